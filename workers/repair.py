"""Objects that several versions of a store have in common: mended in one, they are in all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import xxhash

from precache.commits import BUILD
from precache.errors import DamageError, StorageError, StoreError
from precache.folder import Folder
from precache.store import open_own
from workers.goal import SCRATCH, Goal
from workers.reuse import committed

Lost = Mapping[tuple[str, int], tuple[int, int]]
"""(field, shard) -> size and XXH3-64."""


def take_from_twins(store: Folder, goal: Goal, lost: Lost) -> list[tuple[str, int]]:
    """Put lost objects of a version that another has whole; returns which."""
    found = []
    for (field, shard), made in lost.items():
        name = goal.object_name(field, shard)
        for twin in _twins(store, goal, field, shard, made):
            if _is_whole(twin, name, made):
                goal.folder.copy(name, twin, name, scratch=SCRATCH)
                found.append((field, shard))
                break
    return found


def give_to_twins(store: Folder, goal: Goal, mended: Lost) -> list[str]:
    """Put objects that were made again where other versions have the same ones damaged.

    Returns the ids of these versions.
    """
    found = set()
    for (field, shard), made in mended.items():
        name = goal.object_name(field, shard)
        for twin in _twins(store, goal, field, shard, made):
            if not _is_one_file(twin, goal.folder, name) and not _is_whole(twin, name, made):
                twin.copy(name, goal.folder, name, scratch=SCRATCH)
                twin.remove(SCRATCH)
                if not twin.names(BUILD):
                    twin.remove(BUILD)
                found.add(twin.name)
    return sorted(found)


def _twins(
    store: Folder, goal: Goal, field: str, shard: int, made: tuple[int, int]
) -> Iterator[Folder]:
    """Other versions whose records name the same object."""
    for folder, attributes in committed(store):
        if folder.name == goal.version or field not in attributes.fields:
            continue
        try:
            table = open_own(folder).shard_table(field)
        except (DamageError, StorageError, StoreError):
            continue  # `verify` says why
        if table is not None and shard < len(table) and tuple(table[shard].tolist()) == made:
            yield folder


def _is_one_file(one: Folder, other: Folder, name: str) -> bool:
    here, there = one.local(name), other.local(name)
    return bool(here and there and here.exists() and here.samefile(there))


def _is_whole(folder: Folder, name: str, made: tuple[int, int]) -> bool:
    if folder.size(name) != made[0]:
        return False
    try:
        return xxhash.xxh3_64_intdigest(folder.read(name)) == made[1]
    except StorageError:
        return False
