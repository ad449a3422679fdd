"""Readings of pixels: samples that suggest another meaning than the defaults of a recipe's ops.

Masks and images of 12 bits are stored in files like those of pictures. Where two readings give
other pixels, and the recipe does not state which it means, the build is refused.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from precache.errors import RecipeError
from precache.recipe.ops import Decode, Op, Resampling
from precache.recipe.recipe import Field
from precache_workers.ops.decoding import PictureFacts, picture_facts
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.profiling.frame_readings import FrameReadings
from precache_workers.sources.base import Sample

FEW_VALUES, PIXELS_A_VALUE = 32, 8
"""Values of an array that is a mask whatever its edges are, at most, and least pixels that half of
them cover each. Drawings have values at edges that cover few pixels."""

MANY_VALUES = f"over {FEW_VALUES} values, in areas with sharp edges"

ALONE, GRADUAL, STEPS = 0.03, 0.6, 128
"""A mask of more values has hardly any pixel at an edge that is unlike all four neighbours, which
photographs, text and lines have, by noise and antialiasing; and few steps between neighbours below
1/128 of the range, of which smooth drawings have most. Of 880 pictures in lossless files
(photographs, screenshots, plots, icons, scans) none is a mask by this, enlarged or not; of 273
masks of 33 to 400 instances all are but 23 with ragged edges at 64 pixels."""

COLOURED = ("RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB")
"""Pillow's modes of images in colours. Flat drawings of many colours are as masks are by this, so
those are said and not refused."""

PART = 1024
"""Pixels of a side that are looked at for it."""

MASKS = 4
"""Samples are masks if one in so many of those that are tried looks like one."""

MOST_COUNTED = 4096
"""Values of a blended mask that are counted for the message."""

NEARLY_ALL, NEAR, MOST_LEVELS = 0.95, 8, 4
"""A JPEG is a mask if so many of its pixels are near to one of so few values."""

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
    drawn
        Number of the latter that are images in colours, of many values: drawings are like them.
    grey
        The latter are all grey images of 8 bits.
    widest
        Largest value of images of 16 bits, and the key that has it.
    wide_masks
        Key and values of each image of 16 bits that has few.
    noisy
        Text on each JPEG that is a mask.
    """

    tried: int = 0
    palettes: list[str] = field(default_factory=list)
    blended: list[str] = field(default_factory=list)
    drawn: int = 0
    grey: bool = True
    wide: int = 0
    widest: tuple[int, str] = (0, "")
    wide_masks: list[tuple[str, list[int]]] = field(default_factory=list)
    noisy: list[str] = field(default_factory=list)
    transparent: int = 0
    animated: int = 0


class PixelReadings:
    """Evidence on the meaning of pixels, from the samples that a build tries first.

    Attributes
    ----------
    fields
        By name, without variants.
    """

    def __init__(self, fields: Mapping[str, Field], recipes: Mapping[str, FieldRecipe]) -> None:
        self.fields = fields
        self._recipes = recipes
        self._seen = {name: _Seen() for name in fields}
        self._frames = FrameReadings(fields, recipes)

    def look(self, sample: Sample, key: str) -> None:
        """Add a sample; one that cannot be decoded is left to the ops, which say why."""
        for name, recipe in self._recipes.items():
            with contextlib.suppress(Exception):
                self._look(name, recipe, sample, sample.files.get(recipe.part(sample), key))
        self._frames.look(sample, key)

    def _look(self, name: str, recipe: FieldRecipe, sample: Sample, key: str) -> None:
        ops, seen = self.fields[name].ops, self._seen[name]
        seen.tried += 1
        data = recipe.input(sample)
        facts = PictureFacts()
        if ops and isinstance(ops[0], Decode):
            if isinstance(data, bytes | bytearray | memoryview) and bytes(data[:2]) == b"\xff\xd8":
                # A JPEG: no palette, at most 12 bits, and no values that are exact.
                if levels := _levels(data):
                    seen.noisy.append(f"{key} has nearly all pixels near {levels}")
                return
            facts = picture_facts(data, ops[0])
        if facts.widest is not None:
            seen.wide += 1
            seen.widest = max(seen.widest, (facts.widest, key))
        seen.transparent += facts.transparent
        seen.animated += facts.animated
        wide = _wide_values(data) if facts.widest is not None else []
        if wide:
            seen.wide_masks.append((key, wide))
        elif facts.values > FEW_VALUES:
            return  # no mask, even if few of its values remain
        is_palette = facts.mode in ("P", "PA")
        if not is_palette and not any(map(_blends, ops)):
            return
        plain: np.ndarray | None = None
        for number, (op, value) in enumerate(recipe.steps(sample, key)):
            if isinstance(op, Decode) and is_palette and not op.states("mode"):
                values = _values(np.asarray(value))
                if values and not op.keeps_values:
                    seen.palettes.append(f"{key} is a palette image of {values}")
            if _blends(op) and plain is not None:
                assert op is not None
                if made := _blended(plain, np.asarray(value)):
                    seen.blended.append(f"{key} has {made.format(op.op)}")
                    seen.grey &= facts.mode == "L"
                    coloured = facts.mode in COLOURED or (not facts.mode and plain.shape[-1] > 2)
                    seen.drawn += coloured and made.startswith(MANY_VALUES)
                    return
            if number < len(ops) and _blends(ops[number]):
                plain = np.array(value)

    def require_clear(self) -> None:
        """Raise `RecipeError` if samples suggest another reading than one that was not stated."""
        self._frames.require_clear()
        for name, seen in self._seen.items():
            first = self.fields[name].ops[0] if seen.wide else None
            if isinstance(first, Decode) and not first.keeps_values:
                self._require_no_wide_masks(name, seen, first)
                if first.bits is None:
                    self._require_wide(name, seen)
            if len(seen.blended) > seen.drawn or seen.palettes:
                self._require_no_masks(name, seen)

    def _require_no_masks(self, name: str, seen: _Seen) -> None:
        if max(len(seen.blended) - seen.drawn, len(seen.palettes)) * MASKS >= seen.tried:
            raise RecipeError(f"field {name}: {self._masks(name, seen)}")

    def _masks(self, name: str, seen: _Seen) -> str:
        """Describe the samples that look like masks, and both ways out."""
        looks = max(seen.blended, seen.palettes, key=len)
        first = self.fields[name].ops[0]
        is_open = isinstance(first, Decode) and not first.states("mode")
        keeps = "P" if is_open and (seen.palettes or seen.grey) else None
        mask = self._options(name, "nearest", mode=keeps)
        picture = self._options(name, "bilinear", mode="RGB" if seen.palettes else None)
        return (
            f"{len(looks)} of {seen.tried} samples tried look like masks: {looks[0]}. State which "
            f"they are. Masks: {mask}. Pictures: {picture}"
        )

    def _options(self, name: str, interpolation: str = "", **of_decode: str | int | None) -> str:
        """Format options that state a reading, as a recipe has them; with the flags if these can
        describe the whole recipe.

        Parameters
        ----------
        interpolation
            Of ops that resize; pictures keep one that is stated.
        """
        stated = {key: value for key, value in of_decode.items() if value is not None}
        ops = [op for op in self.fields[name].ops if isinstance(op, Resampling) and interpolation]
        if interpolation != "nearest":
            ops = [op for op in ops if _blends(op)]
        options = [f"{key} = {json.dumps(value)} in decode" for key, value in stated.items()]
        options += [f'interpolation = "{interpolation}" in {op.op}' for op in ops]
        flags = [f"--{key} {value}" for key, value in stated.items()]
        flags += [f"--interpolation {interpolation}"] * bool(ops)
        text = " and ".join(options)
        return f"{' '.join(flags)} ({text})" if [*self.fields] == ["image"] else text

    def _require_no_wide_masks(self, name: str, seen: _Seen, decode: Decode) -> None:
        """Raise `RecipeError` for masks of 16 bits, unless what becomes of their values is stated.

        The fewest bits that hold all values keep them; more bits would divide them.
        """
        ops = self.fields[name].ops
        states_bits, opens_blend = decode.bits is not None, any(map(_blends, ops))
        if len(seen.wide_masks) * MASKS < seen.tried or (states_bits and not opens_blend):
            return
        if states_bits and decode.bits == LEAST_BITS[0]:
            return  # the values stay as they are, as those of 8 bits
        most = seen.widest[0]
        key, values = max(seen.wide_masks, key=lambda mask: len(mask[1]))
        bits = next((bits for bits in LEAST_BITS if not most >> bits), 16)
        stated = None if states_bits else bits
        picture = self._options(name, "bilinear", bits=stated)
        if bits == LEAST_BITS[0]:
            mask = self._options(name, "nearest", bits=stated)
        else:
            mask = self._options(name, "nearest", mode="unchanged")
        shown = ", ".join(map(str, values[:6])) + ", …" * (len(values) > 6)
        raise RecipeError(
            f"field {name}: {len(seen.wide_masks)} of {seen.tried} samples tried look like masks "
            f"of 16 bits: {key} has the values {shown}. State which they are. Masks: {mask}. "
            f"Pictures: {picture}"
        )

    def _require_wide(self, name: str, seen: _Seen) -> None:
        most, key = seen.widest
        bits = next((bits for bits in LEAST_BITS if not most >> bits), None)
        if bits is None or not most:
            return
        narrow, wide = (self._options(name, bits=count) for count in (bits, 16))
        raise RecipeError(
            f"field {name}: {seen.wide} of {seen.tried} samples tried have 16 bits, and values up "
            f"to {most} alone ({key}), as of {bits} bits. Decoded as 16 bits they become 0 to "
            f"{most >> 8}; state which they are. {bits} bits: {narrow}. 16 bits: {wide}. To "
            f"keep all values: {self._options(name, mode='unchanged')}"
        )

    def notes(self) -> tuple[str, ...]:
        """Return a line for each default that decided pixels of the samples."""
        lines = []
        for name, seen in self._seen.items():
            if seen.blended or seen.palettes:  # that are not refused
                lines.append(f"{name}: {self._masks(name, seen)}")
            first = self.fields[name].ops[0] if self.fields[name].ops else None
            if not isinstance(first, Decode):
                continue
            resized = [op for op in self.fields[name].ops if isinstance(op, Resampling)]
            is_open = any(map(_blends, resized))
            is_mask = is_open or all(op.interpolation == "nearest" for op in resized)
            if is_mask and seen.noisy and len(seen.noisy) * MASKS >= seen.tried:
                nearest, bilinear = (self._options(name, way) for way in ("nearest", "bilinear"))
                lines.append(
                    f"{name}: {len(seen.noisy)} of {seen.tried} samples tried look like masks in "
                    f"JPEG files, which do not keep values: {seen.noisy[0]}. Masks: "
                    + f"{nearest}, and " * is_open
                    + "round the values behind the loader"
                    + f". Pictures: {bilinear}" * is_open
                )
            if seen.transparent and not first.states("mode"):
                keeps = self._options(name, mode="RGBA")
                lines.append(
                    f"{name}: {seen.transparent} of {seen.tried} samples tried have transparent "
                    f"pixels, which get the colours stored beneath; to keep alpha: {keeps}"
                )
            if seen.animated:
                lines.append(
                    f"{name}: {seen.animated} of {seen.tried} samples tried are animated, and "
                    "their first frame is stored; a function in place of decode can read others"
                )
            if seen.wide and first.bits is None and not first.keeps_values:
                lines.append(
                    f"{name}: {seen.wide} of {seen.tried} samples tried have 16 bits, of which the "
                    f"highest 8 are kept; to keep all: {self._options(name, mode='unchanged')}"
                )
        return (*lines, *self._frames.notes())


def _levels(data: Any) -> str:
    """Return the values that nearly all pixels of a JPEG are near to, if they are few as a mask's.

    Of 160 photographs none is so; a mask of class numbers is dark all over.
    """
    image = Image.open(io.BytesIO(data))
    image.draft("L", (PART // 2, PART // 2))  # an eighth of a large one is decoded
    counts, levels = np.array(image.convert("L").histogram(), np.float64), list[int]()
    used = counts.nonzero()[0]
    if len(used) > 1 and used[-1] < FEW_VALUES:
        return f"0 to {used[-1]}"
    least = (1 - NEARLY_ALL) * counts.sum()
    while counts.sum() > least:
        level = int(np.convolve(counts, np.ones(2 * NEAR + 1), "same").argmax())
        levels.append(
            int(counts[max(0, level - NEAR) :][: 2 * NEAR + 1].argmax()) + max(0, level - NEAR)
        )
        counts[max(0, level - NEAR) : level + NEAR + 1] = 0
    levels.sort()
    apart = min(np.diff(levels), default=0) > 2 * NEAR  # unlike those of a picture of low contrast
    return " and ".join(map(str, levels)) if apart and len(levels) <= MOST_LEVELS else ""


def _blends(op: Op | None) -> bool:
    """Return True for an op that makes new values, unless the user asked for it."""
    return (
        isinstance(op, Resampling)
        and op.interpolation != "nearest"
        and not op.states("interpolation")
    )


def _wide_values(data: Any) -> list[int]:
    """Return the values of a grey image of 16 bits that is a mask; empty if it is none."""
    image = data if isinstance(data, Image.Image) else Image.open(io.BytesIO(data))
    pixels = np.asarray(image)
    values, counts = np.unique(pixels, return_counts=True)
    if pixels.ndim != 2 or pixels.dtype.kind not in "iu" or len(values) < 2:
        return []
    few = len(values) <= FEW_VALUES and np.median(counts) >= PIXELS_A_VALUE
    return values.tolist() if few or has_sharp_areas(pixels) else []


def _values(array: np.ndarray) -> str:
    """Return how many values a mask has; empty if the array is none."""
    values = few_values(array)
    if values is None:
        return MANY_VALUES if has_sharp_areas(array) else ""
    return f"{len(values)} values"


def _blended(before: np.ndarray, after: np.ndarray) -> str:
    """Say what an op made of the values of a mask; empty if it is none, or was not blended.

    Of class numbers that follow each other, a blend makes others of the same: 1 and 3 become 2.
    """
    if np.array_equal(before, after):
        return ""
    values = few_values(before)
    if values is None:
        return f"{MANY_VALUES}, which {{}} blends" if has_sharp_areas(before) else ""
    made = _counts(after, MOST_COUNTED)
    if made is None or not made.keys() <= values:
        count = f"over {MOST_COUNTED}" if made is None else len(made)
        return f"{len(values)} values, of which {{}} makes {count}"
    return "" if len(values) == 1 else f"{len(values)} values, which {{}} blends"


def has_sharp_areas(array: np.ndarray) -> bool:
    """Return whether an array (H, W, C) or (H, W) of more than `FEW_VALUES` values is a mask."""
    if array.ndim not in (2, 3) or not array.size or array.dtype.kind not in "uif":
        return False
    top, left = (max(0, (side - PART) // 2) for side in array.shape[:2])
    part = array[top : top + PART, left : left + PART]
    part = part.reshape(*part.shape[:2], -1).astype(np.result_type(part.dtype, np.int32))
    for axis in (0, 1):  # an enlarged picture repeats rows and columns
        changes = np.diff(part, axis=axis).any((1 - axis, 2))
        part = part.compress(np.append(True, changes), axis)
    if min(part.shape[:2]) < 3:
        return False
    down, right = (np.abs(np.diff(part, axis=axis)).max(2) for axis in (0, 1))
    sides = np.stack([down[:-1, 1:-1], down[1:, 1:-1], right[1:-1, :-1], right[1:-1, 1:]]) > 0
    steps = np.concatenate([down.ravel(), right.ravel()])
    steps = steps[steps > 0]
    least = max(np.ptp(part) / STEPS, 0 if array.dtype.kind == "f" else 2)
    alone = sides.all(0).sum() / max(1, sides.any(0).sum())
    return bool(alone < ALONE and (steps <= least).mean() < GRADUAL)


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
