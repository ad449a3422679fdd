"""Samples that take too long, or too many bytes: found, and left as holes."""

import contextlib
import ctypes
import errno
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

import precache
from precache.errors import FetchError, HangError, Hole, UsageError
from precache.storage import retries
from precache_workers.cluster import process_engine
from precache_workers.cluster.executor import executor
from precache_workers.runtime import time_limit
from precache_workers.runtime.time_limit import DECODING, FETCHING, KILLS, LATE, run_in_time
from precache_workers.shards.samples import FetchAllTask
from precache_workers.sources.base import MOST_SAMPLE_BYTES, Fetched, Sample
from precache_workers.sources.fetching import fetch_ahead
from precache_workers.sources.kinds import open_source
from tests.support import building
from tests.support.building import DEADLINE, REPOSITORY, ask, block, cli, environment, poll, write
from tests.support.command_line import Run
from tests.support.servers import web_server

SLOW = precache.Recipe.from_dict(tomllib.loads(building.marked_recipe("hang")))
PLAIN = precache.Recipe.image(resize=(48, 48), interpolation="nearest")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LOOK_SECONDS", 0.02)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return building.marked_photos(tmp_path / "in")


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def hang_at(key: str, released: threading.Event, done: list[str]) -> None:
    """Take three samples, one after another; at one, wait."""
    for each in "abc":
        time_limit.samples_at_work().begin(DECODING, each)
        if each == key:
            released.wait()
        done.append(each)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("key", ["a", "c"])
def test_work_that_hangs_is_given_up_and_ends_at_its_next_sample(
    key: str, released: threading.Event
) -> None:
    before, done, held = set(threading.enumerate()), list[str](), list[weakref.ref[Any]]()

    def work() -> None:
        shard = np.zeros(10)
        held.append(weakref.ref(shard))
        hang_at(key, released, done)
        raise FetchError("no luck")

    late = time_limit.late_hole(DECODING, "0.1 s (--sample-timeout)")
    with pytest.raises(HangError, match=f"^{re.escape(f'{key}: {late}')}.*--address loc") as caught:
        run_in_time(work, 0.1)
    assert caught.value.late == {key: late}
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.late, str(again)) == (caught.value.late, str(caught.value))
    released.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert done == list("abc"[: "abc".index(key) + 1])
    del caught, again
    assert held[0]() is None, "a shard is not kept"
    with pytest.raises(FetchError, match="no luck"):
        run_in_time(work, 10.0)


def test_the_thread_of_work_has_ended_when_its_result_is_there() -> None:
    def end_slowly(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is threading.Thread.run.__code__:
            time.sleep(0.1)

    before = set(building.own_threads())
    threading.setprofile(end_slowly)
    try:
        run_in_time(lambda: None, 1.0)
    finally:
        threading.setprofile(None)
    assert set(building.own_threads()) <= before


def test_time_for_which_the_process_was_stopped_does_not_count(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count(0, 10_000)

    def monotonic() -> int:
        if (now := next(looks)) == 40_000:
            released.set()
        return now

    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=monotonic))
    done: list[str] = []
    run_in_time(lambda: hang_at("b", released, done), 1.0)
    assert done == ["a", "b", "c"]


def test_what_may_wait_for_a_late_sample_is_suspected_too_and_what_is_read_is_not(
    released: threading.Event,
) -> None:
    kept, begun = time_limit.SamplesAtWork(1.0), threading.Barrier(2)

    def stay(key: str, foreign: bool) -> None:
        with kept.kept():
            kept.begin(DECODING, key, foreign=foreign)
            begun.wait()
            released.wait()

    for kept.clock, key, foreign in [(0, "late", True), (5, "waits", True), (5, "read", False)]:
        threading.Thread(target=stay, args=[key, foreign], daemon=True).start()
        begun.wait()
    kept.clock = 0.9
    assert not kept.late()
    kept.clock = 5.1
    assert kept.late().keys() == {"late", "waits"}


class Recorded:
    """A source that keeps what was fetched together."""

    fetch_threads = 2

    def __init__(self) -> None:
        self.fetched: list[list[str]] = []

    def fetch(self, keys: Sequence[str], *_: Any) -> Sequence[Fetched]:
        self.fetched.append(list(keys))
        return [Sample({0: key}) for key in keys]


def test_a_file_that_does_not_come_is_late_and_those_beside_it_are_not(
    tmp_path: Path, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.0)
    for name in "abc":
        write(tmp_path / f"photos/{name}.jpg", b" ")
    with web_server(tmp_path, {"/photos/b.jpg": released}) as url:
        source = open_source(f"{url}/photos")
        source.fetch(["a.jpg"], [-1])  # the first request of a process takes longer
        with pytest.raises(HangError) as caught:
            run_in_time(lambda: source.fetch(["a.jpg", "b.jpg", "c.jpg"], [-1] * 3), 1.0)
        released.set()
    assert list(caught.value.late) == ["b.jpg"]


def test_suspects_are_tried_one_by_one_and_then_the_one_is_left_out() -> None:
    task: Any = Turn(how="free", keys=["a", "b", "c"])
    why = Hole("fetch timed out", f"{FETCHING} {LATE} 1 s (--sample-timeout)")
    task = task.after(suspected("a", "b", why=why))
    assert (task.alone, task.barred) == ({"a", "b"}, {})
    source: Any = Recorded()
    with contextlib.closing(
        fetch_ahead(source, "abcd", [1] * 4, task.barred, task.alone)
    ) as samples:
        for key in "ab":
            assert next(samples)[0] == key
            assert source.fetched[-1] == [key]
        assert [key for key, _ in samples] == ["c", "d"]
    assert source.fetched == [["a"], ["b"], ["c", "d"]]

    assert task.after(suspected("c", why=why)).barred == {}
    assert task.after(suspected("elsewhere", why=why)) == task
    task = task.after(suspected("b", why=why))
    assert task.barred == {"b": why}
    source.fetched.clear()
    fetched = dict(fetch_ahead(source, "abcd", [1] * 4, task.barred, task.alone))
    assert source.fetched == [["a"], ["c", "d"]]
    assert str(fetched["b"]) == why.reason


@dataclass
class Workers:
    """Threads that note samples and stay at them."""

    attempt: time_limit.SamplesAtWork = field(
        default_factory=lambda: time_limit.SamplesAtWork(9.0, timed=True)
    )
    release: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def note(self, *keys: str, foreign: bool = True) -> None:
        begun = threading.Event()

        def work() -> None:
            with self.attempt.kept():
                self.attempt.begin(DECODING, *keys, foreign=foreign)
                begun.set()
                self.release.wait()

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        begun.wait()

    def end(self) -> None:
        self.release.set()
        for thread in self.threads:
            thread.join()
        self.attempt.give_up()


def suspected(*keys: str, why: Hole) -> dict[str, Hole]:
    return {time_limit.key_digest(key): why for key in keys}


def suspects_after(path: Path, act: Callable[[Workers], object]) -> dict[str, Hole]:
    """Return the suspects where a process dies after some notes."""
    workers, left = Workers(), path.with_name("left")
    with time_limit.kept_notes(str(path)):
        act(workers)
        shutil.copytree(path, left)
        workers.end()
    assert not path.exists(), "a task that has ended leaves nothing"
    suspects = time_limit.take_suspects(str(left), "it fell")
    assert not left.exists()
    assert time_limit.take_suspects(str(left), "it fell") == {}
    assert suspects is not None
    return suspects


MANY = {f"ä/{number}.jpg" for number in range(40)}
LONG = [f"\udcff{number:09000}" for number in range(1000)]


def ended(workers: Workers) -> None:
    """Notes of threads that have ended."""
    for number in range(40):
        workers.note(f"old {number}")
    workers.end()
    workers.__init__()  # type: ignore[misc]  # others


def on_a_full_disk(workers: Workers) -> None:
    with pytest.MonkeyPatch.context() as full:
        full.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
        workers.note("lost")


HANGS = Hole("timed out", "it hangs")


def late(workers: Workers) -> None:
    notes = time_limit._notes
    assert notes is not None
    notes.write_late({"b": HANGS})


def noted(*keys: str, foreign: bool = True) -> Callable[[Workers], None]:
    return lambda workers: workers.note(*keys, foreign=foreign)


NOTES: dict[str, tuple[Sequence[Callable[[Workers], None]], Collection[str]]] = {
    "a note of every thread": ([noted(key) for key in MANY], MANY),
    "many keys in one note": ([noted(*LONG)], LONG),
    "none of threads that have ended": ([ended, noted("new")], ["new"]),
    "what is only read": ([noted("a", "b", foreign=False)], "ab"),
    "not what is only read": ([noted("a", foreign=False), noted("c")], "c"),
    "those for which there is room": ([on_a_full_disk, noted("b")], "b"),
    "late ones instead": ([*map(noted, "abc"), late], "b"),
}


@pytest.mark.parametrize("case", NOTES)
def test_of_a_process_that_died_the_notes_tell_the_suspects(tmp_path: Path, case: str) -> None:
    acts, suspects = NOTES[case]
    taken = suspects_after(tmp_path / "notes", lambda workers: [act(workers) for act in acts])
    fell = Hole("killed its worker", f"{DECODING} kills the worker: it fell")
    why = HANGS if late in acts else fell
    assert taken == suspected(*suspects, why=why)


def test_a_thread_that_outlives_its_task_writes_into_no_file_of_others(tmp_path: Path) -> None:
    """Another file gets the number that the file of its note had."""
    with time_limit.kept_notes(str(tmp_path / "notes")) as notes:
        assert notes is not None
        notes.write("begun")
    with (tmp_path / "other").open("wb+", buffering=0) as other:
        others = [os.dup(other.fileno()) for _ in range(9)]
        notes.write("late")
        notes.leave()
        for each in others:
            os.close(each)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_task_goes_on_where_no_notes_can_be_kept(tmp_path: Path) -> None:
    with time_limit.kept_notes(str(tmp_path / "nowhere/notes")) as notes:
        assert notes is None
        assert run_in_time(lambda: time_limit.samples_at_work().work(DECODING, "a", str), 1.0) == ""


class Locked:
    """A data set with a lock of its own, of which one item never comes."""

    released = threading.Event()

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> np.ndarray:
        with self.lock:
            if index != 23:
                return np.full((8, 8, 3), index, np.uint8)
            self.hang()
            return np.full((33, 33, 3), index, np.uint8)

    def hang(self) -> None:
        self.released.wait()


class Holding(Locked):
    """The same, where the interpreter's lock is held."""

    def hang(self) -> None:
        block()


class Many(Locked):
    """The same, of which eight are fetched at a time; one is marked, and no trouble to fetch."""

    fetch_threads = 8

    def hang(self) -> None:
        pass


def test_serial_builds_and_plans_end_with_an_error_that_names_the_sample_and_the_doctor_lists_it(
    photos: Path, tmp_path: Path
) -> None:
    """In a process of its own, with which the threads end that hang."""
    errors, failures = ask(build_and_examine, photos)
    for error in errors:
        first = building.MARKED[0]
        assert error.startswith(f"{first}: {DECODING} {LATE} 2.5 s (--sample-timeout). Only")
    assert failures["dog/0001.jpg"].startswith("has 1.1 TB, over the limit of 537 MB")
    late = {key for key, why in failures.items() if why.startswith(f"{DECODING} {LATE} 3 s")}
    assert late
    assert late <= set(building.MARKED)
    source = "python:tests.runtime.test_time_limit:Locked"
    with pytest.raises(
        HangError, match=rf"^23: {FETCHING} {LATE} 2.5 s \(--sample-timeout\)\. Only"
    ):
        precache.build(source, tmp_path / "other", address="serial", sample_timeout=2.5)
    Locked.released.set()


def build_and_examine(photos: Path) -> tuple[list[str], dict[str, str]]:
    """The errors of a build and a plan, and the failures that the doctor lists."""
    store, errors = photos.with_name("store"), list[str]()
    make_sparse(photos / "dog/0001.jpg", 1 << 40)
    for act in (precache.build, precache.plan):
        with pytest.raises(HangError) as caught:
            act(photos, store, SLOW, address="serial", sample_timeout=2.5, shard_samples=20)
        errors.append(str(caught.value))
    return errors, dict(precache.doctor(photos, SLOW, samples=40, seconds=3.0).failures)


BLOCKED = """
import time
from tests.support.building import block
from precache_workers.runtime import time_limit
time_limit.GRACE_SECONDS = 0.0

def work():
    time_limit.samples_at_work().work(time_limit.DECODING, "evil\\x1b[2J.jpg", block)

at_work = time_limit.samples_at_work
time_limit.run_in_time(lambda: at_work().work(time_limit.DECODING, "well", str), 0.1)
time.sleep(1)
time_limit.run_in_time(work, 0.5)
"""


def test_a_process_whose_lock_is_held_is_ended_and_the_sample_named() -> None:
    """By the timer, which does not run while no sample is at work."""
    line = [sys.executable, "-c", BLOCKED]
    ran = subprocess.run(line, cwd=REPOSITORY, env=environment(), timeout=DEADLINE, check=False,
        capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == 1
    assert " in block\n" in ran.stderr
    said = (
        "in decoding it, of sample 'evil\\x1b[2J.jpg', for at most 0.5 s (--sample-timeout); where"
    )
    assert f"{said} it hangs, --address local leaves a hole\n" in ran.stderr
    assert "well" not in ran.stderr


EXPIRED = """
import sys
from tests.support.building import block
from precache_workers.runtime import time_limit
time_limit.GRACE_SECONDS = 0.5

def work():
    time_limit.samples_at_work().begin(time_limit.DECODING, "a")
    print("begun", flush=True)
    block()

with time_limit.kept_notes(sys.argv[1]):
    time_limit.run_in_time(work, 2.5)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_the_sample_of_a_worker_whose_timer_expired_as_it_was_stopped_is_no_suspect(
    tmp_path: Path, stopped: bool
) -> None:
    line = [sys.executable, "-c", EXPIRED, str(tmp_path / "notes")]
    with building.running(line, environment(), REPOSITORY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        if stopped:
            worker = psutil.Process(process.pid)
            began = sum(worker.cpu_times()[:2])
            poll(lambda: sum(worker.cpu_times()[:2]) > began + 0.05, "it holds the lock")
            process.send_signal(signal.SIGSTOP)
            time.sleep(3.5 + time_limit.EXPIRY_SECONDS)
            process.send_signal(signal.SIGCONT)
        process.communicate(timeout=DEADLINE)
        assert process.returncode == 1
    late = suspected("a", why=time_limit.late_hole(DECODING, "2.5 s (--sample-timeout)"))
    taken = time_limit.take_suspects(str(tmp_path / "notes"), "it fell")
    assert taken == (None if stopped else late)


@dataclass(frozen=True)
class Turn(FetchAllTask):
    """Samples of which one hangs, or none; gives its process, and what was left out."""

    job: Any = None
    how: str = ""
    memory: int = 0
    seconds: float = 0.0

    def run(self) -> tuple[int, Mapping[str, Hole]]:
        return run_in_time(self._run, 0.5)

    def _run(self) -> tuple[int, Mapping[str, Hole]]:
        for key in self.keys:
            time_limit.samples_at_work().begin(DECODING, key)
            if key == "evil" and key not in self.barred:
                while self.how == "free":
                    sum(range(10_000))
                if self.how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.how == "left":
                    os._exit(0)
                if self.how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                ctypes.string_at(0) if self.how == "segfault" else block()
        return os.getpid(), self.barred


REASONS = {
    "free": r"took longer than 0.5 s \(--sample-timeout\)",
    "held": r"took longer than 0.5 s \(--sample-timeout\)",
    "killed": r"kills the worker: its process was killed \(SIGKILL\) with up to .+ MB of memory",
    "left": "kills the worker: its process ended with status 0",
    "segfault": r"kills the worker: its process was killed \(SIGSEGV\)",
    "stopped": r"kills the worker: its process was stopped for 1 s \(SIGSTOP\)",
}


@pytest.mark.heavy  # half a minute
def test_a_worker_that_a_sample_ends_is_replaced_and_the_sample_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", building.PYTHONPATH)  # for the workers
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(process_engine, "STOPPED_CHECKS", 4)
    with executor("local", cpus=1) as run:
        last = 0
        for how, why in REASONS.items():
            [(_, (first, _))] = run(Turn.run, [Turn(how=how, keys=["a"])])
            [(_, (second, left_out))] = run(Turn.run, [Turn(how=how, keys=["a", "evil", "b"])])
            assert list(left_out) == ["evil"]
            assert re.fullmatch(f"decoding it {why}", left_out["evil"].reason)
            kind = "timed out" if "longer" in why else "killed its worker"
            assert left_out["evil"].kind == kind
            assert first != second
            assert last in (0, first)
            last = second
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("source", "doing", "recipe"),
    [
        ("Locked", FETCHING, None),
        ("Holding", FETCHING, None),
        ("Many", DECODING, "hang"),
        ("Many", DECODING, "hold_the_lock"),
    ],
)
def test_an_item_that_hangs_is_the_only_hole_and_all_others_have_their_pixels(
    tmp_path: Path, source: str, doing: str, recipe: str | None
) -> None:
    store, given = tmp_path / "store", list[object]()
    if recipe:
        text = building.marked_recipe(recipe)
        given = ["--recipe", write(tmp_path / "recipe.toml", text.encode())]
    ran = cli("build", f"python:tests.runtime.test_time_limit:{source}", store, *given, "--cpus", 2,
        "--sample-timeout", 1, "--shard-samples", 20, "--keep-order", "--json",
        cwd=REPOSITORY)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["holes"] == [["23", f"{doing} {LATE} 1 s (--sample-timeout)"]]
    rows = building.pixels(store)
    assert {key: (row.min(), row.max()) for key, row in rows.items()} == {
        str(index): (index, index) for index in range(40) if index != 23
    }


DEADLY = {3: "hangs", 9: "kills", 14: "hangs", 20: "kills"}


class Deadly(Locked):
    """Items that hang and that end their process, in each of two halves; each writes its number."""

    def __init__(self) -> None:
        self.log = os.environ["DEADLY"]

    def __getitem__(self, index: int) -> np.ndarray:
        if index in DEADLY:
            with Path(self.log).open("a") as log:
                log.write(f"{index}\n")
            if DEADLY[index] == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            self.released.wait()
        return np.full((8, 8, 3), index, np.uint8)


@pytest.mark.heavy
@pytest.mark.parametrize("shard_samples", [40, 12])
def test_samples_that_end_workers_do_so_twice_each_in_one_shard_or_several(
    tmp_path: Path, shard_samples: int
) -> None:
    """The first time beside others, and then alone: no search for another meets them again."""
    log, store = tmp_path / "log", tmp_path / "store"
    ran = cli("build", "python:tests.runtime.test_time_limit:Deadly", store, "--cpus", 2,
        "--sample-timeout", 2, "--shard-samples", shard_samples, "--keep-order", "--json",
        cwd=REPOSITORY, env=environment(DEADLY=str(log)))  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    holes = dict(json.loads(ran.stdout)["holes"])
    assert holes.keys() == {str(index) for index in DEADLY}
    for index, how in DEADLY.items():
        assert holes[str(index)].startswith(f"{FETCHING} {LATE if how == 'hangs' else KILLS}")
    assert Counter(map(int, log.read_text().split())) == dict.fromkeys(DEADLY, 2)


def make_sparse(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(nbytes)


def test_a_file_of_more_bytes_than_is_right_is_not_read(tmp_path: Path) -> None:
    make_sparse(tmp_path / "b.jpg", 1 << 43)
    write(tmp_path / "a.jpg", b"12345")
    for limit, listed, why in (
        (1 << 50, 1 << 43, "has 8.8 TB, more than the memory allows"),
        (1 << 50, -1, "has 8.8 TB, more than the memory allows"),
        (MOST_SAMPLE_BYTES, 5, "has more than 5 bytes and had 5 when it was listed"),
        (MOST_SAMPLE_BYTES, -1, "has 8.8 TB, over the limit of 537 MB"),
    ):
        source = open_source(str(tmp_path), most_bytes=limit)
        first, second = source.fetch(["a.jpg", "b.jpg"], [5 if listed > 0 else -1, listed])
        assert isinstance(first, Sample)
        assert why in str(second)


def test_limits_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for name, value, why in (
        ("max_sample_bytes", "much", "is 'much'; give bytes, or a size such as"),
        ("max_sample_bytes", 0, "is 0; give a whole number from 1 up"),
        ("sample_timeout", 0, "is 0; give a number above 0"),
        ("sample_timeout", float("inf"), "is inf; give a finite number"),
        ("sample_timeout", 1e300, "is 1e[+]300; the most is"),
        ("sample_timeout", 60, ".*give more than 120 seconds, for which requests to a"),
    ):
        options: dict[str, Any] = {name: value}
        with pytest.raises(UsageError, match=f"{name} {why}"):
            precache.build("s3://bucket/in", tmp_path / "store", **options)


def test_a_file_of_too_many_bytes_is_a_hole_until_a_higher_limit_retries_it(
    photos: Path, run: Run
) -> None:
    make_sparse(photos / "cat/0000.jpg", 1 << 40)
    photo = building.encoded(building.cut(1), quality=90)
    write(photos / "eel/0023.jpg", photo + bytes(100_000))
    line = ["build", photos, photos.with_name("store"), "--address", "serial"]
    line += ["--sample-timeout", 99, "--max-sample-bytes"]
    ran = run(*line, "100kB")
    assert ran.status == 0, ran.err
    for why in ("has 1.1 TB, over the limit of 100 KB (--max-sample-bytes)", "--retry-failed"):
        assert why in ran.out
    assert "has 102 KB, over the limit of 100 KB" in ran.out
    assert "--retry-failed" in run(*line, "1MB").out
    result = run(*line, "1MB", "--retry-failed", "--json").json
    why = "has 1.1 TB, over the limit of 1 MB (--max-sample-bytes)"
    assert (result["mended"], result["holes"]) == (1, [["cat/0000.jpg", why]])
