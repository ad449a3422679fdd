"""Masks move as their pictures do, by the pixels that torchvision.transforms.v2 takes.

``tests/golden/masks.npz`` was made with torchvision 0.28: a `Mask` of `mask_of` for each of the
sizes in ``boxes.npz`` went through ``v2.functional.resized_crop``, ``pad``, ``crop``,
``center_crop``, ``resize`` and ``horizontal_flip``, with the crops and flips that the steps below
draw from ``Draw((3, 5), 0, arange(16))``; and some others through ``resize`` alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import precache
from precache.codecs.windows import pick_pixels
from precache.transforms import (
    CenterCrop,
    Compose,
    Draw,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    WindowSteps,
    run_all,
    steps_of,
)

ROOT = Path(__file__).parents[1] / "golden"
GOLDEN, SIZES = np.load(ROOT / "masks.npz"), np.load(ROOT / "boxes.npz")
ALONE, NEAREST = ("mask",), {"mask": "nearest"}
FLIP = HorizontalFlip(fields=ALONE)
STEPS: dict[str, list[Any]] = {
    "crop_flip": [RandomResizedCrop(32, fields=NEAREST), FLIP],
    "flip_crop": [FLIP, RandomResizedCrop((24, 40), fields=NEAREST)],
    "window_flip": [RandomCrop(40, fields=ALONE), FLIP],
    "padded": [RandomCrop(40, padding=6, fields=ALONE), FLIP],
    "centre": [CenterCrop((33, 34), fields=ALONE)],
    "resized": [Resize(31, fields=NEAREST), CenterCrop(30, fields=ALONE), FLIP],
    "flips": [FLIP, Resize(37, fields=NEAREST), RandomCrop((30, 33), fields=ALONE), FLIP],
    "larger": [RandomCrop(40, fields=ALONE), Resize((57, 81), fields=NEAREST), FLIP],
}
DRAW = Draw((3, 5), 0, torch.arange(16))


def mask_of(height: int, width: int) -> np.ndarray:
    return (np.arange(height * width) * 40503 % 251).reshape(1, height, width).astype(np.uint8)


@pytest.mark.parametrize("name", STEPS)
def test_dense_batches_have_the_masks_of_torchvision(name: str) -> None:
    masks = np.stack([mask_of(*size) for size in SIZES["dense.sizes"].tolist()])
    moved = run_all(steps_of(Compose(STEPS[name])), {"mask": torch.from_numpy(masks)}, DRAW)
    np.testing.assert_array_equal(moved["mask"][:, 0], GOLDEN[f"dense.{name}"])


@pytest.mark.parametrize("name", [name for name in STEPS if name != "padded"])
def test_windows_of_ragged_masks_have_the_pixels_of_torchvision(name: str) -> None:
    sizes, wanted = SIZES["ragged.sizes"], GOLDEN[f"ragged.{name}"]
    placed = [((number,), step) for number, step in enumerate(STEPS[name])]
    windows = WindowSteps(placed, (0, 0))(sizes, DRAW).windows()
    found = np.zeros_like(wanted[:, None])
    for row, size in enumerate(sizes.tolist()):
        part = slice(row, row + 1)
        pick_pixels(mask_of(*size), windows.part(part), found[part])
    np.testing.assert_array_equal(found[:, 0], wanted)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("resize.")])
def test_recipes_resize_masks_as_torchvision(name: str) -> None:
    before, after = ([*map(int, sides.split("x"))] for sides in name.split(".")[1:])
    size: Any = after[0] if len(after) == 1 else tuple(after)
    resize = precache.Resize(size=size, interpolation="nearest")
    found = resize(mask_of(*before).transpose(1, 2, 0), None)
    np.testing.assert_array_equal(found[..., 0], GOLDEN[name])
