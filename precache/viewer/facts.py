"""Facts about a whole version: sizes, statistics, how it was built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from precache.recipe.recipe import Field, op_texts
from precache.units import size
from precache.viewer.search import Catalogue

CHANNELS = {"RGB": ("red", "green", "blue"), "RGBA": ("red", "green", "blue", "alpha")}


@dataclass(frozen=True)
class VersionFacts:
    """A whole version.

    Attributes
    ----------
    store
        The store as the user named it.
    sizes, build
        (name, text).
    statistics
        (field, channel, mean, standard deviation), in stored units.
    """

    store: str
    version: str
    path: str
    created: str
    rows: int
    holes: int
    classes: int
    sizes: Sequence[tuple[str, str]]
    statistics: Sequence[tuple[str, str, float, float]]
    build: Sequence[tuple[str, str]]


def version_facts(store: str, catalogue: Catalogue) -> VersionFacts:
    """Collect the facts about a version; `store` as the user named it."""
    version = catalogue.version
    return VersionFacts(
        store=store,
        version=version.id,
        path=version.path,
        created=version.attributes.created if version.attributes else "",
        rows=version.rows,
        holes=len(version.hole_rows),
        classes=len(version.classes),
        sizes=_sizes(catalogue),
        statistics=[line for name in version.mean for line in _statistics(catalogue, name)],
        build=_build(catalogue),
    )


def _sizes(catalogue: Catalogue) -> list[tuple[str, str]]:
    fields = catalogue.version.fields.values()
    raw = sum(field.raw_nbytes for field in fields)
    stored = sum(field.stored_nbytes for field in fields)
    ratio = f"{raw / max(1, stored):.2f}"
    return [("decoded", size(raw)), ("stored", size(stored)), ("decoded / stored", ratio)]


def _statistics(catalogue: Catalogue, name: str) -> list[tuple[str, str, float, float]]:
    version = catalogue.version
    mean, std = version.mean[name], version.std.get(name, [])
    field = version.recipe.fields.get(name, Field())
    first = field.ops[0] if field.ops else None
    channels = CHANNELS.get(getattr(first, "mode", ""), ())
    if len(channels) != len(mean):
        channels = tuple(map(str, range(len(mean))))
    return [(name, *line) for line in zip(channels, mean, std, strict=False)]


def _build(catalogue: Catalogue) -> list[tuple[str, str]]:
    version, attributes = catalogue.version, catalogue.version.attributes
    facts = [("version", version.id)]
    if attributes is not None:
        libraries = [f"{name} {number}" for name, number in attributes.libraries.items()]
        facts += [
            ("created", attributes.created),
            ("libraries", ", ".join(libraries)),
            ("recipe fingerprint", attributes.fingerprint),
            ("rows per shard", f"{attributes.rows_per_shard:,}"),
        ]
    for name, field in version.fields.items():
        stored = f"{field.dtype} {field.shape}, codec {field.codec}, {size(field.stored_nbytes)}"
        ops = " → ".join(op_texts(version.recipe.fields[name])) or "none"
        facts += [(f"{name}, stored", stored), (f"{name}, ops", ops)]
    return [*facts, ("recipe", json.dumps(version.recipe.to_dict(), ensure_ascii=False))]
