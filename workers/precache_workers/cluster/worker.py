"""Work of one task, in a worker of Ray or in a worker process of this machine."""

from __future__ import annotations

import contextlib
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
from precache_workers.runtime.time_limit import kept_notes

PARENT_SECONDS = 0.5
"""Time between two checks that the process that started this one still runs."""


def run_items(
    call: Callable[[Any], Any], job: Any, items: Sequence[Any], at_work: str
) -> tuple[list[Any], float]:
    """Call a function with the items of a task, until it has taken twice `TASK_SECONDS`.

    A sample that hangs ends this process.

    Parameters
    ----------
    at_work
        Folder to create for the samples at work, which stays only if this process ends.

    Returns
    -------
    tuple
        Values, as of `Done`; a `PrecacheError` that was raised is one. Then the seconds.
    """
    began, seconds, values = time.monotonic(), 0.0, []
    with kept_notes(at_work) as notes:
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
                if notes is not None:
                    notes.write_late(values[-1].late)
                os._exit(1)
    return values, seconds


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
            function, path, items, at_work = connection.recv()
            try:
                if path != loaded:
                    job, loaded = pickle.loads(Path(path).read_bytes()), path
                answer = run_items(function, job, items, at_work)
            except Exception as error:
                answer = [BuildError(f"a task failed: {error!r}")], 0.0
            connection.send(answer)


def _end_with(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
