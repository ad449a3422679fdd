"""Windows of images: the compiled resizer, its twin in NumPy, and the exact result."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from precache.codecs import kernels
from precache.codecs.windows import Windows, resize_window
from precache.transforms import _nearest_pixels
from tests.conftest import photo
from tests.support import numpy_pixels

compiled = pytest.mark.skipif(kernels.compiled().functions is None, reason="nothing is compiled")
pytestmark = compiled
MOST_ERROR = 0.52
"""Levels from the exact result, where windows are shrunk to no less than a fourth."""

Box = tuple[int, int, int, int]
Size = tuple[int, int]


def image(number: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    noise = np.random.default_rng(number).integers(0, 256, (channels, height, width), np.uint8)
    smooth = photo(number, height, width).transpose(2, 0, 1)[[0] * channels]
    return np.where(noise < 128, noise * 2, smooth).astype(np.uint8)


def window(box: Box, size: Size, mirrored: bool) -> Windows:
    scales = np.array([[box[2] / size[0], box[3] / size[1]]])
    no = np.zeros(1, bool)
    return Windows(np.array([box]), np.zeros((1, 2)), scales, np.array([mirrored]), no)


def resized(pixels: np.ndarray, seen: Windows, size: Size) -> np.ndarray:
    out = np.zeros((1, len(pixels), *size), np.uint8)
    resize_window(pixels, seen, out)
    return out[0]


def error_of(pixels: np.ndarray, seen: Windows, size: Size) -> float:
    """The most levels from the result in double precision."""
    top, left, height, width = seen.boxes[0].tolist()

    def weights(length: int, axis: int) -> np.ndarray:
        scale = seen.scales[0, axis]
        centres = seen.starts[0, axis] + (np.arange(size[axis]) + 0.5) * scale
        distances = np.abs(np.arange(length) + 0.5 - centres[:, None]) / max(1, scale)
        values = np.maximum(0, 1 - distances)
        return values / values.sum(axis=1, keepdims=True)

    box = pixels[:, top : top + height, left : left + width].astype(np.float64)
    exact: np.ndarray = weights(height, 0) @ box @ weights(width, 1).T
    exact = exact[:, :, ::-1] if seen.mirrored[0] else exact
    return float(np.abs(resized(pixels, seen, size) - exact).max())


@st.composite
def cases(
    draw: st.DrawFn, channels: tuple[int, ...] | list[int] = (1, 3, 4)
) -> tuple[np.ndarray, Windows, Size]:
    height, width = draw(st.integers(1, 90)), draw(st.integers(1, 300))
    size = draw(st.integers(1, 40)), draw(st.integers(1, 150))
    h, w = draw(st.integers(1, height)), draw(st.integers(1, width))
    box = draw(st.integers(0, height - h)), draw(st.integers(0, width - w)), h, w
    pixels = image(draw(st.integers(0, 9)), height, width, draw(st.sampled_from(channels)))
    return pixels, window(box, size, draw(st.booleans())), size


@settings(max_examples=300, deadline=None)
@given(cases())
def test_compiled_and_numpy_give_the_same_bytes(case: tuple[np.ndarray, Windows, Size]) -> None:
    pixels, seen, size = case
    fast = resized(pixels, seen, size)
    out = np.zeros((1, len(pixels), *size), np.uint8)
    resize_window(pixels.transpose(1, 2, 0).copy(), seen, out, interleaved=True)
    np.testing.assert_array_equal(out[0], fast)
    numpy_pixels.resize(pixels, seen, out[0])
    np.testing.assert_array_equal(out[0], fast)
    assert error_of(pixels, seen, size) <= 0.65


def test_crops_of_photos_are_within_half_a_level_of_the_exact_result() -> None:
    """And a little more where they are shrunk by any scale."""
    for seed in range(8):
        random = np.random.default_rng(seed)
        pixels, size = image(seed, 375, 500), (224, 224)
        h, w = (int(random.integers(60, length)) for length in (375, 500))
        box = int(random.integers(0, 375 - h)), int(random.integers(0, 500 - w)), h, w
        assert error_of(pixels, window(box, size, bool(seed % 2)), size) <= MOST_ERROR
    shrunk = window((3, 2, 1390, 890), (5, 9), False)
    assert error_of(image(1, 1400, 900), shrunk, (5, 9)) <= 0.55


@pytest.mark.parametrize("sides", [(1, 1), (97, 3), (1400, 9), (9, 1400), (2500, 2)])
def test_even_areas_stay_as_they_are_at_any_scale(sides: Size) -> None:
    for value in (0, 255):
        pixels = np.full((3, *sides), value, np.uint8)
        for size in ((1, 1), (7, 5), (23, 40)):
            out = resized(pixels, window((0, 0, *sides), size, False), size)
            assert (out == value).all()


def test_a_resize_and_a_crop_of_it_are_one_window() -> None:
    pixels, (height, width) = image(4, 300, 410), (200, 273)
    whole = torch.from_numpy(pixels)[None]
    around = interpolate(whole.double(), (height, width), mode="bilinear", antialias=True)[0]
    top, left = 20, 33
    starts, scales = (
        np.array([[down * 300 / height, across * 410 / width]])
        for down, across in ((top, left), (1, 1))
    )
    no = np.zeros(1, bool)
    seen = Windows(np.array([[0, 0, 300, 410]]), starts, scales, no, no)
    expected = around[:, top : top + 160, left : left + 160].numpy()
    assert np.abs(resized(pixels, seen, (160, 160)) - expected).max() <= MOST_ERROR


def test_windows_outside_of_their_images_and_images_of_other_channels_are_refused() -> None:
    for box in (
        (-1, 0, 5, 5), (0, 0, 11, 5), (6, 0, 5, 5), (0, 16, 5, 5), (0, 0, 0, 5), (0, 0, 5, -1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="do not lie in their images"):
            resized(image(0, 10, 20), window(box, (4, 4), False), (4, 4))
    out = np.zeros((1, 3, 4, 4), np.uint8)
    with pytest.raises(ValueError, match="an image of 1 channels, and room for 3"):
        resize_window(image(0, 10, 20, 1), window((0, 0, 5, 5), (4, 4), False), out)


@pytest.mark.parametrize("count", [1, 7, 24, 100, 224, 385])
def test_nearest_pixels_are_those_of_torch(count: int) -> None:
    """By single precision: of the centre of 24 pixels of 41, double precision takes another."""
    sizes = np.arange(1, 1200)
    boxes = np.stack([sizes * 0, sizes * 0 + 5, sizes, sizes], 1)
    starts, scales = np.zeros((len(sizes), 2)), np.stack([sizes, sizes], 1) / count
    seen = Windows(boxes, starts, scales, sizes % 2 == 0, sizes % 3 == 0)
    lines = [torch.arange(size, dtype=torch.float32)[None, None] for size in sizes.tolist()]
    wanted = torch.cat([interpolate(line, count, mode="nearest")[0] for line in lines]).numpy()
    np.testing.assert_array_equal(seen.nearest(0, count), wanted)
    turned = np.where(sizes[:, None] % 3 == 0, (sizes[:, None] - 1 - wanted)[:, ::-1], wanted)
    np.testing.assert_array_equal(seen.nearest(1, count), turned + 5)
    on_device = _nearest_pixels(torch.from_numpy(sizes)[:, None], count)
    np.testing.assert_array_equal(on_device, wanted)
