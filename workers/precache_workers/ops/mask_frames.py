"""Frames of images that are columns of one sample, and show one scene.

A mask that is neither as large as its image, upright, nor the same at another scale, does not lie
on it: it belongs to another photo, or was drawn before EXIF turned that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from precache.recipe.ops import Decode, Op, RandomResizedCrop
from precache.recipe.recipe import Field, crop_pairs, mask_pairs
from precache_workers.ops.decoding import Frame, frame_of
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.sources.base import Sample

EDGE = 1.0
"""Pixels of a row by which the parts that two fields take may differ, by rounding."""


class Pair(NamedTuple):
    """The frames of a mask and of its image in one sample."""

    mask: str
    image: str
    of_mask: Frame
    of_image: Frame
    decodes: tuple[Decode, Decode]

    @property
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Width and height of both as they are decoded."""
        of_mask, of_image = self.decodes
        return self.of_mask.decoded(of_mask), self.of_image.decoded(of_image)

    @property
    def fits(self) -> bool:
        return _alike(*self.sizes)

    @property
    def fits_as_stored(self) -> bool:
        """True if the mask fits the image as its file stores it."""
        return _alike(self.sizes[0], self.of_image[:2])

    @property
    def is_turned(self) -> bool:
        """True if EXIF turns the image alone."""
        return self.of_image.orientation not in (self.of_mask.orientation, 1)

    def __str__(self) -> str:
        (width, height), (others, rows) = self.sizes
        turned = self.is_turned and self.decodes[1].orientation == "exif"
        by_exif = f", turned by EXIF orientation {self.of_image.orientation}" if turned else ""
        return (
            f"{width} x {height} px in {self.mask}, and {others} x {rows} in {self.image}{by_exif}"
        )


class MaskFrames:
    """The fields of a recipe that are masks, with the image that each lies on: the first other.

    Parameters
    ----------
    fields, recipes
        By name, or by array of a variant.

    Attributes
    ----------
    pairs
        Each mask with its image.
    compares
        True if a sample may have frames that are no frames of one scene.
    """

    def __init__(self, fields: Mapping[str, Field], recipes: Mapping[str, FieldRecipe]) -> None:
        self._fields, self._recipes = fields, recipes
        self.pairs, self._cropped = mask_pairs(fields), crop_pairs(fields)
        self.compares = bool(self.pairs or self._cropped)

    def of(self, sample: Sample) -> Iterator[Pair]:
        """Yield the masks that come from another part of a sample than their image."""
        return self._frames(sample, self.pairs)

    def _frames(self, sample: Sample, pairs: Sequence[tuple[str, str]]) -> Iterator[Pair]:
        for mask, image in pairs:
            with contextlib.suppress(Exception):  # the ops say why it cannot be decoded
                data, other = (self._recipes[name].input(sample) for name in (mask, image))
                if data is not other:
                    decodes = self._recipes[mask].decode, self._recipes[image].decode
                    frames = frame_of(data, decodes[0]), frame_of(other, decodes[1])
                    yield Pair(mask, image, *frames, decodes)

    def fault(self, sample: Sample) -> str:
        """Return the reason why a sample has no row, as a mask does not lie on its image, or one
        draw would be crops of two sizes."""
        files = f" ({', '.join(sample.files.values())})" if sample.files else ""
        for pair in self.of(sample):
            if not pair.fits:
                return f"its mask does not lie on its image{files}: {pair}"
        for pair in self._frames(sample, self._cropped):
            if not self.are_cropped_alike(pair):
                return (
                    f"one draw of random_resized_crop is another part of images of two sizes{files}"
                    f": {pair}; bring both to one height and width before it, as by "
                    "size = [224, 224] in a resize of both"
                )
        return ""

    def unlike(self, shapes: Mapping[str, Sequence[int] | None]) -> str:
        """Return the reason why a sample has no row, as a mask has not the size of its image.

        Parameters
        ----------
        shapes
            (C, H, W) of its rows, of fields whose rows have shapes of their own.
        """
        for mask, image in self.pairs:
            of_mask, of_image = shapes.get(mask), shapes.get(image)
            if of_mask and of_image and (*of_mask[1:],) != (*of_image[1:],):
                (_, rows, others), (_, height, width) = of_mask, of_image
                return (
                    f"its mask has not the size of its image: {others} x {rows} px in {mask}, and "
                    f"{width} x {height} in {image}; bring both to one height and width, as by "
                    "size = [224, 224] in the resize of both"
                )
        return ""

    def are_cropped_alike(self, pair: Pair) -> bool:
        """Return False if a crop is drawn in two sizes: one draw is another part in each."""
        (position, shape), (other, others) = (
            _drawn_in(self._fields[name].ops, *size)
            for name, size in zip((pair.mask, pair.image), pair.sizes, strict=True)
        )
        return position != other or None in (shape, others) or shape == others

    def are_apart(self, pair: Pair) -> bool:
        """Return True if ops take other parts of the scene for a mask than for its image."""
        mask, image = (
            _part(self._fields[name].ops, *size)
            for name, size in zip((pair.mask, pair.image), pair.sizes, strict=True)
        )
        return mask is not None and image is not None and bool(np.abs(mask - image).max() > EDGE)


def _alike(size: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True for sizes that are equal but for scale, up to a pixel."""
    return abs(size[0] * other[1] - size[1] * other[0]) <= max(*size, *other)


def _drawn_in(ops: tuple[Op, ...], width: int, height: int) -> tuple[int, tuple[int, int] | None]:
    """Return the position of an op that draws a crop, and height and width in which it does; None
    if a function decides on these, or no op draws one."""
    shape: tuple[int, int] | None = (height, width)
    for position, op in enumerate(ops):
        if isinstance(op, RandomResizedCrop):
            return position, shape
        shape = shape and op.size_after(*shape)
    return len(ops), None


def _part(ops: tuple[Op, ...], width: int, height: int) -> np.ndarray | None:
    """Return the part that ops take, in pixels of the row: top, left, bottom and right.

    None if they draw it, or a function may.
    """
    box, shape = np.array([0.0, 0.0, 1.0, 1.0]), (height, width)
    for op in ops:
        after, part = op.size_after(*shape), op.part(*shape)
        if after is None:
            return None
        if part is not None:
            scale = (box[2:] - box[:2]) / shape
            ends = np.array([[side.start, side.stop] for side in part]).T
            box = (box[:2] + scale * ends).reshape(-1)
        shape = after
    return box * min(shape)
