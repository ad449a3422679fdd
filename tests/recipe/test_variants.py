"""Several random variants of each sample: what is stored of them, and which an epoch reads."""

import itertools
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import precache
from precache import Reading
from precache.cli.main import main
from precache.errors import StoreError, UsageError
from precache.recipe.variants import variant_at
from precache_workers.ops.field_recipe import Common, FieldRecipe
from precache_workers.sources.base import Sample
from tests.support.building import build_here, contents, write, write_jpegs
from tests.support.counting import CALLS, COUNT
from tests.support.forging import put_root


def noisy(array: np.ndarray, amount: int, random: np.random.Generator) -> np.ndarray:
    """Written into its argument, which other variants must not see."""
    array ^= random.integers(0, amount, array.shape, np.uint8)
    return array


def brightness(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.array([random.random(), array.mean()], np.float32)


def recipe_of(variants: int = 3, first: int = 0, **more: Any) -> precache.Recipe:
    """Crops of 24 x 24 of resized photographs."""
    ops = [
        {"op": "decode"}, {"op": "resize", "size": [40, 48]}, COUNT,
        {"op": "random_resized_crop", "size": 24}, {"op": "horizontal_flip"},
    ]  # fmt: skip
    image = {"ops": ops, "variants": variants, "first_variant": first}
    return precache.Recipe.from_dict({"fields": {"image": image, **more}})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jpegs(tmp_path_factory.mktemp("variants") / "in", 12)


@pytest.fixture(scope="module")
def store(source: Path) -> Path:
    build_here(source, source.parent / "store", recipe_of())
    return source.parent / "store"


@pytest.fixture(scope="module")
def alone(source: Path) -> dict[int, np.ndarray]:
    """Variant -> its rows, as a recipe without others makes them."""
    found = {}
    for number in range(5):
        built = build_here(source, source.parent / f"alone{number}", recipe_of(1, number))
        found[number] = zarr.open_group(built.path, mode="r")["image"][:]
    return found


def rows_read(batches: Iterator[Any]) -> np.ndarray:
    """(rows, ...) of an epoch, by row number."""
    found = {}
    for batch in batches:
        found |= dict(zip(batch["row"].tolist(), batch["image"].numpy().copy(), strict=True))
    return np.stack([found[row] for row in sorted(found)])


def test_each_variant_is_what_it_would_be_alone(
    store: Path, alone: dict[int, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = precache.open(store)
    group = zarr.open_group(version.path, mode="r")
    for number in range(3):
        assert np.array_equal(group[f"image.{number}"][:], alone[number])
    assert len({each.tobytes() for each in alone.values()}) == 5
    field = version.fields["image"]
    assert (field.variants, field.first_variant, field.shape) == (3, 0, (3, 24, 24))
    assert list(version.fields) == ["image"]
    assert precache.verify(store).ok
    pixels = np.stack([alone[number] for number in range(3)]).astype(np.float64)
    assert np.allclose(version.mean["image"], pixels.mean((0, 1, 3, 4)))
    assert np.allclose(version.std["image"], pixels.std((0, 1, 3, 4)))
    assert main(["info", str(store)]) == 0
    assert "variants 0 to 2 of uint8 (3, 24, 24)" in capsys.readouterr().out
    precache.pull(store, tmp_path / "copy")
    assert contents(Path(precache.open(tmp_path / "copy").path)) == contents(Path(version.path))


def test_what_is_the_same_for_all_is_done_once(source: Path, tmp_path: Path) -> None:
    CALLS.clear()
    build_here(source, tmp_path / "store", recipe_of(4), {"shard_samples": 12})
    made = len(CALLS)
    CALLS.clear()
    build_here(source, tmp_path / "two", recipe_of(2), {"shard_samples": 12})
    assert made == len(CALLS) > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": "block"},
        {"reading": Reading(access="pread")},
        {"reading": Reading(resident="host")},
        {"reading": Reading(resident="device")},
        {"reading": Reading(num_threads=2), "batch_size": 5},
    ],
)
def test_epoch_e_reads_variant_e_modulo_k(
    store: Path, alone: dict[int, np.ndarray], options: dict[str, Any]
) -> None:
    with precache.Loader(store, **{"batch_size": 4, "device": "cpu", **options}) as loader:
        for epoch in range(5):
            assert np.array_equal(rows_read(iter(loader)), alone[epoch % 3])
        loader.set_epoch(11)
        assert np.array_equal(rows_read(iter(loader)), alone[2])


def test_iterators_of_two_epochs_run_side_by_side_and_a_state_goes_on(
    store: Path, alone: dict[int, np.ndarray]
) -> None:
    with precache.Loader(store, batch_size=4) as loader:
        one, other = iter(loader), iter(loader)
        first, second = [next(one)], [next(other)]
        assert np.array_equal(rows_read(iter([*first, *one])), alone[0])
        assert np.array_equal(rows_read(iter([*second, *other])), alone[1])
        loader.set_epoch(4)
        before = [next(iter(loader))]
        state = json.loads(json.dumps(loader.state_dict()))
    with precache.Loader(store, batch_size=4) as loader:
        loader.load_state_dict(state)
        assert np.array_equal(rows_read(iter([*before, *loader])), alone[1])


@pytest.mark.parametrize("cached", [True, False])
def test_from_a_bucket_only_the_variant_of_the_epoch_is_fetched(
    source: Path, tmp_path: Path, alone: dict[int, np.ndarray], cached: bool
) -> None:
    url = f"memory://variants{cached}/store"
    precache.build(source, url, recipe_of(), address="serial")
    options = {"cache": precache.Cache(tmp_path / "cache", 2_000_000)} if cached else {}
    with precache.Loader(url, batch_size=4, **options) as loader:
        objects = 0
        for epoch in range(4):
            assert np.array_equal(rows_read(iter(loader)), alone[epoch % 3])
            found = sorted((tmp_path / "cache").rglob("*image.*"))
            numbers = {path.name.split("image.")[1].split("-")[0] for path in found}
            assert numbers == (set(map(str, range(min(epoch + 1, 3)))) if cached else set())
            fetched = loader.stats().fetched
            if cached and fetched is not None:
                objects = objects or fetched.objects
                assert fetched.objects == (objects if epoch < 3 else 0)


def test_a_dataset_reads_one_variant_until_it_is_told_another(
    store: Path, alone: dict[int, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = precache.CachedDataset(store)
    [line] = caplog.messages
    assert "reads those of epoch 0 until set_epoch(epoch) chooses others: call it before" in line
    assert np.array_equal(np.stack([each["image"] for each in dataset]), alone[0])
    dataset = precache.CachedDataset(store, variant=1)
    assert [line] == caplog.messages
    assert np.array_equal(np.stack([each["image"] for each in dataset]), alone[1])
    dataset.set_epoch(3)
    assert np.array_equal(np.stack([each["image"] for each in dataset]), alone[0])
    dataset.set_epoch(5)
    copied = pickle.loads(pickle.dumps(dataset))
    batches = iter(DataLoader(copied, batch_size=5, collate_fn=copied.collate))
    assert np.array_equal(rows_read(batches), alone[2])


def test_workers_that_an_epoch_does_not_reach_are_said(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = precache.CachedDataset(store)
    for persistent in (False, True):
        loader = DataLoader(dataset, 5, num_workers=1, persistent_workers=persistent)
        list(loader)
        dataset.set_epoch(1)
        assert ("set_epoch(1) does not reach workers that run" in caplog.text) == persistent


def test_small_fields_have_variants_too(source: Path, tmp_path: Path) -> None:
    function = {
        "op": "function", "function": "tests.recipe.test_variants:brightness", "version": "1",
        "random": True, "dtype": "float32", "shape": [2],
    }  # fmt: skip
    drawn = {"ops": [{"op": "decode"}, function], "codec": "zstd", "variants": 2}
    build_here(source, tmp_path / "store", recipe_of(3, drawn=drawn))
    version = precache.open(tmp_path / "store")
    group = zarr.open_group(version.path, mode="r")
    assert {name: each.variants for name, each in version.fields.items()} == {
        "image": 3,
        "drawn": 2,
    }
    with precache.Loader(version.path, batch_size=12, shuffle=False) as loader:
        for epoch in range(7):
            [batch] = loader
            for name, several in (("image", 3), ("drawn", 2)):
                stored = group[f"{name}.{epoch % several}"][:]
                assert np.array_equal(batch[name].numpy(), stored)
    one, other = group["drawn.0"][:], group["drawn.1"][:]
    assert (one[:, 0] != other[:, 0]).all()
    assert np.array_equal(one[:, 1], other[:, 1])


# --- re-caching ---------------------------------------------------------------------------------


def test_more_variants_take_over_those_that_are_there(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    build_here(source, store, recipe_of(1))
    build_here(source, store, recipe_of(2))
    CALLS.clear()
    grown = build_here(source, store, recipe_of(4))
    assert grown.rows_reused == 0  # of each row some variant is new
    fresh = build_here(source, tmp_path / "other", recipe_of(4))
    assert contents(Path(grown.path)) == contents(Path(fresh.path))
    CALLS.clear()
    fewer = build_here(source, store, recipe_of(2, 1))
    assert (CALLS, fewer.rows_reused) == ([], 12)
    single = build_here(source, store, recipe_of(1, 3))
    assert (CALLS, single.rows_reused) == ([], 12)


def test_variants_begin_at_a_cached_base(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ops = recipe_of().to_dict()["fields"]["image"]["ops"][:3]
    build_here(source, store, precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}}))
    shutil.copytree(store, tmp_path / "other")
    CALLS.clear()
    built = build_here(source, store, recipe_of(3))
    assert (len(CALLS), built.rows_reused) == (12 + 8, 12)  # 12 are probed, 8 of them twice
    fresh = build_here(source, tmp_path / "other", recipe_of(3), {"recompute": True})
    assert contents(Path(built.path)) == contents(Path(fresh.path))


def test_a_plan_does_once_what_variants_have_in_common(source: Path, tmp_path: Path) -> None:
    base = precache.Recipe.from_dict(
        {"fields": {"image": {"ops": [{"op": "decode"}, {"op": "resize", "size": [40, 48]}]}}}
    )
    build_here(source, tmp_path / "s", base)
    CALLS.clear()
    found = precache.plan(source, tmp_path / "s", recipe_of(), address="serial")
    assert (found.rows_reused, found.rows_computed) == (12, 0)
    assert len(CALLS) == 12 + 8 + 8  # 12 are probed, 8 of them twice, and a shard of 8 is timed


def test_holes_are_holes_in_all_variants(source: Path, tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 6)
    write(tmp_path / "in/cat/broken.jpg", b"no photo")
    built = build_here(tmp_path / "in", tmp_path / "store", recipe_of())
    assert [key for key, _ in built.holes] == ["cat/broken.jpg"]
    [hole] = precache.open(tmp_path / "store").hole_rows
    group = zarr.open_group(built.path, mode="r")
    assert not any(group[f"image.{number}"][int(hole)].any() for number in range(3))
    assert precache.verify(tmp_path / "store").ok


# --- what is declared ---------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.integers(1, 50))
def test_epochs_read_all_variants_in_turn(epoch: int, first: int, variants: int) -> None:
    read = [variant_at(epoch + n, first, variants) for n in range(variants)]
    assert sorted(read) == list(range(first, first + variants))
    assert all(number % variants == (epoch + n) % variants for n, number in enumerate(read))


@given(st.integers(0, 1000), st.integers(1, 20), st.integers(1, 3))
def test_one_refresh_an_epoch_or_more_and_none_is_read_twice(
    first: int, variants: int, refreshes: int
) -> None:
    epochs = range(first, first + 4 * variants)
    read = [variant_at(e, first + n * refreshes, variants) for n, e in enumerate(epochs)]
    assert len(set(read)) == len(read)


def test_plain_data_of_a_recipe_has_its_variants() -> None:
    plain = precache.Recipe.image(resize=40, random_resized_crop=24, flip=True)
    assert plain.to_dict()["fields"]["image"]["variants"] == 1
    several = precache.Recipe.image(random_resized_crop=24, variants=4)
    assert precache.Recipe.from_dict(several.to_dict()) == several
    assert several.with_fresh_variants().to_dict()["fields"]["image"]["first_variant"] == 1
    assert plain.fingerprint({}) != several.fingerprint({})


# --- what is stored -----------------------------------------------------------------------------


def _forge(document: dict[str, Any], kind: str) -> None:
    fields = document["fields"]
    if kind == "gap":
        fields["image.7"] = fields.pop("image.2")
    elif kind == "shape":
        fields["image.1"]["dtype"] = "int8"
    elif kind == "both":
        fields["image"] = fields["image.0"]
    elif kind == "name":
        fields["image.x"] = fields["image.0"]


@pytest.mark.parametrize("kind", ["gap", "shape", "both", "name"])
def test_forged_variants_are_refused(store: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(store, tmp_path / "store")
    root = Path(precache.open(tmp_path / "store").path, "zarr.json")
    document = json.loads(root.read_text())
    _forge(document["attributes"]["precache"], kind)
    put_root(root.parent, document)
    with pytest.raises(StoreError, match="damaged or forged"):
        precache.open(tmp_path / "store")


def test_fields_are_named_without_their_variants(store: Path) -> None:
    with pytest.raises(UsageError, match=r"no field 'image\.0'; it has image, label"):
        precache.Loader(store, batch_size=4, fields=["image.0"])
    with precache.Loader(store, batch_size=4, fields=["image"]) as loader:
        assert set(next(iter(loader))) == {"image", "row"}


def test_an_object_is_linked_from_the_version_whose_it_is(tmp_path: Path) -> None:
    """The last shard has one row: flipped in variant 0, and in variant 1 what its base has."""
    source = write_jpegs(tmp_path / "in", 65, (24, 20))
    shards = {"shard_samples": 64}
    base = build_here(source, tmp_path / "store", flips(0, 0), shards)
    key = precache.open(base.path).keys[64]
    seed = next(n for n in itertools.count() if is_flipped(n, 0, key) > is_flipped(n, 1, key))
    build_here(source, tmp_path / "store", flips(1, seed), shards)
    made = build_here(source, tmp_path / "store", flips(2, seed), shards)
    right = build_here(source, tmp_path / "right", flips(2, seed), shards)
    for name in ("image.0", "image.1"):
        found, expected = (zarr.open_group(each.path, mode="r")[name][:] for each in (made, right))
        assert np.array_equal(found, expected)


def flips(variants: int, seed: int) -> precache.Recipe:
    """Resized, and flipped where there are variants."""
    ops = [{"op": "decode"}, {"op": "resize", "size": [16, 16]}]
    random = {"variants": variants} if variants else {}
    image = {"ops": [*ops, {"op": "horizontal_flip"}] if variants else ops, **random}
    return precache.Recipe.from_dict({"fields": {"image": image}, "seed": seed})


def is_flipped(seed: int, variant: int, key: str) -> bool:
    fields = flips(2, seed).by_array().fields
    name = f"image.{variant}"
    return bool(FieldRecipe(name, fields[name], seed)._random(key, 2).random() < 0.5)


@pytest.mark.parametrize("before", [[], [{"op": "resize", "size": [5, 5]}]])
def test_a_function_that_writes_into_its_argument_is_seen_by_no_other_variant(
    before: list[dict[str, Any]],
) -> None:
    op = {"op": "function", "function": "tests.recipe.test_variants:noisy", "version": "1"}
    ops = [*before, {**op, "params": {"amount": 200}, "random": True}]
    recipe = precache.Recipe.from_dict({"fields": {"x": {"ops": ops, "variants": 3}}})
    sample, common = Sample({"x": np.zeros((4, 4), np.uint8)}), Common()
    for name, field in recipe.by_array().fields.items():
        alone = FieldRecipe(name, field, 0)(Sample({"x": np.zeros((4, 4), np.uint8)}), "key")
        assert np.array_equal(FieldRecipe(name, field, 0, {}, common)(sample, "key"), alone)
