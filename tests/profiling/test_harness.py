"""The harness that runs samples and measures their stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import precache
from precache.errors import FetchError, SampleError
from precache.storage.local import LocalFolder
from precache_workers.profiling.harness import (
    LEAST,
    SampleRun,
    hole_reason,
    run_samples,
)
from precache_workers.shards.samples import Job, recipes_of
from precache_workers.sources.base import Sample
from precache_workers.sources.fetching import FetchedSamples, fetch_ahead
from precache_workers.sources.folder import FolderSource
from tests.support.building import write, write_jpegs


def samples_of(*pairs: tuple[str, Sample | FetchError | SampleError]) -> FetchedSamples:
    yield from pairs


def test_each_sample_has_its_times_by_stage_and_its_result(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 3)
    job = Job(FolderSource(LocalFolder(tmp_path)), precache.Recipe.image(resize=40, crop=32))
    [recipe] = recipes_of(job).values()
    table = job.source.list(lambda count: None).table

    def row_of(run: SampleRun, sample: Sample) -> tuple[int, ...]:
        return run.time("ops", lambda: recipe(sample, run.key)).shape

    fetched = fetch_ahead(job.source, table.keys, table.sizes.tolist())
    for key, (run, shape) in zip(table.keys, run_samples(fetched, row_of), strict=True):
        assert run.key == key
        assert run.nbytes == (tmp_path / key).stat().st_size
        assert list(run.times) == ["fetch", "ops"]
        assert run.times["ops"].cpu > 0
        assert shape == (3, 32, 32)


def test_a_sample_that_fails_is_an_outcome_and_keeps_the_time_it_took() -> None:
    def fail(run: SampleRun, sample: Sample) -> None:
        run.time("ops", lambda: sum(range(10_000)))
        run.time("ops", lambda: 1 / 0)

    good = Sample({"image": b"12345"})
    samples = samples_of(("a", good), ("b", FetchError("gone")), ("c", good))
    (first, why), (second, gone), (third, barred) = run_samples(
        samples, fail, barred={"c": "it kills the worker"}
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


def test_the_first_sample_is_not_measured_before_its_recipes_ran(tmp_path: Path) -> None:
    write(tmp_path / "in/cat/none.jpg", b"none")
    write_jpegs(tmp_path / "in", 2)
    job = Job(FolderSource(LocalFolder(tmp_path / "in")), precache.Recipe.image())
    table = job.source.list(lambda count: None).table
    recipes = recipes_of(job)
    [recipe] = recipes.values()
    ran: list[Sample] = []

    class Noted:
        def __call__(self, sample: Sample, key: str) -> np.ndarray:
            ran.append(sample)
            return recipe(sample, key)

    noted = dict.fromkeys(recipes, Noted())
    measured: list[Sample] = []
    fetched = fetch_ahead(job.source, table.keys, table.sizes.tolist())
    outcomes = list(
        run_samples(
            fetched,
            lambda run, sample: measured.append(sample),
            warm_up=noted,  # type: ignore[arg-type]  # called alike
        )
    )
    assert len(outcomes) == len(measured) == 3
    assert len(ran) == 1
    assert ran[0] == measured[0]
    assert ran[0] is not measured[0], "variants keep what ops made of the same object"


@pytest.mark.parametrize(("seconds", "count"), [(0.0, LEAST), (60.0, LEAST + 4)])
def test_no_sample_is_begun_after_the_time(seconds: float, count: int) -> None:
    samples = samples_of(*((str(n), Sample({"image": b""})) for n in range(LEAST + 4)))
    runs = run_samples(samples, lambda run, sample: run.key, seconds=seconds)
    assert [key for _, key in runs] == [str(n) for n in range(count)]
