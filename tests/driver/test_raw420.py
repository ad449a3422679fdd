"""Builds of rows with colours at half the resolution: what is said, stored, reused and repaired."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from PIL import Image

import precache
from precache.codecs.raw420 import planes_of, rgb_of
from precache.recipe.recipe import Recipe
from precache.transforms import CenterCrop
from tests.conftest import photo
from tests.support.building import encoded, write
from tests.support.command_line import Run

LINE = (
    "image: codec raw420 halves height and width of colours, which loses: pixels of {} samples "
    "tried differ by "
)


def write_photos(folder: Path, numbers: range) -> None:
    for number in numbers:
        mode = "L" if number == 5 else "RGB"
        picture = Image.fromarray(photo(number, 30 + number, 64 - number)).convert(mode)
        write(folder / "ab"[number % 2] / f"{number}.png", encoded(picture, "PNG"))


def rows_of(store: Path) -> dict[str, np.ndarray]:
    dataset = precache.CachedDataset(store)
    return {key: dataset[n]["image"].numpy() for n, key in enumerate(dataset.keys)}


def build(source: Path, store: Path, codec: str = "raw420") -> int:
    recipe = Recipe.image(max_size=60, codec=codec)  # type: ignore[arg-type]
    result = precache.build(
        source, store, recipe, address="serial", shard_samples=4, progress=False
    )
    return int(result.rows_reused)


def test_a_build_says_that_it_loses_and_stores_what_a_fresh_one_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, run: Run
) -> None:
    source, store = tmp_path / "photos", tmp_path / "store"
    write_photos(source, range(10))
    planned = run(
        "plan", source, store, "--max-size", 60, "--codec", "raw420", "--address", "serial"
    )
    assert LINE.format(10) in planned.out, planned
    build(source, store)
    write_photos(source, range(10, 15))
    caplog.clear()
    assert build(source, store) == 10
    assert LINE.format(5) in caplog.text
    build(source, tmp_path / "fresh")
    build(source, tmp_path / "plain", "raw")
    rows, fresh, plain = (rows_of(tmp_path / name) for name in ("store", "fresh", "plain"))
    assert rows.keys() == fresh.keys() == plain.keys()
    for key, row in plain.items():
        np.testing.assert_array_equal(rows[key], rgb_of(planes_of(row), row.shape))
        np.testing.assert_array_equal(rows[key], fresh[key])
    version = precache.open(store)
    pixels = np.concatenate([row.reshape(3, -1) for row in rows.values()], axis=1)
    assert version.mean["image"] == pytest.approx(pixels.mean(1), rel=1e-12)
    assert version.fields["image"].raw_nbytes == pixels.size
    assert "codec raw420 (lossy)" in str(precache.info(store))
    stored: object = zarr.open_array(Path(version.path) / "image", mode="r")[:]
    for key, data in zip(version.keys, stored, strict=True):  # type: ignore[call-overload]
        assert bytes(data) == planes_of(plain[key]).tobytes()


def test_rows_of_one_shape_are_read_by_a_crop_too(tmp_path: Path, run: Run) -> None:
    source, store = tmp_path / "photos", tmp_path / "store"
    write_photos(source, range(4))
    sized = ("--resize", "24x32", "--codec", "raw420", "--address", "serial")
    planned = run("plan", source, store, *sized)
    assert "(another codec with --crop stores rows of one shape)" in planned.err, planned
    precache.build(source, store, Recipe.image(resize=(24, 32), codec="raw420"), address="serial")
    dataset = precache.CachedDataset(store)
    with precache.Loader(
        store, 4, transform=CenterCrop((24, 32)), device="cpu", shuffle=False
    ) as loader:
        [batch] = loader
    for number, image in enumerate(batch["image"]):
        np.testing.assert_array_equal(image, dataset[number]["image"])


def test_damage_is_repaired_and_other_codecs_start_from_the_photos(tmp_path: Path) -> None:
    source, store = tmp_path / "photos", tmp_path / "store"
    write_photos(source, range(10))
    build(source, store)
    shard = Path(precache.open(store).path) / "image/c/1"
    before = shard.read_bytes()
    shard.write_bytes(before[:300] + bytes([before[300] ^ 32]) + before[301:])
    [damage] = precache.verify(store).damage
    assert len(damage.keys) == 1
    precache.build(
        source,
        store,
        Recipe.image(max_size=60, codec="raw420"),
        verify=True,
        address="serial",
        shard_samples=4,
        progress=False,
    )
    assert shard.read_bytes() == before
    for codec in ("raw", "raw420"):
        assert build(source, tmp_path / "other", codec) == 0
    assert build(source, store, "raw") == 0
