"""The catalogue: what the versions of a store hold, looked up by ops and content.

Of a version that was begun and not committed, these are its finished shards. Each version records
the content of the sample of each row, and of each part from which a field starts, and for each
array the digest of the ops that made it. So a row of a field may come from any version that has the
same content of the part under the first of the field's ops, under whatever key and in whatever row;
where one of these ops is random, the key has to be the same, too. The content of a listed sample is
known if a version has its source, key, size and time or etag. Of another sample the catalogue has
guesses: the contents of its key, else one of its size with its name or time. The task that fetches
it finds out which it is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from precache.errors import Hole
from precache.recipe.recipe import Field, LossyCodec, Recipe, crop_pairs, mask_pairs
from precache.recipe.variants import field_of
from precache.storage.base import Folder
from precache.store.columns import Texts, arrow_of, joined_texts
from precache.store.json_documents import Attributes
from precache.store.layout import RowShape
from precache.store.row_table import REMOVED, RowTable, digests_of
from precache.store.version import Version
from precache_workers.ops.identity import all_starts, ops_digest, starts_of
from precache_workers.planning.stored_versions import (
    UNREADABLE,
    StoredVersion,
    open_finished,
    stored_versions,
)
from precache_workers.planning.target_version import VersionSpec


@dataclass(frozen=True)
class StoredArray:
    """An array of a version with rows of a field, with all ops or some.

    Attributes
    ----------
    applied, finished
        Number of the field's ops that were applied; whether these are all.
    encoded
        Whether the codec is the field's, too, so that chunks can be copied.
    refuses_more
        Whether holes of the array may have rows by the field's ops.
    """

    folder: Folder
    name: str
    shape: RowShape
    rows: int
    rows_per_shard: int
    applied: int
    finished: bool
    encoded: bool
    refuses_more: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """Version and name; variants may resume rows of the same array."""
        return self.folder.name, self.name

    def rows_of(self, shard: int) -> range:
        """Rows of a shard."""
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, self.rows))


_opened: dict[str, Version] = {}

OPENED = 8
"""Versions of which a process keeps small objects in memory."""


def open_stored(array: StoredArray, shard: int) -> Version:
    """Open the version of an array, once in each process; again if a build finished the shard since
    then."""
    key = str(array.folder)
    version = _opened.get(key)
    if version is None or not version.shard_leaves(array.name)[shard].xxh3:
        version = open_finished(array.folder)
        for old in [*_opened][: 1 - OPENED]:
            _opened.pop(old, None)
        _opened[key] = version
    return version


WHOLE = 0.5
"""Share of an object's rows from which on it is read as a whole."""

Held = np.ndarray
"""Where rows of a field are stored: (rows, 3) int32 number of the array, -1 for nowhere, row of its
version, and 1 where that row is a hole."""


@dataclass(frozen=True)
class StoredRows:
    """Places where rows of a version to be built, or of one of its shards, are stored.

    Attributes
    ----------
    fields
        Field -> where its rows are.
    content
        Halves of the XXH3-128 of the sample of each row: (rows, 2) uint64, zeros for none.
    known
        (rows,) bool, whether this is the content of the listed sample, and none of it is a guess.
    holes
        Row -> hole, where samples of this content fail, or were removed: known rows.
    labels
        Labels of rows that came with their samples, -1 for none; None if others are known.
    parts, starts
        Part of samples -> its contents, by row, as `content`; field -> parts that decide it.
    others
        What is stored of other contents that a sample may have, where the first one is a guess.
    """

    arrays: Sequence[StoredArray]
    fields: Mapping[str, Held]
    content: np.ndarray
    known: np.ndarray
    holes: Mapping[int, Hole]
    labels: np.ndarray | None = None
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    starts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    others: Sequence[StoredRows] = ()

    @classmethod
    def empty(cls, fields: Collection[str], rows: int) -> StoredRows:
        """Return what an empty catalogue has."""
        nowhere = np.full((rows, 3), -1, np.int32)
        content = np.zeros((rows, 2), np.uint64)
        return cls((), dict.fromkeys(fields, nowhere), content, np.zeros(rows, np.bool_), {})

    def shard(self, rows: range) -> StoredRows:
        """Return what is stored of consecutive rows."""
        part = slice(rows.start, rows.stop)
        return replace(
            self,
            fields={name: held[part] for name, held in self.fields.items()},
            content=self.content[part],
            known=self.known[part],
            holes={row - rows.start: self.holes[row] for row in rows if row in self.holes},
            labels=None if self.labels is None else self.labels[part],
            parts={start: content[part] for start, content in self.parts.items()},
            others=[other.shard(rows) for other in self.others if other.content[part].any()],
        )

    def without(self, place: tuple[str, str], shard: int) -> StoredRows:
        """Return the rows without those of one object of an array."""
        fields = dict(self.fields)
        for number, array in enumerate(self.arrays):
            rows = array.rows_of(shard)
            for name, held in fields.items() if array.place == place else ():
                gone = (held[:, 0] == number) & (held[:, 1] >= rows.start)
                gone &= held[:, 1] < rows.stop
                fields[name] = np.where(gone[:, np.newaxis], np.int32(-1), held)
        others = [other.without(place, shard) for other in self.others]
        return replace(self, fields=fields, others=others)

    @functools.cached_property
    def contents(self) -> list[str]:
        """XXH3-128 (hex) of each row's sample, empty for none."""
        return digests_of(self.content)

    @functools.cached_property
    def has_parts(self) -> bool:
        """True if samples have parts of other contents than their own."""
        return not all(np.array_equal(part, self.content) for part in self.parts.values())

    @functools.cached_property
    def parts_of_rows(self) -> list[dict[str, str]]:
        """Part -> XXH3-128 (hex), zeros for none, of each row's sample."""
        columns = [[text or "0" * 32 for text in digests_of(part)] for part in self.parts.values()]
        return [dict(zip(self.parts, row, strict=True)) for row in zip(*columns, strict=True)]

    @functools.cached_property
    def has_rows(self) -> np.ndarray:
        """Rows of which some field is stored: (rows,) bool."""
        stored = [has_row(held) for held in self.fields.values()]
        stored += [other.has_rows for other in self.others]
        return np.asarray(np.logical_or.reduce(stored))

    @functools.cached_property
    def used(self) -> list[StoredArray]:
        """Arrays that rows are taken from; that of most rows first."""
        numbers = np.concatenate([held[has_row(held), 0] for held in self.fields.values()])
        counts = np.bincount(numbers, minlength=len(self.arrays))
        order = np.argsort(-counts, kind="stable")
        return [self.arrays[number] for number in order.tolist() if counts[number]]

    @property
    def versions(self) -> list[str]:
        """Ids of the versions that rows are taken from; that of most rows first."""
        return list(dict.fromkeys(array.folder.name for array in self.used))

    @property
    def shapes(self) -> dict[str, RowShape]:
        """Row shapes of the fields that have rows with all their ops: these shapes stay."""
        shapes = {}
        for name, held in self.fields.items():
            numbers = np.unique(held[has_row(held), 0]).tolist()
            own = [self.arrays[number] for number in numbers if self.arrays[number].finished]
            if own:
                shapes[name] = min(own, key=self.used.index).shape
        return shapes


def has_row(held: Held) -> np.ndarray:
    """Return where a row is stored that is no hole: (rows,) bool."""
    return np.asarray((held[:, 0] >= 0) & (held[:, 2] == 0))


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredSamples:
    """The samples of a version, beside those that are listed.

    Attributes
    ----------
    content
        (rows, 2) uint64 halves of the content of each row's sample; zero where it is unknown.
    rows
        Row of each listed sample's key; -1 for none, or an unfinished one: (listed,) int64.
    arrays
        Field -> arrays with its rows.
    parts
        Part of samples -> its contents, as `content`.
    """

    version: Version
    attributes: Attributes
    table: RowTable
    content: np.ndarray
    rows: np.ndarray
    arrays: Mapping[str, Sequence[StoredArray]]
    parts: Mapping[str, np.ndarray]

    @functools.cached_property
    def is_hole(self) -> np.ndarray:
        """(rows,) bool."""
        holes = np.zeros(len(self.table), np.bool_)
        holes[list(self.version.holes)] = True
        return holes

    @functools.cached_property
    def failures(self) -> list[tuple[int, Hole]]:
        """Listed samples that failed, and how."""
        places = np.flatnonzero(self.at_keys(self.is_hole, False))
        holes = self.version.holes
        pairs = ((row, holes[self.rows[row]][1]) for row in places.tolist())
        return [(row, hole) for row, hole in pairs if hole != REMOVED]

    def at_keys(self, of_rows: np.ndarray, unknown: object) -> np.ndarray:
        """Return values of rows for the listed samples of the same keys."""
        found: np.ndarray = of_rows[self.rows]
        found[self.rows < 0] = unknown
        return found

    def rows_with(
        self,
        parts: Mapping[str, np.ndarray],
        starts: Sequence[str],
        usable: np.ndarray,
        *,
        same_keys: bool,
    ) -> np.ndarray:
        """Find usable rows of the same contents of some parts: (listed,) int64, -1 for none.

        Of several it is the one in the same place, else the one of the same key.

        Parameters
        ----------
        parts
            Part of listed samples -> its contents.
        usable
            (rows,) bool.
        same_keys
            Only rows of the same keys.
        """
        own, content = (
            of[starts[0]] if len(starts) == 1 else np.hstack([of[start] for start in starts])
            for of in (self.parts, parts)
        )
        found, left = np.full(len(content), -1), np.flatnonzero(_is_known(content))

        def take(rows: np.ndarray) -> None:
            nonlocal left
            same = rows >= 0
            same[same] = (own[rows[same]] == content[left[same]]).all(1)
            same[same] = usable[rows[same]]
            found[left[same]] = rows[same]
            left = left[~same]

        if same_keys:
            take(self.rows[left])
            return found
        take(np.where(left < len(self.table), left, -1))
        take(self.rows[left])
        if len(left):
            # A content of which only the first half is found is taken for unknown.
            ordered = np.flatnonzero(usable & _is_known(own))
            ordered = ordered[np.argsort(own[ordered, 0], kind="stable")]
            at = np.searchsorted(own[ordered, 0], content[left, 0])
            take(np.append(ordered, -1)[at])
        return found


def _is_known(content: np.ndarray) -> np.ndarray:
    is_there = content[:, ::2] | content[:, 1::2]
    return np.asarray(is_there.astype(np.bool_).all(1))


@dataclass(frozen=True)
class Catalogue:
    """Rows that the versions of a store hold of the samples of a listing.

    Attributes
    ----------
    versions
        Those that have rows of some field, or samples that ended workers, the latest first; then
        unfinished ones.
    listed
        Contents and labels of the listed samples, without places of rows.
    retries
        Samples that failed are not known to fail.
    lost
        Places of arrays, and shards, that are not what they were: no rows are taken of these.
    same_keys
        Rows are looked up by the keys of samples alone, as contents are guessed by these.
    """

    spec: VersionSpec
    versions: Sequence[StoredSamples]
    listed: StoredRows
    retries: bool = False
    lost: Collection[tuple[tuple[str, str], int]] = ()
    same_keys: bool = False

    @classmethod
    def empty(cls, spec: VersionSpec) -> Catalogue:
        """Return a catalogue of nothing."""
        return cls(spec, (), StoredRows.empty((), len(spec.table)))

    @classmethod
    def read(
        cls,
        store: Folder,
        spec: VersionSpec,
        *,
        retries: bool = False,
        pinned: str | None = None,
        labels_with_samples: bool = False,
        made: str | None = None,
    ) -> Catalogue:
        """Read what the versions of a store have of the rows of a version.

        Parameters
        ----------
        pinned
            Id of a version whose samples these are, whatever they are listed as.
        labels_with_samples
            Whether labels are known only with samples: then so are these contents.
        made
            Id of the version that is made: no rows are taken of it.
        """
        stored = [*stored_versions(store, begun=True)]
        if not stored:
            return cls.empty(spec)
        versions = [*_samples(stored, spec, made)]
        listed = _contents(spec, versions, pinned, labels_with_samples)
        if (versions or pinned) and not (listed.known | spec.table.is_removed).all():
            # Versions that have no rows for the recipe know contents, too.
            order = {each.folder.name: number for number, each in enumerate(stored)}
            others = order.keys() - {samples.version.id for samples in versions}
            rest = (each for each in stored if each.folder.name in others)
            every = [*versions, *_samples(rest, spec, made, of_source=True)]
            every.sort(key=lambda samples: order[samples.version.id])
            listed = _contents(spec, every, pinned, labels_with_samples)
        return cls(spec, versions, listed, retries or pinned is not None)

    @functools.cached_property
    def arrays(self) -> dict[str, list[tuple[int, StoredArray]]]:
        """Field -> its arrays, the best first, each with the number of its version."""
        return {
            name: sorted(
                (
                    (number, array)
                    for number, samples in enumerate(self.versions)
                    for array in samples.arrays.get(name, ())
                ),
                key=lambda pair: (-pair[1].applied, not pair[1].encoded, pair[0]),
            )
            for name in self.spec.recipe.fields
        }

    @functools.cached_property
    def failed(self) -> frozenset[int]:
        """Rows whose samples failed in the latest version that has them."""
        failed: set[int] = set()
        seen = self.spec.table.is_removed
        for samples in self.versions:
            failed.update(row for row, _ in samples.failures if not seen[row])
            seen |= samples.rows >= 0
        return frozenset(failed)

    @functools.cached_property
    def holes(self) -> dict[int, Hole]:
        """Row -> hole, where a version has a hole for a sample of the same key and content, which
        is due to the ops of these fields alone; or ended workers, without functions of the user."""
        holes: dict[int, Hole] = {}
        for samples in () if self.retries else self.versions:
            arrays = [array for of_field in samples.arrays.values() for array in of_field]
            whole = {name for name, of in samples.arrays.items() if any(a.finished for a in of)}
            others = samples.attributes.fields.keys() - {array.name for array in arrays}
            # Else it may be due to a field, or a refusal, that the recipe has no more.
            due = whole == self.spec.recipe.fields.keys() and not others
            due = due and not any(array.refuses_more for array in arrays)
            by_library = not (self.spec.recipe.functions or samples.attributes.recipe.functions)
            of_keys = samples.at_keys(samples.content, 0)
            same = _is_known(of_keys) & (of_keys == self.listed.content).all(1)
            for row, hole in samples.failures:
                if same[row] and (due or (by_library and hole.ended_worker)):
                    holes.setdefault(row, hole)
        return holes

    @functools.cached_property
    def _others(self) -> list[Catalogue]:
        return [replace(self, listed=other, same_keys=True) for other in self.listed.others]

    @functools.cached_property
    def _found(self) -> dict[tuple[object, ...], np.ndarray]:
        return {}

    def stored_nbytes(self, name: str) -> float | None:
        """Mean stored bytes of a row of a field with all ops; None if no version has such."""
        for number, array in self.arrays[name]:
            if array.finished:
                samples = self.versions[number]
                leaves = samples.version.shard_leaves(array.name)
                rows = (
                    array.rows
                    if samples.version.committed
                    else int(_is_known(samples.content).sum())
                )
                return sum(leaf.size for leaf in leaves if leaf.xxh3) / max(1, rows)
        return None

    def find(
        self, rows_per_shard: int = 0, shapes: Mapping[str, RowShape] | None = None
    ) -> StoredRows:
        """Find the best stored row for each row of each field, of these shapes, or of any.

        Those with most ops are best, and among these the ones with the codec of the field, those of
        whole shards that can be linked, those in the same place, and those of the latest version.
        """
        arrays = [pair for pairs in self.arrays.values() for pair in pairs]
        numbers = {id(array): number for number, (_, array) in enumerate(arrays)}
        fields, places = {}, np.arange(len(self.listed.known))
        for name, pairs in self.arrays.items():
            held = fields[name] = np.full((len(places), 3), -1, np.int32)
            fitting = (
                pair
                for pair in pairs
                if shapes is None or not pair[1].finished or pair[1].shape == shapes[name]
            )
            for _, alike in itertools.groupby(fitting, lambda p: (p[1].applied, p[1].encoded)):
                group = list(alike)
                rows_of = [self._rows_for(name, number, array) for number, array in group]
                valid = np.logical_or.reduce([rows >= 0 for rows in rows_of])
                ways = []
                for (number, array), rows in zip(group, rows_of, strict=True):
                    is_hole = self._is_hole_of(number) & ~valid
                    is_hole &= self._is_there(array, len(places))
                    same = (rows == places) | is_hole
                    whole = _in_whole_shards(array, rows_per_shard, same)
                    at = numbers[id(array)], is_hole
                    ways.append([(*at, whole, places), (*at, same, places), (*at, rows >= 0, rows)])
                for at, is_hole, some, taken in itertools.chain(*zip(*ways, strict=True)):
                    new = some & (held[:, 0] < 0)
                    held[new, 0], held[new, 1], held[new, 2] = at, taken[new], is_hole[new]
        made = np.logical_and.reduce([has_row(held) for held in fields.values()])
        holes = {row: hole for row, hole in self.holes.items() if not made[row]}
        for held in fields.values():  # of holes, only their own rows are taken
            other = [row for row in holes if held[row, 2] == 0]
            held[other] = -1
        holes |= dict.fromkeys(self.spec.table.removed, REMOVED)
        known = self.listed.known | self.spec.table.is_removed
        versions = np.array([*(n for n, _ in arrays), -1])
        declared = self.spec.recipe.fields
        for pair in (*mask_pairs(declared), *crop_pairs(declared)):
            mask, image = (fields[name] for name in pair)
            # Of a mask and an image that no build saw together the sample is read, to compare them.
            apart = versions[mask[:, 0]] != versions[image[:, 0]]
            apart |= mask[:, 1] != image[:, 1]
            known &= ~(apart & has_row(mask) & has_row(image))
        return replace(
            self.listed,
            arrays=[array for _, array in arrays],
            fields=fields,
            known=known,
            holes=holes,
            starts={n: [*starts_of(n, f)] for n, f in declared.items()},
            others=[other.find(rows_per_shard, shapes) for other in self._others],
        )

    def _rows_for(self, name: str, number: int, array: StoredArray) -> np.ndarray:
        """Find the rows of a version for a field: (listed,) int64, -1 for none."""
        declared = self.spec.recipe.fields[name]
        is_random = any(op.is_random for op in declared.ops[: array.applied])
        same_keys = is_random or self.same_keys
        starts = (*starts_of(name, declared),)
        key = number, starts, same_keys, array.place if self.lost else None
        if key not in self._found:
            samples = self.versions[number]
            usable = ~samples.is_hole & self._is_there(array, len(samples.table))
            self._found[key] = samples.rows_with(
                self.listed.parts, starts, usable, same_keys=same_keys
            )
        return self._found[key]

    def _is_there(self, array: StoredArray, rows: int) -> np.ndarray:
        lost = [shard for place, shard in self.lost if place == array.place]
        return ~np.isin(np.arange(rows) // array.rows_per_shard, lost)

    def _is_hole_of(self, number: int) -> np.ndarray:
        """Return where a version has a hole in the same place, of the same or a removed sample."""
        samples, alike = self.versions[number], self.spec.table.is_removed
        both, content = min(len(alike), len(samples.table)), self.listed.content
        same = (samples.content[:both] == content[:both]).all(1)
        alike[:both] |= same & _is_known(content[:both])
        alike[:both] &= samples.is_hole[:both]
        alike[both:] = False
        return alike


def _in_whole_shards(array: StoredArray, rows_per_shard: int, same: np.ndarray) -> np.ndarray:
    """Return the rows of shards that an array has as they are to be: (rows,) bool."""
    rows = len(same)
    if array.rows_per_shard != rows_per_shard:
        return np.zeros(rows, np.bool_)
    starts = np.arange(0, rows, rows_per_shard)
    ends = np.minimum(starts + rows_per_shard, rows)
    whole = np.logical_and.reduceat(same, starts)
    whole &= ends == np.minimum(starts + rows_per_shard, array.rows)
    return np.repeat(whole, ends - starts)


def _samples(
    versions: Iterable[StoredVersion],
    spec: VersionSpec,
    made: str | None,
    *,
    of_source: bool = False,
) -> Iterator[StoredSamples]:
    """Read the versions that have rows of some field, or samples that ended workers: the committed,
    the latest first, then the finished shards of those that were begun; damaged ones are left out.

    Parameters
    ----------
    of_source
        Also the other versions of the source.
    """
    wanted = _wanted_digests(spec)
    for stored in versions:
        attributes = stored.attributes
        matches = match_arrays(spec.recipe, wanted, stored.folder, attributes)
        is_wanted = bool(matches) or (of_source and attributes.source == spec.table.source)
        if not (is_wanted or attributes.holes) or stored.folder.name == made:
            continue
        with contextlib.suppress(*UNREADABLE, ValueError):  # `verify` says why
            version = stored.version
            ended = any(hole.ended_worker for _, hole in version.holes.values())
            if not (is_wanted or ended):
                continue
            table, content, of_parts, finished = stored.read_rows()
            rows, starts = table.keys.find(spec.table.keys), all_starts(attributes.recipe)
            rows[~finished[rows]] = -1
            parts = dict(zip(starts, of_parts or [content] * len(starts), strict=True))
            samples = StoredSamples(version, attributes, table, content, rows, matches, parts)
            for array in (array for of_field in matches.values() for array in of_field):
                version.shard_leaves(array.name)
                if array.shape.ragged:
                    version.row_shapes(array.name)
            samples.is_hole  # noqa: B018 - these are read here, where damage is expected
            yield samples


MOST_GUESSES = 4
"""Contents that a sample may have, at most: each costs as much memory as the first."""


def _contents(
    spec: VersionSpec, versions: Sequence[StoredSamples], pinned: str | None, with_labels: bool
) -> StoredRows:
    """Return the contents of the listed samples and of their parts, known or guessed, and the
    labels that came with samples."""
    table = spec.table
    content = np.zeros((len(table), 2), np.uint64)
    known = np.zeros(len(table), np.bool_)
    labels = np.full(len(table), -1, np.int64) if with_labels else None
    for samples in versions:
        of_keys = samples.at_keys(samples.content, 0)
        same = _is_known(of_keys) & ~known & ~table.is_removed
        if with_labels and not _has_labels(samples, spec):
            same[:] = False
        if pinned is None:
            rows = np.flatnonzero(same)
            same[rows] = table.unchanged(samples.table, rows, samples.rows[rows])
        elif samples.version.folder.name != pinned:
            same[:] = False
        content[same], known[same] = of_keys[same], True
        if labels is not None:
            labels[same] = samples.at_keys(np.asarray(samples.version.labels), -1)[same]
    by_source = sorted(versions, key=lambda samples: samples.table.source != table.source)
    contents = [content]
    for samples in by_source:
        rows = np.flatnonzero(~known & ~table.is_removed & (samples.rows >= 0))
        own = samples.content[samples.rows[rows]]
        other = _is_known(own)
        for guesses in contents:
            rows, own = rows[other], own[other]
            blank = ~_is_known(guesses[rows])
            guesses[rows[blank]] = own[blank]
            other = (guesses[rows] != own).any(1)
        if other.any() and len(contents) < MOST_GUESSES:
            contents.append(np.zeros_like(content))
            contents[-1][rows[other]] = own[other]
    parts, *parts_of_others = (_parts(spec, by_source, guesses, known) for guesses in contents)
    new = np.flatnonzero(~_is_known(content) & ~table.is_removed & (table.sizes >= 0))
    if len(new):
        _guess_moved_or_copied(table, by_source, content, parts, new)
    others = [
        StoredRows((), {}, guesses, np.zeros_like(known), {}, parts=of_parts)
        for guesses, of_parts in zip(contents[1:], parts_of_others, strict=True)
    ]
    return StoredRows((), {}, content, known, {}, labels, parts, others=others)


def _parts(
    spec: VersionSpec, versions: Sequence[StoredSamples], content: np.ndarray, known: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the contents of parts of samples that have these contents; where a part is a guess,
    the sample is `known` no more."""
    parts = {start: np.zeros_like(content) for start in all_starts(spec.recipe)}
    for is_guess, samples in itertools.product((False, True), versions):
        for start in parts.keys() & samples.parts.keys():
            blank = _is_known(content) & ~_is_known(parts[start])
            rows = np.flatnonzero(blank & (samples.rows >= 0))
            if not is_guess:
                alike = (samples.content[samples.rows[rows]] == content[rows]).all(1)
                rows = rows[alike]
            own = samples.parts[start][samples.rows[rows]]
            new = _is_known(own)
            parts[start][rows[new]] = own[new]
            known[rows[new]] &= not is_guess
    return parts


def _guess_moved_or_copied(
    table: RowTable,
    versions: Sequence[StoredSamples],
    content: np.ndarray,
    parts: Mapping[str, np.ndarray],
    rows: np.ndarray,
) -> None:
    """Guess contents of samples with new keys: of one that is gone, by the end of its key and its
    size, else of one of its size whose time no other content has, as of a file of another name."""
    names, sizes, mtimes = names_of(table, rows), table.sizes[rows], table.mtimes[rows]

    def take(samples: StoredSamples, found: np.ndarray, places: np.ndarray) -> None:
        content[rows[found]] = samples.content[places]
        for start in parts.keys() & samples.parts.keys():
            parts[start][rows[found]] = samples.parts[start][places]

    for samples in reversed(versions):
        times = samples.table.mtimes
        places = np.flatnonzero(_is_known(samples.content) & (times > 0))
        places = places[np.argsort(times[places], kind="stable")]
        starts = np.flatnonzero(np.diff(times[places], prepend=0))
        if not len(starts):
            continue
        firsts = np.repeat(places[starts], np.diff(starts, append=len(places)))
        alike = (samples.content[places] == samples.content[firsts]).all(1)
        places = places[starts][np.logical_and.reduceat(alike, starts)]
        if len(places):
            at = places[np.searchsorted(times[places], mtimes).clip(max=len(places) - 1)]
            found = (times[at] == mtimes) & (samples.table.sizes[at] == sizes)
            take(samples, found, at[found])
    for samples in reversed(versions):
        gone = _is_known(samples.content)
        gone[samples.rows[(samples.rows >= 0) & ~table.is_removed]] = False
        places = np.flatnonzero(gone)
        at = names_of(samples.table, places).find(names)
        take(samples, at >= 0, places[at[at >= 0]])


def names_of(table: RowTable, rows: np.ndarray) -> Texts:
    """Return names and sizes of samples, which stay if they are moved to another folder."""
    import pyarrow.compute as pc

    names = pc.replace_substring_regex(table.keys.take(rows).plain, "^.*/", "")
    return joined_texts([Texts(names), Texts(arrow_of(table.sizes[rows]))], "/")


def _has_labels(samples: StoredSamples, spec: VersionSpec) -> bool:
    """Return whether labels that came with the samples are those that they would bring now.

    A name among other classes is another number.
    """
    before = samples.attributes.recipe.by_array()
    parts = [{(field_of(n), f.input) for n, f in r.fields.items()} for r in (before, spec.recipe)]
    classes = tuple(samples.table.classes)
    numbered = tuple(spec.table.classes[: len(classes)]) == classes
    return samples.table.labels_with_samples and parts[0] == parts[1] and numbered


# --- arrays of the same ops ---------------------------------------------------------------------


def _wanted_digests(spec: VersionSpec) -> dict[str, dict[str, int]]:
    """Return field -> digest of its first ops -> their number, the most first."""
    recipe = spec.recipe
    return {
        # What a field without ops stores need not be what ops would have been given.
        name: {ops_digest(recipe, name, count, spec.decides): count for count in _counts(declared)}
        for name, declared in recipe.fields.items()
    }


def _counts(field: Field) -> Sequence[int]:
    """Return the numbers of first ops whose stored output can be a row, or be made one."""
    # Whether a file is kept, what pixels lose, and what a picture shows, is known by samples alone.
    if isinstance(field.stored_as, LossyCodec) or field.follow is not None:
        return [len(field.ops)]
    return range(len(field.ops), 0, -1) or [0]


def match_arrays(
    recipe: Recipe, wanted: Mapping[str, Mapping[str, int]], folder: Folder, attributes: Attributes
) -> dict[str, list[StoredArray]]:
    """Find the arrays of a version that have rows of each field of a recipe, with some ops.

    Parameters
    ----------
    wanted
        Field -> digest of its first ops -> their number.
    """
    before = attributes.recipe.by_array().fields
    matches: dict[str, list[StoredArray]] = {}
    for name, declared in recipe.fields.items():
        refuses = _refuses_dim(declared)
        for array, stored in attributes.fields.items():
            count = wanted[name].get(stored.recipe) if stored.recipe else None
            refused = _refuses_dim(before[array])
            if count is None or (refuses and not refused):
                continue
            finished = count == len(declared.ops)
            found = StoredArray(
                folder=folder,
                name=array,
                shape=stored.row,
                rows=attributes.rows,
                rows_per_shard=attributes.rows_per_shard,
                applied=count,
                finished=finished,
                encoded=finished and declared.stored_as == before[array].stored_as,
                refuses_more=refused and not refuses,
            )
            matches.setdefault(name, []).append(found)
    return matches


def _refuses_dim(field: Field) -> bool:
    """Return True if dim images of 16 bits become holes, as the field does not state the bits."""
    return field.decode is not None and field.decode.bits is None
