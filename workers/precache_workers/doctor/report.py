"""Measurements of a source before it is cached, and what they predict."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precache.runtime.spread import Spread, relative_error
from precache.simulation.model import Setting, Simulation
from precache_workers.profiling.estimate import (
    FILE_SECONDS,
    Estimate,
    ShardWork,
    UnitTimes,
    estimate,
)
from precache_workers.shards.timing import TimeCost

MISFIT_SHARE = 0.01
"""Share of samples whose rows may have other shapes: a build allows as many failures."""
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
    """One stage over all samples: ``fetch``, an op, or ``encode`` by the recipe's own codec.

    Attributes
    ----------
    ms
        CPU time of the samples; of ``fetch`` the time waited.
    cpu_ms
        Mean CPU time.
    each_ms, each_cpu_ms
        Of each sample, in the same order for all stages: as `ms`, and CPU time.
    """

    name: str
    ms: Spread
    cpu_ms: float
    each_ms: Sequence[float]
    each_cpu_ms: Sequence[float]

    @classmethod
    def of(cls, name: str, times: Sequence[TimeCost]) -> Stage:
        """Return a stage by its times for each sample."""
        cpu = [1e3 * cost.cpu for cost in times]
        judged = [1e3 * cost.wall for cost in times] if name == "fetch" else cpu
        return cls(name, Spread.of(judged), float(np.mean(cpu)), judged, cpu)


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
    """A small store of the sampled rows in one codec, written and read.

    Attributes
    ----------
    stored
        Mean bytes of a sample in it, its index included.
    raw
        Bytes of a sample before compression.
    write_cpu
        Seconds of writing a sample's row.
    samples_per_s, cpu_ms_per_1000
        Of the `Loader`, medians of several epochs from memory.
    """

    codec: str
    stored: float
    raw: int
    write_cpu: float
    samples_per_s: float
    cpu_ms_per_1000: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Whole files read from the source, several at a time.

    Attributes
    ----------
    depth
        Requests in flight at a time.
    median_ms, p95_ms
        Time of one request.
    """

    depth: int
    requests: int
    requests_per_s: float
    bytes_per_s: float
    median_ms: float
    p95_ms: float


@dataclass(frozen=True)
class Host:
    """The machine that measured.

    Attributes
    ----------
    cores
        Cores that this process may use.
    memory, memory_free
        Bytes.
    io_wait
        Share of the time in which a process waited for I/O while the source was read at several
        depths; None where that cannot be read.
    load
        Load average over one minute when the measurement began.
    """

    cores: int
    memory: int
    memory_free: int
    io_wait: float | None
    load: float


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Result of `precache.doctor`; `dataclasses.asdict` of it is plain data.

    Throughput comes from means: a core that works through all samples takes the sum of their
    times. Medians and percentiles show how they differ.

    Attributes
    ----------
    samples, complete
        Number of samples in the source; a lower bound if its listing is not complete.
    source_bytes
        Of all samples.
    keys, nbytes
        Of the measured samples that have rows; all times are in this order.
    failures
        (key, reason) of those that cannot be fetched or decoded.
    misfits
        (key, reason) of those whose rows have other shapes than most: a build would leave holes.
    rate
        Samples per second that the device takes.
    cores
        Cores of a build, and of training.
    build
        The build of all samples by the recipe's own codec, as its plan estimates it.
    stages
        ``fetch``, each op, and ``encode`` by the recipe's own codec.
    random
        Name of the first op that is random; empty if none is.
    codecs
        The recipe's own first.
    seconds
        Time of the measurement.
    """

    source: str
    samples: int
    complete: bool
    source_bytes: float
    listing_seconds: float
    keys: Sequence[str]
    nbytes: Sequence[int]
    failures: Sequence[tuple[str, str]]
    misfits: Sequence[tuple[str, str]]
    rate: float
    cores: int
    build: Estimate
    stages: Sequence[Stage]
    random: str
    codecs: Sequence[CodecFigures]
    storage: Sequence[Throughput]
    host: Host
    seconds: float

    @property
    def sampled(self) -> int:
        """Number of samples measured, broken ones included."""
        return len(self.keys) + len(self.failures)

    @property
    def failed(self) -> int:
        """Number of samples that cannot be fetched or decoded."""
        return len(self.failures)

    @property
    def error(self) -> float:
        """Half the 95% confidence interval of the build's CPU time over itself; samples differ."""
        whole = np.sum([stage.each_cpu_ms for stage in self.stages], axis=0)
        return relative_error(whole, self.samples)

    @property
    def cores_without_cache(self) -> float:
        """Cores that fetch and run the ops for a device of `rate`, files being in memory."""
        return self.rate / fed_per_s(self._online_ms, 1)

    @property
    def samples_per_s_without_cache(self) -> float:
        """Samples per second of all cores, no more than the source delivers."""
        return fed_per_s(max(self._online_ms, self.cores / self.source_per_s * 1e3), self.cores)

    @property
    def cores_with_cache(self) -> float:
        """Cores that read a store in the recipe's own codec for a device of `rate`."""
        return self.cores_at_rate(self.codecs[0])

    @property
    def shapes_differ(self) -> bool:
        """More rows have another shape than most than a build allows to fail."""
        return len(self.misfits) > MISFIT_SHARE * len(self.keys)

    @property
    def worthwhile(self) -> bool:
        """A store can hold the rows, and reading it takes less work than the files do."""
        return not self.shapes_differ and self.cores_with_cache < self.cores_without_cache

    @property
    def source_per_s(self) -> float:
        """Samples per second that the source delivers at best.

        If only single fetches were measured, of a `Dataset`: to as many processes as there are
        cores, each of which waits for one at a time.
        """
        if self.storage:
            return max(reading.requests_per_s for reading in self.storage)
        return 1e3 * self.cores / max(self.stages[0].ms.mean, 1e-6)

    @property
    def slowest(self) -> list[SlowestSample]:
        """The slowest samples, the slowest first."""
        parts = np.array([stage.each_ms for stage in self.stages])
        total = parts.sum(axis=0)
        median = max(Spread.of(total).median, 1e-6)
        return [
            SlowestSample(
                key=self.keys[at],
                nbytes=self.nbytes[at],
                ms=float(total[at]),
                times_median=float(total[at]) / median,
                stage=self.stages[int(parts[:, at].argmax())].name,
            )
            for at in np.argsort(-total, kind="stable")[:SLOWEST_PROBED].tolist()
        ]

    @property
    def _online_ms(self) -> float:
        return sum(stage.cpu_ms for stage in self.stages[:-1])

    def simulate_reading(self, codec: CodecFigures) -> Simulation:
        """Simulate the training with a store in a codec, on all cores."""
        return feed(codec.cpu_ms_per_1000 / 1e3, self.cores, self.rate)

    def cores_at_rate(self, codec: CodecFigures) -> float:
        """Return the cores that read a store in a codec for a device of `rate`."""
        return self.rate / fed_per_s(codec.cpu_ms_per_1000 / 1e3, 1)

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


def predict_build(
    samples: int,
    per_shard: int,
    times: UnitTimes,
    cores: int,
    storage: Sequence[Throughput],
    **spent: float,
) -> Estimate:
    """Predict the build of a new store from its unit times.

    Parameters
    ----------
    per_shard
        Rows of a shard.
    spent
        Seconds of `listing` and `start`, as of `estimate`.
    """
    full, rest = divmod(samples, per_shard)
    rows = [per_shard] * full + [rest] * (rest > 0)
    return estimate(
        [ShardWork.new(count, times.computed) for count in rows],
        times,
        cores,
        **spent,
        round_trip=FILE_SECONDS,
        fetched_per_s=max((reading.requests_per_s for reading in storage), default=math.inf),
    )


def feed(
    sample_ms: npt.NDArray[np.float64] | float, cores: float, rate: float = math.inf
) -> Simulation:
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
    return Simulation(np.maximum(load, 1e-6), step, Setting(workers=workers))


def fed_per_s(sample_ms: float, cores: int) -> float:
    """Return how many samples per second these processes make."""
    return BATCH_SAMPLES * feed(sample_ms, cores).rate
