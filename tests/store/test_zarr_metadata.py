"""Metadata of Zarr arrays: what is made is read back; forged documents end in a `StoreError`."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from precache.codecs.chunk import codec_metadata
from precache.errors import StoreError
from precache.recipe.ops import DTYPES
from precache.recipe.recipe import ImageCodec, RawCodec, ZstdCodec
from precache.store import zarr_metadata
from precache.store.zarr_metadata import (
    Json,
    array_document,
    parse_array,
    parse_json,
    sharding,
)
from tests.conftest import BuiltStore

WHERE = "group/image/zarr.json"


def _document() -> Json:
    codecs = [sharding((2, 3, 8, 8), codec_metadata(ZstdCodec(), "float32"))]
    names = ["row", "channel", "height", "width"]
    document = array_document((23, 3, 8, 8), "float32", (8, 3, 8, 8), codecs, dimension_names=names)
    parsed: Json = json.loads(json.dumps(document))  # no part of it is shared
    return parsed


# --- what is made -------------------------------------------------------------------------------


def test_a_sharded_array_is_read_back() -> None:
    array = parse_array(_document(), WHERE)
    assert array.shape == (23, 3, 8, 8)
    assert (array.row_shape, array.row_nbytes) == ((3, 8, 8), 768)
    assert (array.object_shape, array.chunk_shape) == ((8, 3, 8, 8), (2, 3, 8, 8))
    assert array.chunks_per_object == (4, 1, 1, 1)
    assert array.objects == 3
    assert array.object_name(2) == "c/2/0/0/0"
    assert array.index_at_start is False
    assert array.index_checksum
    assert len(array.pieces()) == 1


@pytest.mark.parametrize("codec", [RawCodec(), ZstdCodec(), ImageCodec()])
def test_zarr_python_takes_every_document(codec: Any) -> None:
    codecs = [sharding((2, 3, 8, 8), codec_metadata(codec, "uint8"))]
    document = array_document((23, 3, 8, 8), "uint8", (8, 3, 8, 8), codecs)
    made = zarr.core.metadata.ArrayV3Metadata.from_dict(document)
    assert made.shape == (23, 3, 8, 8)
    assert made.chunk_grid.chunk_shape == (8, 3, 8, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_zarr_python_are_read_for_every_dtype(dtype: str) -> None:
    made = zarr.create_array(
        zarr.storage.MemoryStore(),
        shape=(5, 4),
        dtype=dtype,
        chunks=(2, 4),
        fill_value=1,
        compressors=None,
    )
    array = parse_array(json.loads(json.dumps(made.metadata.to_dict())), WHERE)
    assert (array.dtype, array.chunk_shape, array.index_at_start) == (dtype, (2, 4), None)
    assert array.fill_value == np.ones((), dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        ("NaN", "float32", math.nan),
        ("Infinity", "float64", math.inf),
        ("-Infinity", "float16", -math.inf),
        ("0x3fc00000", "float32", 1.5),
        ("0x7fc00001", "float32", math.nan),
        (True, "bool", True),
        (2**64 - 1, "uint64", 2**64 - 1),
        (-128, "int8", -128),
    ],
)
def test_fill_values_in_all_their_spellings(value: Any, dtype: str, expected: Any) -> None:
    document = {**_document(), "data_type": dtype, "fill_value": value}
    document["codecs"] = [sharding((2, 3, 8, 8), codec_metadata(RawCodec(), dtype))]
    np.testing.assert_equal(parse_array(document, WHERE).fill_value, np.dtype(dtype).type(expected))


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ({"name": "default", "configuration": {"separator": "/"}}, "c/1/0/2/0"),
        ({"name": "default", "configuration": {"separator": "."}}, "c.1.0.2.0"),
        ({"name": "default"}, "c/1/0/2/0"),
        ({"name": "v2"}, "1.0.2.0"),
        ({"name": "v2", "configuration": {"separator": "/"}}, "1/0/2/0"),
    ],
)
def test_objects_are_named_as_the_document_says(encoding: Json, name: str) -> None:
    array = parse_array({**_document(), "chunk_key_encoding": encoding}, WHERE)
    assert array.object_name(1, (0, 2, 0)) == name


SHAPES = st.tuples(*[st.integers(1, 9)] * 2)


@given(SHAPES, SHAPES, SHAPES)
def test_pieces_tile_a_row_whatever_the_grid(
    row: tuple[int, ...], chunk: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    whole = (4, *(c * n for c, n in zip(chunk, chunks, strict=True)))
    codecs = [sharding((1, *chunk), codec_metadata(RawCodec(), "uint8"))]
    array = parse_array(array_document((8, *row), "uint8", whole, codecs), WHERE)
    covered = np.zeros(row, int)
    for piece in array.pieces():
        covered[piece.row] += 1
        parts = [range(*s.indices(10**9)) for s in piece.row]
        for axis, (part, inner) in enumerate(zip(parts, piece.chunk, strict=True)):
            outside = piece.object_tail[axis] * whole[axis + 1]
            number = np.unravel_index(piece.chunk_tail, array.chunks_per_object[1:])[axis]
            assert part.start == outside + int(number) * chunk[axis]
            assert (inner.start, inner.stop) == (0, len(part))
    assert (covered == 1).all()


# --- what is refused ----------------------------------------------------------------------------


def _with(path: str, value: Any) -> Json:
    document = _document()
    *parents, last = path.split("/")
    target: Any = document
    for name in parents:
        target = target[int(name) if name.isdigit() else name]
    target[int(last) if last.isdigit() else last] = value
    return document


SHARDING = "codecs/0/configuration"
REFUSED: dict[str, tuple[Json, str]] = {
    "version 2": (_with("zarr_format", 2), "no Zarr v3 array"),
    "group": (_with("node_type", "group"), "no Zarr v3 array"),
    "dtype": (_with("data_type", "complex64"), "'complex64'; precache reads bool, uint8"),
    "dtype object": (_with("data_type", {"name": "x"}), "data type"),
    "grid": (_with("chunk_grid/name", "rectangular"), "rectangular chunk grid"),
    "grid of other rank": (_with("chunk_grid/configuration/chunk_shape", [8]), "(8,)"),
    "empty chunks": (_with("chunk_grid/configuration/chunk_shape", [0, 3, 8, 8]), "grid"),
    "negative chunks": (_with("chunk_grid/configuration/chunk_shape", [-8, 3, 8, 8]), "shape"),
    "huge chunks": (_with("chunk_grid/configuration/chunk_shape", [2**70, 3, 8, 8]), ""),
    "chunks that do not tile": (_with(f"{SHARDING}/chunk_shape", [3, 3, 8, 8]), "do not tile"),
    "negative shape": (_with("shape", [-1, 3, 8, 8]), "shape"),
    "huge shape": (_with("shape", [2**70, 3, 8, 8]), ""),
    "fractional shape": (_with("shape", [2.5, 3, 8, 8]), "shape"),
    "shape of truths": (_with("shape", [True, 3, 8, 8]), "shape"),
    "scalar": (
        array_document((), "uint8", (), codec_metadata(RawCodec(), "uint8")),
        "do not tile",
    ),
    "codec behind the shard": (
        _with("codecs", [*_document()["codecs"], {"name": "gzip"}]),
        "whole shards",
    ),
    "nested shards": (_with(f"{SHARDING}/codecs", _document()["codecs"]), "sharding_indexed"),
    "transformed storage": (
        {**_document(), "storage_transformers": [{"name": "scramble"}]},
        "storage_transformers",
    ),
    "index codecs": (_with(f"{SHARDING}/index_codecs", [{"name": "zstd"}]), "index codecs"),
    "big-endian index": (
        _with(f"{SHARDING}/index_codecs/0/configuration/endian", "big"),
        "little-endian",
    ),
    "index location": (_with(f"{SHARDING}/index_location", "middle"), "middle"),
    "key encoding": (_with("chunk_key_encoding/name", "fancy"), "'fancy'"),
    "separator that leads elsewhere": (
        _with("chunk_key_encoding/configuration/separator", "/../../"),
        "separator",
    ),
    "separator that is none": (_with("chunk_key_encoding/configuration/separator", 5), ""),
    "endian": (_with(f"{SHARDING}/codecs/0/configuration/endian", "middle"), "middle"),
    "fill value of words": (_with("fill_value", "seven"), "fill"),
    "fill value of a list": (_with("fill_value", [1, 2]), "fill"),
    "fill value too wide": ({**_with("data_type", "uint8"), "fill_value": 300}, "fill"),
    "fill value of too many bits": (_with("fill_value", "0x" + "f" * 40), "fill"),
    "fill value of no bits": (_with("fill_value", "0xzz"), "fill"),
    "image filter of floats": (
        _with(f"{SHARDING}/codecs", codec_metadata(ImageCodec(), "uint8")),
        "precache.image",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_forged_document_is_refused_with_its_place(case: str) -> None:
    document, words = REFUSED[case]
    with pytest.raises(StoreError) as caught:
        parse_array(document, WHERE)
    assert WHERE in str(caught.value)
    assert words in str(caught.value)


def test_the_image_filter_is_refused_for_rows_that_are_no_images() -> None:
    codecs = codec_metadata(ImageCodec(), "uint8")
    with pytest.raises(StoreError):
        parse_array(array_document((5, 100), "uint8", (1, 100), codecs), WHERE)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"1" * 5000, b"[" * 100_000, b'{"a":' * 50_000]
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="is not"):
        parse_json(data, WHERE)


def test_the_documents_of_a_built_store_parse(store: BuiltStore) -> None:
    documents = sorted(store.version_folder.rglob("zarr.json"))
    names = {path.parent.relative_to(store.version_folder).as_posix() for path in documents}
    groups = {".", "shards", "_checks", "_sums"}
    small = {"label", "valid", "key", "rows", "holes", "_spare"}
    assert names == groups | small | {"image", "shards/image", "_checks/image", "_sums/image"}
    kinds = [parse_json(path.read_bytes(), str(path))["node_type"] for path in documents]
    assert kinds.count("array") == len(names - groups)
    for path, kind in zip(documents, kinds, strict=True):
        document = parse_json(path.read_bytes(), str(path))
        if kind == "array" and document["data_type"] != "string":
            assert zarr_metadata.parse_array(document, str(path)).shape[0] > 0
