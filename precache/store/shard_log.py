"""The log of the shards that a running build has finished, which a training can read already.

Entries are objects of ``_build/finished``, numbered from 0, created once and never changed; each
lists some shards. A process that follows a log records that before its build commits: then the
whole log is kept in the store beside the version, which does not itself store the order in which
its shards were finished.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from precache.errors import StorageError
from precache.storage.base import Folder
from precache.store.commit_log import BUILD
from precache.store.json_documents import document_error
from precache.store.receipts import Receipt

FINISHED_FOLDER = f"{BUILD}/finished"

LOG_STATE = f"{BUILD}/fate"
"""Object created once, as `FOLLOWED` by the first follower or as `CLOSED` by the build's commit."""

FOLLOWED, CLOSED = b"followed", b"closed"

FOLLOWED_FOLDER = "_followed"
"""Folder of a store with the logs that were followed."""

_U64 = Annotated[int, Field(ge=0, lt=2**64)]
_Label = Annotated[int, Field(ge=-1, lt=2**63)]


class FinishedShard(BaseModel):
    """A shard that can be read.

    Attributes
    ----------
    objects
        Field -> size and XXH3-64 of its object.
    holes
        Row number -> why it is a hole.
    labels
        Labels of its rows, if the source gives labels only with samples.
    """

    model_config = ConfigDict(frozen=True)

    shard: NonNegativeInt
    objects: Mapping[str, tuple[_U64, _U64]]
    holes: Mapping[NonNegativeInt, str] = {}
    labels: tuple[_Label, ...] | None = None

    @classmethod
    def of(cls, receipt: Receipt) -> FinishedShard:
        """Make the entry of a receipt's shard."""
        objects = {name: (stored.size, stored.xxh3) for name, stored in receipt.objects.items()}
        labels = None if receipt.labels is None else tuple(receipt.labels)
        return cls(shard=receipt.shard, objects=objects, holes=dict(receipt.holes), labels=labels)


_ENTRY = TypeAdapter(list[FinishedShard])


def entry_name(number: int) -> str:
    """Name of an entry below the version's folder."""
    return f"{FINISHED_FOLDER}/{number:06d}.json"


def to_entry(shards: Iterable[FinishedShard]) -> bytes:
    """Serialise an entry."""
    return json.dumps([shard.model_dump(exclude_defaults=True) for shard in shards]).encode()


def from_entry(data: bytes, where: str) -> list[FinishedShard]:
    """Parse the output of `to_entry`; raise a `StoreError` for anything else.

    An empty entry lists nothing: the process that created it was killed.
    """
    try:
        return _ENTRY.validate_json(data or b"[]")
    except ValidationError as error:
        raise document_error(error, where) from None


def read_entries(version: Folder, start: int) -> list[list[FinishedShard]]:
    """Read the entries of a version's log from a number on; mostly one request."""
    first = version.get(entry_name(start))
    if first is None:
        return []
    entries = [from_entry(first, version.path(entry_name(start)))]
    last = max(
        [int(name[:6]) for name in version.names(FINISHED_FOLDER) if name[:6].isdigit()], default=0
    )
    names = [entry_name(number) for number in range(start + 1, last + 1)]
    for name, data in zip(names, version.read_many(names, [-1] * len(names)), strict=True):
        if isinstance(data, StorageError):
            break  # removed by the build's commit
        entries.append(from_entry(data, version.path(name)))
    return entries


def followed_log_name(version: str) -> str:
    """Name of a followed log below the store's folder."""
    return f"{FOLLOWED_FOLDER}/{version}.json"


def follow_log(version: Folder) -> bool:
    """Ask a running build to keep its log; return False if it has committed already."""
    return version.create(LOG_STATE, [FOLLOWED]) or version.get(LOG_STATE) == FOLLOWED


def close_log(version: Folder, scratch: str) -> bool:
    """Prevent new followers; return whether the log is followed already."""
    return not version.create(LOG_STATE, [CLOSED], scratch) and version.get(LOG_STATE) == FOLLOWED
