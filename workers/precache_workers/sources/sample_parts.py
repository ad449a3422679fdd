"""Parts of samples: the values of members, files and cells of tables, and samples made of them.

A part is the bytes of an encoded image, text, bytes, or an array. One that cannot be used is an
error in its place: the fields that start from it have a hole, and only these need it.
"""

from __future__ import annotations

import io
import math
import threading
import tokenize
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.lib import format as npy

from precache.errors import FetchError, SampleError
from precache.store.columns import numbers_of
from precache_workers.sources.base import IMAGE, Fetched
from precache_workers.sources.dataset_items import Part, content_of, hashed
from precache_workers.sources.labels import is_binary, is_list, kind_of

TEXT_SUFFIXES = ("txt", "caption", "json", "cls")
VALUE_SUFFIXES = (*TEXT_SUFFIXES, "npy")
"""Suffixes of members and files that are text in UTF-8, and of all that are no bytes."""

_PARSING = threading.Lock()
"""NumPy parses headers by `ast`, which in CPython before 3.12.2 fails in two threads at a time.

https://github.com/python/cpython/issues/106905
"""

STARTS = "text, bytes, numbers, or lists of numbers"
"""What parts of samples are in columns of tables."""

NO_NUMBER, IRREGULAR = (
    "has missing values among its numbers",
    "has lists of several lengths, which are no array",
)


def joined(parts: Mapping[Part, Any], files: Mapping[Part, str] | None = None) -> Fetched:
    """Return the sample of some parts, or an error: of what was not fetched, or of all parts.

    Its content is that of the bytes if it has no other part.

    Parameters
    ----------
    parts
        Values, None where there is none, or errors in place of them; the first is the default
        input.
    files
        As in `Sample`.
    """
    if not files:
        parts = {name: _named(name, parts) for name in parts}
    values = [*parts.values()]
    errors = [value for value in values if isinstance(value, FetchError | SampleError)]
    unfetched = [error for error in errors if isinstance(error, FetchError)]
    if unfetched or len(errors) == len(values):
        return [*unfetched, *errors][0]
    contents = {
        name: xxhash.xxh3_128_hexdigest(value)
        if isinstance(value, bytes)
        else content_of({name: (str(value),) if isinstance(value, SampleError) else value})
        for name, value in parts.items()
    }
    return replace(hashed(parts, contents), files=files or {})


def _named(name: Part, parts: Mapping[Part, Any]) -> Any:
    """Return a value, or the error of one with its name."""
    value = parts[name]
    if value is None and name == IMAGE:
        return SampleError("its row has no image")
    if value is None:
        held = [repr(other) for other, part in parts.items() if part is not None]
        return SampleError(f"has no {name!r}" + f"; it has {', '.join(held)}" * bool(held))
    named = isinstance(value, SampleError) and name != IMAGE
    return SampleError(f"its {name!r} {value}") if named else value


# --- members and files --------------------------------------------------------------------------


def value_of(name: str, data: bytes) -> bytes | str | np.ndarray | SampleError:
    """Return the value of a member or file, by the last suffix of its name."""
    suffix = name.rpartition(".")[2].lower()
    if suffix in TEXT_SUFFIXES:
        return text_of(data)
    return _array(data) if suffix == "npy" else data


def text_of(data: bytes) -> str | SampleError:
    """Return the text that bytes are, or an error in its place."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return SampleError(f"is not UTF-8 (at byte {error.start:,}); save it as UTF-8")


def _array(data: bytes) -> np.ndarray | SampleError:
    """Return the array of an .npy file, in the memory of its bytes."""
    try:
        shape, by_columns, dtype, start = array_header(data)
    except SampleError as error:
        return error
    held = len(data) - start
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != held:
        return SampleError(f"is said to be {shape} of {dtype}, and has {held:,} bytes of values")
    array = np.frombuffer(data, dtype, offset=start)
    array = array.reshape(shape, order="F" if by_columns else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def array_header(
    data: bytes, *, texts: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, order and dtype of the array of an .npy file, and where its values begin.

    The order is True for Fortran's. The shape is not checked against the file.

    Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

    Parameters
    ----------
    texts
        Values may be text.

    Raises
    ------
    SampleError
        It is no array of numbers.
    """
    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        with _PARSING:
            shape, by_columns, dtype = read(stream)
    except (ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError,
            ValueError, tokenize.TokenError) as error:  # fmt: skip
        raise SampleError(f"is no NumPy array: {error}") from None
    is_text = texts and dtype.kind == "U" and dtype.itemsize > 0
    if not is_text and (dtype.kind not in "biuf" or dtype.itemsize > 8 or dtype.shape):
        way_out = "; of text, save array.astype(str)" if texts else ""
        raise SampleError(
            f"is an array of {dtype}, and not of numbers; nothing is unpickled{way_out}"
        )
    return shape, by_columns, dtype, stream.tell()


# --- cells of tables ----------------------------------------------------------------------------


def can_start(kind: Any) -> bool:
    """Return True for an Arrow type whose values can be parts of samples."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if is_binary(kind) or kind_of(kind) == "names":
        return True
    while is_list(kind):
        kind = kind.value_type
    return kind_of(kind) in ("numbers", "values")


def cell_of(column: Any, row: int) -> bytes | str | np.ndarray | SampleError | None:
    """Return the value of a row of an Arrow array, of a type that `can_start` takes."""
    values = column.slice(row, 1)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count:
        return None
    if is_binary(values.type):
        data: bytes = values[0].as_py()
        return data
    if kind_of(values.type) == "names":
        return text_of(values[0].as_buffer().to_pybytes())
    shape = []
    while is_list(values.type):
        if values.null_count:
            return SampleError(NO_NUMBER)
        if pa.types.is_fixed_size_list(values.type):
            shape.append(values.type.list_size)
        else:
            lengths = pc.list_value_length(values).unique().to_pylist()
            if len(lengths) > 1:
                return SampleError(IRREGULAR)
            shape += lengths or [0]
        values = values.flatten()
    if values.null_count:
        return SampleError(NO_NUMBER)
    return np.array(numbers_of(values)).reshape(shape)
