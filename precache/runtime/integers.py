"""Validation of whole numbers from callers, as plain ints.

NumPy's and torch's integers hash, print and pickle differently from `int`: an order or a draw
seeded with one would differ, and `torch.load` refuses a state that holds one. So every public
function converts its integers with `whole`, and private code has `int` alone. A bool is refused:
it is usually an argument in the wrong position.
"""

from __future__ import annotations

import operator
from typing import Any

from precache.errors import UsageError


def whole(name: str, value: Any, minimum: int | None = None) -> int:
    """Convert `value` to an int.

    Raises
    ------
    UsageError
        It is no integer, below `minimum`, or a size that 64 bits do not hold.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and not minimum <= number < 2**63):
        end = ", below 2**63" if number is not None and number >= 2**63 else ""
        limit = "" if minimum is None else f" from {minimum} up{end}"
        raise UsageError(f"{name} is {value!r}; give a whole number{limit}")
    return number


def sides(name: str, value: Any) -> tuple[int, int]:
    """Convert a pair, or one number for both, to (height, width).

    Raises
    ------
    UsageError
        They are no integers from 1 up.
    """
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    return whole(name, pair[0], 1), whole(name, pair[1], 1)
