"""Masks, images of 12 bits and random draws: a build refuses what nobody stated, with a way out."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

import precache
from precache import Decode, Field, HorizontalFlip, RandomResizedCrop, Recipe, Resize
from precache.cli import main as command_line
from precache.errors import RecipeError
from precache.recipe.recipe import draws_in_words
from tests.support.building import cut, encoded, pixels, write, write_jpegs

Make = Callable[[int], Image.Image]


def mask(number: int) -> Image.Image:
    """Classes 0 to 20, and 255 for those that do not count."""
    classes = np.random.default_rng(number).permutation(24)[:20].reshape(4, 5) % 22
    values = np.kron(classes, np.ones((16, 13), int)).astype(np.uint8)
    return Image.fromarray(np.where(values == 21, 255, values).astype(np.uint8))


def in_palette(image: Image.Image) -> Image.Image:
    image = image.copy()
    image.putpalette([(number * 37 + 11) % 256 for number in range(768)])
    return image


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


def folder_of(root: Path, make: Make, count: int = 12, kind: str = "PNG") -> Path:
    for number in range(count):
        write(root / f"{number:02}.{kind.lower()}", encoded(make(number), kind))
    return root


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run a command here; returns its status and all that it printed."""
    status = command_line.main([str(argument) for argument in arguments])
    return status, "".join(capfd.readouterr())


def flags_after(name: str, text: str) -> list[str]:
    """Return the flags that a refusal prints behind a word."""
    found = re.search(rf"{name}: (--[^(]+) \(", text)
    assert found, text
    return shlex.split(found[1])


HERE = ("--address", "serial")
RESIZE = ("--resize", "40")

# --- masks --------------------------------------------------------------------------------------

MASKS: dict[str, tuple[Make, str, tuple[str, ...]]] = {
    "palette": (lambda n: in_palette(mask(n)), "PNG", RESIZE),
    "palette that is not resized": (lambda n: in_palette(mask(n)), "PNG", ("--crop", "40")),
    "GIF": (lambda n: in_palette(mask(n)), "GIF", RESIZE),
    "grey": (mask, "PNG", RESIZE),
    "grey, decoded as grey": (mask, "PNG", (*RESIZE, "--mode", "L")),
    "TIFF": (mask, "TIFF", RESIZE),
    "colours": (lambda n: in_palette(mask(n)).convert("RGB"), "PNG", RESIZE),
    "random crop": (mask, "PNG", ("--random-resized-crop", "40", "--variants", "2")),
    "neighbouring numbers": (lambda n: mask(n).point(lambda v: v % 3), "PNG", RESIZE),
    "two neighbours": (lambda n: mask(n).point(lambda v: v % 2), "PNG", RESIZE),
    "one bit": (lambda n: mask(n).point(lambda v: 255 * (v > 9)).convert("1"), "PNG", RESIZE),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_asked_for_and_both_ways_out_build(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    make, kind, recipe = MASKS[name]
    source = folder_of(tmp_path / "masks", make, kind=kind)
    for command in ("build", "plan"):
        status, text = run(capfd, command, source, tmp_path / "no", *recipe, *HERE)
        assert status
        assert re.search(r"\d+ of 12 samples tried look like masks", text)
        assert not list((tmp_path / "no").glob("*/zarr.json"))
    as_mask, as_picture = flags_after("Masks", text), flags_after("Pictures", text)
    for number, flags in enumerate((as_mask, as_picture)):
        store = tmp_path / f"{number}.store"
        status, text = run(capfd, "build", source, store, *recipe, *flags, *HERE)
        assert status == 0, text
    for key, row in pixels(tmp_path / "0.store").items():
        with Image.open(source / key) as image:
            mode = image.mode if "P" in as_mask else "L" if "decoded as grey" in name else "RGB"
            stored = colours_of(np.asarray(image.convert(mode)))
        assert colours_of(row.transpose(1, 2, 0)) <= stored
        assert len(stored) > 1


def colours_of(array: np.ndarray) -> set[tuple[int, ...]]:
    flat = array.reshape(array.shape[0] * array.shape[1], -1)
    return {tuple(row) for row in np.unique(flat, axis=0).tolist()}


def test_indices_come_out_of_a_store_as_they_are(tmp_path: Path) -> None:
    """Of 22 values a resize made 221."""
    source = folder_of(tmp_path / "masks", lambda n: in_palette(mask(n)))
    for codec in ("image", "raw", "zstd"):
        recipe = Recipe.image(resize=(30, 33), mode="P", interpolation="nearest", codec=codec)
        precache.build(source, tmp_path / codec, recipe, address="serial")
        for key, row in pixels(tmp_path / codec).items():
            expected = mask(int(key[:2])).resize((33, 30), Image.Resampling.NEAREST)
            assert np.array_equal(row[0], np.asarray(expected))
    version = precache.open(tmp_path / "image")
    with precache.Loader(version, batch_size=12, device="cpu") as loader:
        [batch] = loader
    assert batch["image"].shape == (12, 1, 30, 33)


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
    precache.build(source, tmp_path / "store", recipe, address="serial")
    masks = pixels(tmp_path / "store", "mask")
    for key, image in pixels(tmp_path / "store").items():
        shown = in_palette(Image.fromarray(masks[key][0])).convert("RGB")
        assert np.array_equal(image, np.asarray(shown).transpose(2, 0, 1))
    fields = {**recipe.fields, "mask": Field(ops=[Decode(mode="L"), Resize(size=30)])}
    grey = folder_of(tmp_path / "grey", mask)
    with pytest.raises(RecipeError, match=r"field mask: 12 of 12 .*Masks: interpolation = "):
        precache.build(grey, tmp_path / "no", Recipe(fields=fields), address="serial")


def test_a_quarter_of_masks_is_enough_and_a_stray_one_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    photos = write_jpegs(tmp_path / "photos", 16)
    write(photos / "cat" / "mask.png", encoded(mask(1), "PNG"))
    line = "1 of 17 samples tried look like masks"
    assert line in run(capfd, "build", photos, tmp_path / "store", "--resize", "32", *HERE)[1]
    folder_of(photos / "drawn", mask, 8)
    with pytest.raises(RecipeError, match=r"[89] of 2[45] samples tried look like masks"):
        precache.build(photos, tmp_path / "other", Recipe.image(resize=32), address="serial")


PICTURES: dict[str, tuple[Make, str]] = {
    "photographs": (cut, "PNG"),
    "grey photographs": (lambda n: cut(n).convert("L"), "PNG"),
    "photographs of 256 colours": (lambda n: cut(n, (200, 150)).quantize(256), "GIF"),
    "JPEGs of masks": (mask, "JPEG"),
    "digits": (digit, "PNG"),
    "one colour": (lambda n: Image.new("RGB", (50, 50), (n, 9, 9)), "PNG"),
    "16 bits": (wide(65_000), "PNG"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_build_without_a_flag(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    make, kind = PICTURES[name]
    source = folder_of(tmp_path / "pictures", make, kind=kind)
    status, text = run(capfd, "build", source, tmp_path / "store", "--resize", "24", *HERE)
    assert status == 0, text
    assert ("highest 8 are kept" in text) == (name == "16 bits")


def test_grey_of_a_palette_is_refused_sample_by_sample(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = folder_of(tmp_path / "masks", lambda n: in_palette(mask(n)))
    grey = ("build", source, tmp_path / "store", "--resize", "32", "--mode", "L", *HERE)
    status, text = run(capfd, *grey)
    assert status
    assert "is a palette image" in text
    assert "--mode P --interpolation nearest" in text


def test_a_transparent_picture_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without progress, too."""

    def half(number: int) -> Image.Image:
        image = cut(number).convert("RGBA")
        image.putalpha(Image.linear_gradient("L").resize(image.size))
        return image

    source = folder_of(tmp_path / "pictures", half)
    line = "image: 12 of 12 samples tried have transparent pixels, which get the colours stored"
    for command in ("build", "plan"):
        assert line in run(capfd, command, source, tmp_path / command, *RESIZE, *HERE)[1]
    keeps = ("build", source, tmp_path / "rgba", *RESIZE, "--mode", "RGBA", *HERE)
    assert "transparent pixels" not in run(capfd, *keeps)[1]
    assert {row.shape[0] for row in pixels(tmp_path / "rgba").values()} == {4}
    caplog.clear()
    run(capfd, "build", source, tmp_path / "quiet", *RESIZE, *HERE, "--quiet")
    precache.build(source, tmp_path / "python", Recipe.image(resize=40), address="serial")
    assert [record.message.startswith(line) for record in caplog.records] == [True, True]


# --- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "bits"), [(200, 8), (1000, 10), (4095, 12), (12_345, 14)])
def test_fewer_bits_in_files_of_sixteen_are_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], most: int, bits: int
) -> None:
    source = folder_of(tmp_path / "wide", wide(most))
    for command in ("build", "plan"):
        status, text = run(capfd, command, source, tmp_path / "no", "--mode", "L", *HERE)
        assert status
        assert f"as of {bits} bits" in text
    few, all_of_them = flags_after(f"{bits} bits", text), flags_after("16 bits", text)
    assert (few, all_of_them) == (["--bits", str(bits)], ["--bits", "16"])
    for name, flags in (("few", few), ("all", all_of_them)):
        status, text = run(capfd, "build", source, tmp_path / name, "--mode", "L", *flags, *HERE)
        assert status == 0, text
    for name, kept in (("few", bits), ("all", 16)):
        for key, row in pixels(tmp_path / name).items():
            expected = np.asarray(wide(most)(int(key[:2]))) >> (kept - 8)
            assert np.array_equal(row[0], expected)


def test_a_value_of_more_bits_makes_a_hole(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "wide", wide(1000))
    write(source / "99.png", encoded(wide(60_000)(0), "PNG"))
    recipe = Recipe.image(mode="L", bits=10)
    result = precache.build(source, tmp_path / "store", recipe, address="serial")
    assert result.failed == 1
    [(key, reason)] = precache.open(tmp_path / "store").holes.values()
    assert (key, "more than 10 bits" in reason) == ("99.png", True)


# --- draws --------------------------------------------------------------------------------------

DRAWN = {
    "crop": ("--random-resized-crop", "32"),
    "flip": ("--resize", "40x40", "--flip"),
    "both": ("--random-resized-crop", "32", "--flip"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_how_often_to_draw_is_asked_for_and_the_ways_out_build(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    source = write_jpegs(tmp_path / "photos", 6)
    recipe = DRAWN[name]
    for command in ("build", "plan"):
        status, text = run(capfd, command, source, tmp_path / "no", *recipe, *HERE)
        assert status
        assert "variants is not stated" in text
        assert not (tmp_path / "no").exists()
    ways = re.findall(r"--variants \d", text)
    assert ways == ["--variants 4", "--variants 1"]
    frozen = "all epochs read the same random draw of"
    for way in ways:
        for command in ("plan", "build"):
            store = tmp_path / way[-1]
            status, text = run(capfd, command, source, store, *recipe, *way.split(), *HERE)
            assert status == 0, text
            assert (frozen in text) == (way[-1] == "1")
            assert text.count(frozen) <= 1
    assert {image.shape for image in pixels(tmp_path / "4").values()} == (
        {(3, 40, 40)} if name == "flip" else {(3, 32, 32)}
    )


def flip(image: np.ndarray, random: Any) -> np.ndarray:
    return image[:, ::-1] if random.random() < 0.5 else image


FIELDS: dict[str, Callable[[], Field]] = {
    "crop": lambda: Field(ops=[Decode(), RandomResizedCrop(size=32)]),
    "flip": lambda: Field(ops=[Decode(), Resize(size=(32, 32)), HorizontalFlip()]),
    "function": lambda: Field(
        ops=[
            Decode(),
            Resize(size=(32, 32)),
            {"op": "function", "function": f"{__name__}:flip", "random": True},
        ]
    ),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("ask", [precache.build, precache.plan, precache.ensure, precache.submit])
def test_every_door_asks_how_often_to_draw(
    tmp_path: Path, ask: Callable[..., object], name: str
) -> None:
    photos = write_jpegs(tmp_path / "photos", 4)
    recipe = Recipe(fields={"image": FIELDS[name]()})
    with pytest.raises(RecipeError, match=r"field image has random ops .* variants is not stated"):
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
    options: dict[str, Any] = {"mode": "RGB", "interpolation": "bilinear", "bits": 16}
    recipe = Recipe.image(resize=32, **(options if stated else {}))
    sent = Recipe.from_dict(json.loads(json.dumps(recipe.as_stated())))
    decode, resize = sent.fields["image"].ops
    assert decode.states("mode") == decode.states("bits") == stated
    assert resize.states("interpolation") == stated
    assert sent.to_dict() == recipe.to_dict() == Recipe.image(resize=32).to_dict()


def test_fields_that_draw_apart_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A mask that is not mirrored with its image fits no longer."""
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
        text = run(capfd, command, source, store, "--recipe", tmp_path / "recipe.toml", *HERE)[1]
        assert line in text
    flipped = {"variants": 1, "ops": [{"op": "decode", "mode": "P"}, {"op": "horizontal_flip"}]}
    both = {"image": {**flipped, "ops": [{"op": "decode", "mode": "RGB"}, flipped["ops"][1]]}}
    recipe = Recipe.from_dict({"fields": {**both, "mask": flipped}})
    assert len(draws_in_words(recipe)) == 2, "one for each frozen draw"
    precache.build(source, tmp_path / "together", recipe, address="serial")
    masks = pixels(tmp_path / "together", "mask")
    for key, image in pixels(tmp_path / "together").items():
        shown = in_palette(Image.fromarray(masks[key][0])).convert("RGB")
        assert np.array_equal(image, np.asarray(shown).transpose(2, 0, 1))
