"""The metadata documents of a version's arrays, as its attributes determine them. Pure.

Other Zarr software reads these documents. precache checks that they agree with the attributes, and
a repair writes them again if they do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from precache.codecs.chunk import codec_metadata, zstd_content_size
from precache.errors import DamageError, StoreError
from precache.recipe.recipe import CODEC_CLASSES, Codec, Field
from precache.store.json_documents import Attributes
from precache.store.labels import CLASS_DTYPES
from precache.store.layout import RowShape
from precache.store.small_arrays import (
    ROWS_PER_CHUNK,
    file_document,
    small_document,
    small_layout,
    string_document,
)
from precache.store.zarr_metadata import (
    Array,
    Json,
    array_document,
    group_document,
    parse_array,
    sharding,
)

SUMS = "_sums"
"""Folder of a version with the channel sums."""

LABEL_CHUNK_NBYTES = 64 << 20
"""Most bytes of a chunk of multi-hot labels: so many are plausible, however small it is stored."""


def is_summed(field: Field, row: RowShape) -> bool:
    """Return whether channel sums are stored for a field: only for decoded images."""
    return field.decodes and len(row.shape) == 3


def field_document(field: Field, row: RowShape, rows: int, rows_per_shard: int) -> Json:
    """Return the `zarr.json` of a field's array."""
    names = ["row", "channel", "height", "width"] if is_summed(field, row) else None
    return _field_document(field.stored_as, row, rows, rows_per_shard, names)


def _field_document(
    codec: Codec, row: RowShape, rows: int, rows_per_shard: int, names: list[str] | None = None
) -> Json:
    inner = (row.chunk_rows(rows_per_shard), *row.shape)
    return array_document(
        (rows, *row.shape),
        row.dtype,
        (rows_per_shard, *row.shape),
        [sharding(inner, codec_metadata(codec, row.dtype))],
        fill_value=False if row.dtype == "bool" else 0,
        dimension_names=names,
    )


def field_layout(attributes: Attributes, name: str, where: str) -> Array:
    """Return the layout of a field's array, from the attributes.

    Raises
    ------
    StoreError
        No version can have such a field; names `where`.
    """
    field = attributes.fields[name]
    if field.codec not in CODEC_CLASSES:
        raise StoreError(f"{where} has codec {field.codec!r}; there are {', '.join(CODEC_CLASSES)}")
    codec = cast(Codec, CODEC_CLASSES[field.codec]())
    row = RowShape(field.shape, field.dtype)
    document = _field_document(codec, row, attributes.rows, attributes.rows_per_shard)
    return parse_array(document, where)


def label_form(row_shape: Sequence[int], dtype: str) -> tuple[list[str], Any, int]:
    """Return names of axes, fill value and rows per chunk of labels, as `small_array` takes them.

    The labels of a row have a shape: () unless they are multi-hot.
    """
    if row_shape:
        return ["row", "class"], 0, min(ROWS_PER_CHUNK, max(1, LABEL_CHUNK_NBYTES // row_shape[0]))
    return ["row"], 0 if dtype == "float32" else -1, ROWS_PER_CHUNK


def label_layouts(attributes: Attributes) -> list[Array]:
    """Return the possible layouts of the labels: one for each dtype that class numbers may have."""
    stored = attributes.label
    forms = [(stored.shape, stored.dtype)] if stored else [((), dtype) for dtype in CLASS_DTYPES]
    return [
        small_layout((attributes.rows, *shape), dtype, *label_form(shape, dtype)[1:])
        for shape, dtype in forms
    ]


def label_layout(attributes: Attributes, first: bytes) -> Array:
    """Return the layout of the labels, from the decoded size of their first chunk.

    Raises
    ------
    DamageError
        The size fits no dtype that labels have.
    """
    size = zstd_content_size(memoryview(first))
    layouts = label_layouts(attributes)
    fitting = (layout for layout in layouts if layout.chunk_nbytes == size)
    layout = next(fitting, None)
    if layout is None:
        raise DamageError("a chunk does not decode: its frame is another size")
    return layout


def layout_difference(actual: Array, expected: Array) -> str:
    """Describe the first difference of two layouts; empty if they are equal."""
    for field in dataclasses.fields(Array):
        value, wanted = getattr(actual, field.name), getattr(expected, field.name)
        if value != wanted:
            return f"its {field.name} is {value}, and its version has {wanted}"
    return ""


def array_documents(
    attributes: Attributes, labels: str, row_table: int, holes: int
) -> dict[str, Json]:
    """Name -> `zarr.json` of every array and group of a version except its own group.

    Parameters
    ----------
    labels
        Dtype of the labels.
    row_table, holes
        Sizes of these objects in bytes.
    """
    rows, per_shard = attributes.rows, attributes.rows_per_shard
    shards = -(-rows // per_shard)
    shape = attributes.label.shape if attributes.label else ()
    documents = {
        "label": small_document((rows, *shape), labels, *label_form(shape, labels)),
        "valid": small_document((rows,), "bool", ["row"], False),
        "key": string_document(rows, "row"),
        "rows": file_document(row_table),
        "holes": file_document(holes),
        "shards": group_document({}),
        SUMS: group_document({}),
    }
    for name, stored in attributes.fields.items():
        row = RowShape(stored.shape, stored.dtype)
        declared = attributes.declared[name]
        documents[name] = field_document(declared, row, rows, per_shard)
        documents[f"shards/{name}"] = small_document((shards, 2), "uint64", ["shard", "size_xxh3"])
        if is_summed(declared, row):
            names = ["shard", "count_total_squares"]
            shape = shards, 1 + 2 * stored.shape[0]
            documents[f"{SUMS}/{name}"] = small_document(shape, "float64", names)
    return documents
