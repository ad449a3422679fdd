"""Folders whose files pair up by name are columns of one sample."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import precache
from precache.errors import SourceError, UsageError
from precache_workers.sources.base import Sample
from precache_workers.sources.kinds import open_source
from tests.support.building import pixels, write
from tests.support.containers import in_bucket
from tests.support.layouts import Builds, commands_in
from tests.support.servers import S3Server
from tests.support.source_contract import check_source

RECIPE = """
[fields.image]
ops = [{ op = "decode" }, { op = "resize", size = [16, 16] }]

[fields.mask]
input = "masks"
ops = [{ op = "decode", mode = "P" }, { op = "resize", size = [16, 16], interpolation = "nearest" }]
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve photos of a grey each and their masks, one photo and one mask without a partner."""
    for number in range(12):
        photo(tmp_path / f"data/images/{number % 2}/{number}.jpg", 10 * number)
        photo(tmp_path / f"data/masks/{number % 2}/{number}.png", number)
    photo(tmp_path / "data/images/0/alone.jpg", 0)
    photo(tmp_path / "data/masks/1/spare.png", 0)
    return tmp_path / "data"


def photo(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((16, 16), value, np.uint8)).save(path)


def keys(source: Path | str, **options: str) -> Sequence[str]:
    return check_source(open_source(str(source), **options)).table.keys


def test_files_of_one_name_are_one_sample(data: Path, builds: Builds) -> None:
    write(builds.root / "recipe.toml", RECIPE.encode())
    flags = ["--recipe", "recipe.toml", "--address", "serial"]
    assert builds.run("build", "data/{images,masks}", "store", *flags) == 0
    for line in (
        "the 12 names that are in all of 'images', 'masks', as columns",
        "no input start from 'images'",
        "Files of 'images' without a partner",
        "which are no samples: 1, such as 1/spare.png",
    ):
        assert line in builds.printed
    for field, factor in (("image", 10), ("mask", 1)):
        rows = pixels(builds.root / "store", field)
        assert {*rows} == {f"{n % 2}/{n}.jpg" for n in range(12)}
        for key, row in rows.items():
            np.testing.assert_array_equal(row, factor * int(Path(key).stem))
    version = precache.open(builds.root / "store")
    assert version.classes == ("0", "1")  # folders of the first column


def test_folders_are_found_below_one(data: Path) -> None:
    write(data / "notes/readme.txt", b"no image")
    photo(data / ".cache/0/1.png", 0)
    source = open_source(str(data), kind="folders")
    assert str(source) == f"{data}/{{images,masks}}"
    assert len(check_source(source).table) == 12


def test_braces_may_be_in_the_middle(data: Path) -> None:
    assert keys(data / "{images,masks}/1") == [f"{n}.jpg" for n in (1, 11, 3, 5, 7, 9)]


NAMES: list[tuple[str, str, str | None]] = [
    ("17 18 28", "17_mask 18_mask 28_mask", "17 18 28"),
    ("0 10 20", "0_mask 1_mask 2_mask 10_mask 20_mask", "0 10 20"),
    ("IMG_105 IMG_205", "IMG_105_seg IMG_205_seg IMG_1_seg", "IMG_105 IMG_205"),
    ("1_10 2_10", "1_10_m 2_10_m", "1_10 2_10"),
    ("0001 0002", "0001x4 0002x4", "0001 0002"),
    ("a/left b/left", "a/right b/right", None),
    ("cat", "dog", None),
    ("1 2 3 x_1", "1_m 2_m 3_m x_1", None),
]
"""Names in two folders, and those that are compared without what all end in; None: refused."""


def in_folders(images: str, masks: str, paired: str | None) -> tuple[str, str, str | None, str]:
    folders = (("images", images), ("masks", masks))
    files = [f"{folder}/{name}.png" for folder, names in folders for name in names.split()]
    keys = paired and " ".join(f"{name}.png" for name in paired.split())
    return " ".join(files), "{images,masks}", keys, "images masks"


PATTERNS: list[tuple[str, str, str | None, str]] = [
    ("1.jpg 1_gt.png 2.jpg 2_gt.png", "{*.*,*_gt.*}", "1.jpg 2.jpg", "*.* *_gt.*"),
    ("1.jpg 1.png 2.jpg 2.png 3.jpg", "{*.jpg,*.png}", "1.jpg 2.jpg", "*.jpg *.png"),
    ("x1.png 1_m.png x2.png 2_m.png", "{x*.png,*_m.png}", "x1.png x2.png", "x*.png *_m.png"),
    (
        "a/a (1).png a/a (1)_mask.png a/a (1)_mask_1.png b/b (2).png b/b (2)_mask.png c.png",
        "**/{*.*,*_mask.*}",
        "a/a (1).png b/b (2).png",
        "*.* *_mask.*",
    ),
    (
        "img/ulm/u1_img.png gt/ulm/u1_gt_ids.png gt/ulm/u1_gt_color.png",
        "{img/**/*_img.*,gt/*/*_gt_ids.*}",
        "ulm/u1_img.png",
        "img gt",
    ),
]
"""Files, the source below their folder, the keys, and the columns."""


@pytest.mark.parametrize(
    ("files", "pattern", "expected", "columns"), [*(in_folders(*of) for of in NAMES), *PATTERNS]
)
def test_names_pair_by_what_stars_stand_for_or_without_what_all_end_in(
    tmp_path: Path, files: str, pattern: str, expected: str | None, columns: str
) -> None:
    names = re.compile(r"\S.*?\.\w+")
    for number, name in enumerate(names.findall(files)):
        photo(tmp_path / "in" / name, number)
    source = open_source(f"{tmp_path}/in/{pattern}")
    if expected is None:
        with pytest.raises(SourceError, match=r"names in .* are alike in all columns"):
            source.list(lambda count: None)
        return
    table = check_source(source).table
    assert sorted(table.keys) == sorted(names.findall(expected))
    for sample in source.fetch(table.keys, table.sizes.tolist(), table.locations):
        assert isinstance(sample, Sample)
        assert [*sample.inputs] == columns.split()
    assert table.locations is not None
    for key, place in zip(table.keys, table.locations.places.to_pylist(), strict=True):
        _, mask = place.values()
        assert "masks" not in columns or Path(mask["name"]).stem.startswith(Path(key).stem)


def test_patterns_in_this_folder_are_named_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("1.jpg", "1_gt.png"):
        photo(tmp_path / name, 1)
    monkeypatch.chdir(tmp_path)
    assert keys("{*.jpg,*_gt.png}") == ["1.jpg"]


def test_files_that_no_pattern_pairs_are_counted(builds: Builds) -> None:
    for name in ("1.png", "1_mask.png", "1_mask_1.png", "2.png", "2_mask.png", "3.png"):
        photo(builds.root / "in" / name, 1)
    assert builds.run("build", "in/{*.*,*_mask.*}", "store", "--address", "serial") == 0
    line = (
        "Files of '*.*' without a partner in each other pattern, which are no samples: 2, such as "
    )
    assert f"{line}1_mask_1.png" in builds.printed


def test_names_that_pair_but_for_several_endings_are_answered_with_the_patterns(
    builds: Builds,
) -> None:
    for number in range(4):
        town = "train/ulm/ulm" if number else "val/bonn/bonn"
        name = f"{town}_{number:06}_000019"
        photo(builds.root / f"cs/leftImg8bit/{name}_leftImg8bit.png", 10 * number)
        for value, end in enumerate(("color", "labelIds")):
            photo(builds.root / f"cs/gtFine/{name}_gtFine_{end}.png", value)
    for source in ("cs/{leftImg8bit,gtFine}/train", "cs"):
        choices = builds.choices(source)
        sources = [command[1] for command in commands_in(builds.printed) if "{" in command[1]]
        masks = ("gtFine_color", "gtFine_labelIds")
        photos = "cs/{leftImg8bit/train/**/*_leftImg8bit.*"
        assert sources == [f"{photos},gtFine/train/**/*_{mask}.*}}" for mask in masks]
        assert all(len(choice) == 3 for choice in choices)
    recipe = RECIPE.replace('"masks"', '"gtFine"')
    write(builds.root / "recipe.toml", recipe.encode())
    flags = ["--recipe", "recipe.toml", "--address", "serial"]
    assert builds.run("build", sources[1], "store", *flags) == 0, builds.printed
    assert {int(row.max()) for row in pixels(builds.root / "store", "mask").values()} == {1}


def test_two_files_of_one_name_are_no_sample(data: Path) -> None:
    photo(data / "masks/1/7.bmp", 0)
    listing = open_source(f"{data}/{{images,masks}}").list(lambda count: None)
    assert "1/7.jpg" not in listing.table.keys
    assert listing.left_out == {"same_key": 2}


def test_a_bucket_is_listed_alike(data: Path, s3: S3Server) -> None:
    in_bucket(data, "s3://bucket/data", s3.options())
    for uri, kind in (("s3://bucket/data/{images,masks}", None), ("s3://bucket/data", "folders")):
        listed = check_source(open_source(uri, s3.options(), kind=kind)).table
        assert [*listed.keys] == [*keys(data / "{images,masks}")]


@pytest.mark.parametrize(
    ("source", "kind", "error", "match"),
    [
        ("{images,mask}", None, SourceError, "mask does not exist; give a folder of images"),
        ("{train,val}", None, UsageError, r"names splits \('train', 'val'\)"),
        ("{images,images}", None, UsageError, "no two folders of images"),
        ("images/0", "folders", UsageError, "no folders of images"),
        ("{*/*/*.jpg,*/*/*.pgn}", None, SourceError, r"0 names in .* alike in all columns, of 0"),
        ("masks", "folders", SourceError, "0 names in .* are alike in all columns, of 6"),
    ],
)
def test_what_has_no_pairs_is_refused(
    data: Path, source: str, kind: str | None, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        open_source(f"{data}/{source}", kind=kind).list(lambda count: None)


def test_a_file_that_is_lost_or_too_large_is_named_with_its_column(data: Path) -> None:
    source = open_source(f"{data}/{{images,masks}}", most_bytes=1000)
    table = source.list(lambda count: None).table
    (data / "masks/0/2.png").unlink()
    write(data / "masks/0/4.png", bytes(2000))
    places = [table.keys.index(key) for key in ("0/2.jpg", "0/4.jpg")]
    kept = table.take(places)
    lost, large = source.fetch(kept.keys, kept.sizes.tolist(), kept.locations)
    assert "masks/0/2.png" in str(lost)
    assert "masks/0/4.png" in str(large)


def test_a_mask_that_cannot_be_decoded_or_lies_on_no_photo_is_named(
    data: Path, builds: Builds
) -> None:
    write(builds.root / "recipe.toml", RECIPE.encode())
    write(data / "masks/0/4.png", b"none")
    Image.fromarray(np.zeros((9, 16), np.uint8)).save(data / "masks/1/3.png")
    options = {"address": "serial", "max_failures": 2}
    result = precache.build(f"{data}/{{images,masks}}", "store", "recipe.toml", **options)
    reasons = dict(result.holes)
    assert reasons["0/4.jpg"].startswith("masks/0/4.png: not an image")
    assert "(images/1/3.jpg, masks/1/3.png): 16 x 9 px in mask" in reasons["1/3.jpg"]


def test_folders_of_one_column_that_change_places_are_read_again(
    data: Path, builds: Builds
) -> None:
    """Names, sizes and times of all files are equal, and photos have the latest ctimes."""
    for number in range(12):
        path = f"{number % 2}/{number}.png"
        photo(data.parent / "others" / path, 99)
        size = (data / "masks" / path).stat().st_size
        for folder in ("masks", "others"):
            file = data.parent / ("others" if folder == "others" else "data/masks") / path
            file.write_bytes(file.read_bytes().ljust(size + 99, b"\0"))
            os.utime(file, ns=(0, 0))
    photos = [*(data / "images").rglob("*.jpg")]
    for path in photos:
        path.chmod(0o600)
    write(builds.root / "recipe.toml", RECIPE.encode())
    source = f"{data}/{{images,masks}}"
    precache.build(source, "store", "recipe.toml", address="serial")
    (data / "masks").rename(data.parent / "first")
    (data.parent / "others").rename(data / "masks")
    precache.build(source, "store", "recipe.toml", address="serial")
    assert all((mask == 99).all() for mask in pixels(builds.root / "store", "mask").values())


def test_columns_that_no_field_reads_are_named(builds: Builds, data: Path) -> None:
    flags = ["--resize", "16x16", "--address", "serial"]
    assert builds.run("build", "data/{images,masks}", "store", *flags) == 0
    assert "No field reads 'masks' of the samples; to store 'masks', add a " in builds.printed
    assert 'input = "masks"' in builds.printed
    assert len(pixels(builds.root / "store")) == 12
