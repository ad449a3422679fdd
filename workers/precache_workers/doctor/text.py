"""The doctor's report as text: the answers first, then the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from precache.messages import Table, aligned, as_text
from precache.units import counted, duration, number, plain, size

if TYPE_CHECKING:
    from precache_workers.doctor.report import CodecFigures, DoctorReport

TEXT_COLUMNS = ("key", "slowest stage")
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
        f"{report.source}: {least}{counted(report.samples, 'sample')}, "
        f"{size(report.source_bytes)}; {report.sampled:,} measured in {report.seconds:.0f} s"
    )


def answers(report: DoctorReport) -> Iterator[tuple[str, str]]:
    """Yield names and short sentences, the most important first."""
    target = f"{report.rate:,.0f} samples/s"
    own, rate = report.codecs[0], report.samples_per_s_without_cache
    waiting = rate * report.cores_without_cache < WAITING * report.rate * report.cores
    limit = ", waiting for the source" if waiting else ""
    now = f"{count_cores(report.cores)} would load {number(rate)}/s{limit}"
    yield "without a cache", f"{target} need {count_cores(report.cores_without_cache)}; {now}"
    needed = count_cores(report.cores_with_cache)
    yield "with a cache", f"{target} need {needed}, {_savings(report)}"
    yield "time to build", _build(report)
    stored, raw = size(own.stored * report.samples), size(own.raw * report.samples)
    yield "store size", f"{stored} with codec {own.codec}; {raw} uncompressed"
    yield "store rows", _stored(report)
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


def _savings(report: DoctorReport) -> str:
    ratio = report.cores_without_cache / max(report.cores_with_cache, 1e-9)
    if ratio <= 1:
        return "more work per epoch than without"
    return f"{number(ratio)} times less work per epoch"


def _stored(report: DoctorReport) -> str:
    if report.shapes_differ:
        return "nothing yet: the samples differ in shape; add a resize and a crop to the recipe"
    if not report.worthwhile:
        own, fastest = report.codecs[0], min(report.codecs, key=lambda c: c.cpu_ms_per_1000)
        needed = report.cores_at_rate(fastest)
        if needed < report.cores_without_cache:
            return (
                f"nothing with codec {own.codec}; with {fastest.codec} a store would need "
                f"{count_cores(needed)}"
            )
        return "nothing: no store would be cheaper to read than the files"
    frozen = f"; {report.random} is random, and a store keeps its draws" if report.random else ""
    return f"the result of {report.stages[-2].name}{frozen}"


def _broken(report: DoctorReport) -> str:
    if not report.failed:
        return f"none of {report.sampled:,}"
    share = report.failed / max(1, report.sampled)
    return f"{report.failed:,} of {report.sampled:,}; about {share * report.samples:,.0f} of all"


def tables(report: DoctorReport, slow_ratio: float = SLOW_RATIO) -> Iterator[tuple[str, Table]]:
    """Yield headings and tables; samples that took `slow_ratio` times the median are listed."""
    stages, codecs, at = report.stages, report.codecs, f"{report.rate:,.0f}/s"
    total = sum(stage.cpu_ms for stage in stages)
    rest = 1e3 * report.build.cpu_seconds / report.samples - total
    columns = {
        "": [*(stage.name for stage in stages), "other build work"],
        "mean": [*(number(stage.ms.mean) for stage in stages), number(max(0.0, rest))],
        "median": [number(stage.ms.median) for stage in stages],
        "p95": [number(stage.ms.p95) for stage in stages],
        "max": [number(stage.ms.max) for stage in stages],
        "CPU share": [f"{stage.cpu_ms / max(total, 1e-9):.0%}" for stage in stages],
    }
    yield "Time by stage, CPU-ms per sample (fetch: ms spent waiting)", _table(columns)
    columns = {
        "": [codec.codec for codec in codecs],
        "bytes": [size(codec.stored * report.samples) for codec in codecs],
        "raw /\nstored": [f"{codec.raw / max(codec.stored, 1e-9):.2f}" for codec in codecs],
        "build\nCPU time": [duration(_build_cpu(report, codec)) for codec in codecs],
        "samples/s": [f"{codec.samples_per_s:,.0f}" for codec in codecs],
        "CPU-ms\nper 1,000": [number(codec.cpu_ms_per_1000) for codec in codecs],
        f"cores at\n{at}": [f"{report.cores_at_rate(codec):.2f}" for codec in codecs],
        f"MB/s at\n{at}": [f"{report.rate * codec.stored / 1e6:,.0f}" for codec in codecs],
    }
    here = count_cores(report.host.cores)
    yield f"Reading a store from memory, measured on {here} here", _table(columns)
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
        # A bucket's are in no memory of this machine.
        cold = "" if "://" in report.source else ", dropped from memory before"
        yield f"Reading whole files of the source at random{cold}{io_wait}", _table(columns)


def _build_cpu(report: DoctorReport, codec: CodecFigures) -> float:
    more = report.samples * (codec.write_cpu - report.codecs[0].write_cpu)
    return max(0.0, report.build.cpu_seconds + more)


def _table(columns: Mapping[str, Sequence[str]]) -> Table:
    """Make a table of columns, the last of which may be shorter."""
    rows = zip_longest(*columns.values(), fillvalue="")
    return Table(list(columns), [*rows], TEXT_COLUMNS)


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
