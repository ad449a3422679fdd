"""``python -m tests.bench.recaching``: what a build burns when something changed, beside all of it.

Each change is built into a store that has an earlier version, and into a copy of that store with
``recompute=True``; the objects of both are compared to the last byte. Figures are CPU time of the
tasks, start-up apart. Cuts of a photo are to their rows as 500 x 375 px are to 224 x 224: rows of
160 x 160 have a chunk each, of 64 x 64 four share one. Rows of 224 x 224 are of whole photos about
that large.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.codecs.chunk import encoder
from precache.codecs.image import undo_image
from precache.reading.array_reader import ArrayReader
from precache.store.layout import RowShape, decode_index
from precache.store.shard_writer import ShardWriter
from tests.bench.building import decodes
from tests.bench.common import (
    Cost,
    cost_of,
    find_photos,
    in_clean_process,
    link,
    log,
    work_folder,
)
from tests.support.building import cut, encoded

DISTINCT = 300
"""Photos that differ; the others are links to them."""
OTHERS = 50
"""Photos that come in the place of some."""
SIZES = (160, 64)
WHOLE = 224
"""Rows of whole photos, with sides from `SIDES[0]` to `SIDES[1]` pixels."""
SIDES = (300, 640)
BATCH = 4 << 20
"""Bytes of rows that are decoded at a time."""
MEGA = 1e6
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


@dataclass(frozen=True)
class Recipe:
    """Rows of one size, from photos as large to them as usual ones are to 224 px.

    Attributes
    ----------
    crop
        Of a crop behind the base, in the place of 192 behind 224; 0 for none.
    thumb
        Size of the rows of a second field, of three; 0 for one field alone.
    """

    size: int
    codec: str = "image"
    crop: int = 0
    thumb: int = 0
    alone: bool = False

    @property
    def photo(self) -> tuple[int, int]:
        """Width and height."""
        return round(self.size * 500 / 224), round(self.size * 375 / 224)

    @property
    def recipe(self) -> precache.Recipe:
        decode, resize = {"op": "decode"}, {"op": "resize", "size": round(self.size * 256 / 224)}
        ops = [decode, resize, _crop(self.size), *([_crop(self.crop)] if self.crop else [])]
        fields: dict[str, Any] = {"image": {"ops": ops, "codec": self.codec}}
        if self.thumb:
            small = {"op": "resize", "size": [self.thumb, self.thumb]}
            mean = {"op": "function", "function": "tests.bench.recaching:mean_of", "version": "1"}
            mean |= {"dtype": "float32", "shape": [3]}
            thumb = {"ops": [decode, small], "codec": "image"}
            if self.alone:
                fields = {"thumb": thumb}
            else:
                fields |= {"thumb": thumb, "mean": {"ops": [decode, mean], "codec": "zstd"}}
        return precache.Recipe.from_dict({"fields": fields})


def _crop(size: int) -> dict[str, Any]:
    return {"op": "center_crop", "size": [size, size]}


@dataclass(frozen=True)
class Built:
    """One build: CPU-seconds of its tasks, bytes that its process read and wrote, rows kept."""

    path: str
    version: str
    cpu_seconds: float
    read: int
    written: int
    rows_reused: int


@dataclass(frozen=True)
class Change:
    """What a change cost, against `floor` CPU-seconds.

    Attributes
    ----------
    goal
        The most that `share` is to be.
    linked
        Bytes of objects that both versions have.
    by_hand
        The same share, had rows of the base only been decoded, cropped, encoded and put.
    """

    name: str
    size: int
    goal: float
    cpu_seconds: float
    floor: float
    read: int
    written: int
    linked: int
    by_hand: float | None = None

    @property
    def share(self) -> float:
        return self.cpu_seconds / self.floor


# --- building -----------------------------------------------------------------------------------


def _build(source: Path, store: Path, recipe: Recipe, recompute: bool = False) -> Built:
    """To be called in a clean process."""
    before = _bytes_so_far()
    result = precache.build(
        source, store, recipe.recipe, address="serial", max_failures=0, recompute=recompute
    )
    read, written = (now - then for now, then in zip(_bytes_so_far(), before, strict=True))
    return Built(result.path, result.version, result.cpu_seconds, read, written, result.rows_reused)


def _bytes_so_far() -> tuple[int, int]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text("utf-8").splitlines())
    return int(lines["rchar"]), int(lines["wchar"])


def _whole_photos(folder: Path) -> list[Path]:
    """JPEGs of usual size: those shared beside the repository, or made."""
    root, files = find_photos(None, folder)
    found = []
    for path in filter(decodes, files):
        height, width, _, _ = simplejpeg.decode_jpeg_header(path.read_bytes())
        if SIDES[0] <= min(height, width) and max(height, width) <= SIDES[1]:
            found.append(path)
    log.print(f"{len(found)} of {len(files)} photos in {root} are of usual size")
    return found


def _photos(folder: Path, size: tuple[int, int], count: int, first: int = 0) -> list[Path]:
    """Photos that differ, from number `first` on."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(first, first + count):
        paths.append(folder / f"{number}.jpg")
        paths[-1].write_bytes(encoded(cut(number, size), quality=90))
    return paths


def _links(photos: Sequence[Path], source: Path, numbers: range) -> None:
    for number, photo in zip(numbers, itertools.cycle(photos), strict=False):
        target = source / f"{number % 100:02d}" / f"{number:06d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        link(photo, target)


def _copy(store: Path, target: Path) -> Path:
    """A store like it; objects are never written to, so that links will do."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(store, target, copy_function=os.link)
    return target


def _objects(path: str | Path) -> dict[str, Path]:
    root = Path(path)
    return {
        str(each.relative_to(root)): each
        for field in precache.open(root).fields
        for each in (root / field / "c").rglob("*")
        if each.is_file()
    }


def _require_equal(one: Built, other: Built) -> None:
    """Rows, key by key, and every object to the last byte."""
    versions = [precache.open(each.path) for each in (one, other)]
    alike = one.version == other.version and list(versions[0].keys) == list(versions[1].keys)
    alike = alike and versions[0].mean == versions[1].mean and versions[0].std == versions[1].std
    objects, others = _objects(one.path), _objects(other.path)
    alike = alike and objects.keys() == others.keys() and other.rows_reused == 0
    if not alike or any(objects[n].read_bytes() != others[n].read_bytes() for n in objects):
        raise SystemExit(f"{one.path} and {other.path} differ")


def _linked(store: Path, built: Built) -> int:
    """Bytes of the version's objects that another version of the store has, too."""
    earlier = {
        path.stat().st_ino for path in store.glob("*/*/c/**/*") if built.version not in path.parts
    }
    stats = [path.stat() for path in _objects(built.path).values()]
    return sum(each.st_size for each in stats if each.st_ino in earlier)


# --- changes ------------------------------------------------------------------------------------


def _by_hand(path: str, folder: Path, codec: str, crop: int = 0) -> Cost:
    """Decode, crop, encode and put the rows of a version, nothing else; in a clean process."""
    version = precache.open(path)
    array = ArrayReader(version, "image").array
    size = array.row_shape[1]
    encode = encoder(Recipe(size, codec).recipe.fields["image"].stored_as, "uint8")
    rows = np.empty((BATCH // math.prod(array.chunk_shape), *array.chunk_shape), np.uint8)
    chunks = math.prod(array.chunks_per_object)
    per_shard = chunks * array.chunk_shape[0]
    target = precache.storage.open.open_folder(folder)
    shape = RowShape((3, crop or size, crop or size), "uint8")
    step = shape.chunk_rows(per_shard)
    inner = slice((size - shape.shape[1]) // 2, (size + shape.shape[1]) // 2)

    def run() -> int:
        for name, each in _objects(path).items():
            data = memoryview(each.read_bytes())
            writer = ShardWriter((step, *shape.shape), "uint8", per_shard // step, encode)
            index = decode_index(data[-chunks * 16 - 4 :], chunks).tolist()
            index = [each for each in index if each[1] < len(data)]
            for start in range(0, len(index), len(rows)):
                part = index[start : start + len(rows)]
                for (offset, length), chunk in zip(part, rows, strict=False):
                    array.decoder.decode(data[offset : offset + length], chunk)
                undo_image(rows[: len(part)])
                for chunk in rows[: len(part)]:
                    if not crop:
                        writer.extend(chunk)
                        continue
                    for row in chunk:
                        np.copyto(writer.row, row[:, inner, inner])
                        writer.advance()
            target.put(name, writer.finish()[0])
        return version.rows

    return cost_of(run)


class Bench:
    """The changes of one size of rows, each measured on a store of its own."""

    def __init__(self, size: int, rows: int, folder: Path) -> None:
        self.recipe = Recipe(size)
        self.rows = rows
        self.folder = folder / str(size)
        self.source = self.folder / "source"
        if size == WHOLE:
            whole = _whole_photos(folder)
            self.photos, self.others = whole[OTHERS:], whole[:OTHERS]
        else:
            cuts = _photos(self.folder / "photos", self.recipe.photo, DISTINCT + OTHERS)
            self.photos, self.others = cuts[OTHERS:], cuts[:OTHERS]
        _links(self.photos, self.source, range(rows))
        self.store = self.folder / "store"
        log.print(f"{rows:,} rows of {size} x {size}: first build")
        self.first = in_clean_process(_build, self.source, self.store, self.recipe)

    def changes(self) -> list[Change]:
        return [
            self._change("another codec only", 1.2, self._codec),
            self._change("crop behind a base", 0.25, self._base),
            self._change("one field of three", 1.1, self._field),
            self._change("1% of the samples changed", 0.04, self._changed),
            self._change("10% of samples added", 0.12, self._added),
        ]

    def _change(
        self, name: str, goal: float, make: Callable[[Path], tuple[Built, float]]
    ) -> Change:
        log.print(f"{self.recipe.size} x {self.recipe.size}: {name}")
        store = _copy(self.store, self.folder / "changed")
        self.by_hand: float | None = None
        built, floor = make(store)
        linked = _linked(store, built)
        return Change(
            name, self.recipe.size, goal, built.cpu_seconds, floor,
            built.read, built.written, linked, self.by_hand and self.by_hand / floor,
        )  # fmt: skip

    def _both(self, store: Path, recipe: Recipe) -> tuple[Built, Built]:
        """The change, and a full rebuild from the same row table."""
        other = _copy(store, self.folder / "recomputed")
        built = in_clean_process(_build, self.source, store, recipe)
        full = in_clean_process(_build, self.source, other, recipe, recompute=True)
        _require_equal(built, full)
        return built, full

    def _codec(self, store: Path) -> tuple[Built, float]:
        recipe = dataclasses.replace(self.recipe, codec="zstd")
        alone = self._alone("zstd")
        built, _ = self._both(store, recipe)
        return built, (alone + self._alone("zstd")) / 2

    def _alone(self, codec: str, crop: int = 0) -> float:
        folder = self.folder / "by hand"
        return in_clean_process(_by_hand, self.first.path, folder, codec, crop).cpu_seconds

    def _base(self, store: Path) -> tuple[Built, float]:
        crop = round(self.recipe.size * 192 / 224)
        alone = self._alone(self.recipe.codec, crop)
        built, full = self._both(store, dataclasses.replace(self.recipe, crop=crop))
        self.by_hand = (alone + self._alone(self.recipe.codec, crop)) / 2
        return built, full.cpu_seconds

    def _field(self, store: Path) -> tuple[Built, float]:
        three = dataclasses.replace(self.recipe, thumb=self.recipe.size // 2)
        in_clean_process(_build, self.source, store, three)
        other = dataclasses.replace(three, thumb=three.thumb - 4)
        built, _ = self._both(store, other)
        alone = dataclasses.replace(other, alone=True)
        return built, in_clean_process(
            _build, self.source, self.folder / "alone", alone
        ).cpu_seconds

    def _changed(self, store: Path) -> tuple[Built, float]:
        """The samples of these files have other bytes for good: the last but one change."""
        names = sorted(self.source.rglob("*.jpg"))
        chosen = random.Random(0).sample(names, max(1, len(names) // 100))
        for name, photo in zip(chosen, itertools.cycle(self.others), strict=False):
            name.unlink()
            link(photo, name)
        built, full = self._both(store, self.recipe)
        shutil.rmtree(self.store)
        _copy(store, self.store)
        return built, full.cpu_seconds

    def _added(self, store: Path) -> tuple[Built, float]:
        _links(self.photos, self.source, range(self.rows, self.rows + self.rows // 10))
        built, full = self._both(store, self.recipe)
        return built, full.cpu_seconds


@dataclass(frozen=True)
class Nothing:
    """A build with nothing to do, as a process: the median of three, and what it loaded."""

    keys: int
    seconds: float
    cpu_seconds: float
    loaded: Sequence[str]


def nothing(folder: Path, keys: int) -> Nothing:
    """``precache build`` of files that did not change."""
    log.print(f"{keys:,} keys of which none changed: first build")
    photos = _photos(folder / "tiny", (24, 18), DISTINCT)
    _links(photos, folder / "keys", range(keys))
    line = ["build", str(folder / "keys"), str(folder / "kept"), "--resize", "16", "--crop", "16"]
    line += ["--address", "serial", "--quiet"]
    subprocess.run([sys.executable, "-m", "precache", *line], check=True, stdout=subprocess.DEVNULL)
    found = []
    for _ in range(3):
        ran = subprocess.run(
            [sys.executable, "-c", NOTHING, *line, "--address", "local"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        status, *figures = json.loads(ran.stderr.splitlines()[-1])
        if status:
            raise SystemExit(ran.stderr)
        found.append(figures)
    return Nothing(keys, *sorted(found)[1])


# --- results ------------------------------------------------------------------------------------


def _table(changes: Sequence[Change], rows: int) -> Table:
    names = ("CPU-s", "of", "share", "to reach", "by hand", "MB read", "MB written", "MB linked")
    table = Table(
        Column("", no_wrap=True),
        *(Column(name, justify="right") for name in names),
        title=f"{rows:,} rows",
        caption="CPU-seconds of the tasks, against a full rebuild's; another codec, against\n"
        "decoding, encoding and putting the rows alone; one field, against that field alone.\n"
        "By hand: the base's rows decoded, cropped, encoded and put, and no sums, by one loop.\n"
        "Objects of the earlier version that are mapped do not count as read.",
    )
    for each in changes:
        table.add_row(
            f"{each.name}, {each.size} x {each.size}",
            f"{each.cpu_seconds:.2f}",
            f"{each.floor:.2f}",
            f"{each.share:.3f}",
            f"{each.goal:g}",
            "" if each.by_hand is None else f"{each.by_hand:.3f}",
            *(f"{nbytes / MEGA:,.0f}" for nbytes in (each.read, each.written, each.linked)),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recaching", description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000, help="rows of each store (50,000)")
    parser.add_argument("--keys", type=int, default=100_000, help="of which none changed (100,000)")
    parser.add_argument(
        "--size", type=int, choices=(WHOLE, *SIZES), help="of the rows (160 and 64)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.rows < 1000 or options.keys < 0:
        parser.error("give at least 1,000 rows")
    with work_folder(None) as folder:
        changes = [
            change
            for size in ([options.size] if options.size else SIZES)
            for change in Bench(size, options.rows, folder).changes()
        ]
        still = nothing(folder, options.keys) if options.keys else None
    if options.json:
        found = [{**dataclasses.asdict(each), "share": each.share} for each in changes]
        machine = dataclasses.asdict(Installation.here())
        same: Mapping[str, Any] | None = dataclasses.asdict(still) if still else None
        print(json.dumps({"machine": machine, "changes": found, "nothing": same}))
        return
    console = Console(highlight=False, width=120)
    console.print(_table(changes, options.rows))
    if still:
        loaded = " and ".join(still.loaded) or "neither torch nor Ray"
        console.print(
            f"nothing changed, {still.keys:,} local keys: {still.seconds:.1f} s, "
            f"{still.cpu_seconds:.1f} CPU-s; loaded {loaded}"
        )
    console.print(str(Installation.here()), soft_wrap=True)


if __name__ == "__main__":
    main()
