"""Find the bottleneck of a training loop from measurements; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from precache.diagnosis.measurements import OUTLIER, Measurements
from precache.diagnosis.remedies import LoopTimes, Remedy, computes, is_noisy, late_wait, remedies
from precache.units import plain

Verdict = Literal["compute-bound", "CPU-bound", "storage-bound", "transfer-bound", "variance-bound"]

WORTH = 1.1
"""Minimum speed-up without waiting for data for which data counts as the bottleneck."""

CROWDED_STALL = 0.3
"""Stall below which contention for cores, not waiting for data, counts as the bottleneck."""

MANY_WORKERS = 16
"""Minimum number of cores to assume for workers that only wait."""

OWN_READS = 1 << 20
"""Allowance in bytes for reads of the usage measurement itself."""

SMALL_FILE = 16 << 10
"""File size in bytes below which opening a file costs more than reading it."""


@dataclass(frozen=True)
class Figure:
    """One piece of evidence: a name, its value, and the unit."""

    name: str
    value: float
    unit: str = ""


@dataclass(frozen=True)
class Judgement:
    """Base of `Diagnosis`, whose docstring describes the attributes."""

    verdict: Verdict
    reason: str
    evidence: tuple[Figure, ...]
    remedies: tuple[Remedy, ...]
    flags: tuple[str, ...]
    batches_per_s: float
    without_waiting: float


def judge(measured: Measurements) -> Judgement:
    """Judge measurements."""
    times = LoopTimes.of(measured)
    verdict, reason = _verdict(measured, times)
    return Judgement(
        verdict=verdict,
        reason=reason,
        evidence=tuple(_evidence(measured, times)),
        remedies=remedies(measured),
        flags=tuple(_flags(measured, times)),
        batches_per_s=1 / times.now,
        without_waiting=1 / times.step,
    )


def _verdict(measured: Measurements, times: LoopTimes) -> tuple[Verdict, str]:
    lost = times.now - times.step
    warm = measured.cold is None or measured.fits
    if times.crowded and measured.together.stall < CROWDED_STALL:
        return "CPU-bound", "loading and the step compete for the cores and slow each other down"
    if times.now < WORTH * times.step or _workers_keep_up(measured, times):
        return "compute-bound", "the step takes the time; data is ready when it is needed"
    if times.copy > 0.5 * lost:
        return "transfer-bound", "the step waits for its batch to be copied to the device"
    if not warm and measured.cold and measured.cold.mean > 1.5 * measured.loader.mean:
        return (
            "storage-bound",
            "the files do not fit into memory, and reading them from the disk is slower",
        )
    if measured.together.transform_share > 0.5:
        return "CPU-bound", "transforms on the CPU compute, and the step waits for them"
    if _varies(measured, times):
        return "variance-bound", "most batches are ready in time; rare slow ones hold up the step"
    if computes(measured) is not False:
        return "CPU-bound", "loading computes, and the step waits for it"
    return "storage-bound", _waiting(measured)


def _workers_keep_up(measured: Measurements, times: LoopTimes) -> bool:
    """Return whether workers are far enough ahead that the step's short waits are noise."""
    workers = measured.setup.workers
    if not workers or times.now > 1.25 * times.step:
        return False
    late = late_wait(measured, workers * measured.setup.prefetch, times.floor)
    return max(times.load, times.floor + late) < WORTH * times.step


def _varies(measured: Measurements, times: LoopTimes) -> bool:
    """Return whether slow batches dominate loading, or are the only reason why it is late."""
    tail = measured.by_worker.tail
    in_time = times.load * (1 - tail) < (WORTH - 1) * times.step
    if measured.setup.workers:
        in_time = times.load < WORTH * times.floor
    return tail > 0.5 or (tail > 0.25 and in_time)


def _waiting(measured: Measurements) -> str:
    usage = measured.by_worker.usage
    if usage.read_bytes:
        return "loading waits for the disk, and the step waits for loading"
    expected = measured.setup.batch_nbytes * len(measured.by_worker.seconds)
    if (usage.called_bytes or 0.0) > OWN_READS + expected / 2:
        return "loading waits for data that is not on a local disk"
    return "loading waits rather than computes, for a network or something else"


def _evidence(measured: Measurements, times: LoopTimes) -> Iterator[Figure]:
    runs = {"step alone": measured.step, "loader alone": measured.loader}
    if measured.single_worker:
        runs["one worker alone"] = measured.single_worker
    if measured.cold:
        runs["loader alone, cold"] = measured.cold
    for name, run in {**runs, "both together": measured.together}.items():
        yield Figure(name, run.mean, "s")
        yield Figure(f"{name}, p50", run.median, "s")
        yield Figure(f"{name}, p95", run.p95, "s")
        yield Figure(f"{name}, max", run.max, "s")
        if run.cores is not None:
            yield Figure(f"{name}, CPU", run.cores, "cores")
        if run.usage.read_bytes is not None:
            yield Figure(f"{name}, read from disk", run.usage.read_bytes / run.usage.wall, "B/s")
        if run.usage.io_wait is not None:
            yield Figure(f"{name}, I/O wait", run.usage.io_wait / run.usage.wall, "share")
    stall = measured.together.stall
    yield Figure("waiting for data", stall, "share")
    if measured.together.transform_share:
        transforms = stall * measured.together.transform_share
        yield Figure("waiting for transforms on the CPU", transforms, "share")
    yield Figure("overlap of loading and step", times.overlap, "share")
    work = measured.by_worker
    if work.busy is not None:
        yield Figure("loading that computes", min(1.0, work.busy), "share")
    yield Figure("slow batches' excess", work.tail, "share")
    if measured.copies:
        yield Figure("copy to the device", measured.copies.as_given, "s")
        yield Figure("copy from page-locked memory", measured.copies.from_pinned, "s")
        yield Figure("copy that the step waits for", measured.copies.exposed, "s")


def _flags(measured: Measurements, times: LoopTimes) -> Iterator[str]:
    setup, work = measured.setup, measured.by_worker
    if (setup.workers or 0) > 2 * setup.cores and computes(measured) is not False:
        yield (
            f"num_workers={setup.workers} on {setup.cores} cores: the workers compete "
            f"for them; give at most {setup.cores}"
        )
    elif (setup.workers or 0) > 2 * max(setup.cores, MANY_WORKERS):
        yield f"num_workers={setup.workers} on {setup.cores} cores costs memory; try fewer"
    if setup.pin_memory and not setup.cuda:
        yield "pin_memory=True, but the step uses no CUDA device: page-locking only costs time"
    if measured.synchronisations:
        places = ", ".join(measured.synchronisations)
        yield f"the step waits for the device at {places}; .item(), .cpu() and print cause that"
    if setup.files and setup.files.count > 100 and setup.files.median_nbytes < SMALL_FILE:
        yield (
            f"{setup.files.count:,} files of {setup.files.median_nbytes / 1e3:.3g} KB: opening "
            "them costs more than reading them; pack them into larger files"
        )
    for name, run in (("alone", work), ("beside the step", measured.together)):
        if run.outlier is not None:
            slow = run.seconds[run.outlier]
            yield (
                f"one batch of {len(run.seconds)} ({name}, number {run.outlier + 1}) took "
                f"{plain(slow, 2)} s, over {OUTLIER} times the median; the means leave it out"
            )
    epoch = (setup.epoch or 0) * times.now
    start = measured.start - work.mean  # without the load of the first batch
    if setup.workers and not setup.persistent and epoch and start > 0.1 * epoch:
        yield (
            f"starting workers takes {plain(start, 2)} s of each epoch, whose batches "
            f"take {plain(epoch, 2)} s; give persistent_workers=True"
        )
    if measured.cold and measured.fits and measured.cold.mean > 1.5 * measured.loader.mean:
        yield (
            f"the first epoch loads {measured.cold.mean / measured.loader.mean:.1f} times slower, "
            "from the disk, than later ones, from memory"
        )
    if is_noisy(measured):
        yield "something else uses the machine: the figures are rough; repeat on an idle machine"
