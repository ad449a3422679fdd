"""Write shards: encode rows of one field into the bytes of one object."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from precache.codecs.chunk import Encode, ragged_encoder, require_plausible
from precache.codecs.jpeg import decode_jpeg, encode_jpeg, lacks_scans
from precache.codecs.raw420 import planes_of, rgb_of
from precache.errors import DamageError
from precache.recipe.recipe import JpegCodec, LossyCodec
from precache.storage.base import Buffer
from precache.store.arrays import Array
from precache.store.layout import (
    CHECK_NBYTES,
    INDEX_CHECKSUM_NBYTES,
    INDEX_ENTRY_NBYTES,
    MISSING,
    decode_index,
    encode_index,
)
from precache.store.receipts import ShardObject


class ShardWriter:
    """Collects the rows of one shard of one field, chunk by chunk, in compressed form.

    Parameters
    ----------
    chunk_shape
        (rows, ...) of a chunk; the last chunk is padded with zeros.
    chunks
        Chunks of a whole shard; those never written are missing in the index.
    """

    def __init__(
        self, chunk_shape: tuple[int, ...], dtype: str, chunks: int, encode: Encode
    ) -> None:
        kind = np.dtype(dtype).newbyteorder("<")
        size = math.prod(chunk_shape) * kind.itemsize
        memory = np.zeros(size + 64, np.uint8)
        start = -memory.ctypes.data % 64  # aligned for vector instructions
        self._chunk = memory[start : start + size].view(kind).reshape(chunk_shape)
        self._filled = 0
        self._encode = encode
        self._parts: list[Buffer] = []
        self._lengths: list[int] = []
        self._checks = bytearray()
        self._chunks = chunks

    @property
    def row(self) -> np.ndarray:
        """Buffer of the next row; fill it, then call `advance`."""
        view: np.ndarray = self._chunk[self._filled, ...]
        return view

    @property
    def filled(self) -> int:
        """Rows in the current chunk."""
        return self._filled

    def room(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the buffer of the next row, which has this shape: `row`."""
        return self.row

    def advance(self) -> None:
        """Record that the next row was filled in."""
        self._filled += 1
        if self._filled == len(self._chunk):
            self._flush()

    def extend(self, rows: np.ndarray) -> None:
        """Append one or more rows."""
        while len(rows):
            part = rows[: len(self._chunk) - self._filled]
            rows = rows[len(part) :]
            if len(part) == len(self._chunk) and part.flags.c_contiguous:
                self._encode_chunk(part)
                continue
            self._chunk[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if self._filled == len(self._chunk):
                self._flush()

    def _encode_chunk(self, chunk: np.ndarray) -> None:
        encoded = self._encode(chunk)
        self.put_chunks(encoded, [len(encoded)])

    def put_chunks(self, encoded: Buffer, lengths: Sequence[int]) -> None:
        """Append whole encoded chunks, one after another; the current chunk must be empty."""
        self._parts.append(encoded)
        self._lengths.extend(lengths)
        for end in itertools.accumulate(lengths):
            self._checks += encoded[end - CHECK_NBYTES : end]

    def _flush(self) -> None:
        self._chunk[self._filled :] = 0
        self._encode_chunk(self._chunk)
        self._filled = 0

    def finish(self) -> tuple[list[Buffer], ShardObject]:
        """Return the object's bytes in parts, index last, and its entry for the receipt."""
        if self._filled:
            self._flush()
        lengths = np.full(self._chunks, MISSING, np.uint64)
        offsets = lengths.copy()
        written = len(self._lengths)
        lengths[:written] = self._lengths
        ends = np.cumsum(lengths[:written], dtype=np.uint64)
        offsets[:written] = ends - lengths[:written]
        parts: list[Buffer] = [*self._parts, encode_index(offsets, lengths)]
        digest = xxhash.xxh3_128()
        for part in parts:
            digest.update(part)
        size, raw = sum(map(len, parts)), written * self._chunk.nbytes
        checks = self._checks.ljust(self._chunks * CHECK_NBYTES, b"\0").hex()
        return parts, ShardObject(size, digest.intdigest(), raw, checks)


def of_same_rows(
    array: Array, data: memoryview, made: memoryview, shapes: Sequence[Sequence[int]] | None
) -> ShardObject | None:
    """Return what a receipt says of an object if it has the rows of another: releases differ.

    Parameters
    ----------
    data
        Bytes that may be anything.
    made
        Bytes of a writer.
    shapes
        Of the rows, if they are ragged.
    """
    chunks = array.object_chunks
    index_nbytes = chunks * INDEX_ENTRY_NBYTES + INDEX_CHECKSUM_NBYTES
    writer = ShardWriter((1,), "uint8", chunks, bytes)

    def decoded(chunk: memoryview, number: int) -> bytes:
        if shapes is not None:
            shape = tuple(shapes[number])
            return array.decoder.decode_ragged(chunk, shape, array.dtype).tobytes()
        array.decoder.decode(chunk, rows := np.empty(array.chunk_shape, array.dtype))
        return rows.tobytes()

    try:
        indexes = [decode_index(whole[-index_nbytes:], chunks).tolist() for whole in (data, made)]
        for number, ((at, size), (start, length)) in enumerate(zip(*indexes, strict=True)):
            chunk, own = data[at : at + size], made[start : start + length]
            if chunk != own and decoded(chunk, number) != decoded(own, number):
                return None
            if chunk:
                writer.put_chunks(chunk, [len(chunk)])
    except (DamageError, IndexError):
        return None
    stored = writer.finish()[1]
    return None if stored.leaf("").fault(data) else stored  # it is laid out in another way


class RaggedWriter(ShardWriter):
    """Collects rows of any shapes, each a chunk of its own.

    Parameters
    ----------
    chunks
        Rows of a whole shard.
    encode
        As `ragged_encoder` returns it.
    """

    def __init__(self, dtype: str, chunks: int, encode: Encode) -> None:
        super().__init__((1, 0), dtype, chunks, encode)

    @property
    def row(self) -> np.ndarray:
        return self._row

    def room(self, shape: tuple[int, ...]) -> np.ndarray:
        self._row = np.empty(shape, self._chunk.dtype)
        return self._row

    def advance(self) -> None:
        self._encode_chunk(self._row)

    def extend(self, rows: np.ndarray) -> None:
        for row in rows:
            np.copyto(self.room(row.shape), row)
            self.advance()


class LossyWriter(RaggedWriter):
    """Collects rows by a codec that loses.

    Attributes
    ----------
    row
        Pixels of the next row, as a reader decodes them.
    """

    def __init__(self, chunks: int, codec: LossyCodec) -> None:
        super().__init__("uint8", chunks, ragged_encoder(codec))
        self._codec = codec
        self._stored = b""

    def room(self, shape: tuple[int, ...]) -> np.ndarray:
        self._stored = b""
        return super().room(shape)

    def choose(self, row: np.ndarray, given: Any) -> None:
        """Make the next row of (C, H, W) uint8.

        Parameters
        ----------
        given
            What the row was made of.
        """
        self._stored, self._row = lossy_row(self._codec, row, given)

    def advance(self) -> None:
        self._encode_chunk(np.frombuffer(self._stored, np.uint8))


def lossy_row(codec: LossyCodec, row: np.ndarray, given: Any) -> tuple[bytes, np.ndarray]:
    """Return what a row of (C, H, W) uint8 is stored as, and its pixels then.

    Parameters
    ----------
    given
        What the row was made of: `jpeg` keeps it if it is a JPEG file of the same pixels.

    Raises
    ------
    SampleError
        The row is larger than a file can be.
    """
    if isinstance(codec, JpegCodec):
        return jpeg_of(row, given, codec.quality)
    planes = planes_of(row)
    return planes.tobytes(), rgb_of(planes, row.shape)


def jpeg_of(row: np.ndarray, given: Any, quality: int) -> tuple[bytes, np.ndarray]:
    """Return the JPEG file of a row, which is `given` if that has the same pixels, and its pixels.

    Raises
    ------
    SampleError
        The row is larger than a file can be.
    """
    if isinstance(given, bytes | bytearray | memoryview) and bytes(given[:2]) == b"\xff\xd8":
        with contextlib.suppress(DamageError):
            require_plausible(len(given), row.nbytes)  # else a reader would take it for forged
            pixels = decode_jpeg(bytes(given), row.shape)
            # Compared as they lie in memory.
            same = np.array_equal(pixels.transpose(1, 2, 0), row.transpose(1, 2, 0))
            if same and not lacks_scans(bytes(given)):
                return bytes(given), pixels
    file = encode_jpeg(row, quality)
    return file, decode_jpeg(file, row.shape)
