"""Samples that take too long, or too many bytes: found, and left as holes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest

import precache
from precache.errors import FetchError, UsageError
from tests.building import (
    REPOSITORY,
    ask,
    build_here,
    cut,
    encoded,
    environment,
    remains,
    write,
    write_jpegs,
)
from workers import time_limit
from workers.cluster import executor
from workers.doctor import Question, examine
from workers.shard_task import fetch_ahead
from workers.sources import MOST_SAMPLE_BYTES, Fetched, FolderSource, Sample, open_source
from workers.time_limit import DECODING, FETCHING, notes, run_in_time

HANGING = ("cat/0000.jpg", "eel/0023.jpg")
"""Keys: one among those that are measured first, one that is not."""

RECIPE = """
[[fields.image.ops]]
op = "decode"

[[fields.image.ops]]
op = "function"
function = "tests.building:hang"
version = "1"

[[fields.image.ops]]
op = "resize"
size = [48, 48]
"""
SLOW = precache.Pipeline.from_dict(tomllib.loads(RECIPE))
PLAIN = precache.Pipeline.image(resize=(48, 48))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LOOK_SECONDS", 0.02)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """40 photos, over two of which the recipe's function never ends."""
    write_jpegs(tmp_path / "in", 40)
    for name in HANGING:
        write(tmp_path / "in" / name, encoded(cut(1, (33, 33)), quality=90))
    return tmp_path / "in"


# --- time ---------------------------------------------------------------------------------------


@dataclass
class Work:
    """Takes samples one after another; at some it waits for `released`."""

    hanging: Sequence[str]
    released: threading.Event
    done: list[list[str]]

    def __call__(self, late: Mapping[str, str]) -> Mapping[str, str]:
        done: list[str] = []
        self.done.append(done)
        for key in "abc":
            notes().begin(DECODING, key)
            if key in self.hanging and key not in late:
                self.released.wait()
            done.append(key)
        return late


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("hanging", ["", "a", "bc", "abc"])
def test_what_takes_too_long_is_left_out(hanging: str, released: threading.Event) -> None:
    work = Work(hanging, released, [])
    late = run_in_time(work, 0.1)
    assert late == dict.fromkeys(hanging, f"{DECODING} 0.1 s (--sample-timeout)")
    assert len(work.done) == len(hanging) + 1
    assert time_limit.has_stuck_thread() is bool(hanging)


def test_what_was_given_up_ends_at_its_next_sample(released: threading.Event) -> None:
    work = Work("b", released, [])
    run_in_time(work, 0.1)
    assert time_limit.has_stuck_thread()
    released.set()
    for thread in time_limit._stuck:
        thread.join(10)
    assert work.done == [["a", "b"], ["a", "b", "c"]]
    assert not time_limit.has_stuck_thread()


def test_an_error_is_that_of_the_work() -> None:
    def fail(late: Mapping[str, str]) -> None:
        raise FetchError("no luck")

    with pytest.raises(FetchError, match="no luck"):
        run_in_time(fail, 1.0)


@dataclass(frozen=True)
class Slow:
    """A source that gives several samples at a time, or never answers."""

    hanging: str
    released: threading.Event
    fetch_threads: int = 2

    def fetch(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[Fetched]:
        notes().begin(FETCHING, *keys)
        if self.hanging in keys:
            self.released.wait()
        return [Sample({0: key}) for key in keys]


def test_of_samples_that_are_fetched_together_the_one_that_hangs_is_found(
    released: threading.Event,
) -> None:
    source: Any = Slow("k17", released)
    keys = [f"k{number:02}" for number in range(40)]

    def work(late: Mapping[str, str]) -> list[tuple[str, Fetched]]:
        with contextlib.closing(fetch_ahead(source, keys, [1] * 40, late)) as samples:
            return list(samples)

    fetched = run_in_time(work, 0.1)
    assert [key for key, _ in fetched] == keys
    why = {key: str(each) for key, each in fetched if not isinstance(each, Sample)}
    assert why == {"k17": f"{FETCHING} 0.1 s (--sample-timeout)"}


def test_samples_that_take_too_long_are_holes(photos: Path) -> None:
    store, plain = photos.with_name("store"), photos.with_name("plain")
    options = {"shard_samples": 20}
    result = ask(build_here, photos, store, SLOW, {**options, "sample_timeout": 0.5})
    assert sorted(key for key, _ in result.holes) == sorted(HANGING)
    assert {why for _, why in result.holes} == {f"{DECODING} 0.5 s (--sample-timeout)"}
    ask(build_here, photos, plain, SLOW, options, {"HASTY": "1"})
    assert remains(store) == []
    assert precache.verify(store).ok
    found, whole = precache.CachedDataset(store), precache.CachedDataset(plain)
    for place, row in enumerate(np.flatnonzero(precache.open(store).valid)):
        np.testing.assert_array_equal(found[place]["image"], whole[row]["image"])


def test_a_plan_and_the_doctor_end_though_samples_hang(photos: Path) -> None:
    plan = precache.plan(photos, photos.with_name("store"), SLOW, sample_timeout=0.3)
    assert plan.samples == 40
    told = examine(Question(str(photos), SLOW, samples=40, seconds=3.0))
    assert {key for key, _ in told.failures} <= set(HANGING)
    assert {why for _, why in told.failures} == {f"{DECODING} 3 s (--sample-timeout)"}


class Held:
    """A data set of which one item never comes."""

    released = threading.Event()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 7:
            self.released.wait()
        return np.full((4, 4, 3), index, np.uint8)


def test_an_item_of_a_dataset_that_never_comes_is_a_hole(tmp_path: Path) -> None:
    source = "python:tests.test_time_limit:Held"
    options = {"address": "serial", "sample_timeout": 0.3, "keep_order": True}
    try:
        result = precache.build(source, tmp_path / "store", precache.Pipeline.image(), **options)
    finally:
        Held.released.set()
    assert list(result.holes) == [("7", f"{FETCHING} 0.3 s (--sample-timeout)")]


# --- workers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A task that hangs, or not, and tells its process."""

    hangs: bool
    job: None = None
    memory: int = 0

    def retried(self) -> Self:
        return self

    def run(self) -> int:
        def work(late: Mapping[str, str]) -> int:
            notes().begin(DECODING, "a")
            while self.hangs and not late:
                sum(range(10_000))
            return os.getpid()

        return run_in_time(work, 0.5)


def test_a_worker_in_which_something_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for the workers
    with executor("local", cpus=1) as run:
        [(_, first)] = run(Turn.run, [Turn(hangs=True)])
        psutil.Process(first).wait(30)
        [(_, second)] = run(Turn.run, [Turn(hangs=False)])
        [(_, third)] = run(Turn.run, [Turn(hangs=False)])
    assert first != second == third


HOLDING = """
import re, sys
from workers import time_limit
time_limit.expendable, time_limit.HELD_SECONDS = True, 0.5
time_limit.run_in_time(lambda late: re.match(r"(a+)+$", "a" * 50 + "b"), 0.5)
"""


def test_a_worker_that_never_lets_go_of_the_lock_ends() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HOLDING], cwd=REPOSITORY, env=environment(), timeout=60, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "Timeout" in ran.stderr


# --- bytes --------------------------------------------------------------------------------------


def make_sparse(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(nbytes)


def test_a_file_of_too_many_bytes_is_a_hole_that_is_not_read(photos: Path) -> None:
    make_sparse(photos / "cat/0000.jpg", 1 << 40)
    make_sparse(photos / "eel/0023.jpg", 100_001)
    limits = {"max_sample_bytes": "100kB", "shard_samples": 20}
    plan = precache.plan(photos, photos.with_name("store"), PLAIN, **limits)
    assert plan.samples == 40
    result = ask(build_here, photos, photos.with_name("store"), PLAIN, limits)
    assert dict(result.holes) == {
        "cat/0000.jpg": "has 1.1 TB, over the limit of 100 KB (--max-sample-bytes)",
        "eel/0023.jpg": "has 100 KB, over the limit of 100 KB (--max-sample-bytes)",
    }
    told = examine(Question(str(photos), PLAIN, samples=40, seconds=3.0))
    assert dict(told.failures)["cat/0000.jpg"].startswith("has 1.1 TB, over the limit of 537 MB")


@pytest.mark.parametrize("known", [True, False])
def test_memory_that_does_not_suffice_for_a_file_is_its_failure(
    tmp_path: Path, known: bool
) -> None:
    """A petabyte is more than any machine gives."""
    make_sparse(tmp_path / "b.jpg", 1 << 43)
    write(tmp_path / "a.jpg", b"12345")
    source = open_source(str(tmp_path), most_bytes=1 << 50)
    sizes = [5, 1 << 43] if known else [-1, -1]
    first, second = source.fetch(["a.jpg", "b.jpg"], sizes)
    assert isinstance(first, Sample)
    assert str(second) == "has 8.8 TB, for which memory does not suffice"


def test_a_file_that_has_grown_is_not_read_to_its_end(tmp_path: Path) -> None:
    make_sparse(tmp_path / "a.jpg", 1 << 43)
    [found] = open_source(str(tmp_path)).fetch(["a.jpg"], [5])
    assert isinstance(found, FetchError)
    assert "has more than 5 bytes and had 5 when it was listed" in str(found)


def test_a_file_of_unknown_size_is_looked_at_before_it_is_read(tmp_path: Path) -> None:
    make_sparse(tmp_path / "a.jpg", MOST_SAMPLE_BYTES + 1)
    source = open_source(str(tmp_path))
    assert isinstance(source, FolderSource)
    [found] = source.fetch(["a.jpg"], [-1])
    assert "over the limit" in str(found)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_sample_bytes": "much"}, "max_sample_bytes is 'much'; give bytes, or a size such as"),
        ({"max_sample_bytes": 0}, "max_sample_bytes is 0; give a whole number from 1 up"),
        ({"sample_timeout": 0}, "sample_timeout is 0; give more than 0 seconds"),
        ({"sample_timeout": float("inf")}, "sample_timeout is inf; give more than 0 seconds"),
    ],
)
def test_limits_that_make_no_sense_are_refused(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        precache.build(tmp_path, tmp_path / "store", **options)


def test_requests_are_given_the_time_to_be_made_again(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give more than 120 seconds, for which requests to a"):
        precache.build("s3://bucket/in", tmp_path / "store", sample_timeout=60)


def test_the_command_line_takes_both_limits(photos: Path) -> None:
    make_sparse(photos / "cat/0000.jpg", 1 << 40)
    line = [sys.executable, "-m", "precache", "build", str(photos), str(photos.with_name("store"))]
    line += ["--address", "serial", "--json", "--max-sample-bytes", "1MB", "--sample-timeout", "99"]
    ran = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    holes = dict(json.loads(ran.stdout)["holes"])
    assert holes["cat/0000.jpg"] == "has 1.1 TB, over the limit of 1 MB (--max-sample-bytes)"
