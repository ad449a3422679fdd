"""Versions with one thing changed: bytes of an object, a value of a document, objects or chunks put
in each other's place."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from precache.storage.open import open_folder
from precache.store.layout import MISSING, decode_index, encode_index
from precache.store.open import open_own

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**80, 0.5, -1e300, "", "x", "uint8", [], {},
    [1], {"x": 1},
]  # fmt: skip

Changes = Mapping[str, bytes | None]
"""Name of an object below its version -> its new bytes; None: removed."""


def object_names(version: Path) -> list[str]:
    """All objects of a version, below its folder."""
    return sorted(str(path.relative_to(version)) for path in version.rglob("*") if path.is_file())


def small_names(version: Path) -> list[str]:
    """All objects of a version but its shards."""
    shards = {
        name for array in open_own(open_folder(version)).stored for name in _of(version, array)
    }
    return [name for name in object_names(version) if name not in shards]


def _of(version: Path, array: str) -> list[str]:
    return [name for name in object_names(version) if name.startswith(f"{array}/c/")]


def mutation(
    random_: random.Random, version: Path, other: Path, kinds: Mapping[str, Mutate] | None = None
) -> tuple[Changes, str]:
    """Changed objects, and what was done to them.

    Parameters
    ----------
    other
        A version that differs from the first in every object but a few documents.
    """
    while True:
        name = random_.choice(list(kinds or KINDS))
        changes = KINDS[name](random_, version, other)
        stored = {name: (version / name).read_bytes() for name in changes}
        changed = {name: data for name, data in changes.items() if data != stored[name]}
        if changed:
            return changed, name


Mutate = Callable[[random.Random, Path, Path], Changes]


def _any(random_: random.Random, version: Path) -> tuple[str, bytes]:
    name = random_.choice(object_names(version))
    return name, (version / name).read_bytes()


def _flip(random_: random.Random, version: Path, other: Path) -> Changes:
    name, data = _any(random_, version)
    at, bit = random_.randrange(len(data)), random_.randrange(8)
    return {name: data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]}


def _cut(random_: random.Random, version: Path, other: Path) -> Changes:
    name, data = _any(random_, version)
    return {name: data[: random_.randrange(len(data))]}


def _grow(random_: random.Random, version: Path, other: Path) -> Changes:
    name, data = _any(random_, version)
    return {name: data + random_.randbytes(random_.randint(1, 9))}


def _zero(random_: random.Random, version: Path, other: Path) -> Changes:
    name, data = _any(random_, version)
    at = random_.randrange(len(data))
    part = len(data[at : at + 64])
    return {name: data[:at] + bytes(part) + data[at + part :]}


def _remove(random_: random.Random, version: Path, other: Path) -> Changes:
    return {_any(random_, version)[0]: None}


def _edit(random_: random.Random, version: Path, other: Path) -> Changes:
    documents = [name for name in object_names(version) if name.endswith("zarr.json")]
    name = random_.choice([*documents, *["zarr.json"] * len(documents)])
    document = json.loads((version / name).read_bytes())
    container, key = random_.choice(list(places(document)))
    what = random_.choice(["drop", "set", "near"])
    if what == "drop":
        del container[key]
    elif what == "set":
        container[key] = random_.choice(VALUES)
    else:
        container[key] = _near(container[key], random_)
    return {name: json.dumps(document, indent=1).encode()}


def _of_other(random_: random.Random, version: Path, other: Path) -> Changes:
    """The same object of another version."""
    name = random_.choice([n for n in object_names(version) if (other / n).exists()])
    return {name: (other / name).read_bytes()}


def _folder_of_other(random_: random.Random, version: Path, other: Path) -> Changes:
    """All that another version has in a folder: its data agree with its document."""
    folder = random_.choice(
        ["label", "valid", "key", "rows", "holes", "shards", "_checks", "_sums"]
    )
    names = [
        n for n in object_names(version) if n.startswith(f"{folder}/") and (other / n).exists()
    ]
    return {name: (other / name).read_bytes() for name in names}


def _exchange(random_: random.Random, version: Path, other: Path) -> Changes:
    """Two objects in each other's place."""
    one, two = random_.sample(_alike(random_, version), 2)
    return {one: (version / two).read_bytes(), two: (version / one).read_bytes()}


def _copy(random_: random.Random, version: Path, other: Path) -> Changes:
    """An object in place of another, too."""
    one, two = random_.sample(_alike(random_, version), 2)
    return {one: (version / two).read_bytes()}


def _rotate(random_: random.Random, version: Path, other: Path) -> Changes:
    """All shards of a field, each in the place of the next."""
    names = _of(version, random_.choice(fields(version)))
    return {
        name: (version / source).read_bytes()
        for name, source in zip(names, [*names[1:], names[0]], strict=True)
    }


def _alike(random_: random.Random, version: Path) -> list[str]:
    """The shards of a field, or all objects."""
    names = _of(version, random_.choice(fields(version)))
    return names if random_.random() < 0.7 else object_names(version)


def _chunks(random_: random.Random, version: Path, other: Path) -> Changes:
    """Two chunks of a shard in each other's place: their bytes, or their entries in the index."""
    array = random_.choice(fields(version))
    name = random_.choice(_of(version, array))
    data = (version / name).read_bytes()
    count = open_own(open_folder(version)).arrays[array].object_chunks
    index = decode_index(data[-16 * count - 4 :], count).copy()
    written = [n for n in range(count) if index[n, 0] != MISSING]
    if len(written) < 2:
        return {}
    one, two = random_.sample(written, 2)
    (begin, length), (start, size) = index[[one, two]].tolist()
    if length == size and random_.random() < 0.5:
        changed = bytearray(data)
        changed[begin : begin + length], changed[start : start + size] = (
            data[start : start + size],
            data[begin : begin + length],
        )
        return {name: bytes(changed)}
    index[[one, two]] = index[[two, one]]
    return {name: data[: -16 * count - 4] + encode_index(index[:, 0], index[:, 1])}


def fields(version: Path) -> list[str]:
    return open_own(open_folder(version)).stored


KINDS: dict[str, Mutate] = {
    "flip": _flip, "cut": _cut, "grow": _grow, "zero": _zero, "remove": _remove, "edit": _edit,
    "of other": _of_other, "folder of other": _folder_of_other, "exchange": _exchange,
    "copy": _copy, "rotate": _rotate, "chunks": _chunks,
}  # fmt: skip

MISPLACED = {
    name: KINDS[name]
    for name in ("of other", "folder of other", "exchange", "copy", "rotate", "chunks")
}


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
