"""The model against closed forms, exact chains, published figures, and its own laws."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.errors import UsageError
from precache.simulation.model import Simulation, simulate

MS = 1_000_000

SETTINGS = st.fixed_dictionaries(
    {
        "load_ms": st.integers(1, 3000) | st.floats(1, 3000),
        "step_ms": st.integers(10, 300) | st.floats(10, 300),
        "loaders": st.integers(1, 12),
        "queue": st.none() | st.integers(0, 9),
        "load_cv": st.sampled_from([0, 0.1, 0.5, 1.5]),
        "step_cv": st.sampled_from([0, 0.3]),
        "load_dist": st.sampled_from([None, "lognormal"]),
        "resolution_ms": st.sampled_from([0, 50]),
        "seconds": st.floats(0.5, 8),
        "seed": st.integers(0, 2**32),
    }
)


def _done(found: Simulation) -> np.ndarray:
    """When the n-th step ended, as far as that is before the end."""
    times = np.sort(found.done)
    return times[times <= found.end]


# --- known answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(("load_ms", "batches"), [(2000, 98), (700, 293), (350, 296)])
def test_seven_steady_loaders(load_ms: float, batches: int) -> None:
    assert precache.simulate(load_ms, 100, 7, seconds=30).batches == batches


@pytest.mark.parametrize(("load_ms", "batches"), [(2000, 98), (700, 275), (350, 295)])
def test_seven_loaders_on_a_grid_make_what_was_published(load_ms: float, batches: int) -> None:
    made = [
        simulate(load_ms, 100, 7, load_cv=0.1, resolution_ms=100, seed=seed).batches
        for seed in range(100)
    ]
    assert np.mean(made) == pytest.approx(batches, rel=0.02)


@pytest.mark.parametrize(("cv", "queue", "lost"), [(0.1, 7, 0.4), (0.5, 7, 4), (0.1, 0, 22)])
def test_what_variance_costs_at_the_balance_point(cv: float, queue: int, lost: float) -> None:
    """As the command's help says."""
    made = [simulate(700, 100, 7, load_cv=cv, queue=queue, seed=s).batches for s in range(100)]
    assert 293 - np.mean(made) == pytest.approx(lost, abs=0.7)


@given(
    load=st.integers(1, 500),
    step=st.integers(1, 500),
    loaders=st.integers(1, 9),
    queue=st.none() | st.integers(0, 5),
    ms=st.integers(1, 5000),
)
def test_steady_times_have_a_closed_form(
    load: int, step: int, loaders: int, queue: int | None, ms: int
) -> None:
    """In rounds of all loaders where loading limits, and without a gap where the step does."""
    found = simulate(load, step, loaders, queue=queue, seconds=ms / 1000)
    if load >= loaders * step:
        rounds = range(1, ms // load + 1)
        expected = sum(min(loaders, (ms - r * load) // step) for r in rounds)
    else:
        expected = max(0, (ms - load) // step)
        assert found.stall_share == 0 or ms <= load
    assert found.batches == expected


def _chain(loaders: int, queue: int, load: float, step: float) -> dict[str, float]:
    """Stationary figures of the closed system with exponential times: a birth-death chain.

    State n: batches ready and not done, in the consumer's hands, in the queue, or held by a
    loader that is blocked. All loaders work but the blocked ones.
    """
    states = np.arange(loaders + queue + 2)
    blocked = np.maximum(0, states - 1 - queue)
    generator = np.zeros((len(states), len(states)))
    for n in states[:-1]:
        generator[n, n + 1] = (loaders - blocked[n]) / load
        generator[n + 1, n] = 1 / step
    generator -= np.diag(generator.sum(axis=1))
    # Balance, one equation of which is replaced by that the shares add up to one.
    system = np.vstack([generator.T[:-1], np.ones(len(states))])
    share = np.linalg.solve(system, np.eye(len(states))[-1])
    return {
        "rate": (1 - share[0]) / step,
        "stall": share[0],
        "queue": float(share @ np.clip(states - 1, 0, queue)),
        "blocked": float(share @ blocked) / loaders,
    }


@pytest.mark.parametrize(
    ("loaders", "queue", "load"),
    [(1, 1, 0.1), (3, 0, 0.3), (3, 3, 0.3), (7, 7, 2.0), (7, 2, 0.35), (4, 9, 0.42)],
)
def test_exponential_times_agree_with_the_exact_chain(
    loaders: int, queue: int, load: float
) -> None:
    exact = _chain(loaders, queue, load, 0.1)
    seconds, runs = 600.0, 12
    found = [
        simulate(
            load * 1000,
            100,
            loaders,
            queue=queue,
            load_dist="exponential",
            step_dist="exponential",
            seconds=seconds,
            seed=seed,
        )
        for seed in range(runs)
    ]
    measured = {
        "rate": [x.batches / seconds for x in found],
        "stall": [x.stall_share_with_startup for x in found],
        "queue": [x.queue_mean for x in found],
        "blocked": [x.blocked_share for x in found],
    }
    for name, values in measured.items():
        # The runs begin empty: the last terms bound what that makes in the first few load times.
        error = 4 * np.std(values, ddof=1) / math.sqrt(runs) + 0.005 * exact[name] + 1e-4
        assert np.mean(values) == pytest.approx(exact[name], abs=error), name


# --- laws ---------------------------------------------------------------------------------------


@given(SETTINGS)
def test_no_batch_is_lost_and_no_hand_holds_two(setting: dict[str, Any]) -> None:
    found = simulate(**setting)
    end, room = found.end, found.scenario.capacity
    made = found.ready <= end
    held = made & (found.queued > end)
    waiting = (found.queued <= end) & (found.taken > end)
    working = (found.taken <= end) & (found.done > end)
    assert made.sum() == found.batches + waiting.sum() + working.sum() + held.sum()
    assert working.sum() <= 1
    times, depth = found.queue_depth
    assert 0 <= depth.min() <= depth.max() <= max(room, 0)
    assert depth[-1] == waiting.sum()
    assert (np.diff(times) > 0).all()
    for loader in range(found.scenario.loaders):
        mine = found.loader == loader
        begun, queued = found.begun[mine], found.queued[mine]
        np.testing.assert_array_equal(begun, [0, *queued[:-1]])
        assert queued[-1] > end
    assert (found.begun <= found.ready).all()
    assert (found.ready <= found.queued).all()
    assert (found.queued <= found.taken).all()
    steps = found.order
    assert (found.taken[steps][1:] >= found.done[steps][:-1]).all()


@given(SETTINGS)
def test_the_shares_are_what_the_times_say(setting: dict[str, Any]) -> None:
    found = simulate(**setting)
    waited = found.stalls_ms.sum() / 1000
    busy_until = float(found.done[found.order].max(initial=0)) / 1e9
    waited += max(0.0, setting["seconds"] - busy_until)
    assert found.stall_share_with_startup * setting["seconds"] == pytest.approx(waited, abs=1e-6)
    assert 0 <= found.stall_share <= 1
    assert found.stall_share <= found.stall_share_with_startup + 1e-12
    assert 0 <= found.blocked_share <= 1
    assert found.stall_at_one_place <= 1
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()


@given(SETTINGS)
def test_more_loaders_or_a_longer_queue_never_make_a_batch_later(setting: dict[str, Any]) -> None:
    few = _done(simulate(**setting))
    room = setting["loaders"] if setting["queue"] is None else setting["queue"]
    for change in ({"loaders": setting["loaders"] + 1}, {"queue": room + 1}):
        more = _done(simulate(**setting | change))
        assert len(more) >= len(few)
        assert (more[: len(few)] <= few).all()


@given(SETTINGS)
def test_the_same_seed_makes_the_same(setting: dict[str, Any]) -> None:
    assert simulate(**setting).to_dict() == simulate(**setting).to_dict()


def test_another_seed_makes_something_else() -> None:
    first, second = (simulate(700, 100, 7, load_cv=0.3, seed=seed) for seed in (0, 1))
    assert first.stalls_ms.tolist() != second.stalls_ms.tolist()


@given(SETTINGS)
def test_no_rate_exceeds_the_limit(setting: dict[str, Any]) -> None:
    found = simulate(**setting | {"load_cv": 0, "step_cv": 0, "load_dist": None})
    slack = 1e-9 * found.scenario.seconds + 1e-6
    assert found.batches <= found.scenario.limit * (found.scenario.seconds + slack)


# --- spikes and spread --------------------------------------------------------------------------


def test_loaders_that_begin_together_stall_the_consumer_once_in_a_round() -> None:
    found = simulate(2000, 100, 7)
    np.testing.assert_array_equal(
        found.stalls_ms[:22], [2000, *[0] * 6, *[1300, *[0] * 6] * 2, 1300]
    )
    np.testing.assert_array_equal(found.stall_by_place_ms, [1300, 0, 0, 0, 0, 0, 0])
    assert found.stall_at_one_place == 1
    assert found.stall_share == pytest.approx(0.65)
    assert found.stall_share_with_startup == pytest.approx(0.65 * 28 / 30 + 2 / 30)
    assert (found.startup_s, found.rate) == (2, 3.5)


def test_variance_takes_the_spikes_and_leaves_the_stall() -> None:
    steady = simulate(2000, 100, 7, seconds=600)
    varied = simulate(2000, 100, 7, seconds=600, load_cv=0.4)
    spikes, rest = (np.quantile(x.stalls_ms[1:], 0.9) for x in (steady, varied))
    assert rest < 0.5 * spikes
    assert varied.stall_at_one_place < 0.25
    assert varied.stall_share == pytest.approx(steady.stall_share, rel=0.03)


def test_one_more_loader() -> None:
    assert simulate(2000, 100, 7).with_one_more().batches == 8 * 14
    assert simulate(350, 100, 7).with_one_more().batches == 296
    assert simulate(350, 100, 7, queue=3).with_one_more().scenario.capacity == 3
    assert simulate(350, 100, 7).with_one_more().scenario.capacity == 8


def test_measured_times_are_those_of_the_batches_in_turn() -> None:
    found = simulate([100, 300, 200], 10, 2, seconds=3)
    made = (found.ready - found.begun) // MS
    np.testing.assert_array_equal(made, np.resize([100, 300, 200], len(made)))
    assert found.scenario.limit == pytest.approx(10)


def test_a_run_too_short_for_any_batch() -> None:
    found = simulate(2000, 100, 7, seconds=1)
    assert (found.batches, found.rate, found.stall_share, found.startup_s) == (0, 0, 1, 1)
    assert found.stall_share_with_startup == 1
    assert found.blocked_share == found.queue_mean == 0
    assert found.stalls_ms.tolist() == []


# --- bad arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"loaders": 0}, "loaders=0"),
        ({"loaders": 20_000}, "loaders=20000"),
        ({"queue": -1}, "queue=-1"),
        ({"load_ms": 0}, "load_ms=0"),
        ({"step_ms": -3}, "step_ms=-3"),
        ({"step_dist": "normal"}, "step_dist='normal'"),
        ({"step_cv": math.inf}, "step_cv=inf"),
        ({"resolution_ms": -1}, "resolution_ms=-1"),
        ({"resolution_ms": math.nan}, "resolution_ms=nan"),
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_arguments_are_refused_with_their_values(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        simulate(**{"load_ms": 100, "step_ms": 10, "loaders": 2} | wrong)


def test_a_run_of_too_many_batches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precache.simulation.model.MOST_BATCHES", 1000)
    with pytest.raises(UsageError, match="seconds=1000 gives more than 1,000 batches"):
        simulate(1, 1, 1, seconds=1000)
