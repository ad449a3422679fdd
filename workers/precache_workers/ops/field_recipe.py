"""The ops of one field of a recipe, applied to samples."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from precache.errors import RecipeError, SampleError
from precache.recipe.ops import (
    CenterCrop,
    Computed,
    Decode,
    Function,
    HorizontalFlip,
    Op,
    Operation,
    Resampling,
    ToDType,
)
from precache.recipe.recipe import Field, FieldKind
from precache.recipe.variants import field_of
from precache_workers.ops.decoding import Scratch, decode, frame_of
from precache_workers.ops.entries import moved, require_inside
from precache_workers.ops.kinds import require_exact, row_of, stored_value, value_of
from precache_workers.runtime.time_limit import fails_sample
from precache_workers.sources.base import Sample
from precache_workers.user_code.loading import load_object

MOST_BANDS = 4
"""Most channels of an array (C, H, W) that is taken for one."""


def part_of(name: str, field: Field, sample: Sample) -> str | int:
    """Return the name of the part of a sample that a field starts from."""
    if field.input is not None:
        return field.input
    default = field_of(name)
    return default if default in sample.inputs else next(iter(sample.inputs))


class Common:
    """Output of the ops before the first random one, shared by all variants of a field.

    Attributes
    ----------
    of, value
        The object that the ops got last, and their output.
    """

    def __init__(self) -> None:
        self.of: Any = None
        self.value: Any = None


class FieldRecipe:
    """The ops of one field, ready to be applied to samples.

    Parameters
    ----------
    name
        Name of the field, or of the array of one of its variants.
    code
        Function's name -> digest that its code must have.
    common
        Cache that the recipes of a field's variants share.
    """

    def __init__(
        self,
        name: str,
        field: Field,
        seed: int,
        code: Mapping[str, str] | None = None,
        common: Common | None = None,
    ) -> None:
        self.name, self.kind = name, field.kind
        self._common = common
        self._field = field
        self._seed = seed
        self._runs_functions = any(isinstance(op, Function) for op in field.ops)
        self._is_picture = field.decodes
        first = next((op for op in field.ops if not isinstance(op, ToDType)), None)
        self._takes_images = isinstance(first, Resampling | CenterCrop | HorizontalFlip)
        # A custom function may keep a reference to its argument; built-in ops do not.
        scratch = None if self._runs_functions else Scratch()
        self._calls = [_computed(op, code or {}, scratch, field.kind) for op in field.ops]
        self._follow, self._at = field.follow, (Sample({}), "")
        if self._follow is not None:
            self._calls[-1] = self._following
            self._leaders = [
                FieldRecipe(
                    leader,
                    declared.model_copy(update={"first_variant": field.first_variant}),
                    seed,
                    code,
                )
                for leader, declared in zip(self._follow.names, self._follow.fields, strict=True)
            ]
        self._calls_before = [
            call.before(following) if isinstance(call, Operation) else call
            for call, following in zip(self._calls, field.ops[1:], strict=False)
        ]

    def __call__(self, sample: Sample, key: str) -> np.ndarray:
        """Compute a row, (C, H, W) for a decoded image; it is valid until the next call.

        Raises
        ------
        SampleError
            The reason why this sample has no row.
        """
        self._at = sample, key
        try:
            if self._common is None or not self._field.fixed_ops:
                return self.row(self.apply(self.input(sample), 0, None, key))
            return self._from_common(sample, lambda: self.input(sample), 0, key)
        except SampleError as error:
            of_several = self._field.kind or len(sample.inputs) > 1
            named = f"its {field_of(self.name)}" if of_several else ""
            if where := sample.files.get(self.part(sample), named):
                raise SampleError(f"{where}: {error}") from None
            raise

    def _from_common(
        self, of: object, begin: Callable[[], Any], applied: int, key: str
    ) -> np.ndarray:
        """Compute a row from the output of the ops that all variants share."""
        common, fixed = self._common, self._field.fixed_ops
        assert common is not None
        if common.of is not of:
            common.of = None  # an op that fails may have overwritten the old value's memory
            common.value = self.apply(begin(), applied, fixed, key)
            common.of = of
        # A custom function may modify its argument, from which the other variants start, too.
        value = common.value
        if self._runs_functions:
            value = copy.copy(value) if isinstance(value, str | bytes) else value.copy()
        return self.row(self.apply(value, fixed, None, key))

    def resume(self, row: np.ndarray, applied: int, key: str) -> np.ndarray:
        """Apply the ops after the first `applied` to a stored row.

        `key` is the same object for all variants of one row, and another one for the next.
        """
        if applied == len(self._field.ops):
            return row
        if self._field.kind is not None:  # their ops are functions, which may keep the row
            value = stored_value(self._field.kind, row)
            return self.row(self.apply(value, applied, None, key))
        if self._is_picture and row.ndim == 3:
            row = row.transpose(1, 2, 0)
        if self._common is not None and applied <= self._field.fixed_ops:
            return self._from_common(key, row.copy, applied, key)
        for op in self._field.ops[applied:]:
            if row.ndim < 2 or (part := op.part(*row.shape[:2])) is None:
                # Other ops get the memory layout of a build without a base; functions may keep it.
                row = row.copy()
                break
            row = row[part]
            applied += 1
        return self.row(self.apply(row, applied, None, key))

    def apply(self, value: Any, first: int, stop: int | None, key: str) -> Any:
        """Apply the ops from number `first` on, up to `stop`; some with the next one in mind."""
        ops = self._field.ops[:stop]
        for number in range(first, len(ops)):
            calls = self._calls if number + 1 == len(ops) else self._calls_before
            random = self._random(key, number) if ops[number].is_random else None
            value = calls[number](value, random)
        return value

    def steps(self, sample: Sample, key: str) -> Iterator[tuple[Op | None, Any]]:
        """Yield (None, input), then (op, output) for each op; valid until the next sample.

        Raises
        ------
        SampleError
            The reason why this sample has no row, raised by the op that finds it.
        """
        self._at = sample, key
        value = self.input(sample)
        yield None, value
        for number, op in enumerate(self._field.ops):
            value = self.apply(value, number, number + 1, key)
            yield op, value

    def row(self, value: Any) -> np.ndarray:
        """Convert the output of the last op to a stored row: a decoded image to (C, H, W)."""
        if self._field.kind is not None:
            return row_of(self._field.kind, value)
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if self._is_picture and array.ndim == 3:
            array = array.transpose(2, 0, 1)
        return array

    def part(self, sample: Sample) -> str | int:
        """Return the name of the part of a sample that the ops start from."""
        return part_of(self.name, self._field, sample)

    def input(self, sample: Sample) -> Any:
        """Return the part of a sample that the ops start from."""
        name = self.part(sample)
        if name not in sample.inputs:
            names = ", ".join(map(repr, sample.inputs))
            raise SampleError(f"field {self.name!r} starts from {name!r}; samples have {names}")
        value = sample.inputs[name]
        if isinstance(value, SampleError):
            raise SampleError(str(value))
        # A custom function may modify its argument, from which other fields start, too.
        value = copy.deepcopy(value) if self._runs_functions and not self._is_picture else value
        if self._field.kind is not None:
            return value_of(self._field.kind, value)
        require_exact(value)
        return _image(value) if self._takes_images else value

    def _following(self, value: np.ndarray, _: np.random.Generator | None) -> np.ndarray:
        """Return the entries that are left where the ops of their picture move them."""
        entries, left = self._entries(value)
        kept: np.ndarray = entries[left]
        return kept

    def _entries(self, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return all entries, moved, and which of them are left: (n,) bool.

        Raises
        ------
        SampleError
            They cannot be entries of their picture, or not of their boxes.
        """
        (sample, key), kind = self._at, self._field.kind
        assert self._follow is not None
        *boxes, picture = self._leaders
        name, left = field_of(self.name), np.ones(len(value), np.bool_)
        for leader in boxes:
            leader._at = sample, key
            before = leader.apply(leader.input(sample), 0, -1, key)
            left = leader._entries(before)[1]
            if len(left) != len(value):
                raise SampleError(
                    f"it has {len(value)} {name}, and {len(left)} {field_of(leader.name)}"
                )
        if kind in ("boxes", "keypoints"):
            ops = picture._field.ops
            width, height = frame_of(picture.input(sample), picture.decode).decoded(picture.decode)
            canvas = getattr(sample.inputs[self.part(sample)], "canvas_size", None)
            if canvas is not None and tuple(canvas) != (height, width) and not self._runs_functions:
                raise SampleError(  # those of torchvision.tv_tensors say it
                    f"its {name} are places in a picture of {canvas[1]} x {canvas[0]} px, and it "
                    f"has {width} x {height}"
                )
            value = require_inside(kind, name, value, (height, width))
            draws = (
                picture._random(key, number) if op.is_random else None
                for number, op in enumerate(ops)
            )
            value = moved(kind, value, (height, width), zip(ops, draws, strict=True))
        if kind == "boxes":
            left &= (value[:, 2:] > value[:, :2]).all(axis=1)
        return value, left

    def unmoved(self, sample: Sample, key: str) -> tuple[np.ndarray, Any, Decode]:
        """Return entries before they follow their picture, the picture's input, and its decode."""
        self._at, picture = (sample, key), self._leaders[-1]
        return (
            self.apply(self.input(sample), 0, -1, key),
            picture.input(sample),
            picture.decode,
        )

    @property
    def picture(self) -> str:
        """Field of the picture that entries follow."""
        return field_of(self._leaders[-1].name)

    @property
    def decode(self) -> Decode:
        """The op that decodes a picture."""
        assert self._field.decode is not None
        return self._field.decode

    def _random(self, key: str, number: int) -> np.random.Generator:
        """Return a generator that depends only on recipe seed, key, variant and index of the op."""
        variant = self._field.first_variant
        entropy = [self._seed & (2**64 - 1), number, variant, *key.encode()]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def _image(value: Any) -> np.ndarray:
    """Return an array that ops take as an image; raises `SampleError` if they would mix up axes."""
    array = np.asarray(value)
    shape = array.shape
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[0] <= MOST_BANDS < min(shape[1:])):
        raise SampleError(
            f"it is an array {shape}, and without decode ops that move pixels take (H, W) or "
            "(H, W, C): return one with its channels last, as of transpose(1, 2, 0)"
        )
    return array


def _computed(
    op: Op, code: Mapping[str, str], scratch: Scratch | None, kind: FieldKind | None
) -> Computed:
    """Return the callable that computes an op: the op itself, unless only workers can."""
    match op:
        case Decode():
            return lambda value, _: decode(value, op, scratch)
        case Function():
            call = _UserFunction(op, code.get(op.function, ""), kind)
            return call if kind is None else lambda *given: value_of(kind, call(*given))
        case _:
            return op


class _UserFunction:
    """A function of the user with its parameters, or an instance of a class."""

    def __init__(self, op: Function, code: str, kind: FieldKind | None) -> None:
        self._op = op
        self._kind = kind
        loaded = load_object(op.function, code)
        if not isinstance(loaded, type):
            self._call: Callable[..., Any] = functools.partial(loaded, **op.params)
            return
        try:
            self._call = loaded(**op.params)
        except Exception as error:
            raise RecipeError(_failure(f"{op.function}(**{op.params})", error)) from error

    def __call__(self, value: Any, random: np.random.Generator | None) -> Any:
        try:
            result = self._call(value, **({} if random is None else {"random": random}))
            if self._kind is None and result is not None:
                require_exact(result)
                result = np.asarray(result)
        except MemoryError:
            raise
        except BaseException as error:
            if not fails_sample(error):
                raise
            raise SampleError(_failure(self._op.function, error)) from error
        if result is None:
            raise SampleError(f"{self._op.function} returned None; let it return an array")
        return result


def _failure(what: str, error: BaseException) -> str:
    """Describe an error of the user's code, with the file and line where it arose.

    The line is the innermost one in the top-level module or package of the function. Its path
    starts at that package, since nodes may have it in different folders.
    """
    package = what.partition(":")[0].partition(".")[0]
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == package:
            file = PurePath(frame.f_code.co_filename)
            depth = module.count(".") + 1 + (file.name == "__init__.py")
            place = f" at {'/'.join(file.parts[-depth:])}:{line}"
    return f"{what} failed{place}: {error!r}"
