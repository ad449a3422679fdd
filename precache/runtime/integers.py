"""Whole numbers as callers give them, taken as plain ints where they enter.

NumPy's and torch's integers hash, print and pickle in other ways than `int`: an order or a draw
seeded with one would be another, and `torch.load` refuses a state that holds one. So every public
function takes its integers through `whole`, and what lies behind it has `int` alone. A bool is
refused, since it stands in the place of another parameter where a number is meant.
"""

from __future__ import annotations

import operator
from typing import Any

from precache.errors import UsageError


def whole(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int.

    Raises
    ------
    UsageError
        It is no integer, or below `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        above = "" if least is None else f" from {least} up"
        raise UsageError(f"{name} is {value!r}; give a whole number{above}")
    return number


def sides(name: str, value: Any) -> tuple[int, int]:
    """(height, width) of a pair, or of one number for both.

    Raises
    ------
    UsageError
        They are no integers from 1 up.
    """
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    return whole(name, pair[0], 1), whole(name, pair[1], 1)
