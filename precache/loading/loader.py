"""`Loader`: batches of a cached version on the training device, with almost no CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from precache.codecs.kernels import warn_if_slow
from precache.errors import UsageError
from precache.loading.batch_source import BatchSource, SourceCounts, open_batch_source
from precache.loading.cuda_clock import stall_clock
from precache.loading.options import LoaderOptions
from precache.loading.position import Epochs, Position, end_all, require_same, require_state
from precache.loading.rank_check import RankCheck
from precache.loading.ranks import find_rank, require_rank
from precache.loading.selection import row_numbers
from precache.reading.version_reader import FieldNames
from precache.runtime.integers import whole
from precache.runtime.step_clock import LoaderStats, WorkTime
from precache.storage.open import StorageOptions
from precache.store.version import Version
from precache.transforms import Compose, Transform

log = logging.getLogger(__name__)

PARTS = "rank=RANK * info.num_workers + info.id, world_size=WORLD_SIZE * info.num_workers"
"""Which part of the rows a worker of a `DataLoader` reads, where there are several processes."""


class Loader(Epochs):
    """Iterates over a cached version in batches; one iterator is one epoch.

    Parameters
    ----------
    uri
        A store, ``STORE@prefix`` for one version, or a Zarr group together with a mapping as
        `fields`; or a `Version`, as `open` and `ensure` return it. A version from ``ensure`` with
        ``follow=True`` may still be built: its first epoch reads shard after shard, mixed within
        each; later epochs wait for the build, and are shuffled as described here.
    batch_size
        Rows of a batch of each rank; the last one is smaller unless `drop_last`.
    shuffle, seed
        A new order every epoch, a function of (seed, epoch) alone. ``"full"`` mixes all rows;
        ``"block"`` mixes `shuffle_window` random shards at a time, so that only these are read from
        meanwhile; ``True`` means ``"block"`` with a cache of a remote store, else ``"full"``;
        ``False`` keeps `order`.
    device
        Where batches go; by default this rank's CUDA device if there is one, else the CPU. To any
        other device of torch, such as ``mps``, they are copied synchronously when they are
        requested.
    fields
        Names of the fields to read, by default all; or name -> path of an array in a group that
        other software wrote.
    transform
        One of `precache.transforms`, seeded by (seed, epoch, row), or by the position in the order
        where a row may come again in an epoch, as with `weights`; or any callable that takes each
        batch on the device as a dict, and returns what the loop gets. Unless that is a CUDA
        device, `precache.transforms` run on the decoding threads of the CPU, ahead of the loop.
    output
        ``dict``: field -> tensor, with `row` (int64), and `label`: class numbers (int64), numbers
        (float32), or uint8 (N, classes) of several classes. With several ranks and without
        `drop_last`, and of a version that is still being built, also `repeated` (N,), bool: True
        for rows that only fill up the epoch. ``tuple``: (image, label) of the dict that the
        transform returns, as a `TupleBatch`, whose attribute `repeated` is that mark, or None. What
        is no dict is handed out as the transform returns it.
    order
        Without shuffle: ``row`` (as stored) or ``key`` (sorted by key as text, `10` before `2`).
    verify
        Check the checksum of each chunk the first time that this process reads it; otherwise only
        those of zstd frames are checked. `precache.verify` reads and checks all bytes at any time.
    num_threads
        Decoding threads; by default one where reading is copying, else up to four, and no more than
        the cores that this process may use by its affinity and the CPU quota of its control group.
    prefetch_batches
        Batches in preparation; by default one more than the threads work on at a time: 2 where they
        share each batch, `num_threads` + 1 where batches are too small for that, and up to 8 times
        as many where they are copied and small.
    resident
        ``host`` or ``device``: decode everything once into that memory and gather batches there;
        refused if it does not fit.
    shuffle_window
        Shards mixed at a time by ``shuffle="block"``; by default 8, or with a `cache_limit` as
        many fewer as let two loaders share it; it must be the same on all ranks.
    decompress
        ``host``, or ``device``: zstd frames go to the CUDA device as they are, and nvCOMP
        decompresses them there. Falls back to the host, and logs why, if there is no nvCOMP or no
        CUDA device. Checksums of frames are checked on the host, as `verify` says.
    access
        ``map``, or ``pread`` for a network file system, where another client may truncate a mapped
        file, which would end the process.
    cache_dir, cache_limit
        Folder on a local disk for whole shards of a remote store, fetched ahead of need and
        checked, and its size in bytes, such as ``"200GB"``, which only the shards of batches being
        read may exceed; by default nine tenths of the disk. All loaders of this user on a node may
        share it; it is refused if another user owns it or others can write to it, and links in it
        are never followed. Without one, rows of a remote store are read by range requests: slower,
        and again in each epoch.
    storage_options
        Options of a remote file system, as its fsspec class takes them.
    rank, world_size
        This process among those that train together, each with its own part of every step's rows;
        by default from `torch.distributed`, or the variables of torchrun, srun, mpirun and other
        launchers, else 0 of 1. Variables that leave it unclear are refused. All have the
        same number of batches: without `drop_last`, rows from the epoch's beginning fill up its
        end. Where `torch.distributed` is initialised with ``MASTER_ADDR``, a rank is refused that
        disagrees with another in what decides the rows; `stats` counts the ranks compared.
    rows
        Row numbers, or (rows,) bool, of the rows to read, as `Version.rows_of_classes` and
        `Version.rows_of_keys` return them; holes among them are left out. Each is read once in an
        epoch, so a repeated one is refused; without `shuffle` they must ascend, as they are read.
    weights
        (rows,) of the version, not negative: an epoch draws as many rows as there are, with
        replacement, in proportion to their weights.
    num_canonical_nodes
        With block shuffle: shards are dealt out to so many nodes permanently, so that the cache of
        each needs to hold its share alone. The order is a function of this number, not of how many
        nodes there are; `batch_size` times `world_size` must be a multiple of it.
    refresh
        ``epoch``: each epoch reads the version that is current at its beginning, the same on all
        processes of `torch.distributed`, which must begin it together; iterators of earlier epochs
        end. A version whose fields have another shape or dtype is skipped, and logged. By
        default all epochs read the version that was current when the loader was made.

    Notes
    -----
    Of a field with `variants = K`, epoch e reads the stored variant whose number is e
    modulo K. With `refresh` a new variant is read after at most K epochs; if a build adds one for
    each epoch, none is read twice.

    Images are (N, C, H, W) uint8 unless `transform` changes them. On the CPU a batch's memory is
    used again once its last tensor is gone. Each iterator is the next epoch, unless `set_epoch`
    chooses one; the epoch is fixed when the first batch is requested.

    Threads of a loader page-lock memory and copy while a step runs. By default the capture of a
    CUDA graph refuses that on any thread: capture with
    ``torch.cuda.graph(graph, capture_error_mode="thread_local")``.

    Examples
    --------
    >>> with Loader("photos.store", output="tuple") as loader:  # doctest: +SKIP
    ...     for image, label in loader:
    ...         step(image.float() / 255, label)
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Version,
        batch_size: int = 256,
        shuffle: bool | str = True,
        seed: int = 0,
        drop_last: bool = False,
        device: str | torch.device | None = None,
        fields: FieldNames = None,
        transform: Transform | Compose | Callable[[Any], Any] | None = None,
        *,
        output: str = "dict",
        order: str = "row",
        verify: bool = True,
        num_threads: int | None = None,
        prefetch_batches: int | None = None,
        resident: str | None = None,
        shuffle_window: int | None = None,
        decompress: str = "host",
        access: str = "map",
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        storage_options: StorageOptions = None,
        rank: int | None = None,
        world_size: int | None = None,
        num_canonical_nodes: int = 1,
        rows: np.ndarray | Sequence[int] | None = None,
        weights: np.ndarray | Sequence[float] | None = None,
        refresh: str | None = None,
    ) -> None:
        names = LoaderOptions.__dataclass_fields__
        parameters = {name: value for name, value in locals().items() if name in names}
        super().__init__()
        self._options = LoaderOptions.validated(parameters)
        self._has_rank, self._counted_parts = rank is not None, False
        end_iterators = functools.partial(end_all, self._iterators)
        self._source = open_batch_source(uri, self._options, self._closed, end_iterators)
        # A mixture of this loader has a check of its own.
        self.rank_check = RankCheck(self.rank, self.world_size)
        # At exit, while modules can still be used, and before the source is finalized.
        weakref.finalize(self, end_iterators)
        warn_if_slow()
        self._clock = stall_clock(self.device)
        self._position = Position(len(self))
        self._last = (0, 0)
        # For a mixture: rows and bytes of the last batch, and how many were decoded at its request.
        self.latest: tuple[int, int, float] = (0, 0, 0)
        self._reported_work = WorkTime()
        self._counts = SourceCounts()

    @property
    def version(self) -> Version:
        """The version being read."""
        return self._source.version

    @property
    def device(self) -> torch.device:
        """The device that batches go to."""
        return self._options.device

    @property
    def rank(self) -> int:
        """Number of this process among the `world_size` ranks."""
        return self._options.rank

    @property
    def world_size(self) -> int:
        return self._options.world_size

    @property
    def output(self) -> str:
        """Form of the batches: ``dict`` or ``tuple``."""
        return self._options.output

    @property
    def follows(self) -> bool:
        """True if a later epoch may read another version: with `refresh`, or after ``follow``."""
        return self._source.changes

    @property
    def marks_repeated(self) -> bool:
        """True if batches have the field `repeated`; a mixture makes its sources agree on it."""
        return self._source.marks_repeated

    @marks_repeated.setter
    def marks_repeated(self, marks: bool) -> None:
        self._source.marks_repeated = marks

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._source.order.batches

    def keys(self, rows: torch.Tensor | np.ndarray | Iterable[int]) -> list[str]:
        """Keys of the given row numbers, such as ``batch["row"]``.

        Raises
        ------
        UsageError
            They are no row numbers, or the version has no such row.
        """
        return [self.version.keys[row] for row in row_numbers(self.version, rows).tolist()]

    def locate(self) -> Callable[[], tuple[str, ...]]:
        """Return a function that looks up the keys of the batch that was handed out last."""
        order, keys, last = self._source.order, self.version.keys, self._last
        return lambda: tuple(keys[row] for row in next(order.epoch(*last)).tolist())

    def rows_of_batch(self, epoch: int, batch: int) -> np.ndarray:
        """(n,) int64 rows of a batch of an epoch, whether it was read or not.

        Raises
        ------
        UsageError
            An epoch has no such batch.
        """
        epoch, batch = whole("epoch", epoch, 0), self._require_batch(batch)
        return self._source.rows_of_batch(epoch, batch)

    def _require_batch(self, batch: int) -> int:
        if not 0 <= whole("batch", batch) < len(self):
            raise UsageError(f"batch is {batch}, and an epoch has {len(self)}, counted from 0")
        return whole("batch", batch)

    def seek(self, epoch: int, batch: int) -> None:
        """Choose the epoch that the next iterator runs, and the batch that it begins with.

        Raises
        ------
        UsageError
            An epoch has no such batch.
        """
        self._require_batch(batch)
        self._position.seek(epoch, batch)

    def __iter__(self) -> Iterator[Any]:
        if not self._has_rank:
            require_rank(self.rank, self.world_size)
        return super().__iter__()

    def _run(self) -> Generator[Any, None, None]:
        if self._closed.is_set():
            return
        # With its first batch, not when it is made: some trainers make one that they never use.
        self._require_own_rows()
        check = self.rank_check
        epoch, start = self._position.begin()
        check.register(lambda: self.settings(start))
        turn = epoch if self._source.order.by_epoch else 0
        check.begin(turn, start, chosen=self._position.chosen)
        source = self._use(self._source.at_epoch(epoch, start))
        with contextlib.closing(source.batches(epoch, start)) as batches, check.passing():
            self._clock.begin()
            ready = source.stream.ready
            for rows, repeated, nbytes, outputs in batches:
                self._last = (epoch, start)
                start += 1
                self._counts = self._counts._replace(repeated=self._counts.repeated + repeated)
                self.latest = rows, nbytes, ready
                self._clock.arrived(*self.latest)
                self._position.received(epoch, start)
                if start == len(self):
                    check.finish(turn)
                yield outputs.pop()  # without a name, so that a batch that is dropped is freed
                self._clock.requested()
                check.advance()
                ready = source.stream.ready

    def _require_own_rows(self) -> None:
        """Raise `UsageError` if each of several workers of a `DataLoader` would read all rows."""
        worker = get_worker_info()
        workers = worker.num_workers if worker else 1
        if workers > 1 and not self._has_rank:
            parts = "rank=info.id, world_size=info.num_workers"
            same = "rank=0, world_size=1"
            if self.world_size > 1:
                parts, same = PARTS, "rank=RANK, world_size=WORLD_SIZE"
            raise UsageError(
                f"this loader is used in {workers} workers of a DataLoader, and each of "
                "them would read all rows; give num_workers=0, as a Loader reads ahead by itself, "
                f"or give each worker its part, such as {parts}, "
                "with info = torch.utils.data.get_worker_info(); where each worker gives rows= of "
                f"its own, {same}"
            )
        if self._has_rank and not self._counted_parts and self._options.rows is None:
            self._counted_parts = True
            self._warn_of_few_parts(workers)

    def _warn_of_few_parts(self, workers: int) -> None:
        """Log that there are more processes, with so many workers each, than parts."""
        processes = 1
        with contextlib.suppress(UsageError):  # it is unclear
            processes = find_rank()[1]
        alone = self.world_size == workers == 1
        if self.world_size < processes * workers and not alone:
            log.warning(
                "rank=%d, world_size=%d was given, and rows would be dealt out to %d: processes "
                "(%d) times workers of a DataLoader (%d). Unless processes share their rows, some "
                "read the same ones: give %s",
                self.rank, self.world_size, processes * workers, processes, workers,
                PARTS if workers > 1 else "the rank and the number of all processes",
            )  # fmt: skip

    def _use(self, source: BatchSource) -> BatchSource:
        if source is not self._source:
            self._counts = self._take_counts()
            self._source = source
            self._position.resize(len(self))
        return source

    def stats(self) -> LoaderStats:
        """Batches, bytes, waiting and step times, and the threads' CPU time since the last call."""
        before, self._reported_work = self._reported_work, self._source.work_time
        counts, self._counts = self._take_counts(), SourceCounts()
        work = self._reported_work.plus(before, -1)
        stats = self._clock.take().stats(counts.cpu_seconds, counts.fetched, work)
        ranks, compared = self.world_size, self.rank_check.count()
        return dataclasses.replace(stats, repeated=counts.repeated, ranks=ranks, compared=compared)

    def _take_counts(self) -> SourceCounts:
        """Take the counts since the last report, of this source and those before it."""
        return self._counts.plus(self._source.take_counts())

    @property
    def work_time(self) -> WorkTime:
        """Time in which batches were made on the CPU, since the loader was made."""
        return self._source.work_time

    @property
    def together(self) -> int:
        """Batches that are made at a time: small ones come in rounds of so many."""
        return self._source.together

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop: what it has received, not what is being read ahead."""
        return {**self.identity(), **self._position.saved()}

    def identity(self) -> dict[str, Any]:
        """All that decides the batches of each step; a state with another identity is refused."""
        return self._source.identity()

    def settings(self, start: int = 0) -> dict[str, Any]:
        """All that decides the rows of a rank's steps, by option; ranks must agree in it."""
        return self._source.settings(start)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next iterator yields the rest of that epoch.

        Raises
        ------
        UsageError
            The state is of another version, global batch or order, by name. Ranks may be more or
            fewer than they were. With `refresh` the version that it names is opened.
        """
        require_state(state)
        self._use(self._source.at_state(state))
        require_same(self.identity(), state, "this loader")
        self._position.load(state)

    def close(self) -> None:
        """End running iterators and their threads, and release their memory.

        An iterator that is at work on another thread, or calls this itself, ends with its batch.
        """
        super().close()
        self._source.close()
