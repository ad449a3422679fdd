"""Rows that differ in length, as parts of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from precache.errors import UsageError
from precache.loading.slots import as_tensor
from precache.runtime.usage import available_bytes

LENGTH = ".length"
"""Ending of the name of the part of a batch with the lengths of the rows of a field."""

LARGE_NBYTES = 1 << 30
"""Padded rows from this size on are checked against the available memory."""


def with_padding(batch: Mapping[str, Any], sequences: Collection[str]) -> Any:
    """Return a batch with lists of tensors padded: field -> (n, longest, ...), and their lengths.

    Parameters
    ----------
    sequences
        Names of fields whose rows differ in length; lists of str or bytes stay.
    """
    if not sequences:
        return batch
    whole: dict[str, Any] = {}
    for name, rows in batch.items():
        if name in sequences and torch.is_tensor(rows[0]):
            whole |= padded(name, [row.numpy() for row in rows])
        else:
            whole[name] = rows
    return whole


def padded(name: str, rows: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """Return rows of a field as (n, longest, ...) with zeros behind each, and their lengths.

    Raises
    ------
    UsageError
        There is no memory for them.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    shape = len(rows), int(lengths.max(initial=0)), *rows[0].shape[1:]
    nbytes = int(np.prod(shape, dtype=np.float64)) * rows[0].itemsize
    if nbytes >= LARGE_NBYTES and nbytes > available_bytes():
        raise UsageError(
            f"{name} of a batch takes {nbytes} bytes, as its {len(rows)} rows are padded to the "
            f"longest, of {shape[1]}, and {available_bytes()} are free; give a smaller batch_size, "
            f"or ragged={{{name!r}: 'list'}} to a Loader"
        )
    out = np.zeros(shape, rows[0].dtype)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return {name: as_tensor(out), name + LENGTH: torch.from_numpy(lengths)}
