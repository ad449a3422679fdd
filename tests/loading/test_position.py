"""Where a loop is: an end of an epoch is the next one's start, and other settings are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.errors import UsageError
from precache.loading.position import Position, require_same


@given(st.integers(1, 20), st.integers(0, 5), st.data())
def test_what_was_saved_is_where_the_next_iterator_begins(
    length: int, epoch: int, data: st.DataObject
) -> None:
    place = Position(length)
    place.choose(epoch)
    assert place.begin() == (epoch, 0)
    batches = data.draw(st.integers(1, length))
    place.received(epoch, batches)
    other = Position(length)
    other.load(place.saved())
    expected = (epoch, batches) if batches < length else (epoch + 1, 0)
    assert other.begin() == expected
    assert other.begin() == (expected[0] + 1, 0)


def test_a_resumed_epoch_that_is_chosen_again_goes_on() -> None:
    place = Position(9)
    place.seek(3, 5)
    place.choose(3)
    assert place.saved() == {"epoch": 3, "batch": 5}
    place.choose(4)
    assert place.begin() == (4, 0)


@pytest.mark.parametrize("batch", [-1, 9, None, 1.0])
def test_a_place_that_is_none_is_refused(batch: object) -> None:
    place = Position(9)
    with pytest.raises(UsageError, match=f"at epoch 2, batch {batch!r}; an epoch has 9"):
        place.load({"epoch": 2, "batch": batch})
    assert place.saved() == {"epoch": 0, "batch": 0}


def test_the_first_that_differs_is_named_with_both_values() -> None:
    require_same({"a": 1}, {"a": 1, "b": 2}, "this loader")
    with pytest.raises(UsageError, match="the saved state has b=3 and this loader has 2; open"):
        require_same({"a": 1, "b": 2}, {"a": 1, "b": 3}, "this loader")
    with pytest.raises(UsageError, match="has a=None and this loader has 1"):
        require_same({"a": 1}, {}, "this loader")
