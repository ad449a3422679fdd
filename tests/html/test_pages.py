"""What all pages have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from precache.errors import StorageError
from precache.html import pages
from precache.html.charts import PAGE, PAPER
from precache.simulation.model import simulate
from precache.simulation.pictures import page
from tests.support.browser import CHROMIUM, chromium


def test_all_pages_carry_the_one_style_sheet() -> None:
    sheet = (Path(pages.__file__).parent / "page.css").read_text("utf-8")
    assert pages.style() == sheet
    assert pages.style("view.css").startswith(sheet)
    assert sheet in page(simulate(20, 10, 1, seconds=1))


def test_colours_of_charts_are_those_of_the_style_sheet() -> None:
    assert PAPER["bg"] == "#fff"
    assert list(PAPER) == list(PAGE)
    assert len(set(PAGE.values())) == len(PAGE)
    assert not set(PAGE.values()) & set(PAPER.values())


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write the page .*no/a\.html: No such file"):
        pages.save("", tmp_path / "no/a.html")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_no_script_but_the_pages_own_can_run(tmp_path: Path) -> None:
    """Were anything ever put into a page unescaped, the policy would still stop it."""
    html = page(simulate(20, 10, 1, seconds=1))
    evil = "<script>document.title = 'run'</script><img src=x: onerror=\"document.title = 'run'\">"
    pages.save(html.replace("</main>", f"{evil}</main>"), tmp_path / "a.html")
    with chromium(tmp_path / "profile") as tab:
        tab.open(tmp_path / "a.html")
        assert "Simulated" in tab.run("document.title")
        assert tab.run("document.querySelector('#clock').textContent"), "its own did run"
        assert "Content Security Policy" in " ".join(tab.errors)
