"""The progress display of a build, on standard error."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from precache.runtime.terminal import Terminal
from precache.units import size

log = logging.getLogger(__name__)

LINE_EVERY = 10.0
"""Least seconds between two progress lines, if there is no terminal to redraw."""


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} samples/s" if task.speed else "")


class BuildProgress:
    """A line for the listing, then a bar of samples with rate and time left."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._logged = time.monotonic()
        self._began = (0, self._logged)
        console = Terminal(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not (shown and (console.is_terminal or console.is_jupyter)),
            refresh_per_second=4,
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
            self._progress.update(self._task, visible=False)
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            self._progress.print(text, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line that the user must see: without progress, as a warning."""
        if self._shown:
            self.say(text)
        else:
            log.warning("%s", text)

    def finish(self, text: str) -> None:
        """Replace the bar by a last line."""
        self._progress.update(self._task, visible=False)
        self.say(text)

    def listed(self, samples: int) -> None:
        """Show how many samples are listed so far."""
        self._progress.update(self._task, completed=samples)
        if self._line_due():
            self.say(f"{samples:,} listed")

    def phase(self, name: str) -> None:
        """Name the current phase, one that cannot be counted."""
        self._progress.update(self._task, description=name)

    def checked(self, done: int, total: int) -> None:
        """Show how many bytes of a stored version are checked so far."""
        text = f"{size(done)} of {size(total)} checked"
        self.phase(text)
        if done and self._line_due():
            self.say(text)

    def begin(self, done: int, total: int) -> None:
        """Begin to count samples, of which `done` were built before this run."""
        self._progress.reset(
            self._task, description="Building", completed=done, total=total, start=True
        )
        self._began = (done, time.monotonic())

    def advance(self, samples: int, failed: int) -> None:
        """Count samples that were built, and show how many failed in all."""
        note = f"{failed} failed" if failed else ""
        self._progress.update(self._task, advance=samples, note=note)
        if self._line_due():
            bar, (before, since) = self._progress.tasks[self._task], self._began
            rate = (bar.completed - before) / max(1e-3, time.monotonic() - since)
            self.say(progress_line(int(bar.completed), int(bar.total or 0), rate))

    def _line_due(self) -> bool:
        """True if it is time for a progress line; never on a terminal, which has the bar."""
        clock = time.monotonic()
        if clock - self._logged < LINE_EVERY or self._progress.console.is_terminal:
            return False
        self._logged = clock
        return True


def progress_line(done: int, total: int, rate: float) -> str:
    """Progress of a build in one line.

    Parameters
    ----------
    rate
        Samples a second; 0 before the first, as where all rows of the first shards are removed.
    """
    line = f"{done:,} of {total:,} samples"
    if not rate:
        return line
    left = timedelta(seconds=round((total - done) / rate))
    return f"{line}, {rate:,.0f}/s, {left} left"
