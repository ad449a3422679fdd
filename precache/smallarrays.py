"""Small arrays: one entry for each row or shard, as plain Zarr arrays of a few objects in all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numcodecs import zstd
from numcodecs.vlen import VLenUTF8

from precache import metadata
from precache.ahead import Readable
from precache.codecs import codec_metadata
from precache.errors import DamageError, StorageError
from precache.pipeline import ZstdCodec

KEYS_PER_CHUNK = 1 << 16
ROWS_PER_CHUNK = 1 << 20


def read_small(folder: Readable, arrays: Mapping[str, metadata.Array]) -> dict[str, np.ndarray]:
    """Whole unsharded arrays, chunked along axis 0 only, all their objects read together."""
    names = [
        f"{name}/{array.object_name(number)}"
        for name, array in arrays.items()
        for number in range(array.objects)
    ]
    stored = iter(zip(names, folder.read_many(names, [-1] * len(names)), strict=True))
    found = {}
    for name, array in arrays.items():
        values = found[name] = np.full(array.shape, array.fill_value, array.dtype)
        step = array.object_shape[0]
        for number, (object_name, data) in zip(range(array.objects), stored, strict=False):
            if isinstance(data, StorageError):
                raise data
            chunk = np.empty(array.chunk_shape, array.dtype)
            try:
                array.decoder.decode(memoryview(data), chunk)
            except DamageError as error:
                raise DamageError(f"{folder.path(object_name)} is damaged: {error}") from None
            part = values[number * step : (number + 1) * step]
            part[...] = chunk[: len(part)]
    return found


def small_array(
    values: np.ndarray, dimension_names: Sequence[str], fill_value: Any = 0
) -> dict[str, bytes]:
    """Name below the array's folder -> bytes of a zstd-compressed array."""
    rows = max(1, min(len(values), ROWS_PER_CHUNK))
    chunk_shape = (rows, *values.shape[1:])
    dtype = values.dtype.name
    document = metadata.array_document(
        values.shape,
        dtype,
        chunk_shape,
        codec_metadata(ZstdCodec(), "uint8"),
        fill_value=fill_value,
        dimension_names=dimension_names,
    )
    files = {"zarr.json": json.dumps(document).encode()}
    tail = "/0" * (values.ndim - 1)
    for number, start in enumerate(range(0, len(values), rows)):
        chunk = np.full(chunk_shape, fill_value, values.dtype)
        part = values[start : start + rows]
        chunk[: len(part)] = part
        files[f"c/{number}{tail}"] = _compress(chunk.astype(chunk.dtype.newbyteorder("<")))
    return files


def file_array(data: bytes) -> dict[str, bytes]:
    """A file as a Zarr array of its bytes, since Zarr software stumbles over plain files."""
    codecs = [{"name": "bytes"}]
    document = metadata.array_document(
        (len(data),), "uint8", (len(data),), codecs, dimension_names=["byte"]
    )
    return {"zarr.json": json.dumps(document).encode(), "c/0": data}


def string_array(values: Sequence[str], dimension_name: str) -> dict[str, bytes]:
    """Name below the array's folder -> bytes of a Zarr `string` array (codec `vlen-utf8`)."""
    rows = max(1, min(len(values), KEYS_PER_CHUNK))
    codecs = [{"name": "vlen-utf8"}, codec_metadata(ZstdCodec(), "uint8")[1]]
    document = metadata.array_document(
        (len(values),), "string", (rows,), codecs, fill_value="", dimension_names=[dimension_name]
    )
    files = {"zarr.json": json.dumps(document).encode()}
    for number, start in enumerate(range(0, len(values), rows)):
        part = [*values[start : start + rows]]
        chunk = np.array(part + [""] * (rows - len(part)), object)
        files[f"c/{number}"] = _compress(VLenUTF8().encode(chunk))
    return files


def decode_strings(data: bytes, where: str) -> np.ndarray:
    """An object array of str from one chunk of a `string_array`."""
    try:
        return np.asarray(VLenUTF8().decode(zstd.decompress(data)))
    except (RuntimeError, ValueError) as error:
        raise DamageError(f"{where} is damaged: {error}") from None


def _compress(data: Any) -> bytes:
    return bytes(zstd.compress(data, 3, True))
