"""Slots: reusable host buffers that one batch is decoded into, and their copies to a device.

A slot returns to its pool when the last array or tensor that shares its memory dies. On the CPU the
batch is the slot itself. On CUDA a slot is page-locked, copied once on a side stream, and held
until that copy is done.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import threading
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from precache.store.layout import align
from precache.transforms import SIGNED

log = logging.getLogger(__name__)

STEPS_AHEAD = 4
"""Steps that may be queued on a device when the host requests the next batch."""


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to the tensors of a batch, and return new containers.

    A mapping keeps its type and attributes, or becomes a dict if its type refuses that.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {name: map_tensors(value, change) for name, value in batch.items()}
        with contextlib.suppress(Exception):  # the user's own type, which may raise anything
            if not isinstance(batch, dict | UserDict):
                return type(batch)(changed)  # type: ignore[call-arg]  # of most mappings
            clone = copy.copy(batch)
            clone.update(changed)
            return clone
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def indexable(values: torch.Tensor) -> torch.Tensor:
    """View a tensor in a dtype that torch can index: it cannot index wide unsigned ones."""
    return values.view(SIGNED.get(values.dtype, values.dtype))


def row_nbytes(shape: tuple[int, ...], dtype: str | np.dtype) -> int:
    """Return the bytes of a row of a field."""
    return math.prod(shape) * np.dtype(dtype).itemsize


@dataclass(frozen=True)
class SlotField:
    """One field of a slot: its row shape and dtype, and its offset in a slot."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @functools.cached_property
    def row_nbytes(self) -> int:
        return row_nbytes(self.shape, self.dtype)

    @functools.cached_property
    def tensor_dtype(self) -> torch.dtype:
        return torch.from_numpy(np.empty(0, self.dtype)).dtype


@dataclass(frozen=True)
class SlotLayout:
    """Offsets of a batch's fields in a slot, each a multiple of 64 bytes."""

    columns: Mapping[str, SlotField]
    nbytes: int

    @classmethod
    def of(cls, fields: Mapping[str, tuple[tuple[int, ...], str]], batch_size: int) -> SlotLayout:
        """Lay out (row shape, dtype) by name for batches of up to `batch_size` rows."""
        columns, offset = {}, 0
        for name, (shape, dtype) in fields.items():
            columns[name] = SlotField(shape, np.dtype(dtype), offset)
            offset = align(offset + batch_size * columns[name].row_nbytes)
        return cls(columns, offset)

    def arrays(self, slot: np.ndarray, rows: int) -> dict[str, np.ndarray]:
        """Return field -> (rows, ...) view of the slot's memory."""
        return {
            name: slot[c.offset : c.offset + rows * c.row_nbytes]
            .view(c.dtype)
            .reshape(rows, *c.shape)
            for name, c in self.columns.items()
        }

    def tensors(self, memory: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
        """Return field -> (rows, ...) tensor that shares the uint8 tensor `memory`."""
        return {
            name: memory[c.offset : c.offset + rows * c.row_nbytes]
            .view(c.tensor_dtype)
            .view(rows, *c.shape)
            for name, c in self.columns.items()
        }


class _Lent(weakref.ref[np.ndarray]):
    """A weak reference to the view that was handed out of a slot."""

    slot: np.ndarray


def slots_of_a_block(nbytes: int, slots: int) -> int:
    """Return how many of `slots` slots of `nbytes` one page-locked allocation should hold.

    torch rounds each such allocation up to a power of two (CachingHostAllocator, 2.13): a slot of
    38.6 MB alone would take 64 MiB, and three of them together take 128 MiB. The result wastes the
    least memory; of several such numbers it is the smallest.
    """
    return min(
        range(1, max(1, slots) + 1),
        key=lambda count: (-(-slots // count) * (1 << (count * nbytes - 1).bit_length()), count),
    )


class SlotPool:
    """Slots of one size.

    An empty pool allocates a slot, or as many page-locked ones as `slots_of_a_block` returns.

    Parameters
    ----------
    keep
        Slots that the pool may own; the first one beyond is logged.
    pinned_for
        Page-lock the slots, for asynchronous copies to this CUDA device.
    """

    def __init__(self, nbytes: int, keep: int, pinned_for: torch.device | None = None) -> None:
        self.nbytes = nbytes
        self._keep = keep
        self._device = pinned_for
        self._logged = False
        # The callback of a batch that dies may run inside the garbage collector, where it must take
        # no lock, and in the middle of Ctrl-C, which Python code there would swallow: a deque's own
        # append does neither. The slot returned last is the likeliest to be in a cache.
        self._free: deque[_Lent] = deque()
        self._lent: dict[int, _Lent] = {}
        self._copies: deque[tuple[torch.cuda.Event, np.ndarray]] = deque()
        self._copies_lock = threading.Lock()
        self._spare: list[np.ndarray] = []
        self._spare_lock = threading.Lock()
        if pinned_for is not None:
            # torch does not know that a copy reads a part of a block, and would use that again.
            weakref.finalize(self, _await, self._copies, os.getpid())

    @property
    def owned(self) -> int:
        """Slots of this pool, lent and free."""
        return len(self._lent)

    def acquire(self) -> np.ndarray:
        """Return a free slot (uint8).

        It returns to the pool when the last array or tensor over its memory dies.
        """
        if self._device is None:
            return self._acquire()
        # On a thread that never chose one, CUDA would set up the first device for this process.
        with torch.cuda.device(self._device):
            self._collect_copies()
            return self._acquire()

    def _acquire(self) -> np.ndarray:
        self.trim()
        try:
            slot = self._returned(self._free.pop())
        except IndexError:
            slot = self._allocate()
        # From a memoryview, because a view of a view of an array would hold that array alone.
        view = np.frombuffer(slot.data, np.uint8)
        lent = _Lent(view, self._free.append)
        lent.slot = slot
        self._lent[id(lent)] = lent
        return view

    def _returned(self, lent: _Lent) -> np.ndarray:
        self._lent.pop(id(lent), None)
        return lent.slot

    def trim(self, keep: int | None = None) -> None:
        """Release free slots beyond `keep`, by default the pool's own limit."""
        keep = self._keep if keep is None else keep
        while len(self._free) > keep:
            try:
                self._returned(self._free.popleft())
            except IndexError:  # another thread took it
                return

    def settle(self, keep: int | None = None) -> None:
        """Own no more than `keep` slots, by default the pool's own limit.

        Lent slots beyond that are freed with their last reader, and do not return.
        """
        keep = self._keep if keep is None else keep
        self.trim(keep)
        for key, lent in list(self._lent.items()):
            if self.owned <= keep:
                return
            if lent() is not None:  # else it is about to be free
                self._lent.pop(key, None)

    def close(self) -> None:
        """Wait for running copies, and release the memory of free slots."""
        with self._copies_lock:
            _await(self._copies, os.getpid())
        self.settle(0)
        with self._spare_lock:
            self._spare.clear()

    def hold_until(self, event: torch.cuda.Event, slot: np.ndarray) -> None:
        """Hold a slot until the device has passed `event`."""
        with self._copies_lock:
            self._copies.append((event, slot))

    def _collect_copies(self) -> None:
        with self._copies_lock:
            # torch's own method has no types.
            while self._copies and self._copies[0][0].query():  # type: ignore[no-untyped-call]
                self._copies.popleft()

    def _allocate(self) -> np.ndarray:
        if self.owned >= self._keep and not self._logged:
            self._logged = True
            log.warning(
                "more than %d batches of %.1f MB are held at once; more take fresh memory",
                self._keep,
                self.nbytes / 1e6,
            )
        if self._device is not None:
            with self._spare_lock:
                if not self._spare:
                    self._spare = self._page_locked()
                return self._spare.pop()
        memory = np.empty(self.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + self.nbytes]

    def _page_locked(self) -> list[np.ndarray]:
        pitch = align(self.nbytes)
        count = slots_of_a_block(pitch, self._keep)
        block = torch.empty(count * pitch, dtype=torch.uint8, pin_memory=True).numpy()
        return [block[n * pitch : n * pitch + self.nbytes] for n in range(count)]


def _await(copies: deque[tuple[torch.cuda.Event, np.ndarray]], process: int) -> None:
    """Wait for copies that a process began, and release the slots that they read."""
    while copies:
        event, _ = copies[0]
        if os.getpid() == process:
            with contextlib.suppress(RuntimeError):  # a device that failed reads no more
                event.synchronize()
        copies.popleft()


@dataclass(frozen=True)
class Sent:
    """A batch on its way to a device, where it is complete after the event `arrived`."""

    batch: dict[str, Any]
    arrived: torch.cuda.Event


class DeviceCopier:
    """Copies slots to a CUDA device on a side stream, one asynchronous copy for each batch."""

    def __init__(self, pool: SlotPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._handed_out: deque[torch.cuda.Event] = deque()

    def send(
        self, slot: np.ndarray, nbytes: int, unpack: Callable[[torch.Tensor], dict[str, Any]]
    ) -> Sent:
        """Copy the first `nbytes` of a slot to the device, and unpack them there.

        The copy and `unpack` run on the side stream, beside other work of the device; the host
        does not wait for them. Any thread may call this.
        """
        # On threads that chose no device, leaving the stream would set up the first one.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            memory = torch.from_numpy(slot[:nbytes]).to(self._device, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            copied.record(self._stream)
            self._pool.hold_until(copied, slot)
            batch = unpack(memory)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            arrived.record(self._stream)
        return Sent(batch, arrived)

    def hand_out(self, sent: Sent) -> dict[str, Any]:
        """Return a sent batch for the caller's current stream, which waits for it.

        The host waits only if `STEPS_AHEAD` steps are queued on the device, whose memory would fill
        up with batches otherwise.
        """
        current = torch.cuda.current_stream(self._device)
        self._limit(current)
        current.wait_event(sent.arrived)
        for tensor in sent.batch.values():
            if not isinstance(tensor, list):  # texts, and lengths for the host
                tensor.record_stream(current)
        return sent.batch

    def copied(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the tensors among parts of a batch to the device, by page-locked memory that torch
        keeps; on the stream that is current."""
        return {
            name: part.pin_memory().to(self._device, non_blocking=True)
            if torch.is_tensor(part)
            else part
            for name, part in parts.items()
        }

    def _limit(self, current: torch.cuda.Stream) -> None:
        """Wait until at most `STEPS_AHEAD` steps are queued on the caller's stream."""
        queued: torch.cuda.Event | None = None
        while len(self._handed_out) >= STEPS_AHEAD:
            queued = self._handed_out.popleft()
            queued.synchronize()
        if queued is None:  # creating a blocking event takes 0.1 ms
            # Blocking: the wait must not spin. torch's own class has no types.
            queued = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        queued.record(current)
        self._handed_out.append(queued)


def undo_image_tensor(rows: torch.Tensor) -> torch.Tensor:
    """Do as `undo_image` with tensor operations: (..., C, H, W) uint8, on any device, copied."""
    plain = torch.cumsum(rows, -2, dtype=torch.uint8)
    if plain.shape[-3] == 3:
        plain[..., 0, :, :] += plain[..., 1, :, :]
        plain[..., 2, :, :] += plain[..., 1, :, :]
    return plain
