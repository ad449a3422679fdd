"""What differs between two versions: recipe, samples, classes, libraries."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from precache.errors import StoreError, UsageError
from precache.recipe.recipe import Field, Recipe, op_texts
from precache.recipe.variants import variants_of
from precache.storage.open import StorageOptions
from precache.store.documents import Attributes
from precache.store.open import open_version
from precache.store.row_table import REMOVED, RowTable, read_contents
from precache.store.version import ROW_TABLE, Version

EXAMPLES = 5
"""Keys that are named of each kind of change."""


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A value that differs; None where there is none on that side."""

    what: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Some:
    """How many samples, and the first of them by name."""

    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class SampleChanges:
    """What became of the samples, by key.

    Attributes
    ----------
    added, removed
        Keys that only one version has.
    changed
        Those whose bytes are others.
    touched
        Those whose bytes are the same, and whose time or entity tag is another: copied files.
    relabelled
        Those of another class, by its name.
    failed, mended
        Those that became holes, and those that are none any more.
    moved
        Those that lie in another row.
    """

    added: Some
    removed: Some
    changed: Some
    touched: Some
    relabelled: Some
    failed: Some
    mended: Some
    moved: Some


@dataclass(frozen=True)
class Difference:
    """All that differs from one version to another.

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


# --- what is compared ---------------------------------------------------------------------------


class RawSample(NamedTuple):
    """A raw sample: XXH3-128 (hex), empty where it was not fetched, and what its source said."""

    content: str
    size: int
    mtime_ns: int
    etag: str


@dataclass(frozen=True)
class Samples:
    """A version's samples in row order, without those that the source had no more.

    Attributes
    ----------
    rows
        Where each lies.
    labels
        Class names; numbers where there are none, and empty for no label.
    valid
        False for holes.
    origins
        None where they are known to be those of the other version.
    """

    keys: Sequence[str]
    rows: Sequence[int]
    labels: Sequence[str]
    valid: Sequence[bool]
    origins: Sequence[RawSample] | None = None


def diff(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    storage_options: StorageOptions = None,
) -> Difference:
    """What differs between two versions, of one store or of two.

    Parameters
    ----------
    before, after
        ``STORE@prefix``, or a store, which means its current version.

    Raises
    ------
    StoreError
        There is no such version, or other software wrote it.
    """
    opened = [open_version(uri, None, storage_options) for uri in (before, after)]
    one, other = (_own(version) for version in opened)
    alike = one.rows_digest == other.rows_digest
    samples = [_samples(version, with_origins=not alike) for version in opened]
    return compare(one, other, samples[0], samples[1])


def _own(version: Version) -> Attributes:
    if version.attributes is None:
        raise StoreError(f"{version.path} is not a version that precache wrote")
    return version.attributes


def _samples(version: Version, *, with_origins: bool) -> Samples:
    names = dict(enumerate(version.classes)) | {-1: ""}
    gone = {row for row, (_, why) in version.holes.items() if why == REMOVED}
    rows = [row for row in range(version.rows) if row not in gone]
    keys, labels, valid = list(version.keys), version.labels.tolist(), version.valid.tolist()
    origins = _origins(version) if with_origins else None
    return Samples(
        [keys[row] for row in rows],
        rows,
        [names.get(labels[row], str(labels[row])) for row in rows],
        [valid[row] for row in rows],
        None if origins is None else [origins[row] for row in rows],
    )


def _origins(version: Version) -> list[RawSample]:
    data, where = version.read_checked(ROW_TABLE), version.folder.path(ROW_TABLE)
    try:
        table, content = RowTable.from_parquet(data, where), read_contents(data, where)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"comparing samples needs {error.name}: pip install 'precache[workers]'"
        ) from None
    columns = content, table.sizes.tolist(), table.mtimes.tolist(), table.etags
    return [RawSample(*each) for each in zip(*columns, strict=True)]


# --- comparing ----------------------------------------------------------------------------------


def compare(one: Attributes, other: Attributes, before: Samples, after: Samples) -> Difference:
    """What differs from one version to the other."""
    recipe = list(_recipe(*(Recipe.from_dict(each.pipeline) for each in (one, other))))
    if not recipe and one.fingerprint != other.fingerprint:
        # The same recipe, made by other decoders or by other code of its own functions.
        recipe.append(Change("fingerprint", one.fingerprint, other.fingerprint))
    common = set(one.classes) & set(other.classes)
    return Difference(
        one.version,
        other.version,
        tuple(recipe),
        tuple(_values("", _layout(one), _layout(other))),
        compare_samples(before, after),
        tuple(name for name in other.classes if name not in common),
        tuple(name for name in one.classes if name not in common),
        tuple(
            name
            for number, name in enumerate(one.classes)
            if name in common and other.classes.index(name) != number
        ),
        tuple(_values("", one.libraries, other.libraries)),
    )


def _layout(attributes: Attributes) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rows": attributes.rows,
        "holes": attributes.holes,
        "rows per shard": attributes.rows_per_shard,
    }
    for name, arrays in variants_of(attributes.fields).items():
        field = attributes.fields[arrays[0]]
        found[f"{name} shape"] = list(field.shape)
        found[f"{name} dtype"] = field.dtype
        found[f"{name} bytes stored"] = sum(attributes.fields[array].stored for array in arrays)
    return found


def _values(of: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield Change(f"{of}{name}", one.get(name), other.get(name))


def _recipe(one: Recipe, other: Recipe) -> Iterator[Change]:
    """Field by field, and op by op."""
    for name in dict.fromkeys([*one.fields, *other.fields]):
        mine, theirs = one.fields.get(name), other.fields.get(name)
        if mine is None or theirs is None:
            texts = [
                None if side is None else " → ".join(op_texts(side)) for side in (mine, theirs)
            ]
            yield Change(f"field {name}", *texts)
            continue
        yield from _ops(name, mine, theirs)
        codecs = [side.stored_as.model_dump(mode="json") for side in (mine, theirs)]
        yield from _values(f"{name} codec ", *codecs)
        others = [{other: getattr(side, other) for other in _OTHERS} for side in (mine, theirs)]
        yield from _values(f"{name} ", *others)
    yield from _values("", {"seed": one.seed}, {"seed": other.seed})


_OTHERS = ("input", "variants", "first_variant")


def _ops(field: str, one: Field, other: Field) -> Iterator[Change]:
    """Ops that went, came or have other parameters, numbered from 1 in their own version."""
    names = [[op.op for op in side.ops] for side in (one, other)]
    plain = [[op.model_dump(mode="json") for op in side.ops] for side in (one, other)]
    texts = op_texts(one), op_texts(other)
    matcher = difflib.SequenceMatcher(None, names[0], names[1], autojunk=False)
    for kind, start, stop, begin, end in matcher.get_opcodes():
        if kind == "equal":
            for mine, theirs in zip(range(start, stop), range(begin, end), strict=True):
                what = f"{field} op {theirs + 1} {names[1][theirs]} "
                yield from _values(what, plain[0][mine], plain[1][theirs])
            continue
        for number in range(start, stop):
            yield Change(f"{field} op {number + 1}", texts[0][number], None)
        for number in range(begin, end):
            yield Change(f"{field} op {number + 1}", None, texts[1][number])


def compare_samples(before: Samples, after: Samples) -> SampleChanges:
    """What became of the samples; each kind in row order."""
    places = {key: place for place, key in enumerate(before.keys)}
    found: dict[str, list[str]] = {field.name: [] for field in fields(SampleChanges)}
    for new, key in enumerate(after.keys):
        old = places.pop(key, None)
        if old is None:
            found["added"].append(key)
            continue
        if before.origins is not None and after.origins is not None:
            kind = _origin_change(before.origins[old], after.origins[new])
            if kind:
                found[kind].append(key)
        if before.labels[old] != after.labels[new]:
            found["relabelled"].append(
                f"{key}: {before.labels[old] or 'none'} → {after.labels[new] or 'none'}"
            )
        if before.valid[old] != after.valid[new]:
            found["mended" if after.valid[new] else "failed"].append(key)
        if before.rows[old] != after.rows[new]:
            found["moved"].append(key)
    found["removed"] = list(places)
    return SampleChanges(
        **{kind: Some(len(keys), tuple(keys[:EXAMPLES])) for kind, keys in found.items()}
    )


def _origin_change(old: RawSample, new: RawSample) -> str:
    if old.content and new.content:
        if old.content != new.content:
            return "changed"
        return "" if old == new else "touched"
    return "" if old[1:] == new[1:] else "changed"
