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
from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c

from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.storage.base import FileInfo, Folder
from precache_workers.sources.base import FILES_PER_TICK, NO_COLUMNS, Columns, Fetched
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Members,
    RequestedSample,
    TimeUpError,
    changed,
)
from precache_workers.sources.file_ranges import open_file, read_parts
from precache_workers.sources.parquet_tables import name_rows
from precache_workers.sources.tf_examples import (
    Parts,
    add_parts,
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

    def scan(self, folder: Folder, file: FileInfo, until: float) -> Members:
        members, where, offset = Members(), folder.path(file.name), 0
        first: Parts | None = None
        with open_file(folder, file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            while head := stream.read(_HEAD.size):
                if len(members.keys) % FILES_PER_TICK == 0 and time.monotonic() > until:
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
                location = f"{file.name}#{offset // UNIT_BYTES}\t{offset}:{length}:{crc}"
                try:
                    if _masked(record) != crc:
                        raise ValueError(_DAMAGED)
                    parts = parts_of(record, self.columns)
                except ValueError as error:
                    if not members.keys and str(error) != _DAMAGED:
                        raise SourceError(f"{where}: in its first record, {error}") from None
                    parts = Parts(key=f"{file.name}/{len(members.keys)}")  # it will be a hole
                first = first or parts
                add_parts(members, parts, where, location, f"crc32c:{crc:08x}")
                offset += _HEAD.size + length + _TAIL.size
        require_label(members, self.columns, first, where)
        name_rows(members, file.name, self.columns.key, where)
        return members

    def read(
        self,
        folder: Folder,
        name: str,
        unit: str,
        wanted: Sequence[RequestedSample],
        most_bytes: int,
    ) -> Sequence[Fetched]:
        places = [tuple(map(int, sample.place.split(":"))) for sample in wanted]
        ranges = [(name, offset, length + 16) for offset, length, _ in places]
        return [
            self._sample(folder, name, sample.key, length, crc, data)
            for sample, (_, length, crc), data in zip(
                wanted, places, read_parts(folder, ranges), strict=True
            )
        ]

    def _sample(
        self,
        folder: Folder,
        name: str,
        key: str,
        length: int,
        crc: int,
        data: bytes | StorageError,
    ) -> Fetched:
        if isinstance(data, StorageError):
            return FetchError(str(data))
        same = len(data) == length + 16 and _length(data[: _HEAD.size]) == length
        if not same or _TAIL.unpack(data[-_TAIL.size :])[0] != crc:
            return changed(folder, name, key)
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
