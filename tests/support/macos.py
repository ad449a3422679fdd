"""Make a process of Linux as poor as one of macOS: `become` hides what Python lacks there.

The libraries that `become` imports keep what they found. Pages of 16 KiB, folders that fold case
and macOS's own kernel are not imitated.
"""

import contextlib
import errno
import importlib
import io
import mmap
import multiprocessing
import os
import resource
import signal
import stat
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import Any

INT_MAX = (1 << 31) - 1

# Python's own documentation of each module says which systems have a name.
MISSING = {
    os: "copy_file_range eventfd fdatasync getrandom getxattr listxattr memfd_create pidfd_open "
    "pipe2 posix_fadvise posix_fallocate removexattr sched_getaffinity sched_setaffinity setns "
    "setxattr splice unshare O_DIRECT O_NOATIME O_PATH O_RSYNC O_TMPFILE POSIX_FADV_DONTNEED "
    "POSIX_FADV_WILLNEED",
    mmap: "MADV_DONTFORK MADV_HUGEPAGE MADV_POPULATE_READ MAP_DENYWRITE MAP_POPULATE MAP_STACK",
    resource: "RUSAGE_THREAD prlimit",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
    time: "CLOCK_BOOTTIME pthread_getcpuclockid",
}
LIBRARIES = (
    "torch.utils.data", "zarr", "fsspec.implementations.memory", "pydantic", "obstore.store",
)  # fmt: skip
SYSTEM_FOLDERS = ("/proc", "/sys")


def become() -> None:
    """Hide names, files and symbols from what is imported from now on."""
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    sysconfig.get_config_vars()  # read from a file that is named like the system
    for module, names in MISSING.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for module, name in [
        *((os, name) for name in ("open", "stat", "lstat", "readlink", "listdir", "scandir")),
        (io, "open"),
        (sys.modules["builtins"], "open"),
    ]:
        setattr(module, name, _without_system_folders(getattr(module, name)))
    for name in ("pread", "preadv", "pwrite", "writev"):
        setattr(os, name, _up_to_int_max(getattr(os, name)))
    os.unlink = os.remove = _unlink(os.unlink)
    multiprocessing.set_start_method("spawn", force=True)
    sys.platform = "darwin"


def _without_system_folders(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(path: Any = ".", *args: Any, **keywords: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(SYSTEM_FOLDERS):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *args, **keywords)

    return called


def _up_to_int_max(function: Callable[..., Any]) -> Callable[..., Any]:
    """A system call that is refused, not cut short, for more than `INT_MAX` bytes."""

    def called(descriptor: int, buffers: Any, *args: Any) -> Any:
        if isinstance(buffers, int):
            nbytes = buffers
        else:
            parts = buffers if isinstance(buffers, list) else [buffers]
            nbytes = sum(memoryview(part).nbytes for part in parts)
        if nbytes > INT_MAX:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return function(descriptor, buffers, *args)

    return called


def _unlink(unlink: Callable[..., None]) -> Callable[..., None]:
    """unlink(2), which for a folder fails by EPERM."""

    def called(path: Any, *, dir_fd: int | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path, dir_fd=dir_fd).st_mode):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        unlink(path, dir_fd=dir_fd)

    return called
