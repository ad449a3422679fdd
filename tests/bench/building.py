"""Benchmarks of building stores, and of building them again.

CPU time is that of the tasks, as a build reports it, unless a part says otherwise.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pickle
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from PIL import Image

import precache
from precache.codecs.chunk import encoder
from precache.codecs.image import undo_image
from precache.reading.array_reader import ArrayReader
from precache.storage.open import open_folder
from precache.store.layout import CHECK_NBYTES, RowShape
from precache.store.receipts import ChannelSums, Receipt, ShardObject
from precache.store.row_table import freeze
from precache.store.shard_writer import ShardWriter
from precache_workers.cluster.dispatch import Done, Lost, dispatch
from precache_workers.driver.build_result import BuildResult
from precache_workers.planning.listing import list_rows
from precache_workers.planning.request import Request
from precache_workers.planning.target_version import SCRATCH
from precache_workers.planning.work_plan import MeasuredRows
from precache_workers.shards.shard_task import ShardTask
from precache_workers.sources.base import Columns
from precache_workers.sources.kinds import open_source
from tests.bench.costs import Cost, cost_of, files_of, peak_bytes
from tests.bench.harness import (
    CROP,
    RESIZE,
    Rounds,
    Rows,
    Table,
    Work,
    beside,
    decodes,
    frames_of,
    in_clean_process,
    link,
    log,
    main,
    part,
)
from tests.bench.remote import bucket
from tests.bench.scaling import scaling
from tests.support.building import cut, encoded
from tests.support.containers import KEY_COLUMNS, WRITERS, add, photos_of

Json = dict[str, Any]


# --- photos -------------------------------------------------------------------------------------

STAGES = ("fetch", "ops", "encode", "put")


@part("photos", needs=["simplejpeg"])
def photos(
    work: Work,
    rows: Rows = 2000,
    rounds: Rounds = 3,
) -> Table:
    """Building, beside decoding alone.

    Decoding alone is libjpeg-turbo on bytes that are in memory already, in as many processes at
    once as the build has tasks, since cores that share caches slow each other down. It is measured
    before and after every build, so that each has neighbours in time.
    """
    source, decoded = work.photos(rows, plain=True), []

    def floor_of(address: str) -> Callable[[], float]:
        at_once = (os.cpu_count() or 1) if address == "local" else 1

        def alone() -> float:
            with ThreadPoolExecutor(at_once) as pool:
                costs = pool.map(lambda _: in_clean_process(_decode, source), range(at_once))
                decoded.append(statistics.fmean(cost.cpu_seconds for cost in costs))
            return decoded[-1]

        return alone

    stores = (work.folder / f"build-{os.getpid()}-{number}.store" for number in itertools.count())

    def build(codec: str, address: str) -> BuildResult:
        recipe = precache.Recipe.image(resize=RESIZE, crop=CROP, codec=codec)
        given = {"address": address, "max_failures": 0}
        return in_clean_process(precache.build, source, next(stores), recipe, **given)

    floors = {address: floor_of(address) for address in ("local", "serial")}
    ways = {
        f"{codec}, {address}": (functools.partial(build, codec, address), floors[address])
        for codec, address in itertools.product(("image", "raw"), floors)
    }
    found: dict[str, list[tuple[BuildResult, float]]] = {name: [] for name in ways}
    for name, result, floor in beside(ways, rounds):
        found[name].append((result, floor))
    table = Table(
        f"{rows:,} photos, resized to {RESIZE}, cropped to {CROP}",
        ("", "CPU-ms|.2f", "per CPU-s|,.0f", "ratio|.2f"),
        f"CPU-ms a photo; medians of {rounds} rounds. The ratio to decoding alone is to be 0.6.",
        measured={"decode_seconds": decoded, "builds": found},
    )
    alone = statistics.median(decoded)
    table.add("decoding alone", alone / rows * 1e3, rows / alone, 1.0)
    low, high = (end / rows * 1e3 for end in (min(decoded), max(decoded)))
    table.remarks.append(f"decoding alone: {low:.2f} to {high:.2f} CPU-ms in the course of the run")
    for name, pairs in found.items():
        rate = statistics.median(each.samples / each.cpu_seconds for each, _ in pairs)
        ratio = statistics.median(floor / each.cpu_seconds for each, floor in pairs)
        table.add(name, 1e3 / rate, rate, ratio)
    return table


def _decode(folder: Path) -> Cost:
    """Decode every photo from memory, in a clean process."""
    import simplejpeg

    every = [path.read_bytes() for path in sorted(files_of(folder))]

    def run(photos: Sequence[bytes]) -> int:
        for data in photos:
            simplejpeg.decode_jpeg(data)
        return len(photos)

    run(every[:200])
    return cost_of(lambda: run(every))


# --- listing ------------------------------------------------------------------------------------

SAMPLES_A_FILE = 10_000
"""Samples of a tar archive or a Parquet file."""


@part("listing")
def listing(
    work: Work,
    rows: Rows = 1_000_000,
    kinds: Annotated[tuple[Literal["folder", "tar", "parquet"], ...], "of sources"] = (
        "folder", "tar", "parquet",
    ),
) -> Table:  # fmt: skip
    """From a source to its frozen row table, beside a walk of the folder, or reading the headers.

    Samples are empty, in 1,000 classes of which one has less; tar archives have a label for each.
    """
    table = Table(
        f"{rows:,} samples",
        ("source", "CPU-s|.2f", "floor|.2f", "beyond it|.2f", "peak MB|,.0f"),
        "Of a million samples, at most 3 CPU-s beyond the floor and 350 MB are asked, and of 14\n"
        "million in a table 60 s and 3 GB.",
    )
    for kind in kinds:
        folder = work.folder / f"listed-{kind}-{rows}"
        source = folder if kind == "folder" else f"{folder}/*.{kind}"
        if not folder.exists():
            _SAMPLES[kind](folder, rows)
        floor = in_clean_process(cost_of, functools.partial(_floor, folder, kind)).cpu_seconds
        cost, peak = in_clean_process(_to_row_table, str(source), work.folder / "listed.store")
        spent = cost.cpu_seconds
        table.add(kind, spent, floor, spent - floor, peak / 1e6)
    return table


def _files(folder: Path, rows: int) -> None:
    for number in range(rows):
        inside = folder / f"n{number % 1000:08d}"
        if number < 1000:
            inside.mkdir(parents=True)
        if number != rows - 1:
            (inside / f"{inside.name}_{number * 7919}.JPEG").touch()


def _tars(folder: Path, rows: int) -> None:
    folder.mkdir(parents=True)
    for start in range(0, rows, SAMPLES_A_FILE):
        with tarfile.open(folder / f"{start:08d}.tar", "w") as tar:
            for number in range(start, min(start + SAMPLES_A_FILE, rows)):
                add(tar, f"{number:08d}.jpg", b"", mtime=number)
                add(tar, f"{number:08d}.cls", b"%d" % (number % 1000), mtime=number)


def _tables(folder: Path, rows: int) -> None:
    folder.mkdir(parents=True)
    for start in range(0, rows, SAMPLES_A_FILE):
        numbers = np.arange(start, min(start + SAMPLES_A_FILE, rows))
        images = [number.tobytes() for number in numbers]
        columns = pa.table({"image": images, "label": numbers % 1000})
        pq.write_table(columns, folder / f"{start:08d}.parquet")


_SAMPLES = {"folder": _files, "tar": _tars, "parquet": _tables}


def _floor(folder: Path, kind: str) -> int:
    """A walk of a folder; or the headers of all archives, one after the other."""
    count = 0
    if kind == "folder":
        for inside in os.scandir(folder):
            with os.scandir(inside) as entries:
                count += sum(entry.stat().st_size >= 0 for entry in entries)
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb") as stream:
            while any((header := stream.read(512))[:1]):
                stream.seek(-(-int(header[124:135], 8) // 512) * 512, os.SEEK_CUR)
                count += 1
    return count


def _to_row_table(uri: str, store: Path) -> tuple[Cost, int]:
    """The cost of a row table that is ready for the first task, and peak bytes."""
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    recipe = precache.Recipe.image(resize=RESIZE, crop=CROP)
    request = Request(source=uri, store=str(store), recipe=recipe)
    folder, source = open_folder(str(store)), open_source(uri)

    def run() -> int:
        listed = list_rows(request, folder, source, lambda count: None, log.print)
        listed.keep(folder)
        return len(freeze(listed.spec.table))

    return cost_of(run), peak_bytes()


# --- the plan -----------------------------------------------------------------------------------

ROW = RowShape((3, CROP, CROP), "uint8")


@part("plan")
def plan(
    work: Work,
    rows: Rows = 1_000_000,
    shard_samples: Annotated[int, "of each shard"] = 1000,
) -> Table:
    """The driver alone with a million samples: the wait for the first task, and its memory.

    The bucket is pretended, and so is what tasks answer.
    """
    if rows < 1000:
        raise SystemExit(f"--rows {rows}: give at least 1,000")
    names = ("shards|,d", "s to the first task|.1f", "s in all|.1f", "CPU-s in all|.1f",
             "peak MB|,.0f")  # fmt: skip
    table = Table(
        f"A driver with {rows:,} samples, tasks pretended",
        names,
        "1 GB at most, and the first task within a minute, are asked.",
    )
    shards, first, cost, peak = in_clean_process(_plan, rows, shard_samples)
    table.add(shards, first, cost.wall_seconds, cost.cpu_seconds, peak / 1e6)
    table.measured["build"] = {"driver": [cost]}
    return table


class _Engine:
    """Answers every task at once; pickles it all the same."""

    def __init__(self) -> None:
        self._ended: list[tuple[Hashable, Done | Lost]] = []
        self.first = 0.0

    def slots(self) -> int:
        return 64

    def submit(
        self, function: Callable[[Any], Any], items: Sequence[Any], next_one: bool = False
    ) -> Hashable:
        if not isinstance(items[0], ShardTask):  # the probe
            answers: list[Any] = [MeasuredRows({"image": ROW}, {"image": 80_000.0})]
        else:
            self.first = self.first or time.perf_counter()
            pickle.dumps([dataclasses.replace(item, job=None) for item in items])
            answers = [_receipt(item) for item in items]
        name = object()
        self._ended.append((name, Done(answers, 100.0 * len(items))))
        return name

    def wait(self, seconds: float) -> list[tuple[Hashable, Done | Lost]]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, copy: Hashable) -> None:
        """Nothing runs."""


def _receipt(task: ShardTask) -> Receipt:
    """Of an object of one byte: a commit looks whether it is there."""
    task.folder.put(task.objects["image"], [b"0"], scratch=SCRATCH)
    raw_nbytes = ROW.nbytes * task.rows_per_shard
    chunks = task.rows_per_shard // ROW.chunk_rows(task.rows_per_shard)
    return Receipt(
        shard=task.shard,
        objects={"image": ShardObject(1, task.shard, raw_nbytes, "00" * CHECK_NBYTES * chunks)},
        holes={},
        content=[xxhash.xxh3_128_hexdigest(key.encode()) for key in task.keys],
        sums={"image": ChannelSums(CROP * CROP * len(task.keys), [1.0] * 3, [1.0] * 3)},
        seconds=dict.fromkeys(STAGES, 0.1),
        cpu_seconds=1.4,
    )


def _plan(samples: int, shard_samples: int) -> tuple[int, float, Cost, int]:
    """Shards, seconds to the first task, the driver's cost and peak bytes."""
    engine = _Engine()

    @contextlib.contextmanager
    def executor(*_: Any) -> Iterator[Any]:
        yield functools.partial(dispatch, engine)

    with (
        bucket("s3", 1000, samples // 1000) as pipe,
        tempfile.TemporaryDirectory() as folder,
        mock.patch("precache_workers.driver.build.executor", executor),
    ):
        began, options = time.perf_counter(), pipe.recv()
        recipe, store = precache.Recipe.image(resize=RESIZE, crop=CROP), Path(folder, "store")
        given = {"shard_samples": shard_samples, "check_space": False, "storage_options": options}
        results: list[BuildResult] = []

        def build() -> int:
            results.append(precache.build("s3://bucket", store, recipe, **given))
            return results[0].samples

        began = time.perf_counter()
        cost = cost_of(build)
    return results[0].shards, engine.first - began, cost, peak_bytes()


# --- building again -----------------------------------------------------------------------------

DISTINCT, OTHERS = 300, 50
"""Photos that differ, of which the others are links; and photos that come in the place of some."""
WHOLE, SIDES = 224, (300, 640)
"""Rows of whole photos, with sides from 300 to 640 pixels."""
TOGETHER = 4 << 20
"""Bytes of rows that are decoded at a time."""
NOTHING = """
import json, sys, time
began = time.perf_counter()
from precache.cli.main import main
status = main(sys.argv[1:])
loaded = [name for name in ("torch", "ray") if name in sys.modules]
spent = time.perf_counter() - began, time.process_time()
print(json.dumps([status, *spent, loaded]), file=sys.stderr)
"""


def mean_of(array: np.ndarray) -> np.ndarray:
    """Mean of each channel."""
    return array.mean((0, 1), dtype=np.float32)


@part("recaching", needs=["simplejpeg"])
def recaching(
    work: Work,
    rows: Rows = 50_000,
    sizes: Annotated[tuple[int, ...], "of rows, of 160, 64, and 224, which takes whole photos"] = (
        160, 64,
    ),
    keys: Annotated[int, "of which none changed"] = 100_000,
) -> Table:  # fmt: skip
    """Builds after a change, beside all of it anew.

    Each change is built into a store that has an earlier version, and into a copy of that store
    with recompute=True; the objects of both are compared to the last byte. Start-up does not count.
    Cuts of a photo are to their rows as 500 x 375 px are to 224 x 224: rows of 160 x 160 have a
    chunk each, of 64 x 64 four share one. Rows of 224 x 224 are of whole photos about that large.
    """
    if rows < 1000 or keys < 0 or not set(sizes) <= {160, 64, WHOLE}:
        raise SystemExit("give at least 1,000 rows, of size 160, 64 or 224, and no keys below 0")
    table = Table(
        f"{rows:,} rows",
        ("change", "size|d", "CPU-s|.2f", "of|.2f", "share|.3f", "to reach|g"),
        "CPU-seconds of the tasks, against a full rebuild's; another codec, against\n"
        "decoding, encoding and putting the rows alone; one field, against that field alone.\n"
    )  # fmt: skip
    for size in sizes:
        changing = _Changing(work, size, rows)
        for name, goal, change in (
            ("another codec only", 1.2, changing.codec),
            ("crop behind a base", 0.25, changing.crop),
            ("one field of three", 1.1, changing.field),
            ("1% of the samples changed", 0.04, changing.changed),
            ("10% of samples added", 0.12, changing.added),
        ):
            log.print(f"{size} x {size}: {name}")
            store = _copy(changing.store, changing.folder / "changed")
            built, floor = change(store)
            spent = built.cpu_seconds
            table.add(name, size, spent, floor, spent / floor, goal)
    if keys:
        table.remarks.append(_nothing(work.folder, keys))
    return table


Change = tuple[BuildResult, float]
"""A build, and the CPU-seconds that it is held against."""


class _Changing:
    """The changes of one size of rows, each measured on a copy of a store."""

    def __init__(self, work: Work, size: int, rows: int) -> None:
        self.size, self.rows = size, rows
        self.folder = work.folder / f"recaching-{os.getpid()}-{size}"
        self.source, self.store = self.folder / "source", self.folder / "store"
        if size == WHOLE:
            every = _whole_photos(work)
        else:
            sides = self._of(500), self._of(375)
            every = _cuts(self.folder / "photos", sides, DISTINCT + OTHERS)
        self.photos, self.others = every[OTHERS:], every[:OTHERS]
        _links(self.photos, self.source, range(rows))
        log.print(f"{rows:,} rows of {size} x {size}: first build")
        self.first = self._build(self.store, self._recipe())

    def _of(self, pixels: int) -> int:
        """So many to this size of rows as `pixels` to 224."""
        return round(self.size * pixels / 224)

    def _recipe(self, codec: str = "image", crop: int = 0) -> Json:
        """One field; with a crop behind the base, if there is one."""
        ops: list[Json] = [{"op": "decode"}, {"op": "resize", "size": self._of(256)}]
        ops += [{"op": "center_crop", "size": [n, n]} for n in (self.size, crop) if n]
        return {"image": {"ops": ops, "codec": codec}}

    def _thumb(self, size: int) -> Json:
        ops = [{"op": "decode"}, {"op": "resize", "size": [size, size]}]
        return {"thumb": {"ops": ops, "codec": "image"}}

    def _build(self, store: Path, fields: Json, **options: Any) -> BuildResult:
        recipe = precache.Recipe.from_dict({"fields": fields})
        options |= {"address": "serial", "max_failures": 0}
        return in_clean_process(precache.build, self.source, store, recipe, **options)

    def _both(self, store: Path, fields: Json) -> Change:
        """The change, beside a full rebuild from the same row table."""
        other = _copy(store, self.folder / "recomputed")
        built = self._build(store, fields)
        full = self._build(other, fields, recompute=True)
        _require_equal(built, full)
        return built, full.cpu_seconds

    def _by_hand(self) -> float:
        folder, field = self.folder / "by hand", self._recipe("zstd")
        return in_clean_process(_by_hand, self.first.path, folder, field).cpu_seconds

    def codec(self, store: Path) -> Change:
        before = self._by_hand()
        built, _ = self._both(store, self._recipe("zstd"))
        return built, (before + self._by_hand()) / 2

    def crop(self, store: Path) -> Change:
        return self._both(store, self._recipe(crop=self._of(192)))

    def field(self, store: Path) -> Change:
        mean: Json = {"op": "function", "function": "tests.bench.building:mean_of", "version": "1"}
        mean |= {"dtype": "float32", "shape": [3]}
        two = {**self._recipe(), "mean": {"ops": [{"op": "decode"}, mean], "codec": "zstd"}}
        self._build(store, two | self._thumb(self.size // 2))
        thumb = self._thumb(self.size // 2 - 4)
        built, _ = self._both(store, two | thumb)
        return built, self._build(self.folder / "alone", thumb).cpu_seconds

    def changed(self, store: Path) -> Change:
        """The samples of these files have other bytes for good: the last but one change."""
        names = sorted(self.source.rglob("*.jpg"))
        chosen = random.Random(0).sample(names, max(1, len(names) // 100))
        for name, photo in zip(chosen, itertools.cycle(self.others), strict=False):
            name.unlink()
            link(photo, name)
        change = self._both(store, self._recipe())
        _copy(store, self.store)
        return change

    def added(self, store: Path) -> Change:
        _links(self.photos, self.source, range(self.rows, self.rows + self.rows // 10))
        return self._both(store, self._recipe())


def _whole_photos(work: Work) -> list[Path]:
    """JPEGs of usual size."""
    import simplejpeg

    root, files = work.files()
    found = []
    for path in filter(decodes, files):
        height, width, _, _ = simplejpeg.decode_jpeg_header(path.read_bytes())
        if SIDES[0] <= min(height, width) and max(height, width) <= SIDES[1]:
            found.append(path)
    log.print(f"{len(found)} of {len(files)} photos in {root} are of usual size")
    return found


def _cuts(folder: Path, size: tuple[int, int], count: int) -> list[Path]:
    """Photos that differ."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(encoded(cut(number, size), quality=90))
    return paths


def _links(photos: Sequence[Path], source: Path, numbers: range) -> None:
    for number, photo in zip(numbers, itertools.cycle(photos), strict=False):
        link(photo, source / f"{number % 100:02d}" / f"{number:06d}.jpg")


def _copy(store: Path, target: Path) -> Path:
    """A store like it; objects are never written to, so that links will do."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(store, target, copy_function=os.link)
    return target


def _objects(path: str | Path) -> dict[str, Path]:
    root = Path(path)
    files = (file for field in precache.open(root).fields for file in files_of(root / field / "c"))
    return {str(file.relative_to(root)): file for file in files}


def _require_equal(one: BuildResult, full: BuildResult) -> None:
    """Rows, key by key, and every object to the last byte; nothing of the full one is reused."""
    versions = [precache.open(each.path) for each in (one, full)]
    alike = one.version == full.version and list(versions[0].keys) == list(versions[1].keys)
    alike = alike and versions[0].mean == versions[1].mean and versions[0].std == versions[1].std
    objects, others = _objects(one.path), _objects(full.path)
    alike = alike and objects.keys() == others.keys() and full.rows_reused == 0
    if not alike or any(objects[n].read_bytes() != others[n].read_bytes() for n in objects):
        raise SystemExit(f"{one.path} and {full.path} differ")


def _by_hand(path: str, folder: Path, fields: Json) -> Cost:
    """Decode, encode and put the rows of a version, nothing else; in a clean process."""
    version = precache.open(path)
    array = ArrayReader(version, "image").array
    field = precache.Recipe.from_dict({"fields": fields}).fields["image"]
    encode = encoder(field.stored_as, "uint8")
    rows = np.empty((TOGETHER // math.prod(array.chunk_shape), *array.chunk_shape), np.uint8)
    chunks = array.object_chunks
    target, frames = open_folder(folder), frames_of(Path(path))

    def run() -> int:
        for file, extents in itertools.groupby(frames, key=lambda frame: frame[0]):
            data, index = memoryview(file.read_bytes()), list(extents)
            writer = ShardWriter(array.chunk_shape, "uint8", chunks, encode)
            for start in range(0, len(index), len(rows)):
                some = index[start : start + len(rows)]
                for (_, offset, length), chunk in zip(some, rows, strict=False):
                    array.decoder.decode(data[offset : offset + length], chunk)
                undo_image(rows[: len(some)])
                for chunk in rows[: len(some)]:
                    writer.extend(chunk)
            target.put(str(file.relative_to(path)), writer.finish()[0])
        return version.rows

    return cost_of(run)


def _nothing(folder: Path, keys: int) -> str:
    """``precache build`` of files that did not change: the median of three, and what it loaded."""
    log.print(f"{keys:,} keys of which none changed: first build")
    source, store = folder / f"keys-{keys}", folder / f"kept-{keys}"
    _links(_cuts(folder / "tiny", (24, 18), DISTINCT), source, range(keys))
    line = ["build", str(source), str(store), "--resize", "16", "--crop", "16"]
    line += ["--address", "serial", "--no-progress"]
    subprocess.run([sys.executable, "-m", "precache", *line], check=True, stdout=subprocess.DEVNULL)
    found = []
    for _ in range(3):
        command = [sys.executable, "-c", NOTHING, *line, "--address", "local"]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        status, *figures = json.loads(ran.stderr.splitlines()[-1])
        if status:
            raise SystemExit(ran.stderr)
        found.append(figures)
    seconds, cpu, loaded = sorted(found)[1]
    spent = f"{seconds:.1f} s, {cpu:.1f} CPU-s"
    libraries = " and ".join(loaded) or "neither torch nor Ray"
    return f"nothing changed, {keys:,} local keys: {spent}; loaded {libraries}"


# --- sources ------------------------------------------------------------------------------------

FOLDER = "folder"
LINKS = 50_000
"""Names of one file: file systems allow some 65,000."""


@part("sources", needs=["simplejpeg"])
def sources(
    work: Work,
    rows: Annotated[int, "photos to build from"] = 400,
    rounds: Rounds = 5,
    listed: Annotated[int, "samples to list"] = 100_000,
    kinds: Annotated[tuple[str, ...], "of sources"] = tuple(WRITERS),
) -> Table:
    """Listing, building, and building again from each kind of source, beside a folder.

    Listing many small samples, building from photos, and what is fetched again when one photo
    changed. The same photos, in one process without a cluster. Before and after every build from a
    source comes one from the folder, so that each ratio has neighbours in time.
    """
    if unknown := set(kinds) - WRITERS.keys():
        raise SystemExit(f"--kinds {' '.join(sorted(unknown))}: choose of {', '.join(WRITERS)}")
    folder, every = work.folder / f"sources-{os.getpid()}", (FOLDER, *kinds)
    small, costs = _small_photos(folder / "small", listed), {}
    for kind in every:
        log.print(f"listing: {kind}")
        source = _written(kind, small, folder / "small" / kind)
        costs[kind] = in_clean_process(_listed, source, KEY_COLUMNS.get(kind))
    pictures = work.photos(rows, plain=True)
    beside_folder = _built_beside(pictures, folder, kinds, rounds)
    table = Table(
        f"{listed:,} samples listed, {rows:,} photos built, medians of {rounds} rounds",
        ("source", "listing: s|.2f", "CPU-s|.2f", "MB|.0f", "building: CPU-ms|.2f",
         "beside the folder|.3f", "least|.3f", "most|.3f", "fetched again|d"),
        "A ratio is to be 1.15 or less, but for what the format's own library takes.",
        measured={"listing": costs, "building": beside_folder},
    )  # fmt: skip
    own = [(floor, floor) for pairs in beside_folder.values() for _, floor in pairs]
    for kind, (cost, nbytes) in costs.items():
        log.print(f"one photo changed: {kind}")
        again = _fetched_again(pictures, folder / "changing", kind)
        pairs = beside_folder.get(kind, own)
        ratios = sorted(mine / floor for mine, floor in pairs)
        spent = statistics.median(mine for mine, _ in pairs)
        figures = statistics.median(ratios), ratios[0], ratios[-1]
        listing = cost.wall_seconds, cost.cpu_seconds, nbytes / 1e6
        table.add(kind, *listing, spent, *figures, again)
    return table


def _written(kind: str, photos: Path, folder: Path) -> str:
    """Write the photos as one kind of source; returns its name."""
    if kind == FOLDER:
        return str(photos)
    folder.mkdir(parents=True)
    return WRITERS[kind](photos, folder)


def _small_photos(folder: Path, count: int) -> Path:
    """Write photos of eight pixels, in a hundred classes."""
    for number in range(count):
        if number % LINKS == 0:
            original = folder / f"{number}.png"
            original.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(original, "JPEG")
        link(original, folder / "photos" / f"class{number % 100:03d}/{number:08d}.jpg")
    return folder / "photos"


def _listed(source: str, key: str | None) -> tuple[Cost, int]:
    """Cost of listing a source, and memory above what was there before."""
    opened = open_source(source, columns=Columns(key=key))
    with contextlib.suppress(precache.SourceError):
        opened.list(lambda count: None, seconds=0.01)  # imports what it needs
    before = peak_bytes()
    cost = cost_of(lambda: len(opened.list(lambda count: None).table))
    return cost, peak_bytes() - before


def _cpu_ms(source: str, kind: str, store: Path) -> float:
    """CPU-ms of the tasks of a build, a photo."""
    recipe = precache.Recipe.image(resize=RESIZE, crop=CROP)
    given = {"address": "serial", "max_failures": 0, "key_column": KEY_COLUMNS.get(kind)}
    result = precache.build(source, store, recipe, **given)
    return result.cpu_seconds / result.samples * 1e3


def _built_beside(
    photos: Path, folder: Path, kinds: Sequence[str], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Kind -> CPU-ms a photo of its builds, each with the mean of the folder's around it."""
    stores = (folder / f"{number}.store" for number in itertools.count())

    def build(source: str, kind: str) -> float:
        return in_clean_process(_cpu_ms, source, kind, next(stores))

    floor = functools.partial(build, str(photos), FOLDER)
    ways = {
        kind: (functools.partial(build, _written(kind, photos, folder / kind), kind), floor)
        for kind in kinds
    }
    pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for kind, own, beside_it in beside(ways, rounds):
        pairs[kind].append((own, beside_it))
    return pairs


def _fetched_again(photos: Path, folder: Path, kind: str) -> int:
    """Samples that the next build fetches when one photo changed."""
    changing, own = folder / "photos", folder / kind
    if not changing.exists():
        shutil.copytree(photos, changing)
        for number, path in enumerate(photos_of(changing)):
            os.utime(path, (1e9 + number, 1e9 + number))  # a time of several says nothing
    source, store = _written(kind, changing, own), folder / f"{kind}.store"
    _cpu_ms(source, kind, store)
    one = photos_of(changing)[0]
    with Image.open(one) as image:
        image.rotate(180).save(one, "JPEG")
    fresh = folder / "fresh" / kind
    _written(kind, changing, fresh)
    for path in files_of(fresh):
        old = own / path.relative_to(fresh)
        if old.read_bytes() != path.read_bytes():
            shutil.copyfile(path, old)
    return in_clean_process(_fetched, source, kind, store)


def _fetched(source: str, kind: str, store: Path) -> int:
    """Build, and return how many samples were fetched, those included that only were compared."""
    source_type: Any = type(open_source(source))
    fetch, count = source_type.fetch, 0

    def counting(self: object, keys: Sequence[str], *args: object) -> object:
        nonlocal count
        count += len(keys)
        return fetch(self, keys, *args)

    source_type.fetch = counting
    _cpu_ms(source, kind, store)
    return count


PARTS = (photos, scaling, listing, plan, recaching, sources)

if __name__ == "__main__":
    main("building", PARTS)
