"""One shard, made whole: fetch -> ops -> encode -> put. Idempotent, and no Ray in it."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from precache.codecs import encoder
from precache.errors import BuildError, FetchError, SampleError
from precache.folder import Folder
from precache.layout import RowShape
from precache.pipeline import Pipeline
from precache.prefetch import prefetch
from precache.receipts import ChannelSums, Receipt, ShardObject
from precache.shardwriter import ShardWriter
from precache.store import BUILD
from workers.goal import SCRATCH
from workers.ops import FieldRecipe
from workers.reuse import Offer
from workers.sources import Sample, Source

FETCH_BYTES = 4 << 20
FETCH_SAMPLES = 16
"""A fetch is a run of samples up to either limit; three are in the making at a time."""
BASE_MEMORY = 1 << 30
"""Bytes of a worker's process: 250 MB of libraries, the rest for photos of 100 million pixels."""
_STAGES = ("fetch", "ops", "encode", "put")
_tasks_before = itertools.count()
"""Shards this process has made: what it burnt before the first one went into imports."""


@dataclass(frozen=True)
class Job:
    """What all shards of a build share."""

    source: Source
    pipeline: Pipeline
    import_path: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    fetch_labels: bool = False


@dataclass(frozen=True)
class ShardTask:
    """One shard to make: the samples of its rows, in order.

    Attributes
    ----------
    folder
        Of the version.
    objects
        Field -> name of the object to be put, below the folder.
    expected
        Field -> size and XXH3-64 that an object must have, where it replaces a lost one.
    offer
        The same shard of an earlier version.
    accept_missing
        Make a hole of a sample that cannot be fetched.
    barred
        Key -> why, of samples that must not be decoded: they become holes.
    permit
        Object below the folder that is there as long as the build goes on; its worker must see it.
    again
        The shard may be there already: another task was given it before.
    """

    job: Job
    folder: Folder
    shapes: Mapping[str, RowShape]
    objects: Mapping[str, str]
    rows_per_shard: int
    shard: int
    keys: Sequence[str]
    sizes: Sequence[int]
    accept_missing: bool = False
    expected: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    offer: Offer | None = None
    barred: Mapping[str, str] = field(default_factory=dict)
    permit: str | None = None
    again: bool = False

    @property
    def first_row(self) -> int:
        return self.shard * self.rows_per_shard

    @property
    def memory(self) -> int:
        """Bytes its process may need: libraries and a large photograph, and a whole shard."""
        return BASE_MEMORY + self.rows_per_shard * sum(row.nbytes for row in self.shapes.values())

    def retried(self) -> ShardTask:
        return replace(self, again=True)


def receipt_name(shard: int) -> str:
    """Name of a shard's receipt below the version's folder."""
    return f"{BUILD}/receipts/{shard:08d}.json"


# --- the stages ---------------------------------------------------------------------------------


class _Clock:
    """Wall time by stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_STAGES, 0.0)
        self._since = time.perf_counter()

    def charge(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now


def _runs(keys: Sequence[str], sizes: Sequence[int]) -> Iterator[list[tuple[str, int]]]:
    run: list[tuple[str, int]] = []
    weight = 0
    for key, size in zip(keys, sizes, strict=True):
        if run and (weight + size > FETCH_BYTES or len(run) == FETCH_SAMPLES):
            yield run
            run, weight = [], 0
        run.append((key, size))
        weight += max(0, size)
    if run:
        yield run


def fetch_ahead(
    source: Source, keys: Sequence[str], sizes: Sequence[int]
) -> Generator[tuple[str, Sample | FetchError], None, None]:
    """Samples in order, the next ones being fetched while the caller works."""

    def fetch_run(run: list[tuple[str, int]]) -> list[tuple[str, Sample | FetchError]]:
        names, expected = zip(*run, strict=True)
        return list(zip(names, source.fetch(names, expected), strict=True))

    threads = source.fetch_threads
    runs = prefetch(fetch_run, _runs(keys, sizes), threads, threads + 1)
    with contextlib.closing(runs):
        for run in runs:
            yield from run


class Sums:
    """Channel sums of one image field."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.total = np.zeros(shape[0])
        self.squares = np.zeros(shape[0])
        self._pixels = torch.empty(shape[0], math.prod(shape[1:]))

    def add(self, row: np.ndarray) -> None:
        pixels = self._pixels.copy_(torch.from_numpy(row.reshape(self._pixels.shape)))
        self.count += pixels.shape[1]
        self.total += pixels.sum(1).numpy()
        self.squares += pixels.square_().sum(1).numpy()

    def result(self) -> ChannelSums:
        return ChannelSums(self.count, self.total.tolist(), self.squares.tolist())


@dataclass
class _FieldOutput:
    """Where the rows of one field go."""

    recipe: FieldRecipe
    shape: RowShape
    writer: ShardWriter
    sums: Sums | None

    def make(self, sample: Sample, key: str) -> None:
        """Compute the row into the writer's next place."""
        row = self.recipe(sample, key)
        _check_row(self.recipe.name, row, self.shape)
        np.copyto(self.writer.row, row)

    def keep(self) -> None:
        """Take the row that `make` left there."""
        if self.sums is not None:
            self.sums.add(self.writer.row)
        self.writer.advance()

    def leave_hole(self) -> None:
        """A row of zeros in place of a sample that has none."""
        self.writer.row[...] = 0
        self.writer.advance()


def _check_row(name: str, row: np.ndarray, shape: RowShape) -> None:
    if row.shape != shape.shape or row.dtype != shape.dtype:
        raise SampleError(
            f"its {name} is {row.dtype.name} {row.shape}, and the rows of this store are "
            f"{shape.dtype} {shape.shape}; add a resize and a crop"
        )


def recipes_of(job: Job) -> dict[str, FieldRecipe]:
    """The ops of every field, ready to be applied to samples."""
    for path in job.import_path:
        if path not in sys.path:
            sys.path.append(path)
    return {
        name: FieldRecipe(name, each, job.pipeline.seed, job.code)
        for name, each in job.pipeline.fields.items()
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Parallelism is one task a core; torch's own threads would only get in its way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _output(task: ShardTask, name: str, recipe: FieldRecipe) -> _FieldOutput:
    shape, codec = task.shapes[name], task.job.pipeline.fields[name].stored_as
    chunk_rows = shape.chunk_rows(task.rows_per_shard)
    chunks = task.rows_per_shard // chunk_rows
    writer = ShardWriter(
        (chunk_rows, *shape.shape), shape.dtype, chunks, encoder(codec, shape.dtype)
    )
    sums = Sums(shape.shape) if has_sums(task, name) else None
    return _FieldOutput(recipe, shape, writer, sums)


def has_sums(task: ShardTask, name: str) -> bool:
    """Whether channel sums are kept of a field: of images alone."""
    return task.job.pipeline.fields[name].decodes and len(task.shapes[name].shape) == 3


def make_row(outputs: Sequence[_FieldOutput], sample: Sample, key: str) -> str:
    """Compute every field of a sample; the reason where it has to be a hole, else empty."""
    try:
        for each in outputs:
            each.make(sample, key)
    except SampleError as error:
        return str(error)
    except MemoryError:
        raise FetchError(f"{key}: the worker ran out of memory") from None
    except Exception as error:  # whatever a decoder raises on a hostile file concerns that file
        return f"{type(error).__name__}: {error}"
    return ""


# --- tasks --------------------------------------------------------------------------------------


def run_shard(task: ShardTask) -> Receipt:
    """Make one shard of every field, put its objects, then its receipt.

    Raises
    ------
    FetchError
        Samples that could not be fetched, by key; nothing was put.
    StorageError
        An object could not be written.
    BuildError
        The build has ended meanwhile.
    """
    started = time.process_time()
    clock = _Clock()
    outputs = [_output(task, name, recipe) for name, recipe in recipes_of(task.job).items()]
    holes: dict[int, str] = {}
    content: list[str] = []
    labels: list[int] = []
    unfetched: list[FetchError] = []
    with one_thread():
        samples = fetch_ahead(task.job.source, task.keys, task.sizes)
        for row, (key, fetched) in enumerate(samples, task.first_row):
            clock.charge("fetch")
            if isinstance(fetched, FetchError):
                unfetched.append(fetched)
                sample, reason = Sample({}), f"could not be fetched: {fetched}"
            else:
                sample = fetched
                reason = task.barred.get(key) or make_row(outputs, fetched, key)
            clock.charge("ops")
            content.append(sample.content)
            labels.append(-1 if sample.label is None else sample.label)
            for each in outputs:
                each.leave_hole() if reason else each.keep()
            if reason:
                holes[row] = reason
            clock.charge("encode")
    if unfetched and not task.accept_missing:
        raise _unfetched(task.shard, unfetched)
    finished = {each.recipe.name: each.writer.finish() for each in outputs}
    require_permit(task)
    _require_expected(task, {name: made for name, (_, made) in finished.items()})
    for name, object_name in task.objects.items():
        task.folder.put(object_name, finished[name][0], scratch=SCRATCH)
    objects = {name: finished[name][1] for name in task.objects}
    clock.charge("put")
    sums = {each.recipe.name: each.sums.result() for each in outputs if each.sums is not None}
    receipt = Receipt(
        task.shard,
        objects,
        holes,
        content,
        sums,
        clock.seconds,
        time.process_time() - started,
        started if next(_tasks_before) == 0 else 0.0,
        labels=labels if task.job.fetch_labels else None,
    )
    task.folder.put(receipt_name(task.shard), [receipt.to_json()], scratch=SCRATCH)
    return receipt


def require_permit(task: ShardTask) -> None:
    """Raise `BuildError` where the object that stands for the build is not to be seen."""
    if task.permit is not None and task.folder.size(task.permit) is None:
        raise BuildError(
            f"{socket.gethostname()} does not see {task.folder.path(task.permit)}: the build has "
            "ended, or the store is on a disk that this node does not share; give the store as a "
            "URL, or on a disk that all nodes mount at the same path"
        )


def _require_expected(task: ShardTask, made: Mapping[str, ShardObject]) -> None:
    for name, expected in task.expected.items():
        if (made[name].size, made[name].xxh3) != expected:
            raise BuildError(
                f"shard {task.shard} of version {task.folder.name[:8]} came out different "
                f"from what it was: the source or a library changed; remove {task.folder} "
                "and build again"
            )


def _unfetched(shard: int, errors: Sequence[FetchError]) -> FetchError:
    shown = "; ".join(map(str, errors[:5]))
    more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
    return FetchError(f"shard {shard}: {len(errors)} samples could not be fetched: {shown}{more}")


def try_samples(job: Job, keys: Sequence[str], sizes: Sequence[int]) -> None:
    """Fetch and decode samples, and let what comes of it go: only their process is at stake."""
    recipes = recipes_of(job)
    with one_thread():
        for key, sample in fetch_ahead(job.source, keys, sizes):
            if isinstance(sample, Sample):
                with contextlib.suppress(Exception):
                    for recipe in recipes.values():
                        recipe(sample, key)
