"""Statistics of measured values."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.runtime.spread import Spread, mean_and_cv, relative_error


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50))
def test_figures_lie_in_order(values: list[float]) -> None:
    found = Spread.of(values)
    assert min(values) <= found.median <= found.max == max(values)
    assert found.median <= found.p95 <= found.max
    assert found.mean == pytest.approx(sum(values) / len(values))


def test_known_values() -> None:
    assert Spread.of([1.0] * 95 + [9.0] * 5).p95 == 9.0
    assert Spread.of([1.0] * 96 + [9.0] * 4).p95 == 1.0
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0, 0.0)
    assert mean_and_cv(np.zeros(2)) == (0, 0)
    assert mean_and_cv(np.array([1.0, 3.0])) == (2, 0.5)
    assert relative_error(np.array([1.0, 2.0, 3.0]), 3) == 0, "a sample of all"
    assert relative_error(np.array([1.0]), 1) == 0
    assert relative_error(np.array([1.0]), 2) == math.inf
    assert relative_error(np.array([2.0, 2.0]), 100) == 0


def test_the_error_holds_what_it_says() -> None:
    """Of 400 samples without replacement, some 95% have the true mean within their interval."""
    random = np.random.default_rng(0)
    population = random.gamma(2.0, 1.0, 2000)
    inside = 0
    for _ in range(400):
        part = random.choice(population, 200, replace=False)
        error = relative_error(part, len(population)) * part.mean()
        inside += abs(part.mean() - population.mean()) <= error
    assert 0.91 < inside / 400 < 0.99
