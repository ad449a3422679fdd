"""The same work by Ray Data: ``python ray_data.py images|bytes SOURCE TARGET CPUS``.

``images`` is Ray Data's own reader, which decodes with Pillow; ``bytes`` reads files and decodes
and resizes them with the libraries that precache uses. Rows end up in .npy files.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import simplejpeg
import torch
from PIL import Image

RESIZE, CROP, BATCH = 256, 224, 64


def _size(height: int, width: int) -> tuple[int, int]:
    """(height, width) with the shorter side resized."""
    shorter = min(height, width)
    return RESIZE * height // shorter, RESIZE * width // shorter


def _crop(array: np.ndarray) -> np.ndarray:
    top, left = (array.shape[0] - CROP) // 2, (array.shape[1] - CROP) // 2
    return array[top : top + CROP, left : left + CROP]


def _by_pillow(array: np.ndarray) -> np.ndarray:
    height, width = _size(*array.shape[:2])
    resized = Image.fromarray(array).resize((width, height), Image.Resampling.BILINEAR)
    return _crop(np.asarray(resized))


def _by_torch(data: bytes) -> np.ndarray:
    array = simplejpeg.decode_jpeg(data)
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(array)[None].permute(0, 3, 1, 2),
        size=_size(*array.shape[:2]),
        mode="bilinear",
        antialias=True,
    )
    return _crop(resized[0].permute(1, 2, 0).numpy())


def from_images(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """A batch of decoded images."""
    return {"image": np.stack([_by_pillow(image) for image in batch["image"]])}


def from_bytes(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """A batch of files."""
    torch.set_num_threads(1)
    return {"image": np.stack([_by_torch(data) for data in batch["bytes"]])}


def main() -> None:
    """Run the recipe on a Ray of its own."""
    kind, source, target, cpus = sys.argv[1:]
    ray.init(
        address="local",
        num_cpus=int(cpus),
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    paths = sorted(str(path) for path in Path(source).rglob("*") if path.is_file())
    if kind == "images":
        rows = ray.data.read_images(paths, mode="RGB").map_batches(from_images, batch_size=BATCH)
    else:
        rows = ray.data.read_binary_files(paths).map_batches(from_bytes, batch_size=BATCH)
    rows.write_numpy(target, column="image")
    ray.shutdown()


if __name__ == "__main__":
    main()
