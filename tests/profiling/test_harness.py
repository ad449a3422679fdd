"""The harness that runs samples and measures their stages."""

from typing import Any

import pytest

from precache.errors import FetchError, Hole, SampleError
from precache_workers.profiling.harness import LEAST, SampleRun, hole_reason, run_samples
from precache_workers.sources.base import Sample
from precache_workers.sources.fetching import FetchedSamples


def samples_of(*pairs: tuple[str, Sample | FetchError | SampleError]) -> FetchedSamples:
    yield from pairs


def test_a_sample_that_fails_is_an_outcome_and_keeps_the_time_it_took() -> None:
    def fail(run: SampleRun, sample: Sample) -> None:
        run.time("ops", lambda: sum(range(10_000)))
        run.time("ops", lambda: 1 / 0)

    good = Sample({"image": b"12345"})
    samples = samples_of(("a", good), ("b", FetchError("gone")), ("c", good))
    (first, why), (second, gone), (third, barred) = run_samples(
        samples, fail, barred={"c": Hole("killed its worker", "it kills the worker")}
    )
    assert isinstance(why, ZeroDivisionError)
    assert hole_reason(why) == "ZeroDivisionError: division by zero"
    assert why.__traceback__ is None
    assert first.times["ops"].wall > 0
    assert (first.nbytes, second.nbytes, third.nbytes) == (5, 0, 0)
    assert isinstance(gone, FetchError)
    assert isinstance(barred, SampleError)
    assert hole_reason(barred) == "it kills the worker"
    assert list(third.times) == ["fetch"]


def test_the_first_sample_is_not_measured_before_its_recipes_ran() -> None:
    """On a copy of it, as variants keep what ops made of the same object; the first may fail."""
    ran, measured = list[Sample](), list[Sample]()

    def fail(sample: Sample, key: str) -> None:
        ran.append(sample)
        raise ValueError("said again when it is measured")

    samples = samples_of(*((key, Sample({"image": key.encode()})) for key in "abc"))
    warm_up: Any = {"image": fail}
    list(run_samples(samples, lambda run, sample: measured.append(sample), warm_up=warm_up))
    assert len(measured) == 3
    assert ran == measured[:1]
    assert ran[0] is not measured[0]


@pytest.mark.parametrize(("seconds", "count"), [(0.0, LEAST), (60.0, LEAST + 4)])
def test_no_sample_is_begun_after_the_time(seconds: float, count: int) -> None:
    samples = samples_of(*((str(n), Sample({"image": b""})) for n in range(LEAST + 4)))
    runs = run_samples(samples, lambda run, sample: run.key, seconds=seconds)
    assert [key for _, key in runs] == [str(n) for n in range(count)]
