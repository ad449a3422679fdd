"""The rows that a loader reads: all valid rows, a subset, or draws by weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from precache.errors import UsageError
from precache.reading.version_reader import VersionReader, read_small_field
from precache.sampling.order import ChosenRows, ValidRows
from precache.store.version import SMALL_ROW_NBYTES, Version


@dataclass(frozen=True)
class Selection:
    """Rows by index, and their weights by index where they have any.

    Attributes
    ----------
    rows_digest, weights_digest
        XXH3-64 (hex) of the chosen rows and of the weights; None where none were given.
    """

    valid: ValidRows | ChosenRows
    weights: np.ndarray | None
    rows_digest: str | None = None
    weights_digest: str | None = None

    @property
    def read(self) -> np.ndarray:
        """(n,) int64 rows that an epoch can read, ascending."""
        rows = self.valid(np.arange(len(self.valid)))
        return rows if self.weights is None else rows[self.weights > 0]

    @classmethod
    def of(
        cls,
        reader: VersionReader,
        rows: np.ndarray | Sequence[int] | None,
        weights: np.ndarray | Sequence[float] | None,
    ) -> Selection:
        """Select the rows that a user chose, without the holes.

        Raises
        ------
        UsageError
            There are no such rows, or none is valid; there is not one weight for each row of the
            version, or the weights make no sense.
        """
        valid: ValidRows | ChosenRows = reader.valid
        if rows is None and weights is None:
            return cls(valid, None)
        rows_digest = None
        if rows is not None:
            chosen = _chosen(reader, np.asarray(rows))
            rows_digest = xxhash.xxh3_64_hexdigest(chosen.tobytes())
            valid = ChosenRows(chosen)
        if weights is None:
            return cls(valid, None, rows_digest)
        by_index = _weights(reader, np.asarray(weights))[valid(np.arange(len(valid)))]
        if not by_index.sum() > 0:
            raise UsageError("all weights are zero; give some row a weight above that")
        return cls(valid, by_index, rows_digest, xxhash.xxh3_64_hexdigest(by_index.tobytes()))


def _chosen(reader: VersionReader, rows: np.ndarray) -> np.ndarray:
    count = reader.version.rows
    if rows.dtype == np.bool_:
        if rows.shape != (count,):
            raise UsageError(f"rows has shape {rows.shape}, and there are {count} rows to choose")
        rows = np.flatnonzero(rows)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise UsageError(f"rows is {rows.dtype} {rows.shape}; give row numbers, or (rows,) bool")
    outside = rows[(rows < 0) | (rows >= count)] if len(rows) else rows
    if len(outside):
        raise UsageError(f"rows has {outside[0]}, and {reader.version.path} has {count} rows")
    chosen = np.setdiff1d(rows.astype(np.int64), reader.version.hole_rows)
    if not len(chosen):
        raise UsageError(f"rows names no row of {reader.version.path} that is valid")
    return chosen


def _weights(reader: VersionReader, weights: np.ndarray) -> np.ndarray:
    if weights.shape != (reader.version.rows,) or weights.dtype.kind not in "fiu":
        raise UsageError(
            f"weights is {weights.dtype} {weights.shape}; give a number for each of the "
            f"{reader.version.rows} rows of {reader.version.path}, holes included"
        )
    weights = weights.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise UsageError(f"the weight of row {wrong[0]} is {weights[wrong[0]]}; give 0 or more")
    return weights


def rows_where(version: Version, predicate: Callable[..., np.ndarray]) -> np.ndarray:
    """Implement `Version.rows_where`."""
    small = [
        name
        for name, (_, array) in version.arrays.items()
        if array.row_nbytes <= SMALL_ROW_NBYTES or (name == "label" and not version.foreign)
    ]
    known = small if version.foreign else [*small, "key"]
    values = []
    for name in inspect.signature(predicate).parameters:
        if name not in known:
            field = version.fields.get(name)
            why = "there is no such field"
            if field is not None:
                why = "it is too large a field" if field.variants == 1 else "it has variants"
            raise UsageError(
                f"the predicate takes {name!r}, and {why}; its parameters may be "
                f"{', '.join(known)} of {version.path}"
            )
        keys = name == "key" and name not in small
        values.append(np.array(list(version.keys)) if keys else read_small_field(version, name))
    chosen = np.asarray(predicate(*values))
    if chosen.dtype != np.bool_ or chosen.shape != (version.rows,):
        raise UsageError(
            f"the predicate returns {chosen.dtype} {chosen.shape}; it takes whole arrays and must "
            f"return bool ({version.rows},), such as lambda label: label < 10"
        )
    return np.flatnonzero(chosen)
