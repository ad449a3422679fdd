"""A process that ends the one that started it, once the interpreter's lock there is held too long.

No thread of that process can do so: none of them runs. It sends heartbeats, and keeps the samples
that it works on in shared memory (`time_limit`). A heartbeat is a line: the seconds within
which the next one is due, 0 for no limit, and optionally the file that the report goes to.

Seconds are counted one by one, and not while the process is stopped, as by Ctrl-Z or a debugger.
The module imports next to nothing: it is started for every build.
"""

from __future__ import annotations

import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SLOTS, SLOT_BYTES = 8, 8 << 10
"""Slots of the shared memory, one for each thread that works on samples, and bytes of a slot. It
begins with the length of its contents (16 bits, little-endian): a reason and keys, with NUL between
them."""

IDLE_SECONDS = 60.0
"""Seconds between two checks that the process exists, while it has no limit."""

WAY_OUT = (
    "Only the end of its process ends what hangs. Mend or remove the sample, or build with "
    "--address local, whose worker processes are replaced, which leaves a hole"
)


def explain(late: Mapping[str, str]) -> str:
    """Return the message on samples that take too long: one may hang, the others wait for it."""
    return f"{'; or '.join(f'{key}: {why}' for key, why in late.items())}. {WAY_OUT}"


def write_report(path: str, late: Mapping[str, str]) -> None:
    """Write the file that explains why a process was ended: key -> reason, of samples."""
    import json

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(file, json.dumps(late).encode())
    os.close(file)


def _watch(process: int, notes: int) -> None:
    limit, missed, report = 0.0, 0, ""
    late: dict[str, str] = {}
    while missed <= limit or not late:
        if select.select([0], [], [], 1.0 if limit else IDLE_SECONDS)[0]:
            beats = os.fsdecode(os.read(0, 1 << 16))
            if not beats:
                return
            seconds, _, report = beats[:-1].rpartition("\n")[2].partition(" ")
            limit, missed = float(seconds), 0
        elif os.getppid() != process:
            return
        elif limit and not _is_stopped(process):
            missed += 1
            late = _read(notes) if missed > limit else {}
    _end(process, late, report)


def _is_stopped(process: int) -> bool:
    """Return True if a process is stopped and waits to be continued (proc_pid_stat(5))."""
    with open(f"/proc/{process}/stat", "rb") as file:  # noqa: PTH123 - pathlib takes long to import
        return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")


def _read(notes: int) -> dict[str, str]:
    late: dict[str, str] = {}
    for slot in range(SLOTS):
        data = os.pread(notes, SLOT_BYTES, slot * SLOT_BYTES)
        why, *keys = data[2 : 2 + int.from_bytes(data[:2], "little")].decode().split("\0")
        late |= dict.fromkeys(keys, why)
    return late


def _end(process: int, late: dict[str, str], report: str) -> None:
    import json
    import signal

    try:
        if report:
            write_report(report, late)
        # In JSON, control characters in keys are escaped.
        shown = {json.dumps(key)[1:-1]: why for key, why in late.items()}
        os.write(2, f"\nprecache: {explain(shown)}\n".encode())
    finally:
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]))
