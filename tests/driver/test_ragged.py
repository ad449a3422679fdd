"""Builds of rows of many shapes, by every codec: contents, reuse, damage, repair, commands."""

import functools
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader

import precache
from precache.codecs.jpeg import decode_jpeg, encode_jpeg
from precache.codecs.raw420 import planes_of, rgb_of
from precache.errors import DamageError, RecipeError, UsageError
from precache.recipe.ops import Resize
from precache.recipe.recipe import Recipe
from precache.store.open import open_version
from precache.transforms import CenterCrop, RandomResizedCrop
from tests.conftest import photo
from tests.support import building
from tests.support.building import build_until, contents, encoded, end, flip, start, write
from tests.support.command_line import Run

LONGEST = 48
CODECS = ("raw", "image", "zstd", "jpeg", "raw420")
LOSES = (
    "image: codec raw420 halves height and width of colours, which loses: pixels of {} samples "
    "tried differ by "
)


def write_photo(path: Path, number: int, height: int, width: int) -> None:
    write(path, encoded(Image.fromarray(photo(number, height, width)), "PNG"))


def write_photos(root: Path, count: int = 30, first: int = 0) -> Path:
    """Photos of many shapes in three classes, and one file that is none."""
    for number in range(first, first + count):
        size = 20 + 13 * number % 61, 17 + 7 * number % 83
        write_photo(root / "abc"[number % 3] / f"{number:03}.png", number, *size)
    write(root / "a" / "broken.png", b"no image")
    return root


def recipe(**codecs: str) -> Recipe:
    """A field for each codec; some may have another one than their name says."""
    ops = [{"op": "decode"}, {"op": "resize", "max_size": LONGEST}]
    fields = {name: {"ops": ops, "codec": codecs.get(name, name)} for name in CODECS}
    return Recipe.from_dict({"fields": fields})


build = functools.partial(building.build, recipe=recipe(), shard_samples=8)


Samples = dict[str, dict[str, np.ndarray]]
"""Key -> field -> row."""


def rows_of(store: Path | str) -> Samples:
    dataset = precache.CachedDataset(store)
    fields = precache.open(store).fields
    return {
        key: {name: dataset[number][name].numpy() for name in fields}
        for number, key in enumerate(dataset.keys)
    }


def expected(source: Path) -> Samples:
    shrink, rows = Resize(max_size=LONGEST), {}
    for path in sorted(source.rglob("[0-9]*.png")):
        row = shrink(np.asarray(Image.open(path)), None).transpose(2, 0, 1)
        rows[path.relative_to(source).as_posix()] = {
            **dict.fromkeys(CODECS, row),
            "jpeg": decode_jpeg(encode_jpeg(row, 90), row.shape),
            "raw420": rgb_of(planes_of(row), row.shape),
        }
    return rows


def assert_same(one: Samples, other: Samples) -> None:
    assert one.keys() == other.keys()
    for key, rows in one.items():
        assert rows.keys() == other[key].keys()
        for name, row in rows.items():
            np.testing.assert_array_equal(row, other[key][name], err_msg=f"{name} of {key}")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("ragged") / "photos")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("built") / "store"
    build(source, store)
    return store


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "store"))


def test_rows_are_the_images_with_shapes_of_their_own(source: Path, built: Path) -> None:
    rows, version = expected(source), precache.open(built)
    assert_same(rows_of(built), rows)
    assert len(version.hole_rows) == 1
    assert "uint8 of any shape" in str(precache.info(built))
    for codec in CODECS:
        assert version.fields[codec].ragged
        shapes = version.row_shapes(codec)
        assert {tuple(shapes[row]) for row in version.hole_rows} == {(0, 0, 0)}
        pixels = np.concatenate([row[codec].reshape(3, -1) for row in rows.values()], axis=1)
        assert version.mean[codec] == pytest.approx(pixels.mean(1), rel=1e-12)
        assert version.std[codec] == pytest.approx(pixels.std(1), rel=1e-9)
        assert version.fields[codec].raw_nbytes == pixels.size
        sizes: Any = zarr.open_array(Path(version.path) / f"{codec}.shape", mode="r")
        np.testing.assert_array_equal(sizes[:], shapes)
        stored: Any = zarr.open_array(Path(version.path) / codec, mode="r")
        for key, row, shape in zip(version.keys, stored[:], shapes, strict=True):
            if codec in ("raw", "zstd"):
                assert len(row) == shape.prod()
            elif codec == "raw420" and key in rows:
                assert bytes(row) == planes_of(rows[key]["raw"]).tobytes()


def test_a_row_takes_at_most_44_bytes_besides_its_values(built: Path) -> None:
    """Its head and CRC32C, its place in the shard and its shape, and what checks it."""
    version = precache.open(built)
    folders = [Path(version.path) / name for name in ("raw/c", "raw.shape/c", "_checks/c")]
    stored = sum(path.stat().st_size for at in folders for path in at.rglob("*") if path.is_file())
    assert stored - version.fields["raw"].raw_nbytes <= 44 * version.rows


def test_images_of_one_shape_stay_rows_of_one_shape(tmp_path: Path) -> None:
    for number in range(12):
        write_photo(tmp_path / "photos" / f"{number}.png", number, 20, 30)
    build(tmp_path / "photos", tmp_path / "plain", recipe=Recipe.image())
    build(tmp_path / "photos", tmp_path / "longest", recipe=Recipe.image(max_size=LONGEST))
    one, other = (precache.open(tmp_path / name) for name in ("plain", "longest"))
    assert (one.fields["image"].shape, one.fields["image"].ragged) == ((3, 20, 30), False)
    assert other.fields["image"].ragged
    assert "ragged" not in (Path(one.path) / "zarr.json").read_text()
    assert_same(rows_of(tmp_path / "plain"), rows_of(tmp_path / "longest"))


@pytest.mark.parametrize("codec", ["jpeg", "raw420"])
def test_rows_of_one_shape_that_lose_are_read_by_a_crop_too(
    codec: str, tmp_path: Path, run: Run
) -> None:
    source, store = write_photos(tmp_path / "photos", 6), tmp_path / "store"
    sized = ("--resize", "24x32", "--codec", codec, "--address", "serial")
    planned = run("plan", source, store, *sized)
    assert "(another codec with --crop stores rows of one shape)" in planned.err, planned
    build(source, store, recipe=Recipe.image(resize=(24, 32), codec=codec))  # type: ignore[arg-type]
    assert "uint8 (3, 24, 32), codec" in str(precache.info(store))
    rows, crop = rows_of(store), CenterCrop((24, 32))
    assert {row["image"].shape for row in rows.values()} == {(3, 24, 32)}
    with precache.Loader(store, 6, transform=crop, device="cpu") as loader:
        [batch] = loader
        for key, image in zip(loader.keys(batch["row"]), batch["image"], strict=True):
            np.testing.assert_array_equal(image, rows[key]["image"])


BOTH = {name: {"ops": [{"op": "decode", "mode": name}]} for name in ("RGB", "L")}


@pytest.mark.parametrize(
    ("made", "names"),
    [(Recipe.image(resize=24), "image"), (Recipe.from_dict({"fields": BOTH}), "RGB and L")],
)
def test_a_build_says_in_one_line_that_rows_keep_the_shapes_of_images_that_differ(
    made: Recipe, names: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(source, tmp_path / "store", recipe=made, progress=True)
    assert f"Rows of {names} keep the shapes of their images" in capsys.readouterr().err
    for name in made.fields:
        rows = [row[name] for row in rows_of(tmp_path / "store").values()]
        assert len({row.shape for row in rows}) > 5
        assert all(min(row.shape[1:]) == 24 for row in rows) or name != "image"


def test_rows_of_a_shard_follow_from_the_recipe_and_not_from_the_images(tmp_path: Path) -> None:
    counts = set()
    for name, size in (("small", 10), ("large", 100)):
        for number in range(12):
            write_photo(tmp_path / name / f"{number}.png", number, size, size + number)
        shrunk = Recipe.image(max_size=LONGEST)
        build(tmp_path / name, tmp_path / f"{name}.store", recipe=shrunk, shard_samples=None)
        attributes = precache.open(tmp_path / f"{name}.store").attributes
        assert attributes is not None
        counts.add(attributes.rows_per_shard)
    assert len(counts) == 1


def test_a_codec_that_halves_colours_says_that_it_loses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, run: Run
) -> None:
    source, store = write_photos(tmp_path / "photos", 10), tmp_path / "store"
    (source / "a/broken.png").unlink()
    options = ("--max-size", 60, "--codec", "raw420", "--address", "serial")
    assert LOSES.format(10) in run("plan", source, store, *options).out
    halved = Recipe.image(max_size=60, codec="raw420")
    build(source, store, recipe=halved)
    write_photos(source, 5, first=10)
    caplog.clear()
    build(source, store, recipe=halved)
    assert LOSES.format(5) in caplog.text
    assert "codec raw420 (lossy)" in str(precache.info(store))
    assert build(source, store, recipe=Recipe.image(max_size=60, codec="raw")).rows_reused == 0


# --- reuse --------------------------------------------------------------------------------------


def test_later_builds_reuse_rows_and_make_what_a_fresh_build_makes(
    source: Path, tmp_path: Path
) -> None:
    photos, store = Path(shutil.copytree(source, tmp_path / "photos")), tmp_path / "store"
    build(photos, store)
    before = open_version(store).id
    write_photos(photos, 11, first=30)
    (photos / "a/003.png").unlink()
    write_photo(photos / "b/004.png", 99, 31, 57)
    assert build(photos, store).rows_reused > 15
    assert_same(rows_of(store), expected(photos))
    assert "a/003.png" in str(precache.diff(f"{store}@{before}", str(store)))
    encoded_again = recipe(raw="image", image="raw", zstd="raw")
    assert build(photos, store, recipe=encoded_again).rows_reused > 30
    assert_same(rows_of(store), expected(photos))
    build(photos, tmp_path / "fresh", recipe=encoded_again)
    one, other = (precache.open(path) for path in (store, tmp_path / "fresh"))
    for codec in CODECS:
        assert one.mean[codec] == pytest.approx(other.mean[codec], rel=1e-12)
    precache.pull(store, tmp_path / "copy")
    assert_same(rows_of(tmp_path / "copy"), expected(photos))


def test_ops_that_are_added_go_on_from_stored_rows(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    build(source, store, recipe=Recipe.image(resize=24))
    cropped = Recipe.image(resize=24, crop=20)
    assert build(source, store, recipe=cropped).rows_reused > 20
    build(source, tmp_path / "fresh", recipe=cropped)
    assert_same(rows_of(store), rows_of(tmp_path / "fresh"))


def test_a_worker_process_and_a_build_that_was_ended_make_the_same_bytes(
    source: Path, built: Path, tmp_path: Path
) -> None:
    build(source, tmp_path / "local", address="local", cpus=1)
    for change in (14, 40):
        options = {"shard_samples": 8}
        killed = start(build_until, change, source, tmp_path / "killed", recipe(), options)
        assert end(killed) == -signal.SIGKILL
    assert build(source, tmp_path / "killed").shards_skipped > 0
    for store in ("local", "killed"):
        for codec in CODECS:
            leaves = precache.open(tmp_path / store).shard_leaves(codec)
            assert leaves == precache.open(built).shard_leaves(codec)


# --- damage -------------------------------------------------------------------------------------


def test_damage_is_named_by_key_and_repaired_by_the_build(store: Path, source: Path) -> None:
    folder = Path(precache.open(store).path)
    before = contents(folder)
    for codec in CODECS:
        flip(folder / codec / "c/1", 0.25, 32)
    found = [(each.shard, len(each.keys)) for each in precache.verify(store).damage]
    assert sorted(found) == [(f"{codec}/c/1", 1) for codec in sorted(CODECS)]
    for codec in CODECS:
        named = pytest.raises(DamageError, match=f"{codec}/c/1 is damaged at row")
        with named:
            list(precache.CachedDataset(store, fields=[codec]))
        crop = RandomResizedCrop(16, fields={codec: "bilinear"})
        with (
            named,
            precache.Loader(store, 4, transform=crop, fields=[codec], device="cpu") as loader,
        ):
            list(loader)
    build(source, store, verify=True)
    assert contents(folder) == before
    for codec in CODECS:
        lost, last = (folder / codec / "c" / number for number in "02")
        data = last.read_bytes()
        last.write_bytes(lost.read_bytes())
        lost.write_bytes(data)
        with pytest.raises(DamageError):
            list(precache.CachedDataset(store, fields=[codec]))
        last.write_bytes(data)
        lost.unlink()
    build(source, store)
    assert contents(folder) == before
    assert precache.verify(store).ok


def test_lost_shapes_are_damage_until_a_build_takes_them_from_the_spare_copy(
    store: Path, source: Path
) -> None:
    lost = Path(precache.open(store).path) / "image.shape/c/0/0"
    data = lost.read_bytes()
    lost.write_bytes(data[:-5] + b"12345")
    with pytest.raises(DamageError, match=r"image\.shape"):
        precache.CachedDataset(store)
    assert not precache.verify(store).ok
    build(source, store)
    assert lost.read_bytes() == data


# --- reading ------------------------------------------------------------------------------------


def test_a_data_loader_takes_rows_one_by_one_and_says_so_where_it_stacks(built: Path) -> None:
    dataset = precache.CachedDataset(built)
    several = dataset[[3, 4, 5]]
    assert [row.shape for row in several["image"]] == [dataset[n]["image"].shape for n in (3, 4, 5)]
    loader: Any = DataLoader(dataset, batch_size=4, collate_fn=list)
    assert sum(len(batch) for batch in loader) == len(dataset)
    for source in (dataset, ConcatDataset([dataset])):
        with pytest.raises(UsageError, match="collate_fn"):
            next(iter(DataLoader(source, batch_size=4)))

    class Cropped(precache.CachedDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index)["image"][:, :8, :8]

    batch = next(iter(DataLoader(Cropped(built), batch_size=4)))
    assert batch.shape == (4, 3, 8, 8)


def test_sizes_of_a_resize_are_one_of_two() -> None:
    with pytest.raises(RecipeError, match="either size or max_size"):
        Recipe.from_dict({"fields": {"image": {"ops": [{"op": "resize"}]}}})
    with pytest.raises(RecipeError, match="either size or max_size"):
        Resize(size=3, max_size=4)
