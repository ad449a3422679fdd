"""The arrays of a version, as its attributes determine them, and their Zarr v3 documents. Pure.

Other Zarr software reads these documents (the Zarr core specification, version 3, and its
`sharding_indexed` codec); precache reads the attributes alone.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic_core import from_json

from precache.codecs.chunk import (
    MOST_RAGGED_NBYTES,
    RAGGED_HEAD_NBYTES,
    Decoder,
    codec_metadata,
    decoder,
    index_codecs,
)
from precache.codecs.image import IMAGE_FILTER, IMAGE_FILTER_VERSION
from precache.errors import StoreError
from precache.recipe.recipe import (
    CODEC_CLASSES,
    AnyCodec,
    Field,
    ImageCodec,
    LossyCodec,
    ZstdCodec,
)
from precache.store.json_documents import Attributes, TableAttributes
from precache.store.layout import RowShape

Json = dict[str, Any]

SHARDS, CHECKS, SUMS = "shards", "_checks", "_sums"
"""Folders of a version with size and digest of each shard, with the last bytes of each chunk, and
with the channel sums of each shard."""

SHAPES = ".shape"
"""Ending of the name of the small array with the shapes of a ragged field's rows."""

ROWS_PER_CHUNK = 1 << 20
"""Entries of a chunk of a small array."""

LABEL_CHUNK_NBYTES = 64 << 20
"""Most bytes of a chunk of multi-hot labels: so many are plausible, however small it is stored."""

MAX_SHARD_CHUNKS = 1 << 26
"""Chunks of a shard; the index of so many takes a gibibyte."""


@dataclass(frozen=True)
class Array:
    """Layout of an array: its rows, and the objects and chunks that they are stored in.

    A field is sharded: an object has several chunks, and their index at its end. A small array has
    one entry for each row or shard, in objects of one chunk of zstd.

    Attributes
    ----------
    row
        Shape and dtype of a row. A ragged one is a chunk of its own.
    rows
        Rows of the whole array.
    object_rows, chunk_rows
        Rows of a stored object, and of a separately compressed chunk; the last may be short.
    """

    row: RowShape
    rows: int
    object_rows: int
    chunk_rows: int
    codec: AnyCodec
    sharded: bool = True

    @functools.cached_property
    def row_shape(self) -> tuple[int, ...]:
        return () if self.row.ragged else self.row.shape

    @property
    def dtype(self) -> str:
        """Data type of a row's values."""
        return self.row.dtype

    @functools.cached_property
    def row_nbytes(self) -> int:
        """Bytes of a row; the most that a ragged one may have."""
        return MOST_RAGGED_NBYTES if self.row.ragged else self.row.nbytes

    @functools.cached_property
    def chunk_shape(self) -> tuple[int, ...]:
        return (self.chunk_rows, *self.row_shape)

    @functools.cached_property
    def chunk_nbytes(self) -> int:
        head = RAGGED_HEAD_NBYTES if self.row.ragged else 0
        return head + self.chunk_rows * self.row_nbytes

    @functools.cached_property
    def decoder(self) -> Decoder:
        dtype = self.row.dtype if self.sharded else "uint8"
        return decoder(self.codec, dtype, ragged=self.row.ragged)

    @functools.cached_property
    def objects(self) -> int:
        """Number of stored objects."""
        return -(-self.rows // self.object_rows)

    @functools.cached_property
    def object_chunks(self) -> int:
        """Chunks of an object."""
        return self.object_rows // self.chunk_rows

    def rows_of(self, number: int) -> range:
        """Rows of an object."""
        start = number * self.object_rows
        return range(start, min(start + self.object_rows, self.rows))

    def object_name(self, number: int) -> str:
        """Name of an object below the array's folder."""
        return self.row.object_name(number)

    def document(self, names: Sequence[str] | None = None, fill_value: Any = 0) -> Json:
        """Return the array's `zarr.json`.

        Parameters
        ----------
        names
            Of the axes.
        """
        row, dtype = self.row, self.row.dtype if self.sharded else "uint8"
        codecs = codec_metadata(self.codec, dtype, ragged=row.ragged)
        if self.sharded:
            inside = {"chunk_shape": [*self.chunk_shape], "codecs": codecs}
            index = {"index_codecs": index_codecs(), "index_location": "end"}
            codecs = [{"name": "sharding_indexed", "configuration": inside | index}]
        shape, chunks = (self.rows, *self.row_shape), (self.object_rows, *self.row_shape)
        if not row.ragged:
            return array_document(shape, row.dtype, chunks, codecs, names, fill_value)
        own: Json = {"dtype": row.dtype}
        if isinstance(self.codec, ImageCodec):
            own |= {"filter": IMAGE_FILTER, "filter_version": IMAGE_FILTER_VERSION}
        if isinstance(self.codec, LossyCodec):
            own |= {"filter": self.codec.name}
        return array_document(shape, "bytes", chunks, codecs, ["row"], "", {"precache": own})


# --- documents ----------------------------------------------------------------------------------


def array_document(
    shape: Sequence[int],
    data_type: str,
    chunk_shape: Sequence[int],
    codecs: Sequence[Json],
    names: Sequence[str] | None,
    fill_value: Any = 0,
    attributes: Json | None = None,
) -> Json:
    """Return an array's `zarr.json`; `chunk_shape` is that of one stored object."""
    document: Json = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [*shape],
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*chunk_shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": [*codecs],
        "attributes": attributes or {},
    }
    return document if names is None else {**document, "dimension_names": [*names]}


def group_document(attributes: Json) -> Json:
    """Return a group's `zarr.json`."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def as_json(document: Mapping[Any, Any]) -> bytes:
    """Serialize a document in the format of all documents of a version."""
    return json.dumps(document, indent=1, allow_nan=False).encode()


def parse_json(data: bytes, where: str) -> Json:
    """Parse a JSON object; raise a `StoreError` that names the file."""
    try:
        value = from_json(data)
    except ValueError as error:
        raise StoreError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StoreError(f"{where} is not a JSON object")
    return value


# --- fields -------------------------------------------------------------------------------------


def is_summed(field: Field, row: RowShape) -> bool:
    """Return whether channel sums are stored for a field: only for decoded images, not masks."""
    return field.decodes and len(row.shape) == 3 and field.specs()[-1].kind != "mask"


def field_document(field: Field, row: RowShape, rows: int, rows_per_shard: int) -> Json:
    """Return the `zarr.json` of a field's array."""
    is_picture = field.decodes and len(row.shape) == 3
    names = ["row", "channel", "height", "width"] if is_picture else None
    fill_value = False if row.dtype == "bool" else 0
    return field_array(field.stored_as, row, rows, rows_per_shard).document(names, fill_value)


def field_array(codec: AnyCodec, row: RowShape, rows: int, rows_per_shard: int) -> Array:
    """Return the layout of an array of a field."""
    return Array(row, rows, rows_per_shard, row.chunk_rows(rows_per_shard), codec)


def version_arrays(attributes: Attributes, where: str) -> dict[str, Array]:
    """Return the arrays of a version that a loader can read, by name: fields, and the labels.

    Raises
    ------
    StoreError
        No version can have such a field; names `where`.
    """
    arrays = {}
    for name, field in attributes.fields.items():
        if field.codec not in CODEC_CLASSES:
            known = ", ".join(CODEC_CLASSES)
            raise StoreError(f"{where} has codec {field.codec!r}; there are {known}")
        codec: Any = CODEC_CLASSES[field.codec]()
        row = field.row
        array = field_array(codec, row, attributes.rows, attributes.rows_per_shard)
        _require_possible(array, f"{where}: {name}")
        arrays[name] = array
    return {**arrays, "label": row_array(attributes, "label")}


def _require_possible(array: Array, where: str) -> None:
    """Refuse a codec that cannot hold such rows, and sizes that no array has."""
    row = array.row
    if not row.shape if row.ragged else 0 in row.shape:
        raise StoreError(f"{where} is damaged or forged: its rows are {row.shape}")
    images = row.dtype == "uint8" and (row.ragged or len(row.shape) > 2)
    if isinstance(array.codec, ImageCodec | LossyCodec) and not images:
        raise StoreError(f"{where} stores {row} by codec {array.codec.name!r}: no uint8 images")
    if isinstance(array.codec, LossyCodec) and not row.ragged:
        codec = array.codec.name
        raise StoreError(f"{where} stores {row} by codec {codec!r}, which stores ragged rows alone")
    nbytes = math.prod(max(1, length) for length in row.shape) * np.dtype(row.dtype).itemsize
    for count, unit, limit in (
        (max(array.rows, array.object_rows) * nbytes, "bytes", 2**63 - 1),
        (array.object_chunks, "chunks in each shard", MAX_SHARD_CHUNKS),
    ):
        if count > limit:
            raise StoreError(
                f"{where} has {count} {unit}; precache reads up to {limit}: it is damaged or forged"
            )


# --- small arrays -------------------------------------------------------------------------------


def small(shape: Sequence[int], dtype: str, per_chunk: int | None = None) -> Array:
    """Return the layout of a small array, which follows from its length alone."""
    rows = max(1, min(shape[0], per_chunk or ROWS_PER_CHUNK))
    row = RowShape(tuple(shape[1:]), dtype)
    return Array(row, shape[0], rows, rows, ZstdCodec(), sharded=False)


def shapes_name(array: str) -> str:
    """Return the name of the small array with the shapes of a ragged array's rows."""
    return f"{array}{SHAPES}"


def label_form(row_shape: Sequence[int], dtype: str) -> tuple[list[str], Any, int]:
    """Return names of axes, fill value and rows per chunk of labels, as `small_array` takes them.

    The labels of a row have a shape: () unless they are multi-hot.
    """
    if row_shape:
        return ["row", "class"], 0, min(ROWS_PER_CHUNK, max(1, LABEL_CHUNK_NBYTES // row_shape[0]))
    return ["row"], 0 if dtype == "float32" else -1, ROWS_PER_CHUNK


def row_array(attributes: TableAttributes, name: str) -> Array:
    """Return the layout of a small array by rows: of labels, `valid`, or a column below `rows`."""
    rows = attributes.rows
    if name == "label":
        shape, dtype = attributes.label.shape, attributes.label.dtype
        return small((rows, *shape), dtype, label_form(shape, dtype)[2])
    column = name.rpartition("/")[2]
    if column in ("valid", "removed"):
        return small((rows,), "bool")
    if column in ("size", "mtime_ns", "label"):
        return small((rows,), "int64")
    return small((rows, 2), "uint64")  # XXH3-128s


def checks_array(array: Array) -> Array:
    """Return the layout of a field's checks, given that of the field: (shards, chunks) uint32."""
    chunks = array.object_chunks
    return small((array.objects, chunks), "uint32", checks_per_object(chunks))


def checks_per_object(chunks: int) -> int:
    """Return the shards whose checks one object has, given the chunks of a shard."""
    return max(1, ROWS_PER_CHUNK // chunks)
