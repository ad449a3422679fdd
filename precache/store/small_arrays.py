"""Small arrays: one entry for each row or shard, as plain Zarr arrays of a few objects.

Their layout follows from their length alone. So precache reads them without their `zarr.json`,
which is for other software, and no object is decoded into more memory than its layout allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numcodecs import zstd
from numcodecs.vlen import VLenUTF8

from precache.codecs.chunk import codec_metadata, require_plausible, zstd_content_size
from precache.errors import DamageError
from precache.recipe.recipe import ZstdCodec
from precache.store.arrays import Array, array_document, small

KEYS_PER_CHUNK = 1 << 16

# --- reading ------------------------------------------------------------------------------------


def read_small(
    array: Array, folder: str, read: Callable[[Sequence[str]], Mapping[str, bytes]], place: str
) -> np.ndarray:
    """Read a whole small array.

    Parameters
    ----------
    folder
        The array's.
    read
        Reads objects: name -> bytes.
    place
        Start of their paths, for messages.
    """
    objects = read([f"{folder}/{array.object_name(number)}" for number in range(array.objects)])
    chunks = [decode_chunk(array, data, f"{place}{name}") for name, data in objects.items()]
    values = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    return values[: array.rows]  # without the padding of the last chunk


def read_strings(
    count: int, folder: str, read: Callable[[Sequence[str]], Mapping[str, bytes]], place: str
) -> Iterator[np.ndarray]:
    """Yield the parts of a `string_array` of `count` values: (n,) object arrays of str.

    Parameters are as in `read_small`.
    """
    rows = max(1, min(count, KEYS_PER_CHUNK))
    objects = read([f"{folder}/c/{number}" for number in range(-(-count // rows))])
    for start, (name, data) in zip(range(0, count, rows), objects.items(), strict=True):
        yield decode_strings(data, f"{place}{name}", rows)[: count - start]


def decode_chunk(array: Array, data: bytes, where: str) -> np.ndarray:
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
    array = small(values.shape, values.dtype.name, per_chunk)
    document = array.document(dimension_names, fill_value)
    files = {"zarr.json": json.dumps(document).encode()}
    for number, part in enumerate(_runs(values, array.chunk_rows)):
        chunk = np.full(array.chunk_shape, fill_value, values.dtype)
        chunk[: len(part)] = part
        data = _compress(chunk.astype(chunk.dtype.newbyteorder("<")))
        files[array.object_name(number)] = data
    return files


def file_array(data: bytes) -> dict[str, bytes]:
    """Make a Zarr array of a file's bytes, since Zarr software stumbles over plain files."""
    return {"zarr.json": file_array_document(len(data)), "c/0": data}


def file_array_document(nbytes: int) -> bytes:
    """Make the `zarr.json` of a `file_array`."""
    document = array_document((nbytes,), "uint8", (nbytes,), [{"name": "bytes"}], ["byte"])
    return json.dumps(document).encode()


def string_array(values: Sequence[str], dimension_name: str) -> dict[str, bytes]:
    """Make a Zarr `string` array (codec `vlen-utf8`): name below its folder -> bytes."""
    rows, count = max(1, min(len(values), KEYS_PER_CHUNK)), len(values)
    codecs = [{"name": "vlen-utf8"}, codec_metadata(ZstdCodec(), "uint8")[1]]
    document = array_document((count,), "string", (rows,), codecs, [dimension_name], "")
    files = {"zarr.json": json.dumps(document).encode()}
    for number, part in enumerate(_runs(values, rows)):
        chunk = np.array([*part] + [""] * (rows - len(part)), object)
        files[f"c/{number}"] = _compress(VLenUTF8().encode(chunk))
    return files


def _runs(values: Any, length: int) -> Iterator[Any]:
    return (values[start : start + length] for start in range(0, len(values), length))


def _compress(data: Any) -> bytes:
    return bytes(zstd.compress(data, 3, True))
