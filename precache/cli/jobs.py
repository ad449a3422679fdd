"""``precache submit | status | cancel``: builds that run on a cluster."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from typing import TYPE_CHECKING, Any

import precache
from precache.cli.build_options import (
    add_build_arguments,
    add_code,
    add_option,
    read_keywords,
    read_recipe,
)
from precache.cli.output import build_json, print_build, print_status, show
from precache.runtime.terminal import say

if TYPE_CHECKING:
    from precache_workers.jobs.submission import ClusterJob
    from precache_workers.planning.request import BuildResult

SERVER = (
    "the cluster's job server, http://head:8265; default RAY_API_SERVER_ADDRESS or RAY_ADDRESS, "
    "else a Ray on this machine"
)


def add_job_commands(commands: Any) -> None:
    """Add the commands to the subparsers of ``precache``."""
    submit = commands.add_parser(
        "submit",
        help="build as a job of a cluster",
        description=inspect.cleandoc(_submit.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_code(add_build_arguments(submit, address=SERVER))
    status = commands.add_parser(
        "status", help="state of a job, or builds of a store", description=_status.__doc__
    )
    status.add_argument("what", metavar="JOB|STORE")
    add_option(status, "storage_options")
    cancel = commands.add_parser("cancel", help="stop a job", description=_cancel.__doc__)
    cancel.add_argument("job", metavar="JOB")
    for command in (status, cancel):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        command.add_argument("--address", help=SERVER)
    for command, function in ((submit, _submit), (status, _status), (cancel, _cancel)):
        command.set_defaults(run=function)


def _submit(options: argparse.Namespace) -> int:
    """Build on a cluster, through its job server; the job continues without this command.

    The arguments are those of build; paths of SOURCE and STORE are the cluster's. The recipe and
    the files of --labels and --classes are sent, and your own modules with --code. If the same
    build is submitted again while it runs, its job is followed; after it ended, it is continued.
    """
    keywords = read_keywords(options, address="auto")
    keywords["address"] = getattr(options, "address", None)
    job = precache.submit(
        options.source, options.store, read_recipe(options), code=options.code, **keywords
    )
    return show_job(job, options.no_wait, options.json)


def show_job(job: ClusterJob, no_wait: bool, as_json: bool) -> int:
    """Print a job's id, or follow the job and print its results; returns the exit status."""
    if no_wait:
        show(as_json, _job_json(job), lambda: say(job.id))
        return 0

    def print_result(result: BuildResult) -> None:
        data = {**_job_json(job), "result": build_json(result)}
        show(as_json, data, lambda: print_build(result))
        sys.stdout.flush()

    was = "is under way already" if job.attached else "is submitted"
    _say(f"precache: job {job.id} {was}")
    try:
        job.wait(_say, print_result)
    except KeyboardInterrupt:
        _say(f"precache: the job goes on; to see how far it is: {job.status_command()}")
        return 130
    return 0


def _say(line: str) -> None:
    say(line, stderr=True)


def _job_json(job: ClusterJob) -> dict[str, Any]:
    return {"job": job.id, "address": job.address, "attached": job.attached}


def _status(options: argparse.Namespace) -> int:
    """Show a job of precache submit: its state, last line of progress and reason of a failure.
    Or show a store, without asking a cluster: its current version and the builds that have begun.
    """
    keywords = {"address": options.address, "storage_options": dict(options.storage_options)}
    status = precache.status(options.what, **keywords)
    show(options.json, dataclasses.asdict(status), lambda: print_status(status))
    return 0


def _cancel(options: argparse.Namespace) -> int:
    """Stop a job of precache submit. Its complete shards are kept; submit it again to continue."""
    status = precache.cancel(options.job, address=options.address)
    show(options.json, dataclasses.asdict(status), lambda: print_status(status))
    return 0
