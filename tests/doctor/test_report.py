"""The arithmetic from measured samples to answers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache_workers.doctor.measurements import (
    CodecTimes,
    CutTimes,
    Host,
    SourceMeasurements,
    StepTimes,
    Throughput,
)
from precache_workers.doctor.report import DoctorReport, best_cut, doctor_report, source_rate
from precache_workers.profiling.estimate import RowCost, TimeCost, UnitTimes

SAMPLES = 4


def times(name: str, *ms: float) -> StepTimes:
    """A stage that took so many milliseconds of CPU, and ten times as much on the clock."""
    cpu = np.array(ms) / 1e3
    return StepTimes(name, cpu, cpu * 10)


DECODE, RESIZE = times("decode", 1, 1, 1, 5), times("resize", 1, 1, 1, 1)


def cut(nbytes: float, decode_ms: float, alike: bool = True, frozen: bool = False) -> CutTimes:
    return CutTimes(nbytes, 0.5e-3, decode_ms / 1e3, alike, frozen)


def unit_times(row_ms: float = 3.9) -> UnitTimes:
    """A tenth of a millisecond for a sample, and so much for a row."""
    row = RowCost(TimeCost(row_ms / 1e3, row_ms / 1e3), 8e4)
    return UnitTimes(TimeCost(1e-4, 1e-4), 1e5, {"image": row}, {}, TimeCost(), 128, ())


def stages(*ops: StepTimes, samples: int = SAMPLES) -> list[StepTimes]:
    """Stages of which fetching takes 0.1 ms, and encoding 0.4."""
    return [times("fetch", *[0.1] * samples), *ops, times("encode", *[0.4] * samples)]


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
        stages=stages(DECODE, RESIZE),
        cuts=[cut(300_000, 0.6, alike=False), cut(90_000, 0.2)],
        codecs=[
            CodecTimes("image", 80_000, 150_000, 0.4e-3, 15_000, 120),
            CodecTimes("raw", 150_020, 150_000, 0.1e-3, 90_000, 10),
        ],
        times=unit_times(),
        rows_per_shard=100,
        storage=[
            Throughput(
                depth=depth,
                requests=100,
                requests_per_s=rate,
                bytes_per_s=1e5 * rate,
                median_ms=median,
                p95_ms=p95,
            )
            for depth, rate, median, p95 in ((1, 300, 3, 5), (16, 2000, 5, 9))
        ],
        host=Host(2, 16 << 30, 8 << 30, 0.1, 0.5),
    )
    return dataclasses.replace(found, **changes)


def ask(found: SourceMeasurements, rate: float = 1000, cores: int = 4) -> DoctorReport:
    return doctor_report(found, rate, cores, 12.0)


TEXT = """\
photos: 1,000 samples, 100 MB; 4 measured in 12 s
without a cache  2,000 samples/s need 6.2 cores; 4 cores would load 1,290/s
with a cache     2,000 samples/s need 0.24 cores, 25.8 times less work per epoch
time to build    4.4 s on 4 cores (2 s to list and start); CPU time 4 s (± 56%)
store size       80 MB with codec image; 150 MB uncompressed
store rows       the result of resize
broken files     none of 4

Time by stage, CPU-ms per sample (fetch: ms spent waiting)
                  mean  median  p95  max  CPU share
fetch                1       1    1    1         3%
decode               2       1    5    5        57%
resize               1       1    1    1        29%
encode             0.4     0.4  0.4  0.4        11%
other build work   0.5

Reading a store from memory, measured on 2 cores here
                raw /     build                CPU-ms  cores at  MB/s at
        bytes  stored  CPU time  samples/s  per 1,000   2,000/s  2,000/s
image   80 MB    1.88       4 s     15,000        120      0.24      160
raw    150 MB    1.00     3.7 s     90,000         10      0.02      300

Result to store: CPU time once, and in every epoch; samples/s from CPU time
                      CPU-ms  every  cores at  samples/s,
stored after   bytes    once  epoch   2,000/s     4 cores  remark
no cache      100 MB       0    3.1      6.20       1,290
decode        300 MB     3.1   1.36      2.72       2,941  shapes differ
resize         80 MB       4   0.12      0.24      33,333  recommended

Reading whole files of the source at random; I/O wait 10%
at a time  requests/s  MB/s  median ms  p95
1                 300    30          3    5
16              2,000   200          5    9

This machine: 2 cores, 17.2 GB memory, 8.59 GB free."""
"""Of `measured`. Cores come of means: 0.1 + 2 + 1 ms a sample, though the median takes 2.1."""

SLOW = CodecTimes("image", 80_000, 150_000, 0.4e-3, 15_000, 9000)
RAW = CodecTimes("raw", 150_020, 150_000, 0.1e-3, 90_000, 10)
DEAR = [cut(300_000, 6), cut(90_000, 2)]


def test_the_text_is_all_that_follows_from_what_was_measured() -> None:
    assert str(ask(measured(), rate=2000)) == TEXT


@pytest.mark.parametrize(
    ("changes", "cores", "texts"),
    [
        (
            {"host": Host(2, 16 << 30, 8 << 30, None, 11.0), "complete": False, "storage": []}, 4,
            ["at least 1,000 samples", "Listing ran out of time", "load 11.0 on 2 cores"],
        ),
        (
            {"failures": [(f"{n}.jpg", "no image") for n in range(8)]}, 4,
            ["8 of 12; about 667 of all", "broken: 4.jpg: no image\n… and 3 more"],
        ),
        (
            {"cuts": [cut(300_000, 0.6, alike=False), cut(90_000, 0.2, alike=False)],
             "misfits": [("b", "its row is wide")] * 2}, 4,
            ["add a resize and a crop", "other shape: b: its row is wide",
             "other shapes     2 of 4; a build would store photos in their own shapes, and other"],
        ),
        (
            {"cuts": [cut(300_000, 0.6), cut(90_000, 0.2, frozen=True)]}, 4,
            ["the result of decode; resize is random, and a store would keep one draw of it"],
        ),
        (
            {"stages": stages(times("decode", 1, 1, 1, 50), RESIZE)}, 4,
            ["Slowest samples\nkey   bytes", "\nd    100 KB  52.4      15.4  decode"],
        ),
        (
            {"samples": 100_000}, 1000,
            ["52 s on 1,000 cores (2 s to list and start), limited by reading the source",
             "1,000 cores would load 2,000/s, waiting for the source"],
        ),
        (
            {"codecs": [SLOW, RAW], "cuts": DEAR}, 4,
            ["need 9 cores, more work per epoch than without",
             "nothing with codec image; with raw a store would need 0.01 cores"],
        ),
        (
            {"codecs": [SLOW], "cuts": DEAR}, 4,
            ["nothing: no store would be cheaper to read than the files"],
        ),
    ],
)  # fmt: skip
def test_the_text_says_what_is_special(changes: Any, cores: int, texts: list[str]) -> None:
    told = str(ask(measured(**changes), cores=cores))
    for text in texts:
        assert text in told


def test_a_dataset_gives_each_core_one_sample_at_a_time() -> None:
    fetch, *others = measured().stages
    waits = dataclasses.replace(fetch, wall=np.full(SAMPLES, 0.3))
    times = dataclasses.replace(unit_times(), fetch=TimeCost(0.3, 1e-4))
    slow = measured(storage=[], stages=[waits, *others], times=times)
    assert source_rate(slow, 2) == pytest.approx(2 / 0.3)
    assert ask(slow, cores=2).build.seconds == pytest.approx(152, rel=0.02)
    assert ask(slow, cores=2).build.limited_by == "fetch"
    assert ask(slow, cores=2).cuts[0].samples_per_s == pytest.approx(2 / 0.3)


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
        stages=stages(times("decode", *[2] * 400), times("resize", *[1] * 400), samples=400),
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


@given(
    st.floats(1, 1e6), st.integers(1, 1000), st.floats(1e-6, 1), st.floats(1e-6, 1e3),
    st.integers(SAMPLES, 10**9),
)  # fmt: skip
def test_whatever_is_measured_has_an_answer(
    rate: float, cores: int, build_cpu: float, cpu_ms: float, samples: int
) -> None:
    codec = CodecTimes("raw", 100, 90, 1e-6, 10, cpu_ms)
    times = unit_times(1e3 * build_cpu)
    shard = 100 + samples // 100  # so that there are few
    changed = measured(times=times, codecs=[codec], samples=samples, rows_per_shard=shard)
    found = ask(changed, rate, cores)
    plain = json.loads(json.dumps(dataclasses.asdict(found), allow_nan=False))
    assert plain["build"]["seconds"] >= plain["build"]["cpu_seconds"] / cores * (1 - 1e-9)
    assert found.cut in {each.after for each in found.cuts}
    assert all(each.offline_cpu_ms >= 0 and each.samples_per_s > 0 for each in found.cuts)
