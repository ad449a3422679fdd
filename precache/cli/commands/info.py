"""``precache info``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import precache
from precache.cli.arguments import add_common, add_store
from precache.cli.output import SHOWN, first_ones, show, statistics
from precache.maintenance.info import VersionInfo
from precache.recipe.recipe import op_texts
from precache.recipe.variants import variants_text
from precache.runtime.terminal import say, say_rows
from precache.store.version import FieldInfo
from precache.units import size


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
        show(options.json, dataclasses.asdict(here), lambda: say_rows(here.rows()))
        return
    info = precache.info(options.store, dict(options.storage_options))
    show(options.json, _json(info), lambda: _print(info))


def _json(info: VersionInfo) -> dict[str, Any]:
    data = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    fields = {name: dataclasses.asdict(field) for name, field in info.fields.items()}
    recipe = data.pop("recipe").to_dict()
    return {**data, "holes": len(info.holes), "fields": fields, "pipeline": recipe}


def _print(info: VersionInfo) -> None:
    rows = [
        ("version", info.version),
        ("path", info.path),
        ("created", info.created),
        ("rows", f"{info.rows:,}, {len(info.holes)} of them holes"),
        *((name, _field(field)) for name, field in info.fields.items()),
        *statistics(info.mean, info.std),
    ]
    if info.classes:
        rows.append((f"{len(info.classes)} classes", first_ones(info.classes)))
    for name, recipe in info.recipe.fields.items():
        rows.append((f"{name} recipe", " → ".join(op_texts(recipe))))
    say_rows(rows)
    for key, reason in info.holes[:SHOWN]:
        say(f"hole: {key}: {reason}")


def _field(field: FieldInfo) -> str:
    ratio = field.raw_nbytes / max(1, field.stored_nbytes)
    several = f"variants {variants_text(field)} of " if field.variants > 1 else ""
    return (
        f"{several}{field.dtype} {field.shape}, codec {field.codec}, {size(field.raw_nbytes)} raw, "
        f"{size(field.stored_nbytes)} stored: ratio {ratio:.2f}"
    )
