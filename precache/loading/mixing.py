"""`mix`: batches of several loaders as one iterable, in exact proportions in every epoch."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from precache.errors import UsageError
from precache.loading.loader import Loader
from precache.loading.loop import Arrived, Loop, require_same
from precache.runtime.integers import whole
from precache.runtime.step_clock import Counters
from precache.sampling.mix_schedule import MixSchedule, shares_of

MIXTURE_STATE_FORMAT = 1


def mix(
    loaders: Sequence[Loader],
    weights: Sequence[float] | None = None,
    *,
    until: str | int = "all",
    seed: int = 0,
) -> Mixture:
    """Mix batches of several loaders; the result replaces a `Loader`.

    Parameters
    ----------
    loaders
        The sources, each with its own store, transform and options. From here on only the mixture
        iterates over them, has a position, and closes them.
    weights
        Each source's share of the steps; by default in proportion to its batches. The proportions
        are exact in every epoch.
    until
        End of an epoch. ``all``: when every source was read to its end; smaller ones begin again,
        in new orders. ``first``: before any source would begin again; the others continue in the
        next epoch where they stopped. Or a number of steps.
    seed
        Decides the order of the sources, together with the epoch.

    Returns
    -------
    Mixture
        Every step is a batch of one source, the same one on all ranks; rows of the sources may
        differ in shape. A dict gets `source`: the number of its loader in `loaders`. A tuple gets
        it at its end. `repeated` marks rows that fill up an epoch of their source, not those of a
        source that begins again.

    Raises
    ------
    UsageError
        The loaders have different ranks, devices or `output`, one is closed or at a position that
        was chosen, an option makes no sense, or a source would have no batch.

    Notes
    -----
    By default an epoch reads every row at least once, as with one loader. For batches with rows of
    every source, iterate over ``zip(*loaders)`` and join them by ``torch.cat``. Each store numbers
    its labels itself: build with ``--classes OTHER.store`` to share the numbers.

    Examples
    --------
    >>> sources = [Loader("photos.store"), Loader("more.store")]  # doctest: +SKIP
    >>> with mix(sources, [0.7, 0.3]) as batches:  # doctest: +SKIP
    ...     for batch in batches:
    ...         step(batch["image"], batch["label"])
    """
    _require_compatible(loaders)
    seed = whole("seed", seed)
    if until not in ("all", "first"):
        if isinstance(until, str):
            raise UsageError(f"until is {until!r}; give all, first, or a number of steps")
        until = whole("until", until, 1)
    schedule = MixSchedule(
        lengths=tuple(map(len, loaders)),
        weights=None if weights is None else tuple(shares_of(weights, len(loaders))),
        until=until,
        seed=seed,
    )
    return Mixture(loaders, schedule)


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
        if loader.closed:
            raise UsageError(f"source {number} is closed; make a new one")
        if type(loader).__iter__ is not Loader.__iter__:
            raise UsageError(
                f"source {number} is a {type(loader).__name__} with an __iter__ of its own, past "
                "which a mixture reads: change batches by transform= of that Loader instead"
            )
        if loader.is_chosen:
            raise UsageError(
                f"source {number} is at a position that was chosen by set_epoch, seek or "
                "load_state_dict, and a mixture reads each source from its start; call these on "
                "the mixture, with its own state"
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
            loader.marks_repeated, loader.is_mixed = marks_repeated, True
        first = self.loaders[0]
        super().__init__(first.device, first.rank, first.world_size, "mixture")

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank and in each epoch."""
        return len(self._schedule)

    def __repr__(self) -> str:
        return f"<precache mixture, {len(self)} batches: {', '.join(map(repr, self.loaders))}>"

    def batches(self, epoch: int, place: int) -> Generator[Arrived, None, None]:
        steps = zip(
            *(column[place:].tolist() for column in self._schedule.epoch(epoch)), strict=True
        )
        with contextlib.ExitStack() as ends:
            reading: dict[int, Generator[Arrived, None, None]] = {}
            for number, (source, *position) in enumerate(steps, place + 1):
                if source not in reading:
                    batches = self._endless(self.loaders[source], *position)
                    reading[source] = ends.enter_context(contextlib.closing(batches))
                arrived = next(reading[source], None)
                if self._closed.is_set():
                    return
                if arrived is None:
                    raise UsageError(
                        f"source {source} of this mixture was closed, and the rest of the epoch "
                        "would lack its rows; close the mixture, which closes its sources"
                    )
                arrived.output[:] = [_add_source(arrived.output.pop(), source)]
                yield arrived._replace(place=number if number < len(self) else None)

    def _endless(self, loader: Loader, epoch: int, batch: int) -> Generator[Arrived, None, None]:
        """Yield batches of a loader from one of them on, epoch after epoch."""
        row = batch * loader.order.global_batch
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
            "weights": schedule.weights and [float(share) for share in schedule.weights],
            "until": schedule.until,
            "seed": schedule.seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop, of all that it has received; one for all ranks."""
        return {**super().state_dict(), "sources": [_identity(loader) for loader in self.loaders]}

    def settings(self, place: int = 0) -> dict[str, Any]:
        sources = {
            f"{name} of source {number}": value
            for number, loader in enumerate(self.loaders)
            for name, value in loader.settings().items()
        }
        return {**self.identity(), "sources": len(self.loaders), **sources}

    def __copy__(self) -> Mixture:
        return copy.deepcopy(self)  # with loaders of its own, as it closes them

    def _remake(self) -> tuple[Any, tuple[Any, ...]]:
        return _made_again, (self.loaders, self._schedule, self._reached[1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next iterator yields the rest of that epoch.

        Raises
        ------
        UsageError
            The state is of another mixture, by name: other sources or another order of them, other
            weights, rule or seed, or another `batch_size` times number of ranks of a source.
        """
        require_same(self.identity(), state, "this mixture")
        sources = state.get("sources")
        if not isinstance(sources, list) or len(sources) != len(self.loaders):
            saved = len(sources) if isinstance(sources, list) else sources
            raise UsageError(
                f"the saved state has sources={saved!r} and this mixture has {len(self.loaders)}"
            )
        for number, (loader, source) in enumerate(zip(self.loaders, sources, strict=True)):
            require_same(_identity(loader), source, f"source {number} of this mixture")
        self._choose(*self._position(state, len(self)))

    def close(self) -> None:
        """End running iterators, and close the loaders, as `Loader.close` does."""
        super().close()
        for loader in self.loaders:
            loader.close()


def _made_again(loaders: Sequence[Loader], schedule: MixSchedule, place: int) -> Mixture:
    """Mix loaders that were copied or unpickled, which may have another number of ranks by now."""
    lengths = tuple(map(len, loaders))
    if place and lengths != schedule.lengths:
        raise UsageError(
            f"a mixture that was pickled within an epoch, with {schedule.lengths} batches of its "
            f"sources, is unpickled where they have {lengths}, as with another number of ranks; "
            "pickle it between epochs, or resume from its state_dict()"
        )
    return Mixture(loaders, replace(schedule, lengths=lengths))


def _identity(loader: Loader) -> dict[str, Any]:
    """Return what decides the batches of a source."""
    return {**loader.identity(), "global_batch": loader.order.global_batch}


def _add_source(batch: Any, source: int) -> Any:
    """Return a batch with the number of its source."""
    if isinstance(batch, Mapping):
        if "source" in batch:
            raise UsageError(
                f"batches of source {source} have a field 'source', under which a mixture gives "
                "the number of the source; leave it out by fields=, or rename it by a transform"
            )
        return {**batch, "source": source}
    if isinstance(batch, tuple):
        return (*batch, source)
    raise UsageError(
        f"the transform of source {source} returns a {type(batch).__name__}; return a dict or a "
        "tuple, to which the number of the source can be added"
    )
