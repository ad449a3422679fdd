"""``python -m tests.bench.sources``: what each kind of source costs, beside a folder.

Listing many small samples, building from photos, and what is fetched again when one photo changed.
The same photos, in one process without a cluster. Before and after every build from a source comes
one from the folder, so that each ratio has neighbours in time.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache_workers.sources.base import Columns
from precache_workers.sources.kinds import open_source
from tests.bench.building import decodes
from tests.bench.common import (
    CROP,
    cost_of,
    find_photos,
    in_clean_process,
    link,
    log,
    multiply,
    peak_bytes,
    work_folder,
)
from tests.support.containers import KEY_COLUMNS, WRITERS, photos_of

RECIPE = precache.Recipe.image(resize=256, crop=CROP)
TARGET = 1.15
FOLDER = "folder"
CLASSES = 100
LINKS = 50_000
"""Names of one file: file systems allow some 65,000."""


@dataclass(frozen=True)
class Listed:
    """What listing a source takes: seconds, CPU-seconds, and memory above what was there before."""

    seconds: float
    cpu_seconds: float
    nbytes: int


def written(kind: str, photos: Path, folder: Path) -> str:
    """Write the photos as one kind of source; returns its name."""
    if kind == FOLDER:
        return str(photos)
    folder.mkdir(parents=True)
    return WRITERS[kind](photos, folder)


# --- listing ------------------------------------------------------------------------------------


def small_photos(folder: Path, count: int) -> Path:
    """Write photos of eight pixels, in many classes."""
    for number in range(count):
        if number % LINKS == 0:
            original = folder / f"{number}.png"
            original.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(original, "JPEG")
        name = f"class{number % CLASSES:03d}/{number:08d}.jpg"
        (folder / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        link(original, folder / "photos" / name)
    return folder / "photos"


def _listed(source: str, key: str | None) -> Listed:
    opened = open_source(source, columns=Columns(key=key))
    with contextlib.suppress(precache.SourceError):
        opened.list(lambda count: None, seconds=0.01)  # imports what it needs
    before = peak_bytes()
    cost = cost_of(lambda: len(opened.list(lambda count: None).table))
    return Listed(cost.wall_seconds, cost.cpu_seconds, peak_bytes() - before)


# --- building -----------------------------------------------------------------------------------


def _cpu_ms(source: str, kind: str, store: Path) -> float:
    """CPU-ms of the tasks of a build, a photo."""
    key = KEY_COLUMNS.get(kind)
    result = precache.build(source, store, RECIPE, address="serial", max_failures=0, key_column=key)
    return result.cpu_seconds / result.samples * 1e3


def built(
    photos: Path, folder: Path, kinds: Sequence[str], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Kind -> CPU-ms a photo of its builds, each with the mean of the folder's around it."""
    sources = {kind: written(kind, photos, folder / kind) for kind in kinds}
    stores = (folder / f"{number}.store" for number in itertools.count())
    before = in_clean_process(_cpu_ms, str(photos), FOLDER, next(stores))
    pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for number, kind in itertools.product(range(rounds), kinds):
        log.print(f"round {number + 1} of {rounds}: {kind}")
        own = in_clean_process(_cpu_ms, sources[kind], kind, next(stores))
        after = in_clean_process(_cpu_ms, str(photos), FOLDER, next(stores))
        pairs[kind].append((own, (before + after) / 2))
        before = after
    return pairs


# --- building again -----------------------------------------------------------------------------


def fetched_again(photos: Path, folder: Path, kind: str) -> int:
    """Samples that the next build fetches when one photo changed."""
    changing, own = folder / "changing" / "photos", folder / "changing" / kind
    if not changing.exists():
        shutil.copytree(photos, changing)
        for number, path in enumerate(photos_of(changing)):
            os.utime(path, (1e9 + number, 1e9 + number))  # a time of several says nothing
    source, store = written(kind, changing, own), folder / "changing" / f"{kind}.store"
    _cpu_ms(source, kind, store)
    one = photos_of(changing)[0]
    with Image.open(one) as image:
        image.rotate(180).save(one, "JPEG")
    fresh = folder / "changing" / "fresh" / kind
    written(kind, changing, fresh)
    for path in filter(Path.is_file, fresh.rglob("*")):
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


# --- output -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sources", description=__doc__)
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--count", type=int, default=400, help="photos to build from (400)")
    parser.add_argument("--listed", type=int, default=100_000, help="samples to list (100,000)")
    parser.add_argument("--rounds", type=int, default=5, help="builds of each kind (5)")
    parser.add_argument("--only", default=",".join(WRITERS), help="kinds, with commas between")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    kinds = options.only.split(",")
    with work_folder(None) as folder:
        small = small_photos(folder / "small", options.listed)
        listed = {}
        for kind in (FOLDER, *kinds):
            log.print(f"listing: {kind}")
            source = written(kind, small, folder / "small" / kind)
            listed[kind] = in_clean_process(_listed, source, KEY_COLUMNS.get(kind))
        root, files = find_photos(options.photos, folder)
        usable = [path for path in files if decodes(path)]
        photos = multiply(usable, root, options.count, folder / "source" / "photos").parent
        pairs = built(photos, folder, kinds, options.rounds)
        again = {}
        for kind in (FOLDER, *kinds):
            log.print(f"one photo changed: {kind}")
            again[kind] = fetched_again(photos, folder, kind)
    if options.json:
        costs = {kind: asdict(cost) for kind, cost in listed.items()}
        print(
            json.dumps(
                {
                    "photos": options.count, "listed": costs, "builds": pairs,
                    "fetched_again": again,
                }
            )
        )  # fmt: skip
        return
    table = Table(
        "source", Column("listing: s", justify="right"),
        Column("CPU-s", justify="right"), Column("MB", justify="right"),
        Column("building: CPU-ms", justify="right"),
        Column("beside the folder", justify="right"),
        Column("fetched again", justify="right"),
        title=f"{options.listed:,} samples listed, {options.count:,} photos built, medians "
        f"of {options.rounds} rounds",
        caption=f"A ratio is to be {TARGET} or less, but for what the format's own library takes.",
    )  # fmt: skip
    for kind, cost in listed.items():
        builds = pairs.get(kind) or [
            (beside, beside) for own in pairs.values() for _, beside in own
        ]
        ratios = sorted(own / beside for own, beside in builds)
        text = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        table.add_row(
            kind, f"{cost.seconds:.2f}", f"{cost.cpu_seconds:.2f}", f"{cost.nbytes / 1e6:.0f}",
            f"{statistics.median(own for own, _ in builds):.2f}", text, str(again[kind]),
        )  # fmt: skip
    console = Console(highlight=False, width=120)
    console.print(table)
    console.print(str(Installation.here()), soft_wrap=True)


if __name__ == "__main__":
    main()
