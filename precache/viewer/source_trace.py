"""Raw samples beside their rows: fetched from the source, and the recipe's ops applied again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from precache.errors import FetchError, PrecacheError, SampleError, SourceError
from precache.html.png import Shown, as_picture, in_words, thinned
from precache.messages import shown
from precache.recipe.ops import Function, Op
from precache.recipe.recipe import Field, Recipe
from precache.recipe.variants import variant_at
from precache.storage.open import StorageOptions

if TYPE_CHECKING:
    from precache_workers.ops.field_recipe import FieldRecipe
    from precache_workers.sources.base import Fetched, Sample

SIDE = 1024
"""Pixels of a picture's longer side, above which only some are shown."""

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif")
"""Of files that browsers show."""

TRACES = 16
"""Samples kept, for the pictures that a browser asks for one by one."""

_MEDIA = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


@dataclass(frozen=True)
class OpResult:
    """What one op leaves.

    Attributes
    ----------
    op
        Its name.
    shown
        As a picture, where it is one.
    note
        The op's parameters and what shape and dtype it leaves; why there is none, where it failed.
    """

    op: str
    shown: Shown | None
    note: str


@dataclass(frozen=True)
class Trace:
    """A raw sample and what the ops make of it.

    Attributes
    ----------
    raw
        The sample's file, where it is one.
    note
        Why there is none, or why no op is applied to it.
    steps
        Field -> what each op leaves, until one fails or may not be run.
    results
        Field -> the row that comes of it, where all ops were applied.
    """

    raw: bytes | None = None
    note: str = ""
    steps: Mapping[str, list[OpResult]] = field(default_factory=dict)
    results: Mapping[str, np.ndarray] = field(default_factory=dict)


def media_type(data: bytes) -> str | None:
    """Of an image that browsers show, by its first bytes; None for all else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((media for magic, media in _MEDIA.items() if data.startswith(magic)), None)


def parameters(op: Op) -> str:
    """An op's parameters that are not their defaults; sizes as height x width."""
    given = op.model_dump(exclude_defaults=True, exclude={"op"})
    return ", ".join(f"{name}={_value(value)}" for name, value in given.items())


def _value(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


class Originals:
    """The source of a version, which the store does not record. Safe to use from several threads.

    Parameters
    ----------
    source
        What `precache.build` was given: a folder, a URL, or ``python:module:factory``.
    functions
        Whether functions that the recipe names are imported and run: they are named by the store,
        which may be a stranger's.

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
    ) -> None:
        from precache_workers.sources.base import FolderSource, open_source

        self._source = open_source(source, storage_options)
        self._folder = isinstance(self._source, FolderSource)
        if isinstance(self._source, FolderSource) and self._source.folder.kind() != "folder":
            raise SourceError(
                f"--source {shown(source)} is no folder; give the one that the store was built from"
            )
        self._recipe = recipe
        self._functions = functions
        self._lock = threading.Lock()
        self._kept = functools.lru_cache(maxsize=TRACES)(self._trace)

    @functools.cached_property
    def _recipes(self) -> dict[str, tuple[FieldRecipe, str]]:
        """Field -> its ops, and why those that are left out are."""
        from precache_workers.ops.field_recipe import FieldRecipe

        made = {}
        for name, each in self._recipe.fields.items():
            ops, note = self._allowed(each)
            # The variant that the pages show, which are of epoch 0.
            shown = variant_at(0, each.first_variant, each.variants)
            part = each.model_copy(update={"ops": ops, "variants": 1, "first_variant": shown})
            recipe = FieldRecipe(name, part, self._recipe.seed)
            made[name] = recipe, note
        return made

    def _allowed(self, declared: Field) -> tuple[tuple[Op, ...], str]:
        for number, op in enumerate(declared.ops):
            if isinstance(op, Function) and not self._functions:
                note = f"{op.function} is not run; if you trust it, give --run-functions"
                return declared.ops[:number], note
        return declared.ops, ""

    @functools.cached_property
    def trouble(self) -> str:
        """Why no op can be applied here; empty where they can."""
        try:
            _ = self._recipes
        except ModuleNotFoundError as error:
            return f"applying the ops needs {error.name}: pip install 'precache[workers]'"
        except PrecacheError as error:
            return f"the ops are not applied: {error}"
        return ""

    def shows_file(self, key: str) -> bool:
        """Whether a browser is likely to show a sample's file, as far as its name tells."""
        return self._folder and key.lower().endswith(SUFFIXES)

    def trace(self, key: str) -> Trace:
        """The sample of a key, and what each op makes of it."""
        with self._lock:  # the recipes decode into memory that they use again
            return self._kept(key)

    def _trace(self, key: str) -> Trace:
        fetched = self._fetch(key)
        if isinstance(fetched, FetchError | SampleError):
            return Trace(note=f"the raw sample could not be fetched: {fetched}")
        raw = next((v for v in fetched.inputs.values() if isinstance(v, bytes)), None)
        if self.trouble:
            return Trace(raw, self.trouble)
        steps, results = {}, {}
        for name, (recipe, note) in self._recipes.items():
            steps[name], result = _steps(recipe, fetched, key)
            if note:
                steps[name].append(OpResult("function", None, note))
            elif result is not None:
                results[name] = result
        return Trace(raw, "", steps, results)

    def _fetch(self, key: str) -> Fetched:
        [fetched] = self._source.fetch([key], [-1])
        return fetched


def _steps(
    recipe: FieldRecipe, sample: Sample, key: str
) -> tuple[list[OpResult], np.ndarray | None]:
    """What each op leaves, and the row, unless an op fails."""
    steps: list[OpResult] = []
    value: Any = None
    try:
        for op, value in recipe.steps(sample, key):
            if op is not None:
                steps.append(_step(op, np.asarray(value)))
        return steps, recipe.row(value).copy()
    except SampleError as error:
        steps.append(OpResult("failed", None, str(error)))
    except Exception as error:  # whatever a decoder raises on a hostile file
        steps.append(OpResult("failed", None, f"{type(error).__name__}: {error}"))
    return steps, None


def _step(op: Op, array: np.ndarray) -> OpResult:
    given = parameters(op)
    head = f"{given}: " if given else ""
    shown = as_picture(array, channels_last=True)
    if shown is None:
        return OpResult(op.op, None, head + in_words(array))
    shown = thinned(shown, SIDE)
    note = f"{head}{array.shape[1]} x {array.shape[0]}, {array.dtype.name}"
    copied = Shown(shown.pixels.copy(), shown.note)  # the next sample is decoded over it
    return OpResult(op.op, copied, f"{note}; {shown.note}" if shown.note else note)
