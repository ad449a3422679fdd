"""Ops: pixels held against Pillow doing the same, and whole recipes."""

import contextlib
import itertools
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import interpolate

from precache.errors import RecipeError, SampleError
from precache.recipe.ops import (
    DTYPES,
    CenterCrop,
    Decode,
    HeightWidth,
    HorizontalFlip,
    Operation,
    RandomResizedCrop,
    Resize,
    Spec,
    ToDType,
)
from precache.recipe.recipe import Field, Recipe
from precache.recipe.resampling import Part, resize, resized_shape
from precache.store.layout import RowShape
from precache_workers.ops.behaviour import pattern
from precache_workers.ops.decoding import decode
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.ops.identity import decides, ops_digest
from precache_workers.planning.assembly import Compute, part_left
from precache_workers.shards.field_writer import FieldWriter, stage_rows
from precache_workers.sources.base import Sample
from tests.demo.photos import Photo, plan_photos, render
from tests.support.building import encoded, photograph
from tests.support.pictures import PHOTOGRAPHS, as_array, by_pillow, half_transparent, oriented
from tests.support.stored import stored_array

SAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """The promise: at most 1 level on average, 3 at most."""
    assert found.shape == expected.shape
    difference = np.abs(found.astype(np.int16) - expected)
    assert difference.mean() <= 1
    assert difference.max() <= 3


def center_crop(array: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return CenterCrop(size=size)(array, None)


def recipe_of(*ops: dict[str, Any], seed: int = 0, **field: Any) -> FieldRecipe:
    return FieldRecipe("image", Field(ops=ops, **field), seed)


def row(data: Any, *ops: dict[str, Any], key: str = "key", seed: int = 0) -> np.ndarray:
    return recipe_of({"op": "decode"}, *ops, seed=seed)(Sample({"bytes": data}), key)


# --- resize and crop ----------------------------------------------------------------------------


def by_pillow_resized(image: Image.Image, size: int, interpolation: str) -> Image.Image:
    height, width = resized_shape(image.height, image.width, size)
    return image.resize((width, height), SAMPLING[interpolation])


@pytest.mark.parametrize("interpolation", SAMPLING)
@pytest.mark.parametrize("size", [24, 224, 700])
@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_resizing_agrees_with_pillow(name: str, size: int, interpolation: str) -> None:
    image = photograph(name)
    data = encoded(image, quality=90)
    ops = {"op": "resize", "size": size, "interpolation": interpolation}
    upright = Image.fromarray(by_pillow(data))
    expected = as_array(by_pillow_resized(upright, size, interpolation)).transpose(2, 0, 1)
    assert_close(row(data, ops), expected)


@pytest.mark.parametrize("mode", ["L", "RGBA"])
@pytest.mark.parametrize("interpolation", SAMPLING)
def test_resizing_of_other_colours_agrees_with_pillow(mode: str, interpolation: str) -> None:
    image = half_transparent().convert(mode)
    if mode == "RGBA":
        image.putalpha(255)  # Pillow weights colours by alpha; here there is none
    found = resize(as_array(image), (111, 167), interpolation)
    assert_close(found, as_array(image.resize((167, 111), SAMPLING[interpolation])))


def demo_photos() -> list[Photo]:
    """As a web photo set has them; without the broken ones."""
    return [photo for photo in plan_photos(40, seed=1) if max(photo.size) < 1500]


@pytest.mark.parametrize("interpolation", SAMPLING)
def test_a_photo_set_agrees_with_pillow(interpolation: str) -> None:
    ops = (
        {"op": "resize", "size": 64, "interpolation": interpolation},
        {"op": "center_crop", "size": 56},
    )
    decoded = 0
    for photo in demo_photos():
        data = render(photo)
        if photo.kind in ("truncated", "not an image"):
            with pytest.raises(SampleError):
                row(data, *ops)
            continue
        small = by_pillow_resized(Image.fromarray(by_pillow(data)), 64, interpolation)
        left, top = round((small.width - 56) / 2), round((small.height - 56) / 2)
        expected = np.asarray(small.crop((left, top, left + 56, top + 56)))
        assert_close(row(data, *ops), expected.transpose(2, 0, 1))
        decoded += 1
    assert decoded > 30


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("interpolation", SAMPLING)
def test_a_single_column_is_resized_as_one_of_three_channels(
    interpolation: str, channels: int
) -> None:
    """torch makes something else of it in each process."""
    for height, shape in itertools.product((2, 3, 5, 40), ((1, 1), (3, 1), (8, 8))):
        column = pattern(height, 1, channels)
        other = resize(np.repeat(column, 3, axis=2), shape, interpolation)[..., ::3]
        assert np.array_equal(resize(column, shape, interpolation), other)


def test_black_and_white_and_images_of_the_size_wanted_stay_so() -> None:
    for level in (0, 255):
        flat = np.full((50, 70, 3), level, np.uint8)
        for interpolation in SAMPLING:
            assert (resize(flat, (23, 190), interpolation) == level).all()
            assert resize(flat, (50, 70), interpolation) is flat


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_any_dtype_are_resized_or_refused_with_the_way(dtype: str) -> None:
    """Those of a function, or of images that are unchanged, of which no recipe knows the dtype."""
    values = np.ones((9, 9, 3), dtype)
    assert np.array_equal(resize(values, (4, 5), "nearest"), np.ones((4, 5, 3), dtype))
    if dtype in ("bool", "float16", "int64", "uint64"):
        with pytest.raises(SampleError, match=rf"does not blend values of {dtype}; resize before"):
            resize(values, (4, 5), "bilinear")
    else:
        found = resize(values, (4, 5), "bilinear")
        assert found.dtype == dtype
        assert np.allclose(found, 1)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 600))
def test_the_shorter_side_is_the_size_and_the_other_is_rounded_down(
    height: int, width: int, size: int
) -> None:
    """As torchvision's Resize: ``int(size * long / short)``."""
    found = resized_shape(height, width, size)
    assert min(found) == size
    assert max(found) == int(size * max(height, width) / min(height, width))
    assert (found[0] <= found[1]) is (height <= width) or found[0] == found[1]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.integers(1, 60))
def test_the_crop_is_the_middle_as_torchvision_rounds_it(
    height: int, width: int, crop_height: int, crop_width: int
) -> None:
    array = np.arange(height * width).reshape(height, width, 1)
    if crop_height > height or crop_width > width:
        with pytest.raises(SampleError, match=f"{width} x {height} px is smaller than the crop"):
            center_crop(array, (crop_height, crop_width))
        return
    found = center_crop(array, (crop_height, crop_width))
    top, left = round((height - crop_height) / 2), round((width - crop_width) / 2)
    assert found.shape == (crop_height, crop_width, 1)
    assert found[0, 0, 0] == top * width + left


@given(*[st.integers(0, 40)] * 2, *[st.integers(0, 5)] * 2)
def test_the_middle_of_the_middle_is_the_middle_where_margins_are_of_fours(
    tall: int, wide: int, fours_high: int, fours_wide: int
) -> None:
    """As re-caching holds."""
    middle = (5 + 4 * fours_high, 6 + 4 * fours_wide)
    height, width = middle[0] + tall, middle[1] + wide
    image = np.arange(height * width).reshape(height, width, 1)
    twice = center_crop(center_crop(image, middle), (5, 6))
    assert np.array_equal(twice, center_crop(image, (5, 6)))


@given(
    st.tuples(st.integers(1, 700), st.integers(1, 700)),
    st.tuples(st.integers(1, 400), st.integers(1, 400)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from([1, 3, 4]),
    st.sampled_from(["bilinear", "bicubic", "nearest"]),
)
@example((375, 500), (256, 341), (224 / 256, 224 / 341), 3, "bilinear")
@example((480, 640), (256, 341), (224 / 256, 224 / 341), 3, "bilinear")  # no factor for its width
@example((256, 500), (256, 341), (224 / 256, 224 / 341), 3, "bicubic")
@example((31, 326), (361, 377), (117 / 361, 276 / 377), 3, "bilinear")  # 326 columns of 326
@example((18, 155), (24, 206), (2 / 24, 68 / 206), 1, "bilinear")  # 13 rows of 13
@settings(deadline=None)
def test_resize_and_crop_at_once_makes_the_same_bytes(
    before: tuple[int, int],
    shape: tuple[int, int],
    share: tuple[float, float],
    channels: int,
    interpolation: str,
) -> None:
    array = np.random.default_rng(0).integers(0, 256, (*before, channels), np.uint8)
    size = max(1, round(shape[0] * share[0])), max(1, round(shape[1] * share[1]))
    whole, crop = Resize(size=shape, interpolation=interpolation), CenterCrop(size=size)
    expected = crop(whole(array, None), None)
    assert np.array_equal(whole.before(crop)(array, None), expected)
    assert np.array_equal(crop(expected, None), expected)


@given(
    st.tuples(st.integers(1, 130), st.integers(1, 130)),
    st.tuples(st.integers(1, 130), st.integers(1, 130)),
    st.sampled_from([1, 3, 4]),
)
@settings(deadline=None)
def test_nearest_takes_the_pixels_that_torch_takes(
    before: tuple[int, int], shape: tuple[int, int], channels: int
) -> None:
    array = np.random.default_rng(0).integers(0, 256, (*before, channels), np.uint8)
    planes = torch.from_numpy(array).permute(2, 0, 1)[None]
    expected = interpolate(planes, shape, mode="nearest")[0].permute(1, 2, 0).numpy()
    assert np.array_equal(resize(array, shape, "nearest"), expected)
    whole = RandomResizedCrop(size=shape, interpolation="nearest")
    found = whole(array, np.random.default_rng(1))
    assert {*found.ravel().tolist()} <= {*array.ravel().tolist()}
    wide = resize(array.astype(np.int64) * 1000, shape, "nearest")
    assert np.array_equal(wide, expected.astype(np.int64) * 1000)


MOVES: tuple[Any, ...] = (
    Resize(size=(9, 7)),
    Resize(size=(9, 7), interpolation="nearest"),
    CenterCrop(size=(9, 7)),
    RandomResizedCrop(size=(9, 7)),
    HorizontalFlip(p=1),
)


@pytest.mark.parametrize("op", MOVES, ids=lambda op: op.op)
def test_arrays_without_decode_have_their_channels_last(op: Any) -> None:
    recipe = FieldRecipe("image", Field(ops=[op], codec="zstd"), 0)
    array = np.random.default_rng(0).integers(0, 256, (16, 20, 3), np.uint8)

    def row(value: Any) -> np.ndarray:
        return recipe(Sample({"image": value}), "a")

    whole = row(array)
    np.testing.assert_array_equal(row(array[..., 0]), whole[..., 0])
    np.testing.assert_array_equal(row(torch.from_numpy(array)), whole)
    for other in (array.transpose(2, 0, 1), array[None], torch.from_numpy(array).permute(2, 0, 1)):
        with pytest.raises(SampleError, match="its channels last"):
            row(other)


def test_a_crop_larger_than_the_resize_is_refused() -> None:
    resize, crop = Resize(size=24), CenterCrop(size=(24, 60))
    with pytest.raises(SampleError, match="36 x 24 px is smaller than the crop to 60 x 24"):
        crop(resize.before(crop)(np.asarray(photograph()), None), None)


# --- an op of its own ---------------------------------------------------------------------------


class Corner(Operation):
    """The top left of an image."""

    op: Literal["corner"] = "corner"
    size: HeightWidth

    def spec(self, given: Spec) -> Spec:
        return super().spec(given).sized(self.size)

    def part(self, height: int, width: int) -> Part | None:
        fits = height >= self.size[0] and width >= self.size[1]
        return (slice(0, self.size[0]), slice(0, self.size[1])) if fits else None

    def __call__(self, value: Any, random: np.random.Generator | None) -> np.ndarray:
        corner: np.ndarray = value[: self.size[0], : self.size[1]]
        return corner


def test_all_that_is_known_of_an_op_stands_in_its_class() -> None:
    """Nothing that uses ops knows `Corner`."""
    ops = (Decode(), Resize(size=40), Corner(size=(20, 30)), CenterCrop(size=9))
    field = Field().model_copy(update={"ops": ops})
    recipe = Recipe(fields={"image": Field()}).model_copy(update={"fields": {"image": field}})
    assert (field.shape, field.dtype, field.decodes) == ((3, 9, 9), "uint8", True)
    assert [ops[2].size_after(*size) for size in ((40, 60), (19, 60))] == [(20, 30), None]
    made, sample = FieldRecipe("image", field, 0), Sample({"bytes": encoded(photograph())})
    values = [value for _, value in made.steps(sample, "key")]
    assert np.array_equal(values[3], values[2][:20, :30])
    assert np.array_equal(made(sample, "key"), values[-1].transpose(2, 0, 1))
    stored = values[2].transpose(2, 0, 1)
    part = part_left(field, stored_array(shape=RowShape((3, 40, 60), "u1"), finished=False))
    assert np.array_equal(stored[part], made(sample, "key"))
    assert np.array_equal(made.resume(stored, 2, "key"), made(sample, "key"))
    identities = decides(recipe)
    assert [*identities][2] == "corner(size=(20, 30)) of uint8 x 3"
    digests = {ops_digest(recipe, "image", count, identities) for count in range(5)}
    assert len(digests) == 5


SIDES = st.integers(1, 40)
PAIRS = st.tuples(SIDES, SIDES)
INTERPOLATIONS = st.sampled_from(["bilinear", "bicubic", "nearest"])
LATER_OPS = st.one_of(
    st.builds(Resize, size=SIDES | PAIRS, interpolation=INTERPOLATIONS),
    st.builds(Resize, max_size=SIDES, interpolation=INTERPOLATIONS),
    st.builds(CenterCrop, size=SIDES | PAIRS),
    st.builds(RandomResizedCrop, size=PAIRS, interpolation=INTERPOLATIONS),
    st.builds(HorizontalFlip),
    st.builds(ToDType, dtype=st.sampled_from(DTYPES)),
    st.just(ToDType(dtype="float32", scale=True)),
)


@settings(max_examples=300)
@given(st.sampled_from(["RGB", "L", "RGBA", "P"]), st.lists(LATER_OPS, max_size=4), PAIRS)
def test_a_recipe_tells_its_rows_and_a_stored_row_of_any_prefix_is_resumed_to_the_same(
    mode: Any, later: list[Operation], size: tuple[int, int]
) -> None:
    try:
        field = Field(ops=(Decode(mode=mode), *later))
    except RecipeError:
        assume(False)
    channels = {"RGB": 3, "RGBA": 4}.get(mode, 1)
    # Any dtype can hold these; what a bicubic resize makes of them, not all.
    pixels = np.random.default_rng(0).integers(0, 128, (*size, channels), np.uint8)
    made, sample = FieldRecipe("image", field, 0), Sample({"image": pixels})
    try:
        outputs = [(op, np.array(value)) for op, value in made.steps(sample, "key")][1:]
    except SampleError as error:
        if not re.search("is smaller than the crop|does not hold it", str(error)):
            raise
        return
    row = made(sample, "key").copy()
    assert field.dtype == row.dtype
    assert field.shape in (None, row.shape)
    before = pixels
    for number, (op, value) in enumerate(outputs, 1):
        told = op.size_after(*before.shape[:2])  # type: ignore[union-attr]
        assert told == (None if isinstance(op, RandomResizedCrop) else value.shape[:2])
        if number <= field.fixed_ops:
            stored = np.ascontiguousarray(value.transpose(2, 0, 1))
            assert np.array_equal(made.resume(stored, number, "key"), row)
        before = value


# --- scaled decoding ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [50, 299, 300, 600, 650, [25, 350]])
def test_scaled_decoding_is_another_way_to_the_same_picture(size: int | list[int]) -> None:
    large, wanted = photograph().resize((902, 600)), {"op": "resize", "size": size}
    scaled = recipe_of({"op": "decode", "scaled": True}, wanted)
    for exif in (oriented(1), oriented(6)):
        data = encoded(large, exif=exif, quality=92)
        found, full = scaled(Sample({"bytes": data}), "key"), row(data, wanted)
        assert found.shape == full.shape
        assert np.abs(found.astype(int) - full).mean() < 3
        assert np.array_equal(found, full) is (size not in (50, 299, 300))


# --- random ops ---------------------------------------------------------------------------------

CROP = {"op": "random_resized_crop", "size": [20, 30]}
FLIP = {"op": "horizontal_flip"}


def test_random_ops_depend_on_seed_and_key_alone() -> None:
    data = encoded(photograph(), quality=90)
    made = recipe_of({"op": "decode"}, CROP, FLIP)
    keys = [f"{number}.jpg" for number in range(12)]
    forth = {key: made(Sample({"bytes": data}), key) for key in keys}
    np.random.seed(5)  # noqa: NPY002 - whatever generators of the process are at
    torch.manual_seed(5)
    back = {key: made(Sample({"bytes": data}), key) for key in reversed(keys)}
    assert all(np.array_equal(forth[key], back[key]) for key in keys)
    assert len({array.tobytes() for array in forth.values()}) == len(keys)
    assert not np.array_equal(forth[keys[0]], row(data, CROP, FLIP, key=keys[0], seed=2))


def test_random_ops_are_the_same_on_every_machine() -> None:
    """Golden: boxes and flips, drawn by a generator whose stream NumPy promises to keep."""
    ramp = np.arange(200 * 300, dtype=np.uint32).reshape(200, 300)
    pixels = np.stack([ramp >> 16, ramp >> 8 & 255, ramp & 255], axis=2).astype(np.uint8)
    flips = [
        recipe_of({"op": "decode"}, FLIP)(Sample({"image": pixels}), str(key))[2, 0, 0] != 0
        for key in range(16)
    ]
    assert "".join(str(int(flip)) for flip in flips) == FLIPS


FLIPS = "1101110000010000"


@pytest.mark.parametrize(("p", "least", "most"), [(0, 0, 0), (0.25, 0.2, 0.3), (1, 1, 1)])
def test_flips_come_about_as_often_as_they_should(p: float, least: float, most: float) -> None:
    pixels = np.asarray(photograph().resize((4, 4)))
    made = recipe_of({"op": "decode"}, {"op": "horizontal_flip", "p": p})
    upright, mirrored = pixels.transpose(2, 0, 1), pixels[:, ::-1].transpose(2, 0, 1)
    found = [made(Sample({"image": pixels}), str(key)) for key in range(800 if 0 < p < 1 else 9)]
    flipped = [np.array_equal(one, mirrored) for one in found]
    assert least <= np.mean(flipped) <= most
    assert flipped == [not np.array_equal(one, upright) for one in found]


def test_two_random_ops_of_a_field_draw_apart() -> None:
    pixels = np.asarray(photograph().resize((8, 8)))
    once = recipe_of({"op": "decode"}, FLIP)
    twice = recipe_of({"op": "decode"}, FLIP, FLIP)
    same = [
        np.array_equal(once(Sample({"i": pixels}), str(k)), twice(Sample({"i": pixels}), str(k)))
        for k in range(64)
    ]
    assert not all(same)
    assert any(same)


@pytest.mark.parametrize("size", [(451, 300), (10, 400), (400, 10), (1, 1)])
def test_random_crops_have_the_size_and_the_bounds_asked_for(size: tuple[int, int]) -> None:
    width, height = size
    place = np.mgrid[0:height, 0:width].transpose(1, 2, 0).astype(np.uint16)
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = place[..., 0] * 255 // max(1, height - 1)
    pixels[..., 1] = place[..., 1] * 255 // max(1, width - 1)
    made = recipe_of({"op": "decode"}, {**CROP, "scale": [0.2, 0.3], "ratio": [0.9, 1.1]})
    areas = []
    for key in range(40):
        found = made(Sample({"image": pixels}), str(key)).astype(float)
        assert found.shape == (3, 20, 30)
        covered = [np.ptp(found[channel]) / 255 for channel in (0, 1)]
        areas.append(covered[0] * covered[1])
    if size == (451, 300):
        assert 0.15 < np.mean(areas) < 0.35
        assert np.std(areas) > 0


def test_a_random_crop_of_all_is_a_resize() -> None:
    op = RandomResizedCrop(size=(20, 30), scale=(1, 1), ratio=(451 / 300, 451 / 300))
    data = encoded(photograph())
    crop = {k: v for k, v in op.model_dump().items() if v is not None}
    expected = row(data, {"op": "resize", "size": [20, 30]})
    assert np.abs(row(data, crop).astype(int) - expected).max() <= 1


# --- values -------------------------------------------------------------------------------------


def test_to_dtype() -> None:
    array = np.array([0, 51, 255], np.uint8)
    scaled = ToDType(dtype="float32", scale=True)(array, None)
    assert scaled.dtype == np.float32
    assert scaled.tolist() == pytest.approx([0, 0.2, 1])
    assert ToDType(dtype="float16")(array, None).tolist() == [0, 51, 255]
    assert ToDType(dtype="int32")(array, None).dtype == np.int32
    floats = np.array([0.5], np.float64)
    assert ToDType(dtype="float16", scale=True)(floats, None).tolist() == [0.5]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([7, 70000], "int16"),
        ([-1], "uint8"),
        ([256.0, 9], "uint8"),
        ([np.nan, 9], "uint8"),
        ([65535], "float16"),
        ([0.5, 1], "uint8"),
        ([2.0**63], "int64"),
        ([2.0**64], "uint64"),
        (np.array([np.inf], np.float16), "uint16"),
        (np.array([2**31], np.float32), "int32"),
    ],
)
def test_to_dtype_refuses_values_that_it_would_change(values: Any, dtype: Any) -> None:
    with pytest.raises(SampleError, match=f"and {dtype} does not hold it"):
        ToDType(dtype=dtype)(np.array(values), None)
    kept = ToDType(dtype=dtype)(np.array([7, *values])[:1], None)
    assert (kept.tolist(), kept.dtype) == ([7], dtype)
    same = [0, 1] if dtype != "float16" else [0, 1, np.inf]
    assert ToDType(dtype=dtype)(np.array(same, np.float32), None).tolist() == same


def test_resizing_after_scaling_to_floats() -> None:
    data = encoded(photograph())
    ops = ({"op": "to_dtype", "dtype": "float32", "scale": True}, {"op": "resize", "size": 64})
    found = row(data, *ops)
    expected = row(data, {"op": "resize", "size": 64})
    assert found.dtype == np.float32
    assert np.abs(found * 255 - expected).max() <= 1.5


def double(array: np.ndarray, by: float = 2.0) -> np.ndarray:
    return array.astype(np.float32) * by


def as_tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32))


def fail(array: np.ndarray) -> np.ndarray:
    raise ZeroDivisionError("in a function")


FAILS_AT = fail.__code__.co_firstlineno + 1


KEPT: list[np.ndarray] = []


def keep(array: np.ndarray) -> np.ndarray:
    KEPT.append(array)
    return array


def test_ops_of_the_users_own() -> None:
    pixels = np.asarray(photograph())
    op = {"op": "function", "function": f"{__name__}:double", "params": {"by": 3}, "version": "1"}
    found = recipe_of({"op": "decode"}, op, codec="zstd")(Sample({"image": pixels}), "key")
    assert np.array_equal(found, pixels.astype(np.float32).transpose(2, 0, 1) * 3)
    op = {"op": "function", "function": f"{__name__}:as_tensor", "version": "1"}
    found = recipe_of(op)(Sample({"x": np.arange(4)}), "key")
    assert found.dtype == np.int32
    assert found.tolist() == [0, 1, 2, 3]


def test_what_a_function_was_given_stays_as_it_was() -> None:
    op = {"op": "function", "function": f"{__name__}:keep", "version": "1"}
    keeping = recipe_of({"op": "decode"}, op)
    photos = [encoded(photograph(name), quality=90) for name in ("astronaut.png", "coffee.png")]
    for data in photos:
        keeping(Sample({"bytes": data}), "key")
    assert all(map(np.array_equal, KEPT, map(by_pillow, photos)))


@pytest.mark.parametrize(
    ("function", "error", "why"),
    [
        (
            f"{__name__}:fail",
            SampleError,
            rf"tests/ops/test_ops.py:{FAILS_AT}: ZeroDivisionError\('in a fun",
        ),
        ("builtins:print", SampleError, "builtins:print returned None; let it return an array"),
        (f"{__name__}:nowhere", RecipeError, "test_ops:nowhere"),
    ],
)
def test_a_function_that_makes_no_array_is_named(
    function: str, error: type[Exception], why: str
) -> None:
    op = {"op": "function", "function": function, "version": "1"}
    with pytest.raises(error, match=why):
        recipe_of(op)(Sample({"x": np.arange(4)}), "key")


def test_the_line_of_a_failure_is_the_innermost_one_of_the_functions_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the library that it calls, and wherever the package lies."""
    package = tmp_path / "mishap"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from mishap.inner import run\n\ndef op(x): return run(x)\n"
    )
    (package / "inner.py").write_text("import json\n\ndef run(x):\n    return json.loads('{')\n")
    monkeypatch.syspath_prepend(tmp_path)
    op = {"op": "function", "function": "mishap:op", "version": "1"}
    with pytest.raises(SampleError, match=r"^mishap:op failed at mishap/inner\.py:4: JSONDecode"):
        recipe_of(op)(Sample({"x": np.arange(4)}), "key")


# --- hostile files ------------------------------------------------------------------------------


def test_a_strip_does_not_become_a_bomb_by_its_resize() -> None:
    strip = encoded(Image.new("RGB", (1, 4000)), "PNG")
    with pytest.raises(SampleError, match="resized to 256 x 1024000 px, it is over the limit"):
        row(strip, {"op": "resize", "size": 256}, {"op": "center_crop", "size": 224})


def reason(sample: Sample) -> str:
    """Why a sample is a hole among rows of 20 x 20."""
    field = Recipe.image(resize=24, crop=20).fields["image"]
    ops, shape = FieldRecipe("image", field, 0), RowShape((3, 20, 20), "uint8")
    writers = {"image": FieldWriter("image", field, shape, 1, ops=ops)}
    return stage_rows({"image": Compute()}, writers, 0, "key", sample)


SMALL = photograph().resize((40, 30))
SEEDS = [
    encoded(SMALL, quality=70),
    encoded(SMALL, quality=70, progressive=True, exif=oriented(6)),
    encoded(SMALL.convert("CMYK"), quality=70),
    encoded(SMALL.convert("L"), quality=70, exif=oriented(3)),
    encoded(SMALL, "PNG", exif=oriented(8)),
    encoded(SMALL, "WEBP"),
    encoded(SMALL.quantize(8), "GIF"),
    encoded(SMALL.quantize(16), "PNG"),
    encoded(SMALL, "TIFF", compression="tiff_lzw"),
    encoded(SMALL, "BMP"),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A file with a few bytes overwritten, cut out or doubled, mostly in its headers."""
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 6))):
        end = draw(st.sampled_from([64, 700, len(data)]))
        at = draw(st.integers(0, min(end, len(data)) - 1))
        match draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
        if not data:
            break
    return bytes(data)


@settings(max_examples=400)
@given(mutated() | st.binary(max_size=300))
@example(SEEDS[0])
@pytest.mark.filterwarnings("ignore")
def test_mutated_files_are_rows_or_reasons(data: bytes) -> None:
    """Making a row raises nothing, and calls a row only what decodes."""
    with contextlib.suppress(SampleError):
        decode(data, Decode(mode="RGBA"))
    why = reason(Sample({"bytes": data}))
    # Of whatever kind: the build makes a hole of each.
    failing = pytest.raises(Exception) if why else contextlib.nullcontext()  # noqa: PT011
    with failing:
        row(data, {"op": "resize", "size": 24}, {"op": "center_crop", "size": 20})


def test_whatever_a_sample_does_there_is_a_reason() -> None:
    class Trap:
        def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
            raise RuntimeError("trap")

    assert reason(Sample({"bytes": Trap()}))
    assert reason(Sample({}))
    assert reason(Sample({"bytes": encoded(photograph())})) == ""
