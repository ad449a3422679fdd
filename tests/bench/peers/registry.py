"""Who is compared, in the order of the table."""

from dataclasses import dataclass

FLOOR = "take"


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Attributes
    ----------
    name
        For ``--only``.
    target
        ``module:attribute`` of its `child.Peer`.
    environment
        Of `environments`; None for this one.
    """

    name: str
    title: str
    target: str
    environment: str | None = None


def _peer(name: str, title: str, target: str, environment: str | None = None) -> Peer:
    return Peer(name, title, f"tests.bench.peers.{target}", environment)


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
TAKE = _peer(FLOOR, "np.take, the floor", "torch_loaders:TAKE")
