"""Objects of a folder that are prefetched together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from precache.errors import StorageError
from precache.storage.base import Folder


class Readable(Protocol):
    """The part of `Folder` that reads objects by name."""

    def path(self, name: str) -> str: ...

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes | StorageError]:
        """Read whole objects; see `Folder.read_many`."""


class PrefetchedFolder:
    """A remote folder, some of whose objects are prefetched in one round trip.

    A prefetched object is returned once; it is read from the folder after that.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._prefetched: dict[str, bytes | StorageError] = {}

    def path(self, name: str) -> str:
        return self._folder.path(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Read objects together, some of which may be missing."""
        wanted = [name for name in dict.fromkeys(names) if name not in self._prefetched]
        read = self._folder.read_many(wanted, [-1] * len(wanted))
        self._prefetched.update(zip(wanted, read, strict=True))

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes | StorageError]:
        rest = [n for n, name in enumerate(names) if name not in self._prefetched]
        contents = self._folder.read_many([names[n] for n in rest], [sizes[n] for n in rest])
        read = dict(zip(rest, contents, strict=True))
        return [
            read[n] if n in read else self._prefetched.pop(name) for n, name in enumerate(names)
        ]
