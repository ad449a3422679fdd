"""FFCV: rows in one `.beton` file, raw or as JPEGs of quality 90.

`RANDOM` order over the operating system's cache, as its guide says for a set that fits in memory;
its own cache and `QUASI_RANDOM` burn two to three times as much. One batch ahead instead of three,
so that its buffers stay in the processor's cache. One thread for raw: a second gives a third more
samples/s for half as much CPU time again. JPEGs cost the same on any number of threads, and get one
a core.

A batch's memory is used again, two batches later, whoever still holds it; those of the other peers
stay what they are.

Random resized crops cost least with one thread, both ways.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import (
    IntDecoder,
    RandomResizedCropRGBImageDecoder,
    SimpleRGBImageDecoder,
)
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor
from ffcv.writer import DatasetWriter

from tests.bench.peers.child import BATCH, ROW_SHAPE, Batch, Peer, PhotoDataset, RowDataset

QUALITY = 90
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class _Beton(Peer):
    mode: str
    cropped: bool = False

    @property
    def exact(self) -> bool | None:
        return None if self.cropped else self.mode == "raw"

    def write(self, rows: Path, store: Path) -> None:
        image = RGBImageField(write_mode=self.mode, jpeg_quality=QUALITY)
        fields = {"image": image, "label": IntField()}
        dataset = PhotoDataset(rows) if self.cropped else RowDataset(rows)
        DatasetWriter(str(store), fields, num_workers=CORES).from_indexed_dataset(dataset)

    def loader(self, rows: Path, store: Path) -> Iterable[Batch]:
        images = [SimpleRGBImageDecoder()]
        if self.cropped:
            images = [RandomResizedCropRGBImageDecoder(ROW_SHAPE[:2]), RandomHorizontalFlip()]
        return Loader(
            str(store),
            BATCH,
            num_workers=CORES if self.exact is False else 1,
            os_cache=True,
            batches_ahead=1,
            order=OrderOption.RANDOM,
            drop_last=False,
            pipelines={
                "image": [*images, ToTensor()],
                "label": [IntDecoder(), ToTensor(), Squeeze(1)],
            },
        )


RAW, JPG = _Beton("raw"), _Beton("jpg")
RAW_CROPS, JPG_CROPS = _Beton("raw", cropped=True), _Beton("jpg", cropped=True)
