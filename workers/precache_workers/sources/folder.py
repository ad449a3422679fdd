"""A folder of image files, local or remote."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from precache.errors import ChoiceError, FetchError, SampleError, SourceError, StorageError
from precache.messages import printable
from precache.storage.base import FileColumns, Folder, left_out_text
from precache.store.columns import GrowingTexts, Texts
from precache.store.commit_log import NUMBERED, ROOT
from precache.store.locations import Locations
from precache.store.row_table import RowTable
from precache.units import size as in_units
from precache_workers.runtime.time_limit import FETCHING, samples_at_work
from precache_workers.sources.base import (
    BY_DATASET,
    FILES_PER_TICK,
    IMAGE_SUFFIXES,
    NO_SPEC,
    Fetched,
    Listing,
    Names,
    Sample,
    Source,
    SourceSpec,
    Tick,
    container_noun,
    container_suffix,
    count_ignored,
    ignored_text,
    in_service_folder,
    is_image,
    is_utf8,
    source_of,
    too_large_error,
    unread_container,
)
from precache_workers.sources.label_readings import BY_TABLE, Bare, bare_folders, labels_of_folders
from precache_workers.sources.listings import Members

_RECORDS = re.compile(r"-\d{3,}-of-\d{3,}$|\.tfrecords?[-*]")
"""Ends of the names that TensorFlow gives to TFRecord files, and patterns of these."""

_TFRECORDS = "--source-kind", "tfrecord"
_AS_RECORDS = "is called as TFRecord files are: give --source-kind tfrecord if it is one"
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
class FolderSource(Source):
    """Image files below a folder; a folder of a path is the class, if there is one."""

    folder: Folder
    spec: SourceSpec = NO_SPEC

    path_of: Callable[[str], str] | None = None
    """Converts a folder in this one to a source that the user may name; None for its path."""

    also: str = ""
    """Regular expression of RE2 of the names of files that are samples, though no images."""

    def file_of(self, key: str, location: Locations | None = None) -> tuple[Folder, str]:
        return self.folder, key

    @property
    def fetch_threads(self) -> int:
        return 2 if self.folder.local("") else 4  # a network answers late

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        until = time.monotonic() + seconds
        if (kind := self.folder.kind()) != "folder":
            name = str(self.folder)
            if _RECORDS.search(name):
                raise ChoiceError(f"the source {name} {_AS_RECORDS}", ways=[(name, *_TFRECORDS)])
            raise SourceError(f"the source {name} {_no_folder(kind, name)}")
        images, facts, complete = _Images(self.also), Members(), True
        container = table_file = ""

        def leave_out(name: str, reason: str) -> None:
            if name.endswith("/") or is_image(name):
                facts.left_out[reason] += 1
            else:
                count_ignored(facts.ignored, name)

        def take(files: Sequence[FileColumns]) -> None:
            nonlocal container, table_file
            for name in images.add(files, facts):
                facts.ignore(name)
                # A Parquet table may only list photos.
                better = not container or (
                    container.endswith(".parquet") > name.endswith(".parquet")
                )
                if better and (container_noun(name) or _RECORDS.search(name)):
                    container = name
                if name.endswith(_TABLES):
                    table_file = min(table_file or name, name)
            if images.count:
                tick(images.count)

        files, count = list[FileColumns](), 0
        for some in self.folder.walk_columns(leave_out):
            files.append(some)
            count += len(some.names)
            late = time.monotonic() > until
            if late or count >= FILES_PER_TICK:
                take(files)
                files, count = [], 0
                if late and images.count:
                    complete = False
                    break
        take(files)
        if not images.count:
            suffixes = f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}"
            suffixes += left_out_text(facts.left_out, facts.examples)
            other = f"{suffixes}; if these are other data, {BY_DATASET}"
            how, way = _how_to_read(self.folder, container) if container else (other, [])
            if not container and "--follow-links" in suffixes:
                way = ["--follow-links"]
            others = ignored_text(facts.ignored) or 0
            what = f"the source {self.folder} has no image (other files: {others})"
            if _is_stored(self.folder):
                how, way = "it is a store, or a version in one: give what that was built from", []
            raise ChoiceError(f"{what}; {how}", ways=[way] if way else [])
        table, file_states = images.sorted()
        bare_in = functools.partial(bare_folders_on_disk, self.folder, facts.others)
        column, bare = labels_of_folders(
            table.keys,
            table.keys,
            self.folder,
            self.spec.rules,
            self.path_of or self.folder.path,
            bare_in if complete else None,
        )
        labels, source = column.values, source_of(self.folder)
        return Listing(
            replace(table, labels=labels, classes=column.classes, source=source),
            dict(facts.ignored),
            complete,
            dict(facts.left_out),
            facts.examples,
            notes=(
                *_note_of_table(table_file),
                *_note_of_links(self.folder, table, file_states),
                *column.notes,
            ),
            file_states=file_states,
            doubts=column.doubts,
            bare=bare,
        )

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        return self.fetch_files(keys, sizes, keys)

    def fetch_files(
        self, names: Sequence[str], sizes: Sequence[int], samples: Sequence[str]
    ) -> Sequence[Fetched]:
        """Fetch files of samples that may have other keys."""
        if self.folder.local("") is None:
            with contextlib.suppress(MemoryError):
                return self._fetch(names, sizes, samples)
        return [self._alone(*one) for one in zip(names, sizes, samples, strict=True)]

    def _alone(self, name: str, size: int, sample: str) -> Fetched:
        if size < 0:
            with contextlib.suppress(StorageError):  # reading it will report the error
                size = self.folder.size(name) or -1
        try:
            [one] = self._fetch([name], [size], [sample])
        except MemoryError:
            return SampleError(f"has {in_units(size)}, more than the memory allows")
        return one

    def _fetch(
        self, keys: Sequence[str], sizes: Sequence[int], samples: Sequence[str]
    ) -> Sequence[Fetched]:
        """Fetch files of known size together, others singly."""
        at_work = samples_at_work()
        known = [n for n, size in enumerate(sizes) if 0 <= size <= self.spec.most_bytes]
        at_work.begin(FETCHING, *(samples[n] for n in known), foreign=False)
        contents = self.folder.read_many([keys[n] for n in known], [sizes[n] for n in known])
        read: dict[int, bytes | StorageError] = dict(zip(known, contents, strict=True))
        for number in (n for n, size in enumerate(sizes) if size < 0):
            at_work.begin(FETCHING, samples[number], foreign=False)
            try:
                read[number] = self.folder.read_first(keys[number], self.spec.most_bytes + 1)
            except StorageError as error:
                read[number] = error
        return [self._sample(key, sizes[n], read.get(n)) for n, key in enumerate(keys)]

    def _sample(self, key: str, nbytes: int, data: bytes | StorageError | None) -> Fetched:
        if data is None or (isinstance(data, bytes) and len(data) > self.spec.most_bytes):
            return too_large_error(nbytes, self.spec.most_bytes)
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

    def __init__(self, also: str) -> None:
        self._also, self.count, self._keys, self._etags = also, 0, GrowingTexts(), GrowingTexts()
        self._numbers = [array("q") for _ in range(3)]

    def add(self, files: Sequence[FileColumns], facts: Members) -> list[str]:
        """Add the images among the files of a walk; returns the names of the others."""
        if not files:
            return []
        names = [*itertools.chain.from_iterable(some.names for some in files)]
        found = Names.of(names, self._also)
        for row, reason in found.left_out.items():
            facts.leave_out(reason, names[row])
        kept = found.kept
        self._keys.extend(found.texts.take(kept))
        etags = itertools.chain.from_iterable(some.etags for some in files)
        self._etags.extend(Texts(etags).take(kept))
        columns = zip(*((of.sizes, of.mtimes, of.file_states) for of in files), strict=True)
        for numbers, parts in zip(self._numbers, columns, strict=True):
            numbers.frombytes(np.concatenate(parts)[kept].tobytes())
        self.count = len(self._numbers[0])
        return [names[row] for row in np.flatnonzero(~found.images).tolist()]

    def sorted(self) -> tuple[RowTable, np.ndarray]:
        """Return the images without labels, by name, and states of files; to be called once."""
        keys, etags = self._keys.texts(), self._etags.texts()
        sizes, mtimes, states = (np.frombuffer(of, np.int64) for of in self._numbers)
        table = RowTable.of_keys(keys, sizes=sizes, mtimes=mtimes, etags=etags)
        if keys.are_ascending:
            return table, states
        order = keys.order()
        return table.take(order), states[order]


def _note_of_table(name: str) -> list[str]:
    """Return the line about a table in a folder of images; none without one."""
    way = "as the source itself"
    if name.endswith((".csv", ".tsv")):
        way = f"by --labels, or {way}"
    elif name.endswith(".parquet"):
        way += ", with --source-kind manifest"
    return [f"{printable(name)} {BY_TABLE} {way}"] if name else []


def _note_of_links(folder: Folder, table: RowTable, file_states: np.ndarray) -> list[str]:
    """Return the line about images that are links to others, or other names of their files."""
    known = np.sort(file_states[file_states >= 0])
    if not (known[1:] == known[:-1]).any():
        return []
    _, first, inverse = np.unique(file_states, return_index=True, return_inverse=True)
    others = first[inverse]
    alike = np.flatnonzero((file_states >= 0) & (others != np.arange(len(others))))
    names = ((table.keys[row], table.keys[int(others[row])]) for row in alike.tolist())
    links = [pair for pair in names if _are_one_file(folder, *pair)]
    if not links:
        return []
    example = " to ".join(map(printable, links[0]))
    count = f"{len(links):,} of {len(table):,} images"
    return [f"{count} are links to others, such as {example}, and are samples of their own"]


def _are_one_file(folder: Folder, name: str, other: str) -> bool:
    path, other_path = folder.local(name), folder.local(other)
    with contextlib.suppress(OSError):  # it is gone
        return path is not None and other_path is not None and path.samefile(other_path)
    return False


def _is_stored(folder: Folder) -> bool:
    """Return True for a store, and for a version in one."""
    has_log = any(map(NUMBERED.fullmatch, folder.names("commits")))
    return has_log or b'"precache"' in (folder.get(ROOT) or b"")


def _how_to_read(folder: Folder, name: str) -> tuple[str, list[str]]:
    """Explain how to read a file with many samples in a folder without images, and name the source
    that does, if there is one."""
    from precache_workers.sources.kinds import kind_of_name  # it imports this module

    noun, kind = container_noun(name), kind_of_name(name)
    if not noun:
        return f"{name} {_AS_RECORDS}", [folder.path("**/*-of-*"), *_TFRECORDS]
    if not kind:
        return f"{name} is {unread_container(folder.path(name))}", []
    suffix = name[-len(container_suffix(name)) :]
    pattern = f"**/*{suffix}" if suffix.startswith(".") else f"**/{suffix}"
    every = folder.path(pattern)
    return f"{name} is {noun}: give '{every}' to read all of them", [every]


def _no_folder(kind: str | None, name: str) -> str:
    """Return the message for a source that is not a folder."""
    if kind is None:
        where = "; patterns name files with many samples, such as *.tar" * ("*" in name)
        return f"does not exist; give a folder of images{where}"
    return (
        "is not a folder; give a folder of images, or --source-kind for a file with many samples; "
        f"if it has other data, {BY_DATASET}"
    )
