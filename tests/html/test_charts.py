"""Charts as SVG and PNG."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the charts need matplotlib")

from precache.html.charts import Chart, Panel, bars, distributions

EVIL = "</text><script>'&'\udcff$\\frac{$\x1b\n\u202e中"
BARS = bars(
    "b", "Title", ["one", EVIL],
    [
        Panel("speed", [3.0, math.nan], ["3/s", "unknown"], (2.0, "asked")),
        Panel(EVIL, [0, 0], ["", EVIL]),
    ],
    ["blue", "green"],
)  # fmt: skip


def elements(chart: Chart) -> list[ET.Element]:
    """The chart for wide screens and that for narrow ones, parsed."""
    text = chart.svg.encode("utf-8", "replace").decode()
    text = text.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ')
    return list(ET.fromstring(f"<div>{text}</div>"))  # it is of our own making


@pytest.mark.parametrize(
    "chart",
    [
        BARS,
        distributions("d", "Title", {EVIL: np.array([1.0, 1000.0]), "zero": np.zeros(3)}),
        distributions("d", "Title", {"alike": np.full(2000, 5.0)}),
        distributions("d", "Title", {"none": np.zeros(1)}),
    ],
)
def test_a_chart_is_two_drawings_in_the_pages_colours(chart: Chart) -> None:
    wide, narrow = elements(chart)
    assert (wide.get("class"), narrow.get("class")) == ("chart wide", "chart narrow")
    for each in (wide, narrow):
        assert each.get("role") == "img"
        assert str(each.get("aria-label")).startswith("Title; ")
        assert not [one for one in each.iter() if one.tag.endswith("script")]
    assert "var(--blue)" in chart.svg
    assert "style" not in chart.svg, "the pages' policy blocks inline styles"
    assert not re.search(r"#0000\d\d", chart.svg), "no colour that only stands for one"
    ids = re.findall(r' id="([^"]*)"', chart.svg)
    assert len(ids) == len(set(ids))


def test_values_are_read_to_those_who_do_not_see_them() -> None:
    assert "speed: one 3/s, " in BARS.alt
    chart = distributions("d", "Times", {"load": np.array([1.0, 2.0, 6.0])})
    assert chart.alt == "Times; load: median 2 ms, mean 3 ms, 95th percentile 5.6 ms, longest 6 ms"
