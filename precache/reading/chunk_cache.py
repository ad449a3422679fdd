"""Cache of decoded chunks of small rows, for rows still to be read, in bounded memory."""

from __future__ import annotations

import math
import threading

import numpy as np

DECODED_NBYTES = 256 << 20
"""Memory for the decoded chunks of one field; block shuffle's default window fits for most sets."""


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
