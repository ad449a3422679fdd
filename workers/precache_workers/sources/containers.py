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

import bisect
import functools
import io
import itertools
import json
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import TypeAdapter

from precache.codecs.chunk import require_plausible
from precache.errors import (
    DamageError,
    FetchError,
    PrecacheError,
    SampleError,
    SourceError,
    StorageError,
)
from precache.messages import printable
from precache.runtime.process_id import this_node
from precache.runtime.threads import prefetch
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
from precache.store.row_table import MIN_ROW_NBYTES, RowTable
from precache_workers.runtime.time_limit import FETCHING, samples_at_work
from precache_workers.sources.base import (
    BY_DATASET,
    HIDDEN,
    IMAGE_SUFFIXES,
    IMAGES_ALONE,
    Columns,
    Fetched,
    Folders,
    Inputs,
    Listing,
    Names,
    Source,
    SourceSpec,
    Tick,
    are_plain,
    fetch_located,
    ignored_text,
    is_utf8,
    located,
    require_columns,
    source_of,
    too_large_error,
)
from precache_workers.sources.container_names import REQUESTS, Containers
from precache_workers.sources.file_ranges import read_parts
from precache_workers.sources.label_evidence import read_column
from precache_workers.sources.label_readings import bare_folders, labels_of_folders
from precache_workers.sources.labels import (
    Column,
    Label,
    column_of,
    join_columns,
    kind_of,
    texts_of_labels,
)
from precache_workers.sources.listings import (
    ColumnEvidence,
    Members,
    text_at,
)
from precache_workers.sources.sample_inputs import SampleInputs, is_picture
from precache_workers.sources.splits import notes_of_folders, read_split_files

UNIT_BYTES = 1 << 20
"""Bytes of neighbours that are read together; with more, rows of sorted containers mix less."""

CHANGED = "has changed since it was listed"
"""Text of errors after which a container must be listed again, even if it seems unchanged."""

CHECKSUM = "crc32:"
"""Beginning of an etag that is a checksum of the member's content."""

LOCAL_THREADS, REMOTE_THREADS = 2, 8
"""Containers that are scanned concurrently."""

INDEX_RULES = b"17"
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
    etags: Sequence[str] | str = "",
    labels: Any = None,
    units: np.ndarray | int = 0,
    nbytes: np.ndarray | int = 0,
) -> Rows:
    """Return the columns of some samples; one value stands for all, as do no names."""
    count, growing = len(places), GrowingTexts()
    growing.extend(names or Texts.repeated([""], [count]))
    if isinstance(etags, str):
        etag = Texts.repeated([etags], [count]).arrow
    else:
        etag = Texts(etags).plain.dictionary_encode()
    labels = pa.nulls(count) if labels is None else labels
    size, mtime, nbyte, unit = (
        arrow_of(np.broadcast_to(np.asarray(number, kind), count))
        for number, kind in ((sizes, "i8"), (-1, "i8"), (nbytes, "i8"), (units, "i4"))
    )
    columns = [growing.texts().arrow, size, mtime, etag, unit, nbyte, places, labels]
    return pa.RecordBatch.from_arrays(columns, [*_INDEX_COLUMNS, "place", "label"])


def joined_rows(parts: list[Rows], labels: Any) -> Rows:
    """Return the samples of all parts, with all their labels, and clear the list."""
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
    labels = join_columns([part["label"] for part in parts], f"labels of {where}")
    return joined_rows(parts, labels)


def with_column(rows: Rows, name: str, values: Any) -> Rows:
    """Return the samples with other values in a column."""
    return rows.set_column(rows.schema.get_field_index(name), name, values)


class Place(NamedTuple):
    """A sample of a format that lists them one by one: the columns of `rows_of`."""

    name: str
    place: Any
    size: int = -1
    unit: int = 0
    etag: str = ""
    label: Label | None = None


def in_batches(samples: Iterator[Place], places: Any, container: str) -> Iterator[Rows]:
    """Yield samples as columns.

    Parameters
    ----------
    places
        Arrow type of the places.
    """
    while some := list(itertools.islice(samples, AT_ONCE)):
        names, where, sizes, units, etags, labels = zip(*some, strict=True)
        numbers = {"sizes": np.array(sizes), "units": np.array(units)}
        column = column_of(labels, f"labels of {container}")
        yield rows_of(names, pa.array(where, places), etags=etags, labels=column, **numbers)


_INDEXED = TypeAdapter(list[tuple[FileInfo, Members]])


def named_rows(
    rows: Rows, members: Members, file: FileInfo, where: str, columns: Columns | None
) -> Rows:
    """Give the samples of a container their keys, and its etag if they have none of their own.

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
    is_again = names.is_repeated
    if columns is None:
        reasons = dict.fromkeys(np.flatnonzero(is_again).tolist(), SAME_KEY)
    elif key is None and (is_again.any() or not are_names(names).all()):
        names = Texts(map(str, range(len(rows))))
    reasons |= dict.fromkeys(np.flatnonzero(~are_utf8(names)).tolist(), NOT_UTF8)
    if key is None:
        names = names.between(f"{file.name}/")
    rows = with_column(rows, "key", names.arrow)
    if len(rows) and not str(rows["etag"][0]):
        rows = with_column(rows, "etag", Texts.repeated([container_etag(file)], [len(rows)]).arrow)
    if reasons:
        rows = rows.filter(arrow_of(members.keep(rows, reasons)))
    members.count = len(rows)
    members.has_labels = kind_of(rows["label"].type) is not None
    return rows


def are_utf8(names: Texts) -> np.ndarray:
    """Return which texts are UTF-8, whatever bytes they have: (names,) bool."""
    try:
        names.arrow.validate(full=True)
    except pa.ArrowInvalid:
        return np.array([is_utf8(text_at(names.arrow, row)) for row in range(len(names))])
    return np.ones(len(names), np.bool_)


def are_names(names: Texts, longest: int = LONGEST_NAME) -> np.ndarray:
    """Return which texts `is_name` takes, if they are not longer: (names,) bool."""
    are_short = numbers_of(pc.utf8_length(names.plain)) <= longest
    return are_short if are_plain(names) else are_short & ~names.matching(_NO_NAME)


Wanted = Sequence[tuple[str, Any]]
"""Samples to read: the key of each, and its place in their container, as Python has it."""

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
class NamedFiles(Source):
    """A source of files that a path or pattern names."""

    containers: Containers
    spec: SourceSpec

    def __str__(self) -> str:
        return str(self.containers)

    @property
    def folder(self) -> Folder:
        return self.containers.folder

    def index_of(self, reading: object) -> str:
        """Return the name of the index of what some options read of the files."""
        identity = self.containers.uri, repr(reading)
        return xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())


@dataclass(frozen=True)
class ContainerSource(NamedFiles):
    """Samples in containers of one format.

    Attributes
    ----------
    node
        Where it was made, and is listed: on others, ctime and inode of one file differ.
    """

    format: Format
    node: str = field(default_factory=this_node, repr=False, compare=False)

    @property
    def index_name(self) -> str:
        return self.index_of(self.format)

    @property
    def inputs(self) -> Inputs:
        """The parts of samples that fields start from."""
        own: Inputs = getattr(self.format, "inputs", IMAGES_ALONE)
        return own if self.format.columns is None else self.format.columns.inputs

    @property
    def fetch_threads(self) -> int:
        return 2 if self.folder.local("") else 4

    def file_of(self, key: str, location: Locations | None = None) -> tuple[Folder, str] | None:
        files = (location or located(self, [key])).containers
        return (self.folder, files[0].name) if files else None

    # --- listing --------------------------------------------------------------------------------

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        until = time.monotonic() + seconds
        scans, columns = Scans(self, self.format.columns), self.format.columns
        whole, sample_name = scans.whole, getattr(self.format, "sample_name", None)
        files = self.containers.files(whole.left_out)
        known = _read_index(index, self.format.places()) if index is not None else {}
        for file, (members, rows) in zip(files, self._scans(files, known, until), strict=False):
            scans.add(file, members, rows)
            tick(whole.count)
            if time.monotonic() > until and len(scans.listed) < len(files):
                break
        complete = len(scans.listed) == len(files)
        read = self.inputs
        if complete and read.names and columns is None:
            columns_there = [name for name, _ in whole.columns.most_common()]
            require_columns(columns_there, read.names, f"the source {self}")
        inputs = SampleInputs(whole.combinations, whole.combined)
        if inputs and sample_name is None:
            inputs.require_clear(self)
        if not whole.count:
            raise self._nothing(complete, whole)
        fresh = len(known) != len(files) or any(file not in known for file in files)
        known.clear()
        scans.join(typed=columns is not None)
        index = scans.index() if fresh else None
        if (columns and columns.key is not None) or _nested(files):
            scans.leave_out_repeated(functools.partial(_record, scans.rows))
        notes, places = (*_note_of_unseen(self.folder, files), *whole.lines), scans.rows["place"]
        if inputs:
            notes = (*notes, inputs.note("last" if sample_name == "last-dot" else "first"))
            places = inputs.with_all(places)
        locations = Locations(
            places=places,
            containers=tuple(
                Container(f.name, f.size, container_etag(f), f.file_state, members.forward)
                for f, members in scans.listed
            ),
            files=scans.numbers,
            units=numbers_of(scans.rows["unit"]),
            nbytes=numbers_of(scans.rows["nbytes"]),
        )
        file_states = np.array([file.file_state for file, _ in scans.listed])[scans.numbers]
        if str(scans.rows["etag"][0]).startswith(CHECKSUM):
            file_states[:] = -1
        named = [name for name in read.names if columns is not None or not is_picture(name)]
        listing = of_inputs(scans.listing(locations, file_states), named, image=read.image)
        return replace(listing, complete=complete, index=index, notes=(*notes, *listing.notes))

    def _scans(
        self,
        files: Sequence[FileInfo],
        known: Mapping[FileInfo, tuple[Members, Rows]],
        until: float,
    ) -> Iterator[tuple[Members, Rows]]:
        """Yield the samples of each container until the time is up."""
        places = self.format.places()

        def scan(file: FileInfo) -> tuple[Members, Rows] | None:
            if (held := known.get(file)) is not None:
                return held
            where, members = self.folder.path(file.name), Members()
            parts = [rows_of((), pa.nulls(0, places))]
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
        left_out = left_out_text(whole.left_out, whole.examples)
        if not whole.ignored:
            return SourceError(f"the source {self} has no image that can be taken{left_out}")
        return SourceError(
            f"the source {self} has no image (other members: {ignored_text(whole.ignored)}); "
            f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}{left_out}; if these are other "
            f"data, unpack them, and {BY_DATASET}"
        )

    # --- fetching -------------------------------------------------------------------------------

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        def read(rows: list[int], places: Locations) -> dict[int, Fetched]:
            fetched: dict[int, Fetched] = {}
            units: dict[int, list[int]] = {}
            numbers = places.unit_numbers.tolist()
            for row in rows:
                if sizes[row] > self.spec.most_bytes:
                    fetched[row] = too_large_error(sizes[row], self.spec.most_bytes)
                else:
                    units.setdefault(numbers[row], []).append(row)
            for some in units.values():
                taken = places.places.take(arrow_of(np.array(some)))
                wanted = list(zip((keys[row] for row in some), taken.to_pylist(), strict=True))
                samples_at_work().begin(FETCHING, *(key for key, _ in wanted), foreign=False)
                container = places.containers[places.files[some[0]]]
                fetched.update(zip(some, self._read(container, wanted), strict=True))
            return fetched

        return fetch_located(self, keys, locations, read)

    def require_unchanged(self, locations: Locations) -> None:
        files = locations.containers
        threads = 1 if self.folder.local("") else REQUESTS
        names = [file.name for file in files]
        try:
            for file, now in zip(
                files, prefetch(self.containers.info, names, threads, 2 * threads), strict=True
            ):
                if now is not None and self._differs(file, now):  # if it is gone, samples say so
                    raise FetchError(
                        f"{self.folder.path(file.name)} {CHANGED}; build again to list it anew "
                        "(copies on several nodes need equal times, as by rsync -t)"
                    )
        except StorageError as error:
            raise FetchError(str(error)) from None

    def _differs(self, file: Container, now: FileInfo) -> bool:
        """Return True if a file is known to be another than it was when it was listed."""
        pairs = [(file.size, now.size)]
        if self.node == this_node():
            pairs.append((file.file_state, now.file_state))
        others = [pair for pair in pairs if min(pair) >= 0 and pair[0] != pair[1]]
        return bool(others) or container_etag(now) != file.etag

    def _read(self, container: Container, wanted: Wanted) -> Sequence[Fetched]:
        """Read samples of a unit; one by one if memory is short."""
        read: Read
        try:
            read = self.format.read(self.folder, container, wanted, self.spec.most_bytes)
        except MemoryError:
            if len(wanted) == 1:
                return [SampleError("there is not enough memory to read it")]
            return [fetched for one in wanted for fetched in self._read(container, [one])]
        except SourceError as error:
            read = [SampleError(str(error))] * len(wanted)
        except StorageError as error:
            return [FetchError(str(error))] * len(wanted)
        except (ArithmeticError, LookupError, TypeError, ValueError):  # as a forged index has them
            read = [None] * len(wanted)
        if not self.format.checks_members:  # after it was read: it may be replaced meanwhile
            now = self.containers.info(container.name)
            if now is None or container_etag(now) != container.etag:
                read = [None] * len(wanted)
        where = self.folder.path(container.name)
        again = "is not where it was; build again to list it anew"
        return [
            FetchError(f"{where} {CHANGED}: {printable(key)} {again}") if sample is None else sample
            for (key, _), sample in zip(wanted, read, strict=True)
        ]


def units_of(starts: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Number the units of members that are sorted by their offsets in a container."""
    ends = starts + nbytes
    highest, begins, first, row = np.maximum.accumulate(ends).tolist(), array("q"), 0, 0
    while (row := bisect.bisect_right(highest, first + UNIT_BYTES, row)) < len(ends):
        if ends[row] - first > UNIT_BYTES and starts[row] > first:
            begins.append(row)
            first = int(starts[row])
        row += 1
    counts = np.diff(begins, prepend=0, append=len(ends))
    return np.repeat(np.arange(len(counts)), counts)


def structs(kind: Any, columns: Sequence[np.ndarray]) -> Any:
    """Return columns of numbers as an Arrow array of structs of some type."""
    names = [field.name for field in kind]
    return pa.StructArray.from_arrays([arrow_of(n) for n in columns], names).cast(kind)


class FileNames(NamedTuple):
    """Names of files in an archive: which are images that are taken, other inputs, and labels."""

    names: Texts
    images: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray


def file_names(
    listed: Sequence[str],
    regular: np.ndarray,
    container: str,
    members: Members,
    labels: str = "",
    inputs: str = "",
) -> FileNames:
    """Tell images from other inputs, labels and the rest in an archive, whose names lose ``./``;
    count the rest.

    Parameters
    ----------
    listed
        Names; those of `Texts` may have bytes that are not UTF-8.
    regular
        Which are files: (names,) bool.
    labels, inputs
        Regular expressions of the names of labels, and of inputs that are no images.
    """
    if isinstance(listed, Texts) and are_utf8(listed).all():
        texts = listed.plain
        if pc.any(pc.starts_with(texts, "./")).as_py():
            texts = pc.replace_substring_regex(texts, r"^\./", "")
        found = Names.of(Texts(texts))
    else:
        if isinstance(listed, Texts):
            listed = [text_at(listed.arrow, row) for row in range(len(listed))]
        found = Names.of([name.removeprefix("./") for name in listed])
    named = are_names(found.texts, LONGEST_NAME - len(container) - 1)
    usable = regular & named
    members.left_out[NO_FILE] += int((~regular).sum())
    members.left_out[NO_NAME] += int((regular & ~named).sum())
    others = usable & ~found.images
    are_inputs = are_labels = np.zeros(len(others), np.bool_)
    if inputs:
        are_inputs = others & found.texts.matching(inputs, ignore_case=True)
        are_inputs &= ~found.texts.matching(HIDDEN, ignore_case=True)
    if labels:
        are_labels = others & ~are_inputs & found.texts.matching(labels, ignore_case=True)
    kept = are_labels | are_inputs
    reasons = {**found.left_out, **{row: NOT_UTF8 for row in found.wrong if kept[row]}}
    for row, reason in reasons.items():
        if usable[row]:
            members.leave_out(reason, f"{container}/{listed[row].removeprefix('./')}")
    for row in np.flatnonzero(others & ~kept).tolist():
        members.ignore(listed[row].removeprefix("./"), container)
    kept[[*found.wrong]] = False
    return FileNames(found.texts, usable & found.kept, are_inputs & kept, are_labels & kept)


def read_places(
    folder: Folder,
    container: Container,
    ranges: Sequence[tuple[int, int]],
    sample_of: Callable[[int, bytes], Fetched | None],
) -> Read:
    """Read (start, length) of each sample, and make it of its number and bytes.

    Where a range leads out of the file, as a forged index has it, no sample is where it was.
    """
    if any(start < 0 or length < 0 for start, length in ranges):
        return [None] * len(ranges)
    read = read_parts(folder, [(container.name, *part) for part in ranges])
    return [
        data if isinstance(data, FetchError) else sample_of(number, data)
        for number, data in enumerate(read)
    ]


def container_etag(file: FileInfo) -> str:
    """Return a digest of a container's identity, the etag of members without one; may be empty.

    Its name counts, as keys need not have it: those of a key column are the same in two tables.
    """
    if not file.etag and file.mtime_ns < 0:
        return ""
    times = file.etag or f"{file.name} {file.size} {file.mtime_ns}"
    return xxhash.xxh3_64_hexdigest(times.encode())


def _note_of_unseen(folder: Folder, files: Sequence[FileInfo]) -> list[str]:
    """Return the line about files of which a server tells nothing but the size."""
    unseen = [file.name for file in files if not container_etag(file)]
    if not unseen:
        return []
    text = (
        f"{len(unseen):,} of {len(files):,} files have neither ETag nor Last-Modified, such as "
        f"{folder.path(unseen[0])}: one that is replaced by another of its size during a build is "
        "not noticed"
    )
    return [text]


def of_inputs(listing: Listing, names: Sequence[str], *, image: bool) -> Listing:
    """Let etags tell which parts of samples their contents cover, if not that of images alone."""
    if not names:
        return listing
    table = listing.table
    blank = table.etags.is_blank & (table.mtimes < 0)
    digest = xxhash.xxh3_64_hexdigest(json.dumps([names, image]).encode())
    etags = table.etags.between("", f" {digest}").blanked(blank)
    return replace(listing, table=replace(table, etags=etags))


def _nested(files: Sequence[FileInfo]) -> bool:
    """Return True if the name of a container is that of a folder with another, as in a bucket."""
    names = sorted(f"{file.name}/" for file in files)
    return any(name.startswith(before) for before, name in itertools.pairwise(names))


def _record(rows: Rows, row: int) -> object:
    """Return a value that is equal for samples of equal bytes; None if that is unknown."""
    etag = str(rows["etag"][row])
    return (etag, rows["size"][row].as_py()) if etag.startswith(CHECKSUM) else None


class Scans:
    """The samples of the containers of a source, from their scans to its listing.

    Attributes
    ----------
    listed
        The containers, each with the facts about its samples.
    whole
        Facts about all samples.
    rows, numbers
        Samples of all containers, and the number of the container of each: int32.
    """

    rows: Rows
    numbers: np.ndarray

    def __init__(self, source: Any, columns: Columns | None) -> None:
        """Begin without a container.

        Parameters
        ----------
        source
            A `ContainerSource`, or one of its attributes `containers`, `folder` and `spec`.
        columns
            As in `Format`.
        """
        self.listed: list[tuple[FileInfo, Members]] = []
        self.whole = Members()
        self._source, self._columns = source, columns
        self._parts: list[Rows] = []

    def add(self, file: FileInfo, members: Members, rows: Rows) -> None:
        """Add the samples of a container."""
        self.listed.append((file, members))
        self.whole.add(members)
        self._parts.append(rows)

    def join(self, *, typed: bool) -> None:
        """Make the columns of all containers one each.

        Where some have labels beside their images, folders of names are no labels in others.

        Parameters
        ----------
        typed
            False if labels are text without a type.

        Raises
        ------
        SourceError
            Labels of two containers have kinds that cannot be combined, or other names of classes.
        """
        pa.default_memory_pool().release_unused()  # what scans took beside the columns
        columns = [rows["label"] for rows in self._parts]
        labels = join_columns(columns, f"labels of {self._source}", typed=typed)
        file_of: dict[tuple[str, ...], FileInfo] = {}
        for (file, members), column in zip(self.listed, columns, strict=True):
            if kind_of(column.type) is not None:
                file_of.setdefault(members.classes, file)
            elif len(column) and not typed and kind_of(labels.type) is not None:
                self.whole.notes[
                    "{count} samples lie in containers without labels beside images, as others "
                    "have: folders of names are no labels there"
                ] += len(column)
        if len(file_of) > 1:
            one, other = [printable(file.name) for file in file_of.values()][:2]
            raise SourceError(
                f"labels of {one} and {other} in {self._source} differ in class names; make them "
                "alike"
            )
        self._types = {column.type for column in columns if kind_of(column.type) is not None}
        del columns
        self.rows = joined_rows(self._parts, labels)
        pa.default_memory_pool().release_unused()
        counts = [members.count for _, members in self.listed]
        self.numbers = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._classes, self._typed = next(iter(file_of), ()), typed

    def index(self) -> bytes | None:
        """Serialise the samples, as Parquet after its XXH3-128; None for labels of two types."""
        import pyarrow.parquet as pq

        if len(self._types) > 1:
            return None
        table, sink = pa.Table.from_batches([self.rows]), io.BytesIO()
        metadata = {"containers": _INDEXED.dump_json(self.listed), "rules": INDEX_RULES}
        table = table.replace_schema_metadata(metadata)
        pq.write_table(
            table, sink, compression="zstd", row_group_size=INDEXED_ROWS, use_dictionary=["etag"],
            write_statistics=False,
        )  # fmt: skip
        data = sink.getvalue()
        return xxhash.xxh3_128_digest(data) + data

    def leave_out_repeated(
        self,
        content_of: Callable[[int], object],
        way_out: str = "rename or remove all but one",
    ) -> None:
        """Leave out samples that share a key: all, or all but one if their contents are equal.

        Parameters
        ----------
        content_of
            Returns a value for a row that is equal for equal samples; None if that is unknown.

        Raises
        ------
        SourceError
            Samples of one key have different labels, or no key names one sample.
        """
        keys, labels = Texts(self.rows["key"]), self.rows["label"]
        rows_of_key: dict[str, list[int]] = {}
        for row in np.flatnonzero(keys.is_repeated).tolist():
            rows_of_key.setdefault(keys[row], []).append(row)
        left_out: dict[int, str] = {}
        for key, some in rows_of_key.items():
            different = sorted({*texts_of_labels(labels.take(some))})
            if len(different) > 1:
                two = " and ".join(printable(label) or "none" for label in different[:2])
                raise self._repeated(f"{key} with the labels {two}", some, way_out)
            contents = {content_of(row) for row in some}
            equal = len(contents) == 1 and None not in contents
            left_out |= dict.fromkeys(*((some[1:], REPEATED) if equal else (some, SAME_KEY)))
        if len(left_out) == len(keys):
            raise self._repeated(keys[0], rows_of_key[keys[0]], way_out)
        kept = self.whole.keep(self.rows, left_out)
        self.rows, self.numbers = self.rows.filter(arrow_of(kept)), self.numbers[kept]

    def _repeated(self, key: str, rows: Sequence[int], way_out: str) -> SourceError:
        return SourceError(
            f"the source {self._source} has {len(rows)} samples {printable(key)}; keys name "
            f"samples, so {way_out}"
        )

    def listing(self, located: Locations, file_states: np.ndarray) -> Listing:
        """Return the samples as a listing, with encoded labels."""
        source, whole, columns, classes = self._source, self.whole, self._columns, self._classes
        keys, labels = Texts(self.rows["key"]), self.rows["label"]
        rules, where = source.spec.rules, str(source)
        evidence = ColumnEvidence.joined([members.evidence for _, members in self.listed])
        kind = kind_of(labels.type)
        classes = () if kind == "names" else classes
        files = [file.name for file, _ in self.listed]
        of_files = read_split_files(source.containers, files, rules)
        of_columns = evidence.reading(source, all_splits=rules.all_splits)
        notes, doubts = [*of_files[0], *of_columns[0]], [*of_files[1], *of_columns[1]]
        is_folder = columns is None and kind is None
        if rules.level is not None and not is_folder:
            raise SourceError(
                f"{where} has labels that are not its folders; leave out --label-level"
            )
        names = Texts([]) if columns is not None else member_names(keys, located)
        if is_folder:
            bare_in = functools.partial(bare_folders, whole.others)
            column, _ = labels_of_folders(names, keys, source, rules, bare_in=bare_in)
        else:
            column = read_column(Column(labels, keys, where, rules, classes, typed=self._typed))
            notes += notes_of_folders(Folders(names).names)
        table = RowTable(
            keys=keys,
            sizes=numbers_of(self.rows["size"]),
            mtimes=numbers_of(self.rows["mtime_ns"]),
            etags=Texts(self.rows["etag"]),
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
            file_states=file_states,
            doubts=(*doubts, *column.doubts),
        )


def member_names(keys: Texts, located: Locations) -> Texts:
    """Return the names of members in their containers: keys without the container's name."""
    ends = np.flatnonzero(np.diff(located.files, append=-2)) + 1
    parts, start = [], 0
    for end in ends.tolist():
        container = located.containers[located.files[start]].name
        parts.append(Texts(pc.utf8_slice_codeunits(keys[start:end].plain, len(container) + 1)))
        start = end
    return Texts.joined(parts)


# --- index --------------------------------------------------------------------------------------


def read_columns(data: bytes, types: Mapping[str, str], *others: str) -> Any:
    """Read the columns of a Parquet file that a store keeps of a source, with no value missing.

    Parameters
    ----------
    others
        Columns that may be of any type, and lack values.

    Raises
    ------
    ValueError
        It has not these columns, or claims more values than it can hold.
    """
    import pyarrow.parquet as pq

    try:
        # A thread of Arrow that lets go of Python's bytes while the process ends would abort it.
        file = pq.ParquetFile(io.BytesIO(data), pre_buffer=False)
        groups = range(file.num_row_groups)
        nbytes = sum(file.metadata.row_group(number).total_byte_size for number in groups)
        # Encoded as runs, any number of rows takes no bytes; in memory each takes at least these.
        require_plausible(len(data), max(nbytes, MIN_ROW_NBYTES * file.metadata.num_rows))
        table = file.read([*types, *others], use_threads=False)
    except (DamageError, MemoryError, OSError, pa.ArrowException) as error:
        raise ValueError(str(error)) from None
    for name in (*types, *table.column_names):
        column = table[name]
        if name not in others and (str(column.type) != types[name] or column.null_count):
            raise ValueError(f"{column.null_count} values of type {column.type} of {name}")
    return table


def _read_index(data: bytes, places: Any) -> dict[FileInfo, tuple[Members, Rows]]:
    """Parse an index: a container -> its members; empty if it is damaged or of other rules.

    Who can write an index into a store can write its row tables, too: the digest is of damage.

    Parameters
    ----------
    places
        Arrow type of the places, which are checked again when they are read.
    """
    digest, data = data[:16], data[16:]
    if xxhash.xxh3_128_digest(data) != digest:
        return {}
    known: dict[FileInfo, tuple[Members, Rows]] = {}
    try:
        table = read_columns(data, {**_INDEX_COLUMNS, "place": str(places)}, "label")
        labels = table["label"].combine_chunks()
        if pa.types.is_large_list(labels.type):  # its items may have another name
            labels = labels.cast(pa.large_list(labels.type.value_type))
        if table.schema.metadata.get(b"rules") != INDEX_RULES:
            return {}
        whole = pa.RecordBatch.from_pydict(
            {
                **{name: table[name].combine_chunks() for name in _INDEX_COLUMNS},
                "etag": Texts(table["etag"]).plain.dictionary_encode(),
                "place": table["place"].combine_chunks().cast(places),
                "label": labels,
            }
        )
        start = 0
        for file, members in _INDEXED.validate_json(table.schema.metadata[b"containers"]):
            rows = whole.slice(start, members.count)
            start += members.count
            if not members.has_labels:
                rows = with_column(rows, "label", pa.nulls(len(rows)))
            if file.etag or file.mtime_ns >= 0:  # else no change of it would be seen
                known[file] = members, rows
    except (PrecacheError, LookupError, TypeError, ValueError):  # of another release
        return {}
    return known
