"""The commands ``precache ls | diff | use | gc``: the versions of a store."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from precache.cli.build_options import add_option
from precache.cli.output import show
from precache.cli.version_output import (
    print_difference,
    print_gc,
    print_listing,
    print_used,
)
from precache.maintenance.diff import diff
from precache.maintenance.gc import gc
from precache.maintenance.versions import use, versions


def add_version_commands(commands: Any) -> None:
    """Add the commands to the subparsers of ``precache``."""
    ls = commands.add_parser("ls", help="list the versions of a store", description=_ls.__doc__)
    ls.add_argument("store", metavar="STORE")
    differ = commands.add_parser("diff", help="compare two versions", description=_diff.__doc__)
    for name in ("before", "after"):
        differ.add_argument(
            name, metavar=name.upper(), help="STORE@3f2a, or a store for its current version"
        )
    make = commands.add_parser("use", help="make a version current", description=_use.__doc__)
    make.add_argument("version", metavar="STORE@VERSION")
    clean = commands.add_parser("gc", help="remove old versions", description=_gc.__doc__)
    clean.add_argument("store", metavar="STORE")
    clean.add_argument(
        "--keep",
        type=int,
        default=2,
        metavar="N",
        help="number of newest versions to keep, including the current one; default 2",
    )
    clean.add_argument(
        "--older-than",
        default="7d",
        metavar="AGE",
        help="time since another version replaced them, such as 12h or 4w; default 7d",
    )
    clean.add_argument(
        "--dry-run",
        action="store_true",
        help="only print what would be removed, by this machine's clock",
    )
    for command, run in ((ls, _ls), (differ, _diff), (make, _use), (clean, _gc)):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        add_option(command, "storage_options")
        command.set_defaults(run=run)


def _ls(options: argparse.Namespace) -> int:
    """List versions with age, rows, size and recipe, and unfinished builds and copies. The total
    counts bytes that versions share by hard links once.
    """
    listing = versions(options.store, dict(options.storage_options))
    show(options.json, dataclasses.asdict(listing), lambda: print_listing(listing))
    return 0


def _diff(options: argparse.Namespace) -> int:
    """Compare recipes op by op, samples by key, classes and libraries. The versions may be in
    different stores.
    """
    difference = diff(options.before, options.after, dict(options.storage_options))
    show(options.json, dataclasses.asdict(difference), lambda: print_difference(difference))
    return 0


def _use(options: argparse.Namespace) -> int:
    """Make a committed version current, if it is complete. Processes that have a version open
    keep it.
    """
    used = use(options.version, dict(options.storage_options))
    show(options.json, dataclasses.asdict(used), lambda: print_used(used))
    return 0


def _gc(options: argparse.Namespace) -> int:
    """Remove versions that are not current, not among the newest, and were replaced longer ago than
    --older-than; and unfinished builds and copies that have not changed for as long. Ages are
    measured with the store's own times, and only folders that identify themselves as versions are
    removed. gc does not see readers: let --older-than be longer than a training takes.
    """
    done = gc(
        options.store,
        options.keep,
        options.older_than,
        options.dry_run,
        dict(options.storage_options),
    )
    data = {**dataclasses.asdict(done), "freed_nbytes": done.freed_nbytes}
    show(options.json, data, lambda: print_gc(done))
    return 0
