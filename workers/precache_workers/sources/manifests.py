"""Tables of URIs: CSV, TSV, JSON Lines, or Parquet, with an optional label for each URI.

A URI is a path, or a URL of any bucket or web server. A relative path is below the folder of its
table. Tables are not trusted: a table at a URL may not name files of a local disk, and a path may
not leave the table's folder by ``..`` unless the user allows it.

The identity of a sample is that of its file, and the location if the key is another. If a table
names many files of a bucket, their common folder is listed once. Files of a web server have no
identity before they are fetched.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import unquote

import numpy as np
import xxhash

from precache.errors import FetchError, SourceError
from precache.messages import did_you_mean, printable, shown
from precache.runtime.ordered_map import prefetch
from precache.storage.backends import WEB
from precache.storage.base import NOT_UTF8, FileInfo, Folder, is_name, left_out_text
from precache.storage.open import StorageOptions, open_folder
from precache_workers.sources.base import (
    FILES_PER_TICK,
    MOST_SAMPLE_BYTES,
    NO_COLUMNS,
    NO_RULES,
    Columns,
    Doubt,
    Fetched,
    LabelRules,
    Listing,
    Tick,
    Ways,
    is_image,
    is_utf8,
)
from precache_workers.sources.container_names import REQUESTS, Containers
from precache_workers.sources.containers import (
    Members,
    leave_out_repeated,
    notes_of,
    row_table,
)
from precache_workers.sources.file_ranges import open_file
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.label_readings import (
    binary,
    doubt_of_columns,
    one_hot_label,
    quoted,
)
from precache_workers.sources.labels import infer_kind, label_of
from precache_workers.sources.parquet_tables import (
    LABEL_COLUMNS,
    LISTED_ROWS,
    damaged,
    may_be_binary,
    open_table,
    values_of,
)

JSON_LINES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".csv", ".tsv", *JSON_LINES)
"""Suffixes of tables that are manifests by default. Parquet is not: it usually holds images."""

URI_NAMES = (
    "uri", "url", "path", "file", "filename", "file_name", "filepath", "file_path", "image",
    "image_path", "image_url", "img", "img_path", "photo",
)  # fmt: skip
"""Usual names of the column of URIs; the first that a table has is used."""

FEW_FILES = 64
"""Up to so many files of a bucket are looked up one by one; for more, their folder is listed."""

LONGEST_LINE = 1 << 20

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ManifestSource:
    """Files named by tables; see the module."""

    containers: Containers
    columns: Columns = NO_COLUMNS
    options: StorageOptions = field(default=None, repr=False)
    follow_links: bool = False
    most_bytes: int = MOST_SAMPLE_BYTES
    labels_with_samples: bool = False
    rules: LabelRules = NO_RULES

    def __str__(self) -> str:
        return str(self.containers)

    @property
    def folder(self) -> Folder:
        return self.containers.folder

    @property
    def fetch_threads(self) -> int:
        return 4  # the files may lie anywhere

    @property
    def index_name(self) -> str:
        identity = self.containers.uri, repr(self.columns)
        return xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())

    def file_of(self, key: str) -> tuple[Folder, str] | None:
        location = self._known.get(key)
        return None if location is None else self._place(location)

    # --- listing --------------------------------------------------------------------------------

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        until = time.monotonic() + seconds
        listed: list[tuple[FileInfo, Members]] = []
        whole, complete = Members(), True
        binary_columns: dict[str, None] = {}
        for file in self.containers.files(whole.left_out):
            members = Members()
            for row in self._rows(file, members, binary_columns):
                count = len(members.keys)
                if count and count % FILES_PER_TICK == 0 and time.monotonic() > until:
                    complete = False
                    break
                if not is_utf8(row[0]) or not is_utf8(row[1]):
                    whole.leave_out(NOT_UTF8, row[0])
                    continue
                members.keys.append(row[0])
                members.locations.append(row[1])
                members.labels.append(row[2])
            if not _has_types(file.name) and members.kind is None:
                where = self.folder.path(file.name)
                members.kind = infer_kind(members.labels, members.keys, where)
            listed.append((file, members))
            for name in ("keys", "locations", "labels"):
                getattr(whole, name).extend(getattr(members, name))
            if not complete:
                break
        if not whole.keys:
            raise SourceError(
                f"the source {self} names no file; the first line of CSV and TSV names columns"
                f"{left_out_text(+whole.left_out, whole.examples)}"
            )
        leave_out_repeated(
            whole, self, whole.locations, "remove all but one, or name samples by --key-column"
        )
        ctimes = []
        for key, location, info in zip(
            whole.keys, whole.locations, self._infos(whole.locations), strict=True
        ):
            whole.sizes.append(info.size if info else -1)
            whole.mtimes.append(info.mtime_ns if info else -1)
            whole.etags.append(_etag(key, location, info) if info else "")
            ctimes.append(info.ctime_ns if info else -1)
        tick(len(whole.keys))
        labelled = row_table(
            listed,
            whole,
            self,
            self.folder,
            self.rules,
            typed=all(_has_types(file.name) for file, _ in listed),
            one_hot=self.columns.may_be_several,
        )
        doubts = (
            *labelled.doubts,
            *doubt_of_columns(list(binary_columns), self),
            *self._doubt_of_place(whole),
        )
        notes = (*notes_of(listed), *labelled.notes)
        return Listing(
            labelled.table,
            {},
            complete,
            dict(+whole.left_out),
            whole.examples,
            notes=notes,
            ctimes=np.array(ctimes, np.int64),
            doubts=doubts,
        )

    def _doubt_of_place(self, members: Members) -> Sequence[Doubt]:
        """Return the doubt about a table whose first file lies in another folder beside it."""
        location, size, mtime = members.locations[0], members.sizes[0], members.mtimes[0]
        root = self.folder.local("")
        if root is None or _root(location) or size >= 0 or mtime >= 0:
            return []
        beside, _, name = location.rpartition("/")
        folders = sorted(path for path in (root / beside).glob("*/") if (path / name).is_file())
        if not folders:
            return []
        ways = Ways()
        way = ways(str(folders[0]), "--labels", str(self))
        text = (
            f"{self} names {printable(name)!r}, which is not beside it, but in {folders[0]}: build "
            f"that folder, with the table as its labels: {way}; or write the folder into the table"
        )
        return [Doubt(text, tuple(ways))]

    def _rows(
        self, file: FileInfo, members: Members, binary_columns: dict[str, None]
    ) -> Iterator[tuple[str, str, str]]:
        """Yield key, location and label of each row.

        Parameters
        ----------
        binary_columns
            Output: the columns of only 0 and 1, if no column has labels.
        """
        where = self.folder.path(file.name)
        chosen: _Chosen | None = None
        with (
            open_file(self.folder, file) as stream,
            contextlib.closing(_parsed(stream, file.name, self.columns, where)) as rows,
        ):
            for number, row in rows:
                if chosen is None:
                    chosen = _Chosen.of(self._names(file, row), self.columns, where, row)
                    members.notes[chosen.note()] += 1
                    if len(chosen.labels) > 1:
                        members.kind, members.classes = "several numbers", chosen.labels
                    elif self.columns.label is None and not chosen.labels:
                        binary_columns |= dict.fromkeys(chosen.others)
                uri = row.get(chosen.uri)
                line = f"line {number} of {where}"
                for name in list(binary_columns):
                    if binary(row.get(name)) is None:
                        del binary_columns[name]
                if not isinstance(uri, str) or not uri:
                    raise SourceError(f"{line} has no {chosen.uri}, which must be a path or URL")
                # Keys are stored: they must not contain credentials of a URL.
                key = shown(uri) if chosen.key is None else row.get(chosen.key)
                if key is None or key == "":
                    raise SourceError(f"{line} has no {chosen.key}, which must name its sample")
                location = self._location(uri, file.name, line)
                yield str(key), location, _label(row, chosen.labels, file.name, line, members)

    def _names(self, file: FileInfo, row: Row) -> Sequence[str]:
        """Return the columns: of the first row, or of all rows of JSON if that has no label."""
        names = list(row)
        if _has_types(file.name):
            with (
                open_file(self.folder, file) as stream,
                damaged(self.folder.path(file.name)),
            ):
                return list(open_table(stream).schema_arrow.names)
        labels = {*self.columns.labels(names)} or {*LABEL_COLUMNS}
        if not file.name.lower().endswith(JSON_LINES) or labels & {*map(_plain, names), *names}:
            return names
        where = self.folder.path(file.name)
        with (
            open_file(self.folder, file) as stream,
            contextlib.closing(_parsed(stream, file.name, self.columns, where)) as rows,
        ):
            return list({name: None for _, row in rows for name in row})

    def _location(self, uri: str, name: str, where: str) -> str:
        """Return a URL, an absolute path, or a path below the folder of the tables."""
        scheme, mark, path = uri.partition("://")
        path = unquote(path) if mark else uri
        if "\t" in path:
            raise SourceError(f"{where}: {printable(uri)} has a tab")
        if mark and scheme != "file":
            return uri.partition("#")[0] if scheme in WEB else uri
        local = self.folder.local("")
        if path.startswith("/"):
            if local is None:
                raise SourceError(
                    f"{where}: {printable(uri)} is a file of a local disk, and a table at a URL "
                    "may not name any; give a URL or a relative path"
                )
            return os.path.normpath(path)
        joined = os.path.normpath(f"{name.rpartition('/')[0] or '.'}/{path}")
        if is_name(joined):
            return joined
        if local is not None and self.follow_links:
            return os.path.normpath(local / joined)
        raise SourceError(
            f"{where}: {printable(uri)} leads out of the folder of its table; give a path below "
            "it, an absolute one, or --follow-links"
        )

    def _infos(self, locations: Sequence[str]) -> Iterator[FileInfo | None]:
        """Yield the identity of each file; None if it is unknown."""
        remote: dict[str, list[str]] = defaultdict(list)
        for location in locations:
            folder, name = self._place(location)
            if folder.local("") is None:
                remote[_root(location)].append(name)
        walked = {root: self._walked(root, names) for root, names in remote.items()}
        for location in locations:
            folder, name = self._place(location)
            infos = walked.get(_root(location))
            yield folder.info(name) if infos is None else infos.get(name)

    def _walked(self, root: str, names: Sequence[str]) -> Mapping[str, FileInfo]:
        """Look up files of a bucket: few of them one by one, many by listing their folder."""
        folder = self._folder(root)
        if root.partition("://")[0] in WEB:
            return {}
        if len(names) <= FEW_FILES:
            infos = prefetch(folder.info, names, REQUESTS, 2 * REQUESTS)
            return {info.name: info for info in infos if info is not None}
        shared = os.path.commonpath([name.rpartition("/")[0] for name in names])
        wanted, prefix = set(names), f"{shared}/" if shared else ""
        below = folder.folder(shared) if shared else folder
        named = (info._replace(name=prefix + info.name) for info in below.walk())
        return {info.name: info for info in named if info.name in wanted}

    # --- fetching -------------------------------------------------------------------------------

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Sequence[str] = ()
    ) -> Sequence[Fetched]:
        locations = locations or [self._known.get(key, "") for key in keys]
        fetched: dict[int, Fetched] = {}
        roots: dict[str, list[int]] = defaultdict(list)
        for number, location in enumerate(locations):
            if location:
                roots[_root(location)].append(number)
            else:
                why = f"{self} has no sample {printable(keys[number])}"
                fetched[number] = FetchError(why)
        for root, numbers in roots.items():
            names = [self._place(locations[number])[1] for number in numbers]
            source = FolderSource(
                self._folder(root),
                most_bytes=self.most_bytes,
                sample_keys=dict(zip(names, (keys[number] for number in numbers), strict=True)),
            )
            samples = source.fetch(names, [sizes[number] for number in numbers])
            fetched.update(zip(numbers, samples, strict=True))
        return [fetched[number] for number in range(len(keys))]

    @functools.cached_property
    def _known(self) -> Mapping[str, str]:
        """Key -> location of all samples."""
        return self.list(lambda count: None).table.location_by_key

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    def _place(self, location: str) -> tuple[Folder, str]:
        root = _root(location)
        name = location[len(root) :].lstrip("/")
        return self._folder(root), unquote(name) if root.partition("://")[0] in WEB else name

    def _folder(self, root: str) -> Folder:
        if not root:
            return self.folder
        return open_folder(root, self.options, follow_links=self.follow_links)


@dataclass(frozen=True)
class _Chosen:
    """The columns of a table that are read, and the others."""

    uri: str
    labels: tuple[str, ...]
    key: str | None
    others: tuple[str, ...]

    @classmethod
    def of(
        cls, names: Sequence[str], columns: Columns, where: str, row: Row | None = None
    ) -> _Chosen:
        labels = columns.labels(names)
        for name in (columns.image, *filter(None, labels), columns.key):
            if name is not None and name not in names:
                raise SourceError(
                    f"{where} has no column {name!r}{did_you_mean(name, names)}; it has "
                    f"{', '.join(map(repr, names[:20]))}"
                )
        if not all(map(is_utf8, names)):
            raise SourceError(
                f"{where} cannot be read: its columns are not UTF-8; save it as UTF-8"
            )
        lower = {_plain(name): name for name in reversed(names)}
        uri = columns.image or next((lower[name] for name in URI_NAMES if name in lower), None)
        marks = [mark for mark in ";,\t|" if len(names) == 1 and mark in names[0]]
        if uri is None and marks:
            raise SourceError(
                f"{where}: {marks[0]!r} does not separate columns; commas do, semicolons if the "
                "first line has no comma, and in .tsv tabs"
            )
        if uri is None:
            values = {name: (row or {}).get(name) for name in names}
            named = [n for n, value in values.items() if isinstance(value, str) and is_image(value)]
            uri = named[0] if len(named) == 1 and not any(map(is_image, names)) else None
        if uri is None:
            raise SourceError(
                f"{where} has no column of URIs; its first line names "
                f"{', '.join(map(repr, names[:20]))}. Choose one by --image-column, or let the "
                f"first line name it {' or '.join(URI_NAMES[:3])}. If its rows label the images of "
                "a folder, build that folder with --labels"
            )
        guess = next((lower[name] for name in LABEL_COLUMNS if name in lower), None)
        if not labels and guess not in (None, uri):
            labels = (str(guess),)
        used = {uri, *labels, columns.key}
        others = tuple(name for name in names if name not in used)
        return cls(uri, tuple(filter(None, labels)), columns.key, others)

    def note(self) -> str:
        """Describe the choice in a line."""
        labels = f"labels from {quoted(self.labels)}" if self.labels else "no labels"
        labels += "" if self.labels else " (--label-column)"
        others = f"; not used: {quoted(self.others, 8)}" if self.others else ""
        return f"URIs from the column {self.uri!r}, {labels}{others}"


def _etag(key: str, location: str, info: FileInfo) -> str:
    """Return the etag of a file, with a digest of its location unless the key is the location.

    Of a file without any identity it is empty.
    """
    if key == location or not (info.etag or info.mtime_ns >= 0):
        return info.etag
    return xxhash.xxh3_64_hexdigest(json.dumps([info.etag, shown(location)]).encode())


def _plain(name: str) -> str:
    """Normalise the name of a column, to compare it with usual names."""
    return name.strip().lower()


def _root(location: str) -> str:
    """Return the bucket or server of a URL, ``/`` for an absolute path, empty for a relative one.

    A URL with a query is a root itself, whose only file has an empty name.
    """
    scheme, mark, path = location.partition("://")
    if scheme in WEB and "?" in path:
        return location
    if mark:
        return f"{scheme}://{path.partition('/')[0]}"
    return "/" if location.startswith("/") else ""


def _text(value: Any, column: str | None, where: str) -> str:
    """Return a label as text, a list as JSON; its kind is inferred from all labels of a table."""
    match value:
        case None:
            return ""
        case str() if not is_utf8(value):
            raise SourceError(
                f"{where}: {column} is {printable(repr(value)[:60])}, which is not UTF-8; save it "
                "as UTF-8"
            )
        case str():
            return value.strip()
        case bool():
            return str(int(value))
        case int() | float():
            return repr(value)
        case list():
            with contextlib.suppress(TypeError):
                return json.dumps(value)
    raise SourceError(
        f"{where}: {column} is {printable(repr(value)[:60])}; a label is a class, a number, or a "
        "list of classes"
    )


def _has_types(name: str) -> bool:
    """Return True for a table whose columns have types, which decide the kind of its labels."""
    return name.lower().endswith(".parquet")


def _label(row: Row, columns: Sequence[str], file: str, where: str, members: Members) -> str:
    """Return the label of a row as text; of a column with a type, set the kind of the members."""
    try:
        if len(columns) > 1:
            return one_hot_label([row.get(name) for name in columns], columns)
        value = row.get(columns[0]) if columns else None
        if not _has_types(file):
            return _text(value, columns[0] if columns else None, where)
        text, kind = label_of(value)
    except ValueError as error:
        column = f"its {columns[0]} " if len(columns) == 1 else ""
        raise SourceError(f"{where}: {column}{error}") from None
    members.kind = members.kind or kind  # a column has one type
    return text


def _parsed(
    stream: BinaryIO, name: str, columns: Columns, where: str
) -> Generator[tuple[int, Row], None, None]:
    """Yield (line number, row) of a table."""
    if name.lower().endswith(".parquet"):
        yield from _parquet_rows(stream, columns, where)
        return
    # Bytes that are not UTF-8 cost their own row.
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    try:
        if name.lower().endswith(JSON_LINES):
            yield from _json_rows(_lines(text, where), where)
        else:
            lines = _lines(text, where)
            first = next(lines, "")
            delimiter = "\t" if name.lower().endswith(".tsv") else delimiter_of(first)
            yield from _csv_rows(itertools.chain([first], lines), delimiter, where)
    except csv.Error as error:
        raise SourceError(f"{where} cannot be read: {error}; correct its quotes") from None
    finally:
        text.detach()  # its file is closed by the caller


def delimiter_of(line: str) -> str:
    """Return the mark between the columns of CSV: spreadsheets of some countries write ``;``."""
    return next((mark for mark in ",;\t" if mark in line), ",")


def _csv_rows(lines: Iterable[str], delimiter: str, where: str) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    twice = [name for name, count in Counter(reader.fieldnames).items() if name and count > 1]
    if twice:
        raise SourceError(
            f"{where} has several columns {printable(twice[0])!r}; rename all but one"
        )
    for row in reader:
        if None in row or None in row.values():
            raise SourceError(
                f"line {reader.line_num} of {where} has not as many cells as the first line, "
                "which names the columns"
            )
        if any(row.values()):  # spreadsheets write lines of separators alone
            yield reader.line_num, row


def _lines(text: io.TextIOWrapper, where: str) -> Iterator[str]:
    while line := text.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise SourceError(f"{where} has a line of more than {LONGEST_LINE:,} characters")
        yield line


def _json_rows(lines: Iterable[str], where: str) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"line {number} of {where} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise SourceError(f"line {number} of {where} is no JSON object; give one a line")
        yield number, row


def _parquet_rows(stream: BinaryIO, columns: Columns, where: str) -> Iterator[tuple[int, Row]]:
    with damaged(where):
        table = open_table(stream)
        chosen = _Chosen.of(table.schema_arrow.names, columns, where)
        names = [name for name in (chosen.uri, *chosen.labels, chosen.key) if name is not None]
        if not chosen.labels and columns.label is None:
            names += [name for name in chosen.others if may_be_binary(table.schema_arrow, name)]
        number = 0
        for batch in table.iter_batches(LISTED_ROWS, columns=names, use_threads=False):
            rows = zip(*map(values_of, batch.columns), strict=True)
            named = (dict(zip(batch.schema.names, row, strict=True)) for row in rows)
            yield from enumerate(named, number + 1)
            number += len(batch)
