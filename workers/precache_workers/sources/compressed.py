"""Compressed files as forward-only streams."""

from __future__ import annotations

import io
import os
from typing import BinaryIO

from precache.errors import SourceError
from precache_workers.runtime.time_limit import samples_at_work
from precache_workers.sources.parquet_tables import damaged

MOST_RATIO, LEAST_LIMIT = 1000, 64 << 20
"""A file is refused if it decompresses to more than `MOST_RATIO` times its size and more than
`LEAST_LIMIT` bytes."""

AT_ONCE = 256 << 10
"""Bytes that are decompressed at a time."""

_PROGRAMS = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz",
    **{bytes([0x50 + number, 0x2A, 0x4D, 0x18]): "zstd" for number in range(16)},
}  # fmt: skip
"""Magic number of a compression, or of a skippable frame -> the program that decompresses it."""


class _Decompressed(io.RawIOBase):
    def __init__(self, packed: BinaryIO, program: str, size: int, where: str) -> None:
        import pyarrow as pa

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
        skipped = memoryview(bytearray(AT_ONCE))
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
    return io.BufferedReader(_Decompressed(archive, program, size, where), AT_ONCE)
