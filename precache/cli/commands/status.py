"""``precache status``."""

from __future__ import annotations

import argparse

import precache
from precache.cli.arguments import add_common, add_job_address
from precache.cli.output import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="JOB|STORE")
    add_common(parser)
    add_job_address(parser)


def run(options: argparse.Namespace) -> None:
    """Show a job of precache submit: its state, last line of progress and reason of a failure.

    For a store, show its current version and the builds that have begun; no cluster is contacted.
    """
    keywords = {"address": options.address, "storage_options": dict(options.storage_options)}
    status = precache.status(options.what, **keywords)
    show(options.json, status)
