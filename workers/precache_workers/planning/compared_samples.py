"""Compare the samples of a Python dataset with those of its versions, by reading them."""

from __future__ import annotations

import numpy as np

from precache.errors import ChoiceError
from precache.recipe.recipe import Recipe
from precache.storage.base import Folder
from precache.store.columns import Texts
from precache.store.commit_log import short
from precache.store.row_table import RowTable
from precache_workers.planning.content_reader import DatasetReader
from precache_workers.planning.source_record import listed_as, stored_tables
from precache_workers.planning.stored_versions import UNREADABLE, stored_versions
from precache_workers.sources.dataset import DatasetSource

SPOTS = 4
"""Samples that are read although they count as unchanged."""


def note_of_held_data(store: Folder, source: DatasetSource, table: RowTable) -> tuple[str, ...]:
    """Return a line if what a dataset holds changed since the latest version, so that all samples
    are read."""
    latest = next(stored_versions(store, table.source), None)
    if latest is None or not table.etags[0].startswith(source.etag):
        return ()
    try:
        stored, *_ = latest.read_rows()
    except UNREADABLE:
        return ()
    before, now = ({listed_as(etag) for etag in of.etags} for of in (stored, table))
    if now <= before or not any(etag.startswith(source.etag) for etag in before):
        return ()
    line = (
        f"{source.factory}: what its attributes hold, or a file that they name, changed since "
        f"version {short(latest.folder.name)}: all {len(table):,} samples are read and compared by "
        "content, and those that are the same are not decoded again. A method fingerprint(i) of "
        "the dataset spares reading them"
    )
    return (line,)


def require_spots(store: Folder, read: DatasetReader, table: RowTable) -> None:
    """Read a few samples that count as unchanged.

    So data of another folder are seen, which the same code reads by relative paths. A sample of
    which two reads differ says nothing.

    Raises
    ------
    SourceError
        One differs from the latest version that reads the same parts of samples.
    """
    latest = next(stored_versions(store, table.source), None)
    if latest is None or _inputs(latest.attributes.recipe) != read.source.fields:
        return
    stored = next(stored_tables(store, table.source, read.brings_labels, deep=False), None)
    if stored is None:
        return
    record, contents = stored
    rows = np.unique(np.linspace(0, len(table) - 1, SPOTS).astype(int)).tolist()
    places = Texts(record["key"]).find(table.keys.take(np.array(rows)))
    etags = Texts(record["known_etag"])
    for row, place in zip(rows, places.tolist(), strict=True):
        if place < 0 or not contents[place] or etags[place] != table.etags[row]:
            continue
        first, second = (read(table, [row]) for _ in range(2))
        if first != second:
            return
        if first[0] not in ("", contents[place]):
            raise ChoiceError(
                f"sample {table.keys[row]} of {read.source.factory} is not what version "
                f"{short(latest.folder.name)} has of it, although the code is the same: its data "
                "changed, or it reads by relative paths in another folder. Build with --compare, "
                "which reads all samples, or give the dataset a method fingerprint(i)",
                ways=[("--compare",)],
            )


def _inputs(recipe: Recipe) -> tuple[tuple[str, str | int | None], ...]:
    return tuple((name, declared.input) for name, declared in recipe.fields.items())
