"""Match the ops of a field with those that made the rows of an earlier version. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from precache.recipe.ops import Decode
from precache.recipe.recipe import Field, Recipe
from precache.recipe.variants import field_of
from precache.store.json_documents import Attributes
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
    refuses_more
        Whether holes of the array may have rows by the field's ops.
    """

    array: str
    applied: int
    finished: bool
    encoded: bool
    shape: RowShape
    refuses_more: bool = False


def match_fields(
    recipe: Recipe, decided: Mapping[str, str], attributes: Attributes
) -> dict[str, FieldMatch]:
    """Find the fields of a recipe of which an earlier version has rows, with all ops or some.

    Parameters
    ----------
    decided
        Identities of its ops and functions, as for `ops_digest`.
    """
    before = attributes.recipe.by_array().fields
    arrays = {n: old for n, old in attributes.fields.items() if old.recipe and n in before}
    matches: dict[str, FieldMatch] = {}
    for name, declared in recipe.fields.items():
        refuses = _refuses_dim(declared)
        array_of = {
            arrays[array].recipe: array
            for array in reversed(_array_names(name, declared))
            if array in arrays and (_refuses_dim(before[array]) or not refuses)
        }
        ops = len(declared.ops)
        # What a field without ops stores need not be what ops would have been given.
        for count in (range(ops, 0, -1) or [0]) if array_of else ():
            array = array_of.get(ops_digest(recipe, name, count, decided))
            if array is not None:
                encoded = count == ops and declared.stored_as == before[array].stored_as
                more = _refuses_dim(before[array]) and not refuses
                matches[name] = FieldMatch(
                    array, count, count == ops, encoded, arrays[array].row, more
                )
                break
    return matches


def _refuses_dim(field: Field) -> bool:
    """Return True if dim images of 16 bits become holes, as the field does not state the bits."""
    first = field.ops[0] if field.ops else None
    return isinstance(first, Decode) and first.bits is None


def _array_names(name: str, field: Field) -> tuple[str, ...]:
    """Names of the arrays that may have the same rows in a version with fewer or more variants."""
    single = field_of(name)
    return name, single, f"{single}.{field.first_variant}"
