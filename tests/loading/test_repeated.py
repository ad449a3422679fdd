"""Rows that fill up an epoch are marked, so that an evaluation counts each sample once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import precache
from precache.errors import PrecacheError, UsageError
from precache.transforms import Compose, HorizontalFlip, MixUp
from tests.conftest import BuiltStore
from tests.support.building import REPOSITORY


def _loader(store: BuiltStore, rank: int, world: int, size: int = 2, **options: Any) -> Any:
    return precache.Loader(store.path, size, device="cpu", rank=rank, world_size=world, **options)


def _marked(loader: Any) -> tuple[list[int], list[int]]:
    """The rows of an epoch that are a rank's own, and those that are repeated."""
    own: list[int] = []
    again: list[int] = []
    for batch in loader:
        assert batch["repeated"].dtype == torch.bool
        assert batch["repeated"].shape == batch["row"].shape
        for row, repeated in zip(batch["row"].tolist(), batch["repeated"].tolist(), strict=True):
            (again if repeated else own).append(row)
    return own, again


WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "in order": {"shuffle": False},
    "by key": {"shuffle": False, "order": "key"},
    "block": {"shuffle": "block", "shuffle_window": 2},
    "nodes": {"shuffle": "block", "num_canonical_nodes": 2},
    "resident": {"resident": "host"},
    "early transform": {"transform": HorizontalFlip()},
    "mixed": {"transform": Compose([HorizontalFlip(), MixUp(5)])},
    "late transform": {"transform": dict},
    "subset": {"rows": np.arange(23) % 4 < 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 4, 8])
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


@pytest.mark.parametrize(
    ("world", "options"), [(1, {}), (2, {"drop_last": True}), (1, {"drop_last": True})]
)
def test_there_is_no_mark_where_no_row_can_be_repeated(
    world: int, options: dict[str, Any], stores: dict[str, BuiltStore]
) -> None:
    with _loader(stores["raw"], 0, world, **options) as loader:
        assert all(batch.keys() == {"image", "label", "row"} for batch in loader)
        assert loader.stats().repeated == 0


def test_draws_by_weight_repeat_nothing(stores: dict[str, BuiltStore]) -> None:
    for rank in range(2):
        with _loader(stores["raw"], rank, 2, weights=np.arange(23)) as loader:
            own, again = _marked(loader)
            assert (len(own), again, loader.stats().repeated) == (11, [], 0)


def test_tuples_have_no_mark_and_transforms_see_it(stores: dict[str, BuiltStore]) -> None:
    seen = []

    def look(batch: Any) -> Any:
        seen.append(int(batch["repeated"].sum()))
        return batch

    with _loader(stores["raw"], 1, 2, output="tuple", transform=look) as loader:
        assert {len(batch) for batch in loader} == {2}
        assert sum(seen) == loader.stats().repeated == 1


@pytest.mark.parametrize("by", ["batch", "sample"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_mixtures_mark_what_fills_up_an_epoch_of_a_source(
    by: str, drop_last: bool, stores: dict[str, BuiltStore]
) -> None:
    marked = []
    for rank in range(2):
        loaders = [
            _loader(stores["raw"], rank, 2), _loader(stores["image"], rank, 2, drop_last=drop_last)
        ]  # fmt: skip
        with precache.mix(loaders, by=by, until="all") as mixture:
            _, again = _marked(mixture)
            assert mixture.stats().repeated == len(again)
            marked += again
    assert len(marked) == (1 if drop_last else 2)


def test_the_evaluation_of_the_guide_counts_each_sample_once(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (REPOSITORY / "docs/ddp.md").read_text("utf-8")
    [code] = re.findall(r"```python\n((?:(?!```).)*def count\(.*?)```", text, re.DOTALL)
    store, names = stores["raw"], {"torch": torch}
    exec(code[: code.index("counts = count(")], names)
    count: Callable[..., torch.Tensor] = names["count"]  # type: ignore[assignment]
    version = store.open()

    def guess(images: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0, 0.0]]).expand(len(images), 3)

    expected = [int((version.labels[version.valid] == 1).sum()), int(version.valid.sum())]
    for world in (1, 2, 4, 8):
        counts = torch.zeros(2, dtype=torch.long)
        for rank in range(world):
            with _loader(store, rank, world, shuffle=False) as loader:
                counts += count(guess, loader)
        assert counts.tolist() == expected


def test_the_names_of_marks_are_no_fields(stores: dict[str, BuiltStore]) -> None:
    with pytest.raises(PrecacheError, match="a field cannot be called 'repeated'"):
        precache.Recipe(fields={"repeated": precache.Recipe.image().fields["image"]})
    for name in ("row", "repeated"):
        with pytest.raises(UsageError, match=f"fields names an array '{name}'.*another name"):
            precache.Loader(stores["raw"].version_folder, 2, fields={name: "image"})
