"""Columns of text."""

import hypothesis.strategies as st
from hypothesis import given

from precache.store.columns import Texts

TEXTS = st.lists(st.sampled_from(["", "a", "b", "é", "zz", "a\0"]), max_size=8)


@given(TEXTS, st.booleans(), st.booleans())
def test_values_are_repeated_and_iterated_alike_with_and_without_a_dictionary(
    values: list[str], ordered: bool, coded: bool
) -> None:
    values = sorted(values) if ordered else values
    texts = Texts(values)
    texts = Texts(texts.plain.dictionary_encode()) if coded else texts
    assert [*texts] == values
    assert texts.is_repeated.tolist() == [values.count(value) > 1 for value in values]
    assert texts.are_ascending == (values == sorted({*values}))
    assert texts.same(texts).all()
