"""From row numbers to batches on the device: read ahead, decode into slots, hand out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

import numpy as np
import torch

from precache.columns import Columns
from precache.prefetch import prefetch
from precache.readahead import ReadAhead
from precache.slots import DeviceCopier, SlotLayout, SlotPool, undo_image_tensor

Batch = dict[str, torch.Tensor]
Rows = Generator[np.ndarray, None, None]

SLOTS_IN_USE = 2
"""Slots beside those being filled: one with the caller, one on its way to or from there."""


class BatchStream:
    """Decodes rows into slots on a few threads, and hands them out as tensors on the device.

    Parameters
    ----------
    threads
        By default one where reading is copying, since one saturates memory; else up to four.
    ahead
        Batches in the making; by default one more than threads.
    """

    def __init__(
        self,
        columns: Columns,
        batch_size: int,
        device: torch.device,
        threads: int | None = None,
        ahead: int | None = None,
    ) -> None:
        self._columns = columns
        self._threads = threads or (1 if columns.plain else min(4, os.cpu_count() or 1))
        self._ahead = ahead or self._threads + 1
        self._read_ahead = ReadAhead(list(columns.readers.values()))
        self._layout = SlotLayout.of(columns.shapes, batch_size)
        cuda = device.type == "cuda"
        self._pool = SlotPool(self._layout.nbytes, self._ahead + SLOTS_IN_USE, pinned=cuda)
        self._copier = DeviceCopier(self._pool, device) if cuda else None

    def batches(self, rows: Rows) -> Generator[Batch, None, None]:
        """A batch for each array of row numbers; closing it joins every thread."""
        advised = self._read_ahead.around(rows, self._ahead)
        work = prefetch(self._fill, advised, self._threads, self._ahead, self._give_back)
        with contextlib.closing(rows), contextlib.closing(advised), contextlib.closing(work):
            for slot, count in work:
                batch = self._deliver(slot, count)
                del slot
                yield batch
                del batch  # what the caller dropped must not live on here

    def _fill(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """Decode a batch into a slot; runs on the decoding threads."""
        slot = self._pool.acquire()
        try:
            out = self._layout.arrays(slot, len(rows))
            self._columns.read(rows, out, undo=self._copier is None)
        except BaseException:
            self._pool.release(slot)
            raise
        return slot, len(rows)

    def _give_back(self, filled: tuple[np.ndarray, int]) -> None:
        self._pool.release(filled[0])

    def _deliver(self, slot: np.ndarray, rows: int) -> Batch:
        """A filled slot as tensors on the device."""
        if self._copier is None:
            batch = self._layout.tensors(self._pool.lend(slot), rows)
            # A list of all labels must not keep all images alive.
            return {n: t if n in self._columns.readers else t.clone() for n, t in batch.items()}
        batch = self._layout.tensors(self._copier.copy(slot), rows)
        for name, reader in self._columns.readers.items():
            if reader.filtered:
                batch[name] = undo_image_tensor(batch[name])
        return batch


class ResidentStream:
    """Gathers batches from fields that are in device memory whole."""

    def __init__(self, fields: Batch, device: torch.device) -> None:
        self._fields = fields
        self._device = device

    def batches(self, rows: Rows) -> Generator[Batch, None, None]:
        """A batch for each array of row numbers."""
        with contextlib.closing(rows):
            for numbers in rows:
                index = torch.from_numpy(numbers).to(self._device)
                yield {name: held.index_select(0, index) for name, held in self._fields.items()}
