"""Ends of a process by a sample: a fatal signal, such as SIGSEGV, and `os._exit`."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterator
from typing import NoReturn

STDERR = 2


@contextlib.contextmanager
def fatal_stacks() -> Iterator[None]:
    """Print the stack of the thread at which a fatal signal ends this process.

    Among its frames is the one by which `SamplesAtWork.work` names the sample. `os._exit` raises
    SystemExit: with status 0 the process would end like one that has done its work.
    """
    process, end = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a fork's end
            end(status)
        raise SystemExit(f"os._exit({status})")

    enabled = faulthandler.is_enabled()
    os._exit = refuse
    if not enabled:
        faulthandler.enable(STDERR, all_threads=False)
    try:
        yield
    finally:
        os._exit = end
        if not enabled:
            faulthandler.disable()
