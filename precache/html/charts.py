"""Charts as values, with positions in percent; ``charts.html`` draws them as SVG.

A drawing is as wide as its page. Whatever has to be read stands beside it as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precache.runtime.spread import Spread
from precache.units import in_ms

MAX_DOTS = 200
"""Maximum number of dots in a row; of more values, evenly spaced quantiles are drawn."""
LEAST_MS = 1e-4
MARGIN = 0.03
"""Share of a scale that stays free at either end."""


@dataclass(frozen=True)
class Panel:
    """Bars of one quantity, one bar per row of the chart.

    Attributes
    ----------
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

    def length(self, value: float) -> float:
        """Return a value in percent of the scale."""
        top = max([*self.values, self.top, self.line[0] if self.line else 0.0])
        return 100 * value / top if top else 0.0


@dataclass(frozen=True)
class Bars:
    """Bars of each quantity below each other, in one panel per quantity."""

    title: str
    rows: Sequence[str]
    panels: Sequence[Panel]
    colours: Sequence[str]
    note: str = ""

    def bars(self, panel: Panel) -> Iterator[tuple[str, str, str, float]]:
        """Yield name, label, colour and length in percent of a panel's bars."""
        lengths = map(panel.length, panel.values)
        yield from zip(self.rows, panel.labels, self.colours, lengths, strict=True)


@dataclass(frozen=True)
class Dots:
    """Times of samples or batches in ms, with a row for each entry of `rows`."""

    title: str
    rows: Mapping[str, npt.NDArray[np.float64]]
    note: str = ""

    @property
    def _range(self) -> tuple[float, float]:
        """The shortest positive time, at most a tenth of the longest, and the longest."""
        every = np.concatenate(list(self.rows.values()))
        high = max(10 * LEAST_MS, float(every.max()))
        return max(LEAST_MS, float(every[every > 0].min(initial=high / 10))), high

    def at(self, ms: float) -> float:
        """Return the position of a time on the logarithmic scale."""
        low, high = self._range
        share = math.log(max(ms, low) / low) / math.log(high / low)
        return 100 * (MARGIN + (1 - 2 * MARGIN) * share)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Labelled times: position and text."""
        low, high = self._range
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        each = (1, 2, 5) if high < 300 * low else (1,)
        powers = decades[:: 1 + len(decades) // 8]
        times = [digit * 10.0**power for power in powers for digit in each]
        return [(self.at(ms), f"{ms:,.12g}") for ms in times if low <= ms <= high]

    def spread(self, row: str) -> Spread:
        """Return the figures of a row, in ms."""
        return Spread.of(self.rows[row])

    def text(self, row: str) -> str:
        """Return the figures of a row as text."""
        spread = self.spread(row)
        figures = spread.median, spread.mean, spread.p95, spread.max
        median, mean, p95, most = (in_ms(ms / 1e3) for ms in figures)
        return f"median {median}, mean {mean}, 95th percentile {p95}, longest {most}"

    def dots(self, row: str) -> Iterator[tuple[float, float]]:
        """Yield the positions of a row's dots."""
        ms = np.sort(self.rows[row])
        if len(ms) > MAX_DOTS:
            ms = ms[np.linspace(0, len(ms) - 1, MAX_DOTS).round().astype(int)]
        # A deterministic jitter: multiples of the golden ratio.
        jitter = 20 + 60 * (np.arange(len(ms)) * (math.sqrt(5) - 1) / 2 % 1)
        yield from zip(map(self.at, ms.tolist()), jitter.tolist(), strict=True)
