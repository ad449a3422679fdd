"""The probes of a diagnosis: short runs of a loader and a step, alone and together."""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from precache.diagnosis.measurements import Copies, Measurements, Run, Setup
from precache.diagnosis.page_cache import Files, evict, files_of, sequential_rate, version_of
from precache.diagnosis.snapshot import Snapshot
from precache.errors import UsageError
from precache.loading.loader import Loader
from precache.runtime.usage import available_bytes, cores, read_usage

WARMUP = 3
"""Steps before the step is timed."""

FEWEST = 3
"""Batches of a run, however long they take, unless that is several times its limit."""

COPIES = 5


@dataclass(frozen=True)
class Limits:
    """Of each run: it ends when either is reached."""

    seconds: float
    steps: int


class Batches:
    """The batches of a loader, one epoch after another, until closed.

    Parameters
    ----------
    workers
        In place of a `DataLoader`'s own number.
    """

    def __init__(self, loader: Iterable[Any], workers: int | None = None) -> None:
        self._loader: Any = loader
        if isinstance(loader, DataLoader):
            self._loader = copy.copy(loader)  # persistent workers that run already stay its own
            self._loader._iterator = None
            if workers is not None:
                self._loader.num_workers = workers
        self._iterator: Iterator[Any] | None = None
        self._alone = isinstance(loader, Iterator)

    def take(self) -> tuple[Any, bool]:
        """The next batch, and whether it is the first of an iteration."""
        if self._iterator is not None:
            with contextlib.suppress(StopIteration):
                return next(self._iterator), False
            self.close()
        self._iterator = iter(self._loader)
        try:
            return next(self._iterator), not self._alone
        except StopIteration:
            raise UsageError(
                f"{type(self._loader).__name__} gave no batch, or ran out; give a loader that "
                "has some, and can be iterated again or does not end soon"
            ) from None

    def close(self) -> None:
        """End the iteration, and with it the workers that it started."""
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, Generator) and not self._alone:
            iterator.close()
        if isinstance(self._loader, DataLoader):
            self._loader._iterator = None  # where persistent workers would live on


def measure(
    loader: Iterable[Any],
    step: Callable[[Any], Any],
    limits: Limits,
    device: torch.device | None,
    files: Sequence[Path] | None,
    restore: Sequence[Any],
    tick: Callable[[str], None],
) -> Measurements:
    """Run everything, and put back what can be."""
    paths = list(files) if files is not None else files_of(loader)
    with Snapshot(loader, restore) as snapshot:
        batches = Batches(loader)
        try:
            return _Probes(loader, step, limits, device, paths, batches, snapshot, tick).measure()
        finally:
            batches.close()


class _Probes:
    """One diagnosis under way."""

    def __init__(
        self,
        loader: Any,
        step: Callable[[Any], Any],
        limits: Limits,
        device: torch.device | None,
        paths: list[Path],
        batches: Batches,
        snapshot: Snapshot,
        tick: Callable[[str], None],
    ) -> None:
        self._loader, self._step, self._limits, self._device = loader, step, limits, device
        self._paths, self._batches, self._snapshot, self._tick = paths, batches, snapshot, tick
        self._workers = loader.num_workers if isinstance(loader, DataLoader) else None
        self._together = loader.together if isinstance(loader, Loader) else 1
        self._prefetch = getattr(loader, "prefetch_factor", None) or 2
        self._alone = isinstance(loader, Iterator)

    def measure(self) -> Measurements:
        cold, note = self._cold()
        rewound = cold is not None
        self._tick("the step alone")
        self._rewind()
        began = time.perf_counter()
        batch, _ = self._batches.take()
        start = time.perf_counter() - began
        alone, copies, setup, synchronisations = self._stepping(batch)
        del batch
        self._tick("the loader alone")
        loading = self._load(rewound)
        self._tick("both together")
        together = self._train(rewound)
        return Measurements(
            step=alone,
            loader=loading,
            together=together,
            setup=setup,
            start=start,
            lane=self._lane(rewound),
            cold=cold,
            cold_note=note,
            sequential=self._sequential() if cold else None,
            copies=copies,
            synchronisations=synchronisations,
        )

    def _stepping(self, batch: Any) -> tuple[Run, Copies | None, Setup, tuple[str, ...]]:
        """The step on one batch, on the device and, where that is another place, as it comes."""
        self._step(batch)
        device = self._device or _current_device()
        held = _mapped(batch, lambda tensor: tensor.to(device))
        for _ in range(WARMUP):
            self._step(held)
        alone = _timed(lambda: self._do(held), self._limits)
        copies = self._copies(batch, device, alone)
        setup = self._setup(device, sum(tensor.nbytes for tensor in _tensors(batch)))
        return alone, copies, setup, _synchronisations(lambda: self._step(held), device)

    def _cold(self) -> tuple[Run | None, str]:
        """The loader with nothing in the page cache; or why that cannot be had."""
        if self._alone:
            return None, "the loader is an iterator, which cannot be begun again"
        if not self._paths:
            return None, "the loader's files are not known; give files="
        self._tick("the loader alone, from the disk")
        if not evict(self._paths, self._limits.seconds):
            return None, f"{len(self._paths):,} files are too many to drop from memory in time"
        # An epoch at most: the next one finds in memory what this one read.
        epoch = (_length(self._loader) or self._limits.steps) - self._ahead
        once = replace(self._limits, steps=max(1, min(self._limits.steps, epoch)))
        run = self._load(True, once)
        if not run.usage.read_bytes:
            return None, "dropped from memory, the files were still not read from a disk"
        return run, ""

    def _do(self, batch: Any) -> tuple[bool, float]:
        self._step(batch)
        return True, 0.0

    def _load(self, rewound: bool, limits: Limits | None = None) -> Run:
        if rewound:
            self._rewind()
        # Workers deliver in rounds, and so does a `Loader` its small batches: whole ones, after
        # those that they had in the making.
        stride = max(self._together, self._workers or 0)
        limits = limits or self._limits
        return _timed(lambda: self._fetch(self._batches), limits, self._ahead, stride)

    def _train(self, rewound: bool) -> Run:
        if rewound:
            self._rewind()

        def once() -> tuple[bool, float]:
            started = time.perf_counter()
            batch, fresh = self._batches.take()
            waited = time.perf_counter() - started
            self._step(batch)
            return self._counts(fresh), waited

        return _timed(once, self._limits, self._ahead, max(self._together, self._workers or 0))

    def _fetch(self, batches: Batches) -> tuple[bool, float]:
        _, fresh = batches.take()
        return self._counts(fresh), 0.0

    def _counts(self, fresh: bool) -> bool:
        """The first batch of an epoch is like the others where nothing has to be started."""
        return not fresh or self._workers == 0

    @property
    def _ahead(self) -> int:
        return 2 * self._together if self._workers is None else self._workers * self._prefetch

    def _rewind(self) -> None:
        self._batches.close()
        self._snapshot.rewind()

    def _lane(self, rewound: bool) -> Run | None:
        """One worker alone: in this process, a dataset might open files that a fork breaks."""
        if (self._workers or 0) < 2:
            return None
        self._batches.close()
        if rewound:
            self._snapshot.rewind()
        self._tick("one worker alone")
        batches = Batches(self._loader, workers=1)
        try:
            return _timed(lambda: self._fetch(batches), self._limits, self._prefetch)
        finally:
            batches.close()

    def _setup(self, device: torch.device, nbytes: int) -> Setup:
        loader, version = self._loader, version_of(self._loader)
        shuffle = loader.identity()["shuffle"] if isinstance(loader, Loader) else None
        return Setup(
            workers=self._workers,
            prefetch=self._prefetch,
            pin_memory=bool(getattr(loader, "pin_memory", False)),
            persistent=bool(getattr(loader, "persistent_workers", False)),
            epoch=_length(loader),
            cached=version is not None,
            block_shuffle=shuffle is not None and shuffle["kind"] == "block",
            cuda=device.type == "cuda",
            cores=cores(),
            batch_nbytes=nbytes,
            memory=available_bytes(),
            files=Files.of(self._paths),
        )

    def _sequential(self) -> float | None:
        return sequential_rate(max(self._paths, key=lambda path: path.stat().st_size))

    def _copies(self, given: Any, device: torch.device, alone: Run) -> Copies | None:
        tensors = [tensor for tensor in _tensors(given) if tensor.device.type == "cpu"]
        if device.type != "cuda" or not tensors:
            return None
        self._tick("copies to the device")
        pinned = all(tensor.is_pinned() for tensor in tensors)
        locked = [tensor.pin_memory() for tensor in tensors]
        as_given = _copy_seconds(tensors, device)
        from_pinned = as_given if pinned else _copy_seconds(locked, device)
        stepped = _timed(lambda: self._do(given), self._limits)
        return Copies(pinned, as_given, from_pinned, max(0.0, stepped.mean - alone.mean))


def _timed(
    once: Callable[[], tuple[bool, float]], limits: Limits, lead: int = 0, stride: int = 1
) -> Run:
    """Repeat until a limit; `once` tells whether its time counts, and what part was a wait."""
    began = time.perf_counter()
    for number in range(lead):
        once()
        if number + 1 >= min(stride, lead) and time.perf_counter() - began > limits.seconds:
            break
    _synchronise()
    before = read_usage()
    counted: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    started = now = time.perf_counter()
    while True:
        counts, waited = once()
        last, now = now, time.perf_counter()
        (counted if counts else others).append((now - last, waited))
        if _enough(max(len(counted), len(others) // 2), now - started, limits, stride):
            break
    _synchronise()
    total = time.perf_counter() - started
    kept = counted or others  # epochs of a single batch
    total -= sum(seconds for seconds, _ in others) if counted else 0.0
    seconds, waits = zip(*kept, strict=True)
    return Run(seconds, total, read_usage() - before, waits)


def _enough(count: int, seconds: float, limits: Limits, stride: int) -> bool:
    if seconds > 3 * limits.seconds:
        return True
    over = seconds > limits.seconds or count >= limits.steps
    return over and count >= min(FEWEST, limits.steps) and count % stride == 0


def _current_device() -> torch.device:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _synchronise() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        torch.cuda.synchronize()


def _copy_seconds(tensors: Sequence[torch.Tensor], device: torch.device) -> float:
    """The fastest of a few copies, each waited for."""
    best = math.inf
    for _ in range(COPIES):
        _synchronise()
        started = time.perf_counter()
        copied = [tensor.to(device, non_blocking=True) for tensor in tensors]
        _synchronise()
        best = min(best, time.perf_counter() - started)
        del copied
    return best


def _synchronisations(step: Callable[[], Any], device: torch.device) -> tuple[str, ...]:
    """File and line of each place where one step waits for the device, as torch warns of it."""
    if device.type != "cuda":
        return ()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    found = [each for each in caught if "called a synchronizing" in str(each.message)]
    return tuple(sorted({f"{Path(each.filename).name}:{each.lineno}" for each in found}))


def _mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with its tensors changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _mapped(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(value, change) for value in batch)
    return batch


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(batch, keep)
    return found


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
