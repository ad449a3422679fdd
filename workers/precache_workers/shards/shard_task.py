"""Build one shard: fetch, ops, encode, put, receipt. Idempotent, without Ray."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from precache.errors import BuildError, FetchError, Hole, SampleError
from precache.runtime.process_id import node_name
from precache.storage.base import Folder
from precache.store.layout import RowShape
from precache.store.receipts import Receipt
from precache.store.tree import Leaf
from precache.units import counted
from precache_workers.ops.field_recipe import part_of
from precache_workers.ops.identity import all_starts, installed_versions
from precache_workers.ops.mask_frames import MaskFrames
from precache_workers.planning.assembly import Assembly, Run, assemble
from precache_workers.planning.catalogue import StoredRows
from precache_workers.planning.content_reader import differs
from precache_workers.runtime.time_limit import DECODING, run_in_time, samples_at_work
from precache_workers.shards.field_writer import FieldWriter, keep_rows, stage_rows
from precache_workers.shards.samples import (
    BASE_MEMORY,
    FetchAllTask,
    one_thread,
    recipes_of,
)
from precache_workers.shards.shard_objects import (
    DamagedObjectError,
    FinishedObject,
    OtherBytesError,
    create_objects,
    create_receipt,
    finished,
    replace_lost,
    require_lease,
)
from precache_workers.shards.timing import Timing
from precache_workers.sources.base import Fetched, Sample
from precache_workers.sources.dataset import DatasetSource

LARGE_FILE = 16 << 20
LARGE_MEMORY = 768 << 20
"""Bytes more where a file is larger than that: for pictures at the default limit of pixels."""


@dataclass(frozen=True, kw_only=True)
class ShardTask(FetchAllTask):
    """One shard to build, from the samples of its rows in order.

    Attributes
    ----------
    folder
        Folder of the version.
    accept_missing
        Leave a hole for a sample that cannot be fetched.
    lost
        Field -> lost object, where objects of a committed version are made again.
    stored, check_stored
        What the catalogue has of its rows, None for nothing; whether objects are checked before
        they are linked.
    pinned
        XXH3-128 (hex) that the sample of each row must have, empty where it may have any; of the
        first rows of the shard. It is that of the refreshed version, else of an earlier read.
    lease
        The build's lease below the folder: while it has the highest number, the build may write.
    again
        Whether the shard may exist already, as another task was given it before.
    may_fail
        Places of rows that become holes where their samples cannot be fetched.
    """

    folder: Folder
    shapes: Mapping[str, RowShape]
    rows_per_shard: int
    shard: int
    accept_missing: bool = False
    lost: Mapping[str, Leaf] | None = None
    stored: StoredRows | None = None
    check_stored: bool = False
    pinned: Sequence[str] = ()
    lease: str | None = None
    again: bool = False
    may_fail: frozenset[int] = frozenset()

    @property
    def objects(self) -> dict[str, str]:
        """Field -> name of the object to put, below the folder."""
        made = self.shapes if self.lost is None else self.lost
        return {name: f"{name}/{self.shapes[name].object_name(self.shard)}" for name in made}

    @property
    def memory(self) -> int:
        """Bytes that its process may need: libraries, a large photograph, and whole shards."""
        built = self.rows_per_shard * sum(row.nbytes for row in self.shapes.values())
        large = LARGE_MEMORY * (max(self.sizes, default=0) > LARGE_FILE)
        reuses = self.stored is not None and bool(self.stored.has_rows.any())
        return BASE_MEMORY + large + built * (1 + reuses)

    def retried(self) -> Self:
        return replace(self, again=True)


def run_shard(task: ShardTask) -> Receipt:
    """Build one shard of every field, put its objects, then its receipt.

    Where another task was first, its receipt is returned.

    Raises
    ------
    FetchError
        Samples that could not be fetched, by key; nothing was put.
    StorageError
        An object could not be written.
    BuildError
        The build has ended meanwhile.
    HangError
        A sample takes too long; nothing was put.
    """
    receipt = finished(task) if task.again else None
    return receipt or run_in_time(functools.partial(_build, task), task.job.sample_seconds)


def _build(task: ShardTask) -> Receipt:
    """Build the shard; again without a stored object that turns out to be missing or damaged."""
    fields = task.job.recipe.fields.keys()
    stored = task.stored or StoredRows.empty(fields, len(task.keys))
    spoiled: list[str] = []
    while True:
        try:
            return write_shard(task, stored, spoiled)
        except DamagedObjectError as damaged:
            stored = stored.without(*damaged.object_id)
            spoiled.append(damaged.name)
        except OtherBytesError:  # other versions may have been encoded by another release
            if not stored.has_rows.any():
                raise
            nowhere = StoredRows.empty(fields, len(task.keys)).fields
            stored = replace(stored, fields=nowhere, others=())


def write_shard(task: ShardTask, stored: StoredRows, spoiled: Sequence[str]) -> Receipt:
    """Assemble the shard, execute its runs, put the objects, and write the receipt.

    Parameters
    ----------
    spoiled
        Objects of other versions that were missing or damaged.
    """
    recipe = task.job.recipe
    barred = {place: task.barred[key] for place, key in enumerate(task.keys) if key in task.barred}
    assembly = assemble(recipe, stored, barred)
    linked, objects_of_others = assembly.linked, None
    if stored.arrays:
        from precache_workers.shards.stored_rows import StoredObjects  # which loads readers

        objects_of_others = StoredObjects(stored)
    if objects_of_others is not None and task.check_stored:
        for array, number in assembly.links.values():  # which would be linked unread
            objects_of_others.object(array, number).open()
    ops = {} if linked else recipes_of(task.job)
    timing = Timing()
    writers = {
        name: FieldWriter(
            name,
            declared,
            task.shapes[name],
            task.rows_per_shard,
            ops=ops.get(name),
            arrays=stored.arrays,
            objects=objects_of_others,
        )
        for name, declared in recipe.fields.items()
    }
    frames = MaskFrames(recipe.fields, ops) if ops else None
    rows = _RowMaker(task, assembly, writers, timing, frames)
    with contextlib.nullcontext() if linked else one_thread():
        rows.make()
    task.require_unchanged(assembly.fetched)
    if (unfetched := rows.unfetched) and not task.accept_missing:
        first = "; ".join(map(str, unfetched[:5]))
        more = f"; and {len(unfetched) - 5} more" * (len(unfetched) > 5)
        raise FetchError(
            f"shard {task.shard}: {counted(len(unfetched), 'sample')} could not be fetched: "
            f"{first}{more}"
        )
    all_built = {name: writer.finish(len(task.keys)) for name, writer in writers.items()}
    built: Mapping[str, FinishedObject] = {name: all_built[name] for name in task.objects}
    require_lease(task)
    if task.lost is None:
        created = create_objects(task, built)
        if isinstance(created, Receipt):
            return created
        built = created
    timing.charge("put")
    receipt = Receipt(
        shard=task.shard,
        objects={name: built_object.stored for name, built_object in built.items()},
        holes=rows.holes,
        content=rows.content,
        parts=rows.parts if any(rows.parts) else [],
        sums={name: own.sums for name, own in all_built.items() if own.sums is not None},
        seconds=timing.seconds,
        cpu_seconds=timing.cpu_seconds,
        labels=rows.labels if task.job.fetch_labels else None,
        reused=all(built_object.other is not None for built_object in built.values()),
        rows_reused=rows.reused,
        host=node_name(),
        began=timing.began,
        fetched=timing.nbytes,
        shapes={name: own.shapes for name, own in all_built.items() if own.shapes is not None},
        libraries={} if linked else installed_versions(),
        spoiled=list(spoiled),
    )
    if task.lost is not None:
        replace_lost(task, built, receipt)
        return receipt
    return create_receipt(task, receipt)


class _RowMaker:
    """Makes the rows of a shard, every field of a row together.

    Attributes
    ----------
    content, parts, holes, labels
        As in the receipt.
    reused
        Rows of which all fields were reused, holes among them.
    unfetched
        Errors of samples that could not be fetched.
    """

    def __init__(
        self,
        task: ShardTask,
        assembly: Assembly,
        writers: Mapping[str, FieldWriter],
        timing: Timing,
        frames: MaskFrames | None,
    ) -> None:
        self._frames = frames if frames and frames.compares else None
        self._task, self._assembly, self._writers, self._timing = task, assembly, writers, timing
        self._at_work = samples_at_work()
        self.content: list[str] = []
        self.parts: list[str] = []
        self._starts = all_starts(task.job.recipe)
        self.holes: dict[int, Hole] = {}
        self.labels = [-1] * len(task.keys)
        if assembly.rows.labels is not None:
            self.labels = assembly.rows.labels.tolist()
        self.reused = 0
        self.unfetched: list[FetchError] = []

    def make(self) -> None:
        """Make all rows, in order."""
        with contextlib.closing(self._task.fetch(self._assembly.fetched)) as samples:
            for run in self._assembly.runs:
                if run.at_once:
                    stage_rows(run.fields, self._writers, run.places.start)
                    keep_rows(self._writers, run.places)
                    part = slice(run.places.start, run.places.stop)
                    self.content += self._assembly.rows.contents[part]
                    self.parts += map(self._stored_parts, run.places)
                    self.reused += len(run.places)
                    self._timing.charge("encode")
                    continue
                for place in run.places:
                    self._make_row(run, place, next(samples)[1] if run.fetches else None)

    def _make_row(self, row: Run, place: int, fetched: Fetched | None) -> None:
        task, timing, key = self._task, self._timing, self._task.keys[place]
        row_number = task.shard * task.rows_per_shard + place
        timing.charge("fetch")
        sample, content = None, self._assembly.rows.contents[place]
        parts = self._stored_parts(place) if fetched is None else ""
        if fetched is not None:
            sample, hole = self._sample_of(place, fetched)
            content = sample.content
            own = dict.fromkeys(self._starts, content)
            if sample.contents:
                for start, each in self._starts.items():
                    own[start] = sample.contents.get(part_of(*each, sample), content)
                parts = _joined(content, own)
            row = self._assembly.with_sample(place, content, hole, own)
        hole = row.hole
        if fault := self._at_work.work(DECODING, key, self._stage, row, place, key, sample):
            stage_rows(self._assembly.hole_at(place), self._writers, place)
            hole = Hole("failed", fault)
        self.content.append(content)
        self.parts.append(parts)
        self.reused += row.reuses and (not row.fetches if hole is None else row.hole is not None)
        if hole is not None:
            self.holes[row_number] = hole
        timing.charge("ops")
        keep_rows(self._writers, range(place, place + 1))
        self._at_work.end()
        timing.charge("encode")
        timing.nbytes += 0 if sample is None else sample.nbytes

    def _stored_parts(self, place: int) -> str:
        rows = self._assembly.rows
        return _joined(rows.contents[place], rows.parts_of_rows[place]) if rows.has_parts else ""

    def _stage(self, row: Run, place: int, key: str, sample: Sample | None) -> str:
        """Stage a row; returns the reason if it cannot be made."""
        fault = ""
        if self._frames is not None and sample is not None and row.hole is None:
            fault = self._frames.fault(sample)
        fault = fault or stage_rows(row.fields, self._writers, place, key, sample)
        if fault or self._frames is None:
            return fault
        return self._frames.unlike({n: w.staged_shape(place) for n, w in self._writers.items()})

    def _sample_of(self, place: int, fetched: Fetched) -> tuple[Sample, Hole | None]:
        """Return a sample, empty if it could not be fetched, and the hole that it is."""
        task, key = self._task, self._task.keys[place]
        self.labels[place], barred = -1, task.barred.get(key)
        if isinstance(fetched, FetchError):
            if place not in task.may_fail:
                self.unfetched.append(fetched)
            return Sample({}), Hole("not fetched", f"could not be fetched: {fetched}")
        if isinstance(fetched, SampleError):
            return Sample({}), barred or Hole("failed", str(fetched))
        pinned = task.pinned[place] if place < len(task.pinned) else ""
        if pinned and fetched.content and fetched.content != pinned:
            if not task.job.refreshes:  # read before, in this build
                raise differs(key)
            source = task.job.source
            unseen = isinstance(source, DatasetSource) and not source.compares
            how = ", with --compare" if unseen else ""
            raise BuildError(
                f"{key} is not what it was when this version was built; have the change built "
                f"first, by the same precache build as then{how}"
            )
        if fetched.label is not None:
            self.labels[place] = fetched.label
        return fetched, barred


def _joined(content: str, parts: Mapping[str, str]) -> str:
    """Return the contents of parts as a receipt has them."""
    return "" if {*parts.values()} <= {content} or not content else "".join(parts.values())
