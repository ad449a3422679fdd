"""Results and progress that several commands print."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from rich.text import Text

from precache.messages import printable
from precache.runtime.terminal import Terminal, say, say_text

if TYPE_CHECKING:
    from precache.store.version import Version
    from precache_workers.driver.build_result import BuildResult
    from precache_workers.jobs.submission import ClusterJob


def show(json_to: TextIO | None, data: Any, text: object = None) -> None:
    """Write a result as one line of JSON, or print its text, by default that of `data`."""
    if json_to:
        json_to.write(json.dumps(data, default=dataclasses.asdict) + "\n")
    else:
        say_text(str(data if text is None else text))
    (json_to or sys.stdout).flush()


def build_json(result: BuildResult) -> dict[str, Any]:
    """Return the object that ``precache build --json`` prints."""
    return {**dataclasses.asdict(result), "ratio": result.ratio}


def show_job(job: ClusterJob, no_wait: bool, json_to: TextIO | None) -> int:
    """Print a job's id, or follow the job and print its results; returns the exit status."""
    if no_wait:
        show(json_to, _job_json(job), job.id)
        return 0

    def print_result(result: BuildResult) -> None:
        data = {**_job_json(job), "result": build_json(result)}
        show(json_to, data, result)

    was = "is already running" if job.attached else "is submitted"
    _say(f"precache: job {job.id} {was}")
    try:
        job.wait(_say, print_result)
    except KeyboardInterrupt:
        _say(f"precache: the job continues; to see its progress: {job.status_command()}")
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
