"""Reports: their text and figures, and the outputs that take them, read back by their own means."""

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
from hypothesis import given
from hypothesis import strategies as st

from precache import outputs
from precache.errors import UsageError
from precache.metering.report import RankStalls, SlowStep, StallReport, rare, slowest
from precache.runtime.machine import Machine
from precache.runtime.spread import Spread
from tests.support.building import poll

OWN = RankStalls(0, 3, 100, 0.04, 0.005, 0.125)
REPORT = StallReport(
    name="train", rank=0, world_size=1, window=3, step=300, steps=100, stall_ratio=0.04,
    data=Spread(0.005, 0.0002, 0.031, 0.1204), iteration=Spread(0.125, 0.12, 0.15, 1.25),
    slow=(), ranks=(OWN,), machine=Machine(), time=0.0,
)  # fmt: skip
LATER = replace(REPORT, window=4, step=400, stall_ratio=0.5)
LINE = (
    "train, steps 201 to 300: waited for data 4.0% of the time; 5.0 of 125 ms per step "
    "(waits: median 0.2, p95 31.0, max 120 ms)"
)


def test_the_line_tells_what_else_is_known() -> None:
    ranks = (OWN, RankStalls(3, 3, 100, 0.061, 0.008, 0.125), RankStalls(5, 2, 100, 0.01, 0, 0.125))
    slow = (SlowStep(241, 0.1204, keys=("a", "b", "c", "d", "e")), SlowStep(201, 0.1, True))
    machine = Machine(2.14, 0.931, 0.0042)
    report = replace(REPORT, ranks=ranks, world_size=8, slow=slow, machine=machine)
    assert str(report) == (
        f"rank 0: {LINE}; rare slow samples: step 241 (120 ms: a, b, c, d … and 1 more), "
        "step 201 (100 ms, the first of an iteration); worst of 3 of 8 ranks: rank 3 with 6.1%; "
        "CPU 2.1 cores; GPU 93%; I/O wait 0.4%"
    )
    assert report.worst.rank == 3
    assert str(REPORT) == LINE
    one = str(replace(REPORT, steps=1, name="a\x1b[2J\n", transform_ratio=0.03))
    assert one.isprintable(), "a name steers no terminal"
    assert ", step 300: waited for data 4.0% of the time (3.0% for transforms, 1.0% for lo" in one
    assert "worst of 3 ranks: rank 3" in str(replace(report, world_size=3))


def test_figures_are_numbers_and_leave_out_what_is_not_known() -> None:
    found = json.loads(json.dumps(REPORT.as_dict()))
    assert (found["data"]["median"], found["worst_rank"]) == (0.0002, None)
    known = {"stall_ratio": 0.04, "data_p95_seconds": 0.031, "iteration_max_seconds": 1.25}
    assert known.items() <= REPORT.figures().items()
    assert not {"cpu_cores", "io_wait", "worst_rank"} & set(REPORT.figures())
    ranks, machine = (OWN, RankStalls(1, 3, 9, 0.5, 0, 0)), Machine(cpu_cores=1.5)
    more = {"worst_rank": 1.0, "worst_stall_ratio": 0.5, "cpu_cores": 1.5}
    assert more.items() <= replace(REPORT, ranks=ranks, machine=machine).figures().items()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([0.001] * 99 + [0.5], True), ([0.005] * 100, False), ([0.001, 0.002] * 50, False)],
)
def test_a_high_mean_with_a_low_median_is_rare(seconds: list[float], expected: bool) -> None:
    data = Spread.of(seconds)
    assert rare(data, 0.05, 0.01) is expected
    assert not rare(data, 0.01, 0.01)  # it does not stall: there is nothing to look for


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_slow_steps_are_those_above_the_mean_longest_first(seconds: list[float]) -> None:
    data = Spread.of(seconds)
    found = slowest(data, [SlowStep(number, value) for number, value in enumerate(seconds)])
    longest = sorted((value for value in seconds if value > data.mean), reverse=True)
    assert [step.seconds for step in found] == longest


@pytest.mark.parametrize(
    ("rank", "stalls", "lines", "records"),
    [(0, True, 1, 1), (0, False, 0, 1), (1, True, 1, 1), (1, False, 0, 0)],
)
def test_lines_tell_of_stalls_and_records_of_all_reports_of_rank_0(
    rank: int, stalls: bool, lines: int, records: int, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with pytest.raises(UsageError, match=r"none does not exist; create it"):
        outputs.jsonl(tmp_path / "none/stalls.jsonl")
    with caplog.at_level("INFO"):
        reports = [replace(each, rank=rank, stalls=stalls) for each in (REPORT, LATER)]
        for report in reports:
            outputs.log(logging.getLogger("mine"), logging.WARNING)(report)
            outputs.jsonl(tmp_path / "stalls.jsonl")(report)
    told = [("mine", logging.WARNING, str(report)) for report in reports]
    assert caplog.record_tuples == told * lines
    texts = [line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert [json.loads(line)["step"] for line in texts] == [300, 400] * records


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
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: it is large")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    from wandb.proto import wandb_internal_pb2

    def records(file: Path) -> list[wandb_internal_pb2.Record]:
        return [wandb_internal_pb2.Record.FromString(data) for data in _records(file.read_bytes())]

    with wandb.init(project="test", dir=str(tmp_path)) as run:
        for loss, step, report in ((3.0, 10, REPORT), (2.0, 11, LATER)):
            run.log({"loss": loss}, step=step)
            outputs.wandb(run)(report)
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
