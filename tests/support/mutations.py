"""Versions with one thing changed: bytes of a small object, a value of a document, an object put
in place of another's."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numcodecs import zstd

from precache.errors import RecipeError
from precache.recipe.recipe import Recipe
from precache.store.json_documents import Attributes
from precache.store.object_names import ObjectNames

UNOBSERVABLE = {"created", "libraries", "behaviours"}
"""What of a version's document no reader uses: texts for people, and outputs of probes, of which
wrong ones only let the next build compute anew."""

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**80, 0.5, -1e300, "", "x", "uint8", [], {},
    [1], {"x": 1},
]  # fmt: skip


def small_names(version: Path) -> list[str]:
    """All objects of a version but its shards, below its folder."""
    document = json.loads((version / "zarr.json").read_bytes())
    attributes = Attributes.model_validate_json(json.dumps(document["attributes"]["precache"]))
    contents = ObjectNames.of(attributes)
    return ["zarr.json", *contents.small]


def mutation(random_: random.Random, version: Path, other: Path) -> tuple[str, bytes | None, str]:
    """Name of an object, its new bytes (None: removed), and what was done to it.

    Parameters
    ----------
    other
        A version that differs from the first in every object but a few documents.
    """
    name = random_.choice(small_names(version))
    data = (version / name).read_bytes()
    kinds = ["flip", "cut", "grow", "remove", "swap"]
    kind = random_.choice(kinds + ["json"] * 4 * name.endswith("zarr.json"))
    if kind == "flip":
        at, bit = random_.randrange(len(data)), random_.randrange(8)
        return name, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], f"flip {at}.{bit}"
    if kind == "cut":
        return name, data[: random_.randrange(len(data))], kind
    if kind == "grow":
        return name, data + random_.randbytes(random_.randint(1, 9)), kind
    if kind == "swap":
        return name, (other / name).read_bytes(), kind
    if kind == "remove":
        return name, None, kind
    document = json.loads(data)
    found = list(places(document))
    container, key = random_.choice(found)
    what = random_.choice(["drop", "set", "near"])
    if what == "drop":
        del container[key]
    elif what == "set":
        container[key] = random_.choice(VALUES)
    else:
        container[key] = _near(container[key], random_)
    return name, json.dumps(document).encode(), f"{what} {key}"


def _near(value: Any, random_: random.Random) -> Any:
    """Another value that is like it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + random_.choice([-1, 1])
    if isinstance(value, float):
        return value * random_.choice([0.99, 1.01])
    if isinstance(value, str):
        return value[:-1] if value else "x"
    return None


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def is_observable(name: str, before: bytes, after: bytes | None) -> bool:
    """Whether any reader could tell: not where the decoded bytes, or the values of a document, are
    the same, but for texts for people and what is left out for its default."""
    if after is None:
        return True
    if not name.endswith("zarr.json"):
        with contextlib.suppress(RuntimeError):  # a frame's header has bits that mean nothing
            return bool(zstd.decompress(before) != zstd.decompress(after))
        return True
    try:
        values = [json.loads(data) for data in (before, after)]
    except ValueError:
        return True
    return bool(json.dumps(_told(values[0])) != json.dumps(_told(values[1])))


def _told(document: Any) -> Any:
    told = copy.deepcopy(document)
    own = told.get("attributes") if isinstance(told, dict) else None
    own = own.get("precache") if isinstance(own, dict) else None
    if isinstance(own, dict):
        for name in UNOBSERVABLE | (own.keys() - Attributes.model_fields.keys()):
            own.pop(name, None)
        with contextlib.suppress(RecipeError):
            own["recipe"] = Recipe.from_dict(own["recipe"]).to_dict()
    return told
