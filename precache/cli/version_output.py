"""Versions of a store, their differences and their removal, printed as text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from precache.maintenance.diff import Change, Difference, KeyChange
from precache.maintenance.gc import Collected, ago
from precache.maintenance.versions import Inventory, Unfinished, Used
from precache.runtime.terminal import say
from precache.units import size

_HEAD = ("", "version", "committed", "rows", "holes", "size", "shared", "recipe")
_NUMBERS = range(3, 7)
"""Columns that are aligned to the right."""

_KINDS = {
    "added": "added",
    "removed": "removed",
    "changed": "with other bytes",
    "touched": "with the same bytes and another time",
    "relabelled": "of another class",
    "failed": "that became holes",
    "mended": "that are no longer holes",
    "moved": "in another row",
}


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        say(line.rstrip())


def print_inventory(inventory: Inventory) -> None:
    """Print a line for each version, the current one marked, and for each unfinished one."""
    now = time.time()
    rows = [
        (
            "*" if summary.current else "",
            summary.version[:12],
            ago(now - summary.committed),
            "" if summary.rows is None else f"{summary.rows:,}",
            "" if summary.holes is None else f"{summary.holes:,}",
            size(summary.nbytes),
            size(summary.shared_nbytes) if summary.shared_nbytes else "",
            summary.recipe or summary.problem,
        )
        for summary in inventory.versions
    ]
    _say([f"{inventory.store}: {size(inventory.nbytes)}; * is current"])
    if rows:
        _say(_columns([_HEAD, *rows]))
    _say(map(_unfinished, inventory.unfinished))


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            text.rjust(width) if number in _NUMBERS else text.ljust(width)
            for number, (text, width) in enumerate(cells)
        )


def _unfinished(version: Unfinished) -> str:
    done = "a copy, or left over"
    if version.build is not None:
        shards = "?" if version.build.shards is None else f"{version.build.shards:,}"
        done = f"{version.build.done:,} of {shards} shards"
    return (
        f"unfinished: {version.version[:12]}: {done}, {size(version.nbytes)}; last heartbeat "
        f"{ago(version.idle_seconds)}"
    )


def print_used(used: Used) -> None:
    """Print which version is current."""
    if used.previous == used.version:
        _say([f"version {used.version[:12]} is current already"])
    else:
        before = "" if used.previous is None else f"; before it was {used.previous[:12]}"
        _say([f"version {used.version[:12]} is current{before}"])


def print_collected(result: Collected) -> None:
    """Print the versions that were or would be removed, those that stay, and the bytes freed."""
    verb = "would remove" if result.dry_run else "removed"
    for removed in result.removed:
        bytes_ = size(removed.nbytes)
        if removed.freed_nbytes != removed.nbytes:
            shared = size(removed.nbytes - removed.freed_nbytes)
            bytes_ += f", {shared} of it shared with other versions"
        _say([f"{verb} {removed.version[:12]}: {removed.why}; {bytes_}"])
    _say(f"kept {kept.version[:12]}: {kept.why}" for kept in result.kept)
    _say(f"{verb} remains of a build or a copy in {version[:12]}" for version in result.swept)
    freed = "would free" if result.dry_run else "freed"
    _say([f"{freed} {size(result.freed_nbytes)}" if result.removed else "nothing to remove"])


def print_difference(difference: Difference) -> None:
    """Print each kind of difference below its heading."""
    _say([f"from {difference.before[:12]} to {difference.after[:12]}"])
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
            ("with other numbers", difference.classes_renumbered),
        )
        if names
    ]
    parts = {
        "recipe": list(map(_change, difference.recipe)),
        "stored": list(map(_change, difference.layout)),
        "samples": samples,
        "classes": classes,
        "libraries": list(map(_change, difference.libraries)),
    }
    for heading, lines in parts.items():
        if lines:
            _say([heading, *(f"  {line}" for line in lines)])
    if not any(parts.values()):
        _say(["nothing differs"])


def _change(change: Change) -> str:
    if change.before is None:
        return f"{change.what}: {_value(change.after)}, added"
    if change.after is None:
        return f"{change.what}: {_value(change.before)}, removed"
    return f"{change.what}: {_value(change.before)} → {_value(change.after)}"


def _value(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


def _samples(words: str, keys: KeyChange) -> Iterable[str]:
    if keys.count:
        more = f" … and {keys.count - len(keys.examples):,} more"
        rest = more if keys.count > len(keys.examples) else ""
        yield f"{keys.count:,} {words}: {', '.join(keys.examples)}{rest}"
