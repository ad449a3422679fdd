"""``precache cancel``."""

from __future__ import annotations

import argparse

import precache
from precache.cli.arguments import add_job_address, add_json
from precache.cli.output import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB")
    add_json(parser)
    add_job_address(parser)


def run(options: argparse.Namespace) -> None:
    """Stop a job of precache submit. Its complete shards are kept; submit it again to continue."""
    status = precache.cancel(options.job, address=options.address)
    show(options.json, status)
