"""Builds of boxes and keypoints: where the ops of their picture move them, and what is refused."""

import enum
import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import precache
from precache.errors import RecipeError, SampleError, UsageError
from precache.loading.gpu.device_slots import DeviceSlots
from precache.reading.version_reader import VersionReader
from precache.recipe.recipe import Recipe, draws_in_words
from precache.store.open import open_version
from precache.transforms import (
    PLACES,
    CenterCrop,
    Compose,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    View,
    WindowSteps,
)
from precache_workers.ops.kinds import value_of
from tests.support.device import unpacked

SOURCE = f"python:{__name__}:Scenes"
SCENES, NONE = 24, 2
"""Number of samples, and that of the one without a box."""

NEAREST = {"interpolation": "nearest"}
DECODE: dict[str, Any] = {"op": "decode", "orientation": "exif"}


class Placed(np.ndarray):
    """Entries that say their picture's size, as those of `torchvision.tv_tensors` do."""

    canvas_size = (40, 60)


BAD = {
    3: ("boxes", [[5, 5, 5, 9]], r"boxes\[0\] is \[5.0, 5.0, 5.0, 9.0\].*of x, y, width, height"),
    4: ("boxes", [[5, 5, float("nan"), 9]], r"boxes\[0\] is \[5.0, 5.0, nan, 9.0\]"),
    5: ("boxes", [[500, 5, 600, 9]], r"boxes\[0\] is .*, outside of its picture of \d+ x \d+ px"),
    6: ("boxes", [[1, 2, 3]], r"its boxes are \(1, 3\), and boxes are \(n, 4\)"),
    7: ("number", [0, 1], r"it has 2 number, and 1 boxes"),
    8: ("corners", [[[1], [2]]], r"its corners are \(1, 2, 1\), and keypoints"),
    9: ("corners", [[[0, float("inf")]] * 2], r"corners\[0\] is"),
    10: ("boxes", np.ones((1, 4)).view(Placed), r"its boxes are places in a picture of 60 x 40 px"),
}
"""Sample -> a part that is bad, and the reason."""


def upright(number: int) -> tuple[np.ndarray, list[int]]:
    """Return a black picture with a white box, and the box."""
    random = np.random.default_rng(number)
    height, width = random.integers(60, 120, 2).tolist()
    x1, y1 = int(random.integers(0, width - 25)), int(random.integers(0, height - 25))
    x2, y2 = int(random.integers(x1 + 20, width + 1)), int(random.integers(y1 + 20, height + 1))
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[y1:y2, x1:x2] = 255 * (number != NONE)
    return pixels, [x1, y1, x2, y2]


class Scenes:
    """Pictures with a box; every third one is turned by EXIF."""

    def __init__(self, bad: bool = False) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return SCENES

    def __getitem__(self, number: int) -> dict[str, Any]:
        pixels, (x1, y1, x2, y2) = upright(number)
        exif, buffer = Image.Exif(), io.BytesIO()
        if number % 3 == 0:
            exif[0x0112], pixels = 6, np.rot90(pixels)
        Image.fromarray(pixels).save(buffer, "PNG", exif=exif)
        sample: dict[str, Any] = {
            "image": buffer.getvalue(),
            "boxes": [[x1, y1, x2, y2]],
            "corners": [[[x1, y1, 1], [x2 - 1, y2 - 1, 2]]],
            "number": [number],
            "label": number % 2,
        }
        if self._bad and number in BAD:
            part, value, _ = BAD[number]
            sample[part] = value
        if number == NONE:
            sample |= {"boxes": [], "corners": [], "number": []}
        return sample


def bad_scenes() -> Scenes:
    return Scenes(bad=True)


class _Changed(Scenes):
    def __init__(self, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self._change = change

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = super().__getitem__(number)
        return sample | self._change(number, sample)


def fractions() -> Scenes:
    def divided(number: int, sample: dict[str, Any]) -> dict[str, Any]:
        rounded = [[0.1, 0.1, 1.0000001, 0.5]]
        boxes = (np.array(sample["boxes"]) / 200).tolist()
        return {"boxes": rounded if number == 8 else boxes}

    return _Changed(divided)


def fractional_corners() -> Scenes:
    def divided(number: int, sample: dict[str, Any]) -> dict[str, Any]:
        points = [[[x / 200, y / 200, 2], [0, 0, 0]] for (x, y, _), _ in sample["corners"]]
        return {"corners": [[[0, 0, 0]] * 2] if number == 8 else points}

    return _Changed(divided)


def some_fractions() -> Scenes:
    return _Changed(lambda number, _: {"boxes": [[0.2, 0.2, 0.9, 0.9]]} if number == 11 else {})


def reaching_outside() -> Scenes:
    def larger(number: int, sample: dict[str, Any]) -> dict[str, Any]:
        corners = [[[1, 1, 1], [150, 20, 1]]]
        return {"boxes": [[1, 1, 150, 20]], "corners": corners} if number == 8 else {}

    return _Changed(larger)


def brighter(pixels: np.ndarray) -> np.ndarray:
    return np.maximum(pixels, 1)


def above_99(numbers: np.ndarray) -> np.ndarray:
    return numbers + 100


def anywhere(boxes: np.ndarray, random: np.random.Generator) -> np.ndarray:
    corners = random.integers(0, 50, (len(boxes), 2))
    return np.concatenate([corners, corners + 8], axis=1)


ABOVE_99 = {"ops": [{"op": "function", "function": f"{__name__}:above_99"}]}


def recipe(
    *ops: dict[str, Any],
    decode: dict[str, Any] = DECODE,
    number: dict[str, Any] | None = None,
    **more: Any,
) -> Recipe:
    return Recipe.from_dict(
        {
            "fields": {
                "number": {"kind": "ragged", "of": "boxes", **(number or {})},
                "image": {"ops": [decode, *ops], **more},
                "boxes": {"kind": "boxes"},
                "corners": {"kind": "keypoints", "of": "boxes"},
            }
        }
    )


def build(store: Path, built: Recipe, source: str = SOURCE, **options: Any) -> Any:
    options = {"address": "serial", "shard_samples": 8, "progress": False, **options}
    return precache.build(source, store, built, max_failures=10, **options)


RECIPES = {
    "resized": recipe({"op": "resize", "size": 50, **NEAREST}, {"op": "center_crop", "size": 40}),
    "exactly": recipe({"op": "resize", "size": [90, 30], **NEAREST}, brighter_op := {
        "op": "function", "function": f"{__name__}:brighter", "moves": False,
    }),
    "shrunk": recipe({"op": "resize", "max_size": 70, **NEAREST}),
    "drawn": recipe(
        {"op": "horizontal_flip"},
        {"op": "random_resized_crop", "size": [48, 40], **NEAREST},
        {"op": "horizontal_flip"},
        number=ABOVE_99,
        variants=3,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=RECIPES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("boxes") / request.param
    build(path, RECIPES[request.param])
    return path


def require_under(box: np.ndarray, white: np.ndarray, *, mirrored: bool = False) -> bool:
    """Hold a box against white pixels (H, W), if any: `nearest` moves all edges right and down, by
    less than a pixel, and left where they are mirrored after that."""
    rows, columns = np.flatnonzero(white.any(1)), np.flatnonzero(white.any(0))
    if not len(rows):
        return False
    across, down = (np.array([n[0], n[-1] + 1]) for n in (columns, rows))
    moves = [[across - box[::2], down - box[1::2]], [box[::2] - across, down - box[1::2]]]
    least, most = np.min(moves, axis=(1, 2)), np.max(moves, axis=(1, 2))
    assert ((least > -0.01) & (most < 1))[: 1 + mirrored].any()
    return True


def test_boxes_lie_where_the_ops_move_the_pixels_under_them(store: Path) -> None:
    stored, declared = open_version(store).recipe, RECIPES[store.name]
    assert stored.to_dict() == declared.to_dict()
    assert [each.ops for each in stored.fields.values()] == [
        each.ops for each in declared.fields.values()
    ]
    assert "follow" not in str(stored.to_dict())
    seen, dropped = 0, 0
    for variant in range(stored.fields["image"].variants):
        dataset = precache.CachedDataset(store, variant=variant)
        for sample in (dataset[number] for number in range(len(dataset))):
            white = sample["image"].numpy()[0] > 99
            count = len(sample["boxes"])
            assert sample["number"].shape == (count,)
            assert (sample["number"] > 99).all() == (store.name == "drawn" or not count)
            assert sample["corners"].shape == (count, 2, 3)
            if not count:
                assert white.sum() <= white.shape[0]  # at most a line of pixels, by rounding
                dropped += 1
                continue
            x1, y1, x2, y2 = sample["boxes"].numpy()[0]
            if store.name == "shrunk":  # corners are the first and last pixels
                before = upright(int(sample["number"]))[0].shape[1::-1]
                scales, corners = np.array(white.shape[::-1]) / before, sample["corners"].numpy()[0]
                np.testing.assert_allclose(corners[0], [x1, y1, 1], atol=1e-4)
                np.testing.assert_allclose([x2, y2] - corners[1, :2], scales, atol=1e-4)
            box, mirrored = sample["boxes"].numpy()[0], store.name == "drawn"
            if require_under(box, white, mirrored=mirrored):
                seen += 1
            else:
                assert min(x2 - x1, y2 - y1) < 1
    assert seen > 2 * dropped
    assert dropped


def test_boxes_of_pictures_as_stored(tmp_path: Path) -> None:
    """With the orientation of the file, boxes are taken as drawn on its pixels."""
    build(tmp_path, recipe(decode={**DECODE, "orientation": "stored"}))
    dataset = precache.CachedDataset(tmp_path)
    boxes = {
        int(number): box.tolist()
        for sample in (dataset[n] for n in range(len(dataset)))
        for number, box in zip(sample["number"], sample["boxes"], strict=True)
    }
    assert boxes[1] == upright(1)[1]
    height, width = upright(3)[0].shape[1::-1]  # it lies on its side
    assert boxes[3] == np.minimum(upright(3)[1], [width, height, width, height]).tolist()


def test_bad_entries_make_a_hole_with_its_reason(tmp_path: Path) -> None:
    built = build(tmp_path, RECIPES["resized"], f"python:{__name__}:bad_scenes")
    assert built.failed == len(BAD)
    holes = {int(key): hole.reason for key, hole in open_version(tmp_path).holes.values()}
    assert holes.keys() == BAD.keys()
    for number, (_, _, reason) in BAD.items():
        assert re.search(reason, holes[number])


RESIZE: dict[str, Any] = {"op": "resize", "size": 50, **NEAREST}
OPEN = recipe(RESIZE, decode={"op": "decode"})
POINTS = Recipe.from_dict(
    {
        "fields": {
            "image": {"ops": [{"op": "decode"}]},
            "corners": {"kind": "keypoints", "of": "image"},
        }
    }
)


@pytest.mark.parametrize(
    ("built", "source", "message"),
    [
        (OPEN, "fractions", r"23 of 23 .* as fractions are: 0 has \[0\.\d+, .*: multiply x by the"),
        (OPEN, "Scenes", r"8 of \d+ samples .*EXIF turns.*: 0 has EXIF orientation 6\. State"),
        (
            POINTS, "fractional_corners",
            r"corners: 22 of 22 .* keypoints of 0 to 1, .* multiply x by the wid",
        ),
        (POINTS, "Scenes", r"corners: 8 of .*EXIF turns.* on which pixels keypoints were drawn"),
    ],
)  # fmt: skip
def test_places_of_two_readings_are_refused(
    built: Recipe, source: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        build(tmp_path, built, f"python:{__name__}:{source}")


def test_what_is_odd_about_boxes_is_said_and_entries_are_not_taken_for_those_that_belong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crop = {"op": "center_crop", "size": 40}
    odd = recipe(RESIZE, crop, number={"of": None})
    build(tmp_path / "said", odd, f"python:{__name__}:reaching_outside")
    tried = r"{}: 1 of \d+ samples tried have {} that reach outside .*: 8 has .* in \d+ x \d+ px"
    assert re.search(tried.format("boxes", "boxes"), caplog.text)
    assert re.search(tried.format("corners", "keypoints"), caplog.text)
    assert "number are as many as those of boxes" in caplog.text
    assert 'if entry i belongs to box i, state of = "boxes"' in caplog.text
    build(tmp_path / "some", RECIPES["resized"], f"python:{__name__}:some_fractions")
    fractions = r"boxes: 1 of \d+ samples tried have boxes of 0 to 1, as fractions are: 11 has"
    assert re.search(fractions, caplog.text)
    for of in (None, "boxes"):
        build(tmp_path / "store", recipe(crop, number={"of": of}))
    dataset = precache.CachedDataset(tmp_path / "store")
    for sample in (dataset[number] for number in range(len(dataset))):
        assert len(sample["number"]) == len(sample["boxes"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boxes": {"kind": "boxes", "of": "photo"}}, r"boxes belongs to 'photo'.*of = "),
        ({"boxes": {"kind": "boxes", "of": "boxes"}}, r"boxes of kind 'boxes' cannot belong to"),
        ({"number": {"kind": "ragged", "of": "image"}}, r"number of kind 'ragged' cannot belong"),
        ({"number": {"kind": "text", "of": "boxes"}}, r"number of kind 'text' cannot belong"),
        ({"boxes": {"kind": "boxes", "variants": 2}}, r"variants = 2, and image.* 3; leave it"),
        (
            {"image": {"ops": [DECODE, {**brighter_op, "moves": True}]}},
            r"brighter may move pixels of image, and .* would not follow: state moves = false",
        ),
        (
            {"image": {"ops": [{**DECODE, "scaled": True}, {"op": "resize", "size": 9}]}},
            r"decode has scaled, which rounds.*leave scaled out",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(changes: dict[str, Any], message: str) -> None:
    data = RECIPES["drawn"].as_stated()
    for field in data["fields"].values():
        field.pop("variants", None)
    data["fields"]["image"]["variants"] = 3
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict({"fields": {**data["fields"], **changes}})


@pytest.mark.parametrize(("form", "fits"), [("XYXY", True), ("XYWH", False), ("CXCYWH", False)])
def test_boxes_that_say_their_format_are_corners(form: str, fits: bool) -> None:
    """As those of `torchvision.tv_tensors`, whose format is an enum."""

    class BoundingBoxes(torch.Tensor):
        format = enum.Enum("BoundingBoxFormat", {form: form})[form]

    given = torch.tensor([[1.0, 2, 30, 40]])
    boxes = given.as_subclass(BoundingBoxes)
    if fits:
        assert np.array_equal(value_of("boxes", boxes), given)
        return
    with pytest.raises(SampleError, match=f"it is of format {form}: convert it to XYXY"):
        value_of("boxes", boxes)


def test_boxes_are_made_anew_if_their_picture_moves_otherwise(tmp_path: Path) -> None:
    stores, rows = [tmp_path / "store", tmp_path / "fresh"], []
    for size, store in ((40, stores[0]), (36, stores[0]), (36, stores[1])):
        cropped = recipe(RESIZE, {"op": "center_crop", "size": size})
        version = build(store, cropped).version
        dataset = precache.CachedDataset(store)
        rows.append(
            {
                str(dataset.keys[n]): {name: part.tolist() for name, part in dataset[n].items()}
                for n in range(len(dataset))
            }
        )
    assert build(store, cropped).version == version
    assert rows[1] == rows[2]
    boxes = [{key: sample["boxes"] for key, sample in each.items()} for each in rows]
    assert boxes[0] != boxes[1]


def test_what_belongs_to_boxes_that_draw_has_their_variants(tmp_path: Path) -> None:
    """Of each draw of the boxes, a crop keeps others, and what belongs to these."""
    draws = {"op": "function", "function": f"{__name__}:anywhere", "random": True}
    fields: dict[str, Any] = {
        "number": {"kind": "ragged", "of": "boxes"},
        "image": {"ops": [DECODE, {"op": "center_crop", "size": 40}]},
        "boxes": {"kind": "boxes", "ops": [draws], "variants": 4},
        "corners": {"kind": "keypoints", "of": "boxes"},
    }
    build(tmp_path, Recipe.from_dict({"fields": fields}))
    lengths = []
    with precache.Loader(tmp_path, SCENES, shuffle=False, device="cpu") as loader:
        for batch in itertools.chain(*(loader for _ in range(4))):
            lengths.append(batch["boxes.length"].tolist())
            for field in ("number", "corners"):
                assert batch[f"{field}.length"].tolist() == lengths[-1]
    assert len(lengths) == 4
    assert lengths[0] != lengths[1]
    fields["boxes"]["variants"] = 1
    frozen = draws_in_words(Recipe.from_dict({"fields": fields}))
    assert [line.partition(":")[0] for line in frozen] == ["boxes"]


@pytest.mark.parametrize("way", ["stated", "added"])
def test_boxes_have_the_variants_of_their_picture_whatever_a_store_had(
    way: str, tmp_path: Path
) -> None:
    drawn = recipe({"op": "random_resized_crop", "size": 40, **NEAREST}, variants=2).to_dict()
    picture = drawn["fields"]["image"]
    del picture["first_variant"]
    if way == "stated":
        build(tmp_path, recipe(*picture["ops"][1:], variants=2))
        picture["first_variant"] = 5
    else:
        build(tmp_path, Recipe.from_dict({"fields": {"image": picture}}))
        precache.refresh(tmp_path, run_functions=True, address="serial", progress=False)
    fields = {"image": picture, "boxes": {"kind": "boxes"}}
    build(tmp_path, Recipe.from_dict({"fields": fields}))
    first = {name: field.first_variant for name, field in precache.open(tmp_path).fields.items()}
    assert first == dict.fromkeys(("image", "boxes"), 5 if way == "stated" else 1)
    with precache.Loader(tmp_path, SCENES, shuffle=False, device="cpu") as loader:
        for batch in itertools.chain(loader, loader):
            for pixels, boxes, kept in zip(
                batch["image"], batch["boxes"], batch["boxes.length"], strict=True
            ):
                if kept:
                    require_under(boxes[0].numpy(), pixels[0].numpy() > 99)


# --- while they are read ------------------------------------------------------------------------


TRANSFORMS = {
    "resized crops": Compose([RandomResizedCrop(40, (0.3, 1)), HorizontalFlip()]),
    "flipped before": Compose([HorizontalFlip(), RandomResizedCrop((30, 44), (0.3, 1))]),
    "centre": Compose([Resize(50), CenterCrop(40), HorizontalFlip()]),
    "windows": Compose([RandomCrop(44), lambda batch: {**batch}, HorizontalFlip()]),
}


@pytest.fixture(scope="module", params=["dense", "ragged"])
def read_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"dense": {"size": [60, 70]}, "ragged": {"max_size": 90}}
    resize = {"op": "resize", "interpolation": "bilinear", **sizes[request.param]}
    path = tmp_path_factory.mktemp("read") / request.param
    build(path, recipe(resize, codec="raw"))
    return path


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_loader_moves_boxes_with_the_pixels_that_it_reads(read_store: Path, name: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "transform": TRANSFORMS[name]}
    seen, dropped = 0, 0
    with precache.Loader(read_store, 7, **options) as loader:
        for batch in (batch for _ in range(3) for batch in loader):
            assert set(batch) == {
                "image", "label", "row",
                *(n + end for n in ("boxes", "corners", "number") for end in ("", ".length")),
            }  # fmt: skip
            lengths = batch["boxes.length"]
            for part in ("corners", "number"):
                assert torch.equal(batch[f"{part}.length"], lengths)
                assert batch[part].shape[:2] == batch["boxes"].shape[:2]
            for pixels, boxes, length in zip(batch["image"], batch["boxes"], lengths, strict=True):
                white = pixels[0].numpy() > 127
                rows, columns = np.flatnonzero(white.any(1)), np.flatnonzero(white.any(0))
                if not length:
                    assert min(len(rows), len(columns)) <= 2
                    assert not boxes.any()
                    dropped += 1
                elif len(rows):
                    edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
                    assert np.abs(boxes[0].numpy() - edges).max() < 1.2  # pixels are blended
                    seen += 1
    assert seen > 2 * dropped > 0


@pytest.mark.parametrize("store", ["shrunk"], indirect=True)
def test_slots_of_a_device_tell_where_windows_lie(store: Path) -> None:
    reader, rows = VersionReader(str(store), ("image", "boxes")), np.arange(8)

    class Corner(WindowSteps):
        def __call__(self, sizes: np.ndarray, draw: Any) -> View:
            whole = View.whole(torch.from_numpy(sizes.astype(np.float64)))
            return whole.cropped(whole.corners + 3, self.size, torch.tensor([self.size]).double())

    reader.crop(Corner([], (30, 20), places=PLACES))
    batch = unpacked(DeviceSlots(reader, 8, {}, ()), reader, rows)
    assert batch[PLACES].tolist() == [[3, 3, 1, 1, 0, 0]] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": {"boxes": "list"}}, r"boxes follows image in padded rows alone: leave boxes"),
        ({"output": {"boxes": "jagged"}}, r"boxes follows image in padded rows alone: leave box"),
        ({"fields": ("image", "number")}, r"number belongs to boxes, .* Name boxes in fields="),
        ({"fields": ("image", "corners")}, r"corners belongs to boxes, .* Name boxes in fields="),
    ],
)
def test_what_cannot_follow_a_crop_is_refused(
    read_store: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        precache.Loader(read_store, 7, transform=TRANSFORMS["centre"], device="cpu", **options)


def test_boxes_do_not_stay_behind_where_their_picture_is_not_read(tmp_path: Path) -> None:
    ops = [DECODE, {"op": "resize", "size": [60, 70], "interpolation": "bilinear"}]
    fields = {"image": {"ops": ops}, "other": {"input": "image", "ops": ops}}
    build(
        tmp_path,
        Recipe.from_dict({"fields": {**fields, "boxes": {"kind": "boxes", "of": "image"}}}),
    )
    flip: dict[str, Any] = {"transform": HorizontalFlip(1, fields=("other",)), "device": "cpu"}
    message = "boxes lies in image, which is not read, and would stay behind where other moves"
    with pytest.raises(UsageError, match=message):
        precache.Loader(tmp_path, 7, fields=("other", "boxes"), **flip)
    with precache.Loader(tmp_path, 7, fields=("other", "label"), **flip) as loader:
        assert len([*loader]) == len(loader)
    flip["transform"] = HorizontalFlip(1, fields=("image", "other"))
    with precache.Loader(tmp_path, 7, **flip) as loader:
        for batch in loader:
            assert torch.equal(batch["image"], batch["other"])
            for pixels, boxes, length in zip(
                batch["image"], batch["boxes"], batch["boxes.length"], strict=True
            ):
                if length:
                    columns = np.flatnonzero((pixels[0].numpy() > 127).any(0))
                    assert np.abs(boxes[0, ::2].numpy() - columns[[0, -1]] - (0, 1)).max() < 1.2


def test_boxes_are_left_out_with_what_belongs_to_them(read_store: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "transform": TRANSFORMS["windows"], "seed": 5}
    images = []
    for fields in (("image", "label"), ("image", "boxes", "number"), None):
        with precache.Loader(read_store, 7, fields=fields, **options) as loader:
            images.append(torch.cat([batch["image"] for batch in loader]))
    assert torch.equal(images[0], images[1])
    assert torch.equal(images[0], images[2])
