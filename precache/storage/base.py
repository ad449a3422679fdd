"""The interface of a folder of bytes, local or remote: read, put atomically, create only, list.

Names are POSIX paths relative to the folder, without empty parts, ``.`` and ``..``; an empty name
is the folder's own. Any other is refused, wherever it comes from, so that nothing outside of a
folder is reached through it. What a file system raises leaves its folder as `StorageError`, with
the path and the way out.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from precache.errors import StorageError

Buffer = bytes | bytearray | memoryview

READ_TOGETHER = FILES_AT_ONCE = 256
"""Small objects that are read at a time; files that a walk describes at a time."""

Range = tuple[str, int, int]
"""Name of an object, first byte, number of bytes."""

Part = tuple[str, int, int | None]
"""Name of an object, first byte, end; None for that of the object."""


LONGEST_NAME = 4095
"""Characters; no disk takes more (PATH_MAX of Linux), and no service."""

MOST_DOCUMENT, MOST_SMALL = 256 << 20, 4 << 30
"""Most bytes of a JSON document, and of any other object that is neither a shard nor a sample: the
row table of fifty million rows has as many."""

_NAME = re.compile(r"(?!\.\.?(?:/|\Z))[^/\0]+(?:/(?!\.\.?(?:/|\Z))[^/\0]+)*")

LINK_OUT, LINK_TWICE, NO_FILE, NO_NAME = "link_out", "link_twice", "no_file", "no_name"
LINK_AGAIN = "link_again"
SERVICE_FOLDER, HIDDEN_FILE = "service_folder", "hidden_file"
"""Reasons to leave out a name in a walk: a link out of the folder; a second link to one folder; a
FIFO, socket, device or a link in an archive; a name with an empty part, ``.`` or ``..``; a link to
a container that is taken by another name; an image below a hidden folder, or one that a system or
program made; an image whose name begins with a dot."""

NOT_UTF8, REPEATED, SAME_KEY = "not_utf8", "repeated", "same_key"
BAD_LABEL = "bad_label"
"""Reasons to leave out a sample of a listing: a name that is not UTF-8; a row that repeats
another; samples of one key, of which none is taken; a label that cannot be read, or labels that
contradict each other."""

BAD_SAMPLES = (NOT_UTF8, REPEATED, SAME_KEY, BAD_LABEL)
"""Reasons that count as failures of samples."""

_LEFT_OUT_AS = {
    LINK_OUT: "links that lead out of it (--follow-links takes what they lead to)",
    LINK_TWICE: "links, below another link, to folders that a link led to before",
    LINK_AGAIN: "links to files that are read by another name",
    NO_FILE: "FIFOs, sockets, devices, files of the kernel, sparse files or links in an archive "
    "(pack what they lead to, and no holes: tar --dereference --hard-dereference, without "
    "--sparse)",
    NO_NAME: "with an empty part, '.', '..' or, in S3 or Azure, control characters in their names "
    "(rename them)",
    SERVICE_FOLDER: "images in hidden folders, or folders of a system or program (to read them, "
    "name such a folder as the source, or pack them anew)",
    HIDDEN_FILE: "hidden images, as in a trash (to read them, rename them without the dot)",
    NOT_UTF8: "whose names are not UTF-8, as keys are (rename them, or save a table as UTF-8)",
    REPEATED: "that repeat another row, of the same file and label (remove them, or name samples "
    "by --key-column)",
    SAME_KEY: "that share their keys with others, so that none of these is taken (rename them, or "
    "remove all but one)",
    BAD_LABEL: "whose .cls members differ, are not UTF-8 or too long (correct them; of a.cls and "
    "a.b.cls, --sample-name last-dot takes the first)",
}


def left_out_text(left_out: Mapping[str, int], examples: Mapping[str, str] | None = None) -> str:
    """Describe what a walk or a listing left out, as the end of a sentence; empty if nothing.

    Parameters
    ----------
    examples
        Reason -> name of a sample that was left out.
    """
    such_as = {reason: f", such as {name}" for reason, name in (examples or {}).items()}
    parts = [
        f"{count:,} {_LEFT_OUT_AS[reason]}{such_as.get(reason, '')}"
        for reason, count in sorted(left_out.items())
    ]
    return f"; left out: {', '.join(parts)}" if parts else ""


LeaveOut = Callable[[str, str], None]
"""Called with each name that a walk leaves out (of a folder, with a slash at its end) and why."""


def ignore_left_out(name: str, reason: str) -> None:
    """Ignore what a walk leaves out."""


def is_name(name: str) -> bool:
    """Return True if a name is valid below a folder."""
    return len(name) <= LONGEST_NAME and _NAME.fullmatch(name) is not None


def checked(name: str, folder: object) -> str:
    """Return the name if it is valid.

    Raises
    ------
    StorageError
        It would lead out of the folder, or is no name.
    """
    if is_name(name):
        return name
    raise refused(name, folder)


def refused(name: str, folder: object) -> StorageError:
    """Return the error for an invalid name."""
    shown = repr(name if len(name) <= 100 else f"{name[:100]}…")
    return StorageError(
        f"{shown} is no name below {folder}: it must be relative, of at most {LONGEST_NAME} "
        "characters, without a zero byte and without empty parts, '.' or '..'"
    )


def required(content: bytes | StorageError) -> bytes:
    """Return bytes that were read, or raise the error that came in their place."""
    if isinstance(content, StorageError):
        try:
            raise content
        finally:
            del content  # else this frame keeps the error and its callers alive
    return content


def most_bytes(name: str) -> int:
    """Return the limit of bytes for an object of unknown size; see `MOST_DOCUMENT`."""
    return MOST_DOCUMENT if name.endswith(".json") else MOST_SMALL


def too_large_text(name: str, size: int | None = None) -> str:
    """Describe an object of more bytes than `most_bytes`."""
    has = "it has" if size is None else f"it has {size:,} bytes,"
    return (
        f"{has} more than the {most_bytes(name):,} bytes that such an object has at most: it is "
        "damaged or forged; remove it"
    )


NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a file system for a name at which nothing can be."""


def is_missing(error: StorageError) -> bool:
    """Return True if an object could not be read because it does not exist."""
    cause = error.__cause__
    return isinstance(cause, FileNotFoundError) or (
        isinstance(cause, OSError) and cause.errno in NOT_THERE
    )


class FileInfo(NamedTuple):
    """One file below a folder.

    Attributes
    ----------
    name
        POSIX path below the folder.
    size
        Bytes; -1 where unknown.
    mtime_ns
        Of its last change, nanoseconds since 1970; -1 where unknown.
    etag
        Identifies the contents: the service's entity tag or generation; may be empty.
    file_state
        Digest (int63) of the ctime of a file on a local disk, and of its inode number where that
        lasts; -1 elsewhere.
    """

    name: str
    size: int
    mtime_ns: int
    etag: str = ""
    file_state: int = -1


class FileColumns(NamedTuple):
    """Some files below a folder, by column: see `FileInfo`; numbers are int64."""

    names: Sequence[str]
    sizes: np.ndarray
    mtimes: np.ndarray
    etags: Sequence[str]
    file_states: np.ndarray


class Folder(ABC):
    """A folder; `str` of it is its path or URL, without credentials. Pickles small.

    A disk and a remote service each define the abstract methods; all others follow from these.
    """

    # --- defined by each ------------------------------------------------------------------------

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of its path."""

    @abstractmethod
    def path(self, name: str) -> str:
        """Path or URL of what lies at `name`, for messages."""

    @abstractmethod
    def folder(self, name: str) -> Folder:
        """The folder at `name`."""

    @abstractmethod
    def info(self, name: str) -> FileInfo | None:
        """Describe an object as `walk` does; None where there is none."""

    @abstractmethod
    def is_folder(self, name: str = "") -> bool:
        """Return True if there is a folder at `name`; a remote one holds something."""

    @abstractmethod
    def read_parts(
        self, parts: Sequence[Part], least: Sequence[int], *, whole: bool = False
    ) -> list[bytes | StorageError]:
        """Return parts of objects, in order; reads as many at a time as suit the service.

        Parameters
        ----------
        least
            Bytes that each has at least; what arrives shorter is fetched again. -1 if unknown.
        whole
            All begin at the first byte, of objects of unknown size.
        """

    @abstractmethod
    def names(self, name: str = "", *, first: bool = False) -> list[str]:
        """Names directly below `name`, sorted; none where it does not exist.

        Parameters
        ----------
        first
            Of a remote folder only those that one request lists.
        """

    @abstractmethod
    def walk(self, leave_out: LeaveOut = ignore_left_out) -> Iterator[FileInfo]:
        """Every object below the folder, in no particular order.

        Parameters
        ----------
        leave_out
            Called for each name that is no object of this folder.
        """

    @abstractmethod
    def put(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> None:
        """Write an object whole or not at all, durable when this returns.

        Parameters
        ----------
        parts
            Its bytes, one buffer after another.
        scratch
            Folder for a temporary file where one is needed, on the same file system; the object's
            own by default.
        """

    @abstractmethod
    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        """Write an object that must not exist yet, whole or not at all; False where it exists.

        If several processes create one object, one succeeds. In a bucket all that create the same
        bytes succeed, since a request is retried if its answer is lost. The bytes must not be
        empty: without hard links, an empty file marks one in creation.
        """

    @abstractmethod
    def copy(
        self,
        name: str,
        origin: Folder,
        source: str,
        scratch: str | None = None,
        *,
        create: bool = False,
    ) -> bool:
        """Copy an object of another folder, if possible without reading its bytes.

        On one local disk the copy is a hard link; a service copies between its own folders.

        Parameters
        ----------
        create
            Leave an object that exists as it is, and return False. If several processes create one
            object, at most one succeeds: none if an answer is lost and its request is retried.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object or a folder and all below it; nothing where there is none."""

    def walk_columns(self, leave_out: LeaveOut = ignore_left_out) -> Iterator[FileColumns]:
        """As `walk`, `FILES_AT_ONCE` files at a time, or fewer."""
        walk = self.walk(leave_out)
        while some := list(itertools.islice(walk, FILES_AT_ONCE)):
            names, *numbers, etags, states = zip(*some, strict=True)
            sizes, mtimes, file_states = (np.array(of, np.int64) for of in (*numbers, states))
            yield FileColumns(names, sizes, mtimes, etags, file_states)

    # --- of a disk alone ------------------------------------------------------------------------

    def local(self, name: str) -> Path | None:
        """Return the path of an object on a local disk; None if it lies elsewhere.

        The path may be a link to anywhere; read the object by `open`.
        """
        return None

    def open(self, name: str) -> int | None:
        """Open an object on a local disk, to be mapped; None if it lies elsewhere."""
        return None

    def free_bytes(self) -> int | None:
        """Space left where the folder is, or will be; None where there is no such limit."""
        return None

    # --- derived --------------------------------------------------------------------------------

    def kind(self) -> str | None:
        """``folder``, ``file``, or None where there is neither."""
        file = self.info("")
        return "folder" if self.is_folder() else "file" if file else None

    def is_link(self, name: str) -> bool:
        """Return True if a name is a symbolic link on a local disk; False in a bucket."""
        path = self.local(name)
        return path is not None and os.path.islink(path)  # noqa: PTH114 - a Path raises for long names

    def remove_if_empty(self, name: str) -> None:
        """Remove a folder if it is empty; a bucket has no folders."""
        path = self.local(name)
        if path is not None:
            with contextlib.suppress(OSError):  # there is none, or something is in it
                path.rmdir()

    def exists(self, name: str = "") -> bool:
        """Return True if there is an object or a folder at `name`."""
        return self.info(name) is not None or self.is_folder(name)

    def size(self, name: str) -> int | None:
        """Bytes of an object, or None where there is none."""
        info = self.info(name)
        return None if info is None else max(0, info.size)

    def sizes(self, name: str = "") -> dict[str, int]:
        """Name -> bytes of every object below `name`, from one listing; -1 on the web."""
        prefix = f"{name}/" if name else ""
        return {f"{prefix}{info.name}": info.size for info in self.folder(name).walk()}

    def read(self, name: str) -> bytes:
        """The whole object."""
        return required(*self.read_parts([(name, 0, None)], [-1]))

    def get(self, name: str) -> bytes | None:
        """A small object, or None where there is none."""
        try:
            return required(*self.read_small([name]))
        except StorageError as error:
            if is_missing(error):
                return None
            raise

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes | StorageError]:
        """Return whole objects, in order.

        Parameters
        ----------
        sizes
            Sizes by a listing, -1 for a small object of unknown size. Of an object that has grown,
            one byte more is read.
        """
        # With a range, no library asks for the size first; one byte more tells what has grown.
        most = [
            most_bytes(name) if size < 0 else size for name, size in zip(names, sizes, strict=True)
        ]
        parts = [(name, 0, limit + 1) for name, limit in zip(names, most, strict=True)]
        whole = any(size < 0 for size in sizes)
        # No name here for an error that is returned: it would keep all callers alive.
        return [
            self._too_large(name)
            if size < 0 and not isinstance(got, StorageError) and len(got) > limit
            else got
            for name, size, limit, got in zip(
                names, sizes, most, self.read_parts(parts, sizes, whole=whole), strict=True
            )
        ]

    def read_small(self, names: Sequence[str]) -> Iterator[bytes | StorageError]:
        """Yield small objects of unknown sizes, in order; `READ_TOGETHER` are held at a time."""
        for start in range(0, len(names), READ_TOGETHER):
            part = names[start : start + READ_TOGETHER]
            yield from self.read_many(part, [-1] * len(part))

    def _too_large(self, name: str) -> StorageError:
        return StorageError(f"cannot read {self.path(name)}: {too_large_text(name)}")

    def read_first(self, name: str, most: int) -> bytes:
        """Return the first `most` bytes of an object, even if the server sends more."""
        return required(*self.read_parts([(name, 0, most)], [-1], whole=True))

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        """Return parts of objects, in order.

        A range that ends beyond its object is shorter.
        """
        parts = [(name, start, start + length) for name, start, length in ranges]
        return self.read_parts(parts, [length for _, _, length in ranges])
