"""Versions, their differences and their removal as text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from precache.maintenance.diff import Difference, KeyChange
from precache.maintenance.gc import GcResult, ago
from precache.maintenance.versions import StoreListing, Unfinished, UseResult
from precache.runtime.terminal import say
from precache.units import size

_HEAD = ("", "version", "committed", "rows", "holes", "size", "shared", "recipe")
_NUMBERS = range(3, 7)
"""Columns that are right-aligned."""

_KINDS = {
    "added": "added",
    "removed": "removed",
    "changed": "with changed bytes",
    "touched": "with the same bytes and a new time",
    "relabelled": "with another class",
    "failed": "that became holes",
    "mended": "that are no longer holes",
    "moved": "in other rows",
}


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        say(line.rstrip())


def print_listing(listing: StoreListing) -> None:
    """Print a table of versions, and a line for each unfinished build or copy."""
    now = time.time()
    rows = [
        (
            "*" if version.current else "",
            version.version[:12],
            ago(now - version.committed),
            "" if version.rows is None else f"{version.rows:,}",
            "" if version.holes is None else f"{version.holes:,}",
            size(version.nbytes),
            size(version.shared_nbytes) if version.shared_nbytes else "",
            version.recipe or version.problem,
        )
        for version in listing.versions
    ]
    _say([f"{listing.store}: {size(listing.nbytes)}; * marks the current version"])
    if rows:
        _say(_columns([_HEAD, *rows]))
    _say(map(_unfinished, listing.unfinished))


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            text.rjust(width) if number in _NUMBERS else text.ljust(width)
            for number, (text, width) in enumerate(cells)
        )


def _unfinished(version: Unfinished) -> str:
    kind, done = "copy or removal", ""
    if version.build is not None:
        shards = "?" if version.build.shards is None else f"{version.build.shards:,}"
        kind, done = "build", f"{version.build.done:,} of {shards} shards, "
    return (
        f"unfinished {kind} of {version.version[:12]}: {done}{size(version.nbytes)}; last change "
        f"{ago(version.idle_seconds)}"
    )


def print_used(result: UseResult) -> None:
    """Print which version is current."""
    if result.previous == result.version:
        _say([f"version {result.version[:12]} is already current"])
    else:
        previous = "" if result.previous is None else f"; it replaces {result.previous[:12]}"
        _say([f"version {result.version[:12]} is now current{previous}"])


def print_gc(done: GcResult) -> None:
    """Print which versions are removed, which stay, and the bytes freed."""
    removed, kept, freed = "removed", "kept", "freed"
    if done.dry_run:
        removed, kept, freed = "would remove", "would keep", "would free"
    for removal in done.removed:
        nbytes = size(removal.nbytes)
        if removal.freed_nbytes != removal.nbytes:
            nbytes += f", of which {size(removal.nbytes - removal.freed_nbytes)} stay in use"
        _say([f"{removed} {removal.version[:12]}: {removal.why}; {nbytes}"])
    _say(f"{kept} {version.version[:12]}: {version.why}" for version in done.kept)
    _say(f"{removed} temporary files of {version[:12]}" for version in done.swept)
    _say([f"{freed} {size(done.freed_nbytes)}" if done.removed else "nothing to remove"])


def print_difference(difference: Difference) -> None:
    """Print each kind of difference below its heading."""
    _say([f"changes from {difference.before[:12]} to {difference.after[:12]}"])
    samples = [
        line
        for kind, words in _KINDS.items()
        for line in _samples(words, getattr(difference.samples, kind))
    ]
    classes = [
        f"{words}: {', '.join(names)}"
        for words, names in (
            ("added", difference.classes_added),
            ("removed", difference.classes_removed),
            ("renumbered", difference.classes_renumbered),
        )
        if names
    ]
    parts = {
        "recipe": list(map(str, difference.recipe)),
        "layout": list(map(str, difference.layout)),
        "samples": samples,
        "classes": classes,
        "libraries": list(map(str, difference.libraries)),
    }
    for heading, lines in parts.items():
        if lines:
            _say([heading, *(f"  {line}" for line in lines)])
    if not any(parts.values()):
        _say(["no differences"])


def _samples(words: str, some: KeyChange) -> Iterable[str]:
    if some.count:
        more = f" … and {some.count - len(some.examples):,} more"
        rest = more if some.count > len(some.examples) else ""
        yield f"{some.count:,} {words}: {', '.join(some.examples)}{rest}"
