"""Cards of single samples: their stored rows as pictures and text."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache.html.png import downsample, encode_png, outline, overlay, preview
from precache.store.version import Version
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
        ``data:`` URL.
    alt
        Text alternative.
    size
        (width, height) in pixels.
    """

    title: str
    note: str
    source: str
    alt: str
    size: tuple[int, int]

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


def page_cards(catalogue: Catalogue, rows: Sequence[int]) -> list[Card]:
    """Return the cards of rows as epoch 0 reads them, with small pictures."""
    valid = [row for row in rows if not catalogue.hole(row)]
    stored = dict(zip(valid, catalogue.read(valid) if valid else [], strict=True))
    return [_card(catalogue, row, stored.get(row, {}), side_of(len(rows))) for row in rows]


def full_card(catalogue: Catalogue, row: int) -> Card:
    """Return the card of one row with all variants of its fields."""
    return _card(catalogue, row, {} if catalogue.hole(row) else catalogue.variants(row), None)


def _card(catalogue: Catalogue, row: int, stored: dict[str, Any] | str, side: int | None) -> Card:
    """Make the card of a row from its arrays, or from the reason why they cannot be read."""
    key, version = catalogue.key(row), catalogue.version
    arrays, problems = ({}, [stored]) if isinstance(stored, str) else (stored, [])
    pictures, numbers = [], []
    fields = version.recipe.fields
    for array in (a for name in fields for a in version.variants(name) if a in arrays):
        pixels, note = preview(arrays[array], kind=version.kind(array))
        title = ", variant ".join(array.split("."))
        if pixels is None:
            numbers.append((title, note))
        else:
            alt = f"Stored {title} of {key}"
            pictures.append(_picture(f"stored {title}", alt, pixels, note, side))
    for title, pixels, note in _overlays(version, arrays):
        pictures.append(_picture(title, f"{title} of {key}", pixels, note, side))
    return Card(
        row=row,
        key=key,
        labels=catalogue.labels(row),
        hole=catalogue.hole(row),
        problems=problems,
        pictures=pictures,
        numbers=numbers,
    )


def _overlays(
    version: Version, arrays: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield titles, pixels and notes: masks of epoch 0 over the first picture of their size, and
    entries over theirs."""
    images, masks = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, field in version.recipe.fields.items():
        row, kind = arrays.get(version.array_at(name, 0)), field.specs()[-1].kind
        if row is not None and kind in ("image", "mask") and row.dtype == np.uint8:
            (masks if kind == "mask" else images)[name] = row
    for name, mask in masks.items():
        for of in [n for n, image in images.items() if image.shape[1:] == mask.shape[1:]][:1]:
            yield f"{name} over {of}", *overlay(mask, images[of])
    for name, field in version.recipe.fields.items():
        entries, follow = arrays.get(version.array_at(name, 0)), field.follow
        if entries is None or follow is None or field.kind not in ("boxes", "keypoints"):
            continue
        if (picture := (images | masks).get(of := follow.names[-1])) is not None:
            yield f"{name} over {of}", *outline(field.kind, entries, picture)


def _picture(title: str, alt: str, pixels: np.ndarray, note: str, side: int | None) -> Picture:
    pixels = downsample(pixels, side) if side else pixels
    height, width, _ = pixels.shape
    url = f"data:image/png;base64,{base64.b64encode(encode_png(pixels)).decode()}"
    return Picture(title, note, url, alt, (width, height))
