"""Slots of batches for a CUDA device: what the host writes into one, and how it is unpacked there.

Fields that the device decompresses are in a slot as frames; of fields whose rows the device gathers
itself from registered memory, it has only offsets.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from precache.codecs import nvcomp
from precache.loading.gpu.gathering import RowOffsets
from precache.loading.gpu.registered import RegisteredShards
from precache.loading.slots import SlotLayout, as_tensor, undo_image_tensor
from precache.reading.array_reader import ArrayReader
from precache.reading.version_reader import VersionReader
from precache.transforms import Batch

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
    gathered
        Field -> array, for fields whose rows the device gathers.
    longest
        Field -> bytes of its longest frame, for fields whose frames the device gathers.
    """

    nbytes: int = 0
    frames: Mapping[str, int] = field(default_factory=dict)
    gathered: Mapping[str, str] = field(default_factory=dict)
    longest: Mapping[str, int] = field(default_factory=dict)


class DeviceSlots:
    """Fills slots for a device, and unpacks them there.

    Parameters
    ----------
    framed
        Fields whose frames the device decompresses.
    registered
        Shards whose rows, or frames, the device gathers.
    small
        Fields that get their own memory, so that a batch that keeps them keeps no others.

    Attributes
    ----------
    layout
        Offsets of the fields that are decoded into a slot, of lengths of frames and offsets of
        rows.
    nbytes
        Bytes of a slot.
    gathered
        Fields that the host does not read.
    """

    def __init__(
        self,
        reader: VersionReader,
        batch_size: int,
        framed: Mapping[str, ArrayReader],
        registered: RegisteredShards | None,
        small: Collection[str],
    ) -> None:
        self._reader = reader
        self._framed = framed
        self._registered = registered
        self._small = small
        layouts = registered.layouts if registered else {}
        self.gathered = {name for name, array in reader.arrays.items() if array in layouts}
        self._sent = {n: reader for n, reader in framed.items() if n not in self.gathered}
        outside = framed.keys() | self.gathered
        shapes = {n: column for n, column in reader.shapes.items() if n not in outside}
        lengths = {_lengths(name): ((), "int64") for name in framed}
        offsets = {_offsets(name): ((), "int64") for name in self.gathered}
        self.layout = SlotLayout.of({**shapes, **lengths, **offsets}, batch_size)
        frames_nbytes = batch_size * sum(reader.frame_bound for reader in self._sent.values())
        self.nbytes = self.layout.nbytes + frames_nbytes

    def fill(
        self,
        reader: VersionReader,
        rows: np.ndarray,
        out: Mapping[str, np.ndarray],
        slot: np.ndarray,
    ) -> FilledSlot:
        """Write rows into a slot: a whole batch, if it has frames or the device gathers any.

        Parameters
        ----------
        reader
            The fields, with the variants of the epoch.
        out
            Views of the slot by column of the layout.
        """
        reader.read(rows, out, undo=False)
        nbytes, frames = self.layout.nbytes, {}
        for name in self._sent:
            frames[name] = nbytes
            lengths = out[_lengths(name)]
            lengths[:] = reader.readers[name].read_frames(rows, slot[nbytes:])
            nbytes += int(lengths.sum())
        return FilledSlot(nbytes, frames, *self._locate(reader, rows, out))

    def _locate(
        self, reader: VersionReader, rows: np.ndarray, out: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Check rows that the device gathers, and write their offsets into the slot.

        Returns
        -------
        tuple of dict
            Field -> array, and field -> bytes of its longest frame.
        """
        gathered = {name: reader.arrays[name] for name in self.gathered}
        longest = {}
        for name, array in gathered.items():
            assert self._registered is not None  # else nothing is gathered
            reader.readers[name].check(rows)
            layout = self._registered.layouts[array]
            if isinstance(layout, RowOffsets):
                out[_offsets(name)][:] = layout.of(rows)
            else:
                out[_offsets(name)][:] = layout.starts[rows]
                lengths = out[_lengths(name)][:] = layout.lengths[rows]
                longest[name] = int(lengths.max())
        return gathered, longest

    def unpack(
        self, rows: np.ndarray, filled: FilledSlot, failures: FrameFailures, memory: torch.Tensor
    ) -> Batch:
        """Turn a slot's bytes on the device into tensors; runs on the copier's stream."""
        tensors = self.layout.tensors(memory, len(rows))
        for name, reader in self._framed.items():
            lengths = tensors.pop(_lengths(name))
            if name in filled.frames:
                frames, offsets = memory, lengths.cumsum(0) - lengths + filled.frames[name]
            else:
                assert self._registered is not None  # else frames are in the slot
                starts, longest = tensors.pop(_offsets(name)), filled.longest[name]
                frames, offsets = self._registered.gather_frames(starts, longest)
            values, failed = nvcomp.decompress(frames, offsets, lengths, reader.array.row_nbytes)
            failures.add(name, rows, failed)
            tensors[name] = self._shaped(name, values)
        for name in filled.gathered.keys() - self._framed.keys():
            assert self._registered is not None  # else nothing is gathered
            values = self._registered.gather(filled.gathered[name], tensors.pop(_offsets(name)))
            tensors[name] = self._shaped(name, values)
        for name, reader in self._reader.readers.items():
            if reader.filtered:
                tensors[name] = undo_image_tensor(tensors[name])
        return {
            name: tensors[name].clone() if name in self._small else tensors[name]
            for name in self._reader.shapes
        }

    def _shaped(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """View (n, bytes of a row) uint8 as (n, ...) of a field's dtype."""
        shape, dtype = self._reader.shapes[name]
        like = as_tensor(np.empty(0, dtype)).dtype
        return values.view(like).view(len(values), *shape)

    def close(self) -> None:
        """Release the shards that the device reads."""
        if self._registered:
            self._registered.close()


def _offsets(name: str) -> str:
    """Name of the column with the offsets of a field's rows in registered memory."""
    return f"{name}/offsets"


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
