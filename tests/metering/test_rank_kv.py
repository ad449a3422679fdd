"""Ranks tell each other figures by the store of their job."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from precache.metering.rank_kv import RankKeyValue
from precache.metering.report import RankStalls
from tests.support.building import environment


@pytest.fixture
def ranks() -> Iterator[list[RankKeyValue]]:
    """Three, each with a connection of its own to a store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(3)]
    yield [RankKeyValue(client, "train", rank, 3) for rank, client in enumerate(clients)]
    del clients, server


def test_rank_0_waits_for_the_figures_of_all_and_once_for_a_rank_that_never_spoke(
    ranks: list[RankKeyValue], monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(rank: int, window: int) -> RankStalls:
        return RankStalls(rank, window, 100, 0.01 * rank, 0.002, 0.1)

    def put(rank: int, window: int) -> None:
        ranks[rank].put(figures(rank, window))

    def gathers(limit: float, window: int, *expected: tuple[int, int]) -> None:
        monkeypatch.setattr("precache.metering.rank_kv.GATHER_SECONDS", limit)
        found = ranks[0].gather(window, lambda: window != 3)  # a later report is due
        assert found == [figures(*one) for one in expected]

    put(0, 1)
    gathers(0.05, 1, (0, 1))
    put(0, 2)
    gathers(1000, 2, (0, 2))  # it would hang
    put(1, 2)
    put(0, 3)
    gathers(1000, 3, (0, 3), (1, 2))  # what is there will do
    for window in (4, 5):
        put(0, window)
        put(1, window)
        late = threading.Timer(0.05, put, [2, window])
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
    assert RankKeyValue.connect("train", 0, 1) is RankKeyValue.connect("train", 0, 2) is None
    monkeypatch.setattr("precache.loading.job_store.TIMEOUT", timedelta(seconds=1))
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with caplog.at_level(logging.INFO, "precache"):
            assert RankKeyValue.connect("train", 0, 2) is None
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

stalls = []
to = [outputs.log(), outputs.jsonl(f"{folder}/{rank}.jsonl"), lambda r: stalls.append(r.stalls)]
for epoch in range(2):
    metered = precache.meter(batches(), every=40, to=to, threshold=0.3)
    for batch in metered:
        time.sleep(0.005)
        dist.all_reduce(torch.ones(1))
metered.flush()
assert stalls == [rank == 2] * 6, stalls
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
    assert all(report["stall_ratio"] > 0.3 for report in third)
    lines = [lines_of(f"{rank}.log") for rank in range(3)]
    assert [len(each) for each in lines] == [0, 0, 6]
    assert all(line.startswith("rank 2: data, steps ") for line in lines[2])
