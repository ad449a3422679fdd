"""A shard of a base version: what a build may reuse of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from precache.storage.base import Folder
from precache.store.receipts import ChannelSums, ShardObject
from precache_workers.planning.field_match import FieldMatch


@dataclass(frozen=True)
class BaseField:
    """One object of a base version: the rows of a shard of one field, and their sums.

    Attributes
    ----------
    folder
        Folder of the version that has the object.
    row_shapes
        (rows, axes) int64 shapes of ragged rows; None for rows of one shape.
    """

    match: FieldMatch
    folder: Folder
    object_name: str
    stored: ShardObject
    sums: ChannelSums | None
    row_shapes: np.ndarray | None = None

    @property
    def object_id(self) -> tuple[str, str]:
        """Version and name of the object; variants may resume rows of the same one."""
        return self.folder.name, self.object_name


@dataclass(frozen=True)
class BaseShard:
    """A shard of a base version, row for row the beginning of the shard to be built.

    Attributes
    ----------
    same
        Whether the sample of each row has the identity that it had, or is removed as it was.
    content
        XXH3-128 (hex) of each raw sample, empty where there was none, or where it has to be tried
        again.
    holes
        Place in the shard -> reason.
    labels
        Labels of rows that came with their samples, which stay; -1 for none. Empty if others are
        known.
    retries
        Whether holes are tried again, and stay holes where their samples cannot be fetched.
    """

    fields: Mapping[str, BaseField]
    same: Sequence[bool]
    content: Sequence[str]
    holes: Mapping[int, str]
    labels: Sequence[int] = ()
    retries: bool = False

    @classmethod
    def empty(cls) -> BaseShard:
        """Return a base shard of which nothing can be reused."""
        return cls({}, (), (), {})

    def only(self, names: Collection[str]) -> BaseShard:
        """Return the shard with these fields alone."""
        return replace(self, fields={n: f for n, f in self.fields.items() if n in names})

    def without_object_of(self, name: str) -> BaseShard:
        """Return the shard without a field, and without those that resume the same object."""
        lost = self.fields[name].object_id
        return self.only([n for n, field in self.fields.items() if field.object_id != lost])

    def nbytes_of(self, names: Iterable[str]) -> int:
        """Bytes of the objects of some fields, each object counted once."""
        fields = [self.fields[name] for name in names]
        return sum({field.object_id: field.stored.size for field in fields}.values())
