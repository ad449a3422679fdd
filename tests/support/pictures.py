"""Pictures that decoding and ops are held against."""

import contextlib
import io
import struct
import sys
import zlib

import numpy as np
from PIL import Image, ImageOps

from precache.errors import SampleError
from precache.recipe.ops import Decode
from precache_workers.ops.decoding import decode
from tests.support.building import photograph

PHOTOGRAPHS = ("chelsea.png", "astronaut.png", "coffee.png", "rocket.jpg")
ORIENTATION = 0x0112


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    """(H, W, C) uint8 as Pillow decodes it."""
    with Image.open(io.BytesIO(data)) as image:
        return as_array(ImageOps.exif_transpose(image).convert(mode))


def as_array(image: Image.Image) -> np.ndarray:
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def png_chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def png(header: tuple[int, int, int, int], body: bytes) -> bytes:
    """A PNG of (width, height, bits, colour type) with the given compressed lines."""
    start = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *header, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


def half_transparent() -> Image.Image:
    image = photograph().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def plugins_after_decoding(files: list[bytes]) -> set[str]:
    """Modules of Pillow's decoders that a new process has loaded afterwards."""
    for data in files:
        with contextlib.suppress(SampleError):
            decode(data, Decode())
    return {name for name in sys.modules if name.startswith("PIL.") and "ImagePlugin" in name}
