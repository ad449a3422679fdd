"""System calls that Linux has and macOS lacks; there each does the nearest that it can.

Stores are read on Linux and macOS, and built on Linux alone.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Container
from pathlib import Path

from precache.errors import UsageError

NETWORK_DISKS = frozenset(
    ("afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs")
)
"""Types of file systems that lie on a network, beside those of FUSE."""

FAT = frozenset(("exfat", "msdos", "vfat"))
"""Types of file systems that number files anew each time they are mounted, as some of FUSE do."""


def require_linux(function: str) -> None:
    """Raise `UsageError` on any other system."""
    if sys.platform != "linux":
        raise UsageError(
            f"{function}() runs on Linux alone, and this system is {sys.platform!r}; build the "
            "store on Linux, then open it here, from a bucket or after precache pull"
        )


def library_places(name: str, number: int) -> tuple[str, ...]:
    """Return the places to look for a shared library in, such as libzstd's of ABI 1.

    First is the Python environment's own folder, where conda installs it, then those of the dynamic
    linker, then Homebrew's.
    """
    file = f"lib{name}.{number}.dylib" if sys.platform == "darwin" else f"lib{name}.so.{number}"
    return str(Path(sys.prefix, "lib", file)), file, f"/opt/homebrew/lib/{file}"


def usable_cores() -> int:
    """Return the number of cores of this process's affinity, else of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_on_network(path: Path) -> bool:
    """Return True if a path lies on a network file system, as far as Linux lists its mounts."""
    try:
        return _is_of(path.stat().st_dev, NETWORK_DISKS)
    except OSError:
        return False


@functools.lru_cache(256)
def has_lasting_inodes(device: int) -> bool:
    """Return False for the number of a device on which a file may get another inode number."""
    return not _is_of(device, NETWORK_DISKS | FAT)


def _is_of(device: int, kinds: Container[str]) -> bool:
    """Return True if FUSE or one of some kinds of file systems is mounted from a device."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    types = (line.rpartition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number)
    return any(kind in kinds or kind.partition(".")[0] == "fuse" for kind in types)


def drop_cached(descriptor: int) -> bool:
    """Drop the clean pages of a file from the page cache; returns False if the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
