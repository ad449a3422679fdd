"""Boxes and keypoints move as their pictures do, by the results of torchvision.transforms.v2.

``tests/golden/boxes.npz`` was made with torchvision 0.28: of each sample, `BoundingBoxes` (XYXY)
and `KeyPoints` went through ``v2.functional.resized_crop``, ``crop``, ``center_crop``, ``resize``
and ``horizontal_flip``, with the crops and flips that the steps below draw from
``Draw((3, 5), 0, arange(16))``, and at the end through ``sanitize_bounding_boxes`` with its
defaults, for pictures of one size (``dense``) and of many (``ragged``).
``kept`` are the numbers of the boxes that are left, -1 behind them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from precache.errors import UsageError
from precache.transforms import (
    Batch,
    CenterCrop,
    Compose,
    CutMix,
    Draw,
    Follower,
    HorizontalFlip,
    MixUp,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    WindowSteps,
    follow,
    movement_of,
    run_all,
    steps_of,
    without_gone,
)
from tests.support.loaders import assert_refused

GOLDEN = np.load(Path(__file__).parents[1] / "golden/boxes.npz")
STEPS: dict[str, list[Any]] = {
    "crop_flip": [RandomResizedCrop(32), HorizontalFlip()],
    "flip_crop": [HorizontalFlip(), RandomResizedCrop((24, 40))],
    "window_flip": [RandomCrop(40), HorizontalFlip()],
    "padded": [RandomCrop(40, padding=6), HorizontalFlip()],
    "centre": [CenterCrop((33, 34))],
    "resized": [Resize(31), CenterCrop(30), HorizontalFlip()],
}
FOLLOWERS = {
    "boxes": Follower("boxes", "image"),
    "points": Follower("keypoints", "image", "boxes"),
    "number": Follower("ragged", "", "boxes"),
    "free": Follower("keypoints", "image"),
}


def batch_of(kind: str) -> Batch:
    """Return the fields of the golden samples, without their pictures."""
    boxes, points = (torch.from_numpy(GOLDEN[f"{kind}.{name}"]) for name in ("boxes", "points"))
    lengths = torch.from_numpy(GOLDEN[f"{kind}.lengths"])
    number = torch.arange(boxes.shape[1]).expand(boxes.shape[:2])
    fields = {"boxes": boxes, "points": points, "number": number, "free": points}
    return fields | {f"{name}.length": lengths for name in fields}


def draw() -> Draw:
    return Draw((3, 5), 0, torch.arange(16), FOLLOWERS)


def require_golden(batch: Batch, kind: str, name: str) -> None:
    golden = {
        part: torch.from_numpy(GOLDEN[f"{kind}.{name}.{part}"])
        for part in ("boxes", "points", "kept", "lengths")
    }
    inside = golden["kept"] >= 0
    assert 0 < inside.sum() < batch["free.length"].sum()  # some are dropped
    for field in ("boxes", "points", "number"):
        assert torch.equal(batch[f"{field}.length"], golden["lengths"])
        assert not batch[field][~inside].any()
    assert torch.equal(batch["number"][inside], golden["kept"][inside].long())
    for field in ("boxes", "points"):
        torch.testing.assert_close(batch[field], golden[field], rtol=0, atol=1e-4)
    # Points that belong to no boxes stay, wherever they go.
    assert torch.equal(batch["free.length"], torch.from_numpy(GOLDEN[f"{kind}.lengths"]))
    for row, numbers in enumerate(golden["kept"].long()):
        kept = numbers[numbers >= 0]
        assert torch.equal(batch["free"][row, kept], batch["points"][row, : len(kept)])


@pytest.mark.parametrize("name", STEPS)
def test_dense_batches_have_the_boxes_of_torchvision(name: str) -> None:
    height, width = GOLDEN["dense.sizes"][0].tolist()
    batch = {"image": torch.zeros(16, 3, height, width, dtype=torch.uint8), **batch_of("dense")}
    before = {field: values.clone() for field, values in batch.items()}
    require_golden(run_all(steps_of(Compose(STEPS[name])), batch, draw()), "dense", name)
    assert all(torch.equal(batch[field], values) for field, values in before.items())


@pytest.mark.parametrize("name", [name for name in STEPS if name != "padded"])
def test_windows_of_ragged_pictures_have_the_boxes_of_torchvision(name: str) -> None:
    steps = STEPS[name]
    placed = [((number,), step) for number, step in enumerate(steps)]
    view = WindowSteps(placed, (0, 0))(GOLDEN["ragged.sizes"], draw())
    size = view.size
    assert size is not None
    batch = batch_of("ragged")
    places = torch.from_numpy(view.places())
    drawn = draw()
    moved = follow(batch, ["image"], movement_of(places, size), drawn)
    require_golden(without_gone({**batch, **moved}, drawn), "ragged", name)


def test_boxes_move_where_the_pixels_under_them_do() -> None:
    """Each picture is black but for one box, and the box of what is white is the moved box."""
    corners = torch.tensor([[9, 5, 40, 30], [0, 0, 20, 12], [31, 8, 64, 48], [10, 40, 12, 42]])
    image = torch.zeros(4, 1, 48, 64, dtype=torch.uint8)
    for pixels, (x1, y1, x2, y2) in zip(image, corners.tolist(), strict=True):
        pixels[:, y1:y2, x1:x2] = 255
    for steps in ([RandomCrop(40, 4), HorizontalFlip()], [HorizontalFlip(), CenterCrop((48, 51))]):
        drawn = Draw((9, 0), 0, torch.arange(4), {"boxes": FOLLOWERS["boxes"]})
        boxes = {"boxes": corners[:, None].float(), "boxes.length": torch.ones(4).long()}
        batch = run_all(steps_of(Compose(steps)), {"image": image, **boxes}, drawn)
        for pixels, box, length in zip(*(batch[n] for n in ("image", *boxes)), strict=True):
            rows, columns = (pixels[0] > 0).any(1).nonzero(), (pixels[0] > 0).any(0).nonzero()
            if length:
                edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert torch.equal(box[0], torch.stack(edges).float())
            else:
                assert not len(rows)


def test_boxes_are_dropped_after_the_last_step_that_moves_pixels() -> None:
    """In dense batches and in windows; a function of the batch sees none of those that are gone."""
    corners = torch.tensor([[[10.0, 10, 15.5, 30], [0, 0, 14, 9], [12, 12, 40, 20]]])
    steps = [CenterCrop(20), Resize((80, 80))]  # of 30 x 50, it begins at 15, 5
    drawn = Draw((0,), 0, torch.arange(1), {"boxes": FOLLOWERS["boxes"]})
    boxes = {"boxes": corners, "boxes.length": torch.tensor([3])}
    left = torch.tensor([[[0.0, 20, 2, 80], [0, 28, 80, 60], [0, 0, 0, 0]]])

    def require(batch: Batch, wanted: torch.Tensor, count: int) -> None:
        torch.testing.assert_close(batch["boxes"], wanted)
        assert batch["boxes.length"].tolist() == [count]

    dense = {"image": torch.zeros(1, 1, 30, 50), **boxes}
    require(run_all(steps_of(Compose(steps)), dense, drawn), left, 2)
    view = WindowSteps([((n,), step) for n, step in enumerate(steps)], (80, 80), ())(
        np.array([[30, 50]]), drawn
    )
    movement = movement_of(torch.from_numpy(view.places()), (80, 80))
    moved = follow(boxes, ["image"], movement, drawn)
    require(without_gone({**boxes, **moved}, drawn), left, 2)
    seen: list[Batch] = []
    between: list[Any] = [steps[0], lambda batch: (seen.append(batch), batch)[1], steps[1]]
    require(run_all(steps_of(Compose(between)), dense, drawn), left[:, [1, 2, 2]], 1)
    assert seen[0]["boxes.length"].tolist() == [1]


def test_a_batch_without_boxes_keeps_its_shape() -> None:
    boxes = {"boxes": torch.zeros(3, 0, 4), "boxes.length": torch.zeros(3).long()}
    drawn = Draw((1, 0), 0, torch.arange(3), {"boxes": FOLLOWERS["boxes"]})
    batch = {"image": torch.zeros(3, 3, 30, 30), **boxes}
    moved = run_all(steps_of(RandomResizedCrop(8)), batch, drawn)
    assert moved["boxes"].shape == (3, 0, 4)
    assert moved["image"].shape == (3, 3, 8, 8)


def test_what_cannot_move_boxes_refuses_them() -> None:
    batch = {"image": torch.zeros(16, 1, 48, 64), "label": torch.zeros(16).long()}
    scene = {**batch, **batch_of("dense")}
    of_boxes = ("image", "boxes")
    assert_refused(
        (r"MixUp does not know where the pixels of image go.*boxes and points",
         MixUp(5).apply, scene, draw()),
        ("CutMix does not know", CutMix(5).apply, scene, draw()),
        ("Normalize changes pixels, and",
         Normalize([0.0], [1.0], fields=of_boxes).apply, scene, draw()),
        ("HorizontalFlip changes pixels.*name pictures",
         HorizontalFlip(fields=("boxes",)).apply, scene, draw()),
        # Those whose recipe names no picture.
        ("boxes would stay behind", HorizontalFlip().apply,
         {name: scene[name] for name in (*of_boxes, "boxes.length")},
         Draw((0,), 0, torch.arange(16))),
    )  # fmt: skip
    plain, named = (
        RandomResizedCrop(9, fields=fields).apply(scene, draw())
        for fields in (None, {"image": "bilinear", "boxes": "nearest"})
    )
    assert all(torch.equal(plain[field], named[field]) for field in plain)


@pytest.mark.parametrize("longest", [True, False])
def test_boxes_that_a_function_dropped_alone_are_refused(longest: bool) -> None:
    """Else what belonged to a dropped box would belong to another one."""
    pixels = torch.zeros(16, 1, *GOLDEN["dense.sizes"][0].tolist(), dtype=torch.uint8)
    batch = {"image": pixels, **batch_of("dense")}
    lengths = batch["boxes.length"]

    def drop(batch: Batch) -> Batch:
        some = lengths == (lengths.max() if longest else lengths[lengths < lengths.max()].max())
        fewer = lengths - some.long()
        return {**batch, "boxes": batch["boxes"][:, : fewer.max()], "boxes.length": fewer}

    with pytest.raises(UsageError, match="has other entries, or lengths"):
        run_all(steps_of(Compose([drop, HorizontalFlip()])), batch, draw())
