"""Execute the actions of rows, with one writer per field."""

from __future__ import annotations

from collections.abc import Mapping

from precache.errors import SampleError
from precache.recipe.recipe import Recipe
from precache.store.layout import RowShape
from precache.units import size
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.planning.shard_actions import Action, ShardActions
from precache_workers.shards.base_rows import BaseRows, SpoiledBaseError
from precache_workers.shards.field_writer import FieldWriter
from precache_workers.shards.reusing_writer import ReusingWriter
from precache_workers.sources.base import Sample


def field_writers(
    recipe: Recipe,
    shapes: Mapping[str, RowShape],
    rows_per_shard: int,
    *,
    ops: Mapping[str, FieldRecipe],
    actions: ShardActions,
    base: Mapping[str, BaseRows],
) -> dict[str, FieldWriter]:
    """Return a writer for each field of a shard.

    Parameters
    ----------
    ops
        Field -> its ops; empty if all objects are links.
    base
        Field -> its rows in the base version, where it has some.
    """
    writers: dict[str, FieldWriter] = {}
    for name, declared in recipe.fields.items():
        field = name, declared, shapes[name], rows_per_shard
        if name in base:
            writers[name] = ReusingWriter(
                *field,
                base=base[name],
                ops=ops.get(name),
                holes=actions.base.holes,
                reused=actions.reused,
            )
        else:
            writers[name] = FieldWriter(*field, ops=ops[name])
    return writers


def stage_rows(
    actions: Mapping[str, Action],
    writers: Mapping[str, FieldWriter],
    place: int,
    key: str = "",
    sample: Sample | None = None,
) -> str:
    """Stage a row of every field, or a run of rows from a place on, for `keep_rows` to append.

    Returns the reason where the row is a hole, else an empty text.
    """
    try:
        for name, action in actions.items():
            writers[name].stage(action, place, key, sample)
    except SampleError as error:
        return str(error)
    except SpoiledBaseError:
        raise
    except MemoryError:
        nbytes = 0 if sample is None else sample.nbytes
        return f"decoding it, of {size(nbytes)}, takes more memory than its process gets"
    except Exception as error:  # whatever a decoder raises on a hostile file concerns that file
        return f"{type(error).__name__}: {error}"
    return ""


def keep_rows(writers: Mapping[str, FieldWriter], rows: range) -> None:
    """Append to every field what was staged last."""
    for writer in writers.values():
        writer.keep(rows)
