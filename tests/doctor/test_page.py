"""A doctor's examination as a page, in a browser, and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from precache.cli import main as cli
from precache.errors import StorageError
from precache.units import in_ms, size
from precache_workers.doctor import page as doctor_page
from precache_workers.doctor.report import DoctorReport
from tests.doctor.test_report import ask, stages, times
from tests.support.browser import Tab
from tests.support.html_page import stands_alone

HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">.jpg"
FOUND = ask(rate=2000)
NOTHING = ask(
    source=HOSTILE,
    keys=[HOSTILE, "ö/中\udcff.jpg", "c", "d"],
    failures=[(HOSTILE, HOSTILE)],
    misfits=[(HOSTILE, HOSTILE)],
    stages=stages(times("</text><script>alert()</script>", 1, 1, 1, 5), times("none", *4 * [0])),
    storage=[],
)


def test_a_page_has_the_figures_of_what_was_found() -> None:
    page = doctor_page.render_doctor_report(FOUND)
    for each in FOUND.codecs:
        assert f"<td>{size(each.stored * FOUND.samples)}</td>" in page
        assert f"<td>{FOUND.cores_at_rate(each):.2f}</td>" in page
    for sample in FOUND.slowest:
        assert f'<td class="text">{sample.key}</td><td>{size(sample.nbytes)}</td>' in page
    for at in FOUND.storage:
        assert f"{at.depth}</td><td>{at.requests_per_s:,.0f}</td>" in page
    decode = FOUND.stages[1].ms
    text = f"median {in_ms(decode.median / 1e3)}, mean {in_ms(decode.mean / 1e3)}"
    assert f'<strong>decode</strong> <span class="soft">{text}' in page
    stands_alone(page, scripts=2)


def test_the_loops_that_are_modelled_stall_as_their_times_say() -> None:
    slow = ask(rate=20_000)
    before, after = doctor_page.simulate_without_cache(slow), doctor_page.simulate_with_cache(slow)
    each = sum(stage.ms.mean for stage in slow.stages[:-1])
    assert before.load.mean() == pytest.approx(64 * each, rel=0.05)
    assert before.stall_share == pytest.approx(1 - 4e3 / each / 20_000, abs=0.05)
    wide = doctor_page.simulate_without_cache(ask(rate=20_000, cores=400))
    assert wide.stall_share == pytest.approx(0.9, abs=0.02), "the source delivers 2,000/s"
    assert after is not None
    assert after.stall_share < 0.01
    assert doctor_page.simulate_with_cache(NOTHING) is None
    for rate, stall in ((1e-9, 0.0), (1e12, 1.0)):
        for cores in (1, 20_000):
            found = ask(rate, cores)
            for loop in doctor_page.simulate_without_cache, doctor_page.simulate_with_cache:
                assert loop(found).stall_share == pytest.approx(stall, abs=0.01)


def test_what_cannot_be_written_is_said_before_measuring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", str(tmp_path), "--html", str(tmp_path / "no/such.html")]) == 2
    assert "no/such.html cannot be written" in capfd.readouterr().err
    assert cli.main(["doctor", str(tmp_path), "--html", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder" in capfd.readouterr().err
    with pytest.raises(StorageError, match="cannot write the page"):
        FOUND.html(tmp_path)


@pytest.mark.parametrize(
    "found",
    [pytest.param(FOUND, id="found", marks=pytest.mark.heavy), pytest.param(NOTHING, id="hostile")],
)
def test_a_page_is_fine_and_what_it_plays_can_be_stepped_through(
    tab: Tab, tmp_path: Path, found: DoctorReport
) -> None:
    found.html(tmp_path / "a.html")
    tab.fine(tmp_path / "a.html")
    if found is NOTHING:
        assert str(tab.run("document.title")).startswith("Doctor: <script>")
        assert tab.run("document.scripts.length") == 2, "the data and what plays them"
        assert tab.run("document.querySelectorAll('img').length") == 0
        assert HOSTILE in str(tab.run("document.querySelector('main').innerText"))
    tab.click("#next")
    assert tab.run("parseFloat(document.querySelector('#clock').textContent)") > 0
    tab.click("#play")
    assert tab.run("document.querySelector('#play').textContent") == "Pause"
    tab.click("#play")
    assert tab.errors == []
