"""`Loop`: the base of `Loader` and `Mixture`: iterators, position and its state, statistics."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import torch
from torch.utils.data import get_worker_info

from precache.errors import UsageError
from precache.loading.options import FixedOptions
from precache.loading.rank_check import RankCheck
from precache.runtime.integers import whole
from precache.runtime.step_clock import Counters, LoaderStats, stall_clock

log = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """A batch, and what is counted of it.

    Attributes
    ----------
    place
        Where the one after it begins; None after the last of an epoch.
    again
        Its rows that only fill up the epoch.
    repeated
        (N,) bool: True for those; None where there is no such mark.
    output
        A list that holds the batch alone, so that it can be dropped.
    """

    place: int | None
    rows: int
    nbytes: int
    again: int
    repeated: torch.Tensor | None
    output: list[Any]


_first_epochs = set[str]()
"""What decided the rows of loops that read epoch 0 by default, and what the log has said of it."""


class Loop(FixedOptions, ABC):
    """Iterates over batches; one iterator is one epoch.

    A position is an epoch and a place in it, counted in the loop's `unit`.

    Attributes
    ----------
    is_chosen
        True if the user chose a position from which no iterator has begun.
    """

    unit: ClassVar[str]
    is_mixed = False
    """True once a mixture reads this, which then has the position."""

    _closed: threading.Event

    def __init__(self, device: torch.device, rank: int, world_size: int, what: str) -> None:
        self._iterators: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
        # At exit, while modules can still be used, and before what batches are made with is
        # finalized.
        weakref.finalize(self, end_all, self._iterators)
        self._rank, self._world_size = rank, world_size
        self._check = RankCheck(rank, world_size, what, self.unit) if world_size > 1 else None
        self._clock = stall_clock(device)
        self._reported = Counters()
        self._reached = self._next = self._last = (0, 0)
        self.is_chosen = False
        self._mark: torch.Tensor | None = None

    # --- of a kind of loop ---

    @abstractmethod
    def batches(self, epoch: int, place: int) -> Generator[Arrived, None, None]:
        """Yield the batches of an epoch from a place on, for a loop that keeps its position."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """Sums since this was made."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that decides the batches; a state with another identity is refused."""

    @abstractmethod
    def settings(self, place: int = 0) -> dict[str, Any]:
        """All that decides the rows of a rank's steps, by option; ranks must agree in it."""

    @abstractmethod
    def _remake(self) -> tuple[Any, tuple[Any, ...]]:
        """Return a function and its arguments that make a loop of the same options."""

    def _turn(self, epoch: int) -> int:
        """Return the number that ranks of one epoch have in common."""
        return epoch

    @property
    def repeated(self) -> torch.Tensor | None:
        """Mark of the batch that was handed out last: (N,) bool on its device, True for rows that
        only fill up the epoch. None where no row can be, and where a transform left it out."""
        return self._mark

    # --- iterators ---

    def __iter__(self) -> Iterator[Any]:
        if self._closed.is_set():
            raise UsageError(f"this {type(self).__name__} is closed; make a new one")
        self.require_position()
        iterator = self._run()
        self._iterators.add(iterator)
        return iterator

    def _run(self) -> Generator[Any, None, None]:
        if self._closed.is_set():
            return
        # With its first batch, not when it is made: some trainers make one that they never use.
        self._reached = epoch, place = self._next
        self._next = (epoch + 1, 0)
        chosen, self.is_chosen = self.is_chosen, False
        check, turn = self._check, self._turn(epoch)
        passing: AbstractContextManager[None] = contextlib.nullcontext()
        if check:
            passing = check.passing(turn, place, chosen, functools.partial(self.settings, place))
        is_first = not (chosen or epoch or place)
        with (
            passing,
            contextlib.closing(self.batches(epoch, place)) as batches,
            self._reading_first(is_first),
        ):
            self._clock.begin()
            for following, rows, nbytes, _, self._mark, output in batches:
                self._last, place = (epoch, place), following or 0
                self._clock.arrived(rows, nbytes)
                self._reached = (epoch + 1, 0) if following is None else (epoch, following)
                if check and following is None:
                    check.finish(turn)
                yield output.pop()  # without a name, so that a batch that is dropped is freed
                self._clock.requested()
                if check:
                    check.advance()

    @contextlib.contextmanager
    def _reading_first(self, is_first: bool) -> Iterator[None]:
        """Log once that epoch 0 comes again, where a loop is made anew for each epoch."""
        settings = self.settings() if is_first else {"shuffle": False}
        worker, name = get_worker_info(), type(self).__name__
        if not settings.get("shuffle", True) or self._rank or (worker and worker.id):
            yield
            return
        order, why = repr(settings), ""
        if order in _first_epochs:
            why = "as did one before it that read the same rows"
        elif worker:
            why = "in a worker of a DataLoader, which starts its workers anew for each epoch"
        if why and why not in _first_epochs:
            _first_epochs.add(why)
            keep = f"{name} and give persistent_workers=True" if worker else name
            log.warning(
                "a %s begins at epoch 0 %s: epochs of one training would all have the same order "
                "and random numbers. Keep one %s, or call set_epoch(epoch) before each; an "
                "evaluation takes shuffle=False",
                name,
                why,
                keep,
            )
        try:
            yield
        finally:
            if self._last[1] or self._reached[0]:  # more than a look at the first batch
                _first_epochs.add(order)

    def __getitem__(self, index: Any) -> NoReturn:
        """Refuse an index, and a `DataLoader` around this."""
        raise UsageError(
            f"a {type(self).__name__} makes batches itself, on threads of its own: iterate over it "
            "in place of a DataLoader; a CachedDataset has samples by index, for any DataLoader"
        )

    def close(self) -> None:
        """End running iterators."""
        self._closed.set()
        end_all(self._iterators)

    @property
    def closed(self) -> bool:
        """True once it is closed."""
        return self._closed.is_set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- position ---

    def require_position(self) -> None:
        """Raise `UsageError` if a mixture reads this: the position is that of the mixture."""
        if self.is_mixed:
            raise UsageError(
                f"this {type(self).__name__} is a source of a mixture, which alone iterates over "
                "it and has a position: iterate over the mixture, and call set_epoch, state_dict "
                "and load_state_dict on that"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator runs; one that was resumed goes on there."""
        epoch = whole("epoch", epoch, 0)
        self._choose(epoch, self._next[1] if epoch == self._next[0] else 0)

    def _choose(self, epoch: int, place: int) -> None:
        self.require_position()
        self._reached = self._next = (whole("epoch", epoch, 0), place)
        self.is_chosen = True

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop: what it has received, not what is being read ahead."""
        self.require_position()
        epoch, place = self._reached
        return {**self.identity(), "epoch": epoch, self.unit: place}

    def _position(self, state: Mapping[str, Any], length: int) -> tuple[int, int]:
        """Return the epoch and the place of a state, of `length` places of an epoch."""
        epoch, place = state.get("epoch"), state.get(self.unit)
        with contextlib.suppress(UsageError):
            position = whole("epoch", epoch, 0), whole(self.unit, place, 0)
            if position[1] < length:
                return position
        raise UsageError(
            f"the saved state is at epoch {epoch!r}, {self.unit} {place!r}; an epoch has {length}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the options and the position; not the threads and the memory."""
        chosen = self.is_chosen or self._reached != self._next
        position = {"_reached": self._reached, "_next": self._reached, "is_chosen": chosen}
        return (*self._remake(), position)

    # --- statistics ---

    def stats(self) -> LoaderStats:
        """Batches, bytes, waiting and step times, and the threads' CPU time since the last call."""
        before, self._reported = self._reported, self.counters
        new, steps = self._reported.plus(before, -1), self._clock.take()
        compared = self._check.count() if self._check else None
        return dataclasses.replace(steps.stats(new), ranks=self._world_size, compared=compared)


def counters_of(loader: object) -> Counters:
    """Return what a loader has done to make batches; zeros for loaders of others."""
    return loader.counters if isinstance(loader, Loop) else Counters()


def require_same(own: Mapping[str, Any], state: Any, owner: str) -> None:
    """Refuse a state that was saved with other settings.

    Raises
    ------
    UsageError
        It is no state; or the first setting that differs, with both values.
    """
    if not isinstance(state, Mapping):
        raise UsageError(f"the saved state is {state!r:.60}; give what state_dict() returned")
    for name, value in own.items():
        if name not in state or state[name] != value:
            way = "open the same version with the same settings, or start a new epoch"
            if name == "version" and state.get(name):
                way = f"open that version, as 'STORE@{state[name]}', or start a new epoch"
            if name == "global_batch":
                way = (
                    "the sources of a mixture go on with the same batch_size times number of ranks"
                )
            raise UsageError(
                f"the saved state has {name}={state.get(name)!r} and {owner} has {value!r}; {way}"
            )


def end_all(iterators: Iterable[Generator[Any, None, None]]) -> None:
    """End iterators, with their threads; those that have not begun may still begin."""
    begun = [one for one in iterators if inspect.getgeneratorstate(one) != inspect.GEN_CREATED]
    for iterator in begun:
        with contextlib.suppress(ValueError):  # it is at work
            iterator.close()
