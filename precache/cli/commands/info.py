"""``precache info``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import precache
from precache.cli.arguments import add_common, add_store
from precache.cli.output import show
from precache.maintenance.info import VersionInfo
from precache.messages import aligned, as_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser, nargs="?")
    add_common(parser)


def run(options: argparse.Namespace) -> None:
    """Summarise a version: fields, rows, holes, classes, statistics and recipe.

    Without STORE, describe this installation, for a bug report: versions, compiled code, platform
    and cores.
    """
    if options.store is None:
        from precache.cli.installation import Installation

        here = Installation.here()
        show(options.json, dataclasses.asdict(here), as_text(aligned(here.rows())))
        return
    info = precache.info(options.store, dict(options.storage_options))
    show(options.json, _json(info), info)


def _json(info: VersionInfo) -> dict[str, Any]:
    data = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    fields = {name: dataclasses.asdict(field) for name, field in info.fields.items()}
    recipe = data.pop("recipe").to_dict()
    return {**data, "holes": len(info.holes), "fields": fields, "pipeline": recipe}
