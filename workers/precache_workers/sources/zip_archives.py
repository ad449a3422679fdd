"""Zip archives: a sample is an image, and its class the first folder of its name.

The identity of a sample is its size and the CRC-32 of its bytes from the archive's directory. If an
archive changes, only changed samples are fetched.

The directory is parsed here, entry by entry (PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.6 to 4.3.16
and 4.5.3), because Python's `zipfile` keeps about a kilobyte for each entry: a gigabyte for a
million of them.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.messages import printable
from precache.storage.base import NO_FILE, NO_NAME, REPLACED, SERVICE_FOLDER, FileInfo, Folder
from precache_workers.sources.base import (
    FILES_PER_TICK,
    Fetched,
    Sample,
    count_ignored,
    first_folder,
    in_service_folder,
    is_image,
)
from precache_workers.sources.containers import (
    CHECKSUM,
    UNIT_BYTES,
    Members,
    RequestedSample,
    TimeUpError,
    changed,
    member_key,
)
from precache_workers.sources.file_ranges import open_file, read_parts

STORED, DEFLATED = 0, 8
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


class _Entry(NamedTuple):
    """An entry of the directory; `offset` is that of its local header.

    `guessed` is true for a name that is read as code page 437, as it is no UTF-8.
    """

    name: str
    size: int
    packed: int
    crc: int
    method: int
    offset: int
    encrypted: bool
    regular: bool
    guessed: bool


@dataclass(frozen=True)
class ZipFormat:
    """Zip archives; see the module."""

    noun: str = "a zip archive"
    suffixes: tuple[str, ...] = (".zip",)
    typed: bool = False

    def scan(self, folder: Folder, file: FileInfo, until: float) -> Members:
        members, where = Members(), folder.path(file.name)
        images: dict[str, _Entry] = {}
        with open_file(folder, file) as stream:
            for number, entry in enumerate(_entries(stream, where, file.size)):
                if number % FILES_PER_TICK == 0 and time.monotonic() > until:
                    raise TimeUpError
                key = member_key(file.name, entry.name) if entry.regular else ""
                if not key:
                    if not entry.name.endswith("/"):  # a folder
                        members.left_out[NO_FILE if key is not None else NO_NAME] += 1
                elif is_image(key) and in_service_folder(key[len(file.name) + 1 :]):
                    members.leave_out(SERVICE_FOLDER, key)
                elif is_image(key):
                    if key in images:
                        members.leave_out(REPLACED, key)
                    images[key] = entry
                    if entry.guessed:
                        members.notes[GUESSED_NOTE] += 1
                else:
                    count_ignored(members.ignored, key)
        unit, start = 0, 0
        prefix = len(file.name) + 1
        for key, entry in sorted(images.items(), key=lambda image: image[1].offset):
            if entry.offset + entry.packed - start > UNIT_BYTES and entry.offset > start:
                unit, start = unit + 1, entry.offset
            place = f"{entry.offset}:{entry.packed}:{entry.size}:{entry.crc}:"
            place += "encrypted" if entry.encrypted else str(entry.method)
            members.add(
                key,
                f"{file.name}#{unit}\t{place}",
                size=entry.size,
                mtime=-1,
                etag=f"{CHECKSUM}{entry.crc:08x}",
                label=first_folder(key[prefix:]),
            )
        members.kind = "names" if any(members.labels) else None
        return members

    def read(
        self,
        folder: Folder,
        name: str,
        unit: str,
        wanted: Sequence[RequestedSample],
        most_bytes: int,
    ) -> Sequence[Fetched]:
        places = [sample.place.split(":") for sample in wanted]
        # The key contains the member's name, which is no longer in any other encoding.
        heads = [_LOCAL.size + len(sample.key.encode()) + EXTRA_BYTES for sample in wanted]
        parts = [
            (name, int(place[0]), head + int(place[1]))
            for place, head in zip(places, heads, strict=True)
        ]
        contents = read_parts(folder, parts)
        return [
            _sample(folder, name, sample.key, place, data)
            for sample, place, data in zip(wanted, places, contents, strict=True)
        ]


def _sample(
    folder: Folder, name: str, key: str, place: Sequence[str], data: bytes | StorageError
) -> Fetched:
    offset, packed, size, crc = map(int, place[:4])
    if isinstance(data, StorageError):
        return FetchError(str(data))
    if len(data) < _LOCAL.size or data[:4] != b"PK\3\4":
        return changed(folder, name, key)
    header = _LOCAL.unpack_from(data)
    start = _LOCAL.size + header[9] + header[10]
    member = _decoded(data[_LOCAL.size :][: header[9]], header[2]).removeprefix("./")
    if member != key[len(name) + 1 :]:
        return changed(folder, name, key)
    if place[4] not in (str(STORED), str(DEFLATED)):
        kind = place[4]
        if kind != "encrypted":
            kind = f"compressed by {_METHODS.get(int(kind), f'method {kind}')}"
        return SampleError(f"is {kind} in its archive, which is not supported; pack it anew")
    raw = data[start : start + packed]
    if len(raw) < packed:  # more extra data than was read
        [raw_or_error] = read_parts(folder, [(name, offset + start, packed)])
        if isinstance(raw_or_error, StorageError):
            return FetchError(str(raw_or_error))
        raw = raw_or_error
        if len(raw) < packed:  # the archive was longer when it was listed
            return changed(folder, name, key)
    try:
        image = raw if place[4] == str(STORED) else _inflated(raw, size)
    except zlib.error as error:
        return SampleError(f"is damaged in its archive: {error}")
    if len(image) != size or zlib.crc32(image) != crc:
        if header[6] not in (0, crc):  # the local header has another CRC: it is another file
            return changed(folder, name, key)
        return SampleError("is damaged in its archive: its bytes have another CRC-32")
    return Sample.of(image)


def _inflated(raw: bytes, size: int) -> bytes:
    """Decompress at most the size in the directory, and one byte more to detect longer data."""
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, size + 1)


def _entries(stream: BinaryIO, where: str, size: int) -> Iterator[_Entry]:
    """Yield the entries of an archive's directory.

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
        name = _decoded(raw, flags)
        guessed = not (flags & 0x800 or raw.isascii() or _is_utf8(raw))
        extra = data[name_length : name_length + extra_length]
        unpacked, packed, at = _wide(extra, unpacked, packed, at)
        if at + packed > size or packed > unpacked + unpacked // 100 + LEAST_PACKED:
            raise SourceError(
                f"{where}: the member {printable(name)} is said to lie at {at:,}, with {packed:,} "
                f"bytes of {unpacked:,}, and the archive has {size:,}: it is cut off or damaged"
            )
        mode = attributes >> 16 if made_by >> 8 == 3 else 0  # of Unix
        regular = not name.endswith("/") and mode & 0xF000 in (0, 0x8000)
        yield _Entry(name, unpacked, packed, crc, method, at, bool(flags & 1), regular, guessed)


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


def _decoded(name: bytes, flags: int) -> str:
    """Decode a name: as UTF-8 if its flag is set or the bytes are valid, else as code page 437.

    Info-ZIP's ``zip`` and macOS write UTF-8 without the flag. Old Windows software writes
    backslashes between folders.
    """
    try:
        text = name.decode("utf-8", "surrogateescape" if flags & 0x800 else "strict")
    except UnicodeDecodeError:
        text = name.decode("cp437")
    return text if "/" in text else text.replace("\\", "/")


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


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
