"""Sources whose samples lie in containers: archives and tables, files with many samples each.

A format scans a container for its members and reads them. All formats share the naming of
containers, their concurrent listing, the index of unchanged containers, and fetching.

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
from pydantic_core import to_jsonable_python

from precache.errors import FetchError, PrecacheError, SampleError, SourceError, StorageError
from precache.messages import printable
from precache.runtime.ordered_map import prefetch
from precache.storage.base import (
    LONGEST_NAME,
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
    FILES_PER_TICK,
    IMAGE_SUFFIXES,
    MOST_SAMPLE_BYTES,
    NO_COLUMNS,
    NO_RULES,
    Doubt,
    Fetched,
    Folders,
    LabelRules,
    Listing,
    Names,
    Tick,
    count_ignored,
    hidden_as,
    is_utf8,
    locations_by_key,
    source_of,
)
from precache_workers.sources.column_evidence import ColumnEvidence
from precache_workers.sources.container_names import Containers
from precache_workers.sources.label_readings import (
    bare_folders,
    folder_labels,
    is_beside,
    read_folders,
)
from precache_workers.sources.labels import (
    Label,
    MixedLabelsError,
    column_of,
    differing,
    join_columns,
    kind_of,
    read_column,
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

_INDEXED = TypeAdapter(
    list[
        tuple[
            str, int, int, str, int, NonNegativeInt,
            tuple[
                bool, tuple[str, ...], dict[str, NonNegativeInt],
                dict[str, NonNegativeInt], dict[str, str], dict[str, NonNegativeInt],
                dict[str, tuple[NonNegativeInt, str]], ColumnEvidence, dict[str, bool], bool,
            ],
        ]
    ]
)  # fmt: skip
"""Containers of an index: the fields of `FileInfo`, the number of samples, and the attributes of
`Members` that are not columns, after whether it has labels."""

INDEX_RULES = b"10"
"""Version of the listing rules; indexes of other versions are ignored. Increase it when a format
lists other keys or labels for the same file."""

_INDEX_COLUMNS = {
    "key": "string", "size": "int64", "mtime_ns": "int64", "etag": "string",
    "unit": "int32", "nbytes": "int64",
}  # fmt: skip

INDEXED_ROWS = 1 << 16
"""Rows of an index that are converted at a time."""

_NO_NAME = r"(?:^|/)\.{0,2}(?:/|$)|\x00"
"""Regular expression of RE2 that is found in what `is_name` refuses, but for its length."""


class TimeUpError(Exception):
    """The time for a listing is up."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The samples of containers, by column.

    Attributes
    ----------
    labels
        Labels as an Arrow array, as of `labels.column_of`; of nulls if there are none.
    units, places, nbytes
        As in `Locations`.
    """

    keys: Texts
    sizes: np.ndarray
    mtimes: np.ndarray
    etags: Texts
    labels: Any
    units: np.ndarray
    places: Any
    nbytes: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(
        cls,
        keys: Texts,
        places: Any,
        *,
        units: np.ndarray,
        etags: Texts | str,
        labels: Any = None,
        sizes: np.ndarray | None = None,
        mtimes: np.ndarray | None = None,
        nbytes: np.ndarray | None = None,
    ) -> Rows:
        """Return the columns of some samples; what is not given is unknown."""
        import pyarrow as pa

        count = len(keys)
        return cls(
            keys=keys,
            sizes=np.full(count, -1) if sizes is None else sizes.astype(np.int64),
            mtimes=np.full(count, -1) if mtimes is None else mtimes.astype(np.int64),
            etags=Texts.repeated([etags], [count]) if isinstance(etags, str) else etags,
            labels=pa.nulls(count) if labels is None else labels,
            units=units.astype(np.int32),
            places=places,
            nbytes=np.zeros(count, np.int64) if nbytes is None else nbytes.astype(np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Rows], labels: Any) -> Rows:
        """Return the samples of several containers, one after the other, with labels of all."""
        import pyarrow as pa

        if len(parts) == 1:
            return parts[0]
        arrays = ("sizes", "mtimes", "units", "nbytes")
        return cls(
            keys=Texts.joined([part.keys for part in parts]),
            etags=Texts.joined([part.etags for part in parts]),
            labels=labels,
            places=pa.concat_arrays([part.places for part in parts]),
            **{name: np.concatenate([getattr(p, name) for p in parts]) for name in arrays},
        )

    def take(self, kept: np.ndarray) -> Rows:
        """Return the samples that a column of bools tells to keep."""
        return Rows(
            keys=self.keys.take(kept),
            sizes=self.sizes[kept],
            mtimes=self.mtimes[kept],
            etags=self.etags.take(kept),
            labels=self.labels.filter(arrow_of(kept)),
            units=self.units[kept],
            places=self.places.filter(arrow_of(kept)),
            nbytes=self.nbytes[kept],
        )


class GrowingRows:
    """Samples that are listed one by one, as columns.

    Parameters
    ----------
    places
        Arrow type of the places.
    """

    def __init__(self, places: Any) -> None:
        self._names, self._etags = GrowingTexts(), GrowingTexts()
        self._type, self._places = places, list[Any]()
        self._sizes, self._units, self._nbytes = array("q"), array("q"), array("q")
        self._labels: list[Label | None] = []
        self._columns: list[Any] = []
        self._different: set[str] = set()
        self._new: list[tuple[str, str, Any]] = []

    def __len__(self) -> int:
        return len(self._sizes)

    def add(
        self,
        name: str,
        place: Any,
        *,
        unit: int = 0,
        size: int = -1,
        etag: str = "",
        label: Label | None = None,
    ) -> None:
        """Add a sample."""
        self._new.append((name, etag, place))
        self._sizes.append(size)
        self._units.append(unit)
        self._nbytes.append(0)
        self._labels.append(label)
        if len(self._new) == FILES_PER_TICK:
            self._settle()

    def extend(
        self,
        names: Sequence[str],
        places: Any,
        *,
        units: np.ndarray,
        sizes: np.ndarray,
        etag: str,
        labels: Any,
        nbytes: int = 0,
    ) -> None:
        """Add samples; not to be mixed with those that are added one by one."""
        self._settle()
        self._names.extend(names)
        self._etags.extend([etag] * len(names))
        self._different.add(etag)
        self._places.append(places)
        self._sizes.frombytes(sizes.astype(np.int64).tobytes())
        self._units.frombytes(units.astype(np.int64).tobytes())
        self._nbytes.frombytes(np.full(len(names), nbytes, np.int64).tobytes())
        self._columns.append(labels)

    def _settle(self) -> None:
        import pyarrow as pa

        names, etags, places = zip(*self._new, strict=True) if self._new else ((), (), ())
        self._names.extend(names)
        self._etags.extend(etags)
        self._different.update(etags)
        self._places.append(pa.array(places, self._type))
        self._new = []

    def rows(self, where: str = "") -> tuple[Rows, list[int]]:
        """Return the samples, with their names as keys, and those whose names are not UTF-8.

        Raises
        ------
        SourceError
            Their labels have kinds that cannot be combined.
        """
        import pyarrow as pa

        self._settle()
        try:
            labels = join_columns([*self._columns, column_of(self._labels)])
        except MixedLabelsError as error:
            row, [_, kind] = error.other[0], error.one
            name = self._names.texts()[row] or f"number {row}"
            raise differing(where, name, self._labels[row], kind) from None
        rows = Rows.of(
            self._names.texts(),
            pa.concat_arrays(self._places),
            units=np.array(self._units),
            etags=next(iter(self._different)) if len(self._different) == 1 else self._etags.texts(),
            labels=labels,
            sizes=np.array(self._sizes),
            nbytes=np.array(self._nbytes),
        )
        return rows, self._names.wrong


def no_rows(places: Any) -> Rows:
    """Return no samples, with places of an Arrow type."""
    return GrowingRows(places).rows()[0]


@dataclass(kw_only=True)
class Members:
    """The samples of one container.

    Attributes
    ----------
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

    rows: Rows
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)
    others: dict[str, bool] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    combinations: dict[str, tuple[int, str]] = field(default_factory=dict)
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

    def remove(self, rows: Mapping[int, str]) -> None:
        """Leave out the samples at some rows, each for its reason."""
        kept = np.ones(len(self.rows), np.bool_)
        for row, reason in rows.items():
            self.leave_out(reason, _shown(self.rows.keys, row))
            kept[row] = False
        self.rows = self.rows.take(kept) if rows else self.rows

    def take(
        self, growing: GrowingRows, container: str, key: str | None = None, where: str = ""
    ) -> None:
        """Take rows by their names in the container, or by values of a column of keys.

        Names from a column of keys are used as they are. Otherwise the container's name comes
        first, and rows are numbered unless all names differ.

        Raises
        ------
        SourceError
            The column of keys has no value in some row.
        """
        self.rows, wrong = growing.rows(where or container)
        names = self.rows.keys
        if key is not None:
            if names.is_blank.any():
                raise SourceError(f"{where}: some of its {key} are missing or empty")
        elif not are_names(names).all() or (names.counts() > 1).any():
            names, wrong = Texts(map(str, range(len(names)))), []
        if key is None:
            names = names.between(f"{container}/")
        self.rows = replace(self.rows, keys=names)
        self.remove(dict.fromkeys(wrong, NOT_UTF8))


def _shown(keys: Texts, row: int) -> str:
    """Return a key, of which some bytes may not be UTF-8."""
    return bytes(keys.arrow[row].as_buffer()).decode("utf-8", "surrogateescape")


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
    def noun(self) -> str:
        """Name of the kind with its article, such as ``a tar archive``."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of its files, in lower case."""

    @property
    def typed(self) -> bool:
        """False if labels are text whose kind is inferred, or else the folders of names."""

    @property
    def checks_members(self) -> bool:
        """True if `read` sees that a member changed; else each change of a file is one of all."""

    def places(self) -> Any:
        """Return the Arrow type of places."""

    def scan(self, folder: Folder, file: FileInfo, until: float) -> Members:
        """List the members of a container.

        Raises
        ------
        SourceError, StorageError
            It is damaged or hostile; it cannot be read.
        TimeUpError
            `time.monotonic()` is past `until`.
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
        files = self._located([key]).containers
        return (self.folder, files[0].name) if files else None

    # --- listing --------------------------------------------------------------------------------

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        until = time.monotonic() + seconds
        left_out = Counter[str]()
        files = self.containers.files(left_out)
        known = _read_index(index, self.format.places()) if index is not None else {}
        listed: list[tuple[FileInfo, Members]] = []
        count = 0
        for file, members in zip(files, self._scans(files, known, until), strict=False):
            listed.append((file, members))
            count += len(members.rows)
            tick(count)
            if time.monotonic() > until and len(listed) < len(files):
                break
        complete = len(listed) == len(files)
        whole = Members(rows=no_rows(self.format.places()))
        whole.left_out = sum((members.left_out for _, members in listed), +left_out)
        for _, members in reversed(listed):
            whole.examples |= members.examples
        if not count:
            raise self._nothing(listed, complete, whole)
        fresh = complete and any(_identity(file) not in known for file in files)
        wanted = fresh or len(known) != len(files)
        known = {}
        empty, rows = whole.rows, [members.rows for _, members in listed]
        for _, members in listed:
            members.rows = empty  # they would take as much memory again
        columns = [some.labels for some in rows]
        labels, classes = join_labels(listed, columns, self, typed=self.format.typed)
        counts, whole.rows = [len(some) for some in rows], Rows.joined(rows, labels)
        del rows
        one_type = len(_label_types(columns)) < 2
        index = _write_index(listed, columns, whole.rows) if wanted and one_type else None
        del columns
        located = Locations(
            places=whole.rows.places,
            containers=tuple(_container(file, members.forward) for file, members in listed),
            files=np.repeat(np.arange(len(listed), dtype=np.int32), counts),
            units=whole.rows.units,
            nbytes=whole.rows.nbytes,
        )
        ctimes = np.repeat(np.array([file.ctime_ns for file, _ in listed], np.int64), counts)
        if whole.rows.etags[0].startswith(CHECKSUM):
            ctimes[:] = -1
        named = getattr(self.format, "columns", NO_COLUMNS)
        if named.key is not None or _are_nested(files):  # else containers have no key in common
            kept = leave_out_repeated(whole, self, lambda row: _record(whole.rows, row))
            if not kept.all():
                located, ctimes = located.take(np.flatnonzero(kept)), ctimes[kept]
        notes = notes_of(listed)
        inputs = SampleInputs(merged(members.combinations for _, members in listed))
        if inputs:
            rule = getattr(self.format, "sample_name", None)
            if rule is None:
                inputs.require_clear(self)
            notes = (*notes, inputs.note("last" if rule == "last-dot" else "first"))
            located = replace(located, places=inputs.with_all(located.places))
        evidence = ColumnEvidence.joined([members.evidence for _, members in listed])
        labelled = row_table(
            listed,
            whole.rows,
            located,
            self,
            self.folder,
            self.rules,
            classes=classes,
            typed=self.format.typed,
            paths=not self.format.typed,
            order=evidence.classes,
        )
        names = [file.name for file in files]
        read = read_split_files(self.containers, names, named.label or evidence.label, self.rules)
        guesses, doubts = evidence.reading(self, all_splits=self.rules.all_splits)
        _listings[self.index_name] = labelled.table
        return Listing(
            labelled.table,
            dict(sum((members.ignored for _, members in listed), Counter[str]())),
            complete,
            dict(whole.left_out),
            whole.examples,
            index,
            (*notes, *read[0], *guesses, *labelled.notes),
            ctimes,
            (*read[1], *doubts, *labelled.doubts),
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
                return self.format.scan(self.folder, file, until)
            except TimeUpError:
                return None
            except MemoryError:
                raise SourceError(f"{self.folder.path(file.name)} takes too much memory") from None

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
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        located = self._located(keys) if locations is None else locations
        fetched: dict[int, Fetched] = {}
        units: dict[int, list[int]] = {}
        files, numbers = located.files.tolist(), located.unit_numbers.tolist()
        for row, key in enumerate(keys):
            if files[row] < 0:
                fetched[row] = FetchError(f"{self} has no sample {printable(key)}")
            elif sizes[row] > self.most_bytes:
                fetched[row] = too_large_error(sizes[row], self.most_bytes)
            else:
                units.setdefault(numbers[row], []).append(row)
        for rows in units.values():
            places = located.take(rows).places
            wanted = Wanted([keys[row] for row in rows], [sizes[row] for row in rows], places)
            samples_at_work().begin(FETCHING, *wanted.keys, foreign=False)
            read = self._read(located.containers[files[rows[0]]], wanted)
            fetched.update(zip(rows, read, strict=True))
        if any(isinstance(error, FetchError) for error in fetched.values()):
            _listings.pop(self.index_name, None)  # a container may have changed
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

    def _located(self, keys: Sequence[str]) -> Locations:
        """Return where samples lie; lists them if this process has not yet done so."""
        table = _listings.get(self.index_name) or self.list(lambda count: None).table
        return locations_by_key(table, keys)


_listings: dict[str, RowTable] = {}
"""Index name of a source -> its listing in this process. Single dict operations need no lock."""


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


def member_names(names: Sequence[str], container: str) -> tuple[Names, np.ndarray]:
    """Return the names of members without ``./``, and which are keys below their container."""
    import pyarrow.compute as pc

    found = Names.of([name.removeprefix("./") for name in names])
    longest = LONGEST_NAME - len(container) - 1
    short = numbers_of(pc.utf8_length(found.texts.plain)) <= longest
    return found, are_names(found.texts) & short


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


def _container(file: FileInfo, forward: bool) -> Container:
    return Container(file.name, file.size, container_etag(file), file.ctime_ns, forward)


def _are_nested(files: Sequence[FileInfo]) -> bool:
    """Return True if the name of a container is that of a folder with another, as in a bucket."""
    names = sorted(f"{file.name}/" for file in files)
    return any(name.startswith(before) for before, name in itertools.pairwise(names))


def _identity(file: FileInfo) -> tuple[Any, ...]:
    """Return a value that is equal for an unchanged container; unique if nothing identifies it."""
    known = file.etag or file.mtime_ns >= 0
    return (*file,) if known else (file.name, object())


def _label_types(columns: Sequence[Any]) -> set[Any]:
    """Return the types of those columns that have labels."""
    return {column.type for column in columns if kind_of(column.type) is not None}


def join_labels(
    listed: Sequence[tuple[FileInfo, Members]],
    columns: Sequence[Any],
    source: object,
    *,
    typed: bool,
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
    note = (
        "{count} samples lie in containers without labels beside images, as others have: folders "
        "of names are no labels there"
    )
    files: dict[tuple[str, ...], FileInfo] = {}
    for (file, members), column in zip(listed, columns, strict=True):
        if kind_of(column.type) is not None:
            files.setdefault(members.classes, file)
        elif not typed and kind_of(labels.type) is not None:
            members.notes = members.notes + Counter({note: len(column)})
    if len(files) > 1:
        first, second, *_ = files.values()
        raise _unlike(first, second, source, str(kind_of(labels.type)))
    return labels, next(iter(files), ())


def _unlike(one: FileInfo, other: FileInfo, source: object, kinds: str) -> SourceError:
    return SourceError(
        f"labels of {printable(one.name)} and {printable(other.name)} in {source} differ in kind "
        f"({kinds}) or in class names; make them alike"
    )


def _record(rows: Rows, row: int) -> object:
    """Return a value that is equal for samples of equal bytes; None if that is unknown."""
    etag = rows.etags[row]
    return (etag, int(rows.sizes[row])) if etag.startswith(CHECKSUM) else None


def leave_out_repeated(
    whole: Members,
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
    keys, labels = whole.rows.keys, whole.rows.labels
    kept = np.ones(len(keys), np.bool_)
    rows_of: dict[str, list[int]] = {}
    for row in np.flatnonzero(keys.counts() > 1).tolist():
        rows_of.setdefault(keys[row], []).append(row)
    left_out: dict[int, str] = {}
    for key, rows in rows_of.items():
        different = sorted({*texts_of_labels(labels.take(rows))})
        if len(different) > 1:
            two = " and ".join(printable(label) or "none" for label in different[:2])
            raise SourceError(_repeated(source, f"{key} with the labels {two}", rows, way_out))
        contents = {content_of(row) for row in rows}
        equal = len(contents) == 1 and None not in contents
        reason = REPEATED if equal else SAME_KEY
        left_out |= dict.fromkeys(rows[1:] if equal else rows, reason)
    if len(left_out) == len(keys):
        raise SourceError(_repeated(source, keys[0], rows_of[keys[0]], way_out))
    whole.remove(left_out)
    kept[list(left_out)] = False
    return kept


def _repeated(source: object, key: str, rows: Sequence[int], way_out: str) -> str:
    return (
        f"the source {source} has {len(rows)} samples {printable(key)}; keys name samples, so "
        f"{way_out}"
    )


def notes_of(listed: Sequence[tuple[FileInfo, Members]]) -> tuple[str, ...]:
    """Return the lines for the user, with their counts over all containers."""
    counts = sum((members.notes for _, members in listed), Counter[str]())
    return tuple(text.replace("{count}", f"{count:,}") for text, count in counts.items())


@dataclass(frozen=True)
class LabelledRows:
    """Members as a row table, with the lines and doubts about their labels."""

    table: RowTable
    notes: tuple[str, ...]
    doubts: tuple[Doubt, ...]


def row_table(
    listed: Sequence[tuple[FileInfo, Members]],
    rows: Rows,
    located: Locations,
    source: object,
    folder: Folder,
    rules: LabelRules = NO_RULES,
    *,
    classes: tuple[str, ...] = (),
    typed: bool = True,
    paths: bool = False,
    order: tuple[str, ...] = (),
) -> LabelledRows:
    """Return the members of all containers as a row table, with encoded labels.

    Parameters
    ----------
    folder
        The folder that keys are relative to, or locations.
    classes
        Names of classes by number, if the containers have them.
    typed
        As in `Format`.
    paths
        Labels may be the first folders of the members' names.
    order
        Names of classes by number, if the type of the labels orders them.
    """
    labels = rows.labels
    kind, is_folder = kind_of(labels.type), False
    if kind == "names":
        classes = order if rules.kind in (None, "name") and not rules.separator else ()
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    if paths:
        names = _names_of(rows.keys, located)
        folders = Folders(names)
        if is_folder := kind is None:
            others: dict[str, bool] = {}
            for _, members in listed:
                others |= {n: may or others.get(n, False) for n, may in members.others.items()}
            bare_in = functools.partial(bare_folders, others)
            reading = read_folders(names, rules, source, bare_in=bare_in)
            notes, doubts = (*notes, *reading.notes), reading.doubts
            level = reading.level
            of_folders = folders.each(lambda some: folder_labels(some, level))
            labels = column_of([label or None for label in of_folders])
        notes = (*notes, *notes_of_folders(folders.names))
        del names, folders
    if rules.level is not None and not is_folder:
        raise SourceError(f"{source} has labels that are not its folders; leave out --label-level")
    where = str(source)
    is_typed = typed or is_folder
    column = read_column(
        labels, rows.keys, where, rules, classes=classes, typed=is_typed, folders=is_folder
    )
    table = RowTable(
        keys=rows.keys,
        sizes=rows.sizes,
        mtimes=rows.mtimes,
        etags=rows.etags,
        labels=column.values,
        classes=column.classes,
        locations=located,
        source=source_of(folder),
    )
    return LabelledRows(table, (*notes, *column.notes), (*doubts, *column.doubts))


def _names_of(keys: Texts, located: Locations) -> Texts:
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


def _write_index(
    listed: Sequence[tuple[FileInfo, Members]], labels: Sequence[Any], rows: Rows
) -> bytes:
    """Serialise the members of all containers: a Parquet file after its XXH3-128 digest.

    Parameters
    ----------
    labels
        The labels of each container, all of one type.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    described = [
        [
            *file, len(column),
            [
                kind_of(column.type) is not None, members.classes, members.ignored,
                members.left_out, members.examples, members.notes, members.combinations,
                to_jsonable_python(members.evidence), members.others, members.forward,
            ],
        ]
        for (file, members), column in zip(listed, labels, strict=True)
    ]  # fmt: skip
    types = {name: pa.type_for_alias(kind) for name, kind in _INDEX_COLUMNS.items()}
    metadata = {"containers": json.dumps(described), "rules": INDEX_RULES}
    types |= {"label": rows.labels.type, "place": rows.places.type}
    schema = pa.schema(types, metadata)
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for start in range(0, len(rows), INDEXED_ROWS):
            part = slice(start, start + INDEXED_ROWS)
            texts = rows.keys[part], rows.etags[part]
            keys, etags = (text.plain.cast(pa.string()) for text in texts)
            numbers = (rows.sizes, rows.mtimes, rows.units, rows.nbytes)
            sizes, mtimes, units, nbytes = (arrow_of(column[part]) for column in numbers)
            columns = [keys, sizes, mtimes, etags, units, nbytes]
            arrays = [*columns, rows.labels[part], rows.places[part]]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    data = sink.getvalue()
    return xxhash.xxh3_128_digest(data) + data


def _read_index(data: bytes, places: Any) -> dict[tuple[Any, ...], Members]:
    """Parse an index: identity of a container -> its members; empty if the index is invalid.

    The index comes from a store and is not trusted: places are checked again when they are read.

    Parameters
    ----------
    places
        Arrow type of the places.
    """
    digest, data = data[:16], data[16:]
    if xxhash.xxh3_128_digest(data) != digest:
        return {}
    try:
        types = {**_INDEX_COLUMNS, "place": str(places)}
        table = read_columns(data, types, "the index of a source")
        table.validate(full=True)
        labels = _indexed_labels(data)
        containers = _INDEXED.validate_json(table.schema.metadata[b"containers"])
        listed = sum(container[5] for container in containers)
        if listed != len(table) or table.schema.metadata.get(b"rules") != INDEX_RULES:
            return {}
        known, start = {}, 0
        for name, size, mtime, etag, ctime, count, rest in containers:
            has_labels, classes, ignored, left_out, examples, noted, combinations = rest[:7]
            part = table.slice(start, count)
            of_part = labels.slice(start, count) if has_labels else None
            start += count
            rows = Rows.of(
                Texts(part["key"]),
                part["place"].combine_chunks().cast(places),
                units=numbers_of(part["unit"]),
                etags=Texts(part["etag"]),
                labels=of_part,
                sizes=numbers_of(part["size"]),
                mtimes=numbers_of(part["mtime_ns"]),
                nbytes=numbers_of(part["nbytes"]),
            )
            members = Members(
                rows=rows,
                classes=classes,
                ignored=Counter(ignored),
                left_out=Counter(left_out),
                examples=examples,
                notes=Counter(noted),
                combinations=combinations,
                evidence=rest[7],
                others=rest[8],
                forward=rest[9],
            )
            if count:  # raises for invalid labels: they must not count as the source's
                read_column(rows.labels, rows.keys, name, classes=classes)
            known[name, size, mtime, etag, ctime] = members
    except (PrecacheError, ArithmeticError, LookupError, TypeError, ValueError):
        return {}
    return known


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
