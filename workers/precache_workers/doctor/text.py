"""What a doctor's examination came to, for people: the answers first, then the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from precache.runtime.terminal import Terminal, say_rows
from precache.units import size

if TYPE_CHECKING:
    from precache_workers.doctor.report import CodecFigures, CutPoint, DoctorReport

SHOWN = 5
"""Broken samples that are named."""
BUSY = 1.25
"""Load over cores from which times on the clock say little."""
WAITING = 0.9
"""Share of the cores' time below which they wait for files."""
NOTABLE = 3.0
"""Times the median from which a sample is worth a line."""


def print_prognosis(found: DoctorReport, console: Console | None = None) -> None:
    """Print a whole examination."""
    out = console or Terminal(soft_wrap=True)
    out.print(title(found), style="bold")
    say_rows(answers(found), out=out)
    for heading, table in tables(found):
        out.print()
        out.print(heading, style="bold")
        out.print(table)
    out.print()
    for line in remarks(found):
        out.print(line)


def title(found: DoctorReport) -> str:
    """What was examined, in a line."""
    least = "" if found.complete else "at least "
    return (
        f"{found.source}: {least}{found.samples:,} samples, {size(found.source_bytes)}; "
        f"{found.sampled:,} measured in {found.seconds:.0f} s"
    )


def answers(found: DoctorReport) -> Iterator[tuple[str, str]]:
    """Names and short sentences, the most important first."""
    at = f"{found.rate:,.0f} samples/s"
    own = found.codecs[0]
    before = found.cuts[0]
    waiting = before.samples_per_s * before.online_cpu_ms < WAITING * 1e3 * found.cores
    limit = ", waiting for the source" if waiting else ""
    now = f"{cores(found.cores)} make {number(before.samples_per_s)}/s{limit}"
    yield "without a cache", f"{cores(found.cores_without_cache)} to feed {at}; {now}"
    yield (
        "with a cache",
        f"{cores(own.cores_at_rate)} from {own.codec}, {_fewer(before.cores_at_rate, own)}",
    )
    yield "to build it", _build(found)
    raw = size(own.bytes_total * own.ratio)
    yield "it takes", f"{size(own.bytes_total)} in {own.codec}; plain pixels are {raw}"
    yield "cut", _cut(found)
    yield "broken files", _broken(found)
    if found.misfits:
        count = len(found.misfits)
        yield "other shapes", f"{count:,} of {found.sampled:,}: a build would leave holes for them"


def _build(found: DoctorReport) -> str:
    build = found.build
    known = 0 < build.error < math.inf
    spread = f" (± {build.error:.0%}, as far as samples differ)" if known else ""
    fetch = ", as fast as this machine reads the source" if build.limited_by == "fetch" else ""
    wall = f"{duration(build.seconds)} on {cores(found.cores)}"
    return f"{duration(build.cpu_seconds)} of CPU{spread}, {wall}{fetch}"


def _fewer(cores_before: float, own: CodecFigures) -> str:
    ratio = cores_before / max(own.cores_at_rate, 1e-9)
    if ratio <= 1:
        return "more work than without"
    return f"{number(ratio)} times less work in every epoch"


def _cut(found: DoctorReport) -> str:
    if found.cut == "fetch" and found.misfits:
        return "none yet: rows differ in shape, and a store's are alike; add a resize and a crop"
    if found.cut == "fetch":
        return _no_cut(found)
    frozen = [each.after for each in found.cuts if each.frozen]
    why = f"; {frozen[0]} draws at random, and a store would keep its first draw" if frozen else ""
    return f"after {found.cut}{why}"


def _no_cut(found: DoctorReport) -> str:
    fastest = min(found.codecs, key=lambda each: each.cores_at_rate)
    last = found.cuts[-1]
    if fastest.cores_at_rate < found.cuts[0].cores_at_rate and last.storable and not last.frozen:
        least = f"{cores(fastest.cores_at_rate)} at that rate"
        return (
            f"nowhere with {found.codecs[0].codec}; a store in {fastest.codec} would take {least}"
        )
    return "nowhere: no store would be cheaper to read than the files"


def _broken(found: DoctorReport) -> str:
    if not found.failed:
        return f"none of {found.sampled:,}"
    share = found.failed / max(1, found.sampled)
    return f"{found.failed:,} of {found.sampled:,}, so about {share * found.samples:,.0f} of all"


def tables(found: DoctorReport, notable: float = NOTABLE) -> Iterator[tuple[str, Table]]:
    """Headings and tables; samples that took `notable` times the median are named."""
    yield "Where the time goes, ms of CPU a sample (fetch: waiting)", _stages(found)
    yield f"Training from a store, on {cores(found.host.cores)} here, from memory", _codecs(found)
    yield "Where to cut between once and every epoch; samples/s by CPU time", _cuts(found)
    if any(each.times_median >= notable for each in found.slowest):
        yield "Slowest samples", _slowest(found, notable)
    if found.storage:
        wait = found.host.io_wait
        waited = "" if wait is None else f"; I/O wait {wait:.0%}"
        yield f"Reading the source, whole files{waited}", _storage(found)


def _stages(found: DoctorReport) -> Table:
    table = _table("", "mean", "median", "p95", "max", "CPU share", "a core-second")
    for each in found.stages:
        ms = each.wall_ms if each.name == "fetch" else each.cpu_ms
        figures = [number(value) for value in (ms.mean, ms.median, ms.p95, ms.max)]
        table.add_row(each.name, *figures, f"{each.share:.0%}", f"{each.per_core_second:,.0f}")
    whole = 1e3 / found.build.samples_per_core_second
    rest = whole - sum(each.cpu_ms.mean for each in found.stages)
    table.add_row("rest of a build", number(max(0.0, rest)))
    return table


def _codecs(found: DoctorReport) -> Table:
    rate = f"at\n{found.rate:,.0f}/s"
    table = _table(
        "", "bytes", "raw /\nstored", "build,\nCPU", "samples/s", "CPU-ms\nper 1,000",
        f"cores {rate}", f"MB/s {rate}",
    )  # fmt: skip
    for each in found.codecs:
        table.add_row(
            each.codec,
            size(each.bytes_total),
            f"{each.ratio:.2f}",
            duration(each.build_cpu_seconds),
            f"{each.samples_per_s:,.0f}",
            number(each.cpu_ms_per_1000),
            f"{each.cores_at_rate:.2f}",
            f"{each.bytes_per_s_at_rate / 1e6:,.0f}",
        )
    return table


def _cuts(found: DoctorReport) -> Table:
    table = _table(
        "stored after", "bytes", "CPU-ms\nonce", "each\nepoch", f"cores at\n{found.rate:,.0f}/s",
        f"samples/s,\n{cores(found.cores)}", "",
    )  # fmt: skip
    table.columns[-1].justify = "left"
    for each in found.cuts:
        marked = "<" if each.after == found.cut else _drawback(each)
        table.add_row(
            cut_name(each),
            size(each.bytes_total),
            number(each.offline_cpu_ms),
            number(each.online_cpu_ms),
            f"{each.cores_at_rate:.2f}",
            f"{each.samples_per_s:,.0f}",
            marked,
        )
    return table


def cut_name(cut: CutPoint) -> str:
    """The stage after which it lies."""
    return "fetch (no cache)" if cut.after == "fetch" else cut.after


def _drawback(cut: CutPoint) -> str:
    if not cut.storable:
        return "shapes differ"
    return "one random draw" if cut.frozen else ""


def _slowest(found: DoctorReport, notable: float) -> Table:
    table = _table("key", "bytes", "ms", "x median", "most in")
    for each in found.slowest:
        if each.times_median >= notable:
            table.add_row(
                each.key, size(each.nbytes), number(each.ms), f"{each.times_median:.1f}", each.stage
            )
    return table


def _storage(found: DoctorReport) -> Table:
    table = _table("", "at a time", "requests/s", "MB/s", "median ms", "p95")
    for each in found.storage:
        table.add_row(
            each.pattern,
            f"{each.depth}",
            f"{each.requests_per_s:,.0f}",
            number(each.bytes_per_s / 1e6),
            number(each.median_ms),
            number(each.p95_ms),
        )
    return table


def remarks(found: DoctorReport) -> Iterator[str]:
    """What makes figures uncertain, and broken files by name."""
    for name, each in (("broken", found.failures), ("other shape", found.misfits)):
        yield from (f"{name}: {key}: {reason}" for key, reason in each[:SHOWN])
        if len(each) > SHOWN:
            yield f"… and {len(each) - SHOWN} more"
    host = found.host
    if host.load > BUSY * host.cores:
        yield (
            f"Others keep this machine busy (load {host.load:.1f} on {cores(host.cores)}): "
            "CPU times hold, waiting times and the samples/s of codecs do not."
        )
    if not found.complete:
        yield "The listing was cut short: totals are of what it found; give more --seconds."
    yield f"{cores(host.cores)}, {size(host.memory)} of memory, {size(host.memory_free)} of it free"


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(Text(header), justify="right", no_wrap=True)
    table.columns[0].justify = "left"
    return table


def cores(count: float) -> str:
    """A number of cores, with its noun."""
    text = f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.2g}"
    return f"{text} core" if text == "1" else f"{text} cores"


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else f"{value:.1g}"


def duration(seconds: float) -> str:
    """Seconds for people: 0.25 s, 4.2 min, 3.1 h, 2.4 days."""
    for unit, length, most in (("s", 1, 90), ("min", 60, 5400), ("h", 3600, 172800)):
        if seconds < most:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds / 86400:.2g} days"
