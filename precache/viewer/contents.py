"""What stands in the pages about a store: its rows, and the originals they were made from."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Sequence
from urllib.parse import quote, urlencode

import numpy as np

from precache.errors import PrecacheError, UsageError
from precache.html.png import as_picture, encode_png, in_words
from precache.recipe.ops import Function
from precache.recipe.recipe import Field
from precache.storage.open import StorageOptions
from precache.units import size
from precache.viewer.facts import facts_of
from precache.viewer.pages import (
    LISTED,
    Card,
    Count,
    Grid,
    Link,
    Picture,
    VersionFacts,
    grid_page,
    sample_page,
)
from precache.viewer.search import Catalogue, Found, Query
from precache.viewer.source_trace import OpResult, Originals, Trace, media_type, parameters

MOST = 1000
"""Samples of a page."""

RAW_INSIDE = 2 << 20
"""Bytes of a raw file up to which it is put into a static page."""

Address = Callable[[str, Callable[[], bytes], str], str]
"""The ``src`` of a picture, from its URL, its bytes and their media type."""


class Pages:
    """Pages about a version.

    Parameters
    ----------
    originals
        The source, where it was given.
    count
        Samples of a page.
    """

    def __init__(
        self, store: str, catalogue: Catalogue, originals: Originals | None, count: int
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._originals = originals
        self._count = count
        self._declared = catalogue.version.recipe.fields

    @functools.cached_property
    def facts(self) -> VersionFacts:
        return facts_of(self._store, self._catalogue)

    # --- pages ----------------------------------------------------------------------------------

    def grid(
        self, query: Query, start: int = 0, *, before: bool = False, static: bool = False
    ) -> str:
        """HTML of the rows that a query finds from `start` on, or right before it."""
        found, error = Found([], 0, 0, None, None), ""
        try:
            found = self._catalogue.find(query, start, self._count, before=before)
        except UsageError as refused:
            if static:
                raise
            error = str(refused)
        version = self._catalogue.version
        holes = version.hole_rows[:LISTED].tolist()
        grid = Grid(
            self.facts,
            query,
            self._cards(found.rows, static),
            [Count(*each) for each in self._catalogue.counts],
            [(row, version.keys[row], self._catalogue.hole(row)) for row in holes],
            _links(query, found, start),
            _in_words(found, version.rows),
            self._note(),
            error,
            self._originals is not None,
        )
        return grid_page(grid, static=static)

    def _note(self) -> str:
        if self._originals is None:
            return (
                "Only what is stored is shown. With --source, raw files and the results of each op "
                "stand beside it."
            )
        if self._originals.trouble:
            return f"Raw files stand beside what is stored; {self._originals.trouble}."
        return "Results of ops are computed from the raw files as they are today."

    def _cards(self, rows: Sequence[int], static: bool) -> list[Card]:
        whole = [row for row in rows if not self._catalogue.hole(row)]
        read = dict(zip(whole, self._catalogue.read(whole) if whole else [], strict=True))
        address = _inside if static else _at("")
        # Of a hole nobody knows in advance how far its ops come.
        return [
            self._card(
                row, self._by_array(read.get(row, {})), address, traced=static or row not in read
            )
            for row in rows
        ]

    def _by_array(self, read: dict[str, np.ndarray] | str) -> dict[str, np.ndarray] | str:
        if isinstance(read, str):
            return read
        return {self._shown_array(name): values for name, values in read.items()}

    def _shown_array(self, name: str) -> str:
        """Of a field with variants: the one that is held against its original."""
        return self._catalogue.version.array_at(name, 0)

    def sample(self, row: int) -> str:
        """HTML of all there is about one row."""
        last = self._catalogue.version.rows - 1
        self._catalogue.key(row)
        stored = {} if self._catalogue.hole(row) else self._catalogue.variants(row)
        card = self._card(row, stored, _at("../"), traced=True)
        neighbours = (("Previous row", row - 1, "prev"), ("Next row", row + 1, "next"))
        links = [(text, str(to), rel) for text, to, rel in neighbours if 0 <= to <= last]
        return sample_page(self.facts, card, links)

    def _card(
        self, row: int, stored: dict[str, np.ndarray] | str, address: Address, *, traced: bool
    ) -> Card:
        """Of one row, by array; `traced` where what becomes of its original is known before it is
        drawn."""
        key = self._catalogue.key(row)
        problems = [stored] if isinstance(stored, str) else []
        arrays = {} if isinstance(stored, str) else stored
        pictures: list[Picture] = []
        trace = Trace()
        if self._originals is not None and traced:
            trace = self._originals.trace(key)
            problems += [trace.note] if trace.note else []
            pictures += [] if trace.raw is None else [_raw(row, key, trace.raw, address)]
        elif self._originals is not None and self._originals.shows_file(key):
            pictures.append(Picture("raw", f"raw/{row}", f"Raw file of {key}"))
        promised = not traced and self._originals is not None and not self._originals.trouble
        numbers = []
        for name, field in self._declared.items():
            pictures += _promised(row, key, name, field) if promised else []
            for number, step in enumerate(trace.steps.get(name, [])):
                pictures.append(_step(step, row, key, name, number, address))
            computed = trace.results.get(name)
            for array in self._catalogue.version.variants(name):
                if array not in arrays:
                    continue
                told = ""
                if computed is not None and array == self._shown_array(name):
                    told = _compared(computed, arrays[array])
                picture = _stored(row, key, array, arrays[array], told, address)
                if picture is not None:
                    pictures.append(picture)
                else:
                    numbers.append((_called(array), _joined(in_words(arrays[array]), told)))
        label = self._catalogue.class_name(self._catalogue.label(row))
        return Card(row, key, label, self._catalogue.hole(row), problems, pictures, numbers)

    # --- images ---------------------------------------------------------------------------------

    def stored_png(self, row: int, name: str) -> bytes:
        """A stored row of an array as a PNG file."""
        self._catalogue.key(row)
        stored = self._catalogue.variants(row)
        if isinstance(stored, str):
            raise PrecacheError(stored)
        shown = as_picture(stored[name]) if name in stored else None
        if shown is None:
            raise UsageError(f"there is no image {name!r} in row {row}")
        return encode_png(shown.pixels)

    def raw(self, row: int) -> tuple[bytes, str]:
        """A raw file and its media type."""
        trace = self._trace(row)
        media = media_type(trace.raw or b"")
        if trace.raw is None or media is None:
            raise UsageError(trace.note or f"row {row} has no raw file that a browser shows")
        return trace.raw, media

    def step_png(self, row: int, name: str, number: int) -> bytes:
        """What an op leaves as a PNG file."""
        trace = self._trace(row)
        steps = trace.steps.get(name, [])
        step = steps[number] if number < len(steps) else None
        if step is None or step.shown is None:
            raise UsageError(trace.note or (step.note if step else f"there is no step {number}"))
        return encode_png(step.shown.pixels)

    def _trace(self, row: int) -> Trace:
        key = self._catalogue.key(row)
        if self._originals is None:
            raise UsageError("no source is given; give --source")
        return self._originals.trace(key)


def open_pages(
    store: str,
    source: str | None = None,
    count: int = 24,
    storage_options: StorageOptions = None,
    functions: bool = False,
) -> Pages:
    """Pages about a store.

    Parameters
    ----------
    source
        What it was built from; None for the stored rows alone.
    count
        Samples of a page.
    storage_options
        Of the store and of the source.
    functions
        Whether functions that the store's recipe names are run.

    Raises
    ------
    StoreError, SourceError
        There is no such store, or no such source.
    UsageError
        `count` is no number of samples.
    """
    if not 1 <= count <= MOST:
        raise UsageError(f"rows is {count}; give 1 to {MOST} samples a page")
    catalogue = Catalogue(store, storage_options)
    originals = None
    if source is not None:
        recipe = catalogue.version.recipe
        originals = Originals(source, recipe, storage_options, functions)
    return Pages(store, catalogue, originals, count)


# --- pictures -----------------------------------------------------------------------------------


def _inside(url: str, data: Callable[[], bytes], media: str) -> str:
    return f"data:{media};base64,{base64.b64encode(data()).decode()}"


def _at(root: str) -> Address:
    return lambda url, data, media: root + url


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _called(array: str) -> str:
    """An array in words."""
    name, dot, number = array.partition(".")
    return f"{name}, variant {number}" if dot else name


def _promised(row: int, key: str, name: str, field: Field) -> list[Picture]:
    """What the ops leave of an image, which is computed when it is asked for."""
    pictures = []
    for number, op in enumerate(field.ops if field.decodes else ()):
        if isinstance(op, Function):
            pictures.append(Picture(op.op, note=f"{op.function}: on the page of the row"))
            break
        source = f"step/{row}/{quote(name)}/{number}.png"
        pictures.append(Picture(op.op, source, f"{name} of {key} after {op.op}", parameters(op)))
    return pictures


def _stored(
    row: int, key: str, name: str, array: np.ndarray, told: str, address: Address
) -> Picture | None:
    shown = as_picture(array)
    if shown is None:
        return None
    url = f"stored/{row}/{quote(name)}.png"
    height, width, _ = shown.pixels.shape
    return Picture(
        f"stored {_called(name)}",
        address(url, lambda: encode_png(shown.pixels), "image/png"),
        f"Stored {_called(name)} of {key}",
        _joined(f"{width} x {height}, {array.dtype.name}", shown.note, told),
        (width, height),
    )


def _raw(row: int, key: str, data: bytes, address: Address) -> Picture:
    media = media_type(data)
    if media is None:
        return Picture("raw", note=f"{size(len(data))}, of a kind that browsers do not show")
    if address is _inside and len(data) > RAW_INSIDE:
        return Picture("raw", note=f"{size(len(data))}, too much to be put into this page")
    source = address(f"raw/{row}", lambda: data, media)
    return Picture("raw", source, f"Raw file of {key}", f"{size(len(data))}, {media}")


def _step(step: OpResult, row: int, key: str, name: str, number: int, address: Address) -> Picture:
    shown = step.shown
    if shown is None:
        return Picture(step.op, note=step.note)
    url = f"step/{row}/{quote(name)}/{number}.png"
    height, width, _ = shown.pixels.shape
    return Picture(
        step.op,
        address(url, lambda: encode_png(shown.pixels), "image/png"),
        f"{name} of {key} after {step.op}",
        step.note,
        (width, height),
    )


def _compared(computed: np.ndarray, stored: np.ndarray) -> str:
    """How a row that was computed again differs from the stored one."""
    if computed.shape != stored.shape or computed.dtype != stored.dtype:
        was = f"{stored.dtype.name} {stored.shape}"
        return f"computed again it is {computed.dtype.name} {computed.shape}, stored is {was}"
    if np.array_equal(computed, stored, equal_nan=computed.dtype.kind == "f"):
        return "bit for bit what the ops make of the raw file"
    apart = np.abs(computed.astype(np.float64) - stored.astype(np.float64))
    return (
        f"not what the ops make of the raw file: they differ by {apart.mean():.3g} on average, "
        f"{apart.max():.3g} at most; the file or a library changed since the build"
    )


# --- links --------------------------------------------------------------------------------------


def _links(query: Query, found: Found, start: int) -> list[Link]:
    asked = {"q": query.text, "match": query.match, "class": query.label, "rows": query.state}
    asked = {name: value for name, value in asked.items() if value != _DEFAULTS[name]}
    links: list[Link] = []
    if found.earlier is not None:
        links.append(("First page", f"?{urlencode(asked)}", ""))
        links.append(("Previous page", _to(asked, "before", found.earlier), "prev"))
    if found.later is not None:
        words = "Search on" if found.cut else "Next page"
        links.append((words, _to(asked, "from", found.later), "next"))
    return links


_DEFAULTS = {"q": "", "match": "begins", "class": "", "rows": "all"}


def _to(asked: dict[str, str], name: str, row: int) -> str:
    return "?" + urlencode({**asked, name: str(row)})


def _in_words(found: Found, rows: int) -> str:
    """How many rows were found, and where."""
    if not found.rows:
        words = f"No row from {found.first:,} to {max(found.first, found.stop - 1):,} fits"
    else:
        first, last = found.rows[0], found.rows[-1]
        span = f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"
        words = f"{len(found.rows)} found: {span}"
    words += f", of {rows:,}."
    if found.cut:
        words += " The search stopped here, having read two million keys."
    return words
