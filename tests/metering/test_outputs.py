"""Reports arrive in what they are written to, read back by its own means."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from precache import outputs
from precache.errors import UsageError
from tests.metering.test_report import REPORT

LATER = replace(REPORT, window=4, step=400, stall_ratio=0.5)


@pytest.mark.parametrize(
    ("rank", "stalls", "lines", "records"),
    [(0, True, 1, 1), (0, False, 0, 1), (1, True, 1, 1), (1, False, 0, 0)],
)
def test_lines_tell_of_stalls_and_records_of_all_reports_of_rank_0(
    rank: int,
    stalls: bool,
    lines: int,
    records: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(UsageError, match=r"none does not exist; create it"):
        outputs.jsonl(tmp_path / "none/stalls.jsonl")
    with caplog.at_level("INFO"):
        reports = [replace(each, rank=rank, stalls=stalls) for each in (REPORT, LATER)]
        for report in reports:
            outputs.log(logging.getLogger("mine"), logging.WARNING)(report)
            outputs.jsonl(tmp_path / "stalls.jsonl")(report)
    told = [("mine", logging.WARNING, str(report)) for report in reports]
    assert caplog.record_tuples == told * lines
    written = [
        json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()
    ]
    assert [each["step"] for each in written] == [300, 400] * records


def test_tensorboard_reads_the_scalars_by_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for report in (REPORT, LATER):
            outputs.tensorboard(writer)(report)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(each.step, each.value) for each in events.Scalars("train/stall_ratio")]
    assert found == [(300, pytest.approx(0.04)), (400, 0.5)]
    assert "train/data_p95_seconds" in events.Tags()["scalars"]


def test_prometheus_has_gauges_by_meter_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(UsageError, match="pip install prometheus_client"):
            outputs.prometheus()
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    registry = client.CollectorRegistry()
    for report in (REPORT, LATER, replace(REPORT, name="valid", rank=1)):
        outputs.prometheus(registry)(report)  # made anew, as in a loop of epochs
    text = client.generate_latest(registry).decode()
    assert 'precache_stall_ratio{meter="train",rank="0"} 0.5' in text
    assert 'precache_stall_ratio{meter="valid",rank="1"} 0.04' in text
    assert 'precache_iteration_mean_seconds{meter="train",rank="0"} 0.125' in text


def test_wandb_has_them_and_its_steps_stay_the_users_own() -> None:
    logged: list[dict[str, float]] = []

    class Run:
        """Takes what goes into the step that the user's next `log` ends."""

        def log(self, figures: dict[str, float], *, commit: bool) -> None:
            assert not commit
            logged.append(figures)

    for report in (REPORT, LATER):
        outputs.wandb(Run())(report)
    figures = [(row["train/step"], row["train/stall_ratio"]) for row in logged]
    assert figures == [(300, 0.04), (400, 0.5)]
