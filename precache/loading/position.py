"""A training loop: its iterators, its position, and the check of a saved state."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Self

from precache.errors import UsageError
from precache.loading.options import LoaderOptions
from precache.runtime.integers import whole


class Position:
    """The epoch and batch that a loop has reached, and those that its next iterator begins with.

    Parameters
    ----------
    length
        Batches of an epoch.

    Attributes
    ----------
    chosen
        Whether the position of the latest iterator was chosen, and does not follow the one before.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._reached = self._next = (0, 0)
        self.chosen = self._is_next_chosen = False

    def choose(self, epoch: int) -> None:
        """Begin with `epoch`; an epoch that was resumed in its middle continues there."""
        epoch = whole("epoch", epoch, 0)
        if epoch != self._next[0]:
            self._next = (epoch, 0)
        self._reached = self._next
        self._is_next_chosen = True

    def begin(self) -> tuple[int, int]:
        """Return epoch and first batch of a new iterator; the one after it runs the next epoch."""
        self._reached = epoch, _ = self._next
        self._next = (epoch + 1, 0)
        self.chosen, self._is_next_chosen = self._is_next_chosen, False
        return self._reached

    def received(self, epoch: int, batches: int) -> None:
        """Record that the caller has `batches` of an epoch; its end is the start of the next."""
        self._reached = (epoch, batches) if batches < self._length else (epoch + 1, 0)

    def saved(self) -> dict[str, int]:
        """Return what the caller has received, as entries of a state."""
        epoch, batch = self._reached
        return {"epoch": epoch, "batch": batch}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved.

        Raises
        ------
        UsageError
            An epoch has no such batch.
        """
        epoch, batch = state.get("epoch"), state.get("batch")
        try:
            position = whole("epoch", epoch, 0), whole("batch", batch, 0)
        except UsageError:
            position = (0, self._length)
        if position[1] >= self._length:
            raise UsageError(
                f"the saved state is at epoch {epoch!r}, batch {batch!r}; an epoch has "
                f"{self._length}"
            )
        self.seek(*position)

    def resize(self, length: int) -> None:
        """Set the batches of an epoch."""
        self._length = length

    def seek(self, epoch: int, batch: int) -> None:
        """Begin the next iterator at a batch of an epoch."""
        self._reached = self._next = (whole("epoch", epoch, 0), whole("batch", batch, 0))
        self._is_next_chosen = True


def require_state(state: Any) -> None:
    """Raise `UsageError` for what is no state."""
    if not isinstance(state, Mapping):
        raise UsageError(f"the saved state is {state!r:.60}; give what state_dict() returned")


def require_same(own: Mapping[str, Any], state: Mapping[str, Any], owner: str) -> None:
    """Refuse a state that was saved with other settings.

    Raises
    ------
    UsageError
        It is no state; or the first setting that differs, with both values.
    """
    require_state(state)
    for name, value in own.items():
        if name not in state or state[name] != value:
            way = "open the same version with the same settings, or start a new epoch"
            if name == "version" and state.get(name):
                way = f"open that version, as 'STORE@{state[name]}', or start a new epoch"
            raise UsageError(
                f"the saved state has {name}={state.get(name)!r} and {owner} has {value!r}; {way}"
            )


OF_DATALOADER = ("sampler", "batch_sampler", "collate_fn", "num_workers")


class Epochs:
    """Iterates over batches; one iterator is one epoch. The base of `Loader` and `Mixture`."""

    _position: Position

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._iterators: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()

    def _run(self) -> Generator[Any, None, None]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator runs."""
        self._position.choose(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._closed.is_set():
            raise UsageError(f"this {type(self).__name__} is closed; make a new one")
        iterator = self._run()
        self._iterators.add(iterator)
        return iterator

    def __getitem__(self, index: Any) -> NoReturn:
        """Refuse an index, and a `DataLoader` around this."""
        raise UsageError(
            f"a {type(self).__name__} makes batches itself, on threads of its own: iterate over it "
            "in place of a DataLoader; a CachedDataset has samples by index, for any DataLoader"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} has threads and memory of this process, and is neither "
            "copied nor pickled: make another one where it is used; state_dict() has its position"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse options, which decide when this is made, unless a subclass iterates itself."""
        option = name in LoaderOptions.__dataclass_fields__
        option |= name in OF_DATALOADER and value is not None
        if option and type(self).__iter__.__module__.startswith(__package__):
            raise UsageError(
                f"{name} was set on a {type(self).__name__}, and its batches would not follow it: "
                f"give {name} when it is made, if it has such an option"
            )
        super().__setattr__(name, value)

    def close(self) -> None:
        """End running iterators."""
        self._closed.set()
        end_all(self._iterators)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end_all(iterators: Iterable[Generator[Any, None, None]]) -> None:
    """End iterators, with their threads; those that have not begun may still begin."""
    begun = [one for one in iterators if inspect.getgeneratorstate(one) != inspect.GEN_CREATED]
    for iterator in begun:
        with contextlib.suppress(ValueError):  # it is at work
            iterator.close()
