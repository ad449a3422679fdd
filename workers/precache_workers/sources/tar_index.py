"""Indexes of tar archives in the format of NVIDIA DALI's ``wds2idx``: hints where headers are.

``train-0001.idx`` lies beside ``train-0001.tar``. Each line after the first lists the members of a
sample: the suffix of each member, the offset and size of its data, and from version 1.2 on its
name. The index allows the headers between large members to be requested in parallel. The members
of an archive always come from its headers: an old, wrong or forged index only costs requests.
"""

from __future__ import annotations

import re

from precache.errors import StorageError
from precache.storage.base import FileInfo, Folder
from precache_workers.sources.file_ranges import BLOCK_BYTES
from precache_workers.sources.tar_members import BLOCK

_PLACE = re.compile(rb" (\d{1,18}) (\d{1,18})(?=[ \r\n]|$)")

LARGE_BYTES = 1 << 20
"""Bytes of a large member: reading it takes far longer than a request for the next header."""

MOST_INDEX = 4 << 20
"""Most bytes of an index that are read, enough for some 60,000 members."""


def between_members(folder: Folder, file: FileInfo) -> list[tuple[int, int]]:
    """Return (start, end) of each part of an archive between large members, from its index.

    The list is empty if the archive is local, small or compressed, or has no index.
    """
    name = file.name.removesuffix(".tar")
    if folder.local("") is not None or file.size <= BLOCK_BYTES or name == file.name:
        return []
    try:
        index = folder.read_first(f"{name}.idx", MOST_INDEX)
    except StorageError:
        return []
    places = (map(int, match.groups()) for match in _PLACE.finditer(index))
    parts, start = [], 0
    for offset, size in sorted((at, size) for at, size in places if size >= LARGE_BYTES):
        if start < offset and offset + size <= file.size:
            parts.append((start, offset))
            start = offset + (size + BLOCK - 1) // BLOCK * BLOCK
    return [*parts, (start, file.size)] if parts else []
