"""Compressed files as forward-only streams."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from precache.errors import SourceError, StorageError
from precache_workers.runtime.time_limit import samples_at_work

MOST_RATIO, LEAST_LIMIT = 1000, 64 << 20
"""A file is refused if it decompresses to more than `MOST_RATIO` times its size and more than
`LEAST_LIMIT` bytes."""

SKIPPED_BYTES = 1 << 20
"""Bytes that are decompressed at a time to skip them."""


def compression_of(start: bytes, where: str) -> str:
    """Return the compression of a tar archive from its first bytes; "" if it has none.

    Raises
    ------
    SourceError
        It has one that is not read.
    """
    if start[257:262] == b"ustar":  # plain tar: a member's name may look like a magic number
        return ""
    for magic, program in _SLOW.items():
        if start.startswith(magic):
            raise SourceError(
                f"{where} is compressed by {program}, which takes too long to be read for each "
                f"shard; decompress it ({program} -d), or compress it by gzip or zstd instead"
            )
    return next((name for name, (magic, _) in _COMPRESSIONS.items() if start.startswith(magic)), "")


class DecompressedFile:
    """The contents of a compressed file as a forward-only stream.

    Parameters
    ----------
    name
        Compression, as `compression_of` returns it.
    size
        Size of the compressed file in bytes.
    where
        Path or URL of the file, for errors.
    """

    def __init__(self, stream: BinaryIO, name: str, size: int, where: str) -> None:
        self._stream = _COMPRESSIONS[name][1](stream)
        self._place = 0
        self._most_bytes = max(LEAST_LIMIT, MOST_RATIO * size)
        self._where = where

    def seek(self, offset: int) -> None:
        """Skip forward to an offset.

        Raises
        ------
        ValueError
            The stream is already past the offset.
        """
        if offset < self._place:
            raise ValueError(f"cannot go back to byte {offset:,}")
        while self._place < offset and self.read(min(SKIPPED_BYTES, offset - self._place)):
            pass

    def finish(self) -> None:
        """Decompress the rest to verify all checksums."""
        while self.read(SKIPPED_BYTES):
            pass

    def read(self, size: int) -> bytes:
        """Return `size` bytes, or fewer at the end.

        Raises
        ------
        SourceError
            The file is damaged, cut off, or decompresses to far more than its size.
        """
        parts = []
        while size > 0 and (data := self._part(size)):
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def _part(self, size: int) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except StorageError:
            raise
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise SourceError(
                f"{self._where} cannot be decompressed: {error}; it is damaged, cut off, or takes "
                "too much memory"
            ) from None
        samples_at_work().advance()  # skipping may take long
        self._place += len(data)
        if self._place > self._most_bytes:
            raise SourceError(
                f"{self._where} decompresses to over {MOST_RATIO:,} times its size; decompress it "
                "yourself if you trust it"
            )
        return data


def _open_zstd(stream: BinaryIO) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd")


_SLOW = {b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
"""Magic number of a compression that is not read -> the program that decompresses it."""

_SKIPPABLE = tuple(bytes([0x50 + number, 0x2A, 0x4D, 0x18]) for number in range(16))
"""Magic numbers of skippable zstd frames; files of pzstd begin with one."""

_COMPRESSIONS: dict[str, tuple[bytes | tuple[bytes, ...], Callable[[Any], Any]]] = {
    "gzip": (b"\x1f\x8b", lambda stream: gzip.GzipFile(fileobj=stream)),
    "zstd": ((b"\x28\xb5\x2f\xfd", *_SKIPPABLE), _open_zstd),
}
"""Compression -> its magic number or numbers, and the function that opens a stream of it."""
