"""Charts drawn with matplotlib, as SVG in a page."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from precache.errors import UsageError
from precache.html.pages import part
from precache.messages import printable
from precache.units import in_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

WIDTHS = {"wide": 920, "narrow": 344}
"""Width in CSS pixels of a chart on wide and on narrow screens."""
MAX_DOTS = 200
"""Maximum number of dots in a row; of more values, evenly spaced quantiles are drawn."""
LOG_SCALE_RATIO = 5
"""The scale is logarithmic if the longest time is at least this multiple of the shortest."""

Palette = Mapping[str, str]
"""Colours by their names in the style sheet."""
LIGHT: Palette = dict(re.findall(r"--(\w+): (#\w+)", part("page.css").partition("@media")[0]))
"""Light colours, for a PNG."""
PLACEHOLDERS: Palette = {name: f"#{number:06x}" for number, name in enumerate(LIGHT, 1)}
"""Colours of a drawing that `_svg` replaces by the style sheet's variables, light or dark."""

DrawChart = Callable[["FigureBase", Palette, bool], None]
"""Draws on a figure; the last argument is True for a wide one."""

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Chart:
    """A chart that can be drawn.

    Attributes
    ----------
    name
        One word, unique in its page.
    alt
        Text alternative.
    heights
        CSS pixels on wide and on narrow screens.
    """

    name: str
    title: str
    alt: str
    heights: tuple[float, float]
    draw: DrawChart
    note: str = ""

    @property
    def svg(self) -> Markup:
        """Two drawings, for wide and for narrow screens; the style sheet shows one of them."""
        return Markup("\n").join(map(_svg, [self] * 2, WIDTHS, self.heights))


def _svg(chart: Chart, kind: str, height: float) -> Markup:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with _style(PLACEHOLDERS), mpl.rc_context({"svg.hashsalt": f"{chart.name}-{kind}"}):
        figure = Figure(figsize=(WIDTHS[kind] / 72, height / 72), layout="constrained")
        chart.draw(figure, PLACEHOLDERS, kind == "wide")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    inside = buffer.getvalue().partition("<svg")[2].partition(">")[2]
    inside = re.sub(r'<g id="[^"]*"', "<g", inside)
    inside = re.sub(r"<style.*?</style>", "", inside, flags=re.DOTALL)
    inside = re.sub(r' (?:d|x|y|transform)="[^"]*"', _round, inside)
    inside = re.sub(r' style="([^"]*)"', _as_attributes, inside)
    for name, colour in PLACEHOLDERS.items():
        inside = inside.replace(colour, f"var(--{name})")
    head = f'<svg class="chart {kind}" viewBox="0 0 {WIDTHS[kind]} {height:g}" role="img"'
    # matplotlib has escaped all text in `inside`.
    return Markup(f'{head} aria-label="{escape(printable(chart.alt))}">{inside}')


def _round(attribute: re.Match[str]) -> str:
    """Cut coordinates to a tenth of a pixel."""
    return re.sub(r"(\.\d)\d+", r"\1", attribute[0])


def _as_attributes(style: re.Match[str]) -> str:
    """Turn an inline style, which the pages' policy blocks, into attributes of the element.

    The font family is dropped, so that the page's own applies.
    """
    attributes = dict(re.findall(r"([\w-]+): ([^;]+)", style[1]))
    attributes.pop("font-family", None)
    if font := attributes.pop("font", ""):
        [(weight, size)] = re.findall(r"(?:(bold|\d+) )?([\d.]+px) ", font)
        attributes |= {"font-size": size} | ({"font-weight": weight} if weight else {})
    return "".join(f' {name}="{value}"' for name, value in attributes.items())


@contextlib.contextmanager
def _style(palette: Palette) -> Iterator[None]:
    import matplotlib as mpl

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 12,
        "text.color": palette["ink"],
        "axes.edgecolor": palette["line"],
        "axes.labelcolor": palette["soft"],
        "axes.titlecolor": palette["soft"],
        "axes.titlelocation": "left",
        "axes.titlesize": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.xmargin": 0,
        "grid.color": palette["line"],
        "hatch.linewidth": 1.5,
        "legend.frameon": False,
        "legend.fontsize": 11,
        "xtick.color": palette["soft"],
        "ytick.color": palette["soft"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
    }
    # matplotlib warns when it lists fonts, or if it has no home directory to cache the list.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with mpl.rc_context(settings):
        yield


def need_matplotlib(path: str | Path) -> None:
    """Require matplotlib, which draws `path`.

    Raises
    ------
    UsageError
        If it is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401  # only to see that it can be imported
    except ImportError:
        raise UsageError(
            f'drawing {path} needs matplotlib: pip install "precache[report]"'
        ) from None


def check_page(path: str | Path) -> None:
    """Check in advance that a page can be drawn and written.

    Raises
    ------
    UsageError
        If matplotlib or the folder of `path` is missing, or `path` is a folder.
    """
    need_matplotlib(path)
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no such folder")
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; give the name of a file")


def ascii_text(text: str) -> str:
    """Replace non-ASCII characters: the font used for measuring text may lack them."""
    return printable(text).encode("ascii", "replace").decode()


# --- kinds of charts ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """Bars of one quantity, one bar per row of the chart.

    Attributes
    ----------
    values
        NaN if unknown.
    labels
        The values as text.
    line
        A reference value, and its name.
    top
        Minimum for the end of the scale, so that two panels can share a scale.
    """

    heading: str
    values: Sequence[float]
    labels: Sequence[str]
    line: tuple[float, str] | None = None
    top: float = 0.0


def bars(
    name: str,
    title: str,
    rows: Sequence[str],
    panels: Sequence[Panel],
    colours: Sequence[str],
    note: str = "",
) -> Chart:
    """Make a bar chart with one panel per quantity; on narrow screens they are stacked."""

    def draw(figure: FigureBase, palette: Palette, wide: bool) -> None:
        shape = (1, len(panels)) if wide else (len(panels), 1)
        grid = figure.subplots(*shape, squeeze=False, sharey=wide)
        for panel, axes in zip(panels, grid.flat, strict=True):
            _draw_panel(axes, panel, colours, palette)
        for axes in grid[:, 0]:
            axes.set_yticks(range(len(rows)), [_shorten(row, wide) for row in rows])
            axes.tick_params(axis="y", labelcolor=palette["ink"])
            axes.invert_yaxis()

    height = 36 + 25 * len(rows)
    descriptions = (
        f"{panel.heading}: " + ", ".join(map(" ".join, zip(rows, panel.labels, strict=True)))
        for panel in panels
    )
    heights = (height, len(panels) * (height + 6))
    return Chart(name, title, "; ".join([title, *descriptions]), heights, draw, note)


def _draw_panel(axes: Axes, panel: Panel, colours: Sequence[str], palette: Palette) -> None:
    values, heading = np.nan_to_num(np.array(panel.values, float), posinf=0), panel.heading
    if panel.line:
        value, meaning = panel.line
        axes.axvline(value, color=palette["soft"], linewidth=1.5, linestyle="--", zorder=3)
        heading += f" (line: {meaning})"
    top = max([*values.tolist(), panel.top, panel.line[0] if panel.line else 0.0]) or 1.0
    rectangles = axes.barh(range(len(values)), values, 0.7, color=[palette[c] for c in colours])
    labels = list(map(ascii_text, panel.labels))
    background = {"facecolor": palette["bg"], "edgecolor": "none", "pad": 1}
    axes.bar_label(rectangles, labels, padding=5, color=palette["ink"], bbox=background, zorder=4)
    axes.set_xlim(0, 1.4 * top)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(ascii_text(heading))


def _shorten(text: str, wide: bool) -> str:
    """Shorten a name beside an axis."""
    limit = 34 if wide else 24
    label = ascii_text(text)
    return label if len(label) <= limit else f"{label[: limit - 3]}..."


def distributions(
    name: str, title: str, rows: Mapping[str, npt.NDArray[np.float64]], note: str = ""
) -> Chart:
    """Make a chart of times of samples or batches in ms, with a row for each entry of `rows`."""

    def draw(figure: FigureBase, palette: Palette, wide: bool) -> None:
        axes = figure.subplots()
        least = _least_positive(rows.values())
        clipped = [np.maximum(ms, least) for ms in rows.values()]
        for row, ms in enumerate(clipped):
            _draw_row(axes, row, ms, palette)
        _set_scale(axes, clipped, wide)
        axes.grid(axis="x")
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), [_shorten(row, wide) for row in rows])
        axes.tick_params(axis="y", labelcolor=palette["ink"])
        axes.spines["left"].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4 if wide else 2)

    descriptions = (
        f"{row}: median {in_ms(np.median(ms) / 1e3)}, mean {in_ms(ms.mean() / 1e3)}, "
        f"95th percentile {in_ms(np.percentile(ms, 95) / 1e3)}, longest {in_ms(ms.max() / 1e3)}"
        for row, ms in rows.items()
    )
    heights = (80 + 40 * len(rows), 100 + 40 * len(rows))
    return Chart(name, title, "; ".join([title, *descriptions]), heights, draw, note)


def _least_positive(rows: Iterable[npt.NDArray[np.float64]]) -> float:
    """Return the shortest positive time, at least 1e-4 ms.

    It is drawn in place of zero, which a logarithmic scale cannot show.
    """
    above = [float(ms[ms > 0].min()) for ms in rows if (ms > 0).any()]
    return max(1e-4, min(above, default=1e-4))


def _set_scale(axes: Axes, rows: Sequence[npt.NDArray[np.float64]], wide: bool) -> None:
    """Use a logarithmic scale if times differ widely, with margins."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(float(ms.min()) for ms in rows), max(float(ms.max()) for ms in rows)
    if high < LOG_SCALE_RATIO * low:
        axes.set_xlim(0, 1.05 * high)
        axes.set_xlabel("ms")
        return
    decades = math.log10(high / low)
    axes.set_xscale("log")
    axes.set_xlim(low / 10 ** (0.03 * decades), high * 10 ** (0.03 * decades))
    ticks = (1.0,) if decades > (3.5 if wide else 1.5) else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.set_xlabel("ms, logarithmic scale")


def _draw_row(axes: Axes, row: int, ms: npt.NDArray[np.float64], palette: Palette) -> None:
    dots = np.sort(ms)
    if len(dots) > MAX_DOTS:
        dots = dots[np.linspace(0, len(dots) - 1, MAX_DOTS).round().astype(int)]
    # A deterministic jitter: multiples of the golden ratio.
    jitter = (np.arange(len(dots)) * (math.sqrt(5) - 1) / 2 % 1 - 0.5) * 0.6
    label = "single" if row == 0 else None
    axes.plot(dots, row + jitter, "o", color=palette["blue"], ms=4, mew=0, alpha=0.6, label=label)
    p50, p95 = np.percentile(ms, [50, 95]).tolist()
    for value, colour, text, line in ((p50, "ink", "median", "-"), (p95, "orange", "p95", ":")):
        axes.plot(
            [value, value], [row - 0.38, row + 0.38], line, color=palette[colour], linewidth=2.5,
            label=text if row == 0 else None,
        )  # fmt: skip
    axes.plot(
        [ms.mean()], [row], "D", color=palette["bg"], mec=palette["ink"], mew=1.5, ms=7,
        label="mean" if row == 0 else None,
    )  # fmt: skip
