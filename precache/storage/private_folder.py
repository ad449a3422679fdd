"""Folders of one user, in which nothing is reached through links.

A folder is held by its descriptor and its files are opened relative to that, so a link in the place
of either is an error. A file counts only if it is a regular one of this user with a single name: a
hard link would have a file elsewhere truncated or touched, and opening a FIFO would block.

A folder has mode 0700 and its files 0600, whatever the umask, so that nobody else puts files there.
A file that another user put there while the folder was open to others is not read.
"""

from __future__ import annotations

import errno
import io
import os
import pwd
import shlex
import stat
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path

from precache.errors import UsageError

FOLDER_MODE, FILE_MODE = 0o700, 0o600


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
    within
        The folder that it is in; by default it is reached by its path.
    names
        Names that it may contain; by default any.

    Raises
    ------
    UsageError
        It is a link or a file, belongs to another user, can be written by others, or has other
        files in it.
    """

    def __init__(
        self,
        path: Path,
        *,
        within: OwnFolder | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        self.path = path
        where, place = (path.name, within._descriptor) if within else (path, None)
        try:
            os.mkdir(where, FOLDER_MODE, dir_fd=place)
            os.chmod(where, FOLDER_MODE, dir_fd=place)  # the umask took some of it
        except FileExistsError:
            pass
        try:
            self._descriptor: int = os.open(where, _FOLDER, dir_fd=place)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise UsageError(
                    f"{path} is a link or a file, where a folder belongs; remove it, or choose "
                    "another folder for the cache"
                ) from None
            self._require_private(os.stat(where, dir_fd=place, follow_symlinks=False))
            raise
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        status = os.fstat(self._descriptor)
        self._require_private(status)
        if names is not None:
            self._require_only(names)
        if stat.S_IMODE(status.st_mode) != FOLDER_MODE:
            os.fchmod(self._descriptor, FOLDER_MODE)

    def _require_private(self, status: os.stat_result) -> None:
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid():
            raise UsageError(
                f"{self.path} belongs to {_user(status.st_uid)}, and this process runs as "
                f"{_user(os.geteuid())}; choose a folder of your own"
            )
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            command = f"chmod {FOLDER_MODE:o} {shlex.quote(str(self.path))}"
            raise UsageError(
                f"{self.path} has mode {mode:04o}, so that others can put files there, and a cache "
                f"belongs to one user; run {command}, or choose another folder for the cache"
            )

    def _require_only(self, names: Collection[str]) -> None:
        others = sorted(set(self.names()).difference(names))
        if others:
            raise UsageError(
                f"{self.path} has other files in it ({', '.join(map(repr, others[:3]))}), and a "
                "cache needs a folder of its own; choose another folder for the cache"
            )

    def folder(self, name: str) -> OwnFolder:
        """A folder in it, made if missing."""
        return OwnFolder(self.path / name, within=self)

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
            It is not a regular file, belongs to another user, or has several names.
        """
        return io.FileIO(name, mode, opener=self.descriptor_of)

    def descriptor_of(self, name: str, flags: int) -> int:
        """Open a file as `file` does, and return its descriptor."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, FILE_MODE, dir_fd=self._descriptor)
        except FileNotFoundError:
            raise
        except OSError:
            self._require_own(name, self.status(name))  # which says more
            raise
        try:
            status = os.fstat(descriptor)
            self._require_own(name, status)
            if stat.S_IMODE(status.st_mode) != FILE_MODE:
                os.fchmod(descriptor, FILE_MODE)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _require_own(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFile(self.path / name, "is no regular file", status)
        if status.st_uid != os.geteuid():
            raise ForeignFile(self.path / name, f"belongs to {_user(status.st_uid)}", status)
        if status.st_nlink > 1:
            raise ForeignFile(self.path / name, "has other names (hard links)", status)

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
