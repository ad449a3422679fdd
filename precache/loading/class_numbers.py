"""Comparison of the class numbers of the versions that a process reads."""

from __future__ import annotations

import logging
import weakref

from precache.errors import UsageError
from precache.store.commit_log import short
from precache.store.version import Version

log = logging.getLogger(__name__)

_read = set[weakref.ref[Version]]()
"""Versions that are read. Listed in one step, as other threads add to it."""
_said = set[frozenset[str]]()
"""Pairs of paths, of which the log has a warning."""


def compare_classes(version: Version) -> None:
    """Log once if a number means another class in another version that is read at the same time.

    Of versions that have no class in common, which may belong to several models, one is named.
    """
    own_names, said = {*version.classes}, False
    for ref in list(_read):
        if (other := ref()) is None:
            continue
        pair = frozenset((version.path, other.path))
        if said and own_names.isdisjoint(other.classes):
            continue
        names = zip(version.classes, other.classes, strict=False)
        for number, (own, another) in enumerate(names if pair not in _said else ()):
            if own != another:
                said = True
                _said.add(pair)
                log.warning(
                    "class %d is %r in %s, and %r in %s: what learns one is wrong on the other; to "
                    "share the numbers, build one with --classes and the store of the other",
                    number,
                    own,
                    version.path,
                    another,
                    other.path,
                )
                break
    _read.add(weakref.ref(version, _read.discard))


def require_numbers(version: Version, before: Version) -> None:
    """Raise `UsageError` if class numbers of a version mean something else than those before."""
    old, new = list(before.classes), list(version.classes)
    if new[: len(old)] != old:
        number = next(n for n, name in enumerate(old) if new[n : n + 1] != [name])
        now = repr(new[number]) if number < len(new) else "none"
        store = before.path.removesuffix(before.id).rstrip("/")
        raise UsageError(
            f"class {number} is {now} in {version.path}, and {old[number]!r} in {before.path}, "
            f"which this loader has read so far: build with --classes {store}@{short(before.id)}, "
            "which keeps the numbers, or make a new Loader"
        )
