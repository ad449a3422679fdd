"""What all pages have in common."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from precache.errors import StorageError
from precache.html import pages
from precache.html.charts import LIGHT, PLACEHOLDERS
from precache.simulation.model import simulate
from precache.simulation.page import render_simulation
from tests.support.browser import CHROMIUM, chromium


def test_all_pages_carry_the_one_style_sheet() -> None:
    sheet = (Path(pages.__file__).parent / "page.css").read_text("utf-8")
    assert pages.style_sheet() == sheet
    assert pages.style_sheet("view.css").startswith(sheet)
    assert sheet in render_simulation(simulate(20, 10, 1, seconds=1))


def test_colours_of_charts_are_those_of_the_style_sheet() -> None:
    assert LIGHT["bg"] == "#fff"
    assert list(LIGHT) == list(PLACEHOLDERS)
    assert len(set(PLACEHOLDERS.values())) == len(PLACEHOLDERS)
    assert not set(PLACEHOLDERS.values()) & set(LIGHT.values())


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write the page .*no/a\.html: No such file"):
        pages.save("", tmp_path / "no/a.html")


def test_the_policy_allows_a_page_its_own_style_sheet_and_script_alone() -> None:
    for served in (False, True):
        policy = pages.content_policy("view.css", served=served)
        assert "unsafe" not in policy
        assert "script-src" not in policy
    assert "script-src 'sha256-" in pages.content_policy("player.css", "player.js")
    for template in Path(pages.__file__).parent.glob("*.html"):
        assert not re.search(r"""\sstyle=|\son\w+=["']""", template.read_text("utf-8")), template


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_no_script_but_the_pages_own_can_run(tmp_path: Path) -> None:
    """Were anything ever put into a page unescaped, the policy would still stop it."""
    html = render_simulation(simulate(20, 10, 1, seconds=1))
    evil = "<script>document.title = 'run'</script><img src=x: onerror=\"document.title = 'run'\">"
    pages.save(html.replace("</main>", f"{evil}</main>"), tmp_path / "a.html")
    with chromium(tmp_path / "profile") as tab:
        tab.open(tmp_path / "a.html")
        assert "Simulated" in tab.run("document.title")
        assert tab.run("document.querySelector('#clock').textContent"), "its own did run"
        assert "Content Security Policy" in " ".join(tab.errors)
