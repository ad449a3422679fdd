"""Decoded chunks: what is kept is right, and no more is kept than fits."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from precache.reading.array_reader import DecodedChunks

CHUNKS, ROWS = 12, 4
VALUES = np.arange(CHUNKS * ROWS * 3, dtype=np.int16).reshape(CHUNKS, ROWS, 3)


def _read(kept: DecodedChunks, rows: np.ndarray) -> tuple[np.ndarray, int]:
    """What a reader does: the rows, and how many chunks it had to decode."""
    chunks, within = np.divmod(rows, ROWS)
    out = np.full((len(rows), 3), -1, np.int16)
    left = kept.copy(rows, out)
    out[left] = VALUES[chunks[left], within[left]]
    present = np.unique(chunks[left])
    kept.add(present, VALUES[present])
    return out, len(present)


@given(
    st.lists(st.lists(st.integers(0, CHUNKS * ROWS - 1), min_size=1, max_size=30), max_size=20),
    st.integers(0, CHUNKS),
)
def test_rows_are_right_whatever_is_kept(batches: list[list[int]], room: int) -> None:
    kept = DecodedChunks(CHUNKS, (ROWS, 3), "int16", room * VALUES[0].nbytes)
    for batch in batches:
        rows = np.array(batch)
        found, _ = _read(kept, rows)
        np.testing.assert_array_equal(found, VALUES.reshape(-1, 3)[rows])


def test_what_fits_is_decoded_once_and_else_the_oldest_makes_room() -> None:
    kept = DecodedChunks(CHUNKS, (ROWS, 3), "int16")
    order = np.random.default_rng(0).permutation(CHUNKS * ROWS)
    decoded = [_read(kept, order[start : start + 6])[1] for start in range(0, len(order), 6)]
    assert sum(decoded) == CHUNKS
    assert _read(kept, order)[1] == 0
    kept = DecodedChunks(CHUNKS, (ROWS, 3), "int16", 3 * VALUES[0].nbytes)
    for chunk in (0, 1, 2, 3):
        assert _read(kept, np.array([chunk * ROWS]))[1] == 1
    assert [_read(kept, np.array([chunk * ROWS]))[1] for chunk in (1, 2, 3)] == [0, 0, 0]
    assert _read(kept, np.array([0]))[1] == 1


def test_threads_may_share_it() -> None:
    kept = DecodedChunks(CHUNKS, (ROWS, 3), "int16", 4 * VALUES[0].nbytes)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(300):
            rows = random.integers(0, CHUNKS * ROWS, 8)
            np.testing.assert_array_equal(_read(kept, rows)[0], VALUES.reshape(-1, 3)[rows])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
