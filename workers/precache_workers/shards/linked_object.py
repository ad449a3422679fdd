"""An object that another version stores, too: a link to its object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from precache.errors import StorageError
from precache.storage.base import Buffer, Folder
from precache.store.commit_log import ROOT
from precache.store.tree import seal_of
from precache_workers.planning.target_version import SCRATCH
from precache_workers.shards.shard_objects import FinishedObject
from precache_workers.shards.stored_rows import DamagedObjectError, StoredObject


@dataclass(frozen=True)
class LinkedObject(FinishedObject):
    """The object of another version, byte for byte.

    Attributes
    ----------
    parts
        Its bytes, where rows were encoded; else empty, and it is read if they are needed.
    """

    other: StoredObject
    reused: ClassVar[bool] = True

    def create(self, folder: Folder, name: str, require: Callable[[], None]) -> bool:
        """Create the object as a link, or of its bytes; False where one exists.

        Raises
        ------
        DamagedObjectError
            The object is gone, and was not read before; or another version of the
            same id has replaced that one, whose objects may have the same sizes.
        """
        other, array = self.other, self.other.array
        try:
            own = other.folder, other.leaf.name
            created = folder.copy(name, *own, scratch=SCRATCH, create=True)
        except StorageError as error:
            if not self.parts:
                raise DamagedObjectError(array, other.shard, error) from None
        else:
            if not created or seal_of(other.folder.get(ROOT) or b"") == array.edition:
                return created
            require()
            folder.remove(name)
            if not self.parts:
                why = f"{other.folder} was replaced"
                raise DamagedObjectError(array, other.shard, why)
        return super().create(folder, name, require)

    def read(self) -> Sequence[Buffer]:
        """Return the bytes of the object, one buffer after another.

        Raises
        ------
        DamagedObjectError
            The object is gone or not what it was.
        """
        if self.parts:
            return self.parts
        other = self.other
        try:
            data = other.folder.read(other.leaf.name)
        except StorageError as error:
            raise DamagedObjectError(other.array, other.shard, error) from None
        if xxhash.xxh3_128_intdigest(data) != self.stored.xxh3:
            why = f"{other.leaf.name} is not what it was"
            raise DamagedObjectError(other.array, other.shard, why)
        return [data]
