"""Reports arrive in what they are written to, read back by its own means."""

from __future__ import annotations

import json
import logging
import struct
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from precache import outputs
from precache.errors import UsageError
from precache.metering.report import StallReport
from tests.metering.test_report import REPORT
from tests.support.building import poll

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


def _records(log: bytes) -> Iterator[bytes]:
    """Of a run's file: LevelDB's log format, behind a header of 7 bytes."""
    block, start, whole = 32_768, 7, b""
    while start < len(log):
        if block - start % block < 7:  # too little for a record's head: zeros
            start += block - start % block
            continue
        _, length, kind = struct.unpack_from("<IHB", log, start)
        whole += log[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


# wandb warns of itself and of what it imports.
@pytest.mark.filterwarnings("ignore")
def test_wandb_has_them_with_the_users_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: it is large")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb
    from wandb.proto import wandb_internal_pb2

    def send(report: StallReport) -> None:
        outputs.wandb(run)(report)

    def records(file: Path) -> list[wandb_internal_pb2.Record]:
        return [wandb_internal_pb2.Record.FromString(data) for data in _records(file.read_bytes())]

    with wandb.init(project="test", dir=str(tmp_path)) as run:
        run.log({"loss": 3.0}, step=10)
        send(REPORT)
        run.log({"loss": 2.0}, step=11)
        send(LATER)
    [file] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    poll(lambda: any(record.HasField("exit") for record in records(file)), "the run's end")
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row}
        for row in (record.history.item for record in records(file))
    ]
    losses = [(row["_step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(10, 3.0), (11, 2.0)]
    figures = [(row["train/step"], row["train/stall_ratio"]) for row in rows if "train/step" in row]
    assert figures == [(300, 0.04), (400, 0.5)]
