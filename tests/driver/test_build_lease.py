"""A build holds the lease of its version, and gives it back."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import precache
from precache.errors import BuildError
from precache.storage.local import LocalFolder
from precache.store import lease
from precache.store.build_status import DESCRIPTION
from precache.store.lease import BUILD_LEASES, is_built, latest
from tests.support.building import build_here, poll, remains, write, write_jpegs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.001)


def beating() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "precache-lease"]


def await_beats(array: np.ndarray, store: str) -> np.ndarray:
    """The array as it is, once the build, if it has begun, has shown that it lives."""
    if any(Path(store).glob(f"*/{DESCRIPTION}")):
        poll(lambda: any(Path(store).glob(f"*/{BUILD_LEASES}/*.json")), "a beat")
    return array


def recipe_of(store: Path) -> precache.Recipe:
    function = "tests.driver.test_build_lease:await_beats"
    ops = [
        {"op": "decode"},
        {"op": "function", "function": function, "params": {"store": str(store)}},
    ]
    return precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})


def test_a_build_has_one_and_leaves_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    build_here(write_jpegs(tmp_path / "in", 4), store, recipe_of(store))
    assert remains(store) == []
    assert beating() == []


def test_a_build_that_fails_gives_it_back(tmp_path: Path) -> None:
    store = tmp_path / "store"
    source = write_jpegs(tmp_path / "in", 4)
    write(source / "eel/broken.jpg", b"none")
    with pytest.raises(BuildError):
        build_here(source, store, recipe_of(store), {"on_error": "raise"})
    assert beating() == []
    [folder] = {path.parents[2] for path in store.glob(f"*/{BUILD_LEASES}/*.json")}
    last = latest(LocalFolder(folder))
    assert last is not None
    assert last.released
    assert not is_built(LocalFolder(folder))
    assert len(precache.versions(store).unfinished) == 1
