"""Predictions for caching a whole source from a few measured samples. Pure."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from precache.runtime.terminal import Terminal
from precache_workers.profiling.measurements import (
    CodecTimes,
    Host,
    PerSample,
    SourceMeasurements,
    StepTimes,
    Throughput,
)

MISFIT_SHARE = 0.01
"""Share of samples whose rows may have other shapes: a build allows as many failures."""
NEAR = 0.1
"""Relative difference below which two amounts of work count as the same."""
SLOWEST_PROBED = 5
"""Number of the slowest samples that are listed."""
STANDARD_ERRORS_95 = 1.96
"""Standard errors on either side of a mean that hold the true mean in 95% of samples."""


@dataclass(frozen=True)
class Spread:
    """Distribution of a time over the samples, in milliseconds."""

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
        Samples per second of a core in this stage alone: 1 / mean.
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
    """A slow sample.

    Attributes
    ----------
    ms
        Time waited for it, and CPU time of its ops and its encoding.
    times_median
        Ratio to that of the median sample.
    stage
        The stage with the largest share.
    """

    key: str
    nbytes: int
    ms: float
    times_median: float
    stage: str


@dataclass(frozen=True)
class CodecFigures:
    """Cost and throughput of one codec.

    Attributes
    ----------
    ratio
        Raw over stored bytes.
    build_cpu_seconds
        Of a build of all samples.
    cores_at_rate, bytes_per_s_at_rate
        To feed a device at the requested rate: cores, and stored bytes that memory or disk must
        deliver.
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
    """A point up to which work is done once, and after it in every epoch.

    Attributes
    ----------
    after
        The stage after which samples are stored; ``fetch``: the files as they are, no cache.
    storable
        A store can hold the rows, which have one shape, or the files.
    offline_cpu_ms, online_cpu_ms
        Per sample: once; and in each epoch, reading and decompressing included.
    samples_per_s
        With all requested cores, and no faster than the source delivers files if these are read.
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
    """Cost of a build of all samples by the recipe's own codec.

    Attributes
    ----------
    cpu_seconds
        Predicted `BuildResult.cpu_seconds`.
    error
        Half the width of its 95% confidence interval over itself, as samples differ.
    seconds
        Wall time on the requested cores.
    before_seconds
        Part of it before the first sample: listing the source, and starting workers.
    limited_by
        ``cpu``, or ``fetch`` if one machine cannot read the source fast enough.
    """

    cpu_seconds: float
    error: float
    seconds: float
    before_seconds: float
    limited_by: str
    samples_per_core_second: float


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Result of `precache.doctor`; `dataclasses.asdict` of it is plain data.

    Attributes
    ----------
    sampled
        Number of samples measured, broken ones included.
    failed, failures
        Number of those that cannot be fetched or decoded; (key, reason) of each.
    misfits
        (key, reason) of those whose rows have other shapes than most: a build would leave holes.
    rate
        Samples per second that the device takes.
    cores
        Cores of a build, and of training.
    cores_without_cache
        Cores that feed that rate from the source: fetch and ops in every epoch.
    cut
        Stage after which to store: the least work in each epoch among the points that can be stored
        and leave random ops to training.
    seconds
        Time of the measurement.
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

    def __str__(self) -> str:
        """Return what ``precache doctor`` prints."""
        from precache_workers.doctor.text import print_doctor_report

        stream = io.StringIO()
        print_doctor_report(self, Terminal(file=stream, width=100, soft_wrap=True))
        return stream.getvalue().rstrip("\n")

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


def doctor_report(
    measured: SourceMeasurements, rate: float, cores: int, seconds: float
) -> DoctorReport:
    """Compute the report from measurements.

    Throughput comes from means: a core that works through all samples takes the sum of their
    times. Medians and percentiles show how they differ.

    Parameters
    ----------
    rate
        Samples per second of the device to be fed.
    cores
        Of the build, and of training.
    seconds
        Time of the measurement.
    """
    cuts = _cuts(measured, rate, cores)
    return DoctorReport(
        source=measured.source,
        samples=measured.samples,
        complete=measured.complete,
        source_bytes=measured.source_bytes,
        listing_seconds=measured.listing_seconds,
        sampled=len(measured.keys) + len(measured.failures),
        failed=len(measured.failures),
        failures=measured.failures,
        misfits=measured.misfits,
        rate=rate,
        cores=cores,
        cores_without_cache=cuts[0].cores_at_rate,
        cut=best_cut(cuts),
        build=_build(measured, cores),
        stages=_stages(measured),
        slowest=_slowest(measured),
        codecs=[_codec(measured, codec, rate) for codec in measured.codecs],
        cuts=cuts,
        storage=measured.storage,
        host=measured.host,
        seconds=seconds,
    )


def spread_ms(seconds: PerSample) -> Spread:
    """Return mean, median, 95th percentile and maximum of seconds, in milliseconds."""
    ms = np.asarray(seconds) * 1e3
    p50, p95 = np.percentile(ms, [50, 95]).tolist()
    return Spread(float(ms.mean()), p50, p95, float(ms.max()))


def relative_error(values: PerSample, population: int) -> float:
    """Return half the 95% confidence interval of a mean over the mean, without replacement.

    Source: Cochran, Sampling Techniques, section 2.5, finite population correction included.
    """
    count, mean = len(values), float(np.mean(values))
    if count < 2 or mean == 0:
        return 0.0 if count >= population or mean == 0 else math.inf
    left = max(0.0, 1 - count / population)
    return STANDARD_ERRORS_95 * float(np.std(values, ddof=1)) / mean * math.sqrt(left / count)


def best_cut(cuts: Sequence[CutPoint]) -> str:
    """Return the stage after which to store: the smallest with nearly the least work online."""
    able = [cut for cut in cuts if cut.storable and not cut.frozen]
    least = min(cut.online_cpu_ms for cut in able)
    near = [cut for cut in able if cut.online_cpu_ms <= least * (1 + NEAR)]
    return min(near, key=lambda cut: cut.bytes_per_sample).after


def _all_stages(measured: SourceMeasurements) -> list[StepTimes]:
    return [measured.fetch, *measured.ops, measured.encode]


def _stages(measured: SourceMeasurements) -> list[Stage]:
    stages = _all_stages(measured)
    total = sum(_mean(stage.cpu) for stage in stages)
    return [
        Stage(
            stage.name,
            spread_ms(stage.cpu),
            spread_ms(stage.wall),
            _mean(stage.cpu) / max(total, 1e-12),
            1 / max(_mean(stage.cpu), 1e-9),
            ((stage.wall if stage is measured.fetch else stage.cpu) * 1e3).tolist(),
        )
        for stage in stages
    ]


def _slowest(measured: SourceMeasurements) -> list[SlowestSample]:
    parts = np.stack(
        [measured.fetch.wall, *(stage.cpu for stage in (*measured.ops, measured.encode))]
    )
    names = [stage.name for stage in _all_stages(measured)]
    total = parts.sum(axis=0)
    median = max(float(np.median(total)), 1e-9)
    return [
        SlowestSample(
            measured.keys[at],
            measured.nbytes[at],
            float(total[at]) * 1e3,
            float(total[at]) / median,
            names[int(parts[:, at].argmax())],
        )
        for at in np.argsort(-total, kind="stable")[:SLOWEST_PROBED].tolist()
    ]


def _codec(measured: SourceMeasurements, codec: CodecTimes, rate: float) -> CodecFigures:
    own = measured.codecs[0]
    build_cpu = measured.build_cpu + codec.encode_cpu - own.encode_cpu
    return CodecFigures(
        codec=codec.name,
        bytes_per_sample=codec.stored,
        bytes_total=codec.stored * measured.samples,
        ratio=codec.raw / max(codec.stored, 1e-9),
        encode_cpu_ms=codec.encode_cpu * 1e3,
        build_cpu_seconds=build_cpu * measured.samples,
        samples_per_s=codec.samples_per_s,
        cpu_ms_per_1000=codec.cpu_ms_per_1000,
        cores_at_rate=rate * codec.cpu_ms_per_1000 / 1e6,
        bytes_per_s_at_rate=rate * codec.stored,
    )


def source_rate(measured: SourceMeasurements, cores: int) -> float:
    """Return samples per second that the source delivers at best.

    If only single fetches were measured, of a `Dataset`: to as many processes as there are cores,
    each of which waits for one at a time.
    """
    if measured.storage:
        return max(reading.requests_per_s for reading in measured.storage)
    return cores / max(_mean(measured.fetch.wall), 1e-9)


def _mean(values: PerSample) -> float:
    return float(values.mean())


def _cuts(measured: SourceMeasurements, rate: float, cores: int) -> list[CutPoint]:
    """Return the points after the fetch and after each op; the last is the store of the recipe."""
    fetch = _mean(measured.fetch.cpu)
    ops = [_mean(stage.cpu) for stage in measured.ops]
    own = measured.codecs[0]
    last = len(ops) - 1
    # A loader does more than decode: at the last cut, the ratio is known.
    beyond = max(1.0, own.cpu_ms_per_1000 / 1e6 / max(_mean(measured.cuts[-1].decode_cpu), 1e-12))
    few = len(measured.misfits) <= MISFIT_SHARE * len(measured.keys)
    encode = _mean(measured.encode.cpu)
    # The work of a build between its stages is the same wherever it stops.
    between = max(0.0, measured.build_cpu - fetch - sum(ops) - encode)
    cuts = [("fetch", True, False, measured.source_bytes / measured.samples, 0.0, fetch + sum(ops))]
    for at, (step, cut) in enumerate(zip(measured.ops, measured.cuts, strict=True)):
        stored = own.stored if at == last else _mean(cut.nbytes)
        read = own.cpu_ms_per_1000 / 1e6 if at == last else _mean(cut.decode_cpu) * beyond
        kept = encode if at == last else _mean(cut.encode_cpu)
        done, left = fetch + sum(ops[: at + 1]) + kept + between, read + sum(ops[at + 1 :])
        storable = cut.one_shape or (at == last and few)
        cuts.append((step.name, storable, cut.frozen, stored, done, left))
    return [
        CutPoint(
            after=after,
            storable=storable,
            frozen=frozen,
            bytes_per_sample=stored,
            bytes_total=stored * measured.samples,
            offline_cpu_ms=done * 1e3,
            online_cpu_ms=left * 1e3,
            cores_at_rate=rate * left,
            samples_per_s=min(
                cores / max(left, 1e-12), source_rate(measured, cores) if at == 0 else math.inf
            ),
        )
        for at, (after, storable, frozen, stored, done, left) in enumerate(cuts)
    ]


def _build(measured: SourceMeasurements, cores: int) -> BuildForecast:
    whole = sum(stage.cpu for stage in _all_stages(measured))
    cpu_seconds = measured.build_cpu * measured.samples
    before = measured.listing_seconds + measured.start_seconds
    by_cpu, by_fetch = cpu_seconds / cores, measured.samples / source_rate(measured, cores)
    return BuildForecast(
        cpu_seconds=cpu_seconds,
        error=relative_error(np.asarray(whole), measured.samples),
        seconds=before + max(by_cpu, by_fetch),
        before_seconds=before,
        limited_by="fetch" if by_fetch > by_cpu else "cpu",
        samples_per_core_second=1 / max(measured.build_cpu, 1e-9),
    )
