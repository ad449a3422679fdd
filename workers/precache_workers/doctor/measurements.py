"""Records of measurements: of stages, codecs, a source and its machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precache_workers.profiling.estimate import UnitTimes

PerSample = npt.NDArray[np.float64]
"""A number for each sample, (samples,)."""


@dataclass(frozen=True)
class StepTimes:
    """One stage over all samples: seconds of CPU and of wall time, (samples,) float64 each."""

    name: str
    cpu: PerSample
    wall: PerSample

    @property
    def judged(self) -> PerSample:
        """Times by which the stage is judged: waiting for a fetch, computing for others."""
        return self.wall if self.name == "fetch" else self.cpu


@dataclass(frozen=True)
class CutTimes:
    """Rows as they are after some op, encoded and decoded again one by one; means of all.

    Attributes
    ----------
    nbytes
        Stored bytes of a row.
    encode_cpu, decode_cpu
        Seconds to encode and to decode one.
    one_shape
        All rows have one shape, so that a store can hold them.
    frozen
        A random op is among those before: its draw would be the same in each epoch.
    """

    nbytes: float
    encode_cpu: float
    decode_cpu: float
    one_shape: bool
    frozen: bool


@dataclass(frozen=True)
class CodecTimes:
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

    name: str
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
class SourceMeasurements:
    """All measurements of a source.

    Attributes
    ----------
    samples, complete
        Number of samples in the source; a lower bound if its listing is not complete.
    source_bytes
        Of all samples.
    keys, nbytes
        Of the measured samples that have rows; all times are in this order.
    failures
        (key, reason) of the others.
    misfits
        (key, reason) of those whose rows have other shapes than most.
    stages
        ``fetch``, each op, and ``encode`` by the recipe's own codec.
    cuts
        After each op.
    codecs
        The recipe's own first.
    times, rows_per_shard
        Unit times of a build, as its plan has them; rows of its shards.
    start_seconds
        From the start of a build's worker to its first sample.
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
    stages: Sequence[StepTimes]
    cuts: Sequence[CutTimes]
    codecs: Sequence[CodecTimes]
    times: UnitTimes
    rows_per_shard: int
    start_seconds: float
    storage: Sequence[Throughput]
    host: Host
