"""One thing changed in a version, whatever it is: no wrong row is read, `verify` finds it, and the
same build mends it.
"""

import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precache
from precache.errors import PrecacheError
from precache.reading.version_reader import VersionReader
from precache.store.tree import SPARE_COPY
from tests.support.building import build_here, write, write_jpegs
from tests.support.mutations import KINDS, MISPLACED, mutation, object_names

OPTIONS = {"shard_samples": 4}
OPS = [{"op": "decode"}, {"op": "resize", "size": [8, 8]}]
SMALL = [{"op": "decode"}, {"op": "resize", "size": [4, 4]}, {"op": "to_dtype", "dtype": "float32"}]
LARGE = [{"op": "decode"}, {"op": "resize", "size": [240, 240]}]
RECIPE: dict[str, Any] = {
    "fields": {
        "image": {"ops": OPS}, "flat": {"ops": SMALL}, "plain": {"ops": LARGE, "codec": "raw"},
        "alone": {"ops": LARGE, "codec": "image"},
    }
}  # fmt: skip
"""Rows that share chunks and rows that do not, of each codec."""


@dataclass(frozen=True)
class Pair:
    """A version's folder, and that of another one of as many rows in another store.

    Attributes
    ----------
    right
        What the first one holds.
    """

    source: Path
    version: Path
    other: Path
    right: Mapping[str, Any]
    keys: Sequence[str]
    bytes: Mapping[str, bytes]


def make_pair(root: Path) -> Pair:
    """Two versions of four shards; the classes of one are the other's in another order."""
    results = []
    for name, classes in (("one", ("cat", "dog")), ("other", ("dog", "ant"))):
        source = write_jpegs(root / name, 13, (24, 24), classes=classes)
        write(source / classes[0] / "broken.jpg", b"none " + name.encode())
        recipe = precache.Recipe.from_dict({**RECIPE, "seed": len(results)})
        results.append(build_here(source, root / f"store {name}", recipe, OPTIONS))
    one, other = (Path(each.path) for each in results)
    keys = [*precache.open(one.parent).keys]
    return Pair(root / "one", one, other, read(one.parent), keys, stored(one))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("mutated"))


def read(store: Path, **how: Any) -> dict[str, Any]:
    """All that a reader sees of a version."""
    reader = VersionReader(store, **how)
    version, rows = reader.version, np.arange(reader.version.rows)
    out = {name: np.zeros((len(rows), *s), dtype) for name, (s, dtype) in reader.shapes.items()}
    reader.read(rows, out)
    told = version.keys[:], version.valid, version.classes, version.mean, version.std, version.holes
    return {**out, "told": [str(each) for each in told], "recipe": version.recipe.to_dict()}


def stored(version: Path) -> dict[str, bytes]:
    return {name: (version / name).read_bytes() for name in object_names(version)}


def is_right(pair: Pair, **how: Any) -> bool:
    found = read(pair.version.parent, **how)
    return found.keys() == pair.right.keys() and all(
        np.array_equal(found[name], value)
        if isinstance(value, np.ndarray)
        else found[name] == value
        for name, value in pair.right.items()
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), misplaced=st.booleans(), mends=st.booleans())
def test_whatever_is_changed_is_found_named_and_mended(
    pair: Pair, seed: int, misplaced: bool, mends: bool
) -> None:
    """Where an object and the copy that would mend it are both lost, by another generation."""
    random_ = random.Random(seed)
    changes, what = mutation(random_, pair.version, pair.other, MISPLACED if misplaced else KINDS)
    for name, data in changes.items():
        (pair.version / name).unlink()
        if data is not None:
            (pair.version / name).write_bytes(data)
    context = f"{seed}, {misplaced}: {what} of {sorted(changes)}"
    try:
        opened, access = False, random_.choice(["map", "pread"])
        try:
            VersionReader(pair.version.parent, access=access)
            opened = True
            assert is_right(pair, access=access), f"{context}: wrong rows"
        except PrecacheError as error:
            said = str(error)
            of_shards = [name for name in changes if name.split("/")[0] in RECIPE["fields"]]
            is_named = any(name in said for name in changes)
            if opened and len(of_shards) == len(changes):
                is_named &= any(repr(key) in said for key in pair.keys)
            assert is_named, f"{context}: {said}"
        try:
            found = precache.verify(pair.version.parent)
            advice, names = str(found), {each.shard for each in found.damage}
        except PrecacheError as error:
            advice, names = str(error), {"zarr.json"}
        assert changes.keys() <= names, f"{context}: {names}"
        assert names <= changes.keys() | {SPARE_COPY}, f"{context}: {names}"
        assert "run the same precache build command again" in advice, f"{context}: {advice}"
        if mends:
            recipe = precache.Recipe.from_dict({**RECIPE, "seed": 0})
            build_here(pair.source, pair.version.parent, recipe, {**OPTIONS, "verify": True})
            if {SPARE_COPY} < changes.keys():  # of an object and its copy nothing is left
                mended = precache.verify(pair.version.parent).ok and is_right(pair)
            else:
                mended = stored(pair.version) == pair.bytes
            assert mended, f"{context}: not mended"
    finally:
        for name in stored(pair.version).keys() | pair.bytes.keys():
            (pair.version / name).write_bytes(pair.bytes[name])
        store = pair.version.parent
        for path in [*store.glob("*.2"), *store.glob("commits/000002.json")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
