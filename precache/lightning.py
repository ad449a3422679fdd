"""The stall meter in Lightning's own loop, as a callback. Needs lightning, or pytorch_lightning."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from precache import outputs
from precache.metering.publisher import Settings
from precache.metering.recorder import StallRecorder, keys_in_batch
from precache.metering.report import StallReport
from precache.outputs import Output

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        raise ImportError("precache.lightning needs lightning; pip install lightning") from None

FETCH = "train_dataloader_next"
"""How Lightning's profiler names the fetch of a training batch."""


class StallMonitor(Callback):
    """Measures how long Lightning's training loop waits for its data; the loader stays as it is.

    Reports go to `to`, and as ``NAME/stall_ratio`` and so on to the loggers of the trainer, by its
    global step. Data time is what Lightning's own profiler counts as fetching a training batch:
    copies to the device, other callbacks and checkpoints are not in it, validation is in nothing.
    Of a loader without a length Lightning fetches one batch ahead, and keys are not known.

    Parameters
    ----------
    every, name, to, threshold, device
        As `precache.meter` takes them.

    Raises
    ------
    UsageError
        As `precache.meter` does.

    Examples
    --------
    >>> from precache.lightning import StallMonitor  # doctest: +SKIP
    >>> Trainer(callbacks=[StallMonitor(every=100)]).fit(model, loader)  # doctest: +SKIP
    """

    def __init__(
        self,
        every: int | str = 100,
        *,
        name: str = "data",
        to: Sequence[Output] | None = None,
        threshold: float = 0.01,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self._reports: deque[StallReport] = deque()
        chosen = [outputs.log()] if to is None else to
        # Loggers are for the loop's thread; a report is made on another.
        every_output = [*chosen, self._reports.append]
        self._settings = Settings.of(name, every, threshold, every_output, device)
        self._recorder = StallRecorder(self._settings, keys_in_batch)
        self._running = self._has_batch = self._sized = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Listen to the profiler of the trainer, which goes on as before."""
        trainer.profiler = _Listening(trainer.profiler, self)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An epoch begins."""
        self._sized = _sized(trainer.train_dataloader)
        self._recorder.begin()
        self._running, self._has_batch = True, False

    def fetching(self) -> None:
        """Lightning asks for a training batch."""
        if self._running:
            self._recorder.asked()

    def fetched(self) -> None:
        """Lightning has it, or has been told that there is none."""
        if self._running:
            self._recorder.arrived()
            self._has_batch = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step begins."""
        self._has_batch = True
        self._recorder.look(batch if self._sized else None)
        self._pass_on(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """The step is over; what comes until the next fetch is of none."""
        if self._running:
            self._recorder.asked()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report what is left."""
        if self._has_batch:
            self._recorder.asked()
        self._finish(trainer, self._has_batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the profiler as it was."""
        if isinstance(trainer.profiler, _Listening):
            trainer.profiler = trainer.profiler.profiler

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave nothing behind."""
        self._finish(trainer, False)
        self.on_train_end(trainer, pl_module)

    def _finish(self, trainer: Any, ended: bool) -> None:
        if self._running:
            self._running = False
            self._recorder.finish(ended)
            self._pass_on(trainer)

    def _pass_on(self, trainer: Any) -> None:
        while self._reports:
            report = self._reports.popleft()
            figures = {f"{report.name}/{name}": v for name, v in report.figures().items()}
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)


class _Listening:
    """A profiler that lets a monitor know of fetches, and is the given one in all else."""

    def __init__(self, profiler: Any, monitor: StallMonitor) -> None:
        self.profiler = profiler
        self._monitor = monitor

    def start(self, action_name: str) -> None:
        if action_name.endswith(FETCH):
            self._monitor.fetching()
        self.profiler.start(action_name)

    def stop(self, action_name: str) -> None:
        self.profiler.stop(action_name)
        if action_name.endswith(FETCH):
            self._monitor.fetched()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.profiler, name)


def _sized(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
