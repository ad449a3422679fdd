"""Files that pair up by name: a photo, its mask and its caption are columns of one sample.

Of folders, ``images/a/17.jpg`` and ``masks/a/17.png`` are the sample ``a/17.jpg`` with the columns
``images`` and ``masks``: keys and labels are those of the first folder. Names are compared without
suffixes, of patterns, as ``*.jpg`` and ``*_mask.png``, by the parts that stars stand for; and where
more are alike then, also without what all names of a column end in. `pairs` joins them. Files
without a partner are no samples.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from precache.errors import SourceError, UsageError
from precache.messages import printable, shown
from precache.storage.base import SAME_KEY, Folder
from precache.storage.local import local_path
from precache.store.columns import Texts, arrow_of, joined_texts
from precache.store.locations import Locations
from precache.store.row_table import RowTable, place_digest
from precache_workers.sources.base import (
    BY_DATASET,
    IMAGE,
    Doubt,
    Fetched,
    LabelRules,
    Listing,
    Sample,
    Source,
    SourceSpec,
    Tick,
    choice_error,
    fetch_located,
    in_service_folder,
    located,
    quoted,
)
from precache_workers.sources.container_names import (
    around_braces,
    braced,
    braced_paths,
    common_start,
    expand_braces,
)
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.pairs import (
    ALL,
    IMAGES,
    MAGIC,
    Files,
    Match,
    expression,
    match,
    names_suffix,
    plain_word,
    sources_of,
    split_pattern,
)
from precache_workers.sources.sample_parts import VALUE_SUFFIXES, joined, value_of
from precache_workers.sources.splits import splits_among

_VALUES = rf"\.(?:{'|'.join(VALUE_SUFFIXES)})$"


class FolderFiles(NamedTuple):
    """Files of a folder whose names fit a pattern."""

    source: FolderSource
    pattern: str

    @property
    def folder(self) -> str:
        return str(self.source.folder)


@dataclass(frozen=True)
class PairedFolders(Source):
    """Samples whose columns are files of several folders, or of several patterns.

    Attributes
    ----------
    columns
        Files of each column; fields that name no input start from the first.
    """

    columns: Mapping[str, FolderFiles]
    where: str

    def __str__(self) -> str:
        return self.where

    @property
    def fetch_threads(self) -> int:
        return self._first.fetch_threads

    @property
    def index_name(self) -> str:
        return place_digest(self.where)

    @property
    def _first(self) -> FolderSource:
        return next(iter(self.columns.values())).source

    def file_of(self, key: str, location: Locations | None = None) -> tuple[Folder, str] | None:
        [place] = (location or located(self, [key])).places.to_pylist()
        return place and (self._first.folder, place[next(iter(self.columns))]["name"])

    # --- listing --------------------------------------------------------------------------------

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        places = dict.fromkeys(of.folder for of in self.columns.values())
        by_folder = {folder: self._listed(folder, seconds) for folder in places}
        listed = {name: by_folder[of.folder] for name, of in self.columns.items()}
        files = {n: Files.at(one.table.keys, self.columns[n].pattern) for n, one in listed.items()}
        taken, said = _paired(files, self.where, self.columns)
        folders = [*by_folder.values()]
        left_out, ignored = Counter[str](), Counter[str]()
        for one in folders:
            left_out.update(one.left_out)
            ignored.update(one.ignored)
        examples = {why: name for one in folders for why, name in one.examples.items()}
        for name, of in files.items():
            repeated = np.flatnonzero(of.stems.counts() > 1)
            if len(repeated):
                left_out[SAME_KEY] += len(repeated)
                examples.setdefault(SAME_KEY, printable(f"{name}/{of.names[int(repeated[0])]}"))
        first = folders[0]
        tick(len(next(iter(taken.values()))))
        rows = {name: files[name].rows[places] for name, places in taken.items()}
        states = [
            one.file_states[rows[name]]
            for name, one in listed.items()
            if one.file_states is not None  # as always of folders
        ]
        table = _table({name: one.table.take(rows[name]) for name, one in listed.items()})
        return replace(
            first,
            table=table,
            ignored=ignored,
            complete=all(one.complete for one in folders),
            left_out=left_out,
            examples=examples,
            notes=(*said, *first.notes),
            # One file alone may change.
            file_states=functools.reduce(_mixed, states),
        )

    def _listed(self, folder: str, seconds: float) -> Listing:
        """List a folder, with all files that fit its columns."""
        own = [column for column in self.columns.values() if column.folder == folder]
        source, patterns = own[0].source, [column.pattern for column in own]
        also = "|".join(map(expression, filter(names_suffix, patterns)))
        try:
            return replace(source, also=also).list(lambda n: None, seconds)
        except SourceError as error:
            try:
                return replace(source, also=_VALUES).list(lambda n: None, seconds)
            except SourceError:
                raise error from None

    # --- fetching -------------------------------------------------------------------------------

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        def read(rows: list[int], located: Locations) -> dict[int, Fetched]:
            every = located.places.to_pylist()
            places, samples = [every[row] for row in rows], [keys[row] for row in rows]
            parts: dict[str, Sequence[Fetched]] = {}
            for name, (source, _) in self.columns.items():
                files = [place[name]["name"] for place in places]
                listed = [place[name]["size"] for place in places]
                parts[name] = source.fetch_files(files, listed, samples)
            return {
                row: _sample(dict(zip(parts, columns, strict=True)), place)
                for row, place, *columns in zip(rows, places, *parts.values(), strict=True)
            }

        return fetch_located(self, keys, locations, read)


def _table(named: Mapping[str, RowTable]) -> RowTable:
    """Return the table of samples from those of their files, row by row."""
    columns = [*named.values()]
    files = [
        pa.StructArray.from_arrays([of.keys.plain, arrow_of(of.sizes)], ["name", "size"])
        for of in columns
    ]
    states = [
        part
        for of in columns
        for part in (of.keys, Texts(arrow_of(of.sizes)), Texts(arrow_of(of.mtimes)), of.etags)
    ]
    return replace(
        columns[0],
        sizes=np.sum([of.sizes for of in columns], axis=0),
        mtimes=np.max([of.mtimes for of in columns], axis=0),
        etags=joined_texts(states, "/"),
        locations=Locations.alone(pa.StructArray.from_arrays(files, [*named])),
        source=place_digest(" ".join(of.source for of in columns)),
    )


def _mixed(states: np.ndarray, others: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = (states * 0x9E37_79B1 + others) & np.iinfo(np.int64).max
    return mixed


def _sample(parts: Mapping[str, Fetched], files: Mapping[str, Any]) -> Fetched:
    """Return the sample of all columns, with the names of their files."""
    names: dict[str | int, str] = {
        name: ("" if MAGIC.search(name) else f"{name}/") + printable(files[name]["name"])
        for name in parts
    }
    inputs: dict[str | int, Any] = {
        name: value_of(names[name], part.inputs[IMAGE]) if isinstance(part, Sample) else part
        for name, part in parts.items()
    }
    return joined(inputs, names)


def open_paired(spec: SourceSpec) -> PairedFolders:
    """Open the folders or patterns that braces name, or all folders in one that hold images.

    Raises
    ------
    UsageError
        They are fewer than two, or splits.
    """
    uri = spec.uri.rstrip("/")
    places = expand_braces(uri)
    alone = len(places) == 1 and names_suffix(_folder_and_pattern(places[0])[1])
    if len(places) == 1 and not alone:
        [uri] = places
        folder = spec.folder(uri)
        inside = (n for n in folder.names("") if not in_service_folder(f"{n}/"))
        names = [name for name in inside if spec.folder(f"{uri}/{name}").kind() == "folder"]
        names.sort(key=lambda name: (plain_word(name) not in IMAGES, name))
        names = [name for name in names if _has_image(spec.folder(f"{uri}/{name}"))]
        places = [f"{uri}/{name}" for name in names]
        uri = f"{uri}/{braced(names)}"
    split = [_folder_and_pattern(place) for place in places]
    names = [split[0][1]] if alone else _names_of(split)
    if (len(names) < 2 and not alone) or len({*names}) < len(names):
        raise UsageError(
            f"{shown(uri)} has {'no two folders of images' if names else 'no folders of images'}, "
            "whose files would be columns of samples; name them, such as 'data/{images,masks}'"
        )
    if splits_among(names) == {*names}:
        raise UsageError(
            f"{shown(uri)} names splits ({quoted(names)}), which are no columns of samples; build "
            "each on its own"
        )
    columns: dict[str, FolderFiles] = {}
    for name, (place, pattern) in zip(names, split, strict=True):
        own = replace(spec, rules=LabelRules(level=0)) if columns else spec
        source = FolderSource(spec.folder(place), own, path_of=functools.partial(_below, split))
        columns[name] = FolderFiles(source, pattern)
    return PairedFolders(columns, shown(uri))


def _below(places: Sequence[tuple[str, str]], folder: str) -> str:
    """Return the source of a folder in each of several, of the files of their patterns."""
    has_patterns = any(pattern != ALL for _, pattern in places)
    of = [f"{place}/{folder}" + f"/{pattern}" * has_patterns for place, pattern in places]
    return braced_paths(of) if of[1:] else of[0]


def columns_of(uri: str) -> list[str]:
    """Return the names of the columns of a source with braces."""
    return _names_of([_folder_and_pattern(place) for place in expand_braces(uri)])


def _names_of(split: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names of columns: in what their folders differ, or their patterns."""
    names = _differing([folder.split("/") for folder, _ in split])
    if len({*names}) < len(names):
        names = _differing([[*folder.split("/"), *of.split("/")] for folder, of in split])
    return names


def _folder_and_pattern(place: str) -> tuple[str, str]:
    """Split a place at the first part that has a star or question mark, unless it is there."""
    if "://" not in place and os.path.lexists(local_path(place)):
        return place, ALL
    folder, pattern = split_pattern(place)
    return folder or ("/" if place.startswith("/") else "."), pattern


def _has_image(folder: Folder) -> bool:
    try:
        FolderSource(folder).list(lambda count: None, seconds=0)
    except SourceError:
        return False
    return True


def _differing(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the part of each path between what all begin with and what all end in."""
    start = len(common_start(paths))
    end = len(common_start([path[::-1] for path in paths]))
    return ["/".join(path[start : len(path) - end]) for path in paths]


def _paired(
    files: Mapping[str, Files], where: str, columns: Mapping[str, FolderFiles]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Match the files of columns; returns those of each that are samples, and lines."""
    first, *others = files
    found = match([of.stems for of in files.values()])
    taken = dict(zip(files, found.rows, strict=True))
    if not found.fits:
        raise _no_pairs(files, where, columns, found)
    of_all = f"Samples are the {len(found):,} names that are in all of {quoted([*files])}"
    lines = [f"{of_all}, as columns; fields that name no input start from {first!r}"] * bool(others)
    for (name, of), end in zip(files.items(), found.ends, strict=True):
        if end:
            lines.append(f"Names are compared without the {end!r} that ends all in {name!r}")
        alone = np.ones(len(of.names), np.bool_)
        for other in files:
            if columns[other].folder == columns[name].folder:
                alone &= ~np.isin(of.rows, files[other].rows[taken[other]])
        alone &= of.stems.counts() == 1
        if alone.any():
            lines.append(
                f"Files of {name!r} without a partner in each other "
                f"{'folder' if columns[name].pattern == ALL else 'pattern'}, which are no samples: "
                f"{alone.sum():,}, such as {printable(of.names[int(np.argmax(alone))])}"
            )
    return taken, lines


def _no_pairs(
    files: Mapping[str, Files], where: str, columns: Mapping[str, FolderFiles], found: Match
) -> SourceError:
    """Return the error about names that do not pair, with the patterns that would."""
    some = " and ".join(
        repr(printable(f"{name}/{of.names[0]}")) for name, of in files.items() if len(of.names)
    )
    of_least = f"of {found.least:,} in the smallest"
    text = f"{len(found):,} names in {where} are alike in all columns, {of_least}"
    text = f"{text}; the first are {some}" if some else text
    around = around_braces(where)
    if around and all(of.pattern == ALL for of in columns.values()):
        start, end = around
        names = [of.names.between(f"{name}{end}/") for name, of in files.items()]
        sources = sources_of(Texts.joined(names), [f"{name}{end}" for name in files])
        if sources:
            ways = [((start + source,), "for samples with a column of each") for source in sources]
            return choice_error([Doubt.of(text, *ways, of_members=True)])
    return SourceError(
        f"{text}. Name the files by patterns whose stars are alike, as "
        f"'data/{{images/**/*.jpg,masks/**/*_mask.png}}', rename them, or {BY_DATASET}"
    )
