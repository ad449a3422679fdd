"""The fields of a recipe that are masks, with the image that each lies on: the first other."""

from __future__ import annotations

from collections.abc import Mapping

from precache.recipe.ops import Decode, Resampling
from precache.recipe.recipe import Field
from precache.recipe.variants import field_of


def mask_pairs(fields: Mapping[str, Field]) -> list[tuple[str, str]]:
    """Return each mask with its image, by the names of fields, or of arrays of a variant."""
    named = {field_of(name): name for name, field in fields.items() if decode_of(field)}
    masks = [name for name in named.values() if _is_mask(fields[name])]
    images = [name for name in named.values() if name not in masks] or masks
    return [(mask, images[0]) for mask in masks if mask != images[0]]


def decode_of(field: Field) -> Decode | None:
    """Return the op that decodes the pictures of a field; None if it has none."""
    first = field.ops[0] if field.ops else None
    return first if isinstance(first, Decode) else None


def _is_mask(field: Field) -> bool:
    """Return True if a field keeps values: its mode does, or no op that resizes blends them."""
    decode = decode_of(field)
    resized = [op.interpolation for op in field.ops if isinstance(op, Resampling)]
    return (decode is not None and decode.keeps_values) or {*resized} == {"nearest"}
