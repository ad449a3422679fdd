"""``python -m tests.bench.metering``: what the stall meter adds to a step.

A bare loop, one that is metered, and one that is metered with many reports take turns in one
process. Their steps do nothing: what is left is the meter.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.runtime.machine import MachineReader
from tests.bench.common import in_clean_process

TARGET = 20
"""Microseconds a step, at most."""

EVERY = 100
BATCH = 256
WIDTH = 100

BARE = "bare loop"
STEPS_ALONE = "metered, no report"
REPORTS = f"metered, a report every {EVERY} steps"
EVENTS = "metered by CUDA events, no report"


@dataclass(frozen=True)
class Overhead:
    """Microseconds a step, above the bare loop; one value for each round.

    Attributes
    ----------
    wall
        Of the loop's own thread until its last step.
    cpu
        Of all threads, the reports included.
    """

    name: str
    wall: list[float]
    cpu: list[float]


def _batches(steps: int) -> Iterable[dict[str, Any]]:
    batch = {"row": torch.arange(BATCH)}
    return itertools.repeat(batch, steps)


def _run(loader: Iterable[Any]) -> tuple[float, float]:
    """Seconds: wall until the last step, CPU until the end."""
    wall, cpu = time.perf_counter(), time.process_time()
    last = wall
    for _ in loader:
        last = time.perf_counter()
    return last - wall, time.process_time() - cpu


def _loops(steps: int) -> dict[str, Callable[[], Iterable[Any]]]:
    def metered(every: int, device: str) -> Callable[[], Iterable[Any]]:
        return lambda: precache.meter(
            _batches(steps), every, to=[lambda report: None], device=device
        )

    loops = {
        BARE: lambda: _batches(steps),
        STEPS_ALONE: metered(10 * steps, "cpu"),
        REPORTS: metered(EVERY, "cpu"),
    }
    if torch.cuda.is_available():
        loops[EVENTS] = metered(10 * steps, "cuda")
    return loops


def _compare(steps: int, rounds: int) -> list[Overhead]:
    """Loops take turns, after one of each; to be called in a clean process."""
    loops = _loops(steps)
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name, loop in loops.items():
            cost = _run(loop())
            if number:
                costs[name].append(cost)
    found = []
    for name in list(loops)[1:]:
        pairs = list(zip(costs[name], costs[BARE], strict=True))
        wall, cpu = ([(own[i] - bare[i]) * 1e6 / steps for own, bare in pairs] for i in (0, 1))
        found.append(Overhead(name, wall, cpu))
    return found


def _reading(rounds: int) -> float:
    """Milliseconds to read the machine once, where no loop runs; median."""
    reader = MachineReader()
    times = []
    for _ in range(10 * rounds):
        started = time.perf_counter()
        reader.read()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def _table(found: Sequence[Overhead], steps: int, rounds: int) -> Table:
    table = Table(
        "a loop",
        *(Column(name, justify="right") for name in ("µs a step", "CPU-µs a step")),
        "target",
        title=f"{steps:,} steps that do nothing, batches with {BATCH} rows",
        caption="Above a bare loop, on the loop's own thread\n"
        f"and on all threads: medians of {rounds} rounds.",
    )
    for each in found:
        wall, cpu = statistics.median(each.wall), statistics.median(each.cpu)
        table.add_row(each.name, f"{wall:.1f}", f"{cpu:.1f}", f"≤ {TARGET}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.metering", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="of a loop (20,000)")
    parser.add_argument("--rounds", type=int, default=7, help="of all loops (7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < EVERY:
        parser.error(f"give at least 1 round and {EVERY} steps")
    found = in_clean_process(_compare, options.steps, options.rounds)
    reading = _reading(options.rounds)
    machine = Installation.here()
    if options.json:
        overheads = [dataclasses.asdict(each) for each in found]
        where = dataclasses.asdict(machine)
        print(json.dumps({"machine": where, "overheads": overheads, "reading_ms": reading}))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(found, options.steps, options.rounds))
    console.print(f"reading the machine: {reading:.1f} ms, once a report")
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
