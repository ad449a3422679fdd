"""The doctor's report as text: the answers first, then the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from precache.messages import Table, aligned, as_text
from precache.units import duration, number, plain, size

if TYPE_CHECKING:
    from precache_workers.doctor.report import CodecFigures, CutPoint, DoctorReport

TEXT_COLUMNS = ("key", "stored after", "remark", "slowest stage")
"""Headings of columns that hold text."""
LISTED_FAILURES = 5
"""Failed samples that are listed for each stage."""
BUSY_LOAD = 1.25
"""Load per core from which wall times are unreliable."""
WAITING = 0.9
"""CPU utilisation below which the cores wait for files."""
SLOW_RATIO = 3.0
"""Multiple of the median time from which a sample is listed as slow."""


def report_text(report: DoctorReport) -> str:
    """Return the whole report."""
    lines = [title(report), *aligned(answers(report))]
    for heading, table in tables(report):
        lines += ["", heading, *table.lines()]
    return as_text([*lines, "", *remarks(report)])


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
    yield "without a cache", f"{target} need {count_cores(before.cores_at_rate)}; {now}"
    savings = _savings(before.cores_at_rate, own)
    yield "with a cache", f"{target} need {count_cores(own.cores_at_rate)}, {savings}"
    yield "time to build", _build(report)
    raw = size(own.bytes_total * own.ratio)
    yield "store size", f"{size(own.bytes_total)} with codec {own.codec}; {raw} uncompressed"
    yield "store rows", _cut(report)
    yield "broken files", _broken(report)
    if report.misfits:
        count = len(report.misfits)
        others = "a build would store photos in their own shapes, and other rows as holes"
        yield "other shapes", f"{count:,} of {report.sampled:,}; {others}"


def _build(report: DoctorReport) -> str:
    build = report.build
    spread = f" (± {report.error:.0%})" if 0 < report.error < math.inf else ""
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
    stages, codecs, cuts, at = report.stages, report.codecs, report.cuts, f"{report.rate:,.0f}/s"
    whole = 1e3 * report.build.cpu_seconds / report.samples
    rest = whole - sum(stage.cpu_ms for stage in stages)
    columns = {
        "": [*(stage.name for stage in stages), "other build work"],
        "mean": [*(number(stage.ms.mean) for stage in stages), number(max(0.0, rest))],
        "median": [number(stage.ms.median) for stage in stages],
        "p95": [number(stage.ms.p95) for stage in stages],
        "max": [number(stage.ms.max) for stage in stages],
        "CPU share": [f"{stage.share:.0%}" for stage in stages],
    }
    yield "Time by stage, CPU-ms per sample (fetch: ms spent waiting)", _table(columns)
    columns = {
        "": [codec.codec for codec in codecs],
        "bytes": [size(codec.bytes_total) for codec in codecs],
        "raw /\nstored": [f"{codec.ratio:.2f}" for codec in codecs],
        "build\nCPU time": [duration(codec.build_cpu_seconds) for codec in codecs],
        "samples/s": [f"{codec.samples_per_s:,.0f}" for codec in codecs],
        "CPU-ms\nper 1,000": [number(codec.cpu_ms_per_1000) for codec in codecs],
        f"cores at\n{at}": [f"{codec.cores_at_rate:.2f}" for codec in codecs],
        f"MB/s at\n{at}": [f"{codec.bytes_per_s_at_rate / 1e6:,.0f}" for codec in codecs],
    }
    here = count_cores(report.host.cores)
    yield f"Reading a store from memory, measured on {here} here", _table(columns)
    columns = {
        "stored after": ["no cache" if c.after == "fetch" else c.after for c in cuts],
        "bytes": [size(cut.bytes_total) for cut in cuts],
        "CPU-ms\nonce": [number(cut.offline_cpu_ms) for cut in cuts],
        "every\nepoch": [number(cut.online_cpu_ms) for cut in cuts],
        f"cores at\n{at}": [f"{cut.cores_at_rate:.2f}" for cut in cuts],
        f"samples/s,\n{count_cores(report.cores)}": [f"{cut.samples_per_s:,.0f}" for cut in cuts],
        "remark": [_remark(report, cut) for cut in cuts],
    }
    heading = "Result to store: CPU time once, and in every epoch; samples/s from CPU time"
    yield heading, _table(columns)
    if slow := [sample for sample in report.slowest if sample.times_median >= slow_ratio]:
        columns = {
            "key": [sample.key for sample in slow],
            "bytes": [size(sample.nbytes) for sample in slow],
            "ms": [number(sample.ms) for sample in slow],
            "x median": [f"{sample.times_median:.1f}" for sample in slow],
            "slowest stage": [sample.stage for sample in slow],
        }
        yield "Slowest samples", _table(columns)
    if trials := report.storage:
        share = report.host.io_wait
        io_wait = "" if share is None else f"; I/O wait {share:.0%}"
        columns = {
            "at a time": [f"{trial.depth}" for trial in trials],
            "requests/s": [f"{trial.requests_per_s:,.0f}" for trial in trials],
            "MB/s": [number(trial.bytes_per_s / 1e6) for trial in trials],
            "median ms": [number(trial.median_ms) for trial in trials],
            "p95": [number(trial.p95_ms) for trial in trials],
        }
        yield f"Reading whole files of the source at random{io_wait}", _table(columns)


def _table(columns: Mapping[str, Sequence[str]]) -> Table:
    """Make a table of columns, the last of which may be shorter."""
    rows = zip_longest(*columns.values(), fillvalue="")
    return Table(list(columns), [*rows], TEXT_COLUMNS)


def _remark(report: DoctorReport, cut: CutPoint) -> str:
    if cut.after == report.cut:
        return "recommended"
    if not cut.storable:
        return "shapes differ"
    return "keeps one random draw" if cut.frozen else ""


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


def count_cores(count: float) -> str:
    """Format a number of cores with its noun."""
    text = plain(count, 2)
    return f"{text} core" if text == "1" else f"{text} cores"
