"""TensorStore: a sharded Zarr v3 array, one uncompressed chunk a row, gathered batch by batch.

Its files are mapped (`file_io_mode`), which saves a copy, and a batch goes into memory that NumPy
allocates, which costs half of what `read` into its own does. The next batch is read meanwhile. It
checks nothing: the rows carry no checksum.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from tests.bench.peers.child import BATCH, Batch, Peer, read_rows

ROWS_PER_SHARD = 512
OPTIONS = {
    "recheck_cached_data": "open",
    "recheck_cached_metadata": "open",
    "context": {"file_io_mode": {"mode": "memmap"}},
}


def _spec(store: Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(store)}}


def _metadata(shape: tuple[int, ...]) -> dict[str, Any]:
    bytes_codec = {"name": "bytes"}
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": [1, *shape[1:]],
        "codecs": [bytes_codec],
        "index_codecs": index_codecs,
    }
    grid = {"chunk_shape": [ROWS_PER_SHARD, *shape[1:]]}
    return {
        "shape": shape,
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": grid},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


class _Zarr(Peer):
    def write(self, rows: Path, store: Path) -> None:
        source = read_rows(rows)
        spec = {**_spec(store), "metadata": _metadata(source.shape), "create": True}
        array = tensorstore.open(spec).result()
        for start in range(0, len(source), ROWS_PER_SHARD):
            part = slice(start, min(start + ROWS_PER_SHARD, len(source)))
            array[part] = source[part]

    def epochs(self, rows: Path, store: Path) -> Iterator[Iterable[Batch]]:
        array = tensorstore.open({**_spec(store), **OPTIONS}).result()
        random = np.random.default_rng(0)
        while True:
            yield _epoch(array, random.permutation(array.shape[0]))


def _epoch(array: tensorstore.TensorStore, order: np.ndarray) -> Iterator[Batch]:
    """Batches, the next one being read meanwhile."""
    parts = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    coming = _read(array, parts[0])
    for number, part in enumerate(parts, 1):
        images, done = coming
        done.result()
        if number < len(parts):
            coming = _read(array, parts[number])
        yield images, part


def _read(
    array: tensorstore.TensorStore, part: np.ndarray
) -> tuple[np.ndarray, tensorstore.WriteFutures]:
    """Memory that rows are being read into, and when they are there."""
    images = np.empty((len(part), *array.shape[1:]), np.uint8)
    return images, tensorstore.array(images).write(array[part])


PEER = _Zarr()
