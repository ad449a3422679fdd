"""A folder of image files, local or remote."""

from __future__ import annotations

import contextlib
import math
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.messages import printable
from precache.storage.base import NOT_UTF8, SERVICE_FOLDER, FileInfo, Folder, left_out_text
from precache.store.row_table import RowTable
from precache.units import size as in_units
from precache_workers.runtime.time_limit import FETCHING, notes
from precache_workers.sources.base import (
    BY_DATASET,
    FILES_PER_TICK,
    IMAGE_SUFFIXES,
    MOST_SAMPLE_BYTES,
    NO_RULES,
    Fetched,
    LabelRules,
    Listing,
    Sample,
    Tick,
    container_noun,
    container_suffix,
    count_ignored,
    in_service_folder,
    is_image,
    is_utf8,
    source_of,
)
from precache_workers.sources.label_readings import (
    SettledLabels,
    doubts_of_classes,
    folder_labels,
    note_of_order,
    read_folders,
    settle_labels,
)
from precache_workers.sources.labels import Kind, encode_labels

_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""Suffixes of files that may have labels of the images beside them."""


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

    def file_of(self, key: str) -> tuple[Folder, str]:
        return self.folder, key

    @property
    def fetch_threads(self) -> int:
        return 2 if self.folder.local("") else 4  # a network answers late

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        until = time.monotonic() + seconds
        if (kind := self.folder.kind()) != "folder":
            raise SourceError(f"the source {self.folder} {_no_folder(kind)}")
        files = _FileColumns()
        ignored, complete, left_out = Counter[str](), True, Counter[str]()
        container, table_file, examples = "", "", dict[str, str]()

        def leave_out(name: str, reason: str) -> None:
            if name.endswith("/") or is_image(name):
                left_out[reason] += 1
            else:
                count_ignored(ignored, name)

        for file in self.folder.walk(leave_out):
            if files.keys and time.monotonic() > until:
                complete = False
                break
            if is_image(file.name):
                reason = SERVICE_FOLDER if in_service_folder(file.name) else NOT_UTF8
                if reason == SERVICE_FOLDER or not is_utf8(file.name):
                    left_out[reason] += 1
                    examples.setdefault(reason, printable(file.name))
                    continue
                files.add(file)
                if len(files.keys) % FILES_PER_TICK == 0:
                    tick(len(files.keys))
            else:
                count_ignored(ignored, file.name)
                if container_noun(file.name) and (
                    not container or _is_better(file.name, container)
                ):
                    container = file.name
                if file.name.endswith(_TABLES):
                    table_file = min(table_file or file.name, file.name)
        if not files.keys:
            images = f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}"
            images += left_out_text(left_out, examples)
            how = _how_to_read(self.folder, container) if container else images
            what = f"the source {self.folder} has no image ({ignored.total()} other files)"
            raise SourceError(f"{what}; {how}")
        tick(len(files.keys))
        return self._listing(files, ignored, complete, left_out, examples, table_file)

    def _listing(
        self,
        files: _FileColumns,
        ignored: Counter[str],
        complete: bool,
        left_out: Counter[str],
        examples: Mapping[str, str],
        table_file: str,
    ) -> Listing:
        where = "the source"
        reading = read_folders(files.keys, self.rules, self.folder, self.folder.path)
        labels = folder_labels(files.keys, reading.level)
        kind: Kind | None = "names" if any(labels) else None
        settled = settle_labels(
            labels, kind, files.keys, where, self.rules, typed=True, folders=True
        )
        table, ctimes = files.table(settled, self.rules)
        way = "as the source itself"
        if table_file.endswith((".csv", ".tsv")):
            way = f"by --labels, if it has lines key,label, or {way}"
        elif table_file.endswith(".parquet"):
            way += ", with --source-kind manifest"
        beside = f"{printable(table_file)} in the source gives labels only {way}"
        return Listing(
            replace(table, source=source_of(self.folder)),
            dict(ignored),
            complete,
            dict(left_out),
            examples,
            notes=(
                *([beside] if table_file else []),
                *reading.notes,
                *settled.notes,
                *note_of_order(table.classes),
            ),
            ctimes=ctimes,
            doubts=(
                *reading.doubts,
                *settled.doubts,
                *doubts_of_classes(table.classes, self.folder),
            ),
        )

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Sequence[str] = ()
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
        notes().begin(FETCHING, *(samples[n] for n in known), foreign=False)
        contents = self.folder.read_many([keys[n] for n in known], [sizes[n] for n in known])
        read: dict[int, bytes | StorageError] = dict(zip(known, contents, strict=True))
        for number in range(len(keys)):
            if number not in read:
                notes().begin(FETCHING, samples[number], foreign=False)
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


class _FileColumns:
    """Files in the order of a walk, as columns to save memory."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._sizes = array("q")
        self._mtimes = array("q")
        self._ctimes = array("q")
        self._etags: list[str] = []

    def add(self, file: FileInfo) -> None:
        self.keys.append(file.name)
        self._sizes.append(file.size)
        self._mtimes.append(file.mtime_ns)
        self._ctimes.append(file.ctime_ns)
        self._etags.append(file.etag)

    def table(self, settled: SettledLabels, rules: LabelRules) -> tuple[RowTable, np.ndarray]:
        """Return the files with their labels, sorted by name; and their ctimes."""
        labels, classes = encode_labels(
            settled.labels, settled.kind, (), self.keys, "the source", rules.order
        )
        sizes, mtimes = np.array(self._sizes, np.int64), np.array(self._mtimes, np.int64)
        table = RowTable(
            keys=self.keys,
            sizes=sizes,
            mtimes=mtimes,
            etags=self._etags,
            labels=labels,
            classes=classes,
        )
        order = sorted(range(len(table)), key=self.keys.__getitem__)
        return table.take(order), np.array(self._ctimes, np.int64)[order]


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


def _no_folder(kind: str | None) -> str:
    """Return the message for a source that is not a folder."""
    if kind is None:
        return "does not exist; give a folder of images"
    return "is not a folder; give a folder of images, or --source-kind for a file with many samples"
