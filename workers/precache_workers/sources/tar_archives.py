"""Tar archives in the layout of WebDataset: members that share a stem are one sample.

The images of a stem are the inputs of its sample, named by their suffixes. The label is the text
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

from precache.errors import FetchError, SourceError, StorageError
from precache.messages import printable
from precache.storage.base import NO_FILE, NO_NAME, FileInfo, Folder, Range
from precache_workers.sources.base import (
    FILES_PER_TICK,
    TAR_SUFFIXES,
    Fetched,
    Sample,
    first_folder,
    is_image,
    require_utf8,
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

    noun: str = "a tar archive"
    suffixes: tuple[str, ...] = TAR_SUFFIXES

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
            samples = _ArchiveSamples(file, compression)
            for number, member in enumerate(read_members(stream, where, size)):
                if number % FILES_PER_TICK == 0 and time.monotonic() > until:
                    raise TimeUpError
                key = member_key(file.name, member.name) if member.regular else ""
                if not key:
                    members.left_out[NO_FILE if key is not None else NO_NAME] += 1
                elif is_image(key):
                    samples.add_image(key, member)
                elif key.lower().endswith(".cls"):
                    samples.add_label(key, _label(stream, member, where))
                else:
                    members.ignored += 1
                    suffix = key.rpartition("/")[2].partition(".")[2]
                    if suffix in ("txt", "json"):
                        members.notes[
                            f"{{count}} .{suffix} members of tar archives are not used: text and "
                            "JSON beside an image cannot be stored yet"
                        ] += 1
            if isinstance(stream, DecompressedFile):
                stream.finish()
        samples.finish(members)
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
            (name, place.offset - BLOCK, BLOCK + place.size) for some in places for place in some
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
            _sample(folder, name, sample.key, some, [next(contents) for _ in some])
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
    """Location of an image: offset, size, CRC-32 of its header, and suffix."""

    offset: int
    size: int
    crc: int
    suffix: str

    @classmethod
    def of(cls, text: str) -> _Location:
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
    inputs: dict[str | int, bytes] = {}
    digest = xxhash.xxh3_128()
    for place, data in zip(places, contents, strict=True):
        if isinstance(data, StorageError):
            return FetchError(str(data))
        if len(data) != BLOCK + place.size or zlib.crc32(data[:BLOCK]) != place.crc:
            return changed(folder, name, key)
        inputs[place.suffix] = image = data[BLOCK:]
        if len(places) > 1:
            digest.update(f"{place.suffix}:{place.size}:".encode())
        digest.update(image)
    return Sample(inputs, content=digest.hexdigest())


class _Images(NamedTuple):
    """The images of a sample: key of the first, stem of all, places by suffix, and times."""

    key: str
    stem: str
    places: dict[str, _Location]
    mtimes: list[int]


class _ArchiveSamples:
    """The samples of an archive, in the order of their first images."""

    def __init__(self, file: FileInfo, compression: str) -> None:
        self._file = file
        self._compression = compression
        self._images: list[_Images] = []
        self._labels: dict[str, str] = {}

    def add_image(self, key: str, member: Member) -> None:
        stem, suffix = _split(key)
        suffix = re.sub(r"[\s:,]", "_", suffix)
        place = _Location(member.offset, member.size, member.crc, suffix)
        if not self._images or self._images[-1].stem != stem:
            self._images.append(_Images(key, stem, {suffix: place}, [member.mtime]))
            return
        require_utf8([key])
        _, _, places, mtimes = self._images[-1]
        if suffix in places:
            raise SourceError(
                f"{self._file.name} has two images {printable(f'{stem}.{suffix}')}; rename or "
                "remove one"
            )
        if len(places) == MOST_IMAGES:
            raise SourceError(
                f"{self._file.name} has over {MOST_IMAGES} images {printable(stem)}.…: those that "
                "share a name up to the first dot are one sample; rename them"
            )
        places[suffix] = place
        mtimes.append(member.mtime)

    def add_label(self, key: str, label: str) -> None:
        stem, _ = _split(key)
        if self._labels.setdefault(stem, label) != label:
            two = f"{printable(self._labels[stem])} and {printable(label)}"
            raise SourceError(
                f"{self._file.name} has two labels of {printable(stem)}: {two}; remove one"
            )

    def finish(self, members: Members) -> None:
        """Add all samples to the members of the archive."""
        times = Counter(mtime for images in self._images for mtime in set(images.mtimes))
        archive = container_etag(self._file)
        unit, start = 0, 0
        whole = f">{self._compression}:{self._file.size}" if self._compression else ""
        prefix = f"{self._file.name}/"
        used: set[str] = set()
        for key, stem, places, mtimes in self._images:
            size = sum(place.size for place in places.values())
            offset = next(iter(places.values())).offset
            if offset + size - start > UNIT_BYTES and offset > start:
                unit, start = unit + 1, offset
            used.add(stem)
            folder = first_folder(key[len(prefix) :])
            label = self._labels.get(stem, "") if self._labels else folder
            alone = len(self._images) == 1
            etag, time_ns = "", mtimes[0]
            if alone or any(times[mtime] > 1 for mtime in mtimes):
                etag, time_ns = archive, -1
            if len(places) > 1 and (etag or time_ns >= 0):
                images = [(place.suffix, place.size) for place in places.values()]
                etag = xxhash.xxh3_64_hexdigest(f"{etag} {images} {mtimes}".encode())
                time_ns = -1
            location = f"{self._file.name}#{whole or unit}\t{','.join(map(str, places.values()))}"
            members.add(key, location, size=size, mtime=time_ns, etag=etag, label=label)
        further = sum(len(images.places) - 1 for images in self._images)
        if further:
            members.notes[
                "{count} images of tar archives are further inputs of a sample: their names are "
                "those of the image before them, up to the first dot"
            ] += further
        if self._labels:
            members.kind = infer_kind(members.labels, members.keys, self._file.name)
        elif any(members.labels):
            members.kind = "names"
        lone = len(self._labels.keys() - used)
        if lone:
            members.notes["{count} .cls members of tar archives have no image beside them"] += lone


def _split(key: str) -> tuple[str, str]:
    """Split a key into stem and suffix at the first dot of the file name, as WebDataset does."""
    folder, slash, name = key.rpartition("/")
    stem, _, suffix = name[1:].partition(".")
    return f"{folder}{slash}{name[:1]}{stem}", suffix.lower()


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
