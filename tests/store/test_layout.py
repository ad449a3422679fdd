"""The arithmetic of rows, chunks and shards, and the bytes of a shard index."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.errors import DamageError
from precache.store.layout import (
    MIN_SHARDS,
    TARGET_CHUNK_BYTES,
    TARGET_SHARD_BYTES,
    RowShape,
    align,
    decode_index,
    encode_index,
    rows_per_chunk,
    rows_per_shard,
)

ROW_BYTES = st.integers(1, 1 << 24)
U64 = st.integers(0, 2**64 - 1)


@given(st.integers(0, 1 << 32))
def test_a_chunk_holds_a_power_of_two_of_small_rows_or_one_large_row(nbytes: int) -> None:
    rows = rows_per_chunk(nbytes)
    assert rows.bit_count() == 1
    assert rows == 1 or rows * nbytes <= TARGET_CHUNK_BYTES
    assert nbytes == 0 or 2 * rows * nbytes > TARGET_CHUNK_BYTES


@given(st.integers(0, 10**9), st.lists(ROW_BYTES, min_size=1, max_size=4))
def test_a_shard_is_whole_chunks_of_every_field(rows: int, nbytes: list[int]) -> None:
    per_shard = rows_per_shard(rows, nbytes)
    step = max(64, rows_per_chunk(max(nbytes)))
    assert per_shard >= 1
    assert per_shard % rows_per_chunk(max(nbytes)) == 0
    shapes = [RowShape((n,), "uint8") for n in nbytes]
    assert all(per_shard % shape.chunk_rows(per_shard) == 0 for shape in shapes)
    assert (per_shard - step) * max(nbytes) < TARGET_SHARD_BYTES
    photo = 3 * 224 * 224
    assert 64 << 20 <= rows_per_shard(1_281_167, [photo]) * photo <= 256 << 20, "as is promised"


@given(st.integers(1, 10**6), st.integers(1, 10**5), ROW_BYTES)
def test_a_small_set_makes_sixteen_shards_or_any_number_in_whole_chunks(
    rows: int, wanted: int, nbytes: int
) -> None:
    step = rows_per_chunk(nbytes)
    shards = -(-rows // rows_per_shard(rows, [nbytes]))
    chunks = -(-rows // step)
    assert shards >= min(MIN_SHARDS, chunks) / 2
    assert wanted <= rows_per_shard(rows, [nbytes], wanted) < wanted + step
    assert align(rows) % 64 == 0
    assert rows <= align(rows) < rows + 64


@given(st.lists(st.tuples(U64, U64), min_size=1, max_size=40))
def test_an_index_is_little_endian_pairs_and_their_crc32c(entries: list[tuple[int, int]]) -> None:
    table = np.array(entries, np.uint64)
    data = encode_index(table[:, 0], table[:, 1])
    numbers = b"".join(n.to_bytes(8, "little") for pair in entries for n in pair)
    assert data == numbers + google_crc32c.value(numbers).to_bytes(4, "little")
    np.testing.assert_array_equal(decode_index(data, len(entries)), table)
    np.testing.assert_array_equal(decode_index(memoryview(data), len(entries)), table)


@given(st.integers(0, 83), st.integers(1, 255))
def test_any_changed_or_missing_byte_of_an_index_is_noticed(at: int, change: int) -> None:
    stored = bytearray(encode_index(np.arange(5, dtype=np.uint64), np.arange(5, dtype=np.uint64)))
    with pytest.raises(DamageError):
        decode_index(bytes(stored[:at]), 5)
    stored[at] ^= change
    with pytest.raises(DamageError, match="CRC32C"):
        decode_index(bytes(stored), 5)
