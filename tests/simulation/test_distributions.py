"""Times from distributions and from files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.errors import UsageError
from precache.simulation.distributions import Durations, durations, read_times


def _ms(times: Durations, count: int, seed: int = 0) -> np.ndarray:
    drawn = itertools.islice(times.draw(np.random.default_rng(seed)), count)
    return np.fromiter(drawn, np.int64) / 1e6


@pytest.mark.parametrize(
    ("cv", "kind"), [(0.1, "gamma"), (0.7, "gamma"), (0.1, "lognormal"), (0.7, "lognormal")]
)
def test_a_distribution_has_the_mean_and_the_variation_asked_for(cv: float, kind: str) -> None:
    drawn = _ms(durations("load", 250, cv, kind), 200_000)
    assert drawn.mean() == pytest.approx(250, rel=0.01)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.02)
    assert (drawn > 0).all()


def test_exponential_times_have_a_variation_of_one_and_constant_ones_none() -> None:
    drawn = _ms(durations("load", 250, kind="exponential"), 200_000)
    assert drawn.mean() == pytest.approx(250, rel=0.01)
    assert drawn.std() == pytest.approx(250, rel=0.01)
    assert set(_ms(durations("load", 250), 3_000)) == {250}
    assert durations("load", 250, 0.0, "gamma") == durations("load", 250)
    assert durations("load", 250, 0.2) == durations("load", 250, 0.2, "gamma")


@given(
    st.floats(0.01, 1e5), st.floats(0, 100), st.sampled_from([0.5, 7, 100]), st.integers(0, 1000)
)
def test_rounding_goes_up_to_the_grid_and_less_than_one_step_of_it(
    mean: float, cv: float, grid: float, seed: int
) -> None:
    exact = _ms(durations("load", mean, cv), 50, seed)
    rounded = _ms(durations("load", mean, cv, None, grid), 50, seed)
    slack = 1e-9 * np.maximum(grid, rounded) + 1e-6
    assert (rounded >= exact - slack).all()
    assert (rounded < exact + grid + slack).all()
    np.testing.assert_allclose(rounded / grid, np.rint(rounded / grid), rtol=1e-9, atol=1e-5)


def test_times_on_the_grid_stay_though_a_float_is_not_exact() -> None:
    assert set(_ms(durations("load", 0.3, resolution_ms=0.1), 10)) == {0.3}
    assert set(_ms(durations("load", 700, resolution_ms=100), 10)) == {700}
    assert set(_ms(durations("load", 3e10, resolution_ms=3), 10)) == {3e10}


def test_a_time_far_below_the_grid_is_rounded_up_to_it() -> None:
    assert set(_ms(durations("load", 1e-6, resolution_ms=1000), 10)) == {1000}


def test_measured_times_come_in_turn_or_at_random() -> None:
    measured = [30.0, 10.0, 20.0]
    cycled = durations("load", measured)
    assert cycled.mean_ms == 20
    assert cycled.cv == pytest.approx(np.std(measured) / 20)
    np.testing.assert_array_equal(_ms(cycled, 3_000), measured * 1_000)
    assert durations("load", np.array(measured)) == cycled
    resampled = _ms(durations("load", measured, kind="resample"), 30_000)
    assert set(resampled) == set(measured)
    assert resampled.mean() == pytest.approx(20, rel=0.01)
    assert not np.array_equal(resampled[:300], measured * 100)


def test_a_file_of_times(tmp_path: Path) -> None:
    path = tmp_path / "times.txt"
    path.write_text("# measured on Monday\n12.5\n\n7, 8,9   # a row of a table\n1e3\n")
    assert read_times(path) == [12.5, 7, 8, 9, 1000]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("12\n13 ms\n", "line 2: 'ms' is not a number"),
        ("# none\n", "holds no times"),
        ("", "no times"),
    ],
)
def test_a_file_of_anything_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "times.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        read_times(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.txt", tmp_path, tmp_path / "binary"):
        with pytest.raises(UsageError, match=f"cannot read the times in {path}"):
            read_times(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("2000",), "load_ms is '2000', not milliseconds; give a number"),
        ((b"2000",), "load_ms is b'2000', not milliseconds; give a number"),
        ((0.0,), "load_ms=0"),
        ((-5.0,), "load_ms=-5"),
        ((float("nan"),), "load_ms=nan"),
        ((float("inf"),), "load_ms=inf"),
        ((100.0, -0.1), "load_cv=-0.1"),
        ((100.0, float("nan")), "load_cv=nan"),
        ((100.0, 0.1, "normal"), "load_dist='normal' is not one of constant, gamma"),
        ((100.0, 0.1, "cycle"), "load_dist='cycle' needs measured times"),
        ((100.0, None, "lognormal"), "needs load_cv"),
        ((100.0, 0.5, "exponential"), "load_cv=0.5 contradicts"),
        ((100.0, 0.5, "constant"), "load_cv=0.5 contradicts"),
        (([100.0, 200.0], 0.5), "load_cv=0.5 contradicts measured"),
        (([100.0, 200.0], None, "gamma"), "load_dist='gamma' contradicts measured"),
        (([100.0, -1.0],), r"load_ms\[1\]=-1"),
        (([100.0, float("nan")],), r"load_ms\[1\]=nan"),
        (([0.0, 0.0],), "none of the 2 times in load_ms is above 0"),
        (([],), "none of the 0 times in load_ms is above 0"),
    ],
)
def test_bad_arguments_are_refused_with_their_values(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        durations("load", *arguments)
