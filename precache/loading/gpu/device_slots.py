"""Slots of batches for a CUDA device: what the host writes into one, and how it is unpacked there.

Fields that the device decompresses are in a slot as frames.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from precache.codecs import nvcomp
from precache.loading.slots import SlotLayout, undo_image_tensor
from precache.reading.array_reader import ArrayReader
from precache.reading.version_reader import VersionReader
from precache.transforms import Batch, Draw

log = logging.getLogger(__name__)


def framed_fields(reader: VersionReader, device: torch.device) -> dict[str, ArrayReader]:
    """Return the fields whose frames the device decompresses; log why if there is none."""
    framed = {name: array for name, array in reader.readers.items() if array.framed}
    if device.type != "cuda":
        why = f"batches go to the {device.type}"
    elif not framed:
        why = "no field has a zstd frame for each row"
    elif not nvcomp.available():
        why = "nvCOMP is not installed: pip install 'precache[nvcomp]'"
    else:
        return framed
    log.warning("decompressing on the host: %s", why)
    return {}


@dataclass(frozen=True)
class FilledSlot:
    """Contents of a slot beside the fields that are decoded into it.

    Attributes
    ----------
    nbytes
        Bytes of the slot that are in use.
    frames
        Field -> offset of its zstd frames in the slot, for fields that the device decompresses.
    """

    nbytes: int = 0
    frames: Mapping[str, int] = field(default_factory=dict)


class DeviceSlots:
    """Fills slots for a device, and unpacks them there.

    Parameters
    ----------
    framed
        Fields whose frames the device decompresses.
    small
        Fields that get their own memory, so that a batch that keeps them keeps no others.

    Attributes
    ----------
    layout
        Offsets of the fields that are decoded into a slot, and of lengths of frames.
    nbytes
        Bytes of a slot.
    """

    def __init__(
        self,
        reader: VersionReader,
        batch_size: int,
        framed: Mapping[str, ArrayReader],
        small: Collection[str],
    ) -> None:
        self._reader = reader
        self._framed = framed
        self._small = small
        shapes = {n: column for n, column in reader.shapes.items() if n not in framed}
        lengths = {_lengths(name): ((), "int64") for name in framed}
        self.layout = SlotLayout.of({**shapes, **lengths}, batch_size)
        frames_nbytes = batch_size * sum(reader.frame_bound for reader in framed.values())
        self.nbytes = self.layout.nbytes + frames_nbytes

    def fill(
        self,
        reader: VersionReader,
        rows: np.ndarray,
        out: Mapping[str, np.ndarray],
        slot: np.ndarray,
        draw: Draw | None = None,
    ) -> FilledSlot:
        """Write rows into a slot: a whole batch, if it has frames.

        Parameters
        ----------
        reader
            The fields, with the variants of the epoch.
        out
            Views of the slot by column of the layout.
        draw
            Random numbers of the rows, where they are cropped.
        """
        reader.read(rows, out, undo=False, draw=draw)
        nbytes, frames = self.layout.nbytes, {}
        for name in self._framed:
            frames[name] = nbytes
            lengths = out[_lengths(name)]
            lengths[:] = reader.readers[name].read_frames(rows, slot[nbytes:])
            nbytes += int(lengths.sum())
        return FilledSlot(nbytes, frames)

    def unpack(
        self, rows: np.ndarray, filled: FilledSlot, failures: FrameFailures, memory: torch.Tensor
    ) -> Batch:
        """Turn a slot's bytes on the device into tensors; runs on the copier's stream."""
        tensors = self.layout.tensors(memory, len(rows))
        for name, reader in self._framed.items():
            lengths = tensors.pop(_lengths(name))
            offsets = lengths.cumsum(0) - lengths + filled.frames[name]
            values, failed = nvcomp.decompress(memory, offsets, lengths, reader.array.row_nbytes)
            failures.add(name, rows, failed)
            shape, dtype = self._reader.shapes[name]
            tensors[name] = values.view(getattr(torch, dtype)).view(len(values), *shape)
        for name, reader in self._reader.readers.items():
            if reader.filtered:
                tensors[name] = undo_image_tensor(tensors[name])
        return {
            name: tensors[name].clone() if name in self._small else tensors[name]
            for name in self._reader.shapes
        }


def _lengths(name: str) -> str:
    """Name of the column with the lengths of a field's frames."""
    return f"{name}/lengths"


class FrameFailures:
    """Results of decompression on the device, checked once the device has computed them.

    The host must not wait for the device at every batch, so a frame that failed is reported one
    or two batches late.
    """

    def __init__(self, readers: Mapping[str, ArrayReader]) -> None:
        self._readers = readers
        self._open: deque[tuple[torch.cuda.Event, torch.Tensor, str, np.ndarray, torch.Tensor]]
        self._open = deque()

    def add(self, name: str, rows: np.ndarray, failed: torch.Tensor) -> None:
        """Keep `failed`, (n,) bool on the device; call this on the stream that computes it."""
        some = torch.empty((), dtype=torch.bool, pin_memory=True)
        some.copy_(failed.any(), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        copied.record(torch.cuda.current_stream(failed.device))
        self._open.append((copied, some, name, rows, failed))

    def settle(self, *, wait: bool = False) -> None:
        """Raise `DamageError` for the first frame known to have failed."""
        while self._open:
            copied, some, name, rows, failed = self._open[0]
            if wait:
                copied.synchronize()
            elif not copied.query():  # type: ignore[no-untyped-call]  # torch's own
                return
            self._open.popleft()
            if some:
                row = int(rows[failed.cpu().numpy()][0])
                raise self._readers[name].damage(row, "nvCOMP cannot decompress it")
