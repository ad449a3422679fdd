"""What pages have in common: policy, colours, the player, charts, pictures; in a browser, too."""

import io
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from precache.diagnosis.diagnose import Diagnosis
from precache.html import pages
from precache.html.charts import Bars, Dots, Panel
from precache.html.pages import _environment
from precache.html.png import encode_png, preview
from precache.simulation.model import simulate
from precache.simulation.page import render_simulation
from tests.diagnosis.test_verdict import made, measured
from tests.doctor.test_report import FOUND, HOSTILE, NOTHING
from tests.support.browser import Tab

TOGETHER = measured(0.02, 0.03, 0.03, workers=4, single_worker=made(0.12, 0.9))
PAGES: dict[str, Any] = {
    "varied": simulate(2000, 100, 7, load_cv=0.4),
    "no workers": simulate(200, 100, 0, seconds=5),
    "nothing came": simulate(2000, 100, 7, seconds=1),
    "many workers": simulate(4000, 10, 200, load_cv=0.3, seconds=20),
    "diagnosis": Diagnosis.of(measured(0.02, 0.06, 0.08, cpu=1.0)),
    "diagnosis of workers": Diagnosis.of(TOGETHER),
    "doctor": FOUND,
    "hostile": NOTHING,
}


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


EVIL = "</text><script>'&'$\\frac{$\n\u202e中"
BARS = Bars(
    "Title", ["one", EVIL],
    [
        Panel("speed", [0.3, 0.0], ["3/s", "0/s"], (0.2, "asked")),
        Panel(EVIL, [0, 0], ["", EVIL]),
    ],
    ["blue", "green"],
)  # fmt: skip


def drawn(chart: Bars | Dots) -> ET.Element:
    """A chart as it stands in a page: well-formed, within its width, and without styles."""
    macros: Any = _environment().get_template("charts.html").module
    found = ET.fromstring((macros.bars if isinstance(chart, Bars) else macros.dots)(chart).strip())
    for element in found.iter():
        assert element.tag != "script"
        assert not element.attrib.keys() & {"style", "id"}, "the pages' policy blocks inline styles"
        for name in {"x", "x1", "x2", "cx", "width"} & element.attrib.keys():
            assert 0 <= float(element.attrib[name].removesuffix("%")) <= 100
    return found


def test_values_are_text_and_bars_have_their_lengths() -> None:
    rows = drawn(BARS).findall(".//li")
    assert "".join(rows[0].itertext()).split() == ["one", "3/s"]
    lengths = [row.find(".//rect").get("width") for row in rows]  # type: ignore[union-attr]
    assert lengths == ["100.00%", "0.00%", "0.00%", "0.00%"]
    assert rows[0].find(".//line").get("x1") == "66.67%"  # type: ignore[union-attr]
    chart = Dots("Times", {"load": np.array([1.0, 2.0, 6.0])})
    text = "median 2 ms, mean 3 ms, 95th percentile 6 ms, longest 6 ms"
    assert text in "".join(drawn(chart).itertext())


TIMES = st.floats(0, 1e9)


@given(
    st.lists(TIMES, min_size=1, max_size=300) | TIMES.map(lambda ms: [ms] * 2000),
    st.lists(TIMES, min_size=1, max_size=3),
)
@example([1.0, 1000.0], [0.0] * 3)
@example([0.0], [0.0])
def test_any_times_can_be_drawn_with_a_few_ticks(one: list[float], other: list[float]) -> None:
    chart = Dots(EVIL, {EVIL: np.array(one), "other": np.array(other)})
    assert "blue" in ET.tostring(drawn(chart)).decode()
    for row in chart.rows:
        places = [x for x, _ in chart.dots(row)]
        assert 0 < len(places) <= 200
        assert places == sorted(places)
        assert 0 <= places[0] <= places[-1] <= 100
    assert 1 < len(chart.ticks) <= 9
    assert all(0 <= at <= 100 for at, _ in chart.ticks)


@given(arrays.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))))
def test_pillow_reads_the_same_pixels(pixels: np.ndarray) -> None:
    with Image.open(io.BytesIO(encode_png(pixels))) as image:
        assert image.mode == ("L", "LA", "RGB", "RGBA")[pixels.shape[2] - 1]
        assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)


ROW = np.arange(300, dtype=np.uint16).astype(np.uint8).reshape(3, 20, 5)
BYTES = np.array([[[0], [128], [255]]], np.uint8)
PREVIEWS: list[tuple[np.ndarray, str, np.ndarray | None]] = [
    (ROW, "5 x 20, uint8", ROW.transpose(1, 2, 0)),
    (ROW.transpose(1, 2, 0), "5 x 20, uint8", ROW.transpose(1, 2, 0)),  # channels last
    (np.eye(16, dtype=np.bool_), "16 x 16, bool", np.eye(16, dtype=np.uint8)[..., None] * 255),
    (np.array([[[0, 30000, 60000]]], np.uint16),
     "3 x 1, uint16; scaled: uint16 0 is black, 6e+04 is white", BYTES),
    *((np.array([[[-100, 0, 100]]], name),
       f"3 x 1, {name}; scaled: {name} -100 is black, 100 is white", BYTES)
      for name in ("float16", "float32", "float64", "int16", "int8")),
    *((np.zeros(shape, np.float32), f"float32 {shape}: ", None)
      for shape in [(512,), (4, 4), (7, 9, 11), (3, 0, 4), (2, 3, 4, 5)]),
    (np.array(1.5, np.float32), "float32: 1.5", None),
    (np.array([1, 2]), "int64 (2,): 1 2", None),
    (np.arange(100, dtype=np.int16),
     "int16 (100,): 0 … 99, mean 49.5; starts with 0 1 2 3 4 5", None),
]  # fmt: skip


@pytest.mark.parametrize(("row", "note", "pixels"), PREVIEWS)
def test_a_row_is_a_picture_or_told_as_numbers(
    row: np.ndarray, note: str, pixels: np.ndarray | None
) -> None:
    shown = preview(row)
    assert shown.note == note or (note.endswith(": ") and shown.note.startswith(note))
    assert (shown.pixels is None) == (pixels is None)
    assert pixels is None or np.array_equal(shown.pixels, pixels)


@given(arrays.arrays(np.float64, (3, 2, 2)))
@example(np.full((3, 2, 2), 5e-324))
def test_no_float_is_too_wild(values: np.ndarray) -> None:
    with np.errstate(all="raise", under="ignore"):  # half of the least float is 0
        shown = preview(values)
    assert shown.pixels is not None
    assert shown.pixels.shape == (2, 2, 3)
    assert ("not finite" in shown.note) == (not np.isfinite(values).all())
