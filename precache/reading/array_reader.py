"""Read rows of shards into the caller's buffer.

The filter of `image` belongs to a chunk: it is undone on each decoded chunk, before rows are cut
out of it, and never on fill values. Only rows written by precache, which are whole chunks, can stay
filtered, to be undone on a device.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from precache.codecs import kernels
from precache.codecs.chunk import crc32c_holds
from precache.codecs.image import undo_batch_rows, undo_image
from precache.codecs.kernels import UNCHECKED
from precache.errors import DamageError, PrecacheError, StoreError
from precache.reading.chunk_cache import DECODED_NBYTES, DecodedChunks
from precache.reading.remote_shards import shard_files
from precache.reading.shard_files import ShardFiles
from precache.runtime.usage import available_bytes
from precache.store.layout import CHECK_NBYTES
from precache.store.version import Version
from precache.store.zarr_metadata import Piece

DECODE_NBYTES = 1 << 20
"""Bytes of chunks of small rows decoded, or of plain rows checked, before their rows are copied."""

CHUNKS_AT_ONCE = 5
"""Decoded chunks in memory where rows are cut out of them: one per thread, and one kept."""

BAD_CRC = "its CRC32C does not hold"
OTHER_CHUNK = "it is another chunk than was written there: its checksum is not the recorded one"

ChunkRow = tuple[int, int, int, int]
"""A row, its object, its chunk there, and how to check the chunk (`kernels.decode_frames`)."""

SHARED_ROW_NBYTES = 16 << 10
"""Rows below this size are not worth a Python object each. If all rows fit into the cache of
decoded chunks, they are copied from there with any codec."""


class ArrayReader:
    """Reads rows of one array of a version from memory maps. Safe to use from several threads.

    Parameters
    ----------
    verify
        Check the checksum of a chunk, a CRC32C or that of a zstd frame, the first time that this
        process maps and reads it; otherwise only frames are checked. Without compiled code, frames
        are always checked.
    objects
        The array's stored objects; by default as `shard_files` returns them.
    """

    def __init__(
        self, version: Version, name: str, verify: bool = True, objects: ShardFiles | None = None
    ) -> None:
        self.name = name
        self._where = f"{version.path}/{version.arrays[name][0]}"
        self._objects = objects or shard_files(version, name)
        self.array = self._objects.array
        self._pieces = self._objects.pieces
        self._verify = verify
        self._decoded: dict[tuple[bool, int], DecodedChunks] = {}
        self._scratch = threading.local()
        self._small = self.array.row_nbytes < SHARED_ROW_NBYTES
        whole = self.array.shape[0] * self.array.row_nbytes
        self._fits = self.array.chunk_shape[0] > 1 and whole <= DECODED_NBYTES
        self._chunks_at_once = max(1, DECODE_NBYTES // self.array.chunk_nbytes)
        straight = self.array.whole_rows and (self.plain or self.array.chunk_shape[0] == 1)
        held = 0 if straight else CHUNKS_AT_ONCE * self.array.chunk_nbytes
        if not self.array.decoder.ragged:
            self.require_memory(max(self.array.row_nbytes, held))
        self._chunks_across = math.prod(self.array.chunks_per_object[1:])
        self._checked = self._objects.checked
        if not (verify and self.array.decoder.codecs):
            self._checked = np.ones_like(self._checked)

    def require_memory(self, nbytes: int) -> None:
        """Raise `StoreError` if less than `nbytes` of memory is available."""
        if nbytes > available_bytes():
            raise self._no_memory(nbytes)

    def _no_memory(self, nbytes: int) -> StoreError:
        return StoreError(
            f"there is no memory for {self._where}: its {self.array.shape[0]} rows of "
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
        kept = self._small and self._fits and self.array.whole_rows
        return self.plain or (kept and self._objects.mapped)

    @property
    def filtered(self) -> bool:
        """True if rows read with ``undo=False`` are still filtered.

        Chunks of other software may hold parts of rows, or be missing, so theirs are not.
        """
        return self.array.decoder.filtered and self._objects.expected is not None

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
        undo = self.array.decoder.filtered and (undo or not self.filtered)
        rows = np.ascontiguousarray(rows, np.int64)
        numbers, inside = np.divmod(rows, self.array.object_shape[0])
        try:
            if not self.array.whole_rows:
                self._read_chunked(rows, out)
            elif self._small and self._fits:
                self._read_shared(rows, out, undo)
            elif not (self.plain and self._read_plain(rows, numbers, inside, out)):
                if self.array.chunk_shape[0] == 1:
                    self._read_single(rows, numbers, self._chunks(inside), out, undo)
                else:
                    self._read_shared(rows, out, undo)
        except MemoryError:
            raise self._no_memory(CHUNKS_AT_ONCE * self.array.chunk_nbytes) from None

    def _read_plain(
        self, rows: np.ndarray, numbers: np.ndarray, inside: np.ndarray, out: np.ndarray
    ) -> bool:
        """Copy plain rows; return False if an object is not plain, or was closed meanwhile."""
        objects = self._objects
        begins = objects.begins[numbers]
        for position in np.flatnonzero(begins < 0).tolist():
            number, row = int(numbers[position]), int(rows[position])
            begin = objects.begin(number, self._pieces[0].object_tail, row)
            if begin is None:
                return False
            begins[position] = begin
        chunks = inside // self.array.chunk_shape[0]
        starts = begins + inside * self.array.row_nbytes + chunks * self.array.gap
        checks = self._checks(numbers, chunks)
        if (checks == UNCHECKED).all():
            return self._copy(rows, numbers, starts, out, out.nbytes)
        if kernels.compiled().has_crc32c and self.array.chunk_shape[0] == 1:
            copied = self._copy(rows, numbers, starts, out, out.nbytes, checks)
            self._checked[numbers, chunks] |= copied
            return copied
        # Checked right before they are copied, rows are read from memory once for both.
        together = DECODE_NBYTES // self.array.row_nbytes + 1
        for start in range(0, len(rows), together):
            part = slice(start, start + together)
            for position in (start + np.flatnonzero(checks[part] != UNCHECKED)).tolist():
                place = rows[position], numbers[position], chunks[position], checks[position]
                self._check_plain(*map(int, place))
            if not self._copy(rows[part], numbers[part], starts[part], out[part], out.nbytes):
                return False
        return True

    def _copy(
        self,
        rows: np.ndarray,
        numbers: np.ndarray,
        starts: np.ndarray,
        out: np.ndarray,
        batch_nbytes: int,
        checks: np.ndarray | None = None,
    ) -> bool:
        """Copy rows and check some; False if another iterator's feed closed an object meanwhile."""
        sources, lengths = self._objects.sources, np.full(len(out), self.array.row_nbytes, np.int64)
        try:
            copied = kernels.copy_pieces(
                sources, numbers, starts, lengths, out, batch_nbytes, checks
            )
        except ValueError:
            return False
        if copied < len(rows):
            raise self.damage(int(rows[copied]), BAD_CRC)
        return True

    def _checks(self, numbers: np.ndarray, chunks: np.ndarray) -> np.ndarray:
        """Return how chunks are still to be checked, as `ShardFiles.checks`: (n,) int64."""
        if self._checked is not self._objects.checked:  # nothing is
            return np.full(len(numbers), UNCHECKED)
        return self._objects.checks(numbers, chunks)

    def _mark_checked(self, numbers: np.ndarray, chunks: np.ndarray) -> None:
        """Remember that chunks were checked.

        Chunks that are not mapped are fetched again, and may have other bytes then.
        """
        if self._objects.mapped:
            self._checked[numbers, chunks] = True

    def _check_plain(self, row: int, number: int, chunk: int, check: int) -> None:
        if self._checked[number, chunk]:
            return
        tail = self._pieces[0].object_tail
        data = self._objects.chunk(number, tail, chunk, row)
        if data is None or not crc32c_holds(data):
            raise self._objects.damage(number, tail, row, BAD_CRC)
        self._require_place(data, (row, number, chunk, check))
        self._checked[number, chunk] = True

    def _require_place(self, data: memoryview, place: ChunkRow) -> None:
        """Raise unless a chunk ends in the checksum that is recorded of it."""
        row, number, _, check = place
        if check >= 0 and int.from_bytes(data[-CHECK_NBYTES:], "little") != check:
            raise self._objects.damage(number, self._pieces[0].object_tail, row, OTHER_CHUNK)

    def _read_single(
        self,
        rows: np.ndarray,
        numbers: np.ndarray,
        chunks: np.ndarray,
        out: np.ndarray,
        undo: bool,
    ) -> None:
        """Decode rows that are one whole chunk each straight into `out`."""
        places = self._chunk_rows(rows, numbers, chunks)
        in_numpy = undo and not kernels.compiled().has_zstd
        together = undo_batch_rows(out.shape[1:]) if in_numpy else len(rows)
        with self._objects.gathered(rows):
            for start in range(0, len(rows), together):
                part = slice(start, start + together)
                self._decode_chunk_rows(places[part], out[part], undo, out.nbytes)
        self._mark_checked(numbers, chunks)

    def _chunks(self, inside: np.ndarray) -> np.ndarray:
        """(n,) int64: the chunk that each row is in, from the row's number within its object."""
        chunks: np.ndarray = inside // self.array.chunk_shape[0] * self._chunks_across
        return chunks

    def _chunk_rows(
        self, rows: np.ndarray, numbers: np.ndarray, chunks: np.ndarray
    ) -> list[ChunkRow]:
        columns = rows, numbers, chunks, self._checks(numbers, chunks)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _decode_chunk_rows(
        self, places: Sequence[ChunkRow], out: np.ndarray, undo: bool, batch_nbytes: int
    ) -> None:
        """Decode whole chunks (n, ...), and undo the filter if `undo`."""
        decode, tail = self.array.decoder.decode, self._pieces[0].object_tail
        decoded, missing = 0, []
        if kernels.compiled().has_zstd and self.array.decoder.framed:
            frames = []
            for row, number, chunk, _ in places:
                data = self._objects.chunk(number, tail, chunk, row)
                if data is None:
                    break
                frames.append(data)
            room, checks = out[: len(frames)], None
            if self._verify:
                checks = np.array([check for *_, check in places[: len(frames)]], np.int64)
            decoded = kernels.decode_frames(
                frames, room, filtered=undo, batch_nbytes=batch_nbytes, checks=checks
            )
        for position, (row, number, chunk, check) in enumerate(places[decoded:], decoded):
            data = self._objects.chunk(number, tail, chunk, row)
            if data is None:
                missing.append(position)
                continue
            self._require_place(data, (row, number, chunk, check))
            try:
                decode(data, out[position : position + 1], verify=check != UNCHECKED)
            except DamageError as error:
                raise self._objects.damage(number, tail, row, str(error)) from None
        if undo:
            undo_image(out[decoded:])
        if missing:
            out[missing] = self.array.fill_value

    def _read_shared(self, rows: np.ndarray, out: np.ndarray, undo: bool) -> None:
        """Copy rows out of chunks of several rows, decoding those not kept from earlier batches."""
        chunks, within = np.divmod(rows, self.array.chunk_shape[0])
        kept = self._kept(undo)
        left = kept.copy(chunks, within, out)
        if not len(left):
            return
        together = self._chunks_at_once
        left = left[np.argsort(chunks[left], kind="stable")]
        needed, first = np.unique(chunks[left], return_index=True)
        ends = np.append(first[together::together], len(left))
        for number, end in enumerate(ends.tolist()):
            part = slice(number * together, (number + 1) * together)
            positions = left[first[part.start] : end]
            decoded = self._decode_chunks(rows[left[first[part]]], undo)
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
            cache = DecodedChunks(
                array.objects * array.chunks_per_object[0], array.chunk_shape, array.dtype
            )
            return self._decoded.setdefault(key, cache)

    def _decode_chunks(self, rows: np.ndarray, undo: bool) -> np.ndarray:
        """Decode the chunks that hold rows, into scratch memory of this thread."""
        shape = (self._chunks_at_once, *self.array.chunk_shape)
        if not hasattr(self._scratch, "chunks"):
            self._scratch.chunks = np.empty(shape, self.array.dtype)
        decoded: np.ndarray = self._scratch.chunks[: len(rows)]
        numbers, inside = np.divmod(rows, self.array.object_shape[0])
        chunks = self._chunks(inside)
        with self._objects.gathered(rows):
            places = self._chunk_rows(rows, numbers, chunks)
            self._decode_chunk_rows(places, decoded, undo, batch_nbytes=0)
        self._mark_checked(numbers, chunks)
        return decoded

    def _read_chunked(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read rows that are spread over several chunks: decode each chunk once, copy from it."""
        chunk_rows = self.array.chunk_shape[0]
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        starts = np.flatnonzero(np.diff(ordered // chunk_rows, prepend=-1)).tolist()
        scratch = np.empty(self.array.chunk_shape, self.array.dtype)
        with self._objects.gathered(rows):
            for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
                group, positions = ordered[start:stop], order[start:stop]
                within = group % chunk_rows
                for piece in self._pieces:
                    self._decode_piece(int(group[0]), piece, scratch)
                    row_part: tuple[Any, ...] = (positions, *piece.row)
                    chunk_part: tuple[Any, ...] = (within, *piece.chunk)
                    out[row_part] = scratch[chunk_part]

    def _decode_piece(self, row: int, piece: Piece, scratch: np.ndarray) -> None:
        number, inside = divmod(row, self.array.object_shape[0])
        chunk = inside // self.array.chunk_shape[0] * self._chunks_across + piece.chunk_tail
        data = self._objects.chunk(number, piece.object_tail, chunk, row)
        if data is None:
            scratch[...] = self.array.fill_value
            return
        try:
            self.array.decoder.decode(data, scratch, verify=self._verify)
        except DamageError as error:
            raise self._objects.damage(number, piece.object_tail, row, str(error)) from None
        if self.array.decoder.filtered:
            undo_image(scratch)

    def probe(self, row: int) -> None:
        """Read a row, and raise as `read` if it cannot be."""
        out = np.empty((1, *self.array.row_shape), self.array.dtype)
        self.read(np.array([row]), out, undo=False)

    def damage(self, row: int, reason: str) -> PrecacheError:
        """Make the error for a damaged row, with the way to repair it."""
        number = row // self.array.object_shape[0]
        return self._objects.damage(number, self._pieces[0].object_tail, row, reason)

    @property
    def framed(self) -> bool:
        """True if every row is stored as one zstd frame, so that `read_frames` can return it."""
        single = self.array.whole_rows and self.array.chunk_shape[0] == 1
        return single and self.array.decoder.framed and self._objects.expected is not None

    @property
    def frame_bound(self) -> int:
        """Largest size of a row's frame in bytes. Source: ZSTD_compressBound in zstd.h."""
        return self.array.row_nbytes + (self.array.row_nbytes >> 8) + 128

    def read_frames(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the zstd frames of rows, one after another, into `out` (uint8).

        Frames that `verify` wants checked are also decompressed here, which checks their content
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
        numbers, chunks = np.divmod(rows, self.array.object_shape[0])
        tail = self._pieces[0].object_tail
        scratch = np.empty((1, *self.array.row_shape), self.array.dtype)
        frames = []
        with self._objects.gathered(rows):
            for row, number, chunk, check in self._chunk_rows(rows, numbers, chunks):
                data = self._objects.chunk(number, tail, chunk, row)
                if data is None or len(data) > self.frame_bound:
                    raise self._objects.damage(number, tail, row, "it has no frame of that row")
                if check != UNCHECKED:
                    self._require_place(data, (row, number, chunk, check))
                    try:
                        self.array.decoder.decode(data, scratch)
                    except DamageError as error:
                        raise self._objects.damage(number, tail, row, str(error)) from None
                frames.append(data)
        self._mark_checked(numbers, chunks)
        lengths = np.array([len(frame) for frame in frames], np.int64)
        kernels.join(frames, out[: int(lengths.sum())])
        return lengths

    def extents(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Path of each object -> (n, 2) offsets and lengths of the chunks that hold rows.

        Empty for arrays whose rows are spread over several chunks; without unreadable objects.
        """
        extents: dict[str, np.ndarray] = {}
        if not self.array.whole_rows or not self._objects.mapped:
            return extents
        tail = self._pieces[0].object_tail
        numbers, within = np.divmod(rows, self.array.object_shape[0])
        chunks = self._chunks(within)
        for number in np.unique(numbers).tolist():
            with contextlib.suppress(PrecacheError):  # raised again when the row is read
                mapped = self._objects.get(number, tail, int(rows[numbers == number][0]))
                if mapped is not None:
                    places = mapped.index[np.unique(chunks[numbers == number])]
                    inside = (places <= mapped.size).all(axis=1)
                    extents[str(self._objects.path(number, tail))] = places[inside]
        return extents
