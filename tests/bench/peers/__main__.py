"""The same rows through other loaders, and the picture of their figures."""

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import tests.bench.peers
from tests.bench.harness import Rounds, Rows, Table, Work, log, main, part
from tests.bench.peers.child import LONGEST
from tests.bench.peers.environments import ENVIRONMENTS
from tests.bench.peers.measure import Bench, Measurement, Peer, make_photos, make_rows
from tests.bench.peers.plot import plot


def _peer(name: str, title: str, target: str, environment: str | None = None) -> Peer:
    return Peer(name, title, f"tests.bench.peers.{target}", environment)


TAKE = _peer("take", "np.take, the floor", "torch_loaders:TAKE")
PEERS = (
    _peer("jpegs", "DataLoader, JPEGs by Pillow", "torch_loaders:JPEGS"),
    _peer("tensordataset", "DataLoader, TensorDataset", "torch_loaders:TENSORS"),
    _peer("memmap", "DataLoader, np.memmap", "torch_loaders:MEMMAP"),
    _peer("ffcv-raw", "FFCV, raw", "ffcv_beton:RAW", "ffcv"),
    _peer("ffcv-jpg", "FFCV, jpg (lossy)", "ffcv_beton:JPG", "ffcv"),
    _peer("mosaic", "MosaicML Streaming, MDS", "mosaic_mds:PEER", "mosaic"),
    _peer("litdata", "LitData", "litdata_chunks:PEER", "litdata"),
    _peer("lancedb", "LanceDB, StreamingDataset", "lance_streaming:PEER", "lancedb"),
    _peer("webdataset", "WebDataset", "webdataset_tars:PEER", "webdataset"),
    _peer("grain", "Grain, ArrayRecord", "grain_arrayrecord:PEER", "grain"),
    _peer("tensorstore", "TensorStore, Zarr v3", "tensorstore_zarr:PEER"),
    _peer("raw", "precache Loader, raw", "precache_stores:RAW"),
    _peer("zstd", "precache Loader, zstd", "precache_stores:ZSTD"),
    _peer("image", "precache Loader, image", "precache_stores:IMAGE"),
    _peer("dataset", "DataLoader, precache raw", "precache_stores:DATASET"),
)
"""In the order of the table."""
NAMES = tuple(peer.name for peer in PEERS)
CROPS = (
    _peer("crops-raw", "precache Loader, raw", "precache_stores:CROPS_RAW"),
    _peer("crops-raw420", "precache Loader, raw420", "precache_stores:CROPS_RAW420"),
    _peer("crops-image", "precache Loader, image", "precache_stores:CROPS_IMAGE"),
    _peer("crops-jpeg", "precache Loader, jpeg, kept", "precache_stores:CROPS_JPEG"),
    _peer("crops-encoded", "precache Loader, jpeg, encoded", "precache_stores:CROPS_ENCODED"),
    _peer("crops-ffcv-raw", "FFCV, raw", "ffcv_beton:RAW_CROPS", "ffcv"),
    _peer("crops-ffcv-jpg", "FFCV, jpg", "ffcv_beton:JPG_CROPS", "ffcv"),
    _peer("crops-pillow", "DataLoader, Pillow", "torch_loaders:CROPS"),
)
"""Of photos, in the order of their table; the last three are what others are compared with."""
COLUMNS = (
    "loader",
    "CPU-ms\nper 1,000|,.1f",
    "of the\nfloor|.2f",
    "its\nfloor|.1f",
    "\nsamples/s|,.0f",
    "cores of\nothers|.1f",
    "first epoch\nCPU-ms|,.1f",
    "\nstored, MB|,.0f",
    "disk reads,\nMB an epoch|,.0f",
)


@part("loaders")
def loaders(
    work: Work,
    rows: Rows = 8000,
    rounds: Rounds = 15,
    only: Annotated[tuple[str, ...], "some of these"] = NAMES,
    install: Annotated[bool, "install peers into the folder"] = False,
) -> Table:
    if unknown := set(only) - set(NAMES):
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: choose of {', '.join(NAMES)}")
    bench = Bench(work.folder, make_rows(work, rows), rounds, install)
    table = Table(
        f"{rows:,} rows of 224 x 224 x 3, batches of 256, shuffled, warm",
        COLUMNS,
        f"Medians of {rounds} epochs after the first.",
    )
    for peer in (TAKE, *(peer for peer in PEERS if peer.name in only)):
        log.print(f"{peer.name} …")
        both = bench.in_turns([peer] if peer is TAKE else [TAKE, peer])
        table.measured[peer.title] = both
        _add(table, peer, both[peer.name], lambda own, both=both: _figures(own, both.get("take")))
    table.remarks += [f"{n}: {', '.join(each)}" for n, each in ENVIRONMENTS.items()]
    return table


loaders.run.__doc__ = tests.bench.peers.__doc__


def _add(
    table: Table,
    peer: Peer,
    found: Measurement | str,
    figures: Callable[[Measurement], Iterable[float | None]],
) -> None:
    """Add a line of figures, or a remark why there are none."""
    if isinstance(found, str):
        table.add(peer.title, *[None] * (len(table.columns) - 1))
        table.remarks.append(f"{peer.title}: {found}")
    else:
        table.add(peer.title, *figures(found))


def _figures(own: Measurement, floor: Measurement | str | None) -> Iterator[float | None]:
    """In the order of the table's columns."""
    median, beside = statistics.median, isinstance(floor, Measurement)
    yield median(own.each("cpu_ms_per_1000"))
    yield own.ratio(floor) if beside else None
    yield median(floor.each("cpu_ms_per_1000")) if beside else None
    yield median(own.each("samples_per_s"))
    yield median(cost.others_seconds / cost.wall_seconds for cost in own.costs[1:])
    yield own.costs[0].cpu_ms_per_1000
    yield own.stored_bytes / 1e6
    yield median(own.each("disk_bytes")) / 1e6


@part("crops")
def crops(
    work: Work,
    rows: Rows = 840,
    rounds: Rounds = 15,
    install: Annotated[bool, "install peers into the folder"] = False,
) -> Table:
    """Random resized crops of whole photos by codec, beside FFCV and a DataLoader with Pillow.

    RandomResizedCrop(224) and a flip of photos up to 500 pixels, encoded at quality 90, in batches
    of 256. JPEG files are kept, or encoded anew from their pixels, as FFCV does, to as many bytes.
    Whole loaders take turns, epoch by epoch, in processes of their own; CPU time is that of all
    threads and workers. FFCV's first epoch compiles.
    """
    bench = Bench(work.folder, make_photos(work, rows), rounds, install)
    measured = bench.in_turns(CROPS)
    peers = [peer for peer in CROPS[-3:] if isinstance(measured[peer.name], Measurement)]
    table = Table(
        f"{rows:,} photos up to {LONGEST} px: RandomResizedCrop(224), flip",
        (
            "loader",
            "CPU-ms\nper 1,000|,.0f",
            *(f"of\n{peer.title}|.3f" for peer in peers),
            "first epoch\nCPU-ms|,.0f",
            "kB a\nphoto|,.0f",
        ),
        f"Medians of {rounds} epochs after the first, and of the ratios of neighbours in time.",
        measured=measured,
    )

    def figures(own: Measurement) -> Iterator[float]:
        yield statistics.median(own.each("cpu_ms_per_1000"))
        yield from (own.ratio(measured[peer.name]) for peer in peers)
        yield from (own.costs[0].cpu_ms_per_1000, own.stored_bytes / rows / 1000)

    for peer in CROPS:
        _add(table, peer, measured[peer.name], figures)
    return table


PARTS = (loaders, crops, plot)

if __name__ == "__main__":
    main("peers", PARTS)
