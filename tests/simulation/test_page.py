"""The page of a simulation, in a browser, and its picture."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from precache.cli import main as cli
from precache.errors import StorageError
from precache.simulation import page as simulation_page
from precache.simulation.model import Simulation, simulate
from precache.simulation.player import MAX_BATCHES
from tests.support.browser import AXE, CHROMIUM, Tab, chromium

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

STEADY = simulate(2000, 100, 7)
SETTINGS = {
    "steady": STEADY,
    "varied": simulate(2000, 100, 7, load_cv=0.4),
    "blocked": simulate(350, 100, 7, load_cv=0.2),
    "no queue": simulate(200, 100, 3, queue=0, seconds=5),
    "nothing came": simulate(2000, 100, 7, seconds=1),
    "one batch": simulate(800, 100, 1, seconds=1),
    "many loaders": simulate(4000, 10, 200, load_cv=0.3, seconds=20),
    "measured": simulate([10, 0, 30.5], 12.25, 2, seconds=2),
}


# --- the file -----------------------------------------------------------------------------------


def test_a_page_is_one_file_without_links_and_with_the_figures() -> None:
    page = simulation_page.render_simulation(STEADY)
    assert not re.findall(
        r"""(?:src|href)=["']?(?!data:|\#)[^"'\s>]+|https?://|@import|url\((?!\#)""", page
    )
    assert "{{" not in page
    assert "65.0% of the time since the first batch, 67.3% of the whole time" in page
    assert "112 batches done (+14)" in page


@pytest.mark.parametrize("found", SETTINGS.values(), ids=SETTINGS)
def test_the_data_of_a_page_are_those_of_the_simulation(found: Simulation) -> None:
    match = re.search(
        r'<script type="application/json" id="data">(.*?)</script>',
        simulation_page.render_simulation(found),
    )
    assert match
    data = json.loads(match[1])
    assert data["waits"] == pytest.approx(found.stalls_ms.tolist(), abs=1e-3)
    assert data["batches"]["begun"] == pytest.approx((found.begun / 1e6).tolist(), abs=1e-3)
    done = [ms for ms in data["batches"]["done"] if ms is not None and ms <= data["end"]]
    assert len(done) == found.batches


def test_a_long_run_is_played_as_far_as_a_page_can_carry() -> None:
    found = simulate(10, 1, 7, seconds=60)
    page = simulation_page.render_simulation(found)
    assert len(found.begun) > MAX_BATCHES
    assert "Shown up to 28.6 s of 60 s." in page
    assert len(page) < 3_000_000


def test_the_page_compares_more_loaders_with_what_the_mean_times_predict() -> None:
    page = simulation_page.render_simulation(STEADY)
    rows = re.findall(r"<td>(\d+) loaders</td><td>([\d.]+)%</td><td>([\d.]+)%</td>", page)
    assert [int(loaders) for loaders, _, _ in rows] == [7, 8, 20]
    for loaders, predicted, simulated in rows:
        share = simulate(2000, 100, int(loaders)).stall_share
        assert float(simulated) == pytest.approx(100 * share, abs=0.05)
        assert float(predicted) == pytest.approx(100 * share, abs=1)


def test_a_page_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precache.simulation.page.find_spec", lambda name: None)
    page = simulation_page.render_simulation(STEADY)
    assert "<h2>Times of a batch</h2>" in page
    assert 'class="chart' not in page


def test_times_are_those_of_what_was_done() -> None:
    told = simulation_page.spans_ms(STEADY)
    assert set(told["load"]) == {2000}
    assert set(told["step"]) == {100}
    assert told["wait before a step"].sum() == pytest.approx(STEADY.stalls_ms[1:].sum())


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no/such"):
        STEADY.html(tmp_path / "no/such/file")


def test_the_command_writes_a_page_beside_its_object(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a.html"
    arguments = ["simulate", "--load-ms", "2000", "--loaders", "7", "--step-ms", "100", "--json"]
    assert cli.main([*arguments, "--html", str(page)]) == 0
    assert page.read_text("utf-8") == simulation_page.render_simulation(STEADY)
    assert json.loads(capfd.readouterr().out)["batches"] == 98


# --- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


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


@in_a_browser
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("width", "dark"), [(360, True), pytest.param(1200, False, marks=pytest.mark.heavy)]
)
def test_every_page_is_drawn_without_an_error_a_request_or_a_sideways_scroll(
    tab: Tab, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    tab.errors.clear()
    tab.requests.clear()
    path = _written(SETTINGS[name], tmp_path)
    tab.open(path, width, dark=dark)
    for _ in range(3):
        tab.click("#next")
    assert tab.errors == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [path.as_uri()]
    over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert tab.run(over) == 0
    for canvas in tab.run("[...document.querySelectorAll('canvas')].map(each => each.id)"):
        pen = f"document.querySelector('canvas#{canvas}').getContext('2d')"
        assert tab.run(f"{pen}.getImageData(0, 0, {pen}.canvas.width, 60).data.some(v => v)")


@in_a_browser
def test_it_plays_and_pauses(opened: Tab) -> None:
    assert _now(opened) == 0
    opened.click("#play")
    assert opened.run("document.querySelector('#play').textContent") == "Pause"
    opened.until("parseFloat(document.querySelector('#clock').textContent) > 0.05")
    opened.click("#play")
    assert opened.run("document.querySelector('#play').textContent") == "Play"
    stopped = _now(opened)
    assert stopped > 0
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    opened.run(f"{frames}.then(() => 0)")
    assert _now(opened) == stopped


@in_a_browser
def test_it_stops_at_the_end_and_plays_again_from_the_beginning(opened: Tab) -> None:
    opened.run("document.querySelector('#speed').value = '100'")
    opened.click("#play")
    opened.until("document.querySelector('#play').textContent === 'Play'")
    assert _now(opened) == 30
    assert "98 batches done" in _said(opened)
    opened.run("document.querySelector('#speed').value = '0.01'")
    opened.click("#play")
    assert _now(opened) < 5
    opened.click("#play")


@in_a_browser
def test_what_is_said_at_a_time_is_what_the_simulation_has(opened: Tab) -> None:
    at = "document.querySelector('#at')"  # in one script: a redraw between would set it back
    opened.run(f"{at}.value = 2250, {at}.dispatchEvent(new Event('input'))")
    wanted = "7 of 7 loaders loading; 4 of 7 in the queue; the training loop works; 2 batches done."
    assert _said(opened) == f"At 2.25 s: {wanted}"
    assert opened.run("document.querySelector('#at').getAttribute('aria-valuetext')") == _said(
        opened
    )
    assert opened.run("document.querySelectorAll('.slot.full').length") == 4


@in_a_browser
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


@in_a_browser
def test_batches_and_the_time_line_are_stepped_to_by_clicks(opened: Tab) -> None:
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


@in_a_browser
def test_with_less_motion_it_goes_from_batch_to_batch(tab: Tab, tmp_path: Path) -> None:
    tab.open(_written(STEADY, tmp_path), still=True)
    tab.click("#play")
    tab.until("parseFloat(document.querySelector('#clock').textContent) >= 2.1")
    tab.click("#play")
    taken = STEADY.taken[STEADY.order] / 1e9
    assert np.isclose(taken, _now(tab)).any()


def _contrast(one: str, other: str) -> float:
    """Ratio of two colours ``#rrggbb`` or ``#rgb``, as WCAG 2 defines it."""
    levels = []
    for colour in (one, other):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = np.frombuffer(bytes.fromhex(digits), np.uint8) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        levels.append(float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)
    return max(levels) / min(levels)


@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
def test_colours_stand_out_in_light_and_dark(tab: Tab, tmp_path: Path, dark: bool) -> None:
    tab.open(_written(STEADY, tmp_path), dark=dark)
    style = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"
    names = ("bg", "card", "ink", "soft", "blue", "orange", "green", "bad")
    colours = {name: str(tab.run(style.format(name))) for name in names}
    for text, ground in itertools.product(("ink", "soft"), ("bg", "card")):
        assert _contrast(colours[text], colours[ground]) > 4.5, (text, ground)
    for mark in ("blue", "orange", "green", "bad"):
        assert _contrast(colours[mark], colours["bg"]) > 3, mark


@in_a_browser
@pytest.mark.skipif(AXE is None, reason="needs axe-core-python")
def test_axe_finds_nothing_to_mend(tab: Tab, tmp_path: Path) -> None:
    tab.fine(_written(SETTINGS["blocked"], tmp_path))
