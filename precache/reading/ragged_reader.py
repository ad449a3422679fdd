"""Read ragged rows: each is a chunk of its own, of the shape that a small array states."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Generator

import numpy as np

from precache.codecs.windows import Windows, resize_windows
from precache.errors import UsageError
from precache.reading.array_reader import ArrayReader
from precache.reading.shard_files import ShardFiles
from precache.store.version import Version

CROPPED_TOGETHER = 8
"""Rows that are decoded before they are cropped: few, as their pixels are to stay in the cache."""


class RaggedReader(ArrayReader):
    """Reads rows of one ragged array of a version. Safe to use from several threads.

    Attributes
    ----------
    shapes
        (rows, axes) int64: the shape of each row, zeros for holes.
    kind
        As the recipe says of the field: rows of a kind differ in length; None for images.
    """

    def __init__(
        self, version: Version, name: str, verify: bool = True, objects: ShardFiles | None = None
    ) -> None:
        super().__init__(version, name, verify, objects)
        self.shapes = version.row_shapes(name)
        assert version.attributes is not None
        self._usual = version.attributes.fields[name].shape
        self.kind = version.kind(name)
        self._version = version

    @property
    def channels(self) -> int:
        """Channels of images (C, H, W).

        Raises
        ------
        UsageError
            Rows are no images of uint8.
        """
        if len(self._usual) != 3 or self.array.dtype != "uint8":
            raise UsageError(f"rows of {self.name} are no images of uint8, which could be cropped")
        return self._usual[0]

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return height and width of images: (n, 2)."""
        sizes: np.ndarray = self.shapes[rows][:, 1:]
        return sizes

    def crop(self, rows: np.ndarray, windows: Windows, out: np.ndarray) -> None:
        """Read a window of each of some images, resized to ``out`` (n, C, height, width).

        Raises
        ------
        DamageError
            As `rows`.
        """
        with contextlib.closing(self.rows(rows)) as images:
            for start in range(0, len(rows), CROPPED_TOGETHER):
                part = slice(start, start + CROPPED_TOGETHER)
                several = list(itertools.islice(images, len(out[part])))
                for row, image in zip(rows[part].tolist(), several, strict=True):
                    if image.shape[0] != out.shape[1]:
                        raise self.damage(row, f"it has {image.shape[0]} channels")
                resize_windows(several, windows.part(part), out[part])

    def rows(self, rows: np.ndarray) -> Generator[np.ndarray, None, None]:
        """Yield rows in the given order, of the array's dtype and their own shapes.

        Plain rows are read-only views of the mapped file.

        Raises
        ------
        DamageError
            Stored bytes are missing or wrong, or not a row of its shape; names file and key. A
            forged length or shape is refused before memory is taken for it.
        """
        places = self._objects.locate(np.ascontiguousarray(rows, np.int64))
        chunks, checks = self._objects.read(places), self._checks(places).tolist()
        for position, (data, check) in enumerate(zip(chunks, checks, strict=True)):
            shape = tuple(self.shapes[rows[position]].tolist())
            decode = functools.partial(
                self.array.decoder.decode_ragged, shape=shape, dtype=self.array.dtype
            )
            value = self._chunk(places, position, data, check, decode)
            self._mark_checked(places.part(position))
            yield value

    def values(self, rows: np.ndarray) -> Generator[str | bytes | np.ndarray, None, None]:
        """Yield rows as what their kind says they are: str, bytes, or arrays, as `rows` does.

        Raises
        ------
        DamageError
            As `rows`; or a text is no UTF-8.
        """
        with contextlib.closing(self.rows(rows)) as stored:
            if self.kind not in ("text", "bytes"):
                yield from stored
                return
            for row, value in zip(rows.tolist(), stored, strict=True):
                data = value.tobytes()
                try:
                    yield data if self.kind == "bytes" else data.decode()
                except UnicodeDecodeError as error:
                    raise self.damage(row, f"it is no UTF-8: {error}") from None

    def own_values(self, rows: np.ndarray) -> list[str | bytes | np.ndarray]:
        """Return the `values` of rows, arrays in memory of their own."""
        values = self.values(rows)
        return [v if isinstance(v, str | bytes) else np.array(v) for v in values]

    def probe(self, row: int) -> None:
        for _ in self.rows(np.array([row])):
            pass


def open_reader(
    version: Version, name: str, verify: bool = True, objects: ShardFiles | None = None
) -> ArrayReader:
    """Return the reader of an array of a version, whose rows are of one shape or ragged."""
    kind = RaggedReader if version.arrays[name][1].decoder.ragged else ArrayReader
    return kind(version, name, verify, objects)
