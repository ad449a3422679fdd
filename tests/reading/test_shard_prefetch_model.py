"""A model of all that a feed does, step by step in any order: it never gets stuck."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from precache.reading import shard_prefetch
from precache.sampling.order import Order, Shuffle, ValidRows

CONFIGURATIONS = 2000


@dataclass
class Lease:
    """Stands in for a part in a disk cache, and refuses to hold more than was claimed."""

    claim: int
    held: set[str] = field(default_factory=set)

    def obtain(self, name: str, *_: object) -> bool:
        assert name not in self.held
        self.held.add(name)
        assert len(self.held) <= self.claim
        return True

    def release(self, name: str) -> None:
        self.held.remove(name)


class ShardFiles:
    """Stands in for an array's objects."""

    def nbytes(self, number: int) -> int:
        return 1

    def cached_name(self, number: int) -> str:
        return str(number)

    def forget(self, number: int) -> None:
        pass


class Shards:
    """Stands in for the shards of a version."""

    where = "here"

    def __init__(self, rows_per_shard: int) -> None:
        self.rows_per_shard = rows_per_shard

    def count(self, nbytes: int) -> None:
        pass


class Fetchers:
    """Stands in for the threads that fetch: `step` does the next piece of work, or one after it."""

    def __init__(self, count: int, where: str) -> None:
        self.count, self.work = count, deque[tuple[Callable[[], None], Future[None]]]()

    def submit(self, work: Callable[[], None], there: Future[None]) -> None:
        self.work.append((work, there))

    def step(self, chance: random.Random) -> None:
        at = chance.randrange(min(self.count, len(self.work)))
        work, there = self.work[at]
        del self.work[at]
        work()
        there.set_result(None)


@dataclass(frozen=True)
class Part:
    """Rows of a batch that one thread reads."""

    rows: np.ndarray


@dataclass
class Configuration:
    """How an epoch is read."""

    order: Order
    parts: list[Part]
    block: int
    room: int
    ahead: int
    threads: int

    @classmethod
    def drawn(cls, chance: random.Random) -> Configuration:
        count, block = chance.randint(1, 250), chance.randint(1, 20)
        world, nodes = chance.choice([1, 1, 2, 3, 4]), chance.choice([1, 2, 2, 3, 4])
        batch = nodes * chance.randint(1, 24)
        shuffle = Shuffle("block", block, chance.randint(1, 6), nodes)
        lost = chance.randint(0, count - 1) if chance.random() < 0.3 else 0
        holes = np.array(sorted(chance.sample(range(count), lost)), np.int64)
        ranks = {"rank": chance.randrange(world), "world_size": world}
        seed, drop_last = chance.randrange(100), chance.random() < 0.3
        order = Order(ValidRows(count, holes), batch, shuffle, seed, drop_last, **ranks)
        if nodes == 1 and chance.random() < 0.2:
            order = Order(ValidRows(count, holes), batch, chance.choice([None, Shuffle()]), **ranks)
        threads = chance.randint(1, 5)
        split = chance.choice([1, threads])
        parts = [
            Part(part)
            for rows in order.epoch(chance.randrange(4))
            for part in np.array_split(rows, min(split, len(rows)))
        ]
        found = cls(order, parts, block, order.blocks_at_once(block), chance.randint(1, 9), threads)
        if chance.random() < 0.3:  # no more than the promise needs
            found.room = max((len(found.shards_of(part.rows)) for part in parts), default=1)
        return found

    def shards_of(self, rows: np.ndarray) -> set[int]:
        return set((rows // self.block).tolist())


def run(configuration: Configuration, chance: random.Random) -> None:
    """Read an epoch: fetches and batches end in any order, each of these once all that it waits
    for has come."""
    lease = Lease(configuration.room)
    shards: Any = Shards(configuration.block)
    objects: Any = ShardFiles()
    source = shard_prefetch.ShardPrefetcher(shards, lease, configuration.room, [objects])  # type: ignore[arg-type]
    fetchers: Any = source._fetchers
    announce, announced = source._announce, list[Any]()

    def announcing(rows: np.ndarray) -> Any:
        announced.append(announce(rows))
        return announced[-1]

    source._announce = announcing  # type: ignore[method-assign]
    coming = enumerate(source.around(configuration.parts))
    pending = deque(itertools.islice(coming, configuration.ahead))
    unread, read = deque(pending), set[int]()
    while pending:
        ready = [
            each
            for each in [*unread][: configuration.threads]
            if announced[each[0]].complete.done()
            and all(source._open[n].fetched.done() for n in announced[each[0]].shards)
        ]
        may = [fetchers.work, ready, pending[0][0] in read]
        assert any(may), "stuck"
        action = chance.choice([number for number, some in enumerate(may) if some])
        if action == 0:
            fetchers.step(chance)
        elif action == 1:
            one = chance.choice(ready)
            number, (part, present) = one
            with present:
                assert configuration.shards_of(part.rows) <= set(map(int, lease.held))
            read.add(number)
            del unread[[number for number, _ in unread].index(number)]
        else:
            pending.popleft()
            more = list(itertools.islice(coming, 1))
            pending.extend(more)
            unread.extend(more)
    assert len(read) == len(announced) == len(configuration.parts)
    assert not lease.held


@pytest.mark.heavy
def test_no_configuration_gets_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_prefetch, "Fetchers", Fetchers)
    for number in range(CONFIGURATIONS):
        chance = random.Random(number)
        configuration = Configuration.drawn(chance)
        try:
            run(configuration, chance)
        except AssertionError as error:
            raise AssertionError(f"{number}: {configuration.order}") from error
