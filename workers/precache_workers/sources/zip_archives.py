"""Zip archives: a sample is an image, and its class the first folder of its name.

The identity of a sample is its size and the CRC-32 of its bytes from the archive's directory. If an
archive changes, only changed samples are fetched.

The directory is parsed here, entry by entry (PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.6 to 4.3.16
and 4.5.3), because Python's `zipfile` keeps about a kilobyte for each entry: a gigabyte for a
million of them.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from precache.errors import FetchError, SampleError, SourceError
from precache.messages import printable
from precache.storage.base import FileInfo, Folder
from precache.store.columns import GrowingTexts
from precache.store.locations import Container
from precache_workers.sources.base import (
    FILES_PER_TICK,
    Fetched,
    Sample,
)
from precache_workers.sources.containers import (
    CHECKSUM,
    Read,
    Rows,
    Wanted,
    file_names,
    read_places,
    rows_of,
    structs,
    units_of,
)
from precache_workers.sources.file_ranges import open_file, read_parts
from precache_workers.sources.listings import Members

STORED, DEFLATED, ENCRYPTED = 0, 8, -1
_METHODS = {1: "Shrink", 9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "XZ"}

_END = struct.Struct("<4s4H2LH")
_END_64_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")

GUESSED_NOTE = (
    "{count} names in zip archives are not UTF-8, and are read as code page 437: if classes are "
    "spelled wrong, pack the archives anew"
)

LEAST_PACKED = 1024
"""Packed data may exceed the unpacked size by so many bytes and 1% of that size."""

LONGEST_COMMENT = 0xFFFF
FULL_32 = 0xFFFFFFFF
EXTRA_BYTES = 64
"""Bytes of extra data that are read with a local header; some writers add more."""


class _Place(NamedTuple):
    """Place of a member: `offset` is that of its local header, `packed` the size of its data."""

    offset: int
    packed: int
    size: int
    crc: int
    method: int


_Entry = tuple[str, bool, bool, _Place]
"""Name; True for a file; True if the name is no UTF-8, and is read as code page 437; and place."""


@dataclass(frozen=True)
class ZipFormat:
    """Zip archives; see the module."""

    suffixes: tuple[str, ...] = (".zip",)
    columns: None = None
    checks_members: bool = True

    def places(self) -> Any:
        """Return the type of the places of members; an encrypted one has no method."""
        numbers = "offset", "packed", "size", "crc", "method"
        return pa.struct({name: pa.int64() for name in numbers})

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows | None]:
        where = folder.path(file.name)
        growing, numbers = GrowingTexts(), [np.zeros((5, 0), np.int64)]
        with open_file(folder, file) as stream:
            entries = _entries(stream, where, file.size)
            while some := list(itertools.islice(entries, FILES_PER_TICK)):
                listed, regular, guessed, places = zip(*some, strict=True)
                found = file_names(listed, np.array(regular), file.name, members)
                growing.extend(found.names.take(found.images))
                numbers.append(np.array(places).T[:, found.images])
                members.notes[GUESSED_NOTE] += int(np.array(guessed)[found.images].sum())
                yield None
        members.notes = +members.notes
        names, columns = growing.texts(), np.hstack(numbers)
        columns = columns[:, order := np.argsort(columns[0], kind="stable")]
        offsets, packed, sizes, crcs, _ = columns
        yield rows_of(
            names.take(order),
            structs(self.places(), [*columns]),
            units=units_of(offsets, packed),
            etags=[f"{CHECKSUM}{crc:08x}" for crc in crcs.tolist()],
            sizes=sizes,
        )

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        places = [_Place(**place) for _, place in wanted]
        if any(place.packed < 0 for place in places):
            return [None] * len(places)
        # The key contains the member's name, which is no longer in any other encoding.
        ranges = [
            (at.offset, _LOCAL.size + len(key.encode()) + EXTRA_BYTES + at.packed)
            for (key, _), at in zip(wanted, places, strict=True)
        ]

        def sample(number: int, data: bytes) -> Fetched | None:
            return _sample(folder, container.name, wanted[number][0], places[number], data)

        return read_places(folder, container, ranges, sample)


def _sample(folder: Folder, name: str, key: str, place: _Place, data: bytes) -> Fetched | None:
    if len(data) < _LOCAL.size or data[:4] != b"PK\3\4":
        return None
    _, _, flags, _, _, _, crc, _, _, name_length, extra_length = _LOCAL.unpack_from(data)
    start = _LOCAL.size + name_length + extra_length
    member, _ = _decoded(data[_LOCAL.size :][:name_length], flags)
    if member.removeprefix("./") != key[len(name) + 1 :]:
        return None
    if place.method not in (STORED, DEFLATED):
        kind = "encrypted"
        if place.method != ENCRYPTED:
            kind = f"compressed by {_METHODS.get(place.method, f'method {place.method}')}"
        return SampleError(f"is {kind} in its archive, which is not supported; pack it anew")
    raw = data[start : start + place.packed]
    if len(raw) < place.packed:  # more extra data than was read
        [read] = read_parts(folder, [(name, place.offset + start, place.packed)])
        if isinstance(read, FetchError):
            return read
        if len(raw := read) < place.packed:  # the archive was longer when it was listed
            return None
    try:
        image = raw if place.method == STORED else _inflated(raw, place.size)
    except zlib.error as error:
        return SampleError(f"is damaged in its archive: {error}")
    if len(image) != place.size or zlib.crc32(image) != place.crc:
        if crc not in (0, place.crc):  # the local header has another CRC: it is another file
            return None
        return SampleError("is damaged in its archive: its bytes have another CRC-32")
    return Sample.of(image)


def _inflated(raw: bytes, size: int) -> bytes:
    """Decompress at most the size in the directory, and one byte more to detect longer data."""
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, size + 1)


def _entries(stream: BinaryIO, where: str, size: int) -> Iterator[_Entry]:
    """Yield the entries of an archive's directory, except folders.

    Raises
    ------
    SourceError
        The file is no zip archive, is damaged or is cut off.
    """
    count, nbytes, offset, end = _directory(stream, where, size)
    if offset + nbytes != end:
        raise SourceError(
            f"{where} is damaged, or has other data before it: its directory is said to lie at "
            f"{offset:,} with {nbytes:,} bytes, and ends at {end:,}"
        )
    if count * _ENTRY.size > nbytes:
        raise SourceError(f"{where} claims {count:,} members in a directory of {nbytes:,} bytes")
    stream.seek(offset)
    for number in range(count):
        head = stream.read(_ENTRY.size)
        if len(head) < _ENTRY.size or head[:4] != b"PK\1\2":
            raise SourceError(f"{where} is damaged: it has no entry {number:,} of {count:,}")
        (
            _, made_by, _, flags, method, _, _, crc, packed, unpacked,
            name_length, extra_length, comment_length, _, _, attributes, at,
        ) = _ENTRY.unpack(head)  # fmt: skip
        data = stream.read(name_length + extra_length + comment_length)
        if len(data) < name_length + extra_length + comment_length:
            raise SourceError(f"{where} is cut off in entry {number:,} of {count:,}")
        raw = data[:name_length]
        name, guessed = _decoded(raw, flags)
        extra = data[name_length : name_length + extra_length]
        unpacked, packed, at = _wide(extra, unpacked, packed, at)
        if at + packed > size or packed > unpacked + unpacked // 100 + LEAST_PACKED:
            raise SourceError(
                f"{where}: the member {printable(name)} is said to lie at {at:,}, with {packed:,} "
                f"bytes of {unpacked:,}, and the archive has {size:,}: it is cut off or damaged"
            )
        mode = attributes >> 16 if made_by >> 8 == 3 else 0  # of Unix
        place = _Place(at, packed, unpacked, crc, ENCRYPTED if flags & 1 else method)
        if not name.endswith("/"):
            yield name, mode & 0xF000 in (0, 0x8000), guessed, place


def _directory(stream: BinaryIO, where: str, size: int) -> tuple[int, int, int, int]:
    """Return the directory's number of entries, bytes and offset, and the offset of its end."""
    first = max(0, size - _END.size - LONGEST_COMMENT)
    stream.seek(first)
    tail = stream.read(size - first)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise SourceError(f"{where} has no directory at its end: it is cut off, or no zip archive")
    _, disk, _, _, count, nbytes, offset, _ = _END.unpack_from(tail, at)
    end = first + at
    locator = at - _END_64_LOCATOR.size
    if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
        _, disk, place, _ = _END_64_LOCATOR.unpack_from(tail, locator)
        if place + _END_64.size > size:
            raise SourceError(f"{where} is damaged: its directory's end lies at {place:,}")
        stream.seek(place)
        record = stream.read(_END_64.size)
        if len(record) < _END_64.size or record[:4] != b"PK\6\6":
            raise SourceError(f"{where} is damaged: it has no end of its directory at {place:,}")
        *_, count, nbytes, offset = _END_64.unpack(record)
        end = place
    if disk:
        raise SourceError(f"{where} is a part of an archive; join its parts first")
    return count, nbytes, offset, end


def _decoded(name: bytes, flags: int) -> tuple[str, bool]:
    """Decode a name: as UTF-8 if its flag is set or the bytes are valid, else as code page 437.

    Returns it, and True for that page. Info-ZIP's ``zip`` and macOS write UTF-8 without the flag.
    Old Windows software writes backslashes between folders.
    """
    try:
        text = name.decode("utf-8", "surrogateescape" if flags & 0x800 else "strict")
        guessed = False
    except UnicodeDecodeError:
        text, guessed = name.decode("cp437"), True
    return text if "/" in text else text.replace("\\", "/"), guessed


def _wide(extra: bytes, unpacked: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Replace sizes and offset that do not fit 32 bits by those of the Zip64 extra data."""
    values = [unpacked, packed, offset]
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            body = extra[4 : 4 + length]
            for number, value in enumerate(values):
                if value == FULL_32 and len(body) >= 8:
                    values[number] = int.from_bytes(body[:8], "little")
                    body = body[8:]
        extra = extra[4 + length :]
    return values[0], values[1], values[2]
