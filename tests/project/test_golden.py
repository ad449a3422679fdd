"""Orders of epochs, and rows and labels of stores, held against the digests in `tests/golden`.

``python -m tests.project.test_golden`` writes them anew, for a change that is meant to change them.
"""

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import precache
from precache.sampling.order import ChosenRows, Order, Shuffle, ValidRows, WeightSums
from tests.conftest import photo, write_photos
from tests.support import containers

GOLDEN = Path(__file__).parents[1] / "golden"
ORDERS, STORES = GOLDEN / "orders.json", GOLDEN / "stores.json"
CONFIGURATIONS = 2000


def digest(*values: object) -> str:
    """Return 16 hex digits over arrays and what has a repr."""
    hashed = hashlib.sha256()
    for value in values:
        array = isinstance(value, np.ndarray)
        hashed.update(value.tobytes() if array else repr(value).encode())  # type: ignore[attr-defined]
    return hashed.hexdigest()[:16]


# --- orders -------------------------------------------------------------------------------------


def order_of(number: int) -> tuple[Order, int, int]:
    """Draw an order, an epoch of it, and the position that it is read from."""
    draw = random.Random(number)
    rows = draw.choice([1, 2, 7, 50, 333, 1000, 4097])
    holes = np.array(sorted(draw.sample(range(rows), draw.choice([0, 0, rows // 5]))), np.int64)
    valid: ValidRows | ChosenRows = ValidRows(rows, holes)
    if draw.random() < 0.25:
        left = np.setdiff1d(np.arange(rows), holes)
        chosen = draw.sample(range(len(left)), draw.randint(1, len(left)))
        valid = ChosenRows(np.sort(left[chosen]))
    world_size = draw.choice([1, 1, 2, 3, 8])
    shuffle = draw.choice([None, Shuffle(), "block", "block"])
    nodes = draw.choice([1, 2, 4])
    if shuffle == "block":
        shuffle = Shuffle("block", draw.choice([1, 5, 64]), draw.choice([1, 3, 8]), nodes)
    weights = None
    if draw.random() < 0.15:
        by_row = np.zeros(rows)
        by_row[valid(np.arange(len(valid)))] = [
            draw.choice([0, 1, 1, 3]) for _ in range(len(valid))
        ]
        by_row[valid(np.array([len(valid) - 1]))] = 1
        weights = WeightSums(by_row, valid)
    order = Order(
        valid,
        draw.choice([1, 2, 5, 64]) * nodes,
        shuffle=shuffle,
        seed=draw.choice([0, 1, -5, 2**40]),
        drop_last=draw.random() < 0.3,
        weights=weights,
        rank=draw.randrange(world_size),
        world_size=world_size,
    )
    batches = order.batches()
    start = draw.choice([0, 0, batches // 2]) if batches else 0
    return order, draw.choice([0, 1, 17]), start * order.global_batch


def digests_of_orders() -> list[str]:
    digests = []
    for number in range(CONFIGURATIONS):
        order, epoch, start = order_of(number)
        batches = [np.asarray(rows, "<i8") for rows in order.epoch(epoch, start)]
        digests.append(digest([len(rows) for rows in batches], *batches))
    return digests


# --- stores -------------------------------------------------------------------------------------


class Items:
    """A map-style dataset of arrays, with targets."""

    targets: ClassVar = [(7 * number) % 3 for number in range(15)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return photo(index, 24, 20), self.targets[index]


def items() -> Items:
    """Return the dataset, as a factory does."""
    return Items()


def invert(array: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
    """Return the negative of an image."""
    return 255 - array


def folder(root: Path, suffix: str = ".png", **options: Any) -> str:
    return str(write_photos(root / "photos", 21, (40, 36), suffix=suffix, **options))


def archives(write: Callable[[Path, Path], str]) -> Callable[[Path], str]:
    def source(root: Path) -> str:
        packed = root / "packed"
        packed.mkdir()
        return write(Path(folder(root, ".jpg")), packed)

    return source


def several_labels(root: Path) -> str:
    files = sorted(Path(folder(root)).rglob("*.png"))
    lines = [
        {"file_name": path.relative_to(root).as_posix(), "label": [number % 4, 4 + number % 3]}
        for number, path in enumerate(files)
    ]
    table = root / "table.jsonl"
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(table)


def table(label: Callable[[int], object]) -> Callable[[Path], str]:
    def source(root: Path) -> str:
        files = sorted(Path(folder(root)).rglob("*.png"))
        lines = [f"{p.relative_to(root).as_posix()},{label(n)}" for n, p in enumerate(files)]
        (root / "table.csv").write_text("\n".join(["path,label", *lines]) + "\n")
        return str(root / "table.csv")

    return source


def dataset(root: Path) -> str:
    return "python:tests.project.test_golden:items"


image = precache.Recipe.image
NEGATIVE = {"op": "function", "function": "tests.project.test_golden:invert"}
FIELDS: Mapping[str, Any] = {
    "image": {"ops": [{"op": "decode"}, {"op": "resize", "size": 32}, NEGATIVE,
                      {"op": "center_crop", "size": 24}]},
    "small": {"ops": [{"op": "decode", "mode": "L"}, {"op": "resize", "size": [9, 7]}],
              "codec": "raw"},
}  # fmt: skip

CASES: Mapping[str, tuple[Callable[[Path], str], precache.Recipe, Mapping[str, Any]]] = {
    "raw": (folder, image(codec="raw"), {}),
    "zstd": (folder, image(codec="zstd"), {}),
    "image": (folder, image(codec="image"), {}),
    "holes": (lambda root: folder(root, broken=2), image(), {}),
    "flat": (lambda root: folder(root, classes=()), image(), {}),
    "ordered": (folder, image(), {"keep_order": True}),
    "jpeg": (lambda root: folder(root, ".jpg"), image(resize=32, crop=24), {}),
    "bicubic": (folder, image(resize=30, crop=28, interpolation="bicubic"), {}),
    "grey": (folder, image(resize=(24, 20), mode="L"), {}),
    "alpha": (folder, image(crop=30, mode="RGBA"), {}),
    "variants": (folder, image(random_resized_crop=20, flip=True, variants=3), {}),
    "other seed": (folder, image(random_resized_crop=20, variants=2, seed=9), {}),
    "functions": (folder, precache.Recipe.from_dict({"fields": FIELDS}), {}),
    "tar": (archives(containers.write_tars), image(resize=28, crop=28), {}),
    "webdataset": (archives(containers.write_webdataset), image(resize=28, crop=28), {}),
    "zip": (archives(containers.write_zip), image(resize=28, crop=28), {}),
    "parquet": (archives(containers.write_parquet), image(resize=28, crop=28), {}),
    "csv": (table(lambda number: "abc"[number % 3]), image(), {}),
    "several labels": (several_labels, image(), {}),
    "values": (table(lambda number: number / 8 - 1), image(), {}),
    "dataset": (dataset, precache.Recipe.from_dict({"fields": {"image": {"input": 0}}}), {}),
}  # fmt: skip


def digest_of_store(case: str, root: Path) -> dict[str, str]:
    source, recipe, options = CASES[case]
    store = root / "store"
    precache.build(
        source(root), store, recipe, address="serial", shard_samples=8, max_failures=5, **options
    )
    version = precache.open(store)
    names = [version.classes, list(version.keys), np.asarray(version.labels)]
    digests = {"keys and labels": digest(*names)}
    for epoch in range(max(field.variants for field in recipe.fields.values())):
        rows = precache.CachedDataset(store, variant=epoch)
        for name in recipe.fields:
            pixels = [row[name].numpy() for row in map(rows.__getitem__, range(len(rows)))]
            digests[f"{name} {epoch}"] = digest([p.shape for p in pixels], *pixels)
    return digests


# --- comparison ---------------------------------------------------------------------------------


def test_orders_are_those_of_the_golden_file() -> None:
    digests = digests_of_orders()
    golden = json.loads(ORDERS.read_text())
    wrong = [n for n, pair in enumerate(zip(digests, golden, strict=True)) if len({*pair}) > 1]
    assert not wrong, f"{len(wrong)} orders differ, such as that of {order_of(wrong[0])}"


@pytest.mark.parametrize("case", CASES)
def test_rows_and_labels_are_those_of_the_golden_file(case: str, tmp_path: Path) -> None:
    assert digest_of_store(case, tmp_path) == json.loads(STORES.read_text())[case]


def test_the_golden_file_has_no_other_stores() -> None:
    assert json.loads(STORES.read_text()).keys() == CASES.keys()


def _write() -> None:
    lines = [json.dumps(one) for one in digests_of_orders()]
    ORDERS.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    stores = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as root:
            stores[case] = digest_of_store(case, Path(root))
    STORES.write_text(json.dumps(stores, indent=1) + "\n")


if __name__ == "__main__":
    _write()
