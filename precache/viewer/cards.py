"""Cards of single samples: the raw file, the result of each op, and what is stored."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from precache.html.png import Preview, downsample, encode_png, overlay, preview
from precache.units import size
from precache.viewer.search import Catalogue
from precache.viewer.source_trace import SourceTracer, Trace, media_type

SMALL_SIDE, LEAST_SIDE, FULL_ROWS = 128, 48, 64
"""Longer side in pixels of pictures on a page of up to `FULL_ROWS` samples; on one of more it is
smaller, so that the page is not larger, down to a least one."""
SMALL_RAW_BYTES, ALL_RAW_BYTES, RAW_BYTES = 256 << 10, 8 << 20, 16 << 20
"""Largest raw file that a page of several samples holds, all that it holds, and that of one."""


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
    """Makes the cards of a version's rows.

    Parameters
    ----------
    tracer
        The source of the version; None to show only what is stored.
    """

    def __init__(self, catalogue: Catalogue, tracer: SourceTracer | None) -> None:
        self._catalogue = catalogue
        self._tracer = tracer

    def page(self, rows: Sequence[int]) -> list[Card]:
        """Return the cards of rows as epoch 0 reads them, with small pictures."""
        valid = [row for row in rows if not self._catalogue.hole(row)]
        stored = dict(zip(valid, self._catalogue.read(valid) if valid else [], strict=True))
        side, raw = side_of(len(rows)), min(SMALL_RAW_BYTES, ALL_RAW_BYTES // max(1, len(rows)))
        return [self._card(row, stored.get(row, {}), side, raw) for row in rows]

    def single(self, row: int) -> Card:
        """Return the card of one row with all variants of its fields."""
        stored = {} if self._catalogue.hole(row) else self._catalogue.variants(row)
        return self._card(row, stored, None, RAW_BYTES)

    def _card(
        self, row: int, stored: dict[str, Any] | str, side: int | None, raw_bytes: int
    ) -> Card:
        """Make the card of a row from its arrays, or from the reason why they cannot be read."""
        key, version = self._catalogue.key(row), self._catalogue.version
        arrays, problems = ({}, [stored]) if isinstance(stored, str) else (stored, [])
        trace = self._tracer.trace(key) if self._tracer else Trace()
        problems += [trace.note] if trace.note else []
        pictures = [] if trace.raw is None else [_raw_picture(key, trace.raw, raw_bytes)]
        numbers = []
        for name in version.recipe.fields:
            for op, result in trace.steps.get(name, []):
                pictures.append(_picture(op, f"{name} of {key} after {op}", result, side))
            compared = version.array_at(name, 0)  # the variant whose ops the tracer runs
            for array in version.variants(name):
                if array not in arrays:
                    continue
                stored_row = preview(arrays[array])
                if array == compared and name in trace.results:
                    same = _compare(trace.results[name], arrays[array])
                    stored_row = replace(stored_row, note=f"{stored_row.note}; {same}")
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
        """Yield the masks of epoch 0 over the first picture of their size."""
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


def _picture(title: str, alt: str, shown: Preview, side: int | None) -> Picture:
    if shown.pixels is None:
        return Picture(title, shown.note)
    pixels = downsample(shown.pixels, side) if side else shown.pixels
    height, width, _ = pixels.shape
    return Picture(title, shown.note, _url(encode_png(pixels), "image/png"), alt, (width, height))


def _raw_picture(key: str, data: bytes, most: int) -> Picture:
    media = media_type(data)
    if media is None:
        return Picture("raw", f"{size(len(data))}, in a format that browsers do not show")
    if len(data) > most:
        return Picture(
            "raw", f"{size(len(data))}, and this page holds raw files up to {size(most)}"
        )
    note = f"{size(len(data))}, {media}"
    return Picture("raw", note, _url(data, media), f"Raw file of {key}")


def _url(data: bytes, media: str) -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def _compare(computed: np.ndarray, stored: Any) -> str:
    """Compare a row computed from the raw file now with the stored one."""
    if isinstance(stored, str | bytes):
        data = stored.encode() if isinstance(stored, str) else stored
        stored = np.frombuffer(data, np.uint8)
    if computed.shape != stored.shape or computed.dtype != stored.dtype:
        return (
            f"the ops now give {computed.dtype.name} {computed.shape}, "
            f"but {stored.dtype.name} {stored.shape} is stored"
        )
    if np.array_equal(computed, stored, equal_nan=computed.dtype.kind == "f"):
        return "bit-identical to what the ops make of the raw file"
    difference = np.abs(computed.astype(np.float64) - stored.astype(np.float64))
    return (
        f"differs from what the ops make of the raw file, by {difference.mean():.3g} on average "
        f"and {difference.max():.3g} at most: the file or a library changed since the build"
    )
