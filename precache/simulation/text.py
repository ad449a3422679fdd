"""What a simulation came to, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from precache.simulation.distributions import ORDERS, Durations
from precache.simulation.model import Simulation

WIDTH = 64
"""Characters of a row of bars."""
NEGLIGIBLE = 0.005
"""Share of the time below which waiting is not worth a pattern."""
_BARS = "▁▂▃▄▅▆▇█"
_NONE = "·"

Rows = list[tuple[str, str]]


def bars(values: Sequence[float] | npt.NDArray[np.float64], top: float | None = None) -> str:
    """One character for each value, as high as its share of the top; a dot for 0."""
    top = top or max(values, default=0) or 1
    steps = [min(len(_BARS) - 1, int(value / top * len(_BARS))) for value in values]
    return "".join(_BARS[n] if value > 0 else _NONE for n, value in zip(steps, values, strict=True))


def average_depth(found: Simulation, parts: int) -> npt.NDArray[np.float64]:
    """Mean length of the queue in each of `parts` equal stretches of the time: (parts,)."""
    times, depth = found.queue_depth
    area = np.concatenate([[0], np.cumsum(np.diff(times, append=found.end) * depth)])
    edges = np.linspace(0, found.end, parts + 1)
    upto = np.interp(edges, np.append(times, found.end), area)
    means: npt.NDArray[np.float64] = np.diff(upto) * parts / found.end
    return means


def title(found: Simulation) -> str:
    """What was simulated, in one line."""
    setting = found.setting
    return (
        f"{count(setting.loaders, 'loader')}, {spoken(setting.load, 'a batch')}; "
        f"a queue of {setting.room}; {spoken(setting.step, 'a step')}"
    )


def spoken(times: Durations, what: str) -> str:
    """A time with its spread, for people."""
    text = f"{number(times.mean_ms)} ms {what}"
    if times.kind in ORDERS:
        how = "in turn" if times.kind == "cycle" else "at random"
        text += f" (cv {times.cv:.2g}, {len(times.measured_ms):,} measured times {how})"
    elif times.cv:
        text += f" (cv {times.cv:g}, {times.kind})"
    if times.resolution_ms:
        text += f", rounded up to {number(times.resolution_ms)} ms"
    return text


def summary(found: Simulation) -> Rows:
    """The figures: names and values."""
    more = found.with_one_more()
    rate = f"{found.rate:,.2f}/s from the first one's arrival on, at {found.startup_s:.3g} s"
    after, share = f"{found.stall_share:.1%}", f"{found.stall_share_with_startup:.1%}"
    gain = f"{more.batches - found.batches:+,}"
    return [
        ("batches done", f"{found.batches:,} in {found.setting.seconds:g} s; {rate}"),
        ("stall", f"{after} of the consumer's time after start-up, {share} with it"),
        ("loaders blocked", f"{found.blocked_share:.1%} of their time, by a full queue"),
        (
            "queue",
            f"{found.queue_mean:.1f} batches on average, {found.queue_depth[1].max()} at most",
        ),
        ("limit", limit(found)),
        ("one more loader", f"{more.batches:,} batches ({gain}), stall {more.stall_share:.1%}"),
    ]


def limit(found: Simulation) -> str:
    """The law that bounds the rate, and which side of it does."""
    setting = found.setting
    loading, step = setting.loading_limit, setting.step_limit
    which = "loading" if loading < step else "the step" if step < loading else "both alike"
    return (
        f"{setting.limit:,.2f}/s, set by {which}: loaders / load time {loading:,.2f}, "
        f"1 / step time {step:,.2f}"
    )


def pattern(found: Simulation) -> Rows:
    """The waits, batch by batch and by their place in a round, and the queue's length."""
    waits, places = found.stalls_ms[1 : WIDTH + 1], found.stall_by_place_ms
    rows = [
        (f"wait before each of the first {len(waits)} batches after start-up", bars(waits)),
        (
            f"queue over {found.setting.seconds:g} s",
            bars(average_depth(found, WIDTH), found.setting.room),
        ),
    ]
    if len(places) <= WIDTH:
        means = f"  {' '.join(map(number, places))} ms" if len(places) <= WIDTH // 4 else ""
        rows.insert(1, (f"mean wait by place in a round of {len(places)}", bars(places) + means))
    return [row for row in rows if row[1]]


def verdict(found: Simulation) -> str:
    """Whether the waits come in spikes or are spread."""
    loaders = found.setting.loaders
    if not len(found.order):
        return "No batch came in this time."
    waits = found.stalls_ms[1:]
    if not waits.any():
        return "The consumer never waits once the first batch is there."
    if found.stall_share < NEGLIGIBLE:
        return f"The consumer hardly waits: for {(waits > 0).sum():,} of {len(waits):,} batches."
    longest = f"the longest wait is {number(float(waits.max()))} ms"
    if loaders == 1 or len(waits) < 2 * loaders:
        return f"The consumer waits for {np.mean(waits > 0):.0%} of its batches; {longest}."
    share = f"{_share(found.stall_at_one_place)} of the waiting falls on one place in {loaders}"
    if found.stall_at_one_place > (1 + 1 / loaders) / 2:
        return f"Spikes: {share}, as loaders that begin together deliver together; {longest}."
    return (
        f"Spread: {share} (even would be {_share(1 / loaders)}). No spikes does not mean no stall: "
        f"the consumer waits {found.stall_share:.1%} of its time; {longest}."
    )


def number(value: float) -> str:
    """Milliseconds: whole from 10 on, else two digits."""
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.2g}"


def _share(of_one: float) -> str:
    return f"{of_one:.0%}" if of_one >= 0.1 else f"{of_one:.1%}"


def count(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"
