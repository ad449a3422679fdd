"""What a few measured samples say of caching a whole source. Pure: figures in, answers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from precache_workers.profiling.measured import (
    CodecTimes,
    Host,
    SourceMeasurements,
    StepTimes,
    Throughput,
    Times,
)

FEW = 0.01
"""Share of samples whose rows may have other shapes: a build lets as many fail."""
NEAR = 0.1
"""Share by which work may differ from the least and count as the same."""
SLOWEST = 5
"""Samples that are named."""
CONFIDENCE = 1.96
"""Standard errors on either side of a mean, within which the true one lies in 95% of samples."""


@dataclass(frozen=True)
class Spread:
    """Of one quantity over the samples: milliseconds."""

    mean: float
    median: float
    p95: float
    max: float


@dataclass(frozen=True)
class Stage:
    """One stage of a build.

    Attributes
    ----------
    share
        Of the CPU time of all stages.
    per_core_second
        Samples that a core makes in a second of this stage alone: 1 / mean.
    each_ms
        Of each sample, in the same order for all stages: CPU time; of ``fetch`` the time waited.
    """

    name: str
    cpu_ms: Spread
    wall_ms: Spread
    share: float
    per_core_second: float
    each_ms: Sequence[float]


@dataclass(frozen=True)
class SlowestSample:
    """A sample that took long.

    Attributes
    ----------
    ms
        Waiting for it, and the CPU time of its ops and its encoding.
    times_median
        Over that of the median sample.
    stage
        Which took most of it.
    """

    key: str
    nbytes: int
    ms: float
    times_median: float
    stage: str


@dataclass(frozen=True)
class CodecFigures:
    """What one codec would take and give.

    Attributes
    ----------
    ratio
        Raw over stored bytes.
    build_cpu_seconds
        Of a build of all samples.
    cores_at_rate, bytes_per_s_at_rate
        To feed a device at the asked rate: cores, and stored bytes that memory or disk must give.
    """

    codec: str
    bytes_per_sample: float
    bytes_total: float
    ratio: float
    encode_cpu_ms: float
    build_cpu_seconds: float
    samples_per_s: float
    cpu_ms_per_1000: float
    cores_at_rate: float
    bytes_per_s_at_rate: float


@dataclass(frozen=True)
class CutPoint:
    """Work up to here is done once, the rest in every epoch.

    Attributes
    ----------
    after
        The stage after which samples are stored; ``fetch``: the files as they are, no cache.
    storable
        Whether a store can hold what is there: rows of one shape, or the files.
    offline_cpu_ms, online_cpu_ms
        Of a sample: once; and in each epoch, reading and decompressing included.
    samples_per_s
        With all the cores asked for, and no faster than the source gives files where these are
        what is read.
    """

    after: str
    storable: bool
    frozen: bool
    bytes_per_sample: float
    bytes_total: float
    offline_cpu_ms: float
    online_cpu_ms: float
    cores_at_rate: float
    samples_per_s: float


@dataclass(frozen=True)
class BuildForecast:
    """Of a build of all samples by the recipe's own codec.

    Attributes
    ----------
    cpu_seconds
        What `BuildResult.cpu_seconds` should say.
    error
        Half the width of its 95% confidence interval over itself, as far as samples differ.
    seconds
        On the cores asked for, starting and listing not counted.
    limited_by
        ``cpu``, or ``fetch`` where one machine cannot read the source fast enough.
    """

    cpu_seconds: float
    error: float
    seconds: float
    limited_by: str
    samples_per_core_second: float


@dataclass(frozen=True)
class DoctorReport:
    """What `precache.doctor` answers; `dataclasses.asdict` of it is plain data.

    Attributes
    ----------
    sampled
        Samples measured, broken ones included.
    failed, failures
        How many of these cannot be fetched or decoded; (key, why) of each.
    misfits
        (key, why) of those whose rows have other shapes than most: a build would leave holes.
    rate
        Samples a second that the device takes.
    cores
        That a build, and training, would have.
    cores_without_cache
        To feed that rate from the source: fetch and ops in every epoch.
    cut
        After which stage to store: the least work in each epoch among what can be stored and
        leaves random ops to training.
    seconds
        That measuring took.
    """

    source: str
    samples: int
    complete: bool
    source_bytes: float
    listing_seconds: float
    sampled: int
    failed: int
    failures: Sequence[tuple[str, str]]
    misfits: Sequence[tuple[str, str]]
    rate: float
    cores: int
    cores_without_cache: float
    cut: str
    build: BuildForecast
    stages: Sequence[Stage]
    slowest: Sequence[SlowestSample]
    codecs: Sequence[CodecFigures]
    cuts: Sequence[CutPoint]
    storage: Sequence[Throughput]
    host: Host
    seconds: float

    def html(self, path: str | Path) -> None:
        """Write a page: one file that needs no network; ``pip install "precache[report]"``.

        Raises
        ------
        UsageError
            If matplotlib is not installed.
        StorageError
            If the file cannot be written.
        """
        from precache.html.charts import need_matplotlib
        from precache.html.pages import save
        from precache_workers.doctor.page import render_doctor_report

        need_matplotlib(path)
        save(render_doctor_report(self), path)

    def png(self, path: str | Path) -> None:
        """Write the charts as a PNG, with the same errors as `html`."""
        from precache_workers.doctor.page import draw_doctor_report

        draw_doctor_report(self, path)


def prognosis(found: SourceMeasurements, rate: float, cores: int, seconds: float) -> DoctorReport:
    """Answers from what was measured.

    Throughput comes from means: a core that works through all samples takes the sum of their
    times. Medians and percentiles tell how they differ.

    Parameters
    ----------
    rate
        Samples a second of the device to be fed.
    cores
        Of the build, and of training.
    seconds
        That measuring took.
    """
    cuts = _cuts(found, rate, cores)
    return DoctorReport(
        found.source,
        found.samples,
        found.complete,
        found.source_bytes,
        found.listing_seconds,
        len(found.keys) + len(found.failures),
        len(found.failures),
        found.failures,
        found.misfits,
        rate,
        cores,
        cuts[0].cores_at_rate,
        best_cut(cuts),
        _build(found, cores),
        _stages(found),
        _slowest(found),
        [_codec(found, each, rate) for each in found.codecs],
        cuts,
        found.storage,
        found.host,
        seconds,
    )


def spread_ms(seconds: Times) -> Spread:
    """Mean, median, 95th percentile and maximum of seconds, in milliseconds."""
    ms = np.asarray(seconds) * 1e3
    p50, p95 = np.percentile(ms, [50, 95]).tolist()
    return Spread(float(ms.mean()), p50, p95, float(ms.max()))


def relative_error(values: Times, population: int) -> float:
    """Half the 95% confidence interval of a mean over the mean, for a sample without replacement.

    Source: Cochran, Sampling Techniques, section 2.5, finite population correction included.
    """
    count, mean = len(values), float(np.mean(values))
    if count < 2 or mean == 0:
        return 0.0 if count >= population or mean == 0 else math.inf
    left = max(0.0, 1 - count / population)
    return CONFIDENCE * float(np.std(values, ddof=1)) / mean * math.sqrt(left / count)


def best_cut(cuts: Sequence[CutPoint]) -> str:
    """The stage after which to store: the smallest of those with nearly the least work online."""
    able = [cut for cut in cuts if cut.storable and not cut.frozen]
    least = min(cut.online_cpu_ms for cut in able)
    near = [cut for cut in able if cut.online_cpu_ms <= least * (1 + NEAR)]
    return min(near, key=lambda cut: cut.bytes_per_sample).after


def _all_stages(found: SourceMeasurements) -> list[StepTimes]:
    return [found.fetch, *found.ops, found.encode]


def _stages(found: SourceMeasurements) -> list[Stage]:
    stages = _all_stages(found)
    total = sum(_mean(each.cpu) for each in stages)
    return [
        Stage(
            each.name,
            spread_ms(each.cpu),
            spread_ms(each.wall),
            _mean(each.cpu) / max(total, 1e-12),
            1 / max(_mean(each.cpu), 1e-9),
            ((each.wall if each is found.fetch else each.cpu) * 1e3).tolist(),
        )
        for each in stages
    ]


def _slowest(found: SourceMeasurements) -> list[SlowestSample]:
    parts = np.stack([found.fetch.wall, *(each.cpu for each in (*found.ops, found.encode))])
    names = [each.name for each in _all_stages(found)]
    total = parts.sum(axis=0)
    median = max(float(np.median(total)), 1e-9)
    return [
        SlowestSample(
            found.keys[at],
            found.nbytes[at],
            float(total[at]) * 1e3,
            float(total[at]) / median,
            names[int(parts[:, at].argmax())],
        )
        for at in np.argsort(-total, kind="stable")[:SLOWEST].tolist()
    ]


def _codec(found: SourceMeasurements, codec: CodecTimes, rate: float) -> CodecFigures:
    own = found.codecs[0]
    build_cpu = found.build_cpu + codec.encode_cpu - own.encode_cpu
    return CodecFigures(
        codec.name,
        codec.stored,
        codec.stored * found.samples,
        codec.raw / max(codec.stored, 1e-9),
        codec.encode_cpu * 1e3,
        build_cpu * found.samples,
        codec.samples_per_s,
        codec.cpu_ms_per_1000,
        rate * codec.cpu_ms_per_1000 / 1e6,
        rate * codec.stored,
    )


def source_rate(found: SourceMeasurements, cores: int) -> float:
    """Samples a second that the source gives at best.

    Where only single fetches were timed, of a `Dataset`: to as many processes as there are cores,
    each of which waits for one at a time.
    """
    if found.storage:
        return max(each.requests_per_s for each in found.storage)
    return cores / max(_mean(found.fetch.wall), 1e-9)


def _mean(values: Times) -> float:
    return float(values.mean())


def _cuts(found: SourceMeasurements, rate: float, cores: int) -> list[CutPoint]:
    """After the fetch, and after each op; the last is the store of the recipe."""
    fetch = _mean(found.fetch.cpu)
    ops = [_mean(each.cpu) for each in found.ops]
    own = found.codecs[0]
    last = len(ops) - 1
    # A loader does more than decode: at the last cut it is known how much.
    beyond = max(1.0, own.cpu_ms_per_1000 / 1e6 / max(_mean(found.cuts[-1].decode_cpu), 1e-12))
    few = len(found.misfits) <= FEW * len(found.keys)
    encode = _mean(found.encode.cpu)
    # What a build does between its stages is the same wherever it stops.
    between = max(0.0, found.build_cpu - fetch - sum(ops) - encode)
    cuts = [("fetch", True, False, found.source_bytes / found.samples, 0.0, fetch + sum(ops))]
    for at, (step, cut) in enumerate(zip(found.ops, found.cuts, strict=True)):
        stored = own.stored if at == last else _mean(cut.nbytes)
        read = own.cpu_ms_per_1000 / 1e6 if at == last else _mean(cut.decode_cpu) * beyond
        kept = encode if at == last else _mean(cut.encode_cpu)
        done, left = fetch + sum(ops[: at + 1]) + kept + between, read + sum(ops[at + 1 :])
        storable = cut.one_shape or (at == last and few)
        cuts.append((step.name, storable, cut.frozen, stored, done, left))
    return [
        CutPoint(
            after,
            storable,
            frozen,
            stored,
            stored * found.samples,
            done * 1e3,
            left * 1e3,
            rate * left,
            min(cores / max(left, 1e-12), source_rate(found, cores) if at == 0 else math.inf),
        )
        for at, (after, storable, frozen, stored, done, left) in enumerate(cuts)
    ]


def _build(found: SourceMeasurements, cores: int) -> BuildForecast:
    whole = sum(each.cpu for each in _all_stages(found))
    cpu_seconds = found.build_cpu * found.samples
    by_cpu, by_fetch = cpu_seconds / cores, found.samples / source_rate(found, cores)
    return BuildForecast(
        cpu_seconds,
        relative_error(np.asarray(whole), found.samples),
        max(by_cpu, by_fetch),
        "fetch" if by_fetch > by_cpu else "cpu",
        1 / max(found.build_cpu, 1e-9),
    )
