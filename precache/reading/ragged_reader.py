"""Read ragged rows: each is a chunk of its own, of the shape that a small array states."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from precache.codecs import kernels
from precache.codecs.chunk import MAX_EXPANDED, MAX_RATIO, RAGGED_HEAD_NBYTES
from precache.codecs.jpeg import import_simplejpeg
from precache.codecs.raw420 import planes_nbytes
from precache.codecs.windows import Windows, pick_pixels, resize_pieces, resize_window
from precache.errors import UsageError
from precache.reading.array_reader import ArrayReader
from precache.reading.shard_files import Places, ShardFiles
from precache.runtime.usage import require_memory
from precache.store.layout import CHECK_NBYTES
from precache.store.version import Version

CHECKED_TOGETHER = 8
"""Rows of the mapped file that are checked before they are cropped, while the CPU's caches hold
them."""


class PackedRows(NamedTuple):
    """Rows that differ in length, in one buffer.

    Attributes
    ----------
    data
        (bytes,) uint8.
    starts, sizes
        (n,) int64: the bytes of each row there; between them are others. They are aligned.
    lengths
        (n,) int64: length of each row's first axis.
    """

    data: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    lengths: np.ndarray


class RaggedReader(ArrayReader):
    """Reads rows of one ragged array of a version. Safe to use from several threads.

    Attributes
    ----------
    shapes
        (rows, axes) int64: the shape of each row, zeros for holes.
    kind
        As the recipe says of the field: rows of a kind differ in length; None for images.
    """

    def __init__(self, version: Version, name: str, objects: ShardFiles | None = None) -> None:
        super().__init__(version, name, objects)
        self.shapes = version.row_shapes(name)
        self._usual = version.attributes.fields[name].shape
        self.kind = version.kind(name)
        self._version = version
        if self.array.decoder.jpeg:
            import_simplejpeg()

    @property
    def fixed(self) -> tuple[int, ...]:
        """Lengths of the axes of a row but the first one."""
        return self._usual[1:]

    @property
    def mean_nbytes(self) -> int:
        """Bytes of a row, on average."""
        values = self.shapes.prod(axis=1).sum() * np.dtype(self.array.dtype).itemsize
        return int(values) // max(1, len(self.shapes))

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
        blended = self.array.dtype == "uint8" and not nearest
        if blended and self._crop_together(rows, windows, out):
            return
        jpeg = self.array.decoder.jpeg
        # Fresh memory for each image would have to be zeroed, and come from beyond the caches; a
        # shape may be forged.
        largest = min(MAX_EXPANDED, int(self.shapes[rows].prod(axis=1).max(initial=0)))
        room = np.empty(largest if jpeg else 0, np.uint8)
        windows = replace(windows, boxes=windows.boxes.astype(np.int64))
        boxes = windows.boxes if jpeg and blended else None
        with contextlib.closing(self.rows(rows, room, boxes)) as images:
            for number, (row, image) in enumerate(zip(rows.tolist(), images, strict=True)):
                part = slice(number, number + 1)
                window, seen = windows.part(part), out[part]
                if image.shape[0] != out.shape[1] or not image.size:
                    raise self.damage(row, f"its pixels are {image.shape}")
                if blended:
                    pixels = image.transpose(1, 2, 0) if jpeg else image
                    resize_window(pixels, window, seen, interleaved=jpeg)
                else:
                    pick_pixels(image, window, seen)

    def _crop_together(self, rows: np.ndarray, windows: Windows, out: np.ndarray) -> bool:
        """Crop plain rows where they are mapped, zstd frames or JPEGs, all by one compiled call.

        Returns False where that is missing, or if a row is not what it should be: `rows` says why.
        """
        decoder, kernel = self.array.decoder, kernels.compiled()
        rows = np.ascontiguousarray(rows, np.int64)
        places, shapes = self._objects.locate(rows), self.shapes[rows]
        wrong = (shapes[:, 0] != out.shape[1]) | (shapes < 1).any(axis=1)
        if kernel.functions is None or wrong.any():
            return False
        if decoder.codecs == ("crc32c",) and not decoder.jpeg and self._objects.mapped:
            return self._crop_mapped(places, shapes, windows, out)
        framed = decoder.codecs == ("zstd",) and kernel.has_zstd
        sizes = shapes.prod(axis=1) + RAGGED_HEAD_NBYTES
        if not (framed or (decoder.jpeg and kernels.has_turbojpeg())) or _implausible(
            sizes, places
        ):
            return False
        chunks: Any = self._objects.read(places)
        checks = self._objects.checks(places)
        numbers, starts = np.arange(len(rows)), np.zeros(len(rows), np.int64)
        done = resize_pieces(
            chunks, numbers, starts, shapes, windows, out,
            checks=checks, filtered=decoder.filtered, jpeg=decoder.jpeg,
        )  # fmt: skip
        if done < len(rows):
            return False
        self._mark_checked(places)
        return True

    def _crop_mapped(
        self, places: Places, shapes: np.ndarray, windows: Windows, out: np.ndarray
    ) -> bool:
        """Crop plain rows where they are mapped, by one call once they are checked; or as
        `_crop_together`."""
        halves = self.array.decoder.halves
        sizes = planes_nbytes(shapes) if halves else shapes.prod(axis=1)
        sources, count = self._objects.sources, len(shapes)
        if (places.lengths != sizes + RAGGED_HEAD_NBYTES + CHECK_NBYTES).any():
            return False
        checked = bool((self._objects.checks(places) == kernels.UNCHECKED).all())
        together = max(1, count) if checked else CHECKED_TOGETHER
        starts = places.starts + RAGGED_HEAD_NBYTES
        for start in range(0, count, together):
            part = slice(start, start + together)
            if not checked:
                self.check(places.rows[part])
            pieces = places.objects[part], starts[part], shapes[part], windows.part(part)
            try:
                resize_pieces(sources, *pieces, out[part], halves=halves)
            except ValueError:  # another iterator closed an object
                return False
        return True

    def rows(
        self,
        rows: np.ndarray,
        room: np.ndarray | None = None,
        boxes: np.ndarray | None = None,
        *,
        planes: bool = False,
    ) -> Generator[np.ndarray, None, None]:
        """Yield rows in the given order, of the array's dtype and their own shapes.

        Plain rows are read-only views of the mapped file; of JPEG files the channels of a pixel
        are beside each other in memory.

        Parameters
        ----------
        room
            As of `decode_jpeg`: each row may be overwritten by the next.
        boxes
            (n, 4) int64: of each, as of `decode_jpeg`.
        planes
            Yield rows of `raw420` as they are stored.

        Raises
        ------
        DamageError
            Stored bytes are missing or wrong, or not a row of its shape; names file and key. A
            forged length or shape is refused before memory is taken for it.
        """
        places = self._objects.locate(np.ascontiguousarray(rows, np.int64))
        chunks, checks = self._objects.read(places), self._objects.checks(places).tolist()
        shapes, decoder = self.shapes[places.rows], self.array.decoder
        if planes and decoder.halves:
            shapes, decoder = planes_nbytes(shapes)[:, np.newaxis], replace(decoder, halves=False)
        for position, (data, check) in enumerate(zip(chunks, checks, strict=True)):
            shape, dtype = tuple(shapes[position].tolist()), self.array.dtype
            decode = functools.partial(
                decoder.decode_ragged, shape=shape, dtype=dtype, room=room,
                box=None if boxes is None else boxes[position],
            )  # fmt: skip
            value = self._chunk(places, position, data, check, decode)
            if check != kernels.UNCHECKED:
                self._mark_checked(places.part(position))
            yield value

    def packed(self, rows: np.ndarray) -> PackedRows:
        """Read rows into memory of their own, one after another.

        Raises
        ------
        DamageError
            As `rows`.
        UsageError
            There is no memory for them.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        lengths = self.shapes[rows]
        sizes = lengths.prod(axis=1) * np.dtype(self.array.dtype).itemsize
        whole, places = sizes + RAGGED_HEAD_NBYTES, self._objects.locate(rows)
        total = int(whole.sum())
        require_memory(f"{len(rows)} rows of {self.name} take", total)
        starts = np.cumsum(whole) - sizes
        if (data := self._unpacked(places, whole)) is None:  # or wrong, which `rows` says
            decoded = [row.reshape(-1).view(np.uint8) for row in self.rows(rows)]
            data = np.empty(total, np.uint8)
            for start, row in zip(starts.tolist(), decoded, strict=True):
                data[start : start + len(row)] = row
        return PackedRows(data, starts, sizes, lengths[:, 0])

    def _unpacked(self, places: Places, sizes: np.ndarray) -> np.ndarray | None:
        """Return the contents of chunks, heads included, by compiled code.

        None if that is missing, or if a chunk is not what it should be.
        """
        codecs, kernel = self.array.decoder.codecs, kernels.compiled()
        checks = self._objects.checks(places)
        if codecs == ("crc32c",) and kernel.functions and self._objects.mapped:
            if (places.lengths != sizes + CHECK_NBYTES).any():
                return None
            data = np.empty(int(sizes.sum()), np.uint8)
            pieces = places.objects, places.starts, sizes
            try:
                done = kernels.copy_pieces(self._objects.sources, *pieces, data, 0, checks)
            except ValueError:  # another iterator closed an object
                return None
        elif codecs == ("zstd",) and kernel.has_zstd and not self.array.decoder.filtered:
            if _implausible(sizes, places):
                return None
            data = np.empty(int(sizes.sum()), np.uint8)
            frames: Any = self._objects.read(places)
            done = kernels.decode_frames(
                frames, data, filtered=False, batch_nbytes=0, sizes=sizes, checks=checks
            )
        else:
            return None
        begins = np.cumsum(sizes) - sizes
        heads = data[begins[:done, np.newaxis] + np.arange(RAGGED_HEAD_NBYTES)].view("<u4")
        if done < len(sizes) or (heads[:, 0] != 1).any():
            return None
        if (heads[:, 1] != sizes - RAGGED_HEAD_NBYTES).any():
            return None
        self._mark_checked(places)
        return data

    def values(self, rows: np.ndarray) -> list[Any]:
        """Return rows as what their kind says they are: str, bytes, or arrays.

        Raises
        ------
        DamageError
            As `rows`; or a text is no UTF-8.
        """
        if self.kind is None:
            return [np.array(row, order="C") for row in self.rows(rows)]
        return self.unpack(rows, self.packed(rows))

    def unpack(self, rows: np.ndarray, packed: PackedRows) -> list[Any]:
        """Return the values of rows of a kind; arrays share the memory of `packed`."""
        starts, sizes = packed.starts.tolist(), packed.sizes.tolist()
        pieces = [packed.data[s : s + size] for s, size in zip(starts, sizes, strict=True)]
        if self.kind == "text":
            return [self._text(*pair) for pair in zip(rows.tolist(), pieces, strict=True)]
        if self.kind == "bytes":
            return [piece.tobytes() for piece in pieces]
        dtype, fixed = self.array.dtype, self.fixed
        numbers = zip(pieces, packed.lengths.tolist(), strict=True)
        return [piece.view(dtype).reshape(length, *fixed) for piece, length in numbers]

    def _text(self, row: int, data: np.ndarray) -> str:
        try:
            return str(data.data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.damage(row, f"it is no UTF-8: {error}") from None

    def probe(self, row: int) -> None:
        self.check(np.array([row]))

    def check(self, rows: np.ndarray) -> None:
        """Decode rows, and raise as `rows` if one is damaged."""
        for _ in self.rows(rows, planes=True):
            pass


def _implausible(sizes: np.ndarray, places: Places) -> bool:
    """Return whether a chunk claims to decode to implausibly many bytes."""
    return bool((sizes > np.maximum(MAX_EXPANDED, MAX_RATIO * places.lengths)).any())
