"""Reports are made beside the loop, and what goes wrong with them stays there."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

import precache
from precache.metering.recorder import keys_in_batch


def test_an_output_that_fails_is_logged_and_a_slow_one_holds_up_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    free, passed = threading.Event(), []

    def fail(report: precache.StallReport) -> None:
        raise ConnectionError("the dashboard is away")

    def slow(report: precache.StallReport) -> None:
        assert free.wait(60)
        passed.append(report.step)

    metered = precache.meter(range(4), every=2, to=[fail, slow], name="bad outputs")
    assert list(metered) == [0, 1, 2, 3]
    assert passed == []  # two reports are due, and the first is still on its way
    free.set()
    metered.flush()
    assert passed == [2, 4]
    assert [r.getMessage() for r in caplog.records] == [
        f"sending the report of step {step} failed" for step in passed
    ]


def test_ranks_without_a_store_report_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    reports: list[precache.StallReport] = []
    metered = precache.meter(range(3), to=[reports.append], threshold=1, name="alone")
    list(metered)
    metered.flush()
    [report] = reports
    assert (report.rank, report.world_size, [r.rank for r in report.ranks]) == (1, 4, [1])
    assert str(report).startswith("rank 1: alone, steps 1 to 3: ")
    assert "worst" not in str(report)


def test_a_meter_ends_no_training_whose_rank_is_unclear(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PMIX_RANK", "17")
    reports: list[precache.StallReport] = []
    metered = precache.meter(range(3), every=1, to=[reports.append])
    assert list(metered) == list(metered) == [0, 1, 2]
    metered.flush()
    assert (metered.report().rank, reports[0].rank, reports[0].world_size) == (0, 0, 1)
    [record] = caplog.records
    assert "this process alone, as rank 0 of 1: the launcher gave" in record.getMessage()
    assert "PMIX_RANK='17'" in record.getMessage()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"key": ["a", "b"]}, ("a", "b")),
        ({"key": "a"}, ("a",)),
        ({"__key__": ("a",)}, ("a",)),
        ({"row": torch.tensor([3, 4])}, (3, 4)),
        ({"row": np.array([3, 4])}, (3, 4)),
        ({"row": [np.int64(3), 4], "key": [b"a\xff", np.str_("b")]}, ("a\ufffd", "b")),
        ({"key": [np.zeros((2, 3)), np.zeros((2, 4))], "row": [np.int64(3)]}, (3,)),
        ({"key": torch.ones(2, requires_grad=True)}, ()),
        ({"key": [torch.ones(2, requires_grad=True)] * 2}, ()),
        ({"key": [float("nan")]}, ()),
        ({"row": torch.tensor([3]), "key": ["c"]}, ("c",)),
        ({"image": torch.zeros(2)}, ()),
        ((torch.zeros(2), torch.zeros(2)), ()),
        (None, ()),
    ],
)
def test_what_a_batch_says_of_its_samples(batch: object, expected: tuple[str | int, ...]) -> None:
    keys = keys_in_batch(batch)()
    assert keys == expected
    assert tuple(json.loads(json.dumps(keys))) == expected
