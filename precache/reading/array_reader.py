"""Read rows of shards into the caller's buffer: locate them, then copy or decode them.

The filter of `image` belongs to a chunk: it is undone on each decoded chunk, before rows are cut
out of it, or stays, to be undone on a device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import os
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from precache.codecs import kernels
from precache.codecs.chunk import crc32c_holds
from precache.codecs.image import undo_image
from precache.codecs.kernels import UNCHECKED
from precache.errors import DamageError, PrecacheError, StoreError
from precache.reading.shard_files import Places, ShardFiles, shard_files
from precache.runtime.usage import shortage
from precache.storage.local_files import will_need
from precache.store.layout import CHECK_NBYTES
from precache.store.version import Version

Value = TypeVar("Value")

DECODED_NBYTES = 256 << 20
"""Memory for the decoded chunks of one field; block shuffle's default window fits for most sets."""

DECODE_NBYTES = 1 << 20
"""Bytes of chunks of small rows that are decoded before their rows are copied."""

CHUNKS_AT_ONCE = 5
"""Decoded chunks in memory where rows are cut out of them: one per thread, and one kept."""

BAD_CRC = "its CRC32C does not hold"
OTHER_CHUNK = "it is another chunk than was written there: its checksum is not the recorded one"

SHARED_ROW_NBYTES = 16 << 10
"""Rows below this size are not worth a Python object each. If all rows fit into the cache of
decoded chunks, they are copied from there with any codec."""


class ArrayReader:
    """Reads rows of one array of a version from memory maps. Safe to use from several threads.

    The checksum of a chunk, a CRC32C or that of a zstd frame, is checked the first time that this
    process maps and reads it; without compiled code, those of frames always are.

    Parameters
    ----------
    objects
        The array's stored objects; by default as `shard_files` returns them.
    """

    def __init__(self, version: Version, name: str, objects: ShardFiles | None = None) -> None:
        self.name = name
        self._where = f"{version.path}/{name}"
        self._objects = objects or shard_files(version, name)
        self.array = self._objects.array
        self._decoded: dict[tuple[bool, int], DecodedChunks] = {}
        self._scratch = threading.local()
        self._small = self.array.row_nbytes < SHARED_ROW_NBYTES
        whole = self.array.rows * self.array.row_nbytes
        self._fits = self.array.chunk_rows > 1 and whole <= DECODED_NBYTES
        self._chunks_at_once = max(1, DECODE_NBYTES // self.array.chunk_nbytes)
        straight = self.plain or self.array.chunk_rows == 1
        held = 0 if straight else CHUNKS_AT_ONCE * self.array.chunk_nbytes
        if not self.array.decoder.ragged:
            self.require_memory(max(self.array.row_nbytes, held))

    def require_memory(self, nbytes: int) -> None:
        """Raise `StoreError` if less than `nbytes` of memory is available."""
        if shortage(nbytes) is not None:
            raise self._no_memory(nbytes)

    def _no_memory(self, nbytes: int) -> StoreError:
        return StoreError(
            f"there is no memory for {self._where}: its {self.array.rows} rows of "
            f"{self.array.row_nbytes} bytes in chunks of {self.array.chunk_nbytes} take {nbytes} "
            "at once; it is damaged or forged, or the array needs other chunks"
        )

    @property
    def plain(self) -> bool:
        """True if reading only copies from memory."""
        return self.array.decoder.plain and self._objects.mapped

    @property
    def copying(self) -> bool:
        """True if reading only copies from memory, except the first time a chunk is needed."""
        return self.plain or (self._small and self._fits and self._objects.mapped)

    @property
    def filtered(self) -> bool:
        """True if rows read with ``undo=False`` are still filtered."""
        return self.array.decoder.filtered

    def read(self, rows: np.ndarray, out: np.ndarray, *, undo: bool = True) -> None:
        """Read rows in the given order.

        Parameters
        ----------
        rows
            (n,) row numbers.
        out
            (n, ...) C-contiguous, of the array's dtype.
        undo
            Undo the image filter; it is always undone for arrays that are not `filtered`.

        Raises
        ------
        DamageError
            Stored bytes are missing or wrong; names the file and the key.
        StoreError
            There is no memory for a chunk of the array.
        """
        if len(rows) == 0:
            return
        undo = undo and self.filtered
        rows = np.ascontiguousarray(rows, np.int64)
        try:
            if self._small and self._fits:
                self._read_shared(rows, out, undo)
            elif self.array.chunk_rows == 1:
                self._decode(rows, out, undo, out.nbytes)
            elif not (self.plain and self._copy(rows, out, out.nbytes)):
                self._read_shared(rows, out, undo)
        except MemoryError:
            raise self._no_memory(CHUNKS_AT_ONCE * self.array.chunk_nbytes) from None

    def _copy(self, rows: np.ndarray, out: np.ndarray, batch_nbytes: int) -> bool:
        """Copy plain rows, or the whole chunks that they are in, into `out` (n, ...).

        Returns False if one is not plain, or another iterator closed its object.
        """
        places = self._objects.locate(rows)
        if (places.lengths != self.array.chunk_nbytes + CHECK_NBYTES).any():
            return False
        nbytes, starts, checks = out.nbytes // len(rows), places.starts, None
        if nbytes != self.array.chunk_nbytes:
            starts = starts + rows % self.array.chunk_rows * nbytes
        due: np.ndarray = self._objects.checks(places)
        if (due != UNCHECKED).any():
            if nbytes == self.array.chunk_nbytes and kernels.compiled().functions:
                checks = due  # while they are copied
            else:
                self._check_crc32c(places)
        pieces = places.objects, starts, np.full(len(rows), nbytes, np.int64)
        try:
            copied = kernels.copy_pieces(self._objects.sources, *pieces, out, batch_nbytes, checks)
        except ValueError:
            return False
        if copied < len(rows):
            raise self.damage(int(rows[copied]), BAD_CRC)
        if checks is not None:
            self._mark_checked(places)
        return True

    def _check_crc32c(self, places: Places) -> None:
        """Check the chunks that were not checked yet."""
        places = places.part(np.unique(places.chunks, return_index=True)[1])
        places = places.part(self._objects.checks(places) != UNCHECKED)
        checks = self._objects.checks(places).tolist()
        for position, data in enumerate(self._objects.read(places)):
            self._chunk(places, position, data, checks[position], _require_crc32c)
        self._mark_checked(places)

    def _mark_checked(self, places: Places) -> None:
        """Remember that chunks were checked.

        Chunks that are not mapped are fetched again, and may have other bytes then.
        """
        if self._objects.mapped:
            self._objects.checked.reshape(-1)[places.chunks] = True

    def _chunk(
        self,
        places: Places,
        position: int,
        data: memoryview,
        check: int,
        decode: Callable[..., Value],
    ) -> Value:
        """Return ``decode(data, verify=)`` of one chunk, which must end in `check`, be checked by
        its `OWN` checksum or stay `UNCHECKED`; an error names its object and key."""
        try:
            if check >= 0 and int.from_bytes(data[-CHECK_NBYTES:], "little") != check:
                raise DamageError(OTHER_CHUNK)
            return decode(data, verify=check != UNCHECKED)
        except DamageError as error:
            number, row = int(places.objects[position]), int(places.rows[position])
            raise self._objects.damage(number, row, str(error)) from None

    def _decode(self, rows: np.ndarray, out: np.ndarray, undo: bool, batch_nbytes: int) -> None:
        """Decode the whole chunks (n, ...) that rows are in, and undo the filter if `undo`."""
        if self.plain and self._copy(rows, out, batch_nbytes):
            return
        places = self._objects.locate(rows)
        data, checks = self._objects.read(places), self._objects.checks(places)
        framed = kernels.compiled().has_zstd and self.array.decoder.framed
        decoded = 0
        if framed:
            decoded = kernels.decode_frames(
                data, out, filtered=undo, batch_nbytes=batch_nbytes, checks=checks
            )
        for position in range(decoded, len(data)):
            row = out[position : position + 1]
            decode = functools.partial(self.array.decoder.decode, out=row)
            self._chunk(places, position, data[position], int(checks[position]), decode)
        if undo:
            undo_image(out[decoded:])
        self._mark_checked(places)

    def _read_shared(self, rows: np.ndarray, out: np.ndarray, undo: bool) -> None:
        """Copy rows out of chunks of several rows, decoding those not kept from earlier batches."""
        kept = self._kept(undo)
        left = kept.copy(rows, out)
        if not len(left):
            return
        chunks, within = np.divmod(rows, self.array.chunk_rows)
        together = self._chunks_at_once
        scratch = self._scratch.__dict__
        if "chunks" not in scratch:
            scratch["chunks"] = np.empty((together, *self.array.chunk_shape), self.array.dtype)
        left = left[np.argsort(chunks[left], kind="stable")]
        needed, first = np.unique(chunks[left], return_index=True)
        ends = np.append(first[together::together], len(left))
        for number, end in enumerate(ends.tolist()):
            part = slice(number * together, (number + 1) * together)
            positions = left[first[part.start] : end]
            decoded = scratch["chunks"][: len(first[part])]
            self._decode(rows[left[first[part]]], decoded, undo, batch_nbytes=0)
            places = np.searchsorted(needed[part], chunks[positions])
            out[positions] = decoded[places, within[positions]]
            kept.add(needed[part], decoded)

    def _kept(self, undo: bool) -> DecodedChunks:
        # In a forked process a thread of the parent may have been in the middle of a change.
        key = undo, os.getpid()
        try:
            return self._decoded[key]
        except KeyError:
            array = self.array
            self.require_memory(CHUNKS_AT_ONCE * array.chunk_nbytes)
            chunks = -(-array.rows // array.chunk_rows)
            cache = DecodedChunks(chunks, array.chunk_shape, array.dtype)
            return self._decoded.setdefault(key, cache)

    def probe(self, row: int) -> None:
        """Read a row, and raise as `read` if it cannot be."""
        out = np.empty((1, *self.array.row_shape), self.array.dtype)
        self.read(np.array([row]), out, undo=False)

    def damage(self, row: int, reason: str) -> PrecacheError:
        """Make the error for a damaged row, with the way to repair it."""
        return self._objects.damage(row // self.array.object_rows, row, reason)

    @property
    def framed(self) -> bool:
        """True if every row is stored as one zstd frame, so that `read_frames` can return it."""
        return self.array.chunk_rows == 1 and self.array.decoder.framed

    @property
    def frame_bound(self) -> int:
        """Largest size of a row's frame in bytes. Source: ZSTD_compressBound in zstd.h."""
        return self.array.row_nbytes + (self.array.row_nbytes >> 8) + 128

    def read_frames(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the zstd frames of rows, one after another, into `out` (uint8).

        Frames that were not checked yet are also decompressed here, which checks their content
        checksum.

        Returns
        -------
        np.ndarray
            (n,) int64 lengths.

        Raises
        ------
        DamageError
            Stored bytes are missing or wrong; names the file and the key.
        """
        places = self._objects.locate(rows)
        frames, checks = self._objects.read(places), self._objects.checks(places)
        for row in rows[places.lengths > self.frame_bound].tolist():
            raise self.damage(row, "it has no frame of that row")
        scratch = np.empty((1, *self.array.row_shape), self.array.dtype)
        decode = functools.partial(self.array.decoder.decode, out=scratch)
        for position in np.flatnonzero(checks != UNCHECKED).tolist():
            self._chunk(places, position, frames[position], int(checks[position]), decode)
        self._mark_checked(places)
        kernels.join(frames, out[: int(places.lengths.sum())])
        return places.lengths

    def will_need(self, rows: np.ndarray) -> None:
        """Start reading the chunks of rows from the disk, where they are mapped."""
        if not self._objects.mapped:
            return
        with contextlib.suppress(PrecacheError):  # raised again when the row is read
            places = self._objects.locate(rows)
            places = places.part(np.unique(places.chunks, return_index=True)[1])
            extents = zip(places.starts.tolist(), places.lengths.tolist(), strict=True)
            ordered = zip(places.objects.tolist(), extents, strict=True)
            for number, members in itertools.groupby(ordered, operator.itemgetter(0)):
                if len(whole := self._objects.sources[number].obj):  # else another one closed it
                    will_need(whole, (extent for _, extent in members))


def _require_crc32c(data: memoryview, *, verify: bool) -> None:
    if verify and not crc32c_holds(data):
        raise DamageError(BAD_CRC)


class DecodedChunks:
    """Keeps the chunks decoded last, as many as fit. Safe to use from several threads.

    Parameters
    ----------
    chunks
        Number of chunks of the whole array.
    chunk_shape
        (rows, ...) of a chunk.
    """

    def __init__(
        self, chunks: int, chunk_shape: tuple[int, ...], dtype: str, nbytes: int = DECODED_NBYTES
    ) -> None:
        self._chunk_rows = chunk_shape[0]
        chunk_nbytes = math.prod(chunk_shape) * np.dtype(dtype).itemsize
        room = max(1, min(chunks, nbytes // chunk_nbytes))
        self._rows = np.empty((room * self._chunk_rows, *chunk_shape[1:]), dtype)
        # Place of each chunk's first row, inverted: zeros take no memory until they are written.
        self._place = np.zeros(chunks, np.int64)
        self._chunk = np.full(room, -1, np.int64)
        self._oldest = 0
        self._whole = False  # every row is there, in its place
        self._lock = threading.Lock()

    def copy(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy rows to `out`; return the positions of those whose chunks are not cached."""
        if self._whole:
            self._rows.take(rows, 0, out, "clip")
            return rows[:0]
        chunks, within = np.divmod(rows, self._chunk_rows)
        with self._lock:
            places = ~self._place[chunks]
            missing = np.flatnonzero(places < 0)
            places += within
            if not len(missing):
                self._rows.take(places, 0, out, "clip")
            elif len(missing) < len(chunks):
                held = np.flatnonzero(self._place[chunks] < 0)
                out[held] = self._rows[places[held]]
            return missing

    def add(self, chunks: np.ndarray, decoded: np.ndarray) -> None:
        """Keep (n, rows, ...) decoded chunks, replacing the oldest unless all have room."""
        room = len(self._chunk)
        chunks, decoded = chunks[-room:], decoded[-room:]
        with self._lock:
            new = np.flatnonzero(self._place[chunks] == 0)
            all_fit = room == len(self._place)
            slots = chunks[new] if all_fit else (self._oldest + np.arange(len(new))) % room
            replaced = self._chunk[slots]
            self._place[replaced[replaced >= 0]] = 0
            self._rows.reshape(room, self._chunk_rows, *self._rows.shape[1:])[slots] = decoded[new]
            self._place[chunks[new]] = ~(slots * self._chunk_rows)
            self._chunk[slots] = chunks[new]
            self._oldest = int(self._oldest + len(new)) % room
            self._whole = all_fit and bool((self._chunk >= 0).all())
