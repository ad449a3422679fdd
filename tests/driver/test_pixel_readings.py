"""Masks, images of 12 bits and random draws: a build refuses what nobody stated, with a way out."""

import functools
import hashlib
import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image, ImageDraw

import precache
from precache import Decode, Field, HorizontalFlip, RandomResizedCrop, Recipe, Resize
from precache.errors import RecipeError
from precache.recipe.recipe import draws_in_words
from precache_workers.profiling.pixel_readings import Pixels
from precache_workers.profiling.row_probe import PROBE_SAMPLES
from tests.support.building import cut, encoded, pixels, write, write_jpegs
from tests.support.command_line import Run
from tests.support.layouts import commands_in

Make = Callable[[int], Image.Image]


def mask(number: int) -> Image.Image:
    """Classes 0 to 20, and 255 for those that do not count."""
    classes = np.random.default_rng(number).permutation(24)[:20].reshape(4, 5) % 22
    values = np.kron(classes, np.ones((16, 13), int)).astype(np.uint8)
    return Image.fromarray(np.where(values == 21, 255, values).astype(np.uint8))


def depth(number: int) -> Image.Image:
    """A depth map of 8 bits: flat parts, and a floor in steps."""
    values = np.full((48, 64), 40 + number, np.uint8)
    values[10:30, 10:40], values[20:40, 30:60] = 90, 140
    values[40:] = 150 + np.arange(8)[:, None]
    return Image.fromarray(values)


def in_palette(image: Image.Image) -> Image.Image:
    image = image.copy()
    image.putpalette([(number * 37 + 11) % 256 for number in range(768)])
    return image


@functools.cache
def instances(number: int, count: int = 150) -> Image.Image:
    """An area for each of many instances, by the nearest of as many points; 0 is none."""
    random = np.random.default_rng(number)
    points = random.random((count, 2)) * (96, 128)
    pixels = np.stack(np.mgrid[:96, :128], -1).reshape(-1, 1, 2)
    distances = np.square(pixels - points).sum(2)
    values = np.where(distances.min(1) < 90, 1 + distances.argmin(1), 0)
    return Image.fromarray(values.reshape(96, 128).astype(np.uint8))


def smooth(number: int) -> Image.Image:
    """A drawing: circles with a gradient in them, on white."""
    image, ramp = Image.new("RGB", (256, 256), "white"), Image.linear_gradient("L")
    for corner in np.random.default_rng(number).integers(0, 150, (6, 2)).tolist():
        circle = Image.new("L", (100, 100))
        ImageDraw.Draw(circle).ellipse((0, 0, 99, 99), fill=255)
        fill = Image.merge("RGB", [ramp.point(lambda v, n=n: v // n + 20) for n in (2, 3, 4)])
        image.paste(fill.resize((100, 100)), corner, circle)
    return image


def enlarged(number: int) -> Image.Image:
    return photo(number).resize((28, 28)).resize((100, 100), Image.Resampling.NEAREST)


def digit(number: int) -> Image.Image:
    """A stroke with smooth edges, 28 x 28 pixels, as those of MNIST."""
    random = np.random.default_rng(number)
    image = Image.new("L", (112, 112))
    points = [tuple(random.integers(25, 88, 2).tolist()) for _ in range(4)]
    ImageDraw.Draw(image).line(points, fill=255, width=11, joint="curve")
    return image.resize((28, 28), Image.Resampling.BICUBIC)


def wide(most: int) -> Make:
    return lambda number: Image.fromarray(
        np.random.default_rng(number).integers(0, most + 1, (48, 64)).astype(np.uint16)
    )


def folder_of(root: Path, make: Make, count: int = 12, kind: str = "PNG", **options: Any) -> Path:
    for number in range(count):
        write(root / f"{number:02}.{kind.lower()}", encoded(make(number), kind, **options))
    return root


Said = Callable[..., tuple[int, str]]
Asked = Callable[..., str]


@pytest.fixture
def run(run: Run) -> Said:
    """Run a command in this process; returns its status and all that it printed."""

    def said(*arguments: object) -> tuple[int, str]:
        here = () if "--address" in arguments else ("--address", "serial")
        ran = run(*arguments, *here)
        return ran.status, ran.out + ran.err

    return said


@pytest.fixture
def asked(run: Said) -> Asked:
    """Plan and build what is refused, by a line; returns what the build printed."""

    def refused(line: str, source: object, store: Path, *flags: object) -> str:
        for command in ("plan", "build"):
            status, text = run(command, source, store, *flags)
            assert status, text
            assert re.search(line, text), text
        assert not list(store.glob("*/build.json"))
        return text

    return refused


def flags_after(name: str, text: str) -> list[str]:
    """Return the flags that a refusal prints behind a word."""
    found = re.search(rf"{name}: (--[^(]+) \(", text)
    assert found, text
    return shlex.split(found[1])


def paste(run: Said, text: str, *stores: Path) -> None:
    """Run each command that a refusal prints, with a store of its own."""
    for command, store in zip(commands_in(text), stores, strict=True):
        status, said = run(*command[:2], store, *command[3:])
        assert status == 0, said


RESIZE = ("--resize", "40")

# --- masks --------------------------------------------------------------------------------------

MASKS: dict[str, tuple[Make, str, tuple[str, ...]]] = {
    "palette": (lambda n: in_palette(mask(n)), "PNG", RESIZE),
    "palette that is not resized": (lambda n: in_palette(mask(n)), "PNG", ("--crop", "40")),
    "GIF": (lambda n: in_palette(mask(n)), "GIF", RESIZE),
    "grey": (mask, "PNG", RESIZE),
    "grey, decoded as grey": (mask, "PNG", (*RESIZE, "--mode", "L")),
    "TIFF": (mask, "TIFF", RESIZE),
    "flat depth": (depth, "PNG", RESIZE),
    "colours": (lambda n: in_palette(mask(n)).convert("RGB"), "PNG", RESIZE),
    "random crop": (mask, "PNG", ("--random-resized-crop", "40", "--variants", "2")),
    "neighbouring numbers": (lambda n: mask(n).point(lambda v: v % 3), "PNG", RESIZE),
    "two neighbours": (lambda n: mask(n).point(lambda v: v % 2), "PNG", RESIZE),
    "instances": (instances, "PNG", RESIZE),
    "instances in a palette": (lambda n: in_palette(instances(n)), "PNG", ("--crop", "40")),
    "one bit": (lambda n: mask(n).point(lambda v: 255 * (v > 9)).convert("1"), "PNG", RESIZE),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_asked_for_and_both_ways_out_build(tmp_path: Path, run: Said, name: str) -> None:
    make, kind, recipe = MASKS[name]
    source = folder_of(tmp_path / "masks", make, kind=kind)
    status, text = run("build", source, tmp_path / "no", *recipe)
    assert status
    assert re.search(r"\d+ of 12 samples tried look like masks", text)
    if name == "palette":
        assert run("plan", "--no-timing", source, tmp_path / "no", *recipe)[0] == status
    assert not list((tmp_path / "no").glob("*/zarr.json"))
    as_mask = flags_after("Masks", text)
    paste(run, text, tmp_path / "0.store", tmp_path / "1.store")
    for key, row in pixels(tmp_path / "0.store").items():
        with Image.open(source / key) as image:
            mode = image.mode if "P" in as_mask else "L" if "decoded as grey" in name else "RGB"
            stored = colours_of(np.asarray(image.convert(mode)))
        assert colours_of(row.transpose(1, 2, 0)) <= stored
        assert len(stored) > 1


def colours_of(array: np.ndarray) -> set[tuple[int, ...]]:
    flat = array.reshape(array.shape[0] * array.shape[1], -1)
    return {tuple(row) for row in np.unique(flat, axis=0).tolist()}


def drawing(number: int) -> Image.Image:
    """Flat rectangles of many colours, with text of two."""
    random, image = np.random.default_rng(number), Image.new("RGB", (320, 200), "white")
    draw = ImageDraw.Draw(image)
    draw.fontmode = "1"
    for x, y, width, height, *colour in random.integers(0, (300, 180, 90, 50, *[256] * 3), (60, 7)):
        draw.rectangle((x, y, x + width + 5, y + height + 5), fill=tuple(map(int, colour)))
    for x, y in random.integers(0, (250, 180), (9, 2)).tolist():
        draw.text((x, y), "Some text", fill="black")
    return image


@pytest.mark.parametrize(
    ("make", "kind", "flags"),
    [
        (drawing, "PNG", ()),
        (lambda n: in_palette(instances(n)).convert("RGB"), "PNG", ("--mode", "L")),
        (lambda n: in_palette(instances(n)).convert("RGBA"), "PNG", ()),
        (lambda n: mask(n).point(lambda value: 255 * (value > 9)), "JPEG", ()),
        (lambda n: mask(n).point(lambda value: value // 12), "JPEG", ()),
    ],
    ids=["drawings", "mosaics in grey", "mosaics with alpha", "JPEGs", "JPEGs of class numbers"],
)
def test_what_may_be_masks_is_said_with_both_ways(
    tmp_path: Path, run: Said, make: Make, kind: str, flags: tuple[str, ...]
) -> None:
    """Drawings are like masks of instances in colours, so the build goes on; JPEG lost values."""
    source, lost = folder_of(tmp_path / "in", make, kind=kind), kind == "JPEG"
    status, text = run("build", source, tmp_path / "store", *RESIZE, *flags)
    assert status == 0, text
    assert f"12 of 12 samples tried look like masks{' in JPEG files' * lost}" in text
    assert ("round the values behind the loader" in text) == lost
    for meaning, said in {"Masks": lost, "Pictures": False}.items():
        ways = [*flags, *flags_after(meaning, text)]
        status, again = run("build", source, tmp_path / meaning, *RESIZE, *ways)
        assert status == 0, again
        assert ("look like masks" in again) is said


def test_one_file_gives_an_image_and_its_mask(tmp_path: Path) -> None:
    """A field that states its reading is built beside one that does not need to."""
    source = folder_of(tmp_path / "masks", lambda n: in_palette(mask(n)))
    resize = {"size": (30, 33), "interpolation": "nearest"}
    recipe = Recipe(
        fields={
            "image": Field(ops=[Decode(mode="RGB"), Resize(**resize)]),
            "mask": Field(ops=[Decode(mode="P"), Resize(**resize)]),
        }
    )
    result = precache.build(source, tmp_path / "store", recipe, address="serial")
    assert [*result.mean] == ["image"], "values of masks have no mean"
    masks = pixels(tmp_path / "store", "mask")
    for key, image in pixels(tmp_path / "store").items():
        shown = in_palette(Image.fromarray(masks[key][0])).convert("RGB")
        assert np.array_equal(image, np.asarray(shown).transpose(2, 0, 1))
    fields = {**recipe.fields, "mask": Field(ops=[Decode(mode="L"), Resize(size=30)])}
    grey = folder_of(tmp_path / "grey", mask)
    with pytest.raises(RecipeError, match=r"field mask: 12 of 12 .*Masks: interpolation = "):
        precache.build(grey, tmp_path / "no", Recipe(fields=fields), address="serial")


def test_flags_that_do_not_go_with_a_recipe_file_are_no_command(tmp_path: Path, run: Said) -> None:
    ops = '{op = "decode"}, {op = "resize", size = 40}'
    (tmp_path / "a.toml").write_text(f"[fields.image]\nops = [{ops}]\n")
    source = folder_of(tmp_path / "masks", mask)
    flags = ("--recipe", tmp_path / "a.toml")
    status, text = run("build", source, tmp_path / "no", *flags)
    assert (status, commands_in(text)) == (2, [])
    assert 'interpolation = "nearest" in resize' in text


def test_a_quarter_of_masks_is_enough_and_a_stray_one_is_not(tmp_path: Path, run: Said) -> None:
    photos = write_jpegs(tmp_path / "photos", 16)
    write(photos / "cat" / "mask.png", encoded(mask(1), "PNG"))
    line = "1 of 17 samples tried look like masks"
    assert line in run("build", photos, tmp_path / "store", "--resize", "32")[1]
    folder_of(photos / "drawn", mask, 8)
    with pytest.raises(RecipeError, match=r"[89] of 2[45] samples tried look like masks"):
        precache.build(photos, tmp_path / "other", Recipe.image(resize=32), address="serial")


@pytest.mark.parametrize("make", [mask, lambda n: in_palette(mask(n))])
def test_masks_among_photos_are_asked_for_by_what_takes_both(
    tmp_path: Path, run: Said, make: Make
) -> None:
    photos = write_jpegs(tmp_path / "photos", 16)
    folder_of(photos / "drawn", make)
    status, text = run("build", photos, tmp_path / "no", "--resize", "40x40")
    assert status
    assert "are JPEG files, which mode P does not take: build masks apart" in text
    paste(run, text, tmp_path / "0.store", tmp_path / "1.store")
    values = colours_of(np.asarray(make(3).convert("RGB")))
    [row] = [row for key, row in pixels(tmp_path / "0.store").items() if key == "drawn/03.png"]
    assert colours_of(row.transpose(1, 2, 0)) <= values
    status, text = run("build", photos, tmp_path / "no", "--crop", "16")
    assert bool(status) == (make(1).mode == "P")
    paste(run, text, *[tmp_path / "2.store"] * bool(status))


PICTURES: dict[str, tuple[Make, str]] = {
    "photographs": (cut, "PNG"),
    "grey photographs": (lambda n: cut(n).convert("L"), "PNG"),
    "photographs of 256 colours": (lambda n: cut(n, (200, 150)).quantize(256), "GIF"),
    "JPEGs of masks": (mask, "JPEG"),
    "digits": (digit, "PNG"),
    "smooth drawings": (smooth, "PNG"),
    "enlarged photographs": (enlarged, "PNG"),
    "lossy photographs": (cut, "WEBP"),
    "one colour": (lambda n: Image.new("RGB", (50, 50), (n, 9, 9)), "PNG"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_build_and_are_added_without_a_flag(tmp_path: Path, run: Said, name: str) -> None:
    make, kind = PICTURES[name]
    photos = folder_of(tmp_path / "photos", photo)
    assert run("build", photos, tmp_path / "1", "--resize", "24x24")[0] == 0
    folder_of(photos / "added", make, 3, kind)
    pictures = folder_of(tmp_path / "pictures", make, kind=kind)
    for source, store, size in ((photos, "1", "24x24"), (pictures, "2", "24")):
        status, text = run("build", source, tmp_path / store, "--resize", size)
        assert status == 0, text
        assert ("look like" in text) == (name == "JPEGs of masks")
        assert ("look like masks in JPEG files" in text) == (name == "JPEGs of masks")


@pytest.mark.parametrize("bands", [0, 4])
def test_masks_of_tiffs_that_pillow_does_not_open_are_asked_for(
    tmp_path: Path, run: Said, asked: Asked, bands: int
) -> None:
    for number in range(6):
        values, file = np.asarray(mask(number)), io.BytesIO()
        values = np.dstack([values] * bands) if bands else values.astype(np.float64)
        tifffile.imwrite(file, values, photometric="minisblack", planarconfig="contig")
        write(tmp_path / f"in/{number}.tif", file.getvalue())
    recipe = ("--resize", "40", "--mode", "unchanged", "--codec", "zstd")
    text = asked("6 of 6 samples tried look like masks", tmp_path / "in", tmp_path / "no", *recipe)
    paste(run, text, tmp_path / "0.store", tmp_path / "1.store")
    for key, row in pixels(tmp_path / "0.store").items():
        assert {*np.unique(row)} <= {*np.unique(np.asarray(mask(int(key[0]))))}


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("JPEG", {}, "JPEG"),
        ("WEBP", {}, "lossy WebP"),
        ("WEBP", {"xmp": b"any"}, "lossy WebP"),
        ("WEBP", {"save_all": True, "append_images": [mask(99)]}, "lossy WebP"),
        ("WEBP", {"lossless": True}, ""),
        ("AVIF", {"quality": 30}, "AVIF"),
        ("TIFF", {"compression": "jpeg"}, "TIFF with JPEG"),
        ("TIFF", {"compression": "tiff_lzw"}, ""),
    ],
)
def test_masks_in_lossy_files_are_said_if_nearest_is_stated_and_photographs_are_not(
    tmp_path: Path, run: Said, kind: str, options: dict[str, Any], name: str
) -> None:
    nearest = ("--resize", "24", "--interpolation", "nearest")

    def make(number: int) -> Image.Image:
        return mask(number).point(lambda value: 255 * (value > 9))

    masks = folder_of(tmp_path / "masks", make, kind=kind, **options)
    status, text = run("build", masks, tmp_path / "masks.store", *nearest)
    assert status == 0, text
    said = rf"masks in {name} files.*Masks: round the values behind the loader\n"
    assert bool(re.search(said, text)) is bool(name), text
    photos = folder_of(tmp_path / "photos", lambda n: cut(n, mask(n).size), kind=kind, **options)
    status, text = run("build", photos, tmp_path / "photos.store", *nearest)
    assert status == 0
    assert "look like masks" not in text


def test_a_transparent_picture_is_said(
    tmp_path: Path, run: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """Without progress, too."""

    def half(number: int) -> Image.Image:
        image = cut(number).convert("RGBA")
        image.putalpha(Image.linear_gradient("L").resize(image.size))
        return image

    source = folder_of(tmp_path / "pictures", half)
    line = "image: 12 of 12 samples tried have transparent pixels, which get the colours stored"
    for command in ("build", "plan"):
        assert line in run(command, source, tmp_path / command, *RESIZE)[1]
    keeps = ("build", source, tmp_path / "rgba", *RESIZE, "--mode", "RGBA")
    assert "transparent pixels" not in run(*keeps)[1]
    assert {row.shape[0] for row in pixels(tmp_path / "rgba").values()} == {4}
    caplog.clear()
    run("build", source, tmp_path / "quiet", *RESIZE, "--no-progress")
    precache.build(source, tmp_path / "python", Recipe.image(resize=40), address="serial")
    assert [record.message.startswith(line) for record in caplog.records] == [True, True]


def test_animations_are_said_once(tmp_path: Path, run: Said) -> None:
    source = as_folder(tmp_path, files_of(photo, "a", 4))
    for number, kind in enumerate(("GIF", "WEBP", "PNG")):
        frames = [photo(10 * number + frame).quantize(64) for frame in range(3)]
        first, *rest = [frame.convert("RGB") for frame in frames] if kind == "WEBP" else frames
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(first, kind, save_all=True, append_images=rest, **options)
        write(tmp_path / f"in/b{number}.{kind.lower()}", data)
    for command in ("build", "plan"):
        text = run(command, source, tmp_path / command, "--resize", "40x40")[1]
        assert text.count("3 of 7 samples tried are animated, and their first frame is") == 1


def stack(number: int, factor: int = 1, dtype: type = np.uint8) -> bytes:
    file = io.BytesIO()
    pages = np.asarray(photo(number)).transpose(2, 0, 1).astype(dtype) * factor
    tifffile.imwrite(file, pages, photometric="minisblack")
    return file.getvalue()


def deep_stack(number: int) -> bytes:
    return stack(number, 15, np.uint16)


def bands(number: int) -> bytes:
    file, colours = io.BytesIO(), np.asarray(photo(number))
    four = np.dstack([colours, 255 - colours[..., :1]])
    tifffile.imwrite(file, four, photometric="rgb", extrasamples=["unspecified"])
    return file.getvalue()


def read_all(data: bytes) -> np.ndarray:
    """Return (C, H, W) of all pages or bands."""
    array = tifffile.imread(io.BytesIO(data))
    return array if array.shape[0] == 3 else array.transpose(2, 0, 1)


@pytest.mark.parametrize("make", [stack, deep_stack, bands])
def test_pages_and_bands_that_would_be_dropped_are_refused_and_the_way_out_builds(
    tmp_path: Path, run: Said, asked: Asked, make: Callable[[int], bytes]
) -> None:
    """Colour pictures, stored as three pages, became grey ones; a stray one is a bad sample."""
    for number in range(6):
        write(tmp_path / f"in/{number}.tif", make(number))
    asked("a function in place of decode", tmp_path / "in", tmp_path / "no")
    op = {"op": "function", "function": f"{__name__}:read_all"}
    recipe = Recipe.from_dict({"fields": {"image": {"ops": [op], "codec": "zstd"}}})
    precache.build(tmp_path / "in", tmp_path / "store", recipe, address="serial")
    for key, row in pixels(tmp_path / "store").items():
        assert np.array_equal(row, read_all((tmp_path / "in" / key).read_bytes()))
    photos = as_folder(tmp_path / "photos", files_of(photo, "a", 30))
    write(tmp_path / "photos/in/b.tif", make(1))
    assert run("build", photos, tmp_path / "other")[0] == 0
    [(key, hole)] = precache.open(tmp_path / "other").holes.values()
    assert (key, "decode would" in hole.reason) == ("b.tif", True)


class Channels:
    """A torch `Dataset` of images in near infrared, too."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.random.default_rng(index).integers(0, 256, (20, 24, 4), np.uint8), index % 2


class Opened:
    """Images that Pillow has opened, which EXIF would turn."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        tags = Image.Exif()
        tags[0x0112] = 6
        return Image.open(io.BytesIO(encoded(cut(index), "JPEG", exif=tags))), index % 2


def test_images_that_a_dataset_opened_and_exif_would_turn_are_said(
    tmp_path: Path, run: Said
) -> None:
    source, line = f"python:{__name__}:Opened", "6 of 6 samples tried are images that a dataset has"
    recipe = 'ops = [{ op = "decode", orientation = "stored" }]'
    write(tmp_path / "stored.toml", f"[fields.image]\n{recipe}\n".encode())
    for flags, is_said in (((), True), (("--recipe", tmp_path / "stored.toml"), False)):
        status, text = run("build", source, tmp_path / f"{is_said}", *flags)
        assert (status, line in text) == (0, is_said), text
        assert precache.open(tmp_path / f"{is_said}").fields["image"].shape == (3, 48, 64)


def test_channels_of_arrays_are_refused_and_the_ways_out_keep_them(
    tmp_path: Path, run: Said, asked: Asked
) -> None:
    source = f"python:{__name__}:Channels"
    line = r"\(20, 24, 4\), \(H, W, C\), and takes 1 or 3 channels"
    text = asked(line, source, tmp_path / "no")
    assert 'ops = [] and codec = "zstd"' in text
    (tmp_path / "recipe.toml").write_text('[fields.image]\nops = []\ncodec = "zstd"\n')
    ways = {"rgba": ("--mode", "RGBA"), "array": ("--recipe", str(tmp_path / "recipe.toml"))}
    for name, flags in ways.items():
        status, text = run("build", source, tmp_path / name, *flags)
        assert status == 0, text
        for key, row in pixels(tmp_path / name).items():
            expected = Channels()[int(key)][0]
            assert np.array_equal(row, expected.transpose(2, 0, 1) if name == "rgba" else expected)


# --- frames -------------------------------------------------------------------------------------


def put_scene(
    root: Path,
    number: int,
    size: tuple[int, int],
    exif: int = 1,
    *,
    drawn: str = "exif",
    of_mask: tuple[int, int] | None = None,
) -> None:
    """Write a photo of four grey areas, and its mask with their numbers.

    Parameters
    ----------
    size
        Width and height of the photo as it is drawn: turned by EXIF, or as it is stored.
    """
    areas = np.random.default_rng(number).permutation(4).reshape(2, 2).astype(np.uint8)
    scene = Image.fromarray(80 * areas).resize(size, Image.Resampling.NEAREST)
    back = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}
    stored = scene.transpose(back[exif]) if exif in back and drawn == "exif" else scene
    tags = Image.Exif()
    tags[0x0112] = exif
    write(root / f"images/{number}.jpg", encoded(stored, "JPEG", quality=95, exif=tags))
    mask = Image.fromarray(areas).resize(of_mask or size, Image.Resampling.NEAREST)
    write(root / f"masks/{number}.png", encoded(mask, "PNG"))


def paired_recipe(path: Path, decode: str = "", crop: str = "") -> Path:
    whole = 'size = [16, 16], interpolation = "nearest"'
    squash = '{ op = "resize", size = [16, 16], interpolation = "bilinear" }'
    text = f"""
        [fields.image]
        ops = [{{ op = "decode", mode = "L", bits = 16{decode} }}, {crop or squash}]
        [fields.mask]
        input = "masks"
        ops = [{{ op = "decode", mode = "P" }}, {{ op = "resize", {whole} }}]
    """
    return write(path, text.encode())


FRAMES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "upright": ({"size": (48, 40)}, []),
    "turned with their masks": ({"size": (48, 40), "exif": 6}, []),
    "turned without their masks": ({"size": (48, 40), "exif": 6, "drawn": "stored"}, ["stored"]),
    "square, turned": ({"size": (48, 48), "exif": 6}, ["exif", "stored"]),
    "square, not turned": ({"size": (48, 48), "exif": 6, "drawn": "stored"}, ["exif", "stored"]),
    "upside down": ({"size": (48, 40), "exif": 3}, ["exif", "stored"]),
    "of half the size": ({"size": (48, 40), "of_mask": (24, 20)}, []),
}
"""Photos and masks -> the orientations of decode that the refusal names."""


@pytest.mark.parametrize("name", FRAMES)
def test_masks_lie_on_their_photos_or_are_asked_about(tmp_path: Path, run: Said, name: str) -> None:
    scene, expected = FRAMES[name]
    for number in range(8):
        put_scene(tmp_path / "in", number, **scene)
    source, recipe = f"{tmp_path}/in/{{images,masks}}", paired_recipe(tmp_path / "recipe.toml")
    ways = []
    for command in ("plan", "build"):
        status, text = run(command, source, tmp_path / "0", "--recipe", recipe)
        ways = re.findall(r'orientation = "(\w+)"', text)
        assert (ways, status) == (expected, 2 if expected else 0), text
        assert ("another resolution" in text) == ("of_mask" in scene)
    fits = {}
    for number, way in enumerate(ways or [""]):
        store, option = tmp_path / f"{number}", f', orientation = "{way}"' if way else ""
        own = paired_recipe(tmp_path / "own.toml", option)
        status, text = run("build", source, store, "--recipe", own)
        assert status == 0, text
        masks = pixels(store, "mask")
        apart = [abs(row - 80.0 * masks[key]).mean() for key, row in pixels(store).items()]
        fits[way] = max(apart) < 20
    assert fits.pop(ways[-1] if scene.get("drawn") else ways[0] if ways else "")
    assert not any(fits.values())


def test_a_mask_of_another_frame_is_a_bad_sample_and_many_are_refused(
    tmp_path: Path, run: Said, asked: Asked
) -> None:
    recipe = paired_recipe(tmp_path / "recipe.toml")
    for number in range(8):
        of_mask = (40, 40) if number == 3 else None
        put_scene(tmp_path / "in", number, (48, 40), of_mask=of_mask)
    source, store = f"{tmp_path}/in/{{images,masks}}", tmp_path / "store"
    status, text = run("build", source, store, "--recipe", recipe)
    assert status == 0, text
    assert "1 of 8 samples tried have masks that do not lie on their images" in text
    [(key, hole)] = precache.open(store).holes.values()
    assert (key, "40 x 40 px in mask, and 48 x 40 in image" in hole.reason) == ("3.jpg", True)
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        for path in sorted((tmp_path / "in").rglob("*.*")):
            tar.add(path, f"{path.stem}.{path.parent.name}{path.suffix}")
    text = recipe.read_text().replace('"masks"', '"masks.png"')
    (tmp_path / "tar.toml").write_text(text)
    flags = ("--recipe", tmp_path / "tar.toml")
    assert run("build", tmp_path / "in.tar", tmp_path / "of_tar", *flags)[0] == 0
    assert len(precache.open(tmp_path / "of_tar").holes) == 1
    for number in range(4):
        put_scene(tmp_path / "in", number, (48, 40), of_mask=(40, 40))
    line = "4 of 8 samples tried have masks that do not lie on their images"
    assert "Pair the files that belong" in asked(line, source, tmp_path / "no", "--recipe", recipe)


def squash(mask: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(mask[:, :, 0]).resize((48, 40), Image.Resampling.NEAREST))[
        :, :, None
    ]


def test_one_draw_is_no_crop_of_two_sizes(tmp_path: Path, run: Said, asked: Asked) -> None:
    """Of photos and masks of half their size, one draw in 80 gave two unrelated crops."""
    for number in range(12):
        put_scene(tmp_path / "in", number, (48, 40), of_mask=(24, 20) if number % 3 else None)
    crop = '{ op = "random_resized_crop", size = [16, 16], interpolation = "XXX" }'
    whole = '{ op = "resize", size = [40, 48], interpolation = "XXX" }'

    def recipe(way: str, ops: str, mode: str = "P") -> Path:
        image, mask = ops.replace("XXX", "bilinear"), ops.replace("XXX", way)
        text = f"""
            [fields.image]
            variants = 1
            ops = [{{ op = "decode", mode = "L" }}, {image}]
            [fields.mask]
            variants = 1
            input = "masks"
            ops = [{{ op = "decode", mode = "{mode}" }}, {mask}]
        """
        return write(tmp_path / "recipe.toml", text.encode())

    source = f"{tmp_path}/in/{{images,masks}}"
    flags = ("--recipe", recipe("nearest", crop))
    asked("8 of 12 samples tried have masks of another size", source, tmp_path / "no", *flags)
    recipe("bilinear", crop, "L")  # two pictures, of which nobody says that one is a mask
    status, text = run("build", source, tmp_path / "no", *flags)
    assert (status, "one draw of random_resized_crop is another part" in text) == (1, True), text
    recipe("nearest", f"{whole}, {crop}")
    status, text = run("build", source, tmp_path / "store", *flags)
    assert status == 0, text
    masks = pixels(tmp_path / "store", "mask")
    assert len(masks) == 12
    squash = f'{{ op = "function", function = "{__name__}:squash" }}'
    text = recipe("nearest", f"{whole}, {crop}").read_text()
    write(tmp_path / "recipe.toml", text.replace(whole.replace("XXX", "nearest"), squash).encode())
    status, text = run("build", source, tmp_path / "store", *flags)
    assert status == 0, text  # the size that a function gives is not known
    assert all(map(np.array_equal, pixels(tmp_path / "store", "mask").values(), masks.values()))
    apart = [abs(row - 80.0 * masks[key]) for key, row in pixels(tmp_path / "store").items()]
    assert max(np.median(each) for each in apart) < 20


def test_a_crop_beside_a_squashed_mask_is_said(tmp_path: Path, run: Said) -> None:
    for number in range(8):
        put_scene(tmp_path / "in", number, (48, 40))
    resize = '{ op = "resize", size = 16, interpolation = "bilinear" }'
    crop = f'{resize}, {{ op = "center_crop", size = 16 }}'
    recipe = paired_recipe(tmp_path / "recipe.toml", crop=crop)
    source = f"{tmp_path}/in/{{images,masks}}"
    for command in ("plan", "build"):
        text = run(command, source, tmp_path / "0", "--recipe", recipe)[1]
        assert "8 of 8 samples tried show another part of the scene than in image" in text
    recipe.write_text(
        recipe.read_text().replace(
            'size = [16, 16], interpolation = "nearest" }',
            'size = 16, interpolation = "nearest" }, { op = "center_crop", size = 16 }',
        )
    )
    text = run("build", source, tmp_path / "1", "--recipe", recipe)[1]
    assert "another part" not in text


# --- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "bits"), [(200, 8), (1000, 10), (4095, 12), (12_345, 14), (60_000, 16)]
)
def test_bits_in_files_of_sixteen_are_asked_for(
    tmp_path: Path, run: Said, most: int, bits: int
) -> None:
    source = folder_of(tmp_path / "wide", wide(most))
    status, text = run("build", source, tmp_path / "no", "--mode", "L")
    assert status
    assert "12 of 12 samples tried have 16 bits, and values up to" in text
    few, all_of_them = flags_after(f"{bits} bits", text), flags_after("16 bits", text)
    assert (few, all_of_them) == (["--bits", str(bits)], ["--bits", "16"])
    if bits not in (12, 16):
        return
    kept = {"few": bits, "all": 16} if bits < 16 else {"all": 16}
    paste(run, text, *(tmp_path / name for name in (*kept, "keep")))
    for key, row in pixels(tmp_path / "keep").items():
        assert row.dtype == np.uint16
        assert np.array_equal(row[0], wide(most)(int(key[:2])))
    for name, count in kept.items():
        for key, row in pixels(tmp_path / name).items():
            expected = np.asarray(wide(most)(int(key[:2]))) >> (count - 8)
            assert np.array_equal(row[0], expected)


def wide_mask(values: list[int]) -> Make:
    """Values of 16 bits, each of some squares."""
    return lambda number: Image.fromarray(
        np.array(values, np.uint16)[np.asarray(mask(number)) % len(values)]
    )


INSTANCES = [7, *range(26_001, 26_006)]
FEW = [*range(6)]


@pytest.mark.parametrize(
    ("values", "recipe"),
    [(INSTANCES, RESIZE), (FEW, RESIZE), (None, RESIZE), (INSTANCES, ("--crop", "40"))],
    ids=["few", "classes", "many", "few that are cropped"],
)
def test_masks_of_sixteen_bits_keep_their_values(
    tmp_path: Path, run: Said, values: list[int] | None, recipe: tuple[str, ...]
) -> None:
    """Of the values 26,000 to 26,150 of many instances the highest eight bits are one."""

    def many(number: int) -> Image.Image:
        return Image.fromarray(np.asarray(instances(number)).astype(np.uint16) + 26_000)

    make, resizes = wide_mask(values) if values else many, recipe is RESIZE
    source = folder_of(tmp_path / "masks", make)
    for flags in [(), ("--mode", "L"), ("--interpolation", "nearest")][: 3 if resizes else 2]:
        status, text = run("build", source, tmp_path / "no", *recipe, *flags)
        assert status, text
        assert "12 of 12 samples tried have 16 bits" in text
    keeps = {"unchanged": flags_after("as of masks", text)}
    assert keeps["unchanged"] == ["--mode", "unchanged"]
    if values is FEW:
        keeps["bits"] = flags_after("8 bits", text)
    if values is INSTANCES and resizes:
        status, text = run("build", source, tmp_path / "no", *RESIZE, "--bits", "16")
        assert status
        assert "12 of 12 samples tried look like masks" in text
    for name, flags in keeps.items():
        store, nearest = tmp_path / name, list[str]()
        status, text = run("build", source, store, *recipe, *flags)
        assert bool(status) == resizes, text
        if status:
            assert "12 of 12 samples tried look like masks" in text
            nearest = ["--interpolation", "nearest"]
            assert flags_after("Masks", text)[-2:] == nearest
            status, text = run("build", source, store, *recipe, *flags, *nearest)
            assert status == 0, text
        found = {int(value) for row in pixels(store).values() for value in np.unique(row)}
        assert found <= {int(v) for n in range(12) for v in np.unique(np.asarray(make(n)))}
        assert len(found) >= len(values or range(100))


def wide_colours(most: int) -> bytes:
    """A PNG of 16 bits a colour, with an opaque alpha."""
    values = np.random.default_rng(most).integers(0, most + 1, (48, 64, 4)).astype(np.uint16)
    values[..., 3] = 65_535
    return cv2.imencode(".png", values)[1].tobytes()


@pytest.mark.parametrize(("kind", "then"), [("grey", "one more"), ("colours", "retry")])
def test_an_image_of_sixteen_bits_is_a_bad_sample_until_bits_are_stated(
    tmp_path: Path, run: Said, kind: str, then: str
) -> None:
    """A probe may miss the few of them; of 12 bits the highest 8 of 16 would be 0 to 15."""

    def make(most: int) -> bytes:
        return encoded(wide(most)(1), "PNG") if kind == "grey" else wide_colours(most)

    source, store = folder_of(tmp_path / "in", photo, 60), tmp_path / "store"
    for name, most in (("b12", 4095), ("b13", 60_000), ("b14", 5000), ("b15", 0)):
        write(source / f"{name}.png", make(most))
    recipe = ("--resize", "40x40")
    status, text = run("build", source, store, *recipe)
    assert status == 0, text
    holes = precache.open(store).holes
    assert {key for key, _ in holes.values()} == {f"b{number}.png" for number in range(12, 16)}
    [hole] = {hole for _, hole in holes.values()}
    exact, whole = (flags.split() for flags in re.findall(r"\((--bits \d+)\)", hole.reason))
    before = precache.open(store).id
    if then == "one more":
        write(source / "a60.png", encoded(photo(60), "PNG"))
    retry = ["--retry-failed"] * (then == "retry")
    status, text = run("build", source, store, *recipe, *whole, *retry)
    assert status == 0, text
    assert re.search(r"\b60 rows and \d whole shards were taken over", text)
    assert not precache.open(store).holes
    assert pixels(store)["b12.png"].max() < 16
    status, text = run("build", source, store, *recipe)
    assert status == 0, text
    assert {other for _, other in precache.open(store).holes.values()} == {hole}
    assert (precache.open(store).id == before) == (then != "one more")
    status, text = run("build", source, store, *recipe, *exact)
    assert status == 0, text
    assert {key for key, _ in precache.open(store).holes.values()} == {"b13.png", "b14.png"}
    assert pixels(store)["b12.png"].max() > 99


def test_more_images_of_sixteen_bits_than_may_fail_stop_a_build_and_the_way_out_builds(
    tmp_path: Path, run: Said
) -> None:
    source, store = folder_of(tmp_path / "in", photo, 60), tmp_path / "store"
    folder_of(source / "wide", wide(4095), 6)
    recipe = ("--resize", "40x40")
    status, text = run("build", source, store, *recipe)
    assert status
    assert "6 of 66 samples failed" in text
    status, text = run("build", source, store, *recipe, "--bits", "16")
    assert status == 0, text
    assert len(pixels(store)) == 66


# --- samples that a version lacks -----------------------------------------------------------------


def photo(number: int) -> Image.Image:
    return cut(number, (60, 50))


Files = dict[str, bytes]


def files_of(make: Make, name: str, count: int = 8) -> Files:
    return {f"{name}{number:02}.png": encoded(make(number), "PNG") for number in range(count)}


def as_folder(root: Path, files: Files) -> str:
    for name, data in files.items():
        write(root / "in" / name, data)
    return str(root / "in")


class Items:
    """A torch `Dataset` of the files of a folder, whose samples have keys and fingerprints."""

    def __init__(self) -> None:
        self.paths = sorted(Path(os.environ["ITEMS"]).iterdir())
        self.targets = [0] * len(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return self.paths[index].read_bytes(), 0

    def key(self, index: int) -> str:
        return self.paths[index].name

    def fingerprint(self, index: int) -> str:
        return hashlib.sha256(self.paths[index].read_bytes()).hexdigest()


def as_dataset(root: Path, files: Files) -> str:
    os.environ["ITEMS"] = as_folder(root, files)
    return f"python:{__name__}:Items"


LATER: dict[str, tuple[Make, str, str, str]] = {
    "palette": (lambda n: in_palette(mask(n)), "look like masks", "Masks", "Pictures"),
    "grey": (mask, "look like masks", "Masks", "Pictures"),
    "12 bits": (wide(4095), "have 16 bits, and values up to", "12 bits", "16 bits"),
}


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITEMS", "")  # and forget what a test sets


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize(
    ("lay", "later"), [(as_folder, "grey"), (as_folder, "12 bits"), (as_dataset, "palette")]
)
def test_samples_that_are_added_are_asked_about_and_the_ways_out_build(
    tmp_path: Path, run: Said, asked: Asked, lay: Callable[[Path, Files], str], later: str
) -> None:
    """Row shapes are known of the version that lacks them; readings of pixels are not."""
    make, said, own, other = LATER[later]
    store, recipe = tmp_path / "store", ("--resize", "40x40")
    photos, added = files_of(photo, "a", 12), files_of(make, "b")
    where = lay(tmp_path / "both", photos)
    status, text = run("build", where, store, *recipe)
    assert status == 0, text
    first = precache.open(store).id
    where = lay(tmp_path / "both", {**photos, **added})
    text = asked(f"8 of 8 samples tried {said}", where, store, *recipe)
    assert precache.open(store).id == first
    as_pictures = flags_after(other, text)
    assert run("build", where, store, *recipe, *as_pictures)[0] == 0
    assert len(pixels(store)) == 20
    as_they_are = flags_after(own, text)
    if own == "Masks":  # photos are none
        where = lay(tmp_path / "alone", added)
    status, text = run("build", where, tmp_path / "exact", *recipe, *as_they_are)
    assert status == 0, text
    rows = pixels(tmp_path / "exact")
    in_order = sorted(rows, key=lambda key: (len(key.split("/")[-1]), key.split("/")[-1]))
    for number, key in enumerate(in_order[-8:]):
        original = np.asarray(make(number))
        if own == "Masks":
            assert {*np.unique(rows[key])} <= {*np.unique(original)}
        else:
            assert abs(int(rows[key].mean()) - int(original.mean() / 16)) <= 1


def test_samples_that_a_version_lacks_are_asked_about(tmp_path: Path) -> None:
    """Those that changed, of new fields, or of another source; among all, a stray one is a line."""
    photos = as_folder(tmp_path, files_of(photo, "a", 40))
    fields = {"image": Field(ops=[Decode(), Resize(size=(40, 40))])}
    small = {"small": Field(ops=[Decode(), Resize(size=(20, 20))])}
    store, recipe = tmp_path / "store", Recipe(fields=fields)
    first = precache.build(photos, store, recipe, address="serial")
    write(tmp_path / "in/a07.png", encoded(in_palette(mask(7)), "PNG"))
    for ask in (precache.build, precache.plan, precache.ensure):
        with pytest.raises(RecipeError, match=r"1 of 1 samples tried look like masks: a07\.png"):
            ask(photos, store, recipe, address="serial")  # type: ignore[operator]
    write(tmp_path / "in/a07.png", encoded(photo(99), "PNG"))
    changed = precache.build(photos, store, recipe, address="serial")
    assert (changed.rows_reused, changed.version != first.version) == (39, True)
    for name in "ab":
        masks = as_folder(tmp_path / f"masks {name}", files_of(mask, name))
        with pytest.raises(RecipeError, match="8 of 8 samples tried look like masks"):
            precache.build(masks, store, recipe, address="serial")
    as_folder(tmp_path, files_of(mask, "b", 4))
    for more in ({}, small):
        both = Recipe(fields={**fields, **more})
        with pytest.raises(RecipeError, match="field image: 4 of 4 samples tried look like masks"):
            precache.build(photos, store, both, address="serial")


def test_failed_samples_that_are_tried_again_are_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = as_folder(tmp_path, files_of(photo, "a"))
    write(tmp_path / "in/b.png", b"none")
    monkeypatch.setenv("ITEMS", photos)
    monkeypatch.setattr(Items, "fingerprint", lambda self, index: "any")
    store, recipe = tmp_path / "store", Recipe.image(resize=(40, 40))
    source = f"python:{__name__}:Items"
    assert precache.build(source, store, recipe, address="serial").failed == 1
    write(tmp_path / "in/b.png", encoded(mask(1), "PNG"))
    again: dict[str, Any] = {"address": "serial", "retry_failed": True}
    for ask in (precache.build, precache.plan):
        with pytest.raises(RecipeError, match=r"1 of 1 samples tried look like masks: b\.png"):
            ask(source, store, recipe, **again)
    stated = Recipe.image(resize=(40, 40), mode="RGB", interpolation="bilinear")
    assert precache.build(source, store, stated, **again).mended == 1


def test_nothing_is_tried_where_nothing_is_decoded_or_all_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Said
) -> None:
    tried = list[str]()
    look = Pixels.look
    monkeypatch.setattr(
        Pixels, "look", lambda self, key, sample: (tried.append(key), look(self, key, sample))
    )
    photos = as_folder(tmp_path, files_of(photo, "a", 40))
    store = tmp_path / "store"
    run("build", photos, store, *RESIZE)
    assert PROBE_SAMPLES <= len(tried) <= PROBE_SAMPLES + 1
    tried.clear()
    status, text = run("build", photos, store, *RESIZE)
    assert (status, "Nothing to do" in text) == (0, True)
    assert run("build", photos, store, *RESIZE, "--codec", "zstd")[0] == 0
    (tmp_path / "in/a03.png").unlink()
    assert run("build", photos, store, *RESIZE)[0] == 0
    assert tried == []
    as_folder(tmp_path, files_of(photo, "b", 30))
    assert run("build", photos, store, *RESIZE)[0] == 0
    assert PROBE_SAMPLES <= len(tried) <= PROBE_SAMPLES + 1
    assert {key[0] for key in tried} == {"b"}
    tried.clear()
    as_folder(tmp_path, files_of(photo, "c"))
    stated = ("--interpolation", "bilinear", "--mode", "RGB", "--bits", "16")
    assert run("build", photos, store, *RESIZE, *stated)[0] == 0
    assert tried == []


@pytest.mark.parametrize("later", ["grey", "12 bits"])
def test_a_refresh_reads_pixels_as_its_version_did(tmp_path: Path, later: str) -> None:
    """A recipe that is taken from the version states its bits, but none of its other defaults."""
    make, store = LATER[later][0], tmp_path / "store"
    source = as_folder(tmp_path, files_of(make, "a"))
    crop: dict[str, Any] = {"random_resized_crop": 20, "variants": 2, "interpolation": "bilinear"}
    precache.build(source, store, Recipe.image(**crop, mode="RGB", bits=16), address="serial")
    precache.refresh(store, address="serial")
    assert precache.open(store).recipe.fields["image"].first_variant == 1
    as_folder(tmp_path, files_of(make, "b"))
    asked = pytest.raises(RecipeError, match="8 of 8 samples tried look like masks")
    with asked if later == "grey" else nullcontext():
        precache.build(source, store, precache.open(store).recipe, address="serial")


# --- draws --------------------------------------------------------------------------------------


def test_how_often_to_draw_is_asked_for_and_the_ways_out_build(
    tmp_path: Path, run: Said, asked: Asked
) -> None:
    source = write_jpegs(tmp_path / "photos", 6)
    recipe = ("--random-resized-crop", "32", "--flip")
    text = asked("variants is not stated", source, tmp_path / "no", *recipe)
    assert not (tmp_path / "no").exists()
    ways = [*dict.fromkeys(re.findall(r"--variants \d", text))]
    assert ways == ["--variants 4", "--variants 1"]
    frozen = "all epochs read the same random draw of"
    for way in ways:
        for command in ("plan", "build"):
            store = tmp_path / way[-1]
            status, text = run(command, source, store, *recipe, *way.split())
            assert status == 0, text
            assert text.count(frozen) == (way[-1] == "1")


def flip(image: np.ndarray, random: Any) -> np.ndarray:
    return image[:, ::-1] if random.random() < 0.5 else image


FIELDS = (
    Field(ops=[Decode(), RandomResizedCrop(size=32)]),
    Field(ops=[Decode(), Resize(size=(32, 32)), HorizontalFlip()]),
    Field(ops=[Decode(), {"op": "function", "function": f"{__name__}:flip", "random": True}]),
)


@pytest.mark.parametrize("ask", [precache.build, precache.plan, precache.ensure, precache.submit])
def test_every_door_asks_how_often_to_draw(tmp_path: Path, ask: Callable[..., object]) -> None:
    photos = write_jpegs(tmp_path / "photos", 4)
    for field in FIELDS:
        recipe = Recipe(fields={"image": field})
        with pytest.raises(RecipeError, match=r"field image has random ops .* variants is not sta"):
            ask(photos, tmp_path / "store", recipe)
    assert not (tmp_path / "store").exists()


def test_a_recipe_that_states_one_draw_does_so_wherever_it_is_written(tmp_path: Path) -> None:
    photos = write_jpegs(tmp_path / "photos", 4)
    (tmp_path / "recipe.toml").write_text(
        '[fields.image]\nvariants = 1\nops = [{ op = "decode" }, '
        '{ op = "random_resized_crop", size = 32 }]\n'
    )
    written = Recipe.from_toml(tmp_path / "recipe.toml")
    first = precache.build(photos, tmp_path / "store", written, address="serial")
    stored = precache.open(tmp_path / "store").recipe
    sent = Recipe.from_dict(json.loads(json.dumps(written.as_stated())))
    for recipe in (stored, sent, Recipe.image(random_resized_crop=32, variants=1)):
        again = precache.build(photos, tmp_path / "store", recipe, address="serial")
        assert again.version == first.version


@pytest.mark.parametrize("stated", [True, False])
def test_a_job_knows_what_was_stated(stated: bool) -> None:
    options: dict[str, Any] = {"mode": "RGB", "interpolation": "bilinear"}
    recipe = Recipe.image(resize=32, **(options if stated else {}))
    sent = Recipe.from_dict(json.loads(json.dumps(recipe.as_stated())))
    decode, resize = sent.fields["image"].ops
    assert decode.states("mode") == stated
    assert resize.states("interpolation") == stated
    assert sent.to_dict() == recipe.to_dict() == Recipe.image(resize=32).to_dict()


def test_fields_that_draw_apart_are_said(tmp_path: Path, run: Said) -> None:
    """A mask that is not mirrored with its image fits no longer."""

    def said(**fields: dict[str, Any]) -> list[str]:
        decode = {"op": "decode"}
        given = {n: {**field, "ops": [decode, *field["ops"]]} for n, field in fields.items()}
        return draws_in_words(Recipe.from_dict({"fields": given}))

    flip, crop = {"op": "horizontal_flip"}, {"op": "random_resized_crop", "size": 8}
    resized = {n: {"ops": [{"op": "resize", "size": n}, crop], "variants": 2} for n in (40, 20)}
    [line] = said(large=resized[40], small=resized[20])
    assert "large variants 0 to 1, 2: resize {'size': 40}, 3: random_resized_crop; small" in line
    [line] = said(image={"ops": [flip], "variants": 2}, mask={"ops": [flip], "variants": 4})
    assert "image variants 0 to 1, 2: horizontal_flip; mask variants 0 to 3, 2:" in line
    together = {"ops": [flip], "variants": 1}
    assert len(said(image=together, mask=together)) == 2, "one for each frozen draw"
    source = folder_of(tmp_path / "masks", lambda n: in_palette(mask(n)))
    (tmp_path / "recipe.toml").write_text(
        """
        [fields.image]
        variants = 1
        ops = [{ op = "decode", mode = "RGB" }, { op = "horizontal_flip" }]
        [fields.mask]
        ops = [{ op = "decode", mode = "P" }]
        """
    )
    line = "fields draw apart, by op and position: image 2: horizontal_flip; mask nothing"
    for command in ("build", "plan"):
        store = tmp_path / command
        text = run(command, source, store, "--recipe", tmp_path / "recipe.toml")[1]
        assert line in text
