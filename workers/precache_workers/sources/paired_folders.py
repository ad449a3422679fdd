"""Folders whose files pair up by name: a photo and its mask are columns of one sample.

``images/a/17.jpg`` and ``masks/a/17.png`` are the sample ``a/17.jpg`` with the columns ``images``
and ``masks``: keys and labels are those of the first folder. Names are compared without suffixes,
and where more are alike then, also without what all names of a folder end in, as in
``17_mask.png``. Files without a partner are no samples.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from precache.errors import FetchError, SampleError, SourceError, UsageError
from precache.messages import printable, shown
from precache.storage.base import SAME_KEY, Folder
from precache.storage.open import StorageOptions, open_folder
from precache.store.columns import Texts
from precache.store.locations import Locations
from precache.store.row_table import RowTable, place_digest
from precache_workers.sources.base import (
    BY_DATASET,
    NO_RULES,
    Fetched,
    LabelRules,
    Listing,
    Sample,
    Tick,
    in_service_folder,
    locations_by_key,
)
from precache_workers.sources.container_names import common_start, expand_braces
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.label_readings import ending, holds_images, quoted, splits_among


@dataclass(frozen=True)
class PairedFolders:
    """Samples whose columns are files of several folders.

    Attributes
    ----------
    columns
        Folder of each column; fields that name no input start from the first.
    """

    columns: Mapping[str, FolderSource]
    where: str
    labels_with_samples: bool = False

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
        return next(iter(self.columns.values()))

    def file_of(self, key: str) -> tuple[Folder, str] | None:
        [location] = locations_by_key(self._known, [key]).places.to_pylist()
        return None if location is None else (self._first.folder, json.loads(location)[0][0])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    @functools.cached_property
    def _known(self) -> RowTable:
        """The listing, for processes that have only keys."""
        return self.list(lambda count: None).table

    # --- listing --------------------------------------------------------------------------------

    def list(self, tick: Tick, seconds: float = math.inf, index: bytes | None = None) -> Listing:
        listed = {
            name: source.list(lambda n: None, seconds) for name, source in self.columns.items()
        }
        rows, said = _paired({name: one.table.keys for name, one in listed.items()}, self.where)
        left_out = sum((Counter(one.left_out) for one in listed.values()), Counter[str]())
        examples = {why: name for one in listed.values() for why, name in one.examples.items()}
        for name, one in listed.items():
            if repeated := set(range(len(one.table))) - {*rows[name].values()}:
                left_out[SAME_KEY] += len(repeated)
                file = one.table.keys[min(repeated)]
                examples.setdefault(SAME_KEY, printable(f"{name}/{file}"))
        first = listed[next(iter(listed))]
        first_rows = rows[next(iter(listed))]
        stems = sorted(set.intersection(*map(set, rows.values())), key=first_rows.__getitem__)
        tick(len(stems))
        taken = {name: [rows[name][stem] for stem in stems] for name in listed}
        ctimes = [one.ctimes[taken[name]] for name, one in listed.items() if one.ctimes is not None]
        table = _table([one.table.take(taken[name]) for name, one in listed.items()])
        return replace(
            first,
            table=table,
            ignored=sum((Counter(one.ignored) for one in listed.values()), Counter[str]()),
            complete=all(one.complete for one in listed.values()),
            left_out=left_out,
            examples=examples,
            notes=(*said, *first.notes),
            ctimes=np.max(ctimes, axis=0) if len(ctimes) == len(listed) else None,
        )

    # --- fetching -------------------------------------------------------------------------------

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        found = locations_by_key(self._known, keys) if locations is None else locations
        texts = enumerate(found.places.to_pylist())
        places = {n: json.loads(location) for n, location in texts if location}
        samples = [keys[n] for n in places]
        parts: dict[str, Sequence[Fetched]] = {}
        for number, (name, source) in enumerate(self.columns.items()):
            files = [place[number] for place in places.values()]
            named = replace(source, sample_keys={file: key for (file, _), key
                in zip(files, samples, strict=True)})  # fmt: skip
            parts[name] = named.fetch([file for file, _ in files], [size for _, size in files])
        read = {
            place: _joined(dict(zip(parts, columns, strict=True)))
            for place, columns in zip(places, zip(*parts.values(), strict=True), strict=True)
        }
        if any(isinstance(part, FetchError) for part in read.values()):
            self.__dict__.pop("_known", None)  # a file may have changed
        return [
            read[n] if n in read
            else FetchError(f"{key!r} is not in {self.where}; build again to list it anew")
            for n, key in enumerate(keys)
        ]  # fmt: skip


def _table(columns: Sequence[RowTable]) -> RowTable:
    """Return the table of samples from those of their files, row by row."""
    files = [zip(of.keys, of.sizes.tolist(), strict=True) for of in columns]
    states = [zip(of.sizes.tolist(), of.mtimes.tolist(), of.etags, strict=True) for of in columns]
    return replace(
        columns[0],
        sizes=np.sum([of.sizes for of in columns], axis=0),
        mtimes=np.max([of.mtimes for of in columns], axis=0),
        etags=Texts([_digest(of) for of in zip(*states, strict=True)]),
        locations=Locations.alone(Texts([json.dumps(of) for of in zip(*files, strict=True)]).arrow),
        source=place_digest(" ".join(of.source for of in columns)),
    )


def _joined(parts: Mapping[str, Fetched]) -> Fetched:
    """Return the sample of all columns, or the first error of one."""
    inputs: dict[str | int, bytes] = {}
    contents = []
    for name, part in parts.items():
        if isinstance(part, SampleError):
            return SampleError(f"{name}: {part}")
        if not isinstance(part, Sample):
            return part
        [inputs[name]] = part.inputs.values()
        contents.append((name, part.content))
    return Sample(inputs, content=_digest(contents))


def _digest(values: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values).encode())


def open_paired(
    uri: str,
    options: StorageOptions = None,
    *,
    follow_links: bool = False,
    most_bytes: int,
    rules: LabelRules = NO_RULES,
) -> PairedFolders:
    """Open the folders that braces name, or all folders in one that hold images.

    Raises
    ------
    UsageError
        They are fewer than two, or splits.
    """
    open_one = functools.partial(open_folder, options=options, follow_links=follow_links)
    places = expand_braces(uri.rstrip("/"))
    names = _differing([place.split("/") for place in places])
    pattern = uri.rstrip("/")
    if len(places) == 1:
        folder = open_one(uri)
        inside = (n for n in folder.names("") if not in_service_folder(f"{n}/"))
        names = [name for name in inside if open_one(f"{pattern}/{name}").kind() == "folder"]
        names.sort(key=lambda name: (not holds_images(name), name))
        names = [name for name in names if _has_image(open_one(f"{pattern}/{name}"))]
        places = [f"{pattern}/{name}" for name in names]
        pattern = f"{pattern}/{{{','.join(names)}}}"
    if len(names) < 2 or len({*names}) < len(names):
        raise UsageError(
            f"{shown(uri)} has {'no two folders of images' if names else 'no folders of images'}, "
            "whose files would be columns of samples; name them, such as 'data/{images,masks}'"
        )
    if splits_among(names) == {*names}:
        raise UsageError(
            f"{shown(uri)} names splits ({quoted(names)}), which are no columns of samples; build "
            "each on its own"
        )
    columns = {
        name: FolderSource(
            open_one(place),
            most_bytes=most_bytes,
            rules=rules if not number else LabelRules(level=0),
            pattern=pattern,
        )
        for number, (name, place) in enumerate(zip(names, places, strict=True))
    }
    return PairedFolders(columns, shown(pattern))


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
    names: Mapping[str, Sequence[str]], where: str
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Match the files of columns; returns for each column stem -> row, and lines about it."""
    stems = {name: [file.rpartition(".")[0] for file in files] for name, files in names.items()}
    ends = {name: ending(_names(of)) for name, of in stems.items()}
    first, *others = names
    rows: dict[str, dict[str, int]] = {}
    both, stripped = set[str](), set[str]()
    ways: list[list[str]] = [[], others, [first], [first, *others]]
    for way in ways:
        without = {name: ends[name] if name in way else "" for name in names}
        tried = {
            name: _rows(stem.removesuffix(without[name]) for stem in of)
            for name, of in stems.items()
        }
        alike = set.intersection(*map(set, tried.values()))
        if len(alike) > len(both) or not rows:
            rows, both, stripped = tried, alike, {name for name in way if ends[name]}
    if 2 * len(both) < min(map(len, names.values())):
        some = " and ".join(repr(printable(f"{name}/{files[0]}")) for name, files in names.items())
        raise SourceError(
            f"{len(both):,} names in {where} are alike in all folders, of "
            f"{min(map(len, names.values())):,} in the smallest; the first are {some}. Rename the "
            f"files, or {BY_DATASET}"
        )
    of_all = f"Samples are the {len(both):,} names that are in all of {quoted([*names])}"
    lines = [f"{of_all}, as columns; fields that name no input start from {first!r}"]
    for name, of in rows.items():
        if name in stripped:
            lines.append(f"Names are compared without the {ends[name]!r} that ends all in {name!r}")
        alone = sorted(of.keys() - both)
        if alone:
            lines.append(
                f"{len(alone):,} files of {name!r} have no partner in each other folder, and are "
                f"no samples, such as {printable(names[name][of[alone[0]]])}"
            )
    return rows, lines


def _names(paths: Iterable[str]) -> list[str]:
    return [path.rpartition("/")[2] for path in paths]


def _rows(stems: Iterable[str]) -> dict[str, int]:
    """Return stem -> row, without stems that are there several times."""
    listed = [*stems]
    counts = Counter(listed)
    return {stem: row for row, stem in enumerate(listed) if counts[stem] == 1}
