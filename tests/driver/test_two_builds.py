"""Two builds of one version at once, each in a process: neither harms what the other did."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numcodecs import zstd

import precache
from precache.storage.open import open_folder
from precache.store.lease import read_leases
from precache_workers.shards import field_writer
from tests.support.building import (
    build_here,
    contents,
    cut,
    encoded,
    end,
    poll,
    remains,
    start,
    write,
    write_jpegs,
)

OPTIONS: dict[str, Any] = {"shard_samples": 3}


def mood(array: np.ndarray, folder: str = "") -> np.ndarray:
    """The array as it is, counted by process; the smallest fail unless LUCKY is set.

    The smallest wait where HOLD is set, if that is a store once a build of it has begun. In the
    second build of the store RELEASE they let the first one go on, and wait for its end.
    """
    with Path(folder, f"{os.getpid()}.calls").open("a") as calls:
        calls.write(".")
    if array.shape[0] == 40:
        if "RELEASE" in os.environ and builds_of(store := Path(os.environ["RELEASE"])) == 2:
            Path(folder, "go").touch()
            poll(lambda: (store / "commits").exists() and not remains(store), "the other's end")
        held = os.environ.get("HOLD")
        if held and (held == "1" or builds_of(Path(held))):
            Path(folder, str(os.getpid())).touch()
            poll(Path(folder, "go").exists, "the test's leave to go on")
        if "LUCKY" not in os.environ:
            raise ValueError("no luck")
    return array


def builds_of(store: Path) -> int:
    """Number of builds that have begun and not ended."""
    return len(list(store.glob("*/_build/leases/*.json")))


def recipe_of(folder: Path) -> precache.Recipe:
    ops = [
        {"op": "decode"},
        {
            "op": "function",
            "function": "tests.driver.test_two_builds:mood",
            "version": "1",
            "params": {"folder": str(folder)},
        },
        {"op": "resize", "size": [24, 24]},
    ]
    return precache.Recipe.from_dict({"fields": {"image": {"ops": ops, "codec": "zstd"}}})


def source_of(folder: Path) -> Path:
    """Twelve photos, the last of which is 40 px high."""
    source = write_jpegs(folder / "in", 11)
    write(source / "cat/0099.jpg", encoded(cut(99, (64, 40)), quality=90))
    return source


def build_otherwise(source: Path, store: Path, recipe: Any, options: Any, variables: Any) -> Any:
    """A build by another release of a codec: the same rows, other bytes."""
    field_writer.encoder = lambda codec, dtype: (
        lambda chunk: bytes(  # type: ignore[assignment]
            zstd.compress(np.ascontiguousarray(chunk), 19, True)
        )
    )
    return build_here(source, store, recipe, options, variables)


@pytest.mark.parametrize("lucky", [False, True])
def test_of_two_that_try_again_what_failed_the_slower_leaves_what_the_other_mended(
    tmp_path: Path, lucky: bool
) -> None:
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    first = build_here(source, store, recipe, OPTIONS)
    assert first.failed == 1
    again = {**OPTIONS, "retry_failed": True}
    variables = {"HOLD": "1", **({"LUCKY": "1"} if lucky else {})}
    slow = start(build_here, source, store, recipe, again, variables)
    poll((tmp_path / str(slow.pid)).exists, "the slow build waits inside a shard")
    mended = start(build_here, source, store, recipe, again, {"LUCKY": "1"})
    assert end(mended) == 0
    current = precache.open(store)
    before = contents(Path(current.path))
    assert current.id != first.version
    (tmp_path / "go").touch()
    assert end(slow) == 0
    assert precache.open(store).id == current.id
    assert contents(Path(current.path)) == before
    assert precache.verify(store).ok
    assert remains(store) == []


def test_a_slower_build_with_another_codec_overwrites_nothing(tmp_path: Path) -> None:
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    variables = {"HOLD": "1", "LUCKY": "1"}
    slow = start(build_otherwise, source, store, recipe, OPTIONS, variables)
    poll((tmp_path / str(slow.pid)).exists, "the slow build waits inside a shard")
    quick = start(build_here, source, store, recipe, OPTIONS, {"LUCKY": "1"})
    assert end(quick) == 0
    current = precache.open(store)
    before = contents(Path(current.path))
    (tmp_path / "go").touch()
    assert end(slow) == 0
    assert contents(Path(current.path)) == before
    assert precache.verify(store).ok
    assert remains(store) == []


def test_a_slower_build_whose_lease_was_renewed_amid_the_others_commit_overwrites_nothing(
    tmp_path: Path,
) -> None:
    """The commit removed the lease after it was looked for, and before it was put again."""
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    slow = start(build_here, source, store, recipe, OPTIONS, {"HOLD": str(store)})
    poll((tmp_path / str(slow.pid)).exists, "the slow build waits inside a shard")
    [lease] = store.glob("*/_build/leases/*.json")
    held = lease.read_bytes()
    quick = start(build_here, source, store, recipe, OPTIONS, {"LUCKY": "1"})
    assert end(quick) == 0
    before = contents(Path(precache.open(store).path))
    write(lease, held)
    (tmp_path / "go").touch()
    assert end(slow) == 0
    assert contents(Path(precache.open(store).path)) == before
    assert precache.verify(store).ok
    assert remains(store) == []


def test_a_build_that_another_codec_began_is_finished(tmp_path: Path) -> None:
    """What was done stays, and what was cut off in the middle is made again."""
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    variables = {"HOLD": "1", "LUCKY": "1"}
    killed = start(build_otherwise, source, store, recipe, OPTIONS, variables)
    poll((tmp_path / str(killed.pid)).exists, "it waits inside a shard")
    killed.kill()
    assert end(killed) < 0
    finished = start(build_here, source, store, recipe, OPTIONS, {"LUCKY": "1"})
    assert end(finished) == 0
    assert precache.verify(store).ok
    assert remains(store) == []
    [version] = [path for path in store.iterdir() if path.name != "commits"]
    assert read_leases(open_folder(version)) == {}


def test_the_second_of_two_equal_builds_takes_the_shards_that_the_first_has_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    variables = {"HOLD": str(store), "LUCKY": "1"}
    first = start(build_here, source, store, recipe, OPTIONS, variables)
    poll((tmp_path / str(first.pid)).exists, "the first build waits inside a shard")
    done = len(list(store.rglob("receipts/*.json")))
    monkeypatch.setenv("LUCKY", "1")
    result = precache.build(source, store, recipe, address="serial", progress=True, **OPTIONS)
    calls = Path(tmp_path, f"{os.getpid()}.calls").read_text()
    measured = 12  # the probe takes all of so few
    assert len(calls) <= measured + 12 - 3 * done
    assert f"The same build is running already (process {first.pid}" in capfd.readouterr().err
    (tmp_path / "go").touch()
    assert end(first) == 0
    assert precache.open(store).id == result.version
    assert precache.verify(store).ok


def test_a_build_ends_well_when_an_equal_one_finishes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source, store, recipe = source_of(tmp_path), tmp_path / "store", recipe_of(tmp_path)
    variables = {"HOLD": str(store), "LUCKY": "1"}
    first = start(build_here, source, store, recipe, OPTIONS, variables)
    poll((tmp_path / str(first.pid)).exists, "the first build waits inside a shard")
    monkeypatch.setenv("LUCKY", "1")
    monkeypatch.setenv("RELEASE", str(store))
    result = precache.build(source, store, recipe, address="serial", progress=True, **OPTIONS)
    assert end(first) == 0
    assert (result.samples, result.failed) == (12, 0)
    assert "is complete: the other build finished it" in capfd.readouterr().err
    assert precache.verify(store).ok
    assert remains(store) == []
