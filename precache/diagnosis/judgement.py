"""Verdict on a measured loop, remedies and their predicted gains; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from precache.diagnosis.loop_model import CONTENTION, LoopModel
from precache.diagnosis.measurements import OUTLIER, SLOW, Measurements
from precache.runtime.spread import Spread
from precache.units import in_ms, plain

Verdict = Literal[
    "compute-bound", "CPU-bound", "storage-bound", "contention-bound", "startup-bound",
    "transfer-bound", "variance-bound",
]  # fmt: skip
Confidence = Literal["high", "medium", "low"]

WORTH = 0.1
"""Share of the time from which waiting for data counts as the bottleneck."""
NOISE = 0.33
"""Share of the time up to which it is noise that a loop waits whose loader keeps up."""
CACHED_RATE = 1e9
"""Bytes that a `Loader` decodes per second on one thread with ``image``, the slowest codec."""
WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PREFETCH = (2, 4, 8, 16, 32, 64)
NEARLY = 0.97
"""Share of the best predicted rate with which the smallest change is enough."""
MISFIT = 0.2
"""Relative error of the model for the loop as it is from which its predictions are guesses."""
LOCKED = 1.5
"""Slowdown of a worker beside the others from which that is the bottleneck."""
STRAY_READS = 1 << 20
"""Bytes of a run that are read for other things than samples: pages of code, usage figures."""


@dataclass(frozen=True)
class Remedy:
    """A change to the loop or its environment.

    Attributes
    ----------
    name
        ``workers``, ``prefetch``, ``any order``, ``persistent workers``, ``precache``,
        ``transforms``, ``pinned memory``, ``faster storage``.
    what
        The change.
    batches_per_s
        Predicted speed.
    gain
        Predicted speed over the present one.
    confidence
        Confidence in the prediction: low if the model does not give the measured speed of the loop
        as it is.
    why
        Basis of the prediction, and what might invalidate it.
    """

    name: str
    what: str
    batches_per_s: float
    gain: float
    confidence: Confidence
    why: str


def find_verdict(model: LoopModel) -> tuple[Verdict, str]:
    """Find the bottleneck, and the reason in one sentence."""
    measured, now = model.measured, model.now
    lost = 1 - now * model.step
    at_start = now * model.startup / model.epoch if model.epoch else 0.0
    if at_start > max(WORTH, 0.5 * lost):
        return "startup-bound", f"starting workers takes {at_start:.0%} of each epoch"
    if model.crowded and lost > WORTH:
        return "CPU-bound", "loading and the step compete for the cores and slow each other down"
    noise = lost < NOISE or is_noisy(measured)
    ready = LoopModel(dataclasses.replace(measured, take=0.0))  # which a busy machine makes longer
    if lost < WORTH or (noise and ready.rate() * model.step > 1 - WORTH):
        return "compute-bound", "the step takes the time; data is ready when it is needed"
    if measured.copies and measured.copies.exposed * now > 0.5 * lost:
        return "transfer-bound", "the step waits for its batch to be copied to the device"
    if measured.together.transform_share > 0.5 and model.computing > 0.5:
        return "CPU-bound", "transforms on the CPU compute, and the step waits for them"
    load = model.load(model.setting.workers)
    middle = Spread.of(load).median
    even = np.where(load > SLOW * middle, middle, load)
    time = 1 / model.rate(load)
    if time - 1 / model.rate(even) > 0.5 * (time - model.step):
        return "variance-bound", "most batches are ready in time; rare slow ones hold up the step"
    if model.computing > 0.5:
        return "CPU-bound", "loading computes, and the step waits for it"
    return _waiting(model)


def _waiting(model: LoopModel) -> tuple[Verdict, str]:
    measured, usage = model.measured, model.measured.by_worker.usage
    expected = measured.setup.batch_nbytes * len(measured.by_worker.seconds)
    reads = (usage.called_bytes or 0.0) > STRAY_READS + expected / 2
    if usage.cpu is None:
        why = "the step waits for loading; the system does not report whether it computes"
    elif (usage.read_bytes or 0.0) > STRAY_READS:
        why = "loading waits for the disk, and the step waits for loading"
    elif model.contention > LOCKED and not reads:
        slower = f"each worker takes {model.contention:.1f} times as long beside the others"
        return "contention-bound", f"{slower}: they wait for a lock or a full connection"
    else:
        why = "loading waits rather than computes, for a network or something else"
    return "storage-bound", why


def find_remedies(model: LoopModel) -> tuple[Remedy, ...]:
    """Predict the remedies that apply to this loader, largest gain first.

    The predictions are multiplied by the ratio of the measured and the predicted speed of the loop
    as it is.
    """
    guess = abs(model.fit - 1) > MISFIT or is_noisy(model.measured)
    remedies = []
    for name, what, predicted, confidence, why in _predictions(model):
        rate = max(min(predicted * model.fit, 1 / model.step), 1e-9)
        level: Confidence = "low" if guess else confidence
        remedies.append(Remedy(name, what, rate, rate / model.now, level, why))
    return tuple(sorted(remedies, key=lambda remedy: -remedy.gain))


def is_noisy(measured: Measurements) -> bool:
    """Return whether something else uses the machine: one worker often waits for a core."""
    run = measured.by_worker
    return run.share(run.usage.delay) > 0.25


def _predictions(model: LoopModel) -> Iterator[tuple[str, str, float, Confidence, str]]:
    measured, setup, setting = model.measured, model.measured.setup, model.setting
    if not setup.cached:
        most = setup.cores if model.computing > 0.5 else WORKERS[-1]
        counts = [n for n in WORKERS if setting.workers < n <= most] or [setting.workers + 1]
        count, rate = _least(model, "workers", counts if setup.workers is not None else [1])
        what = f"num_workers={count}"
        if setup.workers is None:
            what = "prefetch batches during the step, in a DataLoader's worker or a thread"
        loads = f"one worker needs {in_ms(float(model.work.mean()))} per batch"
        needs = f"{count} need {in_ms(float(model.load(count).mean()) / count)}, beside the step"
        if model.contention > CONTENTION:
            needs = f"and {model.contention:.1f} times as long beside the others"
        yield "workers", what, rate, "medium", f"{loads}, {needs}"
        seconds = setup.batch_nbytes / CACHED_RATE
        threads = min(4, setup.cores)
        read = np.full(len(model.work), max(seconds / threads, 1e-6))
        rate = model.rate(read, workers=1, prefetch=2, startup=(0.0,))
        sure: Confidence = "low" if seconds > model.step else "high"
        what = "build a store with precache build, read it with precache.Loader"
        why = f"reading {setup.batch_nbytes / 1e6:.3g} MB of cached tensors costs {in_ms(seconds)}"
        yield "precache", what, rate, sure, f"{why}; random augmentations move to the device"
    if setup.workers:
        window = f"{setting.window} batches are loaded ahead"
        factor, rate = _least(model, "prefetch", [n for n in PREFETCH if n > setup.prefetch])
        yield "prefetch", f"prefetch_factor={factor}", rate, "medium", window
    if setup.workers and setup.in_order:
        rate, why = model.rate(in_order=False), "a slow batch no longer holds up those behind it"
        yield "any order", "in_order=False", rate, "medium", f"{why}; the order then varies"
    if model.startup:
        rate, why = model.rate(startup=(0.0,)), f"workers start in {in_ms(model.startup)}"
        yield "persistent workers", "persistent_workers=True", rate, "high", why
    share = measured.together.stall * measured.together.transform_share
    if share:
        what = (
            "fewer transforms on the CPU: cache fixed ones by the recipe, do others on the device"
        )
        why = f"at most: the loop waits for them {share:.0%} of the time"
        yield "transforms", what, model.rate() / max(1 - share, 1e-9), "medium", why
    if measured.copies and not measured.copies.pinned:
        copies = measured.copies
        left = max(0.0, copies.exposed - max(0.0, copies.as_given - copies.from_pinned))
        why = f"a copy takes {in_ms(copies.as_given)}, from page-locked memory "
        what = "pin_memory=True, and .to(device, non_blocking=True)"
        rate = model.rate(copy=1e3 * left)
        yield "pinned memory", what, rate, "medium", why + in_ms(copies.from_pinned)
    waits = 1 - min(1.0, model.computing)
    if waits > 0.5:
        load, what = model.work * max(1e-3, 1 - waits), "a faster disk or network, or a local copy"
        why = "at most: if all the time that loading does not compute is waiting for storage"
        yield "faster storage", what, model.rate(load), "low", why


def _least(model: LoopModel, name: str, values: list[int]) -> tuple[int, float]:
    """Return the least value with nearly the best predicted rate, and that rate."""
    rates = {value: model.rate(None, **{name: value}) for value in values} or {0: model.rate()}
    return next(one for one in rates.items() if one[1] >= NEARLY * max(rates.values()))


def find_flags(model: LoopModel) -> Iterator[str]:
    """Yield other problems, one sentence each."""
    measured, setup = model.measured, model.measured.setup
    if (setup.workers or 0) > 2 * setup.cores and model.computing > 0.5:
        yield (
            f"num_workers={setup.workers} on {setup.cores} cores: the workers compete for them; "
            f"give at most {setup.cores}"
        )
    if setup.pin_memory and not setup.cuda:
        yield "pin_memory=True, but the step uses no CUDA device: page-locking only costs time"
    if measured.outlier:
        took = f"one batch took {plain(measured.outlier, 2)} s, over {OUTLIER} times the median"
        yield f"{took}, and no other was slow; the means leave it out"
    if abs(model.fit - 1) > MISFIT:
        yield f"the model gives {1 / model.fit:.2f} times the measured speed: gains are rough"
    if is_noisy(measured):
        yield "something else uses the machine: the figures are rough; repeat on an idle machine"
