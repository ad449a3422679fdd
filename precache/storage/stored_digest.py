"""Compare a stored object with its recorded size and XXH3-64, piece by piece."""

from __future__ import annotations

import errno

import xxhash

from precache.errors import StorageError
from precache.storage.base import Folder, is_missing, required

PIECE_BYTES = 8 << 20
"""Bytes that are read at a time."""


def has_bytes(folder: Folder, name: str, size: int, xxh3: int) -> bool:
    """Return whether an object has this size and XXH3-64; False where it is missing.

    It is read, not mapped, since a file that is cut short meanwhile would kill the process.

    Raises
    ------
    StorageError
        It cannot be read for another reason than a failing disk.
    """
    digest = xxhash.xxh3_64()
    try:
        if folder.size(name) != size:
            return False
        for start in range(0, size, PIECE_BYTES):
            part = name, start, min(PIECE_BYTES, size - start)
            digest.update(required(*folder.read_ranges([part])))
    except StorageError as error:
        cause = error.__cause__
        if is_missing(error) or (isinstance(cause, OSError) and cause.errno == errno.EIO):
            return False
        raise
    return digest.intdigest() == xxh3
