"""Readings of pixels: samples that suggest another meaning than the defaults of a recipe's ops.

Masks and images of 12 bits are stored in files like those of pictures, and masks may not lie on
their images. Where two readings give other pixels, and the recipe does not state which it means,
the build is refused.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from precache.errors import RecipeError
from precache.recipe.ops import Decode, Op, Resampling
from precache.recipe.recipe import Field
from precache_workers.ops.decoding import PictureFacts, frame_of, picture_facts
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.ops.mask_frames import MaskFrames, Pair
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
"""A build is refused if one sample in so many of those that are tried is read in two ways."""

MOST_COUNTED = 4096
"""Values of a blended mask that are counted for the message."""

NEARLY_ALL, NEAR, MOST_LEVELS = 0.95, 8, 4
"""A JPEG is a mask if so many of its pixels are near to one of so few values."""

LEAST_BITS = (8, 10, 12, 14)
"""Bits of sensors, in files of 16 bits."""

_STORED = 'orientation = "stored"'


class Stated(NamedTuple):
    """Options that state a reading: as a recipe has them, and as flags, none if these cannot."""

    options: str
    flags: Sequence[str]

    def __str__(self) -> str:
        return f"{' '.join(self.flags)} ({self.options})" if self.flags else self.options


Refusal = tuple[str, *tuple[Stated, ...]]
"""Two readings of pixels, in words, and the options that state each."""


class PixelReadings:
    """Evidence on the meaning of pixels, from the samples that a build tries first.

    Attributes
    ----------
    fields
        By name, without variants.
    """

    def __init__(self, fields: Mapping[str, Field], recipes: Mapping[str, FieldRecipe]) -> None:
        self.fields = fields
        flags = [*fields] == ["image"]
        self._seen = [
            _Places(name, field.kind, recipes[name])
            if field.kind in ("boxes", "keypoints")
            else _Pixels(name, field, recipes[name], flags)
            for name, field in fields.items()
        ]
        self._frames = MaskFrames(fields, recipes)
        self._masks: dict[str, _Frames] = {}

    def look(self, key: str, sample: Sample) -> None:
        """Add a sample; one that cannot be decoded is left to the ops, which say why."""
        for seen in self._seen:
            with contextlib.suppress(Exception):
                seen.look(sample, key)
        key = ", ".join(sample.files.values()) or key
        for pair in self._frames.of(sample) if self._frames.pairs else ():
            masks = self._masks.setdefault(pair.mask, _Frames(pair.mask, self._frames))
            masks.look(pair, key)

    def require_clear(self) -> None:
        """Raise `RecipeError` if samples suggest another reading than one that was not stated."""
        evidence: list[_Frames | _Pixels | _Places] = [*self._masks.values(), *self._seen]
        for seen in evidence:
            for refusal, *stated in seen.refusals():
                ways = [way.flags for way in stated if way.flags]
                raise RecipeError(f"field {seen.name}: {refusal}", ways=ways)

    def notes(self) -> tuple[str, ...]:
        """Return a line for each default that decided pixels, and finding that is not refused."""
        evidence: list[_Frames | _Pixels | _Places] = [*self._seen, *self._masks.values()]
        return tuple(f"{seen.name}: {line}" for seen in evidence for line in seen.notes())


class _Pixels:
    """Evidence on one field: texts on samples, and counts of them.

    Attributes
    ----------
    jpegs
        Number of JPEG files.
    coloured
        Number of other files of images in colours.
    palettes, blended
        Palette images of few values; samples of few values of which an op makes others.
    drawn
        Number of the latter that are images in colours, of many values: drawings are like them.
    grey
        The latter are all grey images of 8 bits.
    widest
        Largest value of images of 16 bits, and the key that has it.
    wide_masks
        Key and values of each image of 16 bits that has few.
    noisy
        JPEGs that are masks.
    """

    def __init__(self, name: str, field: Field, recipe: FieldRecipe, flags: bool) -> None:
        """Parameters are those of the field; `flags` can describe the whole recipe."""
        self.name, self._ops, self._recipe, self._flags = name, field.ops, recipe, flags
        self._decode = field.decode
        self._blends = any(map(_blends, self._ops))
        self.tried = self.jpegs = self.coloured = self.drawn = self.wide = 0
        self.transparent = self.animated = 0
        self.palettes, self.blended, self.noisy = list[str](), list[str](), list[str]()
        self.grey, self.widest = True, (0, "")
        self.wide_masks: list[tuple[str, list[int]]] = []

    def look(self, sample: Sample, key: str) -> None:
        """Add a sample."""
        recipe = self._recipe
        file = sample.files.get(recipe.part(sample), key)
        self.tried += 1
        data = recipe.input(sample)
        facts = PictureFacts()
        if self._decode is not None:
            if isinstance(data, bytes | bytearray | memoryview) and bytes(data[:2]) == b"\xff\xd8":
                # A JPEG: no palette, at most 12 bits, and no values that are exact.
                self.jpegs += 1
                if levels := _levels(data):
                    self.noisy.append(f"{file} has nearly all pixels near {levels}")
                return
            facts = picture_facts(data, self._decode)
        self.coloured += facts.mode in COLOURED
        self.transparent += facts.transparent
        self.animated += facts.animated
        wide = list[int]()
        if facts.widest is not None:
            self.wide += 1
            self.widest = max(self.widest, (facts.widest, file))
            wide = _wide_values(data)
        if wide:
            self.wide_masks.append((file, wide))
        elif facts.values > FEW_VALUES:
            return  # no mask, even if few of its values remain
        is_palette = facts.mode in ("P", "PA")
        if not is_palette and not self._blends:
            return
        plain: np.ndarray | None = None
        for number, (op, value) in enumerate(recipe.steps(sample, file)):
            if isinstance(op, Decode) and is_palette and not op.states("mode"):
                values = _values(np.asarray(value))
                if values and not op.keeps_values:
                    self.palettes.append(f"{file} is a palette image of {values}")
            if _blends(op) and plain is not None:
                assert op is not None
                if made := _blended(plain, np.asarray(value)):
                    self.blended.append(f"{file} has {made.format(op.op)}")
                    self.grey &= facts.mode == "L"
                    coloured = facts.mode in COLOURED or (not facts.mode and plain.shape[-1] > 2)
                    self.drawn += coloured and made.startswith(MANY_VALUES)
                    return
            if number < len(self._ops) and _blends(self._ops[number]):
                plain = np.array(value)

    def refusals(self) -> Iterator[Refusal]:
        """Yield the readings that refuse a build, with both ways out."""
        decode = self._decode
        if self.wide and decode is not None and not decode.keeps_values:
            yield from self._wide_masks(decode)
            if decode.bits is None:
                yield from self._narrow()
        masks = max(len(self.blended) - self.drawn, len(self.palettes))
        if masks and masks * MASKS >= self.tried:
            yield self._looks_like_masks()

    def notes(self) -> Iterator[str]:
        """Yield a line for each default that decided pixels of the samples."""
        if self.blended or self.palettes:  # that are not refused
            yield self._looks_like_masks()[0]
        decode = self._decode
        if decode is None:
            return
        resized = [op for op in self._ops if isinstance(op, Resampling)]
        is_mask = self._blends or all(op.interpolation == "nearest" for op in resized)
        if is_mask and self.noisy and len(self.noisy) * MASKS >= self.tried:
            nearest, bilinear = (self._options(way) for way in ("nearest", "bilinear"))
            yield (
                f"{len(self.noisy)} of {self.tried} samples tried look like masks in JPEG files, "
                f"which do not keep values: {self.noisy[0]}. Masks: "
                + f"{nearest}, and " * self._blends
                + "round the values behind the loader"
                + f". Pictures: {bilinear}" * self._blends
            )
        if self.transparent and not decode.states("mode"):
            yield (
                f"{self.transparent} of {self.tried} samples tried have transparent pixels, which "
                f"get the colours stored beneath; to keep alpha: {self._options(mode='RGBA')}"
            )
        if self.animated:
            yield (
                f"{self.animated} of {self.tried} samples tried are animated, and their first "
                "frame is stored; a function in place of decode can read others"
            )
        if self.wide and decode.bits is None and not decode.keeps_values:
            yield (
                f"{self.wide} of {self.tried} samples tried have 16 bits, of which the highest 8 "
                f"are kept; to keep all: {self._options(mode='unchanged')}"
            )

    def _looks_like_masks(self) -> Refusal:
        looks = max(self.blended, self.palettes, key=len)
        is_open = self._decode is not None and not self._decode.states("mode")
        keeps = "P" if is_open and (self.palettes or self.grey) else None
        if keeps and (self.jpegs or self.coloured):
            keeps = "RGB" if self.palettes else None
        mask = self._options("nearest", mode=keeps)
        picture = self._options("bilinear", mode="RGB" if self.palettes else None)
        text = (
            f"{len(looks)} of {self.tried} samples tried look like masks: {looks[0]}. State which "
            f"they are. Masks: {mask}. Pictures: {picture}"
        )
        for count, what in ((self.jpegs, "JPEG files"), (self.coloured, "images in colours")):
            if count and is_open and (self.palettes or self.grey):
                text += f". {count} are {what}, which mode P does not take: build masks apart"
        return text, mask, picture

    def _options(self, interpolation: str = "", **of_decode: str | int | None) -> Stated:
        """Return options that state a reading, as a recipe has them; with the flags if these can
        describe the whole recipe.

        Parameters
        ----------
        interpolation
            Of ops that resize; pictures keep one that is stated.
        """
        stated = {key: value for key, value in of_decode.items() if value is not None}
        ops = [op for op in self._ops if isinstance(op, Resampling) and interpolation]
        if interpolation != "nearest":
            ops = [op for op in ops if _blends(op)]
        options = [f"{key} = {json.dumps(value)} in decode" for key, value in stated.items()]
        options += [f'interpolation = "{interpolation}" in {op.op}' for op in ops]
        flags = [word for key, value in stated.items() for word in (f"--{key}", str(value))]
        flags += ["--interpolation", interpolation] * bool(ops)
        return Stated(" and ".join(options), flags if self._flags else ())

    @property
    def _bits(self) -> int | None:
        """Fewest bits of a sensor that hold all values of 16 bits; None if all 16 are used."""
        return next((bits for bits in LEAST_BITS if not self.widest[0] >> bits), None)

    def _wide_masks(self, decode: Decode) -> Iterator[Refusal]:
        """Yield the reading of masks of 16 bits, unless what becomes of their values is stated.

        The fewest bits that hold all values keep them; more bits would divide them.
        """
        states_bits, least = decode.bits is not None, LEAST_BITS[0]
        settled = states_bits and (not self._blends or decode.bits == least)  # as those of 8 bits
        if len(self.wide_masks) * MASKS < self.tried or settled:
            return
        key, values = max(self.wide_masks, key=lambda mask: len(mask[1]))
        stated = None if states_bits else self._bits or 16
        keeps = {"bits": stated} if self._bits == least else {"mode": "unchanged"}
        shown = ", ".join(map(str, values[:6])) + ", …" * (len(values) > 6)
        mask, picture = self._options("nearest", **keeps), self._options("bilinear", bits=stated)
        text = (
            f"{len(self.wide_masks)} of {self.tried} samples tried look like masks of 16 bits: "
            f"{key} has the values {shown}. State which they are. Masks: {mask}. Pictures: "
            f"{picture}"
        )
        yield text, mask, picture

    def _narrow(self) -> Iterator[Refusal]:
        """Yield the reading of 16 bits of which few are used."""
        bits, (most, key) = self._bits, self.widest
        if bits and most:
            few, all_16 = self._options(bits=bits), self._options(bits=16)
            unchanged = self._options(mode="unchanged")
            text = (
                f"{self.wide} of {self.tried} samples tried have 16 bits, and values up to {most} "
                f"alone ({key}), as of {bits} bits. Decoded as 16 bits they become 0 to "
                f"{most >> 8}; state which they are. {bits} bits: {few}. 16 bits: {all_16}. To "
                f"keep all values: {unchanged}"
            )
            yield text, few, all_16, unchanged


class _Frames:
    """Evidence on one mask beside its image, a key and a pair for each sample.

    Attributes
    ----------
    unlike
        The mask does not lie on the image.
    turned
        EXIF turns the image alone, and the mask may lie on it either way.
    scaled
        The mask has another resolution.
    apart
        Ops take other parts for the mask than for the image.
    """

    def __init__(self, name: str, frames: MaskFrames) -> None:
        self.name, self._frames, self.tried = name, frames, 0
        self.unlike, self.turned, self.scaled, self.apart = (
            list[tuple[str, Pair]]() for _ in range(4)
        )

    def look(self, pair: Pair, key: str) -> None:
        """Add a sample."""
        self.tried += 1
        if not pair.fits:
            self.unlike.append((key, pair))
            return
        is_open = not pair.decodes[1].states("orientation")
        if is_open and pair.is_turned and pair.fits_as_stored:
            self.turned.append((key, pair))
        if pair.sizes[0] != pair.sizes[1]:
            self.scaled.append((key, pair))
        if self._frames.are_apart(pair):
            self.apart.append((key, pair))

    def refusals(self) -> Iterator[Refusal]:
        """Yield the readings that refuse a build, with their ways out in words."""
        if MASKS * len(self.unlike) >= self.tried:
            yield (self._unlike(),)
        if MASKS * len(self.turned) >= self.tried:
            yield (self._turned(),)

    def notes(self) -> Iterator[str]:
        """Yield a line for each finding."""
        if self.unlike:
            yield self._unlike()
        if self.turned:
            yield self._turned()
        if self.scaled:
            what = "have masks of another resolution than their images, which are taken to"
            yield self._some(self.scaled, f"{what} show the same scene")
        if self.apart:
            what = f"show another part of the scene than in {self.apart[0][1].image}"
            yield f"{self._some(self.apart, what)}; give both fields the same resize and crop"

    def _some(self, some: list[tuple[str, Pair]], what: str) -> str:
        key, pair = some[0]
        return f"{len(some)} of {self.tried} samples tried {what}: {key} has {pair}"

    def _unlike(self) -> str:
        what = "have masks that do not lie on their images, and are bad"
        text, image = self._some(self.unlike, what), self.unlike[0][1].image
        if all(pair.fits_as_stored for _, pair in self.unlike):
            stored = f"{_STORED} in decode of {image}"
            return f"{text}. If masks lie on photos as these are stored: {stored}"
        return f"{text}. Pair the files that belong together, or bring them to one height and width"

    def _turned(self) -> str:
        text = self._some(self.turned, "have images that EXIF turns, without their masks")
        return (
            f"{text}. State in decode of {self.turned[0][1].image} which masks these are. Drawn on "
            f'upright photos: orientation = "exif". Drawn on photos as they are stored: {_STORED}'
        )


class _Places:
    """Evidence on one field of boxes or keypoints, a key and a text for each sample.

    Attributes
    ----------
    tried
        Samples that have boxes, or keypoints other than 0, 0, as those without a label are.
    fractions
        All coordinates are from 0 to 1.
    turned
        EXIF turns the picture, and boxes or keypoints may be drawn on it either way.
    outside
        Some box or keypoint reaches outside of the picture.
    """

    def __init__(self, name: str, kind: str, recipe: FieldRecipe) -> None:
        self.name, self._kind, self._recipe = name, kind, recipe
        self.tried, self._picture = 0, ""
        self.fractions, self.turned, self.outside = (list[str]() for _ in range(3))

    def look(self, sample: Sample, key: str) -> None:
        """Add a sample."""
        boxes, data, decode = self._recipe.unmoved(sample, key)
        if self._kind == "keypoints":
            boxes = boxes.reshape(-1, boxes.shape[-1])[:, :2]
            boxes = boxes[boxes.any(1)]
        if not len(boxes):
            return
        frame, self._picture = frame_of(data, decode), self._recipe.picture
        width, height = frame.decoded(decode)
        self.tried += 1
        far = np.maximum(-boxes[:, :2].min(1), (boxes[:, -2:] - [width, height]).max(1))
        if float(boxes.max()) <= 1:
            self.fractions.append(f"{key} has {boxes[0].tolist()}")
        if float(far.max()) > 1:
            text = f"{key} has {boxes[far.argmax()].tolist()} in {width} x {height} px"
            self.outside.append(text)
        if frame.orientation != 1 and not decode.states("orientation"):
            self.turned.append(f"{key} has EXIF orientation {frame.orientation}")

    def refusals(self) -> Iterator[Refusal]:
        """Yield the readings that refuse a build, with their ways out."""
        if self.tried and len(self.fractions) == self.tried:
            text = self._some(self.fractions, f"have {self._kind} of 0 to 1, as fractions are")
            yield (f"{text}. They are pixels: multiply x by the width and y by the height",)
        if self.turned and MASKS * len(self.turned) >= self.tried:
            yield (self._turned(),)

    def notes(self) -> Iterator[str]:
        """Yield a line for each finding."""
        if self.turned:
            yield self._turned()
        if self.outside:
            clipped = ", and are clipped" if self._kind == "boxes" else ""
            text = f"have {self._kind} that reach outside of their pictures{clipped}"
            yield self._some(self.outside, text)

    def _some(self, some: list[str], what: str) -> str:
        return f"{len(some)} of {self.tried} samples tried {what}: {some[0]}"

    def _turned(self) -> str:
        text = self._some(self.turned, "have pictures that EXIF turns")
        return (
            f"{text}. State in decode of {self._picture} on which pixels {self._kind} were drawn. "
            f'Upright photos: orientation = "exif". Photos as they are stored: {_STORED}'
        )


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
