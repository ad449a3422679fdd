"""Rows that fill up an epoch are marked, so that an evaluation counts each sample once."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import precache
from precache import Reading, Weighted
from precache.errors import PrecacheError, UsageError
from precache.transforms import Compose, HorizontalFlip, MixUp
from tests.conftest import BuiltStore
from tests.support.building import REPOSITORY
from tests.support.loaders import assert_refused, opened, rows_of


def _loader(store: BuiltStore, rank: int, world: int, size: int = 2, **options: Any) -> Any:
    return opened(store, size, rank=rank, world_size=world, **options)


def _marked(loader: Any) -> tuple[list[int], list[int]]:
    """The rows of an epoch that are a rank's own, and those that are repeated."""
    own, again = list[int](), list[int]()
    for batch in loader:
        assert batch["repeated"].dtype == torch.bool
        assert batch["repeated"].shape == batch["row"].shape
        own += batch["row"][~batch["repeated"]].tolist()
        again += batch["row"][batch["repeated"]].tolist()
    return own, again


WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "in order": {"shuffle": False},
    "block": {"shuffle": precache.Block(2)},
    "nodes": {"shuffle": precache.Block(nodes=2)},
    "resident": {"reading": Reading(resident="host")},
    "early transform": {"transform": HorizontalFlip()},
    "mixed": {"transform": Compose([HorizontalFlip(), MixUp(5)])},
    "late transform": {"transform": dict},
    "subset": {"rows": np.arange(23) % 4 < 3},
}


@pytest.mark.parametrize(
    ("way", "world"),
    [
        *zip(WAYS, itertools.cycle((2, 4, 8)), strict=False),
        ("full", 4),
        ("block", 8),
        ("subset", 8),
    ],
)
def test_what_is_not_marked_comes_once(way: str, world: int, stores: dict[str, BuiltStore]) -> None:
    store, options = stores["raw"], WAYS[way]
    right = store.open().valid & options.get("rows", True)
    ranks = []
    for rank in range(world):
        with _loader(store, rank, world, **options) as loader:
            ranks.append(_marked(loader))
            assert loader.stats().repeated == len(ranks[-1][1])
            assert loader.stats().repeated == 0
            middle = max(0, len(loader) - 2)
            loader.seek(1, middle)
            state = loader.state_dict()
            resumed = _marked(loader)
            loader.load_state_dict(state)
            assert _marked(loader) == resumed
    own = [row for rows, _ in ranks for row in rows]
    again = [row for _, rows in ranks for row in rows]
    assert sorted(own) == np.flatnonzero(right).tolist()
    assert len(again) == -int(right.sum()) % world
    assert set(again) <= set(own)


def test_there_is_no_mark_where_no_row_can_be_repeated(stores: dict[str, BuiltStore]) -> None:
    for world, options in ((1, {}), (2, {"drop_last": True})):
        with _loader(stores["raw"], 0, world, **options) as loader:
            assert all(batch.keys() == {"image", "label", "row"} for batch in loader)
            assert loader.stats().repeated == 0
        with _loader(stores["raw"], 0, world, output="tuple", **options) as loader:
            assert all(loader.repeated is None for _ in loader)
            mixture = precache.mix([loader])
            assert all(mixture.repeated is None for _ in mixture)
    with pytest.raises(PrecacheError, match="a field cannot be called 'repeated'"):
        precache.Recipe(fields={"repeated": precache.Recipe.image().fields["image"]})
    for name in ("row", "repeated"):
        with pytest.raises(UsageError, match=f"fields names an array '{name}'.*another name"):
            precache.Loader(stores["raw"].version_folder, 2, fields={name: "image"})


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("batch", [0, 2])
def test_of_draws_by_weight_those_that_fill_up_an_epoch_are_marked(
    batch: int, world: int, stores: dict[str, BuiltStore]
) -> None:
    """As in an epoch that one rank began, and several go on with; a row may be drawn often."""
    drawn = {"shuffle": Weighted(np.arange(23))}
    with _loader(stores["raw"], 0, 1, **drawn) as alone:
        rest = [row for rows in rows_of(alone)[batch:] for row in rows]
        alone.seek(0, batch)
        state = alone.state_dict()
    own, again = list[int](), list[int]()
    for rank in range(world):
        with _loader(stores["raw"], rank, world, **drawn) as loader:
            loader.load_state_dict(state)
            of_rank = _marked(loader)
            assert loader.stats().repeated == len(of_rank[1])
            own += of_rank[0]
            again += of_rank[1]
    assert sorted(own) == sorted(rest)
    assert len(again) == -len(rest) % world


def _labels_alone(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"image": batch["image"].float(), "label": batch["label"]}


def _labels_and_mark(batch: Any) -> Any:
    return {**_labels_alone(batch), "repeated": batch["repeated"]}


@pytest.mark.parametrize("way", [*WAYS, "own dict"])
def test_tuples_have_the_same_mark(way: str, stores: dict[str, BuiltStore]) -> None:
    options = WAYS.get(way) or {"transform": _labels_and_mark}
    for rank in (0, 3):
        dicts = _loader(stores["raw"], rank, 4, **{**options, "transform": None})
        with dicts, _loader(stores["raw"], rank, 4, output="tuple", **options) as tuples:
            for named, batch in zip(dicts, tuples, strict=True):
                assert type(batch) is tuple
                _, label = batch
                assert tuples.repeated.equal(named["repeated"])
                assert tuples.repeated.device == label.device
            assert tuples.stats().repeated == dicts.stats().repeated


def test_a_transform_that_drops_the_mark_is_named(
    stores: dict[str, BuiltStore], caplog: pytest.LogCaptureFixture
) -> None:
    cases = [(_labels_alone, 1), (list, 1), (_labels_and_mark, 0)]
    for output, (transform, lines) in itertools.product(("dict", "tuple"), cases):
        caplog.clear()
        with _loader(stores["raw"], 1, 2, transform=transform, output=output) as loader:
            for _ in range(2):
                assert len(list(loader)) == len(loader)
        said = [line for line in caplog.messages if "repeated" in line]
        assert len(said) == lines
        assert all("return batch['repeated'] as well" in line for line in said)


CHANGED: list[Callable[[Any], Any]] = [
    lambda batch: {"image": batch["image"].flip(0), "label": batch["label"].flip(0)},
    lambda batch: {"image": batch["image"][1:], "label": batch["label"][1:]},
]


@pytest.mark.parametrize("change", CHANGED, ids=["permuted", "filtered"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tuple_of_a_transform_without_the_mark_has_no_mark(
    change: Callable[[Any], Any], rank: int, stores: dict[str, BuiltStore]
) -> None:
    """The one that was passed in is of other rows."""

    def tuples(transform: Any) -> precache.Loader:
        return _loader(stores["raw"], rank, 2, output="tuple", transform=transform)

    def with_mark(batch: Any) -> Any:
        marks = {"image": batch["repeated"], "label": batch["label"]}
        return {**change(batch), "repeated": change(marks)["image"]}

    for batches in (tuples(change), precache.mix([tuples(change)])):
        with batches:
            assert all(batches.repeated is None for _ in batches)
    with tuples(with_mark) as kept, tuples(None) as plain:
        for _, known in zip(kept, plain, strict=True):
            marks = {"image": plain.repeated, "label": known[1]}
            assert kept.repeated.equal(change(marks)["image"])


def test_what_a_transform_returns_that_is_no_image_and_label(stores: dict[str, BuiltStore]) -> None:
    """It is handed out where it is no dict, and refused for a tuple where it is one."""
    others = (lambda batch: (batch["image"], batch["label"]), lambda batch: None)
    for world, transform in itertools.product((1, 2), others):
        make = functools.partial(_loader, stores["raw"], 0, world, transform=transform)
        with make(output="dict") as dicts, make(output="tuple") as tuples:
            for expected, batch in zip(dicts, tuples, strict=True):
                assert type(batch) is type(expected)
                assert expected is None or all(map(torch.equal, batch, expected))

    def renamed(batch: Any) -> Any:
        return {"x": batch["image"], "label": batch["label"]}

    why = r"a dict of x, label, without 'image': .*a tuple of your own, or use output='dict'"
    with _loader(stores["raw"], 0, 1, output="tuple", transform=renamed) as loader:
        assert_refused((why, next, iter(loader)))
    with _loader(stores["raw"], 0, 1, transform=renamed) as loader:
        assert set(next(iter(loader))) == {"x", "label"}


@pytest.mark.parametrize("output", ["dict", "tuple"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_mixtures_mark_what_fills_up_an_epoch_of_a_source(
    output: str, drop_last: bool, stores: dict[str, BuiltStore]
) -> None:
    marked = 0
    for rank in range(2):
        make = functools.partial(_loader, rank=rank, world=2, output=output)
        loaders = [make(stores["raw"]), make(stores["image"], drop_last=drop_last)]
        with precache.mix(loaders, until="all") as mixture:
            again = 0
            for batch in mixture:
                label = batch["label"] if output == "dict" else batch[1]
                marks = batch["repeated"] if output == "dict" else mixture.repeated
                assert marks.dtype == torch.bool
                assert marks.shape == label.shape
                assert len(batch) == 3 or output == "dict"
                again += int(marks.sum())
            assert mixture.stats().repeated == again
            marked += again
    assert marked == (1 if drop_last else 2)


def test_the_evaluation_of_the_guide_counts_each_sample_once(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (REPOSITORY / "docs/guides/ddp.md").read_text("utf-8")
    [code] = re.findall(r"```python\n((?:(?!```).)*def count\(.*?)```", text, re.DOTALL)
    [tuples] = re.findall(r"```python\n((?:(?!```).)*loader\.repeated.*?)```", text, re.DOTALL)
    store = stores["raw"]
    names: dict[str, Any] = {"torch": torch}
    exec(code[: code.index("counts = count(")] + tuples, names)
    counting = {"dict": names["count"], "tuple": names["count_tuples"]}
    version = store.open()

    def guess(images: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0, 0.0]]).expand(len(images), 3)

    expected = [int((version.labels[version.valid] == 1).sum()), int(version.valid.sum())]
    for output, world in itertools.product(counting, (1, 2, 4, 8)):
        counts = torch.zeros(2, dtype=torch.long)
        for rank in range(world):
            with _loader(store, rank, world, shuffle=False, output=output) as loader:
                counts += counting[output](guess, loader)
        assert counts.tolist() == expected
