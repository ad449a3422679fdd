"""What the benchmarks share: photos, clean processes, and costs."""

import contextlib
import ctypes
import itertools
import math
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import psutil
import torch
from rich.console import Console

import precache
from precache.reading.array_reader import ArrayReader
from precache.runtime.usage import cores
from precache.storage.local_files import map_file
from precache.store.layout import INDEX_CHECKSUM_NBYTES, INDEX_ENTRY_NBYTES, decode_index
from tests.demo.photos import make_photos

DEFAULT_PHOTOS = Path(__file__).resolve().parents[2] / "../shared/photos"
PHOTO_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp"))
CROP = 224

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

log = Console(stderr=True, highlight=False)


# --- costs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What some samples cost this process, all its threads together.

    Attributes
    ----------
    others_seconds
        CPU time that the machine spent on other processes meanwhile.
    disk_bytes
        That this process had to read from the disk; 0 where all was in the page cache.
    """

    samples: int
    cpu_seconds: float
    wall_seconds: float
    others_seconds: float
    disk_bytes: int

    @property
    def cpu_ms_per_1000(self) -> float:
        return self.cpu_seconds * 1e6 / self.samples

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_seconds


def cost_of(work: Callable[[], int], *, children: bool = False) -> Cost:
    """Run `work`, which returns how many samples it went through.

    Parameters
    ----------
    children
        Count the CPU time of the processes that this one has started, too.
    """
    of_children = _children_seconds() if children else 0.0
    disk, busy, wall, cpu = _disk_bytes(), _busy_seconds(), time.perf_counter(), time.process_time()
    samples = work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    busy = _busy_seconds() - busy
    if children:
        cpu += _children_seconds() - of_children
    return Cost(samples, cpu, wall, max(0.0, busy - cpu), _disk_bytes() - disk)


def _children_seconds() -> float:
    """CPU time of the processes that this one has started, and of theirs, ended or not."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(child.cpu_times()[:4])  # its own, and those of its ended children
    return seconds


def cpu_ms_by_thread() -> dict[str, float]:
    """CPU-ms of this process so far, by the name of a thread: Python's, else the system's.

    Threads of one pool count together, those that have ended do not. The times are those of
    ``schedstat`` (sched-stats.rst).
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name = names.get(int(task.name)) or (task / "comm").read_text("utf-8").strip()
            spent = int((task / "schedstat").read_text("ascii").split()[0]) / 1e6
            pool = name.rstrip("0123456789").rstrip("-_ ")
            found[pool] = found.get(pool, 0.0) + spent
    return found


def finish(device: torch.device) -> None:
    """Wait until a CUDA device has done everything, without spinning."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def drain(loader: precache.Loader) -> int:
    """Go through an epoch, do nothing with its batches, and return its samples."""
    rows = 0
    for batch in loader:
        rows += len(batch["row"])
        del batch
    finish(loader.device)
    return rows


def _disk_bytes() -> int:
    return _proc_number("/proc/self/io", "read_bytes")


def _busy_seconds() -> float:
    """CPU time that all processes of this machine have had, and what its host took away."""
    ticks = [
        int(field) for field in Path("/proc/stat").read_text("utf-8").split("\n")[0].split()[1:]
    ]
    idle, waiting = ticks[3:5]
    return (sum(ticks[:8]) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    return _proc_number("/proc/self/status", "RssAnon") * 1024


def peak_bytes() -> int:
    """Most memory that this process has had at a time."""
    return _proc_number("/proc/self/status", "VmHWM") * 1024


def _proc_number(path: str, name: str) -> int:
    for line in Path(path).read_text("utf-8").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise LookupError(f"{path} has no {name}")


def share_of_others(costs: Iterable[Cost]) -> float:
    """Share of the machine's cores that other processes had meanwhile."""
    every = list(costs)
    wall = sum(cost.wall_seconds for cost in every)
    return sum(cost.others_seconds for cost in every) / wall / cores()


def median_ratio(costs: Sequence[float], floors: Sequence[float]) -> float:
    """Median of the ratios of neighbours in time: what the whole machine was doing cancels out."""
    return statistics.median(a / b for a, b in zip(costs, floors, strict=True))


def in_clean_process(
    work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call `work` where no earlier measurement left threads, warm pools or freed memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args, **kwargs).result()


# --- the page cache -----------------------------------------------------------------------------


def touch(files: Iterable[Path]) -> None:
    """Read files, so that the page cache holds them."""
    buffer = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(files: Iterable[Path]) -> None:
    """Have the page cache drop files, but for pages that some process still has mapped."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only clean pages can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(files: Iterable[Path]) -> float:
    """Share of the files' pages that the page cache holds, after mincore(2)."""
    page = os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    pages = held = 0
    for path in files:
        data = mapped(path)
        states = np.empty(-(-len(data) // page), np.uint8)
        if libc.mincore(data.ctypes.data, len(data), states.ctypes.data):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        pages, held = pages + len(states), held + int((states & 1).sum())
    return held / max(1, pages)


# --- stores -------------------------------------------------------------------------------------


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file (uint8)."""
    with path.open("rb") as file:
        return map_file(file.fileno())


def chunk_extents(store: Path, field: str = "image") -> list[tuple[Path, int, int]]:
    """File, offset and length of each stored chunk of a field, in the order of the rows."""
    version = precache.open(store)
    reader = ArrayReader(version, field)
    chunks = math.prod(reader.array.chunks_per_object)
    found: list[tuple[Path, int, int]] = []
    for number in range(reader.array.objects):
        path = Path(version.path) / field / reader.array.object_name(number)
        data = mapped(path)
        index = decode_index(
            data[-(INDEX_ENTRY_NBYTES * chunks + INDEX_CHECKSUM_NBYTES) :].data, chunks
        )
        found += [(path, *extent) for extent in index[index[:, 1] < len(data)].tolist()]
    return found


def build_crops(source: Path, store: Path, codec: str) -> Path:
    """A store of the photos in `source`: of each a random crop, resized."""
    crop = {"op": "random_resized_crop", "size": CROP, "scale": (0.25, 1)}
    field = {"ops": [{"op": "decode"}, crop], "codec": codec, "variants": 1}
    recipe = precache.Recipe.from_dict({"fields": {"image": field}})
    precache.build(source, store, recipe, address="serial", max_failures=0)
    return store


# --- photos and folders -------------------------------------------------------------------------


@contextlib.contextmanager
def work_folder(named: Path | None) -> Iterator[Path]:
    """The folder that was named, which stays, or a temporary one."""
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="precache-bench-") as folder:
        yield Path(folder)


def find_photos(named: Path | None, folder: Path) -> tuple[Path, list[Path]]:
    """A folder of photographs, and the files in it that can be decoded.

    Parameters
    ----------
    named
        The user's own.
    folder
        Where photos are made, if there are none.
    """
    root = named or (DEFAULT_PHOTOS if DEFAULT_PHOTOS.is_dir() else None)
    broken: set[Path] = set()
    if root is None:
        log.print("Making photos")
        made = make_photos(folder / "photos")
        root, broken = made.folder, {made.folder / key for key in made.broken}
    files = (path for path in root.rglob("*") if path.suffix.lower() in PHOTO_SUFFIXES)
    return root, sorted(set(files) - broken)


def multiply(files: Sequence[Path], root: Path, count: int, folder: Path) -> Path:
    """`count` photos in `folder`: links to `files`, each under as many names as it takes."""
    if not files:
        raise SystemExit(f"{root} holds no photo that would do; name another with --photos")
    for number, path in zip(range(count), itertools.cycle(files), strict=False):
        name = f"{path.stem}_{number // len(files):04d}{path.suffix}"
        target = folder / path.relative_to(root).with_name(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        link(path, target)
    return folder


def link(path: Path, target: Path) -> None:
    """The same file under another name, which may have it already."""
    if target.exists():
        return
    try:
        target.hardlink_to(path)
    except OSError:  # another file system, or files of another owner
        shutil.copyfile(path, target)
