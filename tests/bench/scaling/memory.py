"""The largest pictures that a build takes, and one that it does not."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from precache.recipe.ops import Decode

LIMIT = Decode().max_pixels
SIDE = 13_377
"""Of a square just below the limit of pixels."""
OVER = 20_000
ORIENTATION = 0x0112


def _picture(side: int) -> Image.Image:
    """Colours that flow into each other: large in memory and small on the disk."""
    few = np.random.default_rng(0).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    return Image.fromarray(few).resize((side, side), Image.Resampling.BICUBIC)


def make_pictures(folder: Path) -> Iterator[tuple[str, Path]]:
    """Titles, and folders of one large picture each, for a worker's memory to be measured."""
    large = _picture(SIDE)
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    yield "a JPEG at the limit", _save(large, folder / "jpeg", "JPEG")
    yield "the same, turned by EXIF", _save(large, folder / "turned", "JPEG", exif=turned)
    yield "the same, progressive", _save(large, folder / "progressive", "JPEG", progressive=True)
    yield "a PNG at the limit", _save(large, folder / "png", "PNG", compress_level=1)
    del large
    yield f"a JPEG of {OVER:,} x {OVER:,}", _save(_picture(OVER), folder / "over", "JPEG")


def _save(image: Image.Image, folder: Path, kind: str, **options: object) -> Path:
    folder.mkdir(parents=True)
    image.save(folder / f"large.{kind.lower()}", kind, **options)
    return folder
