"""`meter`: measure for any loader how long a training loop waits for its data, and why."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch

from precache.errors import UsageError
from precache.loading.dataset import CachedDataset, dataset_of
from precache.loading.loader import Loader
from precache.loading.loop import counters_of, end_all
from precache.metering.publisher import MeterSettings
from precache.metering.recorder import StallRecorder, keys_in_batch
from precache.metering.report import SampleKeys, StallReport
from precache.outputs import Output

Batch = TypeVar("Batch")


class Meter(Generic[Batch]):
    """Iterates over a loader and measures it; returned by `meter`.

    Attributes
    ----------
    loader
        The loader that is measured.
    """

    def __init__(self, loader: Iterable[Batch], settings: MeterSettings) -> None:
        self.loader = loader
        self._recorder = StallRecorder(settings, self._locate, partial(counters_of, loader))
        self._iterators: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()
        weakref.finalize(self, end_all, self._iterators)  # at exit, while modules can still be used

    def __len__(self) -> int:
        """Return the batches per epoch, if the loader has a length."""
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError for a loader without one

    def __iter__(self) -> Iterator[Batch]:
        iterator = self._measured()
        self._iterators.add(iterator)
        return iterator

    def _measured(self) -> Generator[Batch, None, None]:
        recorder, ended = self._recorder, False
        recorder.begin()
        try:
            for batch in self.loader:
                recorder.batch_arrived()
                recorder.inspect(batch)
                batches = [batch]
                del batch
                yield batches.pop()  # keep no reference: the caller may free the batch
                recorder.batch_requested()
            ended = True
        finally:
            recorder.finish(ended)

    def report(self) -> StallReport:
        """Return a report of the steps since the last one; call it on the loop's own thread.

        No later report contains these steps. Nothing is sent to other ranks or outputs.
        """
        return self._recorder.take()

    def flush(self) -> None:
        """Wait until all reports so far are published."""
        self._recorder.publisher.flush()

    def _locate(self, batch: Batch) -> Callable[[], SampleKeys]:
        loader = self.loader
        if isinstance(loader, Loader):
            return loader.locate()
        batch_keys = keys_in_batch(batch)
        dataset = dataset_of(loader)
        if isinstance(dataset, CachedDataset):
            keys, rows = dataset.version.keys, dataset.version.rows
            # A subclass may give keys of its own.
            return lambda: tuple(
                keys[key] if isinstance(key, int) and 0 <= key < rows else key
                for key in batch_keys()
            )
        return batch_keys


def meter(
    loader: Iterable[Batch],
    every: int | str = 100,
    *,
    name: str = "data",
    to: Sequence[Output] | None = None,
    threshold: float = 0.01,
    device: str | torch.device | None = None,
) -> Meter[Batch]:
    """Measure how long a loop over `loader` waits for data, and report it regularly.

    Parameters
    ----------
    loader
        Any iterable of batches; it is iterated once per epoch.
    every
        Steps between two reports, or a time such as ``"30s"`` or ``"5m"``. Remaining steps are
        reported at the end of an iteration.
    name
        Name in the reports, to distinguish several meters; the same on all ranks. Steps and reports
        of a name are numbered through, also if each epoch makes its own meter.
    to
        Callables that take a `StallReport`, such as those of `precache.outputs`; by default
        `precache.outputs.terminal`: a line on standard error if this rank stalls.
    threshold
        Stall ratio above which a rank stalls: lines are written, and rare slow samples listed. With
        0 each wait is a stall.
    device
        Device whose time counts: ``"cpu"`` for the host; by default the current CUDA device if
        CUDA is in use when an iteration begins.

    Returns
    -------
    Meter
        Iterate over it in place of `loader`, for any number of epochs. `Meter.loader` is the
        loader, ``len()`` its length, and `Meter.report` returns a report at once. `Meter.flush`
        waits for the reports so far, as the end of the process does for up to 2 seconds.

    Raises
    ------
    UsageError
        `loader` is no iterable, or `every`, `threshold`, `device` or `to` is invalid.

    Notes
    -----
    **Definitions.** The *data* time of a step is from requesting a batch to receiving it. The
    *iteration* time is from requesting a batch to requesting the next one. The *stall ratio* is the
    sum of data times over the sum of iteration times. A report covers all steps since the last
    one. If a loop ends early, its last step does not count. If a `Loader` or `precache.mix` applies
    a `transform` on the CPU, the report also has the part of the stall ratio that is due to it.

    **On CUDA** steps are queued: the host runs ahead of the device, and may wait for data while
    the device is still busy, which costs nothing. So the meter records events on the current stream
    when a batch is requested and when it arrives. The data time is the time of the device between
    them, in which it does nothing but copies and transforms that the loader queued there. The meter
    never synchronises: steps that the device has not finished are in the next report (in that of
    `Meter.report` after ``torch.cuda.synchronize()``).

    **Rare slow samples.** If the mean data time is more than twice the median, the report lists the
    longest waits with the keys of their batches: of a `Loader` or a `CachedDataset`, or of a batch
    that is a mapping with a field ``key`` or ``row``.

    **Reports** are made and sent on one thread, which stays for the life of the process, and looks
    for them ten times a second. Neither a step nor the end of an iteration waits for it, or wakes
    it: that would cost the loop its core, for some milliseconds, where all cores are busy.

    **Ranks** exchange figures through the key-value store at ``MASTER_ADDR`` that
    `torch.distributed` uses, on that thread and without collectives. Rank 0 reports the rank with
    the highest stall ratio, of those that have a meter. Without such a store, or once the process
    group is destroyed, every rank knows its own figures alone. `precache.outputs` says which
    reports of other ranks are written.

    **Machine.** Each report also has, where available, the CPU time of the process tree and the I/O
    wait (both on Linux), and the GPU utilisation (``pip install "precache[meter]"``).

    Examples
    --------
    >>> for images, labels in precache.meter(loader, every=100):  # doctest: +SKIP
    ...     step(images, labels)

    >>> from precache import outputs  # doctest: +SKIP
    >>> to = [outputs.log(), outputs.jsonl("stalls.jsonl"), outputs.tensorboard(writer)]
    >>> metered = precache.meter(loader, every="30s", to=to)  # doctest: +SKIP
    """
    if not isinstance(loader, Iterable):
        raise UsageError(
            f"loader is {loader!r}; give an iterable of batches, such as a Loader or a DataLoader"
        )
    return Meter(loader, MeterSettings(name, every, threshold, to, device))
