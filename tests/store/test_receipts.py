"""Receipts round-trip; of forged ones, see `test_forged`."""

from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from precache.errors import Hole, HoleKind
from precache.store.receipts import ChannelSums, Receipt, ShardObject

COUNTS = st.integers(0, 2**40)
NAMES = st.text(max_size=6)
ENDS = st.binary(max_size=12).map(lambda ends: ends[: len(ends) // 4 * 4].hex())
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
KINDS = st.sampled_from(get_args(HoleKind))
RECEIPTS = st.builds(
    Receipt,
    shard=COUNTS,
    objects=st.dictionaries(
        NAMES, st.builds(ShardObject, COUNTS, COUNTS, COUNTS, ENDS), max_size=3
    ),
    holes=st.dictionaries(COUNTS, st.builds(Hole, KINDS, st.text()), max_size=4),
    content=st.lists(st.just("") | st.binary(min_size=16, max_size=16).map(bytes.hex), max_size=4),
    sums=st.dictionaries(
        NAMES, st.builds(ChannelSums, COUNTS, st.lists(FLOATS), st.lists(FLOATS)), max_size=2
    ),
    seconds=st.dictionaries(NAMES, FLOATS, max_size=3),
    labels=st.none() | st.lists(st.integers(-1, 10), max_size=4),
    host=st.text(max_size=6),
    fetched=COUNTS,
    **dict.fromkeys(("cpu_seconds", "began"), FLOATS),
)


@settings(max_examples=20)
@given(RECEIPTS)
def test_a_receipt_round_trips(receipt: Receipt) -> None:
    assert Receipt.from_json(receipt.to_json()) == receipt
