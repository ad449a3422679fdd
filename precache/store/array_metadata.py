"""The metadata documents of a version's arrays, as its attributes determine them. Pure.

Other Zarr software reads these documents; precache reads the attributes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from precache.codecs.chunk import codec_metadata
from precache.codecs.image import IMAGE_FILTER, IMAGE_FILTER_VERSION
from precache.codecs.jpeg import JPEG
from precache.errors import StoreError
from precache.recipe.recipe import CODEC_CLASSES, Codec, Field, ImageCodec, JpegCodec
from precache.store.json_documents import Attributes
from precache.store.layout import RowShape
from precache.store.small_arrays import ROWS_PER_CHUNK, small_layout
from precache.store.zarr_metadata import (
    RAGGED_DATA_TYPE,
    Array,
    Json,
    array_document,
    parse_array,
    sharding,
)

SHARDS, CHECKS, SUMS = "shards", "_checks", "_sums"
"""Folders of a version with size and digest of each shard, with the last bytes of each chunk, and
with the channel sums of each shard."""

SHAPES = ".shape"
"""Ending of the name of the small array with the shapes of a ragged field's rows."""

LABEL_CHUNK_NBYTES = 64 << 20
"""Most bytes of a chunk of multi-hot labels: so many are plausible, however small it is stored."""


def is_summed(field: Field, row: RowShape) -> bool:
    """Return whether channel sums are stored for a field: only for decoded images."""
    return field.decodes and len(row.shape) == 3


def field_document(
    codec: Codec, row: RowShape, rows: int, rows_per_shard: int, *, summed: bool = False
) -> Json:
    """Return the `zarr.json` of a field's array."""
    names = ["row", "channel", "height", "width"] if summed else None
    if row.ragged:
        own: Json = {"dtype": row.dtype}
        if isinstance(codec, ImageCodec):
            own |= {"filter": IMAGE_FILTER, "filter_version": IMAGE_FILTER_VERSION}
        if isinstance(codec, JpegCodec):
            own |= {"filter": JPEG}
        return array_document(
            (rows,),
            RAGGED_DATA_TYPE,
            (rows_per_shard,),
            [sharding((1,), codec_metadata(codec, row.dtype, ragged=True))],
            fill_value="",
            dimension_names=["row"],
            attributes={"precache": own},
        )
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
    document = field_document(codec, field.row, attributes.rows, attributes.rows_per_shard)
    return parse_array(document, where)


def shapes_name(array: str) -> str:
    """Return the name of the small array with the shapes of a ragged array's rows."""
    return f"{array}{SHAPES}"


def shapes_layout(rows: int, axes: int) -> Array:
    """Return the layout of the shapes of ragged rows: (rows, axes) int32, zeros for holes."""
    return small_layout((rows, axes), "int32")


def label_form(row_shape: Sequence[int], dtype: str) -> tuple[list[str], Any, int]:
    """Return names of axes, fill value and rows per chunk of labels, as `small_array` takes them.

    The labels of a row have a shape: () unless they are multi-hot.
    """
    if row_shape:
        return ["row", "class"], 0, min(ROWS_PER_CHUNK, max(1, LABEL_CHUNK_NBYTES // row_shape[0]))
    return ["row"], 0 if dtype == "float32" else -1, ROWS_PER_CHUNK


def label_layout(attributes: Attributes) -> Array:
    """Return the layout of the labels."""
    shape, dtype = attributes.label.shape, attributes.label.dtype
    return small_layout((attributes.rows, *shape), dtype, *label_form(shape, dtype)[1:])


def checks_layout(array: Array) -> Array:
    """Return the layout of a field's checks, given that of the field: (shards, chunks) uint32."""
    chunks = array.chunks_per_object[0]
    return small_layout((array.objects, chunks), "uint32", 0, checks_per_object(chunks))


def checks_per_object(chunks: int) -> int:
    """Return the shards whose checks one object has, given the chunks of a shard."""
    return max(1, ROWS_PER_CHUNK // chunks)
