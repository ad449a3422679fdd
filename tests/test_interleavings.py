"""Builds of one version that go on at once, call by call, in every order that matters.

Two builders of a version, whose codecs give other bytes for the same rows, and a removal of old
versions share a store. Whatever the order of their calls: what is committed is whole, and a build
that had to give way succeeds when it is run again.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numcodecs import zstd

import workers.account
import workers.build
import workers.commit
import workers.shard_objects
import workers.shardrows
from precache import garbage
from precache.commits import BUILD, read_commits
from precache.errors import BuildError
from precache.pipeline import Field, Pipeline, ZstdCodec
from precache.store import open_own
from precache.verification import verify_version
from tests.interleaving import ACTORS, Memory, MemoryFolder, Turns
from workers.account import Account
from workers.build import _Build
from workers.progress import BuildProgress
from workers.request import Request
from workers.trials import HeldRows

LEVELS = {"first": 1, "second": 19, "again": 1, "base": 1}
"""Of zstd, by actor."""

PIPELINE = Pipeline(fields={"image": Field(codec=ZstdCodec())})


class Silent:
    """In place of the log of finished shards, whose thread would need turns of its own."""

    def __init__(self, *given: object) -> None:
        pass

    def add(self, receipt: object) -> None:
        pass

    def end(self) -> None:
        pass


def encoder_of_the_actor(codec: object, dtype: str) -> Callable[[np.ndarray], bytes]:
    level = LEVELS[ACTORS.name]
    return lambda chunk: bytes(zstd.compress(np.ascontiguousarray(chunk), level, True))


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.build, "open_folder", lambda uri, options: ACTORS.store)
    monkeypatch.setattr(garbage, "open_folder", lambda uri, options: ACTORS.store)
    monkeypatch.setattr(workers.build, "check_request", lambda request: None)
    monkeypatch.setattr(workers.build.sources, "open_source", lambda source, options: source)
    monkeypatch.setattr(workers.build, "source_to_keep", lambda source: None)
    monkeypatch.setattr(workers.build, "shown", str)
    monkeypatch.setattr(workers.account, "FinishedLog", Silent)
    monkeypatch.setattr(workers.commit, "PUTS", 1)
    monkeypatch.setattr(workers.shardrows, "encoder", encoder_of_the_actor)
    monkeypatch.setattr(workers.shard_objects, "RECEIPT_SECONDS", 0.0)


def rows(count: int, seed: int = 0) -> HeldRows:
    made = np.random.default_rng(seed).integers(0, 99, (count, 3, 4, 4), np.uint8)
    return HeldRows([{"image": row} for row in made], count)


def builder(source: HeldRows) -> str:
    request = Request(source, "store", PIPELINE, address="serial", shard_samples=4)  # type: ignore[arg-type]
    with BuildProgress(False) as progress:
        account = Account(request, progress)
        try:
            return _Build(request, progress, account).run().version
        except BaseException as error:
            account.fail(error)
            raise


def remover() -> object:
    return garbage.gc("store", keep=0, older_than=0)


def alone(memory: Memory, actor: str, act: Callable[[], Any]) -> Any:
    """What an actor returns that has the store to itself."""
    outcome = Turns(memory, lambda able: able[0]).run({actor: act})[actor]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def check(memory: Memory, outcomes: dict[str, object], source: HeldRows) -> None:
    for name, outcome in outcomes.items():
        if isinstance(outcome, Exception):
            assert isinstance(outcome, BuildError), (name, repr(outcome))
    require_whole(memory)
    version = alone(memory, "again", partial(builder, source))
    [*_, last] = read_commits(MemoryFolder(memory, lambda call, name: None))
    assert last.version == version
    require_whole(memory)
    assert not [name for name in memory.objects if name.startswith(f"{version}/{BUILD}")]


def require_whole(memory: Memory) -> None:
    """What the log names as current is there, without a fault."""
    store = MemoryFolder(memory, lambda call, name: None)
    for commit in read_commits(store)[-1:]:
        assert verify_version(open_own(store.folder(commit.version)), lambda n: None).damage == ()


def preempted(points: Sequence[int], first: str) -> Callable[[Sequence[str]], str]:
    """One actor goes on until its call number `points[0]`, then the other until …, and so on."""
    left = list(points)
    going = first

    def choose(able: Sequence[str]) -> str:
        nonlocal going
        if left and left[0] == 0:
            left.pop(0)
            going = next((name for name in able if name != going), going)
        if left:
            left[0] -= 1
        return going if going in able else able[0]

    return choose


def test_of_two_builders_one_is_stopped_at_each_of_its_calls() -> None:
    source = rows(4)
    calls = Turns(memory := Memory(), lambda able: able[0])
    calls.run({"first": partial(builder, source)})
    count = len(calls.calls["first"])
    print("calls", count, len(memory.objects))
    for first in ("first", "second"):
        for point in range(1, count):
            memory = Memory()
            turns = Turns(memory, preempted([point], first))
            outcomes = turns.run(
                {"first": partial(builder, source), "second": partial(builder, source)}
            )
            check(memory, outcomes, source)
