"""A folder of image files, local or remote."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.messages import printable
from precache.storage.base import Folder, left_out_text
from precache.store.columns import GrowingTexts, Texts
from precache.store.locations import Locations
from precache.store.row_table import RowTable
from precache.units import size as in_units
from precache_workers.runtime.time_limit import FETCHING, samples_at_work
from precache_workers.sources.base import (
    BY_DATASET,
    FILES_PER_TICK,
    IMAGE_SUFFIXES,
    MOST_SAMPLE_BYTES,
    NO_RULES,
    Fetched,
    Folders,
    LabelRules,
    Listing,
    Names,
    Sample,
    Tick,
    container_noun,
    container_suffix,
    count_ignored,
    hidden_as,
    in_service_folder,
    is_image,
    is_utf8,
    source_of,
)
from precache_workers.sources.label_evidence import read_column
from precache_workers.sources.label_readings import (
    Bare,
    bare_folders,
    folder_labels,
    is_beside,
    read_folders,
)
from precache_workers.sources.labels import Column, column_of
from precache_workers.sources.splits import notes_of_folders

_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""Suffixes of files that may have labels of the images beside them."""


def bare_folders_on_disk(folder: Folder, others: Mapping[str, bool], outer: str) -> Bare:
    """Return the folders in a folder that may be bare: as `bare_folders`, and empty ones of a disk.

    Parameters
    ----------
    folder
        The source that `outer` lies in.
    others
        As of `bare_folders`.
    """
    bare = {**bare_folders(others, outer)}
    local = folder.local(outer)
    if local is not None:
        with contextlib.suppress(OSError), os.scandir(local) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and is_utf8(entry.name):
                    bare.setdefault(entry.name, True)
    return {name: may for name, may in bare.items() if not in_service_folder(f"{name}/")}


@dataclass(frozen=True)
class FolderSource:
    """Image files below a folder; a folder of a path is the class, if there is one."""

    folder: Folder
    labels_with_samples: bool = False
    most_bytes: int = MOST_SAMPLE_BYTES
    """Size limit of a sample; larger samples are not fetched."""

    index_name: str = ""
    sample_keys: Mapping[str, str] = field(default_factory=dict)
    """File name -> key of its sample, if they differ."""

    rules: LabelRules = NO_RULES

    pattern: str = ""
    """Name of the source if it has several folders, of which this is the first."""

    def file_of(self, key: str) -> tuple[Folder, str]:
        return self.folder, key

    @property
    def fetch_threads(self) -> int:
        return 2 if self.folder.local("") else 4  # a network answers late

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        until = time.monotonic() + seconds
        if (kind := self.folder.kind()) != "folder":
            raise SourceError(f"the source {self.folder} {_no_folder(kind, str(self.folder))}")
        files = _Images()
        ignored, complete, left_out = Counter[str](), True, Counter[str]()
        container, table_file, examples = "", "", dict[str, str]()
        others: dict[str, bool] = {}

        def leave_out(name: str, reason: str) -> None:
            if name.endswith("/") or is_image(name):
                left_out[reason] += 1
            else:
                count_ignored(ignored, name)

        def take() -> None:
            nonlocal container, table_file
            for name in files.settle(left_out, examples):
                count_ignored(ignored, name)
                if not hidden_as(name):
                    inside = name.rpartition("/")[0]
                    others[inside] = others.get(inside, False) or not is_beside(name)
                if container_noun(name) and (not container or _is_better(name, container)):
                    container = name
                if name.endswith(_TABLES):
                    table_file = min(table_file or name, name)
            if files.count:
                tick(files.count)

        for file in self.folder.walk(leave_out):
            late = time.monotonic() > until
            if late or len(files.names) == FILES_PER_TICK:
                take()
                if late and files.count:
                    complete = False
                    break
            files.add(*file)
        take()
        if not files.count:
            images = f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}"
            images += left_out_text(left_out, examples)
            other = f"{images}; if these are other data, {BY_DATASET}"
            how = _how_to_read(self.folder, container) if container else other
            what = f"the source {self.folder} has no image ({ignored.total()} other files)"
            raise SourceError(f"{what}; {how}")
        bare_in = functools.partial(bare_folders_on_disk, self.folder, others) if complete else None
        return self._listing(files, ignored, complete, left_out, examples, table_file, bare_in)

    def _listing(
        self,
        files: _Images,
        ignored: Counter[str],
        complete: bool,
        left_out: Counter[str],
        examples: Mapping[str, str],
        table_file: str,
        bare_in: Callable[[str], Bare] | None,
    ) -> Listing:
        table, ctimes = files.sorted()
        folders = Folders(table.keys)
        path = (lambda name: f"{self.pattern}/{name}") if self.pattern else self.folder.path
        reading = read_folders(table.keys, self.rules, self.folder, path, bare_in)
        labels = folders.each(lambda names: folder_labels(names, reading.level))
        given = column_of([label or None for label in labels])
        column = read_column(Column(given, table.keys, str(self.folder), self.rules, folders=True))
        source = source_of(self.folder)
        table = replace(table, labels=column.values, classes=column.classes, source=source)
        way = "as the source itself"
        if table_file.endswith((".csv", ".tsv")):
            way = f"by --labels, or {way}"
        elif table_file.endswith(".parquet"):
            way += ", with --source-kind manifest"
        beside = f"{printable(table_file)} in the source gives labels only {way}"
        return Listing(
            table,
            dict(ignored),
            complete,
            dict(left_out),
            examples,
            notes=(
                *([beside] if table_file else []),
                *reading.notes,
                *notes_of_folders(folders.names),
                *column.notes,
            ),
            ctimes=ctimes,
            doubts=(*reading.doubts, *column.doubts),
            bare=reading.bare,
        )

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        if self.folder.local("") is None:
            return self._fetch(keys, sizes)
        return [fetched for pair in zip(keys, sizes, strict=True) for fetched in self._alone(*pair)]

    def _alone(self, key: str, size: int) -> Sequence[Fetched]:
        if size < 0:
            with contextlib.suppress(StorageError):  # reading it will report the error
                size = self.folder.size(key) or -1
        return self._fetch([key], [size])

    def _fetch(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[Fetched]:
        """Fetch files together; one by one if memory is short."""
        wanted = [n for n, size in enumerate(sizes) if size <= self.most_bytes]
        try:
            some, expected = [keys[n] for n in wanted], [sizes[n] for n in wanted]
            read = dict(zip(wanted, self._read(some, expected), strict=True))
        except MemoryError:
            if len(keys) == 1:
                nbytes = in_units(sizes[0])
                return [SampleError(f"has {nbytes}, more than the memory allows")]
            return [
                fetched for pair in zip(keys, sizes, strict=True) for fetched in self._alone(*pair)
            ]
        return [self._sample(key, sizes[n], read.get(n)) for n, key in enumerate(keys)]

    def _read(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[bytes | StorageError]:
        """Read files of known size together; read others singly, up to the size limit."""
        known = [n for n, size in enumerate(sizes) if size >= 0]
        samples = [self.sample_keys.get(key, key) for key in keys]
        samples_at_work().begin(FETCHING, *(samples[n] for n in known), foreign=False)
        contents = self.folder.read_many([keys[n] for n in known], [sizes[n] for n in known])
        read: dict[int, bytes | StorageError] = dict(zip(known, contents, strict=True))
        for number in range(len(keys)):
            if number not in read:
                samples_at_work().begin(FETCHING, samples[number], foreign=False)
                try:
                    read[number] = self.folder.read_first(keys[number], self.most_bytes + 1)
                except StorageError as error:
                    read[number] = error
        return [read[number] for number in range(len(keys))]

    def _sample(self, key: str, nbytes: int, data: bytes | StorageError | None) -> Fetched:
        if data is None or (isinstance(data, bytes) and len(data) > self.most_bytes):
            has = "more" if nbytes < 0 else in_units(nbytes)
            return SampleError(
                f"has {has}, over the limit of {in_units(self.most_bytes)} (--max-sample-bytes)"
            )
        if isinstance(data, StorageError):
            return FetchError(str(data))
        if nbytes not in (-1, len(data)):
            now = f"more than {nbytes}" if len(data) > nbytes else str(len(data))
            return FetchError(
                f"{self.folder.path(key)} has {now} bytes and had {nbytes} when it was listed; "
                "build again to list it anew"
            )
        return Sample.of(data)


class _Images:
    """The images of a walk, as columns."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []
        self._etags: list[str] = []
        self._numbers = _three()
        self._all_names, self._all_etags, self._all_numbers = (
            GrowingTexts(),
            GrowingTexts(),
            _three(),
        )

    def add(self, name: str, size: int, mtime_ns: int, etag: str, ctime_ns: int) -> None:
        """Add a file of a walk, which may be none of the images."""
        sizes, mtimes, ctimes = self._numbers
        self.names.append(name)
        self._etags.append(etag)
        sizes.append(size)
        mtimes.append(mtime_ns)
        ctimes.append(ctime_ns)

    def settle(self, left_out: Counter[str], examples: dict[str, str]) -> list[str]:
        """Find the images among the files that were added last; returns the names of the others.

        Parameters
        ----------
        left_out, examples
            Output: images that are left out, as in `Listing`.
        """
        names, found = self.names, Names.of(self.names)
        for row, reason in found.left_out.items():
            left_out[reason] += 1
            examples.setdefault(reason, printable(names[row]))
        kept = found.kept
        self._all_names.extend(found.texts.take(kept))
        self._all_etags.extend(Texts(self._etags).take(kept))
        for column, numbers in zip(self._all_numbers, self._numbers, strict=True):
            column.frombytes(np.frombuffer(numbers, np.int64)[kept].tobytes())
        self.count += int(kept.sum())
        self.names, self._etags, self._numbers = [], [], _three()
        return [names[row] for row in np.flatnonzero(~found.images).tolist()]

    def sorted(self) -> tuple[RowTable, np.ndarray]:
        """Return the images without labels, sorted by name, and their ctimes; to be called once."""
        unsorted = self._all_names.texts()
        order = unsorted.order()
        keys, etags = unsorted.take(order), self._all_etags.texts().take(order)
        sizes, mtimes, ctimes = (np.frombuffer(n, np.int64)[order] for n in self._all_numbers)
        self.__init__()  # type: ignore[misc]  # what it held takes as much memory again
        return RowTable.of_keys(keys, sizes=sizes, mtimes=mtimes, etags=etags), ctimes


def _three() -> tuple[array[int], array[int], array[int]]:
    return array("q"), array("q"), array("q")


def _is_better(name: str, other: str) -> bool:
    """Return True for a container in place of a Parquet table, which may only list its photos."""
    return other.endswith(".parquet") and not name.endswith(".parquet")


def _how_to_read(folder: Folder, name: str) -> str:
    """Explain how to read a file with many samples in a folder without images."""
    from precache_workers.sources.kinds import kind_of_name  # it imports this module

    noun, kind = container_noun(name), kind_of_name(name)
    if not kind:
        return f"{name} is {noun}: {BY_DATASET}"
    suffix = name[-len(container_suffix(name)) :]
    pattern = f"**/*{suffix}" if suffix.startswith(".") else f"**/{suffix}"
    return f"{name} is {noun}: give '{folder.path(pattern)}' to read all of them"


def _no_folder(kind: str | None, name: str) -> str:
    """Return the message for a source that is not a folder."""
    if kind is None and re.search(r"[*?\[]", name):
        root = re.split(r"/[^/]*[*?\[]", name)[0]
        return f"is a pattern, as for archives and tables; of images give their folder, as {root}"
    if kind is None:
        return "does not exist; give a folder of images"
    return "is not a folder; give a folder of images, or --source-kind for a file with many samples"
