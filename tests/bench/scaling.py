"""The part of `building` about workers, their driver and memory, and the tools of others."""

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from unittest import mock

import numpy as np
import psutil
from PIL import Image

import precache
from precache.recipe.ops import Decode
from precache_workers.cluster import executor as cluster
from precache_workers.cluster.process_engine import START
from precache_workers.driver.build_result import BuildResult
from precache_workers.shards.shard_task import run_shard
from tests.bench.costs import peak_bytes
from tests.bench.harness import (
    CROP,
    RESIZE,
    Rounds,
    Rows,
    Table,
    Work,
    in_clean_process,
    log,
    median_ratio,
    multiply,
    part,
    rotated,
)
from tests.bench.peers.environments import ROOT, TOOLS, NotInstalledError, python_of
from tests.support.cgroups import cpu_seconds, entering, group
from tests.support.raycluster import Cluster

MIB = 1 << 20
Only = Literal["workers", "driver", "memory", "tools"]


@part("scaling", needs=["simplejpeg", "ray"])
def scaling(
    work: Work,
    rows: Rows = 5000,
    rounds: Rounds = 3,
    only: Annotated[tuple[Only, ...], "some of these"] = ("workers", "driver", "memory", "tools"),
    install: Annotated[bool, "install the tools of others into the folder"] = False,
) -> Iterator[Table]:
    """Workers, driver, memory, and the same work by the tools of others.

    workers  photos built serially, by a Ray of its own and on a cluster that is joined, with 1
             and with 2 workers in turns: CPU time of the tasks
    driver   the driver's own CPU time, at 1,000 shards of 5, 25 and 100 photos
    memory   what a worker holds at most, with ordinary photos and with the largest allowed
    tools    the same photos through Ray Data and img2dataset: CPU time of all processes
    """
    if "workers" in only:
        yield _workers(work, rows, rounds)
    if "driver" in only:
        yield _driver(work, rows / 5000)
    if "memory" in only:
        yield _memory(work)
    if "tools" in only:
        yield _tools(work, rows, rounds, install)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


# --- what processes use, seen from outside ------------------------------------------------------


@dataclass
class _Process:
    """CPU seconds since the watch began, and most memory that was its own."""

    worker: bool
    before: float
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


class Watch:
    """Looks at all descendants of this process while it is open.

    A worker is one on this machine, or a process of Ray's that has had a task. What a process uses
    after the last look at it is missed.
    """

    def __init__(self) -> None:
        self._seen: dict[psutil.Process, _Process] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._look()
        for each in self._seen.values():
            each.before, each.cpu_seconds = each.cpu_seconds, 0.0
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def processes(self, *, workers: bool) -> list[_Process]:
        """All of them, or the workers alone."""
        return [each for each in self._seen.values() if each.worker or not workers]

    def cpu_seconds(self, *, workers: bool = False) -> float:
        return sum(each.cpu_seconds for each in self.processes(workers=workers))

    def _run(self) -> None:
        while not self._over.wait(0.2):
            self._look()

    def _look(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                seen = self._seen.setdefault(process, _Process(False, 0.0))
                title = process.name()
                seen.worker |= title.startswith("ray::") and "Agent" not in title
                seen.worker |= START in process.cmdline()
                times = process.cpu_times()
                seen.cpu_seconds = times.user + times.system - seen.before
                seen.peak_bytes = max(seen.peak_bytes, peak_bytes(process.pid))


@contextlib.contextmanager
def counted() -> Iterator[tuple[tuple[str, ...], Callable[[], float]]]:
    """What a command line is to begin with, and the CPU seconds of all its processes until then.

    They are the kernel's where a group of processes can be made, else what a `Watch` sees.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(group("cpuacct"))
        except OSError:
            yield (), stack.enter_context(Watch()).cpu_seconds
        else:
            yield entering(folder), lambda: cpu_seconds(folder)


# --- builds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Build:
    """One build.

    Attributes
    ----------
    driver_seconds
        CPU time of the driver from beginning to end.
    loop_seconds, loop_cpu_seconds
        Wall time, and CPU time of the driver, while shard tasks ran.
    worker_seconds, worker_peak_bytes
        CPU time and most memory of the workers' processes, as seen from outside.
    """

    result: BuildResult
    driver_seconds: float
    loop_seconds: float
    loop_cpu_seconds: float
    worker_seconds: float = 0.0
    worker_peak_bytes: int = 0

    @property
    def task_ms(self) -> float:
        """CPU-ms a photo of the tasks, as they tell it themselves."""
        return self.result.cpu_seconds / self.result.samples * 1e3


@dataclass(frozen=True)
class _Way:
    """A kind of build, with the variables of its driver."""

    title: str
    options: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)


def _local(cpus: int) -> _Way:
    return _Way(f"local, {_count(cpus)}", {"address": "local", "cpus": cpus})


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _driven(source: Path, store: Path, way: _Way, more: Mapping[str, Any]) -> _Build:
    """To be called in a clean process."""
    os.environ.update(way.variables)
    began, loops = time.process_time(), []

    @contextlib.contextmanager
    def executor(*given: Any) -> Iterator[cluster.RunTasks]:
        with cluster.executor(*given) as run:

            def measured(function: Callable[[Any], Any], items: Iterable[Any], *more: Any) -> Any:
                wall, cpu = time.perf_counter(), time.process_time()
                yield from run(function, items, *more)
                if function is run_shard:
                    loops.append((time.perf_counter() - wall, time.process_time() - cpu))

            yield measured

    with mock.patch("precache_workers.driver.build.executor", executor):
        recipe = precache.Recipe.image(resize=RESIZE, crop=CROP)
        result = precache.build(source, store, recipe, **way.options, **more)
    return _Build(result, time.process_time() - began, *loops[-1])


def _build(source: Path, folder: Path, way: _Way, **more: Any) -> _Build:
    """Build in a process of its own, watched; the store is removed."""
    store = folder / "watched.store"
    try:
        with Watch() as watch:
            made = in_clean_process(_driven, source, store, way, more)
    finally:
        shutil.rmtree(store, ignore_errors=True)
    peaks = (each.peak_bytes for each in watch.processes(workers=True))
    return replace(
        made,
        worker_seconds=watch.cpu_seconds(workers=True),
        worker_peak_bytes=max(peaks, default=0),
    )


@contextlib.contextmanager
def _joined(folder: Path) -> Iterator[list[_Way]]:
    """A cluster of two nodes with a CPU each; builds on one of them, and on both."""
    running = Cluster(folder)
    try:
        running.add(1, resources={"first": 1, "any": 1})
        running.add(1, resources={"any": 1})
        options = {1: {"first": 1}, 2: {"any": 1}}
        yield [
            _Way(
                f"cluster, {_count(cpus)}",
                {"address": "auto", "node_resources": resources},
                running.env,
            )
            for cpus, resources in options.items()
        ]
    finally:
        running.close()


def _workers(work: Work, rows: int, rounds: int) -> Table:
    source, serial = work.photos(rows, plain=True), _Way("serial", {"address": "serial"})
    with _joined(work.folder / "cluster") as others:
        ways = (serial, _local(1), _local(2), *others)
        found: dict[str, list[_Build]] = {way.title: [] for way in ways}
        for way in rotated(ways, rounds):
            log.print(way.title)
            found[way.title].append(_build(source, work.folder, way))
    table = Table(
        f"{rows:,} photos, resized to {RESIZE}, cropped to {CROP}, codec image",
        ("", "tasks|.2f", "of serial|.2f", "images/s|,.0f"),
        "CPU-ms a photo; medians of all rounds, ratios of neighbours. Target: at most 1.1.",
        measured=found,
    )  # fmt: skip
    for title, made in found.items():
        times = [each.task_ms for each in made]
        ratio = median_ratio(times, [each.task_ms for each in found[serial.title]])
        rate = _median(each.result.samples / each.loop_seconds for each in made)
        table.add(title, _median(times), ratio, rate)
    return table


# --- the driver, and memory ---------------------------------------------------------------------

EMPTY_TASKS = 1000


def _driver(work: Work, scale: float) -> Table:
    table = Table(
        "The driver of 2 workers",
        ("", "CPU-ms a shard|.2f", "of Ray's alone|.1f", "of all CPU time|.1%",
         "of a core's time|.1%", "CPU-s in all|.1f"),
        "In the time that shard tasks run. All CPU time is the driver's then, and the workers'.\n"
        "Target: below 2%.",
    )  # fmt: skip
    alone = in_clean_process(_ray_alone)
    table.add("empty tasks, Ray alone", alone, 1.0, None, None, None)
    shards = max(1, round(1000 * scale))
    for photos in (5, 25, 100):
        source = work.photos(shards * photos, plain=True)
        name = f"{shards:,} shards of {photos}"
        log.print(name)
        made = table.measured[name] = _build(source, work.folder, _local(2), shard_samples=photos)
        cpu = made.loop_cpu_seconds
        ms = cpu / made.result.shards * 1e3
        shares = cpu / (cpu + made.worker_seconds), cpu / made.loop_seconds
        table.add(name, ms, ms / alone, *shares, made.driver_seconds)
    return table


def _empty(item: Any) -> None:
    """What a task of no work does."""


def _ray_alone() -> float:
    """CPU-ms of a driver for each empty task under the same number at a time."""
    import ray

    with ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False):
        remote: Any = ray.remote(_empty)
        ray.get([remote.remote(None) for _ in range(8)])
        began = time.process_time()
        under_way = [remote.remote(None) for _ in range(4)]
        for _ in range(EMPTY_TASKS):
            ready, under_way = ray.wait(under_way, num_returns=1)
            ray.get(ready)
            under_way.append(remote.remote(None))
        cpu = time.process_time() - began
        ray.get(under_way)
    return cpu / EMPTY_TASKS * 1e3


LIMIT, SIDE, OVER = Decode().max_pixels, 13_377, 20_000
"""Most pixels that decode takes, the side of a square just below, and one beyond it."""


def _memory(work: Work) -> Table:
    table = Table(
        "Memory of a worker",
        ("", "peak MiB|,.0f", "holes|d"),
        f"The limit is {LIMIT:,} pixels (decode's max_pixels).",
    )
    ordinary = work.photos(200, plain=True)
    for title, source in (("photos", ordinary), *_pictures(work.folder / f"large-{os.getpid()}")):
        if source is not ordinary:
            multiply(sorted(ordinary.rglob("*.*"))[:4], ordinary, 4, source)
        log.print(title)
        made = _build(source, work.folder, _local(1))
        table.add(title, made.worker_peak_bytes / MIB, len(made.result.holes))
    return table


def _pictures(folder: Path) -> Iterator[tuple[str, Path]]:
    """Titles, and folders of one picture each: the largest that a build takes, and a larger one."""
    large, turned = _picture(SIDE), Image.Exif()
    turned[0x0112] = 6  # its orientation
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "a JPEG at the limit": ("jpeg", "JPEG", {}),
        "the same, turned by EXIF": ("turned", "JPEG", {"exif": turned}),
        "the same, progressive": ("progressive", "JPEG", {"progressive": True}),
        "a PNG at the limit": ("png", "PNG", {"compress_level": 1}),
        f"a JPEG of {OVER:,} x {OVER:,}": ("over", "JPEG", {}),
    }
    for title, (name, kind, options) in kinds.items():
        if name == "over":
            large = _picture(OVER)
        (folder / name).mkdir(parents=True)
        large.save(folder / name / f"large.{kind.lower()}", kind, **options)
        yield title, folder / name


def _picture(side: int) -> Image.Image:
    """Colours that flow into each other: large in memory and small on the disk."""
    few = np.random.default_rng(0).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    return Image.fromarray(few).resize((side, side), Image.Resampling.BICUBIC)


# --- tools of others ----------------------------------------------------------------------------

CPUS, PER_FILE = 2, 500
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "NO_ALBUMENTATIONS_UPDATE": "1", "WANDB_MODE": "disabled"}


@dataclass(frozen=True)
class _Run:
    """What one tool took, all its processes together, and the bytes of its files."""

    samples: int
    cpu_seconds: float
    seconds: float
    nbytes: int

    @property
    def per_cpu_second(self) -> float:
        return self.samples / self.cpu_seconds


@dataclass(frozen=True)
class _Tool:
    """A tool: its command for (python, source, target), and how many images a target holds."""

    title: str
    environment: str | None
    command: Callable[[Path, Path, Path], Sequence[str | Path]]
    count: Callable[[Path], int]


def _precache(codec: str) -> _Tool:
    size = ("--resize", str(RESIZE), "--crop", str(CROP), "--codec", codec, "--cpus", str(CPUS))
    return _Tool(
        f"precache, {codec}",
        None,
        lambda python, source, target: (python, "-m", "precache", "build", source, target, *size),
        lambda target: int(precache.open(target).valid.sum()),
    )


def _ray_data(kind: str, title: str) -> _Tool:
    script = ROOT / "tests/bench/peers/ray_data.py"
    return _Tool(
        title,
        "raydata",
        lambda python, source, target: (python, script, kind, source, target, str(CPUS)),
        lambda target: sum(len(np.load(path, mmap_mode="r")) for path in target.glob("*.npy")),
    )


def _img2dataset(python: Path, source: Path, target: Path) -> Sequence[str | Path]:
    """It has no crop after a larger resize: the shorter side becomes what is cropped to."""
    urls = target.with_suffix(".txt")
    files = sorted(path for path in source.rglob("*") if path.is_file())
    urls.write_text("".join(f"{path.resolve().as_uri()}\n" for path in files), "utf-8")
    options = {
        "url_list": urls, "output_folder": target, "image_size": CROP,
        "resize_mode": "center_crop", "processes_count": CPUS, "thread_count": 2,
        "number_sample_per_shard": PER_FILE, "output_format": "webdataset",
    }  # fmt: skip
    return (python.with_name("img2dataset"), *(f"--{k}={value}" for k, value in options.items()))


def _count_tars(target: Path) -> int:
    tars = sorted(target.glob("*.tar"))
    names = (subprocess.check_output(("tar", "-tf", path), text=True) for path in tars)
    return sum(name.endswith(".jpg") for each in names for name in each.splitlines())


ALL_TOOLS = (
    _precache("image"),
    _precache("raw"),
    _ray_data("images", "Ray Data, read_images"),
    _ray_data("bytes", "Ray Data, precache's decoders"),
    _Tool("img2dataset, to JPEG", "img2dataset", _img2dataset, _count_tars),
)


def _run(tool: _Tool, source: Path, folder: Path, install: bool) -> _Run | str:
    """Its cost, or in a line why there is none."""
    target = folder / "target"
    try:
        python = python_of(tool.environment, folder / "environments", TOOLS, install=install)
        command = tool.command(python, source, target)
        with counted() as (prefix, count):
            began = time.perf_counter()
            done = subprocess.run(
                [*prefix, *(str(each) for each in command)],
                env={**os.environ, **QUIET, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'workers'}"},
                cwd=folder, capture_output=True, text=True, check=False,
            )  # fmt: skip
            seconds, cpu = time.perf_counter() - began, count()
        if done.returncode:
            return (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        files = (path.stat() for path in target.rglob("*") if path.is_file())
        return _Run(tool.count(target), cpu, seconds, sum(each.st_size for each in files))
    except NotInstalledError as error:
        return str(error)
    finally:
        shutil.rmtree(target, ignore_errors=True)
        target.with_suffix(".txt").unlink(missing_ok=True)


def _tools(work: Work, rows: int, rounds: int, install: bool) -> Table:
    source = work.photos(rows, plain=True)
    found: dict[str, list[_Run | str]] = {tool.title: [] for tool in ALL_TOOLS}
    for tool in rotated(ALL_TOOLS, rounds):
        log.print(tool.title)
        found[tool.title].append(_run(tool, source, work.folder, install))
    table = Table(
        f"{rows:,} photos, {CPUS} CPUs, all processes from start to end",
        ("", "images per CPU-s|,.0f", "of precache's|.2f", "CPU-ms an image|.2f",
         "KB an image|.0f", "images/s|,.0f"),
        "Medians of all rounds, and of ratios within each. img2dataset resizes the shorter side\n"
        "to 224 and writes JPEGs, the others to 256 and write pixels: Ray Data as .npy.",
        measured=found,
    )  # fmt: skip
    first = next(iter(found.values()))
    for title, runs in found.items():
        whole = [(a, b) for a, b in zip(runs, first, strict=True) if not isinstance(a, str)]
        if not whole:
            table.add(title, *[None] * 5)
            table.remarks.append(f"{title}: {runs[0]}")
            continue
        rate = _median(a.per_cpu_second for a, _ in whole)
        ratios = [a.per_cpu_second / b.per_cpu_second for a, b in whole if not isinstance(b, str)]
        ratio = _median(ratios) if ratios else None
        size = _median(a.nbytes / a.samples for a, _ in whole) / 1e3
        speed = _median(a.samples / a.seconds for a, _ in whole)
        table.add(title, rate, ratio, 1e3 / rate, size, speed)
    return table
