"""A build from listing to commit; the driver never touches a pixel."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from precache import metadata
from precache.errors import (
    BuildError,
    FetchError,
    PrecacheError,
    SampleError,
    SourceError,
    StorageError,
    UsageError,
)
from precache.layout import rows_per_shard
from precache.pipeline import Pipeline
from precache.receipts import Receipt, ShardObject
from precache.rowtable import RowTable
from precache.storage import Folder, open_folder
from precache.store import BUILD, ROOT, append_commit, open_version, split_uri
from workers import sources
from workers.cluster import Run, executor
from workers.commit import FieldShape, Finished, channel_statistics, commit
from workers.plan import (
    deciding_versions,
    default_max_failures,
    failures,
    order_rows,
    sample_for_probe,
    shards_to_do,
    version_id,
)
from workers.progress import BuildProgress

PROBE_SAMPLES = 24
ATTEMPTS = 3
"""At a shard whose samples could not be fetched."""

DESCRIPTION = f"{BUILD}/build.json"
ROWS = "rows.parquet"


@dataclass(frozen=True)
class Request:
    """What the user asked for; `precache.build` explains each."""

    source: str
    store: str
    pipeline: Pipeline
    address: str = "local"
    labels: str | None = None
    classes: str | None = None
    keep_order: bool = False
    shard_samples: int | None = None
    on_error: str = "skip"
    max_failures: int | None = None
    accept_missing: bool = False
    check_space: bool = True
    cpus: int | None = None
    import_path: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildResult:
    """What a build made.

    Attributes
    ----------
    version, path
        The version's id and folder.
    samples, failed, ignored
        Rows; holes among them; files of the source that are not images by suffix.
    holes
        (key, why) of every hole.
    shards, shards_skipped
        Shards of the version; those that were there before.
    raw_bytes, stored_bytes
        Of all large fields, before and after compression.
    seconds, cpu_seconds
        Wall time of all; CPU time that the tasks burnt on what was made in this run.
    timings
        Seconds by stage: ``list`` and ``start`` (of the executor, once) as wall time; ``fetch``,
        ``ops``, ``encode``, ``put`` as wall time summed over tasks; ``imports`` as CPU time of the
        workers before their first task.
    classes, mean, std
        Class names; by image field, statistics of each channel in stored units.
    """

    version: str
    path: str
    samples: int
    failed: int
    shards: int
    shards_skipped: int
    raw_bytes: int
    stored_bytes: int
    seconds: float
    cpu_seconds: float
    holes: Sequence[tuple[str, str]] = ()
    ignored: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    mean: Mapping[str, list[float]] = field(default_factory=dict)
    std: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return self.raw_bytes / max(1, self.stored_bytes)


@dataclass(frozen=True)
class _Goal:
    """The version to be made, fully determined."""

    version: str
    fingerprint: str
    rows_digest: str
    rows_per_shard: int
    shapes: Mapping[str, FieldShape]
    table: RowTable
    pipeline: Pipeline

    @property
    def shards(self) -> int:
        return -(-len(self.table) // self.rows_per_shard)

    def rows_of(self, shard: int) -> range:
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, len(self.table)))

    def description(self) -> bytes:
        shapes = {
            n: {"shape": s.shape, "dtype": s.dtype, "rows_per_chunk": s.rows_per_chunk}
            for n, s in self.shapes.items()
        }
        return json.dumps(
            {
                "version": self.version,
                "fingerprint": self.fingerprint,
                "rows_digest": self.rows_digest,
                "rows_per_shard": self.rows_per_shard,
                "shapes": shapes,
            }
        ).encode()


# --- steps --------------------------------------------------------------------------------------


def run_build(request: Request, shown: bool) -> BuildResult:
    """Build, or finish, the version that the request describes, and make it current.

    Parameters
    ----------
    shown
        Whether progress goes to standard error.

    Raises
    ------
    UsageError
        The request cannot be met, found before anything is written.
    BuildError
        Too many samples failed, or some could not be fetched; what was done is kept.
    """
    started = time.perf_counter()
    _check(request)
    with BuildProgress(shown) as progress:
        build = _Build(request, progress)
        result = build.run()
    timings = {**build.timings, **result.timings}
    return _with(result, seconds=time.perf_counter() - started, timings=timings)


def _with(result: BuildResult, **changes: Any) -> BuildResult:
    return BuildResult(**{**vars(result), **changes})


def _check(request: Request) -> None:
    if request.on_error not in ("skip", "raise"):
        raise UsageError(f"on_error is {request.on_error!r}; choose skip or raise")
    for name in ("shard_samples", "cpus"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; give a whole number from 1 up")
    if request.max_failures is not None and request.max_failures < 0:
        raise UsageError(f"max_failures is {request.max_failures}; give 0 or more")
    if split_uri(request.store)[1] is not None:
        raise UsageError(f"{request.store} names a version; build into the store itself")
    store = open_folder(request.store)
    if store.exists(ROOT):
        raise UsageError(f"{request.store} is a Zarr group, not a store; choose another folder")
    if store.exists() and not store.root.is_dir():
        raise UsageError(f"{request.store} is a file; choose a folder for the store")


class _Build:
    """One run of a build; its steps share the request, the store and the progress display."""

    def __init__(self, request: Request, progress: BuildProgress) -> None:
        self.request = request
        self.progress = progress
        self.store = open_folder(request.store)
        self.source = sources.open_source(request.source)
        self.ignored = 0
        self.timings: dict[str, float] = {}

    def run(self) -> BuildResult:
        table = self._list()
        fingerprint = self.request.pipeline.fingerprint(deciding_versions(self.request.pipeline))
        digest = table.digest()
        goal = self._find(fingerprint, digest, table)
        if goal is not None and self._is_whole(goal):
            append_commit(self.store, goal.version)
            self.progress.say(f"Nothing to do: version {goal.version[:8]} is complete")
            return self._result_of_committed(goal)
        began = time.perf_counter()
        self.progress.phase("Starting")
        with executor(self.request.address, self.request.cpus) as run:
            self.timings["start"] = time.perf_counter() - began
            if goal is None:
                goal, stored_per_row = self._probe(run, fingerprint, digest, table)
                self._check_space(goal, stored_per_row)
            return self._make(run, goal)

    def _list(self) -> RowTable:
        began = time.perf_counter()
        listing = self.source.list(self.progress.listed)
        self.ignored, table = listing.ignored, listing.table
        if self.request.labels is not None:
            table = sources.override_labels(table, self.request.labels)
        if self.request.classes is not None:
            frozen = sources.read_classes(self.request.classes)
            table = sources.freeze_classes(table, frozen, self.request.classes)
        table = order_rows(table, self.request.keep_order)
        self.timings["list"] = time.perf_counter() - began
        classes = f" in {len(table.classes)} classes" if table.classes else ""
        ignored = f"; {self.ignored} other files ignored" if self.ignored else ""
        self.progress.say(f"{len(table):,} samples{classes} in {self.request.source}{ignored}")
        return table

    def _find(self, fingerprint: str, digest: str, table: RowTable) -> _Goal | None:
        """The same version, committed or begun, if the store has it."""
        for name in self.store.names():
            for path in (f"{name}/{ROOT}", f"{name}/{DESCRIPTION}"):
                if not self.store.exists(path):
                    continue
                found = metadata.parse_json(self.store.read(path), path)
                goal = self._goal_of(found, table)
                wanted = self.request.shard_samples
                if (
                    goal is not None
                    and (goal.fingerprint, goal.rows_digest) == (fingerprint, digest)
                    and wanted in (None, goal.rows_per_shard)
                ):
                    return goal
        return None

    def _goal_of(self, found: Mapping[str, Any], table: RowTable) -> _Goal | None:
        own = found.get("attributes", {}).get("precache", found)
        try:
            if "shapes" in own:
                shapes = {
                    n: FieldShape(tuple(s["shape"]), s["dtype"], s["rows_per_chunk"])
                    for n, s in own["shapes"].items()
                }
            else:
                shapes = self._committed_shapes(own)
            return _Goal(
                own["version"],
                own["fingerprint"],
                own["rows_digest"],
                own["rows_per_shard"],
                shapes,
                table,
                self.request.pipeline,
            )
        except (KeyError, TypeError):
            return None

    def _committed_shapes(self, own: Mapping[str, Any]) -> dict[str, FieldShape]:
        from workers.shard_task import RowShape

        rows = {n: RowShape(tuple(f["shape"]), f["dtype"]) for n, f in own["fields"].items()}
        return {n: FieldShape(r.shape, r.dtype, r.rows_per_chunk) for n, r in rows.items()}

    def _folder(self, goal: _Goal) -> Folder:
        return Folder(self.store.path(goal.version))

    def _sizes(self, goal: _Goal) -> dict[tuple[str, int], int | None]:
        folder = self._folder(goal)
        return {
            (name, shard): folder.size(f"{name}/c/{shard}" + "/0" * len(shape.shape))
            for name, shape in goal.shapes.items()
            for shard in range(goal.shards)
        }

    def _is_whole(self, goal: _Goal) -> bool:
        """Whether the version's metadata and every object are there."""
        if not self.store.exists(f"{goal.version}/{ROOT}"):
            return False
        version = open_version(self._folder(goal).root)
        sizes = self._sizes(goal)
        for name in goal.shapes:
            table = version.shard_table(name)
            assert table is not None
            if any(sizes[name, shard] != size for shard, (size, _) in enumerate(table.tolist())):
                return False
        return True

    def _probe(
        self, run: Run, fingerprint: str, digest: str, table: RowTable
    ) -> tuple[_Goal, float]:
        from workers.shard_task import Probe, ProbeTask, run_probe

        rows = sample_for_probe(table, PROBE_SAMPLES)
        keys, sizes = [table.keys[r] for r in rows], [int(table.sizes[r]) for r in rows]
        self.progress.phase("Measuring a few samples")
        [(_, probe)] = run(run_probe, [ProbeTask(self._job(), keys, sizes)])
        if isinstance(probe, SampleError):
            raise SourceError(str(probe)) from None
        if isinstance(probe, PrecacheError):
            raise probe
        assert isinstance(probe, Probe)
        shapes = {
            name: FieldShape(s.shape, s.dtype, s.rows_per_chunk) for name, s in probe.shapes.items()
        }
        per_shard = rows_per_shard(
            len(table), [s.nbytes for s in probe.shapes.values()], self.request.shard_samples
        )
        goal = _Goal(
            version_id(fingerprint, digest, per_shard),
            fingerprint,
            digest,
            per_shard,
            shapes,
            table,
            self.request.pipeline,
        )
        return goal, probe.stored_per_row

    def _job(self) -> Any:
        from workers.shard_task import Job

        return Job(self.source, self.request.pipeline, self.request.import_path)

    def _check_space(self, goal: _Goal, stored_per_row: float) -> None:
        needed, free = int(stored_per_row * len(goal.table)), self.store.free_bytes()
        self.progress.say(f"About {_size(needed)} to be stored; {_size(free)} free")
        if needed > free and self.request.check_space:
            raise StorageError(
                f"{self.request.store} needs about {_size(needed)} and its disk has {_size(free)} "
                "free; choose another disk, a smaller --resize or --codec image, or "
                "--no-space-check"
            )

    def _make(self, run: Run, goal: _Goal) -> BuildResult:
        folder = self._folder(goal)
        if not folder.exists(ROWS):
            folder.put(ROWS, [goal.table.to_parquet()], scratch=f"{BUILD}/tmp")
        folder.put(DESCRIPTION, [goal.description()], scratch=f"{BUILD}/tmp")
        receipts = self._read_receipts(goal)
        todo = shards_to_do(goal.shards, receipts, self._sizes(goal))
        skipped = goal.shards - len(todo)
        receipts = {shard: r for shard, r in receipts.items() if shard not in set(todo)}
        done = sum(len(goal.rows_of(shard)) for shard in receipts)
        self.progress.begin(done, len(goal.table))
        if skipped:
            self.progress.say(f"{skipped} of {goal.shards} shards are there already")
        made = self._run_shards(run, goal, todo, receipts)
        self.progress.phase("Committing")
        commit(self.store, self._finished(goal, receipts))
        return self._result(goal, receipts, made, skipped)

    def _read_receipts(self, goal: _Goal) -> dict[int, Receipt]:
        folder = self._folder(goal)
        receipts = {}
        for name in folder.names(f"{BUILD}/receipts"):
            try:
                receipt = Receipt.from_json(folder.read(f"{BUILD}/receipts/{name}"))
            except (ValueError, KeyError, TypeError):
                continue  # a receipt that does not parse is none: its shard is made again
            receipts[receipt.shard] = receipt
        return receipts

    def _run_shards(
        self, run: Run, goal: _Goal, todo: Sequence[int], receipts: dict[int, Receipt]
    ) -> list[Receipt]:
        """Make shards until all are there; adds to `receipts` and returns the new ones."""
        from workers.shard_task import run_shard

        made: list[Receipt] = []
        self._check_failures(goal, receipts)
        for attempt in itertools.count(1):
            last = attempt == ATTEMPTS
            errors: dict[int, FetchError] = {}
            tasks = (self._task(goal, shard, last) for shard in todo)
            for task, outcome in run(run_shard, tasks):
                if isinstance(outcome, FetchError):
                    errors[task.shard] = outcome
                elif isinstance(outcome, PrecacheError):
                    raise outcome
                else:
                    receipts[task.shard] = outcome
                    made.append(outcome)
                    failed = self._check_failures(goal, receipts)
                    self.progress.advance(len(goal.rows_of(task.shard)), failed)
            if not errors:
                return made
            todo = sorted(errors)
            if last:
                raise BuildError(
                    f"{len(todo)} of {goal.shards} shards are not done: {errors[todo[0]]}. The "
                    "rest is kept: run the same command again, or with --accept-missing to leave "
                    "holes for what cannot be fetched"
                )
        raise AssertionError("unreachable")

    def _task(self, goal: _Goal, shard: int, last: bool) -> Any:
        from workers.shard_task import RowShape, ShardTask

        rows = goal.rows_of(shard)
        part = slice(rows.start, rows.stop)
        return ShardTask(
            self._job(),
            self._folder(goal),
            {name: RowShape(s.shape, s.dtype) for name, s in goal.shapes.items()},
            goal.rows_per_shard,
            shard,
            list(goal.table.keys[part]),
            goal.table.sizes[part].tolist(),
            accept_missing=last and self.request.accept_missing,
        )

    def _check_failures(self, goal: _Goal, receipts: Mapping[int, Receipt]) -> int:
        """How many samples failed; raises where that is more than allowed."""
        failed = sum(len(receipt.holes) for receipt in receipts.values())
        limit = self.request.max_failures
        limit = default_max_failures(len(goal.table)) if limit is None else limit
        limit = 0 if self.request.on_error == "raise" else limit
        if failed <= limit:
            return failed
        found = failures(receipts.values(), goal.table.keys)
        shown = "; ".join(f"{key}: {reason}" for key, reason in found[:5])
        way_out = (
            "mend or remove it, or use --on-error skip"
            if self.request.on_error == "raise"
            else f"the limit is {limit}: mend them, or raise --max-failures"
        )
        raise BuildError(f"{failed} of {len(goal.table)} samples failed ({shown}); {way_out}")

    def _finished(self, goal: _Goal, receipts: Mapping[int, Receipt]) -> Finished:
        return Finished(
            goal.version,
            goal.fingerprint,
            goal.rows_digest,
            goal.pipeline,
            goal.table,
            goal.shapes,
            goal.rows_per_shard,
            receipts,
        )

    def _result(
        self, goal: _Goal, receipts: Mapping[int, Receipt], made: Sequence[Receipt], skipped: int
    ) -> BuildResult:
        holes = failures(receipts.values(), goal.table.keys)
        objects: list[ShardObject] = [o for r in receipts.values() for o in r.objects.values()]
        stages: Counter[str] = Counter()
        for receipt in made:
            stages.update(receipt.seconds)
        mean, std = channel_statistics(list(receipts.values()))
        return BuildResult(
            goal.version,
            str(self._folder(goal).root),
            len(goal.table),
            len(holes),
            goal.shards,
            skipped,
            sum(each.raw_nbytes for each in objects),
            sum(each.size for each in objects),
            0.0,
            sum(receipt.cpu_seconds for receipt in made),
            holes,
            self.ignored,
            {**stages, "imports": sum(receipt.import_seconds for receipt in made)},
            goal.table.classes,
            mean,
            std,
        )

    def _result_of_committed(self, goal: _Goal) -> BuildResult:
        version = open_version(self._folder(goal).root)
        fields = version.fields.values()
        holes = [version.holes[row] for row in sorted(version.holes)]
        return BuildResult(
            goal.version,
            version.path,
            version.rows,
            len(holes),
            goal.shards,
            goal.shards,
            sum(each.raw_nbytes for each in fields),
            sum(each.stored_nbytes for each in fields),
            0.0,
            0.0,
            holes,
            self.ignored,
            {},
            version.classes,
            version.mean,
            version.std,
        )


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"
