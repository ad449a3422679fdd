"""Summaries: what is called rare, what a line says, what goes into plots."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.metering.report import RankStalls, SlowStep, StallReport, rare, slowest
from precache.runtime.machine import Machine
from precache.runtime.spread import Spread

OWN = RankStalls(0, 3, 100, 0.04, 0.005, 0.125)
REPORT = StallReport(
    name="train",
    rank=0,
    world_size=1,
    window=3,
    step=300,
    steps=100,
    data=Spread(0.005, 0.0002, 0.031, 0.1204),
    iteration=Spread(0.125, 0.12, 0.15, 1.25),
    stall_ratio=0.04,
    slow=(),
    ranks=(OWN,),
    machine=Machine(),
    time=0.0,
)
LINE = (
    "train, steps 201 to 300: waited for data 4.0% of the time; 5.0 of 125 ms per step "
    "(waits: median 0.2, p95 31.0, max 120 ms)"
)


def test_the_line_tells_what_else_is_known() -> None:
    ranks = (OWN, RankStalls(3, 3, 100, 0.061, 0.008, 0.125), RankStalls(5, 2, 100, 0.01, 0, 0.125))
    slow = (SlowStep(241, 0.1204, keys=("a", "b", "c", "d", "e")), SlowStep(201, 0.1, True))
    machine = Machine(2.14, 0.931, 0.0042)
    report = dataclasses.replace(REPORT, ranks=ranks, world_size=8, slow=slow, machine=machine)
    assert str(report) == (
        f"rank 0: {LINE}; rare slow samples: step 241 (120 ms: a, b, c, d … and 1 more), "
        "step 201 (100 ms, the first of an iteration); worst of 3 of 8 ranks: rank 3 with 6.1%; "
        "CPU 2.1 cores; GPU 93%; I/O wait 0.4%"
    )
    assert report.worst.rank == 3
    assert str(REPORT) == LINE
    one = str(dataclasses.replace(REPORT, steps=1, name="a\x1b[2J\n", transform_ratio=0.03))
    assert one.isprintable(), "a name steers no terminal"
    assert ", step 300: waited for data 4.0% of the time (3.0% for transforms, 1.0% for lo" in one
    assert "worst of 3 ranks: rank 3" in str(dataclasses.replace(report, world_size=3))


def test_figures_are_numbers_and_leave_out_what_is_not_known() -> None:
    found = json.loads(json.dumps(REPORT.as_dict()))
    assert (found["data"]["median"], found["worst_rank"]) == (0.0002, None)
    figures = REPORT.figures()
    assert figures["stall_ratio"] == 0.04
    assert figures["data_p95_seconds"] == 0.031
    assert figures["iteration_max_seconds"] == 1.25
    assert not {"cpu_cores", "io_wait", "worst_rank"} & set(figures)
    more = dataclasses.replace(
        REPORT, ranks=(OWN, RankStalls(1, 3, 9, 0.5, 0, 0)), machine=Machine(cpu_cores=1.5)
    ).figures()
    assert (more["worst_rank"], more["worst_stall_ratio"], more["cpu_cores"]) == (1.0, 0.5, 1.5)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([0.001] * 99 + [0.5], True), ([0.005] * 100, False), ([0.001, 0.002] * 50, False)],
)
def test_a_high_mean_with_a_low_median_is_rare(seconds: list[float], expected: bool) -> None:
    data = Spread.of(seconds)
    assert rare(data, 0.05, 0.01) is expected
    assert not rare(data, 0.01, 0.01)  # it does not stall: there is nothing to look for


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_slow_steps_are_those_above_the_mean_longest_first(seconds: list[float]) -> None:
    data = Spread.of(seconds)
    found = slowest(data, [SlowStep(number, value) for number, value in enumerate(seconds)])
    assert [each.seconds for each in found] == sorted(
        (value for value in seconds if value > data.mean), reverse=True
    )
