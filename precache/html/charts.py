"""Charts by matplotlib: as SVG in a page, in its style sheet's colours, and as a PNG."""

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

from precache.errors import StorageError, UsageError
from precache.html.pages import part
from precache.messages import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

WIDTHS = {"wide": 920, "narrow": 344}
"""CSS pixels that a chart is drawn for, so that its text has its own size on either screen."""
HEADING = 30
"""CSS pixels of a heading in a PNG."""
DOTS = 200
"""Values of a row that are drawn one by one; of more, as many that are spread evenly over them."""
FAR = 5
"""Times the shortest from which the longest makes the scale a logarithmic one."""

Inks = Mapping[str, str]
"""Colours by their names in the style sheet."""
PAPER: Inks = dict(re.findall(r"--(\w+): (#\w+)", part("page.css").partition("@media")[0]))
"""The light ones, for a PNG."""
PAGE: Inks = {name: f"#{number:06x}" for number, name in enumerate(PAPER, 1)}
"""Stand for the style sheet's variables, which know light and dark."""

Draw = Callable[["FigureBase", Inks, bool], None]
"""Draws on a figure; the last argument is whether it is a wide one."""

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Chart:
    """Something to draw.

    Attributes
    ----------
    name
        Of one word, unique in its page.
    alt
        What it shows, for those who do not see it.
    heights
        CSS pixels on wide and on narrow screens.
    """

    name: str
    title: str
    alt: str
    heights: tuple[float, float]
    draw: Draw
    note: str = ""

    @property
    def svg(self) -> Markup:
        """One for wide screens and one for narrow ones, of which the page shows either."""
        drawn = (
            _svg(self, kind, height) for kind, height in zip(WIDTHS, self.heights, strict=True)
        )
        return Markup("\n").join(drawn)


def _svg(chart: Chart, kind: str, height: float) -> Markup:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with _styled(PAGE), mpl.rc_context({"svg.hashsalt": f"{chart.name}-{kind}"}):
        figure = Figure(figsize=(WIDTHS[kind] / 72, height / 72), layout="constrained")
        chart.draw(figure, PAGE, kind == "wide")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    inside = buffer.getvalue().partition("<svg")[2].partition(">")[2]
    inside = re.sub(r'<g id="[^"]*"', "<g", inside)
    inside = re.sub(r' (?:d|x|y|transform)="[^"]*"', _shortened, inside)
    for name, colour in PAGE.items():
        inside = inside.replace(colour, f"var(--{name})")
    head = f'<svg class="chart {kind}" viewBox="0 0 {WIDTHS[kind]} {height:g}" role="img"'
    # matplotlib has escaped all text in it.
    return Markup(f'{head} aria-label="{escape(printable(chart.alt))}">{inside}')


def _shortened(attribute: re.Match[str]) -> str:
    """Coordinates to a tenth of a pixel."""
    return re.sub(r"(\.\d)\d+", r"\1", attribute[0])


@contextlib.contextmanager
def _styled(inks: Inks) -> Iterator[None]:
    import matplotlib as mpl

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 12,
        "text.color": inks["ink"],
        "axes.edgecolor": inks["line"],
        "axes.labelcolor": inks["soft"],
        "axes.titlecolor": inks["soft"],
        "axes.titlelocation": "left",
        "axes.titlesize": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.xmargin": 0,
        "grid.color": inks["line"],
        "hatch.linewidth": 1.5,
        "legend.frameon": False,
        "legend.fontsize": 11,
        "xtick.color": inks["soft"],
        "ytick.color": inks["soft"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
    }
    # It may warn that it makes a list of fonts, or has no home to keep it in.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with mpl.rc_context(settings):
        yield


def need_matplotlib(path: str | Path) -> None:
    """Say how to have what draws `path`.

    Raises
    ------
    UsageError
        If it is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401  # whether it can be imported is the question
    except ImportError:
        raise UsageError(
            f'drawing {path} needs matplotlib: pip install "precache[report]"'
        ) from None


def check_page(path: str | Path) -> None:
    """Refuse early what could not be drawn or written later.

    Raises
    ------
    UsageError
        If matplotlib or the folder is not there, or `path` is a folder.
    """
    need_matplotlib(path)
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no such folder")
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; give the name of a file")


def draw_png(title: str, charts: Sequence[Chart], path: str | Path) -> None:
    """Draw charts below each other into a PNG, 1,600 pixels wide.

    Raises
    ------
    UsageError
        If matplotlib is not installed.
    StorageError
        If the file cannot be written.
    """
    need_matplotlib(path)
    from matplotlib.figure import Figure

    width, heights = WIDTHS["wide"], [HEADING + chart.heights[0] for chart in charts]
    with _styled(PAPER):
        size = (width / 72, (2 * HEADING + sum(heights)) / 72)
        figure = Figure(figsize=size, dpi=72 * 1600 / width, layout="constrained")
        figure.suptitle(plain(title), fontsize=14, wrap=True)
        parts = figure.subfigures(len(charts), 1, height_ratios=heights, squeeze=False)
        for each, chart in zip(parts[:, 0], charts, strict=True):
            each.suptitle(plain(chart.title), x=0.01, ha="left", fontsize=13, fontweight="bold")
            chart.draw(each, PAPER, True)
        try:
            figure.savefig(path, format="png")
        except OSError as error:
            raise StorageError(f"cannot write the picture {path}: {error}") from None


def plain(text: str) -> str:
    """What the font that text is measured with has letters for."""
    return printable(text).encode("ascii", "replace").decode()


# --- kinds of charts ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One quantity of several things, as bars.

    Attributes
    ----------
    values
        NaN for what is not known.
    labels
        The values for people.
    line
        A value that they are to be held against, and what it is.
    top
        Least value at the end of the scale, where two panels are to share theirs.
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
    """Bars of the same rows for each quantity: beside each other, on narrow screens below."""

    def draw(figure: FigureBase, inks: Inks, wide: bool) -> None:
        shape = (1, len(panels)) if wide else (len(panels), 1)
        grid = figure.subplots(*shape, squeeze=False, sharey=wide)
        for panel, axes in zip(panels, grid.flat, strict=True):
            _draw_panel(axes, panel, colours, inks)
        for axes in grid[:, 0]:
            axes.set_yticks(range(len(rows)), [_fitting(row, wide) for row in rows])
            axes.tick_params(axis="y", labelcolor=inks["ink"])
            axes.invert_yaxis()

    each = 36 + 25 * len(rows)
    said = (
        f"{panel.heading}: " + ", ".join(map(" ".join, zip(rows, panel.labels, strict=True)))
        for panel in panels
    )
    heights = (each, len(panels) * (each + 6))
    return Chart(name, title, "; ".join([title, *said]), heights, draw, note)


def _draw_panel(axes: Axes, panel: Panel, colours: Sequence[str], inks: Inks) -> None:
    values, heading = np.nan_to_num(np.array(panel.values, float), posinf=0), panel.heading
    if panel.line:
        at, what = panel.line
        axes.axvline(at, color=inks["soft"], linewidth=1.5, linestyle="--", zorder=3)
        heading += f" (line: {what})"
    top = max([*values.tolist(), panel.top, panel.line[0] if panel.line else 0.0]) or 1.0
    drawn = axes.barh(range(len(values)), values, 0.7, color=[inks[each] for each in colours])
    shown = [plain(each) for each in panel.labels]
    ground = {"facecolor": inks["bg"], "edgecolor": "none", "pad": 1}
    axes.bar_label(drawn, shown, padding=5, color=inks["ink"], bbox=ground, zorder=4)
    axes.set_xlim(0, 1.4 * top)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(plain(heading))


def _fitting(text: str, wide: bool) -> str:
    """A name beside an axis, shortened."""
    most = 34 if wide else 24
    shown = plain(text)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def distributions(
    name: str, title: str, rows: Mapping[str, npt.NDArray[np.float64]], note: str = ""
) -> Chart:
    """Milliseconds of single samples or batches, a row for each thing that was timed."""

    def draw(figure: FigureBase, inks: Inks, wide: bool) -> None:
        axes = figure.subplots()
        least = _least(rows.values())
        for at, ms in enumerate(rows.values()):
            _draw_row(axes, at, np.maximum(ms, least), inks)
        _scale(axes, [np.maximum(ms, least) for ms in rows.values()], wide)
        axes.grid(axis="x")
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), [_fitting(row, wide) for row in rows])
        axes.tick_params(axis="y", labelcolor=inks["ink"])
        axes.spines["left"].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4 if wide else 2)

    said = (
        f"{row}: median {np.median(ms):.3g}, mean {ms.mean():.3g}, "
        f"95th percentile {np.percentile(ms, 95):.3g}, longest {ms.max():.3g} ms"
        for row, ms in rows.items()
    )
    heights = (80 + 40 * len(rows), 100 + 40 * len(rows))
    return Chart(name, title, "; ".join([title, *said]), heights, draw, note)


def _least(rows: Iterable[npt.NDArray[np.float64]]) -> float:
    """What stands for zero, which a logarithmic scale has not."""
    above = [float(ms[ms > 0].min()) for ms in rows if (ms > 0).any()]
    return max(1e-4, min(above, default=1e-4))


def _scale(axes: Axes, rows: Sequence[npt.NDArray[np.float64]], wide: bool) -> None:
    """A logarithmic scale where times differ widely, with room at either end."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(float(ms.min()) for ms in rows), max(float(ms.max()) for ms in rows)
    if high < FAR * low:
        axes.set_xlim(0, 1.05 * high)
        axes.set_xlabel("ms")
        return
    decades = math.log10(high / low)
    axes.set_xscale("log")
    axes.set_xlim(low / 10 ** (0.03 * decades), high * 10 ** (0.03 * decades))
    each = (1.0,) if decades > (3.5 if wide else 1.5) else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=each))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.set_xlabel("ms, on a logarithmic scale")


def _draw_row(axes: Axes, at: int, ms: npt.NDArray[np.float64], inks: Inks) -> None:
    some = np.sort(ms)
    if len(some) > DOTS:
        some = some[np.linspace(0, len(some) - 1, DOTS).round().astype(int)]
    # Multiples of the golden ratio, which spread without order and without chance.
    off = (np.arange(len(some)) * (math.sqrt(5) - 1) / 2 % 1 - 0.5) * 0.6
    label = "each" if at == 0 else None
    axes.plot(some, at + off, "o", color=inks["blue"], ms=4, mew=0, alpha=0.6, label=label)
    p50, p95 = np.percentile(ms, [50, 95]).tolist()
    for value, colour, text, line in ((p50, "ink", "median", "-"), (p95, "orange", "p95", ":")):
        axes.plot(
            [value, value], [at - 0.38, at + 0.38], line, color=inks[colour], linewidth=2.5,
            label=text if at == 0 else None,
        )  # fmt: skip
    axes.plot(
        [ms.mean()], [at], "D", color=inks["bg"], mec=inks["ink"], mew=1.5, ms=7,
        label="mean" if at == 0 else None,
    )  # fmt: skip
