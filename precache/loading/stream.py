"""From row numbers to batches on the device: read ahead, decode into slots, hand out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from precache.codecs import nvcomp
from precache.errors import DamageError, UsageError
from precache.loading.gpu.gathering import Places
from precache.loading.gpu.registered import registered
from precache.loading.slots import (
    STEPS_AHEAD,
    Batch,
    DeviceCopier,
    Sent,
    SlotLayout,
    SlotPool,
    as_tensor,
    indexable,
    undo_image_tensor,
)
from precache.reading.array_reader import ArrayReader
from precache.reading.readahead import ReadAhead
from precache.reading.shard_prefetch import ShardFeed
from precache.reading.version_reader import VersionReader
from precache.runtime.io_pool import Requests
from precache.runtime.ordered_map import computing, prefetch
from precache.runtime.step_clock import ThreadTime
from precache.runtime.usage import available_bytes, cores
from precache.store.live_version import LiveVersion
from precache.store.version import SMALL_ROW_NBYTES

log = logging.getLogger(__name__)

Rows = Generator[np.ndarray, None, None]

Finish = Callable[[Batch], Any]
"""Makes of a batch on the CPU what is handed out, on the thread that decoded the last of it."""

SLOTS_IN_USE = 2
"""Slots beside those being filled: one with the caller, one on its way to or from there."""

PART_NBYTES = 9 << 20
"""Bytes of a batch that are worth another thread: parts are still written past the caches."""

TOGETHER_NBYTES, MOST_TOGETHER = 4 << 20, 8
"""Batches are decoded by so many bytes together, and so many batches at most."""


@dataclass(eq=False)
class _Batch:
    """A batch in the making, in a slot from when its first part is decoded.

    Attributes
    ----------
    finish
        Applied once all is decoded, where it stays on the CPU; what it made is `finished`.
    left
        Parts that are not decoded yet.
    out
        Field -> (n, ...) where it is decoded to: in the slot, or in memory of its own.
    frames
        Field -> where its zstd frames start in the slot, for those that the device decompresses.
    gathered
        Field -> array, for those whose rows the device gathers.
    longest
        Field -> bytes of its longest frame, for those whose frames it gathers.
    nbytes
        Of the slot that are in use.
    sent
        The batch on its way to the device, where it goes to one.
    """

    rows: np.ndarray
    finish: Finish | None
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    slot: np.ndarray | None = None
    out: Mapping[str, np.ndarray] = field(default_factory=dict)
    frames: Mapping[str, int] = field(default_factory=dict)
    gathered: Mapping[str, str] = field(default_factory=dict)
    longest: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0
    sent: Sent | None = None
    finished: Any = None


@dataclass(frozen=True)
class _Part:
    """Some rows of a batch, which one thread decodes."""

    batch: _Batch
    start: int
    stop: int

    @property
    def rows(self) -> np.ndarray:
        return self.batch.rows[self.start : self.stop]

    @property
    def last(self) -> bool:
        return self.stop == len(self.batch.rows)


class BatchStream:
    """Decodes rows into slots on a few threads, and hands them out as tensors on the device.

    All threads decode the same batch, each a part of it, where a part is worth it: the first batch
    comes sooner, and fewer are in the making.

    Attributes
    ----------
    together
        Batches that a thread makes at a time, so that they come in rounds of so many.

    Parameters
    ----------
    threads
        By default one where reading is copying, since one saturates memory; else up to four.
    ahead
        Batches in the making; by default one more than the threads can work on at a time.
    decompress
        Where zstd frames are decompressed: ``host``, or ``device`` where that can be had.
    gather
        Who reads plain rows: ``host``, or ``device`` where that can be had.
    """

    def __init__(
        self,
        columns: VersionReader,
        batch_size: int,
        device: torch.device,
        threads: int | None = None,
        ahead: int | None = None,
        decompress: str = "host",
        gather: str = "host",
    ) -> None:
        self._columns = columns
        self._framed = _framed(columns, device) if decompress == "device" else {}
        self._registered = None
        if gather == "device":
            self._registered = registered(columns, device, frames=bool(self._framed))
        there = self._registered.places if self._registered else {}
        self._gathered = {name for name, array in columns.arrays.items() if array in there}
        copying = all(n in self._framed or each.copying for n, each in columns.readers.items())
        self._threads = threads or (1 if copying else min(4, cores()))
        self.thread_time = ThreadTime()
        self._read_ahead = self._advising(columns)
        cuda = device if device.type == "cuda" else None
        # A list of all labels must not keep all images alive.
        sizes = {name: _row_nbytes(each) for name, each in columns.shapes.items()}
        self._small = {name for name, nbytes in sizes.items() if nbytes <= SMALL_ROW_NBYTES}
        elsewhere = self._framed.keys() | self._gathered | (set() if cuda else self._small)
        shapes = {name: each for name, each in columns.shapes.items() if name not in elsewhere}
        lengths = {_lengths(name): ((), "int64") for name in self._framed}
        places = {_places(name): ((), "int64") for name in self._gathered}
        self._layout = SlotLayout.of({**shapes, **lengths, **places}, batch_size)
        self._sent = {n: each for n, each in self._framed.items() if n not in self._gathered}
        frames = batch_size * sum(reader.frame_bound for reader in self._sent.values())
        nbytes = batch_size * sum(sizes.values())
        # What is requested from afar, or read by the device, is so for a whole batch at a time.
        splits = columns.mapped and not self._framed and not self._gathered
        worth = max(1, min(self._threads, batch_size, nbytes // PART_NBYTES))
        self._parts = worth if splits else 1
        self._ahead = ahead or -(-self._threads // self._parts) + 1
        # Where a batch is long in coming, the one before it is not to wait for it.
        grouped = copying and ahead is None and not isinstance(columns.version, LiveVersion)
        fitting = max(1, TOGETHER_NBYTES // max(1, nbytes))
        self.together = min(MOST_TOGETHER, fitting) if grouped and self._parts == 1 else 1
        slots = (self._ahead + 1) * self.together - 1
        slots += 1 + STEPS_AHEAD if cuda else SLOTS_IN_USE
        free = available_bytes()
        if free is not None and self._layout.nbytes + frames > free:
            raise UsageError(
                f"a batch of {batch_size} rows takes {self._layout.nbytes + frames} bytes, and "
                f"{free} are free; give a smaller batch_size"
            )
        self._pool = SlotPool(self._layout.nbytes + frames, slots, pinned_for=cuda)
        self._copier = DeviceCopier(self._pool, cuda) if cuda else None
        self._filled: deque[None] = deque()

    @property
    def ready(self) -> int:
        """Batches that lie decoded."""
        return len(self._filled)

    def batches(
        self, rows: Rows, epoch: int = 0, finishes: Iterator[Finish] | None = None
    ) -> Generator[Any, None, None]:
        """A batch for each array of row numbers; closing it joins every thread.

        Parameters
        ----------
        epoch
            Whose variants are read.
        finishes
            For batches on the CPU, one each, that makes of it what is yielded.
        """
        columns = self._columns.at_epoch(epoch)
        # A deque's own methods need no lock between the threads that fill and the one that takes.
        self._filled = ready = deque[None]()
        doubts = _Doubts({name: columns.readers[name] for name in self._framed})
        with contextlib.ExitStack() as ends:
            ends.callback(self._pool.settle)
            ends.enter_context(contextlib.closing(rows))
            cached, arrays = columns.cached, columns.arrays.values()
            feed = ends.enter_context(cached.feed(arrays)) if cached else None
            ahead = self._read_ahead_of(columns)

            def stop() -> None:
                requests.stop()
                if feed:
                    feed.stop()

            together = 1 if feed or finishes else self.together
            requests = Requests(self._threads, self._columns.version.path)
            ends.callback(requests.close)
            coming: Generator[tuple[_Part, AbstractContextManager[None]], None, None]
            if feed:
                coming = feed.around(self._split(rows, finishes))
            else:
                advised = ahead.around(rows, self._ahead * together)
                ends.enter_context(contextlib.closing(advised))
                coming = ((part, requests.made_here()) for part in self._split(advised, finishes))
            ends.enter_context(contextlib.closing(coming))
            make = functools.partial(self._make, columns, ready, feed, doubts)
            parts_ahead = self._ahead * self._parts
            work = prefetch(make, coming, self._threads, parts_ahead, together, stop)
            ends.enter_context(contextlib.closing(work))
            for made in work:
                if made is None:
                    continue
                ready.pop()
                batches = [self._deliver(made)]
                del made
                doubts.settle()
                yield batches.pop()  # and not a name more: what the caller drops is gone
        doubts.settle(wait=True)

    def close(self) -> None:
        """Let go of the memory of slots that nobody holds, and of what the device reads itself."""
        self._pool.close()
        if self._registered:
            self._registered.close()

    def _read_ahead_of(self, columns: VersionReader) -> ReadAhead:
        return self._read_ahead if columns is self._columns else self._advising(columns)

    def _advising(self, columns: VersionReader) -> ReadAhead:
        readers = [each for name, each in columns.readers.items() if name not in self._gathered]
        return ReadAhead(readers, self.thread_time)

    def _split(
        self, batches: Iterable[np.ndarray], finishes: Iterator[Finish] | None = None
    ) -> Generator[_Part, None, None]:
        """The parts of each batch that are decoded at a time."""
        for rows in batches:
            finish = next(finishes) if finishes else None
            batch = _Batch(rows, finish, min(self._parts, len(rows)))
            bounds = np.linspace(0, len(rows), batch.left + 1).astype(int).tolist()
            for start, stop in itertools.pairwise(bounds):
                yield _Part(batch, start, stop)

    def _make(
        self,
        columns: VersionReader,
        ready: deque[None],
        feed: ShardFeed | None,
        doubts: _Doubts,
        coming: tuple[_Part, AbstractContextManager[None]],
    ) -> _Batch | None:
        """Decode a part of a batch, and send that to the device once all are decoded; the batch at
        its last part. Runs on the decoding threads."""
        part, at_hand = coming
        batch = part.batch
        with self.thread_time.counted():
            with at_hand:
                self._fill_soundly(columns, feed, part)
            with batch.lock:
                batch.left -= 1
                whole = not batch.left
            if whole and self._copier:
                batch.sent = self._send(self._copier, batch, doubts)
            elif whole and batch.finish:
                with computing():
                    batch.finished = batch.finish(self._tensors(batch))
                batch.slot, batch.out = None, {}  # for another batch, unless that holds it
        if whole:
            ready.append(None)
        return batch if part.last else None

    def _fill_soundly(self, columns: VersionReader, feed: ShardFeed | None, part: _Part) -> None:
        """Decode a part of a batch; where a copy in a disk cache is damaged, from a new one."""
        try:
            self._fill(columns, part)
        except DamageError:
            if feed is None:
                raise
            feed.renew(part.rows)
            self._fill(columns, part)

    def _fill(self, columns: VersionReader, part: _Part) -> None:
        """Decode a part of a batch into its slot."""
        batch, rows = part.batch, part.rows
        slot = self._slot(batch)
        out = {name: values[part.start : part.stop] for name, values in batch.out.items()}
        columns.read(rows, out, undo=self._copier is None)
        if not self._sent and not self._gathered:
            return
        frames = {}
        for name in self._sent:
            frames[name] = batch.nbytes
            lengths = out[_lengths(name)]
            lengths[:] = columns.readers[name].read_frames(rows, slot[batch.nbytes :])
            batch.nbytes += int(lengths.sum())
        batch.frames = frames
        batch.gathered, batch.longest = self._locate(columns, rows, out)

    def _slot(self, batch: _Batch) -> np.ndarray:
        """The slot that a batch is decoded into."""
        with batch.lock:
            if batch.slot is None:
                slot = self._pool.acquire()
                small = {} if self._copier else self._fresh(len(batch.rows))
                batch.out = {**self._layout.arrays(slot, len(batch.rows)), **small}
                batch.slot, batch.nbytes = slot, self._layout.nbytes
        return batch.slot

    def _fresh(self, rows: int) -> dict[str, np.ndarray]:
        """Memory of their own for the small fields."""
        shapes = self._columns.shapes.items()
        return {n: np.empty((rows, *shape), d) for n, (shape, d) in shapes if n in self._small}

    def _send(self, copier: DeviceCopier, batch: _Batch, doubts: _Doubts) -> Sent:
        slot, batch.slot, batch.out = self._slot(batch), None, {}  # free as soon as it is copied
        return copier.send(slot, batch.nbytes, functools.partial(self._unpack, batch, doubts))

    def _locate(
        self, columns: VersionReader, rows: np.ndarray, out: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Say in a slot where the device finds rows, checked as others are; field -> array, and
        field -> bytes of its longest frame."""
        gathered = {name: columns.arrays[name] for name in self._gathered}
        longest = {}
        for name, array in gathered.items():
            assert self._registered is not None  # else nothing is gathered
            columns.readers[name].check(rows)
            layout = self._registered.places[array]
            if isinstance(layout, Places):
                out[_places(name)][:] = layout.of(rows)
            else:
                out[_places(name)][:] = layout.starts[rows]
                lengths = out[_lengths(name)][:] = layout.lengths[rows]
                longest[name] = int(lengths.max())
        return gathered, longest

    def _deliver(self, made: _Batch) -> Any:
        """A batch as tensors on the device, or what was made of it."""
        if made.sent:
            assert self._copier is not None  # which sent it
            return self._copier.hand_out(made.sent)
        return made.finished if made.finish else self._tensors(made)

    def _tensors(self, made: _Batch) -> Batch:
        # NumPy's views: torch's own would each let go of the interpreter lock, and wait for it.
        return {name: as_tensor(made.out[name]) for name in self._columns.shapes}

    def _unpack(self, filled: _Batch, doubts: _Doubts, memory: torch.Tensor) -> Batch:
        """A slot's bytes on the device -> the batch's tensors; runs on the copier's stream."""
        found = self._layout.tensors(memory, len(filled.rows))
        for name, reader in self._framed.items():
            lengths = found.pop(_lengths(name))
            if name in filled.frames:
                held, offsets = memory, lengths.cumsum(0) - lengths + filled.frames[name]
            else:
                assert self._registered is not None  # else frames are in the slot
                starts, longest = found.pop(_places(name)), filled.longest[name]
                held, offsets = self._registered.gather_frames(starts, longest)
            values, failed = nvcomp.decompress(held, offsets, lengths, reader.array.row_nbytes)
            doubts.add(name, filled.rows, failed)
            found[name] = self._shaped(name, values)
        for name in filled.gathered.keys() - self._framed.keys():
            assert self._registered is not None  # else nothing is gathered
            values = self._registered.gather(filled.gathered[name], found.pop(_places(name)))
            found[name] = self._shaped(name, values)
        for name, reader in self._columns.readers.items():
            if reader.filtered:
                found[name] = undo_image_tensor(found[name])
        return {
            name: found[name].clone() if name in self._small else found[name]
            for name in self._columns.shapes
        }

    def _shaped(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """(n, bytes of a row) uint8 as (n, ...) of a field's dtype."""
        shape, dtype = self._columns.shapes[name]
        like = as_tensor(np.empty(0, dtype)).dtype
        return values.view(like).view(len(values), *shape)


def _row_nbytes(field: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = field
    return math.prod(shape) * np.dtype(dtype).itemsize


def _places(name: str) -> str:
    """Name of the column that says where the rows of a field lie."""
    return f"{name}/places"


def _lengths(name: str) -> str:
    """Name of the column with the lengths of a field's frames."""
    return f"{name}/lengths"


def _framed(columns: VersionReader, device: torch.device) -> dict[str, ArrayReader]:
    """The fields whose frames the device decompresses; says why where there is none."""
    framed = {name: reader for name, reader in columns.readers.items() if reader.framed}
    if device.type != "cuda":
        why = f"batches go to the {device.type}"
    elif not framed:
        why = "no field has a zstd frame for each row"
    elif not nvcomp.available():
        why = "nvCOMP is not installed: pip install 'precache[nvcomp]'"
    else:
        return framed
    log.warning("decompressing on the host after all: %s", why)
    return {}


class _Doubts:
    """What the device said of frames it decompressed, looked at when it has said it.

    The host must not wait for the device at every batch; so a frame that failed is reported one
    or two batches late.
    """

    def __init__(self, readers: Mapping[str, ArrayReader]) -> None:
        self._readers = readers
        self._open: deque[tuple[torch.cuda.Event, torch.Tensor, str, np.ndarray, torch.Tensor]]
        self._open = deque()

    def add(self, name: str, rows: np.ndarray, failed: torch.Tensor) -> None:
        """Keep (n,) bool on the device; to be called on the stream that makes it."""
        some = torch.empty((), dtype=torch.bool, pin_memory=True)
        some.copy_(failed.any(), non_blocking=True)
        said = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        said.record(torch.cuda.current_stream(failed.device))
        self._open.append((said, some, name, rows, failed))

    def settle(self, *, wait: bool = False) -> None:
        """Raise `DamageError` for the first frame known to have failed."""
        while self._open:
            said, some, name, rows, failed = self._open[0]
            if wait:
                said.synchronize()
            elif not said.query():  # type: ignore[no-untyped-call]  # torch's own
                return
            self._open.popleft()
            if some:
                row = int(rows[failed.cpu().numpy()][0])
                raise self._readers[name].damage(row, "nvCOMP cannot decompress it")


class ResidentStream:
    """Gathers batches from fields that are in device memory whole.

    Parameters
    ----------
    fields
        As each epoch reads them, over and over.
    """

    ready = 0
    together = 1

    def __init__(self, fields: Sequence[Batch], device: torch.device) -> None:
        self._fields = fields
        self._device = device
        self.thread_time = ThreadTime()

    def close(self) -> None:
        """Nothing: the fields go with the loader."""

    def batches(self, rows: Rows, epoch: int = 0) -> Generator[Batch, None, None]:
        """A batch for each array of row numbers, of the variants that an epoch reads."""
        fields = self._fields[epoch % len(self._fields)]
        with contextlib.closing(rows):
            for numbers in rows:
                # Else the host would wait for all that the device has to do.
                index = torch.from_numpy(numbers).to(self._device, non_blocking=True)
                yield {
                    name: indexable(held).index_select(0, index).view(held.dtype)
                    for name, held in fields.items()
                }
