"""Values of fields of a kind: what their functions are given and return, and the stored rows."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from precache.errors import SampleError
from precache.recipe.recipe import FieldKind
from precache_workers.sources.dataset_items import described


def value_of(kind: FieldKind, value: Any) -> Any:
    """Return a part of a sample, or what a function returned, as a str, bytes, or an array.

    Raises
    ------
    SampleError
        It is none of that kind.
    """
    match kind:
        case "text":
            return _text(value)
        case "bytes" if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        case "bytes":
            way = '; kind = "text" takes it' if isinstance(value, str) else ""
            raise SampleError(f"it is {described(value)}, and its field is of kind bytes{way}")
    array = _numbers(value)
    # Boxes of torchvision.tv_tensors say their format.
    form = getattr(getattr(value, "format", None), "name", "XYXY")
    if kind == "boxes" and form != "XYXY":
        raise SampleError(f"it is of format {form}: convert it to XYXY, x1, y1, x2, y2")
    return array if kind == "ragged" else array.astype(np.float32, copy=False)


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise SampleError(f"it is no text in UTF-8: {error}") from None
    if not isinstance(value, str):
        raise SampleError(f"it is {described(value)}, and its field is of kind text")
    return str(value)


def _numbers(value: Any) -> np.ndarray:
    """Return an array of numbers; floats of a list, which have no dtype of their own, as float32.

    Lists of arrays have that of the arrays.
    """
    require_exact(value)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or not array.ndim:
        way = '; of one number for each sample, state ops = [] and codec = "zstd", and no kind'
        raise SampleError(
            f"it is {described(value)}, and no array or list of numbers"
            + way * (array.dtype.kind in "biuf")
        )
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    untyped = isinstance(first, float) or (isinstance(first, int) and array.dtype == np.float64)
    return array.astype(np.float32 if untyped else array.dtype.newbyteorder("="), copy=False)


def require_exact(value: Any) -> None:
    """Raise `SampleError` for values that NumPy would change while it makes an array of them.

    These are masked ones, which would lose their mask, whole numbers of a list that no int64
    holds, which would become floats, and lists of which it makes no array.
    """
    if np.ma.is_masked(value):
        raise SampleError("it has masked values, and a row has no mask: fill them in the dataset")
    if not isinstance(value, list | tuple):
        return
    if value and isinstance(value[0], bytes):
        raise SampleError(
            f"it is {described(value)}: give each of several images a part and a field of its own, "
            "or decode them to one height and width in the dataset"
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise SampleError(
            f"it is {described(value)}, and no array of one dtype and shape"
        ) from None
    with contextlib.suppress(TypeError, ValueError):  # values of no order, which others refuse
        if array.dtype.kind in "fuO" and (np.abs(array) >= 2.0**63).any():
            whole = (number for number in np.array(value, object).flat if isinstance(number, int))
            beyond = next((n for n in whole if not -(2**63) <= n < 2**63), None)
            if beyond is not None:
                raise SampleError(
                    f"it is a list with {beyond}, which no int64 holds: return an array of uint64, "
                    "or floats"
                )


def row_of(kind: FieldKind, value: Any) -> np.ndarray:
    """Return the row that is stored of a value."""
    if kind == "text":
        try:
            value = value.encode()
        except UnicodeEncodeError as error:
            raise SampleError(f"it is no text of valid Unicode: {error}") from None
    return (
        np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.ascontiguousarray(value)
    )


def stored_value(kind: FieldKind, row: np.ndarray) -> Any:
    """Return the value of a stored row."""
    if kind in ("text", "bytes"):
        return row.tobytes().decode() if kind == "text" else row.tobytes()
    return row.copy()
