"""What the loaders of a process share, while several threads use it."""

from collections.abc import ItemsView
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from precache.loading import rank_check
from precache.loading.class_numbers import compare_classes
from precache.loading.rank_check import RankCheck


class Opened:
    """What is compared of a version."""

    path = "store/version"
    classes = ("cat", "dog")


@pytest.mark.usefixtures("hasty_threads")
def test_versions_are_opened_by_several_threads() -> None:
    def opened(_: int) -> None:
        versions: list[Any] = [Opened() for _ in range(20)]
        for version in versions:
            compare_classes(version)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(opened, range(200)))


class GivenUp(dict[Any, Any]):
    """Jobs that another thread gives up as soon as this one has listed them."""

    def items(self) -> ItemsView[Any, Any]:
        found = dict(self).items()
        self.clear()
        return found


def test_two_threads_may_give_up_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = object()
    monkeypatch.setattr(rank_check, "_jobs", GivenUp({"at": job}))
    check: Any = SimpleNamespace(_job=job, _what="positions")
    RankCheck._give_up(check, RuntimeError("it has ended"))
    assert check._job is None
