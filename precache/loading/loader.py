"""`Loader`: batches of a cached version on the training device, with almost no CPU."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import distributed
from torch.utils.data import get_worker_info

from precache.codecs.kernels import warn_if_slow
from precache.errors import PrecacheError, StoreError, UsageError
from precache.loading.batch_source import BY_SHARD, BatchSource
from precache.loading.class_numbers import require_numbers
from precache.loading.loop import Arrived, Loop, end_all, require_same
from precache.loading.options import (
    Block,
    Buckets,
    Cache,
    LoaderOptions,
    Reading,
    Weighted,
    explained,
    require_path,
)
from precache.loading.ranks import OUTSIDE, find_rank, require_rank
from precache.loading.selection import row_numbers
from precache.loading.sequences import Form
from precache.loading.shard_order import ShardOrder
from precache.messages import shown
from precache.reading.version_reader import FieldNames
from precache.runtime.integers import whole
from precache.runtime.step_clock import Counters
from precache.sampling.order import Order
from precache.storage.base import Folder
from precache.storage.open import StorageOptions, open_folder
from precache.store.commit_log import ROOT, read_log, short
from precache.store.live_version import LiveVersion
from precache.store.open import split_uri
from precache.store.version import Version
from precache.transforms import Compose, Transform

log = logging.getLogger(__name__)

PARTS = "rank=RANK * info.num_workers + info.id, world_size=WORLD_SIZE * info.num_workers"
"""Which part of the rows a worker of a `DataLoader` reads, where there are several processes."""


class Loader(Loop):
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
        A new order every epoch, a function of (seed, epoch) alone. ``"full"`` mixes all rows; a
        `Block`, or ``"block"`` for its defaults, mixes a few random shards at a time; ``True``
        means ``"block"`` with a cache of a remote store, else ``"full"``. `Buckets` makes batches
        of rows of similar length; `Weighted` draws rows. ``False`` keeps the order of the rows.
    device
        Where batches go; by default this rank's CUDA device if there is one, else the CPU. To any
        other device of torch, such as ``mps``, they are copied synchronously when they are
        requested.
    fields
        Names of the fields to read, by default all; or name -> path of an array in a group that
        other software wrote.
    transform
        One of `precache.transforms`, seeded by (seed, epoch, row), or by the position in the order
        where a row may come again in an epoch, as with `Weighted`; or any callable that takes each
        batch on the device as a dict, and returns what the loop gets. Unless that is a CUDA
        device, `precache.transforms` run on the decoding threads of the CPU, ahead of the loop.
        Ragged rows need one that begins with a crop, which is done on the CPU while they are read.
    output
        ``dict``: field -> tensor, with `row` (int64), and `label`: class numbers (int64), numbers
        (float32), or uint8 (N, classes) of several classes. With several ranks and without
        `drop_last`, and of a version that is still being built, also `repeated` (N,), bool: True
        for rows that only fill up the epoch. ``tuple``: (image, label) of the dict that the
        transform returns; the attribute `repeated` of this has its mark. What is no dict is handed
        out as the transform returns it.
        A dict with the forms of fields of kind ``ragged``, ``boxes`` and ``keypoints``: ``padded``
        (default), (N, longest, ...) with zeros behind each, and lengths (N,) int64 as
        ``NAME.length``; ``jagged``, a nested tensor of torch's layout `jagged`; or ``list``. Fields
        of kind ``text`` and ``bytes`` are lists of str and bytes, also with a CUDA device.
    reading
        A `Reading`: threads, batches prepared ahead, memory that holds all rows, decompression by
        the device, files that are read instead of mapped. It changes no batch.
    cache
        A `Cache`, or its folder: whole shards of a remote store are fetched ahead of need, and
        checked. Without one, rows of a remote store are read by range requests: slower, and again
        in each epoch.
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
    refresh
        ``epoch``: each epoch reads the version that is current at its beginning, the same on all
        processes of `torch.distributed`, which must begin it together; iterators of earlier epochs
        end. A version whose fields have another shape or dtype, or whose class numbers mean other
        classes, is skipped, and logged. By default all epochs read the version that was current
        when the loader was made.

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

    @explained
    def __init__(
        self,
        uri: str | os.PathLike[str] | Version,
        batch_size: int = 256,
        shuffle: Literal[True, False, "full", "block"] | Block | Buckets | Weighted = True,
        seed: int = 0,
        drop_last: bool = False,
        device: str | torch.device | None = None,
        fields: FieldNames = None,
        transform: Transform | Compose | Callable[[Any], Any] | None = None,
        *,
        output: Literal["dict", "tuple"] | Mapping[str, Form] = "dict",
        reading: Reading | None = None,
        cache: str | os.PathLike[str] | Cache | None = None,
        storage_options: StorageOptions = None,
        rank: int | None = None,
        world_size: int | None = None,
        rows: np.ndarray | Sequence[int] | None = None,
        refresh: Literal["epoch"] | None = None,
    ) -> None:
        names = LoaderOptions.model_fields
        parameters: dict[str, Any] = {
            name: [*value] if isinstance(value, Iterator) else value  # a copy takes it again
            for name, value in locals().items()
            if name in names
        }
        self._options = options = LoaderOptions(**parameters)
        self._given, self._counted_parts = (uri, parameters), False
        self._ranks = 1  # of the process that this is a copy from
        self._closed = threading.Event()
        self._has_rank = rank is not None
        live = isinstance(uri, Version) and uri.followed and _supports_live(uri, options)
        name = uri if isinstance(uri, Version) else require_path(uri)
        self._store = _open_store(os.fspath(name), options) if options.refresh else None
        self._source = BatchSource(name, options, self._closed, live=live)
        self._earlier = Counters()  # of sources that were replaced
        super().__init__(options.device, options.rank, options.world_size, "loader")
        warn_if_slow()

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
        return "tuple" if self._options.output == "tuple" else "dict"

    @property
    def order(self) -> Order | ShardOrder:
        """Order of the rows."""
        return self._source.order

    @property
    def follows(self) -> bool:
        """True if a later epoch may read another version: with `refresh`, or after ``follow``."""
        return self._source.live is not None or self._store is not None

    @property
    def marks_repeated(self) -> bool:
        """True if batches have the field `repeated`; a mixture makes its sources agree on it."""
        return self._source.marks_repeated

    @marks_repeated.setter
    def marks_repeated(self, marks: bool) -> None:
        self._source.marks_repeated = marks

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.order.batches()

    def __repr__(self) -> str:
        size, ranks = self._options.batch_size, f"rank {self.rank} of {self.world_size}"
        return f"<precache loader, {len(self)} batches of {size}, {ranks}: {self.version!r}>"

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
        self.require_position()
        order, keys, last = self.order, self.version.keys, self._last
        return lambda: tuple(keys[row] for row in next(order.epoch(*last)).tolist())

    def rows_of_batch(self, epoch: int, batch: int) -> np.ndarray:
        """(n,) int64 rows of a batch of an epoch, whether it was read or not.

        Raises
        ------
        UsageError
            An epoch has no such batch; or its rows are not known yet, and the loader is closed.
        """
        epoch, first = whole("epoch", epoch, 0), self._place_of(batch)
        if self._source.live is not None and epoch:
            raise UsageError(f"epoch is {epoch}, and its order is known once the version is built")
        for rows in self.order.epoch(epoch, first):  # waits for a build that is followed
            return rows
        raise UsageError("this Loader is closed, and the rows of that batch are not known yet")

    def _place_of(self, batch: int) -> int:
        """Return the place at which a batch of an epoch begins."""
        if not 0 <= whole("batch", batch) < len(self):
            raise UsageError(f"batch is {batch}, and an epoch has {len(self)}, counted from 0")
        return whole("batch", batch) * self.order.global_batch

    def seek(self, epoch: int, batch: int) -> None:
        """Choose the epoch that the next iterator runs, and the batch that it begins with.

        Raises
        ------
        UsageError
            An epoch has no such batch.
        """
        self._choose(epoch, self._place_of(batch))

    def __iter__(self) -> Iterator[Any]:
        if not self._has_rank:
            require_rank(self.rank, self.world_size)
        return super().__iter__()

    def batches(self, epoch: int, place: int) -> Generator[Arrived, None, None]:
        self._require_own_rows()
        return self._source_at(epoch, place).batches(epoch, place)

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
        if worker and not self._has_rank and self.world_size == 1 < self._ranks:
            raise UsageError(
                f"this loader was made on one of {self._ranks} ranks, and is used in a worker of a "
                "DataLoader that does not know which, so that it would read the rows of all; "
                + OUTSIDE
            )
        if self._has_rank and not self._counted_parts and self._options.rows is None:
            self._counted_parts = True
            self._warn_of_parts(workers)

    def _warn_of_parts(self, workers: int) -> None:
        """Log that there are more processes, with so many workers each, than parts, or fewer."""
        processes = 1
        with contextlib.suppress(UsageError):  # it is unclear
            processes = find_rank()[1]
        alone, readers = self.world_size == workers == 1, processes * workers
        if self.world_size < readers and not alone:
            why = "Unless processes share their rows, some read the same ones"
        elif self.world_size > readers > 1:
            why = "Unless other jobs read the rest, some rows are never read"
        else:
            return
        log.warning(
            "rank=%d, world_size=%d was given, and rows would be dealt out to %d: processes (%d) "
            "times workers of a DataLoader (%d). %s: give %s",
            self.rank, self.world_size, readers, processes, workers, why,
            PARTS if workers > 1 else "the rank and the number of all processes",
        )  # fmt: skip

    # --- which version an epoch reads ---

    def _source_at(self, epoch: int, place: int) -> BatchSource:
        """Return the source of an epoch that is read from a place on.

        It is always the same one; or with `refresh` the one that is current when an epoch begins;
        or that of the build that was followed in epoch 0, for which this waits.
        """
        if self._source.live is not None and epoch:
            self._await_build()
        elif self._store and not place:
            self._refresh(self._store)
        return self._source

    def _refresh(self, store: Folder) -> None:
        """Read the current version from now on.

        Where `torch.distributed` is initialised, rank 0 decides for all of its processes, which
        must call this together. A version that it cannot open is skipped, and logged.
        """
        own = self.version.id
        alone = not (distributed.is_available() and distributed.is_initialized())
        if alone and self.world_size > 1:
            raise UsageError(
                f"refresh='epoch' with {self.world_size} ranks needs torch.distributed, by which "
                "they agree on a version; initialise it before the first epoch"
            )
        newer, decision = None, [own]
        if alone or distributed.get_rank() == 0:
            try:
                entry = read_log(store, newest=True).current
                if entry is None:
                    raise StoreError(f"{shown(str(self._given[0]))} has no commits, or is gone")
                if entry.version != own:
                    newer, decision = self._following(entry.version), [entry.version]
                    log.info("version %s follows %s", short(decision[0], 12), short(own, 12))
            except PrecacheError as error:
                log.error("the next epoch reads version %s again: %s", short(own, 12), error)
        if not alone:  # a rank may have opened another version than rank 0
            distributed.broadcast_object_list(decision, src=0)
        if newer is None and decision[0] != own:
            newer = self._following(decision[0])
        if newer is not None:
            self._use(newer)

    def _following(self, version: str) -> BatchSource:
        """Open a later version of the store, whose class numbers mean what they did."""
        other = self._reopened(f"{self._given[0]}@{version}")
        try:
            require_numbers(other.version, self.version)
        except UsageError:
            other.close()
            raise
        return other

    def _await_build(self) -> None:
        live = self._source.live
        version = live.await_commit(self._closed) if isinstance(live, LiveVersion) else live
        if version is not None:
            self._use(self._reopened(version))
            self._source.marks_repeated = True  # as in the first epoch

    def _reopened(self, uri: str | Version) -> BatchSource:
        """Open another version with the same options.

        All iterators end, and the part of the disk cache of the one before is free.
        """
        end_all(self._iterators)
        before = self._source.reader
        if before.cached:
            before.cached.close()
        fields = list(before.arrays)
        options = self._options.model_copy(update={"fields": fields})
        other = BatchSource(uri, options, self._closed)
        if other.reader.columns != before.columns:
            other.close()
            raise UsageError(
                f"{other.version.folder} has {other.reader.columns}, and this loader reads "
                f"{before.columns}"
            )
        return other

    def _follow_to(self, version: str) -> None:
        """With `refresh`, read another version of the store."""
        if self._store and version != self.version.id:
            self._use(self._reopened(f"{self._given[0]}@{version}"))

    def _use(self, source: BatchSource) -> None:
        self._earlier = self.counters
        self._source.stream.close()
        self._source = source

    # --- position and statistics ---

    unit = "sample"

    @property
    def counters(self) -> Counters:
        return self._earlier.plus(self._source.counters)

    def _turn(self, epoch: int) -> int:
        return epoch if self.order.by_epoch else 0

    @property
    def together(self) -> int:
        """Batches that are made at a time: small ones come in rounds of so many."""
        return self._source.stream.together

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop: what it has received, not what is being read ahead.

        `sample` counts the rows that all ranks have received of the epoch, and `batch` the steps.
        """
        batch = self._reached[1] // self.order.global_batch
        return {**super().state_dict(), "batch": batch}

    def identity(self) -> dict[str, Any]:
        return self._source.identity()

    def settings(self, place: int = 0) -> dict[str, Any]:
        return self._source.settings(place)

    def _remake(self) -> tuple[Any, tuple[Any, ...]]:
        uri, parameters = self._given
        if self._source.live is not None and not self._source.live.committed:
            raise UsageError(
                "a Loader that follows a build is neither copied nor pickled before the build has "
                "ended: make another one where it is used; state_dict() has its position"
            )
        if not (self._store or isinstance(uri, Version) or self.version.foreign):
            options = parameters["storage_options"]
            base, _ = split_uri(uri, options)
            if str(open_folder(base, options)) != self.version.path:  # it is a store
                uri = f"{base}@{self.version.id}"
        begun = self.version.id if self._reached[1] else None
        return _make, (type(self), uri, parameters, self.world_size, begun)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next iterator yields the rest of that epoch.

        Raises
        ------
        UsageError
            The state is of another version or order, by name. `batch_size` and the number of ranks
            may be others: rows that were received do not come again in that epoch, and all others
            do. With `refresh` the version that it names is opened.
        """
        require_same({}, state, "this loader")
        version = state.get("version")
        if self._source.live is not None and state.get("order") != BY_SHARD:
            self._await_build()  # a later epoch has another order
        elif self._store and isinstance(version, str):
            require_same({**self.identity(), "version": version}, state, "this loader")
            self._follow_to(version)
        require_same(self.identity(), state, "this loader")
        epoch, place = self._position(state, self.order.count)
        if not self.order.batches(place):  # the rest is less than a batch
            epoch, place = epoch + 1, 0
        self._choose(epoch, place)

    def close(self) -> None:
        """End running iterators and their threads, and release their memory.

        An iterator that is at work on another thread, or calls this itself, ends with its batch.
        """
        super().close()
        self._source.close()


def _make(
    kind: type[Loader], uri: Any, options: dict[str, Any], ranks: int, begun: str | None
) -> Loader:
    """Make a loader for `copy` and `pickle`, of one in a process that is one of so many ranks, and
    within an epoch of a version."""
    loader = kind.__new__(kind)
    Loader.__init__(loader, uri, **options)
    loader._ranks = ranks
    if begun is not None:
        loader._follow_to(begun)
    return loader


def _open_store(uri: str, options: LoaderOptions) -> Folder:
    """Open a store to follow its commits; raise `UsageError` if it is one version, or none."""
    folder = open_folder(uri, options.storage_options)
    if split_uri(uri, options.storage_options)[1] is not None or folder.exists(ROOT):
        raise UsageError(
            f"{shown(uri)} is one version, or no store of precache; refresh='epoch' follows a store"
        )
    return folder


def _supports_live(version: Version, options: LoaderOptions) -> bool:
    """Return whether a version can be followed while it is built.

    Raises
    ------
    UsageError
        The options need one whose build has ended, and it has not.
    """
    why = ""
    if options.shuffle is False:
        why = (
            "rows come shard by shard, mixed within each, while a version is built; leave out "
            "shuffle=False, or follow=True"
        )
    shuffle = isinstance(options.shuffle, Buckets | Weighted)
    for name, given in (
        ("shuffle", shuffle),
        ("refresh", options.refresh is not None),
        ("resident", options.reading.resident is not None),
        ("rows", options.rows is not None),
    ):
        if given:
            why = (
                f"{name} needs a finished version, and this one is followed while it is built; "
                f"leave out {name}, or follow=True"
            )
    if why and not version.committed:
        raise UsageError(why)
    return not why
