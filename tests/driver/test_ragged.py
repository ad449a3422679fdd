"""Builds of rows of many shapes: contents, reuse, damage, repair, and every command on them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from PIL import Image
from torch.utils.data import DataLoader

import precache
from precache.errors import DamageError, RecipeError, UsageError
from precache.recipe.ops import Resize
from precache.recipe.recipe import Recipe
from precache.store.open import open_version
from tests.conftest import photo
from tests.support.building import encoded, write

LONGEST = 48
CODECS = ("raw", "image", "zstd")


def write_photo(path: Path, number: int, height: int, width: int) -> None:
    write(path, encoded(Image.fromarray(photo(number, height, width)), "PNG"))


def write_photos(root: Path, count: int = 30, first: int = 0) -> Path:
    """Photos of many shapes in three classes, and one file that is none."""
    for number in range(first, first + count):
        size = 20 + 13 * number % 61, 17 + 7 * number % 83
        write_photo(root / "abc"[number % 3] / f"{number:03}.png", number, *size)
    write(root / "a" / "broken.png", b"no image")
    return root


def recipe(**options: Any) -> Recipe:
    return Recipe.image(**{"max_size": LONGEST, **options})


def build(source: Path, store: Path, built: Recipe | None = None, **options: Any) -> Any:
    options = {"address": "serial", "shard_samples": 8, "progress": False, **options}
    return precache.build(source, store, built or recipe(), **options)


def rows_of(store: Path | str) -> dict[str, np.ndarray]:
    dataset = precache.CachedDataset(store)
    return {key: dataset[n]["image"].numpy() for n, key in enumerate(dataset.keys)}


def expected(source: Path) -> dict[str, np.ndarray]:
    shrink, rows = Resize(max_size=LONGEST), {}
    for path in sorted(source.rglob("[0-9]*.png")):
        pixels = np.asarray(Image.open(path))
        rows[path.relative_to(source).as_posix()] = shrink(pixels, None).transpose(2, 0, 1)
    return rows


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for key, row in one.items():
        np.testing.assert_array_equal(row, other[key], err_msg=key)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("ragged") / "photos")


@pytest.fixture(scope="module")
def stores(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stores")
    for codec in CODECS:
        build(source, root / codec, recipe(codec=codec))
    return {codec: root / codec for codec in CODECS}


@pytest.fixture
def store(stores: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(stores["image"], tmp_path / "store"))


@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_the_images_with_shapes_of_their_own(
    codec: str, source: Path, stores: dict[str, Path]
) -> None:
    rows = expected(source)
    assert_same(rows_of(stores[codec]), rows)
    version = precache.open(stores[codec])
    assert version.fields["image"].ragged
    assert len(version.hole_rows) == 1
    shapes = version.row_shapes("image")
    assert {tuple(shapes[row]) for row in version.hole_rows} == {(0, 0, 0)}
    pixels = np.concatenate([row.reshape(3, -1) for row in rows.values()], axis=1)
    assert version.mean["image"] == pytest.approx(pixels.mean(1), rel=1e-12)
    assert version.std["image"] == pytest.approx(pixels.std(1), rel=1e-9)
    assert version.fields["image"].raw_nbytes == pixels.size
    stored: Any = zarr.open_array(Path(version.path) / "image", mode="r")
    sizes: Any = zarr.open_array(Path(version.path) / "image.shape", mode="r")
    np.testing.assert_array_equal(sizes[:], shapes)
    if codec != "image":
        for row, shape in zip(stored[:], shapes, strict=True):
            assert len(row) == shape.prod()


def test_images_of_one_shape_stay_rows_of_one_shape(tmp_path: Path) -> None:
    for number in range(12):
        write_photo(tmp_path / "photos" / f"{number}.png", number, 20, 30)
    build(tmp_path / "photos", tmp_path / "plain", Recipe.image())
    build(tmp_path / "photos", tmp_path / "longest")
    one, other = (precache.open(tmp_path / name) for name in ("plain", "longest"))
    assert (one.fields["image"].shape, one.fields["image"].ragged) == ((3, 20, 30), False)
    assert other.fields["image"].ragged
    assert "ragged" not in (Path(one.path) / "zarr.json").read_text()
    assert_same(rows_of(tmp_path / "plain"), rows_of(tmp_path / "longest"))


@pytest.mark.parametrize("options", [{"resize": 24}, {}])
def test_a_build_says_that_rows_keep_the_shapes_of_images_that_differ(
    options: dict[str, Any], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(source, tmp_path / "store", Recipe.image(**options), progress=True)
    assert "Rows of image keep the shapes of their images" in capsys.readouterr().err
    rows = rows_of(tmp_path / "store")
    assert len({row.shape for row in rows.values()}) > 5
    assert all(min(row.shape[1:]) == 24 for row in rows.values()) or not options


def test_pictures_of_the_same_shapes_are_said_in_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {name: {"ops": [{"op": "decode", "mode": name}]} for name in ("RGB", "L")}
    build(source, tmp_path / "store", Recipe.from_dict({"fields": fields}), progress=True)
    assert "Rows of RGB and L keep the shapes of their images" in capsys.readouterr().err


def test_rows_of_a_shard_follow_from_the_recipe_and_not_from_the_images(tmp_path: Path) -> None:
    for name, size in (("small", 10), ("large", 100)):
        for number in range(40):
            write_photo(tmp_path / name / f"{number}.png", number, size, size + number)
        build(tmp_path / name, tmp_path / f"{name}.store", shard_samples=None)
    roots = [precache.open(tmp_path / f"{name}.store").attributes for name in ("small", "large")]
    assert roots[0] is not None
    assert roots[1] is not None
    assert roots[0].rows_per_shard == roots[1].rows_per_shard


# --- reuse --------------------------------------------------------------------------------------


def test_later_builds_reuse_rows_and_make_what_a_fresh_build_makes(
    source: Path, tmp_path: Path
) -> None:
    photos, store = Path(shutil.copytree(source, tmp_path / "photos")), tmp_path / "store"
    build(photos, store)
    write_photos(photos, 11, first=30)
    (photos / "a/003.png").unlink()
    write_photo(photos / "b/004.png", 99, 31, 57)
    assert build(photos, store).rows_reused > 15
    assert_same(rows_of(store), expected(photos))
    result = build(photos, store, recipe(codec="raw"))  # decoded, and encoded again
    assert result.rows_reused > 30
    assert_same(rows_of(store), expected(photos))
    result = build(photos, store, recipe(codec="raw"), shard_samples=8, recompute=True)
    assert_same(rows_of(store), expected(photos))
    build(photos, tmp_path / "fresh", recipe(codec="raw"))
    one, other = (precache.open(path) for path in (store, tmp_path / "fresh"))
    assert one.mean["image"] == pytest.approx(other.mean["image"], rel=1e-12)


def test_ops_that_are_added_go_on_from_stored_rows(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    build(source, store, Recipe.image(resize=24))
    cropped = Recipe.image(resize=24, crop=20)
    assert build(source, store, cropped).rows_reused > 20
    build(source, tmp_path / "fresh", cropped)
    assert_same(rows_of(store), rows_of(tmp_path / "fresh"))


def test_several_processes_make_the_same_bytes(source: Path, stores: Any, tmp_path: Path) -> None:
    build(source, tmp_path / "store", recipe(codec="image"), address="local", cpus=2)
    one, other = (precache.open(path) for path in (stores["image"], tmp_path / "store"))
    assert one.shard_leaves("image") == other.shard_leaves("image")


# --- damage and commands ------------------------------------------------------------------------


def shard(store: Path, number: int = 1) -> Path:
    return Path(precache.open(store).path) / f"image/c/{number}"


def test_damage_is_named_by_key_and_repaired_by_the_build(store: Path, source: Path) -> None:
    data = bytearray(shard(store).read_bytes())
    before = bytes(data)
    data[len(data) // 4] ^= 32
    shard(store).write_bytes(data)
    verified = precache.verify(store)
    assert not verified.ok
    [damage] = verified.damage
    assert len(damage.keys) == 1
    with pytest.raises(DamageError, match="image/c/1 is damaged at row"):
        rows_of(store)
    build(source, store, recipe(codec="image"), verify=True)
    assert shard(store).read_bytes() == before
    shard(store, 0).unlink()
    build(source, store, recipe(codec="image"))
    assert precache.verify(store).ok


def test_rows_in_each_others_place_are_damage(store: Path) -> None:
    one, other = shard(store, 0), shard(store, 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    with pytest.raises(DamageError):
        rows_of(store)


def test_lost_shapes_are_damage_until_a_build_takes_them_from_the_spare_copy(
    store: Path, source: Path
) -> None:
    lost = Path(precache.open(store).path) / "image.shape/c/0/0"
    data = lost.read_bytes()
    lost.write_bytes(data[:-5] + b"12345")
    with pytest.raises(DamageError, match=r"image\.shape"):
        precache.CachedDataset(store)
    assert not precache.verify(store).ok
    build(source, store, recipe(codec="image"))
    assert lost.read_bytes() == data


def test_versions_are_copied_compared_and_described(
    store: Path, stores: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    precache.pull(store, tmp_path / "copy")
    assert_same(rows_of(tmp_path / "copy"), expected(source))
    assert "uint8 of any shape" in str(precache.info(store))
    photos = Path(shutil.copytree(source, tmp_path / "photos"))
    (photos / "a/003.png").unlink()
    before = open_version(store).id
    build(photos, store, recipe(codec="image"))
    assert "a/003.png" in str(precache.diff(f"{store}@{before}", str(store)))


# --- reading ------------------------------------------------------------------------------------


def test_a_data_loader_takes_rows_one_by_one_and_says_so_where_it_stacks(store: Path) -> None:
    dataset = precache.CachedDataset(store)
    several = dataset[[3, 4, 5]]
    assert [row.shape for row in several["image"]] == [dataset[n]["image"].shape for n in (3, 4, 5)]
    loader: Any = DataLoader(dataset, batch_size=4, collate_fn=list)
    assert sum(len(batch) for batch in loader) == len(dataset)
    with pytest.raises(UsageError, match="collate_fn"):
        next(iter(DataLoader(dataset, batch_size=4)))

    class Cropped(precache.CachedDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index)["image"][:, :8, :8]

    batch = next(iter(DataLoader(Cropped(store), batch_size=4)))
    assert batch.shape == (4, 3, 8, 8)


def test_sizes_of_a_resize_are_one_of_two() -> None:
    with pytest.raises(RecipeError, match="either size or max_size"):
        Recipe.from_dict({"fields": {"image": {"ops": [{"op": "resize"}]}}})
    with pytest.raises(RecipeError, match="either size or max_size"):
        Resize(size=3, max_size=4)
