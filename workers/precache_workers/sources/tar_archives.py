"""Tar archives in the layout of WebDataset: members that share a stem are one sample.

The images of a stem are the inputs of its sample, named by their suffixes; see `sample_inputs` for
the evidence that they are not samples of their own. So are other members with suffixes that fields
name. If no field starts from an image, images are no inputs. Of members of one name the last one
counts, as when the archive is extracted; if these are labels that differ, the sample is bad. The
label is the text of the ``.cls`` member, of any kind that `labels.decide` knows; without any such
member, labels are folders of the names. A sample's key is the name of its first image, or the stem
where images are no inputs.

The identity of a sample consists of the sizes of its inputs and the times in their headers, and of
their suffixes if there are several. Some writers give all members the same time, which
identifies nothing. So where several samples share a time, the identity of the archive replaces it:
after any change of the archive, these samples are compared by content.

All samples of a compressed archive form one unit: a read decompresses the archive from its start.

Beside ``train-0001.tar`` may lie ``train-0001.idx``, as ``wds2idx`` of NVIDIA DALI writes it: each
line after the first lists the members of a sample, each with its suffix, the offset and size of its
data, and from version 1.2 on its name. The headers between large members can then be requested in
parallel. Members always come from headers: an old, wrong or forged index only costs requests.
"""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from precache.errors import ChoiceError, FetchError, SourceError, StorageError
from precache.messages import printable
from precache.storage.base import (
    BAD_LABEL,
    SAME_KEY,
    FileInfo,
    Folder,
    Range,
)
from precache.store.columns import GrowingTexts, Texts, arrow_of
from precache.store.locations import Container
from precache_workers.sources.base import (
    IMAGES_ALONE,
    MOST_SUFFIXES,
    TAR_SUFFIXES,
    Fetched,
    Inputs,
    SampleName,
    choice_error,
)
from precache_workers.sources.compressed import DecompressedFile, compression_of
from precache_workers.sources.containers import (
    Read,
    Rows,
    Wanted,
    container_etag,
    file_names,
    last_of_each,
    rows_of,
    units_of,
)
from precache_workers.sources.file_ranges import (
    BLOCK_BYTES,
    open_file,
    read_parts,
    require_size,
)
from precache_workers.sources.labels import MOST_TEXT
from precache_workers.sources.listings import Members
from precache_workers.sources.sample_inputs import (
    count_combination,
    doubt_of_names,
    is_picture,
)
from precache_workers.sources.sample_parts import joined, value_of
from precache_workers.sources.tar_members import BLOCK, MemberColumns, read_members

COMPRESSED_NOTE = (
    "{count} tar archives are compressed: each shard decompresses an archive from its beginning to "
    "the last sample that it needs, so decompress large ones first"
)

MOST_IMAGES = 256
"""Most inputs of a sample."""

_PLACE = re.compile(rb" (\d{1,18}) (\d{1,18})(?=[ \r\n]|$)")

LARGE_BYTES = 1 << 20
"""Bytes of a large member: reading it takes far longer than a request for the next header."""

MOST_INDEX = 4 << 20
"""Most bytes of an index that are read, enough for some 60,000 members."""


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
        """Return the type of the places of a sample's inputs."""
        import pyarrow as pa

        numbers = {"offset": pa.int64(), "size": pa.int64(), "crc": pa.int64()}
        return pa.list_(pa.field("element", pa.struct({**numbers, "suffix": pa.string()})))

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows | None]:
        where = folder.path(file.name)
        with open_file(folder, file, likely=between_members(folder, file)) as packed:
            compression = compression_of(packed.read(BLOCK), where)
            packed.seek(0)
            stream: BinaryIO | DecompressedFile = packed
            if compression:
                require_size(folder, file)
                stream = DecompressedFile(packed, compression, file.size, where)
                members.notes[COMPRESSED_NOTE] += 1
                members.forward = True
            samples = _ArchiveSamples(self, file, members)
            for some in read_members(stream, where, math.inf if compression else file.size):
                samples.add(some)
                yield None
            if isinstance(stream, DecompressedFile):
                stream.finish()
        yield samples.finish()

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        places = [[_Member(**part) for part in parts] for parts in wanted.places.to_pylist()]
        parts = [
            (container.name, member.offset - BLOCK, BLOCK + member.size)
            for members in places
            for member in members
            if member.exists
        ]
        if any(start < 0 or length < BLOCK for _, start, length in parts):
            return [None] * len(places)
        try:
            contents = iter(
                _decompressed_parts(folder, container, parts)
                if container.forward
                else read_parts(folder, parts)
            )
        except SourceError:  # the archive could be decompressed when it was listed
            return [None] * len(places)
        return [
            _sample(some, [next(contents) for one in some if one.exists], self.inputs.names)
            for some in places
        ]


def _decompressed_parts(
    folder: Folder, container: Container, parts: Sequence[Range]
) -> list[bytes | StorageError]:
    """Read parts of a compressed archive, by their offsets in the decompressed contents."""
    contents: dict[Range, bytes] = {}
    file, where = FileInfo(container.name, container.size, -1), folder.path(container.name)
    with open_file(folder, file) as packed:
        compression = compression_of(packed.read(BLOCK), where)
        if not compression:
            raise SourceError(f"{where} is not compressed")
        packed.seek(0)
        stream = DecompressedFile(packed, compression, container.size, where)
        for part in sorted(set(parts)):
            _, start, length = part
            stream.seek(start)
            contents[part] = stream.read(length)
    return [contents[part] for part in parts]


class _Member(NamedTuple):
    """Place of an input: offset, size, CRC-32 of its header, and suffix.

    An image that the sample lacks, and most others have, is nowhere: it has no size.
    """

    offset: int
    size: int
    crc: int
    suffix: str

    @property
    def exists(self) -> bool:
        return self.size >= 0


def _sample(
    places: Sequence[_Member], contents: Sequence[bytes | StorageError], names: Sequence[str]
) -> Fetched | None:
    inputs, rest = dict[str | int, Any](), iter(contents)
    for place in places:
        if not place.exists:
            continue
        data = next(rest)
        if isinstance(data, StorageError):
            return FetchError(str(data))
        if len(data) != BLOCK + place.size or zlib.crc32(data[:BLOCK]) != place.crc:
            return None
        inputs[place.suffix] = value_of(place.suffix, data[BLOCK:])
    return joined({**dict.fromkeys((*(place.suffix for place in places), *names)), **inputs})


def between_members(folder: Folder, file: FileInfo) -> list[tuple[int, int]]:
    """Return (start, end) of each part of an archive between large members, from its index.

    The list is empty if the archive is local, small or compressed, or has no index.
    """
    name = file.name.removesuffix(".tar")
    if folder.local("") is not None or file.size <= BLOCK_BYTES or name == file.name:
        return []
    try:
        index = folder.read_first(f"{name}.idx", MOST_INDEX)
    except StorageError:
        return []
    places = (map(int, match.groups()) for match in _PLACE.finditer(index))
    parts, start = [], 0
    for offset, size in sorted((at, size) for at, size in places if size >= LARGE_BYTES):
        if start < offset and offset + size <= file.size:
            parts.append((start, offset))
            start = offset + (size + BLOCK - 1) // BLOCK * BLOCK
    return [*parts, (start, file.size)] if parts else []


class _Taken:
    """Members that are inputs of samples."""

    def __init__(self) -> None:
        self.names, self.numbers = GrowingTexts(), list[np.ndarray]()

    def add(self, names: Texts, some: MemberColumns, rows: np.ndarray) -> None:
        """Add some rows of members, of which `names` are those that count."""
        self.names.extend(names.take(rows))
        numbers = [column[rows] for column in (some.sizes, some.mtimes, some.offsets)]
        crcs = [zlib.crc32(some.headers[row]) for row in rows.tolist()]
        self.numbers.append(np.array([*numbers, crcs], np.int64))


class _ArchiveSamples:
    """The samples of an archive, in the order of their first images, or else inputs."""

    def __init__(self, format_: TarFormat, file: FileInfo, members: Members) -> None:
        self._file, self._members = file, members
        self._format = format_
        self._first_dot = format_.sample_name in (None, "first-dot")
        self._whole = format_.sample_name == "whole"
        self._type = format_.places()
        self._images, self._others, self._label_names = _Taken(), _Taken(), GrowingTexts()
        self._middle = "[^./]*" if self._first_dot else "[^/]*"
        named = [re.escape(name) for name in format_.inputs.names if not is_picture(name)]
        self._inputs = rf"^(?:.*/)?[^/]{self._middle}\.(?:{'|'.join(named)})$" if named else ""
        if "cls" in format_.inputs.names:
            members.notes["The .cls members are inputs of fields, and no labels"] += 1
        self._labels: list[str | bytes] = []  # bytes that are no text as they are
        self._known: dict[bytes, str] = {}

    def add(self, some: MemberColumns) -> None:
        """Add members of the archive."""
        members, named = self._members, self._format.inputs.names
        labels = "" if "cls" in named else r"\.cls$"
        found = file_names(some.names, some.regular, self._file.name, members, labels, self._inputs)
        if self._format.takes_images:
            self._images.add(found.names, some, np.flatnonzero(found.images))
        elif unread := int(found.images.sum()):
            members.notes["{count} images of tar archives are read by no field"] += unread
        self._others.add(found.names, some, np.flatnonzero(found.inputs))
        if named:
            dotted = found.names.take(found.names.matching(r"\.[^/]*$"))
            for suffix, count in Counter(self._split(dotted)[1]).items():
                if suffix in named or len(members.columns) < MOST_SUFFIXES:
                    members.columns[suffix] += count
        rows = np.flatnonzero(found.labels)
        self._label_names.extend(found.names.take(rows))
        for row in rows.tolist():
            data = some.labels[row]
            if data not in self._known:
                with contextlib.suppress(UnicodeDecodeError):
                    self._known[data] = data.decode("utf-8-sig").strip()
            is_short = some.sizes[row] <= MOST_TEXT  # of others, nothing was read
            self._labels.append(self._known.get(data, data) if is_short else b"")

    def finish(self) -> Rows:
        """Return all samples."""
        members, prefix = self._members, f"{self._file.name}/"
        taken = self._images, self._others
        texts = [some.names.texts() for some in taken]
        names = Texts.joined(texts) if len(texts[1]) else texts[0]  # it would copy them
        numbers = [np.zeros((4, 0), np.int64), *(part for some in taken for part in some.numbers)]
        is_last = last_of_each(names, self._file.name, members)
        replaced = self._split(names.take(~is_last))[0]
        names = names.take(is_last)
        stems, suffixes = self._split(names)
        # Numbers of samples are in the order of their first images, as others come behind these.
        samples = (names if self._whole else stems).codes()
        order, counts = np.argsort(samples, kind="stable"), np.bincount(samples)
        starts = np.cumsum(counts) - counts
        first = order[starts]
        if len(counts) and counts.max() > MOST_IMAGES:
            stem = prefix + stems[int(first[counts.argmax()])]
            dot = "first" if self._first_dot else "last"
            text = (
                f"{self._file.name} has over {MOST_IMAGES} images {printable(stem)}.…, and those "
                f"that share their names up to the {dot} dot are one sample"
            )
            raise self._choice(text, "rename them")
        sizes, mtimes, offsets, crcs = np.concatenate(numbers, axis=1)[:, is_last][:, order]
        suffixes = [suffixes[row] for row in order.tolist()]
        names = (names if self._format.takes_images else stems).take(first)
        keys, stems = names.between(prefix), stems.take(first)
        kept = self._combined(keys, starts, counts, suffixes)
        times, etags = self._identities(starts, counts, suffixes, sizes, mtimes)
        labels = self._labels_of(stems, kept, replaced) if self._labels else None
        nbytes = np.add.reduceat(sizes, starts) if len(starts) else starts
        columns = (*map(arrow_of, (offsets, sizes, crcs)), Texts(suffixes).arrow)
        return rows_of(
            names.take(kept),
            _lists(columns, starts, self._type).filter(arrow_of(kept)),
            units=0 if members.forward else units_of(offsets[starts][kept], nbytes[kept]),
            etags=etags.take(kept),
            labels=labels,
            sizes=nbytes[kept],
            mtimes=times[kept],
        )

    def _choice(self, text: str, way_out: str) -> ChoiceError:
        """Return the error of members that share a stem and are too many, or contradict."""
        rules: list[SampleName] = ["last-dot"] * self._first_dot
        return choice_error([doubt_of_names(text, *rules, "whole", way_out=way_out)])

    def _combined(
        self, keys: Texts, starts: np.ndarray, counts: np.ndarray, suffixes: Sequence[str]
    ) -> np.ndarray:
        """Count the samples by the suffixes of their images; returns which are kept.

        Those with two inputs of one suffix are left out, and those without an image if fields start
        from images.
        """
        members, takes_images = self._members, self._format.takes_images
        rows_of: dict[tuple[str, ...], list[int]] = {}
        for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            rows_of.setdefault(tuple(suffixes[start : start + count]), []).append(row)
        kept = np.ones(len(keys), np.bool_)
        for combination, rows in rows_of.items():
            images = [suffix for suffix in combination if is_picture(suffix)]
            if takes_images and not images:
                kept[rows] = False
                members.notes["{count} inputs of fields in tar archives have no image beside them"
                    ] += len(rows)  # fmt: skip
            elif len({*combination}) < len(combination):
                kept[rows] = False
                for row in rows:
                    members.leave_out(SAME_KEY, keys[row])
            elif images:
                count_combination(members.combinations, images, keys[rows[0]], len(rows))
        return kept

    def _identities(
        self,
        starts: np.ndarray,
        counts: np.ndarray,
        suffixes: Sequence[str],
        sizes: np.ndarray,
        mtimes: np.ndarray,
    ) -> tuple[np.ndarray, Texts]:
        """Return the time and the etag of each sample."""
        archive, times = container_etag(self._file), mtimes[starts]
        samples = np.repeat(np.arange(len(counts)), counts)
        of_time = np.unique(mtimes, return_inverse=True)[1]
        first, last = np.full(len(mtimes), len(counts)), np.zeros(len(mtimes), np.int64)
        np.minimum.at(first, of_time, samples)
        np.maximum.at(last, of_time, samples)
        is_shared = np.zeros(len(counts), np.bool_)
        is_shared[samples[(first < last)[of_time]]] = True
        is_shared |= len(counts) == 1
        etags = Texts([archive, ""]).take(np.where(is_shared, 0, 1))
        times[is_shared] = -1
        own = {}
        for row in np.flatnonzero(counts > 1).tolist():
            etag = archive if is_shared[row] else ""
            if etag or times[row] >= 0:
                part = slice(starts[row], starts[row] + counts[row])
                described = list(zip(suffixes[part], sizes[part].tolist(), strict=True))
                text = f"{etag} {described} {mtimes[part].tolist()}"
                own[row], times[row] = xxhash.xxh3_64_hexdigest(text.encode()), -1
        return times, etags.replaced(own)

    def _labels_of(self, stems: Texts, kept: np.ndarray, replaced: Texts) -> Any:
        """Return the labels of the samples that are kept: the texts of ``.cls`` members.

        A sample is not kept if they differ, unless later members replace it as a whole, or if its
        label cannot be read.

        Parameters
        ----------
        replaced
            Stems of the images that later ones replace.
        """
        import pyarrow as pa

        members, container = self._members, self._file.name
        names = self._label_names.texts()
        is_last = last_of_each(names, container, members)
        is_unread = np.array([isinstance(label, bytes) for label in self._labels], np.bool_)
        texts = [label if label and isinstance(label, str) else None for label in self._labels]
        texts = pa.array(texts, pa.large_string())
        earlier = self._split(names.take(~is_last))[0]
        first = texts.filter(arrow_of(~is_last))
        texts = texts.filter(arrow_of(is_last))
        theirs, _ = self._split(names.take(is_last))
        labels: dict[str, str | None] = {}
        for row in np.flatnonzero(theirs.counts() > 1).tolist():
            label = texts[row].as_py()
            before = labels.setdefault(theirs[row], label)
            if before != label:
                sample = printable(f"{container}/{theirs[row]}")
                both = f"{printable(before or '')!r} and {printable(label or '')!r}"
                raise self._choice(f"{container} has two labels of {sample}: {both}", "remove one")
        found = theirs.find(stems)
        last = texts.take(arrow_of(theirs.find(earlier))).to_pylist()
        pairs = zip(first.to_pylist(), last, strict=True)
        differ = np.array([one != other for one, other in pairs], np.bool_)
        differ &= replaced.find(earlier) < 0
        unread = theirs.take(is_unread[is_last])
        values = [self._labels[row] for row in np.flatnonzero(is_unread & is_last).tolist()]
        bad = Texts.joined([unread, earlier.take(differ)])
        first_of = bad.find(stems)
        for row in np.flatnonzero((first_of >= 0) & kept).tolist():
            kept[row] = False
            value = values[first_of[row]][:16] if first_of[row] < len(unread) else ""
            shown_value = f" ({value!r})" if value else ""
            members.leave_out(BAD_LABEL, f"{container}/{stems[row]}{shown_value}")
        bare = int(((found < 0) & stems.matching("/")).sum())
        if bare:
            members.notes[
                "{count} samples of tar archives have no .cls member, as others have, and get no "
                "label: folders of names are no labels there (remove all .cls members if they are)"
            ] += bare
        lone = 1 + int(theirs.codes().max()) - len(np.unique(found[found >= 0]))
        if lone:
            members.notes["{count} .cls members of tar archives have no image beside them"] += lone
        return texts.take(pa.array(found[kept], mask=found[kept] < 0))

    def _split(self, names: Texts) -> tuple[Texts, list[str]]:
        """Split names into stems and suffixes at the first or last dot of the file name."""
        import pyarrow.compute as pc

        end = r"(?:\.([^/]*))?" if self._first_dot else r"\.([^/]*)"
        pattern = rf"(?s)^((?:.*/)?[^/]{self._middle}){end}$"
        stems = pc.replace_substring_regex(names.plain, pattern, r"\1")
        suffixes = Texts(pc.replace_substring_regex(names.plain, pattern, r"\2")).shared()
        marks = {text: re.sub(r"[\s:,]", "_", text.lower()) for text in set(suffixes)}
        return Texts(stems), [marks[text] for text in suffixes]


def _lists(columns: Sequence[Any], starts: np.ndarray, kind: Any) -> Any:
    """Return columns as lists of structs, which begin at some rows."""
    import pyarrow as pa

    ends = np.append(starts, len(columns[0])).astype(np.int32)
    structs = pa.StructArray.from_arrays(columns, names=["offset", "size", "crc", "suffix"])
    return pa.ListArray.from_arrays(arrow_of(ends), structs.cast(kind.value_type)).cast(kind)
