"""``precache view``."""

from __future__ import annotations

import argparse
import sys

import precache
from precache.cli.arguments import add_storage_options, add_store, import_from_here, take_defaults
from precache.cli.build_options import add_option, read_keywords
from precache_workers.planning.options import SourceOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    what = parser.add_argument_group("what is shown")
    what.add_argument(
        "--source",
        metavar="SOURCE",
        help="the source of the store: raw files, and the result of each op, are shown beside the "
        "stored rows",
    )
    add_option(what, "run_functions")
    for name in SourceOptions.model_fields:
        add_option(what, name)
    what.add_argument("--rows", type=int, metavar="N", help="rows of a page; default %(default)s")
    what.add_argument("--find", metavar="TEXT", help="rows whose keys begin with TEXT")
    what.add_argument(
        "--class",
        dest="label",
        metavar="NAME",
        help="rows of a class, by name or number",
    )
    take_defaults(parser, precache.view, "rows", "find", "label")
    add_storage_options(what)
    where = parser.add_argument_group("output")
    where.add_argument("--out", metavar="FILE", help="write one page that needs no server")
    where.add_argument("--port", type=int, default=0, metavar="N", help="default any free port")
    where.add_argument("--open", action="store_true", help="open the address in a browser")


def run(options: argparse.Namespace) -> None:
    """Show the samples, classes, statistics, holes and build of a store in a browser.

    Prints an address of this machine and serves pages there until Ctrl-C. Search rows by key and
    class. With --source, the page of a row compares it with its raw file and the result of each op.
    For a store on another machine, forward the port: ssh -L 8000:127.0.0.1:8000.
    """
    import_from_here(options.source, options.run_functions)
    view = precache.view(
        options.store,
        options.source,
        rows=options.rows,
        find=options.find,
        label=options.label,
        run_functions=options.run_functions,
        storage_options=dict(options.storage_options),
        **read_keywords(options, SourceOptions),
    )
    if options.out is None:
        view.serve(options.port, browser=options.open)
    else:
        view.write(options.out)
        sys.stderr.write(f"wrote {options.out}\n")
