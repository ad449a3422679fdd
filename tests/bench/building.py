"""``python -m tests.bench.building``: what a build burns beside decoding the photos alone.

Decoding alone is libjpeg-turbo on bytes that are in memory already, in as many processes at once as
the build has tasks, since cores that share caches slow each other down. It is measured
before and after every build, so that each has neighbours in time.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simplejpeg
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from tests.bench.common import (
    CROP,
    Cost,
    cost_of,
    find_photos,
    in_clean_process,
    log,
    multiply,
    work_folder,
)

RESIZE = 256
CODECS = ("image", "raw")
ADDRESSES = ("local", "serial")
TARGET = 0.6
STAGES = ("fetch", "ops", "encode", "put")
WARM_UP = 200


@dataclass(frozen=True)
class Build:
    """One build, and what decoding the same photos cost around it.

    Attributes
    ----------
    cpu_seconds
        What the tasks burnt: fetch, ops, encode and put.
    decode_seconds
        CPU time of decoding alone, the mean of before and after.
    timings
        Seconds by stage, as `precache.build` reports them.
    """

    samples: int
    cpu_seconds: float
    decode_seconds: float
    seconds: float
    stored_ratio: float
    timings: Mapping[str, float]


@dataclass(frozen=True)
class Building:
    """All builds with one codec at one address."""

    codec: str
    address: str
    builds: tuple[Build, ...]

    @property
    def images_per_cpu_second(self) -> float:
        return statistics.median(each.samples / each.cpu_seconds for each in self.builds)

    @property
    def ratio(self) -> float:
        """Images per CPU-second over those of decoding alone."""
        return statistics.median(each.decode_seconds / each.cpu_seconds for each in self.builds)

    def median_of(self, timing: str) -> float:
        return statistics.median(each.timings[timing] for each in self.builds)


# --- measuring ----------------------------------------------------------------------------------


def decodes(path: Path) -> bool:
    """Whether libjpeg-turbo alone makes RGB of it, as it does of nearly all photos."""
    try:
        simplejpeg.decode_jpeg(path.read_bytes())
    except ValueError:
        return False
    return True


def _decode_alone(folder: Path) -> Cost:
    """Decode every photo from memory; to be called in a clean process."""
    photos = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]

    def run(count: int) -> int:
        for data in photos[:count]:
            simplejpeg.decode_jpeg(data)
        return count

    run(min(WARM_UP, len(photos)))
    return cost_of(lambda: run(len(photos)))


def _build(source: Path, store: Path, codec: str, address: str) -> Build:
    recipe = precache.Recipe.image(resize=RESIZE, crop=CROP, codec=codec)
    result = precache.build(source, store, recipe, address=address, max_failures=0)
    return Build(
        result.samples,
        result.cpu_seconds,
        0.0,
        result.seconds,
        result.ratio,
        dict(result.timings),
    )


def _alone(source: Path, address: str) -> Cost:
    """Decoding alone on every core for a cluster, on one for the serial build; mean of them."""
    at_once = (os.cpu_count() or 1) if address == "local" else 1
    with ThreadPoolExecutor(at_once) as pool:
        costs = list(pool.map(lambda _: in_clean_process(_decode_alone, source), range(at_once)))
    mean = statistics.fmean(cost.cpu_seconds for cost in costs)
    return dataclasses.replace(costs[0], cpu_seconds=mean)


def _rounds(
    source: Path, folder: Path, ways: Sequence[tuple[str, str]], rounds: int
) -> Iterator[tuple[tuple[str, str], Build, Cost]]:
    """Builds with their way, each with the cost of decoding alone around it."""
    before = {address: _alone(source, address) for _, address in ways}
    for number, (codec, address) in itertools.product(range(rounds), ways):
        log.print(f"round {number + 1} of {rounds}: codec {codec}, address {address}")
        store = folder / f"{codec}-{address}-{number}.store"
        build = in_clean_process(_build, source, store, codec, address)
        after = _alone(source, address)
        around = (before[address].cpu_seconds + after.cpu_seconds) / 2
        yield (codec, address), dataclasses.replace(build, decode_seconds=around), after
        before[address] = after


def measure(
    source: Path, folder: Path, addresses: Sequence[str], rounds: int
) -> tuple[list[float], list[Building]]:
    """CPU-seconds of each time of decoding alone, and the builds of each codec and address."""
    ways = list(itertools.product(CODECS, addresses))
    builds: dict[tuple[str, str], list[Build]] = {way: [] for way in ways}
    decoded = []
    for way, build, alone in _rounds(source, folder, ways, rounds):
        builds[way].append(build)
        decoded.append(alone.cpu_seconds)
    buildings = [Building(*way, tuple(each)) for way, each in builds.items()]
    return decoded, buildings


# --- results ------------------------------------------------------------------------------------


def _table(
    decoded: Sequence[float], buildings: Sequence[Building], count: int, rounds: int
) -> Table:
    names = ("CPU-ms", "per CPU-s", "ratio", *STAGES)
    table = Table(
        Column("", no_wrap=True),
        *(Column(name, justify="right") for name in names),
        title=f"{count:,} photos, resized to {RESIZE}, cropped to {CROP}",
        caption=f"CPU-ms a photo, and wall-ms by stage in its task; medians of {rounds} rounds.\n"
        f"The ratio to decoding alone is to be {TARGET} or more.",
    )
    alone = statistics.median(decoded)
    table.add_row("decoding alone", f"{alone / count * 1e3:.2f}", f"{count / alone:,.0f}", "1.00")
    for each in buildings:
        stages = (f"{each.median_of(stage) / count * 1e3:.3f}" for stage in STAGES)
        rate = each.images_per_cpu_second
        figures = f"{1e3 / rate:.2f}", f"{rate:,.0f}", f"{each.ratio:.2f}"
        table.add_row(f"{each.codec}, {each.address}", *figures, *stages)
    return table


def _remark(building: Building) -> str:
    wall = statistics.median(each.seconds for each in building.builds)
    return (
        f"{building.codec}, {building.address}: {wall:.1f} s in all, of which "
        f"{building.median_of('list'):.2f} s to list and {building.median_of('start'):.1f} s to "
        f"start; apart, {building.median_of('imports'):.1f} CPU-s of imports in the workers; "
        f"stored {building.builds[0].stored_ratio:.2f} times smaller"
    )


def _as_json(building: Building) -> dict[str, Any]:
    return {
        "codec": building.codec,
        "address": building.address,
        "images_per_cpu_second": building.images_per_cpu_second,
        "ratio": building.ratio,
        "builds": [dataclasses.asdict(each) for each in building.builds],
    }


def _print(
    decoded: Sequence[float], buildings: Sequence[Building], count: int, rounds: int
) -> None:
    console = Console(highlight=False)
    console.print(_table(decoded, buildings, count, rounds))
    low, high = (each / count * 1e3 for each in (min(decoded), max(decoded)))
    console.print(f"decoding alone: {low:.2f} to {high:.2f} CPU-ms in the course of the run")
    for building in buildings:
        console.print(_remark(building), soft_wrap=True)
    console.print(str(Installation.here()), soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.building", description=__doc__)
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--count", type=int, default=2000, help="photos to build from (2000)")
    parser.add_argument("--rounds", type=int, default=3, help="builds of each kind (3)")
    parser.add_argument("--address", choices=ADDRESSES, help="where tasks run (both, in turn)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.count < 1 or options.rounds < 1:
        parser.error("give at least 1 photo and 1 round")
    addresses = (options.address,) if options.address else ADDRESSES
    with work_folder(None) as folder:
        root, files = find_photos(options.photos, folder)
        usable = [path for path in files if decodes(path)]
        log.print(f"{len(usable)} of {len(files)} photos are JPEGs that decode to RGB")
        source = multiply(usable, root, options.count, folder / "source")
        decoded, buildings = measure(source, folder, addresses, options.rounds)
    if options.json:
        machine = dataclasses.asdict(Installation.here())
        found = [_as_json(each) for each in buildings]
        settings = {"photos": options.count, "rounds": options.rounds, "decode_seconds": decoded}
        print(json.dumps({"machine": machine, **settings, "builds": found}))
        return
    _print(decoded, buildings, options.count, options.rounds)


if __name__ == "__main__":
    main()
