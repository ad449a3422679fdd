"""Charts as SVG."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from precache.html.charts import Bars, Chart, Dots, Panel, round_numbers
from precache.html.pages import _environment

EVIL = "</text><script>'&'$\\frac{$\n\u202e中"
BARS = Bars(
    "Title", ["one", EVIL],
    [
        Panel("speed", [3.0, math.nan], ["3/s", "unknown"], (2.0, "asked")),
        Panel(EVIL, [0, 0], ["", EVIL]),
    ],
    ["blue", "green"],
)  # fmt: skip


def drawn(chart: Chart) -> ET.Element:
    """A chart as it stands in a page: well-formed, within its width, and without styles."""
    module = _environment().get_template("charts.html").module
    found = ET.fromstring(module.chart(chart))  # type: ignore[attr-defined]  # a macro
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
    assert len(chart.ticks) <= 9
    assert all(0 <= tick.at <= 100 for tick in chart.ticks)


@given(st.floats(1e-6, 1e12), st.integers(3, 8))
def test_round_numbers_reach_up_to_the_top(top: float, most: int) -> None:
    found = round_numbers(top, most)
    assert found[0] == 0
    assert top - found[1] <= found[-1] <= top * (1 + 1e-6)
    assert len(found) <= most + 1
    assert all(re.match(r"[125]e", f"{found[1]:.0e}") for _ in found)
