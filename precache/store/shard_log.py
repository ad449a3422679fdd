"""The log of the shards that a build has finished, in that order: what a training may read already.

Entries are objects of ``_build/finished``, numbered from 0, created once and never changed; each
lists some shards. Who follows a log says so before its build commits: then all of it is kept in the
store, beside the version, whose own bytes tell nothing of what was finished when.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from precache.errors import StorageError
from precache.storage.base import Folder
from precache.store.attributes import refuse
from precache.store.commit_log import BUILD
from precache.store.receipts import Receipt

FINISHED = f"{BUILD}/finished"

FATE = f"{BUILD}/fate"
"""Object that is created once: by who follows, or by the build when it commits first."""

FOLLOWED, CLOSED = b"followed", b"closed"

KEPT = "_followed"
"""Folder of a store with the logs that were followed."""

_U64 = Annotated[int, Field(ge=0, lt=2**64)]
_Label = Annotated[int, Field(ge=-1, lt=2**63)]


class Finished(BaseModel):
    """A shard that can be read.

    Attributes
    ----------
    objects
        Field -> bytes and XXH3-64 of its object.
    holes
        Row number -> why it is one.
    labels
        Of its rows, where the source tells a label only with the sample.
    """

    model_config = ConfigDict(frozen=True)

    shard: NonNegativeInt
    objects: Mapping[str, tuple[_U64, _U64]]
    holes: Mapping[NonNegativeInt, str] = {}
    labels: tuple[_Label, ...] | None = None

    @classmethod
    def of(cls, receipt: Receipt) -> Finished:
        """What a receipt says of its shard."""
        objects = {name: (each.size, each.xxh3) for name, each in receipt.objects.items()}
        labels = None if receipt.labels is None else tuple(receipt.labels)
        return cls(shard=receipt.shard, objects=objects, holes=dict(receipt.holes), labels=labels)


_ENTRY = TypeAdapter(list[Finished])


def entry_name(number: int) -> str:
    """Name of an entry below the version's folder."""
    return f"{FINISHED}/{number:06d}.json"


def to_entry(shards: Iterable[Finished]) -> bytes:
    """An entry's bytes."""
    return json.dumps([each.model_dump(exclude_defaults=True) for each in shards]).encode()


def from_entry(data: bytes, where: str) -> list[Finished]:
    """Read what `to_entry` wrote; a `StoreError` where it is not that.

    An empty one was being created by a process that was killed: it lists nothing.
    """
    try:
        return _ENTRY.validate_json(data or b"[]")
    except ValidationError as error:
        raise refuse(error, where) from None


def read_entries(version: Folder, start: int) -> list[list[Finished]]:
    """The entries of a version's log from a number on; mostly one request."""
    first = version.get(entry_name(start))
    if first is None:
        return []
    found = [from_entry(first, version.path(entry_name(start)))]
    last = max([int(name[:6]) for name in version.names(FINISHED) if name[:6].isdigit()], default=0)
    names = [entry_name(number) for number in range(start + 1, last + 1)]
    for name, data in zip(names, version.read_many(names, [-1] * len(names)), strict=True):
        if isinstance(data, StorageError):
            break  # gone with its build's commit
        found.append(from_entry(data, version.path(name)))
    return found


def kept_name(version: str) -> str:
    """Name of a log that was followed, below the store's folder."""
    return f"{KEPT}/{version}.json"


def follow_log(version: Folder) -> bool:
    """Have the log of a build under way kept; False where it is too late for that."""
    return version.create(FATE, [FOLLOWED]) or version.get(FATE) == FOLLOWED


def close_log(version: Folder, scratch: str) -> bool:
    """Let nobody begin to follow; whether somebody does already."""
    return not version.create(FATE, [CLOSED], scratch) and version.get(FATE) == FOLLOWED
