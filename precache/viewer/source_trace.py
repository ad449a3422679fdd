"""Trace a sample from its source: fetch the raw file and run the recipe's ops on it again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from precache.errors import FetchError, PrecacheError, SampleError, SourceError, needs
from precache.html.png import Preview, downsample, preview
from precache.messages import shown
from precache.recipe.ops import Function, Op, Operation
from precache.recipe.recipe import Field, Follow, JpegCodec, Recipe
from precache.recipe.variants import variant_at
from precache.storage.open import StorageOptions
from precache.store.shard_writer import jpeg_of

if TYPE_CHECKING:
    from precache_workers.ops.field_recipe import FieldRecipe
    from precache_workers.sources.base import Sample, SampleName

SIDE = 1024
"""Longer side of a picture in pixels; larger ones are downsampled."""

_MEDIA = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


OpResult = tuple[str, Preview]
"""Name of an op, and its result, noted with the op's parameters; or why it has none."""


@dataclass(frozen=True)
class Trace:
    """A raw sample and the results of the ops on it.

    Attributes
    ----------
    raw
        The sample's file; None if the sample is not a file.
    note
        Why there is no file, or why no op was run.
    steps
        Field -> result of each op, up to the first that fails or may not be run.
    results
        Field -> final row as its codec keeps it, for fields whose ops all ran.
    """

    raw: bytes | None = None
    note: str = ""
    steps: Mapping[str, list[OpResult]] = field(default_factory=dict)
    results: Mapping[str, np.ndarray] = field(default_factory=dict)


def media_type(data: bytes) -> str | None:
    """Return the media type of an image by its first bytes; None if browsers do not show it."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((media for magic, media in _MEDIA.items() if data.startswith(magic)), None)


def parameters(op: Operation) -> str:
    """Format the parameters of an op that are not the defaults; sizes as height x width."""
    if isinstance(op, Follow):
        return " and ".join(op.names)
    values = op.model_dump(exclude_defaults=True, exclude={"op"})
    return ", ".join(f"{name}={_value(value)}" for name, value in values.items())


def _value(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


class SourceTracer:
    """Traces samples of a version's source, which the store does not record. Thread-safe.

    Parameters
    ----------
    source
        The source as given to `precache.build`: a folder, a URL, or ``python:module:factory``.
    source_kind, columns
        As `precache.build` takes them; columns by ``image``, ``label`` and ``key``.
    functions
        Import and run functions that the recipe names. The store names them, and it may come from
        a stranger.

    Raises
    ------
    SourceError
        There is no such source.
    """

    def __init__(
        self,
        source: str,
        recipe: Recipe,
        storage_options: StorageOptions = None,
        functions: bool = False,
        source_kind: str | None = None,
        columns: Mapping[str, str | None] = MappingProxyType({}),
        sample_name: SampleName | None = None,
    ) -> None:
        from precache_workers.sources.base import Columns, Inputs
        from precache_workers.sources.folder import FolderSource
        from precache_workers.sources.kinds import open_source

        self._source = open_source(
            source,
            storage_options,
            kind=source_kind,
            columns=Columns(**columns, inputs=Inputs.of(recipe)),
            sample_name=sample_name,
        )
        if isinstance(self._source, FolderSource) and self._source.folder.kind() != "folder":
            raise SourceError(
                f"--source {shown(source)} is not a folder; give the source of the store"
            )
        self._recipe = recipe
        self._functions = functions
        self._lock = threading.Lock()

    @functools.cached_property
    def _recipes(self) -> dict[str, tuple[FieldRecipe, str]]:
        """Field -> its ops, and why the last ones are left out."""
        from precache_workers.ops.field_recipe import FieldRecipe

        recipes = {}
        for name, declared in self._recipe.fields.items():
            ops, note = self._allowed(declared)
            variant = variant_at(0, declared.first_variant, declared.variants)  # as the pages show
            changes = {"ops": ops, "variants": 1, "first_variant": variant}
            recipe = FieldRecipe(name, declared.model_copy(update=changes), self._recipe.seed)
            recipes[name] = recipe, note
        return recipes

    def _allowed(self, declared: Field) -> tuple[tuple[Op, ...], str]:
        for number, op in enumerate(declared.ops):
            if isinstance(op, Function) and not self._functions:
                note = f"{op.function} is not run; if you trust it, give --run-functions"
                return declared.ops[:number], note
        return declared.ops, ""

    @functools.cached_property
    def ops_problem(self) -> str:
        """Why no op can be run here; empty if they can."""
        try:
            with needs("running the ops"):
                _ = self._recipes
        except PrecacheError as error:
            return f"the ops are not run: {error}"
        return ""

    def trace(self, key: str) -> Trace:
        """Fetch a sample and run the ops on it."""
        with self._lock:  # the recipes decode into buffers that they reuse
            return self._trace(key)

    def _trace(self, key: str) -> Trace:
        [fetched] = self._source.fetch([key], [-1])
        if isinstance(fetched, FetchError | SampleError):
            return Trace(note=f"the raw sample could not be fetched: {fetched}")
        raw = next((v for v in fetched.inputs.values() if isinstance(v, bytes)), None)
        if self.ops_problem:
            return Trace(raw, self.ops_problem)
        steps, results = {}, {}
        for name, (recipe, note) in self._recipes.items():
            steps[name], result = _run_ops(recipe, fetched, key)
            if note:
                steps[name].append(("function", Preview(None, note)))
            elif result is not None:
                codec = self._recipe.fields[name].stored_as
                if isinstance(codec, JpegCodec):
                    _, result = jpeg_of(result, recipe.input(fetched), codec.quality)
                results[name] = result
        return Trace(raw, "", steps, results)


def _run_ops(
    recipe: FieldRecipe, sample: Sample, key: str
) -> tuple[list[OpResult], np.ndarray | None]:
    """Run the ops; returns the result of each, and the final row unless one fails."""
    steps: list[OpResult] = []
    value: Any = None
    try:
        for op, value in recipe.steps(sample, key):
            if op is not None:
                shown_value = value if isinstance(value, str | bytes) else np.asarray(value)
                shown = preview(shown_value, channels_last=True, kind=recipe.kind)
                steps.append(_op_result(op, shown))
        return steps, recipe.row(value).copy()
    except SampleError as error:
        steps.append(("failed", Preview(None, str(error))))
    except Exception as error:  # decoders raise anything on a hostile file
        steps.append(("failed", Preview(None, f"{type(error).__name__}: {error}")))
    return steps, None


def _op_result(op: Op, result: Preview) -> OpResult:
    values = parameters(op)
    note = f"{values}: {result.note}" if values else result.note
    if result.pixels is None:
        return op.op, Preview(None, note)
    pixels = downsample(result.pixels, SIDE)
    note += "; shown reduced" if pixels.shape != result.pixels.shape else ""
    return op.op, Preview(pixels.copy(), note)  # the next sample overwrites the buffer
