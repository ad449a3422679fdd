"""`CachedDataset`: a cached version as a map-style torch `Dataset`."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from precache.loading.slots import as_tensor, require_memory, row_nbytes
from precache.reading.version_reader import FieldNames, VersionReader
from precache.runtime.integers import whole
from precache.storage.open import StorageOptions
from precache.store.version import RowKeys, Version
from precache.transforms import Batch

LARGE_NBYTES = 1 << 30
"""Batches from this size on are checked against the available memory before they are allocated."""


class RowOfBatch(dict[str, torch.Tensor]):
    """A row of a batch: field -> view of the batch; copied and pickled as a plain dict."""

    def __reduce__(self) -> tuple[type, tuple[Batch]]:
        return dict, (dict(self),)


class _RowsOfBatch(Sequence[RowOfBatch]):
    """The rows of a batch, each made at its first access.

    Parameters
    ----------
    batch
        Field -> (n, ...) tensor. Keyword only, so that torch, which rebuilds sequences from their
        members when it pins memory, makes a list of the rows.
    """

    def __init__(self, *, batch: Batch) -> None:
        self._batch = batch
        self._rows: dict[int, tuple[RowOfBatch, Batch]] = {}

    def __len__(self) -> int:
        return len(self._batch["row"])

    @overload
    def __getitem__(self, index: int) -> RowOfBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowOfBatch]: ...
    def __getitem__(self, index: int | slice) -> RowOfBatch | list[RowOfBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        if number not in self._rows:
            views = {name: values[number] for name, values in self._batch.items()}
            self._rows[number] = RowOfBatch(views), views
        return self._rows[number][0]

    def whole(self) -> Batch | None:
        """Return the batch; None if the members of a row were replaced."""
        for number, (row, views) in self._rows.items():
            if row.keys() != views.keys() or any(row[n] is not views[n] for n in views):
                return None
            if any(_layout(view) != _layout(self._batch[n][number]) for n, view in views.items()):
                return None  # changed by `.data =`, or in its shape
        return self._batch


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


_STACK = default_collate_fn_map[torch.Tensor]
"""torch's own function, which a user may replace."""


def _collate(
    samples: Sequence[Batch], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> Any:
    """Collate dicts as torch does, without a copy if `samples` are a whole batch."""
    stacks = default_collate_fn_map.get(torch.Tensor) is _STACK
    if stacks and isinstance(samples, _RowsOfBatch) and collate_fn_map is default_collate_fn_map:
        whole = samples.whole()
        if whole is not None:
            return whole
    return collate([dict(sample) for sample in samples], collate_fn_map=collate_fn_map)


def dataset_of(loader: Any) -> Any:
    """Return the dataset of a loader; None if it has none or its property raises."""
    with contextlib.suppress(Exception):
        return loader.dataset
    return None


class CachedDataset(Dataset[Batch]):
    """The valid rows of a version, for any `DataLoader`, with fork and spawn workers.

    Parameters
    ----------
    uri
        A store, ``STORE@prefix``, or a Zarr group together with a mapping as `fields`.
    fields
        Names of the fields to read, by default all; or name -> path of an array in a group that
        other software wrote.
    verify
        When checksums of chunks are checked: ``first``, ``always`` or ``off``.
    access
        ``map``, or ``pread`` for a network file system. Rows of a remote store are read by range
        requests, those of a batch together.
    storage_options
        Options of a remote file system, as its fsspec class takes them.
    variant
        Of a field with `variants = K`, read the variant of epoch `variant`, until `set_epoch`
        chooses another.

    Notes
    -----
    Index i is the i-th row that is not a hole, in row order. A pickle holds the version's path
    and the storage options, not its data. `Loader` is the faster way to read batches. The samples
    that a `DataLoader` reads together are contiguous in memory, and torch's default collation does
    not copy them.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        fields: FieldNames = None,
        verify: str = "first",
        access: str = "map",
        storage_options: StorageOptions = None,
        variant: int = 0,
    ) -> None:
        default_collate_fn_map[RowOfBatch] = _collate
        self._fields = dict(fields) if isinstance(fields, Mapping) else fields
        self._options = {"verify": verify, "access": access, "storage_options": storage_options}
        self._reader = VersionReader(os.fspath(uri), fields, verify, storage_options, access)
        self.set_epoch(variant)

    def set_epoch(self, epoch: int) -> None:
        """Read the variants of an epoch, as `Loader` does; has no effect on running workers."""
        self._epoch = whole("epoch", epoch, 0)
        self._reader = self._reader.at_epoch(self._epoch)

    @property
    def version(self) -> Version:
        return self._reader.version

    @functools.cached_property
    def keys(self) -> Sequence[str]:
        """Keys of the samples, by index."""
        return RowKeys(self.version, self._reader.valid(np.arange(len(self))))

    @functools.cached_property
    def _row_nbytes(self) -> int:
        return sum(row_nbytes(*column) for column in self._reader.shapes.values())

    def __len__(self) -> int:
        return len(self._reader.valid)

    def __getitem__(self, index: int) -> Batch:
        """Return field -> tensor of one row without a batch axis, and `row` (int64)."""
        return dict(self.__getitems__([index])[0])

    def __getitems__(self, indices: Sequence[int]) -> Sequence[RowOfBatch]:
        """Return the samples at `indices`, read together."""
        count = len(self)
        numbers = np.array([operator.index(index) for index in indices], np.int64)
        if len(numbers) and not (-count <= numbers.min() and numbers.max() < count):
            raise IndexError(f"an index of {list(indices)} is outside of the {count} samples")
        rows = self._reader.valid(numbers % count if count else numbers)
        if (nbytes := len(rows) * self._row_nbytes) >= LARGE_NBYTES:
            require_memory(len(rows), nbytes)
        batch = {
            name: np.empty((len(rows), *shape), dtype)
            for name, (shape, dtype) in self._reader.shapes.items()
        }
        self._reader.read(rows, batch)
        return _RowsOfBatch(batch={name: as_tensor(values) for name, values in batch.items()})

    @staticmethod
    def collate(samples: Sequence[Batch]) -> Batch:
        """Return field -> (n, ...) tensor, as a `DataLoader` does by default."""
        batch: Batch = _collate(samples, collate_fn_map=default_collate_fn_map)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {
            "uri": self.version.path,
            "fields": self._fields,
            "variant": self._epoch,
            **self._options,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        CachedDataset.__init__(self, **state)
