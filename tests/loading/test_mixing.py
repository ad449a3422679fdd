"""`mix`: several loaders as one, the same on every rank, resumable from every step."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import precache
from precache import Reading
from tests.conftest import BuiltStore, write_photos
from tests.support.building import build_here, own_threads
from tests.support.loaders import assert_any_history, assert_refused, opened, valid_rows

Steps = list[tuple[Any, list[int]]]
"""Source and rows of each batch."""


@pytest.fixture
def pair(stores: dict[str, BuiltStore], tile_stores: dict[str, BuiltStore]) -> list[BuiltStore]:
    """Two stores whose rows differ in shape: 21 and 73 valid ones."""
    return [stores["raw"], tile_stores["raw"]]


@pytest.fixture
def alike(stores: dict[str, BuiltStore]) -> list[BuiltStore]:
    """Two stores whose rows have one shape."""
    return [stores["raw"], stores["image"]]


def _mix(
    pair: Iterable[BuiltStore],
    weights: list[float] | None = None,
    sizes: tuple[int, ...] = (4, 8),
    world: tuple[int, int] = (0, 1),
    options: dict[str, Any] | None = None,
    **how: Any,
) -> precache.Mixture:
    ranks = {"rank": world[0], "world_size": world[1], **(options or {})}
    loaders = [opened(s, n // world[1], **ranks) for s, n in zip(pair, sizes, strict=False)]
    return precache.mix(loaders, weights, **how)


def _steps(batches: Iterable[dict[str, Any]]) -> Steps:
    return [(batch["source"], batch["row"].tolist()) for batch in batches]


def test_by_default_every_row_of_every_store_comes_once(pair: list[BuiltStore]) -> None:
    pixels = [store.rows() for store in pair]
    with _mix(pair) as mixture:
        assert len(mixture) == 6 + 10
        named = f"<precache mixture, 16 batches: {', '.join(map(repr, mixture.loaders))}>"
        assert repr(mixture) == named
        for batch in mixture:
            expected = pixels[batch["source"]][batch["row"].numpy()]
            assert (batch["image"].numpy() == expected).all()
            assert mixture.loaders[batch["source"]].keys(batch["row"])
        stats = mixture.stats()
        assert (stats.batches, stats.samples) == (16, 21 + 73)
        assert 0 <= stats.stall_ratio <= 1
        assert stats.bytes > 21 * 112 * 112 * 3
        assert mixture.stats().batches == 0
        for _ in range(2):
            steps = _steps(mixture)
            for source, store in enumerate(pair):
                rows = [row for s, rows in steps if s == source for row in rows]
                assert sorted(rows) == valid_rows(store)
        order = [source for source, _ in steps]
        assert order != sorted(order)


def test_a_small_source_is_gone_through_again_in_new_orders(pair: list[BuiltStore]) -> None:
    with _mix(pair, [1, 1], seed=3) as mixture:
        assert mixture.counts == (10, 10)
        for _ in range(2):
            steps = _steps(mixture)
            small = [rows for source, rows in steps if source == 0]
            first, again = ([r for rows in part for r in rows] for part in (small[:6], small[6:]))
            assert sorted(first) == valid_rows(pair[0])
            assert set(again) < set(first)
            assert again != first[: len(again)]
            assert sorted(r for s, rows in steps if s == 1 for r in rows) == valid_rows(pair[1])


HOW: dict[str, dict[str, Any]] = {
    "one after another": {},
    "weighted": {"weights": [1, 1], "seed": 2},
    "to the first end": {"weights": [0.4, 0.6], "until": "first"},
    "so many steps": {"weights": [0.5, 0.5], "until": 7},
}


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_of_a_loop_reads_what_its_position_says(
    how: str, pair: list[BuiltStore], data: st.DataObject
) -> None:
    options: dict[str, Any] = {**HOW[how], "options": {"fields": ["label"]}}
    with _mix(pair, **options) as mixture:
        epochs = [_steps(mixture) for _ in range(8)]
    assert epochs[0] != epochs[1]
    assert_any_history(data, lambda: _mix(pair, **options), epochs.__getitem__, _steps)


def _gathered(ranks: list[Steps]) -> Steps:
    """Source, and rows of all ranks, by step."""
    found: Steps = []
    for parts in zip(*ranks, strict=True):
        [source] = {source for source, _ in parts}
        found.append((source, sorted(row for _, rows in parts for row in rows)))
    return found


@pytest.mark.parametrize("worlds", [(1, 4), (4, 2)])
def test_a_state_goes_on_with_another_number_of_ranks(
    worlds: tuple[int, int], alike: list[BuiltStore]
) -> None:
    how: dict[str, Any] = {"options": {"drop_last": True}, "weights": [0.5, 0.5]}
    with _mix(alike, **how) as mixture:
        whole = _gathered([_steps(mixture)])
    before, after = worlds
    taken, states = [], []
    for rank in range(before):
        with _mix(alike, world=(rank, before), **how) as mixture:
            assert len(mixture) == len(whole)
            taken.append(_steps(itertools.islice(mixture, 2)))
            states.append(mixture.state_dict())
    assert _gathered(taken) == whole[:2]
    assert all(state == states[0] for state in states)
    rest = []
    for rank in range(after):
        with _mix(alike, world=(rank, after), **how) as mixture:
            mixture.load_state_dict(states[0])
            rest.append(_steps(mixture))
    assert _gathered(rest) == whole[2:]


def test_tuples_tell_their_source_and_nothing_is_left_over(pair: list[BuiltStore]) -> None:
    with _mix(pair, options={"output": "tuple"}) as mixture:
        assert {(image.shape[-1], source) for image, _, source in mixture} == {(112, 0), (32, 1)}
    with _mix(pair, options={"reading": Reading(num_threads=2, prefetch_batches=4)}) as mixture:
        next(iter(mixture))
        assert mixture.state_dict()["batch"] == 1
        assert not own_threads()
        for number, _ in enumerate(mixture, 1):
            if number == 3:
                mixture.close()
        assert number == 3


def test_a_state_of_another_mixture_is_refused_by_name(pair: list[BuiltStore]) -> None:
    how: dict[str, Any] = {"weights": [0.4, 0.6]}
    others: list[tuple[str, dict[str, Any]]] = [
        ("weights", {"weights": [0.5, 0.5]}),
        ("until", {"until": "first"}),
        ("seed", {"seed": 1}),
        ("shuffle", {"options": {"shuffle": "block"}}),
        ("rows", {"options": {"rows": range(20)}}),
        ("global_batch", {"sizes": (4, 6)}),
    ]
    with _mix(pair, **how) as mixture:
        state = mixture.state_dict()
    for name, other in others:
        with _mix(pair, **{**how, **other}) as changed:
            said = f"the saved state has {name}=.* mixture has .*; "
            assert_refused((said, changed.load_state_dict, state))
    with _mix(pair) as mixture, _mix(pair[::-1], sizes=(8, 4)) as swapped, _mix(pair[:1]) as one:
        state = mixture.state_dict()
        with opened(pair[0]) as loader:
            of_loader = loader.state_dict()
        assert_refused(
            (r"has version=.* and source 0 of this mixture has", swapped.load_state_dict, state),
            ("has sources=2 and this mixture has 1", one.load_state_dict, state),
            ("saved state has until=None and this mixture has", mixture.load_state_dict, of_loader),
            ("at epoch 0, batch 99; an epoch has 16",
             mixture.load_state_dict, {**state, "batch": 99}),
        )  # fmt: skip


def test_a_source_of_a_mixture_has_no_position_of_its_own(pair: list[BuiltStore]) -> None:
    with _mix(pair) as mixture:
        source = mixture.loaders[1]
        said = r"source of a mixture.* call set_epoch, .* on that"
        for _ in range(2):
            assert_refused(
                (said, iter, source), (said, source.set_epoch, 3), (said, source.seek, 1, 0),
                (said, source.state_dict), (said, source.locate),
            )  # fmt: skip
            next(iter(mixture))
        mixture.set_epoch(3)
    with _mix(pair[:1]) as fresh, opened(pair[1], 8) as alone:
        state, loaders = alone.state_dict(), [*fresh.loaders, alone]
        alone.set_epoch(1)
        said = r"source 1 is at a position .* set_epoch, seek or"
        assert_refused((said, precache.mix, loaders))
        next(iter(alone))  # a look at a batch chooses nothing
        mixture = precache.mix(loaders)
        assert_refused(("source of a mixture", alone.load_state_dict, state))
        assert len(_steps(mixture)) == len(mixture)


def test_what_cannot_be_mixed_is_refused(pair: list[BuiltStore], alike: list[BuiltStore]) -> None:
    one, other = map(opened, pair)
    far = opened(pair[1], rank=1, world_size=2)
    follows, tuples = opened(pair[1], refresh="epoch"), opened(pair[1], output="tuple")
    both, texts = [one, other], ["a.store", "b.store"]
    of_ranks = "source 0 is for rank 0 of 1 on cpu, and source 1 for rank 1 of 2"
    of_output = "source 0 has output='dict', and source 1 has output='tuple'; give all the same"
    mix: Any = precache.mix
    assert_refused(
        ("there is no loader to mix", mix, []),
        ("a loader comes twice", mix, [one, one]),
        ("mix takes a list of Loaders, not <precache", mix, one),
        (r"mix takes a list of Loaders, not \['a.store', 'b.store'\]", mix, texts),
        (of_ranks, mix, [one, far]),
        ("source 1 has refresh='epoch'", mix, [one, follows]),
        (of_output, mix, [one, tuples]),
        ("until is 'end'; give all, first, or a number", lambda: mix(both, until="end")),
        ("until is 0", lambda: mix(both, until=0)),
        (r"weights is \[1, 1, 1\] for 2 loaders", mix, both, [1, 1, 1]),
    )
    transforms: list[tuple[Callable[[Any], Any], str]] = [
        (lambda batch: [batch["image"]], "transform of source . returns a list; return a dict or"),
        (lambda batch: {**batch, "source": 1}, r"source 0 have a field 'source'.*rename it"),
    ]
    for transform, said in transforms:
        with _mix(alike, options={"transform": transform}) as mixture:
            assert_refused((said, next, iter(mixture)))
    for loader in (one, other, far, follows, tuples):
        loader.close()


def test_class_numbers_that_mean_other_names_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In versions that are read at the same time, as those of a mixture."""
    names = {
        "one": "ant bee", "two": "bee cow", "three": "ant bee cow", "four": "ape bee cow",
        "five": "fox gnu",
    }  # fmt: skip
    for store, classes in names.items():
        write_photos(tmp_path / f"{store}.in", 10, (16, 16), classes=tuple(classes.split()))
        build_here(tmp_path / f"{store}.in", tmp_path / store, precache.Recipe.image())
    kept: list[Any] = [precache.CachedDataset(tmp_path / "one")]
    for name, first in (("three", ""), ("two", "bee"), ("two", ""), ("four", "ape")):
        caplog.clear()
        kept.append(opened(tmp_path / name, 2))
        found = [line for line in caplog.messages if f" in {tmp_path}/one/" in line]
        assert len(found) == bool(first)
        assert all(f"class 0 is '{first}' in {tmp_path}/{name}/" in line for line in found)
        assert all("'ant' in" in line and "--classes" in line for line in found)
    caplog.clear()
    kept.append(opened(tmp_path / "five", 2))
    [line] = caplog.messages
    assert f"class 0 is 'fox' in {tmp_path}/five/" in line
