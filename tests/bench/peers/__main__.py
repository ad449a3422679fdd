"""The same rows through other loaders, and the picture of their figures."""

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Annotated

import tests.bench.peers
from tests.bench.harness import Rounds, Rows, Table, Work, log, main, median_ratio, part
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
    _peer("ffcv-copied", "FFCV, raw, batches copied", "ffcv_beton:COPIED", "ffcv"),
    _peer("ffcv-jpg", "FFCV, jpg (lossy)", "ffcv_beton:JPG", "ffcv"),
    _peer("mosaic", "MosaicML Streaming, MDS", "mosaic_mds:PEER", "mosaic"),
    _peer("litdata", "LitData", "litdata_chunks:PEER", "litdata"),
    _peer("webdataset", "WebDataset", "webdataset_tars:PEER", "webdataset"),
    _peer("grain", "Grain, ArrayRecord", "grain_arrayrecord:PEER", "grain"),
    _peer("tensorstore", "TensorStore, Zarr v3", "tensorstore_zarr:PEER"),
    _peer("raw", "precache Loader, raw", "precache_stores:RAW"),
    _peer("zstd", "precache Loader, zstd", "precache_stores:ZSTD"),
    _peer("image", "precache Loader, image", "precache_stores:IMAGE"),
    _peer("dataset", "DataLoader, precache raw", "precache_stores:DATASET"),
    _peer("collate", "the same, collate_fn=dataset.collate", "precache_stores:COLLATE"),
)
"""In the order of the table."""
NAMES = tuple(peer.name for peer in PEERS)
CROPS = (
    _peer("crops-raw", "precache Loader, raw", "precache_stores:CROPS_RAW"),
    _peer("crops-raw420", "precache Loader, raw420", "precache_stores:CROPS_RAW420"),
    _peer("crops-image", "precache Loader, image", "precache_stores:CROPS_IMAGE"),
    _peer("crops-jpeg", "precache Loader, jpeg", "precache_stores:CROPS_JPEG"),
    _peer("crops-ffcv-raw", "FFCV, raw", "ffcv_beton:RAW_CROPS", "ffcv"),
    _peer("crops-ffcv-jpg", "FFCV, jpg", "ffcv_beton:JPG_CROPS", "ffcv"),
    _peer("crops-pillow", "DataLoader, Pillow", "torch_loaders:CROPS"),
)
"""Of photos, in the order of their table; the last three are what others are compared with."""
COLUMNS = (
    "loader",
    "CPU-ms\nper 1,000|,.1f",
    "of the\nfloor|.2f",
    "\nsamples/s|,.0f",
    "cores of\nothers|.1f",
    "first epoch\nCPU-ms|,.1f",
    "peak\nRSS, MB|,.0f",
    "anonymous,\nMB|,.0f",
    "\nstored, MB|,.0f",
    "disk reads,\nMB an epoch|,.0f",
)


@part("loaders")
def loaders(
    work: Work,
    rows: Rows = 8000,
    rounds: Rounds = 5,
    only: Annotated[tuple[str, ...], "some of these"] = NAMES,
    cold: Annotated[bool, "evict the store before every epoch"] = False,
    install: Annotated[bool, "install peers into the folder"] = False,
) -> Table:
    if unknown := set(only) - set(NAMES):
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: choose of {', '.join(NAMES)}")
    bench = Bench(work.folder, make_rows(work, rows), rounds, cold, install)
    state = "evicted before every epoch" if cold else "warm"
    table = Table(
        f"{rows:,} rows of 224 x 224 x 3, batches of 256, shuffled, {state}",
        COLUMNS,
        f"Medians of {rounds} or more epochs after the first. RSS counts mapped "
        "pages of the page cache, too; what no file backs is anonymous.",
        measured=[],
    )
    for peer, measured in _run(bench, [peer for peer in PEERS if peer.name in only]):
        table.measured.append({"name": peer.name, "measured": measured})
        if isinstance(measured, str):
            table.add(peer.title, *[None] * (len(COLUMNS) - 1))
            table.remarks.append(f"{peer.title}: {measured}")
            continue
        table.add(peer.title, *measured.figures())
        table.costs[f"{len(table.measured)}"] = {peer.name: measured.costs}
    table.remarks += [f"{n}: {', '.join(each.requirements)}" for n, each in ENVIRONMENTS.items()]
    return table


loaders.run.__doc__ = tests.bench.peers.__doc__


def _run(bench: Bench, peers: Sequence[Peer]) -> Iterator[tuple[Peer, Measurement | str]]:
    """Measure the peers, with the floor before, halfway and after them."""
    half = len(peers) // 2
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
        for peer in (TAKE, *peers[:half], TAKE, *peers[half:], TAKE):
            log.print(f"{peer.name} …")
            yield peer, bench.measure(peer, floor)


@part("crops")
def crops(
    work: Work,
    rows: Rows = 840,
    rounds: Rounds = 15,
    install: Annotated[bool, "install peers into the folder"] = False,
) -> Table:
    """Random resized crops of whole photos by codec, beside FFCV and a DataLoader with Pillow.

    RandomResizedCrop(224) and a flip of photos up to 500 pixels, encoded at quality 90, in batches
    of 256. Whole loaders take turns, epoch by epoch, in processes of their own; CPU time is that of
    all threads and workers. FFCV's first epoch compiles.
    """
    bench = Bench(work.folder, make_photos(work, rows), rounds, cold=False, install=install)
    measured = bench.in_turns(CROPS)
    peers = [peer for peer in CROPS[4:] if not isinstance(measured[peer.name], str)]
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
    )
    for peer in CROPS:
        if isinstance(found := measured[peer.name], str):
            table.add(peer.title, *[None] * (len(table.columns) - 1))
            table.remarks.append(f"{peer.title}: {found}")
            continue
        (first, *later), nbytes = found
        own = [cost.cpu_ms_per_1000 for cost in later]
        others = [[c.cpu_ms_per_1000 for c in measured[p.name][0][1:]] for p in peers]  # type: ignore[union-attr]
        ratios = [median_ratio(own, other) for other in others]
        table.add(peer.title, statistics.median(own), *ratios, first.cpu_ms_per_1000, nbytes / 1000)
        table.costs[peer.title] = {peer.name: [first, *later]}
    return table


PARTS = (loaders, crops, plot)

if __name__ == "__main__":
    main("peers", PARTS)
