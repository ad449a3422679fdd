"""Places of the samples of a listing: columns that builds hand to tasks and stores never have."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from precache.store.columns import arrow_of

UNKNOWN_BYTES = 128 << 10
"""Bytes that a sample counts as if nothing is known of its size."""

MOST_EXPECTED = 1 << 30
"""Most bytes that a sample counts as, even if a file claims more."""


class Container(NamedTuple):
    """A file with many samples, as it was listed.

    Attributes
    ----------
    etag
        Digest of its identity; may be empty.
    forward
        Whether a unit is read from its start to the last sample wanted.
    """

    name: str
    size: int = -1
    etag: str = ""
    file_state: int = -1
    forward: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Locations:
    """Places of samples, by column.

    Attributes
    ----------
    places
        Arrow array of the places in containers, as their format has them, or of URIs; null for a
        sample that has none.
    containers
        Empty for samples that are read alone.
    files
        Number of the container of each sample: (rows,) int32, -1 for none.
    units
        Number of the part of its container that a sample is read with: (rows,) int32.
    nbytes
        Bytes that samples are expected to have whose sizes are unknown: (rows,) int64, 0 if that is
        unknown, too.
    """

    places: Any
    containers: tuple[Container, ...] = ()
    files: np.ndarray
    units: np.ndarray
    nbytes: np.ndarray

    @classmethod
    def alone(cls, places: Any) -> Locations:
        """Return the locations of samples that lie in no containers."""
        none = np.full(len(places), -1, np.int32)
        return cls(places=places, files=none, units=none, nbytes=np.zeros(len(places), np.int64))

    def __len__(self) -> int:
        return len(self.files)

    def without_file_states(self) -> Locations:
        """Return these locations, of containers whose states are unknown."""
        containers = tuple(file._replace(file_state=-1) for file in self.containers)
        return replace(self, containers=containers)

    def take(self, rows: Sequence[int] | np.ndarray) -> Locations:
        """Return the locations of some rows, with their containers alone; -1 stands for none."""
        import pyarrow as pa

        rows = np.asarray(rows, np.int64)
        none = rows < 0
        indices = arrow_of(rows)
        if none.any():
            indices = pa.array(rows, mask=none)
        files = np.where(none, -1, self.files[rows])
        is_used = np.zeros(len(self.containers) + 1, np.bool_)
        is_used[files] = True  # the last one is that of none
        used = np.flatnonzero(is_used[:-1])
        numbers = np.full(len(is_used), -1, np.int32)
        numbers[used] = np.arange(len(used))
        return Locations(
            places=self.places.take(indices),
            containers=tuple(self.containers[file] for file in used.tolist()),
            files=numbers[files],
            units=self.units[rows],
            nbytes=self.nbytes[rows],
        )

    @functools.cached_property
    def unit_numbers(self) -> np.ndarray:
        """Number of each row's unit among all, in the order in which they occur: (rows,) int64."""
        both = (self.files.astype(np.int64) << 32) + self.units
        change = np.diff(both, prepend=both[:1])
        if (change >= 0).all():
            return np.cumsum(change > 0)
        _, first, numbers = np.unique(both, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[numbers]

    @property
    def forward(self) -> np.ndarray:
        """Which rows lie in units that are read from their start: (rows,) bool."""
        forward = np.array([*(file.forward for file in self.containers), False])
        of_rows: np.ndarray = forward[self.files]
        return of_rows


def expected_bytes(sizes: np.ndarray, locations: Locations | None) -> np.ndarray:
    """Return the sizes of samples, and in place of unknown ones those that are expected."""
    if (sizes >= 0).all():
        return sizes
    nbytes = np.zeros(len(sizes), np.int64) if locations is None else locations.nbytes
    unknown = np.where(nbytes > 0, nbytes.clip(max=MOST_EXPECTED), UNKNOWN_BYTES)
    return np.where(sizes < 0, unknown, sizes)
