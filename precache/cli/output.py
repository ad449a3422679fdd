"""Results and progress that several commands print."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from precache.messages import printable
from precache.runtime.terminal import Rows, Terminal, say, say_rows
from precache.units import size

if TYPE_CHECKING:
    from precache.store.version import Version
    from precache_workers.jobs.submission import ClusterJob
    from precache_workers.planning.request import BuildResult

SHOWN = 10
"""Number of holes, keys and classes that are listed; the rest is only counted."""


def first_ones(items: Sequence[str], separator: str = ", ") -> str:
    """List the first `SHOWN` of the items, and count the rest."""
    rest = f" … and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + rest


def show(as_json: bool, data: Mapping[str, Any], print_text: Callable[[], None]) -> None:
    """Print a result as one line of JSON or as text."""
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
    else:
        print_text()


def build_json(result: BuildResult) -> dict[str, Any]:
    """Return the object that ``precache build --json`` prints."""
    return {**dataclasses.asdict(result), "ratio": result.ratio}


def row_types_text(row_types: Mapping[str, str]) -> str:
    """Format the dtype and shape of a row, by field."""
    return ", ".join(f"{name} {row}" for name, row in row_types.items())


def print_build(result: BuildResult) -> None:
    """Print the summary of a build."""
    skipped = result.shards_skipped
    computed = result.shards - skipped - result.shards_reused
    mended = f", {result.mended} mended" if result.mended else ""
    reused = f"{result.shards_reused} reused, " if result.shards_reused else ""
    bytes_ = f"{size(result.raw_bytes)} raw, {size(result.stored_bytes)} stored"
    stages = ", ".join(f"{name} {value:.2f}" for name, value in result.timings.items())
    rows = [
        ("version", result.version),
        ("path", result.path),
        ("samples", f"{result.samples:,}, {result.failed} failed{mended}"),
        ("row", row_types_text(result.row_types)),
        (
            "shards",
            f"{result.shards}: {computed} made, {reused}{skipped} there before",
        ),
        ("size", f"{bytes_}: ratio {result.ratio:.2f}"),
        ("time", f"{result.seconds:.1f} s, {result.cpu_seconds:.1f} CPU-s in tasks"),
        ("by stage, s", stages),
        *statistics(result.mean, result.std),
    ]
    say_rows(rows)
    for key, reason in result.holes[:SHOWN]:
        say(f"hole: {key}: {reason}")
    if len(result.holes) > SHOWN:
        say(f"… and {len(result.holes) - SHOWN} more holes")


def statistics(mean: Mapping[str, list[float]], std: Mapping[str, list[float]]) -> Rows:
    """Return names and values of the statistics of each field."""

    def numbers(values: Sequence[float]) -> str:
        return first_ones([f"{value:.2f}" for value in values], " ")

    return [(f"{n} mean, std", f"{numbers(mean[n])}, {numbers(std[n])}") for n in mean]


def show_job(job: ClusterJob, no_wait: bool, as_json: bool) -> int:
    """Print a job's id, or follow the job and print its results; returns the exit status."""
    if no_wait:
        show(as_json, _job_json(job), lambda: say(job.id))
        return 0

    def print_result(result: BuildResult) -> None:
        data = {**_job_json(job), "result": build_json(result)}
        show(as_json, data, lambda: print_build(result))
        sys.stdout.flush()

    was = "is under way already" if job.attached else "is submitted"
    _say(f"precache: job {job.id} {was}")
    try:
        job.wait(_say, print_result)
    except KeyboardInterrupt:
        _say(f"precache: the job goes on; to see how far it is: {job.status_command()}")
        return 130
    return 0


def _say(line: str) -> None:
    say(line, stderr=True)


def _job_json(job: ClusterJob) -> dict[str, Any]:
    return {"job": job.id, "address": job.address, "attached": job.attached}


@contextlib.contextmanager
def byte_progress(doing: str, version: Version, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of a version's bytes on standard error; the yielded function advances it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    total = sum(field.stored_nbytes for field in version.fields.values())
    console = Terminal(stderr=True)
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextlib.contextmanager
def bench_progress(shown: bool) -> Iterator[Callable[[str], None]]:
    """Show on standard error what is measured; the yielded function sets it."""
    with Terminal(stderr=True, quiet=not shown).status("Measuring") as status:
        yield lambda name: status.update(Text(printable(f"Measuring: {name}")))
