"""Folders of one user, or of a group that shares them, in which nothing is reached through links.

A folder is held by its descriptor and its files are opened relative to that, so a link in the place
of either is an error. A file counts only if it is a regular one with a single name: a hard link
would have a file elsewhere truncated or touched, and opening a FIFO would block.

A private folder (0700, files 0600, whatever the umask) belongs to this process's user, and so does
every file in it. A shared one (2770, files 0660) is open to its group, whose members trust each
other: each of them may read, replace and remove the files of all.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pwd
import stat
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path

from precache.errors import UsageError

PRIVATE_MODES = 0o700, 0o600
"""Modes of folders, and of files."""

SHARED_MODES = 0o2770, 0o660


class ForeignFile(OSError):
    """A file in the folder that is not the folder's own.

    Attributes
    ----------
    status
        As `os.lstat` gives it.
    """

    def __init__(self, path: Path, reason: str, status: os.stat_result) -> None:
        super().__init__(f"{path} {reason}, which precache did not make; remove it")
        self.status = status


class OwnFolder:
    """A folder, made if missing, and held open.

    Parameters
    ----------
    path
        Its last part must be no link.
    shared
        With the members of its group.
    within
        The folder that it is in; by default it is reached by its path.
    names
        Names that it may contain; by default any.

    Raises
    ------
    UsageError
        It is a link or a file, belongs to another user, is open to others than it is meant for,
        or has other files in it.
    """

    def __init__(
        self,
        path: Path,
        *,
        shared: bool = False,
        within: OwnFolder | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        self.path = path
        self._shared = shared
        mode, self._file_mode = SHARED_MODES if shared else PRIVATE_MODES
        where, place = (path.name, within._descriptor) if within else (path, None)
        try:
            os.mkdir(where, mode, dir_fd=place)
            os.chmod(where, mode, dir_fd=place)  # the umask took some of it
        except FileExistsError:
            pass
        try:
            self._descriptor: int = os.open(where, _FOLDER, dir_fd=place)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise UsageError(
                    f"{path} is a link or a file, where a folder belongs; remove it, or choose "
                    "another cache_dir"
                ) from None
            self._require_access(os.stat(where, dir_fd=place, follow_symlinks=False))
            raise
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        status = os.fstat(self._descriptor)
        self._require_access(status)
        if names is not None:
            self._require_only(names)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(self._descriptor, mode)
            for name in self.names():
                with contextlib.suppress(OSError):  # raised again when it is used
                    self.file(name).close()  # which sets its mode

    def _require_access(self, status: os.stat_result) -> None:
        mode, own = stat.S_IMODE(status.st_mode), status.st_uid == os.geteuid()
        if not own and not self._shared:
            raise UsageError(
                f"{self.path} belongs to {_user(status.st_uid)}, and this process runs as "
                f"{_user(os.geteuid())}; choose a cache_dir of your own, or share it by its group: "
                "cache_shared=True"
            )
        if own and not self._shared and mode == SHARED_MODES[0]:
            raise UsageError(
                f"{self.path} is shared by its group; give cache_shared=True, or choose another "
                "cache_dir"
            )
        if not own and (mode & 0o2070 != 0o2070 or mode & 0o002):
            raise UsageError(
                f"{self.path} belongs to {_user(status.st_uid)} and has mode {mode:04o}, where a "
                "cache that is shared by its group needs 2770; have its owner change that "
                "(chmod 2770), or choose another cache_dir"
            )

    def _require_only(self, names: Collection[str]) -> None:
        others = sorted(set(self.names()).difference(names))
        if others:
            raise UsageError(
                f"{self.path} has other files in it ({', '.join(map(repr, others[:3]))}), and a "
                "cache needs a folder of its own; choose another cache_dir"
            )

    def folder(self, name: str) -> OwnFolder:
        """A folder in it, made if missing."""
        return OwnFolder(self.path / name, shared=self._shared, within=self)

    def names(self) -> list[str]:
        """List the names of all entries."""
        return [entry.name for entry in self._entries()]

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Name and status of all that is in it but folders; a link's status is its own."""
        for entry in self._entries():
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield entry.name, status

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        # A descriptor of its own: others that list at the same time would share its position.
        descriptor = os.open(".", _FOLDER, dir_fd=self._descriptor)
        try:
            with os.scandir(descriptor) as entries:
                yield from entries
        finally:
            os.close(descriptor)

    def file(self, name: str, mode: str = "r") -> io.FileIO:
        """Open a file.

        Raises
        ------
        ForeignFile
            It is not a regular file, has several names, or belongs to another user.
        """
        return io.FileIO(name, mode, opener=self.descriptor_of)

    def descriptor_of(self, name: str, flags: int) -> int:
        """Open a file as `file` does, and return its descriptor."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, self._file_mode, dir_fd=self._descriptor)
        except FileNotFoundError:
            raise
        except OSError:
            self._require_own(name, self.status(name))  # which says more
            raise
        try:
            status = os.fstat(descriptor)
            self._require_own(name, status)
            wrong = stat.S_IMODE(status.st_mode) != self._file_mode
            if wrong and status.st_uid == os.geteuid():
                os.fchmod(descriptor, self._file_mode)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _require_own(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFile(self.path / name, "is no regular file", status)
        if status.st_nlink > 1:
            raise ForeignFile(self.path / name, "has other names (hard links)", status)
        if status.st_uid != os.geteuid() and not self._shared:
            owner = _user(status.st_uid)
            raise ForeignFile(self.path / name, f"belongs to {owner}", status)

    def status(self, name: str) -> os.stat_result:
        """Return the status of an entry; of a link, its own."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file or link, if it is there."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):  # the latter on macOS, for a folder
            if not stat.S_ISDIR((status := self.status(name)).st_mode):
                raise
            raise ForeignFile(self.path / name, "is a folder", status) from None

    def move(self, name: str, to: OwnFolder) -> None:
        """Move a file to another folder, in the place of what has its name there."""
        os.rename(name, name, src_dir_fd=self._descriptor, dst_dir_fd=to._descriptor)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
