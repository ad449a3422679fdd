"""Quantities as text, for people."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Format bytes in decimal units, with three digits."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")
