"""Facts about a whole version: sizes, statistics, how it was built."""

from __future__ import annotations

import json

from precache.recipe.recipe import Field, op_texts
from precache.store.version import Version
from precache.units import size

CHANNEL_NAMES = {"RGB": ("red", "green", "blue"), "RGBA": ("red", "green", "blue", "alpha")}


def sizes(version: Version) -> list[tuple[str, str]]:
    """Return the bytes of all rows, decoded and stored, as names and texts."""
    fields = version.fields.values()
    raw = sum(field.raw_nbytes for field in fields)
    stored = sum(field.stored_nbytes for field in fields)
    ratio = f"{raw / max(1, stored):.2f}"
    return [("decoded", size(raw)), ("stored", size(stored)), ("decoded / stored", ratio)]


def statistics_rows(version: Version, name: str) -> list[tuple[str, str, float, float]]:
    """Return (field, channel, mean, standard deviation), in stored units."""
    mean, std = version.mean[name], version.std.get(name, [])
    field = version.recipe.fields.get(name, Field())
    first = field.ops[0] if field.ops else None
    channels = CHANNEL_NAMES.get(getattr(first, "mode", ""), ())
    if len(channels) != len(mean):
        channels = tuple(map(str, range(len(mean))))
    return [(name, *line) for line in zip(channels, mean, std, strict=False)]


def build_facts(version: Version) -> list[tuple[str, str]]:
    """Return how a version was built and is stored, as names and texts."""
    attributes = version.attributes
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
