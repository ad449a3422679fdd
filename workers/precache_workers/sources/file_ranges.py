"""Read parts of large files, local or remote: as a stream, or many ranges at once."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import BinaryIO, cast

from precache.errors import SourceError, StorageError
from precache.storage.base import FileInfo, Folder, Range, required
from precache.storage.coalesce import coalesce

BLOCK_BYTES = 4 << 20
"""Bytes of a request while a remote file is streamed."""

GAP_BYTES = 128 << 10
"""Maximum gap between two parts of one request: reading it is faster than a second request."""

SPAN_BYTES = 16 << 20
"""Maximum size of a request for several parts."""

LIKELY_PARTS = 64
"""Maximum number of likely parts that are fetched together, one block of bytes in all."""


class RemoteFile(io.RawIOBase):
    """A remote file as a seekable stream that is read in blocks.

    Parameters
    ----------
    end
        Offset that no block goes beyond, unless a single read does.
    likely
        Start and end of the parts that will probably be read, sorted.
    """

    def __init__(
        self,
        folder: Folder,
        file: FileInfo,
        block_bytes: int,
        end: int,
        likely: Sequence[tuple[int, int]],
    ) -> None:
        self._folder, self._file, self._block_bytes, self._end = folder, file, block_bytes, end
        self._place = 0
        self._start, self._block = 0, b""
        self._likely = likely
        self._ahead: dict[int, bytes | StorageError] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._file.size - self._place)
        size = left if size is None or size < 0 else min(size, left)
        at = self._place - self._start
        held = max(0, len(self._block) - at) if at >= 0 else 0
        if size > held and self._find(size):
            at = self._place - self._start
        elif size > held:
            first = self._place + held
            length = max(size - held, min(self._block_bytes, self._end - first))
            [more] = self._folder.read_ranges([(self._file.name, first, length)])
            self._block = (self._block[at:] if held else b"") + required(more)
            self._start, at = self._place, 0
        data = self._block[at : at + size]
        self._place += len(data)
        return data

    def _find(self, size: int) -> bool:
        """Use the likely part with the next bytes as the block; return False if there is none."""
        number = bisect_right(self._likely, (self._place, self._file.size)) - 1
        if number < 0:
            return False
        if number not in self._ahead:
            name, most = self._file.name, self._block_bytes // LIKELY_PARTS
            some = range(number, min(number + LIKELY_PARTS, len(self._likely)))
            likely = [self._likely[n] for n in some]
            ranges = [(name, start, min(end - start, most)) for start, end in likely]
            self._ahead = dict(zip(some, read_parts(self._folder, ranges), strict=True))
        start, _ = self._likely[number]
        data = self._ahead[number]
        if isinstance(data, StorageError) or self._place + size > start + len(data):
            return False
        self._start, self._block = start, data
        return True


def open_file(
    folder: Folder,
    file: FileInfo,
    block_bytes: int = BLOCK_BYTES,
    end: int | None = None,
    likely: Sequence[tuple[int, int]] = (),
) -> BinaryIO:
    """Open a file for random access.

    Parameters
    ----------
    block_bytes
        Minimum size of a request to a remote file; requests before `end` may be shorter.
    end
        End of the part that is needed, if known; no block goes beyond it.
    likely
        As in `RemoteFile`.

    Raises
    ------
    SourceError
        The size of a remote file is unknown.
    """
    descriptor = folder.open(file.name)
    if descriptor is not None:
        return os.fdopen(descriptor, "rb")
    require_size(folder, file)
    end = file.size if end is None else min(end, file.size)
    return cast("BinaryIO", RemoteFile(folder, file, block_bytes, end, likely))


def require_size(folder: Folder, file: FileInfo) -> None:
    """Raise `SourceError` for a file whose size is unknown."""
    if file.size < 0:
        raise SourceError(
            f"the server does not report the size of {folder.path(file.name)}, which is needed to "
            "read parts of it; copy it to a disk or a bucket"
        )


def read_parts(folder: Folder, parts: Sequence[Range]) -> list[bytes | StorageError]:
    """Read parts of files, neighbours in one request; the end of a file may shorten a part."""
    ranges = coalesce(parts, GAP_BYTES, SPAN_BYTES)
    read = folder.read_ranges([joint for joint, _ in ranges])
    contents: dict[int, bytes | StorageError] = {}
    for ((_, first, _), numbers), data in zip(ranges, read, strict=True):
        for number in numbers:
            _, start, length = parts[number]
            if len(numbers) == 1 or isinstance(data, StorageError):
                contents[number] = data
            else:
                contents[number] = data[start - first : start - first + length]
    return [contents[number] for number in range(len(parts))]
