"""The recurrence against a clock, published figures, its laws; the command; the page, as played."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from precache.simulation.model import SCENARIOS, Batches, Setting, Simulation, simulate
from precache.simulation.page import MAX_BATCHES, render_simulation
from tests.support.browser import Tab
from tests.support.command_line import Run
from tests.support.html_page import stands_alone

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
    setting, seeds = SCENARIOS["high-variance"], range(10)
    in_order, as_ready = (
        np.mean([simulate(**setting, seed=seed, in_order=order).stall_share for seed in seeds])
        for order in (True, False)
    )
    assert in_order > 0.05
    assert as_ready < 0.01


def clocked(load: list[int], step: list[int], at: Setting) -> list[list[int]]:
    """Times of all batches, by a clock at whose ticks workers and the loop look at each other."""
    count, now, turn, busy = len(load), 0, 0, 0
    found = Batches(*([0] * count for _ in Batches._fields))  # type: ignore[arg-type]  # lists
    queues = [[*range(lane, min(at.window, count), at.lanes)] for lane in range(at.lanes)]
    free, here = [*np.resize(at.startup, at.lanes).tolist()], dict[int, int]()

    def begin() -> None:
        for lane, queue in enumerate(queues):
            if queue and free[lane] <= now:
                number = queue.pop(0)
                found.worker[number], found.begun[number] = lane, now
                found.ready[number] = free[lane] = now + load[number]
                here[number] = free[lane] + at.handover

    while turn < count:
        begin()
        ready = [
            (when, n) for n, when in here.items() if when <= now and at.in_order <= (n == turn)
        ]
        if ready and busy <= now:
            _, number = min(ready)
            del here[number]
            found.taken[number] = now + at.copy
            busy = found.done[number] = now + at.copy + step[turn]
            if not at.workers:
                free[0] = busy
            if turn + at.window < count:
                queues[found.worker[number]].append(turn + at.window)
                found.asked[turn + at.window] = now if at.workers else busy
            begin()
            turn += 1
        now += 1
    return [*found]  # type: ignore[arg-type]  # lists


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=30),
    st.builds(
        Setting, workers=st.integers(0, 4), prefetch=st.integers(1, 3), in_order=st.booleans(),
        startup=st.lists(st.integers(0, 40), min_size=1, max_size=4),
        handover=st.integers(0, 3), copy=st.integers(0, 3),
    ),
)  # fmt: skip
def test_the_recurrence_has_the_times_of_a_clock(times: list[Any], setting: Setting) -> None:
    """Of a loop that is simulated millisecond by millisecond."""
    load, step = map(list, zip(*times, strict=True))
    found = Simulation(np.array(load, float), np.array(step, float), setting)
    assert [column.tolist() for column in found.batches] == clocked(load, step, setting)
    assert found.rate == pytest.approx(1e3 * len(load) / found.end)


def test_its_text_is_for_people_and_one_more_worker_takes_the_same_batches() -> None:
    found = simulate(2000, 100, 7)
    lines = str(found).splitlines()
    assert lines[0] == "num_workers=7, prefetch_factor=2, in order; 2,000 ms a batch, 100 ms a step"
    assert lines[1].split() == ["batches", "done", "98", "in", "30", "s"]
    assert lines[-1].split()[1].startswith("······█······█")
    data = found.to_dict()
    assert {"load": [2000, 0], "step": [100, 0], "end": 30_000, "done": 98}.items() <= data.items()
    assert data["waits"][:8] == [2000, *[0] * 6, 1300]
    assert data["batches"]["done"][:8] == [2100, 2200, 2300, 2400, 2500, 2600, 2700, 4100]
    assert data["one_more"]["batches_per_s"] == found.with_workers(8).batches_per_s
    assert found.with_workers(8).batches_per_s == pytest.approx(4, rel=0.001)
    assert found.with_workers(20).stall_share < 0.02


def test_one_more_worker_is_not_slower_for_what_it_has_no_batches_left_to_load() -> None:
    for seed in range(20):
        found = simulate(2000, 100, 7, load_cv=1, in_order=False, seed=seed)
        assert found.with_workers(8).batches_per_s > found.batches_per_s


@settings(suppress_health_check=list(HealthCheck))
@given(SETTINGS)
@example({"load_ms": 1e12, "load_cv": 100, "step_ms": 1e12, "workers": 2, "seconds": 1e8})
@example({"load_ms": 1, "step_ms": 100, "workers": 50_000, "prefetch": 1, "seconds": 1})
@example({"load_ms": 2000, "step_ms": 100, "workers": 2, "seconds": 1e-6})
@example({"load_ms": [0, 0, 5], "step_ms": [0, 3], "workers": 2, "seconds": 1})
@example({"load_ms": 2000, "step_ms": 100, "workers": 7, "seconds": 30, "load_cv": 0.3})
@example({"load_ms": 5, "step_ms": 1e-3, "workers": 0, "seconds": 1})
def test_whatever_is_simulated_is_reported_with_the_shares_that_its_times_give(
    setting: dict[str, Any],
) -> None:
    """The same again for the same seed; the page is one file with these figures and its data."""
    found, again = simulate(**setting), simulate(**setting).to_dict()
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == again
    assert "batches done" in str(found)
    done, order = found.batches.done, found.order
    waited = found.waits[1:].sum() + max(0.0, found.end - done[order].max(initial=0))
    if len(order):
        lasted = found.end - found.startup
        assert found.stall_share * lasted == pytest.approx(waited, abs=1e-9 * lasted + 1e-6)
    assert 0 <= found.stall_share <= 1
    assert (np.diff(found.batches.taken[order]) >= 0).all()
    page = render_simulation(found)
    stands_alone(page, scripts=2)
    assert "{{" not in page
    for name, figure in found.figures():
        assert f"<dt>{name}</dt><dd>{figure}</dd>" in page
    data = json.loads(page.partition('type="application/json" id="data">')[2].partition("<")[0])
    assert "asked" not in data["batches"], "which nothing plays"
    begun, ended = found.batches.begun[:MAX_BATCHES], np.array(data["batches"]["done"])
    np.testing.assert_allclose(data["batches"]["begun"], begun, rtol=1e-9, atol=1e-3)
    assert len(done) > MAX_BATCHES or (ended <= data["end"]).sum() == found.done


# --- the command ---------------------------------------------------------------------------------


STEADY = ("--load-ms", 2000, "--workers", 7, "--step-ms", 100)


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


PLAYED = simulate(2000, 100, 7)


def test_a_long_run_is_played_as_far_as_a_page_can_carry() -> None:
    page = render_simulation(found := simulate(10, 1, 7, seconds=60))
    assert len(found.load) > MAX_BATCHES
    assert "Shown up to 28.6 s of 60 s." in page
    assert len(page) < 3_000_000


def show(found: Simulation, tab: Tab, folder: Path, **options: Any) -> None:
    found.html(folder / "page.html")
    tab.errors.clear()
    tab.open(folder / "page.html", **options)


def _now(tab: Tab) -> float:
    """Seconds on the page's clock."""
    return float(tab.text("#clock").split(" s")[0])


@pytest.mark.parametrize(
    ("found", "ms", "wanted", "full"),
    [
        (PLAYED, 2250, "7 of 7 workers loading; 4 ready; the training loop works; 2 batches", 4),
        (simulate(200, 100, 0), 550, "0 of 1 worker loading; 0 ready; the training loop works", 0),
    ],
)
def test_what_is_said_at_a_time_is_what_the_simulation_has(
    tab: Tab, tmp_path: Path, found: Simulation, ms: float, wanted: str, full: int
) -> None:
    show(found, tab, tmp_path)
    at = "document.querySelector('#at')"
    # In one script: a redraw between would set it back.
    tab.run(f"{at}.value = {ms}, {at}.dispatchEvent(new Event('input'))")
    said = tab.text("#now")
    assert said.startswith(f"At {ms / 1e3} s: {wanted}")
    assert tab.run(f"{at}.getAttribute('aria-valuetext')") == said
    assert tab.run("document.querySelectorAll('.slot.full').length") == full
    tab.run(f"{at}.focus()")
    tab.press("End")
    assert f"; {found.done} batches done." in tab.text("#now")


def test_it_is_worked_by_keys_and_clicks_and_stops_at_the_end(tab: Tab, tmp_path: Path) -> None:
    """From the top of the page by Tab: play, back, next, speed, time."""
    show(PLAYED, tab, tmp_path)
    assert _now(tab) == 0
    for name in ("play", "back", "next", "speed", "at"):
        tab.press("Tab")
        assert tab.run("document.activeElement.id") == name
    for key, change in (("ArrowRight", 0.03), ("PageUp", 0.6), ("ArrowLeft", -0.03)):
        before = _now(tab)
        tab.press(key)
        assert _now(tab) - before == pytest.approx(change, abs=1e-6), key
    tab.press("End")
    assert _now(tab) == 30
    tab.run("document.querySelector('#play').focus()")
    for key, text in ((" ", "Pause"), ("Enter", "Play")):
        tab.press(key)
        assert tab.text("#play") == text
    tab.press("Home")
    tab.click("#play")
    tab.until("parseFloat(document.querySelector('#clock').textContent) > 0.05")
    tab.click("#play")
    stopped = _now(tab)
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    tab.run(f"{frames}.then(() => 0)")
    assert _now(tab) == stopped > 0
    tab.run("document.querySelector('#speed').value = '100'")
    tab.click("#play")
    tab.until("document.querySelector('#play').textContent === 'Play'")
    assert _now(tab) == 30
    tab.run("document.querySelector('#speed').value = '0.01'")
    tab.click("#play")
    assert _now(tab) < 5, "from the beginning"
    tab.click("#play")
    for button, seconds in (("next", 2.0), ("next", 2.1), ("next", 2.2), ("back", 2.1)):
        tab.click(f"#{button}")
        assert _now(tab) == seconds
    tab.click("#lanes", 0.5)
    assert 4 < _now(tab) < 6
    tab.run("document.querySelector('#zoom').selectedIndex = 0")
    tab.run("document.querySelector('#zoom').dispatchEvent(new Event('change'))")
    assert tab.errors == []
    show(PLAYED, tab, tmp_path, still=True)  # with less motion it goes from batch to batch
    tab.click("#play")
    tab.until("parseFloat(document.querySelector('#clock').textContent) >= 2.1")
    tab.click("#play")
    assert np.isclose(PLAYED.batches.taken / 1e3, _now(tab)).any()
