"""Zarr v3 metadata documents: make those that precache writes, parse those that it reads.

Format: the Zarr core specification, version 3, and its `sharding_indexed` codec.

A foreign document may claim any size. Sizes that would take too much memory or time by themselves,
whatever is stored, are refused when the document is parsed.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic_core import from_json

from precache.codecs.chunk import (
    MOST_RAGGED_NBYTES,
    RAGGED_HEAD_NBYTES,
    Decoder,
    decoder,
    index_codecs,
)
from precache.codecs.image import IMAGE_FILTER, IMAGE_FILTER_VERSION
from precache.codecs.jpeg import JPEG
from precache.errors import StoreError
from precache.recipe.ops import DTYPES

Json = dict[str, Any]

BFLOAT16 = "bfloat16"
"""Data type of some arrays of other software."""

RAGGED_DATA_TYPE = "bytes"
"""Data type of ragged rows: byte strings of any length (zarr-extensions)."""

MAX_AXES = 32
"""Axes of an array; NumPy and torch allow 64, which includes axes added while reading."""

MAX_OBJECTS = 1 << 25
"""Stored objects along axis 0."""

MAX_SHARD_CHUNKS = 1 << 26
"""Chunks of a shard; the index of so many takes a gibibyte."""

MAX_ROW_CHUNKS = 1 << 16
"""Chunks that a row may be spread over."""


def as_json(document: Mapping[Any, Any]) -> bytes:
    """Serialize a document in the format of all documents of a version."""
    return json.dumps(document, indent=1, allow_nan=False).encode()


def group_document(attributes: Json) -> Json:
    """Return a group's `zarr.json`."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def array_document(
    shape: Sequence[int],
    data_type: str,
    chunk_shape: Sequence[int],
    codecs: Sequence[Json],
    *,
    fill_value: Any = 0,
    dimension_names: Sequence[str] | None = None,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> Json:
    """Return an array's `zarr.json`; `chunk_shape` is that of one stored object."""
    document: Json = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": list(codecs),
        "attributes": dict(attributes),
    }
    if dimension_names is not None:
        document["dimension_names"] = list(dimension_names)
    return document


def sharding(chunk_shape: Sequence[int], codecs: Sequence[Json]) -> Json:
    """Return the `sharding_indexed` codec with its index at the end."""
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": list(chunk_shape),
            "codecs": list(codecs),
            "index_codecs": index_codecs(),
            "index_location": "end",
        },
    }


@dataclass(frozen=True)
class Piece:
    """Place of a part of a row along axes 1 and up.

    Attributes
    ----------
    object_tail
        Indices of the stored object along axes 1 and up.
    chunk_tail
        Number of the chunk within the object, axis 0 left out.
    row, chunk
        Slices of the row and of the decoded chunk that correspond.
    """

    object_tail: tuple[int, ...]
    chunk_tail: int
    row: tuple[slice, ...]
    chunk: tuple[slice, ...]


@dataclass(frozen=True)
class Array:
    """Layout of an array: its `zarr.json`, validated.

    Attributes
    ----------
    object_shape
        Shape of one stored object: a shard, or a chunk if the array is not sharded.
    chunk_shape
        Shape of one separately compressed chunk.
    index_at_start
        The shard index is at the start, not at the end; None if the array is not sharded.
    index_checksum
        The index ends in a CRC32C.

    Notes
    -----
    An array of ragged rows, of which `decoder.ragged` is true, has the shape (N,) and chunks of one
    row; `dtype` is that of a row's values, `row_nbytes` the most bytes that a row may have.
    """

    shape: tuple[int, ...]
    dtype: str
    object_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    decoder: Decoder
    fill_value: Any
    key_prefix: str
    separator: str
    index_at_start: bool | None
    index_checksum: bool

    @functools.cached_property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @functools.cached_property
    def row_nbytes(self) -> int:
        if self.decoder.ragged:
            return MOST_RAGGED_NBYTES
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @functools.cached_property
    def chunk_nbytes(self) -> int:
        if self.decoder.ragged:
            return RAGGED_HEAD_NBYTES + MOST_RAGGED_NBYTES
        return math.prod(self.chunk_shape) * np.dtype(self.dtype).itemsize

    @functools.cached_property
    def gap(self) -> int:
        """Bytes of checksums between the rows of one plain chunk and the next."""
        return 4 * len(self.decoder.codecs)

    @functools.cached_property
    def pitch(self) -> int:
        """Bytes from one plain chunk to the next."""
        return self.chunk_nbytes + self.gap

    @functools.cached_property
    def objects(self) -> int:
        """Stored objects along axis 0."""
        return -(-self.shape[0] // self.object_shape[0])

    @functools.cached_property
    def chunks_per_object(self) -> tuple[int, ...]:
        return tuple(o // c for o, c in zip(self.object_shape, self.chunk_shape, strict=True))

    def rows_of(self, number: int) -> range:
        """Rows of an object; the last one may be short."""
        start = number * self.object_shape[0]
        return range(start, min(start + self.object_shape[0], self.shape[0]))

    def object_name(self, number: int, tail: tuple[int, ...] = ()) -> str:
        """Name, below the array's folder, of the object `number` along axis 0."""
        tail = tail or (0,) * (len(self.shape) - 1)
        return self.key_prefix + self.separator.join(map(str, (number, *tail)))

    @functools.cached_property
    def whole_rows(self) -> bool:
        """True if a chunk holds whole rows and nothing else."""
        return self.chunk_shape[1:] == self.shape[1:]

    def pieces(self) -> list[Piece]:
        """Return the parts of a row by chunk; a single one for arrays that precache writes."""
        per_axis = [list(self._axis_pieces(axis)) for axis in range(1, len(self.shape))]
        counts = self.chunks_per_object[1:]
        pieces = []
        for combination in itertools.product(*per_axis):
            chunk_tail = 0
            for (_, inner, _, _), count in zip(combination, counts, strict=True):
                chunk_tail = chunk_tail * count + inner
            pieces.append(
                Piece(
                    tuple(c[0] for c in combination),
                    chunk_tail,
                    tuple(c[2] for c in combination),
                    tuple(c[3] for c in combination),
                )
            )
        return pieces

    def _axis_pieces(self, axis: int) -> Iterator[tuple[int, int, slice, slice]]:
        per_object = self.chunks_per_object[axis]
        for start in range(0, self.shape[axis], self.chunk_shape[axis]):
            stop = min(start + self.chunk_shape[axis], self.shape[axis])
            outer, inner = divmod(start // self.chunk_shape[axis], per_object)
            yield outer, inner, slice(start, stop), slice(0, stop - start)


def parse_json(data: bytes, where: str) -> Json:
    """Parse a JSON object; raise a `StoreError` that names the file."""
    try:
        value = from_json(data)
    except ValueError as error:
        raise StoreError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StoreError(f"{where} is not a JSON object")
    return value


def parse_array(document: Mapping[str, Any], where: str) -> Array:
    """Validate and parse an array's `zarr.json`.

    Raises
    ------
    StoreError
        It is not a Zarr v3 array, or uses a feature that precache does not read; names it.
    """
    try:
        return _parse_array(document, where)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise StoreError(f"{where} is no Zarr v3 array metadata: {error!r}") from None


def _parse_array(document: Mapping[str, Any], where: str) -> Array:
    if document.get("zarr_format") != 3 or document.get("node_type") != "array":
        raise StoreError(f"{where} is no Zarr v3 array")
    if document.get("storage_transformers"):
        raise StoreError(f"{where} has storage_transformers, which precache does not read")
    dtype, own = document["data_type"], {}
    if dtype == RAGGED_DATA_TYPE:
        own = document.get("attributes", {}).get("precache", {})
        dtype = own.get("dtype", "uint8")
    if dtype == BFLOAT16:
        _require_bfloat16(where)
    elif dtype not in DTYPES:
        known = ", ".join((*DTYPES, BFLOAT16))
        raise StoreError(f"{where} has data type {dtype!r}; precache reads {known}")
    shape, object_shape = _shape(document["shape"]), _grid(document, where)
    chunk_shape, codecs = object_shape, document["codecs"]
    index_at_start, index_checksum = None, False
    if codecs[0]["name"] == "sharding_indexed":
        _require_alone(codecs, where)
        configuration = codecs[0]["configuration"]
        chunk_shape, codecs = _shape(configuration["chunk_shape"]), configuration["codecs"]
        location = configuration.get("index_location", "end")
        if location not in ("start", "end"):
            raise StoreError(f"{where} has its shard index at {location!r}; it is start or end")
        index_at_start = location == "start"
        index_checksum = _index_checksum(configuration["index_codecs"], where)
    if not len(shape) == len(object_shape) == len(chunk_shape) or 0 in object_shape + chunk_shape:
        raise StoreError(f"{where} has a grid {object_shape} that does not fit its shape {shape}")
    if any(o % c for o, c in zip(object_shape, chunk_shape, strict=True)) or not shape:
        raise StoreError(f"{where}: chunks of {chunk_shape} do not tile shards of {object_shape}")
    _require_bounded(shape, object_shape, chunk_shape, np.dtype(dtype).itemsize, where)
    if document["data_type"] == RAGGED_DATA_TYPE and chunk_shape != (1,):
        raise StoreError(f"{where} has {chunk_shape} byte strings in a chunk; precache reads one")
    key_prefix, separator = _key_encoding(document.get("chunk_key_encoding"), where)
    decode = decoder(codecs, np.dtype(dtype).itemsize, where)
    if decode.ragged != (document["data_type"] == RAGGED_DATA_TYPE):
        raise StoreError(f"{where} has codecs that do not fit its data type")
    if decode.ragged:
        decode = _filtered(decode, own, dtype, where)
    elif decode.filtered and (dtype != "uint8" or len(shape) < 4):
        raise StoreError(f"{where} filters {dtype} {shape} by precache.image: no uint8 images")
    return Array(
        shape=shape,
        dtype=dtype,
        object_shape=object_shape,
        chunk_shape=chunk_shape,
        decoder=decode,
        fill_value=None if decode.ragged else _fill_value(document["fill_value"], dtype, where),
        key_prefix=key_prefix,
        separator=separator,
        index_at_start=index_at_start,
        index_checksum=index_checksum,
    )


def _filtered(decode: Decoder, own: Mapping[str, Any], dtype: str, where: str) -> Decoder:
    """Return the decoder of ragged rows that are filtered as their array's attributes say."""
    name, version = own.get("filter"), own.get("filter_version")
    if name is None:
        return decode
    if (name, version, dtype) == (IMAGE_FILTER, IMAGE_FILTER_VERSION, "uint8"):
        return replace(decode, filtered=True)
    if (name, version, dtype) == (JPEG, None, "uint8"):
        return replace(decode, jpeg=True)
    raise StoreError(f"{where} filters {dtype} by {name} {version}; update precache")


def _require_bfloat16(where: str) -> None:
    try:
        importlib.import_module("ml_dtypes")  # registers the dtype with NumPy
    except ImportError:
        raise StoreError(
            f"{where} has data type {BFLOAT16!r}, for which ml_dtypes is needed: "
            "pip install ml_dtypes"
        ) from None


def _require_bounded(
    shape: tuple[int, ...],
    object_shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    itemsize: int,
    where: str,
) -> None:
    if len(shape) > MAX_AXES:
        raise StoreError(f"{where} has {len(shape)} axes; precache reads up to {MAX_AXES}")
    lengths = [max(1, n) for n in shape]  # an axis of length 0 must not hide the others
    along = [-(-n // c) for n, c in zip(lengths, chunk_shape, strict=True)]
    entries = math.prod(o // c for o, c in zip(object_shape, chunk_shape, strict=True))
    for count, unit, limit in (
        (math.prod(lengths) * itemsize, "bytes", 2**63 - 1),
        (math.prod(object_shape) * itemsize, "bytes in each object", 2**63 - 1),
        (-(-shape[0] // object_shape[0]), "objects along its first axis", MAX_OBJECTS),
        (entries, "chunks in each shard", MAX_SHARD_CHUNKS),
        (math.prod(along[1:]), "chunks in each row", MAX_ROW_CHUNKS),
    ):
        if count > limit:
            raise StoreError(
                f"{where} says that the array has {count} {unit}; precache reads up to {limit}: "
                "it is damaged or forged, or the array needs other chunks"
            )


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(
        type(n) is not int or not 0 <= n < 2**63
        for n in value  # bool is a subclass of int
    ):
        raise TypeError(f"{value!r} is no shape")
    return tuple(value)


def _grid(document: Mapping[str, Any], where: str) -> tuple[int, ...]:
    grid = document["chunk_grid"]
    if grid["name"] != "regular":
        raise StoreError(f"{where} has a {grid['name']} chunk grid; precache reads regular ones")
    return _shape(grid["configuration"]["chunk_shape"])


def _require_alone(codecs: Sequence[Any], where: str) -> None:
    if len(codecs) != 1:
        raise StoreError(f"{where} compresses whole shards; precache reads sharding_indexed alone")


def _index_checksum(codecs: Sequence[Mapping[str, Any]], where: str) -> bool:
    names = [codec["name"] for codec in codecs]
    little = codecs[0].get("configuration", {}).get("endian") == "little"
    if names not in (["bytes"], ["bytes", "crc32c"]) or not little:
        raise StoreError(f"{where} has index codecs {names}; precache reads little-endian bytes")
    return len(names) == 2


def _key_encoding(value: Any, where: str) -> tuple[str, str]:
    defaults = {"default": "/", "v2": "."}
    name = value["name"]
    if name not in defaults:
        raise StoreError(f"{where} has chunk key encoding {name!r}; precache reads default and v2")
    separator = value.get("configuration", {}).get("separator", defaults[name])
    if separator not in ("/", "."):
        raise StoreError(f"{where} has the separator {separator!r} in chunk keys; it is / or .")
    return (f"c{separator}" if name == "default" else ""), separator


def _fill_value(value: Any, dtype: str, where: str) -> Any:
    try:
        if isinstance(value, str) and value.startswith("0x"):
            width = np.dtype(dtype).itemsize
            bits = int(value, 16).to_bytes(width, "little")
            return np.frombuffer(bits, np.dtype(dtype).newbyteorder("<"))[0]
        if isinstance(value, str):
            value = _NOT_FINITE[value]
        if not isinstance(value, int | float):
            raise TypeError("not a number")
        return np.dtype(dtype).type(value)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise StoreError(f"{where} has fill value {value!r}, which is no {dtype}") from None


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
