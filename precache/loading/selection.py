"""The rows that a loader reads: all valid rows, a subset, or draws by weight."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from precache.errors import UsageError
from precache.reading.version_reader import VersionReader
from precache.sampling.order import POSITIONS_AT_ONCE, ChosenRows, ValidRows, WeightSums
from precache.store.version import Version

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """Rows by index, and their weights where they have any.

    Attributes
    ----------
    rows_digest, weights_digest
        XXH3-64 (hex) of the chosen rows and of the weights; None where none were given.
    """

    valid: ValidRows | ChosenRows
    weights: WeightSums | None = None
    rows_digest: str | None = None
    weights_digest: str | None = None

    @property
    def read(self) -> np.ndarray:
        """(n,) int64 rows that an epoch can read, ascending."""
        indices = np.arange(len(self.valid))
        rows = self.valid(indices)
        return rows if self.weights is None else rows[self.weights.of(indices) > 0]


def select(reader: VersionReader, rows: Any, weights: Any, *, as_stored: bool) -> Selection:
    """Select the rows that a user chose, without the holes.

    Parameters
    ----------
    as_stored
        They are read in ascending order.

    Raises
    ------
    UsageError
        There are no such rows, or none is valid; some come twice, or will be read in another
        order; there is not one weight for each row of the version, or the weights make no sense.
    """
    selected = Selection(reader.valid)
    if rows is not None:
        given, is_mask = row_numbers(reader.version, rows), _array(rows).dtype == np.bool_
        chosen = _chosen(reader.version, given, is_mask=is_mask, as_stored=as_stored)
        selected = Selection(ChosenRows(chosen), None, _digest([chosen]))
    if weights is not None:
        sums = WeightSums(_weights(reader, weights), selected.valid)
        parts = (sums.of(indices) for indices in _in_parts(len(selected.valid)))
        selected = replace(selected, weights=sums, weights_digest=_digest(parts))
    return selected


def _digest(parts: Iterable[np.ndarray]) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    return digest.hexdigest()


def _in_parts(count: int) -> Iterator[np.ndarray]:
    """Yield the numbers up to `count`, some at a time: of many rows an array takes much memory."""
    for start in range(0, count, POSITIONS_AT_ONCE):
        yield np.arange(start, min(start + POSITIONS_AT_ONCE, count))


def row_numbers(version: Version, given: Any) -> np.ndarray:
    """Return (n,) int64: the row numbers that a user gave, or those that a (rows,) bool chooses.

    Raises
    ------
    UsageError
        They are no row numbers, or the version has no such row.
    """
    count, rows = version.rows, _array(given)
    if rows.dtype == np.bool_ and rows.ndim:
        if rows.shape != (count,):
            raise UsageError(f"rows has shape {rows.shape}, and there are {count} rows to choose")
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise UsageError(
            f"rows is {reprlib.repr(given)}, {rows.dtype} {rows.shape}; give row numbers, as "
            "[0, 5], or (rows,) bool"
        )
    outside = rows[(rows < 0) | (rows >= count)]
    if len(outside):
        raise UsageError(
            f"rows has {outside[0]}, and {version.path} has {count} rows, counted from 0"
        )
    return rows.astype(np.int64)


def _array(values: Any) -> np.ndarray:
    """Convert to an array, of objects if the values have no other."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        if values.dtype == torch.bfloat16:  # NumPy has no such type
            values = values.float()
    elif isinstance(values, Mapping):  # of which its keys would be taken
        return np.array(None)
    elif isinstance(values, Iterable) and not isinstance(values, np.ndarray):
        values = list(values)
    try:
        return np.asarray(values)
    except (TypeError, ValueError):  # such as lists of several lengths
        return np.array(None)


def _chosen(version: Version, given: np.ndarray, *, is_mask: bool, as_stored: bool) -> np.ndarray:
    """Return the rows without holes, ascending."""
    unique, counts = np.unique(given, return_counts=True)
    if len(unique) < len(given):
        raise UsageError(
            f"rows has {unique[counts.argmax()]} {counts.max()} times, and an epoch reads each of "
            f"its rows once; give np.unique(rows), {len(unique)} of {len(given)}; of a mask, "
            "np.asarray(rows, bool); or to draw some more often "
            f"shuffle=Weighted(np.bincount(rows, minlength={version.rows}))"
        )
    if as_stored and (np.diff(given) < 0).any():
        raise UsageError(
            "rows are not in ascending order, and with shuffle=False they are read as stored; "
            "give np.sort(rows), or read them in your order by a DataLoader of Subset(dataset, "
            "np.searchsorted(np.flatnonzero(dataset.version.valid), rows)) of a CachedDataset"
        )
    holes = version.hole_rows
    if len(holes) and len(given) and given.max() < version.rows - len(holes) and not is_mask:
        log.warning(
            "rows are taken as numbers of rows, of which %d of %d in %s are holes; indices of a "
            "CachedDataset, as of a Subset, leave these out: for them give "
            "np.flatnonzero(version.valid)[indices]", len(holes), version.rows, version.path,
        )  # fmt: skip
    chosen = np.setdiff1d(given, holes)
    if not len(chosen):
        raise UsageError(f"rows names no row of {version.path} that is valid")
    return chosen


def _weights(reader: VersionReader, given: Any) -> np.ndarray:
    weights = _array(given)
    if weights.shape != (reader.version.rows,) or weights.dtype.kind not in "fiu":
        raise UsageError(
            f"weights is {reprlib.repr(given)}, {weights.dtype} {weights.shape}; give a number for "
            f"each of the {reader.version.rows} rows of {reader.version.path}, holes included"
        )
    for rows in _in_parts(len(weights)):
        part = weights[rows].astype(np.float64)
        wrong = np.flatnonzero(~(np.isfinite(part) & (part >= 0)))
        if len(wrong):
            row, weight = rows[wrong[0]], part[wrong[0]]
            raise UsageError(f"the weight of row {row} is {weight}; give 0 or more")
    return weights
