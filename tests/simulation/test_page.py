"""The page of a simulation: its data, and how a browser plays them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache.simulation.model import Simulation, simulate
from precache.simulation.page import MAX_BATCHES, render_simulation
from tests.support.browser import Tab
from tests.support.html_page import stands_alone

STEADY = simulate(2000, 100, 7)
Opened = Callable[..., Tab]


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
def opened(tab: Tab, tmp_path: Path) -> Opened:
    def open_page(found: Simulation = STEADY, **options: Any) -> Tab:
        found.html(tmp_path / "page.html")
        tab.errors.clear()
        tab.open(tmp_path / "page.html", **options)
        return tab

    return open_page


def _now(tab: Tab) -> float:
    """Seconds on the page's clock."""
    return float(tab.text("#clock").split(" s")[0])


@pytest.mark.parametrize(
    ("found", "ms", "wanted", "full"),
    [
        (STEADY, 2250, "7 of 7 workers loading; 4 ready; the training loop works; 2 batches", 4),
        (simulate(200, 100, 0), 550, "0 of 1 worker loading; 0 ready; the training loop works", 0),
    ],
)
def test_what_is_said_at_a_time_is_what_the_simulation_has(
    opened: Opened, found: Simulation, ms: float, wanted: str, full: int
) -> None:
    tab, at = opened(found), "document.querySelector('#at')"
    # In one script: a redraw between would set it back.
    tab.run(f"{at}.value = {ms}, {at}.dispatchEvent(new Event('input'))")
    said = tab.text("#now")
    assert said.startswith(f"At {ms / 1e3} s: {wanted}")
    assert tab.run("document.querySelector('#at').getAttribute('aria-valuetext')") == said
    assert tab.run("document.querySelectorAll('.slot.full').length") == full
    tab.run(f"{at}.focus()")
    tab.press("End")
    assert f"; {found.done} batches done." in tab.text("#now")


def test_it_is_worked_by_keys_alone(opened: Opened) -> None:
    """From the top of the page by Tab: play, back, next, speed, time."""
    tab, names = opened(), []
    for _ in range(5):
        tab.press("Tab")
        names.append(tab.run("document.activeElement.id"))
    assert names == ["play", "back", "next", "speed", "at"]
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


def test_with_less_motion_it_goes_from_batch_to_batch(opened: Opened) -> None:
    tab = opened(still=True)
    tab.click("#play")
    tab.until("parseFloat(document.querySelector('#clock').textContent) >= 2.1")
    tab.click("#play")
    assert np.isclose(STEADY.batches.taken / 1e3, _now(tab)).any()


def test_it_plays_pauses_stops_at_the_end_and_goes_where_one_clicks(
    opened: Opened,
) -> None:
    tab = opened()
    assert _now(tab) == 0
    tab.click("#play")
    assert tab.text("#play") == "Pause"
    tab.until("parseFloat(document.querySelector('#clock').textContent) > 0.05")
    tab.click("#play")
    assert tab.text("#play") == "Play"
    stopped = _now(tab)
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    tab.run(f"{frames}.then(() => 0)")
    assert _now(tab) == stopped > 0
    tab.run("document.querySelector('#speed').value = '100'")
    tab.click("#play")
    tab.until("document.querySelector('#play').textContent === 'Play'")
    assert _now(tab) == 30
    assert "98 batches done" in tab.text("#now")
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
