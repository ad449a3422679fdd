"""Members of tar archives (ustar, GNU, or pax of POSIX.1-2001), read from front to back.

Headers of files in ASCII digits, as nearly all are, become columns; `tarfile` reads all others.
"""

from __future__ import annotations

import io
import math
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precache.errors import SourceError
from precache.messages import printable
from precache.store.columns import Texts, numbers_of
from precache_workers.runtime.time_limit import samples_at_work
from precache_workers.sources.labels import MOST_TEXT
from precache_workers.sources.parquet_tables import damaged

BLOCK = tarfile.BLOCKSIZE

GNU_MAGIC, GNU_LISTED_FOLDER = b"ustar  \0", b"D"
"""Magic of GNU tar's headers; type of a folder with a listing, from incremental archives."""

MOST_HEADER = 1 << 20
"""Most bytes of a long name or of extended attributes."""

AT_ONCE = 4096
"""Members that are read at a time."""

AHEAD_BYTES, FEW, SMALL_BYTES = 2 << 20, 512, 4096
"""Bytes that are read at once where members are small; members among them that are too few, and
bytes of an archive for each member that are few enough, on average."""

_PLAIN = re.compile(
    rb"[^\0].{123}([0-7]{11})[\0 ][0-7]{11}[\0 ].{8}[0\0].{100}ustar.{87}", re.DOTALL
)
"""A header of a file, to the prefix of its name."""

_USTAR = np.frombuffer(b"ustar", np.uint8)
_POWERS = 8 ** np.arange(11)[::-1]


Labels = Callable[[np.ndarray], list[bytes | None]]


class MemberColumns(NamedTuple):
    """Some members of an archive, without folders.

    Attributes
    ----------
    names
        Their bytes need not be UTF-8.
    offsets
        Offsets of data, right after the members' own headers.
    regular
        True for files; False for links, devices and sparse files.
    headers
        The members' own headers, (members, BLOCK) uint8; another one for those that are not
        regular.
    labels
        Returns the contents of ``.cls`` files at some rows, None of those too long for a label.
    """

    names: Texts
    sizes: np.ndarray
    offsets: np.ndarray
    regular: np.ndarray
    headers: np.ndarray
    labels: Labels


def read_members(stream: BinaryIO, where: str, size: float) -> Iterator[MemberColumns]:
    """Yield the members of an archive, many at a time.

    Raises
    ------
    SourceError
        The file is no tar archive, is damaged, or is cut off.
    """
    run, offset, at, began = _Run(), 0, 0, 0
    are_small = isinstance(getattr(stream, "raw", None), io.FileIO)  # reading ahead is cheap there
    seek, read, match = stream.seek, stream.read, _PLAIN.match  # looked up once, not a member
    try:
        while True:
            while are_small:
                seek(offset)
                some, offset = _read_many(read(AHEAD_BYTES), where, offset, size)
                are_small, at, began = len(some.headers) >= FEW, -1, offset
                if len(some.headers):
                    yield some
            if at != offset:
                seek(offset)
            header, start = read(BLOCK), offset + BLOCK
            plain, at = match(header), start
            if plain is not None and (nbytes := int(plain[1], 8)) <= size - start:
                offset = start + (nbytes + BLOCK - 1) // BLOCK * BLOCK
                end = header.find(b"\0", 0, 100)
                suffix = header[end - 4 : end] if end >= 0 else header[96:100]
                if nbytes <= MOST_TEXT and suffix.lower() == b".cls":
                    data = read(offset - start)
                    run.labels[len(run.headers)] = data[:nbytes]
                    at += len(data)
                run.headers.append(header)
                run.sizes.append(nbytes)
                run.starts.append(start)
            elif len(header) == BLOCK and not any(header):
                _require_end(stream, where, offset)
                break
            else:
                offset, at = _read_other(stream, where, size, header, offset, run), -1
            if len(run.headers) == AT_ONCE:
                yield run.columns(where)
                are_small = offset - began <= SMALL_BYTES * AT_ONCE and size < math.inf
                run, began = _Run(), offset
    except SourceError:
        run.columns(where)  # what a damaged header before claims may lead anywhere
        raise
    if run.headers:
        yield run.columns(where)


@dataclass
class _Run:
    """Members in succession.

    Attributes
    ----------
    headers, sizes, starts
        The header of each, its size, and the offset of its data.
    labels
        Row -> contents, of the ``.cls`` files that may be labels.
    others
        Row -> name, and whether it is a file, where these are not those of the header.
    """

    headers: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    labels: dict[int, bytes] = field(default_factory=dict)
    others: dict[int, tuple[bytes, bool]] = field(default_factory=dict)

    def columns(self, where: str) -> MemberColumns:
        """Return the members as columns."""
        headers = np.frombuffer(b"".join(self.headers), np.uint8).reshape(-1, BLOCK)
        sizes, offsets = np.array(self.sizes, np.int64), np.array(self.starts, np.int64)

        def labels(rows: np.ndarray) -> list[bytes | None]:
            return [*map(self.labels.get, rows.tolist())]

        return _columns(headers, sizes, offsets, labels, self.others, where)


def _read_many(data: bytes, where: str, offset: int, size: float) -> tuple[MemberColumns, int]:
    """Return the files that follow each other in a part of an archive, up to a member of another
    kind; and where the next member begins.

    Parameters
    ----------
    offset, size
        Where the part begins, at a member; size of the archive.
    """
    count = len(data) // BLOCK
    blocks = np.frombuffer(data, np.uint8, count * BLOCK).reshape(-1, BLOCK)
    places = np.flatnonzero((blocks[:, 257:262] == _USTAR).all(axis=1))
    numbers, first = blocks[places, 124:157], blocks[places, 0]  # the rest is as of _PLAIN
    nbytes, times = _octal(numbers[:, :11]), _octal(numbers[:, 12:23])
    plain = (nbytes >= 0) & (nbytes <= size - offset - (places + 1) * BLOCK) & (times >= 0)
    plain &= (first > 0) & np.isin(numbers[:, 32], (0, ord("0")))
    plain &= np.isin(numbers[:, (11, 23)], (0, ord(" "))).all(axis=1)
    sizes, ends = np.zeros((2, count + 1), np.int64)
    sizes[places], ends[places] = nbytes, plain * (places + 1 + (nbytes + BLOCK - 1) // BLOCK)
    members, block, next_of = list[int](), 0, np.minimum(ends, count).tolist()
    while end := next_of[block]:
        members.append(block)
        block = end
    if members:
        block = int(ends[members[-1]])
        if block > count and block - members[-1] <= 1 + MOST_TEXT // BLOCK:
            block = members.pop()  # it may be a label, and is read again
    rows = np.array(members, np.int64)
    starts = offset + (rows + 1) * BLOCK
    found = _columns(blocks[rows], sizes[rows], starts, lambda rows: [], {}, where)

    def labels(rows: np.ndarray) -> list[bytes | None]:
        places = zip(
            (found.offsets - offset)[rows].tolist(), found.sizes[rows].tolist(), strict=True
        )
        return [data[at : at + size] if size <= MOST_TEXT else None for at, size in places]

    return found._replace(labels=labels), offset + block * BLOCK


def _columns(
    headers: np.ndarray,
    sizes: np.ndarray,
    offsets: np.ndarray,
    labels: Labels,
    others: dict[int, tuple[bytes, bool]],
    where: str,
) -> MemberColumns:
    """Return members as columns; the others are as in `_Run`.

    Raises
    ------
    SourceError
        A header has another sum.
    """
    for row in np.flatnonzero(_octal(headers[:, 148:154]) != _sums(headers)).tolist():
        try:
            tarfile.TarInfo.frombuf(headers[row].tobytes(), "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise _no_header(where, int(offsets[row]) - BLOCK, error) from None
    regular, named = np.ones(len(headers), bool), {}
    for row in np.flatnonzero((headers[:, 345] > 0) & (headers[:, 262] == 0)).tolist():
        header = headers[row].tobytes()
        named[row] = header[345:500].partition(b"\0")[0] + b"/" + _name(header)
    for row, other in others.items():
        named[row], regular[row] = other
    names = _names(headers, named)
    columns = MemberColumns(names, sizes, offsets, regular, headers, labels)
    is_folder = numbers_of(pc.ends_with(names.plain, "/"))  # as old programs wrote them
    if not is_folder.any():
        return columns
    files = np.flatnonzero(~is_folder)
    return MemberColumns(
        names.take(files),
        sizes[files],
        offsets[files],
        regular[files],
        headers[files],
        lambda rows: labels(files[rows]),
    )


def _names(headers: np.ndarray, others: dict[int, bytes]) -> Texts:
    """Return the names in headers, but for those that are given by row."""
    lengths = _lengths(headers)
    names = headers[:, : lengths.max(initial=0)]
    data = names[np.arange(names.shape[1]) < lengths[:, None]]
    buffers = map(pa.py_buffer, (np.append(0, np.cumsum(lengths)), data))
    texts = pa.LargeStringArray.from_buffers(len(names), *buffers)
    if not others:
        return Texts(texts)
    rows = np.arange(len(names))
    rows[sorted(others)] = len(names) + np.arange(len(others))
    rest = pa.array([others[row] for row in sorted(others)], pa.large_binary())
    return Texts(pa.concat_arrays([texts, rest.view(pa.large_string())])).take(rows)


def _lengths(headers: np.ndarray) -> np.ndarray:
    """Return the lengths of the names in headers: (rows,) int64."""
    is_end = np.ones((len(headers), 101), np.bool_)
    np.equal(headers[:, :100], 0, out=is_end[:, :100])
    return np.asarray(is_end.argmax(axis=1))


def _name(header: bytes) -> bytes:
    return header[:100].partition(b"\0")[0]


def _sums(headers: np.ndarray) -> np.ndarray:
    """Add the bytes of headers, those of their own sum counted as spaces: (rows,) int64."""
    sums, own = (some.sum(axis=1, dtype=np.uint32) for some in (headers, headers[:, 148:156]))
    return np.asarray(sums.astype(np.int64) + 8 * ord(" ") - own)


def _octal(digits: np.ndarray) -> np.ndarray:
    """Return numbers of ASCII digits: (rows,) int64, -1 for those that are none."""
    values = digits - np.uint8(ord("0"))
    numbers = values.astype(np.int64) @ _POWERS[-digits.shape[1] :]
    return np.where((values < 8).all(axis=1), numbers, -1)


class _Headers:
    """The headers of a member, as `tarfile` reads them.

    Attributes
    ----------
    last, at
        The last one, that of the member itself, and its offset.
    """

    def __init__(self, stream: BinaryIO, where: str, first: bytes, offset: int) -> None:
        self._stream, self._where = stream, where
        self._ahead, self._place, self.last, self.at = first, offset, first, offset

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MOST_HEADER:
            raise SourceError(f"{self._where} has {size:,} bytes of attributes of a member")
        data, self._ahead = self._ahead or self._stream.read(size), b""
        self.last, self.at = data, self._place
        self._place += len(data)
        return data

    def tell(self) -> int:
        return self._place


def _read_other(
    stream: BinaryIO, where: str, size: float, header: bytes, offset: int, run: _Run
) -> int:
    """Add a member that begins with a header of another kind; returns where the next one begins."""
    if len(header) < BLOCK:
        raise SourceError(
            f"{where} ends without the zeros that end a tar archive: it is cut off, or empty; "
            "copy it again, or if it was written so, append 1024 zero bytes"
        )
    archive = tarfile.TarFile(fileobj=io.BytesIO(bytes(2 * BLOCK)), errors="surrogateescape")
    headers = _Headers(stream, where, header, offset)
    archive.fileobj = headers  # type: ignore[assignment]
    try:
        info = tarfile.TarInfo.fromtarfile(archive)
    except (tarfile.TarError, LookupError, RecursionError, ValueError) as error:
        raise _no_header(where, headers.at, error) from None
    regular = info.isreg() and not info.issparse()
    own = headers.last if regular else header
    if own[257:265] == GNU_MAGIC and own[345:346] != b"\0":  # times in place of ustar's prefix
        plain = _name(own).decode("utf-8", "surrogateescape")
        info.name = plain if info.name.endswith(f"/{plain}") else info.name
    end = archive.offset
    if info.isdir() or info.type == GNU_LISTED_FOLDER:
        return end
    last = info.offset_data + info.size if regular else end - BLOCK + 1  # others may be padding
    if not (info.size >= 0 and info.offset_data <= end and last <= size):
        raise SourceError(
            f"{where}: the member {printable(info.name)} is said to have {info.size:,} bytes, and "
            f"only {max(0, size - info.offset_data):,} follow: the archive is cut off or damaged"
        )
    is_label = regular and info.name[-4:].lower() == ".cls" and info.size <= MOST_TEXT
    row = len(run.headers)
    if is_label:
        run.labels[row] = stream.read(info.size)
    run.others[row] = info.name.encode("utf-8", "surrogateescape"), regular
    run.headers.append(own)
    run.sizes.append(info.size)
    run.starts.append(info.offset_data)
    return end


def _require_end(stream: BinaryIO, where: str, offset: int) -> None:
    """Raise `SourceError` if data other than zeros follow the end of an archive."""
    while (block := stream.read(tarfile.RECORDSIZE)) and not any(block):
        pass
    if block:
        raise SourceError(
            f"{where} has more than zeros behind its end, at byte {offset:,}: it is damaged, or "
            "archives were joined byte by byte; join them by tar --concatenate, or give each as a "
            "container"
        )


def _no_header(where: str, offset: int, error: Exception) -> SourceError:
    if not offset:
        return SourceError(f"{where} is no tar archive; give --source-kind")
    text = f"{where} is damaged: at byte {offset:,} it has no header of a member ({error})"
    return SourceError(text)


# --- compressed archives --------------------------------------------------------------------------

MOST_RATIO, LEAST_LIMIT = 1000, 64 << 20
"""A file is refused if it decompresses to more than `MOST_RATIO` times its size and more than
`LEAST_LIMIT` bytes."""

PACKED_AT_ONCE = 256 << 10
"""Bytes that are decompressed at a time."""

_PROGRAMS = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz",
    **{bytes([0x50 + number, 0x2A, 0x4D, 0x18]): "zstd" for number in range(16)},
}  # fmt: skip
"""Magic number of a compression, or of a skippable frame -> the program that decompresses it."""


class _Decompressed(io.RawIOBase):
    def __init__(self, packed: BinaryIO, program: str, size: int, where: str) -> None:
        self._stream = pa.CompressedInputStream(pa.PythonFile(packed, "r"), program)
        self._place, self._most, self._where = 0, max(LEAST_LIMIT, MOST_RATIO * size), where

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        end = offset + (self._place if whence == os.SEEK_CUR else 0)
        if end < self._place:
            raise ValueError(f"cannot go back to byte {end:,}")
        skipped = memoryview(bytearray(PACKED_AT_ONCE))
        while self._place < end and self.readinto(skipped[: end - self._place]):
            pass
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer
        with damaged(self._where):
            count: int = self._stream.readinto(buffer)
        samples_at_work().advance()  # skipping may take long
        self._place += count
        if self._place > self._most:
            raise SourceError(
                f"{self._where} decompresses to over {MOST_RATIO:,} times its size; decompress it "
                "yourself if you trust it"
            )
        return count


def decompressed(archive: BinaryIO, size: int, where: str) -> BinaryIO | None:
    """Return the contents of a compressed tar archive as a stream; None for another file.

    It goes forward only, and raises `SourceError` where the file is damaged, cut off, or
    decompresses to far more than its size.

    Parameters
    ----------
    archive
        The file, at its beginning.
    size
        Size of the file in bytes.
    where
        Path or URL of the file, for errors.

    Raises
    ------
    SourceError
        The compression is not read.
    """
    start = archive.read(512)
    archive.seek(0)
    program = next((name for magic, name in _PROGRAMS.items() if start.startswith(magic)), None)
    if (
        program is None or start[257:262] == b"ustar"
    ):  # a member's name may look like a magic number
        return None
    if program in ("bzip2", "xz"):
        raise SourceError(
            f"{where} is compressed by {program}, which takes too long to be read for each shard; "
            f"decompress it ({program} -d), or compress it by gzip or zstd instead"
        )
    return io.BufferedReader(_Decompressed(archive, program, size, where), PACKED_AT_ONCE)
