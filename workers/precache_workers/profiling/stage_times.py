"""A sample of a source taken through a recipe, every stage timed by itself."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from precache.codecs import kernels
from precache.codecs.chunk import codec_metadata, decoder, encoder
from precache.codecs.image import undo_image
from precache.errors import FetchError, SampleError
from precache.recipe.ops import Function, Op, is_random
from precache.recipe.recipe import Field, ImageCodec, RawCodec, Recipe, ZstdCodec
from precache.store.layout import RowShape
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.profiling.measured import CutTimes, StepTimes
from precache_workers.runtime.time_limit import DECODING, notes, run_in_time
from precache_workers.shards.shard_task import Job, one_thread, recipes_of
from precache_workers.shards.timing import Timing
from precache_workers.sources.base import Sample

Codec = RawCodec | ZstdCodec | ImageCodec
Result = TypeVar("Result")

LEAST = 8
"""Samples that are measured however long they take."""
BATCH = 256
"""Rows of the batches that a training is taken to read: large ones are written past the caches."""
TOGETHER_NBYTES = 512 << 10
"""Of the memory that rows are decoded into at a time."""
HELD_BYTES = 256 << 20
"""Of rows that are kept in memory for the trials that follow."""
AS_IT_IS = "no op"
"""What the only step of a recipe without ops is called."""


@dataclass
class Taken:
    """What one sample cost at each stage.

    Attributes
    ----------
    size, nbytes
        Of the sample as it was listed, -1 for unknown; as it came.
    cpu, wall
        Seconds by stage.
    encode, encoded
        CPU seconds, and bytes, by codec, of the finished row.
    cut_nbytes, cut_encode, cut_decode
        Stored bytes, and CPU seconds to encode and to decode them, after each step.
    shapes
        Of every field after each step.
    rows
        The finished row of each field.
    """

    key: str
    size: int
    nbytes: int = 0
    cpu: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)
    encode: dict[str, float] = field(default_factory=dict)
    encoded: dict[str, int] = field(default_factory=dict)
    cut_nbytes: list[float] = field(default_factory=list)
    cut_encode: list[float] = field(default_factory=list)
    cut_decode: list[float] = field(default_factory=list)
    shapes: list[tuple[RowShape, ...]] = field(default_factory=list)
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Passed:
    """All samples taken through.

    Attributes
    ----------
    taken
        Those of which something came.
    failures
        (key, why) of the others.
    frozen
        By step, whether a random op is among those so far.
    """

    steps: tuple[str, ...]
    taken: Sequence[Taken]
    failures: Sequence[tuple[str, str]]
    frozen: Sequence[bool]

    @property
    def usual(self) -> list[Taken]:
        """Those whose rows have the commonest shapes: a store holds no others."""
        shapes = self._usual_shapes
        return [each for each in self.taken if each.shapes[-1] == shapes]

    def misfits(self) -> list[tuple[str, str]]:
        """(key, why) of all others."""
        usual = self._usual_shapes
        return [
            (each.key, f"its row is {_shown(each.shapes[-1])}, most are {_shown(usual)}")
            for each in self.taken
            if each.shapes[-1] != usual
        ]

    @property
    def _usual_shapes(self) -> tuple[RowShape, ...]:
        [(shapes, _)] = Counter(each.shapes[-1] for each in self.taken).most_common(1)
        return shapes

    @property
    def shapes(self) -> dict[str, RowShape]:
        """Of the rows that a store would hold."""
        return dict(zip(self.taken[0].rows, self._usual_shapes, strict=True))

    def stage(self, name: str) -> StepTimes:
        """One stage over all samples."""
        return StepTimes(
            name,
            np.array([each.cpu.get(name, 0.0) for each in self.taken]),
            np.array([each.wall.get(name, 0.0) for each in self.taken]),
        )

    def cuts(self) -> list[CutTimes]:
        """After each step."""
        return [
            CutTimes(
                np.array([each.cut_nbytes[at] for each in self.taken]),
                np.array([each.cut_encode[at] for each in self.taken]),
                np.array([each.cut_decode[at] for each in self.taken]),
                len({each.shapes[at] for each in self.taken}) == 1,
                self.frozen[at],
            )
            for at in range(len(self.steps))
        ]


def step_names(recipe: Recipe) -> tuple[str, ...]:
    """What the steps are called: their ops, those of several fields together, each name once."""
    columns = itertools.zip_longest(*(each.ops for each in recipe.fields.values()))
    plain = ["+".join(dict.fromkeys(_name(op) for op in ops if op)) for ops in columns]
    seen: Counter[str] = Counter()
    names = []
    for name in plain or [AS_IT_IS]:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return tuple(names)


def _name(op: Op) -> str:
    return op.function if isinstance(op, Function) else op.op


def frozen_after(recipe: Recipe) -> list[bool]:
    """Whether a random op is among those up to each step."""
    return [
        any(is_random(op) for each in recipe.fields.values() for op in each.ops[: at + 1])
        for at in range(len(step_names(recipe)))
    ]


def codec_for(codec: Codec, row: RowShape) -> Codec:
    """The codec, or plain zstd where it cannot hold such rows."""
    image = row.dtype == "uint8" and len(row.shape) == 3
    return codec if image or not isinstance(codec, ImageCodec) else ZstdCodec()


def take_through(
    job: Job,
    keys: Sequence[str],
    sizes: Sequence[int],
    codecs: Sequence[str],
    seconds: float,
    tick: Callable[[int], None],
    barred: Mapping[str, str] = MappingProxyType({}),
) -> Passed:
    """Time every stage of samples, one after another on this thread.

    Parameters
    ----------
    codecs
        Names of codecs that finished rows are encoded with, besides the recipe's own.
    seconds
        After which no further sample is begun, once there are a few.
    tick
        Told how many are done.
    barred
        Key -> why, of samples that are not to be fetched.

    Raises
    ------
    SampleError
        None of them has a row.
    HangError
        A sample takes too long.
    """
    until = time.monotonic() + seconds

    def work() -> Passed:
        return _take_through(job, keys, sizes, codecs, until, tick, barred)

    return run_in_time(work, job.sample_seconds)


def _take_through(
    job: Job,
    keys: Sequence[str],
    sizes: Sequence[int],
    codecs: Sequence[str],
    until: float,
    tick: Callable[[int], None],
    barred: Mapping[str, str],
) -> Passed:
    taken: list[Taken] = []
    failures: list[tuple[str, str]] = []
    held = 0
    with one_thread():
        bench = _Bench(job, codecs)
        for number, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            if number >= LEAST and (time.monotonic() > until or held > HELD_BYTES):
                break
            if key in barred:
                failures.append((key, barred[key]))
                continue
            try:
                found = bench.take(key, size)
            except (FetchError, SampleError) as error:
                failures.append((key, str(error)))
            except Exception as error:  # as in a build, whatever a hostile file makes ops raise
                failures.append((key, f"{type(error).__name__}: {error}"))
            else:
                taken.append(found)
                held += sum(row.nbytes for row in found.rows.values())
            tick(number + 1)
    if not taken:
        raise SampleError(
            f"none of {len(failures)} samples has a row: {failures[0][0]}: {failures[0][1]}"
        )
    return Passed(bench.steps, taken, failures, frozen_after(job.recipe))


def _shown(shapes: Sequence[RowShape]) -> str:
    return ", ".join(f"{row.dtype} {row.shape}" for row in shapes)


class _Bench:
    """Recipes and codecs made ready; what the first sample would pay for them is paid before."""

    def __init__(self, job: Job, codecs: Sequence[str]) -> None:
        self.steps = step_names(job.recipe)
        self._source = job.source
        self._fields = job.recipe.fields
        self._recipes = recipes_of(job)
        self._codecs = codecs
        self._coders: dict[tuple[str, str, RowShape], _Coder] = {}
        self._warm = False

    def take(self, key: str, size: int) -> Taken:
        """Time one sample."""
        [fetched], cpu, wall = clocked(
            partial(self._source.fetch, [key], [size]), time.process_time
        )
        if not isinstance(fetched, Sample):
            raise fetched
        notes().begin(DECODING, key)
        if not self._warm:
            self._through(Taken(key, size), fetched)
            self._warm = True
        found = Taken(key, size, Timing().count(fetched), {"fetch": cpu}, {"fetch": wall})
        self._through(found, fetched)
        notes().end()
        return found

    def _through(self, found: Taken, sample: Sample) -> None:
        running = {n: _steps(r, sample, found.key) for n, r in self._recipes.items()}
        values: dict[str, np.ndarray] = {}
        for name in self.steps:
            for field_name, steps in running.items():
                value, cpu, wall = clocked(partial(next, steps, None))
                if value is not None:
                    values[field_name] = self._recipes[field_name].row(value)
                    _add(found, name, cpu, wall)
            self._cut(found, values)
        found.rows = {name: value.copy() for name, value in values.items()}
        for name, row in found.rows.items():
            for codec in (self._fields[name].stored_as, *_named(self._codecs, self._fields[name])):
                coder = self._coder(name, codec, row)
                data, cpu, wall = clocked(partial(coder.encode, values[name]))
                if codec is self._fields[name].stored_as:
                    _add(found, "encode", cpu, wall)
                found.encode[codec.name] = found.encode.get(codec.name, 0.0) + cpu
                found.encoded[codec.name] = found.encoded.get(codec.name, 0) + len(data)

    def _cut(self, found: Taken, values: Mapping[str, np.ndarray]) -> None:
        """What would be stored after a step, by the fields' own codecs, and read again."""
        nbytes = encoding = decoding = 0.0
        for name, row in values.items():
            coder = self._coder(name, self._fields[name].stored_as, row)
            data, cpu, _ = clocked(partial(coder.encode, row))
            nbytes, encoding = nbytes + len(data), encoding + cpu
            decoding += clocked(partial(coder.decode, data))[1] / coder.together
        found.cut_nbytes.append(nbytes)
        found.cut_encode.append(encoding)
        found.cut_decode.append(decoding)
        found.shapes.append(tuple(RowShape(v.shape, v.dtype.name) for v in values.values()))

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
    """Encodes and decodes rows into memory that is used again, as builds and loaders do.

    Attributes
    ----------
    together
        Times that a row is decoded at a time: what a call costs is shared, as by a batch.
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
    """The steps of a recipe; of one without ops its row."""
    none = True
    for op, value in recipe.steps(sample, key):
        if op is not None:
            none = False
            yield np.asarray(value)
    if none:
        yield recipe(sample, key)


def _named(codecs: Sequence[str], each: Field) -> list[Codec]:
    """Codecs by name, without the field's own."""
    made: dict[str, Codec] = {"raw": RawCodec(), "zstd": ZstdCodec(), "image": ImageCodec()}
    return [made[name] for name in codecs if name != each.stored_as.name]


def _add(found: Taken, stage: str, cpu: float, wall: float) -> None:
    found.cpu[stage] = found.cpu.get(stage, 0.0) + cpu
    found.wall[stage] = found.wall.get(stage, 0.0) + wall


def clocked(
    work: Callable[[], Result], clock: Callable[[], float] = time.thread_time
) -> tuple[Result, float, float]:
    """What some work returns, its seconds by a clock of CPU time, and its wall seconds."""
    wall, cpu = time.perf_counter(), clock()
    result = work()
    return result, clock() - cpu, time.perf_counter() - wall
