"""The command line: ``precache build | plan | refresh | submit | status | info | verify | …``."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any, NoReturn

import precache
from precache.cli.build_options import (
    add_build_options,
    add_run_functions,
    add_storage_option,
    build_keywords,
    import_from_here,
    read_recipe,
)
from precache.cli.doctor import add_doctor
from precache.cli.jobs import add_job_commands
from precache.cli.output import (
    bench_progress,
    build_json,
    byte_progress,
    print_bench,
    print_build,
    print_info,
    print_transferred,
    print_verified,
    show,
)
from precache.cli.plan import add_plan, show_plan
from precache.cli.refresh import add_refresh
from precache.cli.simulate import add_simulate
from precache.cli.versions import add_version_commands
from precache.errors import PrecacheError, UsageError
from precache.messages import printable, without_secrets
from precache.runtime.terminal import guard_output, say_error

_EPILOG = """\
examples:
  precache doctor photos/ --resize 256 --crop 224 --rate 4000
  precache build photos/ photos.store --resize 256 --crop 224
  precache build photos/ photos.store --recipe recipe.toml --address ray://head:10001
  precache build val/ val.store --resize 256 --crop 224 --classes photos.store
  precache plan photos/ photos.store --resize 256 --crop 224
  precache submit s3://bucket/photos s3://bucket/photos.store --address http://head:8265
  precache refresh photos.store --times 10
  precache info photos.store
  precache verify photos.store@3f2a
  precache bench photos.store --json
  precache view photos.store --source photos/
  precache pull gs://bucket/photos.store --to photos.store
  precache diff photos.store@3f2a photos.store
  precache gc photos.store --keep 2 --older-than 7d --dry-run
  precache simulate --load-ms 2000 --loaders 7 --step-ms 100

exit status: 0 done; 1 failed or incomplete (run it again to continue); 2 bad usage
"""


class _Parser(argparse.ArgumentParser):
    """Quotes no value of an option that it does not know: it may be a secret."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"(invalid choice: '[^'=]*)=.*(' \(choose)", r"\1=…\2", message)
        super().error(printable(without_secrets(message)))


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [found[0] for each in unknown if (found := re.match(r"--[\w-]+|-\w", each))]
        secret = any(each.startswith("--storage") for each in arguments)
        values = "more than are taken" if secret else " ".join(unknown)
        parser.error(f"unrecognized arguments: {' '.join(names) or values}")
    return options


def _parser() -> _Parser:
    parser = _Parser(
        prog="precache",
        description="Decode once, off the training node; train from memory-mapped tensors.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=precache.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_build(commands)
    add_plan(commands)
    add_refresh(commands)
    add_job_commands(commands)
    info = commands.add_parser("info", help="what a store holds", description=_info.__doc__)
    verify = commands.add_parser(
        "verify", help="check every checksum of a store", description=_verify.__doc__
    )
    bench = commands.add_parser(
        "bench", help="measure what reading a store costs here", description=_bench.__doc__
    )
    for command, run in ((info, _info), (verify, _verify), (bench, _bench)):
        command.add_argument("store", metavar="STORE", help="a store, or STORE@3f2a for a version")
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        command.set_defaults(run=run)
    for command in (info, verify, bench):
        add_storage_option(command)
    _add_transfer(commands)
    add_version_commands(commands)
    add_doctor(commands)
    add_simulate(commands)
    _add_view(commands)
    bench.add_argument("--batch-size", type=int, default=256, metavar="N", help="default 256")
    bench.add_argument(
        "--epochs", type=int, default=3, metavar="N", help="epochs after the first; default 3"
    )
    bench.add_argument("--threads", type=int, metavar="N", help="decoding threads")
    bench.add_argument(
        "--cache-dir", metavar="DIR", help="local folder for shards of a remote store"
    )
    bench.add_argument(
        "--cache-limit", metavar="SIZE", help="size limit of that folder, such as 200GB"
    )
    bench.add_argument(
        "--cache-shared",
        action="store_true",
        help="share that folder with the members of its group",
    )
    return parser


def _add_transfer(commands: Any) -> None:
    for name, there in (("pull", "a folder here"), ("push", "another store, path or URL")):
        command = commands.add_parser(
            name, help=f"copy a version to {there}", description=_transfer.__doc__
        )
        command.add_argument("store", metavar="STORE", help="a store, or STORE@3f2a for a version")
        command.add_argument(
            "--to", required=True, metavar="STORE", help=f"{there}; made if missing"
        )
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        add_storage_option(command)
        command.set_defaults(run=_transfer)


def _add_view(commands: Any) -> None:
    view = commands.add_parser(
        "view",
        help="show samples in a browser",
        description=inspect.cleandoc(_view.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    view.add_argument("store", metavar="STORE", help="a store, or STORE@3f2a for a version")
    what = view.add_argument_group("what is shown")
    what.add_argument(
        "--source",
        metavar="SOURCE",
        help="source of the store; shows the raw files and the result of each op beside the "
        "stored rows",
    )
    add_run_functions(what)
    what.add_argument(
        "--rows", type=int, default=24, metavar="N", help="samples per page; default 24"
    )
    what.add_argument("--find", default="", metavar="TEXT", help="keys that start with TEXT")
    what.add_argument(
        "--class",
        dest="label",
        default="",
        metavar="NAME",
        help="rows of one class, by name or number",
    )
    add_storage_option(what)
    where = view.add_argument_group("where")
    where.add_argument(
        "--out", metavar="FILE", help="write one page to FILE instead of serving pages"
    )
    where.add_argument(
        "--port", type=int, default=0, metavar="N", help="port to listen on; default any free one"
    )
    where.add_argument("--open", action="store_true", help="open the page in a browser")
    view.set_defaults(run=_view)


def _add_build(commands: Any) -> None:
    build = commands.add_parser(
        "build",
        help="decode a source into a store",
        description=inspect.cleandoc(_build.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.set_defaults(run=_build)
    where = "local (a Ray of our own, default), serial (no Ray), auto or ray://host:port"
    run = add_build_options(build, "local", where)
    run.add_argument(
        "--dry-run", action="store_true", help="only say what would be done, as precache plan does"
    )


def _build(options: argparse.Namespace) -> int:
    """Decode and resize every sample of SOURCE once, into tensors that training maps.

    Killed or failed, the same command continues it; with nothing changed it does nothing.
    What is not given about the recipe stays as it is: no resize, no crop.
    """
    if options.dry_run:
        show_plan(options, timing=True)
        return 0
    recipe = read_recipe(options)
    import_from_here(options.source, bool(recipe.functions))
    result = precache.build(options.source, options.store, recipe, **build_keywords(options))
    show(options.json, build_json(result), lambda: print_build(result))
    return 0


def _info(options: argparse.Namespace) -> int:
    """What a store holds: fields, rows, holes, classes, statistics, and its recipe."""
    version = precache.open(options.store, None, dict(options.storage_options))
    info = {
        "version": version.id,
        "path": version.path,
        "rows": version.rows,
        "holes": len(version.hole_rows),
        "fields": {name: dataclasses.asdict(field) for name, field in version.fields.items()},
        "classes": version.classes,
        "mean": version.mean,
        "std": version.std,
        "pipeline": version.recipe.to_dict(),
        "libraries": version.attributes.libraries if version.attributes else {},
        "created": version.attributes.created if version.attributes else "",
    }
    show(options.json, info, lambda: print_info(version, info))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Read every byte, check every checksum, and compare the version's metadata with its row table.

    Damage is listed by object and key; the exit status is 1 if there is any.
    """
    from precache.maintenance.verify import verify_version
    from precache.store.open import open_unchecked

    version = open_unchecked(options.store, dict(options.storage_options))
    with byte_progress("Verifying", version, shown=not options.json) as tick:
        found = verify_version(version, tick)
    report = {**dataclasses.asdict(found), "ok": found.ok}
    show(options.json, report, lambda: print_verified(found))
    return 0 if found.ok else 1


def _transfer(options: argparse.Namespace) -> int:
    """Copy a whole version to another store and make it current there.

    Everything is checked on its way. A version that is there whole is only made current, and a
    damaged one stays as it is until a right one takes its place, or in a bucket is mended. Stopped,
    the same command continues.
    """
    from precache.maintenance.transfer import pull

    given = dict(options.storage_options)
    version = precache.open(options.store, None, given)
    with byte_progress("Copying", version, shown=not options.json) as tick:
        done = pull(options.store, options.to, tick, given)
    show(options.json, dataclasses.asdict(done), lambda: print_transferred(done))
    return 0


def _bench(options: argparse.Namespace) -> int:
    """Read shuffled epochs of a store on the CPU, and compare with the machine's copy limit."""
    from precache.diagnosis.bench import bench

    with bench_progress(shown=not options.json) as tick:
        result = bench(
            options.store,
            options.batch_size,
            options.epochs,
            options.threads,
            tick,
            cache_dir=options.cache_dir,
            cache_limit=options.cache_limit,
            cache_shared=options.cache_shared,
            storage_options=dict(options.storage_options),
        )
    show(options.json, dataclasses.asdict(result), lambda: print_bench(result))
    return 0


def _view(options: argparse.Namespace) -> int:
    """Show the contents of a store in a browser: samples, classes, statistics, holes, the build.

    It prints an address on this machine and serves pages there until Ctrl-C. Search rows by key and
    class. With --source, the page of a row compares it with what the ops make of its raw file now.
    For a store on another machine, give --port 8000 and run ssh -L 8000:127.0.0.1:8000 HOST.
    """
    try:
        from precache.viewer.pages import open_pages
        from precache.viewer.search import Query
        from precache.viewer.server import serve, write_page
    except ModuleNotFoundError as error:
        raise UsageError(f"viewing needs {error.name}: pip install 'precache[report]'") from None
    import_from_here(options.source, options.run_functions)
    pages = open_pages(
        options.store,
        options.source,
        options.rows,
        dict(options.storage_options),
        options.run_functions,
    )
    query = Query(options.find, label=options.label)
    if options.out is None:
        serve(pages, query, options.port, browser=options.open)
    else:
        write_page(pages, query, options.out)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a key must not break a terminal of ASCII
    guard_output()
    options = _parsed(sys.argv[1:] if arguments is None else arguments)
    try:
        status: int = options.run(options)
    except PrecacheError as error:
        say_error(error)
        return error.exit_status
    except KeyboardInterrupt:
        sys.stderr.write("precache: interrupted; what was done is kept, run it again to continue\n")
        return 130
    return status
