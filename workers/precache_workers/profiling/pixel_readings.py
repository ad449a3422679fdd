"""Readings of pixels: samples that suggest another meaning than the defaults of a recipe's ops.

Masks and images of 12 bits are stored in files like those of pictures, and masks may not lie on
their images. Where two readings give other pixels, and the recipe does not state which it means,
the build is refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image

from precache.recipe.ops import Decode, Op, Resampling
from precache.recipe.recipe import Field
from precache_workers.ops.decoding import PictureFacts, decode, frame_of, is_turned, picture_facts
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.ops.mask_frames import MaskFrames
from precache_workers.profiling.questions import FieldQuestion, Stated, Verdict, is_often
from precache_workers.sources.base import Sample

FEW_VALUES, PIXELS_A_VALUE = 32, 8
"""Values of an array that is a mask whatever its edges are, at most, and least pixels that half of
them cover each. Drawings have values at edges that cover few pixels."""

MOST_FRACTION = 1.5
"""Coordinates that are fractions, at most: those of boxes that reach beyond their image."""

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

NEARLY_ALL, NEAR, MOST_LEVELS = 0.95, 8, 4
"""A picture of a lossy format is a mask if so many of its pixels are near to one of so few
values."""

LEAST_BITS = (8, 10, 12, 14)
"""Bits of sensors, in files of 16 bits."""

_STORED = 'orientation = "stored"'


def readings(
    fields: Mapping[str, Field], recipes: Mapping[str, FieldRecipe]
) -> list[FieldQuestion]:
    """Return the questions about fields, by name, without variants."""
    flags, frames = [*fields] == ["image"], MaskFrames(fields, recipes)
    return [
        *(Frames(mask, image, frames) for mask, image in frames.pairs),
        *(
            Coordinates(name, field.kind, recipes[name])
            if field.kind in ("boxes", "keypoints")
            else Pixels(name, field, recipes[name], flags)
            for name, field in fields.items()
        ),
    ]


class Pixels(FieldQuestion):
    """Tells pixels of pictures, of masks, and of 12 bits in 16 apart.

    Evidence is of files: ``jpeg``; others in colours (``coloured``), with pixels that are not
    opaque (``transparent``), with more frames (``animated``), of 16 bits (``wide``); of images that
    were opened, of which EXIF says that they are not upright (``opened``). And of masks:
    ``palette`` of few values; ``blended`` by an op, of which some are grey images of 8 bits
    (``grey``), or of many values in colours, as drawings are (``drawn``); ``noisy``, in a file that
    does not keep values, such as a JPEG.
    """

    def __init__(self, name: str, field: Field, recipe: FieldRecipe, flags: bool) -> None:
        """Parameters are those of the field; `flags` can describe the whole recipe."""
        super().__init__(name)
        self._ops, self._recipe, self._flags = field.ops, recipe, flags
        self._decode = field.decode
        self._blends = any(map(_blends, self._ops))
        self._widest = 0, ""
        self._lossy = set[str]()

    def evidence(self, key: str, sample: Sample) -> Iterator[tuple[str, str]]:
        self.tried += 1
        file = sample.files.get(self._recipe.part(sample), key)
        data, facts = self._recipe.input(sample), PictureFacts()
        if self._decode is not None:
            if isinstance(data, bytes | bytearray | memoryview) and bytes(data[:2]) == b"\xff\xd8":
                # A JPEG: no palette, at most 12 bits, and no values that are exact.
                yield "jpeg", file
                yield from self._of_lossy(file, data, "JPEG")
                return
            facts = picture_facts(data, self._decode)
            stated = self._decode.states("orientation")
            if isinstance(data, Image.Image) and not stated and is_turned(data):
                yield "opened", file
            if facts.lossy:
                yield from self._of_lossy(file, data, facts.lossy)
        of_file = {
            "coloured": facts.mode in COLOURED,
            "transparent": facts.transparent,
            "animated": facts.animated,
            "wide": facts.widest is not None,
        }
        yield from ((name, file) for name, is_so in of_file.items() if is_so)
        if facts.widest is not None:
            self._widest = max(self._widest, (facts.widest, file))
            if not mask_values(decode(data, Decode(mode="unchanged"))):
                return  # a picture may have few values in the bits that are kept
        yield from self._of_masks(file, sample, facts)

    def _of_lossy(self, file: str, data: Any, lossy: str) -> Iterator[tuple[str, str]]:
        """Yield the evidence of a picture whose format does not keep values."""
        if levels := _levels(data):
            self._lossy.add(lossy)
            yield "noisy", f"{file} has nearly all pixels near {levels}"

    def _of_masks(
        self, file: str, sample: Sample, facts: PictureFacts
    ) -> Iterator[tuple[str, str]]:
        """Yield evidence of values that the ops do not keep."""
        is_palette = facts.mode in ("P", "PA")
        if not is_palette and not self._blends:
            return
        before = np.empty(0)
        for op, value in self._recipe.steps(sample, file):
            array = np.asarray(value)
            if isinstance(op, Decode) and is_palette and not op.states("mode"):
                values = mask_values(array)
                if values and not op.keeps_values:
                    yield "palette", f"{file} is a palette image of {values}"
            if op is not None and _blends(op) and not np.array_equal(before, array):
                values = mask_values(before)
                if values and values != ONE_VALUE:
                    yield "blended", f"{file} has {values}, which {op.op} blends"
                    if facts.mode == "L":
                        yield "grey", file
                    coloured = facts.mode in COLOURED or (not facts.mode and before.shape[-1] > 2)
                    if coloured and values == MANY_VALUES:
                        yield "drawn", file
                    return
            before = np.array(array)

    def verdicts(self) -> Iterator[Verdict]:
        decode = self._decode
        states = decode is None or decode.keeps_values or decode.bits is not None
        if self.seen["wide"] and not states:
            yield self._of_16_bits()
        if self.seen["blended"] or self.seen["palette"]:
            yield self._looks_like_masks()
        if decode is None:
            return
        resized = [op for op in self._ops if isinstance(op, Resampling)]
        is_mask = self._blends or all(op.interpolation == "nearest" for op in resized)
        if is_mask and self.often("noisy"):
            nearest, bilinear = (self._options(way) for way in ("nearest", "bilinear"))
            formats = " and ".join(sorted(self._lossy))
            what = f"look like masks in {formats} files, which do not keep values"
            yield Verdict(
                f"{self.said('noisy', what)}. Masks: "
                + f"{nearest}, and " * self._blends
                + "round the values behind the loader"
                + f". Pictures: {bilinear}" * self._blends
            )
        if self.seen["transparent"] and not decode.states("mode"):
            what = "have transparent pixels, which get the colours stored beneath"
            keeps = self._options(mode="RGBA")
            yield Verdict(f"{self.said('transparent', what)}. To keep alpha: {keeps}")
        if self.seen["opened"]:
            what = "are images that a dataset has opened, which EXIF would turn: stored as they are"
            yield Verdict(
                f"{self.said('opened', what)}. To turn them: PIL.ImageOps.exif_transpose in the "
                f"dataset, or return the bytes of files. Else state {_STORED} in decode"
            )
        if self.seen["animated"]:
            text = self.said("animated", "are animated, and their first frame is stored")
            yield Verdict(f"{text}. A function in place of decode can read others")

    def _of_16_bits(self) -> Verdict:
        """Return the readings of 16 bits: the fewest that hold all values, all, or the values."""
        most, file = self._widest
        least = next((bits for bits in LEAST_BITS if not most >> bits), 16)
        by_bits = {bits: self._options(bits=bits) for bits in (least, 16)}
        unchanged = self._options(mode="unchanged")
        text = (
            f"{len(self.seen['wide'])} of {self.tried} samples tried have 16 bits, and values up "
            f"to {most} ({file}), of which the highest 8 are kept; state how many count. "
            + "".join(f"{bits} bits: {stated}. " for bits, stated in by_bits.items())
            + f"To keep all values, as of masks: {unchanged}"
        )
        return Verdict(text, self.often("wide"), (*by_bits.values(), unchanged))

    def _looks_like_masks(self) -> Verdict:
        blended, palettes = self.seen["blended"], self.seen["palette"]
        is_open = self._decode is not None and not self._decode.states("mode")
        by_mode = is_open and (palettes or len(self.seen["grey"]) == len(blended))
        others = {"JPEG files": self.seen["jpeg"], "images in colours": self.seen["coloured"]}
        keeps = ("RGB" if palettes else None) if any(others.values()) else "P"
        mask = self._options("nearest", mode=keeps if by_mode else None)
        picture = self._options("bilinear", mode="RGB" if palettes else None)
        looks = max("blended", "palette", key=lambda name: len(self.seen[name]))
        verdict = _either(self.said(looks, "look like masks"), mask, picture)
        text = verdict.text + "".join(
            f". {len(some)} are {what}, which mode P does not take: build masks apart"
            for what, some in others.items()
            if some and by_mode
        )
        masks = max(len(blended) - len(self.seen["drawn"]), len(palettes))
        return verdict._replace(text=text, refused=is_often(masks, self.tried))

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


def _either(text: str, mask: Stated, picture: Stated) -> Verdict:
    if mask == picture:
        return Verdict(
            f"{text}. State that their pixels are as they should be: {mask}", True, (mask,)
        )
    text += f". State which they are. Masks: {mask}. Pictures: {picture}"
    return Verdict(text, True, (mask, picture))


class Frames(FieldQuestion):
    """Tells masks that lie on their images from others.

    Evidence: the mask does not lie on its image (``unlike``; ``as stored`` if it lies on the
    image's stored pixels); EXIF turns the image alone, and the mask may lie on it either way
    (``turned``); the mask has another resolution (``scaled``); ops take other parts of both
    (``apart``), or draw crops in two sizes (``cropped``).
    """

    def __init__(self, name: str, image: str, frames: MaskFrames) -> None:
        super().__init__(name)
        self._image, self._frames = image, frames

    def evidence(self, key: str, sample: Sample) -> Iterator[tuple[str, str]]:
        for pair in (each for each in self._frames.of(sample) if each.mask == self.name):
            self.tried += 1
            text = f"{', '.join(sample.files.values()) or key} has {pair}"
            if not pair.fits:
                yield "unlike", text
                if pair.fits_as_stored:
                    yield "as stored", text
                return
            is_open = not pair.decodes[1].states("orientation")
            if is_open and pair.is_turned and pair.fits_as_stored:
                yield "turned", text
            if pair.sizes[0] != pair.sizes[1]:
                yield "scaled", text
            if self._frames.are_apart(pair):
                yield "apart", text
            if not self._frames.are_cropped_alike(pair):
                yield "cropped", text

    def verdicts(self) -> Iterator[Verdict]:
        if unlike := self.seen["unlike"]:
            text = self.said("unlike", "have masks that do not lie on their images, and are bad")
            way = "Pair the files that belong together, or bring them to one height and width"
            if len(self.seen["as stored"]) == len(unlike):
                way = f"If masks lie on photos as these are stored: {_STORED} in decode of "
                way += self._image
            yield Verdict(f"{text}. {way}", self.often("unlike"))
        if self.seen["turned"]:
            text = self.said("turned", "have images that EXIF turns, without their masks")
            yield Verdict(
                f"{text}. State in decode of {self._image} which masks these are. Drawn on upright "
                f'photos: orientation = "exif". Drawn on photos as they are stored: {_STORED}',
                self.often("turned"),
            )
        if self.seen["scaled"]:
            what = "have masks of another resolution than their images, which are taken to show the"
            yield Verdict(self.said("scaled", f"{what} same scene"))
        if self.seen["apart"]:
            what = f"show another part of the scene than in {self._image}"
            text = self.said("apart", what)
            yield Verdict(f"{text}; give both fields the same resize and crop")
        if self.seen["cropped"]:
            what = "have masks of another size than their images where random_resized_crop draws"
            yield Verdict(
                f"{self.said('cropped', f'{what}, and are bad')}. Bring both to one height and "
                "width before it, as by size = [224, 224] in a resize of both",
                self.often("cropped"),
            )


class Coordinates(FieldQuestion):
    """Tells boxes and keypoints in pixels of their decoded pictures from others.

    Samples without boxes, or with keypoints at 0, 0 alone, as those without a label are, do not
    count. Evidence: no coordinate is much above 1 (``fractions``); EXIF turns the picture, and they
    may be drawn on it either way (``turned``); some reach outside of the picture (``outside``).
    """

    def __init__(self, name: str, kind: str, recipe: FieldRecipe) -> None:
        super().__init__(name)
        self._kind, self._recipe = kind, recipe

    def evidence(self, key: str, sample: Sample) -> Iterator[tuple[str, str]]:
        boxes, data, decode = self._recipe.unmoved(sample, key)
        if self._kind == "keypoints":
            boxes = boxes.reshape(-1, boxes.shape[-1])[:, :2]
            boxes = boxes[boxes.any(1)]
        if not len(boxes):
            return
        frame = frame_of(data, decode)
        width, height = frame.decoded(decode)
        self.tried += 1
        far = np.maximum(-boxes[:, :2].min(1), (boxes[:, -2:] - [width, height]).max(1))
        # A point may lie on pixel 1, 1; no box ends there.
        if float(boxes.max()) <= MOST_FRACTION and (self._kind == "boxes" or (boxes % 1).any()):
            yield "fractions", f"{key} has {boxes[0].tolist()}"
        if float(far.max()) > 1:
            yield "outside", f"{key} has {boxes[far.argmax()].tolist()} in {width} x {height} px"
        if frame.orientation != 1 and not decode.states("orientation"):
            yield "turned", f"{key} has EXIF orientation {frame.orientation}"

    def verdicts(self) -> Iterator[Verdict]:
        if self.seen["fractions"]:
            text = self.said("fractions", f"have {self._kind} of 0 to 1, as fractions are")
            way = "They are pixels: multiply x by the width and y by the height"
            yield Verdict(f"{text}. {way}", self.often("fractions"))
        if self.seen["turned"]:
            text = self.said("turned", "have pictures that EXIF turns")
            yield Verdict(
                f"{text}. State in decode of {self._recipe.picture} on which pixels {self._kind} "
                'were drawn. Upright photos: orientation = "exif". Photos as they are stored: '
                f"{_STORED}",
                self.often("turned"),
            )
        if self.seen["outside"]:
            clipped = ", and are clipped" * (self._kind == "boxes")
            what = f"have {self._kind} that reach outside of their pictures{clipped}"
            yield Verdict(self.said("outside", what))


def _levels(data: Any) -> str:
    """Return the values that nearly all pixels of a picture are near to, if they are few as a
    mask's, where its format does not keep values.

    Of 160 photographs none is so; a mask of class numbers is dark all over.
    """
    image = data
    if not isinstance(data, Image.Image):
        image = Image.open(io.BytesIO(data))
        image.draft("L", (PART // 2, PART // 2))  # an eighth of a large JPEG is decoded
    counts, levels = np.array(image.convert("L").histogram(), np.float64), list[int]()
    used = counts.nonzero()[0]
    if len(used) > 1 and used[-1] < FEW_VALUES:
        return f"0 to {used[-1]}"
    least = (1 - NEARLY_ALL) * counts.sum()
    while counts.sum() > least and len(levels) <= MOST_LEVELS:
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


ONE_VALUE = "1 values"


def mask_values(array: np.ndarray) -> str:
    """Say how many values, or colours, an array (H, W, C) or (H, W) has; empty if it is no mask."""
    if array.ndim not in (2, 3) or not array.size or array.dtype.kind not in "buif":
        return ""
    sparse = _counts(array[:: max(1, len(array) // 16)])  # spares a look at all of it
    counts = _counts(array) if sparse else []
    if counts and np.median(counts) >= PIXELS_A_VALUE:
        return f"{len(counts)} values"
    return MANY_VALUES if array.dtype.kind != "b" and _has_sharp_areas(array) else ""


def _counts(array: np.ndarray) -> list[int]:
    """Count the pixels of each value, or colour, of an array; empty if there are too many."""
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype == np.uint8 and channels in (1, 3, 4):
        pixels = array.reshape(array.shape[:2]) if channels == 1 else array
        colours = Image.fromarray(np.ascontiguousarray(pixels)).getcolors(FEW_VALUES)
        return [count for count, _ in colours or ()]
    counts: list[int] = np.unique(array, return_counts=True)[1].tolist()
    return counts if len(counts) <= FEW_VALUES else []


def _has_sharp_areas(array: np.ndarray) -> bool:
    """Return whether an array (H, W, C) or (H, W) of more than `FEW_VALUES` values is a mask."""
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
