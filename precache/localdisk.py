"""Folders on a local disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import shutil
import stat
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from precache.errors import StorageError
from precache.folder import Buffer, FileInfo, Folder, Range, is_missing

Result = TypeVar("Result")

PARTS_A_WRITE = 1024
"""As many as Linux takes at once (IOV_MAX)."""

SWEEPS = 10
"""Times that another process may sweep a folder from under one write."""


_AT_FDCWD = -100
_NOREPLACE = 1
"""Of ``linux/fcntl.h`` and ``linux/fs.h``."""

_UNSUPPORTED = frozenset(
    (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL,
     errno.EMLINK, errno.EXDEV)
)  # fmt: skip
"""Of a way to publish a file that a disk does not know; EXDEV of disks that link within a folder
alone."""

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
class LocalFolder:
    """A `Folder` on a local disk."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    @property
    def name(self) -> str:
        return self.root.name

    def path(self, name: str) -> str:
        return str(self.root / name)

    def local(self, name: str) -> Path:
        """Where the object lies, to be mapped."""
        return self.root / name

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self.root / name)

    def kind(self) -> str | None:
        status = self._stat("")
        if status is None:
            return None
        return "folder" if stat.S_ISDIR(status.st_mode) else "file"

    def exists(self, name: str = "") -> bool:
        return self._stat(name) is not None

    def size(self, name: str) -> int | None:
        """Bytes of an object, or None where there is none."""
        status = self._stat(name)
        return None if status is None else status.st_size

    def _stat(self, name: str) -> os.stat_result | None:
        with _translated(self.local(name), "look at"):
            try:
                return self.local(name).stat()
            except ValueError:  # a zero byte in the name
                return None
            except OSError as error:
                if error.errno in _NOT_THERE:
                    return None
                raise

    def read(self, name: str) -> bytes:
        """The whole object."""
        path = self.local(name)
        with _translated(path, "read"):
            return _read(path)

    def get(self, name: str) -> bytes | None:
        if self._stat(name) is None:
            return None
        try:
            return self.read(name)
        except StorageError as error:
            if is_missing(error):  # removed in between
                return None
            raise

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes | StorageError]:
        found: list[bytes | StorageError] = []
        for name, size in zip(names, sizes, strict=True):
            path = self.local(name)
            try:
                with _translated(path, "read"):
                    found.append(_read(path, None if size < 0 else size + 1))
            except StorageError as error:
                found.append(error)
        return found

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        found: list[bytes | StorageError] = []
        for name, start, length in ranges:
            path = self.local(name)
            try:
                with _translated(path, "read"), path.open("rb", buffering=0) as file:
                    found.append(os.pread(file.fileno(), length, start))
            except StorageError as error:
                found.append(error)
        return found

    def names(self, name: str = "") -> list[str]:
        """Names directly below `name`, sorted; none where it does not exist."""
        try:
            with os.scandir(self.local(name)) as entries:
                return sorted(entry.name for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError:
            with _translated(self.local(name), "list"):
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
        whole = list(parts)
        self._write(name, lambda path: _write_durably(path, whole), _replace, scratch)

    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        """Write an object that must not exist yet; False where it does."""
        whole = list(parts)
        return self._write(name, lambda path: _write_durably(path, whole), _publish, scratch)

    def copy(
        self,
        name: str,
        origin: Folder,
        source: str,
        scratch: str | None = None,
        *,
        create: bool = False,
    ) -> bool:
        """Put an object that another folder has: a hard link where both are on one disk."""
        there = origin.local(source)

        def fill(temporary: Path) -> None:
            if there is None:
                _write_durably(temporary, [origin.read(source)])
                return
            try:
                os.link(there, temporary)
            except FileNotFoundError:
                raise
            except OSError:  # another disk, or one that knows no links
                _write_durably(temporary, [there.read_bytes()])

        return self._write(name, fill, _publish if create else _replace, scratch)

    def _write(
        self,
        name: str,
        fill: Callable[[Path], None],
        publish: Callable[[Path, Path], bool],
        scratch: str | None,
    ) -> bool:
        """Fill a temporary file and give it its name; returns what `publish` does."""
        target = self.local(name)

        def write() -> bool:
            with self._temporary(target, scratch) as temporary:
                fill(temporary)
                return publish(temporary, target)

        with _translated(target, "write"):
            published = _again_if_swept(write)
            _sync_folder(target.parent)
            return published

    @contextlib.contextmanager
    def _temporary(self, target: Path, scratch: str | None) -> Iterator[Path]:
        folder = target.parent if scratch is None else self.local(scratch)
        for each in {folder, target.parent}:
            each.mkdir(parents=True, exist_ok=True)
        path = folder / f".{target.name}.{uuid.uuid4().hex}.tmp"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove an object or a folder and all below it; nothing where there is none."""
        path = self.local(name)
        if not os.path.lexists(path):  # a read-only disk would refuse to look
            return

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

    def sizes(self, name: str = "") -> dict[str, int]:
        if not self.exists(name):
            return {}
        prefix = f"{name}/" if name else ""
        return {prefix + info.name: info.size for info in self.folder(name).walk()}

    def walk(self) -> Iterator[FileInfo]:
        """Every file below the folder, in no particular order.

        Links are followed, except back to a folder they are in; one that leads nowhere is a file
        of unknown size (-1).
        """
        with _translated(self.root, "list"):
            stack = [("", frozenset({_identity(self.root.stat())}))]
        while stack:
            prefix, above = stack.pop()
            with _translated(self.local(prefix), "list"), os.scandir(self.local(prefix)) as entries:
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


def _read(path: Path, most: int | None = None) -> bytes:
    """As a file object does, with half the calls that let go of the interpreter's lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        data = os.read(descriptor, size + 1 if most is None else min(size + 1, most))
        if len(data) in (size, most):
            return data
        with open(descriptor, "rb", closefd=False) as file:
            return data + file.read(-1 if most is None else most - len(data))
    finally:
        os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


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


def _replace(temporary: Path, target: Path) -> bool:
    """Give a file its name, whatever has it."""
    temporary.replace(target)
    return True


def _publish(temporary: Path, target: Path) -> bool:
    """Give a file a name that nothing has; False where something has it.

    By a hard link; where the disk has none (FAT, SMB, some of FUSE), by a rename that replaces
    nothing; where it has none either, by taking the name with an empty file, which the whole one
    then replaces. Killed between these two, it leaves the empty one.
    """
    for attempt in (os.link, _rename_new, _take_and_rename):
        try:
            attempt(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED or attempt is _take_and_rename:
                raise
        else:
            return True
    raise AssertionError("unreachable")


def _rename_new(temporary: Path, target: Path) -> None:
    """Rename without replacing (Linux's ``renameat2`` with ``RENAME_NOREPLACE``)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(target), _NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _take_and_rename(temporary: Path, target: Path) -> None:
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
    temporary.replace(target)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
