"""`info`: a summary of a version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from precache.messages import aligned, as_text, first_ones, hole_lines, statistics_text
from precache.recipe.recipe import Recipe
from precache.recipe.variants import variants_text
from precache.storage.open import StorageOptions
from precache.store.open import open_version
from precache.store.version import FieldInfo, Version
from precache.units import size


@dataclass(frozen=True)
class VersionInfo:
    """Summary of a version.

    Attributes
    ----------
    version, path
        The version's id and folder.
    rows
        Number of rows, holes included.
    holes
        (key, reason) of every hole, all of which ``--json`` has; the text lists the first ten.
    labels
        Kind of the labels: class numbers, numbers, or multi-hot; empty where unknown.
    fields
        Row shape, dtype, codec and bytes by field.
    mean, std
        By image field, statistics of each channel in stored units.
    libraries
        Versions of the libraries that decide the pixels.
    """

    version: str
    path: str
    rows: int
    holes: tuple[tuple[str, str], ...]
    fields: Mapping[str, FieldInfo]
    classes: tuple[str, ...]
    mean: Mapping[str, list[float]]
    std: Mapping[str, list[float]]
    recipe: Recipe
    libraries: Mapping[str, str]
    labels: str = ""

    def facts(self) -> list[tuple[str, str]]:
        """Return names and values, for people."""
        rows = [
            ("version", self.version),
            ("path", self.path),
            ("rows", f"{self.rows:,}, {len(self.holes):,} of them holes"),
            *((name, _field_text(field)) for name, field in self.fields.items()),
            *([("labels", self.labels)] if self.labels else []),
            *statistics_text(self.mean, self.std),
        ]
        if self.classes:
            rows.append((f"{len(self.classes)} classes", first_ones(self.classes)))
        for name, recipe in self.recipe.fields.items():
            rows.append((f"{name} recipe", " → ".join(map(str, recipe.ops))))
        libraries = ", ".join(f"{name} {number}" for name, number in self.libraries.items())
        return rows + ([("libraries", libraries)] if libraries else [])

    def __str__(self) -> str:
        return as_text([*aligned(self.facts()), *hole_lines(self.holes)])


def _alike(version: Version, name: str, field: FieldInfo) -> FieldInfo:
    """Return a field with the shape of its rows if all that are stored one by one have one."""
    if not field.ragged or field.kind is not None:
        return field
    shapes = np.concatenate([version.row_shapes(array) for array in version.variants(name)])
    shapes = np.unique(shapes[shapes.any(axis=1)], axis=0)
    return replace(field, shape=(*shapes[0].tolist(),), ragged=False) if len(shapes) == 1 else field


LOSSES = {"raw420": " (lossy)", "jpeg": " (lossy where no file was kept)"}
"""By codec."""


def _field_text(field: FieldInfo) -> str:
    ratio = field.raw_nbytes / max(1, field.stored_nbytes)
    several = f"variants {variants_text(field)} of " if field.variants > 1 else ""
    return (
        f"{several}{field.row.described(field.kind)}, codec {field.codec}"
        f"{LOSSES.get(field.codec, '')}, "
        f"{size(field.raw_nbytes)} raw, {size(field.stored_nbytes)} stored: ratio {ratio:.2f}"
    )


def info(store: str | os.PathLike[str], storage_options: StorageOptions = None) -> VersionInfo:
    """Summarise a version: fields, rows, holes, classes, statistics and recipe.

    Parameters
    ----------
    store
        A store, or ``STORE@prefix`` for a version; path or URL.
    storage_options
        As `open` takes them.

    Raises
    ------
    StoreError
        There is no such version.
    """
    return summarize(open_version(store, storage_options))


def summarize(version: Version) -> VersionInfo:
    """Summarise an open version."""
    attributes = version.attributes
    return VersionInfo(
        version=version.id,
        path=version.path,
        rows=version.rows,
        holes=tuple((key, hole.reason) for key, hole in version.holes.values()),
        fields={name: _alike(version, name, f) for name, f in version.fields.items()},
        classes=tuple(version.classes),
        mean=version.mean,
        std=version.std,
        recipe=version.recipe,
        libraries=attributes.libraries,
        labels=attributes.label_kind,
    )
