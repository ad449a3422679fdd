"""The rows that every peer is fed, and the photographs that they are cut from."""

import itertools
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tests.bench.common import find_photos, log
from tests.bench.peers.child import ROW_SHAPE
from tests.bench.peers.crops import draw_crop

PART = 250


@dataclass(frozen=True)
class Rows:
    """A folder with `rows.npy` (count, H, W, C), and in `photos/` the photograph of each row."""

    folder: Path
    count: int

    @property
    def pixels(self) -> Path:
        return self.folder / "rows.npy"

    @property
    def photos(self) -> Path:
        return self.folder / "photos"


def make_rows(photos: Path | None, folder: Path, count: int) -> Rows:
    """`count` rows, made unless `folder` has them from an earlier run.

    Each row has a photograph of its own on the disk, a copy where there are too few, so that
    reading them cold is what it would be with as many photographs.
    """
    done = Rows(folder / f"rows-{count}", count)
    if done.folder.exists():
        return done
    root, files = find_photos(photos, folder)
    if not files:
        raise SystemExit(f"{root} holds no photo; name another folder with --photos")
    log.print(f"Cutting {count:,} rows from {len(files)} photos")
    making = Rows(done.folder.with_suffix(".making"), count)
    shutil.rmtree(making.folder, ignore_errors=True)
    making.photos.mkdir(parents=True)
    for number, path in zip(range(count), itertools.cycle(files), strict=False):
        shutil.copyfile(path, making.photos / f"{number:06d}.jpg")
    _cut(making)
    making.folder.rename(done.folder)
    return done


def _cut(rows: Rows) -> None:
    shape = (rows.count, *ROW_SHAPE)
    out = np.lib.format.open_memmap(rows.pixels, "w+", np.uint8, shape)
    parts = [range(rows.count)[start : start + PART] for start in range(0, rows.count, PART)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for part, crops in zip(parts, pool.map(partial(_cut_part, rows), parts), strict=True):
            out[part.start : part.stop] = crops
    out.flush()


def _cut_part(rows: Rows, part: Sequence[int]) -> np.ndarray:
    return np.stack([draw_crop(rows.photos / f"{number:06d}.jpg", number) for number in part])
