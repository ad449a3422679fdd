"""Arguments that several commands have; importing this module loads no library."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from precache.errors import UsageError
from precache.storage.environment import FromEnvironment

SERVER = (
    "the cluster's job server, http://head:8265; default RAY_API_SERVER_ADDRESS or RAY_ADDRESS, "
    "else a Ray on this machine"
)


def take_defaults(
    parser: argparse.ArgumentParser, function: Callable[..., Any], *names: str
) -> None:
    """Give arguments the defaults of the parameters of a function; help shows ``%(default)s``."""
    parameters = inspect.signature(function).parameters
    parser.set_defaults(**{name: parameters[name].default for name in names})


def add_store(to: Any, **settings: Any) -> None:
    """Add the argument ``STORE``."""
    to.add_argument(
        "store", metavar="STORE", help="a store, or STORE@3f2a for a version", **settings
    )


def add_json(to: Any, text: str = "one JSON object on stdout") -> None:
    """Add ``--json``; its value is the stream for JSON, or None for text."""
    to.add_argument("--json", action="store_const", const=sys.stdout, help=text)


def add_common(to: Any) -> None:
    """Add ``--json`` and the storage options."""
    add_json(to)
    add_storage_options(to)


def add_storage_options(to: Any) -> None:
    """Add the flags that fill `storage_options`."""
    to.add_argument(
        "--storage-option",
        action="append",
        default=[],
        dest="storage_options",
        metavar="KEY=VALUE",
        type=_storage_option,
        help="option of the file system of a URL, such as endpoint_url=http://host:9000; "
        "repeatable",
    )
    to.add_argument(
        "--storage-option-env",
        action="append",
        default=[],
        dest="storage_options",
        metavar="KEY=VARIABLE",
        type=_storage_option_env,
        help="like --storage-option, but the value is read from an environment variable (on a "
        "cluster: of each node); for secrets, such as secret=PHOTOS_SECRET; repeatable",
    )


def _storage_option(text: str) -> tuple[str, Any]:
    """Split KEY=VALUE; the value is parsed if it is JSON, unless the option takes text."""
    from precache.storage.service_options import TEXT_OPTIONS

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError("expected KEY=VALUE; not shown, as it may be a secret")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return key, value
    looks_like_number = isinstance(parsed, int | float)  # or like true
    return key, value if looks_like_number and key in TEXT_OPTIONS else parsed


def _storage_option_env(text: str) -> tuple[str, FromEnvironment]:
    key, equals, variable = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError("expected KEY=VARIABLE; not shown, as it may be a secret")
    try:
        return key, FromEnvironment(variable)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_job_address(to: Any) -> None:
    """Add ``--address`` of a cluster's job server."""
    to.add_argument("--address", help=SERVER)


def add_code(to: Any) -> None:
    """Add the flags of a job: ``--code`` for modules to send with it, and ``--no-wait``."""
    to.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="PATH",
        help="module, package, or folder of them, that the job can import; repeatable",
    )
    to.add_argument("--no-wait", action="store_true", help="print the job's id, do not follow it")


def import_from_here(source: str | None, functions: bool) -> None:
    """Append the current folder to the import path if the command runs the user's code.

    The folder comes last: it may be a store or full of samples, with files named like modules.

    Parameters
    ----------
    functions
        True if the command runs a recipe's functions.
    """
    if functions or (source or "").startswith("python:"):
        sys.path.append(str(Path.cwd()))
