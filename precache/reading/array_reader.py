"""Reading rows of shards into the caller's buffer.

The filter of `image` belongs to a chunk: it is undone on each chunk that was decoded, before rows
are cut out of it, and never on fill values. Only rows of ours, which are whole chunks, can stay
filtered, to be undone on a device.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from precache.codecs import kernels
from precache.codecs.chunk import crc32c_holds
from precache.codecs.image import undo_image, undone_together
from precache.errors import DamageError, PrecacheError, StoreError, UsageError
from precache.reading.chunk_cache import DECODED_NBYTES, DecodedChunks
from precache.reading.shard_files import MappedObjects, ShardFiles
from precache.runtime.usage import available_bytes
from precache.store.version import Version
from precache.store.zarr_metadata import Piece

CHECK_ROWS = 8
"""Rows that are decompressed together where only their checksum counts."""

DECODE_NBYTES = 1 << 20
"""Chunks of small rows are decoded, and plain rows checked, up to this size before their rows are
copied."""

CHUNKS_AT_ONCE = 5
"""Decoded chunks that reading holds, where rows are cut out of them: one a thread, and one kept."""
NOT_HELD = "its CRC32C does not hold"

Place = tuple[int, int, int, bool]
"""A row, its object, its chunk there, and whether to check that."""

SHARED_ROW_NBYTES = 16 << 10
"""Rows below this size are not worth a Python object each. Where all fit, they are copied from
chunks that are kept decoded, whatever the codec."""


class ArrayReader:
    """Reads rows of one array of a version from memory maps. Safe to use from several threads.

    Parameters
    ----------
    verify
        ``first``: the checksum of a chunk, a CRC32C or that of a zstd frame, is checked the first
        time this process maps and reads it; ``always``; ``off``: that of frames still is. Without
        compiled code, frames always are.
    objects
        Of the array; by default those in the version's own folder, mapped.
    """

    def __init__(
        self, version: Version, name: str, verify: str = "first", objects: ShardFiles | None = None
    ) -> None:
        if verify not in ("first", "always", "off"):
            raise UsageError(f"verify is {verify!r}; choose first, always or off")
        self.name = name
        self._where = f"{version.path}/{version.arrays[name][0]}"
        self._objects = objects or MappedObjects(version, name)
        self.array = self._objects.array
        self._pieces = self._objects.pieces
        self._verify = verify
        self._decoded: dict[bool, DecodedChunks] = {}
        self._scratch = threading.local()
        self._small = self.array.row_nbytes < SHARED_ROW_NBYTES
        whole = self.array.shape[0] * self.array.row_nbytes
        self._fits = self.array.chunk_shape[0] > 1 and whole <= DECODED_NBYTES
        self._together = max(1, DECODE_NBYTES // self.array.chunk_nbytes)
        straight = self.array.whole_rows and (self.plain or self.array.chunk_shape[0] == 1)
        held = 0 if straight else CHUNKS_AT_ONCE * self.array.chunk_nbytes
        self.require_memory(max(self.array.row_nbytes, held))
        self._beyond = math.prod(self.array.chunks_per_object[1:])
        self._checked = self._objects.checked
        if verify == "off":
            self._checked = np.ones_like(self._checked)

    def require_memory(self, nbytes: int) -> None:
        """Refuse what no memory holds, before any is taken for it."""
        free = available_bytes()
        if free is not None and nbytes > free:
            raise self._no_memory(nbytes)

    def _no_memory(self, nbytes: int) -> StoreError:
        return StoreError(
            f"there is no memory for {self._where}: its {self.array.shape[0]} rows of "
            f"{self.array.row_nbytes} bytes in chunks of {self.array.chunk_nbytes} take {nbytes} "
            "at once; it is damaged or forged, or the array needs other chunks"
        )

    @property
    def plain(self) -> bool:
        """Whether reading is copying from memory."""
        return self.array.decoder.plain and self._objects.mapped

    @property
    def copying(self) -> bool:
        """Whether reading is copying from memory, but for the first time a chunk is needed."""
        kept = self._small and self._fits and self.array.whole_rows
        return self.plain or (kept and self._objects.mapped and self._verify != "always")

    @property
    def filtered(self) -> bool:
        """Whether rows read with ``undo=False`` are still filtered: chunks of other software may
        hold parts of rows, or be missing."""
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
            Whether the image filter is undone; of arrays that are not `filtered` it always is.

        Raises
        ------
        DamageError
            Stored bytes are missing or wrong; names the file and the key.
        StoreError
            There is no memory for a chunk of the array.
        """
        try:
            self._read(rows, out, undo)
        except MemoryError:
            raise self._no_memory(CHUNKS_AT_ONCE * self.array.chunk_nbytes) from None

    def _read(self, rows: np.ndarray, out: np.ndarray, undo: bool) -> None:
        if len(rows) == 0:
            return
        undo = self.array.decoder.filtered and (undo or not self.filtered)
        rows = np.ascontiguousarray(rows, np.int64)
        numbers, inside = np.divmod(rows, self.array.object_shape[0])
        if not self.array.whole_rows:
            self._read_chunked(rows, out)
        elif self._small and self._fits:
            self._read_shared(rows, out, undo)
        elif not (self.plain and self._read_plain(rows, numbers, inside, out)):
            if self.array.chunk_shape[0] == 1:
                self._read_single(rows, numbers, self._chunks(inside), out, undo)
            else:
                self._read_shared(rows, out, undo)

    def _read_plain(
        self, rows: np.ndarray, numbers: np.ndarray, inside: np.ndarray, out: np.ndarray
    ) -> bool:
        """Copy rows that are stored as they are; False where some are not, or not at hand."""
        objects = self._objects
        begins = objects.begins[numbers]
        for at in np.flatnonzero(begins < 0).tolist():
            begin = objects.begin(int(numbers[at]), self._pieces[0].object_tail, int(rows[at]))
            if begin is None:
                return False
            begins[at] = begin
        chunks = inside // self.array.chunk_shape[0]
        starts = begins + inside * self.array.row_nbytes + chunks * objects.gap
        checks = self._checks(numbers, chunks)
        if not checks.any():
            return self._gather(rows, numbers, starts, out, out.nbytes)
        if kernels.checks and self.array.chunk_shape[0] == 1:
            held = self._gather(rows, numbers, starts, out, out.nbytes, checks)
            self._checked[numbers, chunks] |= held
            return held
        # Right before they are copied: they are then read from memory once for both.
        together = DECODE_NBYTES // self.array.row_nbytes + 1
        for start in range(0, len(rows), together):
            part = slice(start, start + together)
            for at in (start + np.flatnonzero(checks[part])).tolist():
                self._check_plain(rows[at], numbers[at], chunks[at])
            if not self._gather(rows[part], numbers[part], starts[part], out[part], out.nbytes):
                return False
        return True

    def _gather(
        self,
        rows: np.ndarray,
        numbers: np.ndarray,
        starts: np.ndarray,
        out: np.ndarray,
        batch_nbytes: int,
        checks: np.ndarray | None = None,
    ) -> bool:
        """Copy rows, and check some; False where another iterator's feed let go of an object
        meanwhile."""
        sources, lengths = self._objects.sources, np.full(len(out), self.array.row_nbytes, np.int64)
        try:
            whole = kernels.gather(sources, numbers, starts, lengths, out, batch_nbytes, checks)
        except ValueError:
            return False
        if whole < len(rows):
            raise self.damage(int(rows[whole]), NOT_HELD)
        return True

    @property
    def pitch(self) -> int:
        """Bytes from one plain chunk of an object to the next."""
        return self._objects.pitch

    def plain_objects(self) -> list[tuple[Path, int, int]]:
        """Path, size, and first byte of the rows of each object, from which plain chunks lie at
        equal distances; nothing where that is not so of all that precache wrote.

        Raises
        ------
        DamageError
            An object is missing, or its index is wrong.
        """
        if not self.plain or self._objects.expected is None:
            return []
        found = []
        tail, shard_rows = self._pieces[0].object_tail, self.array.object_shape[0]
        for number in range(self.array.objects):
            path = self._objects.path(number, tail)
            mapped = self._objects.get(number, tail, number * shard_rows)
            if path is None or mapped is None or mapped.begin is None:
                return []
            found.append((path, mapped.size, mapped.begin))
        return found

    def frame_objects(self) -> list[tuple[Path, int, np.ndarray]]:
        """Path and size of each object, and (n, 2) int64 offset and length of each row's frame.

        Raises
        ------
        DamageError
            As `plain_objects`.
        """
        found = []
        tail, shard_rows = self._pieces[0].object_tail, self.array.object_shape[0]
        for number in range(self.array.objects):
            row = number * shard_rows
            path, mapped = self._objects.path(number, tail), self._objects.get(number, tail, row)
            if path is None or mapped is None:
                return []
            extents = mapped.index[: min(shard_rows, self.array.shape[0] - row)]
            lost = (extents > mapped.size).any(axis=1) | (extents.sum(axis=1) > mapped.size)
            for wrong in (np.flatnonzero(lost) + row).tolist():
                raise self.damage(wrong, "its index points outside of it")
            found.append((path, mapped.size, extents.astype(np.int64)))
        return found

    def check(self, rows: np.ndarray) -> None:
        """Check plain rows, or frames, where `verify` says so, without reading them for more.

        Raises
        ------
        DamageError
            As `read`.
        """
        numbers, inside = np.divmod(rows, self.array.object_shape[0])
        chunks = inside // self.array.chunk_shape[0]
        if not self.framed:
            for position in np.flatnonzero(self._checks(numbers, chunks)):
                self._check_plain(rows[position], numbers[position], chunks[position])
            return
        left = rows[~self._checked[numbers, chunks] | (self._verify == "always")]
        scratch = np.empty((min(len(left), CHECK_ROWS), *self.array.row_shape), self.array.dtype)
        for start in range(0, len(left), CHECK_ROWS):
            # To decompress a frame is to check it.
            some = left[start : start + CHECK_ROWS]
            self.read(some, scratch[: len(some)], undo=False)

    def _checks(self, numbers: np.ndarray, chunks: np.ndarray) -> np.ndarray:
        """(n,) bool: whether the CRC32C of each chunk is to be checked."""
        if self._verify == "off" or not self.array.decoder.codecs:
            return np.zeros(len(chunks), bool)
        checks: np.ndarray = ~self._checked[numbers, chunks] | (self._verify == "always")
        return checks

    def _passed(self, numbers: np.ndarray, chunks: np.ndarray) -> None:
        """Remember that chunks were checked; bytes that are not mapped are fetched anew, and may
        be others then."""
        if self._objects.mapped:
            self._checked[numbers, chunks] = True

    def _check_plain(self, row: int, number: int, chunk: int) -> None:
        if self._verify == "first" and self._checked[number, chunk]:
            return
        tail = self._pieces[0].object_tail
        data = self._objects.chunk(int(number), tail, int(chunk), int(row))
        if data is None or not crc32c_holds(data):
            raise self._objects.damage(int(number), tail, int(row), NOT_HELD)
        self._checked[number, chunk] = True

    def _read_single(
        self,
        rows: np.ndarray,
        numbers: np.ndarray,
        chunks: np.ndarray,
        out: np.ndarray,
        undo: bool,
    ) -> None:
        """One chunk a row, the row whole: decode straight into `out`."""
        verify = ~self._checked[numbers, chunks] | (self._verify == "always")
        columns = rows.tolist(), numbers.tolist(), chunks.tolist(), verify.tolist()
        places = list(zip(*columns, strict=True))
        numpys = undo and not kernels.decodes
        together = undone_together(out.shape[1:]) if numpys else len(rows)
        with self._objects.gathered(rows):
            for start in range(0, len(rows), together):
                part = slice(start, start + together)
                self._decode_places(places[part], out[part], undo, out.nbytes)
        self._passed(numbers, chunks)

    def _chunks(self, inside: np.ndarray) -> np.ndarray:
        """(n,) int64: the chunk of an object that each row is in, by the row's place there."""
        chunks: np.ndarray = inside // self.array.chunk_shape[0] * self._beyond
        return chunks

    def _decode_places(
        self, places: Sequence[Place], out: np.ndarray, undo: bool, batch_nbytes: int
    ) -> None:
        """Decode chunks (n, ...), each whole; `undo`: and undo the filter."""
        decode, tail = self.array.decoder.decode, self._pieces[0].object_tail
        whole, missing = 0, []
        if kernels.decodes and self.array.decoder.framed:
            frames = []
            for row, number, chunk, _ in places:
                data = self._objects.chunk(number, tail, chunk, row)
                if data is None:
                    break
                frames.append(data)
            room, checked = out[: len(frames)], None
            if self._verify == "first":
                checked = np.array([check for *_, check in places[: len(frames)]], bool)
            whole = kernels.decode(
                frames, room, filtered=undo, batch_nbytes=batch_nbytes, checked=checked
            )
        for position, (row, number, chunk, check) in enumerate(places[whole:], whole):
            data = self._objects.chunk(number, tail, chunk, row)
            if data is None:
                missing.append(position)
                continue
            try:
                decode(data, out[position : position + 1], verify=check)
            except DamageError as error:
                raise self._objects.damage(number, tail, row, str(error)) from None
        if undo:
            undo_image(out[whole:])
        if missing:
            out[missing] = self.array.fill_value

    def _read_shared(self, rows: np.ndarray, out: np.ndarray, undo: bool) -> None:
        """Several rows a chunk: decode those that are not kept from an earlier batch."""
        chunks, within = np.divmod(rows, self.array.chunk_shape[0])
        kept = self._kept(undo)
        again = self._verify == "always"
        left = np.arange(len(rows)) if again else kept.copy(chunks, within, out)
        if not len(left):
            return
        together = self._together
        left = left[np.argsort(chunks[left], kind="stable")]
        present, first = np.unique(chunks[left], return_index=True)
        ends = np.append(first[together::together], len(left))
        for number, end in enumerate(ends.tolist()):
            part = slice(number * together, (number + 1) * together)
            here = left[first[part.start] : end]
            decoded = self._decode_chunks(rows[left[first[part]]], undo)
            out[here] = decoded[np.searchsorted(present[part], chunks[here]), within[here]]
            kept.add(present[part], decoded)

    def _kept(self, undo: bool) -> DecodedChunks:
        try:
            return self._decoded[undo]
        except KeyError:
            array = self.array
            self.require_memory(CHUNKS_AT_ONCE * array.chunk_nbytes)
            made = DecodedChunks(array.chunks_along_rows, array.chunk_shape, array.dtype)
            return self._decoded.setdefault(undo, made)

    def _decode_chunks(self, rows: np.ndarray, undo: bool) -> np.ndarray:
        """The chunks that hold rows, in memory that the same thread uses again."""
        shape = (self._together, *self.array.chunk_shape)
        if not hasattr(self._scratch, "chunks"):
            self._scratch.chunks = np.empty(shape, self.array.dtype)
        decoded: np.ndarray = self._scratch.chunks[: len(rows)]
        numbers, inside = np.divmod(rows, self.array.object_shape[0])
        chunks = self._chunks(inside)
        verify = ~self._checked[numbers, chunks] | (self._verify == "always")
        columns = rows.tolist(), numbers.tolist(), chunks.tolist(), verify.tolist()
        with self._objects.gathered(rows):
            places = list(zip(*columns, strict=True))
            self._decode_places(places, decoded, undo, batch_nbytes=0)
        self._passed(numbers, chunks)
        return decoded

    def _read_chunked(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Several chunks a row: decode each once, copy from it."""
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
        beyond = math.prod(self.array.chunks_per_object[1:])
        chunk = inside // self.array.chunk_shape[0] * beyond + piece.chunk_tail
        data = self._objects.chunk(number, piece.object_tail, chunk, row)
        if data is None:
            scratch[...] = self.array.fill_value
            return
        try:
            self.array.decoder.decode(data, scratch, verify=self._verify != "off")
        except DamageError as error:
            raise self._objects.damage(number, piece.object_tail, row, str(error)) from None
        if self.array.decoder.filtered:
            undo_image(scratch)

    def damage(self, row: int, reason: str) -> PrecacheError:
        """The error that says so of a row, and what to do."""
        number = row // self.array.object_shape[0]
        return self._objects.damage(number, self._pieces[0].object_tail, row, reason)

    @property
    def framed(self) -> bool:
        """Whether every row is stored as one zstd frame, which `read_frames` can hand out."""
        single = self.array.whole_rows and self.array.chunk_shape[0] == 1
        return single and self.array.decoder.framed and self._objects.expected is not None

    @property
    def frame_bound(self) -> int:
        """Bytes that no frame of a row exceeds. Source: ZSTD_compressBound in zstd.h."""
        return self.array.row_nbytes + (self.array.row_nbytes >> 8) + 128

    def read_frames(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the zstd frames of rows, one after another, into `out` (uint8).

        Each is decompressed here too the first time (as `verify` says), because only that checks
        its content checksum.

        Returns
        -------
        np.ndarray
            (n,) int64 lengths.

        Raises
        ------
        DamageError
            As `read`.
        """
        numbers, chunks = np.divmod(rows, self.array.object_shape[0])
        tail = self._pieces[0].object_tail
        checks = ~self._checked[numbers, chunks] | (self._verify == "always")
        scratch = np.empty((1, *self.array.row_shape), self.array.dtype)
        frames = []
        columns = rows.tolist(), numbers.tolist(), chunks.tolist(), checks.tolist()
        with self._objects.gathered(rows):
            for row, number, chunk, check in zip(*columns, strict=True):
                data = self._objects.chunk(number, tail, chunk, row)
                if data is None or len(data) > self.frame_bound:
                    raise self._objects.damage(number, tail, row, "it has no frame of that row")
                if check:
                    try:
                        self.array.decoder.decode(data, scratch)
                    except DamageError as error:
                        raise self._objects.damage(number, tail, row, str(error)) from None
                frames.append(data)
        self._passed(numbers, chunks)
        lengths = np.array([len(frame) for frame in frames], np.int64)
        kernels.join(frames, out[: int(lengths.sum())])
        return lengths

    def extents(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Path of each object -> (n, 2) offsets and lengths of the chunks that hold rows.

        Nothing for arrays whose rows are spread over several chunks, or what cannot be read.
        """
        found: dict[str, np.ndarray] = {}
        if not self.array.whole_rows or not self._objects.mapped:
            return found
        tail = self._pieces[0].object_tail
        numbers, within = np.divmod(rows, self.array.object_shape[0])
        chunks = self._chunks(within)
        for number in np.unique(numbers).tolist():
            with contextlib.suppress(PrecacheError):  # told to whoever reads the row
                mapped = self._objects.get(number, tail, int(rows[numbers == number][0]))
                if mapped is not None:
                    extents = mapped.index[np.unique(chunks[numbers == number])]
                    inside = (extents <= mapped.size).all(axis=1)
                    found[str(self._objects.path(number, tail))] = extents[inside]
        return found

    def objects(self) -> Iterator[tuple[int, str]]:
        """Number along axis 0 of each stored object that precache wrote, and its name below the
        version's folder."""
        for number in range(self.array.objects):
            yield number, self._objects.name(number)


def open_readers(
    version: Version, names: Sequence[str], verify: str = "first"
) -> dict[str, ArrayReader]:
    """A reader for each of the named arrays."""
    return {name: ArrayReader(version, name, verify) for name in names}
