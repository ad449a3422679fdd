"""Cards of single samples: the raw file, the result of each op, and what is stored."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np

from precache.html.png import Preview, array_summary, as_picture, downsample, encode_png
from precache.recipe.ops import Function
from precache.recipe.recipe import Field
from precache.units import size
from precache.viewer.search import Catalogue
from precache.viewer.source_trace import OpResult, SourceTracer, Trace, media_type, parameters

EMBEDDED_RAW_BYTES = 64 << 10
"""Largest raw file that is embedded in a static page."""

EMBEDDED_SIDE = 128
"""Longer side in pixels of other pictures in a static page; larger ones are reduced."""

Address = Callable[[str, Callable[[], bytes], str], str]
"""Returns the ``src`` of a picture from its URL, its bytes and their media type."""


@dataclass(frozen=True)
class Picture:
    """One image of a sample.

    Attributes
    ----------
    title, note
        Name of the image; its size, and what was done to its values.
    source
        URL or ``data:`` URL; empty if there is only the note.
    alt
        Text alternative.
    size
        (width, height) in pixels, where known.
    """

    title: str
    source: str = ""
    alt: str = ""
    note: str = ""
    size: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Card:
    """One sample: its images, other fields as (name, text), and its problems."""

    row: int
    key: str
    label: str = ""
    hole: str = ""
    problems: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    numbers: Sequence[tuple[str, str]] = ()


def embedded(url: str, data: Callable[[], bytes], media: str) -> str:
    """Address of a picture in a static page: the picture itself."""
    return f"data:{media};base64,{base64.b64encode(data()).decode()}"


def below(root: str) -> Address:
    """Addresses of pictures that the server computes on request."""
    return lambda url, data, media: root + url


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
        self._fields = catalogue.version.recipe.fields

    def page(self, rows: Sequence[int], *, static: bool) -> list[Card]:
        """Return the cards of a page of rows, as epoch 0 reads them."""
        valid = [row for row in rows if not self._catalogue.hole(row)]
        stored = dict(zip(valid, self._catalogue.read(valid) if valid else [], strict=True))
        address = embedded if static else below("")
        # It is not known in advance which op of a hole fails, so its ops run now.
        return [
            self._card(
                row,
                self._by_array(stored.get(row, {})),
                address,
                traced=static or row not in stored,
            )
            for row in rows
        ]

    def single(self, row: int) -> Card:
        """Return the card of one row with all variants of its fields."""
        stored = {} if self._catalogue.hole(row) else self._catalogue.variants(row)
        return self._card(row, stored, below("../"), traced=True)

    def _by_array(self, stored: dict[str, np.ndarray] | str) -> dict[str, np.ndarray] | str:
        if isinstance(stored, str):
            return stored
        return {self._traced_array(name): values for name, values in stored.items()}

    def _traced_array(self, name: str) -> str:
        """Name of the array whose rows are compared with the source: the variant of epoch 0."""
        return self._catalogue.version.array_at(name, 0)

    def _card(
        self, row: int, stored: dict[str, np.ndarray] | str, address: Address, *, traced: bool
    ) -> Card:
        """Make the card of a row from its arrays, or from the reason why they cannot be read.

        With `traced` the ops run now; otherwise the server runs them when a picture is requested.
        """
        key = self._catalogue.key(row)
        problems = [stored] if isinstance(stored, str) else []
        arrays = {} if isinstance(stored, str) else stored
        pictures: list[Picture] = []
        trace = Trace()
        if self._tracer is not None and traced:
            trace = self._tracer.trace(key)
            problems += [trace.note] if trace.note else []
            pictures += [] if trace.raw is None else [_raw_picture(row, key, trace.raw, address)]
        elif self._tracer is not None and self._tracer.shows_file(key):
            pictures.append(Picture("raw", f"raw/{row}", f"Raw file of {key}"))
        deferred = not traced and self._tracer is not None and not self._tracer.ops_problem
        numbers = []
        for name, field in self._fields.items():
            pictures += _deferred_pictures(row, key, name, field) if deferred else []
            for number, step in enumerate(trace.steps.get(name, [])):
                pictures.append(_step_picture(step, row, key, name, number, address))
            computed = trace.results.get(name)
            for array in self._catalogue.version.variants(name):
                if array not in arrays:
                    continue
                comparison = ""
                if computed is not None and array == self._traced_array(name):
                    comparison = _compare(computed, arrays[array])
                picture = _stored_picture(row, key, array, arrays[array], comparison, address)
                if picture is not None:
                    pictures.append(picture)
                else:
                    text = _join(array_summary(arrays[array]), comparison)
                    numbers.append((_array_title(array), text))
        label = self._catalogue.label(row)
        return Card(
            row=row,
            key=key,
            label=label,
            hole=self._catalogue.hole(row),
            problems=problems,
            pictures=pictures,
            numbers=numbers,
        )


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _array_title(array: str) -> str:
    name, dot, number = array.partition(".")
    return f"{name}, variant {number}" if dot else name


def _deferred_pictures(row: int, key: str, name: str, field: Field) -> list[Picture]:
    """Pictures of an image field's op results, which the server computes on request."""
    pictures = []
    for number, op in enumerate(field.ops if field.decodes else ()):
        if isinstance(op, Function):
            pictures.append(Picture(op.op, note=f"{op.function}: see the page of the row"))
            break
        source = f"step/{row}/{quote(name)}/{number}.png"
        pictures.append(Picture(op.op, source, f"{name} of {key} after {op.op}", parameters(op)))
    return pictures


def _stored_picture(
    row: int, key: str, name: str, array: np.ndarray, comparison: str, address: Address
) -> Picture | None:
    preview = as_picture(array)
    if preview is None:
        return None
    height, width, _ = preview.pixels.shape
    return _picture(
        f"stored {_array_title(name)}",
        f"stored/{row}/{quote(name)}.png",
        f"Stored {_array_title(name)} of {key}",
        _join(f"{width} x {height}, {array.dtype.name}", preview.note, comparison),
        preview,
        address,
    )


def _picture(
    title: str, url: str, alt: str, note: str, preview: Preview, address: Address
) -> Picture:
    """Make a picture of an array; in a static page a reduced one."""
    if address is embedded:
        preview = downsample(preview, EMBEDDED_SIDE)
    height, width, _ = preview.pixels.shape
    source = address(url, lambda: encode_png(preview.pixels), "image/png")
    return Picture(title, source, alt, note, (width, height))


def _raw_picture(row: int, key: str, data: bytes, address: Address) -> Picture:
    media = media_type(data)
    if media is None:
        return Picture("raw", note=f"{size(len(data))}, in a format that browsers do not show")
    if address is embedded and len(data) > EMBEDDED_RAW_BYTES:
        return Picture("raw", note=f"{size(len(data))}, too large to embed in this page")
    source = address(f"raw/{row}", lambda: data, media)
    return Picture("raw", source, f"Raw file of {key}", f"{size(len(data))}, {media}")


def _step_picture(
    step: OpResult, row: int, key: str, name: str, number: int, address: Address
) -> Picture:
    preview = step.preview
    if preview is None:
        return Picture(step.op, note=step.note)
    url = f"step/{row}/{quote(name)}/{number}.png"
    return _picture(step.op, url, f"{name} of {key} after {step.op}", step.note, preview, address)


def _compare(computed: np.ndarray, stored: np.ndarray) -> str:
    """Compare a row computed from the raw file now with the stored one."""
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
