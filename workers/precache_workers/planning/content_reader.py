"""Read samples while listing, for the hashes of their contents."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from precache.errors import HangError
from precache.runtime.ordered_map import prefetch
from precache.store.row_table import RowTable
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.sources.base import Sample, Source

READ_BYTES, FORWARD_BYTES = 16 << 20, 256 << 20
"""Bytes of samples that a thread holds in memory at a time; more of a compressed archive, which
is decompressed from its start for each of them."""

READERS = 4
"""Threads that read samples."""

LINE_EVERY = 10.0
"""Seconds between two lines about the progress."""


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
        groups = list(_groups(table, rows))
        found, said = dict[int, str](), time.monotonic()

        def read(group: Sequence[int]) -> list[str] | None:
            try:
                return run_in_time(lambda: self._read(table, group), self.seconds)
            except HangError:
                return None

        reading = contextlib.closing(prefetch(read, groups, READERS, READERS + 1))
        with reading as results:
            for group, contents in zip(groups, results, strict=False):
                if contents is None:
                    break
                found.update(zip(group, contents, strict=True))
                if time.monotonic() - said >= LINE_EVERY:
                    said = time.monotonic()
                    self.say(f"{len(found):,} of {len(rows):,} samples read")
        return [found.get(row, "") for row in rows]

    def _read(self, table: RowTable, rows: Sequence[int]) -> list[str]:
        keys, sizes = [table.keys[row] for row in rows], table.sizes[list(rows)].tolist()
        samples = self.source.fetch(keys, sizes, table.locations_of(rows))
        return [sample.content if isinstance(sample, Sample) else "" for sample in samples]


def _groups(table: RowTable, rows: Sequence[int]) -> Iterator[list[int]]:
    """Yield samples that are read at once: those of a unit together, if they fit into memory."""
    if not rows:
        return
    units, forward = table.units, False
    if units is not None and table.locations is not None:
        rows = sorted(rows, key=units.__getitem__)
        forward = bool(table.locations.forward[rows[0]])
    ends = np.cumsum(table.expected_sizes(rows))
    numbers = ends // (FORWARD_BYTES if forward else READ_BYTES)
    for run in np.split(np.asarray(rows), np.flatnonzero(np.diff(numbers)) + 1):
        yield run.tolist()
