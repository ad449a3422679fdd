"""`Loader`: batches of a cached version on the training device, with almost no CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch

from precache.codecs.kernels import warn_if_slow
from precache.errors import UsageError
from precache.loading.arrival_order import FINISHED, ArrivalOrder, check_options
from precache.loading.cuda_clock import stall_clock
from precache.loading.gpu import resident as residence
from precache.loading.options import find_device, sensible
from precache.loading.order_choice import order_of, shuffle_of
from precache.loading.position import Position, require_same
from precache.loading.ranks import find_rank, require_rank
from precache.loading.selection import Selection
from precache.loading.slots import as_array
from precache.loading.stream import BatchStream, ResidentStream, Rows
from precache.loading.version_follower import VersionFollower
from precache.reading.disk_cache import DiskCache
from precache.reading.version_reader import FieldNames, VersionReader
from precache.runtime.integers import whole
from precache.runtime.step_clock import LoaderStats
from precache.storage.open import StorageOptions
from precache.store.live_version import LiveVersion
from precache.store.version import Version
from precache.transforms import Compose, Draw, Transform, is_drawn, label_mixing, run

STATE_FORMAT = 1

WINDOW = 8
"""Shards that a block shuffle mixes by default."""


class Loader:
    """Iterates over a cached version in batches; one iterator is one epoch.

    Parameters
    ----------
    uri
        A store, ``STORE@prefix`` for one version, or a Zarr group together with a mapping as
        `fields`; or a `Version`, as `open` and `ensure` give it. One that `ensure` gives with
        ``follow=True`` has its first epoch read in the order in which its shards are finished, as
        they are; later ones wait until the build is done, and are shuffled as said here.
    batch_size
        Rows a batch of each rank; the last one is smaller unless `drop_last`.
    shuffle, seed
        A new order every epoch, a function of (seed, epoch) alone. ``"full"`` mixes all rows;
        ``"block"`` mixes `window` random shards at a time, so that only these are read from
        meanwhile; ``True`` means ``"block"`` with a cache of a remote store, else ``"full"``;
        ``False`` keeps `order`.
    device
        Where batches go; by default this rank's CUDA device if there is one, else the CPU.
    fields
        Names to read, by default all; or name -> path of an array in a group that other software
        wrote.
    transform
        One of `precache.transforms`, seeded by (seed, epoch, row), or by the position in the order
        where a row may come again in an epoch, as with `weights`; or any callable: given each batch
        as a dict on the device, returns what takes its place. On the CPU those of ours run on the
        threads that decode, ahead of the loop.
    output
        ``dict``: field -> tensor, with `row` (int64). ``tuple``: (image, label), after the
        transform.
    order
        Without shuffle: ``row`` (as stored) or ``key`` (sorted by key).
    verify
        When CRC32C checksums are checked: ``first`` (once a process), ``always`` or ``off``.
    threads
        That decode; by default one where reading is copying, else up to four, and no more than the
        cores that this process may use by its affinity and the CPU quota of its control group.
    ahead
        Batches in the making; by default one more than the threads work on at a time: 2 where they
        decode each batch together, one more than threads where batches are smaller than that pays
        for, and up to 8 times as many where they are copied and small.
    resident
        ``host`` or ``device``: decode everything once into that memory and gather batches there;
        refused where it does not fit.
    window
        Shards mixed at a time by ``shuffle="block"``; by default 8, or with a `cache_limit` as
        many fewer as let two loaders share it; ranks must have the same one.
    decompress
        ``host``, or ``device``: zstd frames go to the CUDA device as they are, and nvCOMP
        decompresses them there. Falls back to the host, with one line in the log, where nvCOMP or
        a CUDA device is missing. Checksums of frames are checked on the host, as `verify` says.
    gather
        ``host``, or ``device``: shards of `raw` fields, and with ``decompress="device"`` those of
        zstd frames, are registered with the CUDA driver, and the device reads their rows by itself;
        no CPU touches them but to check them, as `verify` says. All stay page-locked until `close`,
        and are read from the disk to begin with; refused where they take more than half of the
        memory available. Where the driver registers no read-only memory, as a copy of each
        process's own, and where it registers none, or there is no CUDA device or such field, the
        host reads; either is one line in the log.
    access
        ``map``, or ``pread`` for a network file system, where a map of a file that is cut short
        meanwhile would end the process.
    cache_dir, cache_limit
        Folder on a local disk where whole shards of a remote store go, ahead of need and checked,
        and the bytes that it never exceeds, such as ``"200GB"``; by default nine tenths of the
        disk. All loaders of a node may share it. Without one, rows of a remote store are read by
        range requests: slower, and each epoch anew.
    cache_shared
        Share `cache_dir` with other users: the members of its group, who trust each other, since
        each of them may replace and remove what is in it. By default it is this user's alone, and
        refused where it belongs to somebody else. Nothing in it is ever reached through links.
    storage_options
        Of a remote file system, as its fsspec class takes them.
    rank, world_size
        This process among those that train together, each with its own part of every step's rows;
        by default as `torch.distributed`, torchrun, srun or mpirun say, else 0 of 1. All have as
        many batches: without `drop_last`, rows from the epoch's beginning fill up its end.
    rows
        Row numbers, or (rows,) bool, to read alone, as `Version.rows_of_classes` and
        `Version.rows_of_keys` give them; holes among them are left out.
    weights
        (rows,) of the version, none negative: as many rows as there are are drawn with replacement,
        each as often as its weight says on average.
    num_canonical_nodes
        With block shuffle: shards are dealt out to so many nodes once and for all, so that the
        cache of each needs to hold its share alone. The order is a function of this number, and
        not of how many nodes there are; `batch_size` times `world_size` must be a multiple of it.
    refresh
        ``epoch``: each epoch reads the version that is current at its beginning, the same on all
        processes of `torch.distributed`, which must begin it together; iterators of earlier ones
        end. One whose fields have another shape or dtype is not taken, and the log says so. By
        default the version stays that of the beginning.

    Notes
    -----
    Of a field with `variants = K`, epoch e reads the variant whose number is e modulo K; with
    `refresh` a fresh one is read after at most K epochs, and where one is made for each epoch, none
    is read twice.

    Images are (N, C, H, W) uint8 unless `transform` changes them. On the CPU a batch's memory is
    used again once its last tensor is gone. Each iterator is the next epoch, unless `set_epoch`
    says which; it is decided when its first batch is asked for.

    Threads of a loader page-lock memory and copy while a step runs, which a CUDA graph's capture
    refuses of all threads by default: capture by
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
        verify: str = "first",
        threads: int | None = None,
        ahead: int | None = None,
        resident: str | None = None,
        window: int | None = None,
        decompress: str = "host",
        gather: str = "host",
        access: str = "map",
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        cache_shared: bool = False,
        storage_options: StorageOptions = None,
        rank: int | None = None,
        world_size: int | None = None,
        num_canonical_nodes: int = 1,
        rows: np.ndarray | Sequence[int] | None = None,
        weights: np.ndarray | Sequence[float] | None = None,
        refresh: str | None = None,
    ) -> None:
        given = sensible({n: v for n, v in locals().items() if n not in ("self", "uri")})
        batch_size, seed, drop_last = given["batch_size"], given["seed"], given["drop_last"]
        grows = isinstance(uri, LiveVersion)
        if grows:
            check_options(given)
        self._refresh = VersionFollower(uri, storage_options) if refresh else None
        self._given = given if refresh or grows else {}
        self._stopped = threading.Event()
        self.device = find_device(device)
        # What is to be in memory whole needs no copy on a disk.
        cache = None
        if cache_dir and not resident:
            cache = DiskCache.at(cache_dir, cache_limit, shared=cache_shared)
        named = uri if isinstance(uri, Version) else os.fspath(uri)
        self._columns = VersionReader(named, fields, verify, storage_options, access, cache)
        if gather == "device" and not self._columns.local:
            raise UsageError(
                f"gather='device' maps shards of a local disk, and {self.version.path} is remote; "
                "fetch it with precache pull first, or leave gather out"
            )
        # What is free on a disk must not change the order: each rank has a disk of its own.
        widest = WINDOW
        if self._columns.cached and cache_limit is not None:
            widest = self._columns.cached.window(WINDOW)
        shuffled = shuffle_of(
            shuffle, self._columns, given["window"] or widest, given["num_canonical_nodes"]
        )
        self._selection = Selection.of(self._columns, rows, weights)
        self._mixing = label_mixing(transform)
        if self._mixing:
            self._require_labels(self._selection.read, unknown=grows)
        ranks = find_rank(given["rank"], given["world_size"])
        self._told_rank = rank is not None
        self._order = order_of(
            self.version, self._selection, batch_size, shuffled, seed, drop_last, given["order"],
            ranks, self._stopped,
        )  # fmt: skip
        self._sorted_by = FINISHED if grows else given["order"]
        self._transform = transform
        self._output = self._output_names(output)
        stream = _made_resident(self._columns, self.device, resident)
        self._stream = stream or BatchStream(
            self._columns,
            batch_size,
            self.device,
            given["threads"],
            given["ahead"],
            decompress,
            gather,
        )
        # Whatever else was given may expect batches one after another, on the thread of the loop.
        self._ahead = self.device.type == "cpu" and stream is None and is_drawn(transform)
        warn_if_slow()
        self._clock = stall_clock(self.device)
        self._iterators: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
        # At the end of the process, while there still are modules, and before what they read goes.
        weakref.finalize(self, _end, self._iterators)
        self._closed = False
        self._place = Position(len(self))
        self._last = (0, 0)
        if self._columns.cached:  # last: what is refused above must hold nothing
            shards = self._order.blocks_at_once(self._columns.cached.rows_per_shard)
            self._columns.cached.claim(shards)

    def _require_labels(self, rows: np.ndarray, *, unknown: bool = False) -> None:
        """Refuse labels that the transform cannot mix; with `unknown`, -1 may be none yet."""
        labels = self._columns.small.get("label")
        if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu":
            rows = rows[labels[rows] >= 0] if unknown else rows
            assert self._mixing is not None  # else no label need be in any range
            self._mixing.require(labels[rows], rows, self.version.path)

    def _output_names(self, output: str) -> tuple[str, str] | None:
        if output == "dict":
            return None
        missing = {"image", "label"} - set(self._columns.shapes)
        if missing:
            raise UsageError(
                f"output='tuple' gives (image, label), and {', '.join(sorted(missing))} is not "
                f"among {', '.join(self._columns.shapes)}; use output='dict'"
            )
        return ("image", "label")

    @property
    def version(self) -> Version:
        """The version being read."""
        return self._columns.version

    @property
    def rank(self) -> int:
        """Which of `world_size` ranks this process is."""
        return self._order.rank

    @property
    def world_size(self) -> int:
        return self._order.world_size

    @property
    def follows(self) -> bool:
        """Whether its epochs read other versions of the store, as `refresh` or a build says."""
        return self._refresh is not None or isinstance(self.version, LiveVersion)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._order.batches

    def keys(self, rows: torch.Tensor | np.ndarray | Iterable[int]) -> list[str]:
        """Keys of the given row numbers, such as ``batch["row"]``."""
        numbers = rows.tolist() if isinstance(rows, torch.Tensor | np.ndarray) else list(rows)
        return [self.version.keys[row] for row in numbers]

    def locate(self) -> Callable[[], tuple[str, ...]]:
        """What tells the keys of the batch that was handed out last, whenever it is asked."""
        order, keys, last = self._order, self.version.keys, self._last
        return lambda: tuple(keys[row] for row in next(order.epoch(*last)).tolist())

    def rows_of_batch(self, epoch: int, batch: int) -> np.ndarray:
        """(n,) int64 rows of a batch of an epoch, whether it was read or not.

        Raises
        ------
        UsageError
            An epoch has no such batch.
        """
        epoch, batch = whole("epoch", epoch), whole("batch", batch)
        if not 0 <= batch < len(self):
            raise UsageError(f"batch is {batch}, and an epoch has {len(self)}, counted from 0")
        if epoch and isinstance(self.version, LiveVersion):
            raise UsageError(f"epoch is {epoch}, and its order is known once the version is built")
        return next(self._order.epoch(epoch, batch))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator runs."""
        self._place.choose(epoch)

    def seek(self, epoch: int, batch: int) -> None:
        """Choose the epoch that the next iterator runs, and the batch that it begins with."""
        self._place.seek(epoch, batch)

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise UsageError("this loader is closed; make a new one")
        if not self._told_rank:
            require_rank(self.rank, self.world_size)
        iterator = self._run()
        self._iterators.add(iterator)
        return iterator

    def _follow(self, refresh: VersionFollower) -> None:
        """Go over to the version that the epoch is to read."""
        taken: list[Loader] = []
        world_size = self._order.world_size
        uri = refresh.newer(self.version, lambda uri: taken.append(self._at(uri)), world_size)
        if uri is not None:
            self._adopt(taken.pop() if taken else self._at(uri))

    def _go_over(self, growing: LiveVersion) -> None:
        """Go over to the version that was followed, once it is there."""
        version = growing.await_commit(self._stopped)
        if version is not None:
            other = self._at(version)
            self._adopt(other)
            self._sorted_by = other._sorted_by

    def _at(self, uri: str | Version) -> Loader:
        """The same loader of another version; this one keeps no iterator and no disk cache."""
        _end(self._iterators)
        if self._columns.cached:
            self._columns.cached.close()
        shapes = self._columns.shapes
        given = {**self._given, "fields": [name for name in shapes if name != "row"]}
        rank = {"rank": self._order.rank, "world_size": self._order.world_size}
        other = Loader(uri, **{**given, **rank, "refresh": None})
        if other._columns.shapes != shapes:
            other.close()
            raise UsageError(
                f"{other.version.folder} has {other._columns.shapes}, and this loader reads "
                f"{shapes}"
            )
        return other

    def _adopt(self, other: Loader) -> None:
        self._stream.close()
        self._columns, self._selection = other._columns, other._selection
        self._order, self._stream = other._order, other._stream
        self._place.measure(len(self))

    def _run(self) -> Generator[Any, None, None]:
        # With its first batch, not when it is made: some trainers make one that they never use.
        epoch, start = self._place.begin()
        if self._refresh and start == 0:
            self._follow(self._refresh)
        if epoch and isinstance(self.version, LiveVersion):
            self._go_over(self.version)
        batches = self._batches(epoch, start)
        with contextlib.closing(batches):
            self._clock.begin()
            ready = self._stream.ready
            for batch in batches:
                if self._closed:
                    return
                finished = batch if self._ahead else self._finish(epoch, start, batch)
                rows, nbytes, outputs = finished
                del batch, finished
                self._last = (epoch, start)
                start += 1
                self._clock.arrived(rows, nbytes, ready)
                self._place.received(epoch, start)
                yield outputs.pop()  # and not a name more: what the caller drops is gone
                self._clock.asked()
                ready = self._stream.ready

    def _batches(self, epoch: int, start: int) -> Generator[Any, None, None]:
        runs = self._order.runs(epoch, start)
        if self._mixing and isinstance(self.version, LiveVersion):
            runs = map(self._with_labels, runs)
        finish = (functools.partial(self._finish, epoch, n) for n in itertools.count(start))
        ahead = [finish] if self._ahead else []
        for rows in runs:
            with contextlib.closing(self._stream.batches(rows, epoch, *ahead)) as batches:
                yield from batches

    def _with_labels(self, rows: Rows) -> Rows:
        """The same row numbers, of samples that brought their labels when they were fetched."""
        with contextlib.closing(rows):
            for numbers in rows:
                self._require_labels(numbers)
                yield numbers

    def _finish(self, epoch: int, number: int, batch: Any) -> tuple[int, int, list[Any]]:
        """Apply the transform, and shape the output; rows and bytes of the batch, and that."""
        rows, nbytes = len(batch["row"]), sum(t.nbytes for t in batch.values())
        if self._transform is not None:
            numbers, again = batch["row"], self._order.again(number)
            if again is not None:
                repeated = torch.from_numpy(again).to(self.device, non_blocking=True)
                numbers = torch.where(repeated < 0, repeated, numbers)
            draw = Draw((self._order.seed, epoch), number, numbers)
            batch = run(self._transform, batch, draw)
        output = batch if self._output is None else tuple(batch[name] for name in self._output)
        return rows, nbytes, [output]

    def stats(self) -> LoaderStats:
        """Batches, bytes, waiting and step times, and the threads' CPU time since the last call."""
        fetched = self._columns.cached.take() if self._columns.cached else None
        stats = self._clock.report(self._stream.thread_time.take(), fetched)
        if not isinstance(self._order, ArrivalOrder):
            return stats
        return dataclasses.replace(stats, repeated=self._order.take_repeated())

    @property
    def together(self) -> int:
        """Batches that are made at a time: small ones come in rounds of so many."""
        return 1 if self._ahead else self._stream.together

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: what it has received, not what is being read ahead."""
        return {**self.identity(), **self._place.saved()}

    def identity(self) -> dict[str, Any]:
        """What decides the batches of each step: a state holds it, and is refused elsewhere."""
        order = self._order
        return {
            "format": STATE_FORMAT,
            "version": self.version.id,
            "global_batch": order.global_batch,
            "order": self._sorted_by,
            "shuffle": None if order.shuffle is None else dataclasses.asdict(order.shuffle),
            "seed": order.seed,
            "drop_last": order.drop_last,
            "rows": self._selection.digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next iterator yields the rest of that epoch.

        Raises
        ------
        UsageError
            The state is of another version, global batch or order, by name. Ranks may be more or
            fewer than they were. With `refresh` the version that it names is opened.
        """
        version = state.get("version")
        if self._refresh and isinstance(version, str) and version != self.version.id:
            self._adopt(self._at(self._refresh.uri_of(version)))
        if isinstance(self.version, LiveVersion) and state.get("order") != FINISHED:
            self._go_over(self.version)  # the state is of a later epoch
        require_same(self.identity(), state, "this loader")
        self._place.load(state)

    def close(self) -> None:
        """End running iterators and their threads, and let go of their memory.

        An iterator that is at work on another thread, or calls this itself, ends with its batch.
        """
        self._closed = True
        self._stopped.set()
        _end(self._iterators)
        self._stream.close()
        if self._columns.cached:
            self._columns.cached.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(iterators: Iterable[Generator[Any, None, None]]) -> None:
    for iterator in list(iterators):
        with contextlib.suppress(ValueError):  # it is at work
            iterator.close()


def _made_resident(
    columns: VersionReader, device: torch.device, resident: str | None
) -> ResidentStream | None:
    """Load what is to be resident; None where batches still come through slots."""
    if resident == "device" and device.type != "cpu":
        return ResidentStream(residence.load(columns, device), device)
    if resident is not None:
        for turn, held in enumerate(residence.load(columns, torch.device("cpu"))):
            values = {name: as_array(column) for name, column in held.items()}
            columns.at_epoch(turn).read_from_memory(values)
    return None
