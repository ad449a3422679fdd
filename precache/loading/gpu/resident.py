"""Resident versions: decoded once into host or device memory, and gathered from there."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import torch

from precache.errors import UsageError
from precache.loading.slots import indexable, row_nbytes
from precache.loading.stream import BatchStream, Rows
from precache.reading.version_reader import VersionReader
from precache.runtime.step_clock import ThreadTime
from precache.runtime.usage import available_bytes
from precache.sampling.order import Order
from precache.transforms import Batch
from precache.units import size

LOAD_ROWS = 256
"""Rows of a batch while loading."""

RESIDENT_SHARE = 0.9
"""Share of the free memory that a resident version may take."""


def load(reader: VersionReader, device: torch.device) -> list[Batch]:
    """Decode every field of a version into the memory of `device`, by row number.

    Returns
    -------
    list[Batch]
        One for each epoch until the variants repeat.

    Raises
    ------
    UsageError
        It does not fit; nothing was loaded.
    """
    _require_room(reader, device)
    count = min(LOAD_ROWS, len(reader.valid))
    stream = BatchStream(reader, count, device)
    return [
        _load_epoch(reader, stream, epoch, count, device) for epoch in range(reader.variant_period)
    ]


def _load_epoch(
    reader: VersionReader, stream: BatchStream, epoch: int, count: int, device: torch.device
) -> Batch:
    fields: Batch = {}
    rows = Order(reader.valid, count, shuffle=None).epoch(0)
    for batch in stream.batches(rows, epoch):
        for name, values in batch.items():
            if name not in fields:
                shape = (reader.version.rows, *values.shape[1:])
                fields[name] = torch.zeros(shape, dtype=values.dtype, device=device)
            indexable(fields[name]).index_copy_(0, batch["row"], indexable(values))
    return fields


def _require_room(reader: VersionReader, device: torch.device) -> None:
    needed = reader.variant_period * sum(
        reader.version.rows * row_nbytes(*column) for column in reader.shapes.values()
    )
    free = _free_bytes(device)
    if needed > RESIDENT_SHARE * free:
        where = "the host" if device.type == "cpu" else str(device)
        raise UsageError(
            f"{reader.version.path} takes {size(needed)} decoded, and {where} has {size(free)} "
            "free; leave resident out, or name fewer fields"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


class ResidentStream:
    """Gathers batches from fields that are in device memory whole.

    Parameters
    ----------
    fields
        Tensors of all rows, once for each epoch until the variants repeat.
    """

    together = 1

    def __init__(self, fields: Sequence[Batch], device: torch.device) -> None:
        self._fields = fields
        self._device = device
        self.thread_time = ThreadTime()

    def close(self) -> None:
        """Do nothing: the fields are freed with the loader."""

    def batches(
        self, rows: Rows, epoch: int = 0, starts: object = None
    ) -> Generator[Batch, None, None]:
        """Yield a batch for each array of row numbers, of the variants that an epoch reads."""
        fields = self._fields[epoch % len(self._fields)]
        with contextlib.closing(rows):
            for numbers in rows:
                # Else the host would wait for all that the device has to do.
                index = torch.from_numpy(numbers).to(self._device, non_blocking=True)
                yield {
                    name: indexable(values).index_select(0, index).view(values.dtype)
                    for name, values in fields.items()
                }
