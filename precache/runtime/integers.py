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

MOST_SIDE = 1 << 24
"""Most pixels of a side: more than any image has, and few enough to be multiplied."""


def whole(name: str, value: Any, minimum: int | None = None, most: int = 2**63 - 1) -> int:
    """Convert `value` to an int.

    Raises
    ------
    UsageError
        It is no integer, below `minimum`, or, where there is one, above `most`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and not minimum <= number <= most):
        end = f", at most {most:,}" if number is not None and number > most else ""
        limit = "" if minimum is None else f" from {minimum} up{end}"
        raise UsageError(f"{name} is {value!r}; give a whole number{limit}")
    return number


def sides(name: str, value: Any) -> tuple[int, int]:
    """Convert a pair, or one number for both, to (height, width).

    Raises
    ------
    UsageError
        They are no integers from 1 up, or beyond what an image has.
    """
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    return whole(name, pair[0], 1, MOST_SIDE), whole(name, pair[1], 1, MOST_SIDE)
