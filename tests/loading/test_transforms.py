"""Device transforms: each against a slow reference, and what its random numbers rest on."""

import colorsys
import functools
import itertools
import math
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional

import precache
from precache import Reading, Weighted
from precache.errors import UsageError
from precache.transforms import (
    Batch,
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    Draw,
    HorizontalFlip,
    MixUp,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToDType,
    Transform,
    require_one_draw,
    run,
    steps_of,
)
from tests.conftest import BuiltStore
from tests.support.building import encoded, own_threads, write
from tests.support.loaders import assert_refused, flat, opened

ROWS = torch.arange(100, 124)
GREY = np.array([0.299, 0.587, 0.114], np.float32)


def _images(count: int = 24, height: int = 20, width: int = 26) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def _draw(rows: torch.Tensor = ROWS, epoch: int = 3) -> Draw:
    return Draw((11, epoch), 5, rows)


def _batch() -> Batch:
    return {"image": _images(), "label": ROWS % 10, "row": ROWS}


def changed(step: Transform, images: torch.Tensor, draw: Draw) -> torch.Tensor:
    return step.apply({"image": images}, draw)["image"]


ALL = [
    RandomCrop(16, padding=2),
    RandomResizedCrop(12),
    HorizontalFlip(),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    MixUp(10),
    CutMix(10),
    ToDType(torch.float16),
    Normalize([120, 110, 100], [60, 60, 60], torch.bfloat16, channels_last=True),
]


@pytest.mark.parametrize("transform", ALL, ids=lambda each: type(each).__name__)
def test_no_transform_asks_the_device_for_values(transform: Transform) -> None:
    """To ask is to wait for the device; tensors of shapes alone have no values to tell."""
    batch = {name: values.to("meta") for name, values in _batch().items()}
    made = transform.apply(batch, _draw(batch["row"]))
    expected = transform.apply(_batch(), _draw())
    for name, values in made.items():
        assert values.is_meta
        assert (values.shape, values.dtype) == (expected[name].shape, expected[name].dtype)
        assert values.stride() == expected[name].stride()


# --- draws --------------------------------------------------------------------------------------


@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 40), st.integers(1, 5))
def test_a_draw_depends_on_the_row_and_not_on_its_batch(
    first: int, epoch: int, count: int, columns: int
) -> None:
    rows = torch.arange(first, first + count)
    whole = Draw((1, epoch), 0, rows).uniform(columns)
    alone = [Draw((1, epoch), 9, row[None]).uniform(columns) for row in rows]
    assert torch.equal(whole, torch.cat(alone))
    assert ((whole >= 0) & (whole < 1)).all()


def test_draws_are_uniform_and_independent() -> None:
    numbers = Draw((0, 0), 0, torch.arange(50_000)).uniform(4).double().numpy()
    assert np.abs(numbers.mean(0) - 0.5).max() < 0.01
    assert np.abs(numbers.var(0) - 1 / 12).max() < 0.002
    both = np.concatenate([numbers, np.roll(numbers, 1, axis=0)], axis=1)
    correlation = np.corrcoef(both.T) - np.eye(8)
    assert np.abs(correlation).max() < 0.02


def test_draws_are_those_of_earlier_releases_and_others_for_each_seed_epoch_and_place() -> None:
    golden = [0.363138, 0.852229, 0.226694, 0.940511, 0.386057, 0.981346]
    found = Draw((0, 0), 0, torch.arange(3)).uniform(2)
    assert [round(x, 6) for x in found.flatten().tolist()] == golden
    draws = [Draw((1, 2), 0, ROWS), Draw((2, 2), 0, ROWS), Draw((1, 3), 0, ROWS)]
    draws += [draws[0].inside(0), draws[0].inside(1), draws[0].inside(0).inside(1)]
    assert len({tuple(draw.uniform(1)[:, 0].tolist()) for draw in draws}) == len(draws)


# --- geometry -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "padding", "places"), [((12, 15), 0, 12), ((12, 15), 4, 12), ((20, 26), 0, 1)]
)
def test_a_random_crop_is_a_window_of_its_own_image(
    size: tuple[int, int], padding: int, places: int
) -> None:
    images = _images()
    found = changed(RandomCrop(size, padding), images, _draw())
    padded = functional.pad(images, (padding,) * 4)
    corners = set()
    for image, crop in zip(padded, found, strict=True):
        windows = image.unfold(1, size[0], 1).unfold(2, size[1], 1)
        same = (windows == crop[:, None, None]).all(-1).all(-1).all(0)
        assert same.sum() == 1
        corners.add(tuple(same.nonzero()[0].tolist()))
    assert len(corners) >= places
    assert_refused(
        ("a crop of 30 x 30 does not fit an image of 20 x 26",
         lambda: changed(RandomCrop(30), images, _draw())),
    )  # fmt: skip


@pytest.mark.parametrize("size", [(9, 11), (20, 26), (40, 31)])
def test_a_random_resized_crop_is_its_box_resized(size: tuple[int, int]) -> None:
    images, crop = _images(), RandomResizedCrop(size, scale=(0.2, 1.0))
    found = changed(crop, images, _draw())
    boxes = crop.boxes(20, 26, _draw()).long().tolist()
    for image, got, (top, left, height, width) in zip(images, found, boxes, strict=True):
        box = image[None, :, top : top + height, left : left + width].float()
        wanted = functional.interpolate(box, size, mode="bilinear", align_corners=False)[0]
        assert (wanted.round() - got.float()).abs().max() <= 1


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 99))
def test_random_boxes_lie_inside_the_image(height: int, width: int, seed: int) -> None:
    boxes = RandomResizedCrop(8).boxes(height, width, Draw((seed,), 0, torch.arange(50)))
    top, left, h, w = boxes.unbind(1)
    spare = torch.stack([top, left, h - 1, w - 1, height - top - h, width - left - w])
    assert (spare >= 0).all()


def test_random_boxes_have_the_areas_and_ratios_asked_for() -> None:
    crop = RandomResizedCrop(8, scale=(0.25, 0.5), ratio=(0.8, 1.25))
    _, _, h, w = crop.boxes(1000, 1000, Draw((0,), 0, torch.arange(5000))).unbind(1)
    area, ratio = (h * w / 1e6).numpy(), (w / h).numpy()
    assert 0.245 < area.min() < 0.26
    assert 0.49 < area.max() < 0.505
    assert abs(area.mean() - 0.375) < 0.005
    assert 0.79 < ratio.min() < 0.81
    assert 1.23 < ratio.max() < 1.26
    assert abs(np.log(ratio).mean()) < 0.005


def test_a_flip_mirrors_about_its_share_of_the_images() -> None:
    rows = torch.arange(4000)
    images = torch.arange(4)[None, None, None].expand(4000, 1, 1, 4)
    found = changed(HorizontalFlip(0.3), images, _draw(rows))
    flipped = found[:, 0, 0, 0] == 3
    assert torch.equal(found, torch.where(flipped[:, None, None, None], images.flip(3), images))
    assert 0.27 < flipped.float().mean() < 0.33
    assert not torch.equal(changed(HorizontalFlip(1), images, _draw(rows)), images)
    assert torch.equal(changed(HorizontalFlip(0), images, _draw(rows)), images)


# --- colour and values --------------------------------------------------------------------------


def _jittered(image: np.ndarray, factors: tuple[float, float, float], turn: float) -> np.ndarray:
    """Brightness, contrast, saturation and hue of one (3, H, W) image in [0, 1], pixel by pixel."""
    pixels = np.clip(image * factors[0], 0, 1)
    mean = np.tensordot(GREY, pixels, 1).mean()
    pixels = np.clip(mean + factors[1] * (pixels - mean), 0, 1)
    grey = np.tensordot(GREY, pixels, 1)
    pixels = np.clip(grey + factors[2] * (pixels - grey), 0, 1)
    out = np.empty_like(pixels)
    for y, x in np.ndindex(pixels.shape[1:]):
        h, s, v = colorsys.rgb_to_hsv(*pixels[:, y, x].tolist())
        out[:, y, x] = colorsys.hsv_to_rgb((h + turn) % 1, s, v)
    return out


def test_colour_jitter_is_that_of_the_standard_library_and_of_nothing_changes_nothing() -> None:
    images = _images(6, 8, 9)
    jitter, draw = ColorJitter(0.5, 0.4, 0.3, 0.2), _draw(ROWS[:6])
    found = changed(jitter, images, draw).numpy()
    u = draw.uniform(4).numpy() * 2 - 1
    for image, got, (b, c, s, h) in zip(images.numpy(), found, u, strict=True):
        wanted = _jittered(image / 255, (1 + 0.5 * b, 1 + 0.4 * c, 1 + 0.3 * s), 0.2 * h)
        assert np.abs(wanted * 255 - got).max() <= 0.51
    for unchanged in (_images(), _images().float() / 255):
        assert torch.equal(changed(ColorJitter(), unchanged, _draw()), unchanged)


class OfTorchvision(torch.nn.Module):
    __module__ = "torchvision.transforms.v2._geometry"


NO_MEAN_AND_STD: list[tuple[Any, Any]] = [
    (3, 4), ([], []), ([1.0, 2.0], [1.0]), ([1.0], [0]), ([math.nan], [1.0]), ([1.0], [math.nan]),
    ([1.0], [math.inf]), ("ab", "ab"), ([None], [None]), ({"image": [1.0]}, {"image": [1.0]}),
    (np.array(1.0), torch.tensor(1.0)), ([10**400], [1.0]), ([1j], [1.0]),
    ([[1.0], [1.0, 2.0]], [1.0]),
]  # fmt: skip


def test_wrong_parameters_are_refused_where_a_transform_is_made() -> None:
    flip, crop = HorizontalFlip, RandomResizedCrop
    both, no_pair = ("image", "mask"), "; give an ascending pair"
    assert_refused(
        ("a step of Compose is 3; give one of precache.transforms", lambda: Compose([3])),
        (r"is the class HorizontalFlip; make one", lambda: Compose([flip])),
        ("; give one of precache.transforms", lambda: Compose([precache.HorizontalFlip()])),
        ("; give one of precache.transforms", lambda: Compose([precache.HorizontalFlip])),
        ("OfTorchvision of torchvision, .* draws once", lambda: Compose([OfTorchvision()])),
        ("Compose takes a list of transforms, not <", lambda: Compose(flip())),
        (r"size is 10+; .*at most 16,777,216", lambda: Resize(10**30)),
        (r"padding is 10+; .*at most 16,777,216", lambda: RandomCrop(8, padding=10**30)),
        ("p is 2; give a number from 0 to 1", lambda: flip(2)),
        ("p is 10+; give a number from 0 to 1", lambda: flip(10**400)),
        (f"scale is 0.5{no_pair}", lambda: crop(8, scale=0.5)),
        (rf"ratio is \(2, 1\){no_pair}", lambda: crop(8, ratio=(2, 1))),
        ("scale is inf; give a number from 0 up", lambda: crop(8, (0.1, math.inf))),
        ("brightness is inf; give a number from 0 up", lambda: ColorJitter(math.inf)),
        ("give a number from 0", lambda: ColorJitter(-0.1)),
        ("give a number from 0", lambda: ColorJitter(hue=0.6)),
        ("alpha is inf; give a number from 0 up", lambda: MixUp(3, math.inf)),
        ("alpha is 'x'; give a number from 0 up", lambda: MixUp(3, "x")),
        ("alpha is 0; give a number above 0", lambda: CutMix(3, 0)),
        ("dtype is 'float16'; give a dtype of torch", lambda: ToDType("float16")),
        ("floats", lambda: Normalize([0], [1], torch.uint8)),
        ("std above 0", lambda: Normalize([0, 0, 0], [1, 0, 1])),
        ("fields is 'image'; give names", lambda: flip(fields="image")),
        (r"fields is \(\); give names", lambda: RandomCrop(8, fields=())),
        (r"fields is \[1\]; give names", lambda: MixUp(3, fields=[1])),  # type: ignore[list-item]
        (r"resamples image and mask; say how: fields=\{'image': 'bilinear', 'mask': 'nearest'\}",
         lambda: crop(8, fields=both)),
        ("say how", lambda: crop(8, fields=("mask",))),
        ("Resize resamples image and mask; say how", lambda: Resize(8, fields=both)),
        ("'bicubic' for image; give 'bilinear' or 'nearest'",
         lambda: crop(8, fields={"image": "bicubic"})),
    )  # fmt: skip
    for sized in (Resize, RandomCrop, CenterCrop, crop):
        assert sized([8, 9]).size == (8, 9)
    for mean, std in NO_MEAN_AND_STD:
        given = f"{re.escape(repr(mean))} and {re.escape(repr(std))}; give .*mean"
        said = rf"Normalize takes a mean and a std above 0 for each channel, not {given}\['image'\]"
        assert_refused((said, functools.partial(Normalize, mean, std)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_normalize(dtype: torch.dtype, channels_last: bool) -> None:
    images, mean, std = _images(), np.array([120, 110, 100], np.uint8), [60, 50.5, 40]
    normalize, shape = Normalize(mean.tolist(), std, dtype, channels_last), (1, 3, 1, 1)
    wanted = (images.double() - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    unsigned = Normalize(mean, std, dtype, channels_last)  # type: ignore[arg-type]
    for each in (normalize, unsigned):
        found = changed(each, images, _draw())
        assert found.dtype == dtype
        assert found.is_contiguous(memory_format=layout)
        assert (found.double() - wanted).abs().max() < tolerance


def test_to_dtype_scales_integers_and_wraps_no_values() -> None:
    assert torch.equal(ToDType().images(_images(), _draw()), _images().float() / 255)
    floats = torch.rand(2, 3, 4, 4)
    assert torch.equal(ToDType(torch.float64).images(floats, _draw()), floats.double())
    for images, dtype in ((floats, torch.uint8), (_images(), torch.int8)):
        with pytest.raises(UsageError, match="whose values it may not hold; put a function"):
            ToDType(dtype).images(images, _draw())
        assert ToDType(torch.bool).images(images, _draw()).any()
    with pytest.raises(UsageError, match="1 channels, images 3"):
        Normalize([0], [1]).images(_images(), _draw())


# --- mixing -------------------------------------------------------------------------------------


def test_mixup_blends_images_and_labels_by_the_same_share() -> None:
    batch = {**_batch(), "image": _images().float()}
    found = MixUp(10, 0.8).apply(batch, _draw())
    label = found["label"]
    for n in range(len(label)):
        own, other = batch["label"][n], batch["label"][n - 1]
        share = label[n, own]
        assert torch.isclose(label[n].sum(), torch.tensor(1.0))
        assert torch.isclose(label[n, other], 1 - share, atol=1e-6)
        wanted = share * batch["image"][n] + (1 - share) * batch["image"][n - 1]
        assert torch.allclose(found["image"][n], wanted, atol=1e-3)


def test_cutmix_replaces_a_box_and_labels_by_its_area() -> None:
    batch = _batch()
    found = CutMix(10).apply(batch, _draw())
    sizes = set()
    for n, image in enumerate(found["image"]):
        foreign = (image != batch["image"][n]).any(0)
        rows, columns = foreign.any(1).nonzero()[:, 0], foreign.any(0).nonzero()[:, 0]
        if len(rows):
            box = (
                slice(int(rows[0]), int(rows[-1]) + 1),
                slice(int(columns[0]), int(columns[-1]) + 1),
            )
            assert torch.equal(image[:, *box], batch["image"][n - 1][:, *box])
            sizes.add((box[0].stop - box[0].start, box[1].stop - box[1].start))
            area = foreign[box].numel() / foreign.numel()
            own = found["label"][n, batch["label"][n]]
            assert torch.isclose(own, torch.tensor(1 - area), atol=1e-6)
    assert len(sizes) > 8


@pytest.mark.parametrize("mix", [MixUp(5), CutMix(5)], ids=lambda each: type(each).__name__)
def test_mixing_is_another_in_each_step_and_takes_labels_that_are_classes(mix: Transform) -> None:
    batch = {**_batch(), "label": ROWS % 5}
    expected = mix.apply(batch, _draw())["label"]
    for labels in (batch["label"], batch["label"].byte()):
        assert torch.equal(mix.apply({**batch, "label": labels}, _draw())["label"], expected)
    assert not torch.equal(mix.apply(batch, Draw((11, 3), 6, ROWS))["label"], expected)
    for wrong in (-1, 5, 2**40):
        batch["label"][3] = batch["label"][7] = wrong
        said = f"a batch has the label {wrong}, and .* takes 0 to 4; 2 rows .* ones are 103, 107"
        with pytest.raises(UsageError, match=said):
            mix.apply(batch, _draw())
    with pytest.raises(UsageError, match=r"not torch.float32 \(5,\); labels are mixed once"):
        mix.apply({**batch, "label": torch.zeros(24, 5)}, _draw())


# --- labels, in a loader ------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [1, 2])
def test_labels_of_a_store_are_looked_at_before_the_first_batch(
    image_tiles: BuiltStore, classes: int
) -> None:
    version = image_tiles.open()
    wrong = np.flatnonzero(version.valid & (version.labels >= classes))
    first = ", ".join(map(str, wrong[:5].tolist()))
    text = f"has the label {version.labels[wrong[0]]}, .*; {len(wrong)} rows .* are {first}:"
    inner = Compose([HorizontalFlip(), Normalize([120] * 3, [60] * 3), MixUp(classes)])
    for transform in (CutMix(classes), Compose([ToDType(), inner])):
        with pytest.raises(UsageError, match=text):
            opened(image_tiles, 8, transform=transform)
    sound = np.where(version.labels < classes, 1.0, 0.0)
    for chosen in ({"rows": sound > 0}, {"shuffle": Weighted(sound)}):
        with opened(image_tiles, 2, transform=inner, **chosen) as loader:
            assert {tuple(b["label"].shape) for b in loader if len(b["row"]) == 2} == {(2, classes)}


def test_labels_that_a_function_makes_or_that_were_not_read_are_named_with_their_batch(
    image_tiles: BuiltStore,
) -> None:
    def labelled(by: int) -> Callable[[Batch], Batch]:
        return lambda batch: {**batch, "label": batch["label"] * 0 + by}

    with opened(image_tiles, 8, transform=Compose([labelled(0), MixUp(1)])) as loader:
        assert all((batch["label"] == 1).all() for batch in loader)
    refusals(image_tiles, "a batch has the label -1", Compose([labelled(-1), MixUp(1)]))
    for mix in (MixUp(5), CutMix(5)):
        unread = Compose([lambda batch: batch, mix])
        refusals(image_tiles, "mixes labels", unread, fields=("image",))
        with pytest.raises(
            UsageError, match=r"mixes labels .* has image, row; .*\('image', 'label"
        ):
            opened(image_tiles, 8, transform=mix, fields=("image",))


def refusals(store: Any, said: str, *transforms: Any, **options: Any) -> None:
    """Each of the transforms is refused with the first batch of a loader."""
    for transform in transforms:
        with (
            opened(store, 8, transform=transform, **options) as loader,
            pytest.raises(UsageError, match=said),
        ):
            next(iter(loader))


# --- all of them, in a loader -------------------------------------------------------------------

MAKE: dict[str, Callable[[Any], Transform]] = {
    "crop": lambda fields: RandomCrop((15, 17), fields=fields),
    "resized crop": lambda fields: RandomResizedCrop((15, 17), fields=fields),
    "flip": lambda fields: HorizontalFlip(fields=fields),
    "cutmix": lambda fields: CutMix(10, fields=fields),
    "mixup": lambda fields: MixUp(10, fields=fields),
    "jitter": lambda fields: ColorJitter(0.4, 0.4, 0.4, 0.1, fields=fields),
    "normalize": lambda fields: Normalize([120] * 3, [60] * 3, fields=fields),
    "dtype": lambda fields: ToDType(fields=fields),
}
MOVING = ["crop", "resized crop", "flip", "cutmix", "mixup"]


@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("cutmix", "mixup")])
def test_what_is_given_stays_as_it_is_and_images_of_another_rank_are_refused(name: str) -> None:
    batch = _batch()
    before = {key: value.clone() for key, value in batch.items()}
    run(MAKE[name](None), batch, _draw())
    assert all(torch.equal(batch[key], value) for key, value in before.items())
    with pytest.raises(UsageError, match=r"takes \(N, C, H, W\), not \(3, 4\)"):
        run(MAKE[name](None), {"image": torch.zeros(3, 4), "row": ROWS}, _draw())


@pytest.mark.parametrize("name", [name for name in MAKE if name != "dtype"])
@pytest.mark.parametrize("frames", [False, True])
def test_rows_with_channels_last_are_refused_and_the_way_out_moves_them(
    name: str, frames: bool
) -> None:
    """A flip reversed the colours."""
    batch = {**_batch(), "image": _images().permute(0, 2, 3, 1)}
    field, fields = "image", None
    if frames:
        field, fields = "clip", {"clip": "nearest"}
        batch = {**batch, field: batch["image"][:, None].expand(-1, 2, -1, -1, -1) / 255}
    transform = MAKE[name](fields)
    text = r"\(N, C, H, W\), and \w+ \(24, (2, )?20, 26, 3\) has its channels last"
    with pytest.raises(UsageError, match=text) as caught:
        transform.apply(batch, _draw())
    if frames and name in ("normalize", "jitter"):
        return  # of channels that are counted
    before = Compose([eval(str(caught.value).partition("in a Compose: ")[2])])
    found = Compose([before, transform]).apply(batch, _draw())[field]
    expected = transform.apply(before.apply(batch, _draw()), _draw().inside(1))[field]
    assert torch.equal(found, expected)
    assert found.shape[-3] == 3


def test_features_and_dtypes_are_not_taken_for_channels_last() -> None:
    for shape in [(24, 512, 1, 1), (24, 64, 4, 4), (24, 3, 30, 3), (24, 4, 20, 3)]:
        HorizontalFlip().apply({"image": torch.zeros(shape), "row": ROWS}, _draw())
    pixels = _images().permute(0, 2, 3, 1)
    assert torch.equal(ToDType().apply({"image": pixels}, _draw())["image"], pixels / 255)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool])
def test_a_flip_takes_every_dtype(dtype: torch.dtype) -> None:
    images = (_images() > 99).to(dtype)
    found = HorizontalFlip().apply({"image": images}, _draw())["image"]
    expected = HorizontalFlip().apply({"image": images.to(torch.uint8)}, _draw())["image"]
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.uint8), expected)


@pytest.mark.parametrize("value", [2**24 + 1, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64, torch.float64])
def test_a_blend_of_one_value_is_that_value(dtype: torch.dtype, value: int) -> None:
    images = torch.full((24, 3, 20, 26), value, dtype=dtype)
    labels = torch.zeros(24, dtype=torch.int64)
    for step in (Resize((7, 9)), RandomResizedCrop(12), MixUp(10)):
        found = step.apply({"image": images, "label": labels}, _draw())["image"]
        assert found.dtype == dtype
        assert (found.double() - value).abs().max() < 1e-6


def test_a_blend_of_64_bits_does_not_wrap_around() -> None:
    for dtype in (torch.int64, torch.uint64):
        images = torch.full((2, 1, 20, 26), torch.iinfo(dtype).max, dtype=dtype)
        assert changed(Resize((7, 9)), images, _draw()).double().min() > 2.0**62


class _Watched(Transform):
    """Says which thread it runs on, and of which batch."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.three = threading.Event()

    def apply(self, batch: dict[str, torch.Tensor], draw: Draw) -> dict[str, torch.Tensor]:
        self.calls.append((draw.step, threading.get_ident()))
        if len(self.calls) == 3:
            self.three.set()
        return {**batch, "image": batch["image"].float()}


@pytest.mark.parametrize(
    "wrap", [lambda step: step, lambda step: Compose([HorizontalFlip(), step])]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_on_the_cpu_transforms_run_ahead_of_the_loop(
    image_tiles: BuiltStore, wrap: Callable[[Transform], Any], threads: int
) -> None:
    watched = _Watched()
    options = {"reading": Reading(num_threads=threads, prefetch_batches=3)}
    with opened(image_tiles, 8, transform=wrap(watched), **options) as loader:
        iterator = iter(loader)
        first = next(iterator)
        assert watched.three.wait(60), "no batch was transformed while the loop had another"
        assert first["image"].dtype == torch.float32
        batches = [first, *iterator]
        assert loader.stats().bytes == sum(
            b["image"].numel() + b["label"].nbytes + b["row"].nbytes for b in batches
        )
    assert sorted(step for step, _ in watched.calls) == list(range(len(loader)))
    assert threading.get_ident() not in {thread for _, thread in watched.calls}


class _Ordered(Compose):
    """Takes batches one after another, as a callable does."""

    def apply(self, batch: Any, draw: Any) -> Any:
        THREADS.append(threading.get_ident())
        return super().apply(batch, draw)


THREADS: list[int] = []


def _noting(batch: Any) -> Any:
    THREADS.append(threading.get_ident())
    return batch


@pytest.mark.parametrize(
    "transform", [_noting, Compose([HorizontalFlip(), _noting]), _Ordered([HorizontalFlip()])]
)
def test_other_callables_run_on_the_thread_of_the_loop_batch_by_batch(
    transform: Any, image_tiles: BuiltStore
) -> None:
    THREADS.clear()
    with opened(image_tiles, 8, reading=Reading(num_threads=4), transform=transform) as loader:
        for count, _ in enumerate(loader, 1):
            assert len(THREADS) == count
    assert set(THREADS) == {threading.get_ident()}


def test_an_error_of_a_transform_comes_at_its_batch_and_the_loader_goes_on(
    image_tiles: BuiltStore,
) -> None:
    failing, calls = {2}, itertools.count()

    def passed(batch: Any, step: int) -> Any:
        if step in failing:
            raise ZeroDivisionError("in the transform")
        return batch

    class FailsAtTwo(Transform):
        def apply(self, batch: Batch, draw: Draw) -> Any:
            return passed(batch, draw.step)

    for transform in (FailsAtTwo(), lambda batch: passed(batch, next(calls))):
        failing.add(2)
        with opened(image_tiles, 8, transform=transform) as loader:
            iterator = iter(loader)
            assert len([next(iterator), next(iterator)]) == 2
            with pytest.raises(ZeroDivisionError, match="in the transform"):
                next(iterator)
            failing.clear()
            assert len(flat(loader)) == 73
    assert own_threads() == []


@pytest.mark.parametrize(
    "step",
    [HorizontalFlip(), RandomCrop(8), RandomResizedCrop(8), ColorJitter(0.4), CutMix(3)],
    ids=lambda step: type(step).__name__,
)
def test_rows_that_a_function_left_out_or_added_are_not_drawn_for(
    step: Transform, image_tiles: BuiltStore
) -> None:
    def first(batch: Batch) -> Batch:
        return {name: values[:1] for name, values in batch.items()}

    def twice(batch: Batch) -> Batch:
        return {name: torch.cat([values, values]) for name, values in batch.items()}

    def require(size: int, change: Callable[[Batch], Batch], rows: int, *, behind: bool) -> None:
        steps = [step, change] if behind else [change, step]
        with opened(image_tiles, size, transform=Compose(steps)) as loader:
            batch = next(iter(loader))
        assert {len(values) for values in batch.values()} == {rows}

    for size, change, rows in ((8, first, 1), (8, twice, 16), (1, twice, 2)):
        require(size, change, rows, behind=True)
        said = f"draws for the {size} rows that were read, and the batch has {rows}: put functions"
        with pytest.raises(UsageError, match=f"{type(step).__name__} {said}"):
            require(size, change, rows, behind=False)
    change = Compose([first, CenterCrop(8), Normalize([120] * 3, [60] * 3)])
    with opened(image_tiles, 8, transform=change) as loader:  # these draw nothing
        assert len(next(iter(loader))["image"]) == 1


# --- rows that come again -----------------------------------------------------------------------


def _crops(store: BuiltStore, size: int, start: int = 0, **options: Any) -> list[tuple[int, bytes]]:
    """Rows of the rest of an epoch, in order, each with its crop."""
    inner = Compose([HorizontalFlip(), ColorJitter(hue=0.2)])
    transform = Compose([RandomCrop(16), inner, lambda batch: batch])
    with opened(store, size, seed=3, transform=transform, **options) as loader:
        loader.seek(2, start)
        pairs = (zip(b["row"].tolist(), b["image"], strict=True) for b in loader)
        return [(row, image.numpy().tobytes()) for batch in pairs for row, image in batch]


def _repeated(crops: list[tuple[int, bytes]]) -> list[set[bytes]]:
    """Crops of each row that came more than once, which all differ with near certainty."""
    counts = Counter(row for row, _ in crops)
    again = [row for row, count in counts.items() if count > 1]
    assert len(set(crops)) > len(counts)
    return [{crop for other, crop in crops if other == row} for row in again]


def test_draws_by_weight_are_augmented_anew_and_the_same_for_all_ranks_and_after_a_resume(
    image_tiles: BuiltStore,
) -> None:
    drawn = {"shuffle": Weighted(np.where(image_tiles.open().labels == 0, 5.0, 1.0))}
    whole = _crops(image_tiles, 8, **drawn)
    repeated = _repeated(whole)
    assert len(repeated) > 3
    assert all(len(each) > 1 for each in repeated)
    assert _crops(image_tiles, 8, start=2, **drawn) == whole[16:]
    assert _crops(image_tiles, 5, **drawn) == whole
    options: dict[str, Any] = {**drawn, "world_size": 2, "drop_last": True}
    ranks = [_crops(image_tiles, 4, rank=rank, **options) for rank in range(2)]
    steps = [rank[start : start + 4] for start in range(0, len(ranks[0]), 4) for rank in ranks]
    assert list(itertools.chain(*steps)) == whole[: len(whole) // 8 * 8]


@pytest.mark.parametrize("shuffle", ["full", "block", False])
def test_rows_that_fill_up_the_last_step_are_augmented_anew(
    image_tiles: BuiltStore, shuffle: str | bool
) -> None:
    ranks = [_crops(image_tiles, 4, shuffle=shuffle, rank=r, world_size=7) for r in range(7)]
    drawn = list(itertools.chain(*ranks))
    assert len(drawn) > len({row for row, _ in drawn})
    assert all(len(each) == 2 for each in _repeated(drawn))
    alone = dict(_crops(image_tiles, 4, shuffle=shuffle))
    assert set(alone.items()) <= set(drawn)  # by its row, as in any other order


# --- several fields -----------------------------------------------------------------------------


def _scene(count: int = 24) -> Batch:
    """Images with a mask, a second image, a depth map and a mask without channels, whose values
    name the pixels of the image."""
    place = torch.arange(count * 20 * 26, dtype=torch.int32).reshape(count, 1, 20, 26)
    return {
        "image": place.to(torch.float32).expand(count, 3, 20, 26),
        "mask": (place % 21).to(torch.uint8),
        "second": place.to(torch.float32) + 1,
        "depth": (place * 100)[:, 0],
        "label": ROWS[:count] % 10,
        "row": ROWS[:count],
    }


SCENE = ("image", "mask", "second", "depth")
NEAREST = dict.fromkeys(SCENE, "nearest")


@pytest.mark.parametrize("name", MOVING[:-1])
def test_fields_that_are_named_move_by_one_draw(name: str) -> None:
    """Of 60 images 29 were mirrored, and no mask."""
    batch = _scene()
    fields: Any = NEAREST if name == "resized crop" else SCENE
    found = MAKE[name](fields).apply(batch, _draw())
    place = found["image"][:, :1].int()
    assert place.shape != (24, 1, 20, 26) or (place != batch["image"][:, :1]).any()
    assert torch.equal(found["mask"], (place % 21).to(torch.uint8))
    assert torch.equal(found["second"], place.float() + 1)
    assert torch.equal(found["depth"], (place * 100)[:, 0])
    alone = MAKE[name](("image",)).apply(batch, _draw())
    if name != "resized crop":  # which is bilinear where no interpolation is given
        assert torch.equal(alone["image"], found["image"])
    assert all(torch.equal(alone[field], batch[field]) for field in ("mask", "second", "depth"))


@pytest.mark.parametrize("resampling", [RandomResizedCrop, Resize])
def test_each_field_is_resampled_as_it_says(resampling: Any) -> None:
    """`nearest` makes no new value, and takes the pixels beside those that `bilinear` blends."""
    batch = _scene()
    fields = {"image": "bilinear", "mask": "nearest", "depth": "nearest"}
    found = resampling((40, 31), fields=fields).apply(batch, _draw())
    alone = resampling((40, 31)).apply({"image": batch["image"], "row": ROWS}, _draw())
    assert torch.equal(found["image"], alone["image"])
    assert torch.equal(found["second"], batch["second"])
    place = found["depth"] // 100
    assert torch.equal(found["depth"] % 100, torch.zeros_like(place))
    assert torch.equal(found["mask"][:, 0], (place % 21).to(torch.uint8))
    across = (found["image"][:, 0] % 26 - place % 26).abs()
    assert across.max() <= 1 or (across > 20).any()
    assert (found["image"][:, 0] - place).abs().max() <= 27


@pytest.mark.parametrize("mode", ["P", "RGB"])
def test_a_store_of_masks_is_not_blended_unless_told(mode: Any, tmp_path: Path) -> None:
    """`--mode P --interpolation nearest`, or colours that stand for classes."""
    for number in range(8):
        mask = np.zeros((32, 32), np.uint8)
        mask[number:20, 8:24] = 7
        image = Image.fromarray(mask if mode == "P" else np.dstack([mask] * 3))
        write(tmp_path / "masks" / f"{number}.png", encoded(image, "PNG"))
    recipe = precache.Recipe.image(resize=(32, 32), mode=mode, interpolation="nearest")
    precache.build(tmp_path / "masks", tmp_path / "store", recipe, address="serial")

    def values(step: Any) -> set[int]:
        with precache.Loader(tmp_path / "store", 4, transform=step, device="cpu") as loader:
            return {value for batch in loader for value in batch["image"].unique().tolist()}

    for make in (Resize, RandomResizedCrop):
        with pytest.raises(UsageError, match="image was built as masks, whose values it would"):
            values(Compose([HorizontalFlip(), make(20)]))
        assert values(make(20, fields={"image": "nearest"})) == {0, 7}
        blended = make(20, fields={"image": "bilinear"})
        if mode == "RGB":
            assert len(values(blended)) > 2
        else:
            with pytest.raises(UsageError, match="or build pictures with mode 'L'"):
                values(blended)
    mean = [3.0] * (1 if mode == "P" else 3)
    makers = (
        functools.partial(Normalize, mean, mean), functools.partial(ColorJitter, 0.2),
        ToDType, functools.partial(MixUp, 4),
    )  # fmt: skip
    for compute in makers:
        with pytest.raises(UsageError, match="with values, and image was built as masks"):
            values(Compose([HorizontalFlip(), compute()]))
        if mode == "P":
            with pytest.raises(UsageError, match="give fields= the names of pictures alone"):
                values(compute(fields=("image",)))
        elif compute is not makers[-1]:  # which needs labels
            assert len(values(compute(fields=("image",)))) > 1  # the advice
    assert values(ToDType(torch.int64)) == {0, 7}
    if mode == "RGB":  # rows with shapes of their own
        recipe = precache.Recipe.image(max_size=32, interpolation="nearest")
        precache.build(tmp_path / "masks", tmp_path / "store", recipe, address="serial")
        with pytest.raises(UsageError, match="image was built as masks"):
            values(RandomResizedCrop(20))
        assert values(RandomResizedCrop(20, fields={"image": "nearest"})) == {0, 7}


BESIDE: dict[str, tuple[int, ...]] = {
    "mask": (20, 26), "small": (1, 10, 13), "clip": (4, 3, 20, 26), "boxes": (7, 4), "box": (4,),
}  # fmt: skip
"""Shapes of rows of fields beside an image; coordinates among them."""


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("other", BESIDE)
def test_a_field_of_arrays_that_would_stay_behind_is_refused(name: str, other: str) -> None:
    """Of 16 images 12 were mirrored, and none of their boxes."""
    batch = {**_batch(), "image": _images().float(), other: torch.rand(24, *BESIDE[other])}
    batch["age"] = torch.zeros(24)
    text = f"changes image alone, and {other} would stay behind"
    with pytest.raises(UsageError, match=text) as caught:
        Compose([lambda batch: batch, Compose([MAKE[name](None)])]).apply(batch, _draw())
    assert f"Give fields=('image', '{other}')" in str(caught.value)
    alone = MAKE[name](("image",)).apply(batch, _draw())
    assert torch.equal(alone[other], batch[other])
    fields = {"image": "nearest", other: "nearest"}
    if BESIDE[other][-2:] == (20, 26):
        MAKE[name](fields).apply(batch, _draw())
        return
    with pytest.raises(UsageError, match=r"one height and width|takes \(N, C, H, W\), not"):
        MAKE[name](fields).apply(batch, _draw())


@pytest.mark.parametrize("name", [*MOVING, "dtype"])
def test_a_field_that_is_missing_is_named(name: str) -> None:
    fields = {"image": "nearest", "depht": "nearest"}
    with pytest.raises(UsageError, match="changes 'depht', and the batch has image, mask, second"):
        MAKE[name](fields).apply(_scene(), _draw())
    with pytest.raises(UsageError, match="changes 'image', and the batch has label"):
        MAKE[name](None).apply({"label": ROWS}, _draw())


def test_masks_are_not_blended_and_values_beyond_a_byte_survive_a_bilinear_crop() -> None:
    for dtype in (torch.uint8, torch.int64, torch.bool):
        batch = {**_scene(), "mask": torch.ones(24, 1, 20, 26).to(dtype)}
        with pytest.raises(UsageError, match=r"mask is torch\.\w+: a blend of the class numbers"):
            MixUp(10, fields=("image", "mask")).apply(batch, _draw())
    found = MixUp(10, fields=("image", "second")).apply(_scene(), _draw())
    assert torch.allclose(found["second"][:, 0], found["image"][:, 0] + 1, atol=1e-3)
    depth = torch.full((24, 1, 20, 26), 5000, dtype=torch.int32)
    crop = RandomResizedCrop(12, fields={"depth": "bilinear"})
    assert (crop.apply({"depth": depth}, _draw())["depth"] == 5000).all()


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """A store of images and masks, 32 x 40, from palette images."""
    for number in range(60):
        values = np.random.default_rng(number).integers(0, 21, (4, 5))
        image = Image.fromarray(np.kron(values, np.ones((8, 8), int)).astype(np.uint8))
        image.putpalette([(n * 37 + 11) % 256 for n in range(768)])
        write(tmp_path / "in" / f"{number:02}.png", encoded(image, "PNG"))
    fields = {
        "image": precache.Field(ops=[precache.Decode(mode="RGB")]),
        "mask": precache.Field(ops=[precache.Decode(mode="P")]),
    }
    recipe = precache.Recipe(fields=fields)
    precache.build(tmp_path / "in", tmp_path / "store", recipe, address="serial")
    return tmp_path / "store"


def test_a_loader_moves_masks_with_their_images(scenes: Path) -> None:
    """Without a word about the mask it does not open; by another draw than its image's, neither."""
    both, named = ("image", "mask"), {"image": "nearest", "mask": "nearest"}
    colours = np.array([(n * 37 + 11) % 256 for n in range(768)], np.uint8).reshape(256, 3)
    moved = Compose([RandomCrop((30, 38), fields=both), HorizontalFlip(fields=both)])
    moved = Compose([moved, RandomResizedCrop(24, fields=named), CutMix(3, fields=both)])

    def known(batch: Batch) -> Batch:
        return {**batch, "label": torch.zeros_like(batch["row"])}

    for transform in (HorizontalFlip(), Compose([RandomCrop(8)]), RandomResizedCrop(8)):
        with pytest.raises(UsageError, match="changes image alone, and mask would stay behind"):
            opened(scenes, 20, transform=transform)
    late = (Compose([known, HorizontalFlip()]), Compose([known, CutMix(1)]))
    refusals(scenes, "mask would stay behind", *late)
    with opened(scenes, 20, transform=HorizontalFlip(), fields=["image"]) as loader:
        assert len(list(loader)) == 3
    with opened(scenes, 20, transform=Compose([known, moved])) as loader:
        for batch in loader:
            shown = colours[batch["mask"][:, 0].numpy()].transpose(0, 3, 1, 2)
            assert np.array_equal(batch["image"].numpy(), shown)
    image, mask = {"fields": ("image",)}, {"fields": ("mask",)}
    apart: list[list[Transform]] = [
        [HorizontalFlip(**image), HorizontalFlip(**mask)],
        [RandomResizedCrop(24, fields={"image": "bilinear"}), RandomCrop(24, **mask)],
        [Compose([HorizontalFlip(fields=("mask", "image"))]), HorizontalFlip(**image)],
        [RandomCrop(24, fields=("mask", "image")), HorizontalFlip(**mask)],
    ]  # type: ignore[list-item]
    for steps in apart:
        with pytest.raises(UsageError, match=r"a draw of its own.* name image and mask in"):
            opened(scenes, 20, transform=Compose(steps))


def test_two_pictures_beside_a_mask_may_move_by_draws_of_their_own() -> None:
    both, one = HorizontalFlip(fields=("left", "mask")), HorizontalFlip(fields=("right",))
    steps = steps_of(Compose([both, one]))
    require_one_draw(steps, {"mask": True})
    require_one_draw(steps, {"mask": True, "left": False, "right": False})


# --- units --------------------------------------------------------------------------------------

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
UNIT = Normalize(*IMAGENET)


def _literal(text: str) -> Any:
    """The transform that a refusal writes."""
    return eval(text[text.index("Give ") + 5 :].partition("),")[0].rstrip(")") + ")")


BYTES = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
UNITS: dict[str, tuple[torch.Tensor, Any]] = {
    "of one, for bytes": (_images(), IMAGENET),
    "of one half, for bytes": (_images(), ([0.5] * 3, [0.5] * 3)),
    "of one, for floats of bytes": (_images().float(), IMAGENET),
    "of bytes, for one": (_images() / 255, BYTES),
    "of two units, for bytes": (_images(), (BYTES[0], IMAGENET[1])),
    "of two units, with the std of bytes": (_images(), (IMAGENET[0], BYTES[1])),
    "of two units, for one": (_images() / 255, (BYTES[0], IMAGENET[1])),
    "of one half of bytes, for one": (_images() / 255, ([127.5] * 3, [127.5] * 3)),
    "of one, for one that was divided again": (_images() / 65025, IMAGENET),
    "of bytes, for 10 bits": ((_images().int() * 4).to(torch.uint16), BYTES),
    "of bytes, for 12 bits": ((_images().int() * 16).to(torch.int16), BYTES),
    "of one, for 12 bits": (_images().int() * 16, IMAGENET),
}
"""Pixels, and a mean and std of another range."""


@pytest.mark.parametrize("name", UNITS)
def test_a_mean_and_a_std_of_another_range_are_refused_with_those_that_fit(name: str) -> None:
    """ImageNet's, for pixels of 0 to 255, gave a mean of 486."""
    images, given = UNITS[name]
    with pytest.raises(UsageError, match="another range than the pixels, which are") as caught:
        Normalize(*given).apply({"image": images}, _draw())
    unit = _images() / 255
    wanted = ([0.5] * 3, [0.5] * 3) if "half" in name else IMAGENET
    expected = Normalize(*wanted).apply({"image": unit}, _draw())["image"]
    found = _literal(str(caught.value)).apply({"image": images}, _draw())["image"]
    assert torch.allclose(found, expected, atol=0.02)


def test_units_are_checked_with_the_first_batch_of_each_loader(image_tiles: BuiltStore) -> None:
    """Also of loaders that share a transform."""
    before: list[list[Any]] = [[], [RandomCrop(16), HorizontalFlip()], [lambda batch: batch]]
    unfit = (Compose([*steps, Normalize(*IMAGENET)]) for steps in before)
    refusals(image_tiles, "another range", *unfit)
    shared = (Normalize(*IMAGENET), "another range"), (ColorJitter(0.1), "takes floats of 0 to 1")
    for step, said in shared:

        def divided(by: int, step: Any = step) -> Compose:
            return Compose([lambda batch: {**batch, "image": batch["image"] / by}, step])

        with opened(image_tiles, 8, transform=divided(255)) as right:
            assert torch.isfinite(next(iter(right))["image"]).all()
            refusals(image_tiles, said, divided(1))


OF_THEIR_PIXELS: list[tuple[torch.Tensor, list[Any], list[Any]]] = [
    (_images(), [0] * 3, [255] * 3), (_images(), [0] * 3, [1] * 3), (_images(), BYTES[0], [1] * 3),
    (_images() % 2, [0.4] * 3, [0.49] * 3), (_images() / 1.0, [120] * 3, [60] * 3),
    (_images() / 255, *IMAGENET), (_images() / 255, IMAGENET[0], [1] * 3),
    (_images() / 255, [0] * 3, [1] * 3), (_images() / 127.5 - 1, [0.1] * 3, [0.7] * 3),
    ((_images().int() + 200).to(torch.uint16), *BYTES), (_images() // 128, *BYTES),
    (_images() // 255, [0.004] * 3, [0.5] * 3),
]  # fmt: skip


def test_means_of_their_own_pixels_are_taken() -> None:
    for images, mean, std in OF_THEIR_PIXELS:
        normalize = Normalize(mean, std)
        for _ in range(2):
            found = normalize.apply({"image": images}, _draw())["image"]
            means, stds = (torch.tensor(values)[:, None, None] for values in (mean, std))
            assert torch.allclose(found, (images.float() - means) / stds, atol=1e-4)


ONES = [1.0] * 3
NORMALIZED = Normalize(*BYTES).apply({"image": _images()}, _draw())["image"]


@pytest.mark.parametrize(
    ("images", "given", "said"),
    [
        (_images(), (IMAGENET[0], ONES), "another range"),
        (_images() / 255, (BYTES[0], ONES), "another range"),
        (_images().int() * 64, (BYTES[0], ONES), "another range"),
        (_images() / 255, ([0.0] * 3, [255.0] * 3), re.escape(f"Give Normalize({[0.0] * 3}, [1.0")),
        (NORMALIZED, IMAGENET, "as normalized ones are: leave Normalize out"),
        (NORMALIZED, BYTES, "as normalized ones are: leave Normalize out"),
    ],
)
def test_what_is_of_another_range_is_not_subtracted_nor_divided_twice(
    images: torch.Tensor, given: Any, said: str
) -> None:
    normalize = Normalize(*given)
    normalize.apply({"image": images * 0}, _draw())  # black images do not end the check
    with pytest.raises(UsageError, match=said):
        normalize.apply({"image": images}, _draw())


COLOURS = "ColorJitter takes floats of 0 to 1"


def test_pixels_of_other_units_or_unknown_brightness_are_refused() -> None:
    cases: list[tuple[Transform, torch.Tensor, str]] = [
        (ColorJitter(0.1), _images().float(), COLOURS),
        (ColorJitter(0.1), _images() / 127.5 - 1, COLOURS),
        *((step, _images().to(dtype), f"the pixels are {dtype}, whose full brightness")
          for step in (ToDType(), ColorJitter(0.1))
          for dtype in (torch.int16, torch.int32, torch.bool)),
    ]  # fmt: skip
    for transform, images, said in cases:
        with pytest.raises(UsageError, match=said):
            transform.apply({"image": images}, _draw())


def test_pixels_are_normalized_once(image_tiles: BuiltStore) -> None:
    def made(*steps: Any) -> Callable[[], precache.Loader]:
        return lambda: opened(image_tiles, 8, transform=Compose(steps))

    once, scale, unit = Normalize([120] * 3, [60] * 3), Normalize([0] * 3, [255] * 3), UNIT
    again = r"changes image a second time, after Normalize\(\["
    assert_refused(
        (again, made(once, once)),
        (again, made(once, Compose([HorizontalFlip(), unit]))),
        (again, made(scale, unit, unit)),
        (r"a second time, .* function of both and what is",
         made(once, lambda batch: batch, Compose([once]))),
    )  # fmt: skip
    for steps in ([scale, unit], [once, lambda batch: batch], [scale, lambda batch: batch, unit]):
        made(*steps)().close()


def test_a_transform_that_is_called_says_how_it_is_given(image_tiles: BuiltStore) -> None:
    for step in (HorizontalFlip(), Compose([HorizontalFlip()])):
        name = type(step).__name__
        said = rf"{name} is called, .* as transform={name}\("
        refusals(image_tiles, said, lambda b, step=step: step(b))
