"""Remedies and their gains, predicted from measurements in closed form; pure.

Let a loop take `step` seconds per batch and its loader `load`. If loading fully overlaps the step,
a batch takes ``max(load, step)`` seconds; without overlap it takes ``load + step``. The run of both
together gives the overlap. Since cores are shared, CPU time is a third limit. A remedy changes
these times.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from precache.diagnosis.measurements import Measurements
from precache.units import in_ms

Confidence = Literal["high", "medium", "low"]
LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")

CACHED_RATE = 1e9
"""Bytes that a `Loader` decodes per CPU-second with ``image``, the slowest codec."""

CACHED_THREADS = 4
WORKER_RATE = 1e9
"""Bytes of tensors that pass from a worker to the training process per CPU-second."""

WAITING_WORKERS = 32
"""Most workers to suggest for a loader that waits rather than computes."""

CONTENTION = 1.3
"""Slowdown of a worker beside the others above which more workers do not help."""


@dataclass(frozen=True)
class Remedy:
    """A change to the loop or its environment.

    Attributes
    ----------
    name
        ``workers``, ``precache``, ``prefetch``, ``transforms``, ``pinned memory``,
        ``block shuffle``, ``faster disk``.
    what
        What to change.
    batches_per_s
        Predicted speed.
    gain
        Time per batch now over the predicted time.
    confidence
        Confidence in the prediction.
    why
        Basis of the prediction, and what might invalidate it.
    """

    name: str
    what: str
    batches_per_s: float
    gain: float
    confidence: Confidence
    why: str


@dataclass(frozen=True)
class LoopTimes:
    """Seconds per batch.

    Attributes
    ----------
    now
        The loop as it is; from the disk if the files do not fit into memory.
    alone
        The step alone.
    step
        The step without waiting for data. Without CUDA, it is the measured time of the loop minus
        the measured wait, unless loading takes the step's cores. Otherwise it equals `alone`.
    copy
        Wait of the step for the copy of its batch to the device.
    load
        The loader alone.
    work
        One worker's time for a batch; `load` if unknown.
    load_cpu, step_cpu
        CPU time of loading and of the step.
    overlap
        Share of the shorter of loading and step that runs during the other, from 0 to 1.
    cores
        Number of cores available.
    crowded
        Whether loading takes the step's cores.
    """

    now: float
    alone: float
    step: float
    copy: float
    load: float
    work: float
    load_cpu: float
    step_cpu: float
    overlap: float
    cores: int
    crowded: bool = False

    @classmethod
    def of(cls, measured: Measurements) -> LoopTimes:
        step, loader, together = measured.step, measured.loader, measured.together
        copy = measured.copies.exposed if measured.copies else 0.0
        shorter = min(loader.mean, step.mean + copy)
        hidden = loader.mean + step.mean + copy - together.mean
        overlap = min(1.0, max(0.0, hidden / max(shorter, 1e-9)))
        worker = measured.by_worker
        load, work = loader.mean, worker.mean
        if measured.setup.workers == 0:  # the loop itself loads
            overlap, load = 0.0, max(together.mean * together.stall, 1e-9)
            work = load
        warm = cls(
            now=together.mean,
            alone=step.mean,
            step=step.mean,
            copy=copy,
            load=load,
            work=work,
            load_cpu=worker.per_batch(worker.usage.cpu),
            step_cpu=step.per_batch(step.usage.cpu),
            overlap=overlap,
            cores=measured.setup.cores,
        )
        if not measured.setup.cuda:
            step_together = max(together.mean * (1 - together.stall), 1e-9)
            if _is_crowded(measured, warm, step_together):
                warm = dataclasses.replace(warm, crowded=True)
            else:
                warm = dataclasses.replace(warm, step=step_together)
        if measured.cold is None or measured.fits:
            return warm
        slowdown = max(1.0, measured.cold.mean / loader.mean)
        cold = dataclasses.replace(warm, load=warm.load * slowdown, work=warm.work * slowdown)
        return dataclasses.replace(cold, now=max(warm.now, cold.together()))

    @property
    def floor(self) -> float:
        """Time per batch if data were always ready in host memory."""
        return self.step + self.copy

    def together(self, extra: float = 0.0) -> float:
        """Predict the loop's time per batch; `extra` is the wait for rare slow batches."""
        serial = (1 - self.overlap) * min(self.load, self.floor)
        elapsed = max(self.load, self.floor + extra) + serial
        return max(elapsed, (self.load_cpu + self.step_cpu) / self.cores)


def _is_crowded(measured: Measurements, times: LoopTimes, step_together: float) -> bool:
    """Return whether the loader slows the step down and both together need most of the cores."""
    usage = measured.together.usage
    demand = (usage.cpu or 0.0) + (usage.delay or 0.0)
    return (
        measured.setup.workers != 0
        and step_together > 1.25 * times.alone
        and times.load_cpu > 0.5 * times.step_cpu
        and demand > 0.7 * usage.wall * times.cores
    )


def remedies(measured: Measurements) -> tuple[Remedy, ...]:
    """Predict the remedies that apply to this loader, largest gain first."""
    times = LoopTimes.of(measured)
    noisy = is_noisy(measured)
    predicted = [
        dataclasses.replace(remedy, confidence=_lower(remedy.confidence)) if noisy else remedy
        for predict in (
            _workers,
            _prefetch,
            _precache,
            _transforms,
            _pinned,
            _block_shuffle,
            _faster_disk,
        )
        for remedy in predict(measured, times)
    ]
    return tuple(sorted(predicted, key=lambda remedy: -remedy.gain))


def is_noisy(measured: Measurements) -> bool:
    """Return whether something else seems to use the machine.

    The signs are steps on the same batch that differ widely, or a single worker that often waits
    for a core.
    """
    step, worker = measured.step, measured.by_worker
    steps_differ = len(step.seconds) > 2 and step.p95 > 1.5 * step.median
    single = measured.setup.workers in (0, 1) or measured.single_worker is not None
    return steps_differ or (single and (worker.usage.delay or 0.0) > 0.25 * worker.usage.wall)


def _lower(level: Confidence) -> Confidence:
    return LEVELS[max(0, LEVELS.index(level) - 1)]


def _remedy(
    name: str, what: str, times: LoopTimes, seconds: float, confidence: Confidence, why: str
) -> Remedy:
    return Remedy(name, what, 1 / seconds, times.now / seconds, confidence, why)


def computes(measured: Measurements) -> bool | None:
    """Return whether the loader computes rather than waits; None if unknown."""
    busy = measured.by_worker.busy
    return None if busy is None else busy >= 0.5


def _workers(measured: Measurements, times: LoopTimes) -> Iterator[Remedy]:
    have, cpu = measured.setup.workers, computes(measured) is not False
    if have is None:
        yield from _background(measured, times)
        return
    slowdown = max(1.0, times.load * have / times.work) if have else 1.0
    work = times.work * slowdown
    if not have:
        work += measured.setup.batch_nbytes / WORKER_RATE
    if have > 1 and slowdown > CONTENTION:
        why = f"each of {have} workers already takes {slowdown:.1f} times as long as one alone"
        yield _remedy("workers", "more workers", times, times.now, "medium", why)
        return
    most = times.cores if cpu else max(WAITING_WORKERS, have)
    count = min(max(math.ceil(work / (0.9 * times.floor)), have + 1), max(most, 1))
    if count <= have:
        why = f"{have} workers already use {times.cores} cores, and loading computes"
        yield _remedy("workers", "more workers", times, times.now, "medium", why)
        return
    load = max(work / count, times.load_cpu / times.cores)
    extra = late_wait(measured, count * measured.setup.prefetch, max(times.floor, load))
    after = dataclasses.replace(times, load=load, overlap=1.0).together(extra)
    why = f"one worker needs {in_ms(work)} per batch, {count} need {in_ms(load)}, beside the step"
    confidence: Confidence = "high" if cpu else "medium"
    if cpu and count == times.cores:
        confidence, why = "medium", why + ", which needs a core as well"
    elif not cpu and measured.by_worker.usage.read_bytes:
        confidence, why = "low", why + "; less if the disk limits them"
    yield _remedy("workers", f"num_workers={count}", times, after, confidence, why)


def _background(measured: Measurements, times: LoopTimes) -> Iterator[Remedy]:
    """Predict prefetching for a loader that is not a `DataLoader`."""
    if measured.setup.cached:
        return
    after = dataclasses.replace(times, overlap=1.0).together()
    why = "the loop takes as long as the slower of loader and step"
    what = "prefetch batches during the step, in a DataLoader's worker or a thread"
    yield _remedy("workers", what, times, after, "medium", why)


def late_wait(measured: Measurements, ahead: int, pace: float) -> float:
    """Predict the mean wait per batch for slow batches, with `ahead` batches prefetched.

    Batches come in order: while a worker is busy with a slow one, the step uses up the queue.
    """
    work = measured.by_worker
    late = [max(0.0, t - ahead * pace) for i, t in enumerate(work.seconds) if i != work.outlier]
    return statistics.fmean(late)


def _prefetch(measured: Measurements, times: LoopTimes) -> Iterator[Remedy]:
    have = measured.setup.workers
    if not have or measured.by_worker.tail < 0.1 or times.load > 1.1 * times.floor:
        return
    pace = max(times.floor, times.load)
    factor = math.ceil(measured.by_worker.max / pace / have) + 1
    if factor <= measured.setup.prefetch:
        return
    factor = min(factor, 64)
    extra = late_wait(measured, have * factor, pace)
    after = dataclasses.replace(times, overlap=1.0).together(extra)
    slowest = in_ms(measured.by_worker.max)
    why = f"{have * factor} prefetched batches cover the slowest one, {slowest}"
    yield _remedy("prefetch", f"prefetch_factor={factor}", times, after, "medium", why)


def _precache(measured: Measurements, times: LoopTimes) -> Iterator[Remedy]:
    if measured.setup.cached:
        return
    cpu = measured.setup.batch_nbytes / CACHED_RATE
    load = cpu / min(CACHED_THREADS, times.cores)
    after = dataclasses.replace(times, load=load, load_cpu=cpu, overlap=1.0).together()
    what = "build a store with precache build, read it with precache.Loader"
    why = f"reading {measured.setup.batch_nbytes / 1e6:.3g} MB of cached tensors costs {in_ms(cpu)}"
    confidence: Confidence = "high" if measured.setup.workers is not None else "medium"
    if load > 0.5 * times.floor:
        confidence, why = "low", why + ", depending on the codec"
    why += "; random augmentations move to the device"
    yield _remedy("precache", what, times, after, confidence, why)


def _transforms(measured: Measurements, times: LoopTimes) -> Iterator[Remedy]:
    share = measured.together.stall * measured.together.transform_share
    if not share:
        return
    after = max(times.now * (1 - share), times.floor)
    what = "fewer transforms on the CPU: cache fixed ones by the recipe, do others on the device"
    why = f"at most: the loop waits for them {share:.0%} of the time"
    yield _remedy("transforms", what, times, after, "medium", why)


def _pinned(measured: Measurements, times: LoopTimes) -> Iterator[Remedy]:
    copies = measured.copies
    if copies is None or copies.pinned:
        return
    saved = min(times.copy, max(0.0, copies.as_given - copies.from_pinned))
    after = dataclasses.replace(times, copy=times.copy - saved).together()
    what = "pin_memory=True, and .to(device, non_blocking=True)"
    pinned = in_ms(copies.from_pinned)
    why = f"a copy takes {in_ms(copies.as_given)}, from page-locked memory {pinned}"
    yield _remedy("pinned memory", what, times, after, "medium", why)


def _block_shuffle(measured: Measurements, times: LoopTimes) -> Iterator[Remedy]:
    cold, setup = measured.cold, measured.setup
    if cold is None or not measured.sequential or not setup.cached or setup.block_shuffle:
        return
    read = cold.per_batch(cold.usage.read_bytes)
    load = max(measured.loader.mean, read / measured.sequential)
    after = dataclasses.replace(times, load=min(load, times.load)).together()
    why = f"the disk delivers {measured.sequential / 1e6:,.0f} MB/s sequentially"
    yield _remedy("block shuffle", 'shuffle="block"', times, after, "low", why)


def _faster_disk(measured: Measurements, times: LoopTimes) -> Iterator[Remedy]:
    level: Confidence = "medium"
    if measured.cold is not None and not measured.fits:
        load, why = measured.loader.mean, "at most: as fast as from memory"
    elif measured.cold is None and computes(measured) is False:
        load = min(times.load, times.load_cpu / max(1, measured.setup.workers or 1))
        level, why = "low", "at most: if all time that is not CPU time is waiting for storage"
    else:
        return
    after = dataclasses.replace(times, load=load).together()
    what = "a faster disk or network, or a local copy"
    yield _remedy("faster disk", what, times, after, level, why)
