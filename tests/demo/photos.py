"""A folder of real photographs for the demo and for tests: offline, the same for the same seed.

They are cut from the pictures that scikit-image carries inside its wheel, one class per subject,
and have what a set collected from the web has: a mix of sizes, qualities and formats, EXIF
orientations, a few grey and CMYK files, two broken ones, and a file that is no photo at all.

``python -m tests.demo.photos FOLDER [--count N] [--seed N]``
"""

import argparse
import io
import itertools
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Kind = Literal["plain", "png", "grey", "cmyk", "rotated", "truncated", "not an image"]

SOURCES = {
    "astronaut": ("astronaut.png",),
    "cat": ("chelsea.png",),
    "coffee": ("coffee.png",),
    "galaxies": ("hubble_deep_field.jpg",),
    "motorcycle": ("motorcycle_left.png", "motorcycle_right.png"),
    "retina": ("retina.jpg",),
    "rocket": ("rocket.jpg",),
    "tissue": ("ihc.png",),
}

BROKEN: tuple[Kind, ...] = ("truncated", "not an image")
SHARES: dict[Kind, float] = {"png": 0.04, "grey": 0.04, "cmyk": 0.01, "rotated": 0.06}
FEWEST = 16

# (share of the photos that are smaller, long side in pixels): half of a web photo set is 500 wide.
LONG_SIDES = ((0, 60), (0.1, 300), (0.3, 500), (0.7, 500), (0.85, 640), (0.96, 1200), (1, 2400))
ASPECTS = (4 / 3, 4 / 3, 4 / 3, 3 / 2, 3 / 2, 1.0, 16 / 9)
QUALITIES = (60, 75, 80, 85, 90, 92, 95)
SUBSAMPLINGS = ("4:2:0", "4:2:0", "4:2:0", "4:2:2", "4:4:4")
GRAIN = (4.0, 12.0)  # levels: with it, photos compress as those of a real set do
SUFFIXES = (".jpg", ".jpg", ".jpg", ".jpg", ".jpeg", ".JPG")

EXIF_ORIENTATION = 0x0112
# Orientation -> what was done to the upright pixels (EXIF 2.32, 4.6.4 A).
STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}

MODIFIED = 1_700_000_000  # a fixed time, so that the same photos written again are unchanged
README = "Photographs cut from the pictures that scikit-image ships.\n"


@dataclass(frozen=True)
class Photo:
    """How one file is cut and written.

    ``zoom`` is the width of the cut, as a share of the widest that fits the source; ``at`` says
    where it lies, (0, 0) being top left and (1, 1) bottom right. ``size`` is (width, height) as a
    person sees the photo, in pixels. ``grain`` is the noise's standard deviation, in levels.
    """

    key: str
    source: str
    size: tuple[int, int]
    zoom: float
    at: tuple[float, float]
    mirrored: bool
    grain: float
    kind: Kind
    quality: int
    subsampling: str
    progressive: bool
    orientation: int


@dataclass(frozen=True)
class PhotoSet:
    """The photos in ``folder``: keys are paths relative to it, as POSIX paths."""

    folder: Path
    keys: tuple[str, ...]
    broken: tuple[str, ...]
    classes: tuple[str, ...]


def plan_photos(count: int, seed: int = 0) -> tuple[Photo, ...]:
    """Plan ``count`` files, two of them broken, in the order of their keys.

    Raises
    ------
    ValueError
        If ``count`` is too small for one of each kind.
    """
    if count < FEWEST:
        raise ValueError(
            f"count is {count}, and one photo of each kind makes {FEWEST}: ask for more"
        )
    rng = random.Random(seed)
    sides, kinds = _long_sides(count), _kinds(count)
    rng.shuffle(sides)
    rng.shuffle(kinds)
    classes = itertools.cycle(SOURCES)
    photos = (
        _plan_one(rng, *each)
        for each in zip(itertools.count(), classes, sides, kinds, strict=False)
    )
    return tuple(sorted(photos, key=lambda photo: photo.key))


def make_photos(folder: Path, count: int = 600, seed: int = 0) -> PhotoSet:
    """Write ``count`` photos, two of them broken, and a README into ``folder``, one folder a class.

    What it writes depends on nothing but ``count``, ``seed`` and Pillow's version, times of
    modification included.

    Raises
    ------
    FileExistsError
        If ``folder`` holds files that are not of this set.
    ValueError
        If ``count`` is too small for one of each kind.
    """
    photos = plan_photos(count, seed)
    _refuse_strangers(folder, {photo.key for photo in photos} | {"README.txt"})
    for photo in photos:
        _write(folder / photo.key, render(photo))
    _write(folder / "README.txt", README.encode())
    return PhotoSet(
        folder=folder,
        keys=tuple(photo.key for photo in photos),
        broken=tuple(photo.key for photo in photos if photo.kind in BROKEN),
        classes=tuple(SOURCES),
    )


def render(photo: Photo) -> bytes:
    """Cut ``photo`` from its source, and return the bytes of its file."""
    if photo.kind == "not an image":
        return b"<!DOCTYPE html><title>404 Not Found</title>\n"
    source = _open_source(photo.source)
    box = cut_box(source.size, photo)
    image = source.resize(photo.size, Image.Resampling.BICUBIC, box=box)
    if photo.mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    encoded = _encode(_grainy(image, photo.grain), photo)
    return encoded[: len(encoded) * 2 // 5] if photo.kind == "truncated" else encoded


def cut_box(source: tuple[int, int], photo: Photo) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a photo in its source, of the photo's own shape."""
    aspect = photo.size[0] / photo.size[1]
    width = min(source[0], source[1] * aspect) * photo.zoom
    height = width / aspect
    left = (source[0] - width) * photo.at[0]
    top = (source[1] - height) * photo.at[1]
    return left, top, left + width, top + height


def _plan_one(rng: random.Random, number: int, name: str, long_side: int, kind: Kind) -> Photo:
    suffix = ".png" if kind == "png" else rng.choice(SUFFIXES)
    return Photo(
        key=f"{name}/{name}_{number // len(SOURCES):04d}{suffix}",
        source=rng.choice(SOURCES[name]),
        size=_size(long_side, rng.choice(ASPECTS), upright=rng.random() < 0.25),
        zoom=rng.uniform(0.55, 1),
        at=(rng.random(), rng.random()),
        mirrored=rng.random() < 0.5,
        grain=rng.uniform(*GRAIN),
        kind=kind,
        quality=rng.choice(QUALITIES),
        subsampling=rng.choice(SUBSAMPLINGS),
        progressive=rng.random() < 0.15,
        orientation=rng.choice(list(STORED_AS)) if kind == "rotated" else 1,
    )


def _size(long_side: int, aspect: float, *, upright: bool) -> tuple[int, int]:
    short_side = round(long_side / aspect)
    return (short_side, long_side) if upright else (long_side, short_side)


def _long_sides(count: int) -> list[int]:
    return [round(_quantile(index / (count - 1))) for index in range(count)]


def _quantile(share: float) -> float:
    """Interpolate ``LONG_SIDES`` geometrically."""
    for (low, small), (high, large) in itertools.pairwise(LONG_SIDES):
        if share <= high:
            part = (share - low) / (high - low)
            return small * math.exp(part * math.log(large / small))
    return LONG_SIDES[-1][1]


def _kinds(count: int) -> list[Kind]:
    kinds: list[Kind] = list(BROKEN)
    for kind, share in SHARES.items():
        kinds += [kind] * max(1, round(share * count))
    return kinds + ["plain"] * (count - len(kinds))


@cache
def _open_source(name: str) -> Image.Image:
    data = resources.files("skimage.data").joinpath(name).read_bytes()
    return Image.open(io.BytesIO(data)).convert("RGB")


@cache
def _noise() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((512, 512, 3), np.float32)


def _grainy(image: Image.Image, levels: float) -> Image.Image:
    """Add what a sensor adds, and what shrinking or enlarging a picture takes away."""
    noise = _noise()
    repeats = (-(-image.height // len(noise)), -(-image.width // len(noise)), 1)
    pixels = np.asarray(image, np.float32)
    pixels = pixels + levels * np.tile(noise, repeats)[: image.height, : image.width]
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def _encode(image: Image.Image, photo: Photo) -> bytes:
    buffer = io.BytesIO()
    if photo.kind == "png":
        image.save(buffer, "PNG", compress_level=3)
        return buffer.getvalue()
    modes = {"grey": "L", "cmyk": "CMYK"}
    stored = image.convert(modes.get(photo.kind, "RGB"))
    exif = Image.Exif()
    if photo.orientation != 1:
        stored = stored.transpose(STORED_AS[photo.orientation])
        exif[EXIF_ORIENTATION] = photo.orientation
    stored.save(
        buffer,
        "JPEG",
        quality=photo.quality,
        subsampling=photo.subsampling,
        progressive=photo.progressive,
        exif=exif,
    )
    return buffer.getvalue()


def _refuse_strangers(folder: Path, ours: set[str]) -> None:
    strangers = sorted(set(_files(folder)) - ours)
    if strangers:
        raise FileExistsError(
            f"{folder} holds {len(strangers)} other files, such as {strangers[0]}: "
            "name a new or an empty folder"
        )


def _files(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (MODIFIED, MODIFIED))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo.photos", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=600, help="files, two of them broken (600)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        made = make_photos(options.folder, options.count, options.seed)
    except (FileExistsError, ValueError) as error:
        parser.error(str(error))
    print(f"{len(made.keys)} photos in {len(made.classes)} classes in {made.folder}")


if __name__ == "__main__":
    main()
