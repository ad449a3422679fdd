"""``precache ls``."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterable, Sequence

from precache.cli.arguments import add_common
from precache.cli.output import show
from precache.maintenance.versions import StoreListing, Unfinished, versions
from precache.runtime.terminal import say
from precache.units import ago, size

_HEAD = ("", "version", "committed", "rows", "holes", "size", "shared", "recipe")
_NUMBERS = range(3, 7)
"""Columns that are right-aligned."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")
    add_common(parser)


def run(options: argparse.Namespace) -> None:
    """List versions with age, rows, size and recipe, and unfinished builds and copies. The total
    counts bytes that versions share by hard links once.
    """
    listing = versions(options.store, dict(options.storage_options))
    show(options.json, dataclasses.asdict(listing), lambda: _print(listing))


def _print(listing: StoreListing) -> None:
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
    say(f"{listing.store}: {size(listing.nbytes)}; * marks the current version")
    for line in _columns([_HEAD, *rows]) if rows else ():
        say(line.rstrip())
    for version in listing.unfinished:
        say(_unfinished(version))


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
