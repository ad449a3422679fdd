"""``python -m tests.bench.doctor``: what ``precache doctor`` predicts, over what is measured then.

Each turn predicts, builds and reads a store of one codec, one right after the other, so that all
three have the same neighbours on the machine. Turns of the codecs alternate.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.diagnosis.bench import bench
from tests.bench.common import find_photos, log, multiply, work_folder

CODECS = ("image", "raw", "zstd")


@dataclass(frozen=True)
class Ratios:
    """Predicted over measured figures of one turn.

    Attributes
    ----------
    build_cpu, stored
        CPU time of the build's tasks, and stored bytes.
    reading_cpu, reading_rate
        CPU time and samples/s of a loader.
    """

    build_cpu: float
    stored: float
    reading_cpu: float
    reading_rate: float


def _turn(source: Path, store: Path, codec: str) -> Ratios:
    recipe = precache.Recipe.image(resize=256, crop=224, codec=codec)
    predicted = precache.doctor(source, recipe, seconds=15)
    built = precache.build(source, store, recipe, address="serial")
    read = bench(store, epochs=5).warm
    own = predicted.codecs[0]
    return Ratios(
        build_cpu=predicted.build.cpu_seconds / built.cpu_seconds,
        stored=own.bytes_total / built.stored_bytes,
        reading_cpu=own.cpu_ms_per_1000 / read.cpu_ms_per_1000,
        reading_rate=own.samples_per_s / read.samples_per_s,
    )


def measure(photos: Path | None, folder: Path, count: int, turns: int) -> dict[str, list[Ratios]]:
    """Return codec -> ratios of each turn; a turn before the first one is not counted."""
    root, files = find_photos(photos, folder)
    source = multiply(files, root, count, folder / f"photos-{count}")
    ratios: dict[str, list[Ratios]] = {codec: [] for codec in CODECS}
    for turn in range(turns + 1):
        for codec in CODECS:
            log.print(f"turn {turn} of {turns}: {codec}")
            ratios[codec].append(_turn(source, folder / f"{codec}-{turn}.store", codec))
    return {codec: found[1:] for codec, found in ratios.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.doctor", description=__doc__)
    parser.add_argument("--count", type=int, default=400, help="photographs in the source (400)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each codec (5)")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--folder", type=Path, help="work there, and keep what is made")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with work_folder(options.folder) as folder:
        measured = measure(options.photos, folder, options.count, options.turns)
    machine = Installation.here()
    if options.json:
        codecs = {
            codec: [dataclasses.asdict(one) for one in found] for codec, found in measured.items()
        }
        print(json.dumps({"machine": dataclasses.asdict(machine), "codecs": codecs}))
        return
    table = Table(
        "codec",
        "figure",
        *(Column(name, justify="right") for name in ("median", "least", "most")),
        title=f"Predicted over measured, {options.turns} turns",
    )
    names = ("CPU time of the build", "stored bytes", "CPU time of reading", "samples/s")
    for codec, found in measured.items():
        columns = zip(*(dataclasses.astuple(one) for one in found), strict=True)
        for name, column in zip(names, columns, strict=True):
            figures = statistics.median(column), min(column), max(column)
            table.add_row(codec, name, *(f"{figure:.2f}" for figure in figures))
    console = Console(highlight=False)
    console.print(table)
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
