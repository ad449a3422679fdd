"""Quantities as text, for people."""

from __future__ import annotations

import time
from datetime import timedelta


def size(nbytes: float) -> str:
    """Format bytes in decimal units, with three digits."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def ms(seconds: float) -> str:
    """Format seconds as a number of milliseconds, without the unit."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def number(value: float) -> str:
    """A number with about three digits: 1,234, 12.3, 0.05."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else f"{value:.1g}"


def ago(seconds: float) -> str:
    """Format an age in the largest unit of which it has at least two."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{int(seconds // unit)} {name} ago"
    return "just now" if seconds < 2 else f"{int(seconds)} seconds ago"


def clock_duration(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds: 0:02:05."""
    return str(timedelta(seconds=round(seconds)))


def local_time(seconds: float) -> str:
    """Format a Unix time as date and time of this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
