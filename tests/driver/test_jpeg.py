"""Builds of rows that are JPEG files: which stay, reuse, damage and repair, and what is refused."""

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from PIL import Image, ImageCms

import precache
from precache.codecs import jpeg
from precache.codecs.jpeg import decode_jpeg, encode_jpeg
from precache.errors import RecipeError, UsageError
from precache.recipe.recipe import Recipe
from precache.transforms import RandomResizedCrop
from tests.conftest import photo
from tests.support import building
from tests.support.building import encoded, write
from tests.support.command_line import Run

LONGEST = 64


def picture(number: int, height: int = 41, width: int = 57) -> Image.Image:
    return Image.fromarray(photo(number, height, width))


def turned(orientation: int) -> Any:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
KEPT: dict[str, bytes] = {
    "baseline.jpg": encoded(picture(1), quality=93),
    "progressive.jpg": encoded(picture(2), progressive=True),
    "grey.jpg": encoded(picture(3).convert("L")),
    "full colours.jpg": encoded(picture(4, 64, 20), subsampling=0),
    "upright.jpg": encoded(picture(5), exif=turned(1)),
    "profile.jpg": encoded(picture(6), icc_profile=SRGB),
    "trailing.jpg": encoded(picture(7)) + b"trailing bytes",
    **{f"more/{n}.jpg": encoded(picture(n, 30 + n, 64 - n), quality=88) for n in range(10, 22)},
}
ENCODED: dict[str, bytes] = {
    "turned.jpg": encoded(picture(31), exif=turned(6)),
    "mirrored.jpg": encoded(picture(32), exif=turned(2)),
    "large.jpg": encoded(picture(33, 90, 70)),
    "cmyk.jpg": encoded(picture(34).convert("CMYK")),
    "lossless.png": encoded(picture(35), "PNG"),
    "no end.jpg": encoded(picture(36))[:-2],
}


def write_source(root: Path) -> Path:
    for name, data in {**KEPT, **ENCODED}.items():
        write(root / "a" / name, data)
    write(root / "b" / "broken.jpg", encoded(picture(40))[:600])
    return root


def recipe(codec: Any = "jpeg", **options: Any) -> Recipe:
    return Recipe.image(**{"max_size": LONGEST, "codec": codec, **options})


build = functools.partial(building.build, recipe=recipe(), shard_samples=8)


def rows_of(store: Path) -> dict[str, np.ndarray]:
    dataset = precache.CachedDataset(store)
    return {key: dataset[n]["image"].numpy() for n, key in enumerate(dataset.keys)}


def files_of(store: Path) -> dict[str, bytes]:
    """Key -> stored file, by zarr-python."""
    version = precache.open(store)
    stored: Any = zarr.open_array(Path(version.path) / "image", mode="r")
    return {key: bytes(file) for key, file in zip(version.keys, stored[:], strict=True)}


def assert_same(one: Path, other: Path) -> None:
    rows = rows_of(one)
    assert rows.keys() == rows_of(other).keys()
    for key, row in rows_of(other).items():
        np.testing.assert_array_equal(rows[key], row, err_msg=key)
    versions = [precache.open(path) for path in (one, other)]
    for name in ("mean", "std"):
        values = [getattr(version, name)["image"] for version in versions]
        assert values[0] == pytest.approx(values[1], rel=1e-12)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("jpeg") / "photos")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Codec -> store."""
    root = tmp_path_factory.mktemp("stores")
    for codec in ("jpeg", "image"):
        build(source, root / codec, recipe=recipe(codec))
    return {codec: root / codec for codec in ("jpeg", "image")}


@pytest.fixture
def store(built: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(built["jpeg"], tmp_path / "store"))


def test_files_stay_as_they_came_where_they_have_the_pixels_of_the_row(
    built: dict[str, Path],
) -> None:
    files, rows, plain = files_of(built["jpeg"]), rows_of(built["jpeg"]), rows_of(built["image"])
    assert files.pop("b/broken.jpg") == b""
    assert files.keys() == rows.keys() == plain.keys()
    for name, data in KEPT.items():
        assert files[f"a/{name}"] == data
        np.testing.assert_array_equal(rows[f"a/{name}"], plain[f"a/{name}"], err_msg=name)
    for name in ENCODED:
        row = plain[f"a/{name}"]
        assert files[f"a/{name}"] == encode_jpeg(row, 90)
        np.testing.assert_array_equal(rows[f"a/{name}"], decode_jpeg(files[f"a/{name}"], row.shape))
        assert 0 < np.abs(rows[f"a/{name}"].astype(int) - row).mean() < 4, name


def test_plan_and_build_say_how_many_files_stay_and_that_others_lose(
    built: dict[str, Path], tmp_path: Path, run: Run
) -> None:
    line = "image: {} of {} samples tried stay the JPEG files that they are"
    loses = "; rows of the others are encoded at quality 80, which loses (--codec image keeps all"
    few = tmp_path / "few"
    for name in ("baseline.jpg", "grey.jpg", "turned.jpg"):
        write(few / "a" / name, {**KEPT, **ENCODED}[name])
    command = [few, tmp_path / "store", "--max-size", LONGEST, "--codec", "jpeg", "--quality", 80]
    command += ["--address", "serial"]
    planned = run("plan", *command)
    assert line.format(2, 3) + loses in planned.out, planned
    done = run("build", *command)
    assert line.format(2, 3) + loses in done.err, done
    write(few / "a/more.jpg", KEPT["progressive.jpg"])
    added = run("plan", *command)  # of the samples that are decoded
    assert line.format(1, 1) + "\n" in added.out, added
    turned = rows_of(built["image"])["a/turned.jpg"]
    assert files_of(tmp_path / "store")["a/turned.jpg"] == encode_jpeg(turned, 80)


# --- reuse --------------------------------------------------------------------------------------


def test_appended_and_changed_photos_make_what_a_fresh_build_makes(
    source: Path, tmp_path: Path
) -> None:
    photos, store = Path(shutil.copytree(source, tmp_path / "photos")), tmp_path / "store"
    build(photos, store)
    for number in range(50, 57):
        write(photos / f"c/{number}.jpg", encoded(picture(number), quality=80 + number % 5))
    write(photos / "a/large.jpg", ENCODED["turned.jpg"])
    (photos / "a/baseline.jpg").unlink()
    assert build(photos, store).rows_reused > 15
    fresh = {k: f for k, f in files_of(store).items() if k != "a/baseline.jpg"}
    build(photos, tmp_path / "fresh")
    assert fresh == files_of(tmp_path / "fresh")
    assert_same(store, tmp_path / "fresh")
    assert build(photos, tmp_path / "fresh", shard_samples=4).failed == 1


OTHER: dict[str, Callable[[], Recipe]] = {
    "raw": lambda: recipe("raw"),
    "raw420": lambda: recipe("raw420"),
    "quality": lambda: recipe(quality=70),
    "more ops": lambda: recipe(crop=18),
}


@pytest.mark.parametrize("kind", OTHER)
def test_another_codec_quality_or_op_starts_from_the_photos_and_not_from_rows_that_lost(
    kind: str, source: Path, built: dict[str, Path], tmp_path: Path
) -> None:
    """And back: rows that a lossless codec has are no files that could stay."""
    store = Path(shutil.copytree(built["jpeg"], tmp_path / "store"))
    assert build(source, store, recipe=OTHER[kind]()).rows_reused == 0
    build(source, tmp_path / "fresh", recipe=OTHER[kind]())
    assert_same(store, tmp_path / "fresh")
    precache.gc(store, keep=1, older_than=0)
    build(source, store)
    assert_same(store, built["jpeg"])
    assert files_of(store) == files_of(built["jpeg"])


def test_the_encoder_is_part_of_what_identifies_rows(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that another release would encode otherwise are not taken; other codecs' are."""
    fingerprints = {}
    for release in ("one", "other"):
        if release == "other":
            monkeypatch.setattr(jpeg, "SUBSAMPLING", "4:4:4")
            clear_cache()
        for codec in ("jpeg", "raw"):
            result = build(source, tmp_path / codec, recipe=recipe(codec))
            fingerprints[release, codec] = result.version
    clear_cache()
    assert fingerprints["one", "jpeg"] != fingerprints["other", "jpeg"]
    assert fingerprints["one", "raw"] == fingerprints["other", "raw"]


def clear_cache() -> None:
    from precache_workers.ops import behaviour

    behaviour.clear_cache()
    behaviour.computed.cache_clear()


# --- refusals -----------------------------------------------------------------------------------


def field(*ops: dict[str, Any], codec: Any = "jpeg") -> dict[str, Any]:
    return {"fields": {"image": {"ops": ops, "codec": codec}}}


DECODE = {"op": "decode"}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "masks": (
        lambda: Recipe.from_dict(field({**DECODE, "mode": "P"})),
        "codec 'jpeg' loses, and keeps no values of a field of masks; use image, raw or zstd",
    ),
    "values by nearest": (
        lambda: recipe(mode="L", interpolation="nearest"),
        "'nearest' says that values are to be kept",
    ),
    "alpha": (lambda: recipe(mode="RGBA"), "stores 1 or 3 channels, not 4"),
    "floats": (
        lambda: Recipe.from_dict(field(DECODE, {"op": "to_dtype", "dtype": "float32"})),
        "stores uint8, not float32",
    ),
    "masks at half the colours": (
        lambda: Recipe.from_dict(field({**DECODE, "mode": "P"}, codec="raw420")),
        "codec 'raw420' loses, and keeps no values of a field of masks; use image, raw or zstd",
    ),
    "grey at half the colours": (lambda: recipe("raw420", mode="L"), "stores 3 channels, not 1"),
    "floats at half the colours": (
        lambda: Recipe.from_dict(
            field(DECODE, {"op": "to_dtype", "dtype": "float32"}, codec="raw420")
        ),
        "stores uint8, not float32",
    ),
    "arrays": (lambda: Recipe.from_dict(field()), "keeps no values of a field of arrays"),
    "no quality": (lambda: recipe(quality=0), "quality is 0; give a whole number from 1 up"),
    "too high": (lambda: recipe(quality=101), "quality is 101; the most is 100"),
    "another codec's": (lambda: recipe("raw", quality=90), "give codec jpeg (--codec jpeg)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_jpeg_cannot_keep_is_refused_in_words(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(RecipeError) as caught:
        make()
    assert words in str(caught.value)


def two_channels(array: np.ndarray) -> np.ndarray:
    return array[..., :2]


def test_functions_that_make_other_channels_are_refused_by_the_samples(
    source: Path, tmp_path: Path
) -> None:
    op = {"op": "function", "function": "tests.driver.test_jpeg:two_channels"}
    with pytest.raises(RecipeError, match=r"codec jpeg stores uint8 .* of 1 or 3 channels"):
        build(source, tmp_path / "store", recipe=Recipe.from_dict(field(DECODE, op)))


def test_a_training_node_without_the_library_is_told_what_to_install(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    jpeg.import_simplejpeg.cache_clear()
    with pytest.raises(UsageError, match=r"pip install 'precache\[jpeg\]'"):
        precache.Loader(store, 4, transform=RandomResizedCrop(16), device="cpu")
    jpeg.import_simplejpeg.cache_clear()


def test_doctor_says_that_it_measures_rows_of_one_shape(source: Path, run: Run) -> None:
    done = run("doctor", source, "--resize", 30, "--crop", 24, "--codec", "jpeg")
    assert done.status == 2
    assert "no --codec jpeg" in done.err
