"""Variants of a field: the names of their arrays, and the variant that an epoch reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np


class HasVariants(Protocol):
    """A field of a recipe, or of a stored version."""

    @property
    def variants(self) -> int: ...
    @property
    def first_variant(self) -> int: ...


def arrays_of(name: str, field: HasVariants) -> dict[str, int]:
    """Return the variant number of each stored array of a field, by the array's name."""
    if field.variants == 1:
        return {name: field.first_variant}
    numbers = range(field.first_variant, field.first_variant + field.variants)
    return {f"{name}.{number}": number for number in numbers}


def field_of(array: str) -> str:
    """Return the name of a stored array's field: `image` for ``image.4``."""
    return array.partition(".")[0]


def variant_at(epoch: int, first: int, variants: int) -> int:
    """Return the number of the variant that an epoch reads: the one of the `variants` numbers from
    `first` on that equals `epoch` modulo `variants`.

    A new variant is thus read in the epochs of the variant that it replaces.
    """
    return first + (epoch - first) % variants


def variants_text(field: HasVariants) -> str:
    """Format the numbers of a field's variants, as ``2 to 4``."""
    return f"{field.first_variant} to {field.first_variant + field.variants - 1}"


def variants_of(arrays: Iterable[str]) -> dict[str, list[str]]:
    """Group arrays by field, sorted by variant."""
    fields: dict[str, list[str]] = {}
    for array in arrays:
        fields.setdefault(field_of(array), []).append(array)
    return {name: sorted(variants, key=number_of) for name, variants in fields.items()}


def number_of(array: str) -> int:
    """Return the variant number in an array's name; 0 if the name has none."""
    return int(array.partition(".")[2] or 0)


def pool_statistics(
    mean: Mapping[str, Sequence[float]], std: Mapping[str, Sequence[float]]
) -> dict[str, tuple[list[float], list[float]]]:
    """Combine the mean and standard deviation of each field's arrays, with equal weights."""
    statistics = {}
    for name, arrays in variants_of(array for array in mean if array in std).items():
        means, stds = (np.array([values[array] for array in arrays]) for values in (mean, std))
        if len(arrays) == 1:
            statistics[name] = list(mean[arrays[0]]), list(std[arrays[0]])
            continue
        average = means.mean(0)
        squares = (stds**2 + means**2).mean(0)
        statistics[name] = average.tolist(), np.sqrt(np.maximum(squares - average**2, 0)).tolist()
    return statistics
