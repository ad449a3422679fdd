"""Rows: each another crop of a photograph, as training draws them."""

import random
from pathlib import Path

import numpy as np
from PIL import Image

from tests.bench.peers.child import ROW_SHAPE

SHARES = (0.6, 1.0)  # of the photograph's width and of its height


def draw_crop(path: Path, number: int) -> np.ndarray:
    """Decode a photograph, and resize the crop that `number` stands for: (H, W, C) uint8."""
    draw = random.Random(number)
    with Image.open(path) as file:
        image = file.convert("RGB")
    width, height = (side * draw.uniform(*SHARES) for side in image.size)
    left, top = (image.width - width) * draw.random(), (image.height - height) * draw.random()
    box = (left, top, left + width, top + height)
    return np.asarray(image.resize(ROW_SHAPE[:2], Image.Resampling.BILINEAR, box=box))
