"""How far an earlier version has made the rows of a field, by the ops that made them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from precache.errors import RecipeError
from precache.recipe.ops import CenterCrop, Op
from precache.recipe.recipe import Field, Recipe
from precache.recipe.variants import field_of
from precache.store.documents import Attributes, FieldAttributes
from precache.store.layout import RowShape
from precache_workers.ops.identity import ops_digest


@dataclass(frozen=True)
class FieldMatch:
    """How far an earlier version has made the rows of an array.

    Attributes
    ----------
    array
        Name of the array that it has them in.
    applied
        Ops of the field that made its rows.
    finished
        Whether these are all.
    encoded
        Whether its codec is the field's, too: chunks can be copied.
    shape
        Of its rows.
    """

    array: str
    applied: int
    finished: bool
    encoded: bool
    shape: RowShape


def made_of(recipe: Recipe, attributes: Attributes) -> dict[str, FieldMatch]:
    """Fields of a recipe of which an earlier version has rows, made all the way or part of it."""
    try:
        before = Recipe.from_dict(attributes.pipeline).by_array().fields
    except RecipeError:
        return {}
    found = {}
    there = {n: old for n, old in attributes.fields.items() if old.recipe and n in before}
    for name, declared in recipe.fields.items():
        old = {array: there[array] for array in _alike(name, declared) if array in there}
        found[name] = _made(recipe, name, old, before) if old else None
    return {name: made for name, made in found.items() if made is not None}


def _made(
    recipe: Recipe,
    name: str,
    old: Mapping[str, FieldAttributes],
    before: Mapping[str, Field],
) -> FieldMatch | None:
    """The array that has most of a field's ops applied, and how many these are."""
    declared = recipe.fields[name]
    every = len(declared.ops)
    # What a field without ops stores need not be what ops would have been given.
    for count in range(every, 0, -1) or [0]:
        digest = ops_digest(recipe, name, count)
        for array, each in old.items():
            wider = _with_wider_crop(recipe, name, count, before[array].ops)
            if each.recipe == digest:
                applied = count
            elif wider is not None and each.recipe == ops_digest(wider, name, count):
                applied = count - 1  # the middle of the middle
            else:
                continue
            finished = applied == every
            encoded = finished and declared.stored_as == before[array].stored_as
            return FieldMatch(array, applied, finished, encoded, RowShape(each.shape, each.dtype))
    return None


def _with_wider_crop(recipe: Recipe, name: str, count: int, before: Sequence[Op]) -> Recipe | None:
    """The recipe whose op number `count` crops as that of an array's, which ends with it.

    None unless the same pixels come of both crops, one after the other, as of the recipe's alone:
    where the sides differ by multiples of four, however the margins are rounded.
    """
    field = recipe.fields[name]
    if not 0 < count == len(before):
        return None
    own, wide = field.ops[count - 1], before[-1]
    if not (isinstance(own, CenterCrop) and isinstance(wide, CenterCrop)):
        return None
    if any(
        less > more or (more - less) % 4 for less, more in zip(own.size, wide.size, strict=True)
    ):
        return None
    ops = (*field.ops[: count - 1], wide, *field.ops[count:])
    fields = {**recipe.fields, name: field.model_copy(update={"ops": ops})}
    return recipe.model_copy(update={"fields": fields})


def _alike(name: str, field: Field) -> tuple[str, ...]:
    """Names that the rows of an array may have in a version with fewer or more variants."""
    plain = field_of(name)
    return name, plain, f"{plain}.{field.first_variant}"
