"""The nodes of a build as a table, under its bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.text import Text

from precache.messages import printable
from precache_workers.driver.totals import BuildRates, BuildTotals, Totals, by_number

SHOWN_NODES = 12
"""Nodes that have a line of their own; the rest share one."""

LAYOUT_EVERY = 1.0
"""Seconds between two tables."""

CPUS_EVERY = 10.0
"""Seconds between two readings of the nodes' CPUs."""

Cpus = Callable[[], Mapping[str, int]]
"""CPUs by node, as far as they are known."""


_COLUMNS = {
    "shards": 8,
    "samples/s": 10,
    "MB/s in": 9,
    "MB/s out": 10,
    "failed": 8,
    "idle cores": 12,
}
"""Widths."""


def nodes_table(totals: BuildTotals, cpus: Mapping[str, int], now: float) -> Text | None:
    """A line for each node; None where there is one node alone.

    Plain text: rich takes ten times as long to lay out a table of its own.
    """
    nodes = totals.nodes
    if len(nodes) < 2:
        return None
    names = sorted(nodes, key=by_number)
    lines = [
        (printable(name), *_figures(nodes[name].total, nodes[name].rates(now), cpus.get(name, 0)))
        for name in names[:SHOWN_NODES]
    ]
    if rest := names[SHOWN_NODES:]:
        known = all(name in cpus for name in rest)
        rest_cpus = sum(cpus[name] for name in rest) if known else 0
        total = sum((nodes[name].total for name in rest), Totals())
        rates = sum((nodes[name].rates(now) for name in rest), BuildRates())
        lines.append((f"{len(rest)} more", *_figures(total, rates, rest_cpus)))
    first = max(len(line[0]) for line in lines)
    rows = [("node", *_COLUMNS), *lines]
    widths = (f"<{first}", *(f">{width}" for width in _COLUMNS.values()))
    text = ["".join(map(format, row, widths)) for row in rows]
    return Text("\n".join([*text, f"{totals.left:,} shards left"]), no_wrap=True)


def _figures(total: Totals, rates: BuildRates, cpus: int) -> list[str]:
    idle = f"{max(0.0, cpus - rates.cores):.0f} of {cpus}"
    return [
        f"{total.shards:,}",
        f"{rates.images:,.0f}",
        f"{rates.fetched / 1e6:,.1f}",
        f"{rates.stored / 1e6:,.1f}",
        f"{total.failed:,}",
        idle if cpus else f"{rates.cores:.0f} in use",
    ]


class NodeProgress(Progress):
    """A bar, and the nodes under it once there are several."""

    def __init__(self, *columns: ProgressColumn, console: Console, disable: bool) -> None:
        self._totals: BuildTotals | None = None
        self._cpus: Cpus = dict
        self._known: Mapping[str, int] = {}
        self._looked_up = float("-inf")
        self._table: Text | None = None
        self._laid_out = 0.0
        super().__init__(*columns, console=console, disable=disable, refresh_per_second=4)

    def watch(self, totals: BuildTotals, cpus: Cpus) -> None:
        """Show the nodes of `totals`; `cpus` is called now and then."""
        self._totals, self._cpus = totals, cpus

    def note_node(self, name: str) -> None:
        """Look up the CPUs of the nodes when one of them is new, and now and then."""
        if self._totals is None or self.disable:
            return
        now = time.monotonic()
        if name not in self._totals.nodes or now - self._looked_up >= CPUS_EVERY:
            self._known, self._looked_up = self._cpus(), now

    def hide(self) -> None:
        """Leave nothing of the table."""
        self._totals = self._table = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar and the table; rich calls this on a thread of its own."""
        yield self.make_tasks_table(self.tasks)
        totals, now = self._totals, time.monotonic()
        if totals is None:
            return
        if now - self._laid_out >= LAYOUT_EVERY:
            with totals.lock:
                self._table = nodes_table(totals, self._known, now)
            self._laid_out = now
        if self._table is not None:
            yield self._table
