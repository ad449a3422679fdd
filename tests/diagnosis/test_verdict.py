"""The verdict and the predictions, on made measurements."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.diagnosis.diagnose import Diagnosis
from precache.diagnosis.measurements import Copies, Measurements, Setup, TimedRun
from precache.diagnosis.page_cache import Files
from precache.diagnosis.remedies import LoopTimes, Remedy
from precache.diagnosis.verdict import judge
from precache.runtime.usage import Usage

COUNT = 60
GB = 1 << 30


def made(
    seconds: float | Sequence[float], cpu: float = 0.0, wait: float = 0.0, **usage: float
) -> TimedRun:
    """A run whose batches take `seconds`, of which `cpu` and `wait` are shares."""
    each = [seconds] * COUNT if isinstance(seconds, float) else list(seconds)
    total = sum(each)
    waits = tuple(wait * one for one in each)
    return TimedRun(tuple(each), total, Usage(total, cpu * total, **usage), waits)


def measured(
    step: float, load: float | Sequence[float], together: float, **more: Any
) -> Measurements:
    """A step on the CPU beside a loader that computes `cpu` of its time."""
    cpu, io = more.pop("cpu", 0.0), more.pop("io", {})
    copies = more.get("copies")
    setup = Setup(**{"workers": 0, "cores": 4, "batch_nbytes": 1000, **more.pop("setup", {})})
    free = step + (copies.exposed if copies else 0.0)
    wait = max(0.0, together - free) / together
    return Measurements(
        step=made(step),
        loader=made(load, cpu, **io),
        together=made(together, wait=wait),
        setup=setup,
        **more,
    )


def remedy(found: Measurements, name: str) -> Remedy:
    return next(each for each in judge(found).remedies if each.name == name)


TAIL = [0.01] * 57 + [0.5] * 3
UNEVEN = [0.018] * 54 + [0.038] * 6
BURSTS = ([0.001] * 7 + [0.2]) * 8
SLOW_DISK = {
    "setup": {"files": Files(100, 2 * GB, GB), "memory": GB, "workers": 0},
    "cold": made(0.1, 0.05, read_bytes=1e9),
}
COPY = Copies(pinned=False, as_given=0.03, from_pinned=0.01, exposed=0.03)

CASES = {
    "the step takes the time": (measured(0.05, 0.001, 0.051), "compute-bound"),
    "workers are ahead": (measured(0.05, 0.04, 0.05, setup={"workers": 4}), "compute-bound"),
    "noise beside fast workers": (
        measured(0.05, 0.002, 0.06, setup={"workers": 2}),
        "compute-bound",
    ),
    "decoding, in this process": (measured(0.02, 0.06, 0.08, cpu=1.0), "CPU-bound"),
    "decoding, in workers": (
        measured(0.02, 0.06, 0.06, setup={"workers": 2}, single_worker=made(0.12, 0.95)),
        "CPU-bound",
    ),
    "decoding, and no figures of the kernel": (
        dataclasses.replace(
            measured(0.02, 0.06, 0.08), loader=TimedRun((0.06,) * COUNT, 0.06 * COUNT, Usage(3.6))
        ),
        "CPU-bound",
    ),
    "loading and step share cores": (
        dataclasses.replace(
            measured(0.02, 0.02, 0.04, cpu=1.0, setup={"workers": 1, "cores": 1}),
            step=made(0.02, 1.0),
            together=made(0.04, 1.0, wait=0.01),
        ),
        "CPU-bound",
    ),
    "cores are taken by others": (
        measured(0.02, 0.06, 0.08, cpu=0.3, io={"delay": 0.65 * 0.06 * COUNT}),
        "CPU-bound",
    ),
    "waiting for the disk": (
        measured(0.02, 0.06, 0.08, cpu=0.1, io={"read_bytes": 1e9}),
        "storage-bound",
    ),
    "waiting for a pipe": (
        measured(0.02, 0.06, 0.08, cpu=0.1, io={"called_bytes": 1e8}),
        "storage-bound",
    ),
    "waiting for a network": (measured(0.02, 0.06, 0.08, cpu=0.1), "storage-bound"),
    "warm, but does not stay so": (measured(0.02, 0.002, 0.022, **SLOW_DISK), "storage-bound"),
    "copies": (
        measured(0.02, 0.002, 0.052, setup={"workers": 2, "cuda": True}, copies=COPY),
        "transfer-bound",
    ),
    "a long tail, in this process": (measured(0.02, TAIL, 0.055), "variance-bound"),
    "a long tail, in workers": (
        measured(0.04, TAIL, 0.055, setup={"workers": 1}),
        "variance-bound",
    ),
    "bursts": (measured(0.02, BURSTS, 0.045), "variance-bound"),
    "one outlier says nothing": (
        measured(0.05, [0.001] * 59 + [1.0], 0.051),
        "compute-bound",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name: str) -> None:
    found, verdict = CASES[name]
    judged = judge(found)
    assert judged.verdict == verdict, judged.reason
    assert judged.without_waiting == pytest.approx(1 / found.step.mean)
    assert {figure.name for figure in judged.evidence} >= {"step alone", "waiting for data"}


@pytest.mark.parametrize("name", CASES)
def test_a_diagnosis_is_text_and_json(name: str) -> None:
    found, verdict = CASES[name]
    diagnosis = Diagnosis.of(found)
    lines = str(diagnosis).splitlines()
    assert lines[0] == f"{verdict}: {diagnosis.reason}"
    assert "mean time per batch" in lines
    loaded = json.loads(json.dumps(diagnosis.to_dict()))
    assert loaded["verdict"] == verdict
    assert loaded["remedies"] == [vars(each) for each in diagnosis.remedies]


SECONDS = st.floats(1e-4, 10)
RUNS = st.builds(
    made,
    st.lists(SECONDS, min_size=1, max_size=40),
    st.floats(0, 4),
    st.floats(0, 1),
)
ANY = st.builds(
    Measurements,
    step=RUNS,
    loader=RUNS,
    together=RUNS,
    setup=st.builds(
        Setup,
        workers=st.none() | st.integers(0, 64),
        prefetch=st.integers(1, 8),
        cuda=st.booleans(),
        cores=st.integers(1, 64),
        batch_nbytes=st.integers(0, 10**9),
        cached=st.booleans(),
        files=st.none() | st.just(Files(10, 2 * GB, GB)),
        memory=st.none() | st.just(GB),
    ),
    single_worker=st.none() | RUNS,
    cold=st.none() | RUNS,
    copies=st.none() | st.builds(Copies, st.booleans(), SECONDS, SECONDS, SECONDS),
)


@given(ANY)
def test_whatever_was_measured_there_is_a_verdict_and_no_remedy_beats_the_step(
    found: Measurements,
) -> None:
    judged = judge(found)
    assert str(Diagnosis.of(found))
    gains = [each.gain for each in judged.remedies]
    assert gains == sorted(gains, reverse=True)
    now = LoopTimes.of(found).now
    for each in judged.remedies:
        assert each.gain == pytest.approx(each.batches_per_s * now)
        assert each.batches_per_s <= judged.without_waiting * (1 + 1e-9) or each.gain <= 1


def test_workers_are_as_many_as_keep_up_with_the_step() -> None:
    found = remedy(measured(0.02, 0.06, 0.08), "workers")
    assert (found.what, found.confidence) == ("num_workers=4", "medium")
    assert found.gain == pytest.approx(4.0)


def test_workers_that_compute_are_no_more_than_cores() -> None:
    found = remedy(measured(0.001, 0.06, 0.061, cpu=1.0), "workers")
    assert found.what == "num_workers=4"
    assert found.gain == pytest.approx(0.061 / 0.015, rel=0.01)


def test_workers_in_each_others_way_are_not_made_more() -> None:
    setup = {"workers": 4}
    found = measured(
        0.02, 0.06, 0.06, setup=setup, single_worker=made(0.08), io={"read_bytes": 1e9}
    )
    assert remedy(found, "workers").gain == pytest.approx(1.0)
    assert "3.0 times as long" in remedy(found, "workers").why


def test_of_other_loaders_only_loading_ahead_is_said() -> None:
    found = remedy(measured(0.02, 0.06, 0.08, setup={"workers": None}), "workers")
    assert "prefetch" in found.what
    assert found.gain == pytest.approx(80 / 60)
    cached = judge(measured(0.02, 0.06, 0.08, setup={"workers": None, "cached": True}))
    names = {each.name for each in cached.remedies}
    assert not names & {"workers", "precache"}, "a Loader loads ahead, and reads a cache"


def test_a_cache_costs_what_its_pixels_cost() -> None:
    small = measured(0.02, 0.06, 0.08, cpu=1.0, setup={"batch_nbytes": 10**6})
    large = measured(0.02, 0.9, 0.92, cpu=1.0, setup={"batch_nbytes": 2 * 10**9})
    assert remedy(small, "precache").gain == pytest.approx(4.0)
    assert remedy(small, "precache").confidence == "high"
    assert remedy(large, "precache").gain == pytest.approx(0.92 / 0.5, rel=0.05)
    assert remedy(large, "precache").confidence == "low"


def test_pinned_memory_saves_the_slow_part_of_a_copy_and_no_more() -> None:
    found = measured(0.02, 0.002, 0.05, setup={"workers": 2, "cuda": True}, copies=COPY)
    assert remedy(found, "pinned memory").gain == pytest.approx(0.05 / 0.03)
    pinned = dataclasses.replace(COPY, pinned=True)
    found = dataclasses.replace(found, copies=pinned)
    assert all(each.name != "pinned memory" for each in judge(found).remedies)


def test_a_deeper_queue_outlasts_the_slowest_batch() -> None:
    found = measured(0.04, TAIL, 0.055, setup={"workers": 1})
    assert remedy(found, "prefetch").what == "prefetch_factor=14"
    assert remedy(found, "prefetch").gain == pytest.approx(0.055 / 0.04)


def test_a_faster_disk_is_at_most_as_fast_as_memory() -> None:
    found = measured(0.02, 0.002, 0.022, **SLOW_DISK)
    assert judge(found).batches_per_s == pytest.approx(1 / 0.12)
    assert remedy(found, "faster disk").gain == pytest.approx(0.12 / 0.022)


def test_reading_in_a_row_is_predicted_from_the_disks_own_rate() -> None:
    setup = {**SLOW_DISK["setup"], "workers": None, "cached": True}
    found = measured(0.02, 0.002, 0.022, setup=setup, cold=SLOW_DISK["cold"], sequential=1e9)
    each = 1e9 / COUNT / 1e9
    assert remedy(found, "block shuffle").gain == pytest.approx(0.12 / (0.02 + each), rel=0.01)
    blocks = dataclasses.replace(found.setup, block_shuffle=True)
    names = {each.name for each in judge(dataclasses.replace(found, setup=blocks)).remedies}
    assert "block shuffle" not in names


FLAGS: dict[str, Measurements] = {
    "num_workers=32 on 4 cores: the workers compete": measured(
        0.02, 0.06, 0.06, cpu=1.0, setup={"workers": 32}
    ),
    "pin_memory=True, but the step uses no CUDA": measured(
        0.02, 0.06, 0.08, setup={"pin_memory": True}
    ),
    "waits for the device at train.py:12": measured(
        0.02, 0.01, 0.03, setup={"cuda": True}, synchronisations=("train.py:12",)
    ),
    "50,000 files of 3 KB": measured(
        0.02, 0.06, 0.08, setup={"files": Files(50_000, 150_000_000, 3000)}
    ),
    "one batch of 60 (alone, number 60) took 1 s": measured(0.05, [0.001] * 59 + [1.0], 0.051),
    "give persistent_workers=True": measured(
        0.02, 0.01, 0.02, setup={"workers": 2, "epoch": 50}, start=2.0
    ),
    "loads 5.0 times slower": measured(0.05, 0.01, 0.06, cold=made(0.05, read_bytes=1e9)),
    "something else uses the machine": dataclasses.replace(
        measured(0.02, 0.06, 0.08), step=made(UNEVEN)
    ),
}


@pytest.mark.parametrize("text", FLAGS)
def test_what_people_get_wrong_is_flagged(text: str) -> None:
    assert any(text in flag for flag in judge(FLAGS[text]).flags)


def test_nothing_is_flagged_where_nothing_is_wrong() -> None:
    assert judge(CASES["the step takes the time"][0]).flags == ()


def test_the_load_of_the_first_batch_is_not_the_start_of_workers() -> None:
    slow = {"setup": {"workers": 2, "epoch": 5}, "single_worker": made(0.2), "start": 0.22}
    assert judge(measured(0.001, 0.1, 0.1, **slow)).flags == ()
    late = judge(measured(0.001, 0.1, 0.1, **{**slow, "start": 0.32})).flags
    assert late[0].startswith("starting workers takes 0.12 s of each epoch")


def test_on_a_busy_machine_predictions_are_less_sure() -> None:
    quiet = measured(0.02, 0.06, 0.08, cpu=1.0)
    busy = dataclasses.replace(quiet, step=made(UNEVEN))
    levels = ["low", "medium", "high"]
    for name in ("workers", "precache"):
        before, after = (levels.index(remedy(m, name).confidence) for m in (quiet, busy))
        assert after == before - 1


def test_a_run_knows_its_outlier_and_its_tail() -> None:
    one, tail = made([0.01] * 59 + [2.0]), made(TAIL)
    assert (one.outlier, one.tail) == (59, 0.0)
    assert one.mean == pytest.approx(0.01)
    assert tail.outlier is None
    assert tail.tail == pytest.approx(3 * 0.49 / sum(TAIL))
    assert made([0.01, 0.01, 2.0]).outlier is None, "of three batches, none can be called rare"


def test_differences_of_readings_never_fall_below_zero() -> None:
    for before, after in itertools.permutations([Usage(1.0, 5.0, None, 10.0), Usage(2.0, 3.0)]):
        gained = after - before
        assert gained.read_bytes is None
        assert gained.cpu is not None
        assert gained.cpu >= 0


def test_waiting_for_transforms_on_the_cpu_is_not_called_loading() -> None:
    found = measured(0.02, 0.06, 0.08, cpu=1.0, setup={"workers": None, "cached": True})
    together = dataclasses.replace(found.together, transform_share=0.8)
    found = dataclasses.replace(found, together=together)
    judged = judge(found)
    reason = "transforms on the CPU compute, and the step waits for them"
    assert (judged.verdict, judged.reason) == ("CPU-bound", reason)
    [evidence] = [fig for fig in judged.evidence if fig.name == "waiting for transforms on the CPU"]
    assert evidence.value == pytest.approx(0.8 * 0.75)
    assert remedy(found, "transforms").gain == pytest.approx(1 / (1 - 0.8 * 0.75))
    assert "The loop waits 75% of the time: 60% for transforms on the CPU, 15% for loading." in str(
        Diagnosis.of(found)
    )
