"""What a person sees of a build while it runs, on standard error."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from precache.runtime.terminal import Terminal
from precache.store.receipts import Receipt
from precache_workers.driver.node_table import Cpus, NodeProgress

LINE_EVERY = 10.0
"""Seconds at least between two lines of a log, where there is no terminal to redraw."""


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} images/s" if task.speed else "")


class BuildProgress:
    """A line for the listing, then a bar of images with rate and time left, and several nodes."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._logged = time.monotonic()
        self._began = (0, self._logged)
        self._progress = NodeProgress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Terminal(stderr=True),
            disable=not shown,
        )
        self._task = self._progress.add_task("Listing", total=None, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._hide()
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._shown:
            self._progress.print(text, soft_wrap=True)

    def finish(self, text: str) -> None:
        """The last line, in place of the bar."""
        self._hide()
        self.say(text)

    def _hide(self) -> None:
        self._progress.update(self._task, visible=False)
        self._progress.hide()

    def listed(self, found: int) -> None:
        self._progress.update(self._task, completed=found)
        if self._logs():
            self.say(f"{found:,} listed")

    def phase(self, name: str) -> None:
        """What goes on, where it cannot be counted."""
        self._progress.update(self._task, description=name)

    def begin(self, done: int, total: int) -> None:
        """The images of a build, some of them made before."""
        self._progress.reset(
            self._task, description="Building", completed=done, total=total, start=True
        )
        self._began = (done, time.monotonic())

    def watch(self, shards: int, cpus: Cpus) -> None:
        """So many shards are to be made; `cpus` tells what each node of a cluster has."""
        self._progress.watch(shards, cpus)

    def count(self, receipt: Receipt) -> None:
        """A shard is made, somewhere."""
        self._progress.count(receipt)

    def advance(self, images: int, failed: int) -> None:
        note = f"{failed} failed" if failed else ""
        self._progress.update(self._task, advance=images, note=note)
        if self._logs():
            bar, (before, since) = self._progress.tasks[self._task], self._began
            rate = (bar.completed - before) / max(1e-3, time.monotonic() - since)
            self.say(progress_line(int(bar.completed), int(bar.total or 0), rate))

    def _logs(self) -> bool:
        """Whether a line for a log is due, where there is no terminal with a bar."""
        clock = time.monotonic()
        if clock - self._logged < LINE_EVERY or self._progress.console.is_terminal:
            return False
        self._logged = clock
        return True


def progress_line(done: int, total: int, rate: float) -> str:
    """How far a build is, in one line.

    Parameters
    ----------
    rate
        Images a second, above 0.
    """
    left = timedelta(seconds=round((total - done) / rate))
    return f"{done:,} of {total:,} images, {rate:,.0f}/s, {left} left"
