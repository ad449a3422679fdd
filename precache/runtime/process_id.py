"""Identity of nodes and processes in a store, and whether a process of this machine has ended."""

from __future__ import annotations

import functools
import os
import socket
import time
import uuid
from pathlib import Path

from pydantic import BaseModel, ConfigDict

NODE = "PRECACHE_NODE"
"""Environment variable: the name of this node in receipts, in place of the machine's name."""


def node_name() -> str:
    """Return the name of this node in receipts."""
    return os.environ.get(NODE) or socket.gethostname()


class Process(BaseModel):
    """The identity of a process.

    Attributes
    ----------
    node
        The boot of its machine and its namespace of process ids; a pid is unique within both.
        Without ``/proc``, the machine alone.
    started
        Clock ticks from boot to its start, since pids are used again; 0 without ``/proc``.
    host
        Name of its machine, for messages.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    node: str
    pid: int
    started: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def process_of(pid: int) -> Process:
    """Return the identity of a running process of this machine."""
    _, started = _stat(pid) or ("", 0)
    return Process(node=this_node(), pid=pid, started=started, host=socket.gethostname())


def has_ended(process: Process) -> bool:
    """Return whether a process is known to have ended; False for those of other machines."""
    if process.node != this_node():
        return False
    stat = _stat(process.pid)
    return stat is None or stat[0] in "ZX" or stat[1] != process.started


@functools.cache
def this_node() -> str:
    """Return `Process.node` of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state and start of a process; None if there is none. Source: proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self").exists() else _signalled(pid)
    return fields[0], int(fields[19])


def _signalled(pid: int) -> tuple[str, int] | None:
    """Do as `_stat` without /proc: an ended process counts as running while its pid is in use."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # it is another user's
        pass
    return "R", 0


def boottime() -> float:
    """Return seconds since some start, with those in which the machine was suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
