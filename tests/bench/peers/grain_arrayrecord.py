"""Grain over ArrayRecord: one uncompressed record a row, shuffled globally.

One thread that reads two batches ahead: without one, or with the sixteen of the default, it takes
longer, and a second one only burns more. Processes would copy every batch once more.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from absl import flags
from array_record.python.array_record_module import ArrayRecordWriter
from grain import MapDataset, ReadOptions
from grain.sources import ArrayRecordDataSource

from tests.bench.peers.child import BATCH, ROW_SHAPE, Batch, Peer, read_rows

flags.FLAGS.mark_as_parsed()  # Grain reads flags of absl, which wants to have seen the command line


def _parse(record: bytes) -> tuple[np.ndarray, np.int64]:
    number = np.frombuffer(record, np.int64, 1)[0]
    return np.frombuffer(record, np.uint8, offset=number.nbytes).reshape(ROW_SHAPE), number


class _Records(Peer):
    def write(self, rows: Path, store: Path) -> None:
        writer = ArrayRecordWriter(str(store), "group_size:1,uncompressed")
        for number, row in enumerate(read_rows(rows)):
            writer.write(np.int64(number).tobytes() + row.tobytes())
        writer.close()

    def epochs(self, rows: Path, store: Path) -> Iterator[Iterable[Batch]]:
        source = MapDataset.source(ArrayRecordDataSource(str(store)))
        options = ReadOptions(num_threads=1, prefetch_buffer_size=2)
        epoch = 0
        while True:
            yield source.seed(epoch).shuffle().map(_parse).batch(BATCH).to_iter_dataset(options)
            epoch += 1


PEER = _Records()
