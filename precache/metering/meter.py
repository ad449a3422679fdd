"""The stall meter, for any loader: how long a training loop waits for its data, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from precache import outputs
from precache.loading.dataset import CachedDataset
from precache.loading.loader import Loader
from precache.metering.publisher import Keys, Settings
from precache.metering.recorder import StallRecorder, keys_in_batch
from precache.metering.report import StallReport
from precache.outputs import Output

Batch = TypeVar("Batch")


class Meter(Generic[Batch]):
    """Iterates over a loader and measures it; `meter` makes one.

    Attributes
    ----------
    loader
        As it was given.
    """

    def __init__(self, loader: Iterable[Batch], settings: Settings) -> None:
        self.loader = loader
        self._recorder = StallRecorder(settings, self._locate)

    def __len__(self) -> int:
        """Batches of an epoch, where the loader knows."""
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError for a loader without one

    def __iter__(self) -> Iterator[Batch]:
        recorder, ended = self._recorder, False
        recorder.begin()
        try:
            for batch in self.loader:
                recorder.arrived()
                recorder.look(batch)
                batches = [batch]
                del batch
                yield batches.pop()  # and not a name more: what the caller drops is gone
                recorder.asked()
            ended = True
        finally:
            recorder.finish(ended)

    def report(self) -> StallReport:
        """The steps since the last report, as the loop's own thread may ask at any moment.

        They are in no later report. Nothing is sent to other ranks or to the outputs.
        """
        return self._recorder.take()

    def _locate(self, batch: Batch) -> Callable[[], Keys]:
        loader = self.loader
        if isinstance(loader, Loader):
            return loader.locate()
        found = keys_in_batch(batch)
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, CachedDataset):
            keys = dataset.version.keys
            return lambda: tuple(keys[int(row)] for row in found())
        return found


def meter(
    loader: Iterable[Batch],
    every: int | str = 100,
    *,
    name: str = "data",
    to: Sequence[Output] | None = None,
    threshold: float = 0.01,
    device: str | torch.device | None = None,
) -> Meter[Batch]:
    """Measure how long a loop over `loader` waits for data; a report every so many steps.

    Parameters
    ----------
    loader
        Anything that can be iterated over, by itself or by each epoch.
    every
        Steps between two reports, or seconds, such as ``"30s"``. What is left at the end of an
        iteration is reported then.
    name
        Of what is measured, where several are; the same on all ranks.
    to
        Callables that take a `StallReport`, such as those of `precache.outputs`; by default one
        line in the log (level INFO).
    threshold
        Stall ratio above which a rank other than 0 speaks, and rare slow samples are named.
    device
        Whose time counts: ``"cpu"`` for the host's; by default the current CUDA device's where
        CUDA is in use when an iteration begins.

    Returns
    -------
    Meter
        To be iterated over in place of `loader`, for any number of epochs. `Meter.loader` is the
        loader, ``len()`` its length, `Meter.report` what was measured since the last report.

    Raises
    ------
    UsageError
        `every`, `threshold`, `device` or `to` is not what it should be.

    Notes
    -----
    **What is measured.** The *data* time of a step is from asking for a batch until it is there;
    the *iteration* is from asking for a batch until asking for the next one; the *stall ratio* is
    the sum of the one over the sum of the other. Each report is of all steps since the last one.
    A loop that is left early leaves out the step it was left in.

    **On CUDA** steps are queued: the host runs ahead of the device, and may wait for data while
    the device is still busy, which costs nothing. So events are recorded on the current stream
    where a batch is asked for and where it is there, and the data time is what the device spent
    between them, with nothing to do but copies and transforms that the loader put on that stream.
    The device is never waited for: steps that it has not finished are in the next report (after
    ``torch.cuda.synchronize()``, in that of `Meter.report`).

    **Rare slow samples.** Where the mean data time is more than twice the median, the longest
    waits are named, with the keys of their batches: of a `Loader` or a `CachedDataset`, or of a
    batch that is a mapping with a field ``key`` or ``row``.

    **Ranks** tell each other figures through the key-value store at ``MASTER_ADDR``, by which
    `torch.distributed` found them, from a thread that no step waits for; there is no collective.
    Rank 0 reports, and names the rank with the highest stall ratio; another rank's report is
    `quiet` unless its own is above `threshold`, and then only a callable of your own and
    `precache.outputs.prometheus` take it. At the end of an iteration rank 0 waits for the others'
    last figures, a second at most. Where there is no such store, every rank speaks for itself.

    **Beside it**, once a report and where it can be read: CPU time of the process tree (psutil),
    GPU utilisation (nvidia-ml-py), I/O wait (Linux). ``pip install "precache[meter]"`` brings the
    two libraries.

    Examples
    --------
    >>> for images, labels in precache.meter(loader, every=100):  # doctest: +SKIP
    ...     step(images, labels)

    >>> from precache import outputs  # doctest: +SKIP
    >>> to = [outputs.log(), outputs.jsonl("stalls.jsonl"), outputs.tensorboard(writer)]
    >>> metered = precache.meter(loader, every="30s", to=to)  # doctest: +SKIP
    """
    chosen = [outputs.log()] if to is None else to
    return Meter(loader, Settings.of(name, every, threshold, chosen, device))
