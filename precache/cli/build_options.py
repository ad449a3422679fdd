"""What a build takes on the command line, whether it runs here or on a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from precache.errors import UsageError
from precache.recipe.recipe import Recipe

_PIPELINE_FLAGS = (
    "resize",
    "crop",
    "random_resized_crop",
    "flip",
    "interpolation",
    "mode",
    "codec",
    "seed",
    "variants",
)


def add_build_options(build: argparse.ArgumentParser, address: str | None, where: str) -> Any:
    """What a build takes, here or on a cluster; returns the group of how it runs.

    Parameters
    ----------
    address, where
        Default and help of ``--address``.
    """
    add_source(build)
    build.add_argument("store", metavar="STORE", help="folder of the store (path or URL)")
    add_recipe_options(build)
    rows = build.add_argument_group("rows")
    rows.add_argument("--labels", metavar="CSV", help="key,label lines that override the folders")
    rows.add_argument(
        "--classes", metavar="FROM", help="store or file whose class map is used as it is"
    )
    rows.add_argument(
        "--accept-unmatched",
        action="store_true",
        help="go on though many lines of --labels fit no sample, or many samples get no label",
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
    rows.add_argument(
        "--compact",
        action="store_true",
        help="lay all rows down anew, without the holes of samples that are no more",
    )
    rows.add_argument(
        "--recompute",
        action="store_true",
        help="compute all anew, as a new version beside those that there are",
    )
    rows.add_argument(
        "--retry-failed",
        action="store_true",
        help="try samples again that failed, also those that could not be fetched, and take over "
        "all others; a new version where some are mended, else the current one stays",
    )
    return add_running_options(build, address, where, "default 1%%, at least 5")


def add_running_options(
    to: argparse.ArgumentParser, address: str | None, where: str, failures: str
) -> Any:
    """How a build or a refresh runs; returns the group.

    Parameters
    ----------
    address, where
        Default and help of ``--address``.
    failures
        How many holes are allowed by default.
    """
    run = to.add_argument_group("running")
    run.add_argument("--address", default=address, help=where)
    run.add_argument(
        "--cpus", type=int, metavar="N", help="CPUs of a local Ray; default all that it may use"
    )
    run.add_argument(
        "--on-error",
        choices=("skip", "raise"),
        default="skip",
        help="what a sample that cannot be decoded does: leave a hole (default) or end the build",
    )
    run.add_argument("--max-failures", type=int, metavar="N", help=f"holes allowed; {failures}")
    run.add_argument(
        "--accept-missing", action="store_true", help="holes for samples that cannot be fetched"
    )
    run.add_argument(
        "--max-sample-bytes",
        default="512MiB",
        metavar="SIZE",
        help="a larger file is a hole, and not fetched; default 512MiB",
    )
    run.add_argument(
        "--sample-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="a sample that takes longer to fetch or to decode is a hole; default 300",
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
    add_follow_links(run)
    run.add_argument("--storage-options-at", metavar="NAME", help=argparse.SUPPRESS)
    add_placement(to.add_argument_group("on a cluster that is joined"))
    add_storage_option(run)
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    run.add_argument("--json", action="store_true", help="JSON on stdout, an object a version")
    return run


def add_run_functions(to: Any) -> None:
    """``--run-functions``, for commands whose recipe is the store's."""
    to.add_argument(
        "--run-functions",
        action="store_true",
        help="run the code that the store names: functions of its recipe, and a python: source in "
        "its log of commits. It runs with your rights, so only for a store that you trust: see "
        "what precache info says of the recipe, and read these functions. A recipe file that you "
        "name yourself is code as a Makefile is, and needs no such leave",
    )


def import_from_here(source: str | None, functions: bool) -> None:
    """Let modules of the current folder be imported, after all others, where code is to run at all.

    The folder may be a store, or full of samples, with files that are named like modules.

    Parameters
    ----------
    functions
        Whether functions of a recipe are to run.
    """
    if functions or (source or "").startswith("python:"):
        sys.path.append(str(Path.cwd()))


def add_code(to: Any) -> None:
    """What goes with a job to a cluster, and whether it is followed."""
    to.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="PATH",
        help="module, package, or folder of them, that the job can import; repeatable",
    )
    to.add_argument("--no-wait", action="store_true", help="print the job's id, do not follow it")


def add_source(to: argparse.ArgumentParser) -> None:
    """The argument ``SOURCE``."""
    to.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of images (path or URL), one sub-folder a class; or python:module:factory "
        "for a torch Dataset",
    )


def add_follow_links(to: Any) -> None:
    """``--follow-links``."""
    to.add_argument(
        "--follow-links",
        action="store_true",
        help="follow links on a local disk, and redirects of a web server, that lead out of the "
        "source; default leave them out",
    )


def add_recipe_options(to: argparse.ArgumentParser) -> None:
    """What `read_recipe` reads."""
    recipe = to.add_argument_group("recipe")
    recipe.add_argument(
        "--recipe",
        "--pipeline",
        metavar="FILE",
        help="TOML file or JSON text, in place of this group's flags",
    )
    recipe.add_argument(
        "--resize", type=_size, metavar="N|HxW", help="shorter side, or exact height and width"
    )
    recipe.add_argument("--crop", type=_size, metavar="N|HxW", help="centre crop after the resize")
    recipe.add_argument(
        "--random-resized-crop",
        type=_size,
        metavar="N|HxW",
        help="a random part of the image, resized to this",
    )
    recipe.add_argument(
        "--flip", action="store_true", default=None, help="mirror every second image, at random"
    )
    recipe.add_argument(
        "--variants",
        type=int,
        metavar="K",
        help="keep K random realisations of each sample: epoch e reads number e modulo K",
    )
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


def add_placement(to: Any) -> None:
    """What each task takes of a cluster that is joined."""
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


def _size(text: str) -> int | tuple[int, int]:
    height, by, width = text.lower().partition("x")
    try:
        return (int(height), int(width)) if by else int(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor HxW") from None


def add_storage_option(to: Any) -> None:
    """``--storage-option KEY=VALUE``, repeatable."""
    to.add_argument(
        "--storage-option",
        dest="storage_options",
        action="append",
        default=[],
        type=_storage_option,
        metavar="KEY=VALUE",
        help="of a URL's service, such as endpoint_url=http://host:9000; repeatable",
    )


def _storage_option(text: str) -> tuple[str, Any]:
    """The value as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not key or not equals:  # it may well be the secret alone
        raise argparse.ArgumentTypeError("expected KEY=VALUE; what was given is not shown")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def build_keywords(options: argparse.Namespace) -> dict[str, Any]:
    """What `precache.build` is given besides source, store and recipe."""
    return {
        "labels": options.labels,
        "classes": options.classes,
        "accept_unmatched": options.accept_unmatched,
        "keep_order": options.keep_order,
        "shard_samples": options.shard_samples,
        "compact": options.compact,
        "recompute": options.recompute,
        "retry_failed": options.retry_failed,
        **running_keywords(options),
    }


def running_keywords(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_running_options` has read, as `precache.build` takes it."""
    storage_options = dict(options.storage_options)
    if options.storage_options_at is not None:
        from precache_workers.jobs.job_server import receive_storage_options

        storage_options |= receive_storage_options(options.storage_options_at)
    return {
        "address": options.address,
        "on_error": options.on_error,
        "max_failures": options.max_failures,
        "accept_missing": options.accept_missing,
        "follow_links": options.follow_links,
        "check_space": not options.no_space_check,
        "cpus": options.cpus,
        "cpus_per_task": options.cpus_per_task,
        "memory_per_task": options.memory_per_task,
        "node_resources": dict(options.node_resources),
        "node_labels": dict(options.node_labels),
        "nice": options.nice,
        "progress": not options.quiet,
        "storage_options": storage_options,
        "report": options.report,
        "max_sample_bytes": options.max_sample_bytes,
        "sample_timeout": options.sample_timeout,
    }


def read_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe that the flags, or a file, say."""
    given = {n: getattr(options, n) for n in _PIPELINE_FLAGS if getattr(options, n) is not None}
    resizes = given.keys() & {"resize", "random_resized_crop"}
    if "interpolation" in given and not resizes and options.recipe is None:
        raise UsageError("--interpolation says how to resize; give --resize with it")
    if options.recipe is None:
        return Recipe.image(**given)
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"--recipe {options.recipe} and {flags} both say what to do; drop one")
    if options.recipe.lstrip().startswith("{"):
        return _recipe_of_json(options.recipe)
    return Recipe.from_toml(options.recipe)


def _recipe_of_json(text: str) -> Recipe:
    try:
        return Recipe.from_dict(json.loads(text))
    except ValueError as error:
        raise UsageError(f"--recipe is neither a TOML file nor JSON: {error}") from None
