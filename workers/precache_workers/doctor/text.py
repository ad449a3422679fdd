"""The doctor's report as text: the answers first, then the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from precache.messages import aligned, as_text
from precache.runtime.terminal import Terminal, say_text
from precache.units import duration, number, plain, size

if TYPE_CHECKING:
    from precache_workers.doctor.report import CodecFigures, CutPoint, DoctorReport

LISTED_FAILURES = 5
"""Failed samples that are listed for each stage."""
BUSY_LOAD = 1.25
"""Load per core from which wall times are unreliable."""
WAITING = 0.9
"""CPU utilisation below which the cores wait for files."""
SLOW_RATIO = 3.0
"""Multiple of the median time from which a sample is listed as slow."""


def print_doctor_report(report: DoctorReport, console: Console | None = None) -> None:
    """Print the whole report."""
    out = console or Terminal(soft_wrap=True)
    out.print(title(report), style="bold")
    say_text(as_text(aligned(answers(report))), out)
    for heading, table in tables(report):
        out.print()
        out.print(heading, style="bold")
        out.print(table)
    out.print()
    for line in remarks(report):
        out.print(line)


def title(report: DoctorReport) -> str:
    """Describe the source and the measurement in one line."""
    least = "" if report.complete else "at least "
    return (
        f"{report.source}: {least}{report.samples:,} samples, {size(report.source_bytes)}; "
        f"{report.sampled:,} measured in {report.seconds:.0f} s"
    )


def answers(report: DoctorReport) -> Iterator[tuple[str, str]]:
    """Yield names and short sentences, the most important first."""
    target = f"{report.rate:,.0f} samples/s"
    own = report.codecs[0]
    before = report.cuts[0]
    waiting = before.samples_per_s * before.online_cpu_ms < WAITING * 1e3 * report.cores
    limit = ", waiting for the source" if waiting else ""
    now = f"{count_cores(report.cores)} would load {number(before.samples_per_s)}/s{limit}"
    yield "without a cache", f"{target} need {count_cores(report.cores_without_cache)}; {now}"
    savings = _savings(before.cores_at_rate, own)
    yield "with a cache", f"{target} need {count_cores(own.cores_at_rate)}, {savings}"
    yield "time to build", _build(report)
    raw = size(own.bytes_total * own.ratio)
    yield "store size", f"{size(own.bytes_total)} with codec {own.codec}; {raw} uncompressed"
    yield "store rows", _cut(report)
    yield "broken files", _broken(report)
    if report.misfits:
        count = len(report.misfits)
        yield "other shapes", f"{count:,} of {report.sampled:,}; a build would store them as holes"


def _build(report: DoctorReport) -> str:
    build = report.build
    known = 0 < build.error < math.inf
    spread = f" (± {build.error:.0%})" if known else ""
    fetch = ", limited by reading the source" if build.limited_by == "fetch" else ""
    wall = f"{duration(build.seconds)} on {count_cores(report.cores)}"
    before = f" ({duration(build.before_seconds)} to list and start)"
    return f"{wall}{before}{fetch}; CPU time {duration(build.cpu_seconds)}{spread}"


def _savings(cores_before: float, own: CodecFigures) -> str:
    ratio = cores_before / max(own.cores_at_rate, 1e-9)
    if ratio <= 1:
        return "more work per epoch than without"
    return f"{number(ratio)} times less work per epoch"


def _cut(report: DoctorReport) -> str:
    if report.cut == "fetch" and report.misfits:
        return "nothing yet: the samples differ in shape; add a resize and a crop to the recipe"
    if report.cut == "fetch":
        return _no_cut(report)
    frozen = [cut.after for cut in report.cuts if cut.frozen]
    why = f"; {frozen[0]} is random, and a store would keep one draw of it" if frozen else ""
    return f"the result of {report.cut}{why}"


def _no_cut(report: DoctorReport) -> str:
    fastest = min(report.codecs, key=lambda codec: codec.cores_at_rate)
    last = report.cuts[-1]
    if fastest.cores_at_rate < report.cuts[0].cores_at_rate and last.storable and not last.frozen:
        return (
            f"nothing with codec {report.codecs[0].codec}; with {fastest.codec} a store would need "
            f"{count_cores(fastest.cores_at_rate)}"
        )
    return "nothing: no store would be cheaper to read than the files"


def _broken(report: DoctorReport) -> str:
    if not report.failed:
        return f"none of {report.sampled:,}"
    share = report.failed / max(1, report.sampled)
    return f"{report.failed:,} of {report.sampled:,}; about {share * report.samples:,.0f} of all"


def tables(report: DoctorReport, slow_ratio: float = SLOW_RATIO) -> Iterator[tuple[str, Table]]:
    """Yield headings and tables; samples that took `slow_ratio` times the median are listed."""
    yield "Time by stage, CPU-ms per sample (fetch: ms spent waiting)", _stages(report)
    yield (
        f"Reading a store from memory, measured on {count_cores(report.host.cores)} here",
        _codecs(report),
    )
    yield (
        "Result to store: CPU time once, and in every epoch; samples/s from CPU time",
        _cuts(report),
    )
    if any(sample.times_median >= slow_ratio for sample in report.slowest):
        yield "Slowest samples", _slowest(report, slow_ratio)
    if report.storage:
        share = report.host.io_wait
        io_wait = "" if share is None else f"; I/O wait {share:.0%}"
        yield f"Reading whole files of the source{io_wait}", _storage(report)


def _stages(report: DoctorReport) -> Table:
    table = _table("", "mean", "median", "p95", "max", "CPU share", "per core-second")
    for stage in report.stages:
        ms = stage.wall_ms if stage.name == "fetch" else stage.cpu_ms
        figures = [number(value) for value in (ms.mean, ms.median, ms.p95, ms.max)]
        table.add_row(stage.name, *figures, f"{stage.share:.0%}", f"{stage.per_core_second:,.0f}")
    whole = 1e3 / report.build.samples_per_core_second
    rest = whole - sum(stage.cpu_ms.mean for stage in report.stages)
    table.add_row("other build work", number(max(0.0, rest)))
    return table


def _codecs(report: DoctorReport) -> Table:
    rate = f"at\n{report.rate:,.0f}/s"
    table = _table(
        "", "bytes", "raw /\nstored", "build\nCPU time", "samples/s", "CPU-ms\nper 1,000",
        f"cores {rate}", f"MB/s {rate}",
    )  # fmt: skip
    for codec in report.codecs:
        table.add_row(
            codec.codec,
            size(codec.bytes_total),
            f"{codec.ratio:.2f}",
            duration(codec.build_cpu_seconds),
            f"{codec.samples_per_s:,.0f}",
            number(codec.cpu_ms_per_1000),
            f"{codec.cores_at_rate:.2f}",
            f"{codec.bytes_per_s_at_rate / 1e6:,.0f}",
        )
    return table


def _cuts(report: DoctorReport) -> Table:
    table = _table(
        "stored after", "bytes", "CPU-ms\nonce", "every\nepoch", f"cores at\n{report.rate:,.0f}/s",
        f"samples/s,\n{count_cores(report.cores)}", "",
    )  # fmt: skip
    table.columns[-1].justify = "left"
    for cut in report.cuts:
        table.add_row(
            cut_name(cut),
            size(cut.bytes_total),
            number(cut.offline_cpu_ms),
            number(cut.online_cpu_ms),
            f"{cut.cores_at_rate:.2f}",
            f"{cut.samples_per_s:,.0f}",
            "recommended" if cut.after == report.cut else _drawback(cut),
        )
    return table


def cut_name(cut: CutPoint) -> str:
    """Name a cut by the stage before it."""
    return "no cache" if cut.after == "fetch" else cut.after


def _drawback(cut: CutPoint) -> str:
    if not cut.storable:
        return "shapes differ"
    return "keeps one random draw" if cut.frozen else ""


def _slowest(report: DoctorReport, slow_ratio: float) -> Table:
    table = _table("key", "bytes", "ms", "x median", "slowest stage")
    for sample in report.slowest:
        if sample.times_median >= slow_ratio:
            table.add_row(
                sample.key,
                size(sample.nbytes),
                number(sample.ms),
                f"{sample.times_median:.1f}",
                sample.stage,
            )
    return table


def _storage(report: DoctorReport) -> Table:
    table = _table("", "at a time", "requests/s", "MB/s", "median ms", "p95")
    for trial in report.storage:
        table.add_row(
            trial.pattern,
            f"{trial.depth}",
            f"{trial.requests_per_s:,.0f}",
            number(trial.bytes_per_s / 1e6),
            number(trial.median_ms),
            number(trial.p95_ms),
        )
    return table


def remarks(report: DoctorReport) -> Iterator[str]:
    """Yield broken samples by name, and reasons why figures are uncertain."""
    for name, samples in (("broken", report.failures), ("other shape", report.misfits)):
        yield from (f"{name}: {key}: {reason}" for key, reason in samples[:LISTED_FAILURES])
        if len(samples) > LISTED_FAILURES:
            yield f"… and {len(samples) - LISTED_FAILURES} more"
    host = report.host
    if host.load > BUSY_LOAD * host.cores:
        yield (
            f"Other processes use this machine, load {host.load:.1f} on {count_cores(host.cores)}: "
            "CPU times are reliable, waiting times and the samples/s of codecs are not."
        )
    if not report.complete:
        yield "Listing ran out of time, so the totals are too low; give more --seconds."
    memory = f"{size(host.memory)} memory, {size(host.memory_free)} free"
    yield f"This machine: {count_cores(host.cores)}, {memory}."


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(Text(header), justify="right", no_wrap=True)
    table.columns[0].justify = "left"
    return table


def count_cores(count: float) -> str:
    """Format a number of cores with its noun."""
    text = plain(count, 2)
    return f"{text} core" if text == "1" else f"{text} cores"
