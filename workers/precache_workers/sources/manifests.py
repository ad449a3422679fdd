"""Tables of URIs: CSV, TSV, JSON Lines, or Parquet, with optional labels and texts for each URI.

A URI is a path, or a URL of any bucket or web server. A relative path is below the folder of its
table. Tables are not trusted: a table at a URL may not name files of a local disk, and a path may
not leave the table's folder by ``..`` unless the user allows it.

Cells that fields start from travel with the listing, as JSON; one that is empty in CSV is missing.

The identity of a sample is that of its file, and these cells, and the location if the key is
another. If a table
names many files of a bucket, their common folder is listed once. Files of a web server have no
identity before they are fetched.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import xxhash

from precache.errors import SampleError, SourceError
from precache.messages import printable, shown
from precache.runtime.threads import prefetch
from precache.storage.backends import WEB
from precache.storage.base import NOT_UTF8, FileInfo, Folder, is_name, left_out_text
from precache.store.columns import Texts, arrow_of
from precache.store.locations import Locations
from precache_workers.sources.base import (
    IMAGE,
    UNSEEN,
    Fetched,
    Folders,
    Listing,
    Sample,
    Tick,
    choice_error,
    fetch_located,
    is_image,
    is_utf8,
    located,
)
from precache_workers.sources.columns import ChosenColumns, choose, plain_name, usual_among
from precache_workers.sources.container_names import REQUESTS
from precache_workers.sources.containers import (
    NamedFiles,
    Rows,
    Scans,
    of_inputs,
    rows_of,
    rows_of_one,
    with_column,
)
from precache_workers.sources.dataset_items import described
from precache_workers.sources.file_ranges import open_file
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.labels import note_of_categories
from precache_workers.sources.listings import ColumnEvidence, Members, doubt_of_rivals
from precache_workers.sources.sample_parts import STARTS, joined
from precache_workers.sources.splits import notes_of_folders
from precache_workers.sources.tables import (
    JSON_LINES,
    Batch,
    read_batches,
    read_labels,
)

TABLE_SUFFIXES = (".csv", ".tsv", *JSON_LINES)
"""Suffixes of tables that are manifests by default. Parquet is not: it usually holds images."""

URI_NAMES = (
    "uri", "url", "path", "file", "filename", "file_name", "filepath", "file_path", "image",
    "image_path", "image_url", "img", "img_path", "photo",
)  # fmt: skip
"""Usual names of the column of URIs; the first that a table has is used."""

WAY_OUT = "remove all but one, or name samples by --key-column"
"""Way out of several rows of one key."""

FEW_FILES = 64
"""Up to so many files of a bucket are looked up one by one; for more, their folder is listed."""


@dataclass(frozen=True)
class ManifestSource(NamedFiles):
    """Files named by tables; see the module."""

    @property
    def fetch_threads(self) -> int:
        return 4  # the files may lie anywhere

    @property
    def index_name(self) -> str:
        return self.index_of(self.spec.columns)

    def file_of(self, key: str, location: Locations | None = None) -> tuple[Folder, str] | None:
        [place] = (location or located(self, [key])).places.to_pylist()
        return None if place is None else self._place(place["uri"])

    # --- listing --------------------------------------------------------------------------------

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        until, complete = time.monotonic() + seconds, True
        scans = Scans(self, self.spec.columns)
        whole = scans.whole
        for file in self.containers.files(whole.left_out):
            members, parts = Members(), [rows_of((), pa.nulls(0, _places()))]
            for rows in self._scan(file, members):
                parts.append(rows)
                complete = time.monotonic() <= until
                if not complete:
                    break
            of_file = rows_of_one(parts, self.folder.path(file.name))
            members.count = len(of_file)
            scans.add(file, members, of_file)
            if not complete:
                break
        if not whole.count:
            raise SourceError(
                f"the source {self} names no file; the first line of CSV and TSV names columns"
                f"{left_out_text(+whole.left_out, whole.examples)}"
            )
        scans.join(typed=all(file.name.lower().endswith(".parquet") for file, _ in scans.listed))
        files = self._files(Texts(scans.rows["place"].field("uri")))
        of_rows = Texts(scans.rows["place"].field("cells"))
        if self.spec.columns.key is None:  # a file that is spelled in several ways is one sample
            first: dict[str, str] = {}
            pairs = zip(files, Texts(scans.rows["key"]), strict=True)
            one_each = Texts([first.setdefault(file, key) for file, key in pairs])
            scans.rows = with_column(scans.rows, "key", one_each.arrow)
        scans.leave_out_repeated(lambda row: (files[row], of_rows[row]), WAY_OUT)
        keys, locations = Texts(scans.rows["key"]), Texts(scans.rows["place"].field("uri"))
        numbers, etags = np.full((3, len(keys)), -1, np.int64), list[str]()
        cells = Texts(scans.rows["place"].field("cells"))
        infos = zip(keys, locations, cells, self._infos(locations), strict=True)
        for row, (key, where, own, info) in enumerate(infos):
            etags.append(_etag(key, where, own, info))
            if info is not None:
                numbers[:, row] = info.size, info.mtime_ns, info.file_state
        sizes, mtimes, file_states = numbers
        for name, column in (("size", arrow_of(sizes)), ("mtime_ns", arrow_of(mtimes)),
            ("etag", Texts(etags).arrow)):  # fmt: skip
            scans.rows = with_column(scans.rows, name, column)
        self._require_some(locations, sizes)
        tick(len(keys))
        read = self.spec.columns.inputs
        listing = scans.listing(Locations.alone(scans.rows["place"]), file_states)
        listing = of_inputs(listing, read.names, image=read.image)
        of_folders = notes_of_folders(Folders(locations).names)
        return replace(
            listing,
            complete=complete,
            notes=(*whole.lines, *of_folders, *listing.notes),
        )

    def _require_some(self, locations: Texts, sizes: np.ndarray) -> None:
        """Raise `SourceError` if no file of a disk is there that tables name."""
        if max(sizes) >= 0 or any("://" in location for location in locations):
            return
        root = self.folder.local("")
        if root is not None and (root / locations[0]).is_file():
            raise SourceError(
                f"{printable(locations[0])} lies behind a link that leads out of {self.folder}; "
                "give --follow-links, or the path that it leads to"
            )
        if root is not None:
            raise SourceError(
                f"none of the {len(locations):,} files that {self} names is there, such as "
                f"{printable(str(root / locations[0]))}: write their folder into the table, or if "
                f"its rows label the images of a folder, build that folder with --labels {self}"
            )

    def _scan(self, file: FileInfo, members: Members) -> Iterator[Rows]:
        """Yield the rows of a table."""
        where = self.folder.path(file.name)
        chosen: ChosenColumns | None = None

        def wanted(schema: Any, batch: Batch | None = None) -> Iterable[str]:
            def guess(schema: Any, features: object) -> str:
                return _uri_column(schema.names, where, batch)

            nonlocal chosen
            chosen = choose(schema, self.spec.columns, where, guess, typed=batch is None)
            if batch is not None and chosen.image is not None and _is_uri(chosen.image):
                raise SourceError(
                    f"{where} has no names of columns, as its first line has {chosen.image!r}: "
                    f"{_NAMED}"
                )
            chosen.describe(members, "URIs")
            uris = [name for name in chosen.others if plain_name(name) in URI_NAMES]
            named = self.spec.columns.inputs.names
            return filter(None, (chosen.image, chosen.name, *chosen.listed, *uris, *named))

        with open_file(self.folder, file) as stream:
            for batch in read_batches(stream, file.name, where, wanted):
                if chosen is None:
                    names = self._names(file, batch)
                    if not all(map(is_utf8, names)):
                        raise SourceError(
                            f"{where} cannot be read: its columns are not UTF-8; save it as UTF-8"
                        )
                    wanted(pa.schema([(name, pa.string()) for name in names]), batch)
                assert chosen is not None
                _look(members.evidence, batch)
                if self.spec.columns.image is None:
                    _require_no_rival(batch, chosen, where)
                yield self._rows(batch, chosen, file.name, members)

    def _rows(self, batch: Batch, chosen: ChosenColumns, name: str, members: Members) -> Rows:
        where = self.folder.path(name)
        labels = read_labels(batch, chosen.labels, where, self.spec.rules.none)
        members.notes |= Counter(note_of_categories(batch.typed, chosen.labels))
        # Images of Hugging Face are dicts with a path.
        assert chosen.image is not None  # it has been found
        none = [None] * len(batch.lines)  # of columns that rows of JSON lack
        cells = batch.columns.get(chosen.image, none)
        uris = [cell.get("path") if isinstance(cell, dict) else cell for cell in cells]
        key_column = self.spec.columns.key
        keys = uris if key_column is None else batch.columns.get(key_column, none)
        taken: dict[int, tuple[str, dict[str, str]]] = {}
        named = {name: batch.columns.get(name, none) for name in self.spec.columns.inputs.names}
        for row, (number, uri, key) in enumerate(zip(batch.lines, uris, keys, strict=True)):
            line = f"line {number} of {where}"
            if not isinstance(uri, str) or not uri:
                raise SourceError(f"{line} has no {chosen.image}, which must be a path or URL")
            if key is None or key == "":
                raise SourceError(f"{line} has no {key_column}, which must name its sample")
            # Keys are stored: they must not contain credentials of a URL.
            own_name = shown(uri) if "://" in uri else os.path.normpath(uri)
            text = own_name if key_column is None else str(key)
            location = self._location(uri, name, line)
            if is_utf8(text) and is_utf8(location):
                own = {name: values[row] for name, values in named.items()}
                taken[row] = text, {"uri": location, "cells": _cells(own, line) if own else ""}
            else:
                members.leave_out(NOT_UTF8, text)
        names, places = zip(*taken.values(), strict=True) if taken else ((), ())
        labels = labels.take(pa.array([*taken], pa.int64()))
        return rows_of(names, pa.array(places, _places()), labels=labels)

    def _names(self, file: FileInfo, batch: Batch) -> Sequence[str]:
        """Return the columns: of the first rows, or of all rows of JSON, as some lack some."""
        if not file.name.lower().endswith(JSON_LINES):
            return list(batch.columns)
        with open_file(self.folder, file) as stream:
            batches = read_batches(stream, file.name, self.folder.path(file.name))
            return list(dict.fromkeys(name for batch in batches for name in batch.columns))

    def _location(self, uri: str, name: str, where: str) -> str:
        """Return a URL, an absolute path, or a path below the folder of the tables."""
        scheme, mark, path = uri.partition("://")
        path = unquote(path) if mark else uri
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
        outer = name.rpartition("/")[0] or "."
        if "\\" in path and local is not None and not (local / outer / path).exists():
            path = path.replace("\\", "/")  # of Windows
        joined = os.path.normpath(f"{outer}/{path}")
        if is_name(joined):
            return joined
        if local is not None and self.spec.follow_links:
            return os.path.normpath(local / joined)
        raise SourceError(
            f"{where}: {printable(uri)} leads out of the folder of its table; give a path below "
            "it, an absolute one, or --follow-links"
        )

    def _files(self, locations: Iterable[str]) -> Sequence[str]:
        """Return the file of each location, equal however it is spelled; links to files stay."""
        real = functools.cache(os.path.realpath)

        def file_of(location: str) -> str:
            if _root(location) == location:  # it may have a query
                return location
            folder, name = self._place(location)
            path = folder.local(name)
            return folder.path(name) if path is None else f"{real(path.parent)}/{path.name}"

        return [*map(file_of, locations)]

    def _infos(self, locations: Sequence[str]) -> Sequence[FileInfo | None]:
        """Return the identity of each file; None if it is unknown."""
        places = [(_root(location), self._place(location)[1]) for location in locations]
        named = defaultdict[str, list[str]](list)
        for root, name in places:
            named[root].append(name)
        infos = {root: self._infos_below(root, names) for root, names in named.items()}
        return [infos[root].get(name) for root, name in places]

    def _infos_below(self, root: str, names: Sequence[str]) -> Mapping[str, FileInfo | None]:
        """Look up files: those of a disk, and few of a bucket, one by one; many of a bucket by
        listing their folder."""
        folder = self._folder(root)
        if root.partition("://")[0] in WEB:
            return {}
        if folder.local("") is not None:
            return {name: folder.info(name) for name in names}
        if len(names) <= FEW_FILES:
            infos = prefetch(folder.info, names, REQUESTS, 2 * REQUESTS)
            return dict(zip(names, infos, strict=True))
        shared = os.path.commonpath([name.rpartition("/")[0] for name in names])
        wanted, prefix = set(names), f"{shared}/" if shared else ""
        below = folder.folder(shared) if shared else folder
        named = (info._replace(name=prefix + info.name) for info in below.walk())
        return {info.name: info for info in named if info.name in wanted}

    # --- fetching -------------------------------------------------------------------------------

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        def read(rows: list[int], located: Locations) -> dict[int, Fetched]:
            fetched: dict[int, Fetched] = {}
            places, roots = located.places.to_pylist(), defaultdict[str, list[int]](list)
            for row in rows if self.spec.columns.inputs.image else ():
                roots[_root(places[row]["uri"])].append(row)
            for root, some in roots.items():
                names = [self._place(places[row]["uri"])[1] for row in some]
                source = FolderSource(self._folder(root), self.spec)
                own = [sizes[row] for row in some], [keys[row] for row in some]
                fetched.update(zip(some, source.fetch_files(names, *own), strict=True))
            if not self.spec.columns.inputs.names:
                return fetched
            return {row: _sample(fetched.get(row), places[row]["cells"]) for row in rows}

        return fetch_located(self, keys, locations, read)

    def _place(self, location: str) -> tuple[Folder, str]:
        root = _root(location)
        name = location[len(root) :].lstrip("/")
        return self._folder(root), unquote(name) if root.partition("://")[0] in WEB else name

    def _folder(self, root: str) -> Folder:
        return self.spec.folder(root) if root else self.folder


_NAMED = "write a line above it that names the columns, such as uri,label"


def _is_uri(name: str) -> bool:
    """Return True for a name that is no column's: of an image, or a URL."""
    return is_image(name) or "://" in name


def _uri_column(names: Sequence[str], where: str, batch: Batch | None) -> str:
    """Return the column of URIs: one of a usual name, or the only one with names of images.

    Raises
    ------
    SourceError
        There is none.
    """
    if named := usual_among(URI_NAMES, names):
        return named[0]
    firsts = {name: values[0] for name, values in batch.columns.items()} if batch else {}
    named = [n for n, value in firsts.items() if isinstance(value, str) and is_image(value)]
    is_row = any(map(_is_uri, names))
    if len(named) == 1 and not is_row:
        return named[0]
    text = f"{where} has no column of URIs; its first line names {', '.join(map(repr, names[:20]))}"
    name_it = _NAMED if is_row else f"let the first line name it {' or '.join(URI_NAMES[:3])}"
    how = f"Choose one by --image-column, or {name_it}" if not is_row else _NAMED.capitalize()
    raise SourceError(
        f"{text}. {how}. If its rows label the images of a folder, build that folder with --labels"
    )


def _look(evidence: ColumnEvidence, batch: Batch) -> None:
    blank = [None] * len(batch.lines)

    def texts(name: str) -> list[str]:
        cells = batch.columns.get(name, blank)
        return ["" if value is None else str(value).strip() for value in cells]

    evidence.look(texts, texts)


def _require_no_rival(batch: Batch, chosen: ChosenColumns, where: str) -> None:
    """Raise `ChoiceError` if a column of a usual name has other images than the chosen one."""
    assert chosen.image is not None
    for name in chosen.others:
        if plain_name(name) in URI_NAMES and name in batch.columns:
            for uri, other in zip(batch.columns[chosen.image], batch.columns[name], strict=True):
                paths = str(uri), str(other)
                if all(map(is_image, paths)) and len({p.rpartition("/")[2] for p in paths}) > 1:
                    columns = chosen.image, name
                    doubts = doubt_of_rivals("--image-column", columns, "name other images", where)
                    raise choice_error(doubts)


def _places() -> Any:
    """Return the Arrow type of the places of samples: the URI of each, and its cells as JSON."""
    return pa.struct({"uri": pa.large_string(), "cells": pa.large_string()})


def _cells(cells: Mapping[str, Any], where: str) -> str:
    """Return the cells that fields start from as JSON; of CSV an empty one is none."""
    try:
        return json.dumps({name: None if cell == "" else cell for name, cell in cells.items()})
    except TypeError as error:
        raise SourceError(
            f"{where}: {error}; a field starts from text, numbers, or lists of numbers"
        ) from None


def _sample(image: Fetched | None, cells: str) -> Fetched:
    """Return the sample of a file, if it is read, and of cells."""
    own: dict[str | int, Any] = {name: _value(cell) for name, cell in json.loads(cells).items()}
    first = image.inputs[IMAGE] if isinstance(image, Sample) else image
    return joined({**({IMAGE: first} if first is not None else {}), **own})


def _value(cell: Any) -> Any:
    """Return the part of a sample that a cell is, or an error in its place."""
    if isinstance(cell, str):
        return cell if is_utf8(cell) else SampleError("is not UTF-8; save it as UTF-8")
    if isinstance(cell, int | float):
        return np.array(cell)
    is_one = cell is None or isinstance(cell, list)
    return cell if is_one else SampleError(f"is {described(cell)}, and not {STARTS}")


def _etag(key: str, location: str, cells: str, info: FileInfo | None) -> str:
    """Return the etag of a file, with a digest of its cells, and of its location unless the key is
    that."""
    etag = info.etag if info else ""
    if key == location and not cells:
        return etag
    parts = [etag, shown(location), *[cells] * bool(cells)]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())
    return digest if info and (etag or info.mtime_ns >= 0) else f"{UNSEEN}{digest}"


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
