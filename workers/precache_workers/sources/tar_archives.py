"""Tar archives in the layout of WebDataset: members that share a stem are one sample.

The images of a stem are the inputs of its sample, named by their suffixes; see `sample_inputs` for
the evidence that they are not samples of their own. So are other members with suffixes that fields
name. If no field starts from an image, images are no inputs. A sample with two members of one name,
or with labels that differ, is bad. The label is the text of the ``.cls`` member, of any kind that
`labels.decide` knows; without any such member, labels are folders of the names. A sample's key is
the name of its first image, or the stem where images are no inputs.

The identity of a sample is its archive's: after a change of that, its samples are compared by
content.

All samples of a compressed archive form one unit: a read decompresses the archive from its start.

Beside ``train-0001.tar`` may lie ``train-0001.idx``, as ``wds2idx`` of NVIDIA DALI writes it: each
line after the first lists the members of a sample, each with its suffix, the offset and size of its
data, and from version 1.2 on its name. What lies between large members of a remote archive is then
requested in parallel. Members always come from headers: an old, wrong or forged index only costs
requests.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from precache.errors import FetchError, SourceError, StorageError
from precache.storage.base import BAD_LABEL, SAME_KEY, FileInfo, Folder, Range
from precache.store.columns import GrowingTexts, Texts, arrow_of, texts_or_nulls
from precache.store.locations import Container
from precache_workers.sources.base import (
    IMAGES_ALONE,
    MOST_SUFFIXES,
    TAR_SUFFIXES,
    Fetched,
    Inputs,
    SampleName,
)
from precache_workers.sources.containers import (
    Read,
    Rows,
    Wanted,
    file_names,
    rows_of,
    units_of,
)
from precache_workers.sources.file_ranges import BLOCK_BYTES, open_file, read_parts
from precache_workers.sources.listings import Members
from precache_workers.sources.sample_inputs import is_picture
from precache_workers.sources.sample_parts import joined, value_of
from precache_workers.sources.tar_members import BLOCK, MemberColumns, decompressed, read_members

COMPRESSED_NOTE = (
    "{count} tar archives are compressed: each shard decompresses an archive from its beginning to "
    "the last sample that it needs, so decompress large ones first"
)

LARGE_BYTES = 1 << 20
"""Bytes of a large member: reading it takes far longer than a request for the next header."""

MOST_INDEX, MOST_AHEAD = 4 << 20, 64 << 20
"""Most bytes of an index that are read, enough for some 60,000 members; of what lies between."""

_PLACE = re.compile(rb" (\d{1,18}) (\d{1,18})(?=[ \r\n]|$)")


@dataclass(frozen=True)
class TarFormat:
    """Tar archives; see the module."""

    sample_name: SampleName | None = None
    inputs: Inputs = IMAGES_ALONE
    suffixes: tuple[str, ...] = TAR_SUFFIXES
    columns: None = None
    checks_members: bool = True

    @property
    def takes_images(self) -> bool:
        """True if some field starts from an image."""
        return self.inputs.image or any(map(is_picture, self.inputs.names))

    def places(self) -> Any:
        """Return the type of the places of a sample's inputs, with a digest of their headers.

        An image that the sample lacks, and most others have, is nowhere: it has no size.
        """
        numbers = {"offset": pa.int64(), "size": pa.int64(), "digest": pa.int64()}
        return pa.list_(pa.field("element", pa.struct({**numbers, "suffix": pa.string()})))

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows | None]:
        where = folder.path(file.name)
        samples = _ArchiveSamples(self, file, members)
        with open_file(folder, file, ahead=between_members(folder, file)) as archive:
            stream = decompressed(archive, file.size, where)
            if stream:
                members.notes[COMPRESSED_NOTE] += 1
                members.forward = True
            for some in read_members(stream or archive, where, math.inf if stream else file.size):
                samples.add(some)
                yield None
        yield samples.finish()

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        places = [place for _, place in wanted]
        parts = [
            (container.name, at["offset"] - BLOCK, BLOCK + at["size"])
            for place in places
            for at in place
            if at["size"] >= 0
        ]
        if any(start < 0 for _, start, _ in parts):
            return [None] * len(places)
        try:
            contents = iter(
                _read_forward(folder, container, parts)
                if container.forward
                else read_parts(folder, parts)
            )
        except SourceError:  # the archive could be decompressed when it was listed
            return [None] * len(places)
        samples = list[Fetched | None]()
        for place in places:
            suffixes = (at["suffix"] for at in place)
            inputs, is_there = dict[str | int, Any].fromkeys((*suffixes, *self.inputs.names)), True
            for at in place:
                if at["size"] < 0:
                    continue
                data = next(contents)
                if isinstance(data, FetchError):
                    inputs[at["suffix"]] = data
                    continue
                is_same = (
                    len(data) == BLOCK + at["size"]
                    and xxhash.xxh32_intdigest(data[:BLOCK]) == at["digest"]
                )
                is_there &= is_same
                inputs[at["suffix"]] = value_of(at["suffix"], data[BLOCK:])
            samples.append(joined(inputs) if is_there else None)
        return samples


def _read_forward(folder: Folder, container: Container, parts: Sequence[Range]) -> list[bytes]:
    """Read parts of a compressed archive, by their offsets in the decompressed contents."""
    contents: dict[Range, bytes] = {}
    with open_file(folder, FileInfo(container.name, container.size, -1)) as archive:
        stream = decompressed(archive, container.size, folder.path(container.name)) or archive
        for part in sorted({*parts}):
            stream.seek(part[1])
            contents[part] = stream.read(part[2])
    return [contents[part] for part in parts]


def between_members(folder: Folder, file: FileInfo) -> dict[int, bytes]:
    """Read what lies between large members of an archive, by its index: offset -> bytes.

    Nothing is read if the archive is local, small or compressed, or has no index.
    """
    stem = file.name.removesuffix(".tar")
    if folder.local("") is not None or file.size <= BLOCK_BYTES or stem == file.name:
        return {}
    try:
        index = folder.read_first(f"{stem}.idx", MOST_INDEX)
    except StorageError:
        return {}
    places = (map(int, match.groups()) for match in _PLACE.finditer(index))
    parts, start = {}, 0
    for offset, size in sorted((at, size) for at, size in places if size >= LARGE_BYTES):
        if start < offset and offset + size <= file.size:
            parts[start] = offset
            start = offset + (size + BLOCK - 1) // BLOCK * BLOCK
    if parts:
        parts[start] = file.size
    most = MOST_AHEAD // max(len(parts), 4096)
    read = read_parts(folder, [(file.name, at, min(end - at, most)) for at, end in parts.items()])
    there = zip(parts, read, strict=True)
    return {at: data for at, data in there if isinstance(data, bytes)}


class _ArchiveSamples:
    """The samples of an archive, in the order of their first images, or else inputs."""

    def __init__(self, format_: TarFormat, file: FileInfo, members: Members) -> None:
        self._file, self._members = file, members
        self._format = format_
        self._first_dot = format_.sample_name in (None, "first-dot")
        self._whole = format_.sample_name == "whole"
        self._type = format_.places()
        self._names, self._label_names = GrowingTexts(), GrowingTexts()
        self._numbers = [np.zeros((4, 0), np.int64)]
        self._middle = "[^./]*" if self._first_dot else "[^/]*"
        named = [re.escape(name) for name in format_.inputs.names if not is_picture(name)]
        self._inputs = rf"^(?:.*/)?[^/]{self._middle}\.(?:{'|'.join(named)})$" if named else ""
        if "cls" in format_.inputs.names:
            members.notes["The .cls members are inputs of fields, and no labels"] += 1
        self._labels = array("q")  # numbers of the texts
        self._known: dict[bytes | None, int] = {}

    def add(self, some: MemberColumns) -> None:
        """Add members of the archive."""
        members, named = self._members, self._format.inputs.names
        labels = "" if "cls" in named else r"\.cls$"
        found = file_names(some.names, some.regular, self._file.name, members, labels, self._inputs)
        if self._format.takes_images:
            self._take(found.names, some, np.flatnonzero(found.images), 0)
        elif unread := int(found.images.sum()):
            members.notes["{count} images of tar archives are read by no field"] += unread
        self._take(found.names, some, np.flatnonzero(found.inputs), 1)
        if named:
            dotted = found.names.take(found.names.matching(r"\.[^/]*$"))
            for suffix, count in Counter(self._split(dotted)[1]).items():
                if suffix in named or len(members.columns) < MOST_SUFFIXES:
                    members.columns[suffix] += count
        rows = np.flatnonzero(found.labels)
        self._label_names.extend(found.names.take(rows))
        contents = some.labels(rows)
        known = self._known
        self._labels.extend([known.setdefault(data, len(known)) for data in contents])

    def _take(self, names: Texts, some: MemberColumns, rows: np.ndarray, group: int) -> None:
        """Add members that are inputs: images are group 0, before all others."""
        digests = [*map(xxhash.xxh32_intdigest, some.headers[rows])]
        numbers = some.sizes[rows], some.offsets[rows], digests, np.full(len(rows), group)
        self._numbers.append(np.array(numbers, np.int64))
        self._names.extend(names.take(rows))

    def finish(self) -> Rows:
        """Return all samples."""
        prefix = f"{self._file.name}/"
        names, numbers = self._names.texts(), np.concatenate(self._numbers, axis=1)
        if numbers[3].any():
            order = np.argsort(numbers[3], kind="stable")
            names, numbers = names.take(order), numbers[:, order]
        stems, suffixes = self._split(names)
        # Numbers of samples are in the order of their first images, as others come behind these.
        samples = (names if self._whole else stems).codes()
        order, counts = np.argsort(samples, kind="stable"), np.bincount(samples)
        starts = np.cumsum(counts) - counts
        first = order[starts]
        sizes, offsets, digests, _ = numbers[:, order]
        suffixes = suffixes.take(order)
        names = (names if self._format.takes_images else stems).take(first)
        keys, stems = names.between(prefix), stems.take(first)
        kept = self._combined(keys, starts, suffixes)
        labels = self._labels_of(stems, kept) if self._labels else None
        nbytes = np.add.reduceat(sizes, starts) if len(starts) else starts
        columns = (*map(arrow_of, (offsets, sizes, digests)), suffixes.plain)
        places = _lists(columns, starts, self._type)
        return rows_of(
            names.take(kept),
            places if kept.all() else places.filter(arrow_of(kept)),
            units=0 if self._members.forward else units_of(offsets[starts][kept], nbytes[kept]),
            labels=labels,
            sizes=nbytes[kept],
        )

    def _combined(self, keys: Texts, starts: np.ndarray, suffixes: Texts) -> np.ndarray:
        """Count the samples by the suffixes of their images; returns which are kept.

        Those with two inputs of one suffix are left out, and those without an image if fields start
        from images.
        """
        members, takes_images = self._members, self._format.takes_images
        joined = suffixes
        if len(starts) < len(suffixes):
            ends = arrow_of(np.append(starts, len(suffixes)))
            lists = pa.LargeListArray.from_arrays(ends, suffixes.plain)
            joined = Texts(pc.binary_join(lists, pa.scalar(",", lists.type.value_type)))
        codes = joined.codes()
        groups = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
        kept = np.ones(len(keys), np.bool_)
        for rows in filter(len, groups):
            combination = joined[int(rows[0])].split(",")
            images = [suffix for suffix in combination if is_picture(suffix)]
            if takes_images and not images:
                kept[rows] = False
                members.notes["{count} inputs of fields in tar archives have no image beside them"
                    ] += len(rows)  # fmt: skip
            elif len({*combination}) < len(combination):
                kept[rows] = False
                for row in rows.tolist():
                    members.leave_out(SAME_KEY, keys[row])
            elif images:
                members.combine(images, keys[int(rows[0])], len(rows))
        return kept

    def _labels_of(self, stems: Texts, kept: np.ndarray) -> Any:
        """Return the labels of the samples that are kept: the texts of ``.cls`` members.

        A sample is not kept if they differ, or cannot be read.
        """
        members = self._members
        theirs, _ = self._split(self._label_names.texts())
        labels, values = np.array(self._labels), [*map(_label_text, self._known)]
        is_bad = np.array([isinstance(value, bytes) for value in values], np.bool_)[labels]
        texts = [value if value and isinstance(value, str) else None for value in values]
        first, is_again = dict[str, int](), np.zeros(len(theirs), np.bool_)
        for row in np.flatnonzero(theirs.is_repeated).tolist():
            before = first.setdefault(theirs[row], row)
            is_again[row] = before != row
            is_bad[row] |= values[labels[before]] != values[labels[row]]
        bad = np.flatnonzero(is_bad)
        bad_of = theirs.take(bad).find(stems)
        for row in np.flatnonzero((bad_of >= 0) & kept).tolist():
            kept[row] = False
            label = values[labels[bad[bad_of[row]]]]
            value = f" ({label[:16]!r})" if isinstance(label, bytes) and label else ""
            members.leave_out(BAD_LABEL, f"{self._file.name}/{stems[row]}{value}")
        found = theirs.find(stems)
        bare = int(((found < 0) & stems.matching("/")).sum())
        if bare:
            members.notes[
                "{count} samples of tar archives have no .cls member, as others have, and get no "
                "label: folders of names are no labels there (remove all .cls members if they are)"
            ] += bare
        lone = int((~is_again).sum() - np.count_nonzero(np.bincount(found + 1)[1:]))
        if lone:
            members.notes["{count} .cls members of tar archives have no image beside them"] += lone
        texts.append(None)  # of those without one
        of_kept = np.where(found[kept] < 0, len(values), labels[found[kept]])
        return texts_or_nulls(texts).take(arrow_of(of_kept))

    def _split(self, names: Texts) -> tuple[Texts, Texts]:
        """Split names into stems and suffixes at the first or last dot of the file name."""
        (data, places), bases = names.data, names.after_last("/")
        starts, ends = places[:-1], places[1:]
        if self._first_dot:
            dots = np.append(np.flatnonzero(data == ord(".")), len(data) + 1)
            stem_ends = np.minimum(dots[np.searchsorted(dots, bases + 1)], ends)
            rest = np.minimum(stem_ends + 1, ends)
        else:  # a name without a dot is its own suffix
            rest = names.after_last(".")
            has_dot = rest > bases + 1
            stem_ends, rest = np.where(has_dot, (rest - 1, rest), (ends, starts))
        stems, suffixes = names.cut(starts, stem_ends), names.cut(rest, ends)
        suffixes = suffixes.plain.dictionary_encode()
        marks = [re.sub(r"[\s:,]", "_", text.lower()) for text in suffixes.dictionary.to_pylist()]
        return stems, Texts(Texts(marks).arrow.take(suffixes.indices).dictionary_encode())


def _label_text(data: bytes | None) -> str | bytes:
    """Return the text of a label, or the bytes if they are none; no bytes for one too long."""
    try:
        return b"" if data is None else data.decode().removeprefix("\ufeff").strip()
    except UnicodeDecodeError:
        return data or b""


def _lists(columns: Sequence[Any], starts: np.ndarray, kind: Any) -> Any:
    """Return columns as lists of structs, which begin at some rows."""
    ends = np.append(starts, len(columns[0])).astype(np.int32)
    structs = pa.StructArray.from_arrays(columns, names=["offset", "size", "digest", "suffix"])
    return pa.ListArray.from_arrays(arrow_of(ends), structs.cast(kind.value_type)).cast(kind)
