"""A diagnosis as a page, in a browser, and as a picture."""

from __future__ import annotations

import dataclasses
from html import unescape
from pathlib import Path

import pytest

from precache.diagnosis import page as diagnosis_page
from precache.diagnosis.diagnose import Diagnosis
from precache.diagnosis.measurements import TimedRun
from precache.errors import StorageError
from precache.runtime.usage import Usage
from tests.diagnosis.test_verdict import CASES, made, measured
from tests.support.browser import Tab
from tests.support.building import poll
from tests.support.html_page import stands_alone

LOOP = Diagnosis.of(measured(0.02, 0.06, 0.08, cpu=1.0))
WORKERS = Diagnosis.of(
    measured(0.02, 0.03, 0.03, setup={"workers": 4}, single_worker=made(0.12, 0.9))
)


def loops(found: Diagnosis) -> dict[str, tuple[float, float]]:
    rows = diagnosis_page.loops(found)
    return {loop.name: (loop.lost_share, loop.batches_per_s) for loop in rows}


def test_the_loop_and_its_remedies_are_compared() -> None:
    rows = loops(LOOP)
    assert rows["now"] == pytest.approx((0.75, 12.5))
    helpful = [remedy for remedy in LOOP.remedies if remedy.gain >= 1.05]
    assert set(rows) == {"now", *(remedy.name for remedy in helpful)}
    for remedy in helpful:
        share, rate = rows[remedy.name]
        assert rate == remedy.batches_per_s
        assert share == pytest.approx(1 - rate / LOOP.without_waiting)


def test_the_share_that_is_lost_is_one_number_and_other_waits_have_their_reason() -> None:
    """A step of 20 ms takes 44 beside workers that want its cores; it waits another 16."""
    step, wait = 0.02, 0.016
    crowded = measured(step, 0.03, 0.06, cpu=1.9, setup={"workers": 4, "cores": 2})
    usage = Usage(60.0, cpu=110.0)
    together = TimedRun((0.06,) * 1000, 60.0, usage, (wait,) * 1000)
    step_alone = made(step, cpu=1.0)
    diagnosis = Diagnosis.of(dataclasses.replace(crowded, together=together, step=step_alone))
    assert loops(diagnosis)["now"][0] == pytest.approx(2 / 3)
    for text in (str(diagnosis), unescape(diagnosis_page.render_diagnosis(diagnosis))):
        assert "The loop waited for data 27% of the measured time: loading also slows" in text
    assert "so 67% of the time is lost to data." in str(diagnosis)
    assert "waited for data" not in str(LOOP)


@pytest.mark.parametrize("name", ["decoding, in workers", "copies", "bursts"])
def test_a_page_has_the_figures_and_stands_alone(name: str) -> None:
    found = Diagnosis.of(CASES[name][0])
    html = diagnosis_page.render_diagnosis(found)
    stands_alone(html, scripts=2)
    page = unescape(html)
    assert found.reason in page
    waits, stall = found.simulation.stall_share, found.measurements.together.stall
    assert f"it waits {waits:.0%} of the time; the measured loop waited {stall:.0%}" in page
    assert f"<dd>{found.lost_share:.0%}</dd>" in page
    for each in found.remedies:
        assert f"<dt>{each.gain:.2f} x: {each.what}</dt>" in page


@pytest.mark.parametrize(
    "found", [pytest.param(LOOP, id="alone"), pytest.param(WORKERS, id="workers")]
)
def test_a_page_is_fine_and_what_it_plays_is_what_was_recorded(
    tab: Tab, tmp_path: Path, found: Diagnosis
) -> None:
    with pytest.raises(StorageError, match=r"no/a\.html"):
        found.html(tmp_path / "no/a.html")
    found.html(tmp_path / "a.html")
    tab.fine(tmp_path / "a.html")
    shown = found.simulation
    tab.click("#next")
    taken = tab.run("parseFloat(document.querySelector('#clock').textContent)")
    assert taken == pytest.approx(shown.startup / 1e3, abs=1e-3)
    assert "training loop works" in tab.run("document.querySelector('#now').textContent")
    tab.press("End")
    tab.run("document.querySelector('#at').focus()")
    tab.press("End")
    wanted = f"; {shown.done} batches done."
    assert wanted in tab.run("document.querySelector('#now').textContent")
    assert tab.errors == []
    if found is LOOP:  # which loads by itself

        def after_its_beginning() -> bool:  # what a key does may be drawn after a click
            tab.run("document.querySelector('#at').focus()")
            tab.press("Home")
            tab.click("#next")
            return "0 of 1 worker loading" in tab.run("document.querySelector('#now').textContent")

        poll(after_its_beginning, "its next moment is shown")
        assert tab.run("document.querySelector('#workers').textContent") == "1: idle"
