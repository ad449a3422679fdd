"""Files of NumPy arrays whose first axis is the samples.

A field starts from the array itself, or from the one of a column: a file in the same folder, whose
name without suffix is the column's. Labels and keys are such columns, too. Each value is a range of
bytes of its file.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from precache.errors import FetchError, SampleError, SourceError
from precache.messages import did_you_mean
from precache.storage.base import FileInfo, Folder, is_name, required
from precache_workers.sources.base import IMAGE, Doubt, choice_error, quoted
from precache_workers.sources.columns import texts_of
from precache_workers.sources.container_names import Containers
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Rows,
    rows_of,
    structs,
)
from precache_workers.sources.file_ranges import read_parts, require_size
from precache_workers.sources.labels import typed_column
from precache_workers.sources.listings import Members
from precache_workers.sources.parquet_tables import TableFormat, Value, damaged
from precache_workers.sources.sample_parts import array_header

HEADER_BYTES = 1 << 16
LISTED_ROWS = 1 << 14


class Array(NamedTuple):
    """An array in a file: where its values begin, their type, and its shape."""

    file: FileInfo
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @classmethod
    def of(cls, folder: Folder, file: FileInfo, *, texts: bool = False) -> Array:
        """Read the header of a file.

        Parameters
        ----------
        texts
            Values may be text.

        Raises
        ------
        SourceError
            It is no array of numbers with rows, or has not the size that its header claims.
        """
        where = folder.path(file.name)
        require_size(folder, file)
        head = folder.read_first(file.name, HEADER_BYTES)
        try:
            shape, by_columns, dtype, start = array_header(head, texts=texts)
        except SampleError as error:
            raise SourceError(f"{where} {error}") from None
        array = cls(file, start, dtype, shape)
        if min(shape, default=0) < 1:
            raise SourceError(f"{where} has the shape {shape}, and no row with values")
        if by_columns and len(shape) > 1:
            raise SourceError(
                f"{where} is in Fortran's order, in which the values of a row lie apart; save "
                "np.ascontiguousarray(array)"
            )
        if shape[0] * array.row_bytes != (held := file.size - start):
            raise SourceError(
                f"{where} is said to be {shape} of {dtype}, and has {held:,} bytes of values"
            )
        return array

    def values(self, folder: Folder, first: int, end: int) -> Any:
        """Return rows as an Arrow array of labels or keys, or of lists of labels."""
        length = (end - first) * self.row_bytes
        [part] = folder.read_ranges([(self.file.name, self.start + first * self.row_bytes, length)])
        if len(data := required(part)) != length:
            raise SourceError(f"{folder.path(self.file.name)} has changed while it was listed")
        kind = np.dtype("f4") if self.dtype == np.float16 else self.dtype.newbyteorder("=")
        values = np.frombuffer(data, self.dtype).astype(kind, copy=False)
        many = math.prod(self.shape[1:])
        flat = pa.array(values)
        return flat if many == 1 else pa.FixedSizeListArray.from_arrays(flat, many)


@dataclass(frozen=True)
class ArrayFiles(Containers):
    """Files of arrays, each of which changes with its columns.

    Attributes
    ----------
    are_parts
        The user says that all files have samples in their rows.
    """

    columns: tuple[str, ...] = ()
    are_parts: bool = False

    def files(self, left_out: Counter[str]) -> list[FileInfo]:
        files = super().files(left_out)
        if len(files) > 1 and not self.are_parts:
            rows = ("--source-kind", "npy"), "if the rows of all of them are samples"
            alone = ("--source-kind", "folders"), "if each file is one sample"
            columns = f"if they are columns of the same samples, name one, as {files[0].name}"
            several = f"the source {self} has {len(files):,} files of arrays"
            raise choice_error([Doubt.of(several, rows, alone, ((), columns), of_members=True)])
        return [self._with_columns(file) for file in files]

    def info(self, name: str) -> FileInfo | None:
        file = super().info(name)
        return file and self._with_columns(file)

    def _with_columns(self, file: FileInfo) -> FileInfo:
        beside = (file_of(file.name, column) for column in self.columns)
        found = (self.folder.info(name) for name in beside if is_name(name))
        files = [file, *filter(None, found)]
        if len(files) == 1:
            return file
        if any(not one.etag and one.mtime_ns < 0 for one in files):
            return file._replace(etag="", mtime_ns=-1)
        times = json.dumps([one[:4] for one in files]).encode()
        states = np.array([one.file_state for one in files])
        state = -1 if states.min() < 0 else xxhash.xxh3_64_intdigest(states.tobytes()) >> 1
        return file._replace(etag=xxhash.xxh3_64_hexdigest(times), file_state=state)


def file_of(name: str, column: str) -> str:
    """Return the name of the file of a column of an array."""
    folder, slash, _ = name.rpartition("/")
    return f"{folder}{slash}{column}.npy"


@dataclass(frozen=True)
class NumpyFormat(TableFormat):
    """Arrays whose first axis is the samples; see the module."""

    suffixes: tuple[str, ...] = (".npy",)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are read."""
        columns = self.columns
        return tuple(filter(None, (*columns.inputs.names, columns.label, columns.key)))

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows]:
        where, columns = folder.path(file.name), self.columns
        arrays = self._columns(folder, file, self.names)
        beside = [n for n in columns.inputs.unnamed if folder.info(file_of(file.name, n))]
        stem = file.name.rpartition("/")[2].removesuffix(".npy")
        columns.inputs.require_clear(beside, stem, where)
        [inputs] = self.head(folder, file)
        first_input = next(iter(inputs.values()))
        rows = [
            f"{' x '.join(map(str, array.shape[1:])) or 'one'} {array.dtype.name}"
            + ("" if name == IMAGE else f" from {name!r}")
            for name, array in inputs.items()
        ]
        hint = "no labels (--label-column NAME takes those of NAME.npy beside it)"
        given = f"labels from {columns.label!r}" if columns.label else hint
        note = f"{{count}} samples are rows of arrays: {', '.join(rows)}; {given}"
        count = first_input.shape[0]
        members.notes[note] += count
        for first in range(0, count, LISTED_ROWS):
            end = min(first + LISTED_ROWS, count)
            numbers = np.arange(first, end)
            names: Any = ()
            with damaged(where):
                if columns.key:
                    names = texts_of(arrays[columns.key].values(folder, first, end), columns.key)
                labels = None
                if columns.label:
                    given = arrays[columns.label].values(folder, first, end)
                    labels = typed_column(given, columns.label)
            yield rows_of(
                names,
                structs(self.places(), (np.zeros_like(numbers), numbers)),
                units=(first_input.start + numbers * first_input.row_bytes) // UNIT_BYTES,
                sizes=sum(array.row_bytes for array in inputs.values()),
                labels=labels,
            )

    def head(self, folder: Folder, file: FileInfo) -> tuple[dict[str, Array]]:
        """Return the arrays that fields start from."""
        arrays = self._columns(folder, file, self.columns.inputs.names)
        if not self.columns.inputs.image:
            del arrays[IMAGE]
        return ({name: Array.of(folder, array.file) for name, array in arrays.items()},)

    def values(
        self, folder: Folder, file: FileInfo, head: Any, rows: Mapping[int, Collection[int]]
    ) -> Iterator[Value]:
        [arrays] = head
        wanted = list(itertools.product(rows[0], arrays.items()))
        ranges = [
            (array.file.name, array.start + row * array.row_bytes, array.row_bytes)
            for row, (_, array) in wanted
        ]
        for (row, (name, array)), data in zip(wanted, read_parts(folder, ranges), strict=True):
            if isinstance(data, FetchError):
                yield 0, row, name, data
            else:
                values = np.frombuffer(data, array.dtype).reshape(array.shape[1:])
                yield 0, row, name, values.astype(array.dtype.newbyteorder("="), copy=False)

    def _columns(self, folder: Folder, file: FileInfo, names: Iterable[str]) -> dict[str, Array]:
        """Return the array of a file, and those of columns, which have as many rows.

        Raises
        ------
        SourceError
            One is not there, or has other rows.
        """
        own, where = Array.of(folder, file, texts=True), folder.path(file.name)
        arrays = {IMAGE: own}
        for name in names:
            path = file_of(file.name, name)
            if not is_name(path) or (info := folder.info(path)) is None:
                inside = folder.names(file.name.rpartition("/")[0])
                beside = [n.removesuffix(".npy") for n in inside if n.endswith(".npy")]
                raise SourceError(
                    f"{where} has no column {name!r}{did_you_mean(name, beside)}, as there is no "
                    f"{name}.npy beside it; its folder has {quoted(beside, 8)}"
                )
            arrays[name] = array = Array.of(folder, info, texts=True)
            if array.shape[0] != own.shape[0]:
                raise SourceError(
                    f"{folder.path(path)} has {array.shape[0]:,} rows, and {where} has "
                    f"{own.shape[0]:,}; columns have a row for each sample"
                )
        return arrays
