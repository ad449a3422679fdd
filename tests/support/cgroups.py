"""Groups of processes that the kernel counts or limits, where one may make them: cgroups(7)."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def group(controller: str) -> Iterator[Path]:
    """The folder of a group; what is left of its processes at the end is killed.

    Raises
    ------
    OSError
        None can be made here.
    """
    first = ROOT / controller
    folder = (first if first.is_dir() else ROOT) / f"precache-{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                process.kill()
                process.wait(30)
        folder.rmdir()


def entering(folder: Path) -> tuple[str, ...]:
    """What a command line begins with, for its processes to be in a group."""
    return ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")


def limit_memory(folder: Path, nbytes: int) -> None:
    """Have the kernel kill one of the group's processes when they hold more."""
    first = folder / "memory.limit_in_bytes"
    (first if first.exists() else folder / "memory.max").write_text(str(nbytes))


def cpu_seconds(folder: Path) -> float:
    """CPU time of all processes that were ever in a group of the controller ``cpuacct``."""
    first = folder / "cpuacct.usage"
    if first.exists():
        return int(first.read_text()) / 1e9
    lines = (folder / "cpu.stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec")) / 1e6
