"""Members of tar archives (ustar, GNU, or pax of POSIX.1-2001), read from front to back."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from precache.errors import SourceError
from precache.messages import printable
from precache_workers.sources.compressed import DecompressedFile

BLOCK = tarfile.BLOCKSIZE

GNU_MAGIC, GNU_LISTED_FOLDER = b"ustar  \0", b"D"
"""Magic of GNU tar's headers; type of a folder with a listing, from incremental archives."""

MOST_HEADER = 1 << 20
"""Most bytes of a long name or of extended attributes."""

SPARSE = "GNU.sparse."
"""Prefix of the attributes of sparse files."""

MOST_ATTRIBUTES = 10_000
"""Most extended attributes of a member."""

MOST_TIME = (1 << 63) - 1
"""Latest time that a row table can hold, in nanoseconds since 1970."""


class Member(NamedTuple):
    """A member of an archive.

    Attributes
    ----------
    mtime
        Nanoseconds since 1970.
    offset
        Offset of its data, right after its own header.
    crc
        CRC-32 of that header.
    regular
        True for a file; False for a link, a device or a sparse file.
    """

    name: str
    size: int
    mtime: int
    offset: int
    crc: int
    regular: bool


def padded(nbytes: int) -> int:
    """Round a number of bytes up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def read_members(stream: BinaryIO | DecompressedFile, where: str, size: float) -> Iterator[Member]:
    """Yield the members of an archive, except folders.

    Raises
    ------
    SourceError
        The file is no tar archive, is damaged, or is cut off.
    """
    offset = 0
    named: dict[str, str] = {}
    while True:
        stream.seek(offset)
        header = stream.read(BLOCK)
        if len(header) == BLOCK and not any(header):
            _require_end(stream, where, offset)
            return
        if len(header) < BLOCK:
            raise SourceError(
                f"{where} ends without the zeros that end a tar archive: it is cut off, or empty; "
                "copy it again, or if it was written so, append 1024 zero bytes"
            )
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise SourceError(_no_header(where, offset, header, error)) from None
        if header[257:265] == GNU_MAGIC:  # it has times in place of ustar's prefix of the name
            info.name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
        start = offset + BLOCK
        if info.type == tarfile.GNUTYPE_SPARSE and header[482]:  # its map continues in more blocks
            while stream.read(BLOCK)[504:505] not in (b"", b"\0"):
                start += BLOCK
            start += BLOCK
        has_data = info.type not in (
            tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE,
            tarfile.FIFOTYPE,
        )  # fmt: skip
        long = info.type in (
            tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
            tarfile.GNUTYPE_LONGLINK,
        )  # fmt: skip
        name = named.get("path", info.name)
        try:
            nbytes = info.size if long else int(named.get("size", info.size))
            mtime = round(float(named.get("mtime", info.mtime)) * 1e9)
            mtime = min(max(0, mtime), MOST_TIME)
        except (ValueError, OverflowError):
            raise SourceError(
                f"{where}: {printable(name)} has a size or time that is no number"
            ) from None
        if has_data and not 0 <= nbytes <= size - start:
            raise SourceError(
                f"{where}: the member {printable(name)} is said to have {nbytes:,} bytes, and only "
                f"{max(0, size - start):,} follow: the archive is cut off or damaged"
            )
        if long:
            if nbytes > MOST_HEADER:
                raise SourceError(f"{where} has {nbytes:,} bytes of attributes of a member")
            named |= _long(info.type, stream.read(nbytes), where)
        elif info.type in (tarfile.DIRTYPE, GNU_LISTED_FOLDER) or name[-1:] == "/":
            named = {}
        elif info.type != tarfile.XGLTYPE:
            sparse = info.type == tarfile.GNUTYPE_SPARSE or any(
                key.startswith(SPARSE) for key in named
            )
            regular = info.type in tarfile.REGULAR_TYPES and not sparse
            yield Member(name, nbytes, mtime, start, zlib.crc32(header), regular)
            named = {}
        offset = start + (padded(nbytes) if has_data else 0)


def _require_end(stream: BinaryIO | DecompressedFile, where: str, offset: int) -> None:
    """Raise `SourceError` if data other than zeros follow the end of an archive."""
    while (block := stream.read(tarfile.RECORDSIZE)) and not any(block):
        pass
    if block:
        raise SourceError(
            f"{where} has more than zeros behind its end, at byte {offset:,}: it is damaged, or "
            "archives were joined byte by byte; join them by tar --concatenate, or give each as a "
            "container"
        )


def _no_header(where: str, offset: int, header: bytes, error: Exception) -> str:
    if offset:
        return f"{where} is damaged: at byte {offset:,} it has no header of a member ({error})"
    return f"{where} is no tar archive; give --source-kind"


def _long(kind: bytes, data: bytes, where: str) -> dict[str, str]:
    """Parse the data of a long name of GNU tar, or of extended attributes of pax."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    if kind == tarfile.GNUTYPE_LONGLINK:
        return {}
    attributes: dict[str, str] = {}
    start = 0
    for _ in range(MOST_ATTRIBUTES):
        if start >= len(data):
            return attributes
        digits, _, _ = data[start : start + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = data[start + len(digits) + 1 : start + length]
        name, equals, value = record.partition(b"=")
        if not equals or not record.endswith(b"\n"):
            break
        key = name.decode("utf-8", "replace")
        if key in ("path", "size", "mtime") or key.startswith(SPARSE):
            attributes[key] = value[:-1].decode("utf-8", "surrogateescape")
        start += length
    raise SourceError(
        f"{where} has damaged attributes of a member: {printable(repr(data[start : start + 40]))}"
    )
