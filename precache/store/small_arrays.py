"""Small arrays: one entry for each row or shard, as plain Zarr arrays of a few objects.

Their layout follows from their length alone. So precache reads them without their `zarr.json`,
which is for other software, and no object is decoded into more memory than its layout allows.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numcodecs import zstd
from numcodecs.vlen import VLenUTF8

from precache.codecs.chunk import codec_metadata, require_plausible, zstd_content_size
from precache.errors import DamageError
from precache.recipe.recipe import ZstdCodec
from precache.store import zarr_metadata

KEYS_PER_CHUNK = 1 << 16
ROWS_PER_CHUNK = 1 << 20

READ_TOGETHER = 256
"""Objects that are read at a time, before the first of them is decoded."""

# --- layout -------------------------------------------------------------------------------------


def small_document(
    shape: Sequence[int],
    dtype: str,
    dimension_names: Sequence[str],
    fill_value: Any = 0,
    per_chunk: int | None = None,
) -> zarr_metadata.Json:
    """Return the `zarr.json` of a `small_array`."""
    chunk_shape = (max(1, min(shape[0], per_chunk or ROWS_PER_CHUNK)), *shape[1:])
    codecs = codec_metadata(ZstdCodec(), "uint8")
    return zarr_metadata.array_document(
        shape, dtype, chunk_shape, codecs, fill_value=fill_value, dimension_names=dimension_names
    )


def small_layout(
    shape: Sequence[int], dtype: str, fill_value: Any = 0, per_chunk: int | None = None
) -> zarr_metadata.Array:
    """Return the layout of a `small_array`."""
    names = [""] * len(shape)
    document = small_document(shape, dtype, names, fill_value, per_chunk)
    return zarr_metadata.parse_array(document, "a small array")


# --- reading ------------------------------------------------------------------------------------


def read_small(
    arrays: Mapping[str, zarr_metadata.Array],
    read: Callable[[Sequence[str]], list[bytes]],
    place: str,
) -> dict[str, np.ndarray]:
    """Read whole small arrays, many objects at a time.

    Memory is taken only for objects that exist, even if an array claims to be longer.

    Parameters
    ----------
    read
        Reads objects by name.
    place
        Start of their paths, for messages.
    """
    parts: dict[str, list[np.ndarray]] = {name: [] for name in arrays}
    numbers = ((name, n) for name, array in arrays.items() for n in range(array.objects))
    while batch := list(itertools.islice(numbers, READ_TOGETHER)):
        names = [f"{name}/{arrays[name].object_name(number)}" for name, number in batch]
        for (name, _), object_name, data in zip(batch, names, read(names), strict=True):
            parts[name].append(decode_chunk(arrays[name], data, f"{place}{object_name}"))
    return {name: join_chunks(arrays[name], chunks) for name, chunks in parts.items()}


def join_chunks(array: zarr_metadata.Array, chunks: Sequence[np.ndarray]) -> np.ndarray:
    """Join all chunks of a small array, without the padding of the last one."""
    if not chunks:
        return np.empty(array.shape, array.dtype)
    values = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    return values[: array.shape[0]]


def decode_chunk(array: zarr_metadata.Array, data: bytes, where: str) -> np.ndarray:
    """Decode one chunk of a small array.

    Raises
    ------
    DamageError
        The bytes are damaged; names `where`.
    """
    try:
        _require_size(data, array.chunk_nbytes)
        chunk = np.empty(array.chunk_shape, array.dtype)
        array.decoder.decode(memoryview(data), chunk)
        if array.dtype == "bool" and chunk.view(np.uint8).max(initial=0) > 1:
            raise DamageError("it holds values that are neither true nor false")
    except DamageError as error:
        raise DamageError(f"{where} is damaged: {error}") from None
    return chunk


def decode_strings(data: bytes, where: str, count: int) -> np.ndarray:
    """Decode one chunk of a `string_array` into a (count,) object array of str.

    Raises
    ------
    DamageError
        The bytes are damaged; names `where`.
    """
    try:
        _require_size(data, None)
        decoded = zstd.decompress(data)
        if int.from_bytes(decoded[:4], "little") != count:  # memory is taken for as many
            raise DamageError(f"it does not hold {count} strings")
        return np.asarray(VLenUTF8().decode(decoded))
    except (DamageError, RuntimeError, SystemError, ValueError) as error:
        raise DamageError(f"{where} is damaged: {error}") from None


def _require_size(frame: bytes, nbytes: int | None) -> None:
    """Raise `DamageError` unless a frame decodes to `nbytes`, or if None, plausibly many bytes."""
    size = zstd_content_size(memoryview(frame))
    if size is None or nbytes not in (None, size):
        raise DamageError("its frame is another size")
    require_plausible(len(frame), size)


# --- writing ------------------------------------------------------------------------------------


def small_array(
    values: np.ndarray,
    dimension_names: Sequence[str],
    fill_value: Any = 0,
    per_chunk: int | None = None,
) -> dict[str, bytes]:
    """Make a zstd-compressed array: name below its folder -> bytes."""
    document = small_document(
        values.shape, values.dtype.name, dimension_names, fill_value, per_chunk
    )
    files = {"zarr.json": json.dumps(document).encode()}
    tail, per_chunk = "/0" * (values.ndim - 1), per_chunk or ROWS_PER_CHUNK
    rows = min(len(values), per_chunk)
    for number, start in enumerate(range(0, len(values), per_chunk)):
        part = values[start : start + per_chunk]
        chunk = np.full((rows, *values.shape[1:]), fill_value, values.dtype)
        chunk[: len(part)] = part
        files[f"c/{number}{tail}"] = _compress(chunk.astype(chunk.dtype.newbyteorder("<")))
    return files


def file_array(data: bytes) -> dict[str, bytes]:
    """Make a Zarr array of a file's bytes, since Zarr software stumbles over plain files."""
    return {"zarr.json": file_array_document(len(data)), "c/0": data}


def file_array_document(nbytes: int) -> bytes:
    """Make the `zarr.json` of a `file_array`."""
    codecs = [{"name": "bytes"}]
    document = zarr_metadata.array_document(
        (nbytes,), "uint8", (nbytes,), codecs, dimension_names=["byte"]
    )
    return json.dumps(document).encode()


def string_array(values: Sequence[str], dimension_name: str) -> dict[str, bytes]:
    """Make a Zarr `string` array (codec `vlen-utf8`): name below its folder -> bytes."""
    count, rows = len(values), min(len(values), KEYS_PER_CHUNK)
    codecs = [{"name": "vlen-utf8"}, codec_metadata(ZstdCodec(), "uint8")[1]]
    document = zarr_metadata.array_document(
        (count,), "string", (max(1, rows),), codecs, fill_value="", dimension_names=[dimension_name]
    )
    files = {"zarr.json": json.dumps(document).encode()}
    for number, start in enumerate(range(0, count, KEYS_PER_CHUNK)):
        part = values[start : start + KEYS_PER_CHUNK]
        chunk = np.array([*part] + [""] * (rows - len(part)), object)
        files[f"c/{number}"] = _compress(VLenUTF8().encode(chunk))
    return files


def _compress(data: Any) -> bytes:
    return bytes(zstd.compress(data, 3, True))
