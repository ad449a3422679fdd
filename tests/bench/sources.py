"""``python -m tests.bench.sources``: what a build burns from each kind of source, beside a folder.

The same photos, in one process without a cluster. Before and after every build from a source comes
one from the folder, so that each ratio has neighbours in time.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from tests.bench.building import decodes
from tests.bench.common import CROP, find_photos, in_clean_process, log, multiply, work_folder
from tests.support.containers import KEY_COLUMNS, WRITERS

RESIZE = 256
TARGET = 1.15
FOLDER = "folder"


def _cpu_ms(source: str, kind: str, store: Path) -> float:
    """CPU-ms of the tasks of a build, a photo."""
    recipe = precache.Recipe.image(resize=RESIZE, crop=CROP)
    key = KEY_COLUMNS.get(kind)
    result = precache.build(source, store, recipe, address="serial", max_failures=0, key_column=key)
    return result.cpu_seconds / result.samples * 1e3


def measure(
    photos: Path, folder: Path, kinds: Sequence[str], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Kind -> CPU-ms a photo of its builds, each with the mean of the folder's around it."""
    sources = {}
    for kind in kinds:
        (folder / kind).mkdir()
        sources[kind] = WRITERS[kind](photos, folder / kind)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sources", description=__doc__)
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--count", type=int, default=400, help="photos to build from (400)")
    parser.add_argument("--rounds", type=int, default=5, help="builds of each kind (5)")
    parser.add_argument("--only", default=",".join(WRITERS), help="kinds, with commas between")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with work_folder(None) as folder:
        root, files = find_photos(options.photos, folder)
        usable = [path for path in files if decodes(path)]
        photos = multiply(usable, root, options.count, folder / "source" / "photos").parent
        pairs = measure(photos, folder, options.only.split(","), options.rounds)
    if options.json:
        print(json.dumps({"photos": options.count, "builds": pairs}))
        return
    table = Table(
        "source", Column("CPU-ms", justify="right"), Column("beside the folder", justify="right"),
        title=f"{options.count:,} photos, medians of {options.rounds} rounds, lowest to highest",
        caption=f"A ratio is to be {TARGET} or less, but for what the format's own library takes.",
    )  # fmt: skip
    for kind, builds in pairs.items():
        ratios = sorted(own / beside for own, beside in builds)
        text = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        table.add_row(kind, f"{statistics.median(own for own, _ in builds):.2f}", text)
    console = Console(highlight=False)
    console.print(table)
    console.print(str(Installation.here()), soft_wrap=True)


if __name__ == "__main__":
    main()
