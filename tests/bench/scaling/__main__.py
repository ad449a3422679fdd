"""The command line: ``python -m tests.bench.scaling``."""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

import tests.bench.scaling
from precache.cli.installation import Installation
from tests.bench.building import decodes
from tests.bench.common import find_photos, in_clean_process, log, multiply, work_folder
from tests.bench.scaling import builds, others
from tests.bench.scaling.builds import SERIAL, Build, local, ray_alone
from tests.bench.scaling.memory import LIMIT, make_pictures
from tests.bench.scaling.plan import plan
from tests.bench.scaling.watch import load_average

MIB = 1 << 20
WIDTH = 130
SHARDS = ((1000, 5), (1000, 25), (1000, 100))
"""How many, and photos in each, where the driver is measured; by default each has some 900."""
ORDINARY = 200
"""Photos beside a large picture, and alone."""

Section = tuple[Table, Any]
"""Figures for people and for programs."""


def _table(title: str, caption: str, *columns: str) -> Table:
    numbers = (Column(name, justify="right") for name in columns)
    return Table(Column("", no_wrap=True), *numbers, title=title, caption=caption)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _of_neighbours(over: Sequence[Build], under: Sequence[Build]) -> str:
    """Median of the ratios of the CPU time of tasks in the same rounds."""
    return f"{_median(a.task_ms / b.task_ms for a, b in zip(over, under, strict=True)):.2f}"


# --- sections -----------------------------------------------------------------------------------


def _workers(options: argparse.Namespace, folder: Path) -> Section:
    source = _photos(options, folder, options.count)
    found = builds.in_turns(source, folder, options.rounds)
    table = _table(
        f"{options.count:,} photos, resized to 256, cropped to 224, codec image",
        "CPU-ms a photo; medians of all rounds, ratios of neighbours. Target: at most 1.1.",
        "tasks",
        "of serial",
        "of 1 worker",
        "workers' processes",
        "all processes",
        "images/s",
    )
    one: list[Build] = []
    for title, made in found.items():
        if "1 worker" in title:
            one = made
        seen = (each.worker_seconds / each.samples * 1e3 for each in made)
        every = (each.all_seconds / each.samples * 1e3 for each in made)
        table.add_row(
            title,
            f"{_median(each.task_ms for each in made):.2f}",
            _of_neighbours(made, found[SERIAL.title]),
            _of_neighbours(made, one) if "2 workers" in title else "",
            f"{_median(seen):.2f}" if title != SERIAL.title else "",
            f"{_median(every):.2f}",
            f"{_median(each.samples / each.loop.seconds for each in made):,.0f}",
        )
    return table, found


def _driver(options: argparse.Namespace, folder: Path) -> Section:
    table = _table(
        "The driver of 2 workers",
        "In the time that shard tasks run. All CPU time is the driver's then, and the workers'. "
        "Target: below 2%.",
        "CPU-ms a shard",
        "of Ray's alone",
        "of all CPU time",
        "of a core's time",
        "CPU-s in all",
    )
    alone = ray_alone()
    found: dict[str, Any] = {"ray_alone_ms": alone}
    table.add_row("empty tasks, Ray alone", f"{alone:.2f}", "1.0", "", "", "")
    for shards, photos in SHARDS:
        source = _photos(options, folder, shards * photos)
        log.print(f"{shards} shards of {photos}")
        made = builds.build(source, folder, local(2), shard_samples=photos)
        burnt = made.loop.cpu_seconds
        found[f"{shards}x{photos}"] = made
        table.add_row(
            f"{shards:,} shards of {photos}",
            f"{burnt / made.shards * 1e3:.2f}",
            f"{burnt / made.shards * 1e3 / alone:.1f}",
            f"{burnt / (burnt + made.worker_seconds):.1%}",
            f"{burnt / made.loop.seconds:.1%}",
            f"{made.driver_seconds:.1f}",
        )
    return table, found


def _plan(options: argparse.Namespace, folder: Path) -> Section:
    found = in_clean_process(plan, options.planned, 1000)
    table = _table(
        f"A driver with {found.samples:,} samples in {found.shards:,} shards, tasks pretended",
        "1 GB at most, and the first task within a minute, are asked.",
        "s to the first task",
        "s in all",
        "CPU-s in all",
        "peak MB",
        "KB a task",
    )
    table.add_row(
        "",
        f"{found.first_task_seconds:.1f}",
        f"{found.seconds:.1f}",
        f"{found.cpu_seconds:.1f}",
        f"{found.peak_bytes / 1e6:,.0f}",
        f"{found.task_bytes / 1e3:.0f}",
    )
    return table, found


def _memory(options: argparse.Namespace, folder: Path) -> Section:
    table = _table(
        "Memory of a worker",
        f"The limit is {LIMIT:,} pixels (decode's max_pixels).",
        "peak MiB",
        "holes",
    )
    found: dict[str, Build] = {}
    ordinary = _photos(options, folder, ORDINARY)
    for title, source in (("photos", ordinary), *make_pictures(folder / "large")):
        if source is not ordinary:
            multiply(sorted(ordinary.rglob("*.*"))[:4], ordinary, 4, source)
        log.print(title)
        made = found[title] = builds.build(source, folder, local(1))
        table.add_row(title, f"{made.worker_peak_bytes / MIB:,.0f}", str(len(made.holes)))
    return table, found


def _peers(options: argparse.Namespace, folder: Path) -> Section:
    source = _photos(options, folder, options.count)
    found = others.in_turns(source, folder, options.rounds, options.install)
    table = _table(
        f"{options.count:,} photos, {others.CPUS} CPUs, all processes from start to end",
        "Medians of all rounds, and of ratios within each. img2dataset resizes the shorter side to "
        "224 and writes JPEGs, the others to 256 and write pixels: Ray Data as .npy.",
        "images per CPU-s",
        "of precache's",
        "CPU-ms an image",
        "KB an image",
        "images/s",
    )
    first = next(iter(found.values()))
    for title, runs in found.items():
        whole = [(a, b) for a, b in zip(runs, first, strict=True) if not isinstance(a, str)]
        if not whole:
            table.add_row(title, str(runs[0]))
            continue
        rates = [a.per_cpu_second for a, _ in whole]
        ratios = [a.per_cpu_second / b.per_cpu_second for a, b in whole if not isinstance(b, str)]
        table.add_row(
            title,
            f"{_median(rates):,.0f}",
            f"{_median(ratios):.2f}" if ratios else "",
            f"{1e3 / _median(rates):.2f}",
            f"{_median(a.nbytes / a.samples for a, _ in whole) / 1e3:.0f}",
            f"{_median(a.samples / a.seconds for a, _ in whole):,.0f}",
        )
    return table, found


SECTIONS: Mapping[str, Callable[[argparse.Namespace, Path], Section]] = {
    "workers": _workers,
    "driver": _driver,
    "plan": _plan,
    "memory": _memory,
    "peers": _peers,
}


# --- command line -------------------------------------------------------------------------------


def _photos(options: argparse.Namespace, folder: Path, count: int) -> Path:
    """So many photos, each of some under many names; made once."""
    source = folder / f"photos-{count}"
    if not source.exists():
        root, files = find_photos(options.photos, folder)
        multiply([path for path in files if decodes(path)], root, count, source)
    return source


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{value!r} is not JSON")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.scaling",
        description=tests.bench.scaling.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(SECTIONS)
    parser.add_argument("--only", metavar="NAME,…", help=f"of {names}")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--count", type=int, default=5000, help="photos to build from (5000)")
    parser.add_argument("--rounds", type=int, default=3, help="builds of each kind (3)")
    parser.add_argument(
        "--planned", type=int, default=1_000_000, help="samples of the plan (1000000)"
    )
    parser.add_argument("--folder", type=Path, help="work there; keeps photos and environments")
    parser.add_argument("--install", action="store_true", help="install peers into the folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.count < 1 or options.rounds < 1 or options.planned < 1000:
        parser.error("give at least 1 photo, 1 round, and 1000 samples of a plan")
    options.only = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := set(options.only) - SECTIONS.keys():
        parser.error(f"--only {', '.join(sorted(unknown))}: choose of {names}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parse(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    found: dict[str, Any] = {}
    with work_folder(options.folder) as named:
        for name in options.only:
            before = load_average()
            table, found[name] = SECTIONS[name](options, named.resolve())
            table.caption = f"{table.caption} Load average: {before:.1f} to {load_average():.1f}."
            if not options.json:
                console.print(table)
    if options.json:
        machine = dataclasses.asdict(Installation.here())
        print(json.dumps({"machine": machine, **found}, default=_plain))
    else:
        console.print(str(Installation.here()), soft_wrap=True)


if __name__ == "__main__":
    main()
