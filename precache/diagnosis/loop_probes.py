"""Probes of a diagnosis: short runs of a loader and a step, alone and together."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import random
import time
import timeit
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from precache.diagnosis.measurements import SLOW, Copies, Measurements, Setup, TimedRun
from precache.errors import UsageError
from precache.loading.dataset import CachedDataset, dataset_of
from precache.loading.loader import Loader
from precache.loading.loop import Loop, counters_of
from precache.loading.mixing import Mixture
from precache.loading.slots import map_tensors
from precache.runtime.machine import current_device
from precache.runtime.spread import Spread
from precache.runtime.usage import cores, read_usage

WARMUP = 3
"""Number of steps before timing starts."""

MIN_BATCHES = 3
"""Minimum number of batches of a run, unless they take over three times its limit."""

MIN_SLOW, SLOW_SHARE = 4, 0.1
"""Slow batches that a run is to have if they take this share of its time."""

COPY_REPEATS = 5

READY = 30
"""Batches that are taken from a worker that has them at hand."""
READY_SECONDS = 30.0
"""Seconds after which that worker counts as unreachable."""


@contextlib.contextmanager
def restored(loader: Any, objects: Sequence[Any]) -> Iterator[None]:
    """Save states, and restore them after the block, so that a loader yields the same batches.

    Parameters
    ----------
    objects
        Objects with `state_dict` and `load_state_dict`: models, optimizers, schedulers.
    """
    for item in objects:
        if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
            raise UsageError(
                f"restore has {item!r}, which has no state_dict and load_state_dict; give "
                "models, optimizers and the like"
            )
    placed = [loader] if isinstance(loader, Loop) else []
    states = [(item, copy.deepcopy(item.state_dict())) for item in (*placed, *objects)]
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
    owners = (loader, batch_sampler, *samplers)
    candidates = [getattr(owner, "generator", None) for owner in owners]
    generators = [(one, one.get_state()) for one in candidates if isinstance(one, torch.Generator)]
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002  # users draw from it
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    devices = range(torch.cuda.device_count() if on_cuda else 0)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002  # as above
        for generator, state in generators:
            generator.set_state(state)
        for item, state in states:
            item.load_state_dict(state)


class Limits(NamedTuple):
    """Limits of each run; a run ends at the first one that it reaches."""

    seconds: float
    steps: int


def batches_of(
    loader: Any, workers: int | None = None
) -> Generator[tuple[Any, bool], None, NoReturn]:
    """Yield the batches of a loader, and whether one is the first of an epoch, until closed.

    Parameters
    ----------
    workers
        Overrides `num_workers` of a `DataLoader`.

    Raises
    ------
    UsageError
        There is no batch, or no other after the last one of an iterator.
    """
    single_pass = isinstance(loader, Iterator)
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)  # the original keeps its persistent workers
        loader._iterator = None
        if workers is not None:
            loader.num_workers = workers
    while True:
        iterator, taken = iter(loader), 0
        with contextlib.suppress(StopIteration):
            for taken in itertools.count():
                yield next(iterator), taken == 0 and not single_pass
        if not taken:
            raise UsageError(
                f"{type(loader).__name__} has no batches left; give a loader that is not empty, "
                "and that can be iterated repeatedly or has enough batches"
            )


@dataclass
class Probes:
    """The probes of one diagnosis.

    Attributes
    ----------
    tick
        Called with the name of each measurement.
    """

    loader: Any
    step: Callable[[Any], Any]
    limits: Limits
    device: torch.device | None
    tick: Callable[[str], None]

    def __post_init__(self) -> None:
        loader = self.loader
        self._workers = loader.num_workers if isinstance(loader, DataLoader) else None
        sources = loader.loaders if isinstance(loader, Mixture) else [loader]
        self._together = sum(one.together for one in sources if isinstance(one, Loader)) or 1
        self._prefetch = getattr(loader, "prefetch_factor", None) or 2

    def run(self) -> Measurements:
        """Run all probes."""
        self._batches = batches_of(self.loader)
        try:
            return self._measure().without_outlier()
        finally:
            self._batches.close()

    def _measure(self) -> Measurements:
        self.tick("the step alone")
        began = time.perf_counter()
        batch, _ = next(self._batches)
        start = time.perf_counter() - began
        step, copies, setup = self._measure_step(batch)
        take = self._handover(batch)
        del batch
        # In two parts, far apart: what others do on this machine changes from second to second.
        seconds, half = self.limits.seconds / 2, self.limits.steps // 2
        self.tick("both together")
        together = self._loop(Limits(seconds, self.limits.steps - half), self.step)
        self.tick("the loader alone")
        loader = self._loop(self.limits)
        single_worker = None
        if (self._workers or 0) > 1:
            self.tick("one worker alone")
            self._batches.close()
            # Not in this process: a dataset that was read here might not survive a later fork.
            with contextlib.closing(batches_of(self.loader, workers=1)) as batches:
                single_worker = self._run(batches, self.limits, self._prefetch)
            self._batches = batches_of(self.loader)
        self.tick("both together, again")
        together += self._loop(Limits(seconds, max(1, half)), self.step)
        return Measurements(
            step=step,
            loader=loader,
            together=together,
            setup=setup,
            start=start,
            take=take,
            single_worker=single_worker,
            copies=copies,
        )

    def _measure_step(self, batch: Any) -> tuple[TimedRun, Copies | None, Setup]:
        """Time the step on a batch on the device and, on CUDA, on the batch as it was loaded."""
        self._run_step(batch)
        device = self.device or current_device()
        on_device = map_tensors(batch, lambda tensor: tensor.to(device))
        step = _time(lambda: self._run_step(on_device), self.limits, WARMUP)
        setup = Setup(
            workers=self._workers,
            prefetch=self._prefetch,
            in_order=getattr(self.loader, "in_order", True),
            pin_memory=bool(getattr(self.loader, "pin_memory", False)),
            persistent=bool(getattr(self.loader, "persistent_workers", False)),
            epoch=_length(self.loader),
            cached=_reads_store(self.loader),
            cuda=device.type == "cuda",
            cores=cores(),
            batch_nbytes=sum(array.nbytes for array in _arrays(batch)),
        )
        return step, self._copies(batch, device, step), setup

    def _run_step(self, batch: Any) -> tuple[bool, float]:
        self.step(map_tensors(batch, lambda tensor: tensor))  # which may pop from its containers
        return True, 0.0

    def _handover(self, batch: Any) -> float:
        """Return the mean time to take a batch that is ready from a worker; 0 if unknown."""
        if self._workers is None or not _can_be_sent(batch):
            return 0.0
        copies: Any = [batch] * 2 * READY  # more than are taken: no second epoch begins
        ready = DataLoader[Any](
            copies,
            batch_size=None,
            num_workers=1,
            timeout=READY_SECONDS,
            multiprocessing_context=self.loader.multiprocessing_context or "fork",
        )
        limits = Limits(self.limits.seconds / 2, min(READY, self.limits.steps))
        with contextlib.closing(batches_of(ready)) as batches:
            try:
                next(batches)
            except (AssertionError, OSError, RuntimeError):  # no process can be started or reached
                return 0.0
            return Spread.of(self._run(batches, limits, WARMUP, step=self.step).waits).mean

    def _loop(self, limits: Limits, step: Callable[[Any], Any] = lambda batch: None) -> TimedRun:
        """Time the loader, in rounds in which workers deliver, and a `Loader` of small batches."""
        ahead = 2 * self._together if self._workers is None else self._workers * self._prefetch
        stride = max(self._together, self._workers or 0)
        return self._run(self._batches, limits, ahead, stride, step)

    def _run(
        self,
        batches: Iterator[tuple[Any, bool]],
        limits: Limits,
        lead: int,
        stride: int = 1,
        step: Callable[[Any], Any] = lambda batch: None,
    ) -> TimedRun:
        waits: list[float] = []

        def once() -> tuple[bool, float]:
            started = time.perf_counter()
            batch, fresh = next(batches)
            waits.append(time.perf_counter() - started)
            step(batch)
            # The first of an epoch may also start workers.
            return not fresh or self._workers == 0, waits[-1]

        before = counters_of(self.loader)
        run = _time(once, limits, lead, stride)
        waited = sum(waits)
        transforms = counters_of(self.loader).plus(before, -1).wait_for_transforms(waited)
        return replace(run, transform_share=transforms / max(waited, 1e-9))

    def _copies(self, batch: Any, device: torch.device, step: TimedRun) -> Copies | None:
        arrays = [array for array in _arrays(batch) if isinstance(array, torch.Tensor)]
        tensors = [tensor for tensor in arrays if tensor.device.type == "cpu"]
        if device.type != "cuda" or not tensors:
            return None
        self.tick("copies to the device")
        pinned = all(tensor.is_pinned() for tensor in tensors)
        as_given = from_pinned = _copy_seconds(tensors, device)
        if not pinned:
            from_pinned = _copy_seconds([tensor.pin_memory() for tensor in tensors], device)
        stepped = _time(lambda: self._run_step(batch), self.limits)
        return Copies(pinned, as_given, from_pinned, max(0.0, stepped.mean - step.mean))


def _time(
    once: Callable[[], tuple[bool, float]], limits: Limits, lead: int = 0, stride: int = 1
) -> TimedRun:
    """Time repeated calls of `once`, which returns whether to count it and the seconds it waited.

    Up to `lead` calls before are not timed. The run consists of whole rounds of `stride` calls.
    """
    started = time.perf_counter()
    for number in range(lead):
        once()
        if number + 1 >= min(stride, lead) and time.perf_counter() - started > limits.seconds:
            break
    _synchronise()
    before = read_usage()
    counted: list[tuple[float, float]] = []
    uncounted: list[tuple[float, float]] = []
    started = now = time.perf_counter()

    def is_enough() -> bool:
        passed, count = now - started, max(len(counted), len(uncounted) // 2)
        if passed > 3 * limits.seconds:
            return True
        if count < min(MIN_BATCHES, limits.steps) or count % stride:
            return False
        return count >= limits.steps or (passed > limits.seconds and not _is_unsettled(counted))

    while not is_enough():
        counts, waited = once()
        last, now = now, time.perf_counter()
        (counted if counts else uncounted).append((now - last, waited))
    _synchronise()
    total = time.perf_counter() - started
    kept = counted or uncounted  # epochs of a single batch
    total -= sum(seconds for seconds, _ in uncounted) if counted else 0.0
    seconds, waits = zip(*kept, strict=True)
    return TimedRun(seconds, total, read_usage() - before, waits)


def _is_unsettled(counted: Sequence[tuple[float, float]]) -> bool:
    """Return whether a few slow batches take much of the time, so that their share is uncertain."""
    times = np.array([seconds for seconds, _ in counted])
    slow = times[times > SLOW * np.median(times)] if counted else times
    return 0 < len(slow) < MIN_SLOW and slow.sum() > SLOW_SHARE * times.sum()


def _can_be_sent(batch: Any) -> bool:
    """Return whether another process can send a batch here; one of a device cannot be forked."""
    tensors = [array for array in _arrays(batch) if isinstance(array, torch.Tensor)]
    if any(tensor.device.type != "cpu" or tensor.requires_grad for tensor in tensors):
        return False
    with contextlib.suppress(Exception):  # of the user's own classes
        return bool(pickle.dumps(batch))
    return False


def _synchronise() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        torch.cuda.synchronize()


def _copy_seconds(tensors: Sequence[torch.Tensor], device: torch.device) -> float:
    """Return the time of the fastest of a few synchronous copies."""

    def copy_all() -> None:
        _copied = [tensor.to(device, non_blocking=True) for tensor in tensors]
        _synchronise()

    return min(timeit.repeat(copy_all, _synchronise, repeat=COPY_REPEATS, number=1))


def _arrays(batch: Any) -> Iterator[torch.Tensor | np.ndarray]:
    """Yield the tensors and arrays of a batch."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _arrays(value)


def _reads_store(loader: Any) -> bool:
    dataset = dataset_of(loader)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(loader, Loop) or isinstance(dataset, CachedDataset)


def _length(loader: Any) -> int | None:
    with contextlib.suppress(Exception):  # the user's own method, which may raise anything
        return len(loader)
    return None
