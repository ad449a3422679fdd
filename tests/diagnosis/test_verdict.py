"""The verdict, the predictions and the page, on made measurements."""

import json
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.diagnosis.diagnose import Diagnosis, loops, render_diagnosis
from precache.diagnosis.judgement import Remedy
from precache.diagnosis.measurements import Copies, Measurements, Setup, TimedRun
from precache.runtime.usage import Usage
from precache.units import in_ms
from tests.support.html_page import stands_alone

COUNT = 60


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
    """A step on the CPU beside a loader that computes `cpu` of its time.

    `more` has fields of `Measurements`, of the setup, and of the loader's usage.
    """
    of = {kind: {name: more.pop(name) for name in more.keys() & kind.__annotations__}
          for kind in (Setup, Usage)}  # fmt: skip
    copies = more.get("copies")
    setup = Setup(**{"workers": 0, "cores": 4, "batch_nbytes": 1000, **of[Setup]})
    free = step + (copies.exposed if copies else 0.0)
    both = made(together, wait=max(0.0, together - free) / together)
    if setup.workers == 0 and not isinstance(load, float):  # the loop loads by itself
        both = replace(made([one + step for one in load]), waits=tuple(load))
    loader = made(load, **of[Usage])
    return Measurements(step=made(step), loader=loader, together=both, setup=setup, **more)


def remedy(found: Measurements, name: str) -> Remedy:
    return next(each for each in Diagnosis.of(found).remedies if each.name == name)


TAIL = [0.01] * 57 + [0.5] * 3
BURSTS = ([0.001] * 7 + [0.2]) * 8
COPY = Copies(pinned=False, as_given=0.03, from_pinned=0.01, exposed=0.03)
CUDA: dict[str, Any] = {"workers": 2, "cuda": True, "copies": COPY}
LOCKED: dict[str, Any] = {"workers": 3, "single_worker": made(0.06)}


def waiting(cpu: float, **usage: float) -> Measurements:
    """Of a loop that loads by itself, with a share of CPU time and these figures of the kernel."""
    return measured(0.02, 0.06, 0.08, cpu=cpu, **usage)


HERE = waiting(1.0)
START = measured(0.02, 0.005, 0.02, workers=2, epoch=50, start=1.0)
OTHERS = "something else uses the machine"
CASES: dict[str, tuple[Measurements, str, str]] = {
    "the step takes the time": (measured(0.05, 0.001, 0.051), "compute-bound", ""),
    "workers are ahead": (measured(0.05, 0.04, 0.05, workers=4), "compute-bound", ""),
    "noise beside fast workers": (measured(0.05, 0.002, 0.06, workers=2), "compute-bound", ""),
    "a busy machine beside fast workers": (
        measured(0.04, 0.016, 0.05, workers=2, single_worker=made(0.03), take=0.01),
        "compute-bound", ""),
    "decoding, in this process": (HERE, "CPU-bound", ""),
    "decoding, in workers": (
        measured(0.02, 0.06, 0.06, workers=2, single_worker=made(0.12, 0.95)), "CPU-bound", ""),
    "idle cores": (waiting(0.28), "storage-bound", ""),
    "no figures of the kernel": (
        replace(waiting(0), loader=TimedRun((0.06,) * COUNT, 0.06 * COUNT, Usage(3.6))),
        "storage-bound", ""),
    "loading and step share cores": (
        replace(measured(0.02, 0.02, 0.04, cpu=1.0, workers=1, cores=1),
                step=made(0.02, 1.0), together=made(0.04, 1.0, wait=0.01)), "CPU-bound", ""),
    "cores are taken by others": (waiting(0.3, delay=0.65 * 0.06 * COUNT), "CPU-bound", OTHERS),
    "half a core": (waiting(0.5, delay=0.4 * 0.06 * COUNT), "CPU-bound", OTHERS),
    "waiting for a network, and now and then for a core": (
        waiting(0.1, delay=0.45 * 0.06 * COUNT), "storage-bound", OTHERS),
    "waiting for the disk": (waiting(0.1, read_bytes=9e6), "storage-bound", ""),
    "waiting for a pipe": (waiting(0.1, called_bytes=1e8, read_bytes=9e5), "storage-bound", ""),
    "waiting for each other": (measured(0.02, 0.06, 0.06, **LOCKED), "contention-bound", ""),
    "starting workers": (START, "startup-bound", ""),
    "copies": (measured(0.02, 0.002, 0.052, **CUDA), "transfer-bound", ""),
    "a long tail, in this process": (measured(0.02, TAIL, 0.055), "variance-bound", ""),
    "a long tail, in workers": (measured(0.04, TAIL, 0.055, workers=1), "variance-bound", ""),
    "bursts": (measured(0.02, BURSTS, 0.045), "variance-bound", ""),
    "too many workers": (
        measured(0.02, 0.06, 0.06, cpu=1.0, workers=32), "CPU-bound",
        "num_workers=32 on 4 cores: the workers compete"),
    "memory of no use": (
        measured(0.02, 0.06, 0.08, pin_memory=True), "storage-bound",
        "pin_memory=True, but the step uses no CUDA"),
    "times that do not fit": (
        measured(0.02, 0.01, 0.03, workers=2), "storage-bound",
        "the model gives 1.50 times the measured speed"),
    "the only slow batch": (
        measured(0.05, [0.001] * 59 + [1.0], 0.051, workers=1), "compute-bound",
        "one batch took 1 s"),
}  # fmt: skip
"""Measurements, their verdict, and what is flagged."""


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_and_what_people_get_wrong_are_text_json_and_a_page(name: str) -> None:
    """The only slow batch is left out."""
    measurements, verdict, flag = CASES[name]
    judged, left = measurements.without_outlier(), name == "the only slow batch"
    assert (judged != measurements) == left
    assert not left or judged.loader.mean == pytest.approx(0.001)
    found = Diagnosis.of(judged)
    assert found.verdict == verdict, found.reason
    assert ("the disk" in found.reason) == ("the disk" in name)
    assert flag in " ".join(found.flags)
    assert (found.flags == ()) == (flag == "")
    fits = not any(text.startswith("the model gives") for text in found.flags)
    rough = not fits or flag == OTHERS
    assert ({each.confidence for each in found.remedies} == {"low"}) == rough
    assert found.without_waiting == pytest.approx(1 / measurements.step.mean)
    lines = str(found).splitlines()
    assert lines[0] == f"{verdict}: {found.reason}"
    assert any(line.split()[:2] == ["per", "batch"] for line in lines)
    assert "loader alone" in str(found)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["verdict"] == verdict
    assert data["remedies"] == [vars(remedy) for remedy in found.remedies]
    assert data["runs"]["step alone"]["mean"] == pytest.approx(measurements.step.mean)
    if fits and name != "noise beside fast workers":  # the model gives the measured speed
        predicted = 1e3 * len(found.simulation.load) / found.simulation.end
        assert predicted == pytest.approx(found.batches_per_s, rel=0.15)
    waits, stall = found.simulation.stall_share, judged.together.stall
    page = render_diagnosis(found)
    stands_alone(page, scripts=2)
    for text in (
        found.reason,
        f"it waits {waits:.0%} of the time; the measured loop waited {stall:.0%}",
        f"<dd>{found.lost_share:.0%}</dd>",
        f"mean {in_ms(found.measurements.step.mean)}, 95th percentile",
        *(f"<dt>{remedy.gain:.2f} x: {remedy.what}</dt>" for remedy in found.remedies),
    ):
        assert text in unescape(page)
    now, *others = loops(found)
    assert now == ("now, measured", found.lost_share, found.batches_per_s)
    helpful = [remedy for remedy in found.remedies if remedy.gain >= 1.05]
    for remedy, (name, lost, rate) in zip(helpful, others, strict=True):
        assert (name, rate) == (f"{remedy.name}, predicted", remedy.batches_per_s)
        assert lost == pytest.approx(1 - rate / found.without_waiting, abs=1e-9)


SECONDS = st.floats(1e-4, 10)
EACH = st.lists(SECONDS, min_size=1, max_size=40)
RUNS = st.builds(made, EACH, st.floats(0, 4), st.floats(0, 1))
SETUPS = st.builds(
    Setup, workers=st.none() | st.integers(0, 64), prefetch=st.integers(1, 8),
    in_order=st.booleans(), epoch=st.none() | st.integers(1, 5000), cuda=st.booleans(),
    cores=st.integers(1, 64), batch_nbytes=st.integers(0, 10**9), cached=st.booleans(),
)  # fmt: skip
ANY = st.builds(
    Measurements, step=RUNS, loader=RUNS, together=RUNS, setup=SETUPS, start=st.floats(0, 10),
    single_worker=st.none() | RUNS,
    copies=st.none() | st.builds(Copies, st.booleans(), SECONDS, SECONDS, SECONDS),
)  # fmt: skip


@given(ANY)
def test_whatever_was_measured_there_is_a_verdict_and_no_remedy_beats_the_step(
    found: Measurements,
) -> None:
    judged = Diagnosis.of(found.without_outlier())
    assert str(judged)
    gains = [each.gain for each in judged.remedies]
    assert gains == sorted(gains, reverse=True)
    for each in judged.remedies:
        assert each.gain == pytest.approx(each.batches_per_s / judged.batches_per_s)
        assert each.batches_per_s <= judged.without_waiting * (1 + 1e-9)


def test_slow_batches_in_order_are_not_taken_for_contention() -> None:
    load = np.random.default_rng(0).gamma(1, 0.05, COUNT).tolist()
    alone = Diagnosis.of(measured(0.001, load, 0.05, workers=1)).simulation.load / 1e3
    found = measured(0.02, float(alone.mean()) / 2.5, 0.03, workers=4, single_worker=made(load))
    assert "beside the others" not in remedy(found, "workers").why


BUSY: dict[str, Any] = {"cpu": 0.5, "delay": 1.8}
"""One worker that has half a core is one beside another process; two get two thirds of one."""
TAKE: dict[str, Any] = {"workers": 2, "single_worker": made(0.12), "take": 0.005}
CACHED = measured(0.02, 0.06, 0.08, cpu=1.0, workers=None, cached=True)
PINNED = measured(0.02, 0.002, 0.05, **CUDA | {"copies": replace(COPY, pinned=True)})


@pytest.mark.parametrize(
    ("found", "name", "gain", "within", "text"),
    [
        (measured(0.02, 0.06, 0.08), "workers", 4, 0.05, "num_workers=3, medium"),
        (measured(0.02, 0.9, 0.92, cores=64), "workers", 0.92 / 0.9 * 32, 0.03, "num_workers=32, "),
        (measured(0.001, 0.06, 0.061, cpu=1.0), "workers", 0.061 / 0.015, 0.02, "num_workers=4, "),
        (measured(0.001, 0.06, 0.061, **BUSY, cores=1), "workers", 1, 0.05, ""),
        (measured(0.001, 0.06, 0.061, **BUSY, cores=2), "workers", 1.55, 0.05, ""),
        (measured(0.02, 0.06, 0.06, **LOCKED), "workers", 1, 0.02, "3.0 times as long"),
        (measured(0.02, 0.06, 0.08, workers=None), "workers", 80 / 60, 0.01, "prefetch"),
        (measured(0.02, 0.06, 0.06, **TAKE), "workers", 0.06 / 0.025, 0.03, ""),
        (measured(0.02, 0.06, 0.06, **TAKE), "precache", 0.06 / 0.025, 0.03, ""),
        (measured(0.02, 0.06, 0.08, cpu=1.0, batch_nbytes=10**6), "precache", 4, 0.01, ", high"),
        (measured(0.02, 0.9, 0.92, cpu=1.0, batch_nbytes=2 * 10**9),
         "precache", 0.92 / 0.5, 0.05, ", low"),
        (measured(0.02, 0.002, 0.05, **CUDA), "pinned memory", 0.05 / 0.03, 0.01, ""),
        (measured(0.04, TAIL, 0.055, workers=1), "prefetch", 0.055 / 0.041, 0.05, ""),
        (START, "persistent workers", 2, 0.05, "persistent_workers=True"),
        (measured(0.02, 0.06, 0.08, cpu=0.1), "faster storage", 0.08 / 0.026, 0.05, "faster disk"),
    ],
)  # fmt: skip
def test_a_remedy_has_the_gain_that_its_times_give(
    found: Measurements, name: str, gain: float, within: float, text: str
) -> None:
    given = remedy(found, name)
    assert given.gain == pytest.approx(gain, rel=within)
    assert text in f"{given.what}, {given.confidence}, {given.why}"


def test_two_runs_add_up_to_the_run_of_both() -> None:
    one, other = made(0.1, 0.5, wait=0.5, read_bytes=1e6), made(0.3, 1.0, wait=1.0)
    other = replace(other, transform_share=0.5)
    both = one + other
    assert (both.total, both.usage.wall, both.usage.cpu) == pytest.approx((24, 24, 3 + 18))
    assert (len(both.seconds), both.usage.read_bytes) == (120, None)
    assert both.transform_share == pytest.approx(0.5 * 18 / (3 + 18)), "by their waits"


def test_waiting_for_transforms_on_the_cpu_is_not_called_loading() -> None:
    found = replace(CACHED, together=replace(CACHED.together, transform_share=0.8))
    judged = Diagnosis.of(found)
    reason = "transforms on the CPU compute, and the step waits for them"
    assert (judged.verdict, judged.reason) == ("CPU-bound", reason)
    assert remedy(found, "transforms").gain == pytest.approx(1 / (1 - 0.8 * 0.75), rel=0.01)
    names = {each.name for one in (found, PINNED) for each in Diagnosis.of(one).remedies}
    assert "pinned memory" not in names
    text = "The loop waits 75% of the time: 60% for transforms on the CPU, 15% for loading."
    assert text in str(judged)
    idle = replace(found, loader=made(0.06, cpu=0.1))  # the transforms wait themselves
    assert Diagnosis.of(idle).verdict == "storage-bound"


def test_the_share_that_is_lost_is_one_number_and_other_waits_have_their_reason() -> None:
    """A step of 20 ms takes 44 beside workers that want its cores; it waits another 16."""
    crowded = measured(0.02, 0.03, 0.06, cpu=1.9, workers=4, cores=2)
    together = TimedRun((0.06,) * 1000, 60.0, Usage(60.0, cpu=110.0), (0.016,) * 1000)
    found = Diagnosis.of(replace(crowded, together=together, step=made(0.02, cpu=1.0)))
    assert loops(found)[0][1] == pytest.approx(2 / 3)
    for text in (str(found), unescape(render_diagnosis(found))):
        assert "The loop waited for data 27% of the measured time: loading also slows" in text
    assert "so 67% of the time is lost to data." in str(found)
    alone = Diagnosis.of(HERE)
    assert "waited for data" not in str(alone)
    assert loops(alone)[0][1:] == pytest.approx((0.75, 12.5))
