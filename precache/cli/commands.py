"""The commands: one table, from which parsers, help and progress follow."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command that calls a public function.

    Attributes
    ----------
    help
        One line of the list of commands.
    example
        Arguments of an example.
    function
        Name of the function in `precache`, if it is not that of the command.
    model
        Model of `precache_workers.planning.options` that declares the function's other keywords.
    flags
        Arguments besides the parameters.
    tick
        Heading of the progress that the function reports.
    """

    help: str
    example: str = ""
    function: str = ""
    model: str = ""
    flags: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    tick: str = ""


_PAGE = {"--html": {"metavar": "FILE", "help": "Write a page; needs the report extra."}}
_NO_WAIT = {"--no-wait": {"action": "store_true", "help": "Print the job's id, do not follow it."}}
_DRY_RUN = {"--dry-run": {"action": "store_true", "help": "Only report, as precache plan does."}}
_VIEW: dict[str, dict[str, Any]] = {
    "--out": {"metavar": "FILE", "help": "Write one page (.html), or what it shows (.json)."},
    "--port": {"type": int, "default": 0, "help": "Port of the server; by default any free one."},
}

COMMANDS: Mapping[str, Mapping[str, Command]] = {
    "first steps": {
        "doctor": Command(
            "predict what caching would cost and gain",
            "photos/ --resize 256 --crop 224 --rate 4000",
            model="BuildOptions",
            flags=_PAGE,
            tick="Measuring",
        ),
        "plan": Command(
            "report what a build would do, why, how long it would take, and what it would gain",
            "photos/ photos.store --resize 256 --crop 224 --rate 4000",
            model="BuildOptions",
            flags=_PAGE,
            tick="Measuring",
        ),
        "build": Command(
            "decode a source into a store",
            "photos/ photos.store --resize 256 --crop 224",
            model="BuildOptions",
            flags=_DRY_RUN,
        ),
        "info": Command("summary of a version"),
        "view": Command("show samples in a browser", flags=_VIEW),
    },
    "on a cluster": {
        "submit": Command(
            "build as a job of a cluster",
            "s3://photos s3://photos.store --address http://head:8265",
            model="BuildOptions",
            flags=_NO_WAIT,
        ),
    },
    "versions of a store": {
        "ls": Command("list the versions of a store", function="versions"),
        "diff": Command("compare two versions", "photos.store@3f2a photos.store"),
        "use": Command("make a version current"),
        "refresh": Command("compute fresh variants of a store's samples", model="RunOptions"),
        "verify": Command("check every checksum of a version", tick="Verifying"),
        "gc": Command("remove old versions", "photos.store --keep 2 --older-than 7d --dry-run"),
    },
    "measuring": {
        "simulate": Command(
            "simulate how long a training loop waits for its loaders",
            "--load-ms 2000 --workers 7 --step-ms 100 --html loading.html",
            flags=_PAGE,
        ),
    },
    "copying": {
        "pull": Command(
            "copy a version into another store, such as a local one",
            "gs://bucket/photos.store photos.store",
            tick="Copying",
        ),
        "push": Command(
            "copy a version into another store, such as a remote one",
            "photos.store gs://bucket/photos.store",
            tick="Copying",
        ),
    },
}
"""Commands by heading; each calls the public function of its name."""

COMMAND = {name: command for group in COMMANDS.values() for name, command in group.items()}
"""Commands by name."""
