"""Versions, their differences and their removal as text, for people."""

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
"""Columns that are flush right."""

_KINDS = {
    "added": "added",
    "removed": "removed",
    "changed": "with other bytes",
    "touched": "with the same bytes at another time",
    "relabelled": "of another class",
    "failed": "that are holes since",
    "mended": "that are holes no more",
    "moved": "in another row",
}


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        say(line.rstrip())


def print_inventory(found: Inventory) -> None:
    """A line for each version, the current one marked, and one for each that is unfinished."""
    now = time.time()
    rows = [
        (
            "*" if each.current else "",
            each.version[:12],
            ago(now - each.committed),
            "" if each.rows is None else f"{each.rows:,}",
            "" if each.holes is None else f"{each.holes:,}",
            size(each.nbytes),
            size(each.shared_nbytes) if each.shared_nbytes else "",
            each.recipe or each.problem,
        )
        for each in found.versions
    ]
    _say([f"{found.store}: {size(found.nbytes)}; * is current"])
    if rows:
        _say(_columns([_HEAD, *rows]))
    _say(map(_unfinished, found.unfinished))


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            text.rjust(width) if number in _NUMBERS else text.ljust(width)
            for number, (text, width) in enumerate(cells)
        )


def _unfinished(each: Unfinished) -> str:
    done = "a copy, or left over"
    if each.build is not None:
        shards = "?" if each.build.shards is None else f"{each.build.shards:,}"
        done = f"{each.build.done:,} of {shards} shards"
    return (
        f"unfinished: {each.version[:12]}: {done}, {size(each.nbytes)}; last sign of life "
        f"{ago(each.idle_seconds)}"
    )


def print_used(used: Used) -> None:
    """Which version is current."""
    if used.previous == used.version:
        _say([f"version {used.version[:12]} is current already"])
    else:
        before = "" if used.previous is None else f"; before it was {used.previous[:12]}"
        _say([f"version {used.version[:12]} is current{before}"])


def print_collected(done: Collected) -> None:
    """What went or would go, what stays, and the bytes that this frees."""
    verb = "would remove" if done.dry_run else "removed"
    for gone in done.removed:
        bytes_ = size(gone.nbytes)
        if gone.freed_nbytes != gone.nbytes:
            bytes_ += f", {size(gone.nbytes - gone.freed_nbytes)} of it held by others too"
        _say([f"{verb} {gone.version[:12]}: {gone.why}; {bytes_}"])
    _say(f"kept {each.version[:12]}: {each.why}" for each in done.kept)
    _say(f"{verb} what a build or a copy left in {version[:12]}" for version in done.swept)
    would = "would free" if done.dry_run else "freed"
    _say([f"{would} {size(done.freed_nbytes)}" if done.removed else "nothing to remove"])


def print_difference(found: Difference) -> None:
    """Each kind of difference below its heading; nothing of what is the same."""
    _say([f"from {found.before[:12]} to {found.after[:12]}"])
    samples = [
        line
        for kind, words in _KINDS.items()
        for line in _samples(words, getattr(found.samples, kind))
    ]
    classes = [
        f"{words}: {', '.join(names)}"
        for words, names in (
            ("added", found.classes_added),
            ("removed", found.classes_removed),
            ("with other numbers", found.classes_renumbered),
        )
        if names
    ]
    parts = {
        "recipe": list(map(_change, found.recipe)),
        "stored": list(map(_change, found.layout)),
        "samples": samples,
        "classes": classes,
        "libraries": list(map(_change, found.libraries)),
    }
    for heading, lines in parts.items():
        if lines:
            _say([heading, *(f"  {line}" for line in lines)])
    if not any(parts.values()):
        _say(["nothing differs"])


def _change(each: Change) -> str:
    if each.before is None:
        return f"{each.what}: {_value(each.after)}, which was not there"
    if each.after is None:
        return f"{each.what}: {_value(each.before)} is gone"
    return f"{each.what}: {_value(each.before)} → {_value(each.after)}"


def _value(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


def _samples(words: str, keys: KeyChange) -> Iterable[str]:
    if keys.count:
        more = f" … and {keys.count - len(keys.examples):,} more"
        rest = more if keys.count > len(keys.examples) else ""
        yield f"{keys.count:,} {words}: {', '.join(keys.examples)}{rest}"
