"""Variants of a field: what their arrays are called, and which of them an epoch reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np


class HasVariants(Protocol):
    """A field as it is declared, or as it is stored."""

    @property
    def variants(self) -> int: ...
    @property
    def first_variant(self) -> int: ...


def arrays_of(name: str, field: HasVariants) -> dict[str, int]:
    """Name of each stored array of a field -> number of its variant."""
    if field.variants == 1:
        return {name: field.first_variant}
    numbers = range(field.first_variant, field.first_variant + field.variants)
    return {f"{name}.{number}": number for number in numbers}


def field_of(array: str) -> str:
    """The field that a stored array is of: `image` for ``image.4``."""
    return array.partition(".")[0]


def variant_at(epoch: int, first: int, variants: int) -> int:
    """Number of the variant that an epoch reads, of those from `first` on: the one that is `epoch`
    modulo `variants`.

    A fresh one is read by the next epoch that would have read the one whose place it takes.
    """
    return first + (epoch - first) % variants


def variants_text(field: HasVariants) -> str:
    """Numbers of a field's variants, as ``2 to 4``."""
    return f"{field.first_variant} to {field.first_variant + field.variants - 1}"


def variants_of(arrays: Iterable[str]) -> dict[str, list[str]]:
    """Field -> its arrays, by number; those of a version's metadata, which may be forged."""
    found: dict[str, list[str]] = {}
    for array in arrays:
        found.setdefault(field_of(array), []).append(array)
    return {name: sorted(each, key=number_of) for name, each in found.items()}


def number_of(array: str) -> int:
    """Number of the variant that an array holds; 0 where its field has no others."""
    return int(array.partition(".")[2] or 0)


def pooled(
    mean: Mapping[str, Sequence[float]], std: Mapping[str, Sequence[float]]
) -> dict[str, tuple[list[float], list[float]]]:
    """Mean and standard deviation by field, from those of its arrays, which weigh the same."""
    found = {}
    for name, arrays in variants_of(array for array in mean if array in std).items():
        means, stds = (np.array([each[array] for array in arrays]) for each in (mean, std))
        if len(arrays) == 1:
            found[name] = list(mean[arrays[0]]), list(std[arrays[0]])
            continue
        average = means.mean(0)
        squares = (stds**2 + means**2).mean(0)
        found[name] = average.tolist(), np.sqrt(np.maximum(squares - average**2, 0)).tolist()
    return found
