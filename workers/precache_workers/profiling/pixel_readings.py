"""Readings of pixels: samples that suggest another meaning than the defaults of a recipe's ops.

Masks and images of 12 bits are stored in files like those of pictures. Where two readings give
other pixels, and the recipe does not state which it means, the build is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from precache.errors import RecipeError
from precache.recipe.ops import Decode, Op, RandomResizedCrop, Resize
from precache.recipe.recipe import Field
from precache_workers.ops.decoding import PictureFacts, picture_facts
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.sources.base import Sample

FEW_VALUES, PIXELS_A_VALUE = 32, 8
"""Most values of a mask, and least pixels that half of them cover each. Photographs have thousands
of colours and 150 to 256 grey levels. Drawings have values at edges that cover few pixels."""

MASKS = 4
"""Samples are masks if one in so many of those that are tried looks like one."""

MOST_COUNTED = 4096
"""Values of a blended mask that are counted for the message."""

LEAST_BITS = (8, 10, 12, 14)
"""Bits of sensors, in files of 16 bits."""


@dataclass
class _Seen:
    """Evidence on one field.

    Attributes
    ----------
    tried
        Number of samples.
    palettes, blended
        Text on each sample that is a palette image of few values, or has few values of which an op
        makes others.
    grey
        The latter are all grey images of 8 bits.
    widest
        Largest value of images of 16 bits, and the key that has it.
    """

    tried: int = 0
    palettes: list[str] = field(default_factory=list)
    blended: list[str] = field(default_factory=list)
    grey: bool = True
    wide: int = 0
    widest: tuple[int, str] = (0, "")
    transparent: int = 0


class PixelReadings:
    """Evidence on the meaning of pixels, from the samples that a build tries first."""

    def __init__(self, fields: Mapping[str, Field], recipes: Mapping[str, FieldRecipe]) -> None:
        self._fields = fields
        self._recipes = recipes
        self._seen = {name: _Seen() for name in fields}

    def look(self, sample: Sample, key: str) -> None:
        """Add a sample; one that cannot be decoded is left to the ops, which say why."""
        for name, recipe in self._recipes.items():
            with contextlib.suppress(Exception):
                self._look(name, recipe, sample, key)

    def _look(self, name: str, recipe: FieldRecipe, sample: Sample, key: str) -> None:
        ops, seen = self._fields[name].ops, self._seen[name]
        seen.tried += 1
        data = recipe.input(sample)
        facts = PictureFacts()
        if ops and isinstance(ops[0], Decode):
            if isinstance(data, bytes | bytearray | memoryview) and bytes(data[:2]) == b"\xff\xd8":
                return  # a JPEG: no palette, at most 12 bits, and no values that are exact
            facts = picture_facts(data, ops[0])
        if facts.widest is not None:
            seen.wide += 1
            seen.widest = max(seen.widest, (facts.widest, key))
        seen.transparent += facts.transparent
        is_palette = facts.mode in ("P", "PA")
        if not is_palette and not any(map(_blends, ops)):
            return
        before: set[object] | None = None
        plain = np.empty(0)
        for number, (op, value) in enumerate(recipe.steps(sample, key)):
            if isinstance(op, Decode) and is_palette and not op.states("mode"):
                values = few_values(np.asarray(value))
                if values is not None and op.mode != "P":
                    seen.palettes.append(f"{key} is a palette image of {len(values)} colours")
            if _blends(op) and before is not None:
                assert op is not None
                if made := _blended(before, plain, np.asarray(value)):
                    seen.blended.append(f"{key} has {len(before)} values, {made.format(op.op)}")
                    seen.grey &= facts.mode == "L"
                    return
            if number < len(ops) and _blends(ops[number]):
                plain = np.array(value)
                before = few_values(plain)

    def require_clear(self) -> None:
        """Raise `RecipeError` if samples suggest another reading than one that was not stated."""
        for name, seen in self._seen.items():
            if seen.blended or seen.palettes:
                self._require_no_masks(name, seen)
            first = self._fields[name].ops[0] if seen.wide else None
            if isinstance(first, Decode) and not first.states("bits") and first.mode != "P":
                self._require_wide(name, seen)

    def _require_no_masks(self, name: str, seen: _Seen) -> None:
        looks = max(seen.blended, seen.palettes, key=len)
        if len(looks) * MASKS >= seen.tried:
            raise RecipeError(f"field {name}: {self._masks(name, seen)}")

    def _masks(self, name: str, seen: _Seen) -> str:
        """Describe the samples that look like masks, and both ways out."""
        looks = max(seen.blended, seen.palettes, key=len)
        first = self._fields[name].ops[0]
        is_open = isinstance(first, Decode) and not first.states("mode")
        keeps = "P" if is_open and (seen.palettes or seen.grey) else None
        mask = self._options(name, keeps, "nearest")
        picture = self._options(name, "RGB" if seen.palettes else None, "bilinear")
        return (
            f"{len(looks)} of {seen.tried} samples tried look like masks: {looks[0]}. State which "
            f"they are. Masks: {mask}. Pictures: {picture}"
        )

    def _options(self, name: str, mode: str | None, interpolation: str) -> str:
        """Format the options that state a reading, as a recipe and as the command line have it."""
        ops = [op for op in self._fields[name].ops if isinstance(op, Resize | RandomResizedCrop)]
        options = [f'mode = "{mode}" in decode'] * (mode is not None)
        options += [f'interpolation = "{interpolation}" in {op.op}' for op in ops]
        flags = [f"--mode {mode}"] * (mode is not None)
        flags += [f"--interpolation {interpolation}"] * bool(ops)
        return _either(" ".join(flags), " and ".join(options), [*self._fields] == ["image"])

    def _require_wide(self, name: str, seen: _Seen) -> None:
        most, key = seen.widest
        bits = next((bits for bits in LEAST_BITS if not most >> bits), None)
        if bits is None or not most:
            return
        alone = [*self._fields] == ["image"]
        narrow, wide = (
            _either(f"--bits {count}", f"bits = {count} in decode", alone) for count in (bits, 16)
        )
        raise RecipeError(
            f"field {name}: {seen.wide} of {seen.tried} samples tried have 16 bits, and values up "
            f"to {most} alone ({key}), as of {bits} bits. Decoded as 16 bits they become 0 to "
            f"{most >> 8}; state which they are. {bits} bits: {narrow}. 16 bits: {wide}. A "
            "function in place of decode can keep them all"
        )

    def notes(self) -> tuple[str, ...]:
        """Return a line for each default that decided pixels of the samples."""
        lines = []
        for name, seen in self._seen.items():
            if seen.blended or seen.palettes:  # fewer than are refused
                lines.append(f"{name}: {self._masks(name, seen)}")
            first = self._fields[name].ops[0] if self._fields[name].ops else None
            if not isinstance(first, Decode):
                continue
            alone = [*self._fields] == ["image"]
            if seen.transparent and not first.states("mode"):
                keeps = _either("--mode RGBA", 'mode = "RGBA" in decode', alone)
                lines.append(
                    f"{name}: {seen.transparent} of {seen.tried} samples tried have transparent "
                    f"pixels, which get the colours stored beneath; to keep alpha: {keeps}"
                )
            if seen.wide and not first.states("bits"):
                lines.append(
                    f"{name}: {seen.wide} of {seen.tried} samples tried have 16 bits, of which the "
                    "highest 8 are kept; a function in place of decode can keep them all"
                )
        return tuple(lines)


def _either(flags: str, options: str, alone: bool) -> str:
    """Format options of a recipe; with the flags if they can describe the whole recipe."""
    return f"{flags} ({options})" if alone else options


def _blends(op: Op | None) -> bool:
    """Return True for an op that makes new values, unless the user asked for it."""
    return (
        isinstance(op, Resize | RandomResizedCrop)
        and op.interpolation != "nearest"
        and not op.states("interpolation")
    )


def _blended(values: set[object], before: np.ndarray, after: np.ndarray) -> str:
    """Say what an op made of an array of few values; empty if it did not blend them.

    Of class numbers that follow each other, a blend makes others of the same: 1 and 3 become 2.
    """
    made = _counts(after, MOST_COUNTED)
    if made is None or not made.keys() <= values:
        return f"of which {{}} makes {f'over {MOST_COUNTED}' if made is None else len(made)}"
    return "" if len(values) == 1 or np.array_equal(before, after) else "which {} blends"


def few_values(array: np.ndarray) -> set[object] | None:
    """Return the values, or colours, of an array (H, W, C) or (H, W) if they are as few as a mask's
    are; else None."""
    if array.ndim not in (2, 3) or not array.size or array.dtype.kind not in "buif":
        return None
    step = max(1, len(array) // 16)
    if _counts(array[::step], FEW_VALUES) is None:  # spares a look at all of it
        return None
    counts = _counts(array, FEW_VALUES)
    if counts is None or np.median([*counts.values()]) < PIXELS_A_VALUE:
        return None
    return {*counts}


def _counts(array: np.ndarray, most: int) -> dict[object, int] | None:
    """Count the pixels of each value, or colour, of an array; None if there are more than `most`
    of these."""
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype == np.uint8 and channels in (1, 3, 4):
        pixels = array.reshape(array.shape[:2]) if channels == 1 else array
        colours = Image.fromarray(np.ascontiguousarray(pixels)).getcolors(most)
        return None if colours is None else {colour: count for count, colour in colours}
    values, counts = np.unique(array, return_counts=True)
    few = len(values) <= most
    return dict(zip(values.tolist(), counts.tolist(), strict=True)) if few else None
