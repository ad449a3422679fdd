"""``python -m tests.bench.containers``: requests and bytes that a build from containers takes.

Photos lie in tar archives or Parquet files, one class after another, in a bucket whose server
(moto's, behind a proxy, in a process of its own) answers after a latency. Beside what listing and
building read is the ideal: each byte once, by requests of the size that each of them makes.
"""

import argparse
import dataclasses
import io
import json
import multiprocessing
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.storage.open import open_folder
from precache_workers.sources.containers import UNIT_BYTES
from precache_workers.sources.file_ranges import BLOCK_BYTES
from precache_workers.sources.kinds import open_source
from tests.bench.common import Cost, cost_of, in_clean_process, log
from tests.support.building import cut, encoded
from tests.support.containers import add, tar_index
from tests.support.servers import FaultProxy, S3Server

CROP = 64
DISTINCT = 250
"""Photos that are encoded; containers have them again and again, each with its own last bytes."""
CUT = 300
"""Most pixels across a piece of a photo; larger ones are enlarged."""
MIB = 1 << 20
WIDTH = 110


@dataclass(frozen=True)
class Settings:
    """Containers of a bucket, and how slow it is."""

    containers: int
    photos: int
    width: int
    group_rows: int
    latency: float


@dataclass(frozen=True)
class Traffic:
    """Requests to a server, and bytes of its answers."""

    requests: int
    nbytes: int

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.requests - other.requests, self.nbytes - other.nbytes)


@dataclass(frozen=True)
class Run:
    """A listing and a build of one kind of container.

    Attributes
    ----------
    nbytes
        Bytes of all containers.
    building
        Traffic of the build beyond that of a listing, with which it begins.
    """

    kind: str
    nbytes: int
    shards: int
    listing: Traffic
    building: Traffic
    list_cost: Cost
    build_cost: Cost

    @property
    def ideal_listing(self) -> Traffic:
        return Traffic(-(-self.nbytes // BLOCK_BYTES), self.nbytes)

    @property
    def ideal_building(self) -> Traffic:
        return Traffic(-(-self.nbytes // UNIT_BYTES), self.nbytes)


# --- containers ---------------------------------------------------------------------------------


def _tar(photos: Sequence[bytes], number: int, settings: Settings) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for place, photo in enumerate(photos):
            add(tar, f"{number:04d}/{place:06d}.jpg", photo, mtime=place)
    return sink.getvalue()


def _parquet(photos: Sequence[bytes], number: int, settings: Settings) -> bytes:
    sink = io.BytesIO()
    images = [{"bytes": data, "path": f"{n:06d}.jpg"} for n, data in enumerate(photos)]
    table = pa.table({"image": images, "label": [f"{number:04d}"] * len(photos)})
    pq.write_table(table, sink, row_group_size=settings.group_rows)
    return sink.getvalue()


WRITERS: dict[str, Callable[[Sequence[bytes], int, Settings], bytes]] = {
    "tar": _tar,
    "tar+idx": _tar,
    "parquet": _parquet,
}


def _suffix(kind: str) -> str:
    return kind.partition("+")[0]


def _fill(kind: str, options: dict[str, Any], settings: Settings) -> int:
    """Put the containers into the bucket; returns their bytes."""
    size = settings.width, settings.width * 3 // 4
    part = min(size[0], CUT), min(size[1], CUT)
    distinct = [
        encoded(cut(number, part).resize(size)) for number in range(min(DISTINCT, settings.photos))
    ]
    photos = [
        distinct[number % len(distinct)] + f"{number:06d}".encode()
        for number in range(settings.photos)
    ]
    folder, nbytes = open_folder("s3://bucket/data", options), 0
    for number in range(settings.containers):
        data = WRITERS[kind](photos, number, settings)
        folder.put(f"{number:04d}.{_suffix(kind)}", [data])
        if kind == "tar+idx":
            folder.put(f"{number:04d}.idx", [tar_index(io.BytesIO(data)).encode()])
        nbytes += len(data)
    return nbytes


# --- measuring ----------------------------------------------------------------------------------


def _serve(pipe: Connection, latency: float) -> None:
    """Serve a bucket; sends the options to fill and to read it, then its traffic when asked."""
    server = S3Server()
    server.make_bucket("bucket")
    proxy, nbytes = FaultProxy(server.port), [0]

    def count(handler: Any, status: int, data: bytes) -> bool:
        with proxy.lock:
            nbytes[0] += len(data)
        return False

    proxy.before = lambda method, path: time.sleep(latency)
    proxy.choose = lambda method, path: count
    pipe.send((server.options(), server.options(proxy.port)))
    while pipe.recv():
        pipe.send(Traffic(sum(proxy.seen.values()), nbytes[0]))


def _run(kind: str, settings: Settings, store: Path) -> Run:
    """List and build the containers of a kind; to be called in a clean process."""
    pipe, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=[theirs, settings.latency], daemon=True
    )
    server.start()

    def traffic() -> Traffic:
        pipe.send(True)
        answer: Traffic = pipe.recv()
        return answer

    try:
        direct, options = pipe.recv()
        nbytes, uri = _fill(kind, direct, settings), f"s3://bucket/data/*.{_suffix(kind)}"
        source = open_source(uri, options)
        list_cost = cost_of(lambda: len(source.list(lambda count: None).table))
        listing = traffic()
        recipe = precache.Recipe.image(resize=CROP, crop=CROP)

        def build() -> int:
            result = precache.build(
                uri, store, recipe, address="serial", max_failures=0, storage_options=options
            )
            return result.samples

        build_cost = cost_of(build)
        building = traffic() - listing - listing
    finally:
        server.kill()
        server.join()
    shards = sum(1 for path in store.rglob("image/c/**/0") if path.is_file())
    return Run(kind, nbytes, shards, listing, building, list_cost, build_cost)


# --- results ------------------------------------------------------------------------------------


def _table(runs: Sequence[Run], settings: Settings) -> Table:
    names = ("requests", "ideal", "MiB", "ideal", "ratio", "wall s", "CPU s")
    table = Table(
        "containers",
        "step",
        *(Column(name, justify="right") for name in names),
        title=f"{settings.containers} containers of {settings.photos:,} photos, "
        f"{settings.latency * 1e3:.0f} ms more per request",
        caption="Requests and bytes of building are those beyond the listing; times include it.",
    )
    for run in runs:
        table.add_row(run.kind, "list", *_cells(run.listing, run.ideal_listing, run.list_cost))
        step = f"build, {run.shards} shards"
        cells = _cells(run.building, run.ideal_building, run.build_cost)
        table.add_row("", step, *cells, end_section=True)
    return table


def _cells(traffic: Traffic, ideal: Traffic, cost: Cost) -> Iterator[str]:
    yield from (f"{traffic.requests:,}", f"{ideal.requests:,}")
    yield from (f"{traffic.nbytes / MIB:,.1f}", f"{ideal.nbytes / MIB:,.1f}")
    yield f"{traffic.nbytes / ideal.nbytes:.2f}"
    yield from (f"{cost.wall_seconds:.1f}", f"{cost.cpu_seconds:.1f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.containers", description=__doc__)
    parser.add_argument("--kinds", choices=WRITERS, nargs="+", default=list(WRITERS))
    parser.add_argument("--containers", type=int, default=100, help="number of them (100)")
    parser.add_argument("--photos", type=int, default=1000, help="in each (1000)")
    parser.add_argument("--width", type=int, default=96, help="of a photo, in pixels (96)")
    parser.add_argument("--group-rows", type=int, default=100, help="of a row group (100)")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds a request (0.05)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if min(options.containers, options.photos, options.width, options.group_rows) < 1:
        parser.error("give no number below 1")
    fields = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(options, name) for name in fields})
    runs = []
    with tempfile.TemporaryDirectory(prefix="precache-bench-") as folder:
        for kind in options.kinds:
            log.print(f"{kind}: {settings.containers} containers of {settings.photos:,} photos")
            store = Path(folder, f"{kind}.store")
            runs.append(in_clean_process(_run, kind, settings, store))
    machine = Installation.here()
    if options.json:
        told = {"machine": dataclasses.asdict(machine), **dataclasses.asdict(settings)}
        print(json.dumps({**told, "runs": [dataclasses.asdict(run) for run in runs]}))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(runs, settings))
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
