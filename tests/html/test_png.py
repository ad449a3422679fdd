"""Arrays as PNG files: what another reader decodes is what went in."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from precache.html.png import Preview, downsample, encode_png, preview

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


@given(arrays.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))))
def test_pillow_reads_the_same_pixels(pixels: np.ndarray) -> None:
    with Image.open(io.BytesIO(encode_png(pixels))) as image:
        assert image.mode == MODES[pixels.shape[2]]
        assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)


def test_bytes_are_shown_as_they_are_and_masks_in_black_and_white() -> None:
    """Channels first or last; a large picture is thinned."""
    row = np.arange(3 * 20 * 5, dtype=np.uint16).astype(np.uint8).reshape(3, 20, 5)
    shown, last = preview(row), preview(row.transpose(1, 2, 0))
    assert shown.note == "5 x 20, uint8"
    assert np.array_equal(shown.pixels, row.transpose(1, 2, 0))
    assert np.array_equal(last.pixels, shown.pixels)
    mask = preview(np.eye(16, dtype=np.bool_)).pixels
    assert mask is not None
    assert np.array_equal(mask[..., 0], np.eye(16, dtype=np.uint8) * 255)
    few = downsample(np.zeros((2100, 10, 3), np.uint8), 1024)
    assert few.shape == (700, 4, 3)
    assert downsample(few, 1024).shape == few.shape


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", "uint16", "int8"])
def test_other_numbers_are_scaled_and_said_so(dtype: str) -> None:
    given = [0, 30000, 60000] if dtype == "uint16" else [-100, 0, 100]
    shown = preview(np.array(given, dtype).reshape(1, 1, 3))
    assert shown.pixels is not None
    assert shown.pixels.ravel().tolist() == [0, 128, 255]
    low, high = ("0", "6e+04") if dtype == "uint16" else ("-100", "100")
    assert shown.note == f"3 x 1, {dtype}; scaled: {dtype} {low} is black, {high} is white"


@given(arrays.arrays(np.float64, (3, 2, 2)))
@example(np.full((3, 2, 2), 5e-324))
def test_no_float_is_too_wild(values: np.ndarray) -> None:
    with np.errstate(all="raise", under="ignore"):  # half of the least float is 0
        shown = preview(values)
    assert shown.pixels is not None
    assert shown.pixels.shape == (2, 2, 3)
    assert ("not finite" in shown.note) == (not np.isfinite(values).all())


def test_what_is_no_picture_is_told_as_numbers() -> None:
    for shape in [(512,), (4, 4), (7, 9, 11), (3, 0, 4), (2, 3, 4, 5)]:
        shown = preview(np.zeros(shape, np.float32))
        assert shown.pixels is None
        assert shown.note.startswith(f"float32 {shape}: ")
    for values, text in (
        (np.float32(1.5).reshape(()), "float32: 1.5"),
        (np.array([1, 2], np.int64), "int64 (2,): 1 2"),
        (
            np.arange(100, dtype=np.int16),
            "int16 (100,): 0 … 99, mean 49.5; starts with 0 1 2 3 4 5",
        ),
        (np.zeros((0, 4), np.int8), "int8 (0, 4): "),
    ):
        assert preview(values) == Preview(None, text)
