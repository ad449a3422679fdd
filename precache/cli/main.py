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
    add_build_arguments,
    add_option,
    import_from_here,
    read_keywords,
    read_recipe,
)
from precache.cli.doctor import add_doctor
from precache.cli.jobs import add_job_commands
from precache.cli.output import (
    bench_progress,
    build_json,
    byte_progress,
    info_json,
    print_bench,
    print_build,
    print_info,
    print_transferred,
    print_verified,
    show,
)
from precache.cli.plan import add_plan, show_plan
from precache.cli.refresh import add_refresh
from precache.cli.run_job import add_job
from precache.cli.simulate import add_simulate
from precache.cli.versions import add_version_commands
from precache.errors import PrecacheError
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

exit status: 0 done; 1 failed or incomplete (run it again to continue); 2 bad usage; 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors show no value of an unknown option, which may be a secret."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"(invalid choice: '[^'=]*)=.*(' \(choose)", r"\1=…\2", message)
        super().error(printable(without_secrets(message)))


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [match[0] for text in unknown if (match := re.match(r"--[\w-]+|-\w", text))]
        secret = any(text.startswith("--storage") for text in arguments)
        values = "too many" if secret else " ".join(unknown)
        parser.error(f"unrecognized arguments: {' '.join(flags) or values}")
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
    add_job(commands)
    info = commands.add_parser("info", help="summary of a version", description=_info.__doc__)
    verify = commands.add_parser(
        "verify", help="check every checksum of a store", description=_verify.__doc__
    )
    bench = commands.add_parser(
        "bench", help="measure the cost of reading a store", description=_bench.__doc__
    )
    for command, run in ((info, _info), (verify, _verify), (bench, _bench)):
        command.add_argument("store", metavar="STORE", help="a store, or STORE@3f2a for a version")
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        command.set_defaults(run=run)
    for command in (info, verify, bench):
        add_option(command, "storage_options")
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
    for name, target in (("pull", "a local folder"), ("push", "another store, path or URL")):
        command = commands.add_parser(
            name, help=f"copy a version to {target}", description=_transfer.__doc__
        )
        command.add_argument("store", metavar="STORE", help="a store, or STORE@3f2a for a version")
        command.add_argument(
            "--to", required=True, metavar="STORE", help=f"{target}; created if missing"
        )
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        add_option(command, "storage_options")
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
        help="the source of the store: raw files, and the result of each op, are shown beside the "
        "stored rows",
    )
    add_option(what, "run_functions")
    what.add_argument(
        "--rows", type=int, default=24, metavar="N", help="rows of a page; default 24"
    )
    what.add_argument("--find", default="", metavar="TEXT", help="rows whose keys begin with TEXT")
    what.add_argument(
        "--class",
        dest="label",
        default="",
        metavar="NAME",
        help="rows of a class, by name or number",
    )
    add_option(what, "storage_options")
    where = view.add_argument_group("where")
    where.add_argument("--out", metavar="FILE", help="write one page that needs no server")
    where.add_argument("--port", type=int, default=0, metavar="N", help="default any free port")
    where.add_argument("--open", action="store_true", help="open the address in a browser")
    view.set_defaults(run=_view)


def _add_build(commands: Any) -> None:
    build = commands.add_parser(
        "build",
        help="decode a source into a store",
        description=inspect.cleandoc(_build.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.set_defaults(run=_build)
    add_build_arguments(build).add_argument(
        "--dry-run",
        action="store_true",
        help="only report what would be done, as precache plan",
    )


def _build(options: argparse.Namespace) -> int:
    """Decode and resize every sample of SOURCE once, into tensors that training memory-maps.

    If it is killed or fails, run the same command again to continue; if nothing has changed, it
    does nothing. Without flags of the recipe, images are not resized or cropped.
    """
    if options.dry_run:
        return show_plan(options, timing=True)
    recipe = read_recipe(options)
    import_from_here(options.source, bool(recipe.functions))
    result = precache.build(options.source, options.store, recipe, **read_keywords(options))
    show(options.json, build_json(result), lambda: print_build(result))
    return 0


def _info(options: argparse.Namespace) -> int:
    """Summarise a version: fields, rows, holes, classes, statistics and recipe."""
    info = precache.info(options.store, dict(options.storage_options))
    show(options.json, info_json(info), lambda: print_info(info))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Read every byte, check every checksum, and compare the version's small arrays with its row
    table; damage is named by object and key.

    The exit status is 1 if there is any.
    """
    from precache.maintenance.verify import verify_version
    from precache.store.open import open_unchecked

    version = open_unchecked(options.store, dict(options.storage_options))
    with byte_progress("Verifying", version, shown=not options.json) as tick:
        result = verify_version(version, tick)
    data = {**dataclasses.asdict(result), "ok": result.ok}
    show(options.json, data, lambda: print_verified(result))
    return 0 if result.ok else 1


def _transfer(options: argparse.Namespace) -> int:
    """Copy a whole version to another store and make it current there.

    Every object is checked while it is copied. A version that is complete there is only made
    current. A damaged one stays until an intact one replaces it, or in a bucket is repaired. If it
    is stopped, run the same command again to continue.
    """
    storage_options = dict(options.storage_options)
    copy = precache.pull if options.command == "pull" else precache.push
    version = precache.open(options.store, None, storage_options)
    with byte_progress("Copying", version, shown=not options.json) as tick:
        result = copy(options.store, options.to, tick, storage_options)
    show(options.json, dataclasses.asdict(result), lambda: print_transferred(result))
    return 0


def _bench(options: argparse.Namespace) -> int:
    """Read shuffled epochs of a store on the CPU, and compare them with copying plain memory."""
    with bench_progress(shown=not options.json) as tick:
        result = precache.bench(
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
    )
    if options.out is None:
        view.serve(options.port, browser=options.open)
    else:
        view.write(options.out)
        sys.stderr.write(f"wrote {options.out}\n")
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
