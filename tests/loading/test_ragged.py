"""Loaders of rows of many shapes: cropped while they are read, by the draws of dense rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import precache
from precache import Weighted
from precache.codecs import kernels
from precache.errors import DamageError, UsageError
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
from tests.support.building import encoded, write
from tests.support.forging import forge_head

OPTIONS: dict[str, Any] = {"device": "cpu", "seed": 3}


def build(root: Path, sizes: list[tuple[int, int]], recipe: Recipe) -> Path:
    for number, size in enumerate(sizes):
        data = encoded(Image.fromarray(photo(number, *size)), "PNG")
        write(root / "photos" / "abc"[number % 3] / f"{number:03}.png", data)
    store = root / f"{recipe.fields['image'].stored_as.name}{len(str(recipe))}.store"
    precache.build(
        root / "photos", store, recipe, address="serial", shard_samples=8, progress=False
    )
    return store


def batches(store: Path, transform: Any, epochs: int = 1, **options: Any) -> list[Any]:
    with precache.Loader(store, 8, transform=transform, **{**OPTIONS, **options}) as loader:
        return [batch for _ in range(epochs) for batch in loader]


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
    "options", [{}, {"shuffle": Weighted(np.arange(24.0))}, {"num_threads": 2}]
)
def test_crops_without_a_resize_are_those_of_dense_rows(
    steps: list[Any], options: dict[str, Any], alike: tuple[Path, Path]
) -> None:
    dense, ragged = (batches(store, Compose(steps), 2, **options) for store in alike)
    for one, other in zip(dense, ragged, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def test_labels_that_cannot_be_mixed_are_refused_before_the_first_batch(
    alike: tuple[Path, Path],
) -> None:
    for store in alike:
        with pytest.raises(UsageError, match="has the label 2, and MixUp takes 0 to 0"):
            precache.Loader(store, 4, device="cpu", transform=Compose([RandomCrop(32), MixUp(1)]))


@pytest.mark.parametrize(
    "transform",
    [
        RandomResizedCrop(24),
        Compose([RandomResizedCrop((24, 30), (0.3, 1)), HorizontalFlip()]),
        Compose([HorizontalFlip(), RandomResizedCrop(24)]),
    ],
    ids=["alone", "mirrored", "mirrored before"],
)
def test_resized_crops_have_the_boxes_of_dense_rows(
    transform: Any, alike: tuple[Path, Path]
) -> None:
    dense, ragged = (batches(store, transform, 2) for store in alike)
    for one, other in zip(dense, ragged, strict=True):
        # Dense rows are not antialiased.
        error = (one["image"].float() - other["image"].float()).abs()
        assert float(error.mean()) < 2.5


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
def test_rows_of_many_shapes_are_cropped_and_resized(codec: str, ragged: dict[str, Path]) -> None:
    with precache.Loader(ragged[codec], 8, transform=RandomResizedCrop(24), **OPTIONS) as loader:
        for epoch in range(2):
            for batch in loader:
                wanted = expected(ragged[codec], epoch, batch, 24)
                assert np.abs(batch["image"].numpy() - wanted).max() <= 0.6


def test_evaluation_resizes_and_takes_the_centre(ragged: dict[str, Path]) -> None:
    transform = Compose([Resize(32), CenterCrop(24)])
    [batch, *_] = batches(ragged["raw"], transform, shuffle=False)
    dataset = precache.CachedDataset(ragged["raw"])
    for row, image in zip(batch["row"].tolist(), batch["image"], strict=True):
        whole = {"image": dataset[row]["image"][None].double()}
        resized = Compose([Resize(32), CenterCrop(24)]).apply(
            whole, Draw((0,), 0, torch.zeros(1, dtype=torch.int64))
        )["image"][0]
        assert float((resized - image).abs().max()) <= 0.6


@pytest.mark.parametrize("codec", ["raw420", "image", "jpeg"])
def test_numpy_reads_what_compiled_code_reads(
    codec: str, ragged: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = Compose([RandomResizedCrop(24), HorizontalFlip()])
    compiled = batches(ragged[codec], transform)
    monkeypatch.setattr(kernels, "compiled", kernels.Compiled)
    for one, other in zip(compiled, batches(ragged[codec], transform), strict=True):
        torch.testing.assert_close(one["image"], other["image"], rtol=0, atol=0)


# --- positions, ranks, other ways of reading ----------------------------------------------------


def test_a_resumed_loop_and_ranks_go_on_with_the_same_crops(ragged: dict[str, Path]) -> None:
    transform = Compose([RandomResizedCrop(24), HorizontalFlip()])
    whole = batches(ragged["image"], transform, 2, drop_last=False)
    with precache.Loader(ragged["image"], 8, transform=transform, **OPTIONS) as loader:
        steps = iter(loader)
        for _ in range(3):
            next(steps)
        state = loader.state_dict()
    with precache.Loader(ragged["image"], 8, transform=transform, **OPTIONS) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    for one, other in zip(whole[3 : len(whole) // 2], rest, strict=True):
        assert torch.equal(one["image"], other["image"])
    by_row = {
        int(r): i
        for b in whole[: len(whole) // 2]
        for r, i in zip(b["row"], b["image"], strict=True)
    }
    for rank in range(2):
        for batch in batches(ragged["image"], transform, rank=rank, world_size=2):
            for row, image, again in zip(
                batch["row"], batch["image"], batch["repeated"], strict=True
            ):
                assert bool(again) or torch.equal(image, by_row[int(row)])


@pytest.mark.parametrize("options", [{"access": "pread"}, {"shuffle": "block"}])
def test_every_way_of_reading_gives_the_same_rows(
    options: dict[str, Any], ragged: dict[str, Path]
) -> None:
    usual = {
        int(r): i
        for b in batches(ragged["raw"], RandomResizedCrop(24))
        for r, i in zip(b["row"], b["image"], strict=True)
    }
    for batch in batches(ragged["raw"], RandomResizedCrop(24), **options):
        for row, image in zip(batch["row"], batch["image"], strict=True):
            assert torch.equal(image, usual[int(row)])


@pytest.mark.parametrize(
    ("codec", "place"),
    [("raw", 500), ("raw", 0), ("raw", 5), ("raw420", 500), ("raw420", 5), ("image", 500)],
)
def test_a_chunk_is_checked_once_and_damage_is_named(
    codec: str, place: int, ragged: dict[str, Path], tmp_path: Path
) -> None:
    store = Path(shutil.copytree(ragged[codec], tmp_path / "store"))
    shard = Path(precache.open(store).path) / "image/c/1"
    data = bytearray(shard.read_bytes())
    data[place] ^= 2
    shard.write_bytes(data)
    with pytest.raises(DamageError, match="image/c/1 is damaged at row"):
        batches(store, RandomResizedCrop(24))


@pytest.mark.parametrize("head", [b"\2", b"\1\0\0\0\1"], ids=["of two rows", "of another length"])
@pytest.mark.parametrize("codec", ["raw", "raw420"])
def test_a_chunk_with_the_head_of_other_rows_is_damage(
    codec: str, head: bytes, ragged: dict[str, Path], tmp_path: Path
) -> None:
    store = Path(shutil.copytree(ragged[codec], tmp_path / "store"))
    forge_head(Path(precache.open(store).path), "image", head)
    with pytest.raises(DamageError, match="image/c/0 is damaged at row"):
        batches(store, RandomResizedCrop(24))


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["tuple", "dict"])
@pytest.mark.parametrize(
    ("transform", "begins"),
    [
        (None, "CachedDataset"),
        (HorizontalFlip(), "begins with HorizontalFlip"),
        (Resize(32), r"begins with Resize\(32\)"),
        (RandomCrop(32, padding=2), "begins with RandomCrop"),
        (Compose([Normalize([1.0] * 3, [1.0] * 3), RandomCrop(32)]), "begins with Normalize"),
    ],
    ids=["none", "flip", "shorter side", "padding", "normalize"],
)
def test_rows_without_a_crop_are_refused_with_the_step_that_is_missing(
    transform: Any, begins: str, output: str, ragged: dict[str, Path]
) -> None:
    with pytest.raises(UsageError, match=f"transform=RandomResizedCrop\\(224\\).*{begins}"):
        precache.Loader(ragged["raw"], 8, transform=transform, output=output, **OPTIONS)


def test_crops_that_do_not_fit_an_image_are_refused(ragged: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=r"does not fit an image of .* put Resize\(88\)"):
        batches(ragged["raw"], RandomCrop(88))


def test_rows_of_many_shapes_are_not_held_in_memory(ragged: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="leave resident out"):
        batches(ragged["raw"], RandomResizedCrop(24), resident="host")


def test_a_second_resize_waits_for_the_batch(ragged: dict[str, Path]) -> None:
    transform = Compose([RandomResizedCrop(40), Resize(20)])
    assert batches(ragged["raw"], transform)[0]["image"].shape == (8, 3, 20, 20)


# --- other places, and other readers ------------------------------------------------------------


@pytest.mark.parametrize("codec", ["image", "jpeg"])
@pytest.mark.parametrize("cached", [True, False], ids=["disk cache", "ranges"])
def test_rows_of_a_bucket_are_those_of_the_disk(
    cached: bool, codec: str, ragged: dict[str, Path], tmp_path: Path
) -> None:
    store = f"memory://ragged-{tmp_path.name}"
    precache.push(ragged[codec], store)
    options = {"cache": tmp_path / "cache"} if cached else {}
    transform = Compose([RandomResizedCrop(24), HorizontalFlip()])
    usual = {
        int(row): image
        for batch in batches(ragged[codec], transform)
        for row, image in zip(batch["row"], batch["image"], strict=True)
    }
    for batch in batches(store, transform, **options):  # type: ignore[arg-type]
        for row, image in zip(batch["row"], batch["image"], strict=True):
            assert torch.equal(image, usual[int(row)])


def test_a_training_follows_a_build_of_rows_of_many_shapes(
    ragged: dict[str, Path], tmp_path: Path
) -> None:
    photos = ragged["raw"].parent / "photos"
    ops = [
        {"op": "decode"},
        {"op": "resize", "max_size": 90},
        {
            "op": "function",
            "function": "tests.support.building:linger",
            "params": {"seconds": 0.02},
        },
    ]
    version = precache.ensure(
        photos,
        tmp_path / "store",
        Recipe.from_dict({"fields": {"image": {"ops": ops}}}),
        follow=True,
        progress=False,
        address="serial",
        shard_samples=8,
    )
    with precache.Loader(version, 8, transform=RandomResizedCrop(24), **OPTIONS) as loader:
        seen = [int(row) for batch in loader for row in batch["row"]]
        later = list(loader)
    assert sorted({*seen}) == list(range(40))
    built = precache.CachedDataset(tmp_path / "store")
    assert {tuple(built[n]["image"].shape) for n in range(40)} == {
        tuple(row.shape) for row in precache.CachedDataset(ragged["raw"])[list(range(40))]["image"]
    }
    assert later


def test_the_viewer_shows_rows_in_their_own_shapes(ragged: dict[str, Path]) -> None:
    shown = Catalogue(str(ragged["image"])).read([3, 4])
    dataset = precache.CachedDataset(ragged["image"])
    for number, row in zip((3, 4), shown, strict=True):
        assert isinstance(row, dict)
        np.testing.assert_array_equal(row["image"], dataset[number]["image"].numpy())


# --- mixed --------------------------------------------------------------------------------------


def test_ragged_rows_are_mixed_as_those_that_their_loaders_crop(
    ragged: dict[str, Path], alike: tuple[Path, Path]
) -> None:
    """Of two codecs, and with rows of one shape."""
    stores = [ragged["raw"], ragged["image"], alike[0]]

    def loaders() -> list[precache.Loader]:
        crop = RandomResizedCrop(16)
        return [precache.Loader(store, 8, transform=crop, **OPTIONS) for store in stores]

    expected = {}
    for source, loader in enumerate(loaders()):
        with loader:
            for batch in loader:
                for row, image in zip(batch["row"].tolist(), batch["image"], strict=True):
                    expected[source, row] = image.clone()
    seen = set()
    with precache.mix(loaders(), until=5) as mixture:
        for batch in mixture:
            source = batch["source"]
            for row, image in zip(batch["row"], batch["image"], strict=True):
                seen.add((source, int(row)))
                assert torch.equal(image, expected[source, int(row)])
                assert image.shape == (3, 16, 16)
    assert {source for source, _ in seen} == {0, 1, 2}


def test_ragged_rows_without_a_crop_are_refused_before_they_are_mixed(
    ragged: dict[str, Path],
) -> None:
    with pytest.raises(UsageError, match="begin the transform with a crop"):
        precache.mix([precache.Loader(ragged["raw"], 8)])
