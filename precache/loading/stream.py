"""From row numbers to batches: read ahead, decode into slots, hand out.

`gpu.device_slots` has what differs for a CUDA device: the contents of a slot, and its unpacking.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from precache.errors import DamageError
from precache.loading.gpu.device_slots import DeviceSlots, FilledSlot, FrameFailures, framed_fields
from precache.loading.options import Reading
from precache.loading.sequences import Packed, Sequences
from precache.loading.slots import (
    STEPS_AHEAD,
    DeviceCopier,
    SlotLayout,
    SlotPool,
    row_nbytes,
)
from precache.reading.readahead import ReadAhead
from precache.reading.shard_prefetch import ShardPrefetcher
from precache.reading.version_reader import VersionReader
from precache.runtime.step_clock import ThreadTime
from precache.runtime.threads import computing, prefetch, require_process
from precache.runtime.usage import cores, require_memory
from precache.store.version import SMALL_ROW_NBYTES
from precache.transforms import Batch, Draw

Rows = Generator[np.ndarray, None, None]

Finish = Callable[[int, int, Batch], Any]
"""Turns a batch of an epoch, by its first position, into what is handed out."""

DrawOf = Callable[[int, int, torch.Tensor], Draw]
"""Returns the random numbers of a batch of an epoch, by its first position and its rows."""

SLOTS_IN_USE = 2
"""Slots beside those being filled: one with the caller, one on its way to or from the caller."""

PART_NBYTES = 9 << 20
"""Bytes of a batch that are worth another thread: parts are still written past the caches."""

ROUND_NBYTES, ROUND_BATCHES = 4 << 20, 8
"""Most bytes, and most batches, that a thread decodes in one round."""


@dataclass(eq=False)
class _Batch:
    """A batch in preparation; it has a slot from when its first part is decoded.

    Attributes
    ----------
    start
        Its first position in the epoch.
    draw
        Random numbers of its rows, where they are cropped while they are read.
    parts_left
        Parts that are not decoded yet.
    error
        Why a part could not be decoded, or the batch not be finished.
    out
        Field -> (n, ...) array that is decoded into: in the slot, or in memory of its own.
    packed
        First row of each part -> its rows that differ in length.
    filled
        Contents of the slot, if the batch goes to a device.
    result
        What is handed out, or the batch on its way to the device, if it goes to one.
    """

    rows: np.ndarray
    start: int
    draw: Draw | None = None
    parts_left: int = 1
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    slot: np.ndarray | None = None
    out: dict[str, np.ndarray] = field(default_factory=dict)
    packed: dict[int, Packed] = field(default_factory=dict)
    filled: FilledSlot = field(default_factory=FilledSlot)
    result: Any = None


_Job = deque[tuple[_Batch, slice, bool]]
"""Parts of batches, which one thread decodes one after another; True for the last of its batch."""


@dataclass(eq=False)
class _Pass:
    """Common to the threads of one iterator.

    Attributes
    ----------
    reader
        The fields, with the variants of the epoch.
    shards
        Fetches shards into a disk cache, if there is one.
    stopped
        Whether the iterator has ended; a thread that a server kept waiting may still be at work.
    """

    epoch: int
    reader: VersionReader
    shards: ShardPrefetcher | None
    failures: FrameFailures
    stopped: bool = False

    def stop(self) -> None:
        self.stopped = True
        if self.shards:
            self.shards.stop()


class BatchStream:
    """Decodes rows into slots on a few threads, and hands them out as tensors.

    They are on the device if that is a CUDA device, else in the host's memory.

    If a batch is large enough, all threads decode the same batch, each a part of it: the first
    batch comes sooner, and fewer are in preparation. If it is small, a thread makes several at a
    time before it wakes the consumer.

    Parameters
    ----------
    reading
        Threads, batches prepared ahead, and whether the device decompresses zstd frames.
    in_rounds
        A thread may make several small batches at a time; with `finish`, it does not.
    finish
        Applied to batches on the CPU, on the thread that decoded their last part.
    draw
        Random numbers of batches whose rows are cropped while they are read.
    sequences
        Makes the parts of batches of which the rows differ in length.

    Attributes
    ----------
    together
        Batches that a thread makes at a time.
    """

    def __init__(
        self,
        reader: VersionReader,
        batch_size: int,
        device: torch.device,
        *,
        reading: Reading | None = None,
        in_rounds: bool = True,
        finish: Finish | None = None,
        draw: DrawOf | None = None,
        sequences: Sequences | None = None,
    ) -> None:
        reading = reading or Reading()
        self._reader, self._finish, self._draw = reader, finish, draw
        self._sequences = sequences or Sequences(reader, {})
        cuda = device if device.type == "cuda" else None
        framed = framed_fields(reader, device) if reading.decompress == "device" else {}
        sizes = {name: row_nbytes(*column) for name, column in reader.shapes.items()}
        # Small fields get their own memory: a list of all labels must not keep all images alive.
        self._small = {name for name, nbytes in sizes.items() if nbytes <= SMALL_ROW_NBYTES}
        if "label" in sizes and not reader.version.foreign:
            self._small.add("label")  # multi-hot ones may have any number of classes
        slots = DeviceSlots(reader, batch_size, framed, self._small) if cuda else None
        # Where reading is copying, one thread saturates memory.
        copying = all(n in framed or r.copying for n, r in reader.readers.items())
        batch_nbytes = max(1, batch_size * sum(sizes.values()))
        self._threads = reading.num_threads or (1 if copying else min(4, cores()))
        # Remote rows are requested, and frames joined, for a whole batch at a time.
        divisible = reader.mapped and not framed
        most = min(self._threads, batch_size, batch_nbytes // PART_NBYTES) if divisible else 1
        self._parts = max(1, most)
        self._ahead = reading.prefetch_batches or -(-self._threads // self._parts) + 1
        self.together = 1
        if copying and in_rounds and not (finish or reading.prefetch_batches) and self._parts == 1:
            self.together = min(ROUND_BATCHES, max(1, ROUND_NBYTES // batch_nbytes))
        shapes = {n: column for n, column in reader.shapes.items() if n not in self._small}
        self._layout = slots.layout if slots else SlotLayout.of(shapes, batch_size)
        nbytes = slots.nbytes if slots else self._layout.nbytes
        require_memory(f"a batch of {batch_size} rows takes", nbytes)
        in_preparation = (self._ahead + 1) * self.together - 1
        count = in_preparation + (1 + STEPS_AHEAD if cuda else SLOTS_IN_USE)
        self._pool = SlotPool(nbytes, count, pinned_for=cuda)
        self._device: tuple[DeviceSlots, DeviceCopier] | None = None
        if slots and cuda:
            self._device = slots, DeviceCopier(self._pool, cuda)
        self.thread_time = ThreadTime()
        self._read_ahead = ReadAhead(self.thread_time)

    def batches(
        self, rows: Rows, epoch: int = 0, starts: Iterable[int] = itertools.repeat(0)
    ) -> Generator[Any, None, None]:
        """Yield a batch for each array of row numbers; closing the generator joins every thread.

        Parameters
        ----------
        epoch
            Selects the variants that are read.
        starts
            First position of each batch.
        """
        reader, process = self._reader.at_epoch(epoch), os.getpid()
        with contextlib.ExitStack() as ends:
            ends.callback(self._pool.settle)
            ends.enter_context(contextlib.closing(rows))
            shards, together = None, self.together
            if reader.cached:
                shards = ShardPrefetcher(reader.cached, reader.arrays.values())
                ends.enter_context(contextlib.closing(shards))
                coming, together = shards.around(rows), 1  # what waits must not delay others
            else:
                readers = [*reader.readers.values(), *reader.sequences.values()]
                coming = self._read_ahead.around(readers, rows, self._ahead * together)
            ends.enter_context(contextlib.closing(coming))
            own = _Pass(epoch, reader, shards, FrameFailures(reader.readers))
            jobs = prefetch(
                functools.partial(self._decode, own),
                self._jobs(zip(coming, starts), epoch, together),  # noqa: B905  # more starts
                self._threads,
                self._ahead * self._parts,
                own.stop,
                None if reader.mapped else reader.version.path,
            )
            ends.enter_context(contextlib.closing(jobs))
            for batches in jobs:
                while batches:
                    require_process(process)
                    delivered = [self._deliver(own, batches.popleft())]
                    own.failures.settle()
                    yield delivered.pop()  # without a name, so that it is freed if it is dropped
        own.failures.settle(wait=True)

    def close(self) -> None:
        """Release the memory of free slots."""
        self._pool.close()

    def _jobs(
        self, placed: Iterator[tuple[np.ndarray, int]], epoch: int, together: int
    ) -> Iterator[_Job]:
        """Yield a job for each part of a batch, or one for several batches."""
        while coming := list(itertools.islice(placed, together)):
            job = _Job()
            for rows, start in coming:
                draw = self._draw and self._draw(epoch, start, torch.from_numpy(rows))
                batch = _Batch(rows, start, draw)
                count = batch.parts_left = max(1, min(self._parts, len(rows)))
                bounds = [len(rows) * part // count for part in range(count + 1)]
                for number, pair in enumerate(itertools.pairwise(bounds), 1):
                    job.append((batch, slice(*pair), number == count))
                del batch  # which would hold what is handed out
            if self._parts == 1:
                yield job
            else:
                while job:
                    yield _Job([job.popleft()])

    def _decode(self, own: _Pass, job: _Job) -> deque[_Batch]:
        """Decode parts of batches, and finish or send those that are complete; on a thread.

        Returns the batches of which the last part was among them: once all jobs before are done,
        too, they are complete, or have an error.
        """
        ends = deque(batch for batch, _, is_last in job if is_last)
        while job:
            batch, part, _ = job.popleft()  # of which the job, which lives longer, holds none
            with self.thread_time.counted():
                try:
                    self._fill(own, batch, part)
                except BaseException as error:
                    batch.error = error
                with batch.lock:
                    batch.parts_left -= 1
                    complete = not batch.parts_left
                if complete and own.shards:
                    own.shards.release(batch.rows)
                if complete and not (batch.error or own.stopped):
                    try:
                        self._complete(own, batch)
                    except BaseException as error:
                        batch.error = error
        return ends

    def _complete(self, own: _Pass, batch: _Batch) -> None:
        """Send a decoded batch to the device, or finish it."""
        if self._device:
            slots, copier = self._device
            slot, batch.slot, batch.out = self._slot(batch), None, {}  # free once it is copied
            with computing():
                parts = self._gathered(own.reader, batch)

                def unpack(memory: torch.Tensor) -> dict[str, Any]:
                    unpacked = slots.unpack(batch.rows, batch.filled, own.failures, memory)
                    return unpacked | copier.copied(parts)

                batch.result = copier.send(slot, batch.filled.nbytes, unpack)
        elif self._finish:
            with computing():
                tensors = self._tensors(own.reader, batch)
                batch.result = self._finish(own.epoch, batch.start, tensors)
            batch.slot, batch.out = None, {}  # for another batch, unless the result holds it
        else:
            batch.result = self._tensors(own.reader, batch)

    def _fill(self, own: _Pass, batch: _Batch, part: slice) -> None:
        """Decode a part of a batch into its slot; fetch damaged shards of a disk cache again."""
        rows, draw = batch.rows[part], batch.draw
        if own.shards:
            own.shards.wait(batch.rows)
        slot = self._slot(batch)
        if draw is not None:
            draw = draw.part(part.start, part.stop)
        out = {name: values[part] for name, values in batch.out.items()}

        def fill() -> None:
            if self._device:
                batch.filled = self._device[0].fill(own.reader, rows, out, slot, draw)
            else:
                own.reader.read(rows, out, draw=draw)
            if own.reader.sequences:
                batch.packed[part.start] = self._sequences.read(own.reader, rows)

        try:
            fill()
        except DamageError:
            if not own.shards:
                raise
            own.shards.renew(batch.rows)
            fill()

    def _slot(self, batch: _Batch) -> np.ndarray:
        """Return the slot of a batch; acquire one for its first part."""
        with batch.lock:
            if batch.slot is None:
                batch.slot, rows = self._pool.acquire(), len(batch.rows)
                batch.out = self._layout.arrays(batch.slot, rows)
                if not self._device:
                    for name in self._small:
                        shape, dtype = self._reader.shapes[name]
                        batch.out[name] = np.empty((rows, *shape), dtype)
        return batch.slot

    def _deliver(self, own: _Pass, batch: _Batch) -> Any:
        """Return the tensors of a batch on the device, or the result of its `finish`.

        Raises the error of one that could not be decoded.
        """
        error, batch.error = batch.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which holds this frame
        if not self._device:
            return batch.result
        return self._sequences.formed(self._device[1].hand_out(batch.result))

    def _tensors(self, reader: VersionReader, batch: _Batch) -> dict[str, Any]:
        # NumPy's views: torch's own would each release the interpreter lock, and wait for it.
        tensors = {name: torch.from_numpy(batch.out[name]) for name in self._reader.shapes}
        return tensors | self._sequences.formed(self._gathered(reader, batch))

    def _gathered(self, reader: VersionReader, batch: _Batch) -> dict[str, Any]:
        if not batch.packed:
            return {}
        parts = [batch.packed[start] for start in sorted(batch.packed)]
        batch.packed = {}
        return self._sequences.gather(reader, batch.rows, parts)
