"""`CachedDataset`: a cached version as a map-style torch `Dataset`."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from precache.columns import Columns, FieldNames
from precache.integers import whole
from precache.slots import as_tensor
from precache.storage import StorageOptions
from precache.version import Keys, Version

Sample = dict[str, torch.Tensor]


class _Samples(Sequence[Sample]):
    """The samples of a batch, each a view of it."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["row"])

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return {name: values[index] for name, values in self.batch.items()}


class CachedDataset(Dataset[dict[str, torch.Tensor]]):
    """The valid rows of a version, for any `DataLoader`, with fork and spawn workers.

    Parameters
    ----------
    uri
        A store, ``STORE@prefix``, or a Zarr group together with a mapping as `fields`.
    fields
        Names to read, by default all; or name -> path of an array in a group that other software
        wrote.
    verify
        When CRC32C checksums are checked: ``first``, ``always`` or ``off``.
    access
        ``map``, or ``pread`` for a network file system. Rows of a remote store are read by range
        requests, those of a batch together.
    storage_options
        Of a remote file system, as its fsspec class takes them.
    variant
        Which one to read of a field with `variants = K`: that of epoch `variant`, until `set_epoch`
        says another.

    Notes
    -----
    Index i is the i-th row that is not a hole, in row order. A pickle holds the version's path
    and the storage options, not its data. `Loader` is the faster way to read batches; with a
    `DataLoader`, give it ``collate_fn=dataset.collate``.
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
        self._open(os.fspath(uri), fields, verify, access, storage_options, variant)

    def _open(
        self,
        uri: str,
        fields: FieldNames,
        verify: str,
        access: str,
        storage_options: StorageOptions,
        variant: int,
    ) -> None:
        self._fields = dict(fields) if isinstance(fields, Mapping) else fields
        self._how = {"verify": verify, "access": access, "storage_options": storage_options}
        self._columns = Columns(uri, fields, verify, storage_options, access)
        self.set_epoch(variant)

    def set_epoch(self, epoch: int) -> None:
        """Read the variants of an epoch, as `Loader` does; workers that run already do not hear."""
        self._epoch = whole("epoch", epoch)
        self._columns = self._columns.at_epoch(self._epoch)

    @property
    def version(self) -> Version:
        return self._columns.version

    @functools.cached_property
    def keys(self) -> Sequence[str]:
        """The samples' keys, by index."""
        return Keys(self.version, self._columns.valid(np.arange(len(self))))

    def __len__(self) -> int:
        return len(self._columns.valid)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Field -> tensor of one row without a batch axis, and `row` (int64)."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Sample]:
        """The samples at `indices`, read together."""
        count = len(self)
        ranks = np.array([operator.index(index) for index in indices], np.int64)
        if len(ranks) and not (-count <= ranks.min() and ranks.max() < count):
            raise IndexError(f"an index of {list(indices)} is outside of the {count} samples")
        rows = self._columns.valid(ranks % count if count else ranks)
        batch = {
            name: np.empty((len(rows), *shape), dtype)
            for name, (shape, dtype) in self._columns.shapes.items()
        }
        self._columns.read(rows, batch)
        return _Samples({name: as_tensor(values) for name, values in batch.items()})

    @staticmethod
    def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Field -> (n, ...) tensor, for a `DataLoader`'s ``collate_fn``.

        What `__getitems__` read together lies together in memory already; torch's own collation
        would copy it once more, which costs several times as much as reading it.
        """
        if isinstance(samples, _Samples):
            return samples.batch
        whole: dict[str, torch.Tensor] = default_collate(list(samples))
        return whole

    def __getstate__(self) -> dict[str, Any]:
        return {
            "uri": self.version.path,
            "fields": self._fields,
            "variant": self._epoch,
            **self._how,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(**state)
