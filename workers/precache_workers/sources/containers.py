"""Sources whose samples lie in containers: archives and tables, files with many samples each.

A format scans a container for its members and reads them. All formats share the naming of
containers, their concurrent listing, the index of unchanged containers, and fetching.

A sample's key is the name of its container relative to the common folder, a slash, and the sample's
name in the container; a table with a key column gives the key itself. Its location is the text
``CONTAINER#UNIT``, a tab, and a place that the format defines; samples of one unit are read
together. A location is checked when it is read, as its container may have changed since the
listing. A process that has only keys, such as the viewer, lists the source once.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import operator
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import xxhash
from pydantic import NonNegativeInt, TypeAdapter

from precache.errors import FetchError, PrecacheError, SampleError, SourceError, StorageError
from precache.messages import printable
from precache.runtime.ordered_map import prefetch
from precache.storage.base import (
    NOT_UTF8,
    REPEATED,
    SAME_KEY,
    FileInfo,
    Folder,
    is_name,
    left_out_text,
)
from precache.store.row_table import RowTable, read_columns, unit_of
from precache.units import size as in_units
from precache_workers.runtime.time_limit import FETCHING, notes
from precache_workers.sources.base import (
    IMAGE_SUFFIXES,
    MOST_SAMPLE_BYTES,
    NO_COLUMNS,
    NO_RULES,
    Doubt,
    Fetched,
    LabelRules,
    Listing,
    Tick,
    first_folder,
    is_utf8,
    source_of,
)
from precache_workers.sources.container_names import Containers
from precache_workers.sources.label_readings import (
    doubt_of_columns,
    doubts_of_classes,
    folder_labels,
    note_of_containers,
    note_of_order,
    one_class_each,
    read_folders,
    settle_labels,
)
from precache_workers.sources.labels import Kind, encode_labels, joined
from precache_workers.sources.sample_inputs import SampleInputs, merged

UNIT_BYTES = 1 << 20
"""Bytes of neighbours that are read together; with more, rows of sorted containers mix less."""

CHANGED = "has changed since it was listed"
"""Text of errors after which a container must be listed again, even if it seems unchanged."""

CHECKSUM = "crc32:"
"""Beginning of an etag that is a checksum of the member's content."""

LOCAL_THREADS, REMOTE_THREADS = 2, 8
"""Containers that are scanned concurrently."""

LabelRule = Literal["", "beside", "folder"]

_INDEXED = TypeAdapter(
    list[
        tuple[
            str, int, int, str, int, NonNegativeInt,
            tuple[
                Kind | None, LabelRule, tuple[str, ...], dict[str, NonNegativeInt],
                dict[str, NonNegativeInt], dict[str, str], dict[str, NonNegativeInt],
                dict[str, tuple[NonNegativeInt, str]], tuple[str, ...],
            ],
        ]
    ]
)  # fmt: skip
"""Containers of an index: the fields of `FileInfo`, the number of samples, and the attributes of
`Members` that are not columns."""

INDEX_RULES = b"6"
"""Version of the listing rules; indexes of other versions are ignored. Increase it when a format
lists other keys or labels for the same file."""

_INDEX_COLUMNS = {
    "key": "string", "size": "int64", "mtime_ns": "int64", "etag": "string", "label": "string",
    "location": "string",
}  # fmt: skip


_COLUMNS = ("keys", "sizes", "mtimes", "etags", "labels", "locations")


class TimeUpError(Exception):
    """The time for a listing is up."""


@dataclass(kw_only=True)
class Members:
    """The samples of one container, as columns to save memory.

    Attributes
    ----------
    labels
        Labels as text; empty for none.
    kind
        Kind of the labels; None if there are none.
    label_rule
        ``beside`` if labels lie beside images, ``folder`` if they are the first folders of names;
        for formats that have both.
    classes
        Names of all classes, by number, if the container has them.
    ignored, left_out, examples
        As in `Listing`.
    notes
        Lines for the user, shown once for all containers; the total replaces ``{count}``.
    combinations
        Samples by the suffixes of their images, if samples may have several.
    binary
        Columns of only 0 and 1, if no column has labels.
    """

    keys: list[str] = field(default_factory=list)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    mtimes: array[int] = field(default_factory=lambda: array("q"))
    etags: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    kind: Kind | None = None
    label_rule: LabelRule = ""
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    combinations: dict[str, tuple[int, str]] = field(default_factory=dict)
    binary: tuple[str, ...] = ()

    def add(self, key: str, location: str, *, size: int, mtime: int, etag: str, label: str) -> None:
        self.keys.append(key)
        self.locations.append(location)
        self.sizes.append(size)
        self.mtimes.append(mtime)
        self.etags.append(etag)
        self.labels.append(label)

    def extend(self, other: Members) -> None:
        """Add the members of another container."""
        for name in _COLUMNS:
            getattr(self, name).extend(getattr(other, name))

    def leave_out(self, reason: str, name: str) -> None:
        """Count a sample that is left out, and keep the first name as an example."""
        self.left_out[reason] += 1
        self.examples.setdefault(reason, printable(name))

    def remove(self, rows: Mapping[int, str]) -> None:
        """Leave out the samples at some rows, each for its reason."""
        for row, reason in rows.items():
            self.leave_out(reason, self.keys[row])
        kept = [row not in rows for row in range(len(self.keys))]
        for name in _COLUMNS:
            column = getattr(self, name)
            values = itertools.compress(column, kept)
            setattr(self, name, array("q", values) if isinstance(column, array) else list(values))


@dataclass(frozen=True)
class RequestedSample:
    """A sample to read: its key, its size as listed, and its place in its container."""

    key: str
    size: int
    place: str


class Format(Protocol):
    """A kind of container. Workers receive it as a pickle."""

    @property
    def noun(self) -> str:
        """Name of the kind with its article, such as ``a tar archive``."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of its files, in lower case."""

    @property
    def typed(self) -> bool:
        """False if labels are text whose kind is inferred, or folders of names."""

    def scan(self, folder: Folder, file: FileInfo, until: float) -> Members:
        """List the members of a container.

        Raises
        ------
        SourceError, StorageError
            It is damaged or hostile; it cannot be read.
        TimeUpError
            `time.monotonic()` is past `until`.
        """

    def read(
        self,
        folder: Folder,
        name: str,
        unit: str,
        wanted: Sequence[RequestedSample],
        most_bytes: int,
    ) -> Sequence[Fetched]:
        """Read members of one unit of a container, in order."""


@dataclass(frozen=True)
class ContainerSource:
    """Samples in containers of one format."""

    containers: Containers
    format: Format
    most_bytes: int = MOST_SAMPLE_BYTES
    rules: LabelRules = NO_RULES
    labels_with_samples: bool = False

    @property
    def folder(self) -> Folder:
        return self.containers.folder

    @property
    def fetch_threads(self) -> int:
        return 2 if self.folder.local("") else 4

    @property
    def index_name(self) -> str:
        identity = self.containers.uri, repr(self.format)
        return xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())

    def file_of(self, key: str) -> tuple[Folder, str] | None:
        location = self._known().get(key)
        return None if location is None else (self.folder, unit_of(location).rpartition("#")[0])

    # --- listing --------------------------------------------------------------------------------

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        until = time.monotonic() + seconds
        left_out = Counter[str]()
        files = self.containers.files(left_out)
        known = _read_index(index) if index is not None else {}
        listed: list[tuple[FileInfo, Members]] = []
        whole, count = Members(), 0
        scans = self._scans(files, known, until)
        for file, members in zip(files, scans, strict=False):
            listed.append((file, members))
            count += len(members.keys)
            tick(count)
            if time.monotonic() > until and len(listed) < len(files):
                break
        complete = len(listed) == len(files)
        whole.left_out = sum((members.left_out for _, members in listed), +left_out)
        for _, members in reversed(listed):
            whole.examples |= members.examples
        ruled = _by_one_rule(listed)
        for _, members in ruled:
            whole.extend(members)
        if not whole.keys:
            raise self._nothing(listed, complete, whole)
        ctimes = _ctimes(ruled)
        left = leave_out_repeated(
            whole, self, [_record(whole, row) for row in range(len(whole.keys))]
        )
        ctimes = np.delete(ctimes, left)
        notes = notes_of(ruled)
        inputs = SampleInputs(merged(members.combinations for _, members in listed))
        if inputs:
            rule = getattr(self.format, "sample_name", None)
            if rule is None:
                inputs.require_clear(self)
            notes = (*notes, inputs.note("last" if rule == "last-dot" else "first"))
            whole.locations = inputs.with_all(whole.locations)
        labelled = row_table(
            ruled,
            whole,
            self,
            self.folder,
            self.rules,
            typed=self.format.typed,
            paths=not self.format.typed,
            one_hot=getattr(self.format, "columns", NO_COLUMNS).may_be_several,
        )
        _located[self.index_name] = labelled.table
        fresh = complete and any(_identity(file) not in known for file in files)
        return Listing(
            labelled.table,
            dict(sum((members.ignored for _, members in listed), Counter[str]())),
            complete,
            dict(whole.left_out),
            whole.examples,
            _write_index(listed) if fresh or len(known) != len(files) else None,
            (*notes, *note_of_containers(file.name for file in files), *labelled.notes),
            ctimes,
            (*labelled.doubts, *doubt_of_columns(_binary_columns(listed), self)),
        )

    def _scans(
        self, files: Sequence[FileInfo], known: Mapping[tuple[Any, ...], Members], until: float
    ) -> Iterator[Members]:
        """Yield the members of each container until the time is up."""

        def scan(file: FileInfo) -> Members | None:
            held = known.get(_identity(file))
            if held is not None:
                return held
            try:
                members = self.format.scan(self.folder, file, until)
            except TimeUpError:
                return None
            except MemoryError:
                raise SourceError(f"{self.folder.path(file.name)} takes too much memory") from None
            wrong = [row for row, key in enumerate(members.keys) if not is_utf8(key)]
            if wrong:
                members.remove(dict.fromkeys(wrong, NOT_UTF8))
            return members

        threads = LOCAL_THREADS if self.folder.local("") else REMOTE_THREADS
        for members in prefetch(scan, files, threads, threads + 1):
            if members is None:
                return
            yield members

    def _nothing(
        self,
        listed: Sequence[tuple[FileInfo, Members]],
        complete: bool,
        whole: Members,
    ) -> SourceError:
        ignored = sum(members.ignored.total() for _, members in listed)
        if not complete:
            return SourceError(f"the source {self} was not listed in time; give more seconds")
        if not (ignored or whole.left_out):
            return SourceError(f"the source {self} is empty: it has no sample")
        return SourceError(
            f"the source {self} has no image ({ignored} other members); images end in "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}{left_out_text(whole.left_out, whole.examples)}"
        )

    def __str__(self) -> str:
        return str(self.containers)

    # --- fetching -------------------------------------------------------------------------------

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Sequence[str] = ()
    ) -> Sequence[Fetched]:
        if not locations:
            known = self._known()
            locations = [known.get(key, "") for key in keys]
        fetched: dict[int, Fetched] = {}
        units: dict[str, list[int]] = defaultdict(list)
        for number, location in enumerate(locations):
            if not location:
                fetched[number] = FetchError(f"{self} has no sample {printable(keys[number])}")
            elif sizes[number] > self.most_bytes:
                fetched[number] = too_large_error(sizes[number], self.most_bytes)
            else:
                units[unit_of(location)].append(number)
        for unit, numbers in units.items():
            wanted = [
                RequestedSample(keys[n], sizes[n], locations[n].rpartition("\t")[2])
                for n in numbers
            ]
            notes().begin(FETCHING, *(sample.key for sample in wanted), foreign=False)
            fetched.update(zip(numbers, self._read(unit, wanted), strict=True))
        if any(isinstance(error, FetchError) for error in fetched.values()):
            _located.pop(self.index_name, None)  # a container may have changed
        return [fetched[number] for number in range(len(keys))]

    def _read(self, unit: str, wanted: Sequence[RequestedSample]) -> Sequence[Fetched]:
        """Read samples of a unit; one by one if memory is short."""
        name, _, number = unit.rpartition("#")
        try:
            return self.format.read(self.folder, name, number, wanted, self.most_bytes)
        except MemoryError:
            if len(wanted) == 1:
                return [SampleError("there is not enough memory to read it")]
            return [fetched for one in wanted for fetched in self._read(unit, [one])]
        except StorageError as error:
            return [FetchError(str(error)) for _ in wanted]
        except (ArithmeticError, LookupError, ValueError):  # a location that a forged index has
            return [changed(self.folder, name, one.key) for one in wanted]

    def _known(self) -> Mapping[str, str]:
        """Return key -> location of all samples; lists them if this process has not yet done so."""
        table = _located.get(self.index_name) or self.list(lambda count: None).table
        return table.location_by_key


_located: dict[str, RowTable] = {}
"""Index name of a source -> its listing in this process. Single dict operations need no lock."""


def too_large_error(nbytes: int, most_bytes: int) -> SampleError:
    """Return the error of a sample above the limit."""
    return SampleError(
        f"has {in_units(nbytes)}, over the limit of {in_units(most_bytes)} (--max-sample-bytes)"
    )


def changed(folder: Folder, name: str, key: str) -> FetchError:
    """Return the error of a sample that is not at its listed place in its container."""
    return FetchError(
        f"{folder.path(name)} {CHANGED}: {printable(key)} is not where it was; build again to list "
        "it anew"
    )


def container_etag(file: FileInfo) -> str:
    """Return a digest of a container's identity, the etag of members without one; may be empty.

    Its name counts, as keys need not have it: those of a key column are the same in two tables.
    """
    if not file.etag and file.mtime_ns < 0:
        return ""
    times = file.etag or f"{file.name} {file.size} {file.mtime_ns}"
    return xxhash.xxh3_64_hexdigest(times.encode())


def member_key(container: str, name: str) -> str | None:
    """Return the key of a member by its name; None for a name that leads out of its container."""
    name = name.removeprefix("./")
    key = f"{container}/{name}"
    return key if not name.startswith("/") and is_name(name) and is_name(key) else None


def _identity(file: FileInfo) -> tuple[Any, ...]:
    """Return a value that is equal for an unchanged container; unique if nothing identifies it."""
    known = file.etag or file.mtime_ns >= 0
    return (*file,) if known else (file.name, object())


def _by_one_rule(listed: Sequence[tuple[FileInfo, Members]]) -> list[tuple[FileInfo, Members]]:
    """Drop labels that are folders if other containers have labels beside their images."""
    rules = {members.label_rule for _, members in listed}
    return [
        (file, _without_labels(members))
        if members.label_rule == "folder" and "beside" in rules
        else (file, members)
        for file, members in listed
    ]


def _without_labels(members: Members) -> Members:
    note = (
        "{count} samples lie in containers without labels beside images, as others have: folders "
        "of names are no labels there"
    )
    count = len(members.keys)
    notes = members.notes + Counter({note: count})
    return replace(members, labels=[""] * count, kind=None, notes=notes)


def _record(whole: Members, row: int) -> object:
    """Return a value that is equal for samples of equal bytes; None if that is unknown."""
    etag = whole.etags[row]
    return (etag, whole.sizes[row]) if etag.startswith(CHECKSUM) else None


def leave_out_repeated(
    whole: Members,
    source: object,
    contents: Sequence[object],
    way_out: str = "rename or remove all but one",
) -> list[int]:
    """Leave out samples that share a key: all of them, or all but one if their contents are equal.

    Returns their rows.

    Parameters
    ----------
    contents
        Value for each row that is equal for equal samples; None if that is unknown.

    Raises
    ------
    SourceError
        Samples of one key have different labels, or no key names one sample.
    """
    if len(set(whole.keys)) == len(whole.keys):
        return []
    counts = Counter(whole.keys)
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, key in enumerate(whole.keys):
        if counts[key] > 1:
            rows_of[key].append(row)
    left_out: dict[int, str] = {}
    for key, rows in rows_of.items():
        labels = sorted({whole.labels[row] for row in rows})
        if len(labels) > 1:
            two = " and ".join(printable(label) or "none" for label in labels[:2])
            raise SourceError(_repeated(source, f"{key} with the labels {two}", rows, way_out))
        equal = contents[rows[0]] is not None and len({contents[row] for row in rows}) == 1
        reason = REPEATED if equal else SAME_KEY
        left_out |= dict.fromkeys(rows[1:] if equal else rows, reason)
    if len(left_out) == len(whole.keys):
        raise SourceError(_repeated(source, whole.keys[0], rows_of[whole.keys[0]], way_out))
    whole.remove(left_out)
    return list(left_out)


def _repeated(source: object, key: str, rows: Sequence[int], way_out: str) -> str:
    return (
        f"the source {source} has {len(rows)} samples {printable(key)}; keys name samples, so "
        f"{way_out}"
    )


def notes_of(listed: Sequence[tuple[FileInfo, Members]]) -> tuple[str, ...]:
    """Return the lines for the user, with their counts over all containers."""
    counts = sum((members.notes for _, members in listed), Counter[str]())
    return tuple(text.replace("{count}", f"{count:,}") for text, count in counts.items())


def _ctimes(listed: Sequence[tuple[FileInfo, Members]]) -> np.ndarray:
    """Return the ctime of each member's container; -1 for members with a checksum."""
    times = [
        -1 if members.etags and members.etags[0].startswith(CHECKSUM) else file.ctime_ns
        for file, members in listed
    ]
    return np.repeat(np.array(times, np.int64), [len(members.keys) for _, members in listed])


@dataclass(frozen=True)
class LabelledRows:
    """Members as a row table, with the lines and doubts about their labels."""

    table: RowTable
    notes: tuple[str, ...]
    doubts: tuple[Doubt, ...]


def row_table(
    listed: Sequence[tuple[FileInfo, Members]],
    whole: Members,
    source: object,
    folder: Folder,
    rules: LabelRules = NO_RULES,
    *,
    typed: bool = True,
    paths: bool = False,
    one_hot: bool = False,
) -> LabelledRows:
    """Return the members of all containers as a row table, with encoded labels.

    Parameters
    ----------
    folder
        The folder that keys are relative to, or locations.
    typed
        As in `Format`.
    paths
        Labels may be the first folders of the members' names.
    one_hot
        Each class has a column of its own.
    """
    kinds: dict[tuple[Kind, tuple[str, ...]], str] = {}
    for file, members in listed:
        if members.kind is not None:
            kinds.setdefault((members.kind, members.classes), file.name)
    kind = joined(kind for kind, _ in kinds) if kinds else None
    if kinds and (kind is None or len({classes for _, classes in kinds}) > 1):
        one, other = next(
            (one, other)
            for one, other in itertools.combinations(kinds, 2)
            if one[1] != other[1] or joined([one[0], other[0]]) is None
        )
        raise SourceError(
            f"labels of {printable(kinds[one])} and {printable(kinds[other])} in {source} differ "
            f"in kind ({one[0]}, {other[0]}) or in class names; make them alike"
        )
    names = next((classes for _, classes in kinds), ())
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    labels = whole.labels
    if one_hot and kind == "several numbers":
        numbers = one_class_each(labels)
        labels, kind = (labels, kind) if numbers is None else (numbers, "numbers")
        each = "one class" if numbers else "several classes or none"
        notes = (f"Labels from columns of 0 and 1, a class each: rows have {each}",)
    folders = paths and all(map(operator.eq, labels, map(first_folder, _names_of(whole))))
    if folders:
        reading = read_folders(_names_of(whole), rules, source)
        notes, doubts = (*notes, *reading.notes), reading.doubts
        if reading.level != 1:
            labels = folder_labels(_names_of(whole), reading.level)
        kind = "names" if any(labels) else None
    elif rules.level is not None:
        raise SourceError(f"{source} has labels that are not its folders; leave out --label-level")
    settled = settle_labels(
        labels,
        kind,
        whole.keys,
        str(source),
        rules,
        declared=bool(names),
        typed=typed or folders,
        folders=folders,
    )
    encoded, classes = encode_labels(
        settled.labels, settled.kind, names, whole.keys, str(source), rules.order
    )
    if wrong := [name for name in classes if not is_utf8(name)]:
        raise SourceError(f"{source} has the class {printable(wrong[0])}, which is not UTF-8")
    notes += tuple(settled.notes)
    doubts += tuple(settled.doubts)
    if not names:
        doubts += tuple(doubts_of_classes(classes, source))
        notes += tuple(note_of_order(classes))
    sizes, mtimes = np.array(whole.sizes, np.int64), np.array(whole.mtimes, np.int64)
    table = RowTable(
        keys=whole.keys,
        sizes=sizes,
        mtimes=mtimes,
        etags=whole.etags,
        labels=encoded,
        classes=classes,
        locations=whole.locations,
        source=source_of(folder),
    )
    return LabelledRows(table, notes, doubts)


def _binary_columns(listed: Sequence[tuple[FileInfo, Members]]) -> list[str]:
    """Return the columns that have only 0 and 1 in all containers without labels."""
    columns = [members.binary for _, members in listed]
    return [name for name in columns[0] if all(name in others for others in columns)]


def _names_of(whole: Members) -> Iterator[str]:
    """Yield the names of all members in their containers; a list of them would take memory."""
    for key, location in zip(whole.keys, whole.locations, strict=True):
        yield key[len(unit_of(location).rpartition("#")[0]) + 1 :]


# --- index --------------------------------------------------------------------------------------


def _write_index(listed: Sequence[tuple[FileInfo, Members]]) -> bytes:
    """Serialise the members of all containers: a Parquet file after its XXH3-128 digest."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    described = [
        [
            *file, len(members.keys),
            [
                members.kind, members.label_rule, members.classes, members.ignored,
                members.left_out, members.examples, members.notes, members.combinations,
                members.binary,
            ],
        ]
        for file, members in listed
    ]  # fmt: skip
    types = {name: pa.type_for_alias(kind) for name, kind in _INDEX_COLUMNS.items()}
    schema = pa.schema(types, {"containers": json.dumps(described), "rules": INDEX_RULES})
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for _, members in listed:
            columns = (
                members.keys, np.array(members.sizes, np.int64),
                np.array(members.mtimes, np.int64), members.etags, members.labels,
                members.locations,
            )  # fmt: skip
            arrays = [
                pa.array(column, kind) for column, kind in zip(columns, types.values(), strict=True)
            ]
            if members.keys:
                writer.write_table(pa.table(arrays, schema=schema))
    data = sink.getvalue()
    return xxhash.xxh3_128_digest(data) + data


def _read_index(data: bytes) -> dict[tuple[Any, ...], Members]:
    """Parse an index: identity of a container -> its members; empty if the index is invalid.

    The index comes from a store and is not trusted: locations must lie in their own container, and
    are checked again when they are read.
    """
    digest, data = data[:16], data[16:]
    if xxhash.xxh3_128_digest(data) != digest:
        return {}
    try:
        table = read_columns(data, _INDEX_COLUMNS, "the index of a source")
        containers = _INDEXED.validate_json(table.schema.metadata[b"containers"])
        listed = sum(container[5] for container in containers)
        if listed != len(table) or table.schema.metadata.get(b"rules") != INDEX_RULES:
            return {}
        known, start = {}, 0
        for name, size, mtime, etag, ctime, count, rest in containers:
            kind, rule, classes, ignored, left_out, examples, noted, combinations, binary = rest
            part = table.slice(start, count)
            start += count
            members = Members(
                keys=part["key"].to_pylist(),
                sizes=array("q", part["size"].to_numpy().tobytes()),
                mtimes=array("q", part["mtime_ns"].to_numpy().tobytes()),
                etags=part["etag"].to_pylist(),
                labels=part["label"].to_pylist(),
                locations=part["location"].to_pylist(),
                kind=kind,
                label_rule=rule,
                classes=classes,
                ignored=Counter(ignored),
                left_out=Counter(left_out),
                examples=examples,
                notes=Counter(noted),
                combinations=combinations,
                binary=binary,
            )
            if not all(location.startswith(f"{name}#") for location in members.locations):
                return {}
            if members.keys:  # raises for invalid labels: they must not count as the source's
                encode_labels(members.labels, kind, classes, members.keys, name)
            known[name, size, mtime, etag, ctime] = members
    except (PrecacheError, ArithmeticError, LookupError, TypeError, ValueError):
        return {}
    return known
