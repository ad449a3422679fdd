"""Training as a user does it: from the cache as from the photos, killed, and resumed elsewhere."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import precache
from imagenet import augment, train_step
from precache.transforms import Draw, run
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.sources.base import Sample
from resnet import resnet
from tests.conftest import BuiltStore
from tests.support.building import REPOSITORY, environment, gone, poll, running, write, write_jpegs

SEED = 3
CROP = 32
IMAGENET = REPOSITORY / "docs/examples/imagenet.py"
PHOTOS = Path(os.environ.get("PHOTOS", Path(__file__).parents[3] / "shared/photos"))

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Photos(Dataset[tuple[torch.Tensor, int, int]]):
    """The photos of a store, by row, decoded and cropped whenever they are asked for."""

    def __init__(self, store: BuiltStore) -> None:
        version = store.open()
        self._paths = [store.source / key for key in version.keys]
        self._labels = version.labels.tolist()
        self._make = FieldRecipe("image", store.recipe.fields["image"], store.recipe.seed)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int, int]:
        path = self._paths[row]
        image = self._make(Sample({"bytes": path.read_bytes()}), path.name)
        return torch.from_numpy(image.copy()), self._labels[row], row


def _from_cache(store: BuiltStore, batch_size: int) -> Callable[[int], Batches]:
    loader = precache.Loader(
        store.path, batch_size, seed=SEED, device="cpu", output="tuple",
        transform=augment(store.open(), CROP),
    )  # fmt: skip

    def batches(epoch: int) -> Batches:
        loader.set_epoch(epoch)
        return iter(loader)

    return batches


def _from_photos(store: BuiltStore, batch_size: int) -> Callable[[int], Batches]:
    transform, photos = augment(store.open(), CROP), Photos(store)
    order = precache.Loader(store.path, batch_size, seed=SEED, device="cpu", fields=["label"])

    def batches(epoch: int) -> Batches:
        order.set_epoch(epoch)
        rows = [batch["row"].tolist() for batch in order]
        for number, (image, label, row) in enumerate(DataLoader(photos, batch_sampler=rows)):
            batch = {"image": image, "label": label, "row": row}
            done = run(transform, batch, Draw((SEED, epoch), number, row))
            yield done["image"], done["label"]

    return batches


def _curve(batches: Callable[[int], Batches], classes: int, epochs: int = 2) -> list[float]:
    torch.manual_seed(0)
    net = resnet(18, classes, width=8)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    return [
        train_step(net, optimizer, image, label).item()
        for epoch in range(epochs)
        for image, label in batches(epoch)
    ]


def _assert_same_curve(store: BuiltStore, batch_size: int) -> None:
    classes = len(store.open().classes)
    cached = _curve(_from_cache(store, batch_size), classes)
    assert cached == pytest.approx(_curve(_from_photos(store, batch_size), classes), rel=1e-4)
    assert len(set(cached)) == len(cached)


def test_the_losses_from_the_cache_are_those_from_the_photos(
    tmp_path: Path, make_store: Callable[..., BuiltStore]
) -> None:
    photos = write_jpegs(tmp_path, 24, (80, 60))
    (photos / "cat" / "broken.jpg").write_bytes(b"no photo")
    store = make_store(photos, precache.Recipe.image(resize=48, crop=40), shard_samples=8)
    _assert_same_curve(store, 8)


@pytest.mark.heavy
@pytest.mark.skipif(not PHOTOS.is_dir(), reason=f"needs photographs in {PHOTOS}, or in PHOTOS=")
def test_the_losses_on_real_photos_are_those_from_the_photos(
    tmp_path: Path, make_store: Callable[..., BuiltStore]
) -> None:
    for number, path in enumerate(sorted(PHOTOS.glob("*.JPEG"))):
        write(tmp_path / str(number % 7) / path.name, path.read_bytes())
    store = make_store(tmp_path, precache.Recipe.image(resize=128, crop=112), shard_samples=32)
    _assert_same_curve(store, 16)


# --- the script, in processes of its own ---------------------------------------------------------

GLOBAL_BATCH = 8


def _command(store: BuiltStore, folder: Path, processes: int, *more: object) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    options = {
        "--depth": 18, "--width": 8, "--crop": 32, "--batch-size": GLOBAL_BATCH, "--every": 1,
        "--lr": 0.01, "--checkpoint": folder / "run.pt", "--losses": folder / "losses.jsonl",
    }  # fmt: skip
    return [
        sys.executable, *(launcher if processes > 1 else []), str(IMAGENET), str(store.path),
        *(str(part) for pair in options.items() for part in pair),
        *map(str, more),
    ]  # fmt: skip


def _logged(folder: Path) -> list[list[Any]]:
    """Epoch, batch and loss of every step; the last line may be half written."""
    log = folder / "losses.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _train_until_killed(store: BuiltStore, folder: Path, processes: int, steps: int) -> None:
    """Kill a training, and all of its processes, once so many more steps are logged."""
    already = len(_logged(folder))
    command = _command(store, folder, processes, "--epochs", 10_000, "--resume")
    with running(command, environment(OMP_NUM_THREADS="1")) as process:
        poll(
            lambda: len(_logged(folder)) >= already + steps or process.poll() is not None,
            f"{steps} steps of {processes} processes",
        )
        assert process.poll() is None, process.communicate()[1]
        family = psutil.Process(process.pid).children(recursive=True)
    poll(lambda: all(map(gone, family)), "the end of all processes")


@pytest.mark.heavy
def test_a_training_that_is_killed_goes_on_with_another_number_of_processes(
    tile_stores: dict[str, BuiltStore], tmp_path: Path
) -> None:
    store = tile_stores["image"]
    length = 73 // GLOBAL_BATCH
    for processes, steps in ((2, length + 2), (1, 3)):
        _train_until_killed(store, tmp_path, processes, steps)
    command = _command(store, tmp_path, 1, "--epochs", 6, "--resume")
    with running(command, environment(OMP_NUM_THREADS="1")) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    steps_done = [epoch * length + batch - 1 for epoch, batch, _ in _logged(tmp_path)]
    assert set(steps_done) >= set(range(6 * length))
    # Each start goes on at the last checkpoint, so it repeats at most the step logged after it.
    assert all(step - before in (0, 1) for before, step in itertools.pairwise(steps_done))
    assert len(steps_done) <= 6 * length + 2
    assert all(0 < loss < 10 for _, _, loss in _logged(tmp_path))
