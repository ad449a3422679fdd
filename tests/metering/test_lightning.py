"""The stall meter in the training loop of Lightning."""

from __future__ import annotations

import csv
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import precache
from precache.errors import UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning's own imports
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from precache.lightning import StallMonitor

# It warns of a loader without workers, of loggers that are missing, and so on.
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(BoringModel):
    """Its steps sleep, and one may fail."""

    fail_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_at:
            raise ZeroDivisionError("the step failed")
        time.sleep(0.005)
        return self.layer(torch.zeros(32)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.1)


class Loader:
    """Batches with keys, one of them late."""

    def __init__(self, count: int, late: int) -> None:
        self.count, self.late, self.slept = count, late, list[float]()

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.count):
            started = time.perf_counter()
            time.sleep(0.4 if number == self.late else 0.002)
            self.slept.append(time.perf_counter() - started)
            yield {"key": [f"{number}.jpg"], "x": torch.zeros(1)}


class SlowCallback(lightning.Callback):
    """What other callbacks do is no wait for data."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.005)


def _fit(tmp_path: Path, model: Any, loader: Any, callbacks: list[Any], **options: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, callbacks=callbacks,
        logger=CSVLogger(tmp_path), default_root_dir=tmp_path, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, loader, torch.utils.data.DataLoader([0] * 2))
    return trainer


def test_data_time_is_that_of_fetching_alone_and_loggers_get_it(tmp_path: Path) -> None:
    reports: list[precache.StallReport] = []
    monitor = StallMonitor(30, name="feed", to=[reports.append], device="cpu")
    loader, saves = Loader(40, late=25), ModelCheckpoint(tmp_path, every_n_train_steps=7)
    callbacks = [monitor, SlowCallback(), saves]
    trainer = _fit(tmp_path, Model(), loader, callbacks, val_check_interval=20)
    assert [report.steps for report in reports] == [30, 10, 30, 10]
    for epoch in range(2):
        first = reports[2 * epoch]
        slept = loader.slept[40 * epoch :][:30]
        assert first.data.mean == pytest.approx(sum(slept) / 30, rel=0.1)
        assert first.slow[0].keys == ("25.jpg",)
        # Of two validations of 0.2 s, one is in the middle of this report.
        assert first.iteration.median < 0.2
        assert first.iteration.max < 0.4 + 0.2
    assert type(trainer.profiler).__module__.startswith("lightning")
    with Path(trainer.logger.log_dir, "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("feed/stall_ratio")]
    for name in ("stall_ratio", "data_mean_seconds"):
        logged = [float(row[f"feed/{name}"]) for row in rows]
        assert logged == pytest.approx([report.figures()[name] for report in reports])
    assert int(rows[-1]["step"]) == 80


def test_a_step_that_fails_ends_in_a_report_of_the_whole_steps(tmp_path: Path) -> None:
    """Also of a loader without a length, which is measured without keys."""
    with pytest.raises(UsageError, match="every is 0"):
        StallMonitor(0)
    reports: list[precache.StallReport] = []
    monitor, model = StallMonitor(to=[reports.append]), Model()
    model.fail_at = 5
    with pytest.raises(ZeroDivisionError):
        _fit(tmp_path, model, iter(Loader(9, late=2)), [monitor])
    [report] = reports
    assert (report.steps, report.slow[0].keys) == (5, ())
    assert report.data.max >= 0.4
