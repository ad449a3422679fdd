"""Sources whose samples lie in containers: archives and tables, files with many samples each.

A format scans a container for its samples, as columns of Arrow, and reads them. All formats share
the naming of containers, their concurrent listing, the index of unchanged containers, and fetching.

A sample's key is the name of its container relative to the common folder, a slash, and the sample's
name in the container; a table with a key column gives the key itself. Where it lies is its
container, the number of a unit there, and a place that the format defines; samples of one unit are
read together. Places are checked when they are read, as containers may have changed since the
listing. A process that has only keys, such as the viewer, lists the source once.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from pydantic import NonNegativeInt, TypeAdapter

from precache.errors import FetchError, PrecacheError, SampleError, SourceError, StorageError
from precache.messages import printable
from precache.runtime.ordered_map import prefetch
from precache.storage.base import (
    LONGEST_NAME,
    NO_FILE,
    NO_NAME,
    NOT_UTF8,
    REPEATED,
    SAME_KEY,
    FileInfo,
    Folder,
    left_out_text,
)
from precache.store.columns import GrowingTexts, Texts, arrow_of, numbers_of
from precache.store.locations import Container, Locations
from precache.store.row_table import RowTable, read_columns
from precache.units import size as in_units
from precache_workers.runtime.time_limit import FETCHING, samples_at_work
from precache_workers.sources.base import (
    IMAGE_SUFFIXES,
    MOST_SAMPLE_BYTES,
    NO_COLUMNS,
    NO_RULES,
    Columns,
    Fetched,
    Folders,
    LabelRules,
    Listing,
    Names,
    Tick,
    count_ignored,
    forget,
    hidden_as,
    is_utf8,
    located,
    remember,
    source_of,
)
from precache_workers.sources.column_evidence import ColumnEvidence
from precache_workers.sources.container_names import Containers
from precache_workers.sources.label_evidence import read_column
from precache_workers.sources.label_readings import (
    bare_folders,
    folder_labels,
    is_beside,
    read_folders,
)
from precache_workers.sources.labels import (
    Column,
    Label,
    MixedLabelsError,
    column_of,
    differing,
    join_columns,
    kind_of,
    texts_of_labels,
)
from precache_workers.sources.sample_inputs import SampleInputs, merged
from precache_workers.sources.splits import notes_of_folders, read_split_files

UNIT_BYTES = 1 << 20
"""Bytes of neighbours that are read together; with more, rows of sorted containers mix less."""

CHANGED = "has changed since it was listed"
"""Text of errors after which a container must be listed again, even if it seems unchanged."""

CHECKSUM = "crc32:"
"""Beginning of an etag that is a checksum of the member's content."""

LOCAL_THREADS, REMOTE_THREADS = 2, 8
"""Containers that are scanned concurrently."""

INDEX_RULES = b"13"
"""Version of the listing rules; indexes of other versions are ignored. Increase it when a format
lists other keys or labels for the same file."""

AT_ONCE = 256
"""Samples that are Python objects at a time, where a format lists them one by one."""

INDEXED_ROWS = 1 << 16
"""Rows of an index that are converted at a time."""

_CODED = "dictionary<values=string, indices=int32, ordered=0>"
_INDEX_COLUMNS = {
    "key": "large_string", "size": "int64", "mtime_ns": "int64", "etag": _CODED, "unit": "int32",
    "nbytes": "int64",
}  # fmt: skip

_NO_NAME = r"(?:^|/)\.{0,2}(?:/|$)|\x00"
"""Regular expression of RE2 that is found in what `is_name` refuses, but for its length."""

Rows = Any
"""The samples of containers, an Arrow record batch: the key (in a scan the name, whose bytes need
not be UTF-8), size, mtime_ns and etag; unit, nbytes and place as in `Locations`; and the label as
in `labels.column_of`, of type null if there are none."""


def rows_of(
    names: Sequence[str],
    places: Any,
    *,
    sizes: np.ndarray | int = -1,
    mtimes: np.ndarray | int = -1,
    etags: Sequence[str] | str = "",
    labels: Any = None,
    units: np.ndarray | int = 0,
    nbytes: np.ndarray | int = 0,
) -> Rows:
    """Return the columns of some samples; one value stands for all, as do no names."""
    import pyarrow as pa

    count, growing = len(places), GrowingTexts()
    growing.extend(names or Texts.repeated([""], [count]))
    if isinstance(etags, str):
        etag = Texts.repeated([etags], [count]).arrow
    else:
        etag = Texts(etags).plain.dictionary_encode()
    labels = pa.nulls(count) if labels is None else labels
    size, mtime, nbyte, unit = (
        arrow_of(np.broadcast_to(np.asarray(number, kind), count))
        for number, kind in ((sizes, "i8"), (mtimes, "i8"), (nbytes, "i8"), (units, "i4"))
    )
    columns = [growing.texts().arrow, size, mtime, etag, unit, nbyte, places, labels]
    return pa.RecordBatch.from_arrays(columns, [*_INDEX_COLUMNS, "place", "label"])


def joined_rows(parts: list[Rows], labels: Any) -> Rows:
    """Return the samples of all parts, with all their labels, and clear the list."""
    import pyarrow as pa

    parts[:] = [part.drop_columns(["label"]) for part in parts]
    table = pa.Table.from_batches(parts).unify_dictionaries()
    parts.clear()
    names, arrays = table.column_names, []
    while table.num_columns:  # the parts of a column are dropped before the next one is copied
        arrays.append(table.column(0).combine_chunks())
        table = table.remove_column(0)
    return pa.RecordBatch.from_arrays([*arrays, labels], [*names, "label"])


def rows_of_one(parts: list[Rows], where: str) -> Rows:
    """Return the samples of the parts of one container, and clear the list.

    Raises
    ------
    SourceError
        Their labels have kinds that cannot be combined.
    """
    try:
        labels = join_columns([part["label"] for part in parts])
    except MixedLabelsError as error:
        number, [_, kind] = error.other[0], error.one
        row = parts[number]["label"].is_valid().index(True).as_py()
        [name] = names_of(parts[number].slice(row, 1))
        before = sum(len(part) for part in parts[:number])
        label = parts[number]["label"][row].as_py()
        raise differing(where, name or f"number {before + row}", label, kind) from None
    return joined_rows(parts, labels)


def with_column(rows: Rows, name: str, values: Any) -> Rows:
    """Return the samples with other values in a column."""
    return rows.set_column(rows.schema.get_field_index(name), name, values)


def names_of(rows: Rows) -> Iterator[str]:
    """Yield the names of samples; bytes that are not UTF-8 become surrogates."""
    return (bytes(name.as_buffer()).decode("utf-8", "surrogateescape") for name in rows["key"])


class Place(NamedTuple):
    """A sample of a format that lists them one by one: the columns of `rows_of`."""

    name: str
    place: Any
    size: int = -1
    unit: int = 0
    etag: str = ""
    label: Label | None = None


def in_batches(samples: Iterator[Place], places: Any) -> Iterator[Rows]:
    """Yield samples as columns.

    Parameters
    ----------
    places
        Arrow type of the places.
    """
    import pyarrow as pa

    while some := list(itertools.islice(samples, AT_ONCE)):
        names, where, sizes, units, etags, labels = zip(*some, strict=True)
        numbers = {"sizes": np.array(sizes), "units": np.array(units)}
        try:
            column = column_of(labels)
        except MixedLabelsError:  # that of the container names the sample
            yield from (rows for one in some for rows in in_batches(iter([one]), places))
        else:
            yield rows_of(names, pa.array(where, places), etags=etags, labels=column, **numbers)


@dataclass(kw_only=True)
class Members:
    """Facts about the samples of one container, or of all.

    Attributes
    ----------
    count
        Number of samples.
    has_labels
        Some of its samples have labels.
    classes
        Names of all classes, by number, if the container has them.
    ignored, left_out, examples
        As in `Listing`.
    others
        Folders of members that are no images -> whether some do not just lie beside samples.
    notes
        Lines for the user, shown once for all containers; the total replaces ``{count}``.
    combinations
        Samples by the suffixes of their images, if samples may have several.
    evidence
        What its columns leave in doubt.
    forward
        As in `Container`.
    """

    count: NonNegativeInt = 0
    has_labels: bool = False
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)
    others: dict[str, bool] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    combinations: dict[str, tuple[NonNegativeInt, str]] = field(default_factory=dict)
    evidence: ColumnEvidence = field(default_factory=ColumnEvidence)
    forward: bool = False

    def ignore(self, container: str, key: str) -> None:
        """Count a member that is no image, and keep its folder."""
        count_ignored(self.ignored, key)
        name = key[len(container) + 1 :]
        folder = name.rpartition("/")[0]
        if folder and is_utf8(folder) and not hidden_as(name):
            self.others[folder] = self.others.get(folder, False) or not is_beside(name)

    def leave_out(self, reason: str, name: str) -> None:
        """Count a sample that is left out, and keep the first name as an example."""
        self.left_out[reason] += 1
        self.examples.setdefault(reason, printable(name))

    def keep(self, rows: Rows, reasons: Mapping[int, str]) -> np.ndarray:
        """Leave out the samples at some rows, each for its reason; returns which are kept."""
        kept = np.ones(len(rows), np.bool_)
        for row, reason in reasons.items():
            [name] = names_of(rows.slice(row, 1))
            self.leave_out(reason, name)
            kept[row] = False
        return kept

    def add(self, other: Members) -> None:
        """Add what is counted of another container."""
        self.count += other.count
        self.ignored += other.ignored
        self.left_out += other.left_out
        self.notes += other.notes
        self.examples = other.examples | self.examples
        self.combinations = {**merged([self.combinations, other.combinations])}
        for folder, may_be_class in other.others.items():
            self.others[folder] = self.others.get(folder, False) or may_be_class

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines for the user, with their counts."""
        return tuple(text.replace("{count}", f"{n:,}") for text, n in self.notes.items())


Listed = Sequence[tuple[FileInfo, Members]]
_INDEXED = TypeAdapter(list[tuple[FileInfo, Members]])


def named_rows(
    rows: Rows, members: Members, file: FileInfo, where: str, columns: Columns | None
) -> Rows:
    """Give the samples of a container their keys.

    Values of a column of keys are used as they are. Otherwise the container's name comes first, and
    rows of tables are numbered unless all names differ.

    Parameters
    ----------
    columns
        Columns of a table as the user chose them; None for an archive.

    Raises
    ------
    SourceError
        The column of keys has no value in some row.
    """
    names, key = Texts(rows["key"]), None if columns is None else columns.key
    reasons: dict[int, str] = {}
    if key is not None and names.is_blank.any():
        raise SourceError(f"{where}: some of its {key} are missing or empty")
    is_again = names.counts() > 1
    if columns is None:
        reasons = dict.fromkeys(np.flatnonzero(is_again).tolist(), SAME_KEY)
    elif key is None and (is_again.any() or not are_names(names).all()):
        names = Texts(map(str, range(len(rows))))
    reasons |= dict.fromkeys(np.flatnonzero(~are_utf8(names)).tolist(), NOT_UTF8)
    if key is None:
        names = names.between(f"{file.name}/")
    rows = with_column(rows, "key", names.arrow)
    if reasons:
        rows = rows.filter(arrow_of(members.keep(rows, reasons)))
    members.count = len(rows)
    members.has_labels = kind_of(rows["label"].type) is not None
    return rows


def are_utf8(names: Texts) -> np.ndarray:
    """Return which texts are UTF-8, whatever bytes they have: (names,) bool."""
    import pyarrow as pa

    try:
        names.arrow.validate(full=True)
    except pa.ArrowInvalid:
        return np.array([*map(is_utf8, names_of({"key": names.arrow}))])
    return np.ones(len(names), np.bool_)


def are_names(names: Texts) -> np.ndarray:
    """Return which texts `is_name` takes: (names,) bool."""
    import pyarrow.compute as pc

    return ~names.matching(_NO_NAME) & (numbers_of(pc.utf8_length(names.plain)) <= LONGEST_NAME)


class Wanted(NamedTuple):
    """Samples to read: keys, sizes as listed, and an Arrow array of places in their container."""

    keys: Sequence[str]
    sizes: Sequence[int]
    places: Any

    def one(self, row: int) -> Wanted:
        """Return one of the samples."""
        return Wanted([self.keys[row]], [self.sizes[row]], self.places[row : row + 1])


Read = Sequence[Fetched | None]
"""Samples or errors; None in place of a sample that is not where it was listed."""


class Format(Protocol):
    """A kind of container. Workers receive it as a pickle."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of its files, in lower case."""

    @property
    def columns(self) -> Columns | None:
        """Columns of a table as the user chose them; None for an archive of files, whose labels are
        texts beside them, or else their folders."""

    @property
    def checks_members(self) -> bool:
        """True if `read` sees that a member changed; else each change of a file is one of all."""

    def places(self) -> Any:
        """Return the Arrow type of places."""

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows | None]:
        """Yield the samples of a container, many at a time, and note facts about them.

        It may yield None, so that the time is checked.

        Raises
        ------
        SourceError, StorageError
            It is damaged or hostile; it cannot be read.
        """

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
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
        files = located(self, [key]).containers
        return (self.folder, files[0].name) if files else None

    def __str__(self) -> str:
        return str(self.containers)

    # --- listing --------------------------------------------------------------------------------

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        until = time.monotonic() + seconds
        whole = Members()
        files = self.containers.files(whole.left_out)
        known = _read_index(index, self.format.places()) if index is not None else {}
        listed: list[tuple[FileInfo, Members]] = []
        parts: list[Rows] = []
        for file, (members, rows) in zip(files, self._scans(files, known, until), strict=False):
            listed.append((file, members))
            parts.append(rows)
            whole.add(members)
            tick(whole.count)
            if time.monotonic() > until and len(listed) < len(files):
                break
        complete = len(listed) == len(files)
        if not whole.count:
            raise self._nothing(complete, whole)
        fresh = len(known) != len(files) or any(file not in known for file in files)
        known.clear()
        columns = [rows["label"] for rows in parts]
        typed = self.format.columns is not None
        labels, classes = join_labels(listed, columns, whole, self, typed=typed)
        one_type = len({c.type for c in columns if kind_of(c.type) is not None}) < 2
        del columns
        rows = joined_rows(parts, labels)
        index = _write_index(listed, rows) if fresh and one_type else None
        numbers = np.repeat(
            np.arange(len(listed), dtype=np.int32), [members.count for _, members in listed]
        )
        if (self.format.columns or NO_COLUMNS).key is not None or _nested(files):
            kept = kept_of_repeated(whole, rows, self, functools.partial(_record, rows))
            rows, numbers = rows.filter(arrow_of(kept)), numbers[kept]
        inputs, notes, places = SampleInputs(whole.combinations), whole.lines, rows["place"]
        if inputs:
            rule = getattr(self.format, "sample_name", None)
            if rule is None:
                inputs.require_clear(self)
            notes = (*notes, inputs.note("last" if rule == "last-dot" else "first"))
            places = inputs.with_all(places)
        locations = Locations(
            places=places,
            containers=tuple(
                Container(f.name, f.size, container_etag(f), f.ctime_ns, members.forward)
                for f, members in listed
            ),
            files=numbers,
            units=numbers_of(rows["unit"]),
            nbytes=numbers_of(rows["nbytes"]),
        )
        ctimes = np.array([file.ctime_ns for file, _ in listed], np.int64)[numbers]
        if str(rows["etag"][0]).startswith(CHECKSUM):
            ctimes[:] = -1
        listing = listing_of(
            self,
            listed,
            whole,
            rows,
            locations,
            ctimes,
            classes=classes,
            columns=self.format.columns,
            typed=typed,
        )
        remember(self, listing.table)
        return replace(listing, complete=complete, index=index, notes=(*notes, *listing.notes))

    def _scans(
        self,
        files: Sequence[FileInfo],
        known: Mapping[FileInfo, tuple[Members, Rows]],
        until: float,
    ) -> Iterator[tuple[Members, Rows]]:
        """Yield the samples of each container until the time is up."""
        import pyarrow as pa

        places = self.format.places()

        def scan(file: FileInfo) -> tuple[Members, Rows] | None:
            if (held := known.get(file)) is not None:
                return held
            where, members = self.folder.path(file.name), Members()
            parts = [rows_of((), pa.array([], places))]
            try:
                for rows in self.format.scan(self.folder, file, members):
                    if time.monotonic() > until:
                        return None
                    if rows is not None:
                        parts.append(rows)
                rows = rows_of_one(parts, where)
                return members, named_rows(rows, members, file, where, self.format.columns)
            except MemoryError:
                raise SourceError(f"{where} takes too much memory") from None

        threads = LOCAL_THREADS if self.folder.local("") else REMOTE_THREADS
        for scanned in prefetch(scan, files, threads, threads + 1):
            if scanned is None:
                return
            yield scanned

    def _nothing(self, complete: bool, whole: Members) -> SourceError:
        if not complete:
            return SourceError(f"the source {self} was not listed in time; give more seconds")
        if not (whole.ignored or +whole.left_out):
            return SourceError(f"the source {self} is empty: it has no sample")
        return SourceError(
            f"the source {self} has no image ({whole.ignored.total()} other members); images end "
            f"in {', '.join(sorted(IMAGE_SUFFIXES))}{left_out_text(whole.left_out, whole.examples)}"
        )

    # --- fetching -------------------------------------------------------------------------------

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        places = located(self, keys) if locations is None else locations
        fetched: dict[int, Fetched] = {}
        units: dict[int, list[int]] = {}
        files, numbers = places.files.tolist(), places.unit_numbers.tolist()
        for row, key in enumerate(keys):
            if files[row] < 0:
                fetched[row] = FetchError(f"{self} has no sample {printable(key)}")
            elif sizes[row] > self.most_bytes:
                fetched[row] = too_large_error(sizes[row], self.most_bytes)
            else:
                units.setdefault(numbers[row], []).append(row)
        for rows in units.values():
            taken = places.take(rows).places
            wanted = Wanted([keys[row] for row in rows], [sizes[row] for row in rows], taken)
            samples_at_work().begin(FETCHING, *wanted.keys, foreign=False)
            read = self._read(places.containers[files[rows[0]]], wanted)
            fetched.update(zip(rows, read, strict=True))
        if any(isinstance(error, FetchError) for error in fetched.values()):
            forget(self)  # a container may have changed
        return [fetched[row] for row in range(len(keys))]

    def _read(self, container: Container, wanted: Wanted) -> Sequence[Fetched]:
        """Read samples of a unit; one by one if memory is short."""
        read: Read
        try:
            read = self.format.read(self.folder, container, wanted, self.most_bytes)
        except MemoryError:
            if len(wanted.keys) == 1:
                return [SampleError("there is not enough memory to read it")]
            ones = map(wanted.one, range(len(wanted.keys)))
            return [fetched for one in ones for fetched in self._read(container, one)]
        except SourceError as error:
            read = [SampleError(str(error))] * len(wanted.keys)
        except StorageError as error:
            return [FetchError(str(error))] * len(wanted.keys)
        except (ArithmeticError, LookupError, TypeError, ValueError):  # as a forged index has them
            read = [None] * len(wanted.keys)
        if not self.format.checks_members:  # after it was read: it may be replaced meanwhile
            now = self.folder.info(container.name)
            if now is None or container_etag(now) != container.etag:
                read = [None] * len(wanted.keys)
        return [
            changed(self.folder, container.name, key) if sample is None else sample
            for key, sample in zip(wanted.keys, read, strict=True)
        ]


def units_of(starts: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Number the units of members that are sorted by their offsets in a container."""
    units, unit, first = array("q"), 0, 0
    for start, end in zip(starts.tolist(), (starts + nbytes).tolist(), strict=True):
        if end - first > UNIT_BYTES and start > first:
            unit, first = unit + 1, start
        units.append(unit)
    return np.frombuffer(units, np.int64) if len(units) else np.zeros(0, np.int64)


def structs(kind: Any, columns: Sequence[np.ndarray]) -> Any:
    """Return columns of numbers as an Arrow array of structs of some type."""
    import pyarrow as pa

    names = [field.name for field in kind]
    return pa.StructArray.from_arrays([arrow_of(n) for n in columns], names).cast(kind)


class FileNames(NamedTuple):
    """Names of files in an archive, and which are images that are taken, and which are labels."""

    names: Texts
    images: np.ndarray
    labels: np.ndarray


def file_names(
    listed: Sequence[str], regular: np.ndarray, container: str, members: Members, labels: str = ""
) -> FileNames:
    """Tell images from labels and others in an archive, whose names lose ``./``; count the others.

    Parameters
    ----------
    listed
        Names; those of `Texts` may have bytes that are not UTF-8.
    regular
        Which are files: (names,) bool.
    labels
        Regular expression of the names of labels.
    """
    import pyarrow.compute as pc

    if isinstance(listed, Texts) and are_utf8(listed).all():
        texts = listed.plain
        if pc.any(pc.starts_with(texts, "./")).as_py():
            texts = pc.replace_substring_regex(texts, r"^\./", "")
        found = Names.of(Texts(texts))
    else:
        listed = [*(names_of({"key": listed.arrow}) if isinstance(listed, Texts) else listed)]
        found = Names.of([name.removeprefix("./") for name in listed])
    lengths = numbers_of(pc.utf8_length(found.texts.plain))
    named = are_names(found.texts) & (lengths <= LONGEST_NAME - len(container) - 1)
    usable = regular & named
    members.left_out[NO_FILE] += int((~regular).sum())
    members.left_out[NO_NAME] += int((regular & ~named).sum())
    others = usable & ~found.images
    are_labels = np.zeros(len(others), np.bool_)
    if labels:
        are_labels = others & found.texts.matching(labels, ignore_case=True)
    reasons = {**found.left_out, **{row: NOT_UTF8 for row in found.wrong if are_labels[row]}}
    for row, reason in reasons.items():
        if usable[row]:
            members.leave_out(reason, f"{container}/{listed[row].removeprefix('./')}")
    for row in np.flatnonzero(others & ~are_labels).tolist():
        members.ignore(container, f"{container}/{listed[row].removeprefix('./')}")
    are_labels[[*found.wrong]] = False
    return FileNames(found.texts, usable & found.kept, are_labels)


def last_of_each(names: Texts) -> np.ndarray:
    """Return which rows no later row has the name of: (rows,) bool."""
    codes = names.codes()
    last = np.zeros(len(codes), np.int64)
    last[codes] = np.arange(len(codes))  # the last assignment counts
    return np.asarray(last[codes] == np.arange(len(codes)))


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


def _nested(files: Sequence[FileInfo]) -> bool:
    """Return True if the name of a container is that of a folder with another, as in a bucket."""
    names = sorted(f"{file.name}/" for file in files)
    return any(name.startswith(before) for before, name in itertools.pairwise(names))


def _record(rows: Rows, row: int) -> object:
    """Return a value that is equal for samples of equal bytes; None if that is unknown."""
    etag = str(rows["etag"][row])
    return (etag, rows["size"][row].as_py()) if etag.startswith(CHECKSUM) else None


def kept_of_repeated(
    whole: Members,
    rows: Rows,
    source: object,
    content_of: Callable[[int], object],
    way_out: str = "rename or remove all but one",
) -> np.ndarray:
    """Leave out samples that share a key: all of them, or all but one if their contents are equal.

    Returns which samples are kept: (rows,) bool.

    Parameters
    ----------
    content_of
        Returns a value for a row that is equal for equal samples; None if that is unknown.

    Raises
    ------
    SourceError
        Samples of one key have different labels, or no key names one sample.
    """
    keys, labels = Texts(rows["key"]), rows["label"]
    rows_of_key: dict[str, list[int]] = {}
    for row in np.flatnonzero(keys.counts() > 1).tolist():
        rows_of_key.setdefault(keys[row], []).append(row)
    left_out: dict[int, str] = {}
    for key, some in rows_of_key.items():
        different = sorted({*texts_of_labels(labels.take(some))})
        if len(different) > 1:
            two = " and ".join(printable(label) or "none" for label in different[:2])
            raise SourceError(_repeated(source, f"{key} with the labels {two}", some, way_out))
        contents = {content_of(row) for row in some}
        equal = len(contents) == 1 and None not in contents
        left_out |= dict.fromkeys(*((some[1:], REPEATED) if equal else (some, SAME_KEY)))
    if len(left_out) == len(keys):
        raise SourceError(_repeated(source, keys[0], rows_of_key[keys[0]], way_out))
    return whole.keep(rows, left_out)


def _repeated(source: object, key: str, rows: Sequence[int], way_out: str) -> str:
    return (
        f"the source {source} has {len(rows)} samples {printable(key)}; keys name samples, so "
        f"{way_out}"
    )


def join_labels(
    listed: Listed, columns: Sequence[Any], whole: Members, source: object, *, typed: bool
) -> tuple[Any, tuple[str, ...]]:
    """Return the labels of all containers as one column, and the names of classes by number.

    Where some have labels beside their images, folders of names are no labels in others.

    Raises
    ------
    SourceError
        Labels of two containers have kinds that cannot be combined, or other names of classes.
    """
    try:
        labels = join_columns(columns, typed=typed)
    except MixedLabelsError as error:
        (one, kind), (other, its_kind) = error.one, error.other
        raise _unlike(listed[one][0], listed[other][0], source, f"{kind}, {its_kind}") from None
    files: dict[tuple[str, ...], FileInfo] = {}
    for (file, members), column in zip(listed, columns, strict=True):
        if kind_of(column.type) is not None:
            files.setdefault(members.classes, file)
        elif not typed and kind_of(labels.type) is not None:
            whole.notes[
                "{count} samples lie in containers without labels beside images, as others have: "
                "folders of names are no labels there"
            ] += len(column)
    if len(files) > 1:
        first, second, *_ = files.values()
        raise _unlike(first, second, source, str(kind_of(labels.type)))
    return labels, next(iter(files), ())


def _unlike(one: FileInfo, other: FileInfo, source: object, kinds: str) -> SourceError:
    return SourceError(
        f"labels of {printable(one.name)} and {printable(other.name)} in {source} differ in kind "
        f"({kinds}) or in class names; make them alike"
    )


def listing_of(
    source: Any,
    listed: Listed,
    whole: Members,
    rows: Rows,
    located: Locations,
    ctimes: np.ndarray,
    *,
    classes: tuple[str, ...],
    columns: Columns | None,
    typed: bool,
) -> Listing:
    """Return the samples of all containers as a listing, with encoded labels.

    Parameters
    ----------
    source
        A `ContainerSource`, or one of its attributes `containers`, `folder` and `rules`.
    classes
        Names of classes by number, if the containers have them.
    columns
        As in `Format`.
    typed
        False if labels are text without a type.
    """
    rules, where, labels = source.rules, str(source), rows["label"]
    evidence = ColumnEvidence.joined([members.evidence for _, members in listed])
    kind = kind_of(labels.type)
    if kind == "names":
        classes = evidence.classes if rules.kind in (None, "name") and not rules.separator else ()
    keys = Texts(rows["key"])
    files = [file.name for file, _ in listed]
    label = (columns or NO_COLUMNS).label or evidence.label
    of_files = read_split_files(source.containers, files, label, rules)
    of_columns = evidence.reading(source, all_splits=rules.all_splits)
    notes, doubts = [*of_files[0], *of_columns[0]], [*of_files[1], *of_columns[1]]
    is_folder = columns is None and kind is None
    if columns is None:
        names = member_names(keys, located)
        folders = Folders(names)
        if is_folder:
            bare_in = functools.partial(bare_folders, whole.others)
            folder, unpack = source.containers.unpacked()
            inside = f"{folder}/{{}}".format if folder else None
            reading = read_folders(names, rules, source, inside, bare_in, unpack)
            notes, doubts = [*notes, *reading.notes], [*doubts, *reading.doubts]
            of_folders = folders.each(lambda some: folder_labels(some, reading.level))
            labels = column_of([label or None for label in of_folders])
        notes += notes_of_folders(folders.names)
        del names, folders
    if rules.level is not None and not is_folder:
        raise SourceError(f"{where} has labels that are not its folders; leave out --label-level")
    typed = typed or is_folder
    given = Column(labels, keys, where, rules, classes, typed=typed, folders=is_folder)
    column = read_column(given)
    table = RowTable(
        keys=keys,
        sizes=numbers_of(rows["size"]),
        mtimes=numbers_of(rows["mtime_ns"]),
        etags=Texts(rows["etag"]),
        labels=column.values,
        classes=column.classes,
        locations=located,
        source=source_of(source.folder),
    )
    return Listing(
        table,
        dict(whole.ignored),
        left_out=dict(+whole.left_out),
        examples=whole.examples,
        notes=(*notes, *column.notes),
        ctimes=ctimes,
        doubts=(*doubts, *column.doubts),
    )


def member_names(keys: Texts, located: Locations) -> Texts:
    """Return the names of members in their containers: keys without the container's name."""
    import pyarrow.compute as pc

    ends = np.flatnonzero(np.diff(located.files, append=-2)) + 1
    parts, start = [], 0
    for end in ends.tolist():
        container = located.containers[located.files[start]].name
        parts.append(Texts(pc.utf8_slice_codeunits(keys[start:end].plain, len(container) + 1)))
        start = end
    return Texts.joined(parts)


# --- index --------------------------------------------------------------------------------------


def _write_index(listed: Listed, rows: Rows) -> bytes:
    """Serialise the members of all containers: a Parquet file after its XXH3-128 digest."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, sink = pa.Table.from_batches([rows]), io.BytesIO()
    metadata = {"containers": _INDEXED.dump_json([*listed]), "rules": INDEX_RULES}
    table = table.replace_schema_metadata(metadata)
    pq.write_table(table, sink, compression="zstd", row_group_size=INDEXED_ROWS)
    data = sink.getvalue()
    return xxhash.xxh3_128_digest(data) + data


def _read_index(data: bytes, places: Any) -> dict[FileInfo, tuple[Members, Rows]]:
    """Parse an index: a container -> its members; empty if the index is invalid.

    The index comes from a store and is not trusted: places are checked again when they are read.

    Parameters
    ----------
    places
        Arrow type of the places.
    """
    digest, data = data[:16], data[16:]
    if xxhash.xxh3_128_digest(data) != digest:
        return {}
    known: dict[FileInfo, tuple[Members, Rows]] = {}
    try:
        table = read_columns(data, {**_INDEX_COLUMNS, "place": str(places)}, "an index")
        table.validate(full=True)
        labels = _indexed_labels(data)
        listed = _INDEXED.validate_json(table.schema.metadata[b"containers"])
        counts = [members.count for _, members in listed]
        if sum(counts) != len(table) or table.schema.metadata.get(b"rules") != INDEX_RULES:
            return {}
        for (file, members), end in zip(listed, itertools.accumulate(counts), strict=True):
            part = table.slice(end - members.count, members.count)
            of_part = labels.slice(end - members.count, members.count)
            rows = rows_of(
                Texts(part["key"]),
                part["place"].combine_chunks().cast(places),
                sizes=numbers_of(part["size"]),
                mtimes=numbers_of(part["mtime_ns"]),
                etags=Texts(part["etag"]),
                labels=of_part if members.has_labels else None,
                units=numbers_of(part["unit"]),
                nbytes=numbers_of(part["nbytes"]),
            )
            if members.count:  # raises for invalid labels: they must not count as the source's
                keys = Texts(rows["key"])
                read_column(Column(rows["label"], keys, file.name, classes=members.classes))
            if _is_identified(file):
                known[file] = members, rows
    except (PrecacheError, ArithmeticError, LookupError, TypeError, ValueError):
        return {}
    return known


def _is_identified(file: FileInfo) -> bool:
    """Return True if a change of a file would be seen."""
    return bool(file.etag) or file.mtime_ns >= 0


def _indexed_labels(data: bytes) -> Any:
    """Return the labels of an index, whose size is known to be plausible."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = pq.read_table(io.BytesIO(data), columns=["label"])["label"].combine_chunks()
    if pa.types.is_large_list(labels.type):  # its items may have another name
        labels = labels.cast(pa.large_list(labels.type.value_type))
    if kind_of(labels.type) is None and not pa.types.is_null(labels.type):
        raise ValueError(f"labels are never {labels.type}")
    labels.validate(full=True)
    return labels
