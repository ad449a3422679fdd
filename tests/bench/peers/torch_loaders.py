"""The floor, and what torch itself offers.

`np.take` from a memory map into one reused buffer is the least that copying rows can cost.

JPEGs are decoded, cropped and resized by Pillow in as many workers as there are cores: the CPU time
is the same without workers, and the rate that of one core. Pillow's `draft`, which is faster on
large photographs, would give other pixels than the rows'.

The others have no workers: passing batches between processes costs five to ten times what it
saves. `TensorDataset` gives its samples to NumPy to stack: with the default collate function it
takes three to thirty times as long, indexed by whole batches seven times. `np.memmap` has
`__getitems__`, so that a batch is one fancy index of NumPy.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.bench.peers.child import BATCH, ROW_SHAPE, Batch, Peer, draw_crop


def stack(samples: Sequence[tuple[np.ndarray, int]]) -> Batch:
    """Collate (image, number) pairs."""
    images, numbers = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(numbers)


def stack_tensors(samples: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
    """Collate (image, number) pairs of tensors."""
    images, numbers = zip(*samples, strict=True)
    return torch.from_numpy(np.stack([image.numpy() for image in images])), torch.stack(numbers)


class _Take(Peer):
    def epochs(self, rows: Path, store: Path) -> Iterator[Iterable[Batch]]:
        source = np.load(store, mmap_mode="r")
        flat = source.reshape(len(source), -1)
        buffer = np.empty((BATCH, flat.shape[1]), np.uint8)
        random = np.random.default_rng(0)

        def epoch() -> Iterator[Batch]:
            order = random.permutation(len(flat))
            for start in range(0, len(flat), BATCH):
                part = order[start : start + BATCH]
                np.take(flat, part, axis=0, out=buffer[: len(part)], mode="clip")
                yield buffer[: len(part)].reshape(len(part), *source.shape[1:]), part

        while True:
            yield epoch()


class _MemmapDataset(Dataset[Batch]):
    def __init__(self, store: Path) -> None:
        self._rows = np.load(store, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, indices: list[int]) -> Batch:
        return torch.from_numpy(self._rows[indices]), torch.tensor(indices)


class _Memmap(Peer):
    def loader(self, rows: Path, store: Path) -> Iterable[Batch]:
        dataset = _MemmapDataset(store)
        return DataLoader(dataset, BATCH, shuffle=True, collate_fn=lambda batch: batch)


class _Tensors(Peer):
    def loader(self, rows: Path, store: Path) -> Iterable[Batch]:
        images = torch.from_numpy(np.load(store))
        dataset = TensorDataset(images, torch.arange(len(images)))
        return DataLoader(dataset, BATCH, shuffle=True, collate_fn=stack_tensors)


@dataclass(frozen=True)
class _PhotoDataset(Dataset[tuple[np.ndarray, int]]):
    files: Sequence[Path]
    decode: Callable[[Path, int], np.ndarray]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.decode(self.files[index], index), index


@dataclass(frozen=True)
class _Photos(Peer):
    """Photos that as many workers as cores decode, each time that they are asked for."""

    decode: Callable[[Path, int], np.ndarray]
    exact: bool | None

    def write(self, rows: Path, store: Path) -> None:
        shutil.copytree(rows / "photos", store, copy_function=os.link)

    def loader(self, rows: Path, store: Path) -> Iterable[Batch]:
        dataset = _PhotoDataset(sorted(store.iterdir()), self.decode)
        workers = len(os.sched_getaffinity(0))
        return DataLoader(
            dataset, BATCH, shuffle=True, num_workers=workers, collate_fn=stack,
            persistent_workers=True,
        )  # fmt: skip


def random_crop(path: Path, number: int) -> np.ndarray:
    """A random resized crop by Pillow, with torchvision's draws, mirrored or not."""
    from PIL import Image

    draw = np.random.default_rng([number, time.time_ns()])
    image = Image.open(path).convert("RGB")
    box = (0, 0, image.width, image.height)
    for _ in range(10):
        area = draw.uniform(0.08, 1) * image.width * image.height
        aspect = np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, tall = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 0 < wide <= image.width and 0 < tall <= image.height:
            left = draw.integers(image.width - wide + 1)
            top = draw.integers(image.height - tall + 1)
            box = (left, top, left + wide, top + tall)
            break
    crop = image.resize(ROW_SHAPE[:2], Image.Resampling.BILINEAR, box=box)
    if draw.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(crop)


TAKE, MEMMAP, TENSORS = _Take(), _Memmap(), _Tensors()
JPEGS, CROPS = _Photos(draw_crop, True), _Photos(random_crop, None)
