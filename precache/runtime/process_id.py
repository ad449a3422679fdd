"""Whether a process that left its name in a store still lives, as far as this machine can tell."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Process(BaseModel):
    """A process as it names itself.

    Attributes
    ----------
    node
        The boot of its machine and its namespace of process ids: only where both are the same does
        a number mean the same process.
    started
        Clock ticks from boot to its start: a number is given again.
    host
        Of its machine, for messages.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    node: str
    pid: int
    started: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def process_of(pid: int) -> Process:
    """A process of this machine, which must live."""
    _, started = _stat(pid) or ("", 0)
    return Process(node=_node(), pid=pid, started=started, host=socket.gethostname())


def has_ended(process: Process) -> bool:
    """Whether a process is known to have ended; False for those of other machines."""
    if process.node != _node():
        return False
    found = _stat(process.pid)
    return found is None or found[0] in "ZX" or found[1] != process.started


@functools.cache
def _node() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process; None where there is none. Source: proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])
