"""Measurements of a source before it is cached; `precache_workers.doctor.report` uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """One stage over all samples: seconds of CPU and of wall time, (samples,) float64 each."""

    name: str
    cpu: Times
    wall: Times


@dataclass(frozen=True)
class CutTimes:
    """Rows as they are after some op, encoded and decoded again one by one.

    Attributes
    ----------
    nbytes
        Stored bytes, (samples,).
    encode_cpu, decode_cpu
        Seconds to encode and to decode each, (samples,).
    one_shape
        Whether all have one shape, so that a store can hold them.
    frozen
        Whether a random op is among those before: its draw would be the same in each epoch.
    """

    nbytes: Times
    encode_cpu: Times
    decode_cpu: Times
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
    encode_cpu
        Mean seconds a sample.
    samples_per_s, cpu_ms_per_1000
        Of the `Loader`, medians of several epochs from memory.
    """

    name: str
    stored: float
    raw: int
    encode_cpu: float
    samples_per_s: float
    cpu_ms_per_1000: float


@dataclass(frozen=True)
class Throughput:
    """Whole files read from the source, some at a time.

    Attributes
    ----------
    pattern
        ``sequential``, in the order of their names, or ``random``.
    depth
        Requests under way at a time.
    median_ms, p95_ms
        Time of one request.
    """

    pattern: str
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
        That this process may use.
    memory, memory_free
        Bytes.
    io_wait
        Share of the time in which something waited for I/O while the source was read at several
        depths; None where that cannot be read.
    load
        Processes that ran or waited for a core, on average of the last minute, when this began.
    """

    cores: int
    memory: int
    memory_free: int
    io_wait: float | None
    load: float


@dataclass(frozen=True)
class SourceMeasurements:
    """All that was measured.

    Attributes
    ----------
    samples, complete
        How many the source has; at least, where its listing was not complete.
    source_bytes
        Of all samples.
    keys, nbytes
        Of the samples measured that the ops go through; all times are in this order.
    failures
        (key, why) of the others.
    misfits
        (key, why) of those whose rows have other shapes than most.
    fetch, ops, encode
        The stages, in order; `encode` by the recipe's own codec.
    cuts
        After each op.
    codecs
        The recipe's own first.
    build_cpu
        Seconds of CPU of a whole build for a sample: the stages, and all between them.
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
    fetch: StepTimes
    ops: Sequence[StepTimes]
    encode: StepTimes
    cuts: Sequence[CutTimes]
    codecs: Sequence[CodecTimes]
    build_cpu: float
    storage: Sequence[Throughput]
    host: Host
