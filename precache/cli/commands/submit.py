"""``precache submit``."""

from __future__ import annotations

import argparse

import precache
from precache.cli.arguments import SERVER, add_code
from precache.cli.build_options import add_build_arguments, read_keywords, read_recipe
from precache.cli.output import show_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_code(add_build_arguments(parser, address=SERVER))


def run(options: argparse.Namespace) -> int:
    """Build on a cluster, through its job server; the job continues without this command.

    The arguments are those of build; paths of SOURCE and STORE are the cluster's. The recipe and
    the files of --labels and --classes are sent, and your own modules with --code. If the same
    build is submitted again while it runs, its job is followed; after it ended, it is continued.

    example:
      precache submit s3://bucket/photos s3://bucket/photos.store --address http://head:8265
    """
    keywords = read_keywords(options, address="auto")
    keywords["address"] = getattr(options, "address", None)
    job = precache.submit(
        options.source, options.store, read_recipe(options), code=options.code, **keywords
    )
    return show_job(job, options.no_wait, options.json)
