"""Make a row of every field, with a writer for each."""

from __future__ import annotations

from collections.abc import Mapping

from precache.errors import SampleError
from precache.units import size
from precache_workers.planning.assembly import Action
from precache_workers.shards.field_writer import FieldWriter
from precache_workers.shards.stored_rows import DamagedObjectError
from precache_workers.sources.base import Sample


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
    except DamagedObjectError:
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
