"""``python -m tests.bench.reading``: what reading a warm store costs beside the least it could.

For each codec, a `Loader` and its floor take turns, epoch by epoch, in one process: for `raw` the
floor is `np.take` from a memory map of the same rows into a reused buffer, for the others zstd
decompressing the same frames into one. Of `image` there is one more `Loader`, which leaves the
filter on, as it does where batches go to a device that undoes it.
"""

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import zstd
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.reading.array_reader import ArrayReader
from precache.store.layout import decode_index
from tests.bench.common import (
    CROP,
    Cost,
    anonymous_bytes,
    cores,
    cost_of,
    find_photos,
    in_clean_process,
    log,
    mapped,
    median_ratio,
    multiply,
    touch,
    work_folder,
)

BATCH = 256
ROW_NBYTES = 3 * CROP * CROP
CODECS = ("raw", "zstd", "image")
FLOOR = "floor"
DEFAULT = "loader"
FILTERED = "filter left on"
FLOORS = {"raw": "np.take from a map", "zstd": "bare zstd", "image": "bare zstd"}
TARGETS = {
    ("raw", DEFAULT): "ratio ≤ 1.25",
    ("zstd", DEFAULT): "ratio ≤ 1.1",
    ("image", DEFAULT): "ratio ≤ 1.35",
    ("image", FILTERED): "ratio ≤ 1.1",
}

Epoch = Callable[[], int]


@dataclass(frozen=True)
class Contender:
    """One way to read all rows.

    Attributes
    ----------
    first
        Its first epoch: page faults, and checksums where the codec has them checked once.
    warm
        The epochs after it.
    ratio
        CPU time of `warm` over the floor's.
    """

    first: Cost
    warm: tuple[Cost, ...]
    ratio: float

    @property
    def cpu_ms_per_1000(self) -> float:
        return statistics.median(cost.cpu_ms_per_1000 for cost in self.warm)

    @property
    def samples_per_s(self) -> float:
        return statistics.median(cost.samples_per_s for cost in self.warm)

    @property
    def best_samples_per_s(self) -> float:
        return max(cost.samples_per_s for cost in self.warm)


@dataclass(frozen=True)
class Memory:
    """Anonymous memory in bytes: before a loader was made, at its peak, and of a batch."""

    before: int
    peak: int
    batch: int


@dataclass(frozen=True)
class Reading:
    """Everything measured of one codec; contenders by name, the floor among them."""

    codec: str
    stored_ratio: float
    contenders: dict[str, Contender]
    memory: Memory

    @property
    def threads_gain(self) -> float | None:
        """Samples/s on two threads over one in their best epochs; None where not measured."""
        one, two = (self.contenders.get(_threads(n)) for n in (1, 2))
        return two.best_samples_per_s / one.best_samples_per_s if one and two else None

    @property
    def warm(self) -> list[Cost]:
        return [cost for each in self.contenders.values() for cost in each.warm]

    @property
    def others(self) -> float:
        """Share of the machine's cores that other processes had meanwhile."""
        wall = sum(cost.wall_seconds for cost in self.warm)
        return sum(cost.others_seconds for cost in self.warm) / wall / cores()

    @property
    def disk_bytes(self) -> int:
        """Read from the disk in warm epochs, where there should be nothing left to read."""
        return sum(cost.disk_bytes for cost in self.warm)


def _threads(count: int) -> str:
    return f"{count} thread" + "s" * (count > 1)


# --- stores -------------------------------------------------------------------------------------


def _build(source: Path, folder: Path, codec: str, rows: int) -> tuple[Path, float]:
    """A store of `rows` rows, each another crop of a photo, and its compression ratio."""
    store = folder / f"{codec}-{rows}.store"
    crop = {"op": "random_resized_crop", "size": CROP, "scale": (0.25, 1)}
    field = {"ops": [{"op": "decode"}, crop], "codec": codec, "variants": 1}
    recipe = precache.Recipe.from_dict({"fields": {"image": field}})
    result = precache.build(source, store, recipe, address="serial", max_failures=0)
    return store, result.ratio


def _write_flat(store: Path, path: Path) -> Path:
    """The rows of a store, one after another in a plain file."""
    with precache.Loader(store, BATCH, shuffle=False, device="cpu") as loader, path.open("wb") as f:
        for batch in loader:
            f.write(batch["image"].numpy())
    return path


# --- epochs -------------------------------------------------------------------------------------


def _batches(rows: int) -> Iterator[np.ndarray]:
    order = np.random.default_rng(0).permutation(rows)
    return (order[start : start + BATCH] for start in range(0, rows, BATCH))


def _loader_that_leaves_filters_on(store: Path) -> precache.Loader:
    loader = precache.Loader(store, BATCH, device="cpu")
    read = loader._source.reader.read

    def read_filtered(
        rows: np.ndarray, out: Mapping[str, np.ndarray], *, undo: bool = True
    ) -> None:
        read(rows, out, undo=False)

    # A loader leaves filters on for a CUDA device alone, and this is to run without one.
    loader._source.reader.read = read_filtered  # type: ignore[method-assign]
    return loader


def _loader_epoch(loader: precache.Loader) -> int:
    return sum(len(batch["row"]) for batch in loader)


def _take_epoch(path: Path, rows: int) -> Epoch:
    source = np.memmap(path, np.uint8, "r", shape=(rows, ROW_NBYTES))
    buffer = np.empty((BATCH, ROW_NBYTES), np.uint8)

    def run() -> int:
        for part in _batches(rows):
            np.take(source, part, axis=0, out=buffer[: len(part)], mode="clip")
        return rows

    return run


def _zstd_epoch(store: Path) -> Epoch:
    frames = _frames(store)
    buffer = np.empty((BATCH, ROW_NBYTES), np.uint8)

    def run() -> int:
        for part in _batches(len(frames)):
            for row, out in zip(part.tolist(), buffer, strict=False):
                zstd.decompress(frames[row], out)
        return len(frames)

    return run


def _frames(store: Path) -> list[memoryview]:
    """The zstd frames of a store by row, as they lie in the mapped shards."""
    version = precache.open(store)
    reader = ArrayReader(version, "image")
    chunks = math.prod(reader.array.chunks_per_object)
    frames = []
    for number in range(reader.array.objects):
        data = mapped(Path(version.path) / "image" / reader.array.object_name(number)).data
        index = decode_index(data[-(16 * chunks + 4) :], chunks)
        written = index[index[:, 1] < len(data)].tolist()
        frames += [data[offset : offset + length] for offset, length in written]
    return frames


# --- measuring ----------------------------------------------------------------------------------


def _compare(
    store: Path, flat: Path | None, rows: int, threads: Sequence[int], epochs: int
) -> dict[str, Contender]:
    """The floor and loaders take turns; to be called in a clean process."""
    files = [path for path in store.rglob("*") if path.is_file()]
    floor = _zstd_epoch(store) if flat is None else _take_epoch(flat, rows)
    loaders = {DEFAULT: precache.Loader(store, BATCH, device="cpu")}
    for count in threads:
        loaders[_threads(count)] = precache.Loader(store, BATCH, device="cpu", num_threads=count)
    if loaders[DEFAULT]._source.reader.readers["image"].filtered:
        loaders[FILTERED] = _loader_that_leaves_filters_on(store)
    ways: dict[str, Epoch] = {FLOOR: floor}
    for name, loader in loaders.items():
        # mypy cannot infer a lambda with a default.
        ways[name] = lambda loader=loader: _loader_epoch(loader)  # type: ignore[misc]
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _ in range(epochs + 1):
        for name, way in ways.items():
            touch(files if name != FLOOR or flat is None else [flat])
            costs[name].append(cost_of(way))
    for loader in loaders.values():
        loader.close()
    return {name: _contender(each, costs[FLOOR]) for name, each in costs.items()}


def _contender(costs: Sequence[Cost], floors: Sequence[Cost]) -> Contender:
    first, *warm = costs
    ratio = median_ratio(
        [cost.cpu_ms_per_1000 for cost in warm], [cost.cpu_ms_per_1000 for cost in floors[1:]]
    )
    return Contender(first, tuple(warm), ratio)


def _memory(store: Path) -> Memory:
    """What two epochs hold beyond the page cache; to be called in a clean process."""
    precache.Loader(store, 1, device="cpu").close()  # imports are not the loader's memory
    before = peak = anonymous_bytes()
    with precache.Loader(store, BATCH, device="cpu") as loader:
        for _ in range(2):
            for batch in loader:
                peak = max(peak, anonymous_bytes())
                del batch
    return Memory(before, peak, BATCH * ROW_NBYTES)


def measure(photos: Path | None, folder: Path, rows: int, epochs: int) -> list[Reading]:
    """Build a store for each codec in `folder`, and read it."""
    root, files = find_photos(photos, folder)
    source = multiply(files, root, rows, folder / f"photos-{rows}")
    readings = []
    for codec in CODECS:
        log.print(f"{codec}: building {rows:,} rows")
        store, ratio = _build(source, folder, codec, rows)
        flat = _write_flat(store, folder / f"{rows}.rows") if codec == "raw" else None
        log.print(f"{codec}: reading {epochs + 1} epochs")
        threads = () if codec == "raw" else (1, 2)
        contenders = in_clean_process(_compare, store, flat, rows, threads, epochs)
        memory = in_clean_process(_memory, store)
        readings.append(Reading(codec, ratio, contenders, memory))
    return readings


# --- results ------------------------------------------------------------------------------------


def _table(readings: Sequence[Reading], rows: int, epochs: int) -> Table:
    table = Table(
        "codec",
        Column("read by", no_wrap=True),
        *(Column(name, justify="right") for name in ("CPU-ms", "ratio", "samples/s")),
        "target",
        title=f"{rows:,} rows of {CROP} x {CROP} x 3, batches of {BATCH}, shuffled, on the CPU",
        caption=f"CPU-ms per 1,000 rows, its ratio to the floor's above, and samples/s:\n"
        f"medians of {epochs} warm epochs.",
    )
    for reading in readings:
        for name, contender in reading.contenders.items():
            table.add_row(*_cells(reading.codec, name, contender))
        first = reading.contenders[DEFAULT].first
        cells = f"{first.cpu_ms_per_1000:.1f}", "", f"{first.samples_per_s:,.0f}"
        table.add_row("", "Loader, first epoch", *cells, end_section=True)
    return table


def _cells(codec: str, name: str, contender: Contender) -> tuple[str, ...]:
    label = {FLOOR: FLOORS[codec], DEFAULT: "Loader"}.get(name, f"Loader, {name}")
    return (
        codec if name == FLOOR else "",
        label,
        f"{contender.cpu_ms_per_1000:.1f}",
        f"{contender.ratio:.2f}",
        f"{contender.samples_per_s:,.0f}",
        TARGETS.get((codec, name), ""),
    )


def _remarks(reading: Reading) -> Iterator[str]:
    memory = reading.memory
    grown = memory.peak - memory.before
    yield f"stored {reading.stored_ratio:.2f} times smaller"
    yield f"peak {grown / 1e6:.0f} MB beyond the page cache ({grown / memory.batch:.1f} batches)"
    if reading.threads_gain is not None:
        yield f"two threads {reading.threads_gain:.2f} times as fast as one"
    yield f"{reading.disk_bytes / 1e6:.1f} MB read from the disk while warm"
    yield f"other processes had {reading.others:.0%} of the cores"


def _as_json(reading: Reading) -> dict[str, Any]:
    contenders: Mapping[str, Any] = {
        name: {
            "cpu_ms_per_1000": each.cpu_ms_per_1000,
            "samples_per_s": each.samples_per_s,
            "ratio": each.ratio,
            "first": dataclasses.asdict(each.first),
            "warm": [dataclasses.asdict(cost) for cost in each.warm],
        }
        for name, each in reading.contenders.items()
    }
    return {
        "stored_ratio": reading.stored_ratio,
        "contenders": contenders,
        "threads_gain": reading.threads_gain,
        "memory": dataclasses.asdict(reading.memory),
        "others": reading.others,
        "disk_bytes": reading.disk_bytes,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.reading", description=__doc__)
    parser.add_argument("--rows", type=int, default=8000, help="of each store (8000)")
    parser.add_argument("--epochs", type=int, default=5, help="after the first (5)")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--folder", type=Path, help="work there, and keep what is made")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.rows < BATCH or options.epochs < 1:
        parser.error(f"give at least {BATCH} rows and 1 epoch")
    with work_folder(options.folder) as folder:
        readings = measure(options.photos, folder, options.rows, options.epochs)
    machine = Installation.here()
    if options.json:
        codecs = {reading.codec: _as_json(reading) for reading in readings}
        settings = {"rows": options.rows, "batch_size": BATCH, "epochs": options.epochs}
        print(json.dumps({"machine": dataclasses.asdict(machine), **settings, "codecs": codecs}))
        return
    console = Console(highlight=False)
    console.print(_table(readings, options.rows, options.epochs))
    for reading in readings:
        console.print(f"{reading.codec}: {'; '.join(_remarks(reading))}", soft_wrap=True)
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
