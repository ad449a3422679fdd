"""Labels that are numbers or several classes, from the build to the batches of a training run."""

import contextlib
import functools
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr

import precache
from precache import Reading
from precache.errors import DamageError, SourceError, StoreError, UsageError
from precache.viewer.search import Catalogue, Query
from precache_workers.sources.kinds import open_source
from tests.support import building
from tests.support.building import cut, encoded, pixels, write
from tests.support.forging import settle
from tests.support.source_contract import check_source

RECIPE = precache.Recipe.image(resize=40, crop=32)
NUMBERS = [0.5, None, -2.0, 0.001, 3.5, 4.0, 5.5, 6.0]
SEVERAL = [["cat", "dog"], [], ["ant"], ["dog"], ["cat"], ["ant"], ["cat"], ["dog"]]


def write_table(folder: Path, labels: list[Any]) -> str:
    """A table of photographs by number, each with its label."""
    for number in range(len(labels)):
        if not (folder / f"{number}.jpg").exists():
            write(folder / f"{number}.jpg", encoded(cut(number)))
    lines = [json.dumps({"path": f"{n}.jpg", "label": label}) for n, label in enumerate(labels)]
    write(folder / "list.jsonl", "\n".join(lines).encode())
    return str(folder / "list.jsonl")


build = functools.partial(building.build, recipe=RECIPE, shard_samples=4)


def by_key(store: Path) -> dict[str, Any]:
    version = precache.open(store)
    return dict(zip(version.keys, version.labels.tolist(), strict=True))


@pytest.fixture(scope="module", params=["numbers", "several"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def labels(kind: str) -> list[Any]:
    return list(NUMBERS if kind == "numbers" else SEVERAL)


@pytest.fixture(scope="module")
def built(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, beside the folder of its source."""
    root = tmp_path_factory.mktemp("kinds")
    build(write_table(root / "in", NUMBERS if kind == "numbers" else SEVERAL), root / "a.store")
    return root / "a.store"


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    """A copy of the store and of its source."""
    shutil.copytree(built.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "a.store"


def expected(number: int, kind: str) -> Any:
    if kind == "numbers":
        label = NUMBERS[number]
        return np.float32("nan" if label is None else label)
    return np.array([name in SEVERAL[number] for name in ("ant", "cat", "dog")], np.uint8)


def test_they_are_read_in_their_shape(
    built: Path, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = precache.open(built)
    with precache.Loader(built, batch_size=4, output="tuple", device="cpu", seed=1) as loader:
        batches = list(loader)
        rows = [loader.rows_of_batch(0, number) for number in range(2)]
    assert ("rows=~numpy.isnan(" in caplog.text) == (kind == "numbers")
    label = batches[0][1]
    assert label.dtype == (torch.float32 if kind == "numbers" else torch.uint8)
    assert tuple(label.shape) == ((4,) if kind == "numbers" else (4, 3))
    for (_, label), numbers in zip(batches, rows, strict=True):
        for got, row in zip(label.numpy(), numbers, strict=True):
            np.testing.assert_array_equal(got, expected(int(version.keys[row][0]), kind))
    array = zarr.open_group(version.path, mode="r")["label"]
    np.testing.assert_array_equal(array[:], version.labels)
    precache.pull(built, tmp_path / "here")
    np.testing.assert_array_equal(precache.open(tmp_path / "here").labels, version.labels)
    why = "labels of float32 " if kind == "numbers" else r"labels of uint8 \(3,\)"
    mixing = precache.transforms.MixUp(classes=3)
    with pytest.raises(UsageError, match=why + ".*MixUp takes a class number"):
        precache.Loader(built, batch_size=4, device="cpu", transform=mixing)


def test_the_viewer_shows_them(built: Path, kind: str) -> None:
    catalogue = Catalogue(str(built))
    row = list(precache.open(built).keys).index("0.jpg")
    assert catalogue.labels(row) == (["0.5"] if kind == "numbers" else ["cat", "dog"])
    [bare] = catalogue.find(Query(label="-1"), 0, 10).rows
    assert catalogue.key(bare) == "1.jpg"
    if kind == "numbers":
        assert catalogue.counts == []
        assert catalogue.find(Query(label="0.5"), 0, 10).rows == [row]
    else:
        assert catalogue.counts == [(0, "ant", 2), (1, "cat", 3), (2, "dog", 3)]
        rows = catalogue.find(Query(label="cat"), 0, 10).rows
        assert rows == precache.open(built).rows_of_classes("cat").tolist()
        assert len(rows) == 3


def test_kept_labels_of_many_classes_keep_no_images(tmp_path: Path) -> None:
    build(
        write_table(tmp_path / "in", [[number * 50] for number in range(8)]), tmp_path / "a.store"
    )
    with precache.Loader(
        tmp_path / "a.store", batch_size=1, device="cpu", reading=Reading(num_threads=1)
    ) as loader:
        kept = [(batch["label"], batch["image"].data_ptr()) for _ in range(4) for batch in loader]
    assert kept[0][0].shape == (1, 351)
    assert len({address for _, address in kept}) < len(kept) // 2


def test_the_build_and_the_plan_say_which_kind_they_are(
    tmp_path: Path,
    labels: list[Any],
    kind: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = write_table(tmp_path / "in", labels)
    build(source, tmp_path / "a.store", progress=True)
    assert _line(kind) in capfd.readouterr().err
    missing = "1 of 8 samples have no label (NaN), such as 1.jpg"
    assert (missing in caplog.text) == (kind == "numbers")
    precache.plan(source, tmp_path / "b.store", RECIPE, address="serial", progress=True)
    assert _line(kind) in capfd.readouterr().err
    assert precache.info(tmp_path / "a.store").labels == (
        "numbers" if kind == "numbers" else "multi-hot, 3 classes"
    )


def _line(kind: str) -> str:
    return "Labels are numbers" if kind == "numbers" else "Labels are multi-hot: several of 3"


def test_changed_labels_cost_no_photo(
    store: Path, tmp_path: Path, labels: list[Any], kind: str
) -> None:
    """Nor do labels of another kind; a removed sample leaves a hole without a label."""
    images = pixels(store)
    old = precache.open(store).id
    labels[3] = labels[0]
    source = write_table(tmp_path / "in", labels)
    plan = precache.plan(source, store, RECIPE, address="serial")
    assert plan.differences is not None
    assert plan.differences.source is not None
    assert plan.differences.source.relabelled.count == 1
    assert build(source, store).rows_reused == 8
    assert by_key(store)["3.jpg"] == by_key(store)["0.jpg"]
    np.testing.assert_equal(pixels(store), images)
    assert precache.diff(f"{store}@{old}", store).samples.relabelled.count == 1
    source = write_table(tmp_path / "in", SEVERAL if kind == "numbers" else NUMBERS)
    assert build(source, store).rows_reused == 8
    assert precache.open(store).labels.ndim == (2 if kind == "numbers" else 1)
    assert any(change.what == "labels" for change in precache.diff(f"{store}@{old}", store).layout)
    build(write_table(tmp_path / "in", labels[:-1]), store)
    version = precache.open(store)
    [row] = version.hole_rows.tolist()
    np.testing.assert_array_equal(
        version.labels[row], np.zeros(3) if version.labels.ndim == 2 else np.nan
    )
    assert precache.verify(store).ok


def test_lost_and_damaged_labels_are_found_and_mended(
    store: Path, tmp_path: Path, labels: list[Any]
) -> None:
    """Others of the same form, too."""
    source = write_table(tmp_path / "in", labels)
    build(source, store)  # of where the source lies now
    version = precache.open(store)
    good, folder = version.labels, Path(version.path)
    [chunk] = [path for path in (folder / "label/c").rglob("*") if path.is_file()]
    (folder / "zarr.json").unlink()  # a build that was cut off
    build(source, store)
    assert precache.verify(store).ok
    for damage in (b"", b"x" * 40, None):
        if damage is None:
            array: Any = zarr.open_group(version.path, mode="r+")["label"]
            array[:] = np.roll(good, 1, axis=0)
        else:
            chunk.write_bytes(damage)
        assert not precache.verify(store).ok
        build(source, store)
        np.testing.assert_array_equal(precache.open(store).labels, good)
        assert precache.verify(store).ok


@pytest.mark.parametrize(
    ("train", "given", "labels"),
    [
        (SEVERAL, [["dog"], ["cat", "dog"]], [[0, 0, 1], [0, 1, 1]]),
        (SEVERAL, [[2], [0, 1]], [[0, 0, 1], [1, 1, 0]]),
        ([[0], [4]], [[2], [0, 1]], [[0, 0, 1, 0, 0], [1, 1, 0, 0, 0]]),
        (SEVERAL, [["emu"], ["cat"]], "has classes that .* does not: emu"),
        (SEVERAL, [0.5, 1.5], "labels are numbers, and no classes; leave out"),
        ([0, 4], [[2], [0, 1]], "a store whose labels have no names of classes"),
    ],
)
def test_classes_of_another_store_number_several_classes(
    train: list[Any], given: list[Any], labels: Any, tmp_path: Path
) -> None:
    """Those of a store without names say how many there are."""
    build(write_table(tmp_path / "in", train), tmp_path / "train.store")
    source, store = write_table(tmp_path / "other", given), tmp_path / "val.store"
    refused = isinstance(labels, str)
    with pytest.raises(SourceError, match=labels) if refused else contextlib.nullcontext():
        build(source, store, classes=tmp_path / "train.store")
    assert refused or by_key(store) == {f"{n}.jpg": label for n, label in enumerate(labels)}


def test_a_labels_file_gives_classes_in_place_of_them(tmp_path: Path, labels: list[Any]) -> None:
    write(tmp_path / "labels.csv", "".join(f"{n}.jpg,c{n % 2}\n" for n in range(8)).encode())
    source = write_table(tmp_path / "in", labels)
    build(source, tmp_path / "a.store", labels=tmp_path / "labels.csv")
    assert by_key(tmp_path / "a.store") == {f"{n}.jpg": n % 2 for n in range(8)}


def test_a_plan_tells_another_kind_of_the_same_labels(tmp_path: Path) -> None:
    store = tmp_path / "a.store"
    build(write_table(tmp_path / "in", [1, 2]), store)
    plan = precache.plan(write_table(tmp_path / "in", [[1], [2]]), store, RECIPE, address="serial")
    assert plan.differences is not None
    assert plan.differences.any
    assert "labels: class numbers → multi-hot, 3 classes" in str(plan)


def test_numbers_that_are_nearly_the_same_differ(tmp_path: Path) -> None:
    store = tmp_path / "a.store"
    build(write_table(tmp_path / "in", [123456.71, 0.5]), store)
    old = precache.open(store).id
    build(write_table(tmp_path / "in", [123456.72, 0.5]), store)
    relabelled = precache.diff(f"{store}@{old}", store).samples.relabelled
    assert relabelled.examples == ("0.jpg: 123456.71 → 123456.72",)


def write_parquet(path: Path, labels: list[Any], kind: pa.DataType) -> str:
    images = [encoded(cut(number)) for number in range(len(labels))]
    pq.write_table(pa.table({"image": images, "label": pa.array(labels, kind)}), path)
    return str(path)


@pytest.mark.parametrize(
    ("of", "empty"), [(pa.string(), []), (pa.string(), None), (pa.int64(), [])], ids=str
)
def test_lists_that_are_all_empty_are_no_labels(
    tmp_path: Path, of: pa.DataType, empty: Any
) -> None:
    source = open_source(write_parquet(tmp_path / "a.parquet", [empty] * 3, pa.list_(of)))
    assert check_source(source).table.labels.tolist() == [-1, -1, -1]


def test_other_labels_than_those_of_a_single_parquet_file_are_found(tmp_path: Path) -> None:
    store = tmp_path / "a.store"
    build(write_parquet(tmp_path / "a.parquet", [0, 1, 2], pa.int64()), store)
    assert precache.verify(store).unchecked == ()
    version = precache.open(store)
    zarr.open_group(version.path, mode="r+")["label"][:] = np.roll(version.labels, 1)
    assert not precache.verify(store).ok


def test_forged_labels_are_refused(store: Path) -> None:
    for label in (
        {"shape": [3], "dtype": "int64"},
        {"shape": [], "dtype": "uint8"},
        {"shape": [2], "dtype": "float32"},
        {"shape": [1 << 40], "dtype": "uint8"},
        {"shape": [-3], "dtype": "uint8"},
    ):
        folder = next(store.glob("*/zarr.json")).parent
        forge_label(folder, label)
        with pytest.raises(StoreError, match="damaged or forged"):
            precache.open(store)
    forge_label(folder, {"shape": [2], "dtype": "uint8"})  # another than the array's
    version = precache.open(store)
    with pytest.raises((StoreError, DamageError), match="label/c/0/0"):
        version.labels  # noqa: B018


def forge_label(version: Path, label: dict[str, Any]) -> None:
    root = version / "zarr.json"
    document = json.loads(root.read_bytes())
    document["attributes"]["precache"]["label"] = label
    root.write_text(json.dumps(document))
    settle(version)


# --- datasets of a user -------------------------------------------------------------------------


class Photos:
    """A dataset; each test gives it the targets, the classes, or the label of all items."""

    targets: Any = None
    classes: Any = ()
    label: Any = None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[np.ndarray, Any]:
        label = self.targets[number] if self.label is None else self.label
        return np.full((32, 32, 3), number, np.uint8), label


DATASET = f"python:{__name__}:Photos"


@pytest.mark.parametrize(
    ("targets", "classes", "expected_labels"),
    [
        ([0.5, 1.5, float("nan")], (), [0.5, 1.5, float("nan")]),
        ([[0, 2], [], [1]], ("a", "b", "c"), [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
        (np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]]), (), [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
        ([["b"], ["a", "b"], []], (), [[0, 1], [1, 1], [0, 0]]),
        ([np.array([0, 2]), np.array([1]), []], (), [[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
        ([[np.int64(0)], [np.int64(1)], []], (), [[1, 0], [0, 1], [0, 0]]),
        ([[], [], []], (), [-1, -1, -1]),
        ([[], [], []], ("a", "b"), [[0, 0], [0, 0], [0, 0]]),
    ],
)
def test_targets_of_a_dataset_may_be_of_any_kind(
    monkeypatch: pytest.MonkeyPatch, targets: Any, classes: Any, expected_labels: list[Any]
) -> None:
    monkeypatch.setattr(Photos, "targets", targets)
    monkeypatch.setattr(Photos, "classes", classes)
    table = check_source(open_source(DATASET)).table
    by_number = dict(zip(table.keys, table.labels.tolist(), strict=True))
    np.testing.assert_array_equal([by_number[str(n)] for n in range(3)], expected_labels)


@pytest.mark.parametrize(
    ("targets", "label", "why"),
    [
        (np.array([2**63, 1, 2], np.uint64), None, r"targets are uint64 \(3,\); .* below 2\*\*63"),
        (5, None, r"targets are int64 \(\)"),
        (iter([1, 2, 3]), None, r"targets are object \(\)"),
        ([[1], ["a", "b"], []], None, "targets are several names and several numbers, such as"),
        (torch.ones(3, dtype=torch.complex64), None, "target of sample 0"),
        (None, 2**63, r"item 1 is the int 9223372036854775808, .* below 2\*\*63"),
        (None, 0.5, "Give the dataset an attribute `targets`"),
    ],
)
def test_targets_that_are_no_labels_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any, label: Any, why: str
) -> None:
    monkeypatch.setattr(Photos, "targets", targets)
    monkeypatch.setattr(Photos, "label", label)
    with pytest.raises(SourceError, match=why):
        build(DATASET, tmp_path / "a.store")


# --- while a version is built -------------------------------------------------------------------


@pytest.mark.heavy
def test_a_training_that_follows_a_build_gets_them(
    tmp_path: Path, labels: list[Any], kind: str
) -> None:
    version = precache.ensure(
        write_table(tmp_path / "in", labels),
        tmp_path / "a.store",
        RECIPE,
        address="serial",
        shard_samples=4,
        follow=True,
    )
    with precache.Loader(version, batch_size=4, device="cpu") as loader:
        for batch in itertools.chain(loader, loader):
            for key, label in zip(loader.keys(batch["row"]), batch["label"], strict=True):
                np.testing.assert_array_equal(label.numpy(), expected(int(key[0]), kind))
