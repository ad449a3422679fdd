"""Photos and masks of many shapes: moved by one draw while they are read, masks never blended."""

import copy
import functools
import os
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional
from torch.utils.data import Dataset

import precache
from precache import Reading
from precache.errors import RecipeError, UsageError
from precache.loading.gpu.device_slots import DeviceSlots
from precache.reading.version_reader import VersionReader
from precache.recipe.recipe import Recipe, ZstdCodec
from precache.recipe.resampling import resized_shape
from precache.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    Draw,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToDType,
    View,
    WindowSteps,
)
from tests.conftest import photo
from tests.support.building import encoded, write
from tests.support.device import unpacked
from tests.support.loaders import assert_refused, opened
from tests.support.pictures import oriented

SEED, COUNT = 5, 36
BOTH = {"image": "bilinear", "mask": "nearest"}
NAMES = tuple(BOTH)
OPTIONS: dict[str, Any] = {"device": "cpu", "seed": SEED}


_build = functools.partial(precache.build, address="serial", shard_samples=8, progress=False)


def mask_of(number: int, height: int, width: int) -> np.ndarray:
    """Classes 0 to 20 in areas and single pixels, and 255 for those that do not count."""
    random = np.random.default_rng(number)
    areas = np.kron(random.integers(0, 22, (8, 8)), np.ones((13, 16), int))[:height, :width]
    values = np.where(random.random(areas.shape) < 0.2, random.integers(0, 22, areas.shape), areas)
    return np.where(values == 21, 255, values).astype(np.uint8)


def put_pair(root: Path, number: int, size: tuple[int, int], exif: int = 1) -> None:
    image = Image.fromarray(photo(number, *size))
    options = {"exif": oriented(exif)} if exif != 1 else {}
    write(root / f"images/{number:02}.png", encoded(image, "PNG", **options))
    mask = Image.fromarray(mask_of(number, *size))
    write(root / f"masks/{number:02}.png", encoded(mask, "PNG"))


def recipe(
    resize: dict[str, Any] | None = None, of_mask: dict[str, Any] | None = None, **decode: str
) -> Recipe:
    """Fields `image`, and `mask` with the same resize or one of its own."""
    ops: list[Any] = [{"op": "decode", **decode}]
    of_masks: list[Any] = [{"op": "decode", "mode": "P"}]
    if resize:
        nearest = {"interpolation": "nearest"}
        ops.append({"op": "resize", **resize})
        of_masks.append({"op": "resize", **(of_mask or resize), **nearest})
    mask = {"input": "masks", "ops": of_masks}
    return Recipe.from_dict({"fields": {"image": {"ops": ops, "codec": "raw"}, "mask": mask}})


def build(root: Path, built: Recipe, name: str = "store") -> Path:
    _build(f"{root}/{{images,masks}}", root / name, built)
    return root / name


def batches(store: Path, transform: Any, **options: Any) -> list[Any]:
    with opened(store, 8, transform=transform, **{**OPTIONS, **options}) as loader:
        return list(loader)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    for number in range(COUNT):
        put_pair(root, number, (30 + 13 * number % 61, 27 + 7 * number % 83))
    return root


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    return build(folder, recipe())


# --- what a build stores --------------------------------------------------------------------------


@pytest.mark.parametrize("resize", [{}, {"max_size": 60}, {"size": 24}])
def test_masks_are_stored_with_the_shapes_of_their_images(
    resize: dict[str, int], folder: Path
) -> None:
    store = build(folder, recipe(resize), f"{''.join(resize)}.store")
    fields = precache.open(store).fields
    assert all(fields[name].ragged for name in BOTH)
    assert precache.open(store).recipe.fields["mask"].codec == ZstdCodec(level=3)
    dataset = precache.CachedDataset(store)
    for key, row in zip(dataset.keys, dataset, strict=True):
        whole = Image.open(folder / "masks" / key)
        height, width = row["image"].shape[1:]
        resized = nearest(np.asarray(whole), (height, width))
        np.testing.assert_array_equal(row["mask"], np.asarray(resized)[None])
    assert len({row["mask"].shape for row in dataset}) > 5


def test_masks_alone_are_rows_of_many_shapes(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_size": 50, "mode": "P", "interpolation": "nearest"}
    _build(folder / "masks", tmp_path / "store", Recipe.image(**options))
    [batch, *_] = batches(tmp_path / "store", RandomResizedCrop(16, fields={"image": "nearest"}))
    assert batch["image"].shape == (8, 1, 16, 16)
    assert {*batch["image"].unique().tolist()} <= {*range(21), 255}


@pytest.mark.parametrize("exif", [6, 8])
def test_photos_that_exif_turns_lie_on_their_masks(exif: int, tmp_path: Path) -> None:
    for number in range(8):
        put_pair(tmp_path, number, (30 + number, 50), exif)
    with pytest.raises(RecipeError, match='orientation = "stored"'):
        build(tmp_path, recipe())
    store = build(tmp_path, recipe(orientation="stored"))
    for row in precache.CachedDataset(store):
        assert row["image"].shape[1:] == row["mask"].shape[1:]
    assert not precache.open(store).holes
    for batch in batches(store, RandomResizedCrop(16, fields=BOTH)):
        assert batch["mask"].shape == (8, 1, 16, 16)


class Scenes(Dataset[dict[str, Any]]):
    """Pairs as Pillow opens them, of the folder that a variable names."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["PAIRS"])

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, mask = (
            Image.open(self._folder / f"{part}/{index:02}.png") for part in ("images", "masks")
        )
        return {"image": image, "masks": mask, "label": index % 3}


@pytest.mark.parametrize("kind", ["tar", "dataset"])
def test_parts_of_samples_are_pairs_as_those_of_folders(
    kind: str, folder: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Any = f"python:{__name__}:Scenes"
    monkeypatch.setenv("PAIRS", str(folder))
    fields = recipe().to_dict()["fields"]
    if kind == "tar":
        source, fields["mask"]["input"] = tmp_path / "pairs.tar", "masks.png"
        with tarfile.open(source, "w") as tar:
            for path in sorted(folder.glob("*s/*.png")):
                tar.add(path, f"{path.stem}.{path.parent.name}.png")
    built = Recipe.from_dict({"fields": fields})
    _build(source, tmp_path / "store", built)
    assert precache.open(tmp_path / "store").fields["mask"].ragged
    pairs = [
        {f"{row['image'].sum()} {row['mask'].sum()} {tuple(row['mask'].shape)}" for row in dataset}
        for dataset in map(precache.CachedDataset, (store, tmp_path / "store"))
    ]
    assert pairs[0] == pairs[1]


def test_a_mask_of_another_size_is_a_hole_with_its_reason(tmp_path: Path) -> None:
    def put_half_mask(number: int) -> None:
        mask = Image.fromarray(mask_of(number, 40, 50 + number))
        write(tmp_path / f"masks/{number:02}.png", encoded(mask, "PNG"))

    for number in range(12):
        put_pair(tmp_path, number, (80, 100 + 2 * number))
    put_half_mask(0)
    store = build(tmp_path, recipe())
    [(key, hole)] = precache.open(store).holes.values()
    assert key == "00.png"
    assert "its mask has not the size of its image: 50 x 40 px in mask, and 100 x 80" in hole.reason
    assert len(batches(store, RandomCrop(40, fields=NAMES))) == 2
    put_pair(tmp_path, 0, (80, 100))
    build(tmp_path, recipe())
    assert not precache.open(store).holes
    for number in range(1, 5):
        put_half_mask(number)
    with pytest.raises(RecipeError, match=r"as by size = \[224, 224\]"):
        build(tmp_path, recipe(), "other")
    build(tmp_path, recipe({"size": (32, 32)}), "other")  # the advice
    assert not precache.open(tmp_path / "other").holes


def test_stored_images_and_new_masks_of_other_sizes_are_holes(tmp_path: Path) -> None:
    """Rows of the images are taken as they are, and those of masks are made anew."""
    for number in range(40):
        put_pair(tmp_path, number, (30 + number, 90 if number == 7 else 40))
    store = build(tmp_path, recipe({"max_size": 100}))
    assert not precache.open(store).holes
    build(tmp_path, recipe({"max_size": 100}, {"max_size": 80}))
    assert {key for key, _ in precache.open(store).holes.values()} == {"07.png"}


# --- windows: every pixel, step by step -----------------------------------------------------------

STEPS: dict[str, Callable[[int, int], Any]] = {
    "RandomResizedCrop": lambda h, w: RandomResizedCrop((h, w), fields=BOTH),
    "wide": lambda h, w: RandomResizedCrop((h, w), (0.3, 1), (0.2, 5), fields=BOTH),
    "Resize": lambda h, w: Resize((h, w), fields=BOTH),
    "shorter": lambda h, w: Resize(min(h, w), fields=BOTH),
    "RandomCrop": lambda h, w: RandomCrop((h, w), fields=NAMES),
    "CenterCrop": lambda h, w: CenterCrop((h, w), fields=NAMES),
    "HorizontalFlip": lambda h, w: HorizontalFlip(fields=NAMES),
}

Part = tuple[int, int, int, int]


def part_of(step: Any, height: int, width: int, draw: Draw) -> Part:
    """Top, left, height and width of what a step shows."""
    if isinstance(step, RandomResizedCrop):
        top, left, high, wide = step.boxes(torch.tensor([height]), width, draw)[0].long().tolist()
        return top, left, high, wide
    if isinstance(step, RandomCrop):
        u = draw.uniform(2)[0]
        spare = [height - step.size[0] + 1, width - step.size[1] + 1]
        top, left = (u * torch.tensor(spare, dtype=torch.float32)).long().tolist()
        return top, left, *step.size
    if isinstance(step, CenterCrop):
        high, wide = step.size
        return round((height - high) / 2), round((width - wide) / 2), high, wide
    return 0, 0, height, width


def moved(mask: np.ndarray, steps: Sequence[Any], draw: Draw) -> np.ndarray:
    """A mask (H, W) after steps that are done one after another."""
    for number, step in enumerate(steps):
        own = draw.inside(number)
        top, left, high, wide = part_of(step, *mask.shape, own)
        mask = mask[top : top + high, left : left + wide]
        if isinstance(step, HorizontalFlip) and own.uniform(1) < step.p:
            mask = mask[:, ::-1]
        if isinstance(step, Resize | RandomResizedCrop):
            mask = nearest(mask, resized_shape(*mask.shape, step.size))
    return mask


def nearest(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    pixels = torch.from_numpy(mask.astype(np.float32))[None, None]
    resized: np.ndarray = functional.interpolate(pixels, size, mode="nearest")[0, 0].numpy()
    return resized.astype(mask.dtype)


@st.composite
def chains(draw: st.DrawFn) -> list[Any]:
    """Steps that bring all rows to one size, and resize once at most."""
    height, width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    flip = STEPS["HorizontalFlip"](0, 0)
    flips = [[flip] * draw(st.integers(0, 1)) for _ in range(3)]
    resize = draw(st.sampled_from(["RandomResizedCrop", "wide", "Resize", "shorter", ""]))
    crop = draw(st.sampled_from(["RandomCrop", "CenterCrop"]))
    first = [STEPS[resize](height + 4, width + 4)] if resize else []
    small = draw(st.integers(1, min(height, width)))
    second = [STEPS[crop](small, small)] if draw(st.booleans()) or resize in ("shorter", "") else []
    return [*flips[0], *first, *flips[1], *second, *flips[2]]


@settings(max_examples=40, deadline=None)
@given(chains(), st.integers(0, 3))
def test_masks_are_those_of_steps_one_by_one_and_images_are_read_as_alone(
    store: Path, steps: list[Any], epoch: int
) -> None:
    dataset = precache.CachedDataset(store)
    alone = [type(step)(step.size) if hasattr(step, "size") else HorizontalFlip() for step in steps]
    for step, own in zip(steps, alone, strict=True):
        if isinstance(step, RandomResizedCrop):
            own.scale, own.ratio = step.scale, step.ratio

    def first(transform: list[Any], **options: Any) -> Any:
        with opened(store, 8, transform=Compose(transform), **OPTIONS, **options) as loader:
            loader.set_epoch(epoch)
            return next(iter(loader))

    batch, other = first(steps), first(alone, fields=["image"])
    assert torch.equal(batch["image"], other["image"])
    for number in range(2):
        row = batch["row"][number : number + 1]
        whole = dataset[int(row)]["mask"][0].numpy()
        wanted = moved(whole, steps, Draw((SEED, epoch), 0, row))
        np.testing.assert_array_equal(batch["mask"][number, 0], wanted)


def test_depth_of_sixteen_bits_keeps_its_values(tmp_path: Path) -> None:
    for number in range(12):
        size = 30 + number, 70 - 2 * number
        depth = np.random.default_rng(number).integers(0, 1 << 16, size).astype(np.uint16)
        put_pair(tmp_path, number, size)
        write(tmp_path / f"depth/{number:02}.png", encoded(Image.fromarray(depth), "PNG"))
    fields = recipe().to_dict()["fields"]
    fields["depth"] = {"input": "depth", "ops": [{"op": "decode", "mode": "unchanged"}]}
    built = Recipe.from_dict({"fields": fields})
    _build(f"{tmp_path}/{{images,masks,depth}}", tmp_path / "store", built)
    scene = {**BOTH, "depth": "nearest"}
    chains: list[list[Any]] = [
        [RandomResizedCrop(12, fields=scene), HorizontalFlip(fields=scene)],
        [HorizontalFlip(fields=scene), RandomCrop((20, 12), fields=scene)],
    ]
    dataset = precache.CachedDataset(tmp_path / "store")
    for steps in chains:
        for batch in batches(tmp_path / "store", Compose(steps)):
            for number, row in enumerate(batch["row"]):
                draw = Draw((SEED, 0), 0, row[None])
                for name in ("mask", "depth"):
                    wanted = moved(dataset[int(row)][name][0].numpy(), steps, draw)
                    np.testing.assert_array_equal(batch[name][number, 0].numpy(), wanted)
    assert batch["depth"].dtype == torch.uint16
    with pytest.raises(UsageError, match=r"is uint16, .* give fields=\{'depth': 'nearest'\}"):
        batches(tmp_path / "store", RandomResizedCrop(12, fields={**scene, "depth": "bilinear"}))


# --- positions, ranks, and what follows -----------------------------------------------------------

MOVES = Compose([RandomResizedCrop(24, fields=BOTH), HorizontalFlip(fields=NAMES)])


def by_row(read: list[Any]) -> dict[int, torch.Tensor]:
    rows = {}
    for batch in read:
        scenes = torch.cat([batch["image"], batch["mask"]], 1)
        rows.update(zip(batch["row"].tolist(), scenes, strict=True))
    return rows


def test_a_resumed_loop_ranks_and_reads_by_range_move_pairs_alike(store: Path) -> None:
    whole = by_row(batches(store, MOVES))
    assert {*torch.stack([*whole.values()])[:, 3].unique().tolist()} == {*range(21), 255}
    with opened(store, 8, transform=MOVES, **OPTIONS) as loader, copy.copy(loader) as other:
        steps = iter(loader)
        seen = [next(steps), next(steps)]
        other.load_state_dict(loader.state_dict())
        seen += list(other)
    ranks = [b for r in range(2) for b in batches(store, MOVES, rank=r, world_size=2)]
    ranged = batches(store, MOVES, reading=Reading(access="pread", num_threads=2))
    for read in (seen, ranged, [b for b in ranks if not b["repeated"].any()]):
        rows = by_row(read)
        assert rows
        assert all(torch.equal(scene, whole[row]) for row, scene in rows.items())


def test_later_steps_see_pairs_of_one_shape(store: Path) -> None:
    """And may change one field alone."""
    colour, floats = ColorJitter(0.4, hue=0.1, fields=("image",)), ToDType(fields=("image",))
    resized, centre = Resize(12, fields=BOTH), CenterCrop(20, fields=("image",))
    steps = [*MOVES.steps, floats, colour, resized, Normalize([0.5] * 3, [0.2] * 3)]
    plain, changed, cropped = (
        batches(store, Compose(each)) for each in (MOVES.steps, steps, [*MOVES.steps, centre])
    )
    for before, batch, part in zip(plain, changed, cropped, strict=True):
        assert batch["image"].shape == (len(batch["row"]), 3, 12, 12)
        wanted = resized.apply(before, Draw((0,), 0, batch["row"]))
        assert torch.equal(batch["mask"], wanted["mask"])
        assert torch.equal(part["image"], before["image"][:, :, 2:22, 2:22])
        assert torch.equal(part["mask"], before["mask"])


def test_slots_of_a_device_hold_what_the_host_reads(folder: Path) -> None:
    """The filter of `image` was undone a second time there, on pixels that had been cropped."""
    store = build(folder, recipe({"size": 24}), "filtered.store")
    reader, rows = VersionReader(str(store)), np.arange(8)

    class Corner(WindowSteps):
        def __call__(self, sizes: np.ndarray, draw: Any) -> View:
            whole = View.whole(torch.from_numpy(sizes.astype(np.float64)))
            return whole.cropped(whole.corners, self.size, torch.tensor([self.size]).double())

    reader.crop(Corner([], (16, 16)))
    batch = unpacked(DeviceSlots(reader, 8, {}, ()), reader, rows)
    for name, values in reader.read_whole(rows).items():
        np.testing.assert_array_equal(batch[name], values)


# --- refusals -------------------------------------------------------------------------------------


BEHIND: list[tuple[Any, str]] = [
    (RandomResizedCrop(16), "fields={'image': 'bilinear', 'mask': 'nearest'}"),
    (RandomResizedCrop(16), "name fewer fields in fields= of the Loader"),
    (Compose([RandomResizedCrop(16, fields=BOTH), HorizontalFlip()]),
     "HorizontalFlip changes image alone, and mask would stay behind"),
    (RandomCrop(16, fields=("image",)), "fields=('image', 'mask')"),
    (None, "RandomResizedCrop(224, fields={'image': 'bilinear', 'mask': 'nearest'})"),
    (RandomCrop(16, padding=2, fields=NAMES), "begins with RandomCrop, whose padding"),
    (RandomResizedCrop(16, fields=dict.fromkeys(NAMES, "bilinear")),
     "give fields={'mask': 'nearest'}"),
    (RandomCrop(16, fields=(*NAMES, "depth")), "changes 'depth', and the batch has image"),
    (Compose([HorizontalFlip(), *MOVES.steps]),
     "HorizontalFlip would leave mask behind: give it fields=('image', 'mask')"),
]  # fmt: skip


def test_what_would_stay_behind_or_be_blended_is_refused(store: Path, folder: Path) -> None:
    for transform, advice in BEHIND:
        assert_refused((re.escape(advice), batches, store, transform))
    [batch, *_] = batches(store, RandomResizedCrop(16), fields=["image"])  # alone
    assert {*batch} == {"image", "row"}
    # Masks of one shape, beside ragged images.
    apart = build(folder, recipe({"max_size": 60}, {"size": (30, 30)}), "apart.store")
    for crop in (RandomResizedCrop(16), RandomResizedCrop(16, fields=BOTH)):
        said = "of mask one shape, so that RandomResizedCrop cannot"
        assert_refused((said, batches, apart, crop))
    [batch, *_] = batches(apart, RandomResizedCrop(16, fields={"image": "bilinear"}))
    assert batch["mask"].shape == (8, 1, 30, 30)


def halved(image: np.ndarray) -> np.ndarray:
    """Half of an image that is wide; others as they are."""
    return image[::2, ::2] if image.shape[1] > 60 else image


def test_images_of_one_scene_that_differ_in_size_are_named_when_a_loader_opens(
    tmp_path: Path, folder: Path
) -> None:
    """Left and right ones, which no rule of a build takes for one scene."""
    ops: list[Any] = [{"op": "decode"}]
    own = {"op": "function", "function": f"{__name__}:halved"}
    of_fields = {"left": ops, "right": [*ops, own], "same": ops}
    fields = {name: {"input": "images", "ops": ops} for name, ops in of_fields.items()}
    store = build(folder, Recipe.from_dict({"fields": fields}), "views.store")

    def read(*names: str) -> list[Any]:
        crop = RandomResizedCrop(16, fields=dict.fromkeys(names, "bilinear"))
        return batches(store, crop, fields=names)

    dataset = precache.CachedDataset(store)
    pairs = zip(dataset.keys, dataset, strict=True)
    wide = [key for key, row in pairs if row["left"].shape[2] > 60]  # type: ignore[index]
    said = f"differ in size in {len(wide)} of {COUNT} rows"
    with pytest.raises(UsageError, match=said) as caught:
        read("left", "right")
    assert any(f"of {key} they are" in str(caught.value) for key in wide)
    [batch, *_], [pair, *_] = read("left"), read("left", "same")
    assert torch.equal(pair["left"], pair["same"])
    assert torch.equal(pair["left"], batch["left"])
