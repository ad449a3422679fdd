"""A process that ends while iterators are alive does not wait for what does not answer."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import precache
from tests.conftest import BuiltStore
from tests.support.building import poll
from tests.support.servers import FaultProxy, S3Server

LIMIT = 20
"""Seconds that a process may take to end at all, while its server keeps silent for longer."""

READ = """
import json, sys
import precache
url, options = sys.argv[1], json.loads(sys.argv[2])
reading = precache.Reading(**options.pop("reading", {}))
loader = precache.Loader(url, 4, shuffle=False, reading=reading, **options)
batches = iter(loader)
kept = [next(batches)]
print("begun", flush=True)
sys.stdin.readline()
"""

METER = """
import sys, threading
import precache
def hang(report):
    print("begun", flush=True)
    threading.Event().wait()
steps = iter(precache.meter([1] * 10, every=2, to=[hang]))
for _ in range(5):
    next(steps)
sys.stdin.readline()
"""


TRANSFORM = """
import sys, time
import torch, precache
from precache.transforms import Compose, Draw, Transform

class Slow(Transform):
    def apply(self, batch, draw):
        begun = time.monotonic()
        image = batch["image"].float()
        while time.monotonic() < begun + 1:
            torch.nn.functional.avg_pool2d(image, 3, 1, 1)
        return batch

reading = precache.Reading(num_threads=3)
loader = precache.Loader(sys.argv[1], 4, shuffle=False, transform=Slow(), reading=reading)
batches = iter(loader)
next(batches)
"""


LOST = """
import gc
cycle = [batches]
cycle.append(cycle)
del batches, cycle
gc.collect()
"""


GOES_ON = """
import atexit
atexit.register(lambda: read())
import gc, sys, threading
import precache
from precache.transforms import Transform

class Nothing(Transform):
    def apply(self, batch, draw):
        return batch

reading = precache.Reading(num_threads=3)
loader = precache.Loader(sys.argv[1], 4, shuffle=False, transform=Nothing(), reading=reading)

def read():
    try:
        print(sum(len(batch["row"]) for batch in loader))
    except precache.PrecacheError as error:
        print(error)

def train():
    threading.main_thread().join()
    cycle = [iter(loader)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()
    read()

threading.Thread(target=train).start()
"""


BESIDE = """
import threading
threading.Thread(target=next, args=[batches], daemon=True).start()
time.sleep(2)
print(flush=True)
"""


NESTED = """
import sys, time
import precache
from precache.transforms import Transform

class Slow(Transform):
    def apply(self, batch, draw):
        time.sleep(0.2)
        return batch

class Outer(Transform):
    def apply(self, batch, draw):
        for _ in load(Slow(), 1):
            pass
        return batch

def load(transform, threads):
    reading = precache.Reading(num_threads=threads, prefetch_batches=2)
    return precache.Loader(sys.argv[1], 4, shuffle=False, transform=transform, reading=reading)

batches = iter(load(Outer(), 2))
next(batches)
time.sleep(0.1)
"""


def _process(code: str, *arguments: object, says: str = "") -> subprocess.Popen[str]:
    """A process that runs code, once it has said a line."""
    line = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert not says or process.stdout.readline() == says
    return process


def _assert_ends(process: subprocess.Popen[str], limit: float = LIMIT) -> str:
    """It ends by itself, once told that it may, and has nothing to complain of."""
    try:
        output, errors = process.communicate("\n", limit)
        assert (process.returncode, errors) == (0, "")
        return output
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "cached",
    [pytest.param(False, id="ranges", marks=pytest.mark.heavy), pytest.param(True, id="cache")],
)
@pytest.mark.parametrize(
    "loading", [{}, pytest.param({"reading": {"num_threads": 1}}, marks=pytest.mark.heavy)]
)
def test_an_exit_does_not_wait_for_a_server_that_hangs(
    stores: dict[str, BuiltStore],
    s3: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    loading: dict[str, Any],
    *,
    cached: bool,
) -> None:
    url = f"s3://bucket/exit-{cached}-{len(loading)}"
    precache.pull(stores["raw"].path, url, storage_options=s3.options())
    options: dict[str, Any] = {"storage_options": s3.options(proxy.port)}
    if cached:
        options |= {"cache": str(tmp_path / "cache")}
    asked, answer = threading.Event(), threading.Event()

    def hang(method: str, path: str) -> None:
        if path.endswith("/image/c/1/0/0/0"):
            asked.set()
            assert answer.wait(3 * LIMIT)

    proxy.before = hang
    process = _process(READ, url, json.dumps(options | loading), says="begun\n")
    try:
        assert asked.wait(60)
        _assert_ends(process)
    finally:
        answer.set()
    if cached:  # whoever comes next finds nothing in its way
        proxy.before = lambda method, path: None
        with precache.Loader(url, 4, shuffle=False, **options) as loader:
            assert sum(len(batch["row"]) for batch in loader) == 21


@pytest.mark.heavy
def test_an_exit_leaves_no_batch_in_the_making(stores: dict[str, BuiltStore]) -> None:
    options = json.dumps({"reading": {"num_threads": 4, "prefetch_batches": 6}})
    _assert_ends(_process(READ, stores["image"].path, options, says="begun\n"))


@pytest.mark.parametrize(
    "lost", ["", pytest.param(LOST, marks=pytest.mark.heavy)], ids=["open", "collected"]
)
def test_an_exit_waits_for_transforms_under_way(stores: dict[str, BuiltStore], lost: str) -> None:
    """A thread that is ended within torch aborts the process."""
    _assert_ends(_process(TRANSFORM + lost, stores["image"].path), 60)


def test_a_thread_reads_on_after_the_main_one_and_the_exit_reads_no_more(
    stores: dict[str, BuiltStore],
) -> None:
    rows, refusal = _assert_ends(_process(GOES_ON, stores["image"].path), 60).splitlines()
    assert rows == "21"
    assert "the process ends" in refusal


@pytest.mark.heavy
def test_an_exit_ends_transforms_that_read_from_another_loader(
    stores: dict[str, BuiltStore],
) -> None:
    _assert_ends(_process(NESTED, stores["image"].path))


@pytest.mark.heavy
def test_an_exit_that_waits_for_a_transform_is_interrupted(stores: dict[str, BuiltStore]) -> None:
    slow = TRANSFORM.replace("begun + 1", "begun + 15").replace("next(batches)", BESIDE)
    process = _process(slow, stores["image"].path, says="\n")
    assert process.stderr is not None
    assert "waiting for the last batches" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.heavy
def test_an_exit_does_not_wait_for_an_output_that_hangs() -> None:
    _assert_ends(_process(METER, says="begun\n"))


def test_a_pool_that_is_lost_ends_its_threads(no_collection: None) -> None:
    from precache.runtime.threads import Threads, collected

    before = threading.active_count()
    pool = Threads(2, "precache-lost")
    assert [pool.submit(abs, -n).result() for n in range(4)] == [0, 1, 2, 3]
    del pool
    poll(lambda: threading.active_count() <= before, "its threads end")
    assert not collected()
