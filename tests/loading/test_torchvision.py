"""A segmentation and a detection learn from a store as from files and torchvision.transforms.v2."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import precache
from precache.transforms import Compose, Draw, HorizontalFlip, RandomResizedCrop
from tests.support.building import encoded

torchvision = pytest.importorskip("torchvision")

SEED, EPOCHS, SIDE = 4, 12, 32
CROP = RandomResizedCrop(SIDE, (0.4, 1), fields={"image": "bilinear", "mask": "nearest"})
FLIP = HorizontalFlip(fields=("image", "mask"))
RECIPE = {
    "fields": {
        "image": {"ops": [{"op": "decode"}], "codec": "raw"},
        "mask": {"ops": [{"op": "decode", "mode": "P"}], "codec": "zstd"},
        "boxes": {"kind": "boxes"},
        "category": {"kind": "ragged", "of": "boxes"},
    }
}

Batches = Iterable[dict[str, torch.Tensor]]


class Squares:
    """Noise with up to three coloured squares; their colours are categories and values of masks."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> dict[str, Any]:
        random = np.random.default_rng(number)
        height, width = random.integers(40, 60, 2).tolist()
        pixels = random.integers(0, 60, (height, width, 3)).astype(np.uint8)
        mask, boxes, categories = np.zeros((height, width), np.uint8), [], []
        mask[:2] = 255
        for _ in range(number % 4):
            x, y, size = *random.integers(0, 28, 2).tolist(), int(random.integers(7, 13))
            category = int(random.integers(0, 3))
            pixels[y : y + size, x : x + size, category] = 255
            mask[y : y + size, x : x + size] = 1 + category
            boxes.append([x, y, x + size, y + size])
            categories.append(category)
        files = [encoded(Image.fromarray(array), "PNG") for array in (pixels, mask)]
        parts = {"boxes": boxes, "category": categories, "label": 0}
        return {"image": files[0], "mask": files[1], **parts}


class Transformed(Dataset[dict[str, Any]]):
    """Squares decoded by Pillow, and moved by torchvision as a loader draws it for each row."""

    def __init__(self, keys: list[str], epoch: int) -> None:
        self._keys, self._epoch = keys, epoch

    def __getitem__(self, row: int) -> dict[str, Any]:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import SanitizeBoundingBoxes
        from torchvision.transforms.v2.functional import horizontal_flip, resized_crop, to_image

        sample = Squares()[int(self._keys[row])]
        image, mask = (to_image(Image.open(io.BytesIO(sample[name]))) for name in ("image", "mask"))
        draw, size = Draw((SEED, self._epoch), 0, torch.tensor([row])), image.shape[1:]
        height, width = (torch.tensor([float(side)]) for side in size)
        part = CROP.boxes(height, width, draw.inside(0))[0].long().tolist()
        corners = torch.tensor(sample["boxes"], dtype=torch.float32).reshape(-1, 4)
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size)
        moved = [
            resized_crop(image, *part, [SIDE, SIDE], antialias=True),
            resized_crop(tv_tensors.Mask(mask), *part, [SIDE, SIDE]),
            resized_crop(boxes, *part, [SIDE, SIDE]),
        ]
        if draw.inside(1).uniform(1).item() < FLIP.p:
            moved = [*map(horizontal_flip, moved)]
        target = {"boxes": moved[2], "category": torch.tensor(sample["category"]).long()}
        kept = SanitizeBoundingBoxes(labels_getter=lambda target: target["category"])(target)
        return {"image": moved[0], "mask": moved[1], **kept}


def stacked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("image", "mask")}
    boxes, category = (
        torch.nn.utils.rnn.pad_sequence([torch.Tensor(s[name]) for s in samples], batch_first=True)
        for name in ("boxes", "category")
    )
    lengths = torch.tensor([len(sample["boxes"]) for sample in samples])
    return {**batch, "boxes": boxes, "category": category.long(), "boxes.length": lengths}


def segmentation(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    target = batch["mask"][:, 0].long()
    return functional.cross_entropy(scores[:, :4], target, ignore_index=255)


def detection(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Find corners and categories in the cells, of 8 x 8 pixels, of the boxes' centres."""
    lengths, boxes = batch["boxes.length"], batch["boxes"]
    image, place = torch.nonzero(torch.arange(boxes.shape[1]) < lengths[:, None]).T
    corners, category = boxes[image, place], batch["category"][image, place]
    # Some centres lie between two cells.
    x, y = ((corners[:, :2] + corners[:, 2:]) / 16 + 1e-3).long().clamp(max=3).T
    cells = functional.avg_pool2d(scores, 8)
    found = torch.zeros_like(cells[:, 0]).index_put((image, y, x), cells.new_ones(()))
    own = cells[image, :, y, x]
    return (
        functional.binary_cross_entropy_with_logits(cells[:, 0], found)
        + functional.mse_loss(own[:, 1:5], corners / SIDE, reduction="sum") / len(lengths)
        + functional.cross_entropy(own[:, 5:], category, reduction="sum") / len(lengths)
    )


def losses(batches: Batches, loss_of: Any) -> list[float]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 12, 5, padding=2),
        torch.nn.Softplus(),
        torch.nn.Conv2d(12, 12, 5, padding=2),
        torch.nn.Softplus(),
        torch.nn.Conv2d(12, 8, 1),
    )
    optimizer, curve = torch.optim.Adam(net.parameters(), 0.005), []
    for batch in batches:
        loss = loss_of(net(batch["image"].float() / 255 - 0.5), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize("loss_of", [segmentation, detection])
def test_a_training_learns_as_from_the_files(loss_of: Any, tmp_path: Path) -> None:
    recipe = precache.Recipe.from_dict(RECIPE)
    source = f"python:{__name__}:Squares"
    precache.build(source, tmp_path, recipe, address="serial", progress=False)
    keys = list(precache.open(tmp_path).keys)
    with precache.Loader(
        tmp_path, 8, seed=SEED, drop_last=True, device="cpu", transform=Compose([CROP, FLIP])
    ) as loader:
        read = [[*loader] for _ in range(EPOCHS)]

    def from_files() -> Iterator[dict[str, torch.Tensor]]:
        for epoch, batches in enumerate(read):
            rows = [batch["row"].tolist() for batch in batches]
            yield from DataLoader(Transformed(keys, epoch), batch_sampler=rows, collate_fn=stacked)

    cached, plain = losses(itertools.chain(*read), loss_of), losses(from_files(), loss_of)
    assert cached == pytest.approx(plain, rel=2e-3)
    assert np.mean(cached[-7:]) < np.mean(cached[:7]) / 2
    assert len({*cached}) == len(cached)
