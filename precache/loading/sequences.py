"""Rows that differ in length, as parts of a batch: lists, padded or jagged tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from precache.codecs import kernels
from precache.errors import UsageError
from precache.reading.ragged_reader import PackedRows, RaggedReader
from precache.reading.version_reader import VersionReader
from precache.runtime.usage import require_memory
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
                    f"output names {name!r}, which is no field of arrays that differ in length "
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
            shape, dtype = (2, 1, *field.fixed), getattr(torch, field.array.dtype)
            batch[name] = ["", ""]
            if name in self.forms:
                rows = torch.empty(shape, dtype=dtype, device="meta")
                is_padded = self.forms[name] == "padded"
                batch[name] = rows if is_padded else [*rows]
                if is_padded:
                    batch[name + LENGTH] = torch.empty(2, dtype=torch.int64, device="meta")
        return batch


def _gathered(
    name: str, form: Form, field: RaggedReader, parts: Sequence[PackedRows]
) -> dict[str, Any]:
    """Join the rows of one field: padded and their lengths, or one after another with offsets, or
    with lengths as a list."""
    numbers = np.repeat(np.arange(len(parts)), [len(part.sizes) for part in parts])
    data, *columns = zip(*parts, strict=True)
    starts, sizes, lengths = map(np.concatenate, columns)
    sources = [one.data for one in data]
    dtype, count, longest = field.array.dtype, len(lengths), int(lengths.max(initial=0))
    if form == "padded":
        pitch = math.prod(field.fixed) * np.dtype(dtype).itemsize * longest
        _require_memory(name, count, longest, count * pitch)
        out, rest = np.empty((count, longest, *field.fixed), dtype), pitch - sizes
        sources.append(np.zeros(int(rest.max(initial=0)), np.uint8).data)
        numbers = _in_turns(numbers, np.full(count, len(parts)))  # each row, then zeros
        starts, sizes = _in_turns(starts, np.zeros(count, np.int64)), _in_turns(sizes, rest)
    else:
        out = np.empty((int(lengths.sum()), *field.fixed), dtype)
    kernels.copy_pieces(sources, numbers, starts, sizes, out, out.nbytes)
    if form == "list":
        return {name: torch.from_numpy(out), name + LENGTH: lengths.tolist()}
    if form == "jagged":
        lengths = np.concatenate([[0], np.cumsum(lengths)])
    return {name: torch.from_numpy(out), name + LENGTH: torch.from_numpy(lengths)}


def _in_turns(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.stack([values, others], axis=1).reshape(-1)


def _require_memory(name: str, count: int, longest: int, nbytes: int) -> None:
    """Raise `UsageError` if there is no memory for the padded rows of a field."""
    require_memory(
        f"{name} of a batch, whose {count} rows are padded to the longest, of {longest}, takes",
        nbytes,
        f"give a smaller batch_size, or output={{{name!r}: 'list'}} to a Loader",
    )


def differ_in_length(rows: Sequence[Any]) -> bool:
    """Return True for tensors that are alike but for their first axis."""
    kinds = {(r.dtype, r.shape[1:]) if torch.is_tensor(r) and r.ndim else None for r in rows}
    return len(kinds) == 1 and None not in kinds


def padded(name: str, rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return rows of a field as (n, longest, ...) with zeros behind each, and their lengths.

    Raises
    ------
    UsageError
        There is no memory for them.
    """
    lengths, first = [len(row) for row in rows], rows[0]
    longest = max(lengths)
    nbytes = len(rows) * longest * math.prod(first.shape[1:]) * first.itemsize
    _require_memory(name, len(rows), longest, nbytes)
    return {name: pad_sequence([*rows], batch_first=True), name + LENGTH: torch.tensor(lengths)}
