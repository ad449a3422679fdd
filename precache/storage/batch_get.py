"""Objects of a folder that are read together before anyone asks for them one after another."""

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


class Ahead:
    """A folder far away, where each question costs a round trip: some answers are here already.

    Each is given once; who asks again asks the folder.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._found: dict[str, bytes | StorageError] = {}

    def path(self, name: str) -> str:
        return self._folder.path(name)

    def bring(self, names: Iterable[str]) -> None:
        """Read objects in one go, those that may be missing among them."""
        wanted = [name for name in dict.fromkeys(names) if name not in self._found]
        read = self._folder.read_many(wanted, [-1] * len(wanted))
        self._found.update(zip(wanted, read, strict=True))

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes | StorageError]:
        asked = [number for number, name in enumerate(names) if name not in self._found]
        read = self._folder.read_many([names[n] for n in asked], [sizes[n] for n in asked])
        anew = dict(zip(asked, read, strict=True))
        return [anew[n] if n in anew else self._found.pop(name) for n, name in enumerate(names)]
