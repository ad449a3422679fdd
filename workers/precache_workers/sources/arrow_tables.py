"""Arrow files with images in a column, as Hugging Face's `datasets` saves them to disk.

Both formats of Arrow IPC are supported, streams and files (``ARROW1``). Of a local file, neither a
listing nor a read touches other values than it returns: a batch is laid out in memory that is
zeros, and what is needed is read into it. (A map would end the process if the file were cut short
meanwhile.) Of a remote file, and where batches are compressed, a batch is read at once. Columns are
chosen, and rows named, as in Parquet files.

A row has no time: its identity is that of its file.

Format: https://arrow.apache.org/docs/format/Columnar.html, and Message.fbs beside it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from precache.errors import SourceError
from precache.storage.base import FileInfo, Folder, is_name
from precache_workers.sources.columns import (
    ChosenColumns,
    choose_images,
    keys_of,
    leaf,
    outer_of,
    row_labels,
    stored_as,
)
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Rows,
    rows_of,
    structs,
)
from precache_workers.sources.file_ranges import open_file
from precache_workers.sources.labels import BYTES_OF, is_list
from precache_workers.sources.listings import Members
from precache_workers.sources.parquet_tables import TableFormat, Value, damaged
from precache_workers.sources.sample_parts import cell_of

MAGIC = b"ARROW1"
_VARIABLE = ("binary", "large_binary", "string", "large_string")
_WAY_OUT = "save it with save_to_disk of `datasets`, or as Parquet"


@dataclass(frozen=True)
class ArrowFormat(TableFormat):
    """Arrow files with images; see the module. A group is the offset of a record batch."""

    suffixes: tuple[str, ...] = (".arrow",)

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows]:
        where, split = folder.path(file.name), file.name.rpartition("/")[0]
        with _opened(folder, file, where) as stream:
            schema = pa.ipc.read_schema(pa.PythonFile(stream, "r"))
            chosen = choose_images(schema, self.columns, where)
            chosen.describe(members)
            whole, start = folder.local("") is None, stream.tell()
            for number in itertools.count():
                read = _read_batch(stream, schema, chosen, where, whole=whole)
                if read is None:
                    break
                batch, nbytes, is_whole = read
                count, rows = len(batch), np.arange(len(batch))
                nbytes = max(1, nbytes // max(1, count))
                units: np.ndarray | int = (start + rows * nbytes) // UNIT_BYTES
                if is_whole:
                    units, members.forward = number, True
                if split:
                    line = f"samples in {split}/; to take them alone, name it as the source"
                    members.notes[f"{{count}} {line}"] += count
                yield rows_of(
                    keys_of(batch, chosen),
                    structs(self.places(), (np.full(count, start), rows)),
                    units=units,
                    nbytes=nbytes,
                    labels=row_labels(batch, chosen, members),
                )
                start = stream.tell()

    def head(self, folder: Folder, file: FileInfo) -> tuple[Any, ...]:
        with _opened(folder, file, where := folder.path(file.name)) as stream:
            schema = pa.ipc.read_schema(pa.PythonFile(stream, "r"))
            return schema, choose_images(schema, self.columns, where)

    def values(
        self, folder: Folder, file: FileInfo, head: Any, rows: Mapping[int, Collection[int]]
    ) -> Iterator[Value]:
        schema, chosen = head
        with _opened(folder, file, where := folder.path(file.name)) as stream:
            whole = folder.local("") is None
            for start, some in rows.items():
                stream.seek(start)
                read = _read_batch(stream, schema, chosen, where, some, whole=whole)
                for row, (name, column) in itertools.product(some, chosen.inputs.items()):
                    if read and len(one := read.columns.slice(row, 1)):
                        is_null = one.column(outer_of(schema, column)).null_count
                        yield start, row, name, None if is_null else cell_of(leaf(one, column), 0)


def is_saved_dataset(path: Path) -> bool:
    """Return True if `save_to_disk` wrote a folder."""
    one = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return one or (path / "dataset_dict.json").is_file()


def saved_files(folder: Folder) -> tuple[str, ...]:
    """Return the Arrow files of all splits that `save_to_disk` wrote; none for other folders.

    Files beside them are caches of `datasets` and not part of the data.

    Raises
    ------
    SourceError
        The JSON documents that name the files are damaged, or list a selection of rows.
    """
    whole = folder.get("dataset_dict.json")
    if whole is None and folder.info("state.json") is None:
        return ()
    try:
        splits = [""] if whole is None else [f"{split}/" for split in json.loads(whole)["splits"]]
        names = []
        for split in splits:
            state = json.loads(folder.read(f"{split}state.json"))
            if state.get("_indices_data_files"):
                raise SourceError(
                    f"the source {folder} has a selection of rows beside its data, as old versions "
                    "of `datasets` saved it; load it and save it again"
                )
            names += [f"{split}{part['filename']}" for part in state["_data_files"]]
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise SourceError(
            f"the source {folder} has a dataset_dict.json or state.json that is damaged: {error!r}"
        ) from None
    wrong = [name for name in names if not is_name(name)]
    if wrong or not names:
        raise SourceError(f"the source {folder} names the files {wrong[:3]} as its data")
    return tuple(names)


# --- messages -----------------------------------------------------------------------------------


@contextmanager
def _opened(folder: Folder, file: FileInfo, where: str) -> Iterator[BinaryIO]:
    """Open a file, and yield it at its schema.

    Raises
    ------
    SourceError
        The file is damaged.
    """
    if not file.size:
        raise SourceError(f"{where} is cut off: it is empty")
    with damaged(where), open_file(folder, file) as stream:
        stream.seek(8 if stream.read(len(MAGIC)) == MAGIC else 0)
        yield stream


class _Batch(NamedTuple):
    """The chosen columns of a record batch, the bytes of all, and True if these were all read."""

    columns: Any
    nbytes: int
    is_whole: bool


def _read_batch(
    stream: BinaryIO,
    schema: Any,
    chosen: ChosenColumns,
    where: str,
    rows: Collection[int] | None = None,
    *,
    whole: bool,
) -> _Batch | None:
    """Read the next record batch of a file; None at the end mark.

    Parameters
    ----------
    rows
        Rows whose inputs are read; None for what a listing reads, of all rows.
    whole
        Everything is read, and not only that.

    Raises
    ------
    SourceError
        The file is cut off, or has dictionaries.
    """
    start = stream.tell()
    end, cut = stream.seek(0, os.SEEK_END), SourceError(f"{where} is cut off, or has no end mark")

    def number_at(place: int, size: int) -> int:
        return int.from_bytes(head[place : place + size], "little", signed=size > 2)

    stream.seek(start)
    head = stream.read(8)
    prefix = 8 if number_at(0, 4) == -1 else 4  # as versions before 0.15 wrote it
    length = number_at(prefix - 4, 4)
    if len(head) < prefix or not 0 <= length <= end - start:
        raise cut
    if not length:
        return None
    stream.seek(start + prefix)
    head = stream.read(length)
    table = number_at(0, 4)  # a table of FlatBuffers, whose fourth field is the size of the body
    fields = table - number_at(table, 4)
    body = number_at(table + number_at(fields + 10, 2), 8) if number_at(fields, 2) > 10 else 0
    if not 0 <= body <= end - start - prefix - length:
        raise cut
    memory = np.zeros(prefix + length + body, np.uint8)

    def load(first: int, last: int) -> None:
        stream.seek(start + first)
        if stream.readinto(memory[first:last]) < last - first:  # type: ignore[attr-defined]
            raise cut

    def load_part(buffer: Any, first: int = 0, last: int | None = None) -> None:
        if buffer and not whole:
            at = buffer.address - memory.ctypes.data
            load(at + first, at + (buffer.size if last is None else last))

    load(0, len(memory) if whole else prefix + length)
    message = pa.ipc.read_message(pa.py_buffer(memory))
    if message.type != "record batch":
        raise SourceError(f"{where} has dictionaries; {_WAY_OUT}")
    try:
        batch = pa.ipc.read_record_batch(message, schema)
    except (OSError, pa.ArrowInvalid):
        if whole:
            raise
        batch = None
    if not whole and (batch is None or _is_decompressed(batch, memory)):
        stream.seek(start)
        return _read_batch(stream, schema, chosen, where, rows, whole=True)
    spans = [(row, row + 1) for row in rows or () if row < len(batch)]
    names = [*chosen.inputs.values()]
    if rows is None:
        spans = [(0, len(batch))]
        names = [name for name in (*chosen.listed, chosen.name) if name]
    outer = {outer_of(schema, name) for name in (*names, *chosen.inputs.values())}
    for name in outer:
        _load_values(batch.column(name), [], load_part)
    for name in names:
        _load_values(leaf(batch, stored_as(schema, name)), spans, load_part)
    stream.seek(start + len(memory))
    batch = plain = batch.select([name for name in schema.names if name in outer])
    key = chosen.name
    if key in batch.schema.names and (kind := str(batch.schema.field(key).type)) in BYTES_OF:
        place, column = batch.schema.get_field_index(key), batch.column(key)
        plain = batch.set_column(place, key, column.view(BYTES_OF[kind]))  # need not be UTF-8
    plain.validate(full=True)
    return _Batch(batch, body, whole)


def _load_values(
    array: Any, spans: Sequence[tuple[int, int]], load_part: Callable[..., None]
) -> None:
    """Load some spans of rows of an array, and what says where all rows lie."""
    array = getattr(array, "storage", array)  # of an extension type
    kind, (validity, *rest) = array.type, array.buffers()
    load_part(validity)
    if pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            _load_values(array.field(number), spans, load_part)
    elif pa.types.is_fixed_size_list(kind):
        items = [(first * kind.list_size, last * kind.list_size) for first, last in spans]
        _load_values(array.values, items, load_part)
    elif is_list(kind) or str(kind) in _VARIABLE:
        load_part(rest[0])
        ends = np.frombuffer(rest[0] or b"", "i8" if str(kind).startswith("large") else "i4")
        parts = [(int(ends[first]), int(ends[last])) for first, last in spans]
        if is_list(kind):
            _load_values(array.values, parts, load_part)
        else:
            for part in parts:
                load_part(rest[1], *part)
    elif pa.types.is_primitive(kind):
        for first, last in spans:
            load_part(rest[0], first * kind.bit_width // 8, -(-last * kind.bit_width // 8))
    else:
        for buffer in rest:
            load_part(buffer)


def _is_decompressed(batch: Any, memory: np.ndarray) -> bool:
    """Return True if the values of a batch are not in the memory of its message."""
    start, end = memory.ctypes.data, memory.ctypes.data + len(memory)
    buffers = (buffer for column in batch.columns for buffer in column.buffers())
    return not all(start <= buffer.address <= end for buffer in buffers if buffer and buffer.size)
