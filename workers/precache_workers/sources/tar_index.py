"""Indexes beside tar archives, as ``wds2idx`` of NVIDIA DALI writes them (version 1.2).

``train-0001.idx`` lies beside ``train-0001.tar``. Its first line has the version and the number of
samples; each further one has the members of a sample, each by its suffix, the offset and size of
its data, and its name, with spaces between all of them. An index may be out of date: what it names
is checked against the headers of the members that are read.
"""

from __future__ import annotations

import re

from precache.errors import StorageError
from precache.storage.base import FileInfo, Folder, required
from precache_workers.sources.file_ranges import read_parts
from precache_workers.sources.tar_members import BLOCK, Member, regular_name

_VERSION = re.compile(rb"v1\.2 \d+\n")
_MEMBER = re.compile(rb"([!-~]*) (\d{1,18}) (\d{1,18}) ([!-~]{1,100})(?: |\n)")
"""Names with spaces cannot be told apart, and headers alone do not have longer or foreign ones."""

MEMBERS_AT_A_TIME = 64
"""Members that are read at once; what lies between them may be read, too."""


def index_name(name: str) -> str:
    """Return the name of the index beside an archive."""
    return f"{name.removesuffix('.tar')}.idx"


def read_index(folder: Folder, file: FileInfo) -> bytes | None:
    """Return the index beside a remote archive, or None if there is none.

    A local archive is read itself: that takes no longer, and its headers have times.
    """
    if folder.local("") is not None or not file.name.endswith(".tar") or file.size < 0:
        return None
    try:
        return folder.read_first(index_name(file.name), file.size)
    except StorageError:
        return None


def indexed_members(folder: Folder, file: FileInfo, index: bytes) -> list[Member]:
    """Return the members that an index names, by offset; none if it does not fit its archive.

    Their time is -1, and their CRC-32 None.
    """
    members = sorted(_parse(index), key=lambda member: member.offset)
    ends = [0, *(member.offset + _padded(member.size) for member in members)]
    starts = [member.offset - BLOCK for member in members]
    apart = all(
        start >= end and start % BLOCK == 0 for start, end in zip(starts, ends, strict=False)
    )
    if not (members and apart and ends[-1] + BLOCK <= file.size):
        return []
    # One that grew, was cut off, or was written anew seldom ends in the same place.
    last, end = members[-1], ends[-1]
    header, rest = read_parts(folder, [(file.name, starts[-1], BLOCK), (file.name, end, BLOCK)])
    if regular_name(required(header), last.size) != last.name or rest != bytes(BLOCK):
        return []
    return members


def read_indexed(
    folder: Folder, file: FileInfo, members: list[Member], most: int
) -> dict[str, bytes] | None:
    """Return name -> contents of members, or None if one is not where its index has it.

    Parameters
    ----------
    most
        Bytes that a member has at most.
    """
    contents: dict[str, bytes] = {}
    for start in range(0, len(members), MEMBERS_AT_A_TIME):
        some = members[start : start + MEMBERS_AT_A_TIME]
        if any(member.size > most for member in some):
            return None
        parts = [(file.name, member.offset - BLOCK, BLOCK + member.size) for member in some]
        for member, data in zip(some, read_parts(folder, parts), strict=True):
            if regular_name(required(data)[:BLOCK], member.size) != member.name:
                return None
            contents[member.name] = required(data)[BLOCK:]
    return contents


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _parse(index: bytes) -> list[Member]:
    start = _VERSION.match(index)
    if start is None:
        return []
    members, offset = [], start.end()
    while offset < len(index):
        found = _MEMBER.match(index, offset)
        if found is None:
            return []
        suffix, place, size, name = found.groups()
        if not name.endswith(suffix):
            return []
        members.append(Member(name.decode(), int(size), -1, int(place), None, True))
        offset = found.end()
    return members
