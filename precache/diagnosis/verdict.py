"""What limits a training loop, judged from measurements alone; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from precache.diagnosis.measurements import OUTLIER, Measurements
from precache.diagnosis.remedies import Rates, Remedy, computes, noise, remedies, stalls

Verdict = Literal["compute-bound", "CPU-bound", "storage-bound", "transfer-bound", "variance-bound"]

WORTH = 1.1
"""Times that the loop would be faster with data for free, from which data limits it."""

CROWDED_STALL = 0.3
"""Share of waiting up to which sharing the cores is what slows a loop down."""

WAITERS = 16
"""Workers of a loader that waits, which are not many on any machine."""

OWN_READS = 1 << 20
"""Bytes that taking the readings may itself have read."""

TINY = 16 << 10
"""Bytes of a file, below which opening it costs more than reading it."""


@dataclass(frozen=True)
class Figure:
    """One piece of evidence: a name, its value, and the unit."""

    name: str
    value: float
    unit: str = ""


@dataclass(frozen=True)
class Judgement:
    """What was found, why, and what would help.

    Attributes
    ----------
    verdict, reason
        What limits the loop, and how that shows.
    evidence
        Figures behind it.
    remedies
        Largest gain first; those without one as well.
    flags
        What else is amiss, a sentence each.
    batches_per_s, without_waiting
        Now, and with data for free.
    """

    verdict: Verdict
    reason: str
    evidence: tuple[Figure, ...]
    remedies: tuple[Remedy, ...]
    flags: tuple[str, ...]
    batches_per_s: float
    without_waiting: float


def judge(measured: Measurements) -> Judgement:
    """The verdict on measurements."""
    rates = Rates.of(measured)
    verdict, reason = _verdict(measured, rates)
    return Judgement(
        verdict,
        reason,
        tuple(_evidence(measured, rates)),
        remedies(measured),
        tuple(_flags(measured, rates)),
        1 / rates.now,
        1 / rates.step,
    )


def _verdict(measured: Measurements, rates: Rates) -> tuple[Verdict, str]:
    lost = rates.now - rates.step
    warm = measured.cold is None or measured.fits
    if rates.crowded and measured.together.stall < CROWDED_STALL:
        return "CPU-bound", "loading and the step share the cores, and slow each other down"
    if rates.now < WORTH * rates.step or _by_chance(measured, rates):
        return "compute-bound", "the step is what takes the time; data is there when it is needed"
    if rates.copy > 0.5 * lost:
        return "transfer-bound", "the step waits for its batch to be copied to the device"
    if not warm and measured.cold and measured.cold.mean > 1.5 * measured.loader.mean:
        return "storage-bound", "files do not fit into memory, and from the disk they come slower"
    if _varies(measured, rates):
        return "variance-bound", "most batches come in time; rare slow ones hold up the step"
    if computes(measured) is not False:
        return "CPU-bound", "loading computes, and the step waits for it"
    return "storage-bound", _waiting(measured)


def _by_chance(measured: Measurements, rates: Rates) -> bool:
    """Whether workers are far ahead of the step: what little it waited is none of their doing."""
    workers = measured.setup.workers
    if not workers or rates.now > 1.25 * rates.step:
        return False
    late = stalls(measured, workers * measured.setup.prefetch, rates.floor)
    return max(rates.load, rates.floor + late) < WORTH * rates.step


def _varies(measured: Measurements, rates: Rates) -> bool:
    """Slow batches are most of loading, or all that keeps it from being in time."""
    tail = measured.by_worker.tail
    in_time = rates.load * (1 - tail) < (WORTH - 1) * rates.step
    if measured.setup.workers:
        in_time = rates.load < WORTH * rates.floor
    return tail > 0.5 or (tail > 0.25 and in_time)


def _waiting(measured: Measurements) -> str:
    usage = measured.by_worker.usage
    if usage.read_bytes:
        return "loading waits for the disk, and the step waits for loading"
    expected = measured.setup.batch_nbytes * len(measured.by_worker.seconds)
    if (usage.called_bytes or 0.0) > OWN_READS + expected / 2:
        return "loading waits for what it reads, which is no local disk"
    return "loading waits rather than computes: for a network, or for something else"


def _evidence(measured: Measurements, rates: Rates) -> Iterator[Figure]:
    runs = {"step alone": measured.step, "loader alone": measured.loader}
    if measured.lane:
        runs["one worker alone"] = measured.lane
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
    yield Figure("waiting for data", measured.together.stall, "share")
    yield Figure("overlap of loading and step", rates.overlap, "share")
    work = measured.by_worker
    if work.busy is not None:
        yield Figure("loading that computes", min(1.0, work.busy), "share")
    yield Figure("slow batches' excess", work.tail, "share")
    if measured.copies:
        yield Figure("copy to the device", measured.copies.as_given, "s")
        yield Figure("copy from page-locked memory", measured.copies.from_pinned, "s")
        yield Figure("copy that the step waits for", measured.copies.exposed, "s")


def _flags(measured: Measurements, rates: Rates) -> Iterator[str]:
    setup, work = measured.setup, measured.by_worker
    if (setup.workers or 0) > 2 * setup.cores and computes(measured) is not False:
        yield (
            f"num_workers={setup.workers} on {setup.cores} cores: they take turns; "
            f"give at most {setup.cores}"
        )
    elif (setup.workers or 0) > 2 * max(setup.cores, WAITERS):
        yield f"num_workers={setup.workers} costs memory, on {setup.cores} cores; try fewer"
    if setup.pin_memory and not setup.cuda:
        yield "pin_memory=True, and the step uses no CUDA device: page-locking costs, for nothing"
    if measured.synchronisations:
        places = ", ".join(measured.synchronisations)
        yield f"the step waits for the device at {places}: .item(), .cpu() and print do that"
    if setup.files and setup.files.count > 100 and setup.files.median_nbytes < TINY:
        yield (
            f"{setup.files.count:,} files of {setup.files.median_nbytes / 1e3:.3g} KB: opening "
            "them costs more than reading them; pack them into larger ones"
        )
    for name, run in (("alone", work), ("beside the step", measured.together)):
        if run.outlier is not None:
            slow = run.seconds[run.outlier]
            yield (
                f"one batch of {len(run.seconds)} ({name}, number {run.outlier + 1}) took "
                f"{slow:.2g} s, over {OUTLIER} times the median; it is left out of the means"
            )
    epoch = (setup.epoch or 0) * rates.now
    if setup.workers and not setup.persistent and epoch and measured.start > 0.1 * epoch:
        yield (
            f"starting workers takes {measured.start:.2g} s of each epoch, whose batches take "
            f"{epoch:.2g} s; give persistent_workers=True"
        )
    if measured.cold and measured.fits and measured.cold.mean > 1.5 * measured.loader.mean:
        yield (
            f"the first epoch, from the disk, loads {measured.cold.mean / measured.loader.mean:.1f}"
            " times slower than later ones, from memory"
        )
    if noise(measured):
        yield "something else uses the machine, and figures are rough; run it again on an idle one"
