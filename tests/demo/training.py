"""A small training that can be fed from anywhere, and what feeding it costs."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from tests.bench.costs import Cost, cost_of

RESIZE, CROP = 256, 224  # pixels: the shorter side of a photo, then the square cut from its middle

Batch = tuple[Tensor, Tensor]
Batches = Callable[[int], Iterable[Batch]]
"""Takes an epoch's number, returns its batches: uint8 images (N, 3, H, W) and int64 labels (N,)."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of training; ``waiting`` and ``seconds`` are wall time."""

    loss: float
    samples: int
    seconds: float
    waiting: float

    @property
    def stall_ratio(self) -> float:
        """The share of the epoch that was spent waiting for the next batch."""
        return self.waiting / self.seconds

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


class JpegDataset(Dataset[tuple[Tensor, int]]):
    """Photos in folders, decoded whenever they are asked for, as most training scripts do."""

    def __init__(self, folder: Path, keys: Sequence[str], classes: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        self._paths = [folder / key for key in keys]
        self._labels = [numbers[path.parent.name] for path in self._paths]

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return a photo as uint8 (3, H, W), and its label."""
        return _decode(self._paths[index]), self._labels[index]


def jpeg_batches(dataset: JpegDataset, batch_size: int, workers: int, seed: int) -> Batches:
    """Return what a torch ``DataLoader`` makes of ``dataset``, shuffled anew every epoch."""
    order = torch.Generator()
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=RandomSampler(dataset, generator=order),
        num_workers=workers,
        persistent_workers=workers > 0,
        # This process has threads, and a fork of it might inherit a lock that is held.
        multiprocessing_context="forkserver" if workers else None,
    )

    def batches(epoch: int) -> Iterable[Batch]:
        order.manual_seed(seed + epoch)
        return loader

    return batches


def train(batches: Batches, classes: int, epochs: int, seed: int) -> Iterator[Epoch]:
    """Train a small net from scratch, and yield every epoch when it is done."""
    torch.manual_seed(seed)
    net = make_net(classes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for number in range(epochs):
        yield _train_epoch(net, optimizer, batches(number))


def loading_cost(batches: Batches, least_seconds: float = 1.0) -> Cost:
    """Measure loading without training, over whole epochs for ``least_seconds`` at least.

    One epoch goes before, unmeasured: it fills the page cache and starts what has to be started.
    """
    _drain(batches(0))
    until = time.perf_counter() + least_seconds

    def whole_epochs() -> int:
        samples, numbers = 0, itertools.count(1)
        while time.perf_counter() < until:
            samples += _drain(batches(next(numbers)))
        return samples

    return cost_of(whole_epochs, children=True)


def _decode(path: Path) -> Tensor:
    """Resize and crop as torchvision rounds, so that both trainings see the same pixels."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    width, height = (RESIZE * side // min(image.size) for side in image.size)
    left, top = round((width - CROP) / 2), round((height - CROP) / 2)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    image = image.crop((left, top, left + CROP, top + CROP))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def make_net(classes: int) -> nn.Sequential:
    """Make a small net of three convolutions."""
    widths = (3, 16, 32, 64)
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        stride, size = (4, 7) if inner == 3 else (2, 3)
        layers += [
            nn.Conv2d(inner, outer, size, stride, padding=size // 2, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def _train_epoch(
    net: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]
) -> Epoch:
    waiting, samples, loss_sum = 0.0, 0, 0.0
    start = before = time.perf_counter()
    for image, label in batches:
        waiting += time.perf_counter() - before
        loss = train_step(net, optimizer, image, label)
        samples += len(label)
        loss_sum += loss * len(label)
        before = time.perf_counter()
    end = time.perf_counter()
    return Epoch(loss_sum / samples, samples, end - start, waiting + end - before)


def train_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, image: Tensor, label: Tensor
) -> float:
    """Return the loss."""
    loss = nn.functional.cross_entropy(net(image.float().div_(127.5).sub_(1)), label)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()
    return float(loss.item())


def _drain(batches: Iterable[Batch]) -> int:
    return sum(len(label) for _, label in batches)
