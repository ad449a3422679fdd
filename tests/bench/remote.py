"""Benchmarks of buckets, whose servers run in processes of their own.

What servers take comes from the same cores, so one latency is compared with another, and
requests and bytes are counted.
"""

import functools
import io
import itertools
import os
import statistics
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

import precache
from precache.reading.disk_cache import OVERHEAD, DiskCache, on_disk
from precache.storage.open import open_folder
from tests.bench.costs import Cost, cost_of, files_of, peak_bytes
from tests.bench.harness import (
    BATCH,
    CROP,
    RESIZE,
    Rounds,
    Rows,
    Table,
    Work,
    drain,
    in_clean_process,
    log,
    main,
    part,
    serving,
)
from tests.support.building import cut, encoded
from tests.support.containers import add, tar_index
from tests.support.gcs_server import GCSServer
from tests.support.listing_server import AZURES_PAGE, PAGE, AzureListingServer, ListingServer
from tests.support.servers import FaultProxy, S3Server

MIB = 1 << 20
MOTO = ("moto", "flask")
Latency = Annotated[float, "seconds that a request takes more"]


# --- servers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """GETs and HEADs to a server, and bytes of its answers to GETs."""

    requests: int
    nbytes: int


class _CountingProxy(FaultProxy):
    """Late by `delay` seconds; counts requests and bytes, and forgets them when asked to."""

    def __init__(self, upstream: int, delay: float) -> None:
        super().__init__(upstream)
        self.before = lambda method, path: time.sleep(delay)
        self.nbytes = 0
        self.choose = lambda method, path: self._count

    def _count(self, handler: Any, upstream: int, data: bytes) -> bool:
        with self.lock:
            self.nbytes += len(data) if handler.command == "GET" else 0
        return False

    def traffic(self) -> Traffic:
        with self.lock:
            requests = sum(n for (method, _), n in self.seen.items() if method in ("GET", "HEAD"))
            counted = Traffic(requests, self.nbytes)
            self.seen, self.nbytes = Counter(), 0
        return counted


def _serve_s3(pipe: Connection, delays: Sequence[float]) -> None:
    """Serve a bucket; sends storage options, straight and through each proxy, then traffic."""
    server = S3Server()
    server.make_bucket("bucket")
    proxies = [_CountingProxy(server.port, delay) for delay in delays]
    pipe.send([server.options(), *(server.options(proxy.port) for proxy in proxies)])
    while True:
        pipe.send(proxies[pipe.recv()].traffic())


def _traffic(pipe: Connection, proxy: int) -> Traffic:
    """Through a proxy since the last call."""
    pipe.send(proxy)
    answer: Traffic = pipe.recv()
    return answer


# --- building and training ----------------------------------------------------------------------

DELAYS = (0.0, 0.05)


@part("training", needs=MOTO)
def training(work: Work, rows: Rows = 800, rounds: Rounds = 3) -> Table:
    """Building and training over a network that answers late.

    An S3 server (moto's) is reached through two proxies: one passes requests on at once, the other
    50 ms later. Both cost the same CPU time.
    """
    store = "s3://bucket/store"
    costs: dict[tuple[str, float], list[Cost]] = {}
    traffic: dict[str, Traffic] = {}
    with serving(_serve_s3, DELAYS) as pipe:
        direct, *options = pipe.recv()
        photos = work.photos(rows)
        folder = open_folder("s3://bucket/photos", direct)
        for path in sorted(files_of(photos)):
            folder.put(path.relative_to(photos).as_posix(), [path.read_bytes()])
        in_clean_process(_build, direct, store)
        for number, (which, delay) in itertools.product(range(rounds), enumerate(DELAYS)):
            log.print(f"round {number + 1} of {rounds}, {delay * 1000:.0f} ms")
            cache, batch = work.folder / f"cache-{os.getpid()}-{number}-{which}", min(BATCH, rows)
            for name, run, *given in (
                ("build", _build, f"{store}-{number}-{which}"),
                ("epoch, cold", _epoch, store, batch, cache),
                ("epoch, warm", _epoch, store, batch, cache),
                ("epoch, by range", _epoch, store, batch, None),
            ):
                _traffic(pipe, which)
                cost = in_clean_process(run, options[which], *given)
                costs.setdefault((name, delay), []).append(cost)
                traffic[name] = _traffic(pipe, which)
    table = Table(
        f"{rows:,} photos, and their rows of {CROP} x {CROP} x 3",
        ("work", *(f"samples/s at {delay * 1000:.0f} ms|,.0f" for delay in DELAYS), "ratio|.2f",
         "CPU-ms per 1,000|,.0f", "requests|,d", "MB|,.1f"),
        "The target of the ratio is 0.7.",
        measured={f"{name}, {delay * 1000:.0f} ms": each for (name, delay), each in costs.items()},
    )  # fmt: skip
    for name, counted in traffic.items():
        every = [costs[name, delay] for delay in DELAYS]
        speeds = [statistics.median(cost.samples_per_s for cost in each) for each in every]
        cpu = statistics.median(cost.cpu_ms_per_1000 for cost in every[0] + every[1])
        ratio = speeds[1] / speeds[0]
        table.add(name, *speeds, ratio, cpu, counted.requests, counted.nbytes / 1e6)
    return table


def _build(options: dict[str, Any], store: str) -> Cost:
    recipe = precache.Recipe.image(resize=RESIZE, crop=CROP)
    build = functools.partial(precache.build, "s3://bucket/photos", store, recipe)
    return cost_of(lambda: build(address="serial", storage_options=options).samples)


def _epoch(options: dict[str, Any], store: str, batch: int, cache: Path | None) -> Cost:
    """From opening the store on."""

    def work() -> int:
        given = {"cache": cache, "storage_options": options}
        with precache.Loader(store, batch, device="cpu", **given) as loader:
            return drain(loader)

    return cost_of(work)


# --- small objects ------------------------------------------------------------------------------

NBYTES = 100_000
IN_FLIGHT = 32


@part("requests", needs=MOTO)
def requests(work: Work, rows: Rows = 1000) -> Table:
    """Small objects of a bucket.

    The servers (moto's for S3, a fake of Google's) limit the requests a second; what counts is the
    CPU time of this process, the second time over.
    """
    table = Table(
        f"{rows:,} objects of {NBYTES:,} bytes",
        ("service", "objects/s|,.0f", "CPU-ms|.2f"),
        "CPU-ms an object",
    )
    names = [f"{number:05d}" for number in range(rows)]
    with serving(_serve_both) as pipe:
        for service, options in pipe.recv().items():
            folder = open_folder(f"{service}://bucket/x", options)
            data = np.random.default_rng(0).bytes(NBYTES)
            for name in names:
                folder.put(name, [data])
            cost = in_clean_process(_fetched, service, options, names)
            table.add(service, cost.samples_per_s, cost.cpu_ms_per_1000 / 1000)
            table.measured[service] = {"read": [cost]}
    return table


def _serve_both(pipe: Connection) -> None:
    servers = {"s3": S3Server(), "gs": GCSServer()}
    for server in servers.values():
        server.make_bucket("bucket")
    pipe.send({name: server.options() for name, server in servers.items()})
    pipe.recv()


def _fetched(service: str, options: dict[str, Any], names: list[str]) -> Cost:
    folder = open_folder(f"{service}://bucket/x", options)

    def work() -> int:
        for start in range(0, len(names), IN_FLIGHT):
            some = names[start : start + IN_FLIGHT]
            for data in folder.read_many(some, [NBYTES] * len(some)):
                assert len(data) == NBYTES
        return len(names)

    work()
    return cost_of(work)


# --- listing ------------------------------------------------------------------------------------

SERVICES = {"s3": (ListingServer, PAGE), "az": (AzureListingServer, AZURES_PAGE)}
"""Protocol -> its server, and the keys in a page."""


def bucket(
    service: str, prefixes: int, keys: int, latency: float = 0.0
) -> AbstractContextManager[Connection]:
    """A pipe that gives the storage options of ``s3://bucket``, or the like, while a process of its
    own serves `prefixes` x `keys` photos; with 0 prefixes in a flat bucket."""
    return serving(_serve_names, service, prefixes, keys, latency)


def _serve_names(pipe: Connection, service: str, prefixes: int, keys: int, latency: float) -> None:
    folders = [f"n{number:08d}/" for number in range(prefixes)] or [""]
    names = [f"{folder}{number:08d}_photo.JPEG" for folder in folders for number in range(keys)]
    server, page = SERVICES[service]
    pipe.send(server(names, page, latency).options())
    pipe.recv()


@part("listing")
def listing(
    work: Work,
    rows: Rows = 1_000_000,
    prefixes: Annotated[tuple[int, ...], "that share the keys; 0 for a flat bucket"] = (1000, 0),
    service: Annotated[Literal["s3", "az"], "the protocol"] = "s3",
    latency: Latency = 0.02,
) -> Table:
    """Listing a bucket of a million keys.

    The bucket is a server that answers as S3 does, or Azure, after a latency for each page.
    """
    if min(prefixes) < 0 or rows < max(prefixes):
        raise SystemExit("give at least 0 prefixes, and a key for each prefix")
    page = SERVICES[service][1]
    table = Table(
        f"Listing {service}://, {latency * 1e3:.0f} ms a page of {page:,} keys",
        ("bucket", "s|.2f", "CPU-s|.2f", "peak MiB|,.0f"),
        "The peak is of the whole process.",
    )
    for count in prefixes:
        log.print(f"listing {rows:,} keys below {count:,} prefixes")
        keys = rows // max(1, count)
        cost, peak = in_clean_process(_listed, service, count, keys, latency)
        name = f"{count:,} x {keys:,}" if count else f"{keys:,}, flat"
        table.add(name, cost.wall_seconds, cost.cpu_seconds, peak / MIB)
        table.measured[name] = {"list": [cost]}
    return table


def _listed(service: str, prefixes: int, keys: int, latency: float) -> tuple[Cost, int]:
    """The cost of listing a bucket, and peak bytes."""
    from precache_workers.sources.kinds import open_source

    with bucket(service, prefixes, keys, latency) as pipe:
        source = open_source(f"{service}://bucket", pipe.recv())
        return cost_of(lambda: len(source.list(lambda found: None).table)), peak_bytes()


# --- the disk cache -----------------------------------------------------------------------------

SIZE, NEW = 100, 300
FAMILY = "3f2a00c59b7e4d12a8f06c1d5e9b7a34-"


def _name(number: int) -> str:
    return f"{FAMILY}image-{number}-{number * 0x9E3779B97F4A7C15 % 2**64:016x}"


@part("caching")
def caching(work: Work, shards: Annotated[int, "in the cache"] = 10_000) -> Table:
    """Decisions of a disk cache of 10,000 shards.

    The shards are small, and made up: what is measured is holding, making room and letting go. Put
    --folder, an empty one, on the disk to be measured.
    """
    folder = work.folder / f"cache-{shards}"
    folder.mkdir(mode=0o700)
    (folder / "objects").mkdir(mode=0o700)
    for number in range(shards):
        (folder / "objects" / _name(number)).write_bytes(bytes(SIZE))
    room = shards + NEW
    cache = DiskCache(folder, OVERHEAD + room * on_disk(SIZE))
    joined = cache.join(_name(0).partition("-")[0])

    def obtain(number: int) -> None:
        cache.obtain(_name(number), SIZE, lambda file: os.pwrite(file, bytes(SIZE), 0))

    def let_go(number: int) -> None:
        cache.release(_name(number))

    names = ("calls|,d", "median ms|.2f", "mean ms|.2f", "longest ms|.2f")
    table = Table(f"A cache of {shards:,} shards", ("step", *names))
    for name, numbers, call in (
        ("hold what is there", range(shards), obtain),
        ("bring what there is room for", range(shards, room), obtain),
        ("let go", range(room), let_go),
        ("bring what others must go for", range(room, room + NEW), obtain),
        ("let go of these", range(room, room + NEW), let_go),
    ):
        times = []
        for number in numbers:
            began = time.perf_counter()
            call(number)
            times.append((time.perf_counter() - began) * 1e3)
        table.add(name, len(times), statistics.median(times), statistics.fmean(times), max(times))
    joined.close()
    return table


# --- containers ---------------------------------------------------------------------------------

SMALL = 64
DISTINCT = 250
"""Photos that are encoded; containers have them again and again, each with its own last bytes."""
GROUP_ROWS = 100
PIECE = 300
"""Most pixels across a piece of a photo; larger ones are enlarged."""


@part("containers", needs=MOTO)
def containers(
    work: Work,
    rows: Annotated[int, "photos in each"] = 1000,
    kinds: Annotated[tuple[Literal["tar", "tar+idx", "parquet"], ...], "of containers"] = (
        "tar", "tar+idx", "parquet",
    ),
    containers: Annotated[int, "number of them"] = 100,
    width: Annotated[int, "pixels across a photo"] = 96,
    latency: Latency = 0.05,
) -> Table:  # fmt: skip
    """Requests and bytes that a build from tar archives or Parquet files in a bucket takes.

    Photos lie in them one class after another, and the server answers after a latency. Beside what
    listing and building read is the ideal: each byte once, by requests of the size that each makes.
    """
    from precache_workers.sources.containers import UNIT_BYTES
    from precache_workers.sources.file_ranges import BLOCK_BYTES

    table = Table(
        f"{containers} containers of {rows:,} photos, {latency * 1e3:.0f} ms more per request",
        ("containers", "step", "requests|,d", "ideal|,d", "MiB|,.1f", "ideal MiB|,.1f",
         "ratio|.3f", "wall s|.1f", "CPU s|.1f"),
        "Requests and bytes of building are those beyond the listing; times include it.",
    )  # fmt: skip
    for kind in kinds:
        log.print(f"{kind}: {containers} containers of {rows:,} photos")
        store = work.folder / f"{kind}.store"
        nbytes, counted, costs = in_clean_process(
            _contained, kind, containers, rows, width, latency, store
        )
        shards = sum(1 for path in store.rglob("image/c/**/0") if path.is_file())
        steps = {"list": BLOCK_BYTES, f"build, {shards} shards": UNIT_BYTES}
        for (step, unit), traffic, cost in zip(steps.items(), counted, costs, strict=True):
            ratio = traffic.nbytes / nbytes
            sizes = traffic.requests, -(-nbytes // unit), traffic.nbytes / MIB, nbytes / MIB
            table.add(kind, step, *sizes, ratio, cost.wall_seconds, cost.cpu_seconds)
        table.measured[kind] = {step: [cost] for step, cost in zip(steps, costs, strict=True)}
    return table


def _contained(
    kind: str, count: int, photos: int, width: int, latency: float, store: Path
) -> tuple[int, tuple[Traffic, Traffic], tuple[Cost, Cost]]:
    """Bytes of the containers, and traffic and cost of listing and of building them."""
    from precache_workers.sources.kinds import open_source

    suffix = kind.partition("+")[0]
    with serving(_serve_s3, [latency]) as pipe:
        direct, options = pipe.recv()
        nbytes = _fill(kind, suffix, count, photos, width, direct)
        uri = f"s3://bucket/data/*.{suffix}"
        source = open_source(uri, options)
        listing = cost_of(lambda: len(source.list(lambda count: None).table))
        listed = _traffic(pipe, 0)
        recipe = precache.Recipe.image(resize=SMALL, crop=SMALL)
        given = {"address": "serial", "max_failures": 0, "storage_options": options}
        building = cost_of(lambda: precache.build(uri, store, recipe, **given).samples)
        both = _traffic(pipe, 0)
        built = Traffic(both.requests - listed.requests, both.nbytes - listed.nbytes)
        return nbytes, (listed, built), (listing, building)


def _fill(
    kind: str, suffix: str, count: int, photos: int, width: int, options: dict[str, Any]
) -> int:
    """Put the containers into the bucket; returns their bytes."""
    size = width, width * 3 // 4
    piece = min(size[0], PIECE), min(size[1], PIECE)
    distinct = [encoded(cut(n, piece).resize(size)) for n in range(min(DISTINCT, photos))]
    images = [distinct[n % len(distinct)] + f"{n:06d}".encode() for n in range(photos)]
    folder, nbytes = open_folder("s3://bucket/data", options), 0
    for number in range(count):
        data = _tar(images, number) if suffix == "tar" else _parquet(images, number)
        folder.put(f"{number:04d}.{suffix}", [data])
        if kind == "tar+idx":
            folder.put(f"{number:04d}.idx", [tar_index(io.BytesIO(data)).encode()])
        nbytes += len(data)
    return nbytes


def _tar(images: Sequence[bytes], number: int) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for place, photo in enumerate(images):
            add(tar, f"{number:04d}/{place:06d}.jpg", photo, mtime=place)
    return sink.getvalue()


def _parquet(images: Sequence[bytes], number: int) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    structs = [{"bytes": data, "path": f"{n:06d}.jpg"} for n, data in enumerate(images)]
    table = pa.table({"image": structs, "label": [f"{number:04d}"] * len(images)})
    pq.write_table(table, sink, row_group_size=GROUP_ROWS)
    return sink.getvalue()


PARTS = (training, requests, listing, caching, containers)

if __name__ == "__main__":
    main("remote", PARTS)
