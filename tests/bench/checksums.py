"""``python -m tests.bench.checksums``: what checking rows costs, when they are and are not checked.

Of each codec, loaders take turns, epoch by epoch, on a warm store: one that checks every row
(``verify="always"``), as all do in their first epoch, and one that has checked each already. Of
`raw` there is one more, which checks by google-crc32c before it copies, as without SSE4.2.
"""

import argparse
import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.codecs import kernels
from tests.bench.common import (
    CROP,
    build_crops,
    cost_of,
    find_photos,
    in_clean_process,
    log,
    median_ratio,
    multiply,
    touch,
    work_folder,
)

BATCH = 256
CODECS = ("raw", "zstd", "image")
ONCE, ALWAYS, GOOGLE = "checked before", "checked", "checked by google-crc32c"


@contextlib.contextmanager
def _by_google(wanted: bool) -> Iterator[None]:
    compiled = kernels.compiled
    if wanted:
        by_google = dataclasses.replace(compiled(), has_crc32c=False)
        kernels.compiled = lambda: by_google
    yield
    kernels.compiled = compiled


def _measure(store: Path, codec: str, epochs: int) -> dict[str, list[float]]:
    """CPU-ms per 1,000 rows; to be called in a clean process."""
    ways = {ONCE: "first", ALWAYS: "always"}
    if codec == "raw" and kernels.compiled().has_crc32c:
        ways[GOOGLE] = "always"
    with contextlib.ExitStack() as ends:
        loaders = {
            name: ends.enter_context(precache.Loader(store, BATCH, device="cpu", verify=verify))
            for name, verify in ways.items()
        }
        costs: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(epochs + 1):
            for name, loader in loaders.items():
                touch(path for path in store.rglob("*") if path.is_file())
                with _by_google(name == GOOGLE):
                    cost = cost_of(lambda loader=loader: sum(len(b["row"]) for b in loader))  # type: ignore[misc]
                costs[name].append(cost.cpu_ms_per_1000)
    return {name: each[1:] for name, each in costs.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.checksums", description=__doc__)
    parser.add_argument("--rows", type=int, default=8000, help="of each store (8000)")
    parser.add_argument("--epochs", type=int, default=5, help="after the first (5)")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--folder", type=Path, help="work there, and keep what is made")
    options = parser.parse_args(arguments)
    title = f"{options.rows:,} rows of {CROP} x {CROP} x 3, batches of {BATCH}, shuffled, warm"
    columns = ("CPU-ms per 1,000", f"of those {ONCE}")
    table = Table("codec", "rows", *(Column(n, justify="right") for n in columns), title=title)
    with work_folder(options.folder) as folder:
        root, files = find_photos(options.photos, folder)
        source = multiply(files, root, options.rows, folder / f"photos-{options.rows}")
        for codec in CODECS:
            log.print(f"{codec}: building {options.rows:,} rows")
            store = build_crops(source, folder / f"{codec}-{options.rows}.store", codec)
            found = in_clean_process(_measure, store, codec, options.epochs)
            for name, costs in found.items():
                ratio = median_ratio(costs, found[ONCE])
                table.add_row(codec, name, f"{statistics.median(costs):.1f}", f"{ratio:.2f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(str(Installation.here()), soft_wrap=True)


if __name__ == "__main__":
    main()
