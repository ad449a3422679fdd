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
import psutil

from precache.errors import HangError, SampleError, SourceError, UsageError
from precache.messages import shown
from precache.recipe.recipe import ImageCodec, RawCodec, Recipe, ZstdCodec
from precache.runtime.usage import cores as usable_cores
from precache.storage.open import StorageOptions
from precache.store.layout import RowShape
from precache_workers.doctor.report import DoctorReport, prognosis
from precache_workers.doctor.source_probe import probe_source
from precache_workers.doctor.trials import Read, build_cpu, read_codec, rows_to_read
from precache_workers.ops.identity import function_digests
from precache_workers.profiling.measured import CodecTimes, Host, SourceMeasurements
from precache_workers.profiling.stage_times import Codec, Passed, codec_for, take_through
from precache_workers.shards.samples import Job
from precache_workers.sources.base import Listing, Source, open_source
from precache_workers.sources.user_code import require_permission

LISTING, STAGES, PROBE, BUILD, READING = 0.2, 0.3, 0.15, 0.1, 0.25
"""Shares of the time for each part."""
READ_RATE = 100e6
"""Raw bytes of a store that are written and read for some epochs in a second, on a slow day."""
INDEX_ENTRY = 16
"""Bytes that a shard's index has for a chunk."""
ORDER_SEED = 0
CODECS: tuple[Codec, ...] = (RawCodec(), ZstdCodec(), ImageCodec())


@dataclass(frozen=True)
class Question:
    """What the user asked; `precache.doctor` explains each."""

    source: str
    recipe: Recipe
    samples: int = 200
    seconds: float = 45.0
    rate: float = 1000.0
    cores: int | None = None
    run_functions: bool = False
    import_path: tuple[str, ...] = ()
    storage_options: StorageOptions = None
    follow_links: bool = False


def examine(question: Question, tick: Callable[[str], None] = lambda what: None) -> DoctorReport:
    """Measure a sample and say what follows.

    Parameters
    ----------
    tick
        Told what is being done.

    Raises
    ------
    UsageError
        A number that makes no sense, or a source that is missing, empty or unusable.
    """
    _check(question)
    started = time.monotonic()
    load = os.getloadavg()[0]
    source = open_source(
        question.source, question.storage_options, follow_links=question.follow_links
    )
    listing = source.list(
        lambda count: tick(f"listing, {count:,} samples"), question.seconds * LISTING
    )
    listing_seconds = time.monotonic() - started
    found = _measure(question, source, listing, tick)
    host = replace(found.host, load=load)
    found = replace(found, listing_seconds=listing_seconds, host=host)
    cores = question.cores or host.cores
    return prognosis(found, question.rate, cores, time.monotonic() - started)


def _measure(
    question: Question, source: Source, listing: Listing, tick: Callable[[str], None]
) -> SourceMeasurements:
    """All but what was known before."""
    table = listing.table
    order = np.random.default_rng(ORDER_SEED).permutation(len(table))[: question.samples]
    keys, sizes = [table.keys[row] for row in order], table.sizes[order].tolist()
    job = Job(
        source,
        question.recipe,
        question.import_path,
        function_digests(question.recipe),
        sample_seconds=question.seconds,
    )
    tick("reading files at several depths")
    budget = question.seconds * PROBE
    storage, io_wait = probe_source(source, table.keys, table.sizes.tolist(), budget)
    passed = _stages(question, job, keys, sizes, tick)
    nbytes = [each.nbytes for each in passed.taken]
    with tempfile.TemporaryDirectory(prefix="precache-doctor-") as folder:
        burnt, codecs = _trials(question, job, passed, len(table), Path(folder), tick)
    memory = psutil.virtual_memory()
    return SourceMeasurements(
        source=shown(question.source),
        samples=len(table),
        complete=listing.complete,
        source_bytes=_source_bytes(table.sizes, nbytes),
        listing_seconds=0.0,
        keys=[each.key for each in passed.taken],
        nbytes=nbytes,
        failures=passed.failures,
        misfits=passed.misfits(),
        fetch=passed.stage("fetch"),
        ops=[passed.stage(name) for name in passed.steps],
        encode=passed.stage("encode"),
        cuts=passed.cuts(),
        codecs=codecs,
        build_cpu=burnt,
        storage=storage,
        host=Host(usable_cores(), memory.total, memory.available, io_wait, 0.0),
    )


def _stages(
    question: Question,
    job: Job,
    keys: Sequence[str],
    sizes: Sequence[int],
    tick: Callable[[str], None],
) -> Passed:
    names = [codec.name for codec in CODECS]

    def tell(done: int) -> None:
        tick(f"stages, sample {done} of {len(keys)}")

    late: dict[str, str] = {}
    while True:
        try:
            return take_through(job, keys, sizes, names, question.seconds * STAGES, tell, late)
        except HangError as error:  # what works on it goes on beside; here no row is kept
            late |= error.late
        except SampleError as error:
            raise SourceError(f"{shown(question.source)}: {error}") from None


def _check(question: Question) -> None:
    require_permission(question.recipe, question.run_functions)
    for name in ("seconds", "rate"):
        value = getattr(question, name)
        if not 0 < value < math.inf:
            raise UsageError(f"{name} is {value:g}; give a number above 0")


def _source_bytes(sizes: np.ndarray, measured: Sequence[int]) -> float:
    """Of all samples: as listed, else by the mean of those measured."""
    return float(sizes.sum()) if (sizes >= 0).all() else float(np.mean(measured)) * len(sizes)


def _trials(
    question: Question,
    job: Job,
    passed: Passed,
    population: int,
    folder: Path,
    tick: Callable[[str], None],
) -> tuple[float, list[CodecTimes]]:
    """CPU seconds of a build for a sample, and every codec's figures, the recipe's own first."""
    tick("building the sample")
    size_of = {each.key: each.size for each in passed.usual}
    burnt = build_cpu(
        job, passed.shapes, list(size_of), list(size_of.values()), population, folder / "build",
        question.seconds * BUILD,
    )  # fmt: skip
    own = own_codec(question.recipe)
    rows = [each.rows for each in passed.usual]
    raw = sum(row.nbytes for row in passed.shapes.values())
    others: list[Codec] = [codec for codec in CODECS if codec.name != own]
    able = [codec for codec in others if any(_holds(codec, row) for row in passed.shapes.values())]
    share = question.seconds * READING / (1 + len(able))
    count = rows_to_read(population, len(rows), raw, share * READ_RATE)
    found = []
    for name, codec in ((own, None), *((codec.name, codec) for codec in able)):
        tick(f"training from {name}")
        read = read_codec(codec, question.recipe, rows, count, folder / name)
        found.append(_codec_times(name, codec, passed, read, whole=count >= len(rows)))
        shutil.rmtree(folder / name)
    return burnt, found


def _codec_times(
    name: str, codec: Codec | None, passed: Passed, read: Read, whole: bool
) -> CodecTimes:
    """What one codec came to; `whole` where the store that was read has all sampled rows."""
    usual = passed.usual
    stored = read.stored
    if codec is None:
        encode = [each.cpu["encode"] for each in usual]
        nbytes = [each.cut_nbytes[-1] for each in usual]
    else:
        encode = [each.encode[name] for each in usual]
        nbytes = [float(each.encoded[name]) for each in usual]
    if not whole:  # rows are large, and each is a chunk of its own
        stored = float(np.mean(nbytes)) + INDEX_ENTRY * len(passed.shapes)
    warm = read.cost.warm
    return CodecTimes(
        name, stored, read.raw, float(np.mean(encode)), warm.samples_per_s, warm.cpu_ms_per_1000
    )


def own_codec(recipe: Recipe) -> str:
    """The codecs of a recipe's fields, by name."""
    return "+".join(dict.fromkeys(each.stored_as.name for each in recipe.fields.values()))


def _holds(codec: Codec, row: RowShape) -> bool:
    return codec_for(codec, row) == codec
