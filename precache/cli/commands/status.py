"""``precache status``."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING

import precache
from precache.cli.arguments import add_common, add_job_address
from precache.cli.output import show
from precache.runtime.terminal import say_rows
from precache.store.build_status import StoreStatus
from precache.units import duration

if TYPE_CHECKING:
    from precache_workers.jobs.submission import JobStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="JOB|STORE")
    add_common(parser)
    add_job_address(parser)


def run(options: argparse.Namespace) -> None:
    """Show a job of precache submit: its state, last line of progress and reason of a failure.
    Or show a store, without asking a cluster: its current version and the builds that have begun.
    """
    keywords = {"address": options.address, "storage_options": dict(options.storage_options)}
    status = precache.status(options.what, **keywords)
    show(options.json, dataclasses.asdict(status), lambda: print_status(status))


def print_status(status: JobStatus | StoreStatus) -> None:
    """Print how far a job of a cluster is, or the builds of a store."""
    if isinstance(status, StoreStatus):
        _print_store(status)
    else:
        _print_job(status)


def _print_job(status: JobStatus) -> None:
    ended = status.ended or time.time()
    rows = [("job", status.job), ("store", status.store), ("state", status.state.lower())]
    if status.started is not None:
        rows.append(("since", _time(status.started)))
        rows.append(("took" if status.ended else "for", duration(ended - status.started)))
    if status.state in ("PENDING", "RUNNING"):
        rows.append(("progress", status.progress))
    if status.state == "FAILED":
        rows.append(("reason", status.reason))
    if status.state in ("FAILED", "STOPPED"):
        rows.append(("next", "what is done is kept; submit the same build again to continue it"))
    say_rows(rows)


def _print_store(status: StoreStatus) -> None:
    current = "none yet"
    if status.version is not None and status.committed is not None:
        current = f"{status.version}, committed {_time(status.committed)}"
    rows = [("store", status.store), ("current version", current)]
    for build in status.building:
        shards = "?" if build.shards is None else f"{build.shards:,}"
        of_rows = "" if build.rows is None else f", {build.rows:,} rows in all"
        idle = "" if build.idle_seconds is None else f"; idle for {duration(build.idle_seconds)}"
        rows.append(
            (f"building {build.version[:8]}", f"{build.done:,} of {shards} shards{of_rows}{idle}")
        )
    say_rows(rows)


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
