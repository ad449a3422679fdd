"""What an earlier version's shard spares the one to be made: its samples, or all of the work."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from precache.recipe.recipe import Recipe
from precache.store.array_metadata import is_summed
from precache.store.layout import RowShape
from precache_workers.planning.reuse import BaseShard


class ReusableRows:
    """Row by row of one shard, what is known of it from an earlier version.

    Parameters
    ----------
    rows
        Of the shard.
    removed
        Places of rows whose samples are no more.
    fields
        Those of the offer that can be read.
    first_row
        Number of its first row.

    Attributes
    ----------
    same
        (rows,) bool: whether the sample has the identity that it had.
    content
        XXH3-128 (hex) that each raw sample had, empty where unknown.
    holes
        Place -> why.
    complete, finished
        Whether all fields are there, and with all their ops applied.
    plain
        (rows,) bool: whether a row is what it was, and no hole.
    needs_sample
        (rows,) bool: whether a row cannot be made of what the earlier version has.
    """

    def __init__(
        self,
        recipe: Recipe,
        rows: int,
        removed: Collection[int],
        offer: BaseShard | None,
        fields: Collection[str],
        first_row: int,
    ) -> None:
        self.count = len(offer.same) if offer and fields else 0
        self.same = np.zeros(rows, np.bool_)
        self.content = [""] * rows
        self.holes: dict[int, str] = {}
        self.complete = self.finished = False
        if offer and self.count:
            self.same[: self.count] = offer.same
            self.content[: self.count] = offer.content
            self.holes = {row - first_row: why for row, why in offer.holes.items()}
            self.complete = len(fields) == len(recipe.fields)
            self.finished = self.complete and all(
                offer.fields[name].made.finished for name in fields
            )
        known = self.same & np.fromiter(map(bool, self.content), np.bool_, rows)
        self.needs_sample = ~known if self.complete else np.ones(rows, np.bool_)
        self.plain = known.copy()
        for place in self.holes:
            self.needs_sample[place] = not (self.finished and known[place])
        self.plain[[*self.holes, *removed]] = False
        self.needs_sample[list(removed)] = False


def is_linked(
    recipe: Recipe,
    shapes: Mapping[str, RowShape],
    rows: int,
    offer: BaseShard,
    removed: Collection[int],
) -> bool:
    """Whether a shard can be the earlier version's as it is, without a look at its rows.

    Parameters
    ----------
    rows
        Of the shard.
    removed
        Places of rows whose samples are no more.
    """
    fields = offer.fields
    return (
        fields.keys() == shapes.keys()
        and len(offer.same) == rows
        and all(offer.same)
        and all(known or place in removed for place, known in enumerate(offer.content))
        and all(each.made.encoded for each in fields.values())
        and all(
            each.sums or not is_summed(recipe.fields[name], shapes[name])
            for name, each in fields.items()
        )
    )
