"""Read ragged rows: each is a chunk of its own, of the shape that a small array states."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from precache.codecs.kernels import UNCHECKED
from precache.errors import DamageError
from precache.reading.array_reader import ArrayReader
from precache.reading.shard_files import ShardFiles
from precache.store.version import Version


class RaggedReader(ArrayReader):
    """Reads rows of one ragged array of a version. Safe to use from several threads.

    Attributes
    ----------
    shapes
        (rows, axes) int64: the shape of each row, zeros for holes.
    """

    def __init__(
        self, version: Version, name: str, verify: bool = True, objects: ShardFiles | None = None
    ) -> None:
        super().__init__(version, name, verify, objects)
        self.shapes = version.row_shapes(name)

    def rows(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield rows in the given order, of the array's dtype and their own shapes.

        Plain rows are read-only views of the mapped file.

        Raises
        ------
        DamageError
            Stored bytes are missing or wrong, or not a row of its shape; names file and key. A
            forged length or shape is refused before memory is taken for it.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        numbers, chunks = np.divmod(rows, self.array.object_shape[0])
        tail, decode = self._pieces[0].object_tail, self.array.decoder.decode_ragged
        with self._objects.gathered(rows):
            for row, number, chunk, check in self._chunk_rows(rows, numbers, chunks):
                data = self._objects.chunk(number, tail, chunk, row)
                if data is None:
                    raise self._objects.damage(number, tail, row, "it is missing in its index")
                self._require_place(data, (row, number, chunk, check))
                shape = tuple(self.shapes[row].tolist())
                try:
                    value = decode(data, shape, self.array.dtype, verify=check != UNCHECKED)
                except DamageError as error:
                    raise self._objects.damage(number, tail, row, str(error)) from None
                yield value
        self._mark_checked(numbers, chunks)

    def probe(self, row: int) -> None:
        for _ in self.rows(np.array([row])):
            pass


def open_reader(
    version: Version, name: str, verify: bool = True, objects: ShardFiles | None = None
) -> ArrayReader:
    """Return the reader of an array of a version, whose rows are of one shape or ragged."""
    kind = RaggedReader if version.arrays[name][1].decoder.ragged else ArrayReader
    return kind(version, name, verify, objects)
