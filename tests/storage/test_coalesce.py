"""Parts of objects that lie close together are read together, and each is found again."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from precache.storage.base import Range
from precache.storage.coalesce import coalesce

PARTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 12)), max_size=30
)


@given(PARTS, st.integers(0, 5), st.integers(0, 20) | st.just(1 << 62))
def test_each_part_lies_in_one_range(parts: list[Range], gap: int, limit: int) -> None:
    """Those without a limit are further apart than the gap."""
    covered, ranges = list[int](), coalesce(parts, gap, limit)
    for (name, first, size), numbers in ranges:
        assert len(numbers) == 1 or size <= limit
        for number in numbers:
            whose, start, length = parts[number]
            assert whose == name
            assert first <= start <= start + length <= first + size
        covered += numbers
    assert sorted(covered) == list(range(len(parts)))
    for ((name, first, size), _), ((other, start, _), _) in itertools.pairwise(ranges):
        assert limit < 1 << 62 or name != other or start > first + size + gap


def test_a_range_ends_before_it_is_too_long() -> None:
    parts = [("a", n * 6, 6) for n in range(3)]
    assert coalesce(parts, 0, 11) == [(part, [n]) for n, part in enumerate(parts)]
    assert coalesce(parts, 0, 12) == [(("a", 0, 12), [0, 1]), (parts[2], [2])]
    assert coalesce([("a", 0, 100)], 0, 12) == [(("a", 0, 100), [0])]
