"""The one boundary to where bytes live: read, put atomically, create only, list.

Names are POSIX paths relative to a folder. What the file system raises leaves here as
`StorageError`, with the path and the way out.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fsspec.core import split_protocol

from precache.errors import StorageError, UsageError

Buffer = bytes | bytearray | memoryview
Result = TypeVar("Result")

PARTS_A_WRITE = 1024
"""As many as Linux takes at once (IOV_MAX)."""

SWEEPS = 10
"""Times that another process may sweep a folder from under one write."""


def local_path(uri: str | os.PathLike[str]) -> Path:
    """The path that a path or ``file://`` URI names.

    Raises
    ------
    UsageError
        For another protocol.
    """
    protocol, path = split_protocol(os.fspath(uri))
    if protocol not in (None, "file", "local"):
        raise UsageError(f"{uri}: {protocol}:// is not supported; give a local path or file://")
    return Path(path).expanduser().absolute()


_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


@contextlib.contextmanager
def _translated(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = {
            errno.ENOSPC: "; free some space and run the same command again: it continues",
            errno.EDQUOT: "; the quota is used up: free some space and run the same command again",
            errno.EACCES: "; check its owner and mode",
            errno.EROFS: "; choose a folder that can be written",
            errno.EMFILE: "; raise `ulimit -n`",
        }.get(error.errno or 0, "")
        reason = error.strerror or str(error)
        raise StorageError(f"cannot {doing} {path}: {reason}{hint}") from error


@dataclass(frozen=True)
class FileInfo:
    """One file below a folder: POSIX name, size in bytes, modification time in nanoseconds."""

    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Folder:
    """A folder on a local disk."""

    root: Path

    def path(self, name: str) -> Path:
        return self.root / name

    def exists(self, name: str = "") -> bool:
        return self._stat(name) is not None

    def size(self, name: str) -> int | None:
        """Bytes of an object, or None where there is none."""
        status = self._stat(name)
        return None if status is None else status.st_size

    def _stat(self, name: str) -> os.stat_result | None:
        with _translated(self.path(name), "look at"):
            try:
                return self.path(name).stat()
            except ValueError:  # a zero byte in the name
                return None
            except OSError as error:
                if error.errno in _NOT_THERE:
                    return None
                raise

    def read(self, name: str) -> bytes:
        """The whole object."""
        path = self.path(name)
        with _translated(path, "read"), path.open("rb", buffering=0) as file:
            return file.readall()

    def names(self, name: str = "") -> list[str]:
        """Names directly below `name`, sorted; none where it does not exist."""
        try:
            with os.scandir(self.path(name)) as entries:
                return sorted(entry.name for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError:
            with _translated(self.path(name), "list"):
                raise

    def put(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> None:
        """Write an object whole or not at all, durable when this returns.

        Parameters
        ----------
        parts
            Its bytes, one buffer after another.
        scratch
            Folder for the temporary file, on the same file system; the object's own by default.
        """
        target, whole = self.path(name), list(parts)

        def write() -> None:
            with self._temporary(target, scratch) as temporary:
                _write_durably(temporary, whole)
                temporary.replace(target)

        with _translated(target, "write"):
            _again_if_swept(write)
            _sync_folder(target.parent)

    def create(self, name: str, data: bytes, scratch: str | None = None) -> bool:
        """Write an object that must not exist yet; False where it does."""
        target = self.path(name)

        def write() -> bool:
            with self._temporary(target, scratch) as temporary:
                _write_durably(temporary, [data])
                try:
                    os.link(temporary, target)
                except FileExistsError:
                    return False
                return True

        with _translated(target, "write"):
            created = _again_if_swept(write)
            _sync_folder(target.parent)
            return created

    @contextlib.contextmanager
    def _temporary(self, target: Path, scratch: str | None) -> Iterator[Path]:
        folder = target.parent if scratch is None else self.path(scratch)
        for each in {folder, target.parent}:
            each.mkdir(parents=True, exist_ok=True)
        path = folder / f".{target.name}.{uuid.uuid4().hex}.tmp"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove an object or a folder and all below it; nothing where there is none."""
        path = self.path(name)

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        with _translated(path, "remove"):
            _again_if_swept(remove)

    def free_bytes(self) -> int:
        """Space left where the folder is, or will be."""
        path = self.root.absolute()
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def walk(self) -> Iterator[FileInfo]:
        """Every file below the folder, in no particular order.

        Links are followed, except back to a folder they are in; one that leads nowhere is a file
        of unknown size (-1).
        """
        with _translated(self.root, "list"):
            stack = [("", frozenset({_identity(self.root.stat())}))]
        while stack:
            prefix, above = stack.pop()
            with _translated(self.path(prefix), "list"), os.scandir(self.path(prefix)) as entries:
                for entry in entries:
                    try:
                        status = entry.stat()
                    except OSError:
                        if not entry.is_symlink():
                            raise
                        yield FileInfo(prefix + entry.name, -1, -1)
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        if _identity(status) not in above:
                            stack.append((f"{prefix}{entry.name}/", above | {_identity(status)}))
                    elif stat.S_ISREG(status.st_mode):
                        yield FileInfo(prefix + entry.name, status.st_size, status.st_mtime_ns)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def open_folder(uri: str | os.PathLike[str]) -> Folder:
    """The folder that a path or URI names; it need not exist."""
    return Folder(local_path(uri))


def _again_if_swept(action: Callable[[], Result]) -> Result:
    """Do it again where another process removed or filled a folder in between."""
    for _ in range(SWEEPS):
        try:
            return action()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
    return action()


def _write_durably(path: Path, parts: Iterable[Buffer]) -> None:
    with path.open("xb", buffering=0) as file:
        # Long writes leave large pages in the page cache, which readers map with few faults.
        waiting = deque(memoryview(part) for part in parts)
        while waiting:
            written = os.writev(file.fileno(), list(itertools.islice(waiting, PARTS_A_WRITE)))
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.popleft())
            if written:
                waiting[0] = waiting[0][written:]
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
