"""Reports: their text, the outputs that take them, and the ranks that exchange their figures."""

import json
import logging
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from precache import outputs
from precache.errors import UsageError
from precache.loading.job_store import job_store
from precache.metering.publisher import RankKeyValue
from precache.metering.report import RankStalls, SlowStep, StallReport, rare
from precache.runtime.machine import Machine
from precache.runtime.spread import Spread
from tests.support.building import environment

OWN = RankStalls(0, 3, 100, 0.04)
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


def test_the_line_and_the_figures_tell_what_else_is_known() -> None:
    ranks = (OWN, RankStalls(3, 3, 100, 0.061), RankStalls(5, 2, 100, 0.01))
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
    more = {"worst_rank": 3.0, "worst_stall_ratio": 0.061, "cpu_cores": 2.14}
    assert more.items() <= report.figures().items()
    found = json.loads(json.dumps(REPORT.as_dict()))
    assert (found["data"]["median"], found["worst_rank"]) == (0.0002, None)
    known = {"stall_ratio": 0.04, "data_p95_seconds": 0.031, "iteration_max_seconds": 1.25}
    assert known.items() <= REPORT.figures().items()
    assert not {"cpu_cores", "io_wait", "worst_rank"} & set(REPORT.figures())


def test_slow_samples_are_looked_for_where_few_long_waits_make_a_stall() -> None:
    few, all_alike = Spread.of([0.001] * 99 + [0.5]), Spread.of([0.005] * 100)
    assert [rare(each, 0.05, 0.01) for each in (few, all_alike)] == [True, False]
    assert not rare(few, 0.01, 0.01), "it does not stall"


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


@pytest.mark.filterwarnings("ignore")  # of tensorboard's own imports
def test_tensorboard_reads_the_scalars_by_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
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


def test_wandb_has_them_beside_the_users_own_steps() -> None:
    """A report that advanced the run's step would have it refuse the user's."""
    run = Mock()
    outputs.wandb(run)(REPORT)
    figures = {f"train/{name}": value for name, value in REPORT.figures().items()}
    run.log.assert_called_once_with({**figures, "train/step": 300}, commit=False)


def test_rank_0_waits_for_the_figures_of_all_and_once_for_a_rank_that_never_spoke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three, each with a connection of its own to a store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(3)]
    ranks = [RankKeyValue(client, "train", 3) for client in clients]

    def figures(rank: int, window: int) -> RankStalls:
        return RankStalls(rank, window, 100, 0.01 * rank)

    def put(window: int, *numbers: int) -> None:
        for rank in numbers:
            ranks[rank].put(figures(rank, window))
            clients[rank].check(["none"])  # a set is not answered: this is, once it is done

    def gathers(limit: float, window: int, *expected: tuple[int, int]) -> None:
        monkeypatch.setattr("precache.metering.publisher.GATHER_SECONDS", limit)
        found = ranks[0].gather(window, lambda: window != 3)  # a later report is due
        assert found == [figures(*one) for one in expected]

    put(1, 0)
    gathers(0.05, 1, (0, 1))
    put(2, 0)
    gathers(1000, 2, (0, 2))  # it would hang
    put(2, 1)
    put(3, 0)
    gathers(1000, 3, (0, 3), (1, 2))  # what is there will do
    for window in (4, 5):
        put(window, 0, 1)
        late = threading.Timer(0.05, put, [window, 2])
        # Rank 2 is not waited for until it has spoken.
        (late.run if window == 4 else late.start)()
        gathers(60, window, (0, window), (1, window), (2, window))
    late.join()


def test_a_store_that_is_not_there_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Ranks that found each other by a file, with a stray address in the environment."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert job_store(1) is job_store(2) is None
    monkeypatch.setattr("precache.loading.job_store.TIMEOUT", timedelta(seconds=1))
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with caplog.at_level(logging.INFO, "precache"):
            assert job_store(2) is None
    finally:
        dist.destroy_process_group()
    assert caplog.messages[0].startswith("ranks exchange nothing: the store of their job")


_TRAIN = """
import logging, sys, time
import torch
import torch.distributed as dist
import precache
from precache import outputs

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
logging.basicConfig(filename=f"{folder}/{rank}.log", level=logging.INFO, format="%(message)s")

def batches():
    for number in range(90):
        if rank == 2:
            time.sleep(0.02)
        yield number

to = [outputs.log(), outputs.jsonl(f"{folder}/{rank}.jsonl")]
for epoch in range(2):
    metered = precache.meter(batches(), every=40, to=to, threshold=0.3)
    for batch in metered:
        time.sleep(0.005)
        dist.all_reduce(torch.ones(1))
metered.flush()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.heavy
def test_rank_0_names_the_worst_and_ranks_that_stall_write_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    line = [sys.executable, *launcher, str(tmp_path / "train.py"), str(tmp_path)]
    done = subprocess.run(line, check=False, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def lines_of(name: str) -> list[str]:
        return (tmp_path / name).read_text().splitlines()

    assert not (tmp_path / "1.jsonl").exists()
    first, third = (list(map(json.loads, lines_of(f"{rank}.jsonl"))) for rank in (0, 2))
    for reports in (first, third):
        assert [report["step"] for report in reports] == [40, 80, 90, 130, 170, 180]
    for report in first:
        assert report["worst_rank"] == 2
        assert [each["rank"] for each in report["ranks"]] == [0, 1, 2]
    lines = [lines_of(f"{rank}.log") for rank in range(3)]
    assert [len(each) for each in lines] == [0, 0, 6]
    assert all(line.startswith("rank 2: data, steps ") for line in lines[2])
