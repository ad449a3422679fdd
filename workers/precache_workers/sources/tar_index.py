"""Indexes beside tar archives, as ``wds2idx`` of NVIDIA DALI writes them: where headers may be.

``train-0001.idx`` lies beside ``train-0001.tar``. After its first line each one has the members of
a sample: of each its suffix, the offset and the size of its data, and from version 1.2 on its name.
Headers of large members are requested side by side by it. What an archive has is what its headers
say: an index that is old, wrong or forged costs requests, and nothing else.
"""

from __future__ import annotations

import re

from precache.errors import StorageError
from precache.storage.base import FileInfo, Folder
from precache_workers.sources.file_ranges import BLOCK_BYTES
from precache_workers.sources.tar_members import padded

_PLACE = re.compile(rb" (\d{1,18}) (\d{1,18})(?=[ \r\n]|$)")

LARGE_BYTES = 1 << 20
"""Bytes of a member that takes far longer to read than a request for the header behind it."""

MOST_INDEX = 4 << 20
"""Bytes of an index that are read: those of some 60,000 members."""


def between_members(folder: Folder, file: FileInfo) -> list[tuple[int, int]]:
    """Return start and end of the parts of an archive that its index leaves between large members.

    Empty if the archive is local, small or compressed, or has no index.
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
            start = offset + padded(size)
    return [*parts, (start, file.size)] if parts else []
