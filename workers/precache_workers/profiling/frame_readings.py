"""Readings of frames: masks that do not lie on their images, in the samples that a build tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from precache.errors import RecipeError
from precache.recipe.recipe import Field
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.ops.mask_frames import MaskFrames, Pair
from precache_workers.sources.base import Sample

PART = 4
"""A build is refused if one sample in so many of those that are tried is read in two ways."""

_STORED = 'orientation = "stored"'


@dataclass
class _Seen:
    """Evidence on one mask, a key and a pair for each sample.

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

    tried: int = 0
    unlike: list[tuple[str, Pair]] = field(default_factory=list)
    turned: list[tuple[str, Pair]] = field(default_factory=list)
    scaled: list[tuple[str, Pair]] = field(default_factory=list)
    apart: list[tuple[str, Pair]] = field(default_factory=list)


class FrameReadings:
    """Evidence on masks beside their images; parameters as of `MaskFrames`."""

    def __init__(self, fields: Mapping[str, Field], recipes: Mapping[str, FieldRecipe]) -> None:
        self._frames = MaskFrames(fields, recipes)
        self._seen: dict[str, _Seen] = {}

    def look(self, sample: Sample, key: str) -> None:
        """Add a sample."""
        key = ", ".join(sample.files.values()) or key
        for pair in self._frames.of(sample):
            seen = self._seen.setdefault(pair.mask, _Seen())
            seen.tried += 1
            if not pair.fits:
                seen.unlike.append((key, pair))
                continue
            is_open = not pair.decodes[1].states("orientation")
            if is_open and pair.is_turned and pair.fits_as_stored:
                seen.turned.append((key, pair))
            if pair.sizes[0] != pair.sizes[1]:
                seen.scaled.append((key, pair))
            if self._frames.are_apart(pair):
                seen.apart.append((key, pair))

    def require_clear(self) -> None:
        """Raise `RecipeError` if samples suggest that masks do not lie on their images."""
        for name, seen in self._seen.items():
            if PART * len(seen.unlike) >= seen.tried:
                raise RecipeError(f"field {name}: {_unlike(seen)}")
            if PART * len(seen.turned) >= seen.tried:
                raise RecipeError(f"field {name}: {_turned(seen)}")

    def notes(self) -> tuple[str, ...]:
        """Return a line for each finding that is not refused."""
        lines = []
        for name, seen in self._seen.items():
            if seen.unlike:
                lines.append(f"{name}: {_unlike(seen)}")
            if seen.turned:
                lines.append(f"{name}: {_turned(seen)}")
            if seen.scaled:
                what = "have masks of another resolution than their images, which are taken to"
                lines.append(f"{name}: {_some(seen, seen.scaled, f'{what} show the same scene')}")
            if seen.apart:
                what = f"show another part of the scene than in {seen.apart[0][1].image}"
                way = "give both fields the same resize and crop"
                lines.append(f"{name}: {_some(seen, seen.apart, what)}; {way}")
        return tuple(lines)


def _some(seen: _Seen, some: list[tuple[str, Pair]], what: str) -> str:
    key, pair = some[0]
    return f"{len(some)} of {seen.tried} samples tried {what}: {key} has {pair}"


def _unlike(seen: _Seen) -> str:
    image = seen.unlike[0][1].image
    text = _some(seen, seen.unlike, "have masks that do not lie on their images, and are bad")
    if all(pair.fits_as_stored for _, pair in seen.unlike):
        return f"{text}. If masks lie on photos as these are stored: {_STORED} in decode of {image}"
    return f"{text}. Pair the files that belong together, or bring them to one height and width"


def _turned(seen: _Seen) -> str:
    image = seen.turned[0][1].image
    text = _some(seen, seen.turned, "have images that EXIF turns, without their masks")
    return (
        f"{text}. State in decode of {image} which masks these are. Drawn on upright photos: "
        f'orientation = "exif". Drawn on photos as they are stored: {_STORED}'
    )
