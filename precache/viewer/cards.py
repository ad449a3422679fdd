"""Cards of single samples: their stored rows as pictures and text."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache.html.png import Preview, downsample, encode_png, outline, overlay, preview
from precache.viewer.search import Catalogue

SMALL_SIDE, LEAST_SIDE, FULL_ROWS = 128, 48, 64
"""Longer side in pixels of pictures on a page of up to `FULL_ROWS` samples; on one of more it is
smaller, so that the page is not larger, down to a least one."""


def side_of(rows: int) -> int:
    """Return the longer side in pixels of the pictures on a page of so many rows."""
    return max(LEAST_SIDE, int(SMALL_SIDE * math.sqrt(FULL_ROWS / max(FULL_ROWS, rows))))


@dataclass(frozen=True)
class Picture:
    """One image of a sample.

    Attributes
    ----------
    title, note
        Name of the image; its size, and what was done to its values.
    source
        ``data:`` URL; empty if there is only the note.
    alt
        Text alternative.
    size
        (width, height) in pixels, where known.
    """

    title: str
    note: str = ""
    source: str = ""
    alt: str = ""
    size: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all but the pixels, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "source"}


@dataclass(frozen=True, kw_only=True)
class Card:
    """One sample: its images, other fields as (name, text), and its problems."""

    row: int
    key: str
    labels: Sequence[str]
    hole: str
    problems: Sequence[str]
    pictures: Sequence[Picture]
    numbers: Sequence[tuple[str, str]]


class Cards:
    """Makes the cards of a version's rows."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def page(self, rows: Sequence[int]) -> list[Card]:
        """Return the cards of rows as epoch 0 reads them, with small pictures."""
        valid = [row for row in rows if not self._catalogue.hole(row)]
        stored = dict(zip(valid, self._catalogue.read(valid) if valid else [], strict=True))
        return [self._card(row, stored.get(row, {}), side_of(len(rows))) for row in rows]

    def single(self, row: int) -> Card:
        """Return the card of one row with all variants of its fields."""
        stored = {} if self._catalogue.hole(row) else self._catalogue.variants(row)
        return self._card(row, stored, None)

    def _card(self, row: int, stored: dict[str, Any] | str, side: int | None) -> Card:
        """Make the card of a row from its arrays, or from the reason why they cannot be read."""
        key, version = self._catalogue.key(row), self._catalogue.version
        arrays, problems = ({}, [stored]) if isinstance(stored, str) else (stored, [])
        pictures, numbers = [], []
        for name in version.recipe.fields:
            for array in version.variants(name):
                if array not in arrays:
                    continue
                stored_row = preview(arrays[array], kind=version.kind(array))
                title = ", variant ".join(array.split("."))
                if stored_row.pixels is None:
                    numbers.append((title, stored_row.note))
                    continue
                alt = f"Stored {title} of {key}"
                pictures.append(_picture(f"stored {title}", alt, stored_row, side))
        pictures += self._overlays(key, arrays, side)
        return Card(
            row=row,
            key=key,
            labels=self._catalogue.labels(row),
            hole=self._catalogue.hole(row),
            problems=problems,
            pictures=pictures,
            numbers=numbers,
        )

    def _overlays(
        self, key: str, arrays: Mapping[str, np.ndarray], side: int | None
    ) -> Iterator[Picture]:
        """Yield masks of epoch 0 over the first picture of their size, and entries over theirs."""
        version, rows, masks = self._catalogue.version, dict[str, np.ndarray](), list[str]()
        for name, field in version.recipe.fields.items():
            row, kind = arrays.get(version.array_at(name, 0)), field.specs()[-1].kind
            if row is not None and kind in ("image", "mask") and row.dtype == np.uint8:
                rows[name] = row
                masks += [name] if kind == "mask" else []
        for mask in masks:
            size = rows[mask].shape[1:]
            for name in [n for n in rows if n not in masks and rows[n].shape[1:] == size][:1]:
                shown = overlay(rows[mask], rows[name])
                yield _picture(f"{mask} over {name}", f"{mask} over {name} of {key}", shown, side)
        for name, field in version.recipe.fields.items():
            entries, follow = arrays.get(version.array_at(name, 0)), field.follow
            if entries is None or follow is None or field.kind not in ("boxes", "keypoints"):
                continue
            if (picture := rows.get(of := follow.names[-1])) is not None:
                shown = outline(field.kind, entries, picture)
                yield _picture(f"{name} over {of}", f"{name} over {of} of {key}", shown, side)


def _picture(title: str, alt: str, shown: Preview, side: int | None) -> Picture:
    if shown.pixels is None:
        return Picture(title, shown.note)
    pixels = downsample(shown.pixels, side) if side else shown.pixels
    height, width, _ = pixels.shape
    url = f"data:image/png;base64,{base64.b64encode(encode_png(pixels)).decode()}"
    return Picture(title, shown.note, url, alt, (width, height))
