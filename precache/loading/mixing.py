"""`mix`: batches of several loaders as one iterable, in exact proportions in every epoch."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from precache.codecs import kernels
from precache.errors import UsageError
from precache.loading.loader import Loader
from precache.loading.loop import Arrived, Counters, Loop, require_same
from precache.loading.slots import SlotPool
from precache.loading.tuple_batch import TupleBatch
from precache.runtime.integers import whole
from precache.sampling.mix_schedule import MixSchedule, Start, shares_of
from precache.transforms import LENGTH

log = logging.getLogger(__name__)

MIXTURE_STATE_FORMAT = 1

POOLED_NBYTES = 1 << 20
"""Smallest field, in bytes of a batch, that goes into pooled memory: small ones are often kept."""

SLOTS = 3
"""A batch with the caller, one in preparation, and a spare one."""


def mix(
    loaders: Sequence[Loader],
    weights: Sequence[float] | None = None,
    *,
    by: str = "batch",
    until: str | int = "all",
    seed: int = 0,
) -> Mixture:
    """Mix batches of several loaders; the result replaces a `Loader`.

    Parameters
    ----------
    loaders
        The sources, each with its own store, transform and options. From here on only the mixture
        may iterate over them, and it closes them.
    weights
        With ``by="batch"``: each source's share of the steps; by default in proportion to its
        batches. The proportions are exact in every epoch.
    by
        ``batch``: every step is a batch of one source, the same one on all ranks; rows of the
        sources may differ in shape. ``sample``: every batch has rows of all sources, as many of
        each as its loader's `batch_size`, one after another; fields, shapes and dtypes must agree.
    until
        End of an epoch. ``all``: when every source was read to its end; smaller ones begin again,
        in new orders. ``first``: before any source would begin again; the others continue in the
        next epoch where they stopped. Or a number of steps.
    seed
        Decides the order of the sources, together with the epoch.

    Returns
    -------
    Mixture
        A dict gets `source`: the number of its loader in `loaders` (``by="batch"``, an int), or one
        for each row (``by="sample"``, int64 (N,)). A tuple gets it at its end. `repeated` marks
        rows that fill up an epoch of their source, not those of a source that begins again.

    Raises
    ------
    UsageError
        The loaders have different ranks, devices or `output`, an option makes no sense, or a source
        would have no batch.

    Notes
    -----
    By default an epoch reads every row at least once, as with one loader. If the losses of the
    sources differ much, the loss jumps between steps by batch; then mix by sample. Each store
    numbers its labels itself: build with ``--classes OTHER.store`` to share the numbers.

    Examples
    --------
    >>> sources = [Loader("photos.store"), Loader("more.store")]  # doctest: +SKIP
    >>> with mix(sources, [0.7, 0.3]) as batches:  # doctest: +SKIP
    ...     for batch in batches:
    ...         step(batch["image"], batch["label"])
    """
    _require_compatible(loaders)
    if by not in ("batch", "sample"):
        raise UsageError(f"by is {by!r}; choose one of batch, sample")
    seed = whole("seed", seed)
    if until not in ("all", "first"):
        if isinstance(until, str):
            raise UsageError(f"until is {until!r}; give all, first, or a number of steps")
        until = whole("until", until, 1)
    if by == "sample" and weights is not None:
        raise UsageError(
            "weights are shares of the steps, and by='sample' takes rows of every source at each; "
            "choose the batch_size of each loader instead"
        )
    schedule = MixSchedule(
        lengths=tuple(map(len, loaders)),
        weights=None if weights is None else tuple(shares_of(weights, len(loaders))),
        until=until,
        seed=seed,
        together=by == "sample",
        sizes=tuple(loader.order.global_batch for loader in loaders),
    )
    mixture = Mixture(loaders, schedule)
    _warn_of_classes(loaders)
    return mixture


def _warn_of_classes(loaders: Sequence[Loader]) -> None:
    """Log once that a class number means different names in two sources."""
    classes = [loader.version.classes for loader in loaders]
    for (one, names), (other, others) in itertools.combinations(enumerate(classes), 2):
        for number, (name, another) in enumerate(zip(names, others, strict=False)):
            if name != another:
                log.warning(
                    "class %d is %r in source %d of the mixture, and %r in source %d; to share the "
                    "numbers, build one with --classes and the store of the other",
                    *(number, name, one, another, other),
                )
                return


def _require_compatible(loaders: Any) -> None:
    if not isinstance(loaders, Sequence) or not all(isinstance(x, Loader) for x in loaders):
        raise UsageError(f"mix takes a list of Loaders, not {loaders!r}")
    if not loaders:
        raise UsageError("there is no loader to mix; give at least one")
    if len(set(map(id, loaders))) < len(loaders):
        raise UsageError("a loader comes twice; open its store by another Loader")
    first = loaders[0]
    for number, loader in enumerate(loaders):
        one, other = (f"rank {x.rank} of {x.world_size} on {x.device}" for x in (first, loader))
        if one != other:
            raise UsageError(f"source 0 is for {one}, and source {number} for {other}")
        if loader.output != first.output:
            raise UsageError(
                f"source 0 has output={first.output!r}, and source {number} has "
                f"output={loader.output!r}; give all the same output="
            )
        if loader.follows:
            raise UsageError(
                f"source {number} has refresh='epoch' or follows a build, and the shares of a "
                "mixture are those of versions that stay; leave that out"
            )


class Mixture(Loop):
    """Batches of several loaders, as `mix` returns them; one iterator is one epoch.

    Attributes
    ----------
    loaders
        The sources.
    counts
        Batches of each in an epoch; divided by ``len(loader)``, how often it is read.
    """

    unit = "batch"

    def __init__(self, loaders: Sequence[Loader], schedule: MixSchedule) -> None:
        self.loaders = tuple(loaders)
        self.counts = schedule.counts
        self._schedule = schedule
        self._closed = threading.Event()
        marks_repeated = any(loader.marks_repeated for loader in self.loaders)
        for loader in self.loaders:
            loader.marks_repeated = marks_repeated
        first = self.loaders[0]
        super().__init__(first.device, first.rank, first.world_size, "mixture")

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank, and in each but the rest of one.

        An epoch that is resumed with other batch sizes has more or fewer.
        """
        return len(self._schedule)

    def batches(self, epoch: int, place: int) -> Generator[Arrived, None, None]:
        schedule, join = self._schedule, _Joiner()
        together, steps_left = schedule.together, schedule.steps(epoch)
        width = len(self.loaders) if together else 1
        columns = [column[place * width :] for column in schedule.epoch(epoch)]
        steps = zip(*(column.reshape(-1, width).tolist() for column in columns), strict=True)
        with contextlib.ExitStack() as ends:
            reading: dict[int, Generator[Arrived, None, None]] = {}
            for number, (sources, *positions) in enumerate(steps, place + 1):
                for source, *position in zip(sources, *positions, strict=True):
                    if source not in reading:
                        batches = self._endless(self.loaders[source], *position)
                        reading[source] = ends.enter_context(contextlib.closing(batches))
                arrived = [one for source in sources for one in islice(reading[source], 1)]
                if self._closed.is_set() or len(arrived) < width:
                    return
                rows, nbytes, ready = (
                    sum(column) for column in list(zip(*arrived, strict=True))[1:4]
                )
                parts = [one.output.pop() for one in arrived]
                parts[:] = [join(parts) if together else _add_source(parts[0], sources[0])]
                following = number if number < steps_left else None
                yield Arrived(following, rows, nbytes, ready, parts)

    def _endless(self, loader: Loader, epoch: int, row: int) -> Generator[Arrived, None, None]:
        """Yield batches of a loader from a position on, epoch after epoch."""
        while not loader.closed:
            yield from loader.batches(epoch, row)
            epoch, row = epoch + 1, 0

    @property
    def counters(self) -> Counters:
        return functools.reduce(Counters.plus, (loader.counters for loader in self.loaders))

    def identity(self) -> dict[str, Any]:
        schedule = self._schedule
        return {
            "format": MIXTURE_STATE_FORMAT,
            "by": "sample" if schedule.together else "batch",
            "weights": schedule.weights and [float(share) for share in schedule.weights],
            "until": schedule.until,
            "seed": schedule.seed,
        }

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator runs; one that was resumed goes on there."""
        start, before = self._schedule.start, self._next[0]
        super().set_epoch(epoch)
        if start and before != self._next[0] <= start.epoch:  # whole, and not the rest of it
            self._schedule = replace(self._schedule, start=None)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop, of all that it has received; one for all ranks."""
        sources = [
            {**loader.identity(), "global_batch": size}
            for loader, size in zip(self.loaders, self._schedule.sizes, strict=True)
        ]
        start = self._schedule.start
        rest = {"start": json.loads(json.dumps(asdict(start)))} if start else {}
        return {**super().state_dict(), "sources": sources, **rest}

    def settings(self, place: int = 0) -> dict[str, Any]:
        sources = {
            f"{name} of source {number}": value
            for number, loader in enumerate(self.loaders)
            for name, value in loader.settings().items()
        }
        start = self._schedule.start
        own = {"sources": len(self.loaders), "start": start and asdict(start)}
        return {**self.identity(), **own, **sources}

    def __copy__(self) -> Mixture:
        return copy.deepcopy(self)  # with loaders of its own, as it closes them

    def _remake(self) -> tuple[Any, tuple[Any, ...]]:
        return Mixture, (self.loaders, self._schedule)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next iterator yields the rest of that epoch.

        Raises
        ------
        UsageError
            The state is of another mixture, by name: other sources or another order of them, other
            weights, rule or seed. Batch sizes and the number of ranks may be others: rows that were
            received in a pass over a source do not come again in it, and all others do.
        """
        require_same(self.identity(), state, "this mixture")
        sources = state.get("sources")
        if not isinstance(sources, list) or len(sources) != len(self.loaders):
            saved = len(sources) if isinstance(sources, list) else sources
            raise UsageError(
                f"the saved state has sources={saved!r} and this mixture has {len(self.loaders)}"
            )
        for number, (loader, source) in enumerate(zip(self.loaders, sources, strict=True)):
            require_same(loader.identity(), source, f"source {number} of this mixture")
        orders = [loader.order for loader in self.loaders]
        own = replace(self._schedule, lengths=tuple(map(len, self.loaders)), start=None)
        sizes = [whole("global_batch", source.get("global_batch"), 1) for source in sources]
        lengths = tuple(order.batches_of(size) for order, size in zip(orders, sizes, strict=True))
        start = _start_of(state.get("start"))
        saved = replace(own, lengths=lengths, sizes=tuple(sizes), start=start)
        epoch, place = self._position(state, saved.steps)
        if saved.sizes != own.sizes:
            left = [order.batches for order in orders]
            saved, place = saved.resumed(own, epoch, place, left), 0
            epoch += not saved.steps(epoch)
        self._schedule = saved
        self._choose(epoch, place)

    def close(self) -> None:
        """End running iterators, and close the loaders, as `Loader.close` does."""
        super().close()
        for loader in self.loaders:
            loader.close()


def _start_of(saved: Any) -> Start | None:
    """Return the start that a state has, if it was taken after one with other batch sizes."""
    try:
        return TypeAdapter[Start | None](Start | None).validate_python(saved)
    except ValidationError:
        raise UsageError(
            f"the saved state has start={saved!r:.60}; give what state_dict() returned"
        ) from None


def _add_source(batch: Any, source: int) -> Any:
    """Return a batch with the number of its source."""
    if isinstance(batch, Mapping):
        _require_no_source(batch, source)
        return {**batch, "source": source}
    if isinstance(batch, tuple):
        parts = (*batch, source)
        return batch.with_parts(parts) if isinstance(batch, TupleBatch) else parts
    raise UsageError(
        f"the transform of source {source} returns a {type(batch).__name__}; return a dict or a "
        "tuple, to which the number of the source can be added"
    )


def _require_no_source(batch: Mapping[Any, Any], source: int) -> None:
    if "source" in batch:
        raise UsageError(
            f"batches of source {source} have a field 'source', under which a mixture gives the "
            "number of the source; leave it out by fields=, or rename it by a transform"
        )


class _Joiner:
    """Joins batches into one, on the CPU in memory that is reused once it is free."""

    def __init__(self) -> None:
        self._pools: dict[Any, SlotPool] = {}

    def __call__(self, parts: Sequence[Any]) -> Any:
        """Join the rows of all parts, and add the source of each row."""
        named = [_named(part, source) for source, part in enumerate(parts)]
        kinds = [
            {name: _kind(values, part, name) for name, values in part.items()} for part in named
        ]
        for source, kind in enumerate(kinds):
            for name in dict.fromkeys([*kinds[0], *kind]):
                if kinds[0].get(name) != kind.get(name):
                    raise UsageError(
                        f"{name} is {kinds[0].get(name)} in source 0 and {kind.get(name)} in "
                        f"source {source}; make them agree, or mix with by='batch'"
                    )
        batch = {name: self._concat(name, [part[name] for part in named]) for name in named[0]}
        tensors = [next(filter(torch.is_tensor, part.values())) for part in named]
        numbers = [torch.full((len(v),), n, device=v.device) for n, v in enumerate(tensors)]
        batch["source"] = torch.cat(numbers)
        if not isinstance(parts[0], tuple):
            return batch
        repeated = batch.pop("repeated", None)
        joined = tuple(batch.values())
        if repeated is not None:
            return TupleBatch.of(joined, repeated)
        return parts[0].with_parts(joined) if isinstance(parts[0], TupleBatch) else joined

    def _concat(self, name: Any, parts: list[Any]) -> Any:
        """Concatenate lists, or tensors as `torch.cat` does; padded ones to the longest.

        For large ones `torch.cat` costs five times as much: fresh memory, and threads that wait for
        each other.
        """
        if isinstance(parts[0], list):
            return [row for part in parts for row in part]
        if len({part.shape[1:] for part in parts}) > 1:  # padded, as `_kind` found
            longest = max(part.shape[1] for part in parts)
            parts = [_lengthened(part, longest) for part in parts]
        first, nbytes = parts[0], sum(part.nbytes for part in parts)
        if first.device.type != "cpu" or nbytes < POOLED_NBYTES:
            return torch.cat(parts)
        pool = self._pools.get(name)
        if pool is None or pool.nbytes < nbytes:
            pool = self._pools[name] = SlotPool(nbytes, SLOTS)
        memory = pool.acquire()[:nbytes]
        flat = [part.contiguous().view(-1).view(torch.uint8).numpy().data for part in parts]
        kernels.join(flat, memory)
        joined = torch.from_numpy(memory).view(first.dtype)
        return joined.view(sum(map(len, parts)), *first.shape[1:])


def _named(batch: Any, source: int) -> dict[Any, torch.Tensor]:
    """Return a batch as name -> tensor; members of a tuple are named by their index."""
    named = dict(enumerate(batch)) if isinstance(batch, tuple) else batch
    if isinstance(batch, TupleBatch) and vars(batch).get("repeated") is not None:
        named["repeated"] = batch.repeated
    fits = isinstance(named, Mapping) and any(map(torch.is_tensor, named.values()))
    if not fits or not all(isinstance(v, torch.Tensor | list) for v in named.values()):
        raise UsageError(
            f"the transform of source {source} does not return a dict or tuple of tensors, so it "
            "cannot be mixed within a batch; mix with by='batch'"
        )
    _require_no_source(named, source)
    return dict(named)


def _lengthened(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return padded rows (n, longest, ...) with more zeros behind them."""
    longer = rows.new_zeros((len(rows), length, *rows.shape[2:]))
    longer[:, : rows.shape[1]] = rows
    return longer


def _kind(values: Any, part: Mapping[Any, Any], name: Any) -> str:
    """Describe the rows of a part of a batch, but for their length where they differ in it."""
    rows, listed = values, ""
    if isinstance(values, list):
        rows, listed = values[0], "a list of "
        if not torch.is_tensor(rows):
            return f"{listed}{type(rows).__name__}"
    axes = tuple(rows.shape[1:])
    if listed or f"{name}{LENGTH}" in part:
        axes = ("length", *axes[not listed :])
    return f"{listed}{str(rows.dtype).removeprefix('torch.')} ({', '.join(map(str, axes))})"
