"""The probe: row shapes, stored bytes and readings of pixels from a few samples, before a build."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from precache.codecs.chunk import encoder, ragged_encoder
from precache.errors import RecipeError, SampleError, SourceError
from precache.messages import SHOWN
from precache.recipe.ops import DTYPES, ToDType
from precache.recipe.recipe import Field, ImageCodec, JpegCodec, LossyCodec, Recipe
from precache.recipe.variants import field_of, variants_of
from precache.store.layout import RowShape, rows_per_chunk
from precache.store.shard_writer import lossy_row
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.ops.mask_frames import MaskFrames
from precache_workers.planning.work_plan import MeasuredRows
from precache_workers.profiling.pixel_readings import readings
from precache_workers.profiling.questions import Question, answers, is_often, show_samples
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.shards.field_writer import fault_of
from precache_workers.shards.samples import FetchAllTask, Job, recipes_of
from precache_workers.sources.base import Sample
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.dataset_items import (
    USUAL_NAMES,
    Part,
    Starts,
    described,
    in_words,
    may_be_label,
)

PROBE_SAMPLES = 24


@dataclass(frozen=True)
class ProbeTask(FetchAllTask):
    """Samples that are tried before a build.

    Attributes
    ----------
    asks
        ``rows``: measure row shapes by the first sample that has a row, and stored bytes by all,
        and read pixels; ``pixels``: read pixels alone; ``starts``: find the parts of a dataset's
        samples that fields without an input start from.
    twice
        Make some samples a second time, to find out whether they draw random numbers.
    """

    asks: Literal["rows", "pixels", "starts"] = "rows"
    twice: bool = True


def run_probe(task: ProbeTask) -> MeasuredRows:
    """Try samples before a build.

    Raises
    ------
    SampleError
        None of them has a row.
    RecipeError
        They suggest another reading of pixels than one that the recipe leaves open, or differ in
        the parts that fields start from; or a dataset or function draws random numbers by itself.
    """
    return run_in_time(functools.partial(_probe, task), task.job.sample_seconds)


def _probe(task: ProbeTask) -> MeasuredRows:
    job, parts = task.job, _Parts(task.job)
    if task.asks == "starts":
        show_samples(task, [parts])
        return MeasuredRows({}, {}, starts=parts.starts)
    recipes = recipes_of(job)
    losses, rows = _Losses(job.recipe, recipes), _Rows(job.recipe, recipes)
    pixels = [*([] if job.refreshes else _asked_of_pixels(task, recipes)), losses]
    if task.asks == "pixels":
        show_samples(task, pixels)
        return MeasuredRows({}, {}, pixels=answers(pixels))
    rows.failed = show_samples(task, [parts, *pixels, rows])
    notes = answers([parts])
    rows.wanted = {part for _, part in parts.starts}
    of_pixels = answers(pixels)
    notes += answers([rows])
    stored = rows.stored | losses.stored
    lines = () if job.refreshes else of_pixels
    return MeasuredRows(rows.shapes, stored, notes, lines, parts.starts)


def _asked_of_pixels(task: ProbeTask, recipes: Mapping[str, FieldRecipe]) -> list[Question]:
    job, recipe = task.job, task.job.recipe
    arrays = {name: variants[0] for name, variants in variants_of(recipes).items()}
    asked: list[Question] = [
        *readings(  # variants of a field have the same
            {name: recipe.fields[array] for name, array in arrays.items()},
            {name: recipes[array] for name, array in arrays.items()},
        )
    ]
    if task.twice and (isinstance(job.source, DatasetSource) or recipe.functions):
        from precache_workers.profiling.own_draws import OwnDraws

        asked.append(OwnDraws(task, recipes))
    return asked


# --- rows ---------------------------------------------------------------------------------------


class _Rows(Question):
    """The shapes and dtypes of rows, and their stored bytes.

    Attributes
    ----------
    failed
        Reasons of the samples that have no rows.
    wanted
        Parts that a sample has by whose rows shapes are measured.
    """

    def __init__(self, recipe: Recipe, recipes: Mapping[str, FieldRecipe]) -> None:
        self._fields, self._recipes = recipe.fields, recipes
        self.failed: Sequence[str] = ()
        self.wanted: set[Part] = set()
        self._parts: dict[str, Collection[Part]] = {}
        self._tried: dict[str, dict[str, np.ndarray]] = {}
        self._nbytes = Counter[str]()

    def look(self, key: str, sample: Sample) -> None:
        rows = {name: recipe(sample, key) for name, recipe in self._recipes.items()}
        for name, row in rows.items():
            _require_storable(name, row)
            if not isinstance(self._fields[name].stored_as, LossyCodec):
                self._nbytes[name] += _stored_nbytes(self._fields[name], row)
        self._parts[key] = sample.inputs.keys()
        self._tried[key] = {
            name: np.broadcast_to(np.zeros((), row.dtype), row.shape) for name, row in rows.items()
        }

    @property
    def stored(self) -> dict[str, float]:
        """Mean stored bytes of a row."""
        return {name: nbytes / len(self._tried) for name, nbytes in self._nbytes.items()}

    @functools.cached_property
    def shapes(self) -> dict[str, RowShape]:
        """Shapes of the rows of each field.

        Raises
        ------
        SampleError
            There are no rows.
        """
        tried = self._tried.items()
        first = next((rows for key, rows in tried if self.wanted <= {*self._parts[key]}), None)
        if first is None:
            raise SampleError(
                f"none of the {len(self.failed)} samples tried has a row: {self.failed[0]}"
            )
        shapes = {}
        for name, row in first.items():
            rows = [own[name] for own in self._tried.values()]
            if self._fields[name].kind is None:
                seen = {own.shape for own in rows}
                shapes[name] = _row_shape(self._fields[name], row, seen)
            else:
                filled = next((own for own in rows if own.size), row)
                shapes[name] = _shape_by_length(name, self._fields[name], filled, self.failed)
        return shapes

    def findings(self) -> Iterator[str]:
        """Yield lines about rows of many shapes, and about samples of other rows.

        Raises
        ------
        RecipeError
            Rows are not what the recipe declares; a quarter of the samples tried have rows unlike
            the first ones, or masks of another size than their images.
        """
        fields, shapes, tried = self._fields, self.shapes, self._tried
        _check_declared(fields, shapes)
        ragged = [name for name, row in shapes.items() if row.ragged]
        frames, faults = MaskFrames(fields, self._recipes), dict[str, str]()
        for key, own in tried.items():
            of_rows = (fault_of(r, field_of(n), fields[n], shapes[n]) for n, r in own.items())
            fault = next(filter(None, of_rows), "")
            if fault := fault or frames.unlike({name: own[name].shape for name in ragged}):
                faults[key] = fault
        if faults:
            key, fault = min(faults.items())
            line = f"{len(faults)} of {len(tried)} samples tried have other rows, such as {key}: "
            if is_often(len(faults), len(tried)):
                raise RecipeError(line + fault)
            yield line + fault
        seen = {n: {own[n].shape for own in tried.values()} for n in ragged}
        yield from _ragged_notes(fields, shapes, seen)
        if ragged:
            yield from _entry_notes(fields, list(tried.values()))


def _row_shape(field: Field, row: np.ndarray, seen: Collection[tuple[int, ...]]) -> RowShape:
    """Return the shape of a field's rows: ragged where images are meant to differ, or do.

    Parameters
    ----------
    row, seen
        A row, and the shapes of all that were tried.
    """
    usual, shape = field.ragged_size, RowShape(row.shape, row.dtype.name)
    if isinstance(field.stored_as, LossyCodec) and _is_image(shape):
        return RowShape((row.shape[0], *(usual or row.shape[1:])), shape.dtype, ragged=True)
    differs = len({*seen}) > 1 or field.differs
    pictures = {len(other) == 3 and other[0] == row.shape[0] for other in seen} == {True}
    if usual is None or not (differs and pictures):
        return shape
    return RowShape((row.shape[0], *usual), shape.dtype, ragged=True)


def _shape_by_length(name: str, field: Field, row: np.ndarray, failed: Sequence[str]) -> RowShape:
    """Return the shape of rows that differ in length, by the first of them that has values.

    That of texts and bytes, and of boxes, is known without. Of empty rows the dtype is known if the
    recipe states it, and the axes are those of the array.

    Parameters
    ----------
    failed
        Why other samples that were tried have no rows.

    Raises
    ------
    RecipeError
        All rows are empty, and have no other axes, or no dtype.
    """
    if field.kind in ("text", "bytes"):
        row = np.empty(1, np.uint8)
    elif field.kind == "boxes":
        row = np.empty((1, 4), np.float32)
    elif not row.size:
        points = field.kind == "keypoints"
        stated = points or isinstance(next(reversed(field.own_ops), None), ToDType)
        if not stated or 0 in row.shape[1:] or (points and row.ndim == 1):
            dtype = "" if points else 'state ops = [{ op = "to_dtype", dtype = "int64" }], and '
            others = f" (others failed: {failed[0]})" if failed else ""
            raise RecipeError(
                f"all rows of {name} that were tried are empty, so that their dtype and axes are "
                f"unknown{others}: {dtype}let rows of more than one axis be arrays such as "
                "numpy.zeros((0, 17, 3)) where they are empty"
            )
        row = np.empty((1, *row.shape[1:]), row.dtype)
    length = max(1, field.usual_nbytes // row[0].nbytes)
    return RowShape((length, *row.shape[1:]), row.dtype.name, ragged=True)


def _is_image(row: RowShape) -> bool:
    return row.dtype == "uint8" and len(row.shape) == 3


def _ragged_notes(
    fields: Mapping[str, Field],
    shapes: Mapping[str, RowShape],
    seen: Mapping[str, Collection[tuple[int, ...]]],
) -> Iterator[str]:
    """Yield a line for each field of rows of many shapes; one for pictures of the same shapes."""
    pictures = dict[str, list[str]]()
    for field, name in {field_of(n): n for n, row in shapes.items() if row.ragged}.items():
        kind = fields[name].kind
        if kind is not None:
            lengths, row = sorted(shape[0] for shape in seen[name]), shapes[name]
            span = f"{lengths[0]:,} to {lengths[-1]:,}"
            values = f"{row.described(kind)}, n from {span},"
            if kind in ("text", "bytes"):
                values = f"{kind} of {span} bytes"
            yield f"Rows of {field} are {values} in the samples that were tried"
            continue
        sizes = sorted((w, h) for _, h, w in seen[name])
        such = " and ".join(f"{w} x {h}" for w, h in dict.fromkeys((sizes[0], sizes[-1])))
        codec = fields[name].stored_as
        jpeg, lossy = isinstance(codec, JpegCodec), isinstance(codec, LossyCodec)
        what = "are JPEG files" if jpeg else "keep the shapes of their images"
        other = "another codec with --crop" if lossy else "--crop"
        pictures.setdefault(
            f"{what}, such as {such}: a Loader reads them by a transform that begins with a crop, "
            f"such as RandomResizedCrop(224) ({other} stores rows of one shape)",
            [],
        ).append(field)
    yield from (f"Rows of {' and '.join(of)} {text}" for text, of in pictures.items())


def _entry_notes(
    fields: Mapping[str, Field], tried: Collection[Mapping[str, np.ndarray]]
) -> Iterable[str]:
    """Return a line for each field that has an entry for each box, and does not belong to boxes."""
    lengths = {
        name: [len(own[name]) for own in tried]
        for name, field in fields.items()
        if field.kind == "boxes" or (field.kind == "ragged" and field.of is None)
    }
    return dict.fromkeys(
        f"Rows of {field_of(name)} are as many as those of {field_of(boxes)} in all samples that "
        f'were tried: if entry i belongs to box i, state of = "{field_of(boxes)}", so that it is '
        "dropped with its box"
        for name, boxes in itertools.permutations(lengths, 2)
        if fields[boxes].kind == "boxes"
        and fields[name].kind == "ragged"
        and lengths[name] == lengths[boxes]
        and len({*lengths[name]}) > 1
    )


def _require_storable(name: str, row: np.ndarray) -> None:
    """Raise `RecipeError` for rows of a type that a store does not hold."""
    if row.dtype.name in DTYPES:
        return
    if row.dtype.kind == "S":
        raise RecipeError(
            f"the ops of {name} return the bytes of a file; begin them with decode, as "
            'ops = [{ op = "decode" }], or give the field kind = "bytes"'
        )
    kind, way = row.dtype.name, ""
    if row.dtype.kind == "U":
        kind, way = "str", f', and text with kind = "text" in [fields.{field_of(name)}]'
    raise RecipeError(
        f"the ops of {name} make values of type {kind}; a store holds {', '.join(DTYPES)}{way}"
    )


def _check_declared(fields: Mapping[str, Field], shapes: Mapping[str, RowShape]) -> None:
    """Raise for rows that differ from what the recipe declares, or that its codec cannot store."""
    for name, row in shapes.items():
        field = fields[name]
        declared = RowShape(field.shape or row.shape, field.dtype or row.dtype, row.ragged)
        if declared != row:
            raise RecipeError(
                f"the ops of {name} make rows of {row}, and the recipe declares {declared}; "
                "declare the dtype and shape of the function's result in its op"
            )
        codec = field.stored_as
        if isinstance(codec, LossyCodec | ImageCodec):
            channels = codec.channels if isinstance(codec, LossyCodec) else ()
            if not _is_image(row) or (channels and row.shape[0] not in channels):
                some = f" of {' or '.join(map(str, channels))} channels" if channels else ""
                raise RecipeError(
                    f"the ops of {name} make rows of {row}, and codec {codec.name} stores uint8 "
                    f"(C, H, W){some}; return (H, W, C) from the function, or give the field "
                    'codec = "zstd" or "raw"'
                )


def _stored_nbytes(field: Field, row: np.ndarray) -> int:
    codec = field.stored_as
    if field.kind is not None:
        return len(ragged_encoder(codec)(row)) + 20
    rows = rows_per_chunk(row.nbytes)
    chunk = np.repeat(np.ascontiguousarray(row)[None], rows, axis=0)
    if isinstance(codec, ImageCodec) or rows == 1:
        return len(encoder(codec, row.dtype.name)(chunk[:1])) + 16
    return row.nbytes + 16


class _Losses(Question):
    """Rows by codecs that lose: how much, or how many stay the JPEG files that they came as."""

    def __init__(self, recipe: Recipe, recipes: Mapping[str, FieldRecipe]) -> None:
        codecs = {name: field.stored_as for name, field in recipe.fields.items()}
        self._codecs = {n: codec for n, codec in codecs.items() if isinstance(codec, LossyCodec)}
        self._recipes = recipes
        self._tried, self._kept, self._nbytes = Counter[str](), Counter[str](), Counter[str]()
        self._levels = defaultdict[str, float](float)

    @property
    def stored(self) -> dict[str, float]:
        """Mean stored bytes of a row."""
        return {name: self._nbytes[name] / tried for name, tried in self._tried.items()}

    def look(self, key: str, sample: Sample) -> None:
        for name, codec in self._codecs.items():
            row = self._recipes[name](sample, key)
            if row.dtype == np.uint8 and row.ndim == 3 and len(row) in codec.channels:
                given = self._recipes[name].input(sample)
                stored, pixels = lossy_row(codec, row, given)
                self._nbytes[name] += len(stored)
                self._tried[name] += 1
                self._kept[name] += isinstance(given, bytes) and stored == given
                self._levels[name] += float(np.abs(row.astype(np.int16) - pixels).mean())

    def findings(self) -> Iterator[str]:
        for name, tried in self._tried.items():
            codec, kept = self._codecs[name], self._kept[name]
            if not isinstance(codec, JpegCodec):
                yield (
                    f"{name}: codec {codec.name} halves height and width of colours, which loses: "
                    f"pixels of {tried} samples tried differ by {self._levels[name] / tried:.1f} "
                    "levels on average (--codec image keeps all)"
                )
                continue
            loses = (
                f"; rows of the others are encoded at quality {codec.quality}, which loses "
                "(--codec image keeps all pixels)"
            )
            yield (
                f"{name}: {kept} of {tried} samples tried stay the JPEG files that they are"
                + loses * (kept < tried)
            )


# --- parts --------------------------------------------------------------------------------------


class _Parts(Question):
    """The parts of samples: those that fields start from, that are labels, that nobody reads."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._fields = {field_of(name): field for name, field in job.recipe.fields.items()}
        self._inputs: dict[tuple[Part, ...], str] = {}
        self._labels: dict[str, str] = {}
        self._numbers: set[int | None] = set()
        self._unread: dict[Part, str] = {}
        self._maybe: dict[str, str] = {}

    def look(self, key: str, sample: Sample) -> None:
        self._inputs.setdefault(tuple(sample.inputs), key)
        self._numbers.add(sample.label)
        if sample.label_part:
            of = "none" if sample.label is None else str(sample.label)
            self._labels.setdefault(sample.label_part, f"{of} of sample {key}")
        for part, value in sample.unread.items():
            self._unread.setdefault(part, f" ({described(value)})")
            if isinstance(part, str) and may_be_label(part, value):
                self._maybe.setdefault(part, f"{in_words(part)} ({described(value)})")

    def _start(self, name: str, inputs: Sequence[Part]) -> Part:
        """Return the part that a field starts from: its own name, if a sample has such a part."""
        field = self._fields[name]
        if field.input is not None:
            return field.input
        return name if any(name in parts for parts in self._inputs) else inputs[0]

    @functools.cached_property
    def starts(self) -> Starts:
        """Field -> the part of a dataset's samples that it starts from, if its input is not given.

        Raises
        ------
        RecipeError
            Samples have different first parts.
        """
        starts: dict[str, Part] = {}
        if not self._inputs or not isinstance(self._job.source, DatasetSource):
            return ()
        for name, field in self._fields.items():
            if field.input is not None:
                continue
            first_keys: dict[Part, str] = {}
            for parts, key in self._inputs.items():
                first_keys.setdefault(self._start(name, parts), key)
            (part, key), *others = first_keys.items()
            if others:
                raise RecipeError(
                    f"field {name} names no input, and would start from {in_words(part)} in sample "
                    f"{key} and from {in_words(others[0][0])} in sample {others[0][1]}: name one, "
                    f"as input = {json.dumps(part)} in [fields.{name}]"
                )
            starts[name] = part
        return tuple(starts.items())

    def findings(self) -> Iterator[str]:
        """Yield lines on what fields start from, on labels, and on what is not read.

        Raises
        ------
        RecipeError
            It is not certain what a field starts from.
        SourceError
            It is not certain what the labels are.
        """
        for inputs in self._inputs:
            self._require_own_starts(inputs)
        starts = self.starts if any(len(inputs) > 1 for inputs in self._inputs) else ()
        for name, part in starts:
            if part not in (name, 0):
                yield (
                    f"Field {name} starts from {in_words(part)} of the samples, their first part "
                    "(its `input` in the recipe names another)"
                )
        if self._job.fetch_labels:
            yield self._labels_in_words()
        read = {self._start(name, inputs) for inputs in self._inputs for name in self._fields}
        unread = self._unread | {
            part: "" for part in itertools.chain(*self._inputs) if part not in self._unread
        }
        unread = {part: value for part, value in unread.items() if part not in read}
        if unread:
            named = [in_words(part) + value for part, value in unread.items()]
            more = f" and {len(named) - SHOWN} more parts" if len(named) > SHOWN else ""
            first = next(iter(unread))
            yield (
                f"No field reads {', '.join(named[:SHOWN])}{more} of the samples; to store "
                f"{in_words(first)}, add a field with input = {json.dumps(first)} to the recipe "
                "(--recipe)"
            )

    def _require_own_starts(self, inputs: Sequence[Part]) -> None:
        """Raise `RecipeError` if several fields would start from the first part by default."""
        first, *others = inputs
        alike = [name for name in self._fields if self._start(name, inputs) == first]
        unnamed = [n for n in alike if self._fields[n].input is None and n != first]
        if others and unnamed and len(alike) > 1:
            name = unnamed[-1]
            raise RecipeError(
                f"field {name} names no input, and would start from {in_words(first)}, as another "
                f"field does; samples have {', '.join(map(in_words, inputs))}: name one, as input "
                f"= {json.dumps(others[0])} in [fields.{name}]"
            )

    def _labels_in_words(self) -> str:
        refuses = not self._job.refreshes
        if refuses and self._numbers == {-1, 1}:
            raise SourceError(
                "labels of the samples are 1 and -1, and -1 may stand for no label: return 1 and 0 "
                "if both are classes, or None in place of -1"
            )
        if self._labels:
            named = [f"{part} of the samples, such as {of}" for part, of in self._labels.items()]
            return (
                f"Labels are {' and '.join(named)} (to take another part, return a dict with it as "
                "'label')"
            )
        usual = [part for part in self._maybe if part.lower() in USUAL_NAMES]
        parts = usual or [*self._maybe]
        if refuses and parts:
            named = [self._maybe[part] for part in parts[:SHOWN]]
            raise SourceError(
                f"samples bring no label, and {' or '.join(named)} may be one: return it as "
                "'label' if it is a class number; give the dataset an attribute `targets` with the "
                "labels of all samples if it is of another kind; if there is no label, return "
                "'label': None as well, or let a field of the recipe read it, by input = "
                f"{json.dumps(parts[0])}"
            )
        return (
            "Samples bring no label: a dict has one as 'label', a tuple as its item 1, or the "
            "dataset as its attribute `targets`"
        )
