"""Members of tar archives (ustar, GNU, or pax of POSIX.1-2001), read from front to back."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from precache.errors import SourceError
from precache.messages import printable
from precache_workers.sources.compressed import DecompressedFile
from precache_workers.sources.labels import MOST_TEXT

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
    label
        Contents of a ``.cls`` file that may be a label; empty for any other.
    """

    name: str
    size: int
    mtime: int
    offset: int
    crc: int
    regular: bool
    label: bytes = b""


AT_ONCE, LEAST_AT_ONCE = 4096, 64
"""Members that are read at a time; fewer are not worth the columns."""

_POWERS = 8 ** np.arange(11)[::-1]


class MemberColumns(NamedTuple):
    """Some members of an archive, by column: the attributes of `Member`."""

    names: list[str]
    sizes: np.ndarray
    mtimes: np.ndarray
    offsets: np.ndarray
    crcs: np.ndarray
    regular: np.ndarray
    labels: list[bytes]


def padded(nbytes: int) -> int:
    """Round a number of bytes up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def read_members(
    stream: BinaryIO | DecompressedFile, where: str, size: float
) -> Iterator[MemberColumns]:
    """Yield the members of an archive, except folders, many at a time.

    Raises
    ------
    SourceError
        The file is no tar archive, is damaged, or is cut off.
    """
    some: list[Member] = []
    for one in _members(stream, where, size):
        if isinstance(one, Member):
            some.append(one)
        if some and (len(some) == AT_ONCE or isinstance(one, MemberColumns)):
            yield _batch(some)
            some = []
        if isinstance(one, MemberColumns):
            yield one
    yield _batch(some)


def _batch(some: Sequence[Member]) -> MemberColumns:
    names, *numbers, regular, labels = zip(*some, strict=True) if some else [()] * 7
    sizes, mtimes, offsets, crcs = np.array(numbers, np.int64)
    return MemberColumns([*names], sizes, mtimes, offsets, crcs, np.array(regular, bool), [*labels])


class _Run:
    """Files in succession that their headers alone describe, in ASCII digits."""

    def __init__(self) -> None:
        self.headers: list[bytes] = []
        self.sizes: list[int] = []
        self.offsets: list[int] = []
        self.labels: list[bytes] = []

    def taken(self, where: str) -> Iterator[Member | MemberColumns]:
        """Yield the files, which the run has no longer.

        Raises
        ------
        SourceError
            A header has another sum.
        """
        headers, sizes, offsets, labels = self.headers, self.sizes, self.offsets, self.labels
        self.__init__()  # type: ignore[misc]
        if not headers:
            return
        table = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, BLOCK)
        for row in np.flatnonzero(_octal(table[:, 148:154]) != _sums(table)).tolist():
            try:
                tarfile.TarInfo.frombuf(headers[row], "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                text = _no_header(where, offsets[row] - BLOCK, headers[row], error)
                raise SourceError(text) from None
        names = [_name(header) for header in headers]
        seconds = _octal(table[:, 136:147])
        mtimes = np.where(seconds > MOST_TIME // 10**9, MOST_TIME, seconds * 10**9)
        crcs = np.fromiter(map(zlib.crc32, headers), np.int64, len(headers))
        regular = np.ones(len(headers), bool)
        batch = MemberColumns(
            names, np.array(sizes), mtimes, np.array(offsets), crcs, regular, labels
        )
        if len(headers) >= LEAST_AT_ONCE:
            yield batch
        else:
            yield from map(Member._make, zip(*batch, strict=True))


def _sums(headers: np.ndarray) -> np.ndarray:
    """Add the bytes of headers, those of their own sum counted as spaces: (rows,) int64."""
    words, mask = headers.view(np.uint64), np.uint64(0x00FF00FF00FF00FF)
    pairs = (words & mask) + (words >> np.uint64(8) & mask)  # of 64 words, none overflows
    sums = pairs.sum(axis=1).view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int64)
    return np.asarray(sums + 8 * ord(" ") - headers[:, 148:156].sum(axis=1, dtype=np.int64))


def _octal(digits: np.ndarray) -> np.ndarray:
    """Return numbers of ASCII digits: (rows,) int64, -1 for those that are none."""
    values = digits - np.uint8(ord("0"))
    numbers = values.astype(np.int64) @ _POWERS[-digits.shape[1] :]
    return np.where((values < 8).all(axis=1), numbers, -1)


def _plain_size(header: bytes, most: float) -> int | None:
    """Return the size of a file whose numbers are ASCII digits; None for other headers."""
    size, time, name = header[124:135], header[136:147], header[:100]
    if not (header[135] in b"\0 " and header[147] in b"\0 " and (size + time).isdigit()):
        return None
    if b"8" in size + time or b"9" in size + time or name.rstrip(b"\0")[-1:] in (b"/", b""):
        return None
    nbytes = int(size, 8)
    return nbytes if nbytes <= most else None


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    if header[345] and header[257:265] != GNU_MAGIC:  # it has times in place of ustar's prefix
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _with_label(member: Member, stream: BinaryIO | DecompressedFile) -> Member:
    """Read the contents of a member that may be a label; the stream is right after its header."""
    if member.size > MOST_TEXT or not (member.regular and member.name[-4:].lower() == ".cls"):
        return member
    return member._replace(label=stream.read(member.size))


def _members(
    stream: BinaryIO | DecompressedFile, where: str, size: float
) -> Iterator[Member | MemberColumns]:
    run = _Run()
    try:
        for one in _others(stream, where, size, run):
            yield from run.taken(where)
            if one is not None:
                yield one
    except SourceError:
        yield from run.taken(where)  # what a damaged header claims may lead anywhere
        raise
    yield from run.taken(where)


def _others(
    stream: BinaryIO | DecompressedFile, where: str, size: float, run: _Run
) -> Iterator[Member | None]:
    """Yield the members that are not added to the run; None where that has enough of them."""
    offset = 0
    named: dict[str, str] = {}
    while True:
        stream.seek(offset)
        header = stream.read(BLOCK)
        if (
            len(header) == BLOCK
            and header[156:157] in (b"0", b"\0")
            and header[257:262] == b"ustar"
            and not named
            and (nbytes := _plain_size(header, size - offset - BLOCK)) is not None
        ):
            offset += BLOCK
            is_label = b".cls" in header[:100].lower() and nbytes <= MOST_TEXT
            run.labels.append(stream.read(nbytes) if is_label else b"")
            run.headers.append(header)
            run.sizes.append(nbytes)
            run.offsets.append(offset)
            offset += padded(nbytes)
            if len(run.headers) == AT_ONCE:
                yield None
            continue
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
            member = Member(name, nbytes, mtime, start, zlib.crc32(header), regular)
            yield _with_label(member, stream)
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
