"""The metadata documents of a version's arrays, as its attributes determine them. Pure.

They are what other Zarr software reads. precache checks that they say what it goes by, and makes
them anew where they do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

from precache.codecs.chunk import codec_metadata, zstd_content_size
from precache.errors import DamageError, StoreError
from precache.recipe.recipe import CODECS, Codec, Field
from precache.store.attributes import Attributes
from precache.store.layout import RowShape
from precache.store.small_arrays import file_document, small_document, small_layout, string_document
from precache.store.zarr_metadata import (
    Array,
    Json,
    array_document,
    group_document,
    parse_array,
    sharding,
)

SUMS = "_sums"
"""Folder of a version with the sums by channel."""

LABEL_DTYPES = ("int8", "int16", "int32", "int64")
"""Of which the labels have the first that holds them."""


def is_summed(field: Field, row: RowShape) -> bool:
    """Whether channel sums are kept of a field: of images alone."""
    return field.decodes and len(row.shape) == 3


def field_document(field: Field, row: RowShape, rows: int, rows_per_shard: int) -> Json:
    """The `zarr.json` of a field's array."""
    names = ["row", "channel", "height", "width"] if is_summed(field, row) else None
    return {
        **_field_document(field.stored_as, row, rows, rows_per_shard),
        **({"dimension_names": names} if names else {}),
    }


def _field_document(codec: Codec, row: RowShape, rows: int, rows_per_shard: int) -> Json:
    inner = (row.chunk_rows(rows_per_shard), *row.shape)
    return array_document(
        (rows, *row.shape),
        row.dtype,
        (rows_per_shard, *row.shape),
        [sharding(inner, codec_metadata(codec, row.dtype))],
        fill_value=False if row.dtype == "bool" else 0,
    )


def field_layout(attributes: Attributes, name: str, where: str) -> Array:
    """How the array of a field is laid out, by what the attributes say of it.

    Raises
    ------
    StoreError
        No version can have such a field; names `where`.
    """
    field = attributes.fields[name]
    if field.codec not in CODECS:
        raise StoreError(f"{where} has codec {field.codec!r}; there are {', '.join(CODECS)}")
    codec = cast(Codec, CODECS[field.codec]())
    row = RowShape(field.shape, field.dtype)
    document = _field_document(codec, row, attributes.rows, attributes.rows_per_shard)
    return parse_array(document, where)


def label_layout(rows: int, first: bytes) -> Array:
    """How labels are laid out, by the size of the first of their chunks.

    Raises
    ------
    DamageError
        They have no dtype that labels have.
    """
    layouts = (small_layout((rows,), dtype, -1) for dtype in LABEL_DTYPES)
    size = zstd_content_size(memoryview(first))
    fitting = (layout for layout in layouts if layout.chunk_shape[0] * layout.row_nbytes == size)
    found = next(fitting, None)
    if found is None:
        raise DamageError("a chunk does not decode: its frame is another size")
    return found


def difference(found: Array, expected: Array) -> str:
    """The first thing in which two layouts differ, in words; empty where they are the same."""
    for each in dataclasses.fields(Array):
        values = [getattr(side, each.name) for side in (found, expected)]
        if values[0] != values[1]:
            return f"its {each.name} is {values[0]}, and its version has {values[1]}"
    return ""


def documents(
    attributes: Attributes, fields: Mapping[str, Field], labels: str, row_table: int, holes: int
) -> dict[str, Json]:
    """Name -> document of every array and group of a version but its own.

    Parameters
    ----------
    fields
        Of its recipe, by array.
    labels
        Their dtype.
    row_table, holes
        Bytes of these objects.
    """
    rows, per_shard = attributes.rows, attributes.rows_per_shard
    shards = -(-rows // per_shard)
    found = {
        "label": small_document((rows,), labels, ["row"], -1),
        "valid": small_document((rows,), "bool", ["row"], False),
        "key": string_document(rows, "row"),
        "rows": file_document(row_table),
        "holes": file_document(holes),
        "shards": group_document({}),
        SUMS: group_document({}),
    }
    for name, stored in attributes.fields.items():
        row = RowShape(stored.shape, stored.dtype)
        found[name] = field_document(fields[name], row, rows, per_shard)
        found[f"shards/{name}"] = small_document((shards, 2), "uint64", ["shard", "size_xxh3"])
        if is_summed(fields[name], row):
            names = ["shard", "count_total_squares"]
            shape = shards, 1 + 2 * stored.shape[0]
            found[f"{SUMS}/{name}"] = small_document(shape, "float64", names)
    return found
