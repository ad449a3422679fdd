"""From measured samples to answers, as text and as a page."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.cli.calls import to_json
from precache.runtime.spread import Spread
from precache.units import in_ms, size
from precache_workers.doctor.page import render_doctor_report, simulate_without_cache
from precache_workers.doctor.report import (
    CodecFigures,
    DoctorReport,
    Host,
    Stage,
    Throughput,
    predict_build,
)
from precache_workers.profiling.estimate import RowCost, UnitTimes
from precache_workers.shards.timing import TimeCost
from tests.support.html_page import stands_alone

SAMPLES = 4
NO_BUILD: Any = None
SLOW = CodecFigures("image", 80_000, 150_000, 0.4e-3, 15_000, 9000)
RAW = CodecFigures("raw", 150_020, 150_000, 0.1e-3, 90_000, 10)


def times(name: str, *ms: float) -> Stage:
    """A stage that took so many milliseconds of CPU, and ten times as much on the clock."""
    return Stage.of(name, [TimeCost(cpu / 100, cpu / 1e3) for cpu in ms])


DECODE, RESIZE = times("decode", 1, 1, 1, 5), times("resize", 1, 1, 1, 1)


def unit_times(row_ms: float = 3.9) -> UnitTimes:
    """A tenth of a millisecond for a sample, and so much for a row."""
    row = RowCost(TimeCost(row_ms / 1e3, row_ms / 1e3), 8e4)
    return UnitTimes(TimeCost(1e-4, 1e-4), 1e5, {"image": row}, RowCost(), 128, ())


def stages(*ops: Stage, samples: int = SAMPLES) -> list[Stage]:
    """Stages of which fetching takes 0.1 ms, and encoding 0.4."""
    return [times("fetch", *[0.1] * samples), *ops, times("encode", *[0.4] * samples)]


def ask(
    rate: float = 1000, cores: int = 4, row_ms: float = 3.9, shard: int = 100, **changes: Any
) -> DoctorReport:
    """Four samples of a thousand: 0.1 ms of fetching, 2 of decoding, 1 of resizing, 0.4 of zstd.

    A build takes so much for a row; `shard` rows make a shard.
    """
    storage = [
        Throughput(depth=depth, requests=100, requests_per_s=rate, bytes_per_s=1e5 * rate,
                   median_ms=median, p95_ms=p95)
        for depth, rate, median, p95 in ((1, 300, 3, 5), (16, 2000, 5, 9))
    ]  # fmt: skip
    found = DoctorReport(
        source="photos", samples=1000, complete=True, source_bytes=100e6, listing_seconds=0.5,
        keys=["a", "b", "c", "d"], nbytes=[100_000] * SAMPLES, failures=[], misfits=[], rate=rate,
        cores=cores, build=NO_BUILD, stages=stages(DECODE, RESIZE), random="",
        codecs=[CodecFigures("image", 80_000, 150_000, 0.4e-3, 15_000, 120), RAW], storage=storage,
        host=Host(2, 16 << 30, 8 << 30, 0.1, 0.5), seconds=12.0,
    )  # fmt: skip
    found = replace(found, **changes)
    listed = {"listing": found.listing_seconds, "start": 1.5}
    times = unit_times(row_ms)
    build = predict_build(found.samples, shard, times, found.cores, found.storage, **listed)
    return replace(found, build=build)


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

Reading whole files of the source at random, dropped from memory before; I/O wait 10%
at a time  requests/s  MB/s  median ms  p95
1                 300    30          3    5
16              2,000   200          5    9

This machine: 2 cores, 17.2 GB memory, 8.59 GB free."""
"""Of `ask`. Cores come of means: 0.1 + 2 + 1 ms a sample, though the median takes 2.1."""


def test_the_text_is_all_that_follows_from_what_was_measured() -> None:
    assert str(ask(rate=2000)) == TEXT


@pytest.mark.parametrize(
    ("changes", "cores", "texts"),
    [
        ({"host": Host(2, 16 << 30, 8 << 30, None, 11.0), "complete": False, "storage": []}, 4,
         ["at least 1,000 samples", "Listing ran out of time", "load 11.0 on 2 cores"]),
        ({"failures": [(f"{n}.jpg", "no image") for n in range(8)]}, 4,
         ["8 of 12; about 667 of all", "broken: 4.jpg: no image\n… and 3 more"]),
        ({"misfits": [("b", "its row is wide")] * 2}, 4,
         ["add a resize and a crop", "other shape: b: its row is wide",
          "other shapes     2 of 4; a build would store photos in their own shapes, and other"]),
        ({"random": "resize"}, 4,
         ["the result of resize; resize is random, and a store keeps its draws"]),
        ({"stages": stages(times("decode", 1, 1, 1, 50), RESIZE)}, 4,
         ["Slowest samples\nkey   bytes", "\nd    100 KB  52.4      15.4  decode"]),
        ({"samples": 100_000}, 1000,
         ["52 s on 1,000 cores (2 s to list and start), limited by reading the source",
          "1,000 cores would load 2,000/s, waiting for the source"]),
        ({"codecs": [SLOW, RAW]}, 4,
         ["need 9 cores, more work per epoch than without",
          "nothing with codec image; with raw a store would need 0.01 cores"]),
        ({"codecs": [SLOW]}, 4, ["nothing: no store would be cheaper to read than the files"]),
    ],
)  # fmt: skip
def test_the_text_says_what_is_special(changes: Any, cores: int, texts: list[str]) -> None:
    told = str(ask(cores=cores, **changes))
    assert [text for text in texts if text not in told] == []


def test_a_dataset_gives_each_core_one_sample_at_a_time() -> None:
    fetch, *others = stages(DECODE, RESIZE)
    waits = replace(fetch, ms=Spread.of([300.0] * SAMPLES))
    slow = ask(storage=[], stages=[waits, *others], cores=2)
    assert slow.source_per_s == pytest.approx(2 / 0.3)
    assert slow.samples_per_s_without_cache == pytest.approx(2 / 0.3)
    times = replace(unit_times(), fetch=TimeCost(0.3, 1e-4))
    build = predict_build(1000, 100, times, 2, [], listing=0.5, start=1.5)
    assert build.seconds == pytest.approx(152, rel=0.02)
    assert build.limited_by == "fetch"


def test_a_few_rows_of_other_shapes_are_holes_and_no_obstacle() -> None:
    misfits = [("a", "another shape")]
    assert ask().worthwhile
    assert not ask(misfits=misfits).worthwhile
    assert not ask(codecs=[SLOW]).worthwhile
    samples = 100 * SAMPLES
    each = {"keys": [str(n) for n in range(samples)], "nbytes": [1] * samples}
    decode = stages(times("decode", *[2] * samples), samples=samples)
    assert ask(**each, misfits=misfits, stages=decode).worthwhile


@settings(max_examples=30)
@given(
    st.floats(1, 1e6), st.integers(1, 1000), st.floats(1e-6, 1), st.floats(1e-6, 1e3),
    st.integers(SAMPLES, 10**9),
)  # fmt: skip
def test_whatever_is_measured_has_an_answer(
    rate: float, cores: int, build_cpu: float, cpu_ms: float, samples: int
) -> None:
    codec = CodecFigures("raw", 100, 90, 1e-6, 10, cpu_ms)
    shard = 100 + samples // 100  # so that there are few
    found = ask(rate, cores, 1e3 * build_cpu, shard, codecs=[codec], samples=samples)
    plain = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert plain["build"]["seconds"] >= plain["build"]["cpu_seconds"] / cores * (1 - 1e-9)
    assert plain["samples_per_s_without_cache"] > 0
    assert str(found)


# --- the page ------------------------------------------------------------------------------------


HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">.jpg"
FOUND = ask(rate=2000)
NOTHING = ask(
    source=HOSTILE,
    keys=[HOSTILE, "ö/中\udcff.jpg", "c", "d"],
    failures=[(HOSTILE, HOSTILE)],
    misfits=[(HOSTILE, HOSTILE)],
    stages=stages(times("</text><script>alert()</script>", 1, 1, 1, 5), times("none", *4 * [0])),
    storage=[],
)


def test_a_page_has_the_figures_of_what_was_found() -> None:
    page = render_doctor_report(FOUND)
    decode = FOUND.stages[1].ms
    text = f"median {in_ms(decode.median / 1e3)}, mean {in_ms(decode.mean / 1e3)}"
    for wanted in (
        f'<strong>decode</strong> <span class="soft">{text}',
        *(f'<td class="text">{s.key}</td><td>{size(s.nbytes)}</td>' for s in FOUND.slowest),
        *(f"{at.depth}</td><td>{at.requests_per_s:,.0f}</td>" for at in FOUND.storage),
        "<span>without a cache</span> <strong>49%</strong>",
        "<span>cached, image</span> <strong>0%</strong>",
    ):
        assert wanted in page
    stands_alone(page, scripts=2)
    assert "; with a cache, 0%." in page
    assert "; with a cache" not in render_doctor_report(NOTHING)


def test_the_loops_that_are_modelled_stall_as_their_times_say() -> None:
    slow = ask(rate=20_000)
    before, after = simulate_without_cache(slow), slow.simulate_reading(slow.codecs[0])
    each = sum(stage.ms.mean for stage in slow.stages[:-1])
    assert before.load.mean() == pytest.approx(64 * each, rel=0.05)
    assert before.stall_share == pytest.approx(1 - 4e3 / each / 20_000, abs=0.05)
    wide = simulate_without_cache(ask(rate=20_000, cores=400))
    assert wide.stall_share == pytest.approx(0.9, abs=0.02), "the source delivers 2,000/s"
    assert after.stall_share < 0.01
    for rate, stall in ((1e-9, 0.0), (1e12, 1.0)):
        for cores in (1, 20_000):
            found = ask(rate, cores)
            for loop in (simulate_without_cache(found), found.simulate_reading(found.codecs[0])):
                assert loop.stall_share == pytest.approx(stall, abs=0.01)
