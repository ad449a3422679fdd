"""MosaicML Streaming: rows as arrays in MDS shards, uncompressed and without hashes.

A `StreamingDataset` of a local folder under a DataLoader without workers; with one it burns half as
much again. `predownload` covers the whole set: the thread that looks ahead is done at once then,
instead of waking up all along, which halves the cost. Its orders (`shuffle_algo`) cost the same.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
from torch.utils.data import DataLoader

try:
    # Tried here, since Streaming imports it.
    import torchvision  # noqa: F401
except RuntimeError:
    # The wheel on PyPI is built for CUDA, and its operators do not load under a torch without. What
    # Streaming uses of it are names in Python; only the operators' shapes must not be registered.
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")

from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from tests.bench.peers.child import BATCH, Batch, Peer, read_rows
from tests.bench.peers.torch_loaders import stack


class _RowDataset(StreamingDataset):
    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        sample = super().__getitem__(index)
        return sample["image"], sample["label"]


class _Mds(Peer):
    def write(self, rows: Path, store: Path) -> None:
        source = read_rows(rows)
        shape = ",".join(map(str, source.shape[1:]))
        columns = {"image": f"ndarray:uint8:{shape}", "label": "int"}
        with MDSWriter(out=str(store), columns=columns) as writer:
            for number, row in enumerate(source):
                writer.write({"image": np.asarray(row), "label": number})

    def loader(self, rows: Path, store: Path) -> Iterable[Batch]:
        clean_stale_shared_memory()
        dataset = _RowDataset(
            local=str(store),
            shuffle=True,
            batch_size=BATCH,
            predownload=len(read_rows(rows)),
        )
        return DataLoader(dataset, BATCH, collate_fn=stack)


PEER = _Mds()
