"""Read samples while listing, for the hashes of their contents."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from precache.errors import HangError, SourceError
from precache.store.row_table import RowTable
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.sources.base import Fetched, Sample, Source, Tick
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.fetching import fetch_ahead

LINE_EVERY = 10.0
"""Seconds between two lines about the progress."""

READ_TWICE = 64
"""Samples of a dataset that are read twice; a task reads those that changed again, too."""


@dataclass(frozen=True)
class ContentReader:
    """Reads samples of a source.

    Calling it returns what is compared of samples, by rows; empty for those that cannot be read.

    Attributes
    ----------
    seconds
        Time limit of a sample.
    say
        Prints a line.
    """

    source: Source
    seconds: float
    say: Callable[[str], None]

    @property
    def brings_labels(self) -> bool:
        """True if labels come with samples, and are part of what is compared."""
        return False

    def __call__(self, table: RowTable, rows: Sequence[int]) -> list[str]:
        """Return the contents of rows of a listing.

        All that are left are empty if one hangs, which the build will find out.
        """
        found, said = dict[int, str](), time.monotonic()

        def read() -> None:
            nonlocal said
            for row, sample in self._fetched(table, rows):
                found[row] = sample.content if isinstance(sample, Sample) else ""
                if time.monotonic() - said >= LINE_EVERY:
                    said = time.monotonic()
                    self.say(f"{len(found):,} of {len(rows):,} samples read")

        with contextlib.suppress(HangError):
            run_in_time(read, self.seconds)
        return [found.get(row, "") for row in rows]

    def _fetched(self, table: RowTable, rows: Sequence[int]) -> Iterator[tuple[int, Fetched]]:
        keys, sizes = list(table.keys.take(np.array(rows))), table.sizes[list(rows)].tolist()
        samples = fetch_ahead(self.source, keys, sizes, locations=table.locations_of(rows))
        with contextlib.closing(samples):
            for row, (_, sample) in zip(rows, samples, strict=True):
                yield row, sample


@dataclass(frozen=True)
class DatasetReader(ContentReader):
    """Reads samples of a Python dataset.

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
        count = min(READ_TWICE, len(table)) * self.twice
        again = {*np.linspace(0, len(table) - 1, count).astype(int).tolist()}
        order = [row for row in rows for _ in range(1 + (row in again))]
        facts = dict[int, str]()

        def read() -> None:
            for row, sample in self._fetched(table, order):
                key, content, fact = table.keys[row], "", ""
                if isinstance(sample, Sample):
                    content = sample.content
                    fact = with_label(content, -1 if sample.label is None else sample.label)
                if row not in facts:
                    facts[row], self.contents[key] = fact, content
                    self.tick(len(facts))
                elif fact and facts[row] not in ("", fact):
                    raise differs(key)

        run_in_time(read, self.seconds)
        keys = map(table.keys.__getitem__, rows)
        return [facts[r] for r in rows] if self.brings_labels else [self.contents[k] for k in keys]


def with_label(content: str, label: int) -> str:
    """Return what is compared of a sample that brings its label."""
    return f"{content} {label}"


def differs(key: str) -> SourceError:
    """Return the error for a sample of which two reads differ."""
    return SourceError(
        f"two reads of sample {key} gave different items, so that samples cannot be "
        "compared. Take what is random out of the dataset: random ops belong into the recipe, or "
        "behind the loader (precache.transforms); else leave out --compare, and keep one draw of "
        "each by --variants 1 (variants = 1 in each field)"
    )
