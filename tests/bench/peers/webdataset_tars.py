"""WebDataset: rows as plain bytes in tar files of 500, shuffled as its documentation shows.

The tars in random order, and a buffer of 1,000 samples, which is less random than the whole set;
the buffer's size hardly changes the cost. Plain bytes instead of `.npy`, which is copied once more.
No workers: two burn half as much again and are no faster.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import webdataset

from tests.bench.peers.child import BATCH, ROW_SHAPE, Batch, Peer, read_rows
from tests.bench.peers.torch_loaders import stack

ROWS_PER_TAR = 500
WINDOW = 1000


def _image(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(ROW_SHAPE)


class _Tars(Peer):
    def write(self, rows: Path, store: Path) -> None:
        store.mkdir()
        pattern = str(store / "%04d.tar")
        with webdataset.ShardWriter(pattern, maxcount=ROWS_PER_TAR, verbose=0) as writer:
            for number, row in enumerate(read_rows(rows)):
                sample = {"bin": row.tobytes(), "cls": str(number).encode()}
                writer.write({"__key__": f"{number:06d}", **sample})

    def loader(self, rows: Path, store: Path) -> Iterable[Batch]:
        tars = sorted(map(str, store.glob("*.tar")))
        dataset = (
            webdataset.WebDataset(tars, shardshuffle=len(tars))
            .shuffle(WINDOW)
            .to_tuple("bin", "cls")
            .map_tuple(_image, int)
            .batched(BATCH, collation_fn=stack)
        )
        return webdataset.WebLoader(dataset, batch_size=None)


PEER = _Tars()
