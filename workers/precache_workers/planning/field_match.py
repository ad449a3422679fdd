"""Match the ops of a field with those that made the rows of an earlier version. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from precache.errors import RecipeError
from precache.recipe.ops import CenterCrop, Op
from precache.recipe.recipe import Field, Recipe
from precache.recipe.variants import field_of
from precache.store.json_documents import Attributes, FieldAttributes
from precache.store.layout import RowShape
from precache_workers.ops.identity import ops_digest


@dataclass(frozen=True)
class FieldMatch:
    """Ops of a field that were applied to the rows of an array of an earlier version.

    Attributes
    ----------
    array
        Name of the array.
    applied
        Number of the field's ops that were applied.
    finished
        Whether these are all ops.
    encoded
        Whether the codec is the field's, too, so that chunks can be copied.
    shape
        Shape and dtype of its rows.
    """

    array: str
    applied: int
    finished: bool
    encoded: bool
    shape: RowShape


def match_fields(recipe: Recipe, attributes: Attributes) -> dict[str, FieldMatch]:
    """Find the fields of a recipe of which an earlier version has rows, with all ops or some."""
    try:
        before = Recipe.from_dict(attributes.pipeline).by_array().fields
    except RecipeError:
        return {}
    arrays = {n: old for n, old in attributes.fields.items() if old.recipe and n in before}
    matches = {}
    for name, declared in recipe.fields.items():
        old = {array: arrays[array] for array in _array_names(name, declared) if array in arrays}
        matches[name] = _match(recipe, name, old, before) if old else None
    return {name: match for name, match in matches.items() if match is not None}


def _match(
    recipe: Recipe,
    name: str,
    old: Mapping[str, FieldAttributes],
    before: Mapping[str, Field],
) -> FieldMatch | None:
    """Find the array to which most of a field's ops were applied."""
    declared = recipe.fields[name]
    ops = len(declared.ops)
    # What a field without ops stores need not be what ops would have been given.
    for count in range(ops, 0, -1) or [0]:
        digest = ops_digest(recipe, name, count)
        for array, stored in old.items():
            wider = _with_wider_crop(recipe, name, count, before[array].ops)
            if stored.recipe == digest:
                applied = count
            elif wider is not None and stored.recipe == ops_digest(wider, name, count):
                applied = count - 1  # the crop is left to apply
            else:
                continue
            finished = applied == ops
            encoded = finished and declared.stored_as == before[array].stored_as
            shape = RowShape(stored.shape, stored.dtype)
            return FieldMatch(array, applied, finished, encoded, shape)
    return None


def _with_wider_crop(recipe: Recipe, name: str, count: int, before: Sequence[Op]) -> Recipe | None:
    """Return the recipe with the wider crop of an array as op number `count`, the array's last.

    None unless both crops, one after the other, give the same pixels as the recipe's alone: where
    the sides differ by multiples of four, however the margins are rounded.
    """
    field = recipe.fields[name]
    if not 0 < count == len(before):
        return None
    own, wide = field.ops[count - 1], before[-1]
    if not (isinstance(own, CenterCrop) and isinstance(wide, CenterCrop)):
        return None
    if any(
        side > wider or (wider - side) % 4 for side, wider in zip(own.size, wide.size, strict=True)
    ):
        return None
    ops = (*field.ops[: count - 1], wide, *field.ops[count:])
    fields = {**recipe.fields, name: field.model_copy(update={"ops": ops})}
    return recipe.model_copy(update={"fields": fields})


def _array_names(name: str, field: Field) -> tuple[str, ...]:
    """Names of the arrays that may have the same rows in a version with fewer or more variants."""
    single = field_of(name)
    return name, single, f"{single}.{field.first_variant}"
