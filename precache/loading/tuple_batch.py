"""`TupleBatch`: a batch as a tuple, which knows the rows that only fill up an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch


class TupleBatch(tuple[Any, ...]):
    """A batch of a `Loader` with ``output="tuple"``: (image, label), and a mark beside them.

    It is unpacked and indexed like any tuple. `to` and `pin_memory` keep the mark, also where
    torch, Accelerate or Lightning call them.

    Attributes
    ----------
    repeated
        (N,) bool on the batch's device: True for rows that only fill up the epoch; None where no
        row can be repeated, as with one rank or `drop_last`.

    Raises
    ------
    AttributeError
        `repeated` is read from a tuple that other code made anew from the parts of a batch, or
        that a transform made without it.
    """

    repeated: torch.Tensor | None

    @classmethod
    def of(cls, parts: Iterable[Any], repeated: torch.Tensor | None) -> Self:
        """Return a batch with its mark."""
        batch = cls(parts)
        batch.repeated = repeated
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "repeated":
            raise AttributeError(
                "this tuple was made anew from the parts of a batch, without the mark of repeated "
                "rows. If the Loader's transform left it out, let it return batch['repeated'] as "
                "well; else read batch.repeated from the batch of the Loader, or use output='dict'"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def with_parts(self, parts: Iterable[Any]) -> Self:
        """Return a batch of other parts with the same mark, or without one as this."""
        changed = type(self)(parts)
        if "repeated" in vars(self):
            changed.repeated = self.repeated
        return changed

    def map(self, change: Callable[[Any], Any]) -> Self:
        """Return a batch with `change` applied to its parts and its mark."""
        changed = self.with_parts(map(change, self))
        mark = vars(self).get("repeated")
        if mark is not None:
            changed.repeated = change(mark)
        return changed

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Copy all tensors to a device."""
        return self.map(
            lambda part: (
                part.to(device, non_blocking=non_blocking) if torch.is_tensor(part) else part
            )
        )

    def pin_memory(self) -> Self:
        """Copy all tensors to page-locked memory."""
        return self.map(lambda part: part.pin_memory() if torch.is_tensor(part) else part)
