"""The page of a simulation: its data, and how a browser plays them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from precache.simulation.model import Simulation, simulate
from precache.simulation.page import MAX_BATCHES, render_simulation
from tests.support.browser import Tab
from tests.support.html_page import stands_alone

STEADY = simulate(2000, 100, 7)


@pytest.mark.parametrize(
    "found",
    [
        STEADY, simulate(350, 100, 7, load_cv=0.2), simulate(200, 100, 0, seconds=5),
        simulate(2000, 100, 7, seconds=1), simulate(800, 100, 1, seconds=1),
        simulate(4000, 10, 200, load_cv=0.3, seconds=20), simulate([10, 0, 30.5], 12, 2, seconds=2),
    ],
)  # fmt: skip
def test_a_page_is_one_file_with_the_figures_and_data_of_the_simulation(found: Simulation) -> None:
    page = render_simulation(found)
    stands_alone(page, scripts=2)
    assert "{{" not in page
    for name, figure in found.figures():
        assert f"<dt>{name}</dt><dd>{figure}</dd>" in page
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert match
    data = json.loads(match[1])
    assert "asked" not in data["batches"], "which nothing plays"
    assert data["batches"]["begun"] == pytest.approx(found.batches.begun.tolist(), abs=1e-3)
    assert sum(ms <= data["end"] for ms in data["batches"]["done"]) == found.done


def test_a_long_run_is_played_as_far_as_a_page_can_carry() -> None:
    found = simulate(10, 1, 7, seconds=60)
    page = render_simulation(found)
    assert len(found.load) > MAX_BATCHES
    assert "Shown up to 28.6 s of 60 s." in page
    assert len(page) < 3_000_000


@pytest.fixture
def opened(tab: Tab, tmp_path: Path) -> Tab:
    STEADY.html(tmp_path / "page.html")
    tab.errors.clear()
    tab.open(tmp_path / "page.html")
    return tab


def _now(tab: Tab) -> float:
    """Seconds on the page's clock."""
    return float(tab.text("#clock").split(" s")[0])


def test_what_is_said_at_a_time_is_what_the_simulation_has(opened: Tab) -> None:
    at = "document.querySelector('#at')"  # in one script: a redraw between would set it back
    opened.run(f"{at}.value = 2250, {at}.dispatchEvent(new Event('input'))")
    wanted = "7 of 7 workers loading; 4 ready; the training loop works; 2 batches done."
    said = opened.text("#now")
    assert said == f"At 2.25 s: {wanted}"
    assert opened.run("document.querySelector('#at').getAttribute('aria-valuetext')") == said
    assert opened.run("document.querySelectorAll('.slot.full').length") == 4


def test_it_is_worked_by_keys_alone(opened: Tab) -> None:
    """From the top of the page by Tab: play, back, next, speed, time."""
    names = []
    for _ in range(5):
        opened.press("Tab")
        names.append(opened.run("document.activeElement.id"))
    assert names == ["play", "back", "next", "speed", "at"]
    for key, change in (("ArrowRight", 0.03), ("PageUp", 0.6), ("ArrowLeft", -0.03)):
        before = _now(opened)
        opened.press(key)
        assert _now(opened) - before == pytest.approx(change, abs=1e-6), key
    opened.press("End")
    assert _now(opened) == 30
    opened.run("document.querySelector('#play').focus()")
    for key, text in ((" ", "Pause"), ("Enter", "Play")):
        opened.press(key)
        assert opened.text("#play") == text


def test_with_less_motion_it_goes_from_batch_to_batch(tab: Tab, tmp_path: Path) -> None:
    STEADY.html(tmp_path / "page.html")
    tab.open(tmp_path / "page.html", still=True)
    tab.click("#play")
    tab.until("parseFloat(document.querySelector('#clock').textContent) >= 2.1")
    tab.click("#play")
    assert np.isclose(STEADY.batches.taken / 1e3, _now(tab)).any()


def test_it_plays_pauses_stops_at_the_end_and_goes_where_one_clicks(opened: Tab) -> None:
    assert _now(opened) == 0
    opened.click("#play")
    assert opened.text("#play") == "Pause"
    opened.until("parseFloat(document.querySelector('#clock').textContent) > 0.05")
    opened.click("#play")
    assert opened.text("#play") == "Play"
    stopped = _now(opened)
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    opened.run(f"{frames}.then(() => 0)")
    assert _now(opened) == stopped > 0
    opened.run("document.querySelector('#speed').value = '100'")
    opened.click("#play")
    opened.until("document.querySelector('#play').textContent === 'Play'")
    assert _now(opened) == 30
    assert "98 batches done" in opened.text("#now")
    opened.run("document.querySelector('#speed').value = '0.01'")
    opened.click("#play")
    assert _now(opened) < 5, "from the beginning"
    opened.click("#play")
    for button, seconds in (("next", 2.0), ("next", 2.1), ("next", 2.2), ("back", 2.1)):
        opened.click(f"#{button}")
        assert _now(opened) == seconds
    opened.click("#lanes", 0.5)
    assert 4 < _now(opened) < 6
    opened.run("document.querySelector('#zoom').selectedIndex = 0")
    opened.run("document.querySelector('#zoom').dispatchEvent(new Event('change'))")
    assert opened.errors == []
