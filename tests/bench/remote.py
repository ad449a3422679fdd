"""``python -m tests.bench.remote``: building and training over a network that answers late.

An S3 server (moto's) and two proxies run in a process of their own: one passes requests on at once,
the other 50 ms later. Both cost the same CPU time, which they take from the same cores; so what
is compared is one against the other, and requests and bytes are counted.
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.storage.open import open_folder
from tests.bench.common import (
    CROP,
    cost_of,
    find_photos,
    in_clean_process,
    log,
    multiply,
    work_folder,
)
from tests.support.servers import FaultProxy, S3Server

RESIZE = 256
DELAYS = (0.0, 0.05)
TARGET = 0.7


@dataclass(frozen=True)
class Run:
    """One piece of work through one proxy.

    Attributes
    ----------
    requests, nbytes
        GETs and HEADs that it made, and what came back.
    cpu_ms_per_1000
        Of this process, all its threads.
    """

    what: str
    delay: float
    samples_per_s: float
    cpu_ms_per_1000: float
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
        self.nbytes += len(data) if handler.command == "GET" else 0
        return False

    def counts(self) -> tuple[int, int]:
        requests = sum(n for (method, _), n in self.seen.items() if method in ("GET", "HEAD"))
        counted = requests, self.nbytes
        self.seen, self.nbytes = Counter(), 0
        return counted


def _serve(pipe: Connection) -> None:
    server = S3Server()
    server.make_bucket("bucket")
    proxies = [_CountingProxy(server.port, delay) for delay in DELAYS]
    pipe.send([proxy.port for proxy in proxies])
    while (asked := pipe.recv()) is not None:
        pipe.send(proxies[asked].counts())


class Servers:
    """The servers' process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=[theirs], daemon=True)
        self._process.start()
        self.ports: list[int] = self._pipe.recv()

    def counts(self, which: int) -> tuple[int, int]:
        """Requests and bytes through a proxy since the last call."""
        self._pipe.send(which)
        found: tuple[int, int] = self._pipe.recv()
        return found

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.kill()
        self._process.join()


def options(port: int) -> dict[str, Any]:
    """Storage options."""
    return {
        "key": "someone",
        "secret": "secret",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
    }


def build(source: str, store: str, port: int) -> tuple[float, float]:
    """Samples a second and CPU-milliseconds a thousand of a build in this process."""

    def work() -> int:
        recipe = precache.Recipe.image(resize=RESIZE, crop=CROP)
        result = precache.build(
            source, store, recipe, address="serial", storage_options=options(port)
        )
        return int(result.samples)

    cost = cost_of(work)
    return cost.samples_per_s, cost.cpu_ms_per_1000


def epoch(store: str, port: int, cache: Path | None) -> tuple[float, float]:
    """The same of an epoch, from opening the store on."""

    def work() -> int:
        with precache.Loader(
            store, 256, device="cpu", cache_dir=cache, storage_options=options(port)
        ) as loader:
            return sum(len(batch["row"]) for batch in loader)

    cost = cost_of(work)
    return cost.samples_per_s, cost.cpu_ms_per_1000


def measure(photos: Path, folder: Path, rounds: int) -> Iterator[Run]:
    """Builds and epochs, alternating between the proxies."""
    servers = Servers()
    try:
        source, made = "s3://bucket/photos", "s3://bucket/store"
        _upload(photos, source, servers.ports[0])
        in_clean_process(build, source, made, servers.ports[0])
        for number in range(rounds):
            for which, (delay, port) in enumerate(zip(DELAYS, servers.ports, strict=True)):
                servers.counts(which)
                log.print(f"Round {number + 1} of {rounds}, {delay * 1000:.0f} ms")
                speed, cpu = in_clean_process(build, source, f"{made}-{number}-{which}", port)
                yield Run("build", delay, speed, cpu, *servers.counts(which))
                cache = folder / f"{number}-{which}"
                for what, where in (("cold", cache), ("warm", cache), ("by range", None)):
                    speed, cpu = in_clean_process(epoch, made, port, where)
                    yield Run(f"epoch, {what}", delay, speed, cpu, *servers.counts(which))
    finally:
        servers.stop()


def _upload(photos: Path, source: str, port: int) -> None:
    there = open_folder(source, options(port))
    for path in sorted(path for path in photos.rglob("*") if path.is_file()):
        there.put(path.relative_to(photos).as_posix(), [path.read_bytes()])


def _print(runs: list[Run], samples: int) -> None:
    right = {"justify": "right"}
    table = Table(
        Column("work"),
        *(Column(f"samples/s at {delay * 1000:.0f} ms", **right) for delay in DELAYS),
        Column("ratio", **right),
        Column("CPU-ms per 1,000", **right),
        Column("requests", **right),
        Column("MB", **right),
    )
    for what in dict.fromkeys(run.what for run in runs):
        same = [run for run in runs if run.what == what]
        speeds = [
            statistics.median(run.samples_per_s for run in same if run.delay == delay)
            for delay in DELAYS
        ]
        cpu = statistics.median(run.cpu_ms_per_1000 for run in same)
        table.add_row(
            what,
            *(f"{speed:,.0f}" for speed in speeds),
            f"{speeds[1] / speeds[0]:.2f}",
            f"{cpu:,.0f}",
            f"{same[-1].requests:,}",
            f"{same[-1].nbytes / 1e6:,.1f}",
        )
    console = Console()
    console.print(table)
    console.print(f"{samples:,} photos; target of the ratio: {TARGET}; {Installation.here()}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.remote", description=__doc__)
    parser.add_argument("--photos", type=Path, help="folder of photographs; by default our own")
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with work_folder(None) as folder:
        root, files = find_photos(chosen.photos, folder)
        photos = multiply(files, root, chosen.samples, folder / "many")
        runs = list(measure(photos, folder, chosen.rounds))
    if chosen.json:
        print(json.dumps([dataclasses.asdict(run) for run in runs]))
    else:
        _print(runs, chosen.samples)


if __name__ == "__main__":
    main()
