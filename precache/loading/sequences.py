"""Rows that differ in length, as parts of a batch: lists, padded or jagged tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from precache.codecs import kernels
from precache.errors import UsageError
from precache.loading.slots import as_tensor
from precache.reading.ragged_reader import LARGE_NBYTES, PackedRows, RaggedReader
from precache.reading.version_reader import VersionReader
from precache.runtime.usage import available_bytes
from precache.transforms import LENGTH

Form = Literal["padded", "jagged", "list"]

Packed = Mapping[str, PackedRows]
"""Field -> rows of a part of a batch."""


class Sequences:
    """Makes parts of batches of the fields of a version whose rows differ in length.

    Parameters
    ----------
    forms
        Field -> form of its tensors, by default ``padded``.
    """

    def __init__(self, reader: VersionReader, forms: Mapping[str, Form]) -> None:
        fields = {n: r for n, r in reader.sequences.items() if r.kind not in ("text", "bytes")}
        for name in forms:
            if name not in fields:
                those = f"those are {', '.join(fields)}" if fields else "there is none"
                raise UsageError(
                    f"ragged names {name!r}, which is no field of arrays that differ in length "
                    f"among those that are read of {reader.version.path}; {those}"
                )
        self.forms: dict[str, Form] = {name: forms.get(name, "padded") for name in fields}

    def read(self, reader: VersionReader, rows: np.ndarray) -> Packed:
        """Read the rows of a part of a batch."""
        return {name: field.packed(rows) for name, field in reader.sequences.items()}

    def gather(
        self, reader: VersionReader, rows: np.ndarray, parts: Sequence[Packed]
    ) -> dict[str, Any]:
        """Join the parts of a batch, in their order: lists of str or bytes, and plain tensors.

        `formed` makes of these what is handed out.
        """
        batch: dict[str, Any] = {}
        for name, field in reader.sequences.items():
            packed = [part[name] for part in parts]
            if name in self.forms:
                batch |= _gathered(name, self.forms[name], field, packed)
                continue
            ends = np.cumsum([len(part.sizes) for part in packed])
            places = zip(np.split(rows, ends[:-1]), packed, strict=True)
            batch[name] = [value for place in places for value in field.unpack(*place)]
        return batch

    def formed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Give the tensors of a batch, on any device, the form that was asked for."""
        for name, form in self.forms.items():
            if form == "jagged":
                values, offsets = batch[name], batch.pop(name + LENGTH)
                batch[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
            elif form == "list":
                batch[name] = list(batch[name].split(batch.pop(name + LENGTH)))
        return batch

    def tried(self, reader: VersionReader) -> dict[str, Any]:
        """Return parts of a batch of two rows without values, to try a transform on."""
        batch: dict[str, Any] = {}
        for name, field in reader.sequences.items():
            shape, dtype = (2, 1, *field.fixed), as_tensor(np.empty(0, field.array.dtype)).dtype
            batch[name] = ["", ""]
            if name in self.forms:
                batch[name] = torch.empty(shape, dtype=dtype, device="meta")
                batch[name + LENGTH] = torch.empty(2, dtype=torch.int64, device="meta")
        return batch


def _gathered(
    name: str, form: Form, field: RaggedReader, parts: Sequence[PackedRows]
) -> dict[str, Any]:
    """Join the rows of one field: padded and their lengths, or one after another with offsets, or
    with lengths as a list."""
    lengths = np.concatenate([part.lengths for part in parts])
    pieces = (
        [part.data.data for part in parts],
        np.repeat(np.arange(len(parts)), [len(part.sizes) for part in parts]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    )
    if form == "padded":
        return padded(name, *pieces, lengths, field.fixed, field.array.dtype)
    out = np.empty((int(lengths.sum()), *field.fixed), field.array.dtype)
    kernels.copy_pieces(*pieces, out, out.nbytes)
    if form == "list":
        return {name: as_tensor(out), name + LENGTH: lengths.tolist()}
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return {name: as_tensor(out), name + LENGTH: torch.from_numpy(offsets)}


def padded(
    name: str,
    sources: list[memoryview],
    numbers: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    lengths: np.ndarray,
    fixed: tuple[int, ...],
    dtype: Any,
) -> dict[str, torch.Tensor]:
    """Return rows of a field as (n, longest, ...) with zeros behind each, and their lengths.

    Parameters
    ----------
    sources
        Buffers that hold the rows.
    numbers, starts, sizes
        (n,) int64: source of each row, and its first byte and bytes there.
    lengths
        (n,) int64: length of each row's first axis.

    Raises
    ------
    UsageError
        There is no memory for them.
    """
    longest = int(lengths.max(initial=0))
    pitch = int(np.prod(fixed, dtype=np.int64)) * np.dtype(dtype).itemsize * longest
    if (nbytes := len(lengths) * pitch) >= LARGE_NBYTES and nbytes > available_bytes():
        raise UsageError(
            f"{name} of a batch takes {nbytes} bytes, as its {len(lengths)} rows are padded to the "
            f"longest, of {longest}, and {available_bytes()} are free; give a smaller batch_size, "
            f"or ragged={{{name!r}: 'list'}} to a Loader"
        )
    out = np.empty((len(lengths), longest, *fixed), dtype)
    rest = pitch - sizes
    zeros = np.zeros(int(rest.max(initial=0)), np.uint8).data
    kernels.copy_pieces(  # each row, then zeros
        [*sources, zeros],
        _in_turns(numbers, np.full_like(numbers, len(sources))),
        _in_turns(starts, np.zeros_like(starts)),
        _in_turns(sizes, rest),
        out,
        out.nbytes,
    )
    return {name: as_tensor(out), name + LENGTH: torch.from_numpy(lengths)}


def _in_turns(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.stack([values, others], axis=1).reshape(-1)


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
        if name not in sequences or not torch.is_tensor(rows[0]):
            whole[name] = rows
            continue
        arrays = [np.ascontiguousarray(row.numpy()) for row in rows]
        sizes = np.array([array.nbytes for array in arrays], np.int64)
        lengths = np.array([len(array) for array in arrays], np.int64)
        sources = [array.reshape(-1).view(np.uint8).data for array in arrays]
        numbers = np.arange(len(arrays))
        fixed, dtype = arrays[0].shape[1:], arrays[0].dtype
        starts = np.zeros_like(sizes)
        whole |= padded(name, sources, numbers, starts, sizes, lengths, fixed, dtype)
    return whole
