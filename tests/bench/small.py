"""``python -m tests.bench.small``: what reading small rows costs beside ``np.take`` of the same.

Rows as of CIFAR, 32 x 32 x 3, share chunks, and a batch of them is little work: what counts is how
often a chunk is decoded, and how much Python there is for a row. For each codec and kind of
shuffle, a `Loader`, one that is ``resident="host"``, and ``np.take`` of the same rows in the same
order, from a memory map of plain pixels into a reused buffer, take turns in one process, warm. Each
chunk decoded once an epoch, without a row copied, is shown beside them.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numcodecs import zstd
from PIL import Image
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from tests.bench.common import (
    Cost,
    chunk_extents,
    cost_of,
    in_clean_process,
    log,
    mapped,
    median_ratio,
    share_of_others,
    touch,
    work_folder,
)
from tests.support.building import photograph

BATCH = 256
SIZE = 32
ROW_NBYTES = 3 * SIZE * SIZE
ROWS = 50_000
CLASSES = 10
CODECS = ("raw", "zstd", "image")
SHUFFLES = ("full", "block")
PASSES = 3
"""Epochs measured as one: a single one is over in milliseconds."""
TAKE, LOADER, RESIDENT, DECODE = "np.take", "Loader", "Loader, resident", "each chunk once"
TARGET = 3

WIDTH = 100

Epoch = Callable[[], int]


@dataclass(frozen=True)
class Reading:
    """Costs by who read, one a round, of one codec and kind of shuffle."""

    codec: str
    shuffle: str
    costs: Mapping[str, Sequence[Cost]]

    def cpu_ms_per_1000(self, name: str) -> float:
        """Median of the rounds."""
        return statistics.median(cost.cpu_ms_per_1000 for cost in self.costs[name])

    def ratio(self, name: str) -> float:
        """Median of the rounds' ratios to `np.take`."""
        own, floor = ([cost.cpu_ms_per_1000 for cost in self.costs[n]] for n in (name, TAKE))
        return median_ratio(own, floor)


class Samples(torch.utils.data.Dataset[tuple[Image.Image, int]]):
    """Pieces of a photograph, made small as those of CIFAR were, in random classes."""

    def __init__(self, count: int = ROWS) -> None:
        self._picture = photograph()
        random = np.random.default_rng(0)
        self._sides = random.integers(48, 161, count)
        self._places = random.random((count, 2))
        self.targets = random.integers(0, CLASSES, count)

    def __len__(self) -> int:
        return len(self._sides)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        side = int(self._sides[index])
        free = np.array(self._picture.size) - side
        left, top = (self._places[index] * free).astype(int).tolist()
        box = (left, top, left + side, top + side)
        small = self._picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
        return small, int(self.targets[index])


# --- stores -------------------------------------------------------------------------------------


def _build(folder: Path, codec: str) -> Path:
    field = {"ops": [{"op": "decode"}], "codec": codec}
    recipe = precache.Recipe.from_dict({"fields": {"image": field}})
    store = folder / f"{codec}.store"
    precache.build("python:tests.bench.small:Samples", store, recipe, address="serial")
    return store


def _write_flat(store: Path, path: Path) -> Path:
    """The rows of a store, one after another in a plain file."""
    with precache.Loader(store, BATCH, shuffle=False, device="cpu") as loader, path.open("wb") as f:
        for batch in loader:
            f.write(batch["image"].numpy())
    return path


# --- epochs -------------------------------------------------------------------------------------


def _take_epoch(flat: Path, order: Sequence[np.ndarray]) -> Epoch:
    source = np.memmap(flat, np.uint8, "r", shape=(ROWS, ROW_NBYTES))
    buffer = np.empty((BATCH, ROW_NBYTES), np.uint8)

    def run() -> int:
        for rows in order:
            np.take(source, rows, axis=0, out=buffer[: len(rows)], mode="clip")
        return ROWS

    return run


def _decode_epoch(store: Path) -> Epoch:
    """zstd alone, each chunk into the same buffer."""
    files: dict[Path, memoryview] = {}
    frames = [
        files.setdefault(path, mapped(path).data)[offset : offset + length]
        for path, offset, length in chunk_extents(store)
    ]
    buffer = np.empty(len(zstd.decompress(frames[0])), np.uint8)

    def run() -> int:
        for frame in frames:
            zstd.decompress(frame, buffer)
        return ROWS

    return run


def _loader_epoch(loader: precache.Loader) -> Epoch:
    return lambda: sum(len(batch["row"]) for batch in loader)


def _epochs(codec: str, store: Path, flat: Path, shuffle: str) -> dict[str, Epoch]:
    """By reader; a loader's memory lives as long as its epoch is held."""
    loader = precache.Loader(store, BATCH, shuffle=shuffle, device="cpu")
    held = precache.Loader(store, BATCH, shuffle=shuffle, device="cpu", resident="host")
    order = [batch["row"].numpy().copy() for batch in loader]
    epochs = {
        TAKE: _take_epoch(flat, order),
        LOADER: _loader_epoch(loader),
        RESIDENT: _loader_epoch(held),
    }
    return epochs if codec == "raw" else {**epochs, DECODE: _decode_epoch(store)}


# --- measuring ----------------------------------------------------------------------------------


def _compare(codec: str, store: Path, flat: Path, shuffle: str, rounds: int) -> Reading:
    """Readers take turns, after an epoch of each; to be called in a clean process."""
    epochs = _epochs(codec, store, flat, shuffle)
    for epoch in epochs.values():
        epoch()
    files = [flat, *(path for path in store.rglob("*") if path.is_file())]
    costs: dict[str, list[Cost]] = {name: [] for name in epochs}
    for _ in range(rounds):
        touch(files)
        for name, epoch in epochs.items():
            # mypy cannot infer a lambda with a default.
            costs[name].append(cost_of(lambda epoch=epoch: sum(epoch() for _ in range(PASSES))))  # type: ignore[misc]
    return Reading(codec, shuffle, costs)


def measure(folder: Path, rounds: int) -> list[Reading]:
    """Build a store for each codec in `folder`, and read it."""
    stores = {}
    for codec in CODECS:
        log.print(f"{codec}: building {ROWS:,} rows")
        stores[codec] = _build(folder, codec)
    flat = _write_flat(stores["raw"], folder / "rows")
    readings = []
    for codec, store in stores.items():
        for shuffle in SHUFFLES:
            log.print(f"{codec}, {shuffle}: reading {rounds} rounds")
            readings.append(in_clean_process(_compare, codec, store, flat, shuffle, rounds))
    return readings


# --- results ------------------------------------------------------------------------------------


def _table(readings: Sequence[Reading], rounds: int) -> Table:
    table = Table(
        "codec",
        "shuffle",
        "read by",
        *(Column(name, justify="right") for name in ("CPU-ms", "ratio", "samples/s")),
        "target",
        title=f"{ROWS:,} rows of {SIZE} x {SIZE} x 3, batches of {BATCH}, on the CPU",
        caption="CPU-ms per 1,000 rows, its ratio to that of np.take of the same rows, and\n"
        f"samples/s: medians of {rounds} rounds of {PASSES} warm epochs.",
    )
    for reading in readings:
        for name, costs in reading.costs.items():
            table.add_row(
                *((reading.codec, reading.shuffle) if name == TAKE else ("", "")),
                name,
                f"{reading.cpu_ms_per_1000(name):.2f}",
                f"{reading.ratio(name):.2f}",
                f"{statistics.median(cost.samples_per_s for cost in costs):,.0f}",
                f"ratio ≤ {TARGET}" if name == LOADER else "",
            )
        table.add_section()
    return table


def _as_json(reading: Reading) -> dict[str, Any]:
    return {
        **dataclasses.asdict(reading),
        "others": share_of_others(itertools.chain.from_iterable(reading.costs.values())),
        "cpu_ms_per_1000": {name: reading.cpu_ms_per_1000(name) for name in reading.costs},
        "ratio": {name: reading.ratio(name) for name in reading.costs},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.small", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of all readers (7)")
    parser.add_argument("--folder", type=Path, help="work there, and keep what is made")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("give at least 1 round")
    with work_folder(options.folder) as folder:
        readings = measure(folder, options.rounds)
    machine = Installation.here()
    if options.json:
        settings = {"rows": ROWS, "batch_size": BATCH, "passes": PASSES}
        found = [_as_json(reading) for reading in readings]
        print(json.dumps({"machine": dataclasses.asdict(machine), **settings, "readings": found}))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(readings, options.rounds))
    costs = (cost for reading in readings for each in reading.costs.values() for cost in each)
    console.print(f"other processes had {share_of_others(costs):.0%} of the cores")
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
