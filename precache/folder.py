"""What a folder of bytes can do, wherever it lies: read, put atomically, create only, list.

Names are POSIX paths relative to the folder. What a file system raises leaves its folder as
`StorageError`, with the path and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from precache.errors import StorageError

Buffer = bytes | bytearray | memoryview

Range = tuple[str, int, int]
"""Name of an object, first byte, number of bytes."""


def is_missing(error: StorageError) -> bool:
    """Whether an object could not be read because there is none."""
    return isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)


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
        What its service says identifies the contents: an entity tag or a generation; may be empty.
    """

    name: str
    size: int
    mtime_ns: int
    etag: str = ""


class Folder(Protocol):
    """A folder; `str` of it is its path or URL, without credentials. Pickles small."""

    @property
    def name(self) -> str:
        """The last part of its path."""

    def path(self, name: str) -> str:
        """Path or URL of what lies at `name`, for messages."""

    def local(self, name: str) -> Path | None:
        """Where an object lies on a local disk, to be mapped; None where it does not."""

    def folder(self, name: str) -> Folder:
        """The folder at `name`."""

    def kind(self) -> str | None:
        """``folder``, ``file``, or None where there is neither."""

    def exists(self, name: str = "") -> bool:
        """Whether there is an object, or a folder, at `name`."""

    def size(self, name: str) -> int | None:
        """Bytes of an object, or None where there is none."""

    def read(self, name: str) -> bytes:
        """The whole object."""

    def get(self, name: str) -> bytes | None:
        """The whole object, or None where there is none."""

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes | StorageError]:
        """Whole objects, in order, as many at a time as the service likes.

        Parameters
        ----------
        sizes
            What a listing said, -1 for unknown; an object that comes shorter is fetched again, and
            of one that has grown one byte more than that is read.
        """

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        """Parts of objects, in order, as many at a time as the service likes.

        One that ends beyond its object comes shorter.
        """

    def names(self, name: str = "") -> list[str]:
        """Names directly below `name`, sorted; none where it does not exist."""

    def sizes(self, name: str = "") -> dict[str, int]:
        """Name -> bytes of every object below `name`, from one listing."""

    def walk(self) -> Iterator[FileInfo]:
        """Every file below the folder, in no particular order."""

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

    def copy(
        self,
        name: str,
        origin: Folder,
        source: str,
        scratch: str | None = None,
        *,
        create: bool = False,
    ) -> bool:
        """Put an object that another folder has, without its bytes passing through here if it can.

        On one local disk both are names of the same bytes; a service copies by itself.

        Parameters
        ----------
        create
            Leave an object that exists as it is, and return False. A service that copies by itself
            is asked first whether there is one: of two who copy at once, both may succeed.
        """

    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        """Write an object that must not exist yet, whole or not at all; False where it exists.

        Of several who create one object, one succeeds. In a bucket whoever creates the same bytes
        succeeds as well: an answer may get lost, so that its request is made again. Bytes must not
        be empty: on a disk that knows no other way, an empty file marks one that is being created.
        """

    def remove(self, name: str) -> None:
        """Remove an object or a folder and all below it; nothing where there is none."""

    def free_bytes(self) -> int | None:
        """Space left where the folder is, or will be; None where there is no such limit."""
