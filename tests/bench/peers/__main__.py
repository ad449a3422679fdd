"""The command line of the comparison: ``python -m tests.bench.peers``."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

import tests.bench.peers
from precache.cli.installation import Installation
from tests.bench.common import log, work_folder
from tests.bench.peers.child import BATCH
from tests.bench.peers.environments import ENVIRONMENTS
from tests.bench.peers.measure import Bench, Measurement, as_json
from tests.bench.peers.registry import PEERS, TAKE, Peer
from tests.bench.peers.rows import make_rows

Found = tuple[Peer, Measurement | str]
WIDTH = 140
COLUMNS = (
    "CPU-ms\nper 1,000",
    "of the\nfloor",
    "\nsamples/s",
    "cores of\nothers",
    "first epoch\nCPU-ms",
    "peak\nRSS, MB",
    "anonymous,\nMB",
    "\nstored, MB",
    "disk reads,\nMB an epoch",
)


def _turns(peers: Sequence[Peer]) -> list[Peer]:
    """The peers with the floor before, halfway and after them."""
    half = len(peers) // 2
    return [TAKE, *peers[:half], TAKE, *peers[half:], TAKE]


def _run(bench: Bench, peers: Sequence[Peer]) -> Iterator[Found]:
    with contextlib.ExitStack() as stack:
        floor = None
        if not bench.cold:
            # Cold, a floor in between would bring its own pages back.
            store = bench.folder / "floor"
            store.unlink(missing_ok=True)
            stack.callback(store.unlink)
            floor = stack.enter_context(bench.start(TAKE, store))
            floor.ask("write")
            floor.ask("epoch")
        for peer in _turns(peers):
            log.print(f"{peer.name} …")
            yield peer, bench.measure(peer, floor)


# --- results ------------------------------------------------------------------------------------


def _table(found: Sequence[Found], bench: Bench) -> Table:
    state = "evicted before every epoch" if bench.cold else "warm"
    table = Table(
        "",
        *(Column(name, justify="right") for name in COLUMNS),
        title=f"{bench.rows.count:,} rows of 224 x 224 x 3, batches of {BATCH}, shuffled, {state}",
        caption=f"Medians of {bench.epochs} or more epochs after the first. RSS counts mapped "
        "pages of the page cache, too; what no file backs is anonymous.",
    )
    for peer, measured in found:
        if isinstance(measured, str):
            table.add_row(peer.title, "-")
        else:
            table.add_row(peer.title, *_cells(measured))
    return table


def _cells(measured: Measurement) -> Iterator[str]:
    yield f"{measured.cpu_ms_per_1000:,.1f}"
    yield "" if measured.ratio is None else f"{measured.ratio:.2f}"
    yield f"{measured.samples_per_s:,.0f}"
    yield f"{measured.others:.1f}"
    yield f"{measured.first.cpu_ms_per_1000:,.1f}"
    megabytes = (
        measured.memory.resident_bytes,
        measured.memory.anonymous_bytes,
        measured.stored_bytes,
        measured.disk_bytes,
    )
    yield from (f"{value / 1e6:,.0f}" for value in megabytes)


def _print(found: Sequence[Found], bench: Bench) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(found, bench))
    for peer, measured in found:
        if isinstance(measured, str):
            console.print(f"{peer.title}: {measured}", soft_wrap=True, markup=False)
    for name, environment in ENVIRONMENTS.items():
        console.print(f"{name}: {', '.join(environment.requirements)}", soft_wrap=True)
    console.print(str(Installation.here()), soft_wrap=True)


def _print_json(found: Sequence[Found], bench: Bench) -> None:
    settings = {
        "rows": bench.rows.count,
        "batch_size": BATCH,
        "epochs": bench.epochs,
        "cold": bench.cold,
        "environments": {n: e.requirements for n, e in ENVIRONMENTS.items()},
    }
    peers = [{"name": peer.name, **as_json(measured)} for peer, measured in found]
    machine = dataclasses.asdict(Installation.here())
    print(json.dumps({"machine": machine, **settings, "peers": peers}))


# --- command line -------------------------------------------------------------------------------


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.peers",
        description=tests.bench.peers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(peer.name for peer in PEERS)
    parser.add_argument("--only", metavar="NAME,…", help=f"of {names}")
    parser.add_argument("--rows", type=int, default=8000, help="how many (8000)")
    parser.add_argument("--epochs", type=int, default=5, help="at least, after the first (5)")
    parser.add_argument("--cold", action="store_true", help="evict the store before every epoch")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--folder", type=Path, help="work there; keeps rows and environments")
    parser.add_argument("--install", action="store_true", help="install peers into the folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.rows < BATCH or options.epochs < 1:
        parser.error(f"give at least {BATCH} rows and 1 epoch")
    wanted = options.only.split(",") if options.only else [peer.name for peer in PEERS]
    unknown = set(wanted) - {peer.name for peer in PEERS}
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: choose of {names}")
    options.peers = [peer for peer in PEERS if peer.name in wanted]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parse(arguments)
    with work_folder(options.folder) as named:
        folder = named.resolve()
        rows = make_rows(options.photos, folder, options.rows)
        bench = Bench(folder, rows, options.epochs, options.cold, options.install)
        found = list(_run(bench, options.peers))
    if options.json:
        _print_json(found, bench)
    else:
        _print(found, bench)


if __name__ == "__main__":
    main()
