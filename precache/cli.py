"""The command line: ``precache build | info | verify | bench | pull | push | simulate``."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import precache
from precache.errors import PrecacheError, UsageError
from precache.pipeline import Pipeline
from precache.report import (
    bench_progress,
    byte_progress,
    print_bench,
    print_build,
    print_info,
    print_transferred,
    print_verified,
)
from precache.simulate_command import add_simulate

if TYPE_CHECKING:
    from workers.request import BuildResult

_EPILOG = """\
examples:
  precache build photos/ photos.store --resize 256 --crop 224
  precache build photos/ photos.store --pipeline recipe.toml --address ray://head:10001
  precache build val/ val.store --resize 256 --crop 224 --classes photos.store
  precache info photos.store
  precache verify photos.store@3f2a
  precache bench photos.store --json
  precache pull gs://bucket/photos.store --to photos.store
  precache simulate --load-ms 2000 --loaders 7 --step-ms 100

exit status: 0 done; 1 failed or incomplete (run it again to continue); 2 bad usage
"""

_PIPELINE_FLAGS = ("resize", "crop", "interpolation", "mode", "codec", "seed")


def _size(text: str) -> int | tuple[int, int]:
    height, by, width = text.lower().partition("x")
    try:
        return (int(height), int(width)) if by else int(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor HxW") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="precache",
        description="Decode once, off the training node; train from memory-mapped tensors.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=precache.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_build(commands)
    info = commands.add_parser("info", help="what a store holds", description=_info.__doc__)
    verify = commands.add_parser(
        "verify", help="check every checksum of a store", description=_verify.__doc__
    )
    bench = commands.add_parser(
        "bench", help="what reading a store costs here", description=_bench.__doc__
    )
    for command, run in ((info, _info), (verify, _verify), (bench, _bench)):
        command.add_argument("store", metavar="STORE", help="a store, or STORE@3f2a for a version")
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        command.set_defaults(run=run)
    for command in (info, verify, bench):
        _add_storage_option(command)
    _add_transfer(commands)
    add_simulate(commands)
    bench.add_argument("--batch-size", type=int, default=256, metavar="N", help="default 256")
    bench.add_argument("--epochs", type=int, default=3, metavar="N", help="after the first; 3")
    bench.add_argument("--threads", type=int, metavar="N", help="decoding threads")
    bench.add_argument(
        "--cache-dir", metavar="DIR", help="local folder where shards of a remote store go"
    )
    bench.add_argument("--cache-limit", metavar="SIZE", help="of that folder, such as 200GB")
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
        _add_storage_option(command)
        command.set_defaults(run=_transfer)


def _add_storage_option(to: Any) -> None:
    to.add_argument(
        "--storage-option",
        dest="storage_options",
        action="append",
        default=[],
        type=_storage_option,
        metavar="KEY=VALUE",
        help="of a URL's fsspec file system, such as endpoint_url=http://host:9000; repeatable",
    )


def _storage_option(text: str) -> tuple[str, Any]:
    """The value as JSON where it is JSON, else as text."""
    key, value = _label(text)
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _add_build(commands: Any) -> None:
    build = commands.add_parser(
        "build",
        help="decode a source into a store",
        description=inspect.cleandoc(_build.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.set_defaults(run=_build)
    build.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of images (path or URL), one sub-folder a class; or python:module:factory "
        "for a torch Dataset",
    )
    build.add_argument("store", metavar="STORE", help="folder of the store (path or URL)")
    recipe = build.add_argument_group("recipe")
    recipe.add_argument(
        "--pipeline", metavar="FILE", help="TOML file, in place of the flags of this group"
    )
    recipe.add_argument(
        "--resize", type=_size, metavar="N|HxW", help="shorter side, or exact height and width"
    )
    recipe.add_argument("--crop", type=_size, metavar="N|HxW", help="centre crop after the resize")
    recipe.add_argument(
        "--interpolation", choices=("bilinear", "bicubic"), help="default bilinear; antialiased"
    )
    recipe.add_argument("--mode", choices=("RGB", "L", "RGBA"), help="colours; default RGB")
    recipe.add_argument(
        "--codec",
        choices=("image", "raw", "zstd"),
        help="image (lossless, smallest; default), raw (fastest, largest), zstd (any reader)",
    )
    recipe.add_argument("--seed", type=int, help="of random ops; part of the recipe; default 0")
    rows = build.add_argument_group("rows")
    rows.add_argument("--labels", metavar="CSV", help="key,label lines that override the folders")
    rows.add_argument(
        "--classes", metavar="FROM", help="store or file whose class map is used as it is"
    )
    rows.add_argument(
        "--keep-order", action="store_true", help="rows in the listing's order, not shuffled"
    )
    rows.add_argument(
        "--shard-samples",
        type=int,
        metavar="N",
        help="rows a shard; default 128 MiB raw, 16 shards or more",
    )
    run = build.add_argument_group("running")
    run.add_argument(
        "--address",
        default="local",
        help="local (a Ray of our own, default), serial (no Ray), auto or ray://host:port",
    )
    run.add_argument("--cpus", type=int, metavar="N", help="CPUs of a local Ray; default all")
    run.add_argument(
        "--on-error",
        choices=("skip", "raise"),
        default="skip",
        help="what a sample that cannot be decoded does: leave a hole (default) or end the build",
    )
    run.add_argument(
        "--max-failures", type=int, metavar="N", help="holes allowed; default 1%%, at least 5"
    )
    run.add_argument(
        "--accept-missing", action="store_true", help="holes for samples that cannot be fetched"
    )
    run.add_argument(
        "--no-space-check", action="store_true", help="begin though the disk seems too small"
    )
    run.add_argument(
        "--report",
        action="append",
        default=[],
        metavar="PATH",
        help="write how it went, failed or not: a page (.html) or figures (.json); repeatable",
    )
    _add_placement(build.add_argument_group("on a cluster that is joined"))
    _add_storage_option(run)
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    run.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_placement(to: Any) -> None:
    to.add_argument(
        "--cpus-per-task", type=float, default=1, metavar="N", help="CPUs of each task; default 1"
    )
    to.add_argument(
        "--memory-per-task",
        metavar="SIZE",
        help="memory of each task, such as 2GB; default 1 GiB and a whole raw shard",
    )
    to.add_argument(
        "--resource",
        dest="node_resources",
        action="append",
        default=[],
        type=_amount,
        metavar="NAME=AMOUNT",
        help="custom resource that each task takes, such as spare=1; repeatable",
    )
    to.add_argument(
        "--label",
        dest="node_labels",
        action="append",
        default=[],
        type=_label,
        metavar="KEY=VALUE",
        help="label that a node must have, such as tier=spot; repeatable",
    )
    to.add_argument(
        "--nice",
        type=int,
        default=10,
        metavar="N",
        help="niceness of the workers, 0 to 19; default 10: other work on their nodes comes first",
    )


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _amount(text: str) -> tuple[str, float]:
    name, amount = _label(text)
    try:
        return name, float(amount)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=AMOUNT, such as spare=1") from None


def _build(options: argparse.Namespace) -> int:
    """Decode and resize every sample of SOURCE once, into tensors that training maps.

    Killed or failed, the same command continues it; with nothing changed it does nothing.
    What is not given about the recipe stays as it is: no resize, no crop.
    """
    sys.path.append(str(Path.cwd()))  # where a user's own functions and datasets are
    result = precache.build(
        options.source,
        options.store,
        _pipeline(options),
        address=options.address,
        labels=options.labels,
        classes=options.classes,
        keep_order=options.keep_order,
        shard_samples=options.shard_samples,
        on_error=options.on_error,
        max_failures=options.max_failures,
        accept_missing=options.accept_missing,
        check_space=not options.no_space_check,
        cpus=options.cpus,
        cpus_per_task=options.cpus_per_task,
        memory_per_task=options.memory_per_task,
        node_resources=dict(options.node_resources),
        node_labels=dict(options.node_labels),
        nice=options.nice,
        progress=not options.quiet,
        storage_options=dict(options.storage_options),
        report=options.report,
    )
    _show(options, build_json(result), lambda: print_build(result))
    return 0


def _pipeline(options: argparse.Namespace) -> Pipeline:
    given = {n: getattr(options, n) for n in _PIPELINE_FLAGS if getattr(options, n) is not None}
    if "interpolation" in given and "resize" not in given and options.pipeline is None:
        raise UsageError("--interpolation says how to resize; give --resize with it")
    if options.pipeline is None:
        return Pipeline.image(**given)
    if given:
        flags = ", ".join(f"--{name}" for name in given)
        raise UsageError(f"--pipeline {options.pipeline} and {flags} both say what to do; drop one")
    return Pipeline.from_toml(options.pipeline)


def build_json(result: BuildResult) -> dict[str, Any]:
    """What ``precache build --json`` prints."""
    fields = dataclasses.asdict(result)
    return {**fields, "ratio": result.ratio}


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
        "pipeline": version.pipeline.to_dict(),
        "libraries": version.attributes.libraries if version.attributes else {},
        "created": version.attributes.created if version.attributes else "",
    }
    _show(options, info, lambda: print_info(version, info))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Read every byte and check every checksum; damage is named by shard and key.

    Exit status 1 where there is any.
    """
    from precache.verification import verify_version

    version = precache.open(options.store, None, dict(options.storage_options))
    with byte_progress("Verifying", version, shown=not options.json) as tick:
        found = verify_version(version, tick)
    report = {**dataclasses.asdict(found), "ok": found.ok}
    _show(options, report, lambda: print_verified(found))
    return 0 if found.ok else 1


def _transfer(options: argparse.Namespace) -> int:
    """Copy a whole version to another store and make it current there.

    What is there already is checked and not copied again: stopped, the same command continues.
    """
    from precache.transfer import pull

    given = dict(options.storage_options)
    version = precache.open(options.store, None, given)
    with byte_progress("Copying", version, shown=not options.json) as tick:
        done = pull(options.store, options.to, tick, given)
    _show(options, dataclasses.asdict(done), lambda: print_transferred(done))
    return 0


def _bench(options: argparse.Namespace) -> int:
    """Epochs over a store on the CPU, shuffled, beside the machine's own copy limit."""
    from precache.bench import bench

    with bench_progress(shown=not options.json) as tick:
        result = bench(
            options.store,
            options.batch_size,
            options.epochs,
            options.threads,
            tick,
            cache_dir=options.cache_dir,
            cache_limit=options.cache_limit,
            storage_options=dict(options.storage_options),
        )
    _show(options, dataclasses.asdict(result), lambda: print_bench(result))
    return 0


def _show(
    options: argparse.Namespace, data: Mapping[str, Any], print_text: Callable[[], None]
) -> None:
    if options.json:
        sys.stdout.write(json.dumps(data) + "\n")
    else:
        print_text()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a key must not break a terminal of ASCII
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except PrecacheError as error:
        sys.stderr.write(f"precache: {error}\n")
        return error.exit_status
    except KeyboardInterrupt:
        sys.stderr.write("precache: interrupted; what was done is kept, run it again to continue\n")
        return 130
    return status
