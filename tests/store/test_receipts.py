"""Receipts round-trip; whatever else lies in their place ends in an error that builds expect."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.store.receipts import ChannelSums, Receipt, ShardObject, SlowSample

COUNTS = st.integers(0, 2**40)
NAMES = st.text(max_size=6)
ENDS = st.binary(max_size=12).map(lambda ends: ends[: len(ends) // 4 * 4].hex())
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
RECEIPTS = st.builds(
    Receipt,
    shard=COUNTS,
    objects=st.dictionaries(
        NAMES,
        st.builds(ShardObject, COUNTS, COUNTS, COUNTS, ENDS),
        max_size=3,
    ),
    holes=st.dictionaries(COUNTS, st.text(), max_size=4),
    content=st.lists(st.text(max_size=4), max_size=4),
    sums=st.dictionaries(
        NAMES, st.builds(ChannelSums, COUNTS, st.lists(FLOATS), st.lists(FLOATS)), max_size=2
    ),
    seconds=st.dictionaries(NAMES, FLOATS, max_size=3),
    cpu_seconds=FLOATS,
    import_seconds=FLOATS,
    labels=st.none() | st.lists(st.integers(-1, 10), max_size=4),
    host=st.text(max_size=6),
    began=FLOATS,
    fetched=COUNTS,
    slowest=st.lists(st.builds(SlowSample, COUNTS, FLOATS, COUNTS), max_size=3),
)


@given(RECEIPTS)
def test_a_receipt_round_trips(receipt: Receipt) -> None:
    assert Receipt.from_json(receipt.to_json()) == receipt


def _receipt() -> Receipt:
    made = {"image": ShardObject(10, 1, 30, "01020304")}
    return Receipt(
        shard=0,
        objects=made,
        holes={3: "broken"},
        content=["ab"],
        sums={"image": ChannelSums(1, [1.0], [1.0])},
        seconds={},
        cpu_seconds=0.5,
    )


@given(st.integers(0, 400), st.binary(max_size=3))
def test_a_receipt_that_was_cut_or_spoilt_is_an_error_of_the_few(cut: int, patch: bytes) -> None:
    data = _receipt().to_json()
    spoilt = data[:cut] + patch + data[cut + len(patch) :]
    for part in (spoilt[: max(cut, 1)], spoilt):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            Receipt.from_json(part)


FORMS: list[object] = [None, [], [1], "x", 3, {"image": None}, {"image": 3}]


def test_a_receipt_of_another_form_is_an_error_of_the_few() -> None:
    document = json.loads(_receipt().to_json())
    for value, name in itertools.product(FORMS, ["objects", "holes", "sums", None]):
        forged = value if name is None else {**document, name: value}
        with pytest.raises((ValueError, KeyError, TypeError)):
            Receipt.from_json(json.dumps(forged).encode())
