"""Read ragged rows: each is a chunk of its own, of the shape that a small array states."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Generator

import numpy as np

from precache.codecs.jpeg import import_simplejpeg
from precache.codecs.windows import Windows, pick_pixels, resize_windows
from precache.errors import UsageError
from precache.reading.array_reader import ArrayReader
from precache.reading.shard_files import ShardFiles
from precache.store.version import Version

CROPPED_TOGETHER = 8
"""Rows of the mapped file that one call crops; decoded ones are cropped each while the CPU's caches
hold it."""


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
        assert version.attributes is not None
        self._usual = version.attributes.fields[name].shape
        self._version = version
        if self.array.decoder.jpeg:
            import_simplejpeg()

    @property
    def channels(self) -> int:
        """Channels of images (C, H, W).

        Raises
        ------
        UsageError
            Rows are no images.
        """
        if len(self._usual) != 3:
            raise UsageError(f"rows of {self.name} are no images, which could be cropped")
        return self._usual[0]

    @property
    def filtered(self) -> bool:
        """False: rows are cropped, so their filter is undone whatever is asked."""
        return False

    def sizes(self, rows: np.ndarray | slice) -> np.ndarray:
        """Return height and width of images: (n, 2)."""
        sizes: np.ndarray = self.shapes[rows][:, 1:]
        return sizes

    def crop(
        self, rows: np.ndarray, windows: Windows, out: np.ndarray, *, nearest: bool = False
    ) -> None:
        """Read a window of each of some images, resized to ``out`` (n, C, height, width).

        Parameters
        ----------
        nearest
            Take the nearest pixels, as of masks; by default those of uint8 are blended.

        Raises
        ------
        DamageError
            As `rows`.
        """
        with contextlib.closing(self.rows(rows)) as images:
            jpeg = self.array.decoder.jpeg
            views = self.array.decoder.codecs == ("crc32c",) and not jpeg
            together = CROPPED_TOGETHER if views else 1
            for start in range(0, len(rows), together):
                part = slice(start, start + together)
                several = list(itertools.islice(images, len(out[part])))
                for row, image in zip(rows[part].tolist(), several, strict=True):
                    if image.shape[0] != out.shape[1]:
                        raise self.damage(row, f"it has {image.shape[0]} channels")
                if self.array.dtype != "uint8" or nearest:
                    pick_pixels(several, windows.part(part), out[part])
                    continue
                if jpeg:
                    several = [image.transpose(1, 2, 0) for image in several]
                resize_windows(several, windows.part(part), out[part], interleaved=jpeg)

    def rows(self, rows: np.ndarray) -> Generator[np.ndarray, None, None]:
        """Yield rows in the given order, of the array's dtype and their own shapes.

        Plain rows are read-only views of the mapped file; of JPEG files the channels of a pixel
        are beside each other in memory.

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

    def probe(self, row: int) -> None:
        for _ in self.rows(np.array([row])):
            pass


def open_reader(
    version: Version, name: str, verify: bool = True, objects: ShardFiles | None = None
) -> ArrayReader:
    """Return the reader of an array of a version, whose rows are of one shape or ragged."""
    kind = RaggedReader if version.arrays[name][1].decoder.ragged else ArrayReader
    return kind(version, name, verify, objects)
