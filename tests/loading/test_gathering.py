"""A gather takes the right bytes, wherever they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precache.loading.gpu.gathering import RowOffsets, gather, gather_frames


@st.composite
def arrays(draw: st.DrawFn) -> tuple[RowOffsets, int]:
    """Where the rows of an array lie, and how many there are."""
    chunk_rows, row_nbytes = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    shard_rows = chunk_rows * draw(st.integers(1, 5))
    pitch = chunk_rows * row_nbytes + draw(st.sampled_from([0, 4]))
    shard_nbytes = shard_rows // chunk_rows * pitch
    starts, end = [], 0
    for _ in range(draw(st.integers(1, 4))):
        starts.append(end + draw(st.sampled_from([0, 8, 20])))
        end = starts[-1] + shard_nbytes
    places = RowOffsets(np.array(starts, np.int64), shard_rows, chunk_rows, row_nbytes, pitch)
    return places, end


@given(arrays(), st.data())
def test_a_gather_takes_the_bytes_of_each_row(
    laid_out: tuple[RowOffsets, int], data: st.DataObject
) -> None:
    places, nbytes = laid_out
    memory = np.random.default_rng(0).integers(0, 256, -(-nbytes // 8) * 8).astype(np.uint8)
    every = len(places.starts) * places.shard_rows
    rows = np.array(data.draw(st.lists(st.integers(0, every - 1), min_size=1, max_size=9)))
    found = gather(
        torch.from_numpy(memory),
        torch.from_numpy(places.of(rows)),
        places.row_nbytes,
        places.unit,
    )
    for row, values in zip(rows.tolist(), found.numpy(), strict=True):
        shard, inside = divmod(row, places.shard_rows)
        chunk, within = divmod(inside, places.chunk_rows)
        start = places.starts[shard] + chunk * places.pitch + within * places.row_nbytes
        np.testing.assert_array_equal(values, memory[start : start + places.row_nbytes])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.data())
def test_frames_are_gathered_whole_wherever_they_lie(
    lengths: list[int], data: st.DataObject
) -> None:
    """Also at the very end, beyond which no memory may be read."""
    nbytes = max(80, -(-sum(lengths) // 8) * 8)
    memory = np.random.default_rng(0).integers(0, 256, nbytes).astype(np.uint8)
    first = nbytes - sum(lengths) if data.draw(st.booleans()) else 0
    starts = first + np.cumsum([0, *lengths[:-1]])
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=9))
    longest = max(lengths[n] for n in chosen)
    held, offsets = gather_frames(
        torch.from_numpy(memory), torch.from_numpy(starts[chosen]), longest
    )
    for number, offset in zip(chosen, offsets.tolist(), strict=True):
        frame = memory[starts[number] : starts[number] + lengths[number]]
        np.testing.assert_array_equal(held[offset : offset + lengths[number]], frame)


@pytest.mark.parametrize(
    ("row_nbytes", "pitch", "unit"),
    [(150528, 150532, 4), (150528, 150528, 8), (3, 7, 1), (6, 10, 2), (75, 79, 1)],
)
def test_the_largest_elements_are_gathered_that_rows_are_made_of(
    row_nbytes: int, pitch: int, unit: int
) -> None:
    assert RowOffsets(np.array([0, 4096]), 8, 1, row_nbytes, pitch).unit == unit
