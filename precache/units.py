"""Quantities as text, for people."""

from __future__ import annotations


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
