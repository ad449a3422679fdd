"""Work of one task, in a worker of Ray or in a worker process of this machine."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from precache.errors import BuildError, HangError, MismatchError, PrecacheError
from precache_workers.cluster.dispatch import TASK_SECONDS
from precache_workers.runtime.time_limit import Watchdog
from precache_workers.runtime.watchdog import write_report

PARENT_SECONDS = 0.5
"""Time between two checks that the process that started this one still runs."""


def run_items(
    call: Callable[[Any], Any], job: Any, items: Sequence[Any], report: str
) -> tuple[list[Any], float]:
    """Call a function with the items of a task, until it has taken twice `TASK_SECONDS`.

    A sample that hangs ends this process, and leaves a report.

    Returns
    -------
    tuple
        Values, as of `Done`; a `PrecacheError` that was raised is one. Then the seconds.
    """
    began, seconds, values = time.monotonic(), 0.0, []
    with _watchdog().on_duty(report):
        for item in items:
            if seconds >= 2 * TASK_SECONDS:
                break
            try:
                values.append(call(replace(item, job=job)))
            except PrecacheError as error:
                values.append(error)
            seconds = time.monotonic() - began
            if isinstance(values[-1], MismatchError):
                break
            if isinstance(values[-1], HangError):
                with contextlib.suppress(OSError):  # without a report it counts as a crash
                    write_report(report, values[-1].late)
                os._exit(1)
    return values, seconds


def take_report(path: str) -> dict[str, str]:
    """Read and remove the report on a worker that had to be ended: sample's key -> why."""
    try:
        late: dict[str, str] = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return {}
    Path(path).unlink()
    return late


@functools.cache
def _watchdog() -> Watchdog:
    """Return the worker process's own, which ends with it."""
    return Watchdog()


def run_worker(descriptor: str, parent: str, folder: str) -> None:
    """Run the tasks that come over a socket, as a worker process of this machine.

    Parameters
    ----------
    parent
        Process that started this one, which ends with it, and then removes `folder`.
    """
    os.set_inheritable(int(descriptor), False)
    with contextlib.suppress(OSError):  # the kernel ends workers first where memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    threading.Thread(target=_end_with, args=(int(parent), folder), daemon=True).start()
    job: Any = None
    loaded = ""
    with Connection(int(descriptor)) as connection, contextlib.suppress(EOFError):
        while True:
            function, path, items, report = connection.recv()
            try:
                if path != loaded:
                    job, loaded = pickle.loads(Path(path).read_bytes()), path
                answer = run_items(function, job, items, report)
            except Exception as error:
                answer = [BuildError(f"a task failed: {error!r}")], 0.0
            connection.send(answer)


def _end_with(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
