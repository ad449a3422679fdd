"""``python -m tests.demo``: build a store from real photos, train from it, and from the photos.

Both trainings are the same but for their data, and share this machine alike: the net runs on one
thread, and loading takes what it takes.
"""

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Column, Table

import precache
from precache_workers.driver.build_result import BuildResult
from tests.bench.costs import Cost
from tests.demo.photos import FEWEST, PhotoSet, make_photos
from tests.demo.training import (
    CROP,
    RESIZE,
    Batch,
    Batches,
    Epoch,
    JpegDataset,
    jpeg_batches,
    loading_cost,
    train,
)

EPOCHS = 2
SEED = 0

console = Console(highlight=False)


@dataclass(frozen=True)
class Outcome:
    """What came of training from one kind of data."""

    name: str
    cost: Cost
    epochs: tuple[Epoch, ...]


def run(folder: Path, count: int) -> None:
    """Make photos and a store in ``folder``, and show what the store is worth."""
    torch.set_num_threads(1)
    console.rule("Photos")
    photos = make_photos(folder / "photos", count, SEED)
    console.print(
        f"{len(photos.keys)} photos in {len(photos.classes)} classes in {photos.folder}",
        soft_wrap=True,
    )

    console.rule("Build")
    built = _build(photos, folder / "store")
    console.print(_build_table(built, photos))

    console.rule("Train")
    outcomes = [_from_store(folder / "store", built), *_from_photos(photos, built)]
    console.print(_training_table(outcomes))
    console.print(_verdict(*outcomes[:2]))


def _build(photos: PhotoSet, store: Path) -> BuildResult:
    return precache.build(
        photos.folder,
        store,
        recipe=precache.Recipe.image(resize=RESIZE, crop=CROP, codec="image"),
        address="local",
        on_error="skip",
        progress=True,
    )


def _from_store(store: Path, built: BuildResult) -> Outcome:
    with precache.Loader(
        store, batch_size=_batch_size(built), shuffle=True, seed=SEED, device="cpu", output="tuple"
    ) as loader:

        def batches(epoch: int) -> Iterable[Batch]:
            loader.set_epoch(epoch)
            return loader

        return _outcome("precache", batches, len(built.classes))


def _from_photos(photos: PhotoSet, built: BuildResult) -> Iterable[Outcome]:
    broken = {key for key, _ in built.holes}
    keys = [key for key in photos.keys if key not in broken]
    dataset = JpegDataset(photos.folder, keys, built.classes)
    for workers, name in ((0, "JPEGs"), (2, "JPEGs, 2 workers")):
        batches = jpeg_batches(dataset, _batch_size(built), workers, SEED)
        yield _outcome(name, batches, len(built.classes))


def _batch_size(built: BuildResult) -> int:
    return min(64, built.samples - built.failed)


def _outcome(name: str, batches: Batches, classes: int) -> Outcome:
    epochs = []
    for number, epoch in enumerate(train(batches, classes, EPOCHS, SEED)):
        console.print(f"{name}: epoch {number}, loss {epoch.loss:.3f}, {epoch.seconds:.1f} s")
        epochs.append(epoch)
    return Outcome(name, loading_cost(batches), tuple(epochs))


def _build_table(built: BuildResult, photos: PhotoSet) -> Table:
    source_bytes = sum((photos.folder / key).stat().st_size for key in photos.keys)
    table = Table("", "", show_header=False, box=None)
    table.add_row("samples", f"{built.samples:,}")
    table.add_row("failed", f"{built.failed}")
    for key, reason in built.holes:
        table.add_row("", escape(f"{key}: {reason}"))
    table.add_row("photos", decimal(source_bytes))
    table.add_row("decoded", f"{decimal(built.raw_bytes)}, as {CROP} x {CROP} x 3 bytes each")
    stored = decimal(built.stored_bytes)
    table.add_row("stored", f"{stored}, {built.ratio:.2f} times smaller, without loss")
    table.add_row("built in", f"{built.seconds:.1f} s, {built.cpu_seconds:.1f} s of CPU time")
    return table


def _training_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        "",
        *(Column(outcome.name, justify="right") for outcome in outcomes),
        title="On the training node",
        caption="A small net on one core. A faster accelerator stalls more.",
    )
    costs = [outcome.cost for outcome in outcomes]
    last = [outcome.epochs[-1] for outcome in outcomes]
    table.add_row("CPU-ms to load 1,000 samples", *(f"{c.cpu_ms_per_1000:,.0f}" for c in costs))
    table.add_row("samples/s, loading alone", *(f"{cost.samples_per_s:,.0f}" for cost in costs))
    table.add_row("samples/s, training", *(f"{epoch.rate:,.0f}" for epoch in last))
    table.add_row("stalled: share of an epoch", *(f"{epoch.stall_ratio:.1%}" for epoch in last))
    for number in range(EPOCHS):
        losses = (f"{outcome.epochs[number].loss:.3f}" for outcome in outcomes)
        table.add_row(f"loss, epoch {number}", *losses)
    return table


def _verdict(cached: Outcome, jpegs: Outcome) -> str:
    saving = jpegs.cost.cpu_ms_per_1000 / cached.cost.cpu_ms_per_1000
    gain = cached.epochs[-1].rate / jpegs.epochs[-1].rate
    return (
        f"\nLoading from the store took {saving:,.0f} times less CPU time than decoding photos,\n"
        f"and training ran {gain:.1f} times as fast.\n"
        "For photos of your own: precache build FOLDER STORE (README.md says the rest)."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep photos and store there")
    parser.add_argument("--count", type=int, default=600, help="photos, two of them broken (600)")
    options = parser.parse_args(arguments)
    if options.count < FEWEST:
        parser.error(f"--count is {options.count}; give {FEWEST} or more")
    try:
        with _folder(options.folder) as folder:
            run(folder, options.count)
    except (precache.PrecacheError, FileExistsError) as error:
        parser.error(str(error))


@contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    """Give the folder to work in: a temporary one, unless one is named."""
    if named is not None:
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="precache-demo-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
