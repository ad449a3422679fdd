"""The doctor's report as text: the answers first, then the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator

from precache.messages import Table, aligned, as_text
from precache.units import counted, duration, number, plain, size
from precache_workers.doctor.report import DoctorReport

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
    ratio = report.cores_without_cache / max(report.cores_with_cache, 1e-9)
    less = f"{number(ratio)} times less work per epoch"
    savings = less if ratio > 1 else "more work per epoch than without"
    needed = count_cores(report.cores_with_cache)
    yield "with a cache", f"{target} need {needed}, {savings}"
    yield "time to build", _build(report)
    stored, raw = size(own.stored * report.samples), size(own.raw * report.samples)
    yield "store size", f"{stored} with codec {own.codec}; {raw} uncompressed"
    yield "store rows", _stored(report)
    share = report.failed / max(1, report.sampled)
    failed = f"{report.failed:,} of {report.sampled:,}; about {share * report.samples:,.0f} of all"
    yield "broken files", failed if report.failed else f"none of {report.sampled:,}"
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


def tables(report: DoctorReport, slow_ratio: float = SLOW_RATIO) -> Iterator[tuple[str, Table]]:
    """Yield headings and tables; samples that took `slow_ratio` times the median are listed."""
    stages, at = report.stages, f"{report.rate:,.0f}/s"
    total = sum(stage.cpu_ms for stage in stages)
    rest = 1e3 * report.build.cpu_seconds / report.samples - total
    table = Table(("", "mean", "median", "p95", "max", "CPU share"), [])
    for stage in stages:
        ms = stage.ms.mean, stage.ms.median, stage.ms.p95, stage.ms.max
        table.add_row(stage.name, *map(number, ms), f"{stage.cpu_ms / max(total, 1e-9):.0%}")
    table.add_row("other build work", number(max(0.0, rest)))
    yield "Time by stage, CPU-ms per sample (fetch: ms spent waiting)", table
    of_build = ("bytes", "raw /\nstored", "build\nCPU time")
    of_reading = ("samples/s", "CPU-ms\nper 1,000", f"cores at\n{at}", f"MB/s at\n{at}")
    table = Table(("", *of_build, *of_reading), [])
    for codec in report.codecs:
        more = report.samples * (codec.write_cpu - report.codecs[0].write_cpu)
        table.add_row(
            codec.codec,
            size(codec.stored * report.samples),
            f"{codec.raw / max(codec.stored, 1e-9):.2f}",
            duration(max(0.0, report.build.cpu_seconds + more)),
            f"{codec.samples_per_s:,.0f}",
            number(codec.cpu_ms_per_1000),
            f"{report.cores_at_rate(codec):.2f}",
            f"{report.rate * codec.stored / 1e6:,.0f}",
        )
    here = count_cores(report.host.cores)
    yield f"Reading a store from memory, measured on {here} here", table
    table = Table(("key", "bytes", "ms", "x median", "slowest stage"), [], ("key", "slowest stage"))
    for slow in report.slowest:
        if slow.times_median >= slow_ratio:
            figures = size(slow.nbytes), number(slow.ms), f"{slow.times_median:.1f}"
            table.add_row(slow.key, *figures, slow.stage)
    if table.rows:
        yield "Slowest samples", table
    table = Table(("at a time", "requests/s", "MB/s", "median ms", "p95"), [])
    for trial in report.storage:
        read = trial.bytes_per_s / 1e6, trial.median_ms, trial.p95_ms
        table.add_row(f"{trial.depth}", f"{trial.requests_per_s:,.0f}", *map(number, read))
    if table.rows:
        share = report.host.io_wait
        io_wait = "" if share is None else f"; I/O wait {share:.0%}"
        # A bucket's are in no memory of this machine.
        cold = "" if "://" in report.source else ", dropped from memory before"
        yield f"Reading whole files of the source at random{cold}{io_wait}", table


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
