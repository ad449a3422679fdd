"""The command ``precache refresh``: fresh variants, one child version after another."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import precache
from precache.build_options import add_placement, add_storage_option
from precache.jobs import refreshes
from precache.report import build_json, print_refreshed, show


def add_refresh(commands: Any) -> None:
    """Add the command to the subparsers of ``precache``."""
    command = commands.add_parser(
        "refresh",
        help="make fresh variants of a store's samples",
        description=inspect.cleandoc(_refresh.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("store", metavar="STORE", help="folder of the store (path or URL)")
    command.add_argument(
        "--source",
        metavar="SOURCE",
        default="",
        help="where the samples are; default what the current version was built from",
    )
    command.add_argument(
        "--times", type=int, metavar="N", help="child versions; default 1, with --every no end"
    )
    command.add_argument(
        "--every", metavar="TIME", help="between the beginnings of two, such as 30m; default 0"
    )
    run = command.add_argument_group("running")
    where = "local (a Ray of our own, default), serial (no Ray), auto or ray://host:port"
    run.add_argument("--address", default="local", help=where)
    run.add_argument("--cpus", type=int, metavar="N", help="CPUs of a local Ray; default all")
    run.add_argument(
        "--max-failures",
        type=int,
        metavar="N",
        help="holes allowed; default 1%%, at least 5, and as many as there were",
    )
    run.add_argument(
        "--no-space-check", action="store_true", help="begin though the disk seems too small"
    )
    add_placement(command.add_argument_group("on a cluster that is joined"))
    add_storage_option(run)
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    run.add_argument("--json", action="store_true", help="one JSON object a line for each version")
    command.set_defaults(run=_refresh)


def _refresh(options: argparse.Namespace) -> int:
    """Make a child of STORE's current version, and make it current: of every field with variants
    the oldest is dropped and a fresh one computed, all others are linked.

    The rows are those of the current version; build first where the source changed. Killed, the
    same command continues. A Loader with refresh="epoch" reads what is current; versions that
    were replaced stay until precache gc removes them.
    """
    sys.path.append(str(Path.cwd()))  # where a user's own functions and datasets are
    for result in refreshes(
        options.store,
        options.source or None,
        times=options.times,
        every=options.every,
        address=options.address,
        cpus=options.cpus,
        max_failures=options.max_failures,
        check_space=not options.no_space_check,
        cpus_per_task=options.cpus_per_task,
        memory_per_task=options.memory_per_task,
        node_resources=dict(options.node_resources),
        node_labels=dict(options.node_labels),
        nice=options.nice,
        progress=not options.quiet,
        storage_options=dict(options.storage_options),
    ):
        fields = precache.open(result.path, None, dict(options.storage_options)).fields
        several = {name: field for name, field in fields.items() if field.variants > 1}
        data = {**build_json(result), "fields": {n: asdict(each) for n, each in several.items()}}
        show(options.json, data, functools.partial(print_refreshed, result, several))
        sys.stdout.flush()
    return 0
