"""The object of a field of which all rows are those of a base version: a link to its object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from precache.errors import StorageError
from precache.storage.base import Buffer, Folder
from precache_workers.planning.base_shard import BaseField
from precache_workers.planning.target_version import SCRATCH
from precache_workers.shards.base_rows import SpoiledBaseError
from precache_workers.shards.shard_objects import FinishedObject


@dataclass(frozen=True)
class LinkedObject(FinishedObject):
    """The base version's object, byte for byte.

    Attributes
    ----------
    parts
        Its bytes, where rows were encoded; else empty, and it is read if they are needed.
    """

    field: str
    base: BaseField
    reused: ClassVar[bool] = True

    def create(self, folder: Folder, name: str) -> bool:
        """Create the object as a link, or of its bytes; False where one exists.

        Raises
        ------
        SpoiledBaseError
            The base version's object is gone, and was not read before.
        """
        base = self.base
        try:
            return folder.copy(name, base.folder, base.object_name, scratch=SCRATCH, create=True)
        except StorageError as error:
            if not self.parts:
                raise SpoiledBaseError(self.field, error) from None
        return super().create(folder, name)

    def read(self) -> Sequence[Buffer]:
        """Return the bytes of the object, one buffer after another.

        Raises
        ------
        SpoiledBaseError
            The base version's object is gone or not what it was.
        """
        if self.parts:
            return self.parts
        try:
            data = self.base.folder.read(self.base.object_name)
        except StorageError as error:
            raise SpoiledBaseError(self.field, error) from None
        if xxhash.xxh3_128_intdigest(data) != self.stored.xxh3:
            raise SpoiledBaseError(self.field, f"{self.base.object_name} is not what it was")
        return [data]
