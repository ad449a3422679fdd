"""``python -m tests.bench.transforming``: transforms on the CPU, beside the loop and in it.

A loop that sleeps for each step, as one does that waits for a device, takes batches that are
cropped, flipped and normalized: by transforms of ours, which run on the loader's threads, and in
turns by the same with a function of the user's own behind them, which all run in the loop.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.transforms import Compose, HorizontalFlip, Normalize, RandomCrop
from tests.bench.common import (
    CROP,
    build_crops,
    cost_of,
    find_photos,
    in_clean_process,
    multiply,
    touch,
    work_folder,
)

BATCH = 64
OURS = (RandomCrop(CROP - 32), HorizontalFlip(), Normalize([127.5] * 3, [64.0] * 3))


def _measure(store: Path, step: float, epochs: int) -> dict[str, list[tuple[float, float]]]:
    """Share of stall and CPU-ms per 1,000 rows of each epoch but the first."""
    ways = {"beside the loop": Compose(OURS), "in the loop": Compose([*OURS, lambda batch: batch])}
    loaders = {
        name: precache.Loader(store, BATCH, device="cpu", transform=transform)
        for name, transform in ways.items()
    }

    def epoch(loader: precache.Loader) -> int:
        for _ in loader:
            time.sleep(step)
        return len(loader) * BATCH

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(epochs + 1):
        for name, loader in loaders.items():
            touch(path for path in store.rglob("*") if path.is_file())
            cost = cost_of(lambda loader=loader: epoch(loader))  # type: ignore[misc]
            found[name].append((loader.stats().stall_ratio, cost.cpu_ms_per_1000))
    for loader in loaders.values():
        loader.close()
    return {name: each[1:] for name, each in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.transforming", description=__doc__)
    parser.add_argument("--rows", type=int, default=2048, help="of the store (2048)")
    parser.add_argument("--step-ms", type=float, default=100, help="of the loop, asleep (100)")
    parser.add_argument("--epochs", type=int, default=3, help="after the first (3)")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--folder", type=Path, help="work there, and keep what is made")
    options = parser.parse_args(arguments)
    with work_folder(options.folder) as folder:
        root, files = find_photos(options.photos, folder)
        source = multiply(files, root, options.rows, folder / f"photos-{options.rows}")
        store = build_crops(source, folder / f"raw-{options.rows}.store", "raw")
        found = in_clean_process(_measure, store, options.step_ms / 1e3, options.epochs)
    title = f"{options.rows:,} rows, batches of {BATCH}, steps of {options.step_ms:g} ms"
    columns = (Column(name, justify="right") for name in ("stalled", "CPU-ms per 1,000"))
    table = Table("transforms", *columns, title=title)
    for name, epochs in found.items():
        stall, cpu = (sorted(values)[len(values) // 2] for values in zip(*epochs, strict=True))
        table.add_row(name, f"{stall:.1%}", f"{cpu:.0f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(str(Installation.here()), soft_wrap=True)


if __name__ == "__main__":
    main()
