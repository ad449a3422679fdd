"""The probe: row shapes, stored bytes and readings of pixels from a few samples, before a build."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

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
from precache_workers.profiling.harness import run_samples
from precache_workers.profiling.own_draws import OwnDraws
from precache_workers.profiling.pixel_readings import MASKS, PixelReadings
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

Result = TypeVar("Result")

PROBE_SAMPLES = 24


def run_probe(task: FetchAllTask) -> MeasuredRows:
    """Measure row shapes by the first sample that has a row, and stored bytes by all.

    Raises
    ------
    SampleError
        None of them has a row.
    RecipeError
        They suggest another reading of pixels than one that the recipe leaves open, or a dataset or
        function draws random numbers by itself.
    """
    return run_in_time(functools.partial(_probe, task), task.job.sample_seconds)


def run_readings(task: FetchAllTask, twice: bool) -> tuple[str, ...]:
    """Read the pixels of samples, and return lines on defaults of the recipe that decided them.

    Parameters
    ----------
    twice
        Make some samples a second time, to find out whether they draw random numbers.

    Raises
    ------
    RecipeError
        As of `run_probe`.
    """
    return run_in_time(functools.partial(_read_pixels, task, twice), task.job.sample_seconds)


def run_starts(task: FetchAllTask) -> Starts:
    """Find the parts of a dataset's samples that fields without an input start from.

    Raises
    ------
    RecipeError
        Samples differ in them.
    """

    def find() -> Starts:
        parts = _Parts(task.job.fetch_labels)
        deque(_looked(task, parts.add), maxlen=0)
        return parts.starts(task.job.recipe)

    return run_in_time(find, task.job.sample_seconds)


def _looked(
    task: FetchAllTask, look: Callable[[str, Sample], Result]
) -> Generator[tuple[str, Result | Exception], None, None]:
    """Yield the keys of samples, with what a function of key and sample makes of each."""
    runs = run_samples(task.fetch(), lambda run, s: look(run.key, s), barred=task.barred)
    return ((run.key, result) for run, result in runs)


def _read_pixels(task: FetchAllTask, twice: bool) -> tuple[str, ...]:
    evidence = _evidence(task, recipes_of(task.job), twice)

    def look(key: str, sample: Sample) -> None:
        for seen in evidence:
            seen.look(key, sample)

    deque(_looked(task, look), maxlen=0)
    for seen in evidence:
        seen.require_clear()
    return tuple(line for seen in evidence for line in seen.notes())


def _evidence(
    task: FetchAllTask, recipes: Mapping[str, FieldRecipe], twice: bool
) -> tuple[PixelReadings, *tuple[OwnDraws | _Losses, ...]]:
    """Return the evidence, of no samples yet, that a recipe and a source may need."""
    job, recipe = task.job, task.job.recipe
    arrays = {name: variants[0] for name, variants in variants_of(recipes).items()}
    readings = PixelReadings(  # variants of a field have the same
        {name: recipe.fields[array] for name, array in arrays.items()},
        {name: recipes[array] for name, array in arrays.items()},
    )
    others: list[OwnDraws | _Losses] = []
    if twice and (isinstance(job.source, DatasetSource) or recipe.functions):
        others.append(OwnDraws(task, recipes))
    if any(isinstance(field.stored_as, LossyCodec) for field in recipe.fields.values()):
        others.append(_Losses(recipe, recipes))
    return readings, *others


def _probe(task: FetchAllTask) -> MeasuredRows:
    job, recipes = task.job, recipes_of(task.job)
    readings, *others = evidence = _evidence(task, recipes, twice=True)
    losses = (other.nbytes for other in others if isinstance(other, _Losses))
    lossy_nbytes = next(losses, dict[str, int]())
    parts = _Parts(job.fetch_labels)

    firsts: dict[tuple[Part, ...], Mapping[str, np.ndarray]] = {}
    stored, reasons = defaultdict[str, float](float), list[str]()
    alike = dict[str, dict[str, np.ndarray]]()
    typical: dict[str, np.ndarray] = {}

    def rows_of(key: str, sample: Sample) -> dict[str, np.ndarray]:
        parts.add(key, sample)
        for each in evidence:
            each.look(key, sample)
        rows = {name: recipe(sample, key) for name, recipe in recipes.items()}
        firsts.setdefault(tuple(sample.inputs), rows)
        return rows

    with contextlib.closing(_looked(task, rows_of)) as looked:
        for key, rows in looked:
            if isinstance(rows, Exception):  # the build itself decides which samples are holes
                reasons.append(f"{key}: {rows}")
                continue
            _check_dtypes(rows)
            alike[key] = {
                name: np.broadcast_to(np.zeros((), row.dtype), row.shape)
                for name, row in rows.items()
            }
            for name, row in rows.items():
                if name not in typical or not typical[name].size:
                    typical[name] = np.array(row[:1]) if row.ndim else row
            for name, row in rows.items():
                stored[name] += lossy_nbytes.get(name) or _stored_nbytes(job, name, row)
    for inputs in parts.inputs:
        _require_inputs(readings.fields, inputs, {*itertools.chain(*parts.inputs)})
        parts.leave_unread(readings.fields, inputs)
    starts = parts.starts(job.recipe) if isinstance(job.source, DatasetSource) else ()
    if not job.refreshes:
        readings.require_clear()
        parts.require_label()
    wanted = {part for _, part in starts}
    first = next((rows for inputs, rows in firsts.items() if wanted <= {*inputs}), None)
    if first is None:
        raise SampleError(f"none of the {len(reasons)} samples tried has a row: {reasons[0]}")
    fields = job.recipe.fields
    tried = {key: {name: row.shape for name, row in own.items()} for key, own in alike.items()}
    seen = {name: {own[name] for own in tried.values()} for name in fields}
    shapes = {
        name: _shape_by_length(field_of(name), fields[name], typical[name], reasons)
        if fields[name].kind is not None
        else _row_shape(fields[name], row, seen[name])
        for name, row in first.items()
    }
    _check_declared(job.recipe, shapes)
    _require_alike(fields, shapes, alike)
    pixels: tuple[str, ...] = ()
    if not job.refreshes:
        for other in others:
            other.require_clear()
        pixels = tuple(line for each in evidence for line in each.notes())
    notes = parts.notes(starts)
    if any(row.ragged for row in shapes.values()):
        notes = (
            *notes,
            *_ragged_notes(fields, shapes, seen),
            *_entry_notes(fields, tried.values()),
        )
        if unlike := _of_other_sizes(MaskFrames(fields, recipes), shapes, tried):
            notes = (*notes, unlike)
    means = {name: nbytes / len(tried) for name, nbytes in stored.items()}
    return MeasuredRows(shapes, means, notes, pixels, starts)


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


def _require_alike(
    fields: Mapping[str, Field],
    shapes: Mapping[str, RowShape],
    tried: Mapping[str, Mapping[str, np.ndarray]],
) -> None:
    """Raise `RecipeError` if a quarter of the samples tried have rows unlike the first ones.

    Parameters
    ----------
    tried
        Arrays of the shapes and dtypes of the rows of each sample.
    """
    faults = {
        key: fault
        for key, own in tried.items()
        for name, row in own.items()
        if (fault := fault_of(row, field_of(name), fields[name], shapes[name]))
    }
    if faults and MASKS * len(faults) >= len(tried):
        key, fault = min(faults.items())
        raise RecipeError(
            f"{len(faults)} of {len(tried)} samples tried have other rows, such as {key}: {fault}"
        )


def _is_image(row: RowShape) -> bool:
    return row.dtype == "uint8" and len(row.shape) == 3


def _of_other_sizes(
    frames: MaskFrames,
    shapes: Mapping[str, RowShape],
    tried: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> str:
    """Return a line on ragged masks that have not the sizes of their images; empty if all have.

    Raises
    ------
    RecipeError
        A quarter of the samples tried are such.
    """
    ragged = [name for name, row in shapes.items() if row.ragged]
    faults = {
        key: fault
        for key, own in tried.items()
        if (fault := frames.unlike({name: own.get(name) for name in ragged}))
    }
    if not faults:
        return ""
    key, fault = next(iter(faults.items()))
    line = f"{len(faults)} of {len(tried)} samples tried are bad, such as {key}: {fault}"
    if MASKS * len(faults) < len(tried):
        return line
    raise RecipeError(
        f"{line}. Bring images and masks to one height and width, as by size = [224, 224] in the "
        "resize of both"
    )


def _ragged_notes(
    fields: Mapping[str, Field],
    shapes: Mapping[str, RowShape],
    seen: Mapping[str, Collection[tuple[int, ...]]],
) -> list[str]:
    """Return a line for each field of rows of many shapes; one for pictures of the same shapes."""
    lines, pictures = list[str](), dict[str, list[str]]()
    for field, name in {field_of(n): n for n, row in shapes.items() if row.ragged}.items():
        kind = fields[name].kind
        if kind is not None:
            lengths, row = sorted(shape[0] for shape in seen[name]), shapes[name]
            span = f"{lengths[0]:,} to {lengths[-1]:,}"
            values = f"{row.described(kind)}, n from {span},"
            if kind in ("text", "bytes"):
                values = f"{kind} of {span} bytes"
            lines.append(f"Rows of {field} are {values} in the samples that were tried")
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
    return [*lines, *(f"Rows of {' and '.join(of)} {text}" for text, of in pictures.items())]


def _entry_notes(
    fields: Mapping[str, Field], tried: Collection[Mapping[str, tuple[int, ...]]]
) -> Iterable[str]:
    """Return a line for each field that has an entry for each box, and does not belong to boxes."""
    lengths = {
        name: [own[name][0] for own in tried]
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


class _Losses:
    """Rows by codecs that lose: how much, or how many stay the JPEG files that they came as.

    Attributes
    ----------
    nbytes
        Stored bytes of the last row, by field.
    """

    def __init__(self, recipe: Recipe, recipes: Mapping[str, FieldRecipe]) -> None:
        codecs = {name: field.stored_as for name, field in recipe.fields.items()}
        self._codecs = {n: codec for n, codec in codecs.items() if isinstance(codec, LossyCodec)}
        self._recipes = recipes
        self._tried, self._kept = Counter[str](), Counter[str]()
        self._levels = defaultdict[str, float](float)
        self.nbytes: dict[str, int] = {}

    def look(self, key: str, sample: Sample) -> None:
        """Add a sample."""
        for name, codec in self._codecs.items():
            row = self._recipes[name](sample, key)
            if row.dtype == np.uint8 and row.ndim == 3 and len(row) in codec.channels:
                given = self._recipes[name].input(sample)
                stored, pixels = lossy_row(codec, row, given)
                self.nbytes[name] = len(stored)
                self._tried[name] += 1
                self._kept[name] += isinstance(given, bytes) and stored == given
                self._levels[name] += float(np.abs(row.astype(np.int16) - pixels).mean())

    def require_clear(self) -> None:
        """Raise nothing: all rows can be stored."""

    def notes(self) -> list[str]:
        """Return a line for each field."""
        return [self._note(name, tried) for name, tried in self._tried.items()]

    def _note(self, name: str, tried: int) -> str:
        codec, kept = self._codecs[name], self._kept[name]
        if not isinstance(codec, JpegCodec):
            return (
                f"{name}: codec {codec.name} halves height and width of colours, which loses: "
                f"pixels of {tried} samples tried differ by {self._levels[name] / tried:.1f} "
                "levels on average (--codec image keeps all)"
            )
        line = f"{name}: {kept} of {tried} samples tried stay the JPEG files that they are"
        if kept == tried:
            return line
        return (
            f"{line}; rows of the others are encoded at quality {codec.quality}, which loses "
            "(--codec image keeps all pixels)"
        )


class _Parts:
    """The parts of samples that have labels, and those that nobody reads."""

    def __init__(self, bring_labels: bool) -> None:
        self.inputs: dict[tuple[Part, ...], list[str]] = {}
        self._bring_labels = bring_labels
        self._labels: dict[str, str] = {}
        self._numbers: set[int | None] = set()
        self._unread: dict[str, str] = {}
        self._maybe: dict[str, Any] = {}

    def add(self, key: str, sample: Sample) -> None:
        self.inputs.setdefault(tuple(sample.inputs), []).append(key)
        self._numbers.add(sample.label)
        if sample.label_part:
            of = "none" if sample.label is None else str(sample.label)
            self._labels.setdefault(sample.label_part, f"{of} of sample {key}")
        for part, value in sample.unread.items():
            self._unread.setdefault(in_words(part), described(value))
            if isinstance(part, str) and may_be_label(part, value):
                self._maybe.setdefault(part, value)

    def leave_unread(self, fields: Mapping[str, Field], inputs: Sequence[Part]) -> None:
        """Note the inputs of samples that no field reads, such as the masks beside photos."""
        read = {
            (name if name in inputs else inputs[0]) if field.input is None else field.input
            for name, field in fields.items()
        }
        for part in inputs:
            if part not in read:
                self._unread.setdefault(in_words(part), "")

    def starts(self, recipe: Recipe) -> Starts:
        """Return field -> the part that it starts from, of those whose input is not given.

        That is its own name, or the first part; of a sample that lacks it, the field starts from no
        other.

        Raises
        ------
        RecipeError
            Parts of samples are in different orders.
        """
        starts: dict[str, Part] = {}
        for array, declared in recipe.fields.items():
            field = field_of(array)
            if declared.input is not None or field in starts:
                continue
            firsts = {parts: field if field in parts else parts[0] for parts in self.inputs}
            others = {
                parts: [of for of in firsts if first in of and firsts[of] != first]
                for parts, first in firsts.items()
            }
            certain = [parts for parts in others if not others[parts]]
            if certain:
                most = max(certain, key=lambda parts: len(self.inputs[parts]))
                starts[field] = field if field in firsts.values() else firsts[most]
            elif others:
                one, (other, *_) = next(iter(others.items()))
                raise RecipeError(
                    f"field {field} names no input, and would start from {in_words(firsts[one])} "
                    f"in sample {self.inputs[one][0]} and from {in_words(firsts[other])} in sample "
                    f"{self.inputs[other][0]}: name one, as input = {json.dumps(firsts[one])} in "
                    f"[fields.{field}]"
                )
        return tuple(starts.items())

    def require_label(self) -> None:
        """Raise `SourceError` if samples bring no label, and one of their parts may be it, or if
        their labels have two readings."""
        if self._bring_labels and self._numbers == {-1, 1}:
            raise SourceError(
                "labels of the samples are 1 and -1, and -1 may stand for no label: return 1 and 0 "
                "if both are classes, or None in place of -1"
            )
        usual = [part for part in self._maybe if part.lower() in USUAL_NAMES]
        parts = usual or list(self._maybe)
        if not self._bring_labels or self._labels or not parts:
            return
        shown_parts = parts[:SHOWN]
        named = " or ".join(
            f"{in_words(part)} ({described(self._maybe[part])})" for part in shown_parts
        )
        raise SourceError(
            f"samples bring no label, and {named} may be one: return it as 'label' if it is a "
            "class number; give the dataset an attribute `targets` with the labels of all samples "
            "if it is of another kind; if there is no label, return 'label': None as well, or let "
            f"a field of the recipe read it, by input = {json.dumps(parts[0])}"
        )

    def notes(self, starts: Starts) -> tuple[str, ...]:
        """Return lines for the user."""
        several = any(len(inputs) > 1 for inputs in self.inputs)
        lines = [
            f"Field {field} starts from {in_words(part)} of the samples, their first part (its "
            "`input` in the recipe names another)"
            for field, part in starts
            if several and part not in (field, 0)
        ]
        if self._bring_labels:
            named = [f"{part} of the samples, such as {of}" for part, of in self._labels.items()]
            lines.append(
                f"Labels are {' and '.join(named)} (to take another part, return a dict with it as "
                "'label')"
                if named
                else "Samples bring no label: a dict has one as 'label', a tuple as its item 1, or "
                "the dataset as its attribute `targets`"
            )
        if self._unread:
            named = [part + f" ({value})" * bool(value) for part, value in self._unread.items()]
            more = f" and {len(named) - SHOWN} more parts" if len(named) > SHOWN else ""
            lines.append(f"No field reads {', '.join(named[:SHOWN])}{more} of the samples")
        return tuple(lines)


def _require_inputs(
    fields: Mapping[str, Field], inputs: Sequence[Part], known: Collection[Part]
) -> None:
    """Raise `RecipeError` if several fields would start from a sample's first part by default.

    Parameters
    ----------
    known
        Parts of any sample: a field of such a name starts from that, which others may lack.
    """
    first, *others = inputs
    named = {name if field.input is None else field.input for name, field in fields.items()}
    unnamed = [n for n, field in fields.items() if field.input is None and n not in known]
    if others and unnamed and (len(unnamed) > 1 or first in named):
        raise RecipeError(
            f"field {unnamed[-1]} names no input, and would start from {in_words(first)}, as "
            f"another field does; samples have {', '.join(map(in_words, inputs))}: name one, "
            f"as input = {json.dumps(others[0])} in [fields.{unnamed[-1]}]"
        )


def _check_dtypes(rows: Mapping[str, np.ndarray]) -> None:
    for name, row in rows.items():
        if row.dtype.name not in DTYPES:
            if row.dtype.kind == "S":
                raise RecipeError(
                    f"the ops of {name} return the bytes of a file; begin them with decode, as "
                    'ops = [{ op = "decode" }], or give the field kind = "bytes"'
                )
            kind, way = row.dtype.name, ""
            if row.dtype.kind == "U":
                kind, way = "str", f', and text with kind = "text" in [fields.{field_of(name)}]'
            raise RecipeError(
                f"the ops of {name} make values of type {kind}; a store holds "
                f"{', '.join(DTYPES)}{way}"
            )


def _check_declared(recipe: Recipe, shapes: Mapping[str, RowShape]) -> None:
    """Raise for rows that differ from what the recipe declares, or that its codec cannot store."""
    for name, row in shapes.items():
        field = recipe.fields[name]
        declared = RowShape(field.shape or row.shape, field.dtype or row.dtype, row.ragged)
        if declared != row:
            raise RecipeError(
                f"the ops of {name} make rows of {row}, and the recipe declares {declared}; "
                "declare the dtype and shape of the function's result in its op"
            )
        codec = field.stored_as
        if isinstance(codec, LossyCodec) and not (
            _is_image(row) and row.shape[0] in codec.channels
        ):
            channels = " or ".join(map(str, codec.channels))
            raise RecipeError(
                f"the ops of {name} make rows of {row}, and codec {codec.name} stores uint8 "
                f'(C, H, W) of {channels} channels; give the field codec = "zstd" or "raw"'
            )
        if isinstance(field.stored_as, ImageCodec) and not _is_image(row):
            raise RecipeError(
                f"the ops of {name} make rows of {row}, and codec image stores uint8 (C, H, W); "
                'return (H, W, C) from the function, or give the field codec = "zstd" or "raw"'
            )


def _stored_nbytes(job: Job, name: str, row: np.ndarray) -> float:
    codec = job.recipe.fields[name].stored_as
    if job.recipe.fields[name].kind is not None:
        return len(ragged_encoder(codec)(row)) + 20.0
    rows = rows_per_chunk(row.nbytes)
    chunk = np.repeat(np.ascontiguousarray(row)[None], rows, axis=0)
    if isinstance(codec, ImageCodec) or rows == 1:
        return len(encoder(codec, row.dtype.name)(chunk[:1])) + 16.0
    return float(row.nbytes + 16)
