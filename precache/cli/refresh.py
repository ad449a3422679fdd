"""The command ``precache refresh``: fresh variants, one child version after another."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from dataclasses import asdict
from typing import Any

import precache
from precache.building.refresh import refreshes
from precache.cli.build_options import (
    add_code,
    add_run_functions,
    add_running_options,
    import_from_here,
    running_keywords,
)
from precache.cli.jobs import WHERE, show_job
from precache.cli.output import build_json, print_refreshed, show
from precache.errors import UsageError


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
        help="where the samples are; default what the current version was built from, as the "
        "store's log of commits says",
    )
    command.add_argument(
        "--times", type=int, metavar="N", help="child versions; default 1, with --every no end"
    )
    command.add_argument(
        "--every", metavar="TIME", help="between the beginnings of two, such as 30m; default 0"
    )
    where = (
        "local (a Ray of our own, default), serial (no Ray), auto or ray://host:port; with "
        f"--submit, that {WHERE}"
    )
    failures = "default 1%%, at least 5, and as many as there were"
    add_running_options(command, None, where, failures)
    add_run_functions(command)
    job = command.add_argument_group("as a job of a cluster")
    job.add_argument(
        "--submit", action="store_true", help="have a cluster do it, as precache submit does"
    )
    add_code(job)
    command.set_defaults(run=_refresh)


def _refresh(options: argparse.Namespace) -> int:
    """Make a child of STORE's current version, and make it current: of every field with variants
    the oldest is dropped and a fresh one computed, all others are linked.

    The rows are those of the current version; build first where the source changed. Killed, the
    same command continues. A Loader with refresh="epoch" reads what is current; versions that
    were replaced stay until precache gc removes them.

    What comes out of a store is data: where its recipe names functions, or its log a python:
    source, they run only with --run-functions.
    """
    what = {
        "source": options.source or None,
        "times": options.times,
        "every": options.every,
        "run_functions": options.run_functions,
        **running_keywords(options),
    }
    if options.submit:
        job = precache.submit_refresh(options.store, code=options.code, **what)
        return show_job(job, options.no_wait, options.json)
    if options.code or options.no_wait:
        raise UsageError("--code and --no-wait are for a job of a cluster; give --submit with them")
    import_from_here(options.source, options.run_functions)
    for result in refreshes(options.store, **{**what, "address": options.address or "local"}):
        fields = precache.open(result.path, None, what["storage_options"]).fields
        several = {name: field for name, field in fields.items() if field.variants > 1}
        data = {**build_json(result), "fields": {n: asdict(each) for n, each in several.items()}}
        show(options.json, data, functools.partial(print_refreshed, result, several))
        sys.stdout.flush()
    return 0
