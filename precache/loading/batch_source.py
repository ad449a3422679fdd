"""Batch sources: a version that a `Loader` reads, the order of its rows, its batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
import threading
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from precache.errors import UsageError
from precache.loading.class_numbers import compare_classes
from precache.loading.gpu import resident
from precache.loading.loop import Arrived
from precache.loading.options import SHUFFLE_WINDOW, Block, Buckets, LoaderOptions, Weighted
from precache.loading.rank_check import BLOCK
from precache.loading.selection import select
from precache.loading.sequences import Sequences
from precache.loading.shard_order import ShardOrder
from precache.loading.slots import map_tensors, row_nbytes
from precache.loading.stream import BatchStream, Rows
from precache.messages import printable, without_secrets
from precache.reading.disk_cache import DiskCache
from precache.reading.version_reader import VersionReader
from precache.runtime.step_clock import Counters, FetchedObjects, ThreadTime
from precache.runtime.threads import prefetch
from precache.sampling.order import POSITIONS_AT_ONCE, Order, Shuffle
from precache.store.labels import has_label
from precache.store.version import Version
from precache.transforms import (
    Draw,
    Follower,
    Steps,
    crops,
    is_drawn,
    label_mixing,
    moved_by,
    require_fitting,
    require_one_draw,
    require_unblended,
    run_all,
    split_windows,
    steps_of,
)

log = logging.getLogger(__name__)

STATE_FORMAT = 1

BY_SHARD = "shard"
"""Name in a loader's state of the order that takes shard after shard."""


_warned: set[str] = set()
"""Paths of versions with rows that have no label, of which the log has a warning."""


class BatchSource:
    """Batches of one version.

    Parameters
    ----------
    closed
        Set once the loader is closed.
    live
        Take shard after shard of a version that may still be built. It does so even if the version
        is complete: ranks and resumed trainings may come later than the commit.

    Attributes
    ----------
    live
        The version itself, if it is read so.
    marks_repeated
        Whether batches say which of their rows are repeated.
    """

    def __init__(
        self,
        uri: str | Version,
        options: LoaderOptions,
        closed: threading.Event,
        *,
        live: bool = False,
    ) -> None:
        self._options, self._closed = options, closed
        self.live = uri if live and isinstance(uri, Version) else None
        # A resident version needs no copy on a disk.
        where = None if options.reading.resident else options.cache
        cache = DiskCache(where.folder, where.limit) if where else None
        self.reader = reader = VersionReader(
            uri, options.fields, options.storage_options, options.reading.access, cache
        )
        steps = steps_of(options.transform)
        self._declared = {} if self.version.foreign else self.version.attributes.recipe.fields
        self._followers = self._find_followers(steps)
        forms = {} if isinstance(options.output, str) else options.output
        self._sequences = Sequences(reader, forms)
        self._require_no_sequences()
        masks = self._masks()
        require_unblended(steps, masks)
        self._steps: Steps = steps
        self._crops = bool(reader.ragged)
        if self._crops:
            names = {name: ragged.array.dtype for name, ragged in reader.ragged.items()}
            path = self.version.path
            dense = [n for n, (shape, _) in reader.shapes.items() if shape and n != "label"]
            windows, self._steps = split_windows(steps, names, dense, path, self._followers)
            if options.reading.resident:
                raise UsageError(
                    f"resident keeps rows of one shape, and {' and '.join(names)} of {path} have "
                    "shapes of their own; leave resident out"
                )
            reader.crop(windows)
        self._copied = options.device.type not in ("cpu", "cuda")
        if self._copied:
            self._require_dtypes()
        self.marks_repeated = live or (options.world_size > 1 and not options.drop_last)
        shuffle = self._choose_shuffle()
        weights = options.shuffle.weights if isinstance(options.shuffle, Weighted) else None
        as_stored = options.shuffle is False
        self._selection = select(reader, options.rows, weights, as_stored=as_stored)
        self._mixing = label_mixing(self._steps)
        if self._mixing:
            self._require_labels(self._rows_with_labels())
        kinds = {n: (s, getattr(torch, d)) for n, (s, d) in reader.shapes.items()}
        require_fitting(self._steps, kinds, self._sequences.tried(reader), self._followers)
        require_one_draw(steps, masks)
        self.order = self._make_order(shuffle)
        self._tuple = ("image", "label") if options.output == "tuple" else ()
        missing = ", ".join(sorted({*self._tuple} - {*reader.shapes}))
        if missing:
            raise UsageError(
                f"output='tuple' gives (image, label), and {missing} is not among "
                f"{', '.join(reader.shapes)}; use output='dict'"
            )
        if options.rank == 0 and "label" in reader.shapes:
            if self._tuple:
                self._warn_of_missing_labels()
            compare_classes(self.version)
        # Other callables may expect batches one after another, on the thread of the loop.
        self._transforms_early = (
            options.device.type != "cuda"
            and (options.reading.resident != "device" or options.device.type == "cpu")
            and is_drawn(self._steps)
        )
        self.stream = self._make_stream()
        self._row_nbytes = sum(row_nbytes(*column) for column in reader.shapes.values())
        self._row_nbytes += sum(field.mean_nbytes for field in reader.sequences.values())
        self._transform_time = ThreadTime()
        self._repeated, self._warned_of_mark = 0, False
        if reader.cached:  # last: an error above must leave nothing behind
            reader.cached.join()

    @property
    def version(self) -> Version:
        """The version being read."""
        return self.reader.version

    @property
    def counters(self) -> Counters:
        """Sums since this was made."""
        threads, transforms = self.stream.thread_time, self._transform_time.wall
        early = self._transforms_early
        fetched = self.reader.cached.fetched if self.reader.cached else FetchedObjects()
        on_host = self._options.device.type != "cuda"  # there the time to queue says nothing
        return Counters(
            cpu_seconds=threads.cpu,
            threads=on_host * threads.wall,
            transforms=on_host * early * transforms,
            loop=on_host * (not early) * transforms,
            objects=fetched.objects,
            nbytes=fetched.nbytes,
            repeated=self._repeated,
        )

    def identity(self) -> dict[str, Any]:
        """Return all that decides the order of the rows."""
        order = self.order
        return {
            "format": STATE_FORMAT,
            "version": self.version.id,
            "order": BY_SHARD if self.live else "row",
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
            Place in the epoch that is read from.
        """
        identity, options = self.identity(), self._options
        if options.refresh and not start:
            identity["version"] = "current"  # as rank 0 decides
        shuffle = identity.pop("shuffle") or {"kind": options.shuffle}
        if identity.pop("order") == BY_SHARD:
            shuffle = {"kind": BY_SHARD}
        window = {}
        if shuffle["kind"] == "block":
            window = {f"{name} of the shuffle": shuffle[name] for name in ("window", "nodes")}
            window[BLOCK] = shuffle["block"]
        elif isinstance(options.shuffle, Buckets):
            window = {"buckets of the shuffle": shuffle["window"]}
        rows, holes = "all", self.version.hole_rows if self.version.committed else ()
        if identity["rows"] is not None:
            rows = f"{len(self._selection.valid):,} rows, digest {identity['rows']}"
        elif len(holes) and not self.live:
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

    # --- batches ---

    def batches(self, epoch: int, first: int) -> Generator[Arrived, None, None]:
        """Yield the batches of an epoch from a position on."""
        step = self.order.global_batch
        begun, starts = itertools.count(first, step), itertools.count(first, step)
        copy = operator.methodcaller("to", self._options.device)  # not a CUDA device
        for rows in self._runs(epoch, first):
            batches: Generator[Any, None, None] = self.stream.batches(rows, epoch, begun)
            with contextlib.closing(batches):
                for decoded in batches:
                    if self._closed.is_set():
                        return
                    batch, start = decoded, next(starts)
                    if self._copied:
                        batch = map_tensors(batch, copy)
                    arrived = batch if self._transforms_early else self._finish(epoch, start, batch)
                    del decoded, batch  # what the caller drops is gone
                    self._repeated += arrived.again
                    yield arrived

    def _runs(self, epoch: int, first: int) -> Iterator[Rows]:
        """Yield the rows of batches, in runs that can be read without waiting for a build."""
        order = self.order
        if isinstance(order, ShardOrder):
            runs = order.runs(epoch, first)
            yield from map(self._checked, runs) if self._mixing else runs
        elif order.count > POSITIONS_AT_ONCE:
            yield self._ahead(order, epoch, first)
        else:
            yield order.epoch(epoch, first)

    @staticmethod
    def _ahead(order: Order, epoch: int, first: int) -> Rows:
        """Yield the rows of batches, of which a thread computes some thousands ahead of need."""
        blocks = prefetch(operator.call, order.blocks(epoch, first), threads=1, ahead=1)
        with contextlib.closing(blocks):
            for rows in blocks:
                yield from order.cut(rows)

    def _checked(self, rows: Rows) -> Rows:
        """Yield the same rows; their labels may have been fetched with the samples."""
        for numbers in rows:
            self._require_labels(numbers)
            yield numbers

    def _finish(self, epoch: int, first: int, batch: Any) -> Arrived:
        """Apply the transform to the batch from a position on, and shape the output."""
        count, repeated = batch["row"].shape[0], self.order.repeated(first)
        again, mark = 0 if repeated is None else int(repeated.sum()), None
        if self.marks_repeated:
            mark = _mark(repeated, batch["row"])
            batch = {**batch, "repeated": mark}
        if self._steps:
            draw = self._draw(epoch, first, batch["row"])
            with self._transform_time.counted():
                batch = run_all(self._steps, batch, draw)
        if mark is not None:
            mark = batch.get("repeated") if isinstance(batch, Mapping) else None
            if again and mark is None:
                self._warn_of_mark()
        following = first + self.order.global_batch
        return Arrived(
            place=following if following < self.order.stop(first) else None,
            rows=count,
            nbytes=count * self._row_nbytes,
            again=again,
            repeated=mark,
            output=[self._tuple_of(batch)],
        )

    def _draw(self, epoch: int, first: int, rows: torch.Tensor) -> Draw:
        """Return the random numbers of the batch from a position on, by its row numbers."""
        again = self.order.again(first)
        if again is not None:
            positions = torch.from_numpy(again).to(rows.device, non_blocking=rows.is_cuda)
            rows = torch.where(positions < 0, positions, rows)
        step = first // self.order.global_batch
        return Draw((self.order.seed, epoch), step, rows, self._followers)

    def _tuple_of(self, batch: Any) -> Any:
        """Return a dict as a tuple, if that was asked for; anything else as it is."""
        if not self._tuple or not isinstance(batch, Mapping):
            return batch
        missing = [name for name in self._tuple if name not in batch]
        if missing:
            raise UsageError(
                f"output='tuple' gives ({', '.join(self._tuple)}), and the transform returns a dict"
                f" of {', '.join(map(str, batch)) or 'nothing'}, without {missing[0]!r}: return it "
                "as well, return a tuple of your own, or use output='dict'"
            )
        return tuple(batch[name] for name in self._tuple)

    def _warn_of_mark(self) -> None:
        """Log once that the transform left out the mark of repeated rows."""
        if not self._warned_of_mark:
            self._warned_of_mark = True
            log.warning(
                "rank %d: rows at the end of an epoch of %s repeat others, and the transform "
                "returns batches without 'repeated', which marks them: a metric counts them twice; "
                "return batch['repeated'] as well",
                self._options.rank,
                self.version.path,
            )

    def _masks(self) -> dict[str, bool]:
        """Return the fields that their recipe decodes as masks -> True, or only resizes so."""
        masks = {}
        for name, field in self._declared.items():
            if name in self.reader.shapes or name in self.reader.ragged:
                is_mask = field.specs()[-1].kind == "mask"
                nearest = (getattr(op, "interpolation", None) == "nearest" for op in field.ops)
                if is_mask or any(nearest):
                    masks[name] = is_mask
        return masks

    def _find_followers(self, steps: Steps) -> dict[str, Follower]:
        """Return the fields that belong to pictures or boxes, as their recipe declares."""
        followers, cropped, moved = {}, crops(steps), moved_by(steps)
        for name, field in self._declared.items():
            if name in self.reader.arrays and field.follow is not None:
                *boxes, picture = field.follow.names
                arrays = self.reader.arrays
                if cropped and picture in arrays and not {*boxes} <= {*arrays}:
                    raise UsageError(
                        f"{name} belongs to {boxes[0]}, which is not read: a crop drops boxes, and "
                        f"entries of {name} would stay. Name {boxes[0]} in fields= of the Loader, "
                        f"too, or leave out {name}"
                    )
                moves = field.kind in ("boxes", "keypoints")
                if moves and moved and picture not in {*arrays, *moved}:
                    raise UsageError(
                        f"{name} lies in {picture}, which is not read, and would stay behind where "
                        f"{' and '.join(moved)} moves: name {picture} in fields= of the Loader and "
                        f"of what moves, too, or leave out {name}"
                    )
                followers[name] = Follower(
                    field.kind or "", picture if moves else "", boxes[0] if boxes else ""
                )
        return followers

    def _require_no_sequences(self) -> None:
        """Raise `UsageError` if rows that differ in length are read, and an option takes none."""
        options, names = self._options, list(self.reader.sequences)
        others = tuple(n for n in self.reader.arrays if n not in self.reader.sequences)
        for option, refused in (
            (f"resident={options.reading.resident!r}", options.reading.resident is not None),
            ("decompress='device'", options.reading.decompress == "device"),
            ("output='tuple'", options.output == "tuple"),
        ):
            if names and refused:
                raise UsageError(
                    f"{option} takes rows of one shape, and those of {' and '.join(names)} differ "
                    f"in length: leave it out, or read the others alone, by fields={others}"
                )

    def _require_dtypes(self) -> None:
        """Raise `UsageError` for a field whose dtype the device does not have."""
        for name, (*_, dtype) in self.reader.columns.items():
            like = torch.from_numpy(np.empty(0, dtype))
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

    def _choose_shuffle(self) -> Shuffle | None:
        options, reader = self._options, self.reader
        chosen, ranks = options.shuffle, options.world_size
        if chosen == "block" or (chosen is True and reader.cached is not None):
            chosen = Block()
        if isinstance(chosen, Buckets):
            if chosen.field not in reader.sequences:
                those = ", ".join(reader.sequences) or "none"
                raise UsageError(
                    f"shuffle is {chosen}, and the fields that are read whose rows differ in "
                    f"length are: {those}"
                )
            return Shuffle(f"buckets {chosen.field}", options.batch_size * ranks, chosen.count)
        if not isinstance(chosen, Block):
            return None if chosen is False else Shuffle()
        if options.batch_size * ranks % chosen.nodes:
            raise UsageError(
                f"the shuffle has nodes={chosen.nodes}, and {ranks} ranks read "
                f"{options.batch_size} rows each a step; choose a batch_size that deals out evenly"
            )
        window, cache = chosen.window or SHUFFLE_WINDOW, options.cache
        # Free space must not change the order: each rank has a disk of its own.
        if chosen.window is None and reader.cached and cache and cache.limit is not None:
            window = reader.cached.window(SHUFFLE_WINDOW)
        arrays = (reader.readers | reader.sequences).values()
        shard_rows = [array.array.object_rows for array in arrays]
        return Shuffle("block", max(shard_rows, default=1), window, chosen.nodes)

    def _make_order(self, shuffle: Shuffle | None) -> Order | ShardOrder:
        """Make the order; raise `UsageError` if an epoch has no batch."""
        options, selection = self._options, self._selection
        size, ranks = options.batch_size, options.world_size
        lengths = None
        if isinstance(options.shuffle, Buckets):
            rows = selection.valid(np.arange(len(selection.valid)))
            lengths = self.reader.sequences[options.shuffle.field].shapes[rows, 0]
        names = {"batch_size", "seed", "drop_last", "rank", "world_size"}
        common: dict[str, Any] = options.model_dump(include=names)
        order: Order | ShardOrder
        if self.live:
            order = ShardOrder(self.live, stopped=self._closed, **common)
        else:
            weights = selection.weights
            order = Order(
                selection.valid, shuffle=shuffle, weights=weights, lengths=lengths, **common
            )
        if order.batches():
            return order
        if not order.count:
            raise UsageError(
                f"{self.version.path} has 0 valid rows; precache info says what failed, and a "
                "build with --retry-failed tries again"
            )
        shared = f" for {ranks} ranks" if ranks > 1 else ""
        most = f"give at most {order.count // ranks}, or leave out drop_last"
        raise UsageError(
            f"batch_size is {size}, and {self.version.path} has {order.count} valid rows{shared}, "
            f"of which drop_last leaves none: {most if order.count >= ranks else 'leave it out'}"
        )

    def _make_stream(self) -> BatchStream | resident.ResidentStream:
        options, reader = self._options, self.reader
        if options.reading.resident == "device" and options.device.type != "cpu":
            return resident.ResidentStream(resident.load(reader, options.device), options.device)
        if options.reading.resident is not None:
            for turn, fields in enumerate(resident.load(reader, torch.device("cpu"))):
                arrays = {name: values.numpy() for name, values in fields.items()}
                reader.at_epoch(turn).read_from_memory(arrays)
        return BatchStream(
            reader,
            self.order.largest,
            options.device,
            reading=options.reading,
            # A batch may have to wait for the build, and must not delay the one before.
            in_rounds=not self.live,
            finish=self._finish if self._transforms_early else None,
            draw=self._draw if self._crops else None,
            sequences=self._sequences,
        )

    def _rows_with_labels(self) -> np.ndarray:
        """Rows whose labels are known."""
        rows = self._selection.read
        if self.live is None or self.live.committed:
            return rows
        labelled: np.ndarray = rows[has_label(self.live.labels[rows])]
        return labelled

    def _warn_of_missing_labels(self) -> None:
        """Log a warning if rows that are read have no label, once for each version."""
        labels = self.reader.small.get("label")
        if labels is None or labels.ndim != 1 or labels.dtype.kind not in "if":
            return  # of multi-hot labels, none of the classes is a label as well
        rows, path = self._rows_with_labels(), self.version.path
        missing = rows[~has_label(labels[rows])]
        if len(missing) and path not in _warned:
            _warned.add(path)
            first, none, labelled = int(missing[0]), "-1", "precache.open(…).labels >= 0"
            if labels.dtype.kind == "f":
                none, labelled = "NaN", "~numpy.isnan(precache.open(…).labels)"
            named = f"row {first}" if self.version.foreign else self.version.keys[first]
            count = f"{len(missing):,} of {len(rows):,} rows"
            log.warning(
                "%s of %s have no label (%s), such as %s: leave them out with rows=%s, have the "
                "loss ignore them, or use output='dict'",
                count,
                path,
                none,
                printable(named),
                labelled,
            )

    def _require_labels(self, rows: np.ndarray) -> None:
        """Refuse labels that the transform cannot mix."""
        labels = self.reader.small.get("label")
        if self._mixing and labels is not None:
            self._mixing.require(labels[rows], rows, self.version.path)


def _mark(repeated: np.ndarray | None, rows: torch.Tensor) -> torch.Tensor:
    """Return (n,) bool on the device of `rows`."""
    if repeated is None and rows.is_cuda:
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    marks = np.zeros(len(rows), np.bool_) if repeated is None else repeated
    return torch.from_numpy(marks).to(rows.device, non_blocking=rows.is_cuda)
