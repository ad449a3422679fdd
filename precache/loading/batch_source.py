"""Batch sources: the version that an epoch of a `Loader` reads, the order of its rows, its batches.

One class for each way in which a loader chooses the version of an epoch: always the same one, the
one that is current when the epoch begins, or one that is still being built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from precache.errors import UsageError
from precache.loading.class_numbers import compare_classes
from precache.loading.gpu import resident
from precache.loading.options import LoaderOptions, require_path
from precache.loading.position import require_same
from precache.loading.rank_check import BLOCK
from precache.loading.selection import Selection
from precache.loading.shard_order import CommittedShards, ShardOrder
from precache.loading.slots import as_array, as_tensor, map_tensors, row_nbytes
from precache.loading.stream import BatchStream, Rows
from precache.loading.tuple_batch import TupleBatch
from precache.loading.version_follower import VersionFollower
from precache.messages import printable, without_secrets
from precache.reading.disk_cache import DiskCache
from precache.reading.version_reader import VersionReader
from precache.runtime.step_clock import FetchedObjects, ThreadTime, WorkTime
from precache.sampling.order import Order, Shuffle
from precache.store.labels import has_label
from precache.store.live_version import LiveVersion
from precache.store.version import Version
from precache.transforms import (
    Batch,
    Draw,
    is_drawn,
    label_mixing,
    require_fitting,
    run,
)

log = logging.getLogger(__name__)

STATE_FORMAT = 1

SHUFFLE_WINDOW = 8
"""Shards that a block shuffle mixes by default."""

BY_SHARD = "shard"
"""Name in a loader's state of the order that takes shard after shard."""

FinishedBatch = tuple[int, int, int, list[Any]]
"""Rows of a batch, those of them that are repeated, its bytes, and a list that holds the output
alone, so that it can be dropped."""


_warned: set[str] = set()
"""Paths of versions with rows that have no label, of which the log has a warning."""


class SourceCounts(NamedTuple):
    """Counters of a source, for `Loader.stats`.

    Attributes
    ----------
    cpu_seconds
        Of its threads.
    fetched
        Objects fetched over the network; None without a disk cache.
    repeated
        Rows read a second time.
    """

    cpu_seconds: float = 0.0
    fetched: FetchedObjects | None = None
    repeated: int = 0

    def plus(self, other: SourceCounts) -> SourceCounts:
        """Return the sums."""
        counts = [c.fetched for c in (self, other) if c.fetched is not None]
        objects, nbytes = sum(c.objects for c in counts), sum(c.nbytes for c in counts)
        return SourceCounts(
            self.cpu_seconds + other.cpu_seconds,
            FetchedObjects(objects, nbytes) if counts else None,
            self.repeated + other.repeated,
        )


class BatchSource:
    """Batches of one version, the same one in every epoch.

    Parameters
    ----------
    closed
        Set once the loader is closed.
    end_iterators
        Ends the loader's iterators, except those that have not begun.

    Attributes
    ----------
    changes
        Whether a later epoch may read another version.
    marks_repeated
        Whether batches say which of their rows are repeated.
    in_rounds
        Whether small batches may be made several at a time.
    output
        Fields of a batch that is a `TupleBatch`; None for a dict.
    """

    changes = False
    in_rounds = True

    def __init__(
        self,
        uri: str | Version,
        options: LoaderOptions,
        closed: threading.Event,
        end_iterators: Callable[[], None],
    ) -> None:
        self._options = options
        self._closed = closed
        self._end_iterators = end_iterators
        cache = None
        # A resident version needs no copy on a disk.
        if options.cache_dir and not options.resident:
            cache = DiskCache.at(options.cache_dir, options.cache_limit)
        self.reader = VersionReader(
            uri, options.fields, options.verify, options.storage_options, options.access, cache
        )
        if self.reader.ragged:
            raise UsageError(
                f"rows of {', '.join(self.reader.ragged)} of {self.version.path} have shapes of "
                "their own, and a batch has one: read them by CachedDataset, or build rows of one "
                "shape, by --crop"
            )
        self._copied = options.device.type not in ("cpu", "cuda")
        if self._copied:
            self._require_dtypes()
        self.marks_repeated = options.world_size > 1 and not options.drop_last
        shuffle = _choose_shuffle(options, self.reader)
        as_stored = shuffle is None and options.order == "row"
        self._selection = Selection.of(
            self.reader, options.rows, options.weights, as_stored=as_stored
        )
        self._mixing = label_mixing(options.transform)
        if self._mixing:
            self._require_labels(self._rows_with_labels())
        if options.transform is not None:
            kinds = {
                n: (s, as_tensor(np.empty(0, d)).dtype) for n, (s, d) in self.reader.shapes.items()
            }
            require_fitting(options.transform, kinds)
        self.order = self._make_order(shuffle)
        self.output = _choose_output(options.output, self.reader)
        if self.output is not None and options.rank == 0:
            self._warn_of_missing_labels()
        if "label" in self.reader.shapes and options.rank == 0:
            compare_classes(self.version)
        self.stream = self._make_stream()
        self._row_nbytes = sum(row_nbytes(*column) for column in self.reader.shapes.values())
        self._transform_time = ThreadTime()
        self._earlier = WorkTime()
        self._warned_of_mark = False
        # Other callables may expect batches one after another, on the thread of the loop.
        self._transforms_early = (
            options.device.type != "cuda"
            and isinstance(self.stream, BatchStream)
            and is_drawn(options.transform)
        )
        if self.reader.cached:  # last: an error above must leave nothing behind
            self.reader.cached.join()

    @property
    def version(self) -> Version:
        """The version being read."""
        return self.reader.version

    @property
    def together(self) -> int:
        """Batches that are made at a time."""
        return 1 if self._transforms_early else self.stream.together

    @property
    def work_time(self) -> WorkTime:
        """Time in which batches were made on the CPU, including those of replaced sources."""
        if self._options.device.type == "cuda":
            return WorkTime()
        threads, transforms = self.stream.thread_time.wall, self._transform_time.wall
        own = (threads, transforms, 0.0) if self._transforms_early else (threads, 0.0, transforms)
        return self._earlier.plus(WorkTime(*own))

    # --- which version an epoch reads ---

    def at_epoch(self, epoch: int, start: int) -> BatchSource:
        """Return the source of an epoch that is read from batch `start` on."""
        return self

    def at_state(self, state: Mapping[str, Any]) -> BatchSource:
        """Return the source of the version that a state was saved with, if there is a choice."""
        return self

    def identity(self) -> dict[str, Any]:
        """Return all that decides the batches of each step."""
        order = self.order
        return {
            "format": STATE_FORMAT,
            "version": self.version.id,
            "global_batch": order.global_batch,
            "order": self._options.order,
            "shuffle": None if order.shuffle is None else dataclasses.asdict(order.shuffle),
            "seed": order.seed,
            "drop_last": order.drop_last,
            "rows": self._selection.rows_digest,
            "weights": self._selection.weights_digest,
        }

    def settings(self, start: int = 0) -> dict[str, Any]:
        """Return all that decides the rows of a step, by option; ranks must agree in it.

        Parameters
        ----------
        start
            First batch of the epoch that is read.
        """
        identity, options = self.identity(), self._options
        shuffle = identity.pop("shuffle") or {"kind": False}
        del identity["global_batch"]  # that of `batch_size` and equal ranks
        if options.refresh and not start:
            identity["version"] = "current"  # as rank 0 decides
        window = {}
        if shuffle["kind"] == "block":
            nodes, size = shuffle["nodes"], shuffle["block"]
            window = {
                "shuffle_window": shuffle["window"],
                "num_canonical_nodes": nodes,
                BLOCK: size,
            }
        rows, holes = "all", self.version.hole_rows if self.version.committed else ()
        if identity["rows"] is not None:
            rows = f"{len(self._selection.valid):,} rows, digest {identity['rows']}"
        elif len(holes):
            # Stores that were built apart may have the same version, and other holes.
            digest = xxhash.xxh3_64_hexdigest(np.asarray(holes).tobytes())
            rows = f"all but {len(holes):,} holes, digest {digest}"
        store = self.version.path.removesuffix(self.version.id).rstrip("/")
        return {
            "store": without_secrets(store),
            **identity,
            "batch_size": options.batch_size,
            "refresh": options.refresh,
            "shuffle": shuffle["kind"],
            **window,
            "rows": rows,
            "weights": identity["weights"] and f"digest {identity['weights']}",
        }

    def take_over(self, before: BatchSource) -> BatchSource:
        """Close the source that this one replaces, and count its work time as well; return this."""
        self._earlier = before.work_time
        before.stream.close()
        return self

    def _reopen(self, uri: str | Version, kind: Callable[..., BatchSource]) -> BatchSource:
        """Open another version with the same options.

        All iterators end, and this source's part of the disk cache is free.
        """
        self._end_iterators()
        if self.reader.cached:
            self.reader.cached.close()
        shapes = self.reader.shapes
        fields = [name for name in shapes if name != "row"]
        options = dataclasses.replace(self._options, fields=fields)
        other = kind(uri, options, self._closed, self._end_iterators)
        if other.reader.shapes != shapes:
            other.close()
            raise UsageError(
                f"{other.version.folder} has {other.reader.shapes}, and this loader reads {shapes}"
            )
        return other

    # --- batches ---

    def rows_of_batch(self, epoch: int, batch: int) -> np.ndarray:
        """Return the (n,) int64 rows of a batch of an epoch."""
        return next(self.order.epoch(epoch, batch))

    def batches(self, epoch: int, start: int) -> Generator[FinishedBatch, None, None]:
        """Yield the batches of an epoch from number `start` on."""
        finish = (functools.partial(self._finish, epoch, n) for n in itertools.count(start))
        early = [finish] if self._transforms_early else []
        copy = operator.methodcaller("to", self._options.device)  # not a CUDA device
        for rows in self._runs(epoch, start):
            batches: Generator[Any, None, None] = self.stream.batches(rows, epoch, *early)
            with contextlib.closing(batches):
                for decoded in batches:
                    if self._closed.is_set():
                        return
                    batch = map_tensors(decoded, copy) if self._copied else decoded
                    finished: FinishedBatch = batch if early else next(finish)(batch)
                    del decoded, batch  # what the caller drops is gone
                    yield finished

    def take_counts(self) -> SourceCounts:
        """Return what was counted since the last call."""
        cached = self.reader.cached
        return SourceCounts(self.stream.thread_time.take(), cached.take() if cached else None)

    def _runs(self, epoch: int, start: int) -> Iterator[Rows]:
        return self.order.runs(epoch, start)

    def _finish(self, epoch: int, number: int, batch: Batch) -> FinishedBatch:
        """Apply the transform, and shape the output."""
        rows = len(batch["row"])
        repeated = self.order.repeated(number)
        mark = _mark(repeated, batch["row"]) if self.marks_repeated else None
        if mark is not None:
            batch = {**batch, "repeated": mark}
        transform = self._options.transform
        if transform is not None:
            numbers, again = batch["row"], self.order.again(number)
            if again is not None:
                positions = torch.from_numpy(again).to(numbers.device, non_blocking=numbers.is_cuda)
                numbers = torch.where(positions < 0, positions, numbers)
            draw = Draw((self.order.seed, epoch), number, numbers)
            with self._transform_time.counted():
                batch = run(transform, batch, draw)
        count = 0 if repeated is None else int(repeated.sum())
        if count and mark is not None:
            self._require_mark(batch)
        output = self._tuple_of(batch, mark is not None) if self.output is not None else batch
        return rows, count, rows * self._row_nbytes, [output]

    def _tuple_of(self, batch: Any, marked: bool) -> Any:
        """Return a dict as a tuple, with the mark that it has; anything else as it is."""
        if not isinstance(batch, Mapping):
            return batch
        wanted = self.output or ()
        missing = [name for name in wanted if name not in batch]
        if missing:
            raise UsageError(
                f"output='tuple' gives ({', '.join(wanted)}), and the transform returns a dict of "
                f"{', '.join(map(str, batch)) or 'nothing'}, without {missing[0]!r}: return it as "
                "well, return a tuple of your own, or use output='dict'"
            )
        parts = [batch[name] for name in wanted]
        lost = marked and "repeated" not in batch
        return TupleBatch(parts) if lost else TupleBatch.of(parts, batch.get("repeated"))

    def _require_mark(self, batch: Any) -> None:
        """Log a warning if the transform left out the mark of repeated rows, once."""
        if not self._warned_of_mark and not (isinstance(batch, Mapping) and "repeated" in batch):
            self._warned_of_mark = True
            log.warning(
                "rank %d: rows at the end of an epoch of %s repeat others, and the transform "
                "returns batches without 'repeated', which marks them: a metric counts them twice; "
                "return batch['repeated'] as well",
                self._options.rank,
                self.version.path,
            )

    def _require_dtypes(self) -> None:
        """Raise `UsageError` for a field whose dtype the device does not have."""
        for name, (_, dtype) in self.reader.shapes.items():
            like = as_tensor(np.empty(0, dtype))
            try:
                like.to(self._options.device)
            except Exception as error:  # of a type that depends on the backend
                raise UsageError(
                    f"field {name!r} is {dtype}, and device {str(self._options.device)!r} does "
                    f"not take it: {error}; name the other fields in fields="
                ) from None

    def close(self) -> None:
        """Release the memory of slots, and this source's part of the disk cache."""
        self.stream.close()
        if self.reader.cached:
            self.reader.cached.close()

    # --- opening ---

    def _make_order(self, shuffle: Shuffle | None) -> Order | ShardOrder:
        options, weights, valid = self._options, self._selection.weights, self._selection.valid
        ranks = options.world_size
        if options.batch_size * ranks > len(valid):
            shared = f" for {ranks} ranks" if ranks > 1 else ""
            raise UsageError(
                f"batch_size is {options.batch_size}, and {self.version.path} has {len(valid)} "
                f"valid rows{shared}; give at most {len(valid) // ranks}"
            )
        if weights is not None and shuffle is None:
            raise UsageError("weights draw rows at random; leave out shuffle=False with them")
        if options.order == "key" and shuffle is not None:
            raise UsageError("order='key' reads in a fixed order; give shuffle=False with it")
        sequence = None
        if options.order == "key":
            rows = valid(np.arange(len(valid)))
            keys = list(self.version.keys)
            sequence = np.array(sorted(rows.tolist(), key=lambda row: keys[row]), np.int64)
        return Order(
            valid=valid,
            batch_size=options.batch_size,
            shuffle=shuffle,
            seed=options.seed,
            drop_last=options.drop_last,
            sequence=sequence,
            weights=weights,
            rank=options.rank,
            world_size=ranks,
        )

    def _make_stream(self) -> BatchStream | resident.ResidentStream:
        options, reader = self._options, self.reader
        if options.resident == "device" and options.device.type != "cpu":
            return resident.ResidentStream(resident.load(reader, options.device), options.device)
        if options.resident is not None:
            for turn, fields in enumerate(resident.load(reader, torch.device("cpu"))):
                arrays = {name: as_array(values) for name, values in fields.items()}
                reader.at_epoch(turn).read_from_memory(arrays)
        return BatchStream(
            reader,
            options.batch_size,
            options.device,
            num_threads=options.num_threads,
            prefetch_batches=options.prefetch_batches,
            decompress=options.decompress,
            in_rounds=self.in_rounds,
        )

    def _rows_with_labels(self) -> np.ndarray:
        """Rows whose labels are known."""
        return self._selection.read

    def _warn_of_missing_labels(self) -> None:
        """Log a warning if rows that are read have no label, once for each version."""
        labels = self.reader.small.get("label")
        if labels is None or labels.ndim != 1 or labels.dtype.kind not in "if":
            return  # of multi-hot labels, none of the classes is a label as well
        rows = self._rows_with_labels()
        missing = rows[~has_label(labels[rows])]
        if len(missing) and self.version.path not in _warned:
            _warned.add(self.version.path)
            none, way_out = "-1", "use output='dict'"
            if labels.dtype.kind == "f":
                none, way_out = (
                    "NaN",
                    "leave them out with rows=~numpy.isnan(precache.open(…).labels)",
                )
            elif len(missing) < len(rows):
                way_out = (
                    "leave them out with rows=precache.open(…).labels >= 0, or have the loss "
                    "ignore them, as by ignore_index=-1"
                )
            first = int(missing[0])
            example = f"row {first}" if self.version.foreign else self.version.keys[first]
            log.warning(
                "%s of %s rows of %s have no label (%s), such as %s: %s",
                f"{len(missing):,}",
                f"{len(rows):,}",
                self.version.path,
                none,
                printable(example),
                way_out,
            )

    def _require_labels(self, rows: np.ndarray) -> None:
        """Refuse labels that the transform cannot mix."""
        labels = self.reader.small.get("label")
        if self._mixing and labels is not None:
            self._mixing.require(labels[rows], rows, self.version.path)


class CurrentVersionSource(BatchSource):
    """Batches of the version of a store that is current when an epoch begins."""

    changes = True

    def __init__(self, follower: VersionFollower, *args: Any) -> None:
        self._follower = follower
        super().__init__(*args)

    def at_epoch(self, epoch: int, start: int) -> BatchSource:
        if start:
            return self
        opened: list[BatchSource] = []
        uri = self._follower.newer(
            self.version, lambda uri: opened.append(self._open(uri)), self._options.world_size
        )
        if uri is None:
            return self
        return (opened.pop() if opened else self._open(uri)).take_over(self)

    def at_state(self, state: Mapping[str, Any]) -> BatchSource:
        version = state.get("version")
        if not isinstance(version, str) or version == self.version.id:
            return self
        require_same({**self.identity(), "version": version}, state, "this loader")
        return self._open(self._follower.uri_of(version)).take_over(self)

    def _open(self, uri: str) -> BatchSource:
        return self._reopen(uri, functools.partial(CurrentVersionSource, self._follower))


class LiveSource(BatchSource):
    """Batches of a version that may still be built; the first epoch takes shard after shard.

    It does so even if the version is complete: ranks and resumed trainings may come later than the
    commit. Epochs after the first wait for the build, and read the version that it commits.
    """

    changes = True
    in_rounds = False  # a batch may have to wait for the build, and must not delay the one before

    def __init__(self, version: Version, options: LoaderOptions, *args: Any) -> None:
        self._live = version
        super().__init__(version, options, *args)
        self.marks_repeated = True

    def at_epoch(self, epoch: int, start: int) -> BatchSource:
        return self._await_version() if epoch else self

    def at_state(self, state: Mapping[str, Any]) -> BatchSource:
        # The state of a later epoch has another order.
        return self if state.get("order") == BY_SHARD else self._await_version()

    def rows_of_batch(self, epoch: int, batch: int) -> np.ndarray:
        if epoch:
            raise UsageError(f"epoch is {epoch}, and its order is known once the version is built")
        return super().rows_of_batch(epoch, batch)

    def _await_version(self) -> BatchSource:
        live = self._live
        version = live.await_commit(self._closed) if isinstance(live, LiveVersion) else live
        if version is None:
            return self
        source = self._reopen(version, BatchSource).take_over(self)
        source.marks_repeated = True  # as in the first epoch
        return source

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "order": BY_SHARD}

    def settings(self, start: int = 0) -> dict[str, Any]:
        return {**super().settings(start), "rows": "all"}

    def _make_order(self, shuffle: Shuffle | None) -> ShardOrder:
        options, live = self._options, self._live
        return ShardOrder(
            live if isinstance(live, LiveVersion) else CommittedShards(live),
            batch_size=options.batch_size,
            seed=options.seed,
            drop_last=options.drop_last,
            rank=options.rank,
            world_size=options.world_size,
            stopped=self._closed,
        )

    def _rows_with_labels(self) -> np.ndarray:
        rows = super()._rows_with_labels()
        if self._live.committed:
            return rows
        labelled: np.ndarray = rows[has_label(self._live.labels[rows])]
        return labelled

    def _runs(self, epoch: int, start: int) -> Iterator[Rows]:
        runs = super()._runs(epoch, start)
        return map(self._checked, runs) if self._mixing else runs

    def _checked(self, rows: Rows) -> Rows:
        """Yield the same rows; their labels may have been fetched with the samples."""
        with contextlib.closing(rows):
            for numbers in rows:
                self._require_labels(numbers)
                yield numbers


def open_batch_source(
    uri: str | os.PathLike[str] | Version,
    options: LoaderOptions,
    closed: threading.Event,
    end_iterators: Callable[[], None],
) -> BatchSource:
    """Open the source that the options choose, with the version of the first epoch."""
    if isinstance(uri, Version) and uri.followed:
        unsupported = _unsupported(options)
        if not unsupported:
            return LiveSource(uri, options, closed, end_iterators)
        if not uri.committed:
            raise UsageError(unsupported)
    name = uri if isinstance(uri, Version) else require_path(uri)
    if options.refresh:
        follower = VersionFollower(os.fspath(name), options.storage_options)
        return CurrentVersionSource(follower, name, options, closed, end_iterators)
    return BatchSource(name, options, closed, end_iterators)


def _choose_shuffle(options: LoaderOptions, reader: VersionReader) -> Shuffle | None:
    shuffle, nodes, ranks = options.shuffle, options.num_canonical_nodes, options.world_size
    by_blocks = shuffle == "block" or (shuffle is True and reader.cached is not None)
    if not by_blocks:
        if nodes > 1:
            raise UsageError(f"num_canonical_nodes is {nodes}; give shuffle='block' with it")
        return Shuffle() if shuffle else None
    if options.batch_size * ranks % nodes:
        raise UsageError(
            f"num_canonical_nodes is {nodes}, and {ranks} ranks read {options.batch_size} rows "
            "each a step; choose a batch_size that deals out evenly"
        )
    window = options.shuffle_window
    if window is None:
        window = SHUFFLE_WINDOW
        # Free space must not change the order: each rank has a disk of its own.
        if reader.cached and options.cache_limit is not None:
            window = reader.cached.window(SHUFFLE_WINDOW)
    shard_rows = [array.array.object_shape[0] for array in reader.readers.values()]
    return Shuffle("block", max(shard_rows, default=1), window, nodes)


def _mark(repeated: np.ndarray | None, rows: torch.Tensor) -> torch.Tensor:
    """Return (n,) bool on the device of `rows`."""
    if repeated is None and rows.is_cuda:
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    marks = np.zeros(len(rows), np.bool_) if repeated is None else repeated
    return torch.from_numpy(marks).to(rows.device, non_blocking=rows.is_cuda)


def _choose_output(output: str, reader: VersionReader) -> tuple[str, str] | None:
    if output == "dict":
        return None
    missing = {"image", "label"} - set(reader.shapes)
    if missing:
        raise UsageError(
            f"output='tuple' gives (image, label), and {', '.join(sorted(missing))} is not "
            f"among {', '.join(reader.shapes)}; use output='dict'"
        )
    return ("image", "label")


def _unsupported(options: LoaderOptions) -> str:
    """Return why options need a version whose build has ended; empty if they do not."""
    for name in ("rows", "weights", "resident", "refresh"):
        if getattr(options, name) is not None:
            return (
                f"{name} needs a finished version, and this one is followed while it is built; "
                f"leave out {name}, or follow=True"
            )
    if options.shuffle is False or options.order == "key":
        return (
            "rows come shard by shard, mixed within each, while a version is built; leave out "
            "shuffle=False and order, or follow=True"
        )
    return ""
