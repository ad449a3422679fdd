"""Tar archives in the layout of WebDataset: members that share a stem are one sample.

The images of a stem are the inputs of its sample, named by their suffixes; see `sample_inputs` for
the evidence that they are not samples of their own. Of members of one name the last one counts, as
when the archive is extracted. The label is the text
of the ``.cls`` member, of any kind that `infer_kind` knows. In an archive without ``.cls`` members,
it is the first folder of the stem. A sample's key is the name of its first image.

The identity of a sample consists of the sizes of its images and the times in their headers, and of
their suffixes if there are several images. Some writers give all members the same time, which
identifies nothing. So where several samples share a time, the identity of the archive replaces it:
after any change of the archive, these samples are compared by content.

All samples of a compressed archive form one unit: a read decompresses the archive from its start.
"""

from __future__ import annotations

import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import xxhash

from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.messages import printable
from precache.storage.base import (
    NO_FILE,
    NO_NAME,
    NOT_UTF8,
    REPLACED,
    SAME_KEY,
    SERVICE_FOLDER,
    FileInfo,
    Folder,
    Range,
)
from precache_workers.sources.base import (
    FILES_PER_TICK,
    TAR_SUFFIXES,
    Fetched,
    Sample,
    count_ignored,
    first_folder,
    in_service_folder,
    is_image,
    is_utf8,
)
from precache_workers.sources.compressed import DecompressedFile, compression_of
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Members,
    RequestedSample,
    TimeUpError,
    changed,
    container_etag,
    member_key,
)
from precache_workers.sources.file_ranges import open_file, read_parts, require_size
from precache_workers.sources.labels import MOST_TEXT, infer_kind
from precache_workers.sources.sample_inputs import LACKS, SampleName, count_combination
from precache_workers.sources.tar_index import between_members
from precache_workers.sources.tar_members import BLOCK, Member, read_members

COMPRESSED_NOTE = (
    "{count} tar archives are compressed: each shard decompresses an archive from its beginning to "
    "the last sample that it needs, so decompress large ones first"
)

MOST_IMAGES = 256
"""Most images of a sample."""


@dataclass(frozen=True)
class TarFormat:
    """Tar archives; see the module."""

    sample_name: SampleName | None = None
    noun: str = "a tar archive"
    suffixes: tuple[str, ...] = TAR_SUFFIXES
    typed: bool = False

    def scan(self, folder: Folder, file: FileInfo, until: float) -> Members:
        members, where = Members(), folder.path(file.name)
        with open_file(folder, file, likely=between_members(folder, file)) as packed:
            compression = compression_of(packed.read(BLOCK))
            packed.seek(0)
            stream: BinaryIO | DecompressedFile = packed
            if compression:
                require_size(folder, file)
                stream = DecompressedFile(packed, compression, file.size, where)
                members.notes[COMPRESSED_NOTE] += 1
            size = math.inf if compression else file.size
            samples = _ArchiveSamples(file, compression, self.sample_name, members)
            for number, member in enumerate(read_members(stream, where, size)):
                if number % FILES_PER_TICK == 0 and time.monotonic() > until:
                    raise TimeUpError
                key = member_key(file.name, member.name) if member.regular else ""
                if not key:
                    members.left_out[NO_FILE if key is not None else NO_NAME] += 1
                    continue
                image, is_label = is_image(key), key.lower().endswith(".cls")
                if not (image or is_label):
                    count_ignored(members.ignored, key)
                elif image and in_service_folder(key[len(file.name) + 1 :]):
                    members.leave_out(SERVICE_FOLDER, key)
                elif not is_utf8(member.name):
                    members.leave_out(NOT_UTF8, key)
                elif image:
                    samples.add_image(key, member)
                else:
                    samples.add_label(key, _label(stream, member, where))
            if isinstance(stream, DecompressedFile):
                stream.finish()
        samples.finish()
        return members

    def read(
        self,
        folder: Folder,
        name: str,
        unit: str,
        wanted: Sequence[RequestedSample],
        most_bytes: int,
    ) -> Sequence[Fetched]:
        places = [[_Location.of(text) for text in sample.place.split(",")] for sample in wanted]
        parts = [
            (name, place.offset - BLOCK, BLOCK + place.size)
            for some in places
            for place in some
            if place.exists
        ]
        compression, _, size = unit.removeprefix(">").partition(":")
        try:
            contents = iter(
                _decompressed_parts(folder, FileInfo(name, int(size), -1, ""), compression, parts)
                if size
                else read_parts(folder, parts)
            )
        except SourceError:  # the archive could be decompressed when it was listed
            return [changed(folder, name, sample.key) for sample in wanted]
        return [
            _sample(folder, name, sample.key, some, [next(contents) for one in some if one.exists])
            for sample, some in zip(wanted, places, strict=True)
        ]


def _decompressed_parts(
    folder: Folder, file: FileInfo, compression: str, parts: Sequence[Range]
) -> list[bytes | StorageError]:
    """Read parts of a compressed archive, by their offsets in the decompressed contents."""
    contents: dict[Range, bytes] = {}
    with open_file(folder, file) as packed:
        stream = DecompressedFile(packed, compression, file.size, folder.path(file.name))
        for part in sorted(set(parts)):
            _, start, length = part
            stream.seek(start)
            contents[part] = stream.read(length)
    return [contents[part] for part in parts]


class _Location(NamedTuple):
    """Location of an image: offset, size, CRC-32 of its header, and suffix.

    An image that the sample lacks, and most others have, is nowhere: it has no size.
    """

    offset: int
    size: int
    crc: int
    suffix: str

    @property
    def exists(self) -> bool:
        return self.size >= 0

    @classmethod
    def of(cls, text: str) -> _Location:
        if text.startswith(LACKS):
            return cls(0, -1, 0, text.removeprefix(LACKS))
        offset, size, crc, suffix = text.split(":", 3)
        return cls(int(offset), int(size), int(crc), suffix)

    def __str__(self) -> str:
        return f"{self.offset}:{self.size}:{self.crc}:{self.suffix}"


def _sample(
    folder: Folder,
    name: str,
    key: str,
    places: Sequence[_Location],
    contents: Sequence[bytes | StorageError],
) -> Fetched:
    inputs: dict[str | int, bytes | SampleError] = {}
    digest, rest = xxhash.xxh3_128(), iter(contents)
    for place in places:
        if len(places) > 1:
            digest.update(f"{place.suffix}:{place.size}:".encode())
        if not place.exists:
            why = f"has no image {place.suffix!r}, which most others have"
            inputs[place.suffix] = SampleError(why)
            continue
        data = next(rest)
        if isinstance(data, StorageError):
            return FetchError(str(data))
        if len(data) != BLOCK + place.size or zlib.crc32(data[:BLOCK]) != place.crc:
            return changed(folder, name, key)
        inputs[place.suffix] = image = data[BLOCK:]
        digest.update(image)
    return Sample(inputs, content=digest.hexdigest())


class _Image(NamedTuple):
    """An image of a sample: its place, and the time in its header."""

    place: _Location
    mtime: int


class _ArchiveSamples:
    """The samples of an archive, in the order of their first images."""

    def __init__(
        self, file: FileInfo, compression: str, sample_name: SampleName | None, members: Members
    ) -> None:
        self._file = file
        self._compression = compression
        self._first_dot = sample_name in (None, "first-dot")
        self._whole = sample_name == "whole"
        self._members = members
        self._images: dict[str, dict[str, _Image]] = {}
        self._labels: dict[str, tuple[str, str]] = {}

    def add_image(self, key: str, member: Member) -> None:
        stem, suffix = self._split(key)
        suffix = re.sub(r"[\s:,]", "_", suffix)
        images = self._images.setdefault(key if self._whole else stem, {})
        if images.pop(key, None) is not None:
            self._members.leave_out(REPLACED, key)
        elif len(images) == MOST_IMAGES:
            raise SourceError(
                f"{self._file.name} has over {MOST_IMAGES} images {printable(stem)}.…, and those "
                "that share their names up to the first dot are one sample; if each image is a "
                "sample, give --sample-name whole, else rename them"
            )
        location = _Location(member.offset, member.size, member.crc, suffix)
        images[key] = _Image(location, member.mtime)

    def add_label(self, key: str, label: str) -> None:
        stem, _ = self._split(key)
        name, before = self._labels.get(stem, (key, label))
        if name == key and stem in self._labels:
            self._members.leave_out(REPLACED, key)
        elif before != label:
            way_out = " (--sample-name last-dot, if each is of another sample)"
            raise SourceError(
                f"{self._file.name} has two labels of {printable(stem)}: {printable(before)} and "
                f"{printable(label)}; remove one{way_out if self._first_dot else ''}"
            )
        self._labels[stem] = key, label

    def finish(self) -> None:
        """Add all samples to the members of the archive."""
        members = self._members
        samples = sorted(self._images.items(), key=lambda item: _first(item[1]).place.offset)
        times = Counter(
            mtime for _, images in samples for mtime in {image.mtime for image in images.values()}
        )
        archive = container_etag(self._file)
        unit, start = 0, 0
        whole = f">{self._compression}:{self._file.size}" if self._compression else ""
        prefix = f"{self._file.name}/"
        used: set[str] = set()
        for name, images in samples:
            key = next(iter(images))
            stem = self._split(key)[0] if self._whole else name
            used.add(stem)
            places = [image.place for image in images.values()]
            mtimes = [image.mtime for image in images.values()]
            suffixes = [place.suffix for place in places]
            if len(suffixes) > 1 and len(set(suffixes)) < len(suffixes):
                members.leave_out(SAME_KEY, key)
                continue
            count_combination(members.combinations, suffixes, key)
            size = sum(place.size for place in places)
            offset = places[0].offset
            if offset + size - start > UNIT_BYTES and offset > start:
                unit, start = unit + 1, offset
            folder = first_folder(key[len(prefix) :])
            label = self._labels.get(stem, ("", ""))[1] if self._labels else folder
            alone = len(samples) == 1
            etag, time_ns = "", mtimes[0]
            if alone or any(times[mtime] > 1 for mtime in mtimes):
                etag, time_ns = archive, -1
            if len(places) > 1 and (etag or time_ns >= 0):
                described = [(place.suffix, place.size) for place in places]
                etag = xxhash.xxh3_64_hexdigest(f"{etag} {described} {mtimes}".encode())
                time_ns = -1
            location = f"{self._file.name}#{whole or unit}\t{','.join(map(str, places))}"
            members.add(key, location, size=size, mtime=time_ns, etag=etag, label=label)
        if self._labels:
            members.kind = infer_kind(members.labels, members.keys, self._file.name)
            members.label_rule = "beside"
        elif any(members.labels):
            members.kind, members.label_rule = "names", "folder"
        lone = len(self._labels.keys() - used)
        if lone:
            members.notes["{count} .cls members of tar archives have no image beside them"] += lone

    def _split(self, key: str) -> tuple[str, str]:
        """Split a key into stem and suffix at the first or last dot of the file name."""
        folder, slash, name = key.rpartition("/")
        if self._first_dot:
            stem, _, suffix = name[1:].partition(".")
        else:
            stem, _, suffix = name[1:].rpartition(".")
        return f"{folder}{slash}{name[:1]}{stem}", suffix.lower()


def _first(images: dict[str, _Image]) -> _Image:
    return next(iter(images.values()))


def _label(stream: BinaryIO | DecompressedFile, member: Member, where: str) -> str:
    if member.size > MOST_TEXT:
        raise SourceError(
            f"{where}: {printable(member.name)} has {member.size:,} bytes; a .cls member has a "
            "class number or name"
        )
    stream.seek(member.offset)
    try:
        return stream.read(member.size).decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise SourceError(f"{where}: {printable(member.name)} is not UTF-8") from None
