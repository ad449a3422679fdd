"""Measurements before anything is cached: of a source, a recipe and this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from precache.errors import HangError, Hole, SampleError, SourceError, StorageError, UsageError
from precache.messages import shown
from precache.recipe.recipe import Codec, ImageCodec, LossyCodec, RawCodec, ZstdCodec
from precache.runtime.machine import MachineReader
from precache.runtime.operating_system import drop_cached
from precache.runtime.spread import Spread
from precache.runtime.threads import prefetch
from precache.runtime.usage import cores as usable_cores
from precache.runtime.usage import read_memory
from precache.store.layout import rows_per_shard
from precache.store.row_table import RowTable
from precache_workers.cluster.executor import executor
from precache_workers.doctor.report import (
    CodecFigures,
    DoctorReport,
    Host,
    Throughput,
    predict_build,
)
from precache_workers.doctor.stages import StageTimes, codec_for, measure_stages
from precache_workers.doctor.trials import rows_to_read, try_codec
from precache_workers.ops.identity import function_digests
from precache_workers.planning.request import Request, source_of
from precache_workers.planning.rows import in_few_units
from precache_workers.profiling.estimate import Estimate
from precache_workers.profiling.rates import RatesTask, start_worker, time_rows
from precache_workers.shards.samples import FetchAllTask, Job
from precache_workers.sources.base import Sample, Source

LISTING, STAGES, PROBE, READING = 0.2, 0.3, 0.15, 0.25
"""Shares of the time for each part."""
READ_RATE = 100e6
"""Raw bytes of a store that are written and read for some epochs in a second, on a slow day."""
ORDER_SEED = 0
DEPTHS = (1, 4, 16)
REMOTE_DEPTHS = (1, 4, 16, 64)
"""Requests in flight; a service has a higher latency, and takes more."""
MOST_FILES = 512
"""Files read at each depth, at most."""
CODECS: tuple[Codec, ...] = (RawCodec(), ZstdCodec(), ImageCodec())


@dataclass(kw_only=True)
class Examination:
    """Measurements of a source and this machine.

    Attributes
    ----------
    request
        A build of the source; its store is not opened.
    samples
        Samples to measure, at most.
    seconds
        Time for all measurements.
    rate, cores
        Samples per second of the device to be fed; cores of the build, and of training.
    tick
        Called with the name of each step.
    barred
        Key -> hole, of samples that take too long.
    """

    request: Request
    samples: int
    seconds: float
    rate: float
    cores: int
    tick: Callable[[str], None]
    barred: Mapping[str, Hole] = field(default_factory=dict)

    @functools.cached_property
    def job(self) -> Job:
        """The source, the recipe and where its functions are imported from."""
        request = self.request
        return Job(
            source_of(request),
            request.recipe,
            request.import_path,
            function_digests(request.recipe),
            sample_seconds=self.seconds,
        )

    def report(self, build: Estimate | None = None) -> DoctorReport:
        """Measure everything, and predict; raises `SourceError` if no sample has a row.

        Parameters
        ----------
        build
            Of all samples, where a plan has estimated it.
        """
        for name, declared in self.request.recipe.fields.items():
            if declared.differs or isinstance(declared.stored_as, LossyCodec):
                raise UsageError(
                    f"doctor measures rows of one shape, and those of {name} keep the shapes of "
                    "their images; give --resize and --crop, and no --codec jpeg or raw420, to it, "
                    "or run plan without --rate"
                )
            if declared.kind is not None:
                raise UsageError(
                    f"doctor measures rows of one shape, and those of {name} differ in length; "
                    f"leave [fields.{name}] out of its recipe, or run plan without --rate"
                )
        began, load, name = time.monotonic(), os.getloadavg()[0], shown(self.request.source)
        listing = self.job.source.list(
            lambda count: self.tick(f"listing, {count:,} samples"), self.seconds * LISTING
        )
        listing_seconds, table = time.monotonic() - began, listing.table
        rows = np.array(in_few_units(table, list(range(len(table))), self.samples))
        order = np.random.default_rng(ORDER_SEED).permutation(len(rows))[: self.samples]
        self.tick("reading files at several depths")
        storage, io_wait = probe_source(self.job.source, table, self.seconds * PROBE)
        stages = self._stages(table.take(rows[order]))
        build = build or self._build(stages, table, storage, listing_seconds)
        codecs = list(self._codecs(stages, len(table)))
        nbytes = [sample.nbytes for sample in stages.samples]
        listed = bool((table.sizes >= 0).all())
        memory = read_memory()
        return DoctorReport(
            source=name,
            samples=len(table),
            complete=listing.complete,
            source_bytes=float(table.sizes.sum() if listed else np.mean(nbytes) * len(table)),
            listing_seconds=listing_seconds,
            keys=[sample.key for sample in stages.samples],
            nbytes=nbytes,
            failures=stages.failures,
            misfits=stages.misfits(),
            stages=[stages.stage(name) for name in ("fetch", *stages.steps, "encode")],
            random=next((name for name, random in stages.steps.items() if random), ""),
            codecs=codecs,
            rate=self.rate,
            cores=self.cores,
            build=build,
            storage=storage,
            host=Host(usable_cores(), memory.total, memory.available, io_wait, load),
            seconds=time.monotonic() - began,
        )

    def _stages(self, some: RowTable) -> StageTimes:
        while True:
            task = FetchAllTask.of(self.job, some, range(len(some)), barred=self.barred)
            try:
                return measure_stages(
                    task,
                    seconds=self.seconds * STAGES,
                    tick=lambda done: self.tick(f"stages, sample {done} of {len(some)}"),
                )
            except HangError as error:  # its thread goes on; no row is kept here
                self.barred = {**self.barred, **error.late}
            except SampleError as error:
                raise SourceError(f"{shown(self.request.source)}: {error}") from None

    def _build(
        self, stages: StageTimes, table: RowTable, storage: Sequence[Throughput], listing: float
    ) -> Estimate:
        """Predict a build from its unit times, measured as its plan does."""
        self.tick("building a few samples")
        samples, shapes = len(table), stages.shapes
        per_shard = rows_per_shard(samples, [row.nbytes for row in shapes.values()])
        how = {"shapes": shapes, "rows_per_shard": per_shard, "barred": self.barred}
        task = RatesTask.some_of(self.job, table, np.arange(samples), **how)
        began = time.perf_counter()
        with executor(self.request.address, 1, self.request) as run:
            start_worker(run, self.job)
            spent = {"listing": listing, "start": time.perf_counter() - began}
            times = time_rows(run, task)
        return predict_build(samples, per_shard, times, self.cores, storage, **spent)

    def _codecs(self, stages: StageTimes, population: int) -> Iterator[CodecFigures]:
        """Yield the figures of every codec, the recipe's own first."""
        declared = {name: field.stored_as for name, field in self.job.recipe.fields.items()}
        own = "+".join(dict.fromkeys(codec.name for codec in declared.values()))
        rows, shapes = stages.rows, stages.shapes.values()
        trials = {own: declared} | {
            codec.name: dict.fromkeys(declared, codec)
            for codec in CODECS
            if codec.name != own and any(codec_for(codec, row) == codec for row in shapes)
        }
        share, raw = self.seconds * READING / len(trials), sum(row.nbytes for row in shapes)
        count = rows_to_read(population, len(rows), raw, share * READ_RATE)
        for name, codecs in trials.items():
            self.tick(f"training from {name}")
            with tempfile.TemporaryDirectory(prefix="precache-doctor-") as folder:
                yield try_codec(name, codecs, rows, count, Path(folder) / name)


# --- the source -----------------------------------------------------------------------------------


def probe_source(
    source: Source, table: RowTable, seconds: float
) -> tuple[list[Throughput], float | None]:
    """Read whole samples of files at several depths; of a `Dataset`, nothing.

    Before each reading, files on a local disk are dropped from the page cache.

    Parameters
    ----------
    table
        All samples, in the order of the listing.
    seconds
        Time for all readings.

    Returns
    -------
    tuple
        The readings; and the share of the time in which a process waited for I/O, None if the
        machine does not report it.
    """
    file = source.file_of(table.keys[0], table.locations_of([0]))
    if file is None:
        return [], None
    depths = DEPTHS if file[0].local("") else REMOTE_DEPTHS
    machine = MachineReader()
    machine.read()
    readings = []
    for depth in depths:
        random = np.random.default_rng(depth)
        some = table.take(random.choice(len(table), min(MOST_FILES, len(table)), replace=False))
        _drop(source, some)
        reading = _read(source, some, depth, seconds / len(depths))
        readings += [reading] if reading else []
    return readings, machine.read().io_wait


def _drop(source: Source, some: RowTable) -> None:
    """Drop local files from the page cache; mapped pages stay."""
    found = (source.file_of(key, some.locations_of([row])) for row, key in enumerate(some.keys))
    files = {name: folder for folder, name in filter(None, found)}
    for name, folder in files.items():
        with contextlib.suppress(StorageError):
            if (descriptor := folder.open(name)) is not None:
                drop_cached(descriptor)
                os.close(descriptor)


def _read(source: Source, some: RowTable, depth: int, seconds: float) -> Throughput | None:
    """Read samples, so many at a time; None if none could be read."""
    work = iter(range(len(some)))
    started = time.perf_counter()
    until = started + seconds

    def fetch_some(number: int) -> list[tuple[float, int]]:
        done = []
        for row in work:  # one `next` at a time, which the interpreter makes whole
            sample = [some.keys[row]], [int(some.sizes[row])], some.locations_of([row])
            began = time.perf_counter()
            [fetched] = source.fetch(*sample)
            ended = time.perf_counter()
            if isinstance(fetched, Sample):
                done.append((ended - began, fetched.nbytes))
            if ended > until:
                break
        return done

    parts = prefetch(fetch_some, range(depth), depth, depth)
    done = [request for part in parts for request in part]
    wall = time.perf_counter() - started
    if not done:
        return None
    spread = Spread.of([seconds for seconds, _ in done])
    return Throughput(
        depth=depth,
        requests=len(done),
        requests_per_s=len(done) / wall,
        bytes_per_s=sum(nbytes for _, nbytes in done) / wall,
        median_ms=1e3 * spread.median,
        p95_ms=1e3 * spread.p95,
    )
