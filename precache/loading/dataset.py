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
from types import FrameType, MethodType
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from precache.errors import StoreError, UsageError
from precache.loading.class_numbers import compare_classes
from precache.loading.options import LoaderOptions, choices_of, require_choice, require_path
from precache.loading.sequences import differ_in_length, padded
from precache.loading.slots import require_memory, row_nbytes
from precache.reading.version_reader import FieldNames, VersionReader, read_small_field
from precache.runtime.integers import whole
from precache.storage.open import StorageOptions
from precache.store.version import RowKeys, Version
from precache.transforms import Batch

log = logging.getLogger(__name__)

LARGE_NBYTES = 1 << 30
"""Batches from this size on are checked against the available memory before they are allocated."""


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
        self._rows: dict[int, tuple[RowOfBatch, dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self.batch["row"])

    @overload
    def __getitem__(self, index: int) -> RowOfBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowOfBatch]: ...
    def __getitem__(self, index: int | slice) -> RowOfBatch | list[RowOfBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        if number not in self._rows:
            views = {name: values[number] for name, values in self.batch.items()}
            self._rows[number] = RowOfBatch(views), views
            self._rows[number][0].sequences = self.sequences
        return self._rows[number][0]

    def whole(self) -> dict[str, Any] | None:
        """Return the batch; None if members of a row were replaced, or images have many shapes."""
        if any(isinstance(self.batch[n], list) for n in {*self.batch} - {*self.sequences}):
            return None
        for number, (row, views) in self._rows.items():
            if row.keys() != views.keys() or any(row[n] is not views[n] for n in views):
                return None
            tensors = {n: view for n, view in views.items() if torch.is_tensor(view)}
            if any(_layout(view) != _layout(self.batch[n][number]) for n, view in tensors.items()):
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
    """(dataset, epoch, index) -> rows that were read together and that no sample has taken yet."""

    rows: Mapping[tuple[int, int, int], list[RowOfBatch]] = {}


_at_hand = _AtHand()


class _ByName:
    """A method that only code finds which names it, and holds the dataset itself.

    A wrapper that passes on any name, by a ``__getattr__`` or in C, does not: torch, which looks
    for the method, calls the wrapper's own ``__getitem__``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __get__(self, dataset: Any, kind: Any = None) -> Any:
        if dataset is None:
            return self
        if not _reaches(sys._getframe(1), "__getitems__", dataset):
            raise AttributeError(
                "__getitems__ is found by code that names it, and holds the dataset in a variable "
                "or an attribute",
                name="__getitems__",
                obj=dataset,
            )
        return MethodType(self, dataset)

    def __call__(self, dataset: CachedDataset, indices: Sequence[int]) -> Sequence[Any]:
        samples: Sequence[Any] = self._function(dataset, indices)
        return samples


def _reaches(frame: FrameType, name: str, value: Any) -> bool:
    """Return True if the code of a frame names an attribute of a value that it can reach."""
    if name not in frame.f_code.co_names and name not in frame.f_code.co_consts:
        return False
    near = list(frame.f_locals.values())
    for local in frame.f_locals.values():
        with contextlib.suppress(AttributeError):  # it has no such dict
            near += object.__getattribute__(local, "__dict__").values()
    return any(one is value for one in (*near, *frame.f_globals.values()))


_OF_STORE = "build with --labels FILE"
_OF_READING = "give it as CachedDataset(…)"
_OF_TRANSFORM = "call it on the batches, or give Loader(…, transform=)"
_TRANSFORMS = ("transform", "transforms", "target_transform")
_UNUSED = {
    **dict.fromkeys(_TRANSFORMS, _OF_TRANSFORM),
    **dict.fromkeys(("targets", "labels", "classes", "class_to_idx", "keys"), _OF_STORE),
    **dict.fromkeys(("samples", "imgs", "data"), "choose samples by Subset(dataset, indices)"),
    **dict.fromkeys(("fields", "verify", "access", "storage_options"), _OF_READING),
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
    verify
        Check the checksum of each chunk the first time that a process reads it, as `Loader` does.
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
        verify: bool = True,
        access: str = "map",
        storage_options: StorageOptions = None,
        variant: int = 0,
    ) -> None:
        for name in _TRANSFORMS:
            if hasattr(type(self), name):
                _require_followed(name, type(self))
        for option, value in (("verify", verify), ("access", access)):
            require_choice(option, value, choices_of(LoaderOptions, option))
        self.__opened = _OpenedVersion(
            require_path(uri),
            dict(fields) if isinstance(fields, Mapping) else fields,
            {"verify": verify, "access": access, "storage_options": storage_options},
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

    def __init_subclass__(cls, **options: Any) -> None:
        """Make `__getitem__` and `__getitems__`, which a `DataLoader` prefers, give the same.

        A class that overrides one of them gets the other one as well, made from its own; so
        ``super()`` in either is its base. A `__getitem__` may also be set later.
        """
        super().__init_subclass__(**options)
        several_alone = "__getitems__" in vars(cls) and "__getitem__" not in vars(cls)
        if "__getitems__" not in vars(cls):

            def read_several(self: CachedDataset, indices: Sequence[int]) -> Sequence[Any]:
                """Return the samples at `indices`, with their rows read together."""
                return self.__samples(cls, indices)

            cls.__getitems__ = _ByName(read_several)  # type: ignore[method-assign]
        if several_alone or (cls.__getitem__ is _ROW and _own_method(cls.__mro__)):

            def read_one(self: CachedDataset, index: int) -> Any:
                """Return a sample."""
                return cls.__getitems__(self, [index])[0]

            cls.__getitem__ = read_one  # type: ignore[method-assign]

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
        rows = _at_hand.rows and _at_hand.rows.get((id(self), self.__epoch, number))
        return dict(rows.pop() if rows else self.__read([number])[0])

    @_ByName
    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the samples at `indices`, read together."""
        return self.__samples(CachedDataset, indices)

    def __samples(self, kind: type[CachedDataset], indices: Sequence[int]) -> Sequence[Any]:
        """Return samples as `kind` and its bases make them, whichever of the two has a method."""
        classes = type(self).__mro__
        name, method = _own_method(classes[classes.index(kind) :]) or ("", None)
        if method is None:
            return self.__read(indices)
        if name == "__getitem__":
            return self.__own_samples(method.__get__(self), indices)
        samples: Sequence[Any] = method.__get__(self)(indices)
        return samples

    def __read(self, indices: Sequence[int]) -> _RowsOfBatch:
        reader = self.__opened.reader.at_epoch(self.__epoch)
        known = len(reader.valid)
        if type(self).__getitem__ is _ROW:  # else its indices are of its own
            known = min(known, len(self))
        numbers = np.array([i if type(i) is int else _number(i) for i in indices], np.int64)
        numbers[numbers < 0] += known
        outside = np.flatnonzero((numbers < 0) | (numbers >= known))
        if len(outside):
            raise IndexError(f"{indices[outside[0]]} is outside of the {known} samples")
        rows = reader.valid(numbers)
        if (nbytes := len(rows) * self.__opened.row_nbytes) >= LARGE_NBYTES:
            require_memory(len(rows), nbytes)
        batch: dict[str, Any] = {
            name: torch.from_numpy(values)
            if isinstance(values, np.ndarray)
            else [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values]
            for name, values in reader.read_whole(rows).items()
        }
        return _RowsOfBatch(batch=batch, sequences=reader.sequences)

    def __own_samples(self, one: Callable[[int], Any], indices: Sequence[int]) -> Sequence[Any]:
        """Return the samples that a `__getitem__` of the user makes."""
        rows: dict[tuple[int, int, int], list[RowOfBatch]] = {}
        # What cannot be read is read again below, where the subclass may handle the error.
        with contextlib.suppress(Exception):
            if self.__reads_together:
                for index, row in zip(indices, self.__read(indices), strict=True):
                    key = id(self), self.__epoch, operator.index(index)
                    rows.setdefault(key, []).append(row)
        outer, _at_hand.rows = _at_hand.rows, rows
        try:
            samples = [one(index) for index in indices]
        finally:
            _at_hand.rows = outer
        if rows and sum(map(len, rows.values())) == len(indices):  # it has others in mind
            self.__reads_together = False
        return samples

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


def _require_followed(name: str, kind: type) -> None:
    """Refuse an attribute that samples do not follow, unless a class makes them itself."""
    if _own_method(kind.__mro__) is None:
        raise UsageError(
            f"{name} was set on a {kind.__name__}, and its samples do not follow it: "
            f"{_UNUSED[name]}, or make the samples in a subclass, by a __getitem__ of its own"
        )


_ROW = CachedDataset.__getitem__
"""The method itself, which a user may replace."""


def _own_method(classes: Sequence[type]) -> tuple[str, Any] | None:
    """Return the first `__getitems__` or `__getitem__` of a user among classes, with its name.

    Those behind `CachedDataset` are replaced by its own.
    """
    for base in classes:
        for name in ("__getitems__", "__getitem__"):
            method = vars(base).get(name, _ROW)
            if method is not _ROW and not isinstance(method, _ByName):
                return name, method
        if base is CachedDataset:
            break
    return None
