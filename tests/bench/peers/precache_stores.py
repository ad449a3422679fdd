"""precache: each codec read by a `Loader`, and `raw` by a `DataLoader` over a `CachedDataset`.

A `Loader` has its defaults, with checksums on, and undoes the image filter on the CPU. A
`CachedDataset` is read by a plain `DataLoader`.
The rows go in as the arrays they are, by ``python:``; photos of which crops are taken, as they lie
in their folder, or decoded, so that the build encodes them.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

import precache
from precache.transforms import Compose, HorizontalFlip, RandomResizedCrop
from tests.bench.peers.child import BATCH, LONGEST, ROW_SHAPE, Batch, Peer, PhotoDataset, RowDataset

ROWS_VARIABLE = "PRECACHE_BENCH_ROWS"


class LabelledRows(RowDataset):
    """The rows in the folder that the environment names, as a dataset whose labels are known."""

    def __init__(self) -> None:
        super().__init__(Path(os.environ[ROWS_VARIABLE]))
        self.targets = range(len(self))


class LabelledPhotos(PhotoDataset):
    """The photos in that folder, decoded."""

    def __init__(self) -> None:
        super().__init__(Path(os.environ[ROWS_VARIABLE]))
        self.targets = range(len(self))


@dataclass(frozen=True)
class _Store(Peer):
    codec: str

    def write(self, rows: Path, store: Path) -> None:
        os.environ[ROWS_VARIABLE] = str(rows)
        field = precache.Field(ops=(precache.Decode(),), codec=self.codec)
        source = f"python:{__name__}:LabelledRows"
        recipe = precache.Recipe(fields={"image": field})
        precache.build(source, store, recipe, address="serial", on_error="raise")

    def loader(self, rows: Path, store: Path) -> Iterable[Batch]:
        return precache.Loader(store, BATCH, device="cpu", output="tuple")


class _DatasetStore(_Store):
    def epochs(self, rows: Path, store: Path) -> Iterator[Iterable[Batch]]:
        dataset = precache.CachedDataset(store)
        loader = DataLoader(dataset, BATCH, shuffle=True)
        while True:
            yield ((batch["image"], batch["label"]) for batch in loader)


@dataclass(frozen=True)
class _Crops(Peer):
    codec: str
    quality: int | None = None  # of JPEG files that the build encodes; without it, they are kept
    exact = None

    def write(self, rows: Path, store: Path) -> None:
        recipe = precache.Recipe.image(max_size=LONGEST, codec=self.codec, quality=self.quality)
        os.environ[ROWS_VARIABLE] = str(rows)
        source = f"python:{__name__}:LabelledPhotos" if self.quality else rows / "photos"
        precache.build(source, store, recipe, address="serial", max_failures=0)

    def epochs(self, rows: Path, store: Path) -> Iterator[Iterable[Batch]]:
        number_of = np.array([int(key.removesuffix(".jpg")) for key in precache.open(store).keys])
        transform = Compose([RandomResizedCrop(ROW_SHAPE[0]), HorizontalFlip()])
        loader = precache.Loader(store, BATCH, device="cpu", transform=transform)
        while True:
            yield ((batch["image"], number_of[batch["row"].numpy()]) for batch in loader)


RAW, ZSTD, IMAGE = _Store("raw"), _Store("zstd"), _Store("image")
DATASET = _DatasetStore("raw")
CROPS_RAW, CROPS_RAW420 = _Crops("raw"), _Crops("raw420")
CROPS_IMAGE, CROPS_JPEG = _Crops("image"), _Crops("jpeg")
CROPS_ENCODED = _Crops("jpeg", quality=97)
"""Of as many bytes as FFCV's files of quality 90, which do not halve colours."""
