"""Times of each stage and op of a recipe, sample by sample, and of storing rows after each op."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from precache.codecs import kernels
from precache.codecs.chunk import codec_metadata, decoder, encoder
from precache.codecs.image import undo_image
from precache.errors import SampleError
from precache.recipe.ops import Function, Op
from precache.recipe.recipe import Codec, Field, ImageCodec, RawCodec, Recipe, ZstdCodec
from precache.store.layout import RowShape
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.profiling.harness import (
    LEAST,
    SampleRun,
    hole_reason,
    run_samples,
    timed,
)
from precache_workers.profiling.measurements import CutTimes, StepTimes, TimeCost
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.shards.samples import FetchAllTask, recipes_of
from precache_workers.sources.base import Sample

BATCH = 256
"""Assumed rows of a batch: large batches are decoded past the processor's caches."""
TOGETHER_NBYTES = 512 << 10
"""Bytes of the memory that rows are decoded into at a time."""
KEPT_NBYTES = 256 << 20
"""Bytes of rows that are kept in memory for the trials that follow."""
NO_OP = "no op"
"""Name of the only step of a recipe without ops."""


@dataclass(frozen=True)
class Cut:
    """The row of every field after a step, as it would be stored.

    Attributes
    ----------
    nbytes
        Stored bytes.
    encode_cpu, decode_cpu
        CPU seconds.
    """

    nbytes: float
    encode_cpu: float
    decode_cpu: float
    shapes: tuple[RowShape, ...]


@dataclass
class MeasuredSample:
    """Measurements of one sample.

    Attributes
    ----------
    nbytes
        Bytes as fetched.
    times
        By stage.
    cuts
        After each step.
    encode_cpu, encoded
        By codec: CPU seconds to encode the finished row, and its bytes.
    rows
        The finished row of each field.
    """

    key: str
    nbytes: int
    times: Mapping[str, TimeCost]
    cuts: list[Cut] = field(default_factory=list)
    encode_cpu: dict[str, float] = field(default_factory=dict)
    encoded: dict[str, int] = field(default_factory=dict)
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[RowShape, ...]:
        """Shapes of the finished rows."""
        return self.cuts[-1].shapes


@dataclass(frozen=True)
class StageTimes:
    """Measurements of all samples.

    Attributes
    ----------
    steps
        Names of the steps.
    samples
        Those that have rows.
    failures
        (key, reason) of the others.
    frozen
        By step, True if a random op is among those so far.
    """

    steps: tuple[str, ...]
    samples: Sequence[MeasuredSample]
    failures: Sequence[tuple[str, str]]
    frozen: Sequence[bool]

    @property
    def usual(self) -> list[MeasuredSample]:
        """Samples whose rows have the most common shapes: a store holds no others."""
        shapes = self._usual_shapes
        return [sample for sample in self.samples if sample.shapes == shapes]

    def misfits(self) -> list[tuple[str, str]]:
        """Return (key, reason) of all other samples."""
        usual = self._usual_shapes
        return [
            (sample.key, f"its row is {_shown(sample.shapes)}, most are {_shown(usual)}")
            for sample in self.samples
            if sample.shapes != usual
        ]

    @property
    def _usual_shapes(self) -> tuple[RowShape, ...]:
        [(shapes, _)] = Counter(sample.shapes for sample in self.samples).most_common(1)
        return shapes

    @property
    def shapes(self) -> dict[str, RowShape]:
        """Shapes of the rows that a store would hold, by field."""
        return dict(zip(self.samples[0].rows, self._usual_shapes, strict=True))

    def stage(self, name: str) -> StepTimes:
        """Return the times of one stage."""
        times = [sample.times.get(name, TimeCost()) for sample in self.samples]
        cpu, wall = [cost.cpu for cost in times], [cost.wall for cost in times]
        return StepTimes(name, np.array(cpu), np.array(wall))

    def cuts(self) -> list[CutTimes]:
        """Return the measurements after each step."""
        by_step = zip(*(sample.cuts for sample in self.samples), strict=True)
        return [
            CutTimes(
                np.array([cut.nbytes for cut in cuts]),
                np.array([cut.encode_cpu for cut in cuts]),
                np.array([cut.decode_cpu for cut in cuts]),
                len({cut.shapes for cut in cuts}) == 1,
                frozen,
            )
            for cuts, frozen in zip(by_step, self.frozen, strict=True)
        ]


def step_names(recipe: Recipe) -> tuple[str, ...]:
    """Return unique names of the steps: their ops, those of several fields joined."""
    columns = itertools.zip_longest(*(spec.ops for spec in recipe.fields.values()))
    plain = ["+".join(dict.fromkeys(_name(op) for op in ops if op)) for ops in columns]
    seen: Counter[str] = Counter()
    names = []
    for name in plain or [NO_OP]:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return tuple(names)


def _name(op: Op) -> str:
    return op.function if isinstance(op, Function) else op.op


def frozen_after(recipe: Recipe) -> list[bool]:
    """Return for each step if a random op is among those up to it."""
    return [
        any(op.is_random for spec in recipe.fields.values() for op in spec.ops[: at + 1])
        for at in range(len(step_names(recipe)))
    ]


def codec_for(codec: Codec, row: RowShape) -> Codec:
    """Return the codec, or plain zstd if it cannot hold such rows."""
    image = row.dtype == "uint8" and len(row.shape) == 3
    return codec if image or not isinstance(codec, ImageCodec) else ZstdCodec()


def measure_stages(
    task: FetchAllTask,
    *,
    codecs: Sequence[str],
    seconds: float,
    tick: Callable[[int], None] = lambda done: None,
) -> StageTimes:
    """Measure every stage of samples, one after another.

    Parameters
    ----------
    codecs
        Names of codecs that finished rows are encoded with, besides the recipe's own.
    seconds
        Time after which no further sample is begun, once there are a few.
    tick
        Called with the number of samples that are done.

    Raises
    ------
    SampleError
        None of them has a row.
    HangError
        A sample takes too long.
    """
    return run_in_time(
        lambda: _StageTimer(task, codecs).measure(seconds, tick), task.job.sample_seconds
    )


def _shown(shapes: Sequence[RowShape]) -> str:
    return ", ".join(f"{row.dtype} {row.shape}" for row in shapes)


class _StageTimer:
    """Measures samples; each encoder is ready before its first row is measured."""

    def __init__(self, task: FetchAllTask, codecs: Sequence[str]) -> None:
        self._task, self._codecs = task, codecs
        self._recipe = task.job.recipe
        self._steps = step_names(self._recipe)
        self._fields = self._recipe.fields
        self._recipes = recipes_of(task.job)
        self._coders: dict[tuple[str, str, RowShape], _Coder] = {}

    def measure(self, seconds: float, tick: Callable[[int], None]) -> StageTimes:
        """Measure all samples, or as many as there is time and memory for."""
        samples: list[MeasuredSample] = []
        failures: list[tuple[str, str]] = []
        # Each alone, so that the time of each is measured.
        alone = replace(self._task, alone=frozenset(self._task.keys))
        runs = run_samples(
            alone.fetch(),
            self._measure,
            barred=alone.barred,
            warm_up=self._recipes,
            seconds=seconds,
        )
        held = 0
        with contextlib.closing(runs):
            for number, (run, sample) in enumerate(runs, 1):
                if isinstance(sample, Exception):
                    failures.append((run.key, hole_reason(sample)))
                else:
                    samples.append(sample)
                    held += sum(row.nbytes for row in sample.rows.values())
                tick(number)
                if number >= LEAST and held > KEPT_NBYTES:
                    break
        if not samples:
            raise SampleError(
                f"none of {len(failures)} samples has a row: {failures[0][0]}: {failures[0][1]}"
            )
        return StageTimes(self._steps, samples, failures, frozen_after(self._recipe))

    def _measure(self, run: SampleRun, sample: Sample) -> MeasuredSample:
        measured = MeasuredSample(run.key, run.nbytes, run.times)
        running = {n: _steps(recipe, sample, run.key) for n, recipe in self._recipes.items()}
        values: dict[str, np.ndarray] = {}
        for name in self._steps:
            for field_name, steps in running.items():
                value = run.time(name, partial(next, steps, None))
                if value is not None:
                    values[field_name] = self._recipes[field_name].row(value)
            measured.cuts.append(self._cut(values))
        measured.rows = {name: value.copy() for name, value in values.items()}
        for name, row in values.items():  # not the copies, whose layout is another
            self._encode(run, measured, name, row)
        return measured

    def _encode(self, run: SampleRun, measured: MeasuredSample, name: str, row: np.ndarray) -> None:
        own = self._fields[name].stored_as
        for codec in (own, *_named(self._codecs, self._fields[name])):
            coder = self._coder(name, codec, row)
            data, cost = timed(partial(coder.encode, row))
            if codec is own:
                run.times["encode"] = run.times.get("encode", TimeCost()) + cost
            measured.encode_cpu[codec.name] = measured.encode_cpu.get(codec.name, 0.0) + cost.cpu
            measured.encoded[codec.name] = measured.encoded.get(codec.name, 0) + len(data)

    def _cut(self, values: Mapping[str, np.ndarray]) -> Cut:
        """Encode and decode rows by the fields' own codecs."""
        nbytes = encoding = decoding = 0.0
        for name, row in values.items():
            coder = self._coder(name, self._fields[name].stored_as, row)
            data, cost = timed(partial(coder.encode, row))
            nbytes, encoding = nbytes + len(data), encoding + cost.cpu
            decoding += timed(partial(coder.decode, data))[1].cpu / coder.together
        shapes = tuple(RowShape(v.shape, v.dtype.name) for v in values.values())
        return Cut(nbytes, encoding, decoding, shapes)

    def _coder(self, name: str, codec: Codec, row: np.ndarray) -> _Coder:
        shape = RowShape(row.shape, row.dtype.name)
        suitable = codec_for(codec, shape)
        at = name, suitable.model_dump_json(), shape
        if at not in self._coders:
            if len(self._coders) > 16:  # rows of all shapes: their buffers are not to pile up
                self._coders.clear()
            self._coders[at] = _Coder(suitable, shape)
            self._coders[at].decode(self._coders[at].encode(row))
        return self._coders[at]


class _Coder:
    """Encodes and decodes rows into reused memory, as builds and loaders do.

    Attributes
    ----------
    together
        Number of times that a row is decoded at once: the overhead of a call is shared, as in a
        batch.
    """

    def __init__(self, codec: Codec, row: RowShape) -> None:
        self._encode = encoder(codec, row.dtype)
        self._decoder = decoder(codec_metadata(codec, row.dtype), np.dtype(row.dtype).itemsize, "")
        self._chunk = np.zeros((1, *row.shape), row.dtype)
        self.together = max(1, min(BATCH, TOGETHER_NBYTES // max(1, self._chunk.nbytes)))
        self._out = np.zeros((self.together, *row.shape), row.dtype)

    def encode(self, row: np.ndarray) -> bytes:
        np.copyto(self._chunk[0], row)
        return self._encode(self._chunk)

    def decode(self, data: bytes) -> None:
        """Decode an encoded row `together` times."""
        frames = [memoryview(data)] * self.together
        out, filtered = self._out, self._decoder.filtered
        if kernels.compiled().has_zstd and self._decoder.framed:
            batch_nbytes = BATCH * self._chunk.nbytes
            kernels.decode_frames(frames, out, filtered=filtered, batch_nbytes=batch_nbytes)
            return
        for number, frame in enumerate(frames):
            self._decoder.decode(frame, out[number : number + 1])
        if filtered:
            undo_image(out)


def _steps(recipe: FieldRecipe, sample: Sample, key: str) -> Iterator[np.ndarray]:
    """Yield the value after each op of a recipe, or its row if it has no ops."""
    none = True
    for op, value in recipe.steps(sample, key):
        if op is not None:
            none = False
            yield np.asarray(value)
    if none:
        yield recipe(sample, key)


def _named(codecs: Sequence[str], spec: Field) -> list[Codec]:
    """Return codecs by name, without the field's own."""
    by_name: dict[str, Codec] = {"raw": RawCodec(), "zstd": ZstdCodec(), "image": ImageCodec()}
    return [by_name[name] for name in codecs if name != spec.stored_as.name]
