"""Folders on a local disk.

Nothing outside of a folder is read, written, linked or removed through it: names have no ``..``,
and links that lead out of it are not followed, unless the user asks for that in a source. The
folder itself may be a link, and links within it are followed. Only regular files are objects.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from precache.errors import StorageError
from precache.storage import local_files
from precache.storage.base import (
    FILES_AT_ONCE,
    LINK_OUT,
    LINK_TWICE,
    NO_FILE,
    NOT_THERE,
    Buffer,
    FileColumns,
    FileInfo,
    Folder,
    LeaveOut,
    Part,
    checked,
    ignore_left_out,
    most_bytes,
    too_large_text,
)

Result = TypeVar("Result")

SWEEPS = 10
"""Times that another process may sweep a folder from under one write."""

ANYWHERE = Path("/")

SYSTEM = ("/proc/", "/sys/")
"""Folders of kernel files, which look regular; reading some of them blocks."""

_HINTS = {
    errno.ENOSPC: "free some space and run the same command again: it continues",
    errno.EDQUOT: "the quota is used up: free some space and run the same command again",
    errno.EACCES: "check its owner and mode",
    errno.EROFS: "choose a folder that can be written",
    errno.EMFILE: "raise `ulimit -n`",
    errno.EISDIR: "a folder is where a file belongs: remove it",
    errno.ELOOP: "a link leads to itself: remove it",
}


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path; ``~`` is expanded as in a shell, where ``~x`` of no user is a name."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - a Path raises for ``~x``


@dataclass(frozen=True)
class Translated:
    """Context that raises a `StorageError` from an `OSError`.

    Not a generator: on Python 3.13 the error would then keep itself and all its callers alive.
    """

    path: object
    doing: str
    hints: Mapping[int, str] | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, OSError):
            return
        reason, hint = error.strerror or str(error), (self.hints or _HINTS).get(error.errno or 0)
        end = f"; {hint}" if hint else ""
        raise StorageError(f"cannot {self.doing} {self.path}: {reason}{end}") from error


@dataclass(frozen=True)
class LocalFolder(Folder):
    """A `Folder` on a local disk.

    Parameters
    ----------
    top
        The folder that links may not lead out of, by default its own root; of a folder made by
        `folder`, that of the one it lies in. `ANYWHERE` where links may lead anywhere.
    """

    root: Path
    top: Path | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return str(self.root)

    @property
    def name(self) -> str:
        return self.root.name

    def path(self, name: str) -> str:
        return str(self.root / name)

    def local(self, name: str) -> Path:
        return self.root / checked(name, self) if name else self.root

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self.local(name), self.top or self.root)

    # --- where things truly lie -----------------------------------------------------------------

    def _leads_out(self, true: str) -> bool:
        """Return True if a path, links resolved, lies outside of this folder."""
        below = f"{true}/"
        if not _is_below(below, str(self.top or self.root)):
            return True
        return below.startswith(SYSTEM) and not _is_below(below, str(self.root))

    def _require_inside(self, true: str) -> None:
        if self._leads_out(true):
            raise OSError(errno.EXDEV, f"it leads out of {self.top or self.root}, to {true}")

    def _look(self, name: str) -> os.stat_result | None:
        """Return the status of a name; None if nothing is there, or a link that leads out."""
        path = self.local(name)
        with Translated(path, "look at"):
            try:
                status, true = local_files.look(path)
            except OSError as error:
                if error.errno in NOT_THERE:
                    return None
                raise
            except ValueError:  # a zero byte in the root
                return None
            return None if self._leads_out(true) else status

    def _open(self, path: Path) -> tuple[int, int]:
        """A descriptor of an object, and its size."""
        descriptor, size = local_files.open_regular(path)
        try:
            self._require_inside(local_files.true_path(descriptor, path))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor, size

    def _target(self, name: str) -> Path:
        """Return the path to write or remove at a name, in a folder below this one."""
        path = self.local(name)
        return self._inside(path.parent) / path.name if name else path

    def _inside(self, folder: Path) -> Path:
        """Return the real path of a folder to be changed; no link below `top` may lead there.

        A link within would have one version's objects replaced, or removed, by way of another.
        """
        top = self.top or self.root
        straight = os.path.normpath(f"{_true(str(top))}{folder.relative_to(top)}")
        true = _followed(folder)[1]
        if true != straight:  # it may just have been removed
            true = os.path.realpath(folder)
        self._require_inside(true)
        if true != straight:
            raise OSError(errno.EXDEV, f"by way of a link it is {true}")
        return Path(true)

    # --- reading --------------------------------------------------------------------------------

    def is_folder(self, name: str = "") -> bool:
        status = self._look(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def info(self, name: str) -> FileInfo | None:
        status = self._look(name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return _info(name, status)

    def open(self, name: str) -> int:
        path = self.local(name)
        with Translated(path, "read"):
            return self._open(path)[0]

    def read_parts(
        self, parts: Sequence[Part], least: Sequence[int], *, whole: bool = False
    ) -> list[bytes | StorageError]:
        return [self._read(*part, whole=whole) for part in parts]

    def _read(self, name: str, start: int, end: int | None, *, whole: bool) -> bytes | StorageError:
        try:
            path = self.local(name)
            with Translated(path, "read"):
                descriptor, size = self._open(path)
                try:
                    if whole and end == most_bytes(name) + 1 and size >= end:
                        raise OSError(errno.EFBIG, too_large_text(name, size))
                    if start == 0:  # whose size may be wrong, as that of some files of the system
                        return local_files.read_whole(descriptor, size, end)
                    return _pread(descriptor, size, start, end)
                finally:
                    os.close(descriptor)
        except StorageError as error:
            return error

    # --- listing --------------------------------------------------------------------------------

    def names(self, name: str = "", *, first: bool = False) -> list[str]:
        if not self.is_folder(name):
            return []
        with Translated(self.local(name), "list"):
            try:
                return sorted(path.name for path in self.local(name).iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def sizes(self, name: str = "") -> dict[str, int]:
        found = super().sizes(name) if self.exists(name) else {}
        return {name: size for name, size in found.items() if size >= 0}  # without broken links

    def walk(self, leave_out: LeaveOut = ignore_left_out) -> Iterator[FileInfo]:
        """Every object below the folder: those of a folder by name, then those of folders in it.

        Links are followed, except out of it, back to a folder they are in, and, below another link,
        to a folder that a link led to before; one that leads nowhere is a file of unknown size
        (-1). A file that is removed meanwhile may be left out, and so may a folder if `leave_out`
        is not given.
        """
        for some in self.walk_columns(leave_out):
            sizes, mtimes, states = (of.tolist() for of in (some.sizes, some.mtimes, some[-1]))
            yield from map(FileInfo, some.names, sizes, mtimes, some.etags, states)

    def walk_columns(self, leave_out: LeaveOut = ignore_left_out) -> Iterator[FileColumns]:
        with Translated(self.root, "list"):
            root, true = local_files.look(self.root)
            self._require_inside(true)
        link_out = NO_FILE if self.top == ANYWHERE else LINK_OUT
        stack = [("", true, frozenset({_identity(root)}), False)]
        linked: set[tuple[int, int]] = set()
        while stack:
            prefix, true, above, linked_to = stack.pop()
            path, below = self.root / prefix, []
            names, statuses = list[str](), list[os.stat_result | None]()
            gone = (FileNotFoundError,) if prefix and leave_out is ignore_left_out else ()
            with Translated(path, "list"), contextlib.suppress(*gone), os.scandir(path) as entries:
                for entry in sorted(entries, key=operator.attrgetter("name")):
                    name, is_link = prefix + entry.name, entry.is_symlink()
                    try:
                        status, lies = _followed(entry.path) if is_link else (entry.stat(), "")
                    except FileNotFoundError:
                        continue
                    if status is not None and stat.S_ISREG(status.st_mode) and not lies:
                        names.append(name)
                        statuses.append(status)
                    elif status is not None and stat.S_ISDIR(status.st_mode):
                        lies = lies or os.path.join(true, entry.name)  # noqa: PTH118 - as text
                        may_be_out = is_link or f"{lies}/".startswith(SYSTEM)
                        if may_be_out and self._leads_out(lies):
                            leave_out(f"{name}/", link_out)
                        elif linked_to and is_link and _identity(status) in linked:
                            leave_out(f"{name}/", LINK_TWICE)
                        elif _identity(status) not in above:
                            if is_link:
                                linked.add(_identity(status))
                            inside = above | {_identity(status)}
                            below.append((f"{name}/", lies, inside, linked_to or is_link))
                    elif lies and self._leads_out(lies):
                        leave_out(name, link_out)
                    elif status is None or stat.S_ISREG(status.st_mode):
                        names.append(name)
                        statuses.append(status)
                    else:
                        leave_out(name, NO_FILE)
                    if len(names) == FILES_AT_ONCE:
                        yield _columns(names, statuses)
                        names, statuses = [], []
            if names:
                yield _columns(names, statuses)
            stack += reversed(below)

    # --- writing --------------------------------------------------------------------------------

    def put(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> None:
        self._write(name, _filling(parts), local_files.replace, scratch)

    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        return self._write(name, _filling(parts), local_files.publish, scratch)

    def copy(
        self,
        name: str,
        origin: Folder,
        source: str,
        scratch: str | None = None,
        *,
        create: bool = False,
    ) -> bool:
        """Copy an object of another folder: by a hard link if both are on one disk."""
        publish = local_files.publish if create else local_files.replace
        opened = origin.open(source)
        if opened is None:
            return self._write(name, _filling([origin.read(source)]), publish, scratch)
        try:
            fill = functools.partial(local_files.link_or_copy, opened, origin.path(source))
            return self._write(name, fill, publish, scratch)
        finally:
            os.close(opened)

    def _write(
        self,
        name: str,
        fill: Callable[[Path], None],
        publish: Callable[[Path, Path], bool],
        scratch: str | None,
    ) -> bool:
        """Fill a temporary file and give it its name; returns what `publish` does."""

        def write() -> bool:
            target = self._target(name)
            folder = target.parent if scratch is None else self._inside(self.local(scratch))
            for parent in {folder, target.parent}:
                local_files.make_folder(parent)
            temporary = folder / f".{uuid.uuid4().hex}.tmp"
            try:
                fill(temporary)
                published = publish(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
            local_files.sync_folder(target.parent)
            return published

        with Translated(self.local(name), "write"):
            return _again_if_swept(write)

    def remove(self, name: str) -> None:
        """Remove an object or a folder and all below it, a link alone; nothing where there is none.

        A read-only disk is not asked to remove what is not there.
        """

        def remove() -> None:
            target = self._target(name)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if stat.S_ISDIR(target.lstat().st_mode):
                    shutil.rmtree(target)
                else:
                    target.unlink()

        with Translated(self.local(name), "remove"):
            _again_if_swept(remove)

    def free_bytes(self) -> int:
        path = self.root.absolute()
        while not os.path.exists(path):  # noqa: PTH110 - a Path raises for a name too long
            path = path.parent
        return shutil.disk_usage(path).free


def _filling(parts: Iterable[Buffer]) -> Callable[[Path], None]:
    """Return a function that writes the parts to a new file, as often as it is called."""
    return functools.partial(local_files.write_durably, parts=list(parts))


def _is_below(true: str, folder: str) -> bool:
    """Return whether a real path is below a folder, which is its own real path if it begins it."""
    is_plain = true.startswith(f"{folder}/")
    return is_plain or true.startswith(_true(folder))


def _true(folder: str) -> str:
    """Return the real path of a folder, with a slash at its end."""
    true = _followed(folder)[1]
    return true if true.endswith("/") else f"{true}/"


def _followed(link: str | Path) -> tuple[os.stat_result | None, str]:
    """Return the status of a link's target, or None if it is broken, and the target's real path."""
    try:
        return local_files.look(link)
    except OSError:
        return None, os.path.realpath(link)


def _pread(descriptor: int, size: int, start: int, end: int | None) -> bytes:
    """Read up to `end`: of 2 GiB, Linux reads a part, and macOS nothing (read(2))."""
    data, end = b"", size if end is None else min(end, size)
    while start < end and (piece := os.pread(descriptor, min(end - start, 1 << 30), start)):
        data = data + piece if data else piece
        start += len(piece)
    return data


def _info(name: str, status: os.stat_result) -> FileInfo:
    return FileInfo(name, status.st_size, status.st_mtime_ns, "", local_files.state_of(status))


def _columns(names: Sequence[str], statuses: Sequence[os.stat_result | None]) -> FileColumns:
    sizes, mtimes, states = local_files.numbers_of(statuses)
    return FileColumns(names, sizes, mtimes, [""] * len(names), states)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _again_if_swept(action: Callable[[], Result]) -> Result:
    """Retry an action if another process removed or filled a folder meanwhile."""
    for _ in range(SWEEPS):
        try:
            return action()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
    return action()
