"""Read parts of large files, local or remote: as a stream, or many ranges at once."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from precache.errors import FetchError, SourceError, StorageError
from precache.storage.base import FileInfo, Folder, Range, required
from precache.storage.coalesce import coalesce

BLOCK_BYTES = 4 << 20
"""Bytes of a request while a remote file is streamed."""

GAP_BYTES = 128 << 10
"""Maximum gap between two parts of one request: reading it is faster than a second request."""

SPAN_BYTES = 16 << 20
"""Maximum size of a request for several parts."""


class RemoteFile(io.RawIOBase):
    """A remote file; no read crosses `end`, and those behind it are small.

    Parameters
    ----------
    ahead
        Offset -> bytes there, which need no request.
    """

    def __init__(
        self, folder: Folder, file: FileInfo, end: int, ahead: Mapping[int, bytes]
    ) -> None:
        self._folder, self._file, self._end, self._place = folder, file, end, 0
        self._ahead = ahead

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer
        end = self._end if self._place < self._end else self._place + GAP_BYTES
        length = min(len(buffer), end - self._place, self._file.size - self._place)
        if length <= 0:
            return 0
        data = self._ahead.get(self._place, b"")[:length]
        data = data or required(
            self._folder.read_ranges([(self._file.name, self._place, length)])[0]
        )
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def open_file(
    folder: Folder,
    file: FileInfo,
    block_bytes: int = BLOCK_BYTES,
    end: int | None = None,
    ahead: Mapping[int, bytes] | None = None,
) -> BinaryIO:
    """Open a file for random access.

    Parameters
    ----------
    block_bytes
        Size of a request to a remote file; those before `end` may be shorter.
    end
        End of the part that is needed, if known; no request crosses it.
    ahead
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
    return io.BufferedReader(RemoteFile(folder, file, end, ahead or {}), block_bytes)


def require_size(folder: Folder, file: FileInfo) -> None:
    """Raise `SourceError` for a file whose size is unknown."""
    if file.size < 0:
        raise SourceError(
            f"the server does not report the size of {folder.path(file.name)}, which is needed to "
            "read parts of it; copy it to a disk or a bucket"
        )


def read_parts(folder: Folder, parts: Sequence[Range]) -> list[bytes | FetchError]:
    """Read parts of files, neighbours in one request; the end of a file may shorten a part."""
    ranges = coalesce(parts, GAP_BYTES, SPAN_BYTES)
    read = folder.read_ranges([joint for joint, _ in ranges])
    contents: dict[int, bytes | FetchError] = {}
    for ((_, first, _), numbers), data in zip(ranges, read, strict=True):
        for number in numbers:
            _, start, length = parts[number]
            if isinstance(data, StorageError):
                contents[number] = FetchError(str(data))
            elif len(numbers) == 1:
                contents[number] = data
            else:
                contents[number] = data[start - first : start - first + length]
    return [contents[number] for number in range(len(parts))]
