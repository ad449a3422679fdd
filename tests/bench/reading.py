"""Benchmarks of reading stores, each beside the least that it could take.

CPU time is that of all threads. Competitors take turns, epoch by epoch, in a process of their own.
"""

import contextlib
import functools
import gc
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numcodecs import zstd
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, random_split

import precache
from precache import Reading
from precache.loading.stream import BatchStream
from precache.sampling.order import Order, Permutation, Shuffle, ValidRows
from precache.store.columns import Texts
from precache.store.layout import rows_per_shard
from precache.store.locations import Container, Locations
from precache.store.row_table import RowTable
from precache.transforms import Compose, HorizontalFlip, Normalize, RandomCrop
from tests.bench.costs import (
    Cost,
    cost_of,
    evict,
    files_of,
    resident_share,
    touch,
)
from tests.bench.harness import (
    BATCH,
    CROP,
    ROW_NBYTES,
    Epoch,
    Rounds,
    Rows,
    Table,
    Turns,
    Work,
    batches_of,
    drain,
    flat_copy,
    frames_of,
    in_clean_process,
    in_turns,
    log,
    main,
    mapped_frames,
    part,
    take_epoch,
)
from tests.support.building import photograph

CODECS = ("raw", "zstd", "image")
COSTS = ("CPU-ms|.1f", "ratio|.2f", "samples/s|,.0f")


def _loader(store: Path, batch: int = BATCH, **options: Any) -> precache.Loader:
    return precache.Loader(store, batch, device="cpu", **options)


def _loader_epoch(loader: precache.Loader) -> Epoch:
    return lambda: drain(loader)


def _zstd_epoch(store: Path, order: Sequence[np.ndarray], samples: int) -> Epoch:
    """zstd alone, the frames of a batch into the same memory."""
    frames = mapped_frames(store)
    size = len(zstd.decompress(frames[0]))
    buffer = np.empty((BATCH, size), np.uint8)

    def run() -> int:
        for some in order:
            for number, out in zip(some.tolist(), buffer, strict=False):
                zstd.decompress(frames[number], out)
        return samples

    return run


# --- a warm store -------------------------------------------------------------------------------

FLOORS = {"raw": "np.take from a map", "zstd": "bare zstd", "image": "bare zstd"}
FILTERED = "Loader, filter left on"
TARGETS = {("raw", "Loader"): 1.25, ("zstd", "Loader"): 1.1, ("image", "Loader"): 1.35}
TARGETS[("image", FILTERED)] = 1.1
ONE, TWO = "Loader, 1 thread", "Loader, 2 threads"


@part("warm")
def warm(work: Work, rows: Rows = 8000, rounds: Rounds = 5) -> Table:
    """A warm store, beside np.take and bare zstd.

    The floor of `raw` is `np.take` from a memory map of the same rows into a reused buffer, of the
    others zstd that decompresses the same frames into one. Of `image` there is one more Loader,
    which leaves the filter on, as it does where batches go to a device that undoes it.
    """
    table = Table(
        f"{rows:,} rows of {CROP} x {CROP} x 3, batches of {BATCH}, shuffled, on the CPU",
        ("codec", "read by", *COSTS, "at most|g"),
        f"CPU-ms per 1,000 rows, its ratio to the floor's above: medians of {rounds} epochs.",
    )
    for codec in CODECS:
        store = work.crops(codec, rows)
        flat = flat_copy(store, work.folder / f"{rows}.rows") if codec == "raw" else None
        turns = in_clean_process(_warm, store, flat, codec, rounds)
        floor = FLOORS[codec]
        for name in turns.costs:
            target = TARGETS.get((codec, name))
            table.add(codec, name, *turns.figures(name, floor), target)
        table.measured[codec] = turns.costs
        if TWO in turns.costs:
            best = [max(turns.each(name, "samples_per_s")) for name in (TWO, ONE)]
            remark = f"{codec}: two threads {best[0] / best[1]:.2f} times as fast as one"
            table.remarks.append(remark)
    return table


def _warm(store: Path, flat: Path | None, codec: str, rounds: int) -> Turns:
    loaders = {"Loader": _loader(store)}
    frames = frames_of(store)
    order = batches_of(len(frames))
    if flat is None:
        loaders |= {
            ONE: _loader(store, reading=Reading(num_threads=1)),
            TWO: _loader(store, reading=Reading(num_threads=2)),
        }
        floor = _zstd_epoch(store, order, len(frames))
    else:
        floor = take_epoch(flat, ROW_NBYTES, batches_of(flat.stat().st_size // ROW_NBYTES))
    if loaders["Loader"]._source.reader.readers["image"].filtered:
        loaders[FILTERED] = _loader_that_leaves_filters_on(store)
    ways = {FLOORS[codec]: floor, **{name: _loader_epoch(each) for name, each in loaders.items()}}
    files = files_of(store)
    try:
        return in_turns(
            ways, rounds, lambda name: touch([flat] if flat and name == FLOORS[codec] else files)
        )
    finally:
        for loader in loaders.values():
            loader.close()


def _loader_that_leaves_filters_on(store: Path) -> precache.Loader:
    loader = _loader(store)
    read = loader._source.reader.read

    def read_filtered(rows: np.ndarray, out: Mapping[str, np.ndarray], **options: Any) -> None:
        read(rows, out, **{**options, "undo": False})

    # A loader leaves filters on for a CUDA device alone, and this is to run without one.
    loader._source.reader.read = read_filtered
    return loader


# --- the first batch, and the first epoch -------------------------------------------------------


@part("first")
def first(work: Work, rows: Rows = 32 * BATCH, rounds: Rounds = 15) -> Iterator[Table]:
    """The first batch and the first epoch of a process.

    A fresh Loader each time, of a store whose files are in memory. The least a first batch could
    take is the CPU time of that batch over the threads that decode: it is measured by loaders of
    that batch alone, which take turns with loaders of all rows. The fastest round counts, as a
    first batch is over before whatever else a machine does evens out.

    A first epoch maps the shards, verifies checksums and takes fresh memory, so each is measured in
    a process of its own. On virtual machines with free page reporting (virtio-balloon) it varies by
    a factor of three: huge pages that a process frees go back to the host, and the next one to
    touch them waits for the host. So the lower quartile counts, and the range is shown.
    """
    batches = Table(
        f"The first batch of {BATCH} rows, shuffled, on the CPU, and the least it could take",
        ("codec", "threads|d", "slots|d", "CPU-ms|.1f", "median ms|.1f", "fastest ms|.1f",
         "ratio|.2f", "at most|g"),
    )  # fmt: skip
    epochs = Table(
        f"CPU-ms per 1,000 of {rows:,} rows",
        ("codec", "first epoch|.1f", "least|.1f", "most|.1f", "second|.1f"),
    )
    for codec in CODECS:
        store = work.crops(codec, rows)
        pairs = [in_clean_process(_two_epochs, store) for _ in range(max(4, rounds // 2))]
        threads, slots, wall, cpu = in_clean_process(_first_batches, store, rounds)
        batches.measured[codec] = {"wall_ms": wall, "cpu_ms": cpu}
        ratio, target = min(wall) * threads / min(cpu), 1.3 if codec == "image" else None
        batches.add(
            codec, threads, slots, min(cpu), statistics.median(wall), min(wall), ratio, target
        )
        ones, twos = zip(*pairs, strict=True)
        spent = sorted(cost.cpu_ms_per_1000 for cost in ones)
        second = statistics.median(cost.cpu_ms_per_1000 for cost in twos)
        epochs.add(codec, spent[len(spent) // 4], spent[0], spent[-1], second)
        epochs.measured[codec] = {"first": ones, "second": twos}
    yield from (batches, epochs)


def _two_epochs(store: Path) -> tuple[Cost, Cost]:
    touch(files_of(store))
    with _loader(store) as loader:
        return cost_of(lambda: drain(loader)), cost_of(lambda: drain(loader))


def _first_batches(store: Path, rounds: int) -> tuple[int, int, list[float], list[float]]:
    """Threads, slots, and of each round the wall and CPU-ms of a first batch."""
    touch(files_of(store))
    wall, cpu = [], []
    for _ in range(rounds + 1):
        with _loader(store) as loader:
            rows = loader.rows_of_batch(0, 0)
            began = time.perf_counter()
            next(iter(loader))
            wall.append((time.perf_counter() - began) * 1e3)
            stream = loader._source.stream
        with _loader(store, rows=np.sort(rows)) as loader:
            cpu.append(cost_of(_loader_epoch(loader)).cpu_seconds * 1e3)
    assert isinstance(stream, BatchStream)
    return stream._threads, stream._pool._keep, wall[1:], cpu[1:]


# --- small rows ---------------------------------------------------------------------------------

SIDE = 32
SMALL_NBYTES = 3 * SIDE * SIDE
PASSES = 3
"""Epochs of small rows measured as one: a single one is over in milliseconds."""
COUNT = "PRECACHE_BENCH_ROWS"


class Samples(Dataset[tuple[Image.Image, int]]):
    """Pieces of a photograph, made small as those of CIFAR were, in random classes; as many as the
    environment says."""

    def __init__(self) -> None:
        count = int(os.environ[COUNT])
        self._picture = photograph()
        random = np.random.default_rng(0)
        self._sides = random.integers(48, 161, count)
        self._places = random.random((count, 2))
        self.targets = random.integers(0, 10, count)

    def __len__(self) -> int:
        return len(self._sides)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        side = int(self._sides[index])
        left, top = (self._places[index] * (np.array(self._picture.size) - side)).astype(int)
        box = (int(left), int(top), int(left) + side, int(top) + side)
        small = self._picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
        return small, int(self.targets[index])


@part("small")
def small(work: Work, rows: Rows = 50_000, rounds: Rounds = 7) -> Table:
    """Rows of 32 x 32 x 3, beside np.take.

    Small rows share chunks, and a batch of them is little work: what counts is how often a chunk is
    decoded, and how much Python there is for a row. For each codec and kind of shuffle, a Loader,
    and `np.take` of the same rows in the same order, from a memory map of plain pixels into a
    reused buffer.
    """
    table = Table(
        f"{rows:,} rows of {SIDE} x {SIDE} x 3, batches of {BATCH}, on the CPU",
        ("codec", "shuffle", "read by", "CPU-ms|.2f", *COSTS[1:], "at most|g"),
        "CPU-ms per 1,000 rows, its ratio to that of np.take of the same rows:\n"
        f"medians of {rounds} rounds of {PASSES} warm epochs.",
    )
    os.environ[COUNT] = str(rows)
    stores = {}
    for codec in CODECS:
        log.print(f"{codec}: building {rows:,} rows")
        field = {"ops": [{"op": "decode"}], "codec": codec}
        recipe = precache.Recipe.from_dict({"fields": {"image": field}})
        stores[codec] = work.folder / f"small-{codec}-{rows}.store"
        source = "python:tests.bench.reading:Samples"
        precache.build(source, stores[codec], recipe, address="serial")
    flat = flat_copy(stores["raw"], work.folder / f"small-{rows}.rows")
    for (codec, store), shuffle in itertools.product(stores.items(), ("full", "block")):
        log.print(f"{codec}, {shuffle}: reading {rounds} rounds")
        turns = in_clean_process(_small, store, flat, shuffle, rounds)
        for name in turns.costs:
            target = 3 if name == "Loader" else None
            table.add(codec, shuffle, name, *turns.figures(name, "np.take"), target)
        table.measured[f"{codec}, {shuffle}"] = turns.costs
    return table


def _small(store: Path, flat: Path, shuffle: str, rounds: int) -> Turns:
    loader = _loader(store, shuffle=shuffle)
    order = [batch["row"].numpy().copy() for batch in loader]
    ways = {"np.take": take_epoch(flat, SMALL_NBYTES, order), "Loader": _loader_epoch(loader)}

    def several(epoch: Epoch) -> Epoch:
        return lambda: sum(epoch() for _ in range(PASSES))

    files = [flat, *files_of(store)]
    return in_turns({n: several(w) for n, w in ways.items()}, rounds, lambda name: touch(files))


# --- a cold store -------------------------------------------------------------------------------

DEPTHS = (8, 32, 128, 512)
FULL, CACHED = "Loader, full", "Loader, full, cached"


@part("cold")
def cold(work: Work, rows: Rows = 8000, rounds: Rounds = 5) -> Table:
    """Reading from a disk, evicted from memory, beside plain preads.

    The files of a store are evicted from the page cache before every epoch, which mincore(2)
    confirms. A new Loader reads all rows then, in turns with plain preadv of the same stored
    bytes, in the order of a full shuffle, by several numbers of threads, each into a buffer of its
    own. The fastest of them is the floor: a queue is as deep as its reader lets it be, and a Loader
    has 512 to 1,024 rows of `raw` in the making or advised. Where a disk is faster than decoding,
    no reading ahead helps: an epoch of a new Loader whose files are cached shows that limit.

    Put --folder on the disk in question. Eviction is this system's alone: the host of a virtual
    machine, or a storage server, may still hold in memory what was just written there.
    """
    names = ("samples/s|,.0f", "MB/s|,.0f", "CPU-ms|.1f", "read|.2f", "of preads|.2f",
             "of cached|.2f")  # fmt: skip
    table = Table(
        f"{rows:,} rows of {CROP} x {CROP} x 3, batches of {BATCH}, cold",
        ("codec", "read by", *names),
        "Stored MB/s, CPU-ms per 1,000 rows, and bytes read from the disk over those\n"
        f"stored: medians of {rounds} epochs. Speed over that of the fastest preads, and over\n"
        "that of a Loader whose files are cached: medians of the rounds' ratios.",
    )
    for codec in ("raw", "image"):
        store = work.crops(codec, rows)
        log.print(f"{codec}: reading {rounds} rounds")
        turns, resident = in_clean_process(_cold, store, rounds)
        stored = sum(length for _, _, length in frames_of(store))
        speed = functools.partial(turns.median, figure="samples_per_s")
        floor = max((name for name in turns.costs if name.startswith("preads")), key=speed)
        for name in turns.costs:
            ratios = (turns.ratio(name, to, "samples_per_s") for to in (floor, CACHED))
            read = turns.median(name, "disk_bytes") / stored
            megabytes = speed(name) * stored / rows / 1e6
            table.add(codec, name, speed(name), megabytes, turns.median(name), read, *ratios)
        table.measured[codec] = turns.costs
        remark = f"{codec}: at most {resident:.2%} resident before an epoch"
        if codec == "raw":
            ratio = turns.ratio(FULL, floor, "samples_per_s")
            remark += f"; {FULL} is {ratio:.2f} times as fast as {floor} (target ≥ 0.7)"
        table.remarks.append(remark)
    return table


def _cold(store: Path, rounds: int) -> tuple[Turns, float]:
    """Costs, and the largest share of the files in the page cache before a cold epoch."""
    frames, files, left = frames_of(store), files_of(store), []

    def empty() -> None:
        gc.collect()  # pages that are mapped stay
        evict(files)
        left.append(resident_share(files))

    ways: dict[str, Callable[[], Cost]] = {
        f"preads, depth {depth}": functools.partial(_pread_epoch, frames, depth, empty)
        for depth in DEPTHS
    }
    ways[FULL] = functools.partial(_cold_epoch, store, empty)
    ways[CACHED] = functools.partial(_cold_epoch, store, lambda: touch(files))
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _, (name, way) in itertools.product(range(rounds), ways.items()):
        costs[name].append(way())
    return Turns(costs), max(left)


def _cold_epoch(store: Path, prepare: Callable[[], None]) -> Cost:
    """The first epoch of a new loader, which maps shards when it reads them, after `prepare`."""
    with _loader(store) as loader:
        prepare()
        return cost_of(_loader_epoch(loader))


def _pread_epoch(
    frames: Sequence[tuple[Path, int, int]], depth: int, prepare: Callable[[], None]
) -> Cost:
    prepare()
    with contextlib.ExitStack() as stack:
        files = {}
        for path in {path for path, _, _ in frames}:
            files[path] = stack.enter_context(path.open("rb", buffering=0)).fileno()
            os.posix_fadvise(files[path], 0, 0, os.POSIX_FADV_RANDOM)
        order = Order(ValidRows(len(frames), np.empty(0, np.int64)), BATCH)
        rows = itertools.chain.from_iterable(batch.tolist() for batch in order.epoch(0))
        ordered = (frames[row] for row in rows)
        places = iter([(files[path], offset, length) for path, offset, length in ordered])
        size = max(length for _, _, length in frames)
        ready = threading.Barrier(depth + 1)
        pool = stack.enter_context(ThreadPoolExecutor(depth))
        readers = [pool.submit(_pread, places, size, ready) for _ in range(depth)]
        ready.wait()
        return cost_of(lambda: sum(reader.result() for reader in readers))


def _pread(places: Iterator[tuple[int, int, int]], size: int, ready: threading.Barrier) -> int:
    """One thread's share of the places; an iterator over a list may be shared."""
    buffer, count = memoryview(bytearray(size)), 0
    ready.wait()
    for descriptor, offset, length in places:
        if os.preadv(descriptor, [buffer[:length]], offset) != length:
            raise OSError("a read was short")
        count += 1
    return count


# --- a DataLoader -------------------------------------------------------------------------------

MEMMAP = "np.memmap"


class _Memmap(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, flat: Path) -> None:
        self._rows = np.memmap(flat, np.uint8, "r").reshape(-1, 3, CROP, CROP)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {"image": torch.from_numpy(self._rows[indices]), "row": torch.tensor(indices)}


@part("datasets")
def datasets(work: Work, rows: Rows = 8000, rounds: Rounds = 5) -> Table:
    """A CachedDataset in a plain DataLoader, beside a memory map's; 0 and 2 workers.

    Rows are `raw` and warm. A DataLoader over a bare memory map of the same rows takes each batch
    by one fancy index; samples are stacked as torch stacks dicts. CPU time is that of the process
    and its workers.
    """
    store = work.crops("raw", rows)
    flat = flat_copy(store, work.folder / f"{rows}.rows")
    counts = {"no workers": 0, "2 workers": 2}
    found = {n: in_clean_process(_datasets, store, flat, w, rounds) for n, w in counts.items()}
    columns = (f"{name}{unit}" for name in counts for unit in (", CPU-ms|.1f", f" / {MEMMAP}|.2f"))
    table = Table(
        f"{rows:,} rows of {CROP} x {CROP} x 3, batches of {BATCH}, shuffled, warm",
        ("DataLoader over", *columns),
        "CPU-ms per 1,000 rows",
        measured=found,
    )
    for name in found["no workers"].costs:
        cells = ((each.median(name), each.ratio(name, MEMMAP)) for each in found.values())
        table.add(name, *itertools.chain.from_iterable(cells))
    return table


def _datasets(store: Path, flat: Path, workers: int, rounds: int) -> Turns:
    dataset, files = precache.CachedDataset(store), [flat, *files_of(store)]
    count = len(dataset)
    halves = random_split(dataset, [count // 2, count - count // 2])

    def load(*sources: Any, **options: Any) -> Epoch:
        options |= {"shuffle": True, "num_workers": workers}
        if workers:
            options["multiprocessing_context"] = "fork"  # as in a script: a clean process spawns
        return lambda: sum(drain(DataLoader(source, BATCH, **options)) for source in sources)

    ways = {
        MEMMAP: load(_Memmap(flat), collate_fn=_as_it_is),
        "CachedDataset": load(dataset),
        "its collate": load(dataset, collate_fn=dataset.collate),
        "Subset": load(Subset(dataset, range(count))),
        "random_split": load(*halves),
        "stacked by torch": load(dataset, collate_fn=_stacked),
    }
    return in_turns(ways, rounds, lambda name: touch(files), children=True)


def _as_it_is(batch: Any) -> Any:
    return batch


def _stacked(samples: Sequence[Mapping[str, torch.Tensor]]) -> Any:
    return default_collate([dict(sample) for sample in samples])


# --- checksums ----------------------------------------------------------------------------------

ONCE, ALWAYS = "checked before", "checked"


@part("checksums")
def checksums(work: Work, rows: Rows = 8000, rounds: Rounds = 5) -> Table:
    """Checking rows, by CRC32C or zstd's own, and not checking them again.

    Loaders take turns on a warm store: one that checks every row in each epoch, as all do in their
    first, and one that has checked each already.
    """
    table = Table(
        f"{rows:,} rows of {CROP} x {CROP} x 3, batches of {BATCH}, shuffled, warm",
        ("codec", "rows", "CPU-ms per 1,000|.1f", f"of those {ONCE}|.2f"),
    )
    for codec in CODECS:
        turns = in_clean_process(_checksums, work.crops(codec, rows), rounds)
        for name in turns.costs:
            table.add(codec, name, turns.median(name), turns.ratio(name, ONCE))
        table.measured[codec] = turns.costs
    return table


def _checksums(store: Path, rounds: int) -> Turns:
    with contextlib.ExitStack() as ends:
        loaders = {name: ends.enter_context(_loader(store)) for name in (ONCE, ALWAYS)}

        def prepare(name: str) -> None:
            touch(files_of(store))
            if name != ONCE:
                for reader in loaders[name]._source.reader.readers.values():
                    reader._objects.checked[:] = False

        ways = {name: _loader_epoch(loader) for name, loader in loaders.items()}
        return in_turns(ways, rounds, prepare)


# --- transforms ---------------------------------------------------------------------------------

STEP_BATCH = 64
OURS = (RandomCrop(CROP - 32), HorizontalFlip(), Normalize([127.5] * 3, [64.0] * 3))


@part("transforms")
def transforms(
    work: Work,
    rows: Rows = 2048,
    rounds: Rounds = 3,
    step_ms: Annotated[float, "milliseconds of a step, asleep"] = 100.0,
) -> Table:
    """Transforms on the CPU, on the loader's threads and in the loop.

    A loop that sleeps for each step, as one does that waits for a device, takes batches that are
    cropped, flipped and normalized: by transforms of ours, which run on the loader's threads, and
    by the same with a function of the user's own behind them, which all run in the loop.
    """
    store = work.crops("raw", rows)
    turns, stalled = in_clean_process(_transforms, store, step_ms / 1e3, rounds)
    table = Table(
        f"{rows:,} rows, batches of {STEP_BATCH}, steps of {step_ms:g} ms",
        ("transforms", "stalled|.1%", "CPU-ms per 1,000|.0f"),
        measured=turns.costs,
    )
    for name in turns.costs:
        table.add(name, statistics.median(stalled[name][1:]), turns.median(name))
    return table


def _transforms(store: Path, step: float, rounds: int) -> tuple[Turns, dict[str, list[float]]]:
    """Costs, and the share of stall of each epoch."""
    ways = {"beside the loop": Compose(OURS), "in the loop": Compose([*OURS, lambda batch: batch])}
    stalled: dict[str, list[float]] = {name: [] for name in ways}
    with contextlib.ExitStack() as ends:

        def epoch(name: str) -> Epoch:
            loader = ends.enter_context(_loader(store, STEP_BATCH, transform=ways[name]))

            def run() -> int:
                for _ in loader:
                    time.sleep(step)
                stalled[name].append(loader.stats().stall_ratio)
                return len(loader) * STEP_BATCH

            return run

        epochs = {name: epoch(name) for name in ways}
        return in_turns(epochs, rounds, lambda name: touch(files_of(store))), stalled


# --- the image codec ----------------------------------------------------------------------------


# --- how random an order is ---------------------------------------------------------------------

PHOTO_NBYTES = 110_000
"""Bytes of a file, as of ImageNet's."""


@part("shuffling")
def shuffling(
    work: Work,
    rows: Rows = 1_281_167,
    classes: Annotated[int, "classes of equal size"] = 1000,
    shard_rows: Annotated[int, "rows of a shard"] = rows_per_shard(1_281_167, [ROW_NBYTES]),
    windows: Annotated[tuple[int, ...], "shards mixed at a time"] = (2, 4, 8, 16, 32),
) -> Table:
    """How random shuffle="block" is, beside "full".

    Nothing is read: the order of an epoch is a function, and labels follow from it, for rows laid
    down in a listing's order, one class after another (--keep-order, the worst case), in the seeded
    order that builds use by default, and in the order for archives that have one class after
    another. Classes are distinct ones in a batch; mates are, of the other rows in a row's batch,
    those of its own shard; both on average.
    """
    if rows < BATCH or min(classes, shard_rows, *windows) < 1:
        raise SystemExit(f"give at least {BATCH} rows, and no number below 1")
    table = Table(
        f"{rows:,} rows in {classes:,} classes, shards of {shard_rows:,}, batches of {BATCH}",
        ("rows laid down in", "window", "GB mixed|.1f", "classes|.0f", "mates|.1f"),
    )
    orders = {str(window): Shuffle("block", shard_rows, window) for window in windows}
    epochs = {}
    for name, shuffle in {**orders, "full": Shuffle()}.items():
        order = Order(ValidRows(rows, np.empty(0, np.int64)), BATCH, shuffle, drop_last=True)
        epochs[name] = np.concatenate(list(order.epoch(0)))
    for (layout, labels), name in itertools.product(_layouts(rows, classes).items(), epochs):
        epoch, window = epochs[name], rows if name == "full" else int(name) * shard_rows
        mixed = min(rows, window) * ROW_NBYTES / 1e9
        distinct = _shared(labels[epoch]).size * BATCH / len(epoch)
        shared = _shared(epoch // shard_rows)
        mates = float((shared * (shared - 1)).sum()) / len(epoch)
        table.add(layout, name, mixed, distinct, mates)
    return table


def _shared(kinds: np.ndarray) -> np.ndarray:
    """How many rows of a batch are of one kind, for each batch and kind that is in it."""
    places = kinds + np.arange(len(kinds)) // BATCH * (kinds.max() + 1)
    return np.unique(places, return_counts=True)[1]


def _layouts(rows: int, classes: int) -> dict[str, np.ndarray]:
    """Labels by row: classes of equal size, as listed, and as builds lay them down."""
    from precache_workers.planning.rows import ROW_ORDER_SEED, order_rows
    from precache_workers.sources.containers import UNIT_BYTES

    listed = np.arange(rows, dtype=np.int64) * classes // rows
    sizes, nothing = np.full(rows, PHOTO_NBYTES), [""] * rows
    units = np.arange(rows) * PHOTO_NBYTES // UNIT_BYTES
    places, files = Texts(nothing).arrow, np.zeros(rows, np.int32)
    located = Locations(
        places=places, containers=(Container("a.tar"),), files=files, units=units, nbytes=sizes
    )
    contained = RowTable(
        keys=nothing, sizes=sizes, mtimes=sizes, etags=nothing, labels=listed, classes=(),
        locations=located,
    )  # fmt: skip
    return {
        "listing's order": listed,
        "seeded order": listed[Permutation(rows, "rows", ROW_ORDER_SEED)(np.arange(rows))],
        "sorted containers": order_rows(contained, keep_order=False).labels,
    }


PARTS = (warm, first, small, cold, datasets, checksums, transforms, shuffling)

if __name__ == "__main__":
    main("reading", PARTS)
