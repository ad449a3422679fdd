"""What all pages have in common: policy, colours, the player; and what a browser makes of them."""

from __future__ import annotations

import importlib
import operator
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from precache.diagnosis.diagnose import Diagnosis
from precache.errors import StorageError, UsageError
from precache.html import pages
from precache.simulation.model import simulate
from precache.simulation.page import render_simulation
from tests.diagnosis.test_verdict import made, measured
from tests.doctor.test_report import FOUND, HOSTILE, NOTHING
from tests.support.browser import Tab

TOGETHER = {"setup": {"workers": 4}, "single_worker": made(0.12, 0.9)}
PAGES: dict[str, Any] = {
    "varied": simulate(2000, 100, 7, load_cv=0.4),
    "no workers": simulate(200, 100, 0, seconds=5),
    "nothing came": simulate(2000, 100, 7, seconds=1),
    "many workers": simulate(4000, 10, 200, load_cv=0.3, seconds=20),
    "diagnosis": Diagnosis.of(measured(0.02, 0.06, 0.08, cpu=1.0)),
    "diagnosis of workers": Diagnosis.of(measured(0.02, 0.03, 0.03, **TOGETHER)),
    "doctor": FOUND,
    "hostile": NOTHING,
}


def test_a_missing_library_is_named_and_a_page_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for page in (PAGES["diagnosis"], FOUND):
        with pytest.raises(StorageError, match=r"cannot write the page .*no/a\.html: No such file"):
            page.html(tmp_path / "no/a.html")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "precache.html.pages")
    with pytest.raises(UsageError, match=r"a page needs jinja2: pip install 'precache\[report\]'"):
        importlib.import_module("precache.html.pages")


def test_no_template_has_styles_or_scripts_that_the_policy_would_block() -> None:
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
    assert tab.text("#clock"), "its own did run"
    assert "Content Security Policy" in " ".join(tab.errors)


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_fine_drawn_and_played(tab: Tab, tmp_path: Path, name: str) -> None:
    PAGES[name].html(tmp_path / "a.html")
    tab.fine(tmp_path / "a.html")
    for canvas in tab.run("[...document.querySelectorAll('canvas')].map(each => each.id)"):
        pen = f"document.querySelector('canvas#{canvas}').getContext('2d')"
        assert tab.run(f"{pen}.getImageData(0, 0, {pen}.canvas.width, 60).data.some(v => v)")
    for _ in range(3):
        tab.click("#next")
    assert float(tab.text("#clock").split(" s")[0]) > 0
    if name != "nothing came":  # where its end is the next moment
        for text in ("Pause", "Play"):
            tab.click("#play")
            assert tab.text("#play") == text
    assert tab.errors == []
    if name == "hostile":
        assert str(tab.run("document.title")).startswith("Doctor: <script>")
        assert tab.run("document.scripts.length") == 2, "the data and what plays them"
        assert tab.run("document.querySelectorAll('img').length") == 0
        assert HOSTILE in str(tab.run("document.querySelector('main').innerText"))


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
