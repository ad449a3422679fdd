"""``python -m tests.bench.device``: what feeding a CUDA device costs, by each way there is.

One run of minutes on a machine with a CUDA device: what each way costs the host's CPUs and how many
samples/s it brings, with nothing else to do, beside what it could not do without (`baselines`);
then how long a ResNet-50 step takes (bf16, channels-last) that is fed by each, and what each thread
has to do meanwhile, beside the same step on one batch that never leaves the device, in turns. In
one of the turns that batch is normalised in each step, as the others are. ``--compile`` compiles
the step and captures it as a CUDA graph, so that it leaves the host idle. ``--rehearse`` goes
through all of it on the CPU, small: its figures mean nothing.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

import precache
from docs.examples.resnet import resnet
from precache.cli.installation import Installation
from precache.codecs import nvcomp
from precache.loading.gpu.gathering import RowOffsets
from precache.loading.gpu.registered import register_shards
from precache.loading.slots import STEPS_AHEAD, undo_image_tensor
from precache.reading.version_reader import VersionReader
from precache.transforms import Compose, Draw, HorizontalFlip, Normalize, RandomResizedCrop
from tests.bench.baselines import (
    Epoch,
    copy_rows,
    decode_jpegs,
    decompress_frames,
    read_rows,
)
from tests.bench.common import (
    CROP,
    Cost,
    build_crops,
    cost_of,
    cpu_ms_by_thread,
    drain,
    find_photos,
    finish,
    log,
    multiply,
    touch,
    work_folder,
)
from tests.bench.direct import Direct, read_directly

Step = Callable[[Tensor, Tensor], Any]

CLASSES = 1000
WARM_STEPS = 6
"""Of a turn, that are not measured: the loader begins, the clocks rise."""

BATCHES_AHEAD = 8
"""At most, in preparation when a turn ends."""

STEP_TARGET = 1.02

LEAST_SHOWN = 0.02
"""CPU-ms of a step, of a thread that is printed."""

STILL = "resident batch"
"""The turn that the others are compared with."""

NORMALIZED = "resident batch, normalised"


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


FULL = Sizes(rows=11_264, batch=256, steps=30, rounds=5, epochs=4)
REHEARSAL = Sizes(rows=96, batch=8, steps=4, rounds=2, epochs=2, depth=18, width=8)


@dataclass(frozen=True)
class Way:
    """A codec, and options of the loader that reads it."""

    codec: str
    options: Mapping[str, str]
    cpu_target: float | None = None


WAYS = {
    "raw, copied": Way("raw", {}, 15),
    "raw, gathered by the device": Way("raw", {"gather": "device"}, 5),
    "raw, resident there": Way("raw", {"resident": "device"}),
    "image, zstd on the host": Way("image", {}),
    "image, zstd on the device": Way("image", {"decompress": "device"}),
    "image, both by the device": Way("image", {"decompress": "device", "gather": "device"}),
}


@dataclass(frozen=True)
class Feeding:
    """What a way costs with nothing else to do.

    Attributes
    ----------
    opened
        Seconds until the loader was made: what is loaded or page-locked then.
    said
        Its warnings: why it went another way, if it did.
    first, warm
        Epochs; checksums are checked in the first.
    """

    opened: float
    said: tuple[str, ...]
    first: Cost
    warm: tuple[Cost, ...]

    @property
    def cpu_ms_per_1000(self) -> float:
        return statistics.median(cost.cpu_ms_per_1000 for cost in self.warm)

    @property
    def samples_per_s(self) -> float:
        return statistics.median(cost.samples_per_s for cost in self.warm)


@dataclass(frozen=True)
class Steps:
    """A turn of training: ms a step, CPU-ms a step of the host, all together and by thread, and the
    share of the device's time between steps: by events around each, and by the loader's own clock.
    """

    ms: float
    cpu_ms: float
    threads: Mapping[str, float]
    between: float | None = None
    stall_ratio: float | None = None


# --- time ---------------------------------------------------------------------------------------


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
            # torch's own class has no types.
            event = torch.cuda.Event(  # type: ignore[no-untyped-call]
                enable_timing=True, blocking=True
            )
            event.record()
            self._marks.append(event)
        return self._marks[-1]

    def between(self) -> list[float]:
        """The ms from each mark to the next."""
        if not self._cuda:
            return [later - mark for mark, later in itertools.pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [mark.elapsed_time(later) for mark, later in itertools.pairwise(self._marks)]


def _device_ms(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Of one run, out of so many that follow each other without a wait."""
    work()
    marks = _Marks(device)
    marks.mark()
    for _ in range(times):
        work()
    marks.mark()
    return marks.between()[0] / times


# --- feeding ------------------------------------------------------------------------------------


class _Said(logging.Handler):
    """Keeps the warnings of a block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "_Said":
        logging.getLogger("precache").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("precache").removeHandler(self)


def feed(way: Way, store: Path, device: torch.device, sizes: Sizes) -> Feeding:
    """Run epochs of a loader, and do nothing with its batches."""
    touch(path for path in store.rglob("*") if path.is_file())
    with _Said() as said:
        started = time.perf_counter()
        with precache.Loader(store, sizes.batch, device=device, **way.options) as loader:
            opened = time.perf_counter() - started
            costs = [cost_of(lambda: drain(loader)) for _ in range(sizes.epochs + 1)]
    return _shown(Feeding(opened, tuple(said.lines), costs[0], tuple(costs[1:])))


def feed_by(make: Callable[[], AbstractContextManager[Epoch]], sizes: Sizes) -> Feeding:
    """Run epochs of a baseline."""
    started = time.perf_counter()
    with make() as epoch:
        opened = time.perf_counter() - started
        costs = [cost_of(epoch, children=True) for _ in range(sizes.epochs + 1)]
    return _shown(Feeding(opened, (), costs[0], tuple(costs[1:])))


def _baselines(
    stores: Mapping[str, Path], source: Path, device: torch.device, sizes: Sizes, all_of_them: bool
) -> dict[str, Callable[[], AbstractContextManager[Epoch]]]:
    given = {"device": device, "batch": sizes.batch}
    found: dict[str, Callable[[], AbstractContextManager[Epoch]]] = {
        "raw rows, copied by hand": functools.partial(copy_rows, stores["raw"], **given),
        "image's frames, by zstd alone": functools.partial(decompress_frames, stores["image"]),
    }
    if all_of_them:
        found["raw, by a DataLoader"] = functools.partial(read_rows, stores["raw"], **given)
        found["JPEGs, by a DataLoader"] = functools.partial(decode_jpegs, source, **given)
    return found


def _shown(fed: Feeding) -> Feeding:
    log.print(f"  {fed.cpu_ms_per_1000:.1f} CPU-ms per 1,000, {fed.samples_per_s:,.0f} samples/s")
    return fed


# --- training -----------------------------------------------------------------------------------


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
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
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
    batches: Iterator[tuple[Tensor, Tensor]],
    step: Step,
    sizes: Sizes,
    device: torch.device,
    begun: Callable[[], object] = lambda: None,
) -> Steps:
    """Steps that follow each other without a wait, measured from one wait to the next; `begun` is
    called at the first of these."""
    for image, label in itertools.islice(batches, WARM_STEPS if device.type == "cuda" else 1):
        step(image, label)
    finish(device)
    begun()
    threads, started, cpu = cpu_ms_by_thread(), time.perf_counter(), time.process_time()
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
    spent = cpu_ms_by_thread()
    by_thread = {name: (ms - threads.get(name, 0.0)) / sizes.steps for name, ms in spent.items()}
    passed = marks.between()
    between = sum(passed[1::2]) / sum(passed)
    return Steps(wall / sizes.steps * 1e3, cpu / sizes.steps * 1e3, by_thread, between)


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
    loaders = {
        name: precache.Loader(
            stores[way.codec], sizes.batch, device=device, transform=normalize, output="tuple",
            **way.options,
        )
        for name, way in WAYS.items()
    }  # fmt: skip
    with precache.Loader(
        stores["raw"], sizes.batch, device=device, output="tuple", drop_last=True
    ) as plain:
        image, label = next(iter(plain))
    fixed = next(_normalized(image, label, normalize))
    for number in range(sizes.rounds + 1):  # the first is not kept
        for name, same in (
            (STILL, itertools.repeat(fixed)),
            (NORMALIZED, _normalized(image, label, normalize)),
        ):
            found[name] += [_turn(same, step, sizes, device)] * bool(number)
        for name, loader in loaders.items():
            batches = iter(loader)
            turn = _turn(batches, step, sizes, device, loader.stats)
            stalled = loader.stats().stall_ratio
            batches.close()  # type: ignore[attr-defined]  # it is a generator
            found[name] += [dataclasses.replace(turn, stall_ratio=stalled)] * bool(number)
        log.print(
            "  " + ", ".join(f"{name} {each[-1].ms:.2f}" for name, each in found.items() if each)
        )
    for loader in loaders.values():
        loader.close()
    return found


# --- pieces -------------------------------------------------------------------------------------


def pieces(stores: Mapping[str, Path], device: torch.device, sizes: Sizes) -> dict[str, float]:
    """ms of the device for a batch: what the ways are made of, and some transforms."""
    shape = (sizes.batch, 3, CROP, CROP)
    rows = torch.randint(0, 256, shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(shape, dtype=torch.uint8, device=device).copy_(rows)
    normalize = Normalize([127.0] * 3, [64.0] * 3, torch.bfloat16, channels_last=True)
    augment = Compose([RandomResizedCrop(CROP), HorizontalFlip()])
    numbers = torch.arange(sizes.batch, device=device)
    works: dict[str, Callable[[], object]] = {
        "copied from pinned memory": lambda: there.copy_(rows, non_blocking=True),
        "image's filter undone": lambda: undo_image_tensor(there),
        "Normalize, to bf16 in channels-last": lambda: normalize.images(
            there, Draw((), 0, numbers)
        ),
        "RandomResizedCrop and HorizontalFlip": lambda: augment.apply(
            {"image": there}, Draw((), 0, numbers)
        ),
    }
    registered = []
    if device.type == "cuda":
        for codec, store in stores.items():
            reader = VersionReader(str(store))
            shards = register_shards(reader, device, frames=nvcomp.available())
            if shards is None:
                continue
            registered.append(shards)
            some = np.random.default_rng(0).permutation(reader.version.rows)[: sizes.batch]
            layout = shards.layouts["image"]
            if isinstance(layout, RowOffsets):
                works[f"{codec}: rows gathered"] = functools.partial(
                    shards.gather, "image", torch.from_numpy(layout.of(some)).to(device)
                )
                continue
            starts = torch.from_numpy(layout.starts[some]).to(device)
            lengths = torch.from_numpy(layout.lengths[some]).to(device)
            gather = functools.partial(
                shards.gather_frames, starts, int(layout.lengths[some].max())
            )
            works[f"{codec}: frames gathered"] = gather
            nbytes = reader.readers["image"].array.row_nbytes
            works[f"{codec}: frames decompressed"] = functools.partial(
                nvcomp.decompress, *gather(), lengths, nbytes
            )
    found = {name: _device_ms(work, device, 20) for name, work in works.items()}
    for shards in registered:
        shards.close()
    return found


# --- results ------------------------------------------------------------------------------------


def _ratio(steps: Sequence[Steps], still: Sequence[Steps]) -> float:
    return statistics.median(a.ms / b.ms for a, b in zip(steps, still, strict=True))


def _cpu_beyond(steps: Sequence[Steps], still: Sequence[Steps], batch: int) -> float:
    """CPU-ms for 1,000 samples, beyond those of the step itself."""
    return statistics.median(
        (a.cpu_ms - b.cpu_ms) / batch * 1e3 for a, b in zip(steps, still, strict=True)
    )


def _by_thread(steps: Sequence[Steps]) -> dict[str, float]:
    names = {name for each in steps for name in each.threads}
    found = {n: statistics.median(each.threads.get(n, 0.0) for each in steps) for n in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def as_json(
    fed: Mapping[str, Feeding], trained: Mapping[str, Sequence[Steps]], sizes: Sizes
) -> dict[str, Any]:
    """Plain data: medians, and all that was measured."""
    still = trained[STILL]
    return {
        "feeding": {
            name: {
                "cpu_ms_per_1000": each.cpu_ms_per_1000,
                "samples_per_s": each.samples_per_s,
                **dataclasses.asdict(each),
            }
            for name, each in fed.items()
        },
        "training": {
            name: {
                "ms": statistics.median(each.ms for each in steps),
                "ratio": _ratio(steps, still),
                "cores_busy": statistics.median(each.cpu_ms / each.ms for each in steps),
                "cpu_ms_per_1000_beyond_the_step": _cpu_beyond(steps, still, sizes.batch),
                "cpu_ms_of_a_step_by_thread": _by_thread(steps),
                "turns": [dataclasses.asdict(each) for each in steps],
            }
            for name, steps in trained.items()
        },
    }


def table(found: Mapping[str, Any]) -> Table:
    """The JSON's medians."""
    names = (
        "opened s", "first", "CPU-ms", "samples/s", "step ms", "ratio", "cores", "beyond",
        "between", "stalled",
    )  # fmt: skip
    made = Table(
        "fed by",
        *(Column(name, justify="right") for name in names),
        "targets",
        caption="CPU-ms per 1,000 samples with nothing else to do, in the first epoch and after;\n"
        "then a step, its ratio to that on the resident batch, cores that were busy, CPU-ms per\n"
        "1,000 beyond those of the step, the share of the device's time between steps, and the\n"
        "loader's own stall ratio.",
    )
    for name in {**found["feeding"], **found["training"]}:
        made.add_row(
            name, *_fed(found["feeding"].get(name)), *_trained(found["training"].get(name)),
            _targets(name),
        )  # fmt: skip
    return made


def _fed(each: Mapping[str, Any] | None) -> tuple[str, ...]:
    if each is None:
        return ("",) * 4
    return (
        f"{each['opened']:.1f}",
        f"{_per_1000(each['first']):.1f}",
        f"{each['cpu_ms_per_1000']:.1f}",
        f"{each['samples_per_s']:,.0f}",
    )


def _trained(steps: Mapping[str, Any] | None) -> tuple[str, ...]:
    if steps is None:
        return ("",) * 6
    between, stalled = (
        [turn[name] for turn in steps["turns"] if turn[name] is not None]
        for name in ("between", "stall_ratio")
    )
    return (
        f"{steps['ms']:.2f}",
        f"{steps['ratio']:.3f}",
        f"{steps['cores_busy']:.3f}",
        f"{steps['cpu_ms_per_1000_beyond_the_step']:.1f}",
        f"{statistics.median(between):.2%}",
        f"{statistics.median(stalled):.2%}" if stalled else "",
    )


def _said_of(direct: Direct | str) -> str:
    if isinstance(direct, str):
        return f"left out: {direct}"
    cpu = statistics.median(cost.cpu_ms_per_1000 for cost in direct.epochs[1:])
    speed = statistics.median(cost.samples_per_s for cost in direct.epochs[1:])
    how = "itself" if direct.by_itself else "through cuFile"
    module = "" if direct.module_loaded else "not "
    how += f", nvidia-fs {module}loaded"
    return f"{how}: {cpu:.1f} CPU-ms per 1,000, {speed:,.0f} samples/s"


def _per_1000(cost: Mapping[str, Any]) -> float:
    return float(cost["cpu_seconds"] * 1e6 / cost["samples"])


def _targets(name: str) -> str:
    if name not in WAYS:
        return ""
    target = WAYS[name].cpu_target
    cpu = f"CPU-ms < {target:g}, " if target else ""
    return f"{cpu}ratio ≤ {STEP_TARGET}"


def _hardware(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": "none: a rehearsal"}
    return {
        "device": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "nvcomp": nvcomp.available(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.device", description=__doc__)
    for field in ("rows", "batch", "steps", "rounds", "epochs"):
        default = getattr(FULL, field)
        parser.add_argument(f"--{field}", type=int, help=f"({default})")
    parser.add_argument("--compile", action="store_true", help="the step, and capture it")
    parser.add_argument("--dataloaders", action="store_true", help="torch's DataLoader, too")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--folder", type=Path, help="work there, and keep what is made")
    parser.add_argument("--out", type=Path, help="write everything there, as JSON")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small")
    options = parser.parse_args(arguments)
    sizes = REHEARSAL if options.rehearse else FULL
    given = {f.name: getattr(options, f.name, None) for f in dataclasses.fields(sizes)}
    sizes = dataclasses.replace(sizes, **{n: v for n, v in given.items() if v is not None})
    # More than a turn takes: loading must not end before it.
    needed = (WARM_STEPS + sizes.steps + BATCHES_AHEAD) * sizes.batch
    if sizes.rows < needed and not options.rehearse:
        parser.error(f"a turn takes {needed} rows; give as many")
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("nothing measured: this needs a CUDA device, and torch sees none")
    device = torch.device("cpu") if options.rehearse else torch.device("cuda", 0)
    with work_folder(options.folder) as folder:
        root, files = find_photos(options.photos, folder)
        source = multiply(files, root, sizes.rows, folder / f"photos-{sizes.rows}")
        stores = {}
        for codec in dict.fromkeys(way.codec for way in WAYS.values()):
            log.print(f"{codec}: building {sizes.rows:,} rows")
            stores[codec] = build_crops(source, folder / f"{codec}.store", codec)
        fed = {}
        for name, way in WAYS.items():
            log.print(f"{name}: {sizes.epochs + 1} epochs")
            fed[name] = feed(way, stores[way.codec], device, sizes)
        log.print(f"raw, read by kvikio: {sizes.epochs + 1} epochs")
        direct = read_directly(stores["raw"], device, sizes.batch, sizes.epochs)
        log.print(f"training: {sizes.rounds + 1} rounds")
        trained = train(stores, device, sizes, options.compile)
        measured_pieces = pieces(stores, device, sizes)
        for name, make in _baselines(stores, source, device, sizes, options.dataloaders).items():
            log.print(f"{name}: {sizes.epochs + 1} epochs")
            fed[name] = feed_by(make, sizes)
    found = {
        **_hardware(device),
        "machine": dataclasses.asdict(Installation.here()),
        **dataclasses.asdict(sizes),
        "compiled": options.compile,
        "pieces": measured_pieces,
        "batch_nbytes": sizes.batch * 3 * CROP * CROP,
        "kvikio": direct if isinstance(direct, str) else dataclasses.asdict(direct),
        **as_json(fed, trained, sizes),
    }
    if options.out:
        options.out.write_text(json.dumps(found))
    console = Console(highlight=False, width=170)
    console.print(table(found))
    for name, each in fed.items():
        for line in each.said:
            console.print(f"{name}: {line}", soft_wrap=True)
    console.print("CPU-ms of a step by thread:")
    for name, each in found["training"].items():
        threads = each["cpu_ms_of_a_step_by_thread"].items()
        parts = [f"{thread} {ms:.2f}" for thread, ms in threads if ms >= LEAST_SHOWN]
        console.print(f"  {name}: {', '.join(parts)}", soft_wrap=True)
    console.print("ms of the device for a batch:")
    for name, spent in found["pieces"].items():
        console.print(f"  {name}: {spent:.3f}")
    console.print(f"rows read by kvikio: {_said_of(direct)}", soft_wrap=True)
    console.print(f"{found['device']}; {Installation.here()}", soft_wrap=True)


if __name__ == "__main__":
    main()
