"""A version as a whole, for the pages about it: sizes, statistics, how it was built."""

from __future__ import annotations

import json

from precache.recipe.recipe import Field
from precache.units import size
from precache.viewer.pages import VersionFacts
from precache.viewer.search import Catalogue
from precache.viewer.source_trace import parameters

CHANNELS = {"RGB": ("red", "green", "blue"), "RGBA": ("red", "green", "blue", "alpha")}


def facts_of(store: str, catalogue: Catalogue) -> VersionFacts:
    """What a version says of itself; `store` as the user named it."""
    version = catalogue.version
    return VersionFacts(
        store,
        version.id,
        version.path,
        version.attributes.created if version.attributes else "",
        version.rows,
        len(version.hole_rows),
        len(version.classes),
        _sizes(catalogue),
        [line for name in version.mean for line in _statistics(catalogue, name)],
        _build(catalogue),
    )


def _sizes(catalogue: Catalogue) -> list[tuple[str, str]]:
    fields = catalogue.version.fields.values()
    raw = sum(each.raw_nbytes for each in fields)
    stored = sum(each.stored_nbytes for each in fields)
    ratio = f"{raw / max(1, stored):.2f}"
    return [("decoded", size(raw)), ("stored", size(stored)), ("decoded / stored", ratio)]


def _statistics(catalogue: Catalogue, name: str) -> list[tuple[str, str, float, float]]:
    version = catalogue.version
    mean, std = version.mean[name], version.std.get(name, [])
    declared = version.recipe.fields.get(name, Field())
    first = declared.ops[0] if declared.ops else None
    names = CHANNELS.get(getattr(first, "mode", ""), ())
    if len(names) != len(mean):
        names = tuple(map(str, range(len(mean))))
    return [(name, *each) for each in zip(names, mean, std, strict=False)]


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
        what = f"{field.dtype} {field.shape}, codec {field.codec}, {size(field.stored_nbytes)}"
        ops = [f"{op.op}({parameters(op)})" for op in version.recipe.fields[name].ops]
        facts += [(f"{name}, stored", what), (f"{name}, ops", " → ".join(ops) or "none")]
    return [*facts, ("recipe", json.dumps(version.recipe.to_dict(), ensure_ascii=False))]
