"""Compare recipes and samples: of two versions, and of a version and a build to come."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache.messages import as_text
from precache.recipe.ops import Op
from precache.recipe.recipe import Field, Recipe
from precache.recipe.variants import variants_of
from precache.storage.open import StorageOptions
from precache.store.columns import find, strings
from precache.store.commit_log import short
from precache.store.json_documents import Attributes
from precache.store.labels import label_texts
from precache.store.open import open_version
from precache.store.row_table import RowTable
from precache.store.version import Version

EXAMPLES = 5
"""Most keys that are named of each kind of change."""


# --- results ------------------------------------------------------------------------------------

_KINDS = {
    "added": "added",
    "removed": "removed",
    "changed": "with changed bytes",
    "touched": "with the same bytes and a new time",
    "relabelled": "with another label",
    "failed": "that became holes",
    "mended": "that are no longer holes",
    "moved": "in other rows",
}


@dataclass(frozen=True)
class Change:
    """A value that differs; None on the side that has none. `str` of it describes it."""

    what: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.what}: added {_value(self.after)}"
        if self.after is None:
            return f"{self.what}: removed {_value(self.before)}"
        return f"{self.what}: {_value(self.before)} → {_value(self.after)}"


def _value(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class KeyChange:
    """Number of samples that changed in some way, and the first few of them by key."""

    count: int
    examples: tuple[str, ...]

    def text(self, words: str) -> str:
        """Describe the samples: their number, what `words` say of them, and the first keys."""
        rest = self.count - len(self.examples)
        more = f" … and {rest:,} more" if rest else ""
        return f"{self.count:,} {words}: {', '.join(self.examples)}{more}"


@dataclass(frozen=True)
class SampleChanges:
    """Changes of samples, by key.

    Attributes
    ----------
    added, removed
        Samples that only one version has.
    changed
        Samples of other bytes.
    touched
        Samples of the same bytes at another time or entity tag: copied files.
    relabelled
        Samples with another label: the names of classes, or numbers.
    failed, mended
        Samples that became holes, and that are holes no more.
    moved
        Samples in another row.
    """

    added: KeyChange
    removed: KeyChange
    changed: KeyChange
    touched: KeyChange
    relabelled: KeyChange
    failed: KeyChange
    mended: KeyChange
    moved: KeyChange


@dataclass(frozen=True)
class Difference:
    """All differences from one version to another.

    Attributes
    ----------
    before, after
        Their ids.
    recipe, layout, libraries
        Values of the recipe; of fields, rows and shards as stored; versions of libraries.
    classes_added, classes_removed, classes_renumbered
        Names.
    """

    before: str
    after: str
    recipe: tuple[Change, ...]
    layout: tuple[Change, ...]
    samples: SampleChanges
    classes_added: tuple[str, ...]
    classes_removed: tuple[str, ...]
    classes_renumbered: tuple[str, ...]
    libraries: tuple[Change, ...]

    def __str__(self) -> str:
        classes = {
            "added": self.classes_added,
            "removed": self.classes_removed,
            "renumbered": self.classes_renumbered,
        }
        samples = {words: getattr(self.samples, kind) for kind, words in _KINDS.items()}
        parts = {
            "recipe": [str(change) for change in self.recipe],
            "layout": [str(change) for change in self.layout],
            "samples": [change.text(words) for words, change in samples.items() if change.count],
            "classes": [f"{words}: {', '.join(n)}" for words, n in classes.items() if n],
            "libraries": [str(change) for change in self.libraries],
        }
        lines = [f"changes from {short(self.before, 12)} to {short(self.after, 12)}"]
        for heading, part in parts.items():
            if part:
                lines += [heading, *(f"  {line}" for line in part)]
        return as_text(lines if any(parts.values()) else [*lines, "no differences"])


# --- what is compared ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples in row order, by column; without removed ones, unless nothing is listed.

    Attributes
    ----------
    keys
        An array of `columns.STRINGS` if samples are listed.
    rows
        Row of each sample; int64.
    labels, classes
        As of a version.
    valid
        False for holes; bool.
    listed
        Sizes, times, and etags (`columns.STRINGS`) that their source lists; None where rows, and
        the raw samples in them, are known to be those of the other version.
    source
        Digest of the source's place.
    content
        XXH3-128 of the raw samples, zeros where one was not fetched: (n, 2) uint64; None if no
        sample was.
    """

    keys: Any
    rows: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    valid: np.ndarray
    listed: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    source: str = ""
    content: np.ndarray | None = None


def diff(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    storage_options: StorageOptions = None,
) -> Difference:
    """Compare two versions, of one store or of two.

    Parameters
    ----------
    before, after
        ``STORE@prefix``, or a store, which means its current version.
    storage_options
        As `open` takes them.

    Raises
    ------
    StoreError
        There is no such version, or other software wrote it.
    """
    opened = [open_version(uri, storage_options) for uri in (before, after)]
    one, other = (version.attributes for version in opened)
    same_rows = (one.rows_digest, one.rows) == (other.rows_digest, other.rows)
    samples = [_samples(version, same_rows=same_rows) for version in opened]
    return compare(one, other, samples[0], samples[1])


def _samples(version: Version, *, same_rows: bool) -> Samples:
    labels, valid, classes = version.labels, version.valid, version.classes
    if same_rows:
        rows = np.arange(version.rows)
        return Samples(keys=version.keys, rows=rows, labels=labels, classes=classes, valid=valid)
    rows = np.flatnonzero(~version.row_column("removed"))
    sizes, mtimes = (version.row_column(name)[rows] for name in ("size", "mtime_ns"))
    keys, etags = (strings(version.row_texts(name))[rows] for name in ("key", "rows/etag"))
    return Samples(
        keys=keys,
        rows=rows,
        labels=labels[rows],
        classes=classes,
        valid=valid[rows],
        listed=(sizes, mtimes, etags),
        source=version.attributes.source,
        content=version.contents()[rows],
    )


def listed_samples(table: RowTable) -> Samples:
    """Samples of a row table as their source lists them, none of them fetched."""
    rows = np.flatnonzero(~table.is_removed)
    keys, etags = (strings(column.take(rows).parts()) for column in (table.keys, table.etags))
    return Samples(
        keys=keys,
        rows=rows,
        labels=table.labels[rows],
        classes=table.classes,
        valid=np.ones(len(rows), np.bool_),
        listed=(table.sizes[rows], table.mtimes[rows], etags),
        source=table.source,
    )


# --- comparing ----------------------------------------------------------------------------------


def compare(one: Attributes, other: Attributes, before: Samples, after: Samples) -> Difference:
    """Compare two versions by their attributes and samples."""
    recipe = compare_recipes(one.recipe, other.recipe)
    if not recipe and one.fingerprint != other.fingerprint:
        # The same recipe, with other decoders or other code of its functions.
        recipe.append(Change("fingerprint", one.fingerprint, other.fingerprint))
    common = set(one.classes) & set(other.classes)
    return Difference(
        before=one.version,
        after=other.version,
        recipe=tuple(recipe),
        layout=tuple(_values(_layout(one), _layout(other))),
        samples=compare_samples(before, after),
        classes_added=tuple(name for name in other.classes if name not in common),
        classes_removed=tuple(name for name in one.classes if name not in common),
        classes_renumbered=tuple(
            name
            for number, name in enumerate(one.classes)
            if name in common and other.classes.index(name) != number
        ),
        libraries=tuple(_values(one.libraries, other.libraries)),
    )


def _layout(attributes: Attributes) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "rows": attributes.rows,
        "holes": attributes.holes,
        "rows per shard": attributes.rows_per_shard,
        "labels": attributes.label_kind,
    }
    for name, arrays in variants_of(attributes.fields).items():
        field = attributes.fields[arrays[0]]
        kind = attributes.declared[arrays[0]].kind
        shape = list(field.shape) if kind is None else ["n", *field.shape[1:]]
        layout[f"{name} shape"] = "of each row" if field.ragged and kind is None else shape
        layout[f"{name} dtype"] = field.dtype
        layout[f"{name} bytes stored"] = sum(attributes.fields[array].stored for array in arrays)
    return layout


def _values(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield Change(name, one.get(name), other.get(name))


# --- recipes ------------------------------------------------------------------------------------


def compare_recipes(one: Recipe, other: Recipe) -> list[Change]:
    """List the changes from one recipe to another, ops as calls and numbered from 1.

    Ops are paired in their order by kind, so that one that is put between two others is the only
    change.
    """
    changes: list[Change] = []
    for name in dict.fromkeys([*one.fields, *other.fields]):
        before, after = one.fields.get(name), other.fields.get(name)
        if before is None or after is None:
            texts = (field and " → ".join(map(str, field.ops)) for field in (before, after))
            changes.append(Change(f"field {name}", *texts))
        else:
            changes += _op_changes(name, before.own_ops, after.own_ops)
            changes += _parameter_changes(name, _settings(before), _settings(after))
    return [*changes, *_values({"seed": one.seed}, {"seed": other.seed})]


def _op_changes(field: str, before: Sequence[Op], after: Sequence[Op]) -> Iterator[Change]:
    """Compare ops; the number of one is that in `after`, unless it was removed."""
    old_kinds, new_kinds = (
        [(op.op, getattr(op, "function", "")) for op in ops] for ops in (before, after)
    )
    matcher = difflib.SequenceMatcher(None, old_kinds, new_kinds, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            for number, (old, new) in enumerate(zip(before[i:i_end], after[j:], strict=False), j):
                parameters = (op.model_dump(mode="json") for op in (old, new))
                yield from _parameter_changes(f"{field} op {number + 1} {new.op}", *parameters)
            continue
        for number, op in enumerate(before[i:i_end], i):
            yield Change(f"{field} op {number + 1}", str(op), None)
        for number, op in enumerate(after[j:j_end], j):
            yield Change(f"{field} op {number + 1}", None, str(op))


def _settings(field: Field) -> dict[str, Any]:
    """Return a field as plain data without its ops, with settings left out by default."""
    settings = {"variants": field.variants, "first_variant": field.first_variant}
    return {**field.model_dump(mode="json", exclude={"ops"}), **settings}


def _parameter_changes(
    what: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[Change]:
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _parameter_changes(f"{what} {name}", old, new)
        elif old != new:
            yield Change(f"{what} {name}", old, new)


# --- samples ------------------------------------------------------------------------------------


def compare_samples(before: Samples, after: Samples, *, by_key: bool = False) -> SampleChanges:
    """Compare samples.

    Parameters
    ----------
    by_key
        The first keys of each kind of change are those in alphabetical order, instead of row order.
    """
    same_rows = before.listed is None
    found = np.arange(len(after.keys)) if same_rows else find(before.keys, after.keys)
    new = np.flatnonzero(found >= 0)
    old = found[new]
    removed = np.ones(len(before.keys), np.bool_)
    removed[old] = False

    def changes(
        places: np.ndarray, side: Samples = after, describe: Callable[[int], str] = lambda place: ""
    ) -> KeyChange:
        if by_key:
            places = places[np.argsort(side.keys[places], kind="stable")]
        first = places[:EXAMPLES].tolist()
        return KeyChange(len(places), tuple(side.keys[place] + describe(place) for place in first))

    def labels(place: int) -> str:
        one, other = (
            label_texts(side.labels[at : at + 1], side.classes)[0] or "none"
            for side, at in ((before, found[place]), (after, place))
        )
        return f": {one} → {other}"

    changed, touched = _raw_changes(before, after, old, new)
    is_valid, hole_changed = after.valid[new], before.valid[old] != after.valid[new]
    return SampleChanges(
        added=changes(np.flatnonzero(found < 0)),
        removed=changes(np.flatnonzero(removed), before),
        changed=changes(new[changed]),
        touched=changes(new[touched]),
        relabelled=changes(new[_relabelled(before, after, old, new)], describe=labels),
        failed=changes(new[hole_changed & ~is_valid]),
        mended=changes(new[hole_changed & is_valid]),
        moved=changes(new[before.rows[old] != after.rows[new]]),
    )


def _relabelled(before: Samples, after: Samples, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Compare labels by their texts: (n,) bool. Parameters are as in `_raw_changes`."""
    one, other = before.labels[old], after.labels[new]
    if one.dtype.kind == other.dtype.kind == "f":
        return np.asarray((one != other) & ~(np.isnan(one) & np.isnan(other)))
    numbers = dict[str, int]()

    def numbered(labels: np.ndarray, classes: tuple[str, ...]) -> np.ndarray:
        """Number the different texts, of which there are few."""
        values = labels
        if labels.ndim == 2:  # a row is one value
            values = np.ascontiguousarray(labels).view(f"V{labels.shape[1]}")[:, 0]
        _, first, places = np.unique(values, return_index=True, return_inverse=True)
        texts = label_texts(labels[first], classes)
        of_texts = [numbers.setdefault(text, len(numbers)) for text in texts]
        return np.array(of_texts, np.int64)[places]

    return np.asarray(numbered(one, before.classes) != numbered(other, after.classes))


def _raw_changes(
    before: Samples, after: Samples, old: np.ndarray, new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find common samples of other bytes, and those of the same bytes that are listed otherwise.

    Samples that were not fetched are compared by identity.

    Parameters
    ----------
    old, new
        Places of the common samples, pair by pair.

    Returns
    -------
    tuple[np.ndarray, np.ndarray]
        Of each common sample, bool.
    """
    none = np.zeros(len(new), np.bool_)
    if before.listed is None or after.listed is None:
        return none, none
    pairs = zip(before.listed, after.listed, strict=True)
    alike = np.logical_and.reduce([one[old] == other[new] for one, other in pairs])
    alike &= before.source == after.source
    _, mtimes, etags = before.listed
    # Without a time or etag, as of web pages, no sample is known to be the same.
    changed = ~(alike & ((mtimes >= 0) | (etags != ""))[old])
    if before.content is None or after.content is None:
        return changed, none
    was, now = before.content[old], after.content[new]
    fetched = was.any(axis=1) & now.any(axis=1)
    changed = np.where(fetched, (was != now).any(axis=1), changed)
    return changed, fetched & ~changed & ~alike
