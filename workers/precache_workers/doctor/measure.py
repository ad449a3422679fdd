"""Measurements before anything is cached: of a source, a recipe and this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from precache.errors import HangError, SampleError, SourceError
from precache.recipe.recipe import Codec, ImageCodec, RawCodec, Recipe, ZstdCodec
from precache.runtime.usage import cores as usable_cores
from precache.runtime.usage import read_memory
from precache.store.layout import INDEX_ENTRY_NBYTES
from precache.store.row_table import RowTable
from precache_workers.cluster.executor import executor
from precache_workers.doctor.source_throughput import probe_source
from precache_workers.doctor.trials import Read, build_cpu, read_codec, rows_to_read
from precache_workers.planning.rows import in_few_units
from precache_workers.profiling.measurements import CodecTimes, Host, SourceMeasurements
from precache_workers.profiling.rates import StartTask, start_worker
from precache_workers.profiling.stage_times import StageTimes, codec_for, measure_stages
from precache_workers.runtime.fatal_signals import fatal_stacks
from precache_workers.shards.samples import FetchAllTask, Job, loads_torch

LISTING, STAGES, PROBE, BUILDING, READING = 0.2, 0.3, 0.15, 0.1, 0.25
"""Shares of the time for each part."""
READ_RATE = 100e6
"""Raw bytes of a store that are written and read for some epochs in a second, on a slow day."""
ORDER_SEED = 0
CODECS: tuple[Codec, ...] = (RawCodec(), ZstdCodec(), ImageCodec())


_start_seconds: dict[bool, float] = {}


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Measurements of a source and this machine.

    Attributes
    ----------
    samples
        Samples to measure, at most.
    seconds
        Time for all measurements.
    job
        The source, the recipe and where its functions are imported from.
    tick
        Called with the name of each step.
    """

    name: str
    job: Job
    samples: int
    seconds: float
    tick: Callable[[str], None]

    def measure(self) -> SourceMeasurements:
        """Measure everything; raises `SourceError` if no sample has a row."""
        began, load = time.monotonic(), os.getloadavg()[0]
        listing = self.job.source.list(
            lambda count: self.tick(f"listing, {count:,} samples"), self.seconds * LISTING
        )
        listing_seconds, table = time.monotonic() - began, listing.table
        with fatal_stacks():
            rows = np.array(in_few_units(table, list(range(len(table))), self.samples))
            order = np.random.default_rng(ORDER_SEED).permutation(len(rows))[: self.samples]
            some = table.take(rows[order])
            self.tick("starting a worker")
            start_seconds = _time_start(self.job)
            self.tick("reading files at several depths")
            storage, io_wait = probe_source(self.job.source, table, self.seconds * PROBE)
            stages = self._stages(some)
            with tempfile.TemporaryDirectory(prefix="precache-doctor-") as folder:
                build_cpu = self._build(stages, some, len(table), Path(folder))
                codecs = list(self._codecs(stages, len(table), Path(folder)))
        nbytes = [sample.nbytes for sample in stages.samples]
        listed = bool((table.sizes >= 0).all())
        memory = read_memory()
        return SourceMeasurements(
            source=self.name,
            samples=len(table),
            complete=listing.complete,
            source_bytes=float(table.sizes.sum() if listed else np.mean(nbytes) * len(table)),
            listing_seconds=listing_seconds,
            keys=[sample.key for sample in stages.samples],
            nbytes=nbytes,
            failures=stages.failures,
            misfits=stages.misfits(),
            fetch=stages.stage("fetch"),
            ops=[stages.stage(name) for name in stages.steps],
            encode=stages.stage("encode"),
            cuts=stages.cuts(),
            codecs=codecs,
            build_cpu=build_cpu,
            start_seconds=start_seconds,
            storage=storage,
            host=Host(usable_cores(), memory.total, memory.available, io_wait, load),
        )

    def _stages(self, some: RowTable) -> StageTimes:
        task = FetchAllTask.of(self.job, some, range(len(some)))
        while True:
            try:
                return measure_stages(
                    task,
                    codecs=[codec.name for codec in CODECS],
                    seconds=self.seconds * STAGES,
                    tick=lambda done: self.tick(f"stages, sample {done} of {len(some)}"),
                )
            except HangError as error:  # its thread goes on; no row is kept here
                task = replace(task, barred={**task.barred, **error.late})
            except SampleError as error:
                raise SourceError(f"{self.name}: {error}") from None

    def _build(self, stages: StageTimes, some: RowTable, population: int, folder: Path) -> float:
        """Return CPU seconds of a build per sample."""
        self.tick("building the sample")
        usual = {sample.key for sample in stages.usual}
        chosen = some.take([row for row, key in enumerate(some.keys) if key in usual])
        seconds = self.seconds * BUILDING
        return build_cpu(self.job, stages.shapes, chosen, population, folder / "build", seconds)

    def _codecs(self, stages: StageTimes, population: int, folder: Path) -> Iterator[CodecTimes]:
        """Yield the figures of every codec, the recipe's own first."""
        own = own_codec(self.job.recipe)
        rows = [sample.rows for sample in stages.usual]
        raw = sum(row.nbytes for row in stages.shapes.values())
        others = [
            codec
            for codec in CODECS
            if codec.name != own
            and any(codec_for(codec, row) == codec for row in stages.shapes.values())
        ]
        share = self.seconds * READING / (1 + len(others))
        count = rows_to_read(population, len(rows), raw, share * READ_RATE)
        for name, codec in ((own, None), *((codec.name, codec) for codec in others)):
            self.tick(f"training from {name}")
            read = read_codec(codec, self.job.recipe, rows, count, folder / name)
            yield _codec_times(name, codec, stages, read, whole=count >= len(rows))
            shutil.rmtree(folder / name)


def _time_start(job: Job) -> float:
    """Return the seconds in which a worker starts; measured once for all recipes like this."""
    known = loads_torch(job.recipe)
    if known not in _start_seconds:
        began = time.perf_counter()
        with executor("local", 1) as run:
            list(run(start_worker, [StartTask(job)]))
            _start_seconds[known] = time.perf_counter() - began
    return _start_seconds[known]


def _codec_times(
    name: str, codec: Codec | None, stages: StageTimes, read: Read, whole: bool
) -> CodecTimes:
    """Figures of one codec; `whole` if the store that was read has all sampled rows."""
    usual = stages.usual
    stored = read.stored
    if codec is None:
        encode = [sample.times["encode"].cpu for sample in usual]
        nbytes = [sample.cuts[-1].nbytes for sample in usual]
    else:
        encode = [sample.encode_cpu[name] for sample in usual]
        nbytes = [float(sample.encoded[name]) for sample in usual]
    if not whole:  # rows are large, and each is a chunk of its own
        stored = float(np.mean(nbytes)) + INDEX_ENTRY_NBYTES * len(stages.shapes)
    warm = read.cost.warm
    return CodecTimes(
        name, stored, read.raw, float(np.mean(encode)), warm.samples_per_s, warm.cpu_ms_per_1000
    )


def own_codec(recipe: Recipe) -> str:
    """Names of the codecs of a recipe's fields, joined."""
    return "+".join(dict.fromkeys(field.stored_as.name for field in recipe.fields.values()))
