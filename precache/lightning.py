"""The stall meter as a Lightning callback; needs lightning or pytorch_lightning."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from precache import outputs
from precache.metering.publisher import MeterSettings
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
"""Name of fetching a training batch in Lightning's profiler."""


class StallMonitor(Callback):
    """Measures how long Lightning's training loop waits for its data, with an unchanged loader.

    Reports go to `to`, and as ``NAME/stall_ratio`` and so on to the trainer's loggers, by its
    global step. Data time is what Lightning's profiler counts as fetching a training batch. It
    excludes copies to the device, other callbacks and checkpoints; validation is not measured. If
    the loader has no length, Lightning fetches one batch ahead, and keys are unknown.

    Parameters
    ----------
    every, name, to, threshold, device
        See `precache.meter`.

    Raises
    ------
    UsageError
        See `precache.meter`.

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
        chosen = [outputs.terminal()] if to is None else to
        # The trainer's loggers belong to the loop's thread, and reports are made on another.
        all_outputs = [*chosen, self._reports.append]
        self._settings = MeterSettings(name, every, threshold, all_outputs, device)
        self._recorder = StallRecorder(self._settings, keys_in_batch)
        self._running = self._has_batch = self._has_length = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wrap the trainer's profiler to observe fetches."""
        trainer.profiler = _ObservedProfiler(trainer.profiler, self)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start measuring an epoch."""
        self._has_length = _has_length(trainer.train_dataloader)
        self._recorder.begin()
        self._running, self._has_batch = True, False

    def fetch_started(self) -> None:
        """Record that Lightning requests a training batch."""
        if self._running:
            self._recorder.batch_requested()

    def fetch_ended(self) -> None:
        """Record that Lightning has the batch, or that there is none."""
        if self._running:
            self._recorder.batch_arrived()
            self._has_batch = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch's keys for the report, and log reports."""
        self._has_batch = True
        self._recorder.inspect(batch if self._has_length else None)
        self._log_reports(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """End the step, so that validation does not count."""
        if self._running:
            self._recorder.batch_requested()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report remaining steps."""
        if self._has_batch:
            self._recorder.batch_requested()
        self._finish(self._has_batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the last reports, and restore the profiler."""
        self._recorder.publisher.flush()
        self._log_reports(trainer)
        if isinstance(trainer.profiler, _ObservedProfiler):
            trainer.profiler = trainer.profiler.profiler

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Report remaining steps and restore the profiler."""
        self._finish(False)
        self.on_train_end(trainer, pl_module)

    def _finish(self, ended: bool) -> None:
        if self._running:
            self._running = False
            self._recorder.finish(ended)

    def _log_reports(self, trainer: Any) -> None:
        while self._reports:
            report = self._reports.popleft()
            figures = {f"{report.name}/{name}": v for name, v in report.figures().items()}
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)


class _ObservedProfiler:
    """A profiler that reports fetches to a monitor, and otherwise delegates to another one."""

    def __init__(self, profiler: Any, monitor: StallMonitor) -> None:
        self.profiler = profiler
        self._monitor = monitor

    def start(self, action_name: str) -> None:
        if action_name.endswith(FETCH):
            self._monitor.fetch_started()
        self.profiler.start(action_name)

    def stop(self, action_name: str) -> None:
        self.profiler.stop(action_name)
        if action_name.endswith(FETCH):
            self._monitor.fetch_ended()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.profiler, name)


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
