"""Quantities as text for people, and ages from text."""

from __future__ import annotations

import re
import time
from decimal import Decimal

from precache.errors import UsageError

_AGE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw])\s*", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def plain(value: float, digits: int) -> str:
    """Format a number with about so many significant digits, never with an exponent."""
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def size(nbytes: float) -> str:
    """Format bytes in decimal units, with three digits."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{plain(nbytes, 3)} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def ms(seconds: float) -> str:
    """Format seconds as a number of milliseconds, without the unit."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def in_ms(seconds: float) -> str:
    """Format seconds as milliseconds with three digits, and the unit."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{plain(1e3 * seconds, 3)} ms"


def duration(seconds: float) -> str:
    """Format seconds with two digits, in a suitable unit: 0.25 s, 4.2 min, 3.1 h, 2.4 days."""
    for unit, length, most in (("s", 1, 90), ("min", 60, 5400), ("h", 3600, 172800)):
        if seconds < most:
            return f"{plain(seconds / length, 2)} {unit}"
    return f"{plain(seconds / 86400, 2)} days"


def parse_age(text: str) -> float:
    """Return the seconds of an age such as ``30s``, ``5m``, ``2h``, ``3d`` or ``1w``, or of ``0``.

    Raises
    ------
    UsageError
        It is not an age.
    """
    if text.strip() == "0":
        return 0.0
    match = _AGE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{text!r} is not an age; give a number with a unit (s, m, h, d or w), such as 7d"
        )
    return float(match[1]) * _SECONDS[match[2].lower()]


def ago(seconds: float) -> str:
    """Format an age."""
    return "just now" if seconds < 2 else f"{duration(seconds)} ago"


def number(value: float) -> str:
    """A number with about three digits: 1,234, 12.3, 0.05."""
    return plain(value, 3 if value >= 0.01 else 1)


def counted(count: int, noun: str) -> str:
    """Format a number of things: 1 row, 1,234 rows, 2 batches."""
    plural = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{plural}"


def local_time(seconds: float) -> str:
    """Format a Unix time as date and time of this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
