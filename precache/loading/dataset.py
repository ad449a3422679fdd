"""`CachedDataset`: a cached version as a map-style torch `Dataset`."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import operator
import os
import reprlib
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args, overload

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from precache.errors import StoreError, UsageError
from precache.loading.class_numbers import compare_classes
from precache.loading.options import Access, require_choice, require_path
from precache.loading.sequences import differ_in_length, padded
from precache.loading.slots import row_nbytes
from precache.reading.version_reader import FieldNames, VersionReader, read_small_field
from precache.runtime.integers import whole
from precache.runtime.usage import require_memory
from precache.storage.open import StorageOptions
from precache.store.version import RowKeys, Version
from precache.transforms import Batch

log = logging.getLogger(__name__)


class RowOfBatch(dict[str, Any]):
    """A row of a batch: field -> view of the batch; copied and pickled as a plain dict.

    Attributes
    ----------
    sequences
        Fields whose rows differ in length, which a batch has padded.
    """

    sequences: Collection[str] = ()

    def __reduce__(self) -> tuple[type, tuple[Batch]]:
        return dict, (dict(self),)


class _RowsOfBatch(Sequence[RowOfBatch]):
    """The rows of a batch, each made at its first access.

    Parameters
    ----------
    batch
        Field -> (n, ...) tensor, of ragged fields a list of rows. Keyword only, so that torch,
        which rebuilds sequences from their members when it pins memory, makes a list of the rows.
    sequences
        Fields whose rows differ in length.
    """

    def __init__(self, *, batch: dict[str, Any], sequences: Collection[str] = ()) -> None:
        self.batch = batch
        self.sequences = sequences
        self._numbers = range(len(batch["row"]))
        self._rows: dict[int, tuple[RowOfBatch, dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> RowOfBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowOfBatch]: ...
    def __getitem__(self, index: int | slice) -> RowOfBatch | list[RowOfBatch]:
        if isinstance(index, slice):
            return [self[number] for number in self._numbers[index]]
        number = self._numbers[index]
        if number not in self._rows:
            views = {name: values[number] for name, values in self.batch.items()}
            self._rows[number] = RowOfBatch(views), views
            self._rows[number][0].sequences = self.sequences
        return self._rows[number][0]

    def whole(self) -> dict[str, Any] | None:
        """Return the batch; None if members of a row were replaced, or images have many shapes."""
        for name, values in self.batch.items():
            if type(values) is list and name not in self.sequences:
                return None
        for number, (row, views) in self._rows.items():
            if row.keys() != views.keys():
                return None
            for name, view in views.items():
                if row[name] is not view:
                    return None
                if torch.is_tensor(view) and _layout(view) != _layout(self.batch[name][number]):
                    return None  # changed by `.data =`, or in its shape
        return self.batch


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


_STACK = default_collate_fn_map[torch.Tensor]
"""torch's own function, which a user may replace."""


def _collate(
    samples: Sequence[Batch],
    *,
    collate_fn_map: dict[Any, Callable[..., Any]] | None = None,
    sequences: Collection[str] | None = None,
) -> Any:
    """Collate dicts as torch does, without a copy if `samples` are a whole batch.

    Parameters
    ----------
    sequences
        Fields whose rows differ in length, which are padded; by default as the rows say.
    """
    if sequences is None:
        sequences = getattr(samples[0], "sequences", ())
    stacks, whole = default_collate_fn_map.get(torch.Tensor) is _STACK, None
    if stacks and isinstance(samples, _RowsOfBatch) and collate_fn_map is default_collate_fn_map:
        whole = samples.whole()
    columns = {
        name: [row[name] for row in samples] if whole is None else whole[name]
        for name in sequences
        if name in samples[0]
    }
    apart = {name: rows for name, rows in columns.items() if differ_in_length(rows)}
    if whole is not None and not apart:
        return whole
    try:
        if whole is None:
            rows = [{name: row[name] for name in row if name not in apart} for row in samples]
            whole = collate(rows, collate_fn_map=collate_fn_map)
        batch: dict[str, Any] = {}
        for name in samples[0]:
            batch |= padded(name, apart[name]) if name in apart else {name: whole[name]}
        return batch
    except RuntimeError:
        for name in samples[0].keys() - apart:
            shapes = dict.fromkeys(tuple(getattr(row.get(name), "shape", ())) for row in samples)
            if len(shapes) > 1:
                raise UsageError(
                    f"rows of {name} have the shapes {', '.join(map(str, [*shapes][:2]))}, and a "
                    "batch has one: crop them in __getitem__ of a subclass of CachedDataset, or "
                    "give the DataLoader a collate_fn that keeps them apart"
                ) from None
        raise


def dataset_of(loader: Any) -> Any:
    """Return the dataset of a loader; None if it has none or its property raises."""
    with contextlib.suppress(Exception):
        return loader.dataset
    return None


class _OpenedVersion:
    """The version that a `CachedDataset` reads; a pickle holds its path, and opens it again."""

    def __init__(self, uri: str, fields: FieldNames, options: Mapping[str, Any]) -> None:
        default_collate_fn_map[RowOfBatch] = _collate
        self._arguments = fields, options
        self.reader = VersionReader(uri, fields, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OpenedVersion, (self.reader.version.path, *self._arguments)

    @functools.cached_property
    def keys(self) -> Sequence[str]:
        return RowKeys(self.reader.version, self._rows())

    @functools.cached_property
    def labels(self) -> np.ndarray:
        version = self.reader.version
        if "label" not in version.arrays:
            raise StoreError(f"{version.path} has no array 'label'; name it in fields")
        labels: np.ndarray = read_small_field(version, "label")[self._rows()]
        labels.setflags(write=False)  # samples would keep theirs
        return labels

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        return self.reader.version.classes

    @functools.cached_property
    def row_nbytes(self) -> int:
        return sum(row_nbytes(*column) for column in self.reader.shapes.values())

    def _rows(self) -> np.ndarray:
        """Row numbers by index."""
        return self.reader.valid(np.arange(len(self.reader.valid)))


class _AtHand(threading.local):
    """(dataset, epoch, index) -> row that was read with others and that no sample has taken yet."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, int], RowOfBatch] = {}


_at_hand = _AtHand()

_OF_STORE = "build with --labels FILE"
_OF_READING = "give it as CachedDataset(…)"
_OF_TRANSFORM = "call it on the batches, or give Loader(…, transform=)"
_TRANSFORMS = ("transform", "transforms", "target_transform")
_UNUSED = {
    **dict.fromkeys(_TRANSFORMS, _OF_TRANSFORM),
    **dict.fromkeys(("targets", "labels", "classes", "class_to_idx", "keys"), _OF_STORE),
    **dict.fromkeys(("samples", "imgs", "data"), "choose samples by Subset(dataset, indices)"),
    **dict.fromkeys(("fields", "access", "storage_options"), _OF_READING),
    "variant": "call set_epoch",
}
"""Attributes that other datasets follow when they are set, and the way that samples do change."""


class CachedDataset(Dataset[Batch]):
    """The valid rows of a version, for any `DataLoader`, with fork and spawn workers.

    Parameters
    ----------
    uri
        A store, ``STORE@prefix``, or a Zarr group together with a mapping as `fields`.
    fields
        Names of the fields to read, by default all; or name -> path of an array in a group that
        other software wrote.
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
    Index i is the i-th row that is not a hole, in row order: `keys` and `labels` are by index,
    those of a `Version` are by row. `Loader` is the faster way to read batches. The samples that a
    `DataLoader` reads together are contiguous in memory, and torch's default collation does not
    copy them.

    A subclass with its own ``__getitem__`` gives a `DataLoader` its own samples. Rows of a batch
    are still read together: those whose indices it passes on to ``super().__getitem__``. A pickle
    holds all attributes, also those of a subclass, but of the version only its path and the storage
    options.
    """

    # Names with two underscores are mangled: no attribute of a subclass replaces them.

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        fields: FieldNames = None,
        access: Access = "map",
        storage_options: StorageOptions = None,
        variant: int = 0,
    ) -> None:
        for name in (*_TRANSFORMS, *(vars(CachedDataset).keys() & _UNUSED.keys())):
            if getattr(type(self), name, None) is not getattr(CachedDataset, name, None):
                _require_followed(name, type(self))
        require_choice("access", access, get_args(Access))
        if fields is not None and not isinstance(fields, str):  # a copy takes them again
            fields = dict(fields) if isinstance(fields, Mapping) else [*fields]
        self.__opened = _OpenedVersion(
            require_path(uri),
            fields,
            {"access": access, "storage_options": storage_options},
        )
        self.__reads_together = True
        self.__epoch = whole("variant", variant, 0)
        if "label" in self.__opened.reader.shapes:
            compare_classes(self.version)
        rows, samples = self.version.rows, len(self.__opened.reader.valid)
        if samples < rows:
            log.warning(
                "%d of %d rows of %s are holes, which the indices of the dataset leave out: give "
                "samplers and subsets its labels and keys, and not version.labels",
                rows - samples, rows, self.version.path,
            )  # fmt: skip

        if self.__opened.reader.variant_period > 1 and not self.__epoch:
            log.warning(
                "%s has several variants of each sample, and a CachedDataset reads those of epoch "
                "0 until set_epoch(epoch) chooses others: call it before each epoch",
                self.version.path,
            )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__getitems__ is not CachedDataset.__getitems__:
            raise UsageError(
                f"{cls.__name__} has a __getitems__, which dataset[i] would not follow: make "
                "samples in __getitem__, which a DataLoader gets with its rows read together, and "
                "batches in a collate_fn"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what samples would not follow, unless a subclass makes them itself."""
        if name in _UNUSED:
            _require_followed(name, type(self))
        super().__setattr__(name, value)

    def set_epoch(self, epoch: int) -> None:
        """Read the variants of an epoch, as `Loader` does; has no effect on running workers."""
        self.__epoch = whole("epoch", epoch, 0)
        if self.__opened.reader.variant_period > 1 and multiprocessing.active_children():
            log.warning(
                "set_epoch(%d) does not reach workers that run, and these go on with the variants "
                "of their epoch: give the DataLoader persistent_workers=False, or use a Loader",
                self.__epoch,
            )

    @property
    def version(self) -> Version:
        return self.__opened.reader.version

    @functools.cached_property
    def keys(self) -> Sequence[str]:
        """Keys of the samples, by index."""
        return self.__opened.keys

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """Labels of the samples, by index; read when they are first used.

        (len,) int64 are class numbers, -1 for none; (len,) float32 are numbers, NaN for none;
        (len, classes) uint8 has a 1 for each class of a sample.
        """
        return self.__opened.labels

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by number; empty if there are none."""
        return self.__opened.classes

    def __len__(self) -> int:
        return len(self.__opened.reader.valid)

    def __repr__(self) -> str:
        return f"<precache dataset, {len(self)} samples: {self.version!r}>"

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return field -> tensor of one row without a batch axis, and `row` (int64).

        Fields of kind ``text`` and ``bytes`` give str and bytes.

        Parameters
        ----------
        index
            A whole number. A slice, (n,) whole numbers or a (len,) bool give field -> (n, ...).

        Raises
        ------
        IndexError
            There is no such sample.
        UsageError
            It is no index.
        """
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        if isinstance(index, list | tuple | range) or getattr(index, "ndim", None):
            return self.__read(_indices(index, len(self))).batch
        number = _number(index)
        row = _at_hand.rows.pop((id(self), self.__epoch, number), None)
        row = self.__read([number])[0] if row is None else row
        reader = self.__opened.reader
        return row if reader.ragged or reader.sequences else dict(row)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the samples at `indices`, with their rows read together."""
        # A wrapper that passes on all names passes on this one: torch then asks here, past the
        # wrapper's own `__getitem__`.
        caller = sys._getframe(1).f_locals  # with it in an attribute, or StackDataset's variable
        for asked in (getattr(caller.get("self"), "dataset", self), caller.get("dataset", self)):
            if asked is not self and getattr(asked, "__getitems__", None) == self.__getitems__:
                return [asked[index] for index in indices]
        if type(self).__getitem__ is _ROW:
            return self.__read(indices)
        # What cannot be read is read again below, where the subclass may handle the error.
        with contextlib.suppress(Exception):
            if self.__reads_together:
                keys = [(id(self), self.__epoch, operator.index(index)) for index in indices]
                _at_hand.rows = dict(zip(keys, self.__read(indices), strict=True))
        count = len(_at_hand.rows)
        try:
            return [self[index] for index in indices]
        finally:
            if count and len(_at_hand.rows) == count:  # it has others in mind
                self.__reads_together = False
            _at_hand.rows = {}

    def __read(self, indices: Sequence[int]) -> _RowsOfBatch:
        reader = self.__opened.reader.at_epoch(self.__epoch)
        known = len(reader.valid)
        if type(self).__getitem__ is _ROW:  # else its indices are of its own
            known = min(known, len(self))
        numbers = [i if type(i) is int else _number(i) for i in indices]
        if numbers and not -known <= min(numbers) <= max(numbers) < known:
            outside = next(number for number in numbers if not -known <= number < known)
            raise IndexError(f"{outside} is outside of the {known} samples")
        rows = reader.valid(np.array(numbers, np.int64) % max(1, known))
        nbytes = len(rows) * self.__opened.row_nbytes
        require_memory(f"a batch of {len(rows)} rows takes", nbytes)
        batch: dict[str, Any] = {
            name: torch.from_numpy(values)
            if isinstance(values, np.ndarray)
            else [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values]
            for name, values in reader.read_whole(rows).items()
        }
        return _RowsOfBatch(batch=batch, sequences=(*reader.sequences,))

    def collate(self, samples: Sequence[Batch]) -> dict[str, Any]:
        """Return field -> (n, ...) tensor, as a `DataLoader` does by default.

        Texts and bytes are lists. Other rows that differ in length are padded with zeros, as
        `Loader` does: ``tokens`` (n, longest, ...), and ``tokens.length`` (n,) int64.
        """
        names = self.__opened.reader.sequences
        batch: dict[str, Any] = _collate(
            samples, collate_fn_map=default_collate_fn_map, sequences=names
        )
        return batch

    def __getstate__(self) -> Any:
        """Return all attributes but what was read from the version."""
        state: Any = super().__getstate__()
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        read = vars(self.__opened)
        kept = {n: value for n, value in attributes.items() if read.get(n, self) is not value}
        return (kept, slots) if slots else kept


def _number(index: Any) -> int:
    """Return the number of one sample; a bool is a part of a mask, and no number."""
    if not isinstance(index, bool) and getattr(index, "dtype", None) not in (torch.bool, np.bool_):
        with contextlib.suppress(TypeError):
            return operator.index(index)
    raise UsageError(
        f"an index is {reprlib.repr(index)} ({type(index).__name__}); give a whole number, a "
        "slice, or an array of whole numbers; of a mask, np.flatnonzero(mask), also to a Subset"
    )


def _indices(given: Any, count: int) -> list[int]:
    """Return the numbers of several samples, or those that a bool for each chooses."""
    array = np.asarray(given)
    if array.dtype == np.bool_ and array.shape == (count,):
        array = np.flatnonzero(array)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise UsageError(
            f"the indices are {reprlib.repr(given)}, {array.dtype} {array.shape}; give (n,) whole "
            f"numbers, or ({count},) bool"
        )
    indices: list[int] = array.tolist()
    return indices


def _require_followed(name: str, kind: type[CachedDataset]) -> None:
    """Refuse an attribute that samples do not follow, unless a class makes them itself."""
    if kind.__getitem__ is _ROW:
        raise UsageError(
            f"{name} was set on a {kind.__name__}, and its samples do not follow it: "
            f"{_UNUSED[name]}, or make the samples in a subclass, by a __getitem__ of its own"
        )


_ROW = CachedDataset.__getitem__
"""The method itself, which a user may replace."""
