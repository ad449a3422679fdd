"""The terminal display of a build on several nodes."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.text import Text

from precache.store.receipts import Receipt, ShardObject
from precache_workers.driver.node_table import SHOWN_NODES, NodeProgress, nodes_table
from precache_workers.driver.progress import BuildProgress
from precache_workers.driver.totals import BuildTotals
from tests.support.building import poll


def receipt(host: str, wall: float = 2.0, holes: int = 0) -> Receipt:
    made = {"image": ShardObject(400_000_000, 1, 1)}
    why = dict.fromkeys(range(holes), "broken")
    return Receipt(
        shard=0,
        objects=made,
        holes=why,
        content=[""] * 500,
        sums={},
        seconds={"ops": wall},
        cpu_seconds=wall,
        host=host,
        fetched=10**9,
    )


def totals_of(hosts: list[str]) -> BuildTotals:
    totals = BuildTotals(planned=len(hosts) + 1234)
    for host in hosts:
        totals.add(receipt(host, holes=3), now=100.0)
    return totals


def count(progress: NodeProgress, totals: BuildTotals, host: str) -> None:
    progress.note_node(host)
    totals.add(receipt(host), time.monotonic())


def words(table: Text) -> list[str]:
    return [" ".join(line.split()) for line in table.plain.splitlines()]


def test_each_node_has_a_line_with_its_figures() -> None:
    table = nodes_table(totals_of(["10.0.0.10", "10.0.0.2", "10.0.0.2"]), {"10.0.0.2": 4}, 100.0)
    assert table is not None
    assert words(table) == [
        "node shards samples/s MB/s in MB/s out failed idle cores",
        "10.0.0.2 2 500 1,000.0 400.0 6 2 of 4",
        "10.0.0.10 1 250 500.0 200.0 3 1 in use",
        "1,234 shards left",
    ]
    assert max(map(len, table.plain.splitlines())) < 80


def test_a_first_shard_without_samples_has_no_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its rows may be removed ones."""
    monkeypatch.setattr("precache_workers.driver.progress.LINE_EVERY", 0)
    with BuildProgress(True) as progress:
        progress.begin(0, 8)
        progress.advance(0, 0)
        progress.advance(8, 0)
    assert "0 of 8 samples\n8 of 8 samples, " in capsys.readouterr().err


def test_one_node_has_no_table() -> None:
    assert nodes_table(BuildTotals(planned=3), {}, 0.0) is None
    assert nodes_table(totals_of(["a", "a"]), {}, 100.0) is None


def test_many_nodes_share_the_last_line() -> None:
    hosts = [f"node-{number}" for number in range(SHOWN_NODES + 20)]
    table = nodes_table(totals_of(hosts), dict.fromkeys(hosts, 2), 100.0)
    assert table is not None
    assert len(words(table)) == SHOWN_NODES + 3
    assert words(table)[-2] == "20 more 20 5,000 10,000.0 4,000.0 60 20 of 40"
    partly = nodes_table(totals_of(hosts), dict.fromkeys(hosts[:-1], 2), 100.0)
    assert partly is not None
    assert words(partly)[-2].endswith(" 20 in use")


def test_the_table_appears_under_the_bar_and_leaves_with_it() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    asked = []

    def cpus() -> dict[str, int]:
        asked.append(1)
        return {"a": 8, "b": 8}

    with NodeProgress(MofNCompleteColumn(), console=console, disable=False) as progress:
        bar = progress.add_task("", total=3)
        totals = BuildTotals(planned=3)
        progress.watch(totals, cpus)
        for host in "aba":
            count(progress, totals, host)
            progress.advance(bar)
        poll(lambda: "7 of 8" in screen.getvalue(), "the table is drawn")
        progress.update(bar, visible=False)
        progress.hide()
        before = len(screen.getvalue())
        progress.refresh()
    assert len(asked) == 2, "once for each node, not for each shard"
    assert "7 of 8" not in screen.getvalue()[before:]


def test_a_node_that_is_gone_has_no_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precache_workers.driver.node_table.CPUS_EVERY", 0.0)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    there = {"a": 8, "b": 8}
    with NodeProgress(MofNCompleteColumn(), console=console, disable=False) as progress:
        progress.add_task("", total=3)
        totals = BuildTotals(planned=3)
        progress.watch(totals, lambda: dict(there))
        count(progress, totals, "a")
        count(progress, totals, "b")
        poll(lambda: screen.getvalue().count(" of 8") >= 2, "both have idle cores")
        del there["b"]
        count(progress, totals, "a")
        poll(lambda: "in use" in screen.getvalue(), "one has them no longer")


def test_what_is_not_shown_costs_nothing() -> None:
    console = Console(file=io.StringIO())
    with NodeProgress(MofNCompleteColumn(), console=console, disable=True) as progress:
        progress.watch(BuildTotals(), lambda: 1 / 0)  # type: ignore[arg-type, return-value]  # not called
        progress.note_node("a")
