"""``precache diff``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable

from precache.cli.arguments import add_common
from precache.cli.output import show
from precache.maintenance.diff import Difference, KeyChange, diff
from precache.runtime.terminal import say

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("before", "after"):
        parser.add_argument(
            name, metavar=name.upper(), help="STORE@3f2a, or a store for its current version"
        )
    add_common(parser)


def run(options: argparse.Namespace) -> None:
    """Compare recipes op by op, samples by key, classes and libraries. The versions may be in
    different stores.

    example:
      precache diff photos.store@3f2a photos.store
    """
    difference = diff(options.before, options.after, dict(options.storage_options))
    show(options.json, dataclasses.asdict(difference), lambda: _print(difference))


def _print(difference: Difference) -> None:
    say(f"changes from {difference.before[:12]} to {difference.after[:12]}")
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
            for line in (heading, *(f"  {line}" for line in lines)):
                say(line.rstrip())
    if not any(parts.values()):
        say("no differences")


def _samples(words: str, some: KeyChange) -> Iterable[str]:
    if some.count:
        more = f" … and {some.count - len(some.examples):,} more"
        rest = more if some.count > len(some.examples) else ""
        yield f"{some.count:,} {words}: {', '.join(some.examples)}{rest}"
