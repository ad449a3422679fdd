"""One thing changed in a version, whatever it is: `verify` finds it, and names the object."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precache
from precache.errors import PrecacheError
from tests.support.building import build_here, write, write_jpegs
from tests.support.mutations import is_observable, mutation


@dataclass(frozen=True)
class Pair:
    """A version's folder, and that of another one of as many rows in the same store."""

    version: Path
    other: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two versions of two shards; the classes of one are the other's in another order."""
    root = tmp_path_factory.mktemp("mutated")
    results = []
    for name, classes in (("one", ("cat", "dog")), ("other", ("dog", "ant"))):
        source = write_jpegs(root / name, 11, (24, 24), classes=classes)
        write(source / classes[0] / "broken.jpg", b"none " + name.encode())
        recipe = precache.Recipe.from_dict(
            {
                "fields": {
                    "image": {"ops": [{"op": "decode"}, {"op": "resize", "size": [8, 8]}]},
                    "flat": {"ops": [{"op": "decode"}, {"op": "resize", "size": [4, 4]},
                                     {"op": "to_dtype", "dtype": "float32"}]},
                },
                "seed": len(results),
            }
        )  # fmt: skip
        results.append(build_here(source, root / "store", recipe, {"shard_samples": 6}))
    one, other = (Path(each.path) for each in results)
    return Pair(one, other)


def mutate(pair: Pair, seed: int) -> str | None:
    """Change one thing, verify, and put it back; what was overlooked, or None."""
    name, data, what = mutation(random.Random(seed), pair.version, pair.other)
    path = pair.version / name
    before = path.read_bytes()
    try:
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        try:
            found = precache.verify(pair.version)
        except PrecacheError:
            return None if name == "zarr.json" else f"{seed}: {name} {what}: not opened"
        names = {each.shard for each in found.damage}
        if names == {name} or (name == "zarr.json" and found.unchecked):
            return None
        if name == "zarr.json" and names and names < {"rows/c/0", "holes/c/0"}:
            return None  # whether an object or its checksum was changed cannot be known
        if not names and not is_observable(name, before, data):
            return None
        return f"{seed}: {name} {what}: {found.damage}"
    finally:
        path.write_bytes(before)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_changed_is_found_and_named(pair: Pair, seed: int) -> None:
    assert mutate(pair, seed) is None
