"""``python -m tests.bench.requests``: what many small objects cost to fetch, by each library.

The servers (moto's for S3, a fake of Google's) run in a process of their own and limit the requests
a second; the CPU time of this process is what is compared.
"""

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from precache.cli.installation import Installation
from precache.storage.open import open_folder
from precache.storage.remote import RemoteFolder
from tests.bench.common import cost_of, in_clean_process
from tests.support.gcs_server import GCSServer
from tests.support.servers import S3Server

NBYTES = 100_000
IN_FLIGHT = 32


@dataclass(frozen=True)
class Fetching:
    """Objects a second, and CPU-milliseconds an object."""

    service: str
    client: str
    objects_per_s: float
    cpu_ms: float


def _serve(pipe: Connection) -> None:
    s3, gcs = S3Server(), GCSServer()
    s3.make_bucket("bucket")
    gcs.make_bucket("bucket")
    pipe.send((s3.port, gcs.port))
    pipe.recv()


def _options(service: str, port: int) -> dict[str, Any]:
    server = f"http://127.0.0.1:{port}"
    if service == "s3":
        client = {"region_name": "us-east-1"}
        return {"key": "someone", "secret": "x", "endpoint_url": server, "client_kwargs": client}
    return {"endpoint_url": server, "token": "anon", "project": "test"}


def _store(service: str, port: int) -> Any:
    """The same bucket, as obstore sees it."""
    from obstore.store import GCSStore, S3Store

    server, client = f"http://127.0.0.1:{port}", {"allow_http": True}
    if service == "s3":
        keys = {"access_key_id": "someone", "secret_access_key": "x", "region": "us-east-1"}
        return S3Store("bucket", prefix="x", endpoint=server, client_options=client, **keys)
    return GCSStore(
        "bucket", prefix="x", base_url=server, skip_signature=True, client_options=client
    )


def _by_fsspec(service: str, port: int, names: list[str]) -> int:
    folder = open_folder(f"{service}://bucket/x", _options(service, port))
    assert isinstance(folder, RemoteFolder)
    parts = [(name, 0, NBYTES) for name in names]
    for start in range(0, len(parts), IN_FLIGHT):
        got = folder._cat(parts[start : start + IN_FLIGHT])
        assert all(len(data) == NBYTES for data in got)
    return len(names)


def _by_precache(service: str, port: int, names: list[str]) -> int:
    folder = open_folder(f"{service}://bucket/x", _options(service, port))
    for start in range(0, len(names), IN_FLIGHT):
        part = names[start : start + IN_FLIGHT]
        assert all(isinstance(data, bytes) for data in folder.read_many(part, [NBYTES] * len(part)))
    return len(names)


def _by_obstore(service: str, port: int, names: list[str]) -> int:
    import obstore

    store = _store(service, port)

    async def fetch() -> None:
        for start in range(0, len(names), IN_FLIGHT):
            part = names[start : start + IN_FLIGHT]
            wanted = [obstore.get_range_async(store, name, start=0, end=NBYTES) for name in part]
            assert all(len(data) == NBYTES for data in await asyncio.gather(*wanted))

    asyncio.run(fetch())
    return len(names)


Fetch = Callable[[str, int, list[str]], int]


def measured(fetch: Fetch, service: str, port: int, names: list[str]) -> tuple[float, float]:
    """Objects a second and CPU-milliseconds an object, the second time over."""
    fetch(service, port, names)
    cost = cost_of(lambda: fetch(service, port, names))
    return cost.samples_per_s, cost.cpu_ms_per_1000 / 1000


def measure(objects: int) -> Iterator[Fetching]:
    """Each library of each service, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    servers = context.Process(target=_serve, args=[theirs], daemon=True)
    servers.start()
    ports = dict(zip(("s3", "gs"), pipe.recv(), strict=True))
    names = [f"{number:05d}" for number in range(objects)]
    try:
        for service, port in ports.items():
            data = np.random.default_rng(0).bytes(NBYTES)
            folder = open_folder(f"{service}://bucket/x", _options(service, port))
            for name in names:
                folder.put(name, [data])
            ways = {"obstore": _by_obstore, "precache": _by_precache}
            if service == "gs":
                ways = {"gcsfs": _by_fsspec, **ways}
            for client, fetch in ways.items():
                found = in_clean_process(measured, fetch, service, port, names)
                yield Fetching(service, client, *found)
    finally:
        servers.kill()
        servers.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.requests", description=__doc__)
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = list(measure(chosen.objects))
    if chosen.json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
        return
    right = {"justify": "right"}
    table = Table("service", "library", Column("objects/s", **right), Column("CPU-ms", **right))
    for each in found:
        table.add_row(each.service, each.client, f"{each.objects_per_s:,.0f}", f"{each.cpu_ms:.2f}")
    console = Console()
    console.print(table)
    console.print(f"{chosen.objects:,} objects of {NBYTES:,} bytes; {Installation.here()}")


if __name__ == "__main__":
    main()
