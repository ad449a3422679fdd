"""The result of a simulation as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from precache.simulation.distributions import ORDERS, Durations
from precache.simulation.model import Simulation
from precache.units import plain

WIDTH = 64
"""Characters of a sparkline."""
NEGLIGIBLE = 0.005
"""Share of the time below which waiting has no pattern worth reporting."""
_LEVELS = "▁▂▃▄▅▆▇█"
_ZERO = "·"


def sparkline(values: Sequence[float] | npt.NDArray[np.float64], top: float | None = None) -> str:
    """Draw one character per value, as high as its share of the top; a dot for 0."""
    top = top or max(values, default=0) or 1
    levels = [min(len(_LEVELS) - 1, int(value / top * len(_LEVELS))) for value in values]
    characters = zip(levels, values, strict=True)
    return "".join(_LEVELS[level] if value > 0 else _ZERO for level, value in characters)


def average_depth(simulation: Simulation, parts: int) -> npt.NDArray[np.float64]:
    """Return the mean length of the queue in each of `parts` equal spans of time: (parts,)."""
    times, depth = simulation.queue_depth
    area = np.concatenate([[0], np.cumsum(np.diff(times, append=simulation.end) * depth)])
    edges = np.linspace(0, simulation.end, parts + 1)
    area_at_edges = np.interp(edges, np.append(times, simulation.end), area)
    means: npt.NDArray[np.float64] = np.diff(area_at_edges) * parts / simulation.end
    return means


def scenario_title(simulation: Simulation) -> str:
    """Describe the scenario in one line."""
    scenario = simulation.scenario
    return (
        f"{count(scenario.loaders, 'loader')}, {_describe(scenario.load, 'batch')}; "
        f"a queue of {scenario.capacity}; {_describe(scenario.step, 'step')}"
    )


def _describe(times: Durations, event: str) -> str:
    text = f"{milliseconds(times.mean_ms)} ms per {event}"
    if times.kind in ORDERS:
        order = "in their order" if times.kind == "cycle" else "in random order"
        text += f" (cv {times.cv:.2g}, {len(times.measured_ms):,} measured times {order})"
    elif times.cv:
        text += f" (cv {times.cv:g}, {times.kind})"
    if times.resolution_ms:
        text += f", rounded up to a multiple of {milliseconds(times.resolution_ms)} ms"
    return text


def figures(simulation: Simulation) -> list[tuple[str, str]]:
    """Return names and values of the main results."""
    more = simulation.with_one_more()
    return [
        ("batches done", f"{simulation.batches:,} in {simulation.scenario.seconds:g} s"),
        (
            "rate",
            (
                f"{simulation.rate:,.2f} batches/s once the first batch is there, "
                f"after {plain(simulation.startup_s, 3)} s"
            ),
        ),
        (
            "stall",
            (
                f"{simulation.stall_share:.1%} of the time since the first batch, "
                f"{simulation.stall_share_with_startup:.1%} of the whole time"
            ),
        ),
        ("loaders blocked", f"{simulation.blocked_share:.1%} of their time, by a full queue"),
        (
            "queue",
            (
                f"{simulation.queue_mean:.1f} batches on average, "
                f"{simulation.queue_depth[1].max()} at most"
            ),
        ),
        ("long-run limit", _limit(simulation)),
        (
            "one more loader",
            (
                f"{more.batches:,} batches done ({more.batches - simulation.batches:+,}), "
                f"stall {more.stall_share:.1%}"
            ),
        ),
    ]


def _limit(simulation: Simulation) -> str:
    """Describe the long-run upper bound of the rate, and whether loading or the step sets it."""
    scenario = simulation.scenario
    loading, step = scenario.loading_limit, scenario.step_limit
    source = "loading" if loading < step else "the step" if step < loading else "both"
    return (
        f"{scenario.limit:,.2f} batches/s, set by {source}: loaders / load time = {loading:,.2f}, "
        f"1 / step time = {step:,.2f}"
    )


def wait_pattern(simulation: Simulation) -> list[tuple[str, str]]:
    """Draw the waits by batch and by position in a round, and the length of the queue."""
    waits, means = simulation.stalls_ms[1 : WIDTH + 1], simulation.stall_by_place_ms
    rows = [
        (f"wait before each of the first {len(waits)} batches after start-up", sparkline(waits)),
        (
            f"queue over {simulation.scenario.seconds:g} s",
            sparkline(average_depth(simulation, WIDTH), simulation.scenario.capacity),
        ),
    ]
    if len(means) <= WIDTH:
        few = len(means) <= WIDTH // 4
        values = f"  {' '.join(map(milliseconds, means))} ms" if few else ""
        heading = f"mean wait by position in a round of {count(len(means), 'batch', 'batches')}"
        rows.insert(1, (heading, sparkline(means) + values))
    return [row for row in rows if row[1]]


def verdict(simulation: Simulation) -> str:
    """Describe whether the waits come in spikes or are spread evenly."""
    loaders = simulation.scenario.loaders
    if not len(simulation.order):
        return "No batch was finished in this time."
    waits = simulation.stalls_ms[1:]
    if not waits.any():
        if simulation.stall_share >= NEGLIGIBLE:
            share = f"{simulation.stall_share:.1%} of the time since the first batch"
            return f"The training loop waits at the end, {share}; simulate a longer time."
        return "The training loop never waits after the first batch."
    if simulation.stall_share < NEGLIGIBLE:
        waited = f"{(waits > 0).sum():,} of {len(waits):,} batches"
        return f"The training loop hardly waits: for {waited}, and then briefly."
    longest = f"the longest wait is {milliseconds(float(waits.max()))} ms"
    if loaders == 1 or len(waits) < 2 * loaders:
        return f"The training loop waits for {np.mean(waits > 0):.0%} of its batches; {longest}."
    share = f"{_share(simulation.stall_at_one_place)} of the waiting is for one batch in {loaders}"
    if simulation.stall_at_one_place > (1 + 1 / loaders) / 2:
        return f"Spikes: {share}, because the loaders deliver at the same time; {longest}."
    return (
        f"Spread: {share} (an even spread is {_share(1 / loaders)}). The training loop still waits "
        f"{simulation.stall_share:.1%} of its time; {longest}."
    )


def milliseconds(value: float) -> str:
    """Format milliseconds: whole from 10 on, otherwise with two digits."""
    return f"{value:,.0f}" if value >= 10 or value == round(value) else plain(value, 2)


def _share(fraction: float) -> str:
    return f"{fraction:.0%}" if fraction >= 0.1 else f"{fraction:.1%}"


def count(number: int, singular: str, plural: str = "") -> str:
    """Format a number with its noun."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
