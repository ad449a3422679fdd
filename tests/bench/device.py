"""Benchmarks of feeding a CUDA device."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numcodecs import zstd
from torch import Tensor, nn
from torch.utils.data import DataLoader

import precache
from docs.examples.resnet import resnet
from precache import Reading
from precache.codecs import nvcomp
from precache.loading.slots import STEPS_AHEAD, undo_image_tensor
from precache.reading.array_reader import ArrayReader
from precache.reading.version_reader import VersionReader
from precache.transforms import Compose, Draw, HorizontalFlip, Normalize, RandomResizedCrop
from tests.bench.costs import Cost, cost_of, files_of, touch
from tests.bench.harness import (
    CROP,
    ROW_NBYTES,
    Epoch,
    MissingError,
    Table,
    Work,
    drain,
    frames_of,
    log,
    main,
    mapped_frames,
    median_ratio,
    part,
)

Step = Callable[[Tensor, Tensor], Any]
Fed = AbstractContextManager[Epoch]

CLASSES = 1000
WARM_STEPS = 6
"""Of a turn, that are not measured: the loader begins, the clocks rise."""
BATCHES_AHEAD = 8
"""At most, in preparation when a turn ends."""
STILL, NORMALIZED = "resident batch", "resident batch, normalised"
"""The turns on a batch that stays; the others are compared with the first."""
MODULE = Path("/proc/driver/nvidia-fs/stats")
"""The kernel module of GPUDirect Storage shows itself there."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    rows: int
    batch: int
    steps: int
    rounds: int
    epochs: int
    depth: int = 50
    width: int = 64


SIZES = Sizes(rows=11_264, batch=256, steps=30, rounds=5, epochs=4)
REHEARSAL = Sizes(rows=96, batch=8, steps=4, rounds=2, epochs=2, depth=18, width=8)
Rehearse = Annotated[bool, "on the CPU, small: its figures mean nothing"]


@dataclass(frozen=True)
class Way:
    """A codec, options of the loader that reads it, and the most CPU-ms that it is to take."""

    codec: str
    options: Mapping[str, str]
    target: int | None = None


WAYS = {
    "raw, copied": Way("raw", {}, 15),
    "raw, resident there": Way("raw", {"reading": Reading(resident="device")}),
    "image, zstd on the host": Way("image", {}),
    "image, zstd on the device": Way("image", {"reading": Reading(decompress="device")}),
}


def _device(rehearse: bool) -> torch.device:
    if rehearse:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MissingError("this needs a CUDA device, and torch sees none; --rehearse does without")
    return torch.device("cuda", 0)


@part("ways")
def ways(
    work: Work,
    rows: Annotated[int | None, f"rows of each store ({SIZES.rows:,})"] = None,
    batch: Annotated[int | None, f"samples of a batch ({SIZES.batch})"] = None,
    steps: Annotated[int | None, f"steps of a turn ({SIZES.steps})"] = None,
    rounds: Annotated[int | None, f"turns of training ({SIZES.rounds})"] = None,
    epochs: Annotated[int | None, f"epochs after the first ({SIZES.epochs})"] = None,
    compile: Annotated[  # noqa: A002 - the name of an option
        bool, "compile the step, and capture it as a CUDA graph"
    ] = False,
    dataloaders: Annotated[bool, "torch's DataLoader, too"] = False,
    rehearse: Rehearse = False,
) -> Iterator[Table]:
    """Ways to feed a device, and a ResNet-50 step that is fed by each.

    First what each way costs the host's CPUs and how many samples/s it brings, with nothing else to
    do, beside what it could not do without: rows copied by hand, frames decompressed, and rows that
    kvikio reads. Then how long a ResNet-50 step takes (bf16, channels-last) that is fed by each,
    beside the same step on one batch that never leaves the device, in turns. In one of the turns
    that batch is normalised in each step, as the others are. With --compile the step leaves the
    host idle.
    """
    device, own = _device(rehearse), REHEARSAL if rehearse else SIZES
    given = {"rows": rows, "batch": batch, "steps": steps, "rounds": rounds, "epochs": epochs}
    sizes = dataclasses.replace(own, **{n: v for n, v in given.items() if v is not None})
    # More than a turn takes: loading must not end before it.
    needed = (WARM_STEPS + sizes.steps + BATCHES_AHEAD) * sizes.batch
    if sizes.rows < needed and not rehearse:
        raise SystemExit(f"--rows {sizes.rows}: a turn takes {needed}; give as many")
    stores = {codec: work.crops(codec, sizes.rows) for codec in ("raw", "image")}
    feeding, remarks = {}, []
    for name, make in _fed_by(stores, device, sizes, dataloaders).items():
        log.print(f"{name}: {sizes.epochs + 1} epochs")
        try:
            feeding[name] = feed(make, sizes.epochs)
        except ImportError as error:
            remarks.append(f"{name}: left out: {error}")
            continue
        remarks += [f"{name}: {line}" for line in feeding[name].warnings]
    log.print(f"training: {sizes.rounds + 1} rounds")
    trained = train(stores, device, sizes, compile)
    yield _table(feeding, trained, sizes, device, remarks)
    pieces = Table("Pieces", ("ms of the device for a batch", "ms|.3f"))
    for name, spent in _pieces(stores, device, sizes).items():
        pieces.add(name, spent)
    pieces.remarks.append(f"a batch has {sizes.batch * ROW_NBYTES:,} bytes; {_hardware(device)}")
    yield pieces


def _hardware(device: torch.device) -> str:
    if device.type != "cuda":
        return "no device: a rehearsal"
    named = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return named if nvcomp.available() else f"{named}, no nvCOMP"


# --- time ---------------------------------------------------------------------------------------


def finish(device: torch.device) -> None:
    """Wait until a CUDA device has done everything, without spinning."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


class _Marks:
    """Points in the device's time; in that of the host where there is no device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> Any:
        """Record one on the current stream, and return it."""
        if not self._cuda:
            self._marks.append(time.perf_counter() * 1e3)
        else:
            options = {"enable_timing": True, "blocking": True}
            self._marks.append(torch.cuda.Event(**options))
            self._marks[-1].record()
        return self._marks[-1]

    def between(self) -> list[float]:
        """The ms from each mark to the next."""
        if not self._cuda:
            return [later - mark for mark, later in itertools.pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [mark.elapsed_time(later) for mark, later in itertools.pairwise(self._marks)]


# --- feeding ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feeding:
    """A way's cost with nothing else to do.

    Attributes
    ----------
    opened
        Seconds until it was ready: what is loaded then.
    warnings
        Of the loader: why it went another way, if it did.
    costs
        Of epochs; the first checks checksums.
    """

    opened: float
    warnings: tuple[str, ...]
    costs: tuple[Cost, ...]

    def median(self, figure: str) -> float:
        return statistics.median(getattr(cost, figure) for cost in self.costs[1:])


def feed(make: Callable[[], Fed], epochs: int) -> Feeding:
    """Run epochs of a way, one more than `epochs`, and do nothing with its batches."""
    log_of_precache, warnings = logging.getLogger("precache"), BufferingHandler(1000)
    warnings.setLevel(logging.WARNING)
    log_of_precache.addHandler(warnings)
    try:
        started = time.perf_counter()
        with make() as epoch:
            opened = time.perf_counter() - started
            costs = tuple(cost_of(epoch, children=True) for _ in range(epochs + 1))
    finally:
        log_of_precache.removeHandler(warnings)
    fed = Feeding(opened, tuple(record.getMessage() for record in warnings.buffer), costs)
    cpu, speed = fed.median("cpu_ms_per_1000"), fed.median("samples_per_s")
    log.print(f"  {cpu:.1f} CPU-ms per 1,000, {speed:,.0f} samples/s")
    return fed


def _fed_by(
    stores: Mapping[str, Path], device: torch.device, sizes: Sizes, dataloaders: bool
) -> dict[str, Callable[[], Fed]]:
    raw, batch = stores["raw"], sizes.batch
    found: dict[str, Callable[[], Fed]] = {
        name: functools.partial(_by_loader, stores[way.codec], device, batch, way.options)
        for name, way in WAYS.items()
    }
    found["raw, read by kvikio"] = functools.partial(_by_kvikio, raw, device, batch)
    found["raw rows, copied by hand"] = functools.partial(_by_copies, raw, device, batch)
    found["image's frames, by zstd alone"] = functools.partial(_by_zstd, stores["image"])
    if dataloaders:
        found["raw, by a DataLoader"] = lambda: _by_dataset(raw, device, batch)
    return found


@contextlib.contextmanager
def _by_loader(
    store: Path, device: torch.device, batch: int, options: Mapping[str, Any]
) -> Iterator[Epoch]:
    touch(files_of(store))
    with precache.Loader(store, batch, device=device, **options) as loader:
        yield lambda: _drained(loader)


def _drained(loader: precache.Loader) -> int:
    rows = drain(loader)
    finish(loader.device)
    return rows


class DirectRows(contextlib.ExitStack):
    """Plain rows that kvikio reads from a store's shards straight into a CUDA device's memory.

    Not a way of a `Loader`: it is here to be compared with those. Where the machine has GPUDirect
    Storage, no CPU touches the bytes, and they come from the disk each time; elsewhere kvikio or
    cuFile copies them. Shards lie open until the context is left. Sources: kvikio's documentation,
    `CuFile.pread` and `defaults`; NVIDIA's of GPUDirect Storage.
    """

    def __init__(self, store: Path, field: str = "image") -> None:
        super().__init__()
        kvikio = importlib.import_module("kvikio")
        self.array = ArrayReader(precache.open(store), field).array
        paths, starts, _ = zip(*frames_of(store, field), strict=True)
        opened = {path: self.enter_context(kvikio.CuFile(path)) for path in dict.fromkeys(paths)}
        self._files, self._starts = [opened[path] for path in paths], np.array(starts)

    def read(self, rows: np.ndarray, memory: Tensor) -> None:
        """Fill the first of (n, bytes of a row) uint8 with rows."""
        chunks, within = np.divmod(rows, self.array.chunk_rows)
        starts = self._starts[chunks] + within * self.array.row_nbytes
        places = zip(memory, chunks.tolist(), starts.tolist(), strict=False)
        reads = [self._files[n].pread(row, row.nbytes, start) for row, n, start in places]
        for read in reads:
            read.get()


@contextlib.contextmanager
def _by_kvikio(store: Path, device: torch.device, batch: int) -> Iterator[Epoch]:
    try:
        itself = importlib.import_module("kvikio.defaults").is_compat_mode_preferred()
        opened = DirectRows(store)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError) as error:
        raise ImportError(f"{error} (it takes kvikio-cu13 and a CUDA driver)") from None
    how = "kvikio itself reads" if itself else "cuFile reads"
    there = "" if MODULE.exists() else "not "
    logging.getLogger("precache").warning("%s, nvidia-fs %sloaded", how, there)
    with opened as rows:
        count = rows.array.rows
        memory = torch.empty((batch, rows.array.row_nbytes), dtype=torch.uint8, device=device)

        def epoch() -> int:
            order = np.random.default_rng().permutation(count)
            for start in range(0, count, batch):
                rows.read(order[start : start + batch], memory)
            return count

        yield epoch


@contextlib.contextmanager
def _by_copies(store: Path, device: torch.device, batch: int) -> Iterator[Epoch]:
    """Rows of a `raw` store, each copied from the memory map into page-locked memory by NumPy, and
    a batch from there to the device."""
    array, pinned = ArrayReader(precache.open(store), "image").array, device.type == "cuda"
    starts = range(0, array.chunk_rows * array.row_nbytes, array.row_nbytes)
    rows = [
        np.frombuffer(frame, np.uint8, array.row_nbytes, start)
        for frame in mapped_frames(store)
        for start in starts
    ][: array.rows]
    shape = (batch, array.row_nbytes)
    slots = [torch.empty(shape, dtype=torch.uint8, pin_memory=pinned) for _ in range(3)]
    copied: list[torch.cuda.Event] = []
    if pinned:
        copied = [torch.cuda.Event(blocking=True) for _ in slots]

    def epoch() -> int:
        order = np.random.default_rng().permutation(len(rows)).tolist()
        for number, start in enumerate(range(0, len(rows), batch)):
            place = number % len(slots)
            for event in copied[place : place + 1]:
                event.synchronize()  # its last copy
            out, some = slots[place].numpy(), order[start : start + batch]
            for number_in_batch, row in enumerate(some):
                out[number_in_batch] = rows[row]
            slots[place][: len(some)].to(device, non_blocking=True)
            for event in copied[place : place + 1]:
                event.record()
        for event in copied:
            event.synchronize()
        return len(rows)

    yield epoch


@contextlib.contextmanager
def _by_zstd(store: Path) -> Iterator[Epoch]:
    """The zstd frames of a store, each decompressed into the same memory."""
    frames, out = mapped_frames(store), np.empty(ROW_NBYTES, np.uint8)

    def epoch() -> int:
        for number in np.random.default_rng().permutation(len(frames)).tolist():
            zstd.decompress(frames[number], out)
        return len(frames)

    yield epoch


@contextlib.contextmanager
def _by_dataset(store: Path, device: torch.device, batch: int) -> Iterator[Epoch]:
    """Rows that two workers of a `DataLoader` read, which it copies into page-locked memory."""
    dataset = precache.CachedDataset(store)
    loader: Any = DataLoader(
        dataset, batch, shuffle=True, num_workers=2, collate_fn=dataset.collate,
        pin_memory=device.type == "cuda", persistent_workers=True,
        multiprocessing_context="forkserver",
    )  # fmt: skip

    def epoch() -> int:
        rows = 0
        for made in loader:
            made["image"].to(device, non_blocking=True)
            rows += len(made["image"])
        finish(device)
        return rows

    yield epoch


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """A turn of training: ms a step, CPU-ms a step of the host, and the share of the device's time
    between steps: by events around each, and by the loader's own clock.
    """

    ms: float
    cpu_ms: float
    between: float
    stall_ratio: float | None = None


def make_step(device: torch.device, sizes: Sizes, compiled: bool) -> Step:
    """A training step on (N, 3, H, W) bf16 images in channels-last and (N,) int64 labels."""
    torch.manual_seed(0)
    model: Any = resnet(sizes.depth, CLASSES, sizes.width)
    model = model.to(device, memory_format=torch.channels_last)
    torch.backends.cudnn.benchmark = True
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if compiled:
        model = torch.compile(model)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        # A graph must not hold what autocast keeps from one step to the next.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=not compiled):
            output = model(images)
        # Photographs in no folder of a class have label -1.
        loss = nn.functional.cross_entropy(output.float(), labels.clamp(min=0))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _captured(step, device, sizes) if compiled and device.type == "cuda" else step


def _captured(step: Step, device: torch.device, sizes: Sizes) -> Step:
    """A step as a CUDA graph: a copy of its batch, and one launch."""
    images = torch.zeros((sizes.batch, 3, CROP, CROP), dtype=torch.bfloat16, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.zeros(sizes.batch, dtype=torch.int64, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step(images, labels)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(images, labels)

    def replay(given: Tensor, given_labels: Tensor) -> Tensor:
        images.copy_(given)
        labels.copy_(given_labels)
        graph.replay()
        return loss

    return replay


def _turn(
    batches: Iterable[tuple[Tensor, Tensor]],
    step: Step,
    sizes: Sizes,
    device: torch.device,
    begun: Callable[[], object] = lambda: None,
) -> Steps:
    """Steps that follow each other without a wait, measured from one wait to the next; `begun` is
    called at the first of these."""
    batches = iter(batches)
    for image, label in itertools.islice(batches, WARM_STEPS if device.type == "cuda" else 1):
        step(image, label)
    finish(device)
    begun()
    started, cpu = time.perf_counter(), time.process_time()
    marks, queued = _Marks(device), deque[Any]()
    for image, label in itertools.islice(batches, sizes.steps):
        marks.mark()
        step(image, label)
        queued.append(marks.mark())
        # As a loader does it: the host would spin, if it went on until the device's queue is full.
        if len(queued) > STEPS_AHEAD and device.type == "cuda":
            queued.popleft().synchronize()
    finish(device)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    passed = marks.between()
    between = sum(passed[1::2]) / sum(passed)
    return Steps(wall / sizes.steps * 1e3, cpu / sizes.steps * 1e3, between)


def _normalized(
    image: Tensor, label: Tensor, normalize: Normalize
) -> Iterator[tuple[Tensor, Tensor]]:
    draw = Draw((), 0, torch.arange(len(image), device=image.device))
    while True:
        yield normalize.images(image, draw), label


def train(
    stores: Mapping[str, Path], device: torch.device, sizes: Sizes, compiled: bool
) -> dict[str, list[Steps]]:
    """Turns of each way that can be had, one after another, between turns on a resident batch."""
    step = make_step(device, sizes, compiled)
    found: dict[str, list[Steps]] = {name: [] for name in (STILL, NORMALIZED, *WAYS)}
    normalize = Normalize([127.0] * 3, [64.0] * 3, torch.bfloat16, channels_last=True)
    given: dict[str, Any] = {"device": device, "output": "tuple"}
    with contextlib.ExitStack() as ends:
        loaders = {
            name: ends.enter_context(
                precache.Loader(
                    stores[way.codec], sizes.batch, transform=normalize, **given, **way.options
                )
            )
            for name, way in WAYS.items()
        }
        with precache.Loader(stores["raw"], sizes.batch, drop_last=True, **given) as plain:
            image, label = next(iter(plain))
        fixed = next(_normalized(image, label, normalize))
        for number in range(sizes.rounds + 1):
            still = itertools.repeat(fixed)
            turns = {STILL: _turn(still, step, sizes, device)}
            same = _normalized(image, label, normalize)
            turns[NORMALIZED] = _turn(same, step, sizes, device)
            for name, loader in loaders.items():
                batches = iter(loader)
                turn = _turn(batches, step, sizes, device, loader.stats)
                turns[name] = dataclasses.replace(turn, stall_ratio=loader.stats().stall_ratio)
                batches.close()  # it is a generator
            log.print("  " + ", ".join(f"{name} {each.ms:.2f}" for name, each in turns.items()))
            for name, turn in turns.items():
                found[name] += [turn] * bool(number)  # the first round is not kept
    return found


def _table(
    feeding: Mapping[str, Feeding], trained: Mapping[str, Sequence[Steps]], sizes: Sizes,
    device: torch.device, remarks: Sequence[str],
) -> Table:  # fmt: skip
    table = Table(
        f"{sizes.rows:,} rows, batches of {sizes.batch}; {_hardware(device)}",
        ("fed by", "opened s|.1f", "first|.1f", "CPU-ms|.1f", "samples/s|,.0f", "step ms|.2f",
         "ratio|.3f", "cores|.3f", "beyond|.1f", "between|.2%", "stalled|.2%", "CPU-ms <|d",
         "ratio ≤|.2f"),
        "CPU-ms per 1,000 samples with nothing else to do, in the first epoch and after;\n"
        "then a step, its ratio to that on the resident batch, cores that were busy, CPU-ms per\n"
        "1,000 beyond those of the step, the share of the device's time between steps, and the\n"
        "loader's own stall ratio.",
        remarks=[*remarks],
        measured={"sizes": sizes, "feeding": feeding, "training": trained},
    )  # fmt: skip
    for name in {**feeding, **trained}:
        cells: list[Any] = [None] * 10
        if fed := feeding.get(name):
            cells[:2] = fed.opened, fed.costs[0].cpu_ms_per_1000
            cells[2:4] = fed.median("cpu_ms_per_1000"), fed.median("samples_per_s")
        if turns := trained.get(name):
            cells[4:] = _trained(turns, trained[STILL], sizes.batch)
        targets = (WAYS[name].target, 1.02) if name in WAYS else (None, None)
        table.add(name, *cells, *targets)
    return table


def _trained(turns: Sequence[Steps], still: Sequence[Steps], batch: int) -> Iterator[float | None]:
    median, pairs = statistics.median, list(zip(turns, still, strict=True))
    yield median(turn.ms for turn in turns)
    yield median_ratio([turn.ms for turn in turns], [turn.ms for turn in still])
    yield median(turn.cpu_ms / turn.ms for turn in turns)
    yield median((turn.cpu_ms - alone.cpu_ms) / batch * 1e3 for turn, alone in pairs)
    yield median(turn.between for turn in turns)
    stalled = [turn.stall_ratio for turn in turns if turn.stall_ratio is not None]
    yield median(stalled) if stalled else None


def _pieces(stores: Mapping[str, Path], device: torch.device, sizes: Sizes) -> dict[str, float]:
    """ms of the device for a batch: what the ways are made of, and some transforms."""
    shape = (sizes.batch, 3, CROP, CROP)
    rows = torch.randint(0, 256, shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(shape, dtype=torch.uint8, device=device).copy_(rows)
    normalize = Normalize([127.0] * 3, [64.0] * 3, torch.bfloat16, channels_last=True)
    augment = Compose([RandomResizedCrop(CROP), HorizontalFlip()])
    draw = Draw((), 0, torch.arange(sizes.batch, device=device))
    works: dict[str, Callable[[], object]] = {
        "copied from pinned memory": lambda: there.copy_(rows, non_blocking=True),
        "image's filter undone": lambda: undo_image_tensor(there),
        "Normalize, to bf16 in channels-last": lambda: normalize.images(there, draw),
        "RandomResizedCrop and HorizontalFlip": lambda: augment.apply({"image": there}, draw),
    }
    if device.type == "cuda" and nvcomp.available():
        for codec, store in stores.items():
            reader = VersionReader(str(store)).readers["image"]
            if not reader.framed:
                continue
            some = np.random.default_rng(0).permutation(reader.array.rows)[: sizes.batch]
            room = np.empty(len(some) * reader.frame_bound, np.uint8)
            lengths = torch.from_numpy(reader.read_frames(some, room)).to(device)
            frames, offsets = torch.from_numpy(room).to(device), lengths.cumsum(0) - lengths
            works[f"{codec}: frames decompressed"] = functools.partial(
                nvcomp.decompress, frames, offsets, lengths, reader.array.row_nbytes
            )
    return {name: _device_ms(run, device, 20) for name, run in works.items()}


def _device_ms(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Of one run, out of so many that follow each other without a wait."""
    work()
    marks = _Marks(device)
    marks.mark()
    for _ in range(times):
        work()
    marks.mark()
    return marks.between()[0] / times


# --- several ranks ------------------------------------------------------------------------------

RANK_WAYS: dict[str, dict[str, Any]] = {
    "copied": {},
    "resident there": {"reading": Reading(resident="device")},
}
PATIENCE_SECONDS = 120.0
"""Limit of the wait for the other ranks, one of which may have failed."""


@part("ranks")
def ranks(
    work: Work,
    store: Annotated[Path, "of raw rows, such as the part ways makes"],
    ranks: Annotated[int, "processes"] = 8,
    batch: Annotated[int, "samples of a batch of each"] = 32,
    epochs: Annotated[int, "epochs after the first"] = 4,
    rehearse: Annotated[bool, "on the CPU"] = False,
) -> Table:
    """Several ranks that feed one device.

    Each is a process with a Loader of its own, and all begin together. Of each way: samples/s and
    CPU time of all together, and the page-locked memory of each.
    """
    device = str(_device(rehearse))
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(ranks, context) as pool:
        rest = ranks, store, batch, epochs, device, manager.Barrier(ranks)
        begun = [pool.submit(_rank, number, *rest) for number in range(ranks)]
        every = [each.result() for each in begun]
    table = Table(
        f"{ranks} ranks, batches of {batch} each, one device",
        ("fed by", "samples/s|,.0f", "CPU-ms per 1,000|.1f", "page-locked MB of each: least|,.0f",
         "most|,.0f"),
    )  # fmt: skip
    for name in RANK_WAYS:
        costs, locked = zip(*(each[name] for each in every), strict=True)
        samples = sum(cost.samples for cost in costs)
        speed = samples / max(cost.wall_seconds for cost in costs)
        cpu = sum(cost.cpu_seconds for cost in costs) * 1e6 / samples
        table.add(name, speed, cpu, min(locked) / 1e6, max(locked) / 1e6)
        table.measured[name] = costs
    return table


def _rank(
    rank: int, ranks: int, store: Path, batch: int, epochs: int, device: str, barrier: Any
) -> dict[str, tuple[Cost, int]]:
    """Cost and page-locked bytes of each way."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    found = {}
    for name, options in RANK_WAYS.items():
        with precache.Loader(store, batch, device=device, **options) as loader:
            _drained(loader)
            barrier.wait(PATIENCE_SECONDS)
            cost = cost_of(lambda: sum(_drained(loader) for _ in range(epochs)))
            cuda = loader.device.type == "cuda"
            locked = torch.cuda.host_memory_stats()["allocated_bytes.current"] if cuda else 0
            found[name] = cost, int(locked)
            barrier.wait(PATIENCE_SECONDS)
    return found


PARTS = (ways, ranks)

if __name__ == "__main__":
    main("device", PARTS)
