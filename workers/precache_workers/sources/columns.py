"""Columns of tables: which of them have images, labels, keys and splits, and their values as text.

A column is chosen by the user, else by its type, by the metadata of Hugging Face, or by its name.
Class names come from that metadata (``ClassLabel``). Columns without types, as of CSV, are text.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from precache.errors import SourceError
from precache.store.columns import Texts, without_nulls
from precache_workers.sources.base import (
    BY_DATASET,
    IMAGE,
    Columns,
    Doubt,
    choice_error,
    quoted,
    require_columns,
    require_distinct,
)
from precache_workers.sources.labels import (
    MOST_TEXT,
    bits_column,
    cell_of,
    is_binary,
    is_list,
    kind_of,
    note_of_categories,
    texts_of_labels,
    typed_column,
    values_of,
)
from precache_workers.sources.listings import ColumnEvidence, Members, doubt_of_rivals
from precache_workers.sources.sample_parts import STARTS, can_start
from precache_workers.sources.splits import names_splits

IMAGE_COLUMNS = (
    "image", "img", "photo", "picture", "jpg", "jpeg", "png", "webp", "bytes", "content",
)  # fmt: skip
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "target", "cls", "category")
"""Usual names of columns; the first that a table has is used."""

_ONE = ("names", "numbers", "values")
"""Kinds of one label a row."""

_KEYS = "a key is text or a whole number"

Features = Mapping[str, Mapping[str, Any]]
"""Column -> its feature in the metadata of Hugging Face."""


@dataclass(frozen=True)
class ChosenColumns:
    """The columns of a table that are read.

    Attributes
    ----------
    image
        Column of images, or of their URIs; None if a table has none, and no field needs it.
    inputs
        Columns that fields start from, by the names of these inputs; the image comes first.
    name
        Column, or field of the struct, that names samples; None for none.
    labels
        Columns of labels: one, or one for each class with 0 and 1.
    classes
        Names of classes by number, if the schema has them.
    others
        Columns that are not used.
    evidence
        What is to be looked at in the columns: those of splits, of 0 and 1, and rivals.
    """

    image: str | None
    inputs: Mapping[str, str]
    name: str | None
    labels: tuple[str, ...]
    classes: tuple[str, ...]
    others: tuple[str, ...]
    evidence: ColumnEvidence

    @property
    def listed(self) -> tuple[str, ...]:
        """Columns that a listing reads beside names."""
        labels, evidence = self.labels or self.evidence.bits, self.evidence
        return tuple(dict.fromkeys((*labels, *evidence.splits, *evidence.rivals)))

    def describe(self, members: Members, what: str = "Images") -> None:
        """Give the members of a table what the choice says of them, before rows are read."""
        members.evidence, members.classes = copy.deepcopy(self.evidence), self.classes
        labels = f"labels from {quoted(self.labels)}" if self.labels else "no labels"
        labels += "" if self.labels else " (--label-column)"
        others = f"; not used: {quoted(self.others, 8)}" if self.others else ""
        named = [name for name in self.inputs if name != IMAGE]
        is_read = IMAGE in self.inputs or what == "URIs"
        read = f"{what} from the column {self.image!r}, " if is_read else ""
        read += f"{'i' if read else 'I'}nputs of fields from {quoted(named)}, " if named else ""
        if taken := [] if self.labels else [*filter(_names_labels, named)]:
            others += f"; {quoted(taken)} are inputs, and no labels (--label-column makes one both)"
        members.notes[f"{read}{labels}{others}"] += 1


def choose(
    schema: Any,
    columns: Columns,
    where: str,
    guess_image: Callable[[Any, Features], str | None],
    *,
    typed: bool = True,
) -> ChosenColumns:
    """Choose the columns of a table: those that the user names, else by type, metadata and name.

    Parameters
    ----------
    guess_image
        Returns the column of images of a schema; None if it has none, and needs none.
    typed
        False if all columns are texts that may be numbers.
    """
    names, features = schema.names, _features(schema)
    require_distinct(names, f"{where} has several columns")
    _require_columns(schema, columns, where)
    image, named = columns.image or guess_image(schema, features), columns.inputs.names
    columns.inputs.require_clear(names, image, where, stated=columns.image is not None)
    labels = tuple(filter(None, columns.labels(names)))
    kinds = {field.name: kind_of(field.type) for field in schema}
    declared = [name for name in names if _is_class(features.get(name))]
    guess = ""
    if columns.label is None:
        free = [name for name in names if name not in (image, *named)]
        able = [name for name in free if kinds[name] is not None]
        declared = [name for name in declared if name in free]
        called = filter(_names_labels, able)
        usual = usual_among(LABEL_COLUMNS, declared), declared, usual_among(LABEL_COLUMNS, able)
        filled = (name for name in free if not pa.types.is_null(schema.field(name).type))
        unusable = usual_among(LABEL_COLUMNS, [name for name in filled if name != columns.key])
        guess = next(itertools.chain(*usual, called, unusable), "")
        labels = (guess,) if guess else ()
    for label in labels:
        if kinds[label] is None:
            kind = schema.field(label).type
            text = f"the column {label!r} of {where} has values of type {kind}, which are no labels"
            none = ("--label-column", ""), "for no label"
            raise choice_error([Doubt.of(text, none, ((), "write classes, numbers or lists"))])
    whole = {outer_of(schema, name) for name in named}
    used = {image if columns.inputs.image or not typed else None, *labels, columns.key, *whole}
    others = tuple(name for name in names if name not in used)
    rivals = [name for name in others if guess and labels and kinds[name] is not None]
    # They have labels by what the guessed column was taken for: its name, or else the metadata.
    if usual_among(LABEL_COLUMNS, [guess]):
        rivals = usual_among(LABEL_COLUMNS, rivals)
    else:
        are = declared.__contains__ if guess in declared else _names_labels
        rivals = [*filter(are, rivals)]
    bare = not labels and columns.label is None
    bits = [n for n in others if bare and (not typed or kinds[n] in ("numbers", "values"))]
    splits = [n for n in others if not typed or (names_splits(n) and kinds[n] in _ONE)]
    evidence = ColumnEvidence(
        guess or ",".join(labels),
        {name: set() for name in bits},
        {name: [] for name in splits},
        {name: set() for name in rivals},
    )
    path = None
    if image is not None and pa.types.is_struct(kind := schema.field(image).type):
        parts = {field.name: field.type for field in kind}
        path = f"{image}.path" if kind_of(parts.get("path", pa.null())) == "names" else None
    first = {IMAGE: image} if columns.inputs.image and image is not None else {}
    inputs = {**first, **dict(zip(named, named, strict=True))}
    names_of_classes = class_names(schema, labels)
    require_distinct(names_of_classes, f"{where} has several classes")
    key = columns.key or path
    return ChosenColumns(image, inputs, key, labels, names_of_classes, others, evidence)


def choose_images(schema: Any, columns: Columns, where: str) -> ChosenColumns:
    """Choose the columns of a table with a column of encoded images, or with all that fields start
    from; see `choose`. Inputs are leaves of the schema."""
    inputs = columns.inputs

    def guess(schema: Any, features: Features) -> str | None:
        able = [field.name for field in schema if holds_images(field.type)]
        if inputs.image:
            able = [name for name in able if name not in inputs.names] or able
        declared = [name for name in able if features.get(name, {}).get("_type") == "Image"]
        candidates = usual_among(IMAGE_COLUMNS, declared or able) or declared or able
        if not inputs.image and len(candidates) != 1:
            return None
        if not candidates:
            inner = next(filter(None, (_image_in(f.name, f.type) for f in schema)), "")
            raise SourceError(
                f"{where} has no column of images (bytes, or a struct of bytes and path); its "
                f"columns are {', '.join(f'{f.name!r} ({f.type})' for f in [*schema][:20])}. If "
                "one has URIs of images, give --source-kind manifest; if all fields start from "
                f"others, name these by their `input`{inner and f', such as {inner}'}; else, "
                f"{BY_DATASET}"
            )
        if len(candidates) > 1:
            raise choice_error(
                doubt_of_rivals("--image-column", candidates[:20], "may have the images", where)
            )
        return candidates[0]

    chosen = choose(schema, columns, where, guess)
    leaves = {}
    for name, column in chosen.inputs.items():
        kind = type_of(schema, column)
        if name == IMAGE and not holds_images(kind):
            raise SourceError(
                f"{where}: its column {column!r} has values of type {kind}; images are bytes, or a "
                "struct of bytes and path"
            )
        is_struct = pa.types.is_struct(kind)
        if not (holds_images(kind) if is_struct else can_start(kind)):
            parts = f", or a field of it, such as {column}.{kind[0].name}" if is_struct else ""
            if is_list(kind) and (inner := _image_in(column, kind)):
                parts = f", or one of them, such as {inner}"
            raise SourceError(
                f"{where}: its column {column!r} has values of type {kind}; a field starts from "
                f"{STARTS}{parts}"
            )
        leaves[name] = f"{column}.bytes" if is_struct else column
    return replace(chosen, inputs=leaves)


def _image_in(column: str, kind: Any) -> str:
    """Return the item of lists, or field of a struct, that has images; empty if there is none."""
    if is_list(kind) and holds_images(kind.value_type):
        return f"{column}.0"
    fields = kind if pa.types.is_struct(kind) else ()
    return next((f"{column}.{part.name}" for part in fields if holds_images(part.type)), "")


def _require_columns(schema: Any, columns: Columns, where: str) -> None:
    """Raise `SourceError` for a column that does not exist, or whose type cannot be that of keys.

    Keys may come from fields of structs.
    """
    structs = [field for field in schema if pa.types.is_struct(field.type)]
    parts = [f"{field.name}.{part.name}" for field in structs for part in field.type]
    require_columns(schema.names, [columns.image], where)
    lists = {field.name for field in schema if is_list(field.type)}
    split = {name: name.partition(".") for name in columns.inputs.names}
    items = [n for n, (of, _, at) in split.items() if of in lists and at.isdecimal()]
    fitting = [*items, *(name for name in split if name in parts)]
    require_columns([*schema.names, *fitting], columns.inputs.names, where)
    require_columns(schema.names, filter(None, columns.labels(schema.names)), where)
    require_columns([*schema.names, *parts], [columns.key], where)
    if columns.key in schema.names:
        kind = schema.field(columns.key).type
        if kind_of(kind) not in ("numbers", "names"):
            raise SourceError(
                f"{where}: its column {columns.key!r} has values of type {kind}; {_KEYS}"
            )


def class_names(schema: Any, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes by number: of several columns theirs, or what metadata has."""
    if len(labels) != 1:
        return tuple(labels)
    named = _features(schema).get(labels[0], {})
    named = named.get("feature", named)  # the element type of a list
    names = named.get("names") if _is_class(named) else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _features(schema: Any) -> Features:
    """Return the features in Hugging Face's metadata, by column; none if it is damaged."""
    try:
        document = json.loads((schema.metadata or {})[b"huggingface"])
        features = document["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return {}


def _names_labels(name: str) -> bool:
    """Return True for a name such as ``fine_label``, ``class_id`` and ``Finding Labels``."""
    words = [word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)]
    counts = words[:1] and words[0] in ("num", "n", "count", "is", "has", "no")
    is_of = words[-1:] and words[-1] in ("id", "idx", "index", "name", "number", "code")
    return not counts and bool({*LABEL_COLUMNS} & {*words[-2 if is_of else -1 :]})


def usual_among(usual: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns that have a usual name, in the order of the usual names."""
    lower = {plain_name(name): name for name in reversed(names)}
    return [lower[name] for name in usual if name in lower]


def plain_name(name: str) -> str:
    """Normalise the name of a column, to compare it with usual names."""
    return name.strip().lower()


def _is_class(feature: Any) -> bool:
    """Return True if a feature of Hugging Face's metadata is a class label."""
    return isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel"


# --- types --------------------------------------------------------------------------------------


def holds_images(kind: Any) -> bool:
    """Return True for a type of bytes, or of a struct with them."""
    if pa.types.is_struct(kind):
        return any(part.name == "bytes" and holds_images(part.type) for part in kind)
    return is_binary(kind.value_type if pa.types.is_dictionary(kind) else kind)


def type_of(schema: Any, name: str) -> Any:
    """Return the type of a column, or of a field of a struct or item of lists, as of `leaf`."""
    if name in schema.names:
        return schema.field(name).type
    outer, _, inner = name.partition(".")
    kind = schema.field(outer).type
    return kind.value_type if is_list(kind) else kind.field(inner).type


def outer_of(schema: Any, name: str) -> str:
    """Return the column of a leaf."""
    return name if name in schema.names else name.partition(".")[0]


def stored_as(schema: Any, name: str) -> str:
    """Return the name of the stored column in which a leaf lies: of items, that of the lists."""
    outer = outer_of(schema, name)
    return outer if is_list(schema.field(outer).type) else name


# --- values -------------------------------------------------------------------------------------


def leaf(batch: Any, name: str) -> Any:
    """Return a column, or by a dotted path a field of a struct, or an item of lists."""
    if name in batch.schema.names:
        return batch.column(name)
    outer, _, inner = name.partition(".")
    column = batch.column(outer)
    if is_list(column.type):
        number, _, inner = inner.partition(".")
        column = _items(column, int(number))
    return column.field(inner) if inner else column


def _items(lists: Any, number: int) -> Any:
    """Return an item of each of some lists; null for those that have fewer."""
    items = [row.values.slice(number, 1) if row.is_valid else () for row in lists]
    none = pa.nulls(1, lists.type.value_type)
    return pa.concat_arrays([item if len(item) else none for item in items])


def row_labels(batch: Any, chosen: ChosenColumns, members: Members) -> Any:
    """Return the labels of rows as an Arrow array; drop columns from `Members` with other values.

    Raises
    ------
    ValueError
        Some value is no label.
    """
    members.evidence.look(
        lambda name: values_of(batch.column(name).unique()),
        lambda name: texts_of_labels(typed_column(batch.column(name), name)),
    )
    if not chosen.labels:
        return pa.nulls(len(batch))
    members.notes |= Counter(note_of_categories(batch, chosen.labels))
    if len(chosen.labels) == 1:
        return typed_column(batch.column(chosen.labels[0]), chosen.labels[0])
    columns = [
        [cell_of(value, name) for value in batch.column(name).to_pylist()] for name in chosen.labels
    ]
    return bits_column(zip(*columns, strict=True))


def keys_of(batch: Any, chosen: ChosenColumns) -> Texts:
    """Return the names of rows, as `texts_of`; empty ones without a column of them."""
    if chosen.name is None:
        return Texts.repeated([""], [len(batch)])
    return texts_of(leaf(batch, chosen.name), chosen.name)


def texts_of(column: Any, name: str) -> Texts:
    """Return keys, or labels of one class, as text, whose bytes may not be UTF-8; empty for none.

    Raises
    ------
    ValueError
        The values are neither text nor whole numbers, or too long.
    """
    is_coded = pa.types.is_dictionary(column.type)
    values = column.dictionary if is_coded else column
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    elif kind_of(values.type) not in ("numbers", "names"):
        raise ValueError(f"its column {name} has values of type {column.type}; {_KEYS}")
    values = values.cast(pa.large_string())
    if len(values) and (pc.max(pc.utf8_length(values)).as_py() or 0) > MOST_TEXT:
        raise ValueError(
            f"its column {name} has a text of more than {MOST_TEXT:,} characters; keys and labels "
            "are shorter"
        )
    values = values.take(column.indices) if is_coded else values
    return without_nulls(values)
