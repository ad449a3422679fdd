"""``python -m tests.bench.shuffling``: how random ``shuffle="block"`` is, beside ``"full"``.

Nothing is read: the order of an epoch is a function, and labels follow from it, for rows laid down
in a listing's order, one class after another (``--keep-order``, the worst case), in the seeded
order that builds use by default, and in the order for archives that have one class after another.
Rows of a window are exchangeable, so what matters is how the classes of a window differ from those
of all rows:

- *in a batch*, *next batch*, *10 on*: how much likelier than chance two rows have the same class,
  both in one batch, or one of them in the next batch or ten batches on; 0 is chance, 1 is certain.
- *classes*: distinct ones in a batch, on average, and in the twentieth of batches with the fewest.
- *chi²*: of the labels of a batch against those of all rows, per degree of freedom; 1 is chance.
- *mates*: of the other rows in a row's batch, those of its own shard, on average; the same ones
  meet again and again, however rows were laid down.
- *span*: batches from the first row of a shard to its last, on average.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from precache.sampling.order import Order, Permutation, Shuffle, ValidRows
from precache.store.layout import rows_per_shard
from precache.store.row_table import RowTable
from precache_workers.planning.rows import ROW_ORDER_SEED, order_rows
from precache_workers.sources.containers import UNIT_BYTES
from tests.bench.common import CROP

BATCH = 256
ROWS = 1_281_167
CLASSES = 1000
ROW_NBYTES = 3 * CROP * CROP
WINDOWS = (2, 4, 8, 16, 32)
FAR = 10
FEWEST = 5
"""Percent of the batches that have the fewest classes."""
WIDTH = 120
PHOTO_NBYTES = 110_000
"""Bytes of a file, as of ImageNet's."""


@dataclass(frozen=True)
class Mixture:
    """How well one order mixes one layout of rows; see the module's docstring.

    Attributes
    ----------
    window
        Shards, or None for a full shuffle.
    window_nbytes
        Decoded bytes of the rows that are mixed at a time.
    """

    layout: str
    window: int | None
    window_nbytes: int
    in_batch: float
    next_batch: float
    far_batch: float
    classes: float
    fewest_classes: float
    chi2: float
    mates: float
    span: float


# --- layouts and orders -------------------------------------------------------------------------


def _layouts(rows: int, classes: int) -> dict[str, np.ndarray]:
    """Labels by row: classes of equal size, as listed, and as builds lay them down."""
    listed = np.arange(rows, dtype=np.int64) * classes // rows
    seeded = Permutation(rows, "rows", ROW_ORDER_SEED)(np.arange(rows))
    return {
        "listing's order": listed,
        "seeded order": listed[seeded],
        "sorted containers": _of_containers(listed),
    }


def _of_containers(listed: np.ndarray) -> np.ndarray:
    """Labels by row, as builds lay down photos that archives have one class after another."""
    numbers = np.arange(len(listed))
    units = (numbers * PHOTO_NBYTES // UNIT_BYTES).tolist()
    sizes, nothing = np.full(len(listed), PHOTO_NBYTES), [""] * len(listed)
    locations = [f"#{unit}\t" for unit in units]
    table = RowTable(
        keys=nothing,
        sizes=sizes,
        mtimes=sizes,
        etags=nothing,
        labels=listed,
        classes=(),
        locations=locations,
    )
    return order_rows(table, keep_order=False).labels


def _epoch(rows: int, shuffle: Shuffle) -> np.ndarray:
    """Row numbers in the order of an epoch, whole batches of them."""
    order = Order(ValidRows(rows, np.empty(0, np.int64)), BATCH, shuffle, drop_last=True)
    return np.concatenate(list(order.epoch(0)))


# --- measures -----------------------------------------------------------------------------------


def _beyond_chance(same: np.ndarray, chance: float) -> float:
    """Shares of pairs with the same class -> 0 for chance, 1 for certainty (Cohen's kappa)."""
    return float((same.mean() - chance) / (1 - chance))


def _measures(labels: np.ndarray, classes: int) -> dict[str, float]:
    """Of labels in the order of an epoch."""
    batches = labels.reshape(-1, BATCH)
    numbers = np.arange(len(batches))[:, None] * classes
    counts = np.bincount((batches + numbers).reshape(-1), minlength=len(batches) * classes)
    counts = counts.reshape(len(batches), classes)
    shares = counts.sum(axis=0) / labels.size
    chance = float((shares**2).sum())
    expected = BATCH * shares
    distinct = (counts > 0).sum(axis=1)

    def later(step: int) -> float:
        same = (counts[:-step] * counts[step:]).sum(axis=1) / BATCH**2
        return _beyond_chance(same, chance)

    pairs = (counts * (counts - 1)).sum(axis=1) / (BATCH * (BATCH - 1))
    return {
        "in_batch": _beyond_chance(pairs, chance),
        "next_batch": later(1),
        "far_batch": later(FAR),
        "classes": float(distinct.mean()),
        "fewest_classes": float(np.percentile(distinct, FEWEST)),
        "chi2": float(((counts - expected) ** 2 / expected).sum(axis=1).mean() / (classes - 1)),
    }


def _mates(order: np.ndarray, shard_rows: int) -> float:
    """Other rows of the same shard in a row's batch, on average."""
    shards = order // shard_rows
    places = shards + np.arange(len(order)) // BATCH * (shards.max() + 1)
    counts = np.unique(places, return_counts=True)[1]
    return float((counts * (counts - 1)).sum()) / len(order)


def _span(order: np.ndarray, shard_rows: int) -> float:
    """Batches between the first and the last row of a shard in an epoch, on average."""
    shards = order // shard_rows
    positions = np.arange(len(order))
    first = np.full(shards.max() + 1, len(order))
    last = np.zeros(len(first), np.int64)
    np.minimum.at(first, shards, positions)
    np.maximum.at(last, shards, positions)
    return float((last - first).mean()) / BATCH


def measure(rows: int, classes: int, shard_rows: int, windows: Sequence[int]) -> list[Mixture]:
    """Every layout under every order."""
    orders: list[tuple[int | None, Shuffle]] = [
        *((window, Shuffle("block", shard_rows, window)) for window in windows),
        (None, Shuffle()),
    ]
    layouts = _layouts(rows, classes)
    found = []
    for window, shuffle in orders:
        order = _epoch(rows, shuffle)
        mixed = min(rows, window * shard_rows) if window else rows
        near = {"mates": _mates(order, shard_rows), "span": _span(order, shard_rows)}
        for layout, labels in layouts.items():
            measures = _measures(labels[order], classes)
            found.append(Mixture(layout, window, mixed * ROW_NBYTES, **near, **measures))
    return sorted(found, key=lambda mixture: list(layouts).index(mixture.layout))


# --- results ------------------------------------------------------------------------------------


def _table(found: Sequence[Mixture], settings: dict[str, int]) -> Table:
    title = (
        "{rows:,} rows in {classes:,} classes, shards of {shard_rows:,}, batches of {batch_size}"
    )
    names = ("window", "GB mixed", "in a batch", "next batch", f"{FAR} on", "classes", "chi²")
    columns = (Column(name, justify="right") for name in (*names, "mates", "span"))
    table = Table(
        Column("rows laid down in", no_wrap=True), *columns, title=title.format(**settings)
    )
    before = None
    for mixture in found:
        if before not in (None, mixture.layout):
            table.add_section()
        table.add_row("" if before == mixture.layout else mixture.layout, *_cells(mixture))
        before = mixture.layout
    return table


def _cells(mixture: Mixture) -> Iterator[str]:
    yield "full" if mixture.window is None else str(mixture.window)
    yield f"{mixture.window_nbytes / 1e9:.1f}"
    for value in (mixture.in_batch, mixture.next_batch, mixture.far_batch):
        yield f"{value:.4f}".replace("-0.0000", "0.0000")
    yield f"{mixture.classes:.0f} ({mixture.fewest_classes:.0f})"
    yield f"{mixture.chi2:.2f}"
    yield f"{mixture.mates:.1f}"
    yield f"{mixture.span:,.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.shuffling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fits = rows_per_shard(ROWS, [ROW_NBYTES])
    windows = ",".join(map(str, WINDOWS))
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of the store ({ROWS})")
    parser.add_argument("--classes", type=int, default=CLASSES, help=f"of its rows ({CLASSES})")
    parser.add_argument("--shard-rows", type=int, default=fits, help=f"rows of a shard ({fits})")
    parser.add_argument("--windows", default=windows, help=f"shards mixed at a time ({windows})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    wanted = [int(window) for window in options.windows.split(",")]
    if min(options.classes, options.shard_rows, *wanted) < 1 or options.rows < 2 * FAR * BATCH:
        parser.error(f"give at least {2 * FAR * BATCH} rows, and no number below 1")
    found = measure(options.rows, options.classes, options.shard_rows, wanted)
    settings = {name: getattr(options, name) for name in ("rows", "classes", "shard_rows")}
    settings["batch_size"] = BATCH
    if options.json:
        print(json.dumps({**settings, "mixtures": [dataclasses.asdict(each) for each in found]}))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(found, settings))


if __name__ == "__main__":
    main()
