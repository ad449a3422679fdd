"""The recurrence against closed forms, an exact chain, published figures, its laws; the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from precache.errors import UsageError
from precache.simulation.model import SCENARIOS, simulate
from precache.simulation.page import render_simulation
from tests.support.command_line import Run

SETTINGS = st.fixed_dictionaries(
    {
        "load_ms": st.floats(1, 3000) | st.lists(st.floats(1, 99), min_size=1),
        "step_ms": st.integers(10, 300) | st.floats(10, 300),
        "workers": st.integers(0, 12), "prefetch": st.integers(1, 4), "in_order": st.booleans(),
        "startup_ms": st.sampled_from([0, 700, 20_000]), "handover_ms": st.sampled_from([0, 3]),
        "copy_ms": st.sampled_from([0, 2.5]), "step_cv": st.sampled_from([0, 0.3]),
        "seconds": st.floats(0.5, 8), "seed": st.integers(0, 2**32),
    }
)  # fmt: skip


# --- known answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"), [("loading-bound", 98), ("balanced", 275), ("step-bound", 295)]
)
def test_the_published_figures_are_reached_on_a_clock_of_100_ms(name: str, published: int) -> None:
    setting = dict(SCENARIOS[name])
    mean, cv = setting.pop("load_ms"), setting.pop("load_cv")
    done = []
    for seed in range(20):
        drawn = np.random.default_rng(seed).gamma(cv**-2, mean * cv**2, 400)
        done.append(simulate(np.rint(drawn / 100) * 100, **setting).done)
    assert np.mean(done) == pytest.approx(published, rel=0.03)


def test_workers_that_begin_together_make_spikes_and_those_one_by_one_none() -> None:
    together = simulate(**SCENARIOS["synchronised"])
    apart = simulate(**SCENARIOS["desynchronised"])
    np.testing.assert_array_equal(together.waits[:15], [2000, *[0] * 6, 1300, *[0] * 6, 1300])
    assert apart.waits[1:] == pytest.approx(np.full(len(apart.waits) - 1, 13000 / 70))
    for found in (together, apart):
        assert found.stall_share == pytest.approx(0.65, abs=0.01)


def test_slow_batches_hold_up_those_behind_them_only_in_order() -> None:
    def stall(in_order: bool) -> float:
        runs = [
            simulate(**SCENARIOS["high-variance"], seed=n, in_order=in_order) for n in range(10)
        ]
        return float(np.mean([run.stall_share for run in runs]))

    assert stall(True) > 0.05
    assert stall(False) < 0.01


@given(
    load=st.integers(1, 500),
    step=st.integers(1, 500),
    workers=st.integers(1, 9),
    prefetch=st.integers(1, 4),
    in_order=st.booleans(),
    ms=st.integers(1, 5000),
)
def test_steady_times_have_a_closed_form(
    load: int, step: int, workers: int, prefetch: int, in_order: bool, ms: int
) -> None:
    """In rounds of all workers where loading limits, and without a gap where the step does."""
    found = simulate(load, step, workers, prefetch=prefetch, in_order=in_order, seconds=ms / 1000)
    if load >= workers * step:
        rounds = range(1, ms // load + 1)
        expected = sum(min(workers, (ms - r * load) // step) for r in rounds)
    else:
        expected = max(0, (ms - load) // step)
        assert found.stall_share == 0 or ms <= load
    assert found.done == expected


@given(load=st.integers(1, 500), step=st.integers(1, 500), ms=st.integers(1, 5000))
def test_without_workers_loading_and_steps_take_turns(load: int, step: int, ms: int) -> None:
    assert simulate(load, step, 0, seconds=ms / 1000).done == ms // (load + step)


def _chain(workers: int, room: int, load: float, step: float) -> tuple[float, float]:
    """Rate and stall of the closed system with exponential times: a birth-death chain.

    State n: batches ready and not done, of which the loop has one. Gamma-distributed times with a
    variation of 1 are exponential.
    """
    states = np.arange(workers + room + 2)
    blocked = np.maximum(0, states - 1 - room)
    generator = np.zeros((len(states), len(states)))
    for n in states[:-1]:
        generator[n, n + 1] = (workers - blocked[n]) / load
        generator[n + 1, n] = 1 / step
    generator -= np.diag(generator.sum(axis=1))
    # Balance, one equation of which is replaced by that the shares add up to one.
    system = np.vstack([generator.T[:-1], np.ones(len(states))])
    share = np.linalg.solve(system, np.eye(len(states))[-1])
    return (1 - share[0]) / step, share[0]


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 2), (1, 4), (3, 1)])
def test_exponential_times_agree_with_the_exact_chain(workers: int, prefetch: int) -> None:
    """Where no worker can be idle beside one with two batches to load."""
    rate, stall = _chain(workers, workers * (prefetch - 1), 0.1 * workers, 0.1)
    setting = {"prefetch": prefetch, "in_order": False, "load_cv": 1, "step_cv": 1, "seconds": 600}
    found = [simulate(100 * workers, 100, workers, **setting, seed=seed) for seed in range(12)]
    for exact, name in ((rate, "batches_per_s"), (stall, "stall_share")):
        values = [getattr(one, name) for one in found]
        error = 4 * np.std(values, ddof=1) / math.sqrt(len(values)) + 0.005 * exact
        assert np.mean(values) == pytest.approx(exact, abs=error)


def test_its_text_is_for_people_and_one_more_worker_takes_the_same_batches() -> None:
    found = simulate(2000, 100, 7)
    lines = str(found).splitlines()
    assert lines[0] == "num_workers=7, prefetch_factor=2, in order; 2,000 ms a batch, 100 ms a step"
    assert lines[1].split() == ["batches", "done", "98", "in", "30", "s"]
    assert lines[-1].split()[1].startswith("······█······█")
    assert found.with_workers(8).batches_per_s == pytest.approx(4, rel=0.01)
    assert found.with_workers(20).stall_share < 0.02


def test_start_up_hand_over_and_copies_take_their_time() -> None:
    found = simulate(50, 30, 1, startup_ms=1000, handover_ms=4, copy_ms=5, seconds=2)
    assert found.batches.asked[:4].tolist() == [0, 0, 1054, 1104]
    assert found.batches.begun[:3].tolist() == [1000, 1050, 1100]
    assert found.batches.taken[:3].tolist() == [1059, 1109, 1159]
    assert found.startup == 1059
    assert found.stall_share == pytest.approx(0.4, abs=0.03)


# --- laws ---------------------------------------------------------------------------------------


@given(SETTINGS)
def test_workers_load_one_batch_at_a_time_and_the_loop_takes_what_is_ready(
    setting: dict[str, Any],
) -> None:
    """The shares are what the times say, and the same seed makes the same, as JSON, too."""
    found = simulate(**setting)
    values = found.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == simulate(**setting).to_dict()
    batches = found.batches
    rest = max(0.0, found.end - batches.done[found.order].max(initial=0))
    waited = found.waits[1:].sum() + rest
    if len(found.order):
        assert found.stall_share * (found.end - found.startup) == pytest.approx(waited, abs=1e-6)
    assert 0 <= found.stall_share <= 1
    assert (batches.begun >= batches.asked).all()
    assert batches.ready == pytest.approx(batches.begun + found.load)
    for worker in range(found.setting.lanes):
        own = batches.worker == worker
        assert (batches.begun[own][1:] >= batches.ready[own][:-1]).all()
    ready = batches.ready + found.setting.handover + found.setting.copy
    assert (batches.taken >= ready - 1e-6).all()
    order = np.argsort(batches.taken, kind="stable")
    assert (batches.taken[order][1:] >= batches.done[order][:-1]).all()
    if setting["in_order"]:
        assert (order == np.arange(len(order))).all()
    before = (batches.taken if setting["workers"] else batches.done)[order]
    window = found.setting.window
    assert (batches.asked[window : len(order)] <= before[: max(0, len(order) - window)]).all()


@given(SETTINGS)
def test_a_longer_prefetch_never_makes_a_batch_later_in_order(setting: dict[str, Any]) -> None:
    setting["in_order"] = True
    runs = [simulate(**{**setting, "prefetch": setting["prefetch"] + n}) for n in (0, 1)]
    few, more = (run.batches.done[: run.done] for run in runs)
    assert len(more) >= len(few)
    assert (more[: len(few)] <= few).all()


TIMES = st.floats(0, 1e13) | st.floats(1e-9, 10) | st.lists(st.floats(0, 1e12), max_size=4)


ANY = {
    **dict.fromkeys(("load_ms", "step_ms", "startup_ms"), TIMES),
    **dict.fromkeys(("handover_ms", "copy_ms"), st.floats(0, 1e13)),
    **dict.fromkeys(("load_cv", "step_cv"), st.none() | st.floats(0, 100)),
    "workers": st.integers(0, 40) | st.integers(0, 10**6), "prefetch": st.integers(1, 50),
    "seconds": st.floats(1e-7, 20) | st.floats(1e-6, 1e9),
}  # fmt: skip


@settings(suppress_health_check=list(HealthCheck), max_examples=40)
@given(setting=st.fixed_dictionaries(ANY))
@example({"load_ms": 1e12, "load_cv": 100, "step_ms": 1e12, "workers": 2, "seconds": 1e8})
@example({"load_ms": 1, "step_ms": 100, "workers": 50_000, "prefetch": 1, "seconds": 1})
@example({"load_ms": 2000, "step_ms": 100, "workers": 2, "seconds": 1e-6})
@example({"load_ms": [0, 0, 5], "step_ms": [0, 3], "workers": 2, "seconds": 1})
@example({"load_ms": 5, "step_ms": 1e-3, "workers": 0, "seconds": 1})
def test_whatever_can_be_simulated_can_be_reported(setting: dict[str, Any]) -> None:
    try:
        found = simulate(**setting)
    except UsageError:
        return
    assert "batches done" in str(found)
    assert json.dumps(found.to_dict(), allow_nan=False)
    assert render_simulation(found)


# --- bad arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": -1}, "workers is -1"),
        ({"prefetch": 0}, "prefetch is 0"),
        ({"load_ms": 0}, "load_ms has no time above 0"),
        ({"load_ms": []}, "load_ms has no time above 0"),
        ({"load_ms": "2000"}, "load_ms is '2000'; give milliseconds"),
        ({"load_ms": [3, math.nan]}, "load_ms has nan"),
        ({"step_ms": -3}, "step_ms has -3"),
        ({"step_cv": math.inf}, "step_cv=inf is wrong"),
        ({"load_ms": [1, 2], "load_cv": 0.5}, "load_cv=0.5 is wrong.* none for a list"),
        ({"load_ms": [[1, 2], [3, 4]]}, "load_ms is .*; give milliseconds"),
        ({"startup_ms": -1}, "startup_ms has -1"),
        ({"handover_ms": [1]}, r"handover_ms is \[1\]; give milliseconds"),
        ({"copy_ms": math.inf}, "copy_ms has inf"),
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seconds": 1e5}, r"seconds=100000 with .* too many batches: give a shorter time"),
        ({"workers": 10**7}, "workers=10000000 .* too many batches"),
    ],
)
def test_bad_arguments_are_refused_with_their_values(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate(**{"load_ms": 1, "step_ms": 1, "workers": 2} | wrong)


# --- the command ---------------------------------------------------------------------------------


STEADY = ("--load-ms", 2000, "--workers", 7, "--step-ms", 100)
TRACE = ("--load-ms", "x.txt", *STEADY[2:])


def test_every_setting_reaches_the_model(run: Run, tmp_path: Path) -> None:
    flags = "--prefetch 3 --no-in-order --startup-ms 9 --handover-ms 1 --copy-ms 2 --step-cv 0.1"
    settings = {"prefetch": 3, "in_order": False, "startup_ms": 9, "handover_ms": 1, "copy_ms": 2}
    expected = simulate(2000, 100, 7, **settings, step_cv=0.1, seed=5, load_cv=0.2)
    more = ("--seed", 5, "--load-cv", 0.2)
    assert run("simulate", *STEADY, *flags.split(), *more) == (0, f"{expected}\n", "")
    assert run("simulate", *STEADY, *flags.split(), *more, "--json").json == expected.to_dict()
    page = tmp_path / "a.html"
    assert run("simulate", *STEADY, "--html", page).status == 0
    assert page.read_text("utf-8") == render_simulation(simulate(2000, 100, 7))
    out = run("simulate", "--scenario", "balanced", "--workers", 8).out
    assert out == f"{simulate(**{**SCENARIOS['balanced'], 'workers': 8})}\n"
    assert out == f"{simulate(scenario='balanced', workers=8)}\n"
    trace = tmp_path / "times.txt"
    trace.write_text("# measured on Monday\n1e2\n\n300,  200 # a row\n")
    out = run("simulate", "--load-ms", trace, "--workers", 2, "--step-ms", 10).out
    assert out == f"{simulate([100, 300, 200], 10, 2)}\n"


@pytest.mark.parametrize(
    ("arguments", "text", "says"),
    [
        ((*STEADY[:2], "--workers", -1, "--step-ms", 100), None, "workers is -1"),
        (STEADY[2:], None, "give load_ms, or a scenario"),
        (STEADY[:2], None, "give step_ms and workers, or a scenario"),
        (("--scenario", "high"), None, "scenario is 'high'; there are loading-bound, "),
        ((*STEADY, "--html", "no/a.html"), None, "no/a.html cannot be written"),
        ((*STEADY, "--html", "."), None, ". is a folder; give the name of a file"),
        (TRACE, None, "cannot read the times in x.txt"),
        (TRACE, "12\n13 ms\n", "x.txt: could not convert string to float: 'ms'; give millisec"),
        (TRACE, "# none\n", "x.txt holds no times"),
    ],
)
def test_bad_usage_ends_in_a_message_and_status_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...],
    text: str | None, says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("x.txt").write_text(text)
    status, out, err = run("simulate", *arguments)
    assert (status, out) == (2, "")
    assert says in err
