"""The nodes of a build as a table, under its bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from threading import Lock

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.text import Text

from precache.messages import printable
from precache.store.receipts import Receipt
from precache_workers.driver.tally import BuildRates, NodeTally, Tally, by_number

SHOWN = 12
"""Nodes that have a line of their own; the rest share one."""

EVERY = 1.0
"""Seconds between two tables."""

CPUS_EVERY = 10.0
"""Seconds after which a node that is gone has no idle cores."""

Cpus = Callable[[], Mapping[str, int]]
"""CPUs by node, as far as they are known."""


_COLUMNS = {
    "shards": 8,
    "images/s": 10,
    "MB/s in": 9,
    "MB/s out": 10,
    "failed": 8,
    "idle cores": 12,
}
"""Widths."""


def nodes_table(tally: Tally, cpus: Mapping[str, int], now: float) -> Text | None:
    """A line for each node; None where there is one node alone.

    Plain text: rich takes ten times as long to lay out a table of its own.
    """
    if len(tally.nodes) < 2:
        return None
    names = sorted(tally.nodes, key=by_number)
    lines = [
        (
            printable(name),
            *_figures(tally.nodes[name], tally.nodes[name].rates(now), cpus.get(name, 0)),
        )
        for name in names[:SHOWN]
    ]
    if rest := names[SHOWN:]:
        together, rates = NodeTally(), BuildRates()
        for name in rest:
            together.shards += tally.nodes[name].shards
            together.failed += tally.nodes[name].failed
            rates = rates.plus(tally.nodes[name].rates(now))
        known = all(name in cpus for name in rest)
        have = sum(cpus[name] for name in rest) if known else 0
        lines.append((f"{len(rest)} more", *_figures(together, rates, have)))
    first = max(len(line[0]) for line in lines)
    rows = [("node", *_COLUMNS), *lines]
    widths = (-first, *_COLUMNS.values())
    text = ["".join(map(_padded, row, widths)) for row in rows]
    return Text("\n".join([*text, f"{tally.left:,} shards left"]), no_wrap=True)


def _padded(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def _figures(node: NodeTally, rates: BuildRates, cpus: int) -> list[str]:
    idle = f"{max(0.0, cpus - rates.cores):.0f} of {cpus}"
    return [
        f"{node.shards:,}",
        f"{rates.images:,.0f}",
        f"{rates.fetched / 1e6:,.1f}",
        f"{rates.stored / 1e6:,.1f}",
        f"{node.failed:,}",
        idle if cpus else f"{rates.cores:.0f} in use",
    ]


class NodeProgress(Progress):
    """A bar, and the nodes under it once there are several."""

    def __init__(self, *columns: ProgressColumn, console: Console, disable: bool) -> None:
        self._counting = Lock()  # rich draws on a thread of its own
        self._tally: Tally | None = None
        self._cpus: Cpus = dict
        self._known: Mapping[str, int] = {}
        self._asked = float("-inf")
        self._table: Text | None = None
        self._laid_out = 0.0
        super().__init__(*columns, console=console, disable=disable, refresh_per_second=4)

    def watch(self, shards: int, cpus: Cpus) -> None:
        """Show the nodes that make so many shards; `cpus` is asked now and then."""
        self._tally, self._cpus = Tally(shards), cpus

    def count(self, receipt: Receipt) -> None:
        """A shard is made."""
        if self._tally is None or self.disable:
            return
        now = time.monotonic()
        if receipt.host not in self._tally.nodes or now - self._asked >= CPUS_EVERY:
            self._known, self._asked = self._cpus(), now
        with self._counting:
            self._tally.add(receipt, now)

    def hide(self) -> None:
        """Leave nothing of the table."""
        with self._counting:
            self._tally = self._table = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        now = time.monotonic()
        with self._counting:
            if self._tally is not None and now - self._laid_out >= EVERY:
                self._table = nodes_table(self._tally, self._known, now)
                self._laid_out = now
            table = self._table
        if table is not None:
            yield table
