"""LanceDB's streaming dataset over a table on disk, shuffled by row.

Rows are binary of fixed size, which take half of what `pa.binary` does and a fifth of what lists of
fixed length do. Reads are of 64 rows, four at a time, as by default: longer ones take longer. One
thread makes rows of them, views of what was read.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.streaming import StreamingDataset
from torch.utils.data import DataLoader

from tests.bench.peers.child import BATCH, ROW_SHAPE, Batch, Peer, read_rows
from tests.bench.peers.torch_loaders import stack

SCHEMA = pa.schema({"image": pa.binary(int(np.prod(ROW_SHAPE))), "row": pa.int64()})
AT_ONCE = 250


def _written(rows: Path) -> Iterator[pa.RecordBatch]:
    every = read_rows(rows)
    for start in range(0, len(every), AT_ONCE):
        some = every[start : start + AT_ONCE]
        data = [None, pa.py_buffer(some.tobytes())]
        images = pa.FixedSizeBinaryArray.from_buffers(SCHEMA.field("image").type, len(some), data)
        yield pa.record_batch([images, np.arange(start, start + len(some))], schema=SCHEMA)


def _read(batch: pa.RecordBatch) -> list[tuple[np.ndarray, int]]:
    column = batch["image"]
    images = np.frombuffer(column.buffers()[1], np.uint8).reshape(-1, *ROW_SHAPE)
    return list(zip(images[column.offset :][: len(column)], batch["row"].to_numpy(), strict=True))


class _Table(Peer):
    def write(self, rows: Path, store: Path) -> None:
        lancedb.connect(str(store)).create_table("rows", _written(rows), schema=SCHEMA)

    def epochs(self, rows: Path, store: Path) -> Iterator[Iterable[Batch]]:
        table = lancedb.connect(str(store)).open_table("rows")
        for epoch in itertools.count():
            dataset = StreamingDataset(table, epoch=epoch, transform=_read, transform_parallelism=1)
            yield DataLoader(dataset, batch_size=BATCH, collate_fn=stack)


PEER = _Table()
