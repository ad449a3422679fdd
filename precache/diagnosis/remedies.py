"""What each remedy would gain, predicted from measurements in closed form; pure.

A loop that takes `step` seconds for a batch, beside a loader that takes `load`, makes a batch every
``max(load, step)`` seconds where loading goes on during the step, and every ``load + step`` where
it does not; what was measured together tells how much of it does. CPU time is a third limit: cores
are shared. A remedy changes these times.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from precache.diagnosis.measurements import Measurements

Confidence = Literal["high", "medium", "low"]
LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")

CACHED_RATE = 1e9
"""Bytes of pixels that a CPU-second of a `Loader` decodes, codec ``image``, the slowest of ours."""

CACHED_THREADS = 4
WORKER_RATE = 1e9
"""Bytes of tensors that a CPU-second passes from a worker to the training process."""

WAITING_WORKERS = 32
"""Most workers worth trying for a loader that waits rather than computes."""

CONTENTION = 1.3
"""Times of what one worker alone needs from which workers are in each other's way."""


@dataclass(frozen=True)
class Remedy:
    """Something to change.

    Attributes
    ----------
    name
        ``workers``, ``precache``, ``prefetch``, ``pinned memory``, ``block shuffle``,
        ``faster disk``.
    what
        To do.
    batches_per_s
        Predicted.
    gain
        Time a batch takes over the time that it would take.
    confidence
        In the figure.
    why
        Where the figure comes from, and what might spoil it.
    """

    name: str
    what: str
    batches_per_s: float
    gain: float
    confidence: Confidence
    why: str


@dataclass(frozen=True)
class Rates:
    """Seconds a batch.

    Attributes
    ----------
    now
        Of the loop as it is; from the disk where the files do not fit into memory.
    alone, step, copy
        The step by itself, and on the device's own batch as data for free would leave it; what it
        waits for the batch's copy. On the host both steps are the same only where workers take the
        cores from it; else what the loop does not wait is the step, on the machine as it was then.
    load
        The loader alone.
    work
        That one worker spends on a batch; `load` where it is not known.
    load_cpu, step_cpu
        CPU time.
    overlap
        How much of the shorter of loading and stepping goes on during the other, from 0 to 1.
    cores
        That there are.
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
    def of(cls, measured: Measurements) -> Rates:
        step, loader, together = measured.step, measured.loader, measured.together
        copy = measured.copies.exposed if measured.copies else 0.0
        shorter = min(loader.mean, step.mean + copy)
        hidden = loader.mean + step.mean + copy - together.mean
        overlap = min(1.0, max(0.0, hidden / max(shorter, 1e-9)))
        work = measured.by_worker
        load, worked = loader.mean, work.mean
        if measured.setup.workers == 0:  # the loop itself loads
            overlap, load = 0.0, max(together.mean * together.stall, 1e-9)
            worked = load
        warm = cls(
            now=together.mean,
            alone=step.mean,
            step=step.mean,
            copy=copy,
            load=load,
            work=worked,
            load_cpu=work.a_batch(work.usage.cpu),
            step_cpu=step.a_batch(step.usage.cpu),
            overlap=overlap,
            cores=measured.setup.cores,
        )
        if not measured.setup.cuda:
            beside = max(together.mean * (1 - together.stall), 1e-9)
            if _crowded(measured, warm, beside):
                warm = dataclasses.replace(warm, crowded=True)
            else:
                warm = dataclasses.replace(warm, step=beside)
        if measured.cold is None or measured.fits:
            return warm
        slower = max(1.0, measured.cold.mean / loader.mean)
        cold = dataclasses.replace(warm, load=warm.load * slower, work=warm.work * slower)
        return dataclasses.replace(cold, now=max(warm.now, cold.together()))

    @property
    def floor(self) -> float:
        """With data for free."""
        return self.step + self.copy

    def together(self, extra: float = 0.0) -> float:
        """A batch of the loop; `extra` is what it waits for rare slow batches."""
        serial = (1 - self.overlap) * min(self.load, self.floor)
        alike = max(self.load, self.floor + extra) + serial
        return max(alike, (self.load_cpu + self.step_cpu) / self.cores)


def _crowded(measured: Measurements, rates: Rates, beside: float) -> bool:
    """Whether the step is slower beside the loader, and both together ask for all the cores."""
    usage = measured.together.usage
    asked = (usage.cpu or 0.0) + (usage.delay or 0.0)
    return (
        measured.setup.workers != 0
        and beside > 1.25 * rates.alone
        and rates.load_cpu > 0.5 * rates.step_cpu
        and asked > 0.7 * usage.wall * rates.cores
    )


def remedies(measured: Measurements) -> tuple[Remedy, ...]:
    """All that apply to this loader, largest gain first."""
    rates = Rates.of(measured)
    noisy = noise(measured)
    found = [
        dataclasses.replace(each, confidence=_lower(each.confidence)) if noisy else each
        for make in (_workers, _prefetch, _precache, _pinned, _block_shuffle, _faster_disk)
        for each in make(measured, rates)
    ]
    return tuple(sorted(found, key=lambda each: -each.gain))


def noise(measured: Measurements) -> bool:
    """Whether something else uses the machine.

    Steps on the very same batch differ widely then, or a single worker has to wait for a core.
    """
    step, alone = measured.step, measured.by_worker
    differ = len(step.seconds) > 2 and step.p95 > 1.5 * step.median
    single = measured.setup.workers in (0, 1) or measured.lane is not None
    return differ or (single and (alone.usage.delay or 0.0) > 0.25 * alone.usage.wall)


def _lower(level: Confidence) -> Confidence:
    return LEVELS[max(0, LEVELS.index(level) - 1)]


def _remedy(
    name: str, what: str, rates: Rates, seconds: float, confidence: Confidence, why: str
) -> Remedy:
    return Remedy(name, what, 1 / seconds, rates.now / seconds, confidence, why)


def computes(measured: Measurements) -> bool | None:
    """Whether the loader computes rather than waits; None where the kernel does not tell."""
    busy = measured.by_worker.busy
    return None if busy is None else busy >= 0.5


def _workers(measured: Measurements, rates: Rates) -> Iterator[Remedy]:
    have, cpu = measured.setup.workers, computes(measured) is not False
    if have is None:
        yield from _background(measured, rates)
        return
    in_the_way = max(1.0, rates.load * have / rates.work) if have else 1.0
    work = rates.work * in_the_way
    if not have:
        work += measured.setup.batch_nbytes / WORKER_RATE
    if have > 1 and in_the_way > CONTENTION:
        why = f"{have} workers already take {in_the_way:.1f} times as long as one alone, each"
        yield _remedy("workers", "more workers", rates, rates.now, "medium", why)
        return
    most = rates.cores if cpu else max(WAITING_WORKERS, have)
    count = min(max(math.ceil(work / (0.9 * rates.floor)), have + 1), max(most, 1))
    if count <= have:
        why = f"{have} workers have {rates.cores} cores, and loading computes"
        yield _remedy("workers", "more workers", rates, rates.now, "medium", why)
        return
    load = max(work / count, rates.load_cpu / rates.cores)
    extra = stalls(measured, count * measured.setup.prefetch, max(rates.floor, load))
    after = dataclasses.replace(rates, load=load, overlap=1.0).together(extra)
    why = f"one worker needs {_ms(work)} a batch, {count} of them {_ms(load)}, beside the step"
    confidence: Confidence = "high" if cpu else "medium"
    if cpu and count == rates.cores:
        confidence, why = "medium", why + ", which needs a core as well"
    elif not cpu and measured.by_worker.usage.read_bytes:
        confidence, why = "low", why + "; less where the disk is what limits them"
    yield _remedy("workers", f"num_workers={count}", rates, after, confidence, why)


def _background(measured: Measurements, rates: Rates) -> Iterator[Remedy]:
    """Of a loader that is no `DataLoader`: whether it loads ahead is all that can be said."""
    if measured.setup.cached:
        return
    after = dataclasses.replace(rates, overlap=1.0).together()
    why = "as slow as the slower of both, where it loads during the step"
    what = "load ahead of the step, in a DataLoader's worker or a thread"
    yield _remedy("workers", what, rates, after, "medium", why)


def stalls(measured: Measurements, ahead: int, pace: float) -> float:
    """Seconds a batch that the loop waits for slow batches, with `ahead` in the making.

    Batches come in order: while a worker is at a slow one, the step uses up what lies ready.
    """
    work = measured.by_worker
    late = [max(0.0, t - ahead * pace) for i, t in enumerate(work.seconds) if i != work.outlier]
    return statistics.fmean(late)


def _prefetch(measured: Measurements, rates: Rates) -> Iterator[Remedy]:
    have = measured.setup.workers
    if not have or measured.by_worker.tail < 0.1 or rates.load > 1.1 * rates.floor:
        return
    pace = max(rates.floor, rates.load)
    factor = math.ceil(measured.by_worker.max / pace / have) + 1
    if factor <= measured.setup.prefetch:
        return
    factor = min(factor, 64)
    extra = stalls(measured, have * factor, pace)
    after = dataclasses.replace(rates, overlap=1.0).together(extra)
    why = f"{have * factor} batches ahead outlast the slowest, {_ms(measured.by_worker.max)}"
    yield _remedy("prefetch", f"prefetch_factor={factor}", rates, after, "medium", why)


def _precache(measured: Measurements, rates: Rates) -> Iterator[Remedy]:
    if measured.setup.cached:
        return
    cpu = measured.setup.batch_nbytes / CACHED_RATE
    load = cpu / min(CACHED_THREADS, rates.cores)
    after = dataclasses.replace(rates, load=load, load_cpu=cpu, overlap=1.0).together()
    what = "cache with precache build, read with precache.Loader"
    why = f"reading {measured.setup.batch_nbytes / 1e6:.3g} MB of cached tensors costs {_ms(cpu)}"
    confidence: Confidence = "high" if measured.setup.workers is not None else "medium"
    if load > 0.5 * rates.floor:
        confidence, why = "low", why + ", which depends on their codec"
    why += "; random augmentations move to the device"
    yield _remedy("precache", what, rates, after, confidence, why)


def _pinned(measured: Measurements, rates: Rates) -> Iterator[Remedy]:
    copies = measured.copies
    if copies is None or copies.pinned:
        return
    saved = min(rates.copy, max(0.0, copies.as_given - copies.from_pinned))
    after = dataclasses.replace(rates, copy=rates.copy - saved).together()
    what = "pin_memory=True, and .to(device, non_blocking=True)"
    why = f"a copy takes {_ms(copies.as_given)}, from page-locked memory {_ms(copies.from_pinned)}"
    yield _remedy("pinned memory", what, rates, after, "medium", why)


def _block_shuffle(measured: Measurements, rates: Rates) -> Iterator[Remedy]:
    cold, setup = measured.cold, measured.setup
    if cold is None or not measured.sequential or not setup.cached or setup.block_shuffle:
        return
    read = cold.a_batch(cold.usage.read_bytes)
    load = max(measured.loader.mean, read / measured.sequential)
    after = dataclasses.replace(rates, load=min(load, rates.load)).together()
    why = f"the disk delivers {measured.sequential / 1e6:,.0f} MB/s in a row"
    yield _remedy("block shuffle", 'shuffle="block"', rates, after, "low", why)


def _faster_disk(measured: Measurements, rates: Rates) -> Iterator[Remedy]:
    level: Confidence = "medium"
    if measured.cold is not None and not measured.fits:
        load, why = measured.loader.mean, "at most: as fast as from memory"
    elif measured.cold is None and computes(measured) is False:
        load = min(rates.load, rates.load_cpu / max(1, measured.setup.workers or 1))
        level, why = "low", "at most: if all that is not CPU time was waiting for it"
    else:
        return
    after = dataclasses.replace(rates, load=load).together()
    what = "a faster disk or network, or a local copy"
    yield _remedy("faster disk", what, rates, after, level, why)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
