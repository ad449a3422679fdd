"""Measurements before anything is cached: of a source, a recipe and this machine."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from precache.errors import HangError, SampleError, SourceError, UsageError
from precache.messages import shown
from precache.recipe.recipe import Codec, ImageCodec, RawCodec, Recipe, ZstdCodec
from precache.runtime.usage import cores as usable_cores
from precache.runtime.usage import read_memory
from precache.storage.open import StorageOptions
from precache.store.layout import INDEX_ENTRY_NBYTES, RowShape
from precache.store.row_table import RowTable
from precache_workers.cluster.executor import executor
from precache_workers.doctor.report import DoctorReport, doctor_report
from precache_workers.doctor.source_throughput import probe_source
from precache_workers.doctor.trials import Read, build_cpu, read_codec, rows_to_read
from precache_workers.ops.identity import function_digests
from precache_workers.planning.rows import in_few_units
from precache_workers.profiling.measurements import CodecTimes, Host, SourceMeasurements
from precache_workers.profiling.rates import StartTask, start_worker
from precache_workers.profiling.stage_times import StageTimes, codec_for, measure_stages
from precache_workers.runtime.fatal_signals import fatal_stacks
from precache_workers.shards.samples import FetchAllTask, Job, loads_torch
from precache_workers.sources.base import Columns, Listing, Source
from precache_workers.sources.kinds import open_source
from precache_workers.sources.sample_inputs import SampleName
from precache_workers.user_code.loading import require_permission

LISTING, STAGES, PROBE, BUILDING, READING = 0.2, 0.3, 0.15, 0.1, 0.25
"""Shares of the time for each part."""
READ_RATE = 100e6
"""Raw bytes of a store that are written and read for some epochs in a second, on a slow day."""
ORDER_SEED = 0
CODECS: tuple[Codec, ...] = (RawCodec(), ZstdCodec(), ImageCodec())


_start_seconds: dict[bool, float] = {}


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """Arguments of `precache.doctor`, which explains each."""

    source: str
    recipe: Recipe
    samples: int
    seconds: float
    rate: float
    cores: int | None
    run_functions: bool
    import_path: tuple[str, ...]
    storage_options: StorageOptions
    follow_links: bool
    source_kind: str | None
    columns: Columns
    sample_name: SampleName | None


def examine(request: DoctorRequest, tick: Callable[[str], None]) -> DoctorReport:
    """Measure some samples of a source and report what follows.

    Parameters
    ----------
    tick
        Called with the name of each step.

    Raises
    ------
    UsageError
        A number is out of range, or the source is missing, empty or unusable.
    """
    _check(request)
    started = time.monotonic()
    load = os.getloadavg()[0]
    source = open_source(
        request.source,
        request.storage_options,
        follow_links=request.follow_links,
        kind=request.source_kind,
        columns=request.columns,
        sample_name=request.sample_name,
    )
    listing = source.list(
        lambda count: tick(f"listing, {count:,} samples"), request.seconds * LISTING
    )
    listing_seconds = time.monotonic() - started
    with fatal_stacks():
        measured = _measure(request, source, listing, tick)
    host = replace(measured.host, load=load)
    measured = replace(measured, listing_seconds=listing_seconds, host=host)
    cores = request.cores or host.cores
    return doctor_report(measured, request.rate, cores, time.monotonic() - started)


def _measure(
    request: DoctorRequest, source: Source, listing: Listing, tick: Callable[[str], None]
) -> SourceMeasurements:
    """Measure all but the listing."""
    table = listing.table
    rows = np.array(in_few_units(table, list(range(len(table))), request.samples))
    order = rows[np.random.default_rng(ORDER_SEED).permutation(len(rows))[: request.samples]]
    some = table.take(order)
    job = Job(
        source,
        request.recipe,
        request.import_path,
        function_digests(request.recipe),
        sample_seconds=request.seconds,
    )
    tick("starting a worker")
    start_seconds = _time_start(job)
    tick("reading files at several depths")
    budget = request.seconds * PROBE
    storage, io_wait = probe_source(source, table, budget)
    stages = _stages(request, job, some, tick)
    nbytes = [sample.nbytes for sample in stages.samples]
    with tempfile.TemporaryDirectory(prefix="precache-doctor-") as folder:
        cpu, codecs = _trials(request, job, stages, some, len(table), Path(folder), tick)
    memory = read_memory()
    return SourceMeasurements(
        source=shown(request.source),
        samples=len(table),
        complete=listing.complete,
        source_bytes=_source_bytes(table.sizes, nbytes),
        listing_seconds=0.0,
        keys=[sample.key for sample in stages.samples],
        nbytes=nbytes,
        failures=stages.failures,
        misfits=stages.misfits(),
        fetch=stages.stage("fetch"),
        ops=[stages.stage(name) for name in stages.steps],
        encode=stages.stage("encode"),
        cuts=stages.cuts(),
        codecs=codecs,
        build_cpu=cpu,
        start_seconds=start_seconds,
        storage=storage,
        host=Host(usable_cores(), memory.total, memory.available, io_wait, 0.0),
    )


def _time_start(job: Job) -> float:
    """Return the seconds in which a worker starts; measured once for all recipes like this."""
    known = loads_torch(job.recipe)
    if known not in _start_seconds:
        began = time.perf_counter()
        with executor("local", 1) as run:
            list(run(start_worker, [StartTask(job)]))
            _start_seconds[known] = time.perf_counter() - began
    return _start_seconds[known]


def _stages(
    request: DoctorRequest, job: Job, some: RowTable, tick: Callable[[str], None]
) -> StageTimes:
    names = [codec.name for codec in CODECS]

    def report(done: int) -> None:
        tick(f"stages, sample {done} of {len(some)}")

    task = FetchAllTask.of(job, some, range(len(some)))
    while True:
        try:
            seconds = request.seconds * STAGES
            return measure_stages(task, codecs=names, seconds=seconds, tick=report)
        except HangError as error:  # its thread goes on; no row is kept here
            task = replace(task, barred={**task.barred, **error.late})
        except SampleError as error:
            raise SourceError(f"{shown(request.source)}: {error}") from None


def _check(request: DoctorRequest) -> None:
    require_permission(request.recipe, request.run_functions)
    for name in ("seconds", "rate"):
        value = getattr(request, name)
        if not 0 < value < math.inf:
            raise UsageError(f"{name} is {value:g}; give a number above 0")


def _source_bytes(sizes: np.ndarray, measured: Sequence[int]) -> float:
    """Bytes of all samples: as listed, else by the mean of those measured."""
    return float(sizes.sum()) if (sizes >= 0).all() else float(np.mean(measured)) * len(sizes)


def _trials(
    request: DoctorRequest,
    job: Job,
    stages: StageTimes,
    some: RowTable,
    population: int,
    folder: Path,
    tick: Callable[[str], None],
) -> tuple[float, list[CodecTimes]]:
    """CPU seconds of a build per sample, and every codec's figures, the recipe's own first."""
    tick("building the sample")
    usual = {sample.key for sample in stages.usual}
    chosen = some.take([row for row, key in enumerate(some.keys) if key in usual])
    building = request.seconds * BUILDING
    cpu = build_cpu(job, stages.shapes, chosen, population, folder / "build", building)
    own = own_codec(request.recipe)
    rows = [sample.rows for sample in stages.usual]
    raw = sum(row.nbytes for row in stages.shapes.values())
    others: list[Codec] = [codec for codec in CODECS if codec.name != own]
    able = [codec for codec in others if any(_holds(codec, row) for row in stages.shapes.values())]
    share = request.seconds * READING / (1 + len(able))
    count = rows_to_read(population, len(rows), raw, share * READ_RATE)
    times = []
    for name, codec in ((own, None), *((codec.name, codec) for codec in able)):
        tick(f"training from {name}")
        read = read_codec(codec, request.recipe, rows, count, folder / name)
        times.append(_codec_times(name, codec, stages, read, whole=count >= len(rows)))
        shutil.rmtree(folder / name)
    return cpu, times


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


def _holds(codec: Codec, row: RowShape) -> bool:
    return codec_for(codec, row) == codec
