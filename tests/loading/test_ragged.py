"""Loaders of rows of many shapes: cropped while they are read, by the draws of dense rows."""

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import precache
from precache import Reading, Weighted
from precache.codecs import kernels
from precache.errors import DamageError, UsageError
from precache.reading.ragged_reader import RaggedReader
from precache.recipe.recipe import Recipe
from precache.transforms import (
    CenterCrop,
    Compose,
    Draw,
    HorizontalFlip,
    MixUp,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    View,
)
from precache.viewer.search import Catalogue
from tests.conftest import photo
from tests.support.building import encoded, flip, write
from tests.support.forging import forge_head, forge_shape, little_memory
from tests.support.loaders import assert_refused, opened

OPTIONS: dict[str, Any] = {"seed": 3}


def build(root: Path, sizes: list[tuple[int, int]], recipe: Recipe) -> Path:
    for number, size in enumerate(sizes):
        data = encoded(Image.fromarray(photo(number, *size)), "PNG")
        write(root / "photos" / "abc"[number % 3] / f"{number:03}.png", data)
    store = root / f"{recipe.fields['image'].stored_as.name}{len(str(recipe))}.store"
    options: dict[str, Any] = {"address": "serial", "shard_samples": 8, "progress": False}
    precache.build(root / "photos", store, recipe, **options)
    return store


def batches(store: Path | str, transform: Any, epochs: int = 1, **options: Any) -> list[Any]:
    with opened(store, 8, transform=transform, **{**OPTIONS, **options}) as loader:
        return [batch for _ in range(epochs) for batch in loader]


def by_row(read: list[Any]) -> dict[int, torch.Tensor]:
    pairs = [zip(batch["row"].tolist(), batch["image"].clone(), strict=True) for batch in read]
    return dict(pair for of_batch in pairs for pair in of_batch)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores of 40 photos of many shapes, by codec."""
    root = tmp_path_factory.mktemp("ragged")
    sizes = [(40 + 13 * n % 61, 37 + 7 * n % 83) for n in range(40)]
    codecs: tuple[Any, ...] = ("raw", "raw420", "image", "jpeg")
    return {c: build(root, sizes, Recipe.image(max_size=90, codec=c)) for c in codecs}


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same photos of one shape, as dense rows and as ragged ones."""
    root, sizes = tmp_path_factory.mktemp("alike"), [(50, 64)] * 24
    return build(root, sizes, Recipe.image()), build(root, sizes, Recipe.image(max_size=64))


# --- the same draws, and the same pixels --------------------------------------------------------


@pytest.mark.parametrize(
    "steps",
    [
        [RandomCrop(32), HorizontalFlip()],
        [HorizontalFlip(), RandomCrop((20, 40)), HorizontalFlip(), CenterCrop(16)],
        [CenterCrop(40), RandomCrop(33), Normalize([90.0] * 3, [60.0] * 3)],
        [Compose([RandomCrop(32), HorizontalFlip()]), MixUp(3)],
    ],
    ids=["crop", "mirrored before", "centre", "nested"],
)
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": Weighted(np.arange(24.0))}, {"reading": Reading(num_threads=2)}]
)
def test_crops_without_a_resize_are_those_of_dense_rows(
    steps: list[Any], options: dict[str, Any], alike: tuple[Path, Path]
) -> None:
    dense, ragged = (batches(store, Compose(steps), 2, **options) for store in alike)
    for one, other in zip(dense, ragged, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def expected(store: Path, epoch: int, batch: Any, size: int) -> np.ndarray:
    """Rows of a batch by `RandomResizedCrop(size)` alone, from a reader of whole rows."""
    dataset = precache.CachedDataset(store)
    draw = Draw((OPTIONS["seed"], epoch), 0, batch["row"])
    rows = [dataset[int(row)]["image"] for row in batch["row"]]
    crop, images = RandomResizedCrop(size), []
    sizes = torch.tensor([row.shape[1:] for row in rows], dtype=torch.float64)
    windows = crop.view(View.whole(sizes), draw).windows()
    for row, box in zip(rows, windows.boxes.astype(int).tolist(), strict=True):
        top, left, height, width = box
        part = row[None, :, top : top + height, left : left + width].double()
        mode = {"mode": "bilinear", "antialias": True}
        images.append(torch.nn.functional.interpolate(part, (size, size), **mode)[0].numpy())
    return np.stack(images)


@pytest.mark.parametrize("codec", ["raw", "raw420", "image", "jpeg"])
def test_rows_of_many_shapes_are_cropped_and_resized(
    codec: str, ragged: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, where they are not what all together should be, to the same pixels."""
    crop = RandomResizedCrop(24)
    for number, batch in enumerate(batches(ragged[codec], crop, 2)):
        wanted = expected(ragged[codec], number // 5, batch, 24)
        assert np.abs(batch["image"].numpy() - wanted).max() <= 0.6
    flipped = Compose([crop, HorizontalFlip()])
    compiled = batches(ragged[codec], flipped)
    monkeypatch.setattr(RaggedReader, "_crop_together", lambda *_: False)
    for one, other in zip(compiled, batches(ragged[codec], flipped), strict=True):
        torch.testing.assert_close(one["image"], other["image"], rtol=0, atol=0)
    monkeypatch.setattr(kernels, "compiled", kernels.Compiled)
    with pytest.raises(UsageError, match="need precache's compiled code, which is missing: with a"):
        batches(ragged[codec], flipped)


def test_evaluation_resizes_and_takes_the_centre(ragged: dict[str, Path]) -> None:
    transform = Compose([Resize(32), CenterCrop(24)])
    [batch, *_] = batches(ragged["raw"], transform, shuffle=False)
    dataset, draw = precache.CachedDataset(ragged["raw"]), Draw((0,), 0, torch.zeros(1).long())
    for row, image in zip(batch["row"].tolist(), batch["image"], strict=True):
        whole = {"image": dataset[row]["image"][None].double()}
        resized = transform.apply(whole, draw)["image"][0]
        assert float((resized - image).abs().max()) <= 0.6


# --- damage -------------------------------------------------------------------------------------


def _flipped(place: int) -> Callable[[Path], None]:
    return lambda version: flip(version / "image/c/1", place, 2)


def _headed(head: bytes) -> Callable[[Path], None]:
    return lambda version: forge_head(version, "image", head)


@pytest.mark.parametrize(
    ("codec", "harm", "shard"),
    [
        *((codec, _flipped(place), 1) for codec, place in
          (("raw", 500), ("raw", 0), ("raw", 5), ("raw420", 500), ("raw420", 5), ("image", 500))),
        # Of two rows, and of another length.
        *((codec, _headed(head), 0) for codec in ("raw", "raw420")
          for head in (b"\2", b"\1\0\0\0\1")),
    ],
)  # fmt: skip
def test_a_chunk_is_checked_and_damage_is_named(
    codec: str, harm: Callable[[Path], None], shard: int, ragged: dict[str, Path], tmp_path: Path
) -> None:
    store = Path(shutil.copytree(ragged[codec], tmp_path / "store"))
    harm(Path(precache.open(store).path))
    with pytest.raises(DamageError, match=f"image/c/{shard} is damaged at row"):
        batches(store, RandomResizedCrop(24))


@pytest.mark.parametrize("codec", ["raw", "raw420", "image", "jpeg"])
def test_a_forged_shape_is_damage_and_takes_no_memory(
    codec: str, ragged: dict[str, Path], tmp_path: Path
) -> None:
    store = Path(shutil.copytree(ragged[codec], tmp_path / "store"))
    for shape in ((3, 30_000, 30_000), (3, 0, 9), (1, 40, 37)):
        forge_shape(Path(precache.open(store).path), "image", 3, shape)
        with little_memory(), pytest.raises(DamageError, match="image/c/0 is damaged at row"):
            batches(store, RandomResizedCrop(24))


# --- refusals -----------------------------------------------------------------------------------


def test_rows_without_a_crop_are_refused_with_the_step_that_is_missing(
    ragged: dict[str, Path], alike: tuple[Path, Path]
) -> None:
    first: list[tuple[Any, str]] = [
        (None, "CachedDataset"),
        (HorizontalFlip(), "begins with HorizontalFlip"),
        (Resize(32), r"begins with Resize\(32\)"),
        (RandomCrop(32, padding=2), "begins with RandomCrop, whose padding"),
        (Compose([Normalize([1.0] * 3, [1.0] * 3), RandomCrop(32)]), "begins with Normalize"),
    ]
    for (transform, begins), output in itertools.product(first, ("tuple", "dict")):
        said = rf"transform=RandomResizedCrop\(224\).*{begins}"
        make = functools.partial(opened, transform=transform, output=output)
        assert_refused((said, make, ragged["raw"], 8))
    assert_refused(
        ("begin the transform with a crop", opened, ragged["raw"]),
        (r"does not fit an image of .* put Resize\(88\)", batches, ragged["raw"], RandomCrop(88)),
    )
    with pytest.raises(UsageError, match="leave resident out"):
        batches(ragged["raw"], RandomResizedCrop(24), reading=Reading(resident="host"))
    for store in alike:  # labels that cannot be mixed
        with pytest.raises(UsageError, match="has the label 2, and MixUp takes 0 to 0"):
            opened(store, transform=Compose([RandomCrop(32), MixUp(1)]))
    [batch, *_] = batches(ragged["raw"], Compose([RandomResizedCrop(40), Resize(20)]))
    assert batch["image"].shape == (8, 3, 20, 20)


# --- other places, and other readers ------------------------------------------------------------


@pytest.mark.parametrize("codec", ["image", "jpeg"])
def test_every_way_of_reading_gives_the_same_rows(
    codec: str, ragged: dict[str, Path], tmp_path: Path
) -> None:
    """Of a disk or a bucket, by map, range and disk cache, in any order; the viewer shows them."""
    store, far = ragged[codec], f"memory://ragged-{tmp_path.name}"
    precache.push(store, far)
    transform = Compose([RandomResizedCrop(24), HorizontalFlip()])
    usual = by_row(batches(store, transform))
    assert len(usual) == 40
    ways: list[tuple[Any, dict[str, Any]]] = [
        (store, {"reading": Reading(access="pread")}),
        (store, {"shuffle": "block"}), (far, {}),
        (far, {"cache": tmp_path / "cache"}),
    ]  # fmt: skip
    for uri, options in ways:
        rows = by_row(batches(uri, transform, **options))
        assert rows.keys() == usual.keys()
        assert all(torch.equal(image, usual[row]) for row, image in rows.items())
    dataset = precache.CachedDataset(store)
    for number, row in zip((3, 4), Catalogue(str(store)).read([3, 4]), strict=True):
        assert isinstance(row, dict)
        np.testing.assert_array_equal(row["image"], dataset[number]["image"].numpy())


# --- mixed --------------------------------------------------------------------------------------


def test_ragged_rows_are_mixed_as_those_that_their_loaders_crop(
    ragged: dict[str, Path], alike: tuple[Path, Path]
) -> None:
    """Of two codecs, and with rows of one shape."""
    crop, stores = RandomResizedCrop(16), [ragged["raw"], ragged["image"], alike[0]]
    expected = [by_row(batches(store, crop)) for store in stores]
    loaders, seen = [opened(store, 8, transform=crop, **OPTIONS) for store in stores], set()
    with precache.mix(loaders, until=5) as mixture:
        for batch in mixture:
            seen.add(batch["source"])
            for row, image in by_row([batch]).items():
                assert torch.equal(image, expected[batch["source"]][row])
                assert image.shape == (3, 16, 16)
    assert seen == {0, 1, 2}
