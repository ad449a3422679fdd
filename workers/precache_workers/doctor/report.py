"""Predictions for caching a whole source from a few measured samples. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precache.runtime.spread import Spread, relative_error
from precache.simulation.loop import Setting
from precache.simulation.model import Simulation
from precache_workers.doctor.measurements import (
    CodecTimes,
    Host,
    PerSample,
    SourceMeasurements,
    Throughput,
)
from precache_workers.profiling.estimate import FILE_SECONDS, Estimate, ShardWork, estimate

MISFIT_SHARE = 0.01
"""Share of samples whose rows may have other shapes: a build allows as many failures."""
NEAR = 0.1
"""Relative difference below which two amounts of work count as the same."""
SLOWEST_PROBED = 5
"""Number of the slowest samples that are listed."""
BATCH_SAMPLES = 64
"""Samples per batch of simulated loops."""
BATCHES = 100
ROUNDS = 20
MOST_WORKERS = 100
"""Workers of a simulated loop; for more cores, they are as much faster."""


@dataclass(frozen=True)
class Stage:
    """One stage of a build.

    Attributes
    ----------
    ms
        CPU time of the samples; of ``fetch`` the time waited.
    cpu_ms
        Mean CPU time.
    share
        Of the CPU time of all stages.
    each_ms
        Of each sample, in the same order for all stages, as `ms`.
    """

    name: str
    ms: Spread
    cpu_ms: float
    share: float
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
    bytes_total: float
    ratio: float
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
    bytes_total: float
    offline_cpu_ms: float
    online_cpu_ms: float
    cores_at_rate: float
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Result of `precache.doctor`; `dataclasses.asdict` of it is plain data.

    Attributes
    ----------
    sampled
        Number of samples measured, broken ones included.
    failures
        (key, reason) of those that cannot be fetched or decoded.
    misfits
        (key, reason) of those whose rows have other shapes than most: a build would leave holes.
    rate
        Samples per second that the device takes.
    cores
        Cores of a build, and of training.
    cut
        Stage after which to store: the least work in each epoch among the points that can be stored
        and leave random ops to training.
    build, error
        The build of all samples by the recipe's own codec, as its plan estimates it; half the
        width of the 95% confidence interval of its CPU time over itself, as samples differ.
    seconds
        Time of the measurement.
    """

    source: str
    samples: int
    complete: bool
    source_bytes: float
    listing_seconds: float
    sampled: int
    failures: Sequence[tuple[str, str]]
    misfits: Sequence[tuple[str, str]]
    rate: float
    cores: int
    cut: str
    build: Estimate
    error: float
    stages: Sequence[Stage]
    slowest: Sequence[SlowestSample]
    codecs: Sequence[CodecFigures]
    cuts: Sequence[CutPoint]
    storage: Sequence[Throughput]
    host: Host
    seconds: float

    @property
    def failed(self) -> int:
        """Number of samples that cannot be fetched or decoded."""
        return len(self.failures)

    def __str__(self) -> str:
        """Return what ``precache doctor`` prints."""
        from precache_workers.doctor.text import report_text

        return report_text(self)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write a page: one file that needs no network; ``pip install "precache[report]"``.

        Raises
        ------
        UsageError
            If jinja2 is not installed.
        StorageError
            If the file cannot be written.
        """
        from precache.html.pages import save
        from precache_workers.doctor.page import render_doctor_report

        save(render_doctor_report(self), os.fspath(path))


def doctor_report(
    measured: SourceMeasurements,
    rate: float,
    cores: int,
    seconds: float,
    build: Estimate | None = None,
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
    build
        Of all samples, where a plan has estimated it.
    """
    build = build or _build(measured, cores)
    each_cpu = build.cpu_seconds / measured.samples
    cuts = _cuts(measured, rate, cores, each_cpu)
    whole = sum(stage.cpu for stage in measured.stages)
    return DoctorReport(
        source=measured.source,
        samples=measured.samples,
        complete=measured.complete,
        source_bytes=measured.source_bytes,
        listing_seconds=measured.listing_seconds,
        sampled=len(measured.keys) + len(measured.failures),
        failures=measured.failures,
        misfits=measured.misfits,
        rate=rate,
        cores=cores,
        cut=best_cut(cuts),
        build=build,
        error=relative_error(np.asarray(whole), measured.samples),
        stages=_stages(measured),
        slowest=_slowest(measured),
        codecs=[_codec(measured, codec, rate, each_cpu) for codec in measured.codecs],
        cuts=cuts,
        storage=measured.storage,
        host=measured.host,
        seconds=seconds,
    )


def feed(sample_ms: PerSample | float, cores: float, rate: float = math.inf) -> Simulation:
    """Simulate one process per core that makes batches for a device of `rate` samples/s.

    Parameters
    ----------
    sample_ms
        Times of a process for samples, of which batches are drawn: (times,).
    """
    workers = max(1, min(int(cores), MOST_WORKERS))
    shape = (BATCHES, BATCH_SAMPLES)
    load = np.random.default_rng(0).choice(np.atleast_1d(sample_ms), shape).sum(axis=1)
    load = np.resize(load, workers * max(ROUNDS, BATCHES // workers)) * workers / cores
    step = np.full(len(load), 1e3 * BATCH_SAMPLES / rate)
    return Simulation.of(np.maximum(load, 1e-6), step, Setting(workers=workers))


def fed_per_s(sample_ms: float, cores: int) -> float:
    """Return how many samples per second these processes make."""
    return BATCH_SAMPLES * feed(sample_ms, cores).rate


def best_cut(cuts: Sequence[CutPoint]) -> str:
    """Return the stage after which to store: the smallest with nearly the least work online."""
    able = [cut for cut in cuts if cut.storable and not cut.frozen]
    least = min(cut.online_cpu_ms for cut in able)
    near = [cut for cut in able if cut.online_cpu_ms <= least * (1 + NEAR)]
    return min(near, key=lambda cut: cut.bytes_total).after


def _stages(measured: SourceMeasurements) -> list[Stage]:
    total = max(sum(_mean(stage.cpu) for stage in measured.stages), 1e-12)
    return [
        Stage(
            name=stage.name,
            ms=Spread.of(1e3 * stage.judged),
            cpu_ms=1e3 * _mean(stage.cpu),
            share=_mean(stage.cpu) / total,
            each_ms=(1e3 * stage.judged).tolist(),
        )
        for stage in measured.stages
    ]


def _slowest(measured: SourceMeasurements) -> list[SlowestSample]:
    parts = np.stack([stage.judged for stage in measured.stages])
    total = parts.sum(axis=0)
    median = max(Spread.of(total).median, 1e-9)
    return [
        SlowestSample(
            key=measured.keys[at],
            nbytes=measured.nbytes[at],
            ms=float(total[at]) * 1e3,
            times_median=float(total[at]) / median,
            stage=measured.stages[int(parts[:, at].argmax())].name,
        )
        for at in np.argsort(-total, kind="stable")[:SLOWEST_PROBED].tolist()
    ]


def _codec(
    measured: SourceMeasurements, codec: CodecTimes, rate: float, each_cpu: float
) -> CodecFigures:
    build_cpu = max(0.0, each_cpu + codec.write_cpu - measured.codecs[0].write_cpu)
    return CodecFigures(
        codec=codec.name,
        bytes_total=codec.stored * measured.samples,
        ratio=codec.raw / max(codec.stored, 1e-9),
        build_cpu_seconds=build_cpu * measured.samples,
        samples_per_s=codec.samples_per_s,
        cpu_ms_per_1000=codec.cpu_ms_per_1000,
        cores_at_rate=rate / fed_per_s(codec.cpu_ms_per_1000 / 1e3, 1),
        bytes_per_s_at_rate=rate * codec.stored,
    )


def source_rate(measured: SourceMeasurements, cores: int) -> float:
    """Return samples per second that the source delivers at best.

    If only single fetches were measured, of a `Dataset`: to as many processes as there are cores,
    each of which waits for one at a time.
    """
    if measured.storage:
        return max(reading.requests_per_s for reading in measured.storage)
    return cores / max(_mean(measured.stages[0].wall), 1e-9)


def _mean(values: PerSample) -> float:
    return float(values.mean())


def _cuts(measured: SourceMeasurements, rate: float, cores: int, each_cpu: float) -> list[CutPoint]:
    """Return the points after the fetch and after each op; the last is the store of the recipe."""
    fetch, *ops, encode = (_mean(stage.cpu) for stage in measured.stages)
    own, last = measured.codecs[0], len(ops) - 1
    read = own.cpu_ms_per_1000 / 1e6
    # A loader does more than decode: at the last cut, the ratio is known.
    beyond = read / max(measured.cuts[-1].decode_cpu, 1e-12)
    few = len(measured.misfits) <= MISFIT_SHARE * len(measured.keys)
    # The work of a build between its stages is the same wherever it stops.
    between = max(0.0, each_cpu - fetch - sum(ops) - encode)
    slowest = cores / source_rate(measured, cores)
    cuts = [("fetch", True, False, measured.source_bytes / measured.samples, 0.0, fetch + sum(ops))]
    for at, cut in enumerate(measured.cuts):
        stored, kept, loaded = (cut.nbytes, cut.encode_cpu, cut.decode_cpu * beyond)
        if at == last:
            stored, kept, loaded = own.stored, encode, read
        done, left = fetch + sum(ops[: at + 1]) + kept + between, loaded + sum(ops[at + 1 :])
        storable = cut.one_shape or (at == last and few)
        cuts.append((measured.stages[1 + at].name, storable, cut.frozen, stored, done, left))
    return [
        CutPoint(
            after=after,
            storable=storable,
            frozen=frozen,
            bytes_total=stored * measured.samples,
            offline_cpu_ms=done * 1e3,
            online_cpu_ms=left * 1e3,
            cores_at_rate=rate / fed_per_s(1e3 * left, 1),
            samples_per_s=fed_per_s(1e3 * max(left, slowest if at == 0 else 0.0), cores),
        )
        for at, (after, storable, frozen, stored, done, left) in enumerate(cuts)
    ]


def _build(measured: SourceMeasurements, cores: int) -> Estimate:
    rows, arrays = measured.rows_per_shard, measured.times.computed
    counts = [rows] * (measured.samples // rows) + [measured.samples % rows]
    return estimate(
        [ShardWork.new(count, arrays) for count in counts if count],
        measured.times,
        cores,
        listing=measured.listing_seconds,
        start=measured.start_seconds,
        round_trip=FILE_SECONDS,
        fetched_per_s=source_rate(measured, cores) if measured.storage else math.inf,
    )
