"""Stored rows for tests that read nothing: arrays, and what a catalogue has of a shard."""

from pathlib import Path
from typing import Any

import numpy as np

from precache.storage.local import LocalFolder
from precache.store.layout import MISSING, RowShape, decode_index
from precache_workers.planning.catalogue import StoredArray, StoredRows

SHAPE = RowShape((3, 8, 8), "uint8")


def stored_array(version: str = "version", **options: Any) -> StoredArray:
    """An array of 100 rows in shards of 4, with all two ops of its field, unless told otherwise."""
    given = {
        "folder": LocalFolder(Path("/nowhere", version)), "name": "image",
        "shape": SHAPE, "rows": 100, "rows_per_shard": 4, "applied": 2,
        "finished": options.get("applied", 2) == 2, "encoded": options.get("applied", 2) == 2,
    }  # fmt: skip
    return StoredArray(**{**given, **options})


def shard_rows(**options: Any) -> StoredRows:
    """Four rows of two fields, all stored in the first shard of an array each, and known."""
    arrays = [stored_array(), stored_array(name="mask")]
    fields = {
        name: np.array([[number, row, 0] for row in range(4)], np.int32)
        for number, name in enumerate(("image", "mask"))
    }
    given = {
        "arrays": arrays, "fields": fields,
        "content": np.array([[0, row + 1] for row in range(4)], np.uint64),
        "known": np.ones(4, np.bool_), "holes": {},
    }  # fmt: skip
    return StoredRows(**{**given, **options})


def checks_of(data: bytes, chunks: int) -> np.ndarray:
    """The last bytes of each chunk of a shard: (chunks,) uint32, 0 where it has none."""
    index = decode_index(data[-(16 * chunks + 4) :], chunks).tolist()
    ends = [b"" if at == MISSING else data[at + size - 4 : at + size] for at, size in index]
    return np.array([int.from_bytes(end, "little") for end in ends], np.uint32)
