"""The command ``precache refresh``: fresh variants, one child version after another."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import precache
from precache.building.refresh import refreshes
from precache.cli.build_options import (
    add_code,
    add_option,
    add_options,
    import_from_here,
    read_keywords,
)
from precache.cli.jobs import SERVER, show_job
from precache.cli.output import build_json, print_refreshed, show
from precache.errors import UsageError
from precache_workers.planning.options import RunOptions


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
    add_options(
        command,
        RunOptions,
        address=f"{RunOptions.model_fields['address'].description}; with --submit, {SERVER}",
        max_failures="holes allowed; default 1% of the samples, at least 5, and as many as there "
        "were",
    )
    add_option(command, "run_functions")
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
    address = getattr(options, "address", None)
    if options.submit:
        keywords = read_keywords(options, RunOptions, address="auto")
        keywords |= {"address": address, "times": options.times, "every": options.every}
        job = precache.submit_refresh(
            options.store, options.source or None, code=options.code, **keywords
        )
        return show_job(job, options.no_wait, options.json)
    if options.code or options.no_wait:
        raise UsageError("--code and --no-wait are for a job of a cluster; give --submit with them")
    keywords = read_keywords(options, RunOptions)
    print_refreshes(
        options.store, options.source or None, options.json, options.times, options.every, keywords
    )
    return 0


def print_refreshes(
    store: str,
    source: str | None,
    as_json: bool,
    times: int | None,
    every: float | str | None,
    keywords: Mapping[str, Any],
) -> None:
    """Refresh, and print each child version when it is complete."""
    import_from_here(source, keywords.get("run_functions", False))
    for result in refreshes(store, source, times=times, every=every, **keywords):
        version = precache.open(result.path, None, dict(keywords.get("storage_options", ())))
        fields = {n: field for n, field in version.fields.items() if field.variants > 1}
        data = {**build_json(result), "fields": {n: asdict(each) for n, each in fields.items()}}
        show(as_json, data, functools.partial(print_refreshed, result, fields))
        sys.stdout.flush()
