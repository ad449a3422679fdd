"""The arithmetic from measured samples to answers."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache_workers.doctor.report import (
    DoctorReport,
    best_cut,
    doctor_report,
    relative_error,
    source_rate,
    spread_ms,
)
from precache_workers.profiling.measurements import (
    CodecTimes,
    CutTimes,
    Host,
    SourceMeasurements,
    StepTimes,
    Throughput,
)

SAMPLES = 4


def times(name: str, *ms: float) -> StepTimes:
    """A stage that took so many milliseconds of CPU, and ten times as much on the clock."""
    cpu = np.array(ms) / 1e3
    return StepTimes(name, cpu, cpu * 10)


def cut(nbytes: float, decode_ms: float, alike: bool = True, frozen: bool = False) -> CutTimes:
    return CutTimes(
        np.full(SAMPLES, nbytes),
        np.full(SAMPLES, 0.5e-3),
        np.full(SAMPLES, decode_ms / 1e3),
        alike,
        frozen,
    )


def measured(**changes: Any) -> SourceMeasurements:
    """Four samples of a thousand: 0.1 ms of fetching, 2 of decoding, 1 of resizing, 0.4 of zstd."""
    found = SourceMeasurements(
        source="photos",
        samples=1000,
        complete=True,
        source_bytes=100e6,
        listing_seconds=0.5,
        start_seconds=1.5,
        keys=["a", "b", "c", "d"],
        nbytes=[100_000] * SAMPLES,
        failures=[],
        misfits=[],
        fetch=times("fetch", 0.1, 0.1, 0.1, 0.1),
        ops=[times("decode", 1, 1, 1, 5), times("resize", 1, 1, 1, 1)],
        encode=times("encode", 0.4, 0.4, 0.4, 0.4),
        cuts=[cut(300_000, 0.6, alike=False), cut(90_000, 0.2)],
        codecs=[
            CodecTimes("image", 80_000, 150_000, 0.4e-3, 15_000, 120),
            CodecTimes("raw", 150_020, 150_000, 0.1e-3, 90_000, 10),
        ],
        build_cpu=4e-3,
        storage=[
            Throughput(
                pattern="sequential",
                depth=1,
                requests=100,
                requests_per_s=300,
                bytes_per_s=3e7,
                median_ms=3,
                p95_ms=5,
            ),
            Throughput(
                pattern="random",
                depth=16,
                requests=100,
                requests_per_s=2000,
                bytes_per_s=2e8,
                median_ms=5,
                p95_ms=9,
            ),
        ],
        host=Host(2, 16 << 30, 8 << 30, 0.1, 0.5),
    )
    return dataclasses.replace(found, **changes)


def ask(found: SourceMeasurements, rate: float = 1000, cores: int = 4) -> DoctorReport:
    return doctor_report(found, rate, cores, 12.0)


def test_cores_without_a_cache_come_of_means() -> None:
    """0.1 + 2 + 1 ms a sample, though the median sample takes 2.1."""
    found = ask(measured(), rate=2000)
    assert found.cores_without_cache == pytest.approx(2000 * 3.1e-3)
    assert found.codecs[0].cores_at_rate == pytest.approx(2000 * 120e-6)
    assert found.codecs[0].bytes_per_s_at_rate == pytest.approx(2000 * 80_000)


def test_stages_keep_the_time_of_each_sample() -> None:
    fetch, decode, *_ = ask(measured()).stages
    assert decode.each_ms == pytest.approx([1, 1, 1, 5])
    assert fetch.each_ms == pytest.approx([1] * 4), "what was waited, ten times its CPU time"


def test_a_build_takes_its_cpu_time_on_all_cores() -> None:
    build = ask(measured(), cores=4).build
    assert build.cpu_seconds == pytest.approx(4.0)
    assert (build.seconds, build.before_seconds) == (pytest.approx(3.0), 2.0)
    assert build.limited_by == "cpu"
    assert build.samples_per_core_second == pytest.approx(250)


def test_a_build_is_no_faster_than_its_source() -> None:
    build = ask(measured(), cores=1000).build
    assert (build.limited_by, build.seconds) == ("fetch", pytest.approx(2.5))


def test_a_dataset_gives_each_core_one_sample_at_a_time() -> None:
    waits = dataclasses.replace(measured().fetch, wall=np.full(SAMPLES, 0.3))
    slow = measured(storage=[], fetch=waits)
    assert source_rate(slow, 2) == pytest.approx(2 / 0.3)
    assert ask(slow, cores=2).build.seconds == pytest.approx(152)
    assert ask(slow, cores=2).build.limited_by == "fetch"
    assert ask(slow, cores=2).cuts[0].samples_per_s == pytest.approx(2 / 0.3)


def test_codecs_differ_in_the_build_by_their_encoding() -> None:
    image, raw = ask(measured()).codecs
    assert image.build_cpu_seconds - raw.build_cpu_seconds == pytest.approx(0.3)
    assert raw.bytes_total == pytest.approx(150.02e6)
    assert image.ratio == pytest.approx(150 / 80)


def test_cuts_move_work_from_every_epoch_to_once() -> None:
    fetch, decode, resize = ask(measured(), cores=4).cuts
    assert [each.after for each in (fetch, decode, resize)] == ["fetch", "decode", "resize"]
    assert [each.storable for each in (fetch, decode, resize)] == [True, False, True]
    assert fetch.online_cpu_ms == pytest.approx(3.1)
    assert decode.online_cpu_ms == pytest.approx(0.6 + 1)
    assert resize.online_cpu_ms == pytest.approx(0.12), "what the loader costs"
    between = 4 - 0.1 - 2 - 1 - 0.4
    assert fetch.offline_cpu_ms == 0
    assert decode.offline_cpu_ms == pytest.approx(0.1 + 2 + 0.5 + between)
    assert resize.offline_cpu_ms == pytest.approx(4)
    assert fetch.bytes_total == pytest.approx(100e6)
    assert decode.bytes_total == pytest.approx(300e6)
    assert resize.bytes_total == pytest.approx(80e6)
    assert resize.samples_per_s == pytest.approx(4 / 120e-6)


def test_without_a_cache_the_source_may_be_the_limit() -> None:
    assert ask(measured(), cores=4).cuts[0].samples_per_s == pytest.approx(4 / 3.1e-3)
    assert ask(measured(), cores=400).cuts[0].samples_per_s == pytest.approx(2000)


def test_the_cut_leaves_random_ops_to_training() -> None:
    assert ask(measured()).cut == "resize"
    frozen = measured(cuts=[cut(300_000, 0.6), cut(90_000, 0.2, frozen=True)])
    assert ask(frozen).cut == "decode"
    nowhere = [cut(300_000, 0.6, alike=False), cut(90_000, 0.2, alike=False)]
    misfits = [("a", "another shape")] * 2
    assert ask(measured(cuts=nowhere, misfits=misfits)).cut == "fetch"


def test_a_few_rows_of_other_shapes_are_holes_and_no_obstacle() -> None:
    last = measured(cuts=[cut(300_000, 0.6, alike=False), cut(90_000, 0.2, alike=False)])
    many = dataclasses.replace(
        last,
        keys=[str(n) for n in range(SAMPLES * 100)],
        nbytes=[1] * SAMPLES * 100,
        misfits=[("a", "another shape")],
        fetch=times("fetch", *[0.1] * 400),
        ops=[times("decode", *[2] * 400), times("resize", *[1] * 400)],
        encode=times("encode", *[0.4] * 400),
    )
    assert ask(many).cut == "resize"


def test_a_loader_costs_more_than_decoding_at_every_cut() -> None:
    """0.6 ms at the last where decoding takes 0.2: three times as much at the others as well."""
    codec = CodecTimes("image", 80_000, 150_000, 0.4e-3, 15_000, 600)
    _, decode, resize = ask(measured(codecs=[codec])).cuts
    assert resize.online_cpu_ms == pytest.approx(0.6)
    assert decode.online_cpu_ms == pytest.approx(3 * 0.6 + 1)


def test_of_equal_work_the_smaller_cut_is_taken() -> None:
    same = [
        dataclasses.replace(each, online_cpu_ms=1.0, storable=True) for each in ask(measured()).cuts
    ]
    assert best_cut(same) == "resize"


def test_stages_tell_how_samples_differ() -> None:
    _, decode, *_ = ask(measured()).stages
    assert (decode.cpu_ms.mean, decode.cpu_ms.median, decode.cpu_ms.max) == pytest.approx((2, 1, 5))
    assert decode.wall_ms.max == pytest.approx(50)
    assert decode.per_core_second == pytest.approx(500)
    shares = [each.share for each in ask(measured()).stages]
    assert sum(shares) == pytest.approx(1)
    assert decode.share == pytest.approx(2 / 3.5)


def test_the_slowest_sample_is_named_with_what_took_it_so_long() -> None:
    worst = ask(measured()).slowest[0]
    assert (worst.key, worst.stage) == ("d", "decode")
    assert worst.ms == pytest.approx(1 + 5 + 1 + 0.4), "fetching counts on the clock"
    assert worst.times_median == pytest.approx(7.4 / 3.4)


def test_broken_samples_count_as_measured() -> None:
    found = ask(measured(failures=[("e", "no image")]))
    assert (found.sampled, found.failed) == (5, 1)


def test_a_sample_of_all_has_no_error_and_one_of_one_has_any() -> None:
    values = np.array([1.0, 2.0, 3.0])
    assert relative_error(values, 3) == 0
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


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_a_spread_is_in_order(seconds: list[float]) -> None:
    found = spread_ms(np.array(seconds))
    slack = 1e-9 * (1 + found.max)
    assert found.median <= found.p95 + slack
    assert found.p95 <= found.max + slack
    assert found.mean <= found.max + slack


@given(
    st.floats(1, 1e6), st.integers(1, 1000), st.floats(1e-6, 1), st.floats(1e-6, 1e3),
    st.integers(SAMPLES, 10**9),
)  # fmt: skip
def test_whatever_is_measured_has_an_answer(
    rate: float, cores: int, build_cpu: float, cpu_ms: float, samples: int
) -> None:
    codec = CodecTimes("raw", 100, 90, 1e-6, 10, cpu_ms)
    found = ask(measured(build_cpu=build_cpu, codecs=[codec], samples=samples), rate, cores)
    plain = json.loads(json.dumps(dataclasses.asdict(found), allow_nan=False))
    assert plain["build"]["seconds"] >= plain["build"]["cpu_seconds"] / cores * (1 - 1e-9)
    assert found.cut in {each.after for each in found.cuts}
    assert all(each.offline_cpu_ms >= 0 and each.samples_per_s > 0 for each in found.cuts)
