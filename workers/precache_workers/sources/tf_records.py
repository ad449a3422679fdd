"""TFRecord files, whose records are `tf.train.Example` with an encoded image, or images.

A sample uses an example's features of the image, the label and the key, and those that fields start
from (bytes, and arrays of one axis): those that the user names,
or else those with the usual names of TensorFlow's image examples and of TensorFlow Datasets. Its
key is the value of the feature of keys, if the user names one, or else its file and its number
there. Its identity is the CRC-32C of its record, which every read checks.

Formats: https://www.tensorflow.org/tutorials/load_data/tfrecord (length, masked CRC-32C of the
length, data, masked CRC-32C of the data; all little-endian),
https://www.tensorflow.org/api_docs/python/tf/train/Example and
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from precache.codecs import kernels
from precache.errors import SampleError, SourceError
from precache.messages import did_you_mean, first_ones, printable
from precache.storage.base import FileInfo, Folder
from precache.store.labels import MOST_CLASSES
from precache.store.locations import Container
from precache_workers.sources.base import (
    IMAGE,
    NO_COLUMNS,
    Columns,
    Fetched,
    Sample,
    quoted,
    starts_as_image,
    too_large_error,
)
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Place,
    Read,
    Rows,
    Wanted,
    in_batches,
    read_places,
)
from precache_workers.sources.dataset_items import Part
from precache_workers.sources.file_ranges import open_file
from precache_workers.sources.labels import Label, label_of
from precache_workers.sources.listings import ColumnEvidence, Members
from precache_workers.sources.sample_parts import joined
from precache_workers.sources.splits import names_splits

IMAGE_FEATURES = ("image/encoded", "image", "image_raw", "encoded", "img", "jpg", "jpeg", "png")
LABEL_FEATURES = ("image/class/label", "label", "labels", "class", "target", "image/class/text")
"""Usual names of features. All records of a file have labels of the feature that is found first."""

_BYTES, _FLOATS, _NUMBERS = 1, 2, 3

Features = Mapping[str, tuple[int, memoryview]]
"""Name -> kind of its list, and the encoded list."""

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
        return pa.struct({name: pa.int64() for name in ("offset", "length", "crc")})

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows]:
        where = folder.path(file.name)
        with open_file(folder, file) as stream:
            yield from in_batches(self._samples(stream, file, where, members), self.places(), where)

    def _samples(
        self, stream: BinaryIO, file: FileInfo, where: str, members: Members
    ) -> Iterator[Place]:
        """Yield the samples of a file, and note the features that they use.

        A record that cannot be used is listed, and will be a hole.
        """
        columns, first, has_labels, seen = self.columns, None, False, set[str]()
        named, lacking = columns.inputs.names, {*columns.inputs.names}
        for number, (record, place) in enumerate(_records(stream, where)):
            parts = Parts(key=f"{file.name}/{number}" if columns.key else "")
            if record is not None:
                try:
                    parts = parts_of(record, columns)
                    if columns.label is None and parts.label_name:
                        columns = replace(columns, label=parts.label_name)
                        members.evidence.label = parts.label_name
                    self._look(members.evidence, parts, seen)
                except ValueError as error:
                    if not number:
                        raise SourceError(f"{where}: in its first record, {error}") from None
            first = first or parts
            has_labels = has_labels or parts.label is not None
            lacking.difference_update(parts.features)
            if parts.features or parts.image:
                members.notes[parts.note] += 1
            unit, etag = place["offset"] // UNIT_BYTES, f"crc32c:{place['crc']:08x}"
            size = -1 if named else len(parts.image)
            yield Place(parts.key, place, size, unit, etag, parts.label)
        if first is None:
            return
        if lacking:
            raise SourceError(f"{where}: in its records, {_lacks(min(lacking), first.features)}")
        if self.columns.label is None and (taken := [n for n in LABEL_FEATURES if n in named]):
            members.notes[f"{quoted(taken)} are inputs of fields, and no labels"] += 1
        if others := sorted(self._unused(first)):
            members.notes[f"Features that are not used: {quoted(others, 8)}"] += 1
        label = self.columns.label
        if label and not has_labels and label not in first.features:
            raise SourceError(f"{where}: in its first record, {_lacks(label, first.features)}")

    def _unused(self, parts: Parts) -> set[str]:
        used = self.columns.key, parts.image_name, parts.label_name, *self.columns.inputs.names
        return {*parts.features}.difference(used)

    def _look(self, evidence: ColumnEvidence, parts: Parts, seen: set[str]) -> None:
        """Note what features that are not used say of labels and splits."""
        features, new = parts.features, self._unused(parts) - seen
        seen |= new
        evidence.splits.update({name: [] for name in new if names_splits(name)})
        if self.columns.label is None:
            # The text of TensorFlow's own examples names the class, and two may share one.
            named = "image/class/text" if parts.label_name == "image/class/label" else ""
            rivals = [name for name in LABEL_FEATURES if name in new and name != named]
            evidence.rivals.update({name: set() for name in rivals})

        def values(name: str) -> list[str]:
            with contextlib.suppress(ValueError):
                if name in features and (label := _label(name, features)) is not None:
                    return [str(label)]
            return [""]

        evidence.look(values, values)

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        places = [place for _, place in wanted]
        ranges = [(place["offset"], place["length"] + 16) for place in places]

        def sample(number: int, data: bytes) -> Fetched | None:
            read = self._sample(data, **places[number])
            listed = not self.columns.inputs.names
            if listed or not isinstance(read, Sample) or read.nbytes <= most_bytes:
                return read
            return too_large_error(read.nbytes, most_bytes)

        return read_places(folder, container, ranges, sample)

    def _sample(self, data: bytes, offset: int, length: int, crc: int) -> Fetched | None:
        same = len(data) == length + 16 and _length(data[: _HEAD.size]) == length
        if not same or _TAIL.unpack(data[-_TAIL.size :])[0] != crc:
            return None
        record = data[_HEAD.size : -_TAIL.size]
        if _masked(record) != crc:
            return SampleError(_DAMAGED)
        try:
            parts = parts_of(record, self.columns)
            own = [(IMAGE, bytes(parts.image))] * self.columns.inputs.image
            return joined(dict([*own, *parts.inputs.items()]))
        except ValueError as error:
            return SampleError(f"its record cannot be used: {error}")


def _records(stream: BinaryIO, where: str) -> Iterator[tuple[bytes | None, dict[str, int]]]:
    """Yield the records of a file, None for a damaged one, and the place of each."""
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
        yield record if _masked(record) == crc else None, place
        offset += _HEAD.size + length + _TAIL.size


def _masked(data: bytes) -> int:
    """Return the masked CRC-32C of data, as TFRecord files store it."""
    crc = kernels.crc32c(data)
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


# --- examples -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """The parts of a record that form a sample: the image, not copied; label and key.

    Attributes
    ----------
    inputs
        Values of the features that fields name; None of those that the record lacks.
    image_name, label_name
        Names of the features that were used; empty if the record is the image itself.
    features
        All features of the record.
    """

    image: bytes | memoryview = b""
    label: Label | None = None
    key: str = ""
    image_name: str = ""
    label_name: str = ""
    features: Features = field(default_factory=dict)
    inputs: dict[Part, Any] = field(default_factory=dict)

    @property
    def note(self) -> str:
        if not self.features:
            return "Each record is an image, without a label"
        labels = f"labels from {self.label_name!r}" if self.label_name else "no labels"
        images = f"Images from the feature {self.image_name!r}, " if self.image_name else ""
        named = f"nputs of fields from {quoted(map(str, self.inputs))}, " if self.inputs else ""
        return f"{images}{('i' if images else 'I') * bool(named)}{named}{labels}"


def parts_of(record: bytes, columns: Columns) -> Parts:
    """Extract image, label and key from a record.

    Raises
    ------
    ValueError
        The record is neither an image nor an example, or its features are missing or of a wrong
        kind.
    """
    if starts_as_image(record) and columns.image is None and not columns.inputs.names:
        return Parts(memoryview(record))
    features = _features(memoryview(record))
    for name in (columns.image, columns.key):
        if name is not None and name not in features:
            raise ValueError(_lacks(name, features))
    named, image_name = columns.inputs.names, ""
    images: Sequence[memoryview] | np.ndarray = ()
    if columns.inputs.image:
        image_name = columns.image or _guess_image(features, named)
        columns.inputs.require_clear(features, image_name, "a record")
        if features[image_name][0] != _BYTES:
            raise ValueError(
                f"its feature {image_name!r} has no bytes; an image is a feature of bytes"
            )
        images = _values(image_name, features)
        if len(images) != 1:
            raise ValueError(f"its feature {image_name!r} has {len(images)} images")
    usual = [name for name in LABEL_FEATURES if name not in named]
    labels = usual if columns.label is None else [columns.label]
    label_name = next((name for name in labels if name in features), "")
    label = _label(label_name, features) if label_name else None
    key = _key(columns.key, features) if columns.key else ""
    inputs: dict[Part, Any] = {name: _input(name, features) for name in named}
    image = images[0] if len(images) else b""
    return Parts(image, label, key, image_name, label_name, features, inputs)


def _input(name: str, features: Features) -> bytes | np.ndarray | SampleError | None:
    """Return the value of a feature: bytes, or (n,) int64 or float32; None if it has none."""
    values = _values(name, features) if name in features else []
    if isinstance(values, np.ndarray):
        return values
    if len(values) > 1:
        return SampleError(f"has {len(values):,} values of bytes, and a field starts from one")
    return bytes(values[0]) if values else None


def _guess_image(features: Features, inputs: Collection[str]) -> str:
    able = [name for name, (kind, _) in features.items() if kind == _BYTES]
    able = [name for name in able if name not in inputs] or able
    images = [name for name in able if any(map(starts_as_image, _values(name, features)[:1]))]
    usual = [name for name in IMAGE_FEATURES if name in able]
    candidates = [name for name in usual if name in images] or usual[:1] or images
    if not candidates:
        raise ValueError(f"it has no feature with an encoded image; it has {_names(features)}")
    if len(candidates) > 1:
        raise ValueError(
            f"it has several images: {first_ones(sorted(candidates))}; choose one by --image-column"
        )
    return candidates[0]


def _lacks(name: str, features: Collection[str]) -> str:
    return f"it has no feature {name!r}{did_you_mean(name, features)}; it has {_names(features)}"


def _names(features: Iterable[str]) -> str:
    return first_ones([printable(repr(name)) for name in features]) or "none"


def _label(name: str, features: Features) -> Label | None:
    """Return a label."""
    found = _values(name, features, MOST_CLASSES + 1)
    values: list[Any]
    if isinstance(found, np.ndarray):
        values = found.tolist()
    else:
        try:
            values = [bytes(value).decode() for value in found]
        except UnicodeDecodeError:
            none = "give --label-column '' for no label, or the feature that has it"
            raise ValueError(f"its feature {name!r} has bytes that are no text; {none}") from None
    try:
        return label_of(values[0] if len(values) == 1 else values)
    except ValueError as error:
        raise ValueError(f"its feature {name!r} {error}") from None


def _key(name: str, features: Features) -> str:
    """Return a key, whose bytes may not be UTF-8; empty for none."""
    key: Label | None
    if features[name][0] == _BYTES and len(values := _values(name, features)) == 1:
        key = bytes(values[0]).decode(errors="surrogateescape")
    else:
        key = _label(name, features)
    if isinstance(key, list | float):
        raise ValueError(f"its feature {name!r} is {printable(str(key)[:60])}; a key is one text")
    return "" if key is None else str(key)


# --- encoding -----------------------------------------------------------------------------------


def _features(data: memoryview) -> Features:
    """Return the features of an example; the last one counts if a name occurs twice."""
    features: dict[str, tuple[int, memoryview]] = {}
    for _, entries in _fields(data, 1):
        for _, entry in _fields(entries, 1):
            parts = dict(_fields(entry, 1, 2))
            lists = list(_fields(parts.get(2, data[:0]), _BYTES, _FLOATS, _NUMBERS))
            if lists:
                features[bytes(parts.get(1, b"")).decode()] = lists[-1]
    if not features:
        raise ValueError("it has no features")
    return features


def _values(
    name: str, features: Features, most: int | None = None
) -> Sequence[memoryview] | np.ndarray:
    """Return the values of a feature: bytes, or an array of numbers, at most so many integers."""
    held, data = features[name]
    if held == _FLOATS:
        return np.frombuffer(b"".join(bytes(value) for _, value in _fields(data, 1)), "<f4")
    if held == _BYTES:
        return [value for _, value in _fields(data, 1)]
    numbers: list[int] = []
    for _, value in _fields(data, 1):
        place = 0
        while place < len(value) and (most is None or len(numbers) < most):
            number, place = _varint(value, place)
            number &= 2**64 - 1
            numbers.append(number - 2**64 if number >> 63 else number)
    return np.array(numbers, np.int64)


def _fields(data: memoryview, *wanted: int) -> Iterator[tuple[int, memoryview]]:
    """Yield (field number, content) of the wanted fields of a message."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        start, wire = place, tag & 7
        if wire == 0:
            _, place = _varint(data, place)
        elif wire == 2:
            length, start = _varint(data, place)
            place = start + length
        elif wire in (1, 5):
            place += 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field has the wire type {wire}")
        if place > len(data):
            raise ValueError("a field is longer than the message that contains it")
        if tag >> 3 in wanted:
            yield tag >> 3, data[start:place]


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    number = shift = 0
    while shift < 70:
        if place >= len(data):
            raise ValueError("it is cut off in a number")
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
        shift += 7
    raise ValueError("a number has more than 64 bits")
