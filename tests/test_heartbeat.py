"""The sign of life of a build."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import precache
from precache.errors import BuildError
from precache.localdisk import LocalFolder
from precache.status import DESCRIPTION, HEARTBEAT, read_status
from tests.building import build_here, poll, remains, write, write_jpegs
from workers import heartbeat
from workers.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.001)


def beating() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "precache-heartbeat"]


def test_it_beats_until_it_is_ended(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    heart = Heartbeat(folder)
    poll(lambda: folder.exists(HEARTBEAT), "a beat")
    first = float(folder.read(HEARTBEAT))
    poll(lambda: float(folder.read(HEARTBEAT)) > first, "another")
    heart.end()
    heart.end()
    last = float(folder.read(HEARTBEAT))
    assert abs(time.time() - last) < 600
    assert beating() == []
    assert float(folder.read(HEARTBEAT)) == last


def test_a_store_that_cannot_be_written_is_told_and_borne(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "_build").write_text("no folder")
    heart = Heartbeat(LocalFolder(tmp_path))
    poll(lambda: "no heartbeat" in caplog.text, "a line in the log")
    heart.end()


def await_beats(array: np.ndarray, store: str) -> np.ndarray:
    """The array as it is, once the build, if it has begun, has shown that it lives."""
    if any(Path(store).glob(f"*/{DESCRIPTION}")):
        poll(lambda: any(Path(store).glob(f"*/{HEARTBEAT}")), "a beat")
    return array


def recipe(store: Path) -> precache.Pipeline:
    function = "tests.test_heartbeat:await_beats"
    ops = [
        {"op": "decode"},
        {"op": "function", "function": function, "params": {"store": str(store)}},
    ]
    return precache.Pipeline.from_dict({"fields": {"image": {"ops": ops}}})


def test_a_build_beats_and_leaves_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    build_here(write_jpegs(tmp_path / "in", 4), store, recipe(store))
    assert remains(store) == []
    assert beating() == []


def test_a_build_that_fails_beats_no_more(tmp_path: Path) -> None:
    store = tmp_path / "store"
    source = write_jpegs(tmp_path / "in", 4)
    write(source / "eel/broken.jpg", b"none")
    with pytest.raises(BuildError):
        build_here(source, store, recipe(store), {"on_error": "raise"})
    assert beating() == []
    [path] = store.glob(f"*/{HEARTBEAT}")
    [build] = read_status(store).building
    assert build.idle_seconds is not None
    path.write_text(str(time.time() + 3600))  # a driver's clock may be fast
    [build] = read_status(store).building
    assert build.idle_seconds == 0
