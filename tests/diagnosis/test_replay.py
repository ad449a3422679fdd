"""Batches of a diagnosis, played."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.diagnosis.replay import recorded, replay
from tests.diagnosis.test_verdict import CASES, made, measured

moments = st.lists(st.tuples(st.floats(1e-3, 10), st.floats(0, 1)), min_size=1, max_size=40)


@given(moments)
def test_a_loop_that_loads_itself_is_played_as_it_was_recorded(
    batches: list[tuple[float, float]],
) -> None:
    seconds = tuple(each for each, _ in batches)
    waits = tuple(each * share for each, share in batches)
    together = dataclasses.replace(made(seconds), waits=waits)
    shown = replay(dataclasses.replace(measured(0.02, 0.06, 0.08), together=together))
    assert shown.batches == len(batches)
    assert shown.stalls_ms / 1e3 == pytest.approx(np.array(waits), abs=1e-6)
    assert (shown.done - shown.begun) / 1e9 == pytest.approx(np.array(seconds), abs=1e-8)
    assert shown.stall_share_with_startup == pytest.approx(sum(waits) / sum(seconds), abs=1e-5)
    assert shown.queue_depth[1].max() == 0


def test_workers_take_the_times_of_one_as_long_as_several_need() -> None:
    found = measured(0.02, 0.06, 0.06, setup={"workers": 2}, single_worker=made(0.1))
    assert not recorded(found)
    shown = replay(found)
    assert shown.scenario.loaders == 2
    assert shown.scenario.load.mean_ms == pytest.approx(120), "0.06 s a batch of two workers"
    assert shown.scenario.capacity == 2
    assert shown.rate == pytest.approx(1 / 0.06, rel=0.05)
    assert shown.stall_share == pytest.approx(2 / 3, abs=0.05), "what the run waited"


@pytest.mark.parametrize("name", CASES)
def test_whatever_was_measured_can_be_played(name: str) -> None:
    found, _ = CASES[name]
    shown = replay(found)
    assert shown.scenario.seconds == pytest.approx(sum(found.together.seconds))
    assert 0 <= shown.stall_share <= 1
