"""``precache ls | diff | use | gc``: the versions of a store."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from precache.cli.build_options import add_option
from precache.cli.output import show
from precache.cli.version_output import (
    print_collected,
    print_difference,
    print_inventory,
    print_used,
)
from precache.maintenance.diff import diff
from precache.maintenance.gc import gc
from precache.maintenance.versions import use, versions


def add_version_commands(commands: Any) -> None:
    """The parsers of this module's commands."""
    ls = commands.add_parser("ls", help="the versions of a store", description=_ls.__doc__)
    ls.add_argument("store", metavar="STORE")
    differ = commands.add_parser(
        "diff", help="what differs between two versions", description=_diff.__doc__
    )
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
        help="versions that stay whatever their age, the current one among them; default 2",
    )
    clean.add_argument(
        "--older-than",
        default="7d",
        metavar="AGE",
        help="since another took their place, such as 12h or 4w; default 7d",
    )
    clean.add_argument(
        "--dry-run",
        action="store_true",
        help="tell what would go by this machine's clock, write and remove nothing",
    )
    for command, run in ((ls, _ls), (differ, _diff), (make, _use), (clean, _gc)):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        add_option(command, "storage_options")
        command.set_defaults(run=run)


def _ls(options: argparse.Namespace) -> int:
    """Versions with their age, rows, bytes and recipe, and builds that are under way or were
    left. Bytes that versions share by hard links are counted once in the sum.
    """
    found = versions(options.store, dict(options.storage_options))
    show(options.json, dataclasses.asdict(found), lambda: print_inventory(found))
    return 0


def _diff(options: argparse.Namespace) -> int:
    """Recipe op by op, samples by key, classes, libraries; the versions may be of two stores."""
    found = diff(options.before, options.after, dict(options.storage_options))
    show(options.json, dataclasses.asdict(found), lambda: print_difference(found))
    return 0


def _use(options: argparse.Namespace) -> int:
    """Make a version current that was committed before, if all of it is there. What has a version
    open keeps it.
    """
    used = use(options.version, dict(options.storage_options))
    show(options.json, dataclasses.asdict(used), lambda: print_used(used))
    return 0


def _gc(options: argparse.Namespace) -> int:
    """Remove versions that are neither current nor among the newest, and that another replaced
    long ago; and what builds and copies left that have shown no sign of life for as long. The
    store's own times count, and only what says that it is a version goes. Readers leave no mark:
    let --older-than be longer than a training takes.
    """
    done = gc(
        options.store,
        options.keep,
        options.older_than,
        options.dry_run,
        dict(options.storage_options),
    )
    data = {**dataclasses.asdict(done), "freed_nbytes": done.freed_nbytes}
    show(options.json, data, lambda: print_collected(done))
    return 0
