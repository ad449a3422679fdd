"""A driver with a million samples: the bucket is pretended, and so is what tasks answer."""

import contextlib
import functools
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash

import precache
from precache.store.layout import RowShape
from precache.store.receipts import ChannelSums, Receipt, ShardObject
from precache_workers.cluster.dispatch import Done, Lost, dispatch
from precache_workers.planning.target_version import SCRATCH
from precache_workers.planning.work_plan import MeasuredRows
from precache_workers.shards.shard_task import ShardTask
from tests.bench.common import CROP
from tests.bench.listing import bucket

ROW = RowShape((3, CROP, CROP), "uint8")
PREFIXES = 1000
SLOTS = 64


@dataclass(frozen=True)
class Plan:
    """What a build takes of its driver where tasks take nothing.

    Attributes
    ----------
    first_task_seconds
        Wall time from the beginning to the first shard task.
    seconds, cpu_seconds
        Of all, commit included.
    peak_bytes
        Of the process.
    task_bytes
        Mean size of a shard task as it goes to a worker.
    """

    samples: int
    shards: int
    first_task_seconds: float
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    task_bytes: float


class _Engine:
    """Answers every task at once; pickles it all the same."""

    def __init__(self) -> None:
        self._ended: list[tuple[Hashable, Done | Lost]] = []
        self.tasks = self.bytes = 0
        self.first = 0.0

    def slots(self) -> int:
        return SLOTS

    def submit(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Hashable:
        if not isinstance(items[0], ShardTask):  # the probe
            answers: list[Any] = [MeasuredRows({"image": ROW}, 80_000.0)]
        else:
            self.first = self.first or time.perf_counter()
            self.tasks += len(items)
            self.bytes += len(pickle.dumps([replace(item, job=None) for item in items]))
            answers = [_receipt(item) for item in items]
        name = object()
        self._ended.append((name, Done(answers, 100.0 * len(items))))
        return name

    def wait(self, seconds: float) -> list[tuple[Hashable, Done | Lost]]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, copy: Hashable) -> None:
        """Nothing runs."""


def _receipt(task: ShardTask) -> Receipt:
    """Of an object of one byte: a commit looks whether it is there."""
    task.folder.put(task.objects["image"], [b"0"], scratch=SCRATCH)
    return Receipt(
        shard=task.shard,
        objects={"image": ShardObject(1, task.shard, ROW.nbytes * task.rows_per_shard)},
        holes={},
        content=[xxhash.xxh3_128_hexdigest(key.encode()) for key in task.keys],
        sums={"image": ChannelSums(CROP * CROP * len(task.keys), [1.0] * 3, [1.0] * 3)},
        seconds=dict.fromkeys(("fetch", "ops", "encode", "put"), 0.1),
        cpu_seconds=1.4,
    )


def plan(samples: int, shard_samples: int) -> Plan:
    """Build from a bucket of names; to be called in a clean process."""
    engine = _Engine()

    @contextlib.contextmanager
    def executor(*_: Any) -> Iterator[Any]:
        yield functools.partial(dispatch, engine)

    with (
        bucket("s3", PREFIXES, samples // PREFIXES) as options,
        tempfile.TemporaryDirectory() as folder,
        mock.patch("precache_workers.driver.build.executor", executor),
    ):
        began, cpu = time.perf_counter(), time.process_time()
        result = precache.build(
            "s3://bucket",
            Path(folder) / "store",
            precache.Recipe.image(resize=256, crop=CROP),
            shard_samples=shard_samples,
            check_space=False,
            storage_options=options,
        )
        seconds, burnt = time.perf_counter() - began, time.process_time() - cpu
    return Plan(
        result.samples,
        result.shards,
        engine.first - began,
        seconds,
        burnt,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        engine.bytes / engine.tasks,
    )
