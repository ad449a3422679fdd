"""From row numbers to batches on the device: read ahead, decode into slots, hand out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from precache.codecs import nvcomp
from precache.errors import DamageError
from precache.loading.gpu.gathering import RowOffsets
from precache.loading.gpu.registered import register_shards
from precache.loading.slots import (
    STEPS_AHEAD,
    Batch,
    DeviceCopier,
    Sent,
    SlotLayout,
    SlotPool,
    as_tensor,
    indexable,
    require_memory,
    row_nbytes,
    undo_image_tensor,
)
from precache.reading.array_reader import ArrayReader
from precache.reading.readahead import ReadAhead
from precache.reading.shard_prefetch import ShardFeed
from precache.reading.version_reader import VersionReader
from precache.runtime.io_pool import Requests
from precache.runtime.ordered_map import computing, prefetch
from precache.runtime.step_clock import ThreadTime
from precache.runtime.usage import cores
from precache.store.version import SMALL_ROW_NBYTES

log = logging.getLogger(__name__)

Rows = Generator[np.ndarray, None, None]

Finish = Callable[[Batch], Any]
"""Turns a batch on the CPU into what is handed out, on the thread that decoded its last part."""

SLOTS_IN_USE = 2
"""Slots beside those being filled: one with the caller, one on its way to or from the caller."""

PART_NBYTES = 9 << 20
"""Bytes of a batch that are worth another thread: parts are still written past the caches."""

ROUND_NBYTES, ROUND_BATCHES = 4 << 20, 8
"""Most bytes, and most batches, that a thread decodes in one round."""


@dataclass(frozen=True)
class Schedule:
    """Division of batches among the decoding threads.

    Attributes
    ----------
    parts
        Parts of a batch; each is decoded by one thread.
    ahead
        Rounds in preparation.
    together
        Batches of a round, which one thread makes before it wakes the consumer.
    """

    threads: int
    parts: int
    ahead: int
    together: int

    @classmethod
    def plan(
        cls,
        batch_size: int,
        batch_nbytes: int,
        num_threads: int | None,
        prefetch_batches: int | None,
        *,
        copying: bool,
        divisible: bool,
        in_rounds: bool,
    ) -> Schedule:
        """Choose the numbers that the user left open.

        Parameters
        ----------
        copying
            Reading is copying, so that one thread saturates memory.
        divisible
            Several threads may decode one batch.
        in_rounds
            A thread may make several batches at a time.
        """
        threads = num_threads or (1 if copying else min(4, cores()))
        parts = max(1, min(threads, batch_size, batch_nbytes // PART_NBYTES)) if divisible else 1
        ahead = prefetch_batches or -(-threads // parts) + 1
        together = 1
        if copying and in_rounds and parts == 1 and prefetch_batches is None:
            together = min(ROUND_BATCHES, max(1, ROUND_NBYTES // max(1, batch_nbytes)))
        return cls(threads, parts, ahead, together)

    @property
    def batches(self) -> int:
        """Batches in preparation at a time, at most."""
        return (self.ahead + 1) * self.together - 1


@dataclass(eq=False)
class _Batch:
    """A batch in preparation; it has a slot from when its first part is decoded.

    Attributes
    ----------
    finish
        Applied once all parts are decoded, if the batch stays on the CPU; its result is `finished`.
    parts_left
        Parts that are not decoded yet.
    out
        Field -> (n, ...) array that is decoded into: in the slot, or in memory of its own.
    frames
        Field -> offset of its zstd frames in the slot, for fields that the device decompresses.
    gathered
        Field -> array, for fields whose rows the device gathers.
    longest
        Field -> bytes of its longest frame, for fields whose frames the device gathers.
    nbytes
        Bytes of the slot that are in use.
    sent
        The batch on its way to the device, if it goes to one.
    """

    rows: np.ndarray
    finish: Finish | None
    parts_left: int
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
    """Decodes rows into slots on a few threads, and hands them out as tensors.

    They are on the device if that is a CUDA device, else in the host's memory.

    If a batch is large enough, all threads decode the same batch, each a part of it: the first
    batch comes sooner, and fewer are in preparation.

    Parameters
    ----------
    num_threads, prefetch_batches
        As of `Loader`; None for the choice of `Schedule.plan`.
    decompress
        ``host``, or ``device`` to decompress zstd frames there if possible.
    gather
        ``host``, or ``device`` to read plain rows there if possible.
    in_rounds
        A thread may make several small batches at a time.
    """

    def __init__(
        self,
        columns: VersionReader,
        batch_size: int,
        device: torch.device,
        num_threads: int | None = None,
        prefetch_batches: int | None = None,
        decompress: str = "host",
        gather: str = "host",
        *,
        in_rounds: bool = True,
    ) -> None:
        self._columns = columns
        self._framed = _framed(columns, device) if decompress == "device" else {}
        self._registered = None
        if gather == "device":
            self._registered = register_shards(columns, device, frames=bool(self._framed))
        layouts = self._registered.layouts if self._registered else {}
        self._gathered = {name for name, array in columns.arrays.items() if array in layouts}
        self._sent = {n: r for n, r in self._framed.items() if n not in self._gathered}
        sizes = {name: row_nbytes(*column) for name, column in columns.shapes.items()}
        # Small fields get their own memory: a list of all labels must not keep all images alive.
        self._small = {name for name, nbytes in sizes.items() if nbytes <= SMALL_ROW_NBYTES}
        self._schedule = Schedule.plan(
            batch_size,
            batch_size * sum(sizes.values()),
            num_threads,
            prefetch_batches,
            copying=all(n in self._framed or r.copying for n, r in columns.readers.items()),
            # Remote rows are requested, and the device reads rows, for a whole batch at a time.
            divisible=columns.mapped and not self._framed and not self._gathered,
            in_rounds=in_rounds,
        )
        cuda = device if device.type == "cuda" else None
        self._layout = self._lay_out(batch_size, keep_small=cuda is not None)
        frames_nbytes = batch_size * sum(reader.frame_bound for reader in self._sent.values())
        slot_nbytes = self._layout.nbytes + frames_nbytes
        require_memory(batch_size, slot_nbytes)
        slots = self._schedule.batches + (1 + STEPS_AHEAD if cuda else SLOTS_IN_USE)
        self._pool = SlotPool(slot_nbytes, slots, pinned_for=cuda)
        self._copier = DeviceCopier(self._pool, cuda) if cuda else None
        self.thread_time = ThreadTime()
        self._read_ahead = self._make_read_ahead(columns)
        self._ready: deque[None] = deque()

    @property
    def ready(self) -> int:
        """Decoded batches that wait for the consumer."""
        return len(self._ready)

    @property
    def together(self) -> int:
        """Batches that a thread makes at a time, so that they come in rounds."""
        return self._schedule.together

    def batches(
        self, rows: Rows, epoch: int = 0, finishes: Iterator[Finish] | None = None
    ) -> Generator[Any, None, None]:
        """Yield a batch for each array of row numbers; closing the generator joins every thread.

        Parameters
        ----------
        epoch
            Selects the variants that are read.
        finishes
            For batches on the CPU: one function per batch, whose result is yielded.
        """
        columns = self._columns.at_epoch(epoch)
        # A deque's own methods need no lock between the threads that fill and the one that takes.
        self._ready = ready = deque[None]()
        failures = _FrameFailures({name: columns.readers[name] for name in self._framed})
        with contextlib.ExitStack() as ends:
            ends.callback(self._pool.settle)
            ends.enter_context(contextlib.closing(rows))
            cached, arrays = columns.cached, columns.arrays.values()
            feed = ends.enter_context(cached.feed(arrays)) if cached else None
            read_ahead = self._read_ahead
            if columns is not self._columns:
                read_ahead = self._make_read_ahead(columns)

            def stop() -> None:
                requests.stop()
                if feed:
                    feed.stop()

            schedule = self._schedule
            together = 1 if feed or finishes else schedule.together
            requests = Requests(schedule.threads, self._columns.version.path)
            ends.callback(requests.close)
            parts: Generator[tuple[_Part, AbstractContextManager[None]], None, None]
            if feed:
                parts = feed.around(self._split(rows, finishes))
            else:
                advised = read_ahead.around(rows, schedule.ahead * together)
                ends.enter_context(contextlib.closing(advised))
                parts = ((part, requests.active()) for part in self._split(advised, finishes))
            ends.enter_context(contextlib.closing(parts))
            decode = functools.partial(self._decode, columns, ready, feed, failures)
            parts_ahead = schedule.ahead * schedule.parts
            work = prefetch(decode, parts, schedule.threads, parts_ahead, together, stop)
            ends.enter_context(contextlib.closing(work))
            for decoded in work:
                if decoded is None:
                    continue
                ready.pop()
                batches = [self._deliver(decoded)]
                del decoded
                failures.settle()
                yield batches.pop()  # without a name, so that a batch that is dropped is freed
        failures.settle(wait=True)

    def close(self) -> None:
        """Release the memory of slots that nobody holds, and of shards that the device reads."""
        self._pool.close()
        if self._registered:
            self._registered.close()

    def _lay_out(self, batch_size: int, *, keep_small: bool) -> SlotLayout:
        """Lay out a slot: fields that are decoded into it, lengths of frames, offsets of rows."""
        outside = self._framed.keys() | self._gathered | (set() if keep_small else self._small)
        shapes = {n: column for n, column in self._columns.shapes.items() if n not in outside}
        lengths = {_lengths(name): ((), "int64") for name in self._framed}
        offsets = {_offsets(name): ((), "int64") for name in self._gathered}
        return SlotLayout.of({**shapes, **lengths, **offsets}, batch_size)

    def _make_read_ahead(self, columns: VersionReader) -> ReadAhead:
        readers = [reader for n, reader in columns.readers.items() if n not in self._gathered]
        return ReadAhead(readers, self.thread_time)

    def _split(
        self, batches: Iterable[np.ndarray], finishes: Iterator[Finish] | None = None
    ) -> Generator[_Part, None, None]:
        """Split each batch into its parts."""
        for rows in batches:
            finish = next(finishes) if finishes else None
            batch = _Batch(rows, finish, min(self._schedule.parts, len(rows)))
            bounds = np.linspace(0, len(rows), batch.parts_left + 1).astype(int).tolist()
            for start, stop in itertools.pairwise(bounds):
                yield _Part(batch, start, stop)

    def _decode(
        self,
        columns: VersionReader,
        ready: deque[None],
        feed: ShardFeed | None,
        failures: _FrameFailures,
        item: tuple[_Part, AbstractContextManager[None]],
    ) -> _Batch | None:
        """Decode a part of a batch; after the last one to be decoded, finish or send the batch.

        Runs on the decoding threads. Returns the batch for its last part in order, else None.
        """
        part, available = item
        batch = part.batch
        with self.thread_time.counted():
            with available:
                self._fill_renewing(columns, feed, part)
            with batch.lock:
                batch.parts_left -= 1
                complete = not batch.parts_left
            if complete and self._copier:
                batch.sent = self._send(self._copier, batch, failures)
            elif complete and batch.finish:
                with computing():
                    batch.finished = batch.finish(self._tensors(batch))
                batch.slot, batch.out = None, {}  # for another batch, unless the result holds it
        if complete:
            ready.append(None)
        return batch if part.last else None

    def _fill_renewing(self, columns: VersionReader, feed: ShardFeed | None, part: _Part) -> None:
        """Decode a part of a batch; fetch damaged shards of a disk cache again."""
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
        """Return the slot of a batch; acquire one for its first part."""
        with batch.lock:
            if batch.slot is None:
                slot = self._pool.acquire()
                small = {} if self._copier else self._small_arrays(len(batch.rows))
                batch.out = {**self._layout.arrays(slot, len(batch.rows)), **small}
                batch.slot, batch.nbytes = slot, self._layout.nbytes
        return batch.slot

    def _small_arrays(self, rows: int) -> dict[str, np.ndarray]:
        """Fresh memory for the small fields."""
        shapes = self._columns.shapes.items()
        return {n: np.empty((rows, *shape), d) for n, (shape, d) in shapes if n in self._small}

    def _send(self, copier: DeviceCopier, batch: _Batch, failures: _FrameFailures) -> Sent:
        slot, batch.slot, batch.out = self._slot(batch), None, {}  # free as soon as it is copied
        return copier.send(slot, batch.nbytes, functools.partial(self._unpack, batch, failures))

    def _locate(
        self, columns: VersionReader, rows: np.ndarray, out: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Check rows that the device gathers, and write their offsets into the slot.

        Returns
        -------
        tuple of dict
            Field -> array, and field -> bytes of its longest frame.
        """
        gathered = {name: columns.arrays[name] for name in self._gathered}
        longest = {}
        for name, array in gathered.items():
            assert self._registered is not None  # else nothing is gathered
            columns.readers[name].check(rows)
            layout = self._registered.layouts[array]
            if isinstance(layout, RowOffsets):
                out[_offsets(name)][:] = layout.of(rows)
            else:
                out[_offsets(name)][:] = layout.starts[rows]
                lengths = out[_lengths(name)][:] = layout.lengths[rows]
                longest[name] = int(lengths.max())
        return gathered, longest

    def _deliver(self, batch: _Batch) -> Any:
        """Return the tensors of a batch on the device, or the result of its `finish`."""
        if batch.sent:
            assert self._copier is not None  # which sent it
            return self._copier.hand_out(batch.sent)
        return batch.finished if batch.finish else self._tensors(batch)

    def _tensors(self, batch: _Batch) -> Batch:
        # NumPy's views: torch's own would each release the interpreter lock, and wait for it.
        return {name: as_tensor(batch.out[name]) for name in self._columns.shapes}

    def _unpack(self, batch: _Batch, failures: _FrameFailures, memory: torch.Tensor) -> Batch:
        """Turn a slot's bytes on the device into tensors; runs on the copier's stream."""
        tensors = self._layout.tensors(memory, len(batch.rows))
        for name, reader in self._framed.items():
            lengths = tensors.pop(_lengths(name))
            if name in batch.frames:
                frames, offsets = memory, lengths.cumsum(0) - lengths + batch.frames[name]
            else:
                assert self._registered is not None  # else frames are in the slot
                starts, longest = tensors.pop(_offsets(name)), batch.longest[name]
                frames, offsets = self._registered.gather_frames(starts, longest)
            values, failed = nvcomp.decompress(frames, offsets, lengths, reader.array.row_nbytes)
            failures.add(name, batch.rows, failed)
            tensors[name] = self._shaped(name, values)
        for name in batch.gathered.keys() - self._framed.keys():
            assert self._registered is not None  # else nothing is gathered
            values = self._registered.gather(batch.gathered[name], tensors.pop(_offsets(name)))
            tensors[name] = self._shaped(name, values)
        for name, reader in self._columns.readers.items():
            if reader.filtered:
                tensors[name] = undo_image_tensor(tensors[name])
        return {
            name: tensors[name].clone() if name in self._small else tensors[name]
            for name in self._columns.shapes
        }

    def _shaped(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """View (n, bytes of a row) uint8 as (n, ...) of a field's dtype."""
        shape, dtype = self._columns.shapes[name]
        like = as_tensor(np.empty(0, dtype)).dtype
        return values.view(like).view(len(values), *shape)


def _offsets(name: str) -> str:
    """Name of the column with the offsets of a field's rows in registered memory."""
    return f"{name}/offsets"


def _lengths(name: str) -> str:
    """Name of the column with the lengths of a field's frames."""
    return f"{name}/lengths"


def _framed(columns: VersionReader, device: torch.device) -> dict[str, ArrayReader]:
    """Return the fields whose frames the device decompresses; log why if there is none."""
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


class _FrameFailures:
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


class ResidentStream:
    """Gathers batches from fields that are in device memory whole.

    Parameters
    ----------
    fields
        Tensors of all rows, once for each epoch until the variants repeat.
    """

    ready = 0
    together = 1

    def __init__(self, fields: Sequence[Batch], device: torch.device) -> None:
        self._fields = fields
        self._device = device
        self.thread_time = ThreadTime()

    def close(self) -> None:
        """Do nothing: the fields are freed with the loader."""

    def batches(self, rows: Rows, epoch: int = 0) -> Generator[Batch, None, None]:
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
