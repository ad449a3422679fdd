"""``python -m tests.bench.datasets``: a `CachedDataset` in a plain `DataLoader`.

Its rows are `raw` and warm. Beside it, in turns: a `DataLoader` over a bare memory map of the same
rows, which takes each batch by one fancy index, and the samples stacked as torch stacks dicts. CPU
time is that of the process and its workers.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, random_split

import precache
from precache.cli.installation import Installation
from tests.bench.common import (
    CROP,
    build_crops,
    cost_of,
    find_photos,
    in_clean_process,
    median_ratio,
    multiply,
    touch,
    work_folder,
)

BATCH = 256
MEMMAP = "np.memmap"


class _Memmap(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, path: Path) -> None:
        self._rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {"image": torch.from_numpy(self._rows[indices]), "row": torch.tensor(indices)}


def _as_it_is(batch: Any) -> Any:
    return batch


def _stacked(samples: Sequence[Mapping[str, torch.Tensor]]) -> Any:
    return default_collate([dict(sample) for sample in samples])


def _loaders(store: Path, flat: Path, workers: int) -> dict[str, Callable[[], Any]]:
    dataset, memmap = precache.CachedDataset(store), _Memmap(flat)
    count = len(dataset)
    halves = random_split(dataset, [count // 2, count - count // 2])

    def load(source: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(source, BATCH, shuffle=True, num_workers=workers, **options)

    return {
        MEMMAP: lambda: [load(memmap, collate_fn=_as_it_is)],
        "CachedDataset": lambda: [load(dataset)],
        "its collate": lambda: [load(dataset, collate_fn=dataset.collate)],
        "Subset": lambda: [load(Subset(dataset, range(count)))],
        "random_split": lambda: [load(half) for half in halves],
        "stacked by torch": lambda: [load(dataset, collate_fn=_stacked)],
    }


def _measure(store: Path, flat: Path, workers: int, epochs: int) -> dict[str, list[float]]:
    """CPU-ms per 1,000 rows in turns; the first epoch, which faults pages in, is left out."""
    files = [flat, *(path for path in store.rglob("*") if path.is_file())]
    ways = _loaders(store, flat, workers)
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(epochs + 1):
        for name, way in ways.items():
            touch(files)
            drain = functools.partial(_drain, way)
            costs[name].append(cost_of(drain, children=True).cpu_ms_per_1000)
    return {name: each[1:] for name, each in costs.items()}


def _drain(way: Callable[[], Any]) -> int:
    rows = 0
    for loader in way():
        for batch in loader:
            rows += len(batch["row"])
            del batch
    return rows


def _write_flat(store: Path, path: Path) -> Path:
    with precache.Loader(store, BATCH, shuffle=False, device="cpu") as loader:
        np.save(path, np.concatenate([batch["image"].numpy() for batch in loader]))
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.datasets", description=__doc__)
    parser.add_argument("--rows", type=int, default=8000, help="of the store (8000)")
    parser.add_argument("--epochs", type=int, default=5, help="after the first (5)")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--folder", type=Path, help="work there, and keep what is made")
    options = parser.parse_args(arguments)
    with work_folder(options.folder) as folder:
        root, files = find_photos(options.photos, folder)
        source = multiply(files, root, options.rows, folder / f"photos-{options.rows}")
        store = build_crops(source, folder / f"raw-{options.rows}.store", "raw")
        flat = _write_flat(store, folder / f"{options.rows}.npy")
        found = {
            workers: in_clean_process(_measure, store, flat, workers, options.epochs)
            for workers in (0, 2)
        }
    columns = [
        Column(f"{workers or 'no'} workers{unit}", justify="right")
        for workers in found
        for unit in (", CPU-ms per 1,000", f" / {MEMMAP}")
    ]
    title = f"{options.rows:,} rows of {CROP} x {CROP} x 3, batches of {BATCH}, shuffled, warm"
    table = Table("DataLoader over", *columns, title=title)
    for name in found[0]:
        cells = []
        for costs in found.values():
            ratio = median_ratio(costs[name], costs[MEMMAP])
            cells += [f"{statistics.median(costs[name]):.1f}", f"{ratio:.2f}"]
        table.add_row(name, *cells)
    console = Console(highlight=False)
    console.print(table)
    console.print(str(Installation.here()), soft_wrap=True)


if __name__ == "__main__":
    main()
