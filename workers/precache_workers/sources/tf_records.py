"""TFRecord files, whose records are examples with an image, or images.

A sample's key is the value of the feature of keys, if the user names one, or else its file and its
number there. Its identity is the CRC-32C of its record, which every read checks.

Format: https://www.tensorflow.org/tutorials/load_data/tfrecord (length, masked CRC-32C of the
length, data, masked CRC-32C of the data; all little-endian).
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import Any

import google_crc32c

from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.storage.base import FileInfo, Folder
from precache.store.locations import Container
from precache_workers.sources.base import NO_COLUMNS, Columns, Fetched
from precache_workers.sources.containers import (
    UNIT_BYTES,
    GrowingRows,
    Members,
    Read,
    TimeUpError,
    Wanted,
    no_rows,
)
from precache_workers.sources.file_ranges import open_file, read_parts
from precache_workers.sources.tf_examples import (
    Parts,
    parts_of,
    require_label,
    sample_of,
)

_DAMAGED = "its record is damaged: it has another CRC-32C"
_HEAD, _TAIL = struct.Struct("<QI"), struct.Struct("<I")


@dataclass(frozen=True)
class TFRecordFormat:
    """TFRecord files without compression; see the module."""

    columns: Columns = NO_COLUMNS
    noun: str = "a TFRecord file"
    suffixes: tuple[str, ...] = (".tfrecord", ".tfrecords")
    typed: bool = True
    checks_members: bool = True

    def places(self) -> Any:
        """Return the type of the places of records, with their masked CRC-32C."""
        import pyarrow as pa

        return pa.struct({name: pa.int64() for name in ("offset", "length", "crc")})

    def scan(self, folder: Folder, file: FileInfo, until: float) -> Members:
        members, where, offset = Members(rows=no_rows(self.places())), folder.path(file.name), 0
        rows, first = GrowingRows(self.places()), None
        with open_file(folder, file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            while head := stream.read(_HEAD.size):
                if time.monotonic() > until:
                    raise TimeUpError
                length = _length(head)
                if length is None:
                    raise SourceError(_no_record(where, offset, head))
                if offset + _HEAD.size + length + _TAIL.size > size:
                    raise SourceError(
                        f"{where} is cut off: the record at byte {offset:,} has {length:,} bytes"
                    )
                record = stream.read(length)
                [crc] = _TAIL.unpack(stream.read(_TAIL.size))
                try:
                    if _masked(record) != crc:
                        raise ValueError(_DAMAGED)
                    parts = parts_of(record, self.columns)
                except ValueError as error:
                    if not len(rows) and str(error) != _DAMAGED:
                        raise SourceError(f"{where}: in its first record, {error}") from None
                    parts = Parts(key=f"{file.name}/{len(rows)}")  # it will be a hole
                first = first or parts
                if parts.image:
                    members.notes[parts.note] += 1
                rows.add(
                    parts.key,
                    {"offset": offset, "length": length, "crc": crc},
                    unit=offset // UNIT_BYTES,
                    size=len(parts.image),
                    etag=f"crc32c:{crc:08x}",
                    label=parts.label,
                )
                offset += _HEAD.size + length + _TAIL.size
        members.take(rows, file.name, self.columns.key, where)
        require_label(members, self.columns, first, where)
        return members

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
