"""The position of a training loop, and the check of a saved state against the loop's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precache.errors import UsageError
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


def require_same(own: Mapping[str, Any], state: Mapping[str, Any], owner: str) -> None:
    """Refuse a state that was saved with other settings.

    Raises
    ------
    UsageError
        The first setting that differs, with both values.
    """
    for name, value in own.items():
        if name not in state or state[name] != value:
            way = "open the same version with the same settings, or start a new epoch"
            if name == "version" and state.get(name):
                way = f"open that version, as 'STORE@{state[name]}', or start a new epoch"
            raise UsageError(
                f"the saved state has {name}={state.get(name)!r} and {owner} has {value!r}; {way}"
            )
