"""The page of a simulation, in a browser, and its picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from precache.simulation import page as simulation_page
from precache.simulation.model import Simulation, simulate
from precache.simulation.page import MAX_BATCHES
from tests.support.browser import Tab
from tests.support.html_page import stands_alone

STEADY = simulate(2000, 100, 7)
SETTINGS = {
    "steady": STEADY,
    "varied": simulate(2000, 100, 7, load_cv=0.4),
    "idle": simulate(350, 100, 7, load_cv=0.2),
    "no workers": simulate(200, 100, 0, seconds=5),
    "nothing came": simulate(2000, 100, 7, seconds=1),
    "one batch": simulate(800, 100, 1, seconds=1),
    "many workers": simulate(4000, 10, 200, load_cv=0.3, seconds=20),
    "measured": simulate([10, 0, 30.5], 12.25, 2, seconds=2),
}


# --- the file -----------------------------------------------------------------------------------


def test_a_page_is_one_file_without_links_and_with_the_figures() -> None:
    page = simulation_page.render_simulation(STEADY)
    stands_alone(page, scripts=2)
    assert "{{" not in page
    for name, figure in STEADY.figures():
        assert f"<dt>{name}</dt><dd>{figure}</dd>" in page


@pytest.mark.parametrize("found", SETTINGS.values(), ids=SETTINGS)
def test_the_data_of_a_page_are_those_of_the_simulation(found: Simulation) -> None:
    match = re.search(
        r'<script type="application/json" id="data">(.*?)</script>',
        simulation_page.render_simulation(found),
    )
    assert match
    data = json.loads(match[1])
    assert data["batches"]["begun"] == pytest.approx(found.batches.begun.tolist(), abs=1e-3)
    assert sum(ms <= data["end"] for ms in data["batches"]["done"]) == found.done


def test_a_long_run_is_played_as_far_as_a_page_can_carry() -> None:
    found = simulate(10, 1, 7, seconds=60)
    page = simulation_page.render_simulation(found)
    assert len(found.load) > MAX_BATCHES
    assert "Shown up to 28.6 s of 60 s." in page
    assert len(page) < 3_000_000


# --- in a browser -------------------------------------------------------------------------------


@pytest.fixture
def opened(tab: Tab, tmp_path: Path) -> Tab:
    tab.open(_written(STEADY, tmp_path))
    return tab


def _written(found: Simulation, folder: Path) -> Path:
    found.html(folder / "page.html")
    return folder / "page.html"


def _now(tab: Tab) -> float:
    """Seconds on the page's clock."""
    return float(tab.run("document.querySelector('#clock').textContent").split(" s")[0])


def _said(tab: Tab) -> str:
    return str(tab.run("document.querySelector('#now').textContent"))


@pytest.mark.parametrize("name", ["varied", "no workers", "nothing came", "many workers"])
def test_every_page_is_fine_and_drawn(tab: Tab, tmp_path: Path, name: str) -> None:
    tab.fine(_written(SETTINGS[name], tmp_path))
    for _ in range(3):
        tab.click("#next")
    assert tab.errors == []
    for canvas in tab.run("[...document.querySelectorAll('canvas')].map(each => each.id)"):
        pen = f"document.querySelector('canvas#{canvas}').getContext('2d')"
        assert tab.run(f"{pen}.getImageData(0, 0, {pen}.canvas.width, 60).data.some(v => v)")


def test_what_is_said_at_a_time_is_what_the_simulation_has(opened: Tab) -> None:
    at = "document.querySelector('#at')"  # in one script: a redraw between would set it back
    opened.run(f"{at}.value = 2250, {at}.dispatchEvent(new Event('input'))")
    wanted = "7 of 7 workers loading; 4 ready; the training loop works; 2 batches done."
    assert _said(opened) == f"At 2.25 s: {wanted}"
    assert opened.run("document.querySelector('#at').getAttribute('aria-valuetext')") == _said(
        opened
    )
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
    opened.press(" ")
    assert opened.run("document.querySelector('#play').textContent") == "Pause"
    opened.press("Enter")
    assert opened.run("document.querySelector('#play').textContent") == "Play"


def test_with_less_motion_it_goes_from_batch_to_batch(tab: Tab, tmp_path: Path) -> None:
    tab.open(_written(STEADY, tmp_path), still=True)
    tab.click("#play")
    tab.until("parseFloat(document.querySelector('#clock').textContent) >= 2.1")
    tab.click("#play")
    taken = STEADY.batches.taken / 1e3
    assert np.isclose(taken, _now(tab)).any()


def test_it_plays_pauses_stops_at_the_end_and_goes_where_one_clicks(opened: Tab) -> None:
    assert _now(opened) == 0
    opened.click("#play")
    assert opened.run("document.querySelector('#play').textContent") == "Pause"
    opened.until("parseFloat(document.querySelector('#clock').textContent) > 0.05")
    opened.click("#play")
    assert opened.run("document.querySelector('#play').textContent") == "Play"
    stopped = _now(opened)
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    opened.run(f"{frames}.then(() => 0)")
    assert _now(opened) == stopped > 0
    opened.run("document.querySelector('#speed').value = '100'")
    opened.click("#play")
    opened.until("document.querySelector('#play').textContent === 'Play'")
    assert _now(opened) == 30
    assert "98 batches done" in _said(opened)
    opened.run("document.querySelector('#speed').value = '0.01'")
    opened.click("#play")
    assert _now(opened) < 5, "from the beginning"
    opened.click("#play")
    for seconds in (2.0, 2.1, 2.2):
        opened.click("#next")
        assert _now(opened) == seconds
    opened.click("#back")
    assert _now(opened) == 2.1
    opened.click("#lanes", 0.5)
    assert 4 < _now(opened) < 6
    opened.run("document.querySelector('#zoom').selectedIndex = 0")
    opened.run("document.querySelector('#zoom').dispatchEvent(new Event('change'))")
    assert opened.errors == []
