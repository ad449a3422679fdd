"""A doctor's examination as a page, in a browser, and as a picture."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the charts need matplotlib")

from precache.cli import main as cli
from precache.errors import StorageError, UsageError
from precache.units import in_ms, size
from precache_workers.doctor import page as doctor_page
from precache_workers.doctor.report import DoctorReport
from tests.doctor.test_report import ask, measured, times
from tests.support.browser import CHROMIUM, Tab, chromium

HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">.jpg"
FOUND = ask(measured(), rate=2000)
NOTHING = dataclasses.replace(
    ask(
        measured(
            source=HOSTILE,
            keys=[HOSTILE, "ö/中\udcff.jpg", "c", "d"],
            failures=[(HOSTILE, HOSTILE)],
            ops=[times("</text><script>alert()</script>", 1, 1, 1, 5), times("none", *4 * [0])],
            storage=[],
        )
    ),
    cut="fetch",
)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


def test_a_page_has_the_figures_of_what_was_found() -> None:
    page = doctor_page.render_doctor_report(FOUND)
    for each in FOUND.codecs:
        assert f"<td>{size(each.bytes_total)}</td>" in page
        assert f"<td>{each.cores_at_rate:.2f}</td>" in page
    for sample in FOUND.slowest:
        assert f'<td class="text">{sample.key}</td><td>{size(sample.nbytes)}</td>' in page
    for at in FOUND.storage:
        assert f"<td>{at.pattern}</td><td>{at.depth}</td><td>{at.requests_per_s:,.0f}</td>" in page
    decode = FOUND.stages[1].cpu_ms
    alt = f"decode: median {in_ms(decode.median / 1e3)}, mean {in_ms(decode.mean / 1e3)}"
    assert page.count(alt) == 2, "of the chart for wide screens and of that for narrow ones"
    assert not re.findall(r"""(?:src|href)=["']?(?!data:|\#)[^"'\s>]+|https?://|@import""", page)


def test_the_stall_is_what_the_source_and_the_codecs_fall_short_of_the_rate() -> None:
    before = FOUND.cuts[0].samples_per_s
    assert before < FOUND.rate
    assert doctor_page.stall(FOUND, before) == pytest.approx(1 - before / 2000)
    assert doctor_page.stall(FOUND, 2001) == 0
    assert doctor_page.predict_speed(FOUND.codecs[0], 3) == pytest.approx(3000 / 0.12)


def test_the_loops_that_are_modelled_stall_as_their_times_say() -> None:
    slow = ask(measured(), rate=20_000)
    before, after = doctor_page.simulate_without_cache(slow), doctor_page.simulate_with_cache(slow)
    each = slow.stages[0].wall_ms.mean + sum(stage.cpu_ms.mean for stage in slow.stages[1:-1])
    assert before.scenario.load.mean_ms == pytest.approx(64 * each, rel=0.05)
    assert before.stall_share == pytest.approx(1 - 4e3 / each / 20_000, abs=0.05)
    assert after is not None
    assert after.stall_share < 0.01
    assert doctor_page.simulate_with_cache(NOTHING) is None


@pytest.mark.parametrize(("rate", "stall"), [(1e-9, 0.0), (1e12, 1.0)])
@pytest.mark.parametrize("cores", [1, 20_000])
def test_any_rate_and_any_number_of_cores_can_be_modelled(
    rate: float, stall: float, cores: int
) -> None:
    found = ask(measured(), rate, cores)
    assert doctor_page.simulate_without_cache(found).stall_share == pytest.approx(stall, abs=0.01)
    after = doctor_page.simulate_with_cache(found)
    assert after is not None
    assert after.stall_share == pytest.approx(stall, abs=0.01)


def test_what_cannot_be_written_is_said_before_measuring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["doctor", str(tmp_path), "--html", str(tmp_path / "no/such.html")]) == 2
    assert "no/such.html cannot be written" in capfd.readouterr().err
    assert cli.main(["doctor", str(tmp_path), "--html", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder" in capfd.readouterr().err
    with pytest.raises(StorageError, match="cannot write the page"):
        FOUND.html(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r'a\.html needs matplotlib: pip install "precache\['):
        FOUND.html("a.html")


@in_a_browser
@pytest.mark.parametrize(
    "found",
    [pytest.param(FOUND, id="found", marks=pytest.mark.heavy), pytest.param(NOTHING, id="hostile")],
)
def test_a_page_is_fine_and_what_it_plays_can_be_stepped_through(
    tab: Tab, tmp_path: Path, found: DoctorReport
) -> None:
    found.html(tmp_path / "a.html")
    tab.fine(tmp_path / "a.html")
    tab.click("#next")
    assert tab.run("parseFloat(document.querySelector('#clock').textContent)") > 0
    tab.click("#play")
    assert tab.run("document.querySelector('#play').textContent") == "Pause"
    tab.click("#play")
    assert tab.errors == []


@in_a_browser
def test_no_name_of_a_file_or_an_op_runs(tab: Tab, tmp_path: Path) -> None:
    NOTHING.html(tmp_path / "a.html")
    tab.open(tmp_path / "a.html")
    assert str(tab.run("document.title")).startswith("Doctor: <script>")
    assert tab.run("document.scripts.length") == 2, "the data and what plays them"
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert HOSTILE in str(tab.run("document.querySelector('main').innerText"))
