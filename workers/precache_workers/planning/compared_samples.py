"""Compare the samples of a Python dataset with those of its versions, by reading them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from precache.errors import ChoiceError, SourceError
from precache.recipe.recipe import Recipe
from precache.storage.base import Folder
from precache.store.columns import Texts
from precache.store.commit_log import short
from precache.store.row_table import RowTable
from precache_workers.planning.content_reader import ContentReader
from precache_workers.planning.source_record import listed_as, stored_tables, with_label
from precache_workers.planning.stored_versions import UNREADABLE, stored_versions
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.sources.base import Fetched, Sample, Tick
from precache_workers.sources.dataset import DatasetSource

READ_TWICE = 64
"""Samples that are read twice; a task reads those that changed again, too."""

READ_AT_ONCE = 16

SPOTS = 4
"""Samples that are read although they count as unchanged."""


@dataclass(frozen=True)
class DatasetReader(ContentReader):
    """Reads samples of a Python dataset, one after the other.

    Attributes
    ----------
    tick
        Takes the number of samples that were read.
    twice
        Read some samples twice.
    contents
        Key -> XXH3-128 (hex) of each sample that was read; empty where it could not be.
    """

    source: DatasetSource
    tick: Tick
    twice: bool
    contents: dict[str, str] = field(default_factory=dict)

    @property
    def brings_labels(self) -> bool:
        return self.source.labels_with_samples and not self.source.labels_given

    def __call__(self, table: RowTable, rows: Sequence[int]) -> list[str]:
        """Read samples.

        Raises
        ------
        SourceError
            Two reads of a sample differ.
        HangError
            A sample takes too long.
        """
        again = np.linspace(0, len(table) - 1, min(READ_TWICE, len(table)) * self.twice).astype(int)
        compared: list[str] = []
        for start in range(0, len(rows), READ_AT_ONCE):
            keys = [table.keys[row] for row in rows[start : start + READ_AT_ONCE]]
            samples = dict(zip(keys, self._fetched(keys), strict=True))
            twice = [table.keys[row] for row in {*rows[start : start + READ_AT_ONCE]} & {*again}]
            for key, sample in zip(twice, self._fetched(twice), strict=True):
                if isinstance(sample, Sample) and _facts(samples[key]) not in ("", _facts(sample)):
                    raise differs(key)
            for key, sample in samples.items():
                own = sample if isinstance(sample, Sample) else Sample({})
                self.contents[key] = own.content
                compared.append(_facts(own) if self.brings_labels else own.content)
            self.tick(start + len(keys))
        return compared

    def _fetched(self, keys: Sequence[str]) -> Sequence[Fetched]:
        if not keys:
            return ()
        return run_in_time(
            functools.partial(self.source.fetch, keys, [-1] * len(keys)), self.seconds
        )


def _facts(sample: Fetched) -> str:
    """Return content and label of a sample, -1 for none; empty if it could not be read."""
    if not isinstance(sample, Sample):
        return ""
    return with_label(sample.content, -1 if sample.label is None else sample.label)


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


def differs(key: str) -> SourceError:
    """Return the error for a sample of which two reads differ."""
    return SourceError(
        f"two reads of sample {key} gave different items, so that samples cannot be "
        "compared. Take what is random out of the dataset: random ops belong into the recipe, or "
        "behind the loader (precache.transforms); else leave out --compare, and keep one draw of "
        "each by --variants 1 (variants = 1 in each field)"
    )
