"""Plan requests for parts of objects: neighbours are read together."""

from __future__ import annotations

from collections.abc import Sequence

from precache.storage.base import Range


def coalesce(parts: Sequence[Range], gap: int, limit: int) -> list[tuple[Range, list[int]]]:
    """Join parts of the same object that lie close together.

    Parameters
    ----------
    gap
        Bytes between two parts that are read rather than requested apart.
    limit
        Bytes of a joint range at most; a larger part stays alone.

    Returns
    -------
    list
        Each range to read, with the numbers of the parts that it covers, sorted.
    """
    joined: list[tuple[Range, list[int]]] = []
    for number in sorted(range(len(parts)), key=parts.__getitem__):
        name, start, length = parts[number]
        if joined:
            (before, first, size), numbers = joined[-1]
            whole = max(size, start + length - first)
            if name == before and start <= first + size + gap and whole <= limit:
                numbers.append(number)
                joined[-1] = (name, first, whole), numbers
                continue
        joined.append(((name, start, length), [number]))
    return joined
