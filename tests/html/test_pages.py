"""What all pages have in common."""

from __future__ import annotations

import importlib
import operator
import re
import sys
from pathlib import Path

import pytest

from precache.errors import StorageError, UsageError
from precache.html import pages
from precache.simulation.model import simulate
from precache.simulation.page import render_simulation
from tests.support.browser import Tab


def test_all_pages_carry_the_one_style_sheet() -> None:
    sheet = (Path(pages.__file__).parent / "page.css").read_text("utf-8")
    assert pages.style_sheet() == sheet
    assert pages.style_sheet("view.css").startswith(sheet)
    assert sheet in render_simulation(simulate(20, 10, 1, seconds=1))


def test_a_missing_library_is_named_and_a_page_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "precache.html.pages")
    with pytest.raises(UsageError, match=r"a page needs jinja2: pip install 'precache\[report\]'"):
        importlib.import_module("precache.html.pages")
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


def test_no_script_but_the_pages_own_can_run(tab: Tab, tmp_path: Path) -> None:
    """Were anything ever put into a page unescaped, the policy would still stop it."""
    html = render_simulation(simulate(20, 10, 1, seconds=1))
    evil = "<script>document.title = 'run'</script><img src=x: onerror=\"document.title = 'run'\">"
    pages.save(html.replace("</main>", f"{evil}</main>"), tmp_path / "a.html")
    tab.open(tmp_path / "a.html")
    assert "Simulated" in tab.run("document.title")
    assert tab.run("document.querySelector('#clock').textContent"), "its own did run"
    assert "Content Security Policy" in " ".join(tab.errors)


def luminance(colour: str) -> float:
    """Of ``#rgb`` or ``#rrggbb``, as WCAG 2 defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [part / 255 for part in bytes.fromhex(digits)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(map(operator.mul, linear, (0.2126, 0.7152, 0.0722)))


def test_colours_stand_out_in_light_and_dark() -> None:
    sheets = re.findall(r":root \{.*?\}", pages.style_sheet(), re.DOTALL)
    assert len(sheets) == 2
    for sheet in sheets:
        levels = {name: luminance(colour) for name, colour in re.findall(r"--(\w+): (#\w+)", sheet)}
        least = {"ink": 4.5, "soft": 4.5, "blue": 3, "orange": 3, "green": 3, "purple": 3, "bad": 3}
        for name, contrast in least.items():
            for ground in ("bg", "card"):
                low, high = sorted((levels[name], levels[ground]))
                assert (high + 0.05) / (low + 0.05) > contrast, (name, ground)
