"""TFRecord files, whose records are examples with an image, or images.

A sample's key is the value of the feature of keys, if the user names one, or else its file and its
number there. Its identity is the CRC-32C of its record, which every read checks.

Format: https://www.tensorflow.org/tutorials/load_data/tfrecord (length, masked CRC-32C of the
length, data, masked CRC-32C of the data; all little-endian).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import google_crc32c

from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.storage.base import FileInfo, Folder
from precache.store.locations import Container
from precache_workers.sources.base import NO_COLUMNS, Columns, Fetched
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Members,
    Read,
    Rows,
    Wanted,
    in_batches,
)
from precache_workers.sources.file_ranges import open_file, read_parts
from precache_workers.sources.tf_examples import sample_of, samples_of

_DAMAGED = "its record is damaged: it has another CRC-32C"
_HEAD, _TAIL = struct.Struct("<QI"), struct.Struct("<I")


@dataclass(frozen=True)
class TFRecordFormat:
    """TFRecord files without compression; see the module."""

    columns: Columns = NO_COLUMNS
    suffixes: tuple[str, ...] = (".tfrecord", ".tfrecords")
    checks_members: bool = True

    def places(self) -> Any:
        """Return the type of the places of records, with their masked CRC-32C."""
        import pyarrow as pa

        return pa.struct({name: pa.int64() for name in ("offset", "length", "crc")})

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows]:
        where = folder.path(file.name)
        with open_file(folder, file) as stream:
            samples = samples_of(_records(stream, where), self.columns, file, where, members)
            yield from in_batches(samples, self.places())

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        places = wanted.places.to_pylist()
        ranges = [(container.name, place["offset"], place["length"] + 16) for place in places]
        if any(start < 0 or length < 16 for _, start, length in ranges):
            return [None] * len(places)
        contents = read_parts(folder, ranges)
        return [
            self._sample(**place, data=data) for place, data in zip(places, contents, strict=True)
        ]

    def _sample(
        self, offset: int, length: int, crc: int, data: bytes | StorageError
    ) -> Fetched | None:
        if isinstance(data, StorageError):
            return FetchError(str(data))
        same = len(data) == length + 16 and _length(data[: _HEAD.size]) == length
        if not same or _TAIL.unpack(data[-_TAIL.size :])[0] != crc:
            return None
        record = data[_HEAD.size : -_TAIL.size]
        return SampleError(_DAMAGED) if _masked(record) != crc else sample_of(record, self.columns)


def _records(
    stream: BinaryIO, where: str
) -> Iterator[tuple[bytes | SampleError, Mapping[str, Any]]]:
    """Yield the records of a file, and the place of each."""
    size, offset = stream.seek(0, os.SEEK_END), 0
    stream.seek(0)
    while head := stream.read(_HEAD.size):
        length = _length(head)
        if length is None:
            raise SourceError(_no_record(where, offset, head))
        if offset + _HEAD.size + length + _TAIL.size > size:
            raise SourceError(
                f"{where} is cut off: the record at byte {offset:,} has {length:,} bytes"
            )
        record = stream.read(length)
        [crc] = _TAIL.unpack(stream.read(_TAIL.size))
        place = {"offset": offset, "length": length, "crc": crc}
        found = {"place": place, "unit": offset // UNIT_BYTES, "etag": f"crc32c:{crc:08x}"}
        yield record if _masked(record) == crc else SampleError(_DAMAGED), found
        offset += _HEAD.size + length + _TAIL.size


def _masked(data: bytes) -> int:
    """Return the masked CRC-32C of data, as TFRecord files store it."""
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _length(head: bytes) -> int | None:
    """Return the length of a record; None if the checksum of the length does not match."""
    if len(head) < _HEAD.size:
        return None
    length, crc = _HEAD.unpack(head)
    return int(length) if _masked(head[:8]) == crc else None


def _no_record(where: str, offset: int, head: bytes) -> str:
    if offset:
        return f"{where} is damaged, or cut off: at byte {offset:,} it has no record"
    if head.startswith((b"\x1f\x8b", b"\x78")):
        return f"{where} is compressed: decompress it, which hardly makes images larger"
    return f"{where} is no TFRecord file; give --source-kind"
