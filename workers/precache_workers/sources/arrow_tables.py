"""Arrow files with images in a column, as Hugging Face's `datasets` saves them to disk.

Both formats of Arrow IPC are supported, streams and files (``ARROW1``), if their batches are not
compressed. A listing finds the labels, the names and the offsets of the values in each record
batch, so that each part of a sample is a byte range of the file; of a remote file it reads all.
Columns are chosen, and rows named, as in Parquet files.

A row has no time: its identity is that of its file.

Format: https://arrow.apache.org/docs/format/Columnar.html, and Message.fbs beside it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.storage.base import FileInfo, Folder, is_name
from precache.store.columns import arrow_of, numbers_of
from precache.store.locations import Container
from precache_workers.sources.base import IMAGE, NO_COLUMNS, Columns, Fetched
from precache_workers.sources.columns import (
    ChosenColumns,
    choose_images,
    leaf,
    row_labels,
    stored_as,
    texts_of,
    type_of,
)
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Read,
    Rows,
    Wanted,
    container_etag,
    rows_of,
)
from precache_workers.sources.file_ranges import open_file, read_parts
from precache_workers.sources.labels import BYTES_OF
from precache_workers.sources.listings import Members
from precache_workers.sources.parquet_tables import damaged
from precache_workers.sources.sample_parts import (
    IRREGULAR,
    NO_NUMBER,
    is_binary,
    is_list,
    joined,
    text_of,
)

MAGIC = b"ARROW1"
_OF_BYTES = ("binary", "large_binary", "string", "large_string")
_WAY_OUT = "save it with save_to_disk of `datasets`, or as Parquet"


@dataclass(frozen=True)
class ArrowFormat:
    """Arrow files with images; see the module."""

    columns: Columns = NO_COLUMNS
    suffixes: tuple[str, ...] = (".arrow",)
    checks_members: bool = False

    def places(self) -> Any:
        """Return the type of the places of a sample's parts: where each lies, and what it is.

        One without a size is not there; then it says why, if that is not that its row has none.
        """
        import pyarrow as pa

        inputs = self.columns.inputs
        place = pa.struct({"start": pa.int64(), "size": pa.int64(), "kind": pa.string()})
        return pa.struct(dict.fromkeys((*([IMAGE] * inputs.image), *inputs.names), place))

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows]:
        import pyarrow as pa

        where = folder.path(file.name)
        schema, chosen, split = None, None, file.name.rpartition("/")[0]
        with damaged(where):
            for message, end in _messages(folder, file, where):
                if message.type == "schema":
                    schema = pa.ipc.read_schema(message)
                    chosen = choose_images(schema, self.columns, where)
                    _require_plain(schema, chosen, where)
                    chosen.describe(members)
                elif message.type == "record batch" and chosen is not None:
                    batch, places = _located(message, end, schema, chosen)
                    sizes = np.array([place.field("size") for place in places])
                    image = places[0].field("start")
                    names = texts_of(leaf(batch, chosen.name), chosen.name) if chosen.name else ""
                    if split:
                        line = f"samples in {split}/; to take them alone, name it as the source"
                        members.notes[f"{{count}} {line}"] += len(batch)
                    yield rows_of(
                        names,
                        pa.StructArray.from_arrays(places, [*chosen.inputs]).cast(self.places()),
                        units=np.maximum(numbers_of(image), 0) // UNIT_BYTES,
                        sizes=np.where((sizes < 0).all(0), -1, sizes.clip(0).sum(0)),
                        etags=container_etag(file),
                        labels=row_labels(batch, chosen, members),
                    )
                else:
                    raise SourceError(
                        f"{where} has dictionaries, or batches without a schema; {_WAY_OUT}"
                    )

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        places = wanted.places.to_pylist()
        ranges = [
            (self.file_of(container.name, name), part["start"], part["size"])
            for place in places
            for name, part in place.items()
            if part["size"] >= 0
        ]
        if any(start < 0 for _, start, _ in ranges):
            return [None] * len(places)
        read = iter(read_parts(folder, ranges))
        samples: list[Fetched | None] = []
        for place in places:
            data = {n: next(read) if part["size"] >= 0 else None for n, part in place.items()}
            cut = [n for n, d in data.items() if isinstance(d, bytes) and len(d) < place[n]["size"]]
            parts = {n: _value(d, place[n]["kind"]) for n, d in data.items()} if not cut else {}
            samples.append(joined(parts) if parts else None)
        return samples

    def file_of(self, container: str, part: str) -> str:
        """Return the name of the file that has a part of the samples of a container."""
        return container


def _value(data: bytes | StorageError | None, kind: str) -> Any:
    """Return the value that bytes of a file are, by what a listing says of them."""
    if not isinstance(data, bytes):
        none = SampleError(kind) if kind else None
        return none if data is None else FetchError(str(data))
    name, _, shape = kind.partition(":")
    if name in ("bytes", "text"):
        return text_of(data) if name == "text" else data
    if name == "bit":
        return np.array(bool(data[0] >> int(shape) & 1))
    array = np.frombuffer(data, name).astype(np.dtype(name).newbyteorder("="), copy=False)
    sizes = [*map(int, shape.split(","))] if shape else []
    return array.reshape([0, *sizes[1:]] if sizes and not len(array) else sizes)


def _require_plain(schema: Any, chosen: ChosenColumns, where: str) -> None:
    import pyarrow as pa

    types = pa.types
    for column in chosen.inputs.values():
        inner = kind = type_of(schema, column)
        while is_list(inner):
            inner = inner.value_type
        plain = types.is_integer(inner) or types.is_floating(inner)
        plain |= kind is inner and (types.is_boolean(kind) or str(kind) in _OF_BYTES)
        plain &= stored_as(schema, column) == column
        if not plain:
            raise SourceError(f"{where}: its column {column!r} is of type {kind}; {_WAY_OUT}")


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


def _messages(folder: Folder, file: FileInfo, where: str) -> Iterator[tuple[Any, int]]:
    """Yield the messages of a file up to its end mark, and the offset behind each.

    Of a local file only the pages that are used are read.
    """
    import pyarrow as pa

    if not file.size:
        raise SourceError(f"{where} is cut off: it is empty")
    with open_file(folder, file) as stream:
        source = pa.PythonFile(stream, "r")
        if folder.local("") is not None:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            source = pa.BufferReader(pa.py_buffer(mapped))
        source.seek(8 if source.read(len(MAGIC)) == MAGIC else 0)
        reader = pa.ipc.MessageReader.open_stream(source)
        end = source.tell()
        for message in reader:
            end = source.tell()
            yield message, end
        if source.tell() == end:
            raise SourceError(f"{where} is cut off: it has no end mark")


def _located(message: Any, end: int, schema: Any, chosen: ChosenColumns) -> tuple[Any, list[Any]]:
    """Return the columns of a batch that a listing reads, and the places of the parts of samples.

    Parameters
    ----------
    end
        Offset in the file behind the batch.
    """
    import pyarrow as pa

    leaves = [name for name in (*chosen.inputs.values(), *chosen.listed, chosen.name) if name]
    outer = {name if name in schema.names else name.partition(".")[0] for name in leaves}
    taken = [name for name in schema.names if name in outer]
    batch = pa.ipc.read_record_batch(message, schema).select(taken)
    _validate(batch, chosen.name)
    places = []
    for name in chosen.inputs.values():
        column, outer_one = leaf(batch, name), batch.column(name.partition(".")[0])
        present = numbers_of(column.is_valid()) & numbers_of(outer_one.is_valid())
        values, starts, sizes, kinds = _ranges(column)
        within = values.address - message.body.address if values else 0
        if not 0 <= within <= message.body.size:  # the buffer is a copy
            raise ValueError(f"its batches are compressed, or of another byte order; {_WAY_OUT}")
        starts = np.where(present, starts + (end - message.body.size + within), -1)
        sizes, kinds = np.where(present, sizes, -1), np.where(present, kinds, "")
        columns = arrow_of(starts), arrow_of(sizes), pa.array(kinds, pa.string())
        places.append(pa.StructArray.from_arrays(columns, ["start", "size", "kind"]))
    return batch, places


def _ranges(column: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """Return the buffer of the values of a column, and the start, size and kind of each row's.

    A kind is ``bytes``, ``text``, a dtype with a shape, or a bit. A row that is no array has the
    size -1, and the reason in place of the kind.
    """
    import pyarrow as pa

    rows, values, kind = len(column), column, str(column.type)
    if kind in _OF_BYTES:
        _, offsets, data = column.buffers()
        width = np.int64 if kind.startswith("large") else np.int32
        ends = np.frombuffer(offsets, width)[: rows + 1] if rows else np.zeros(1, width)
        name = "bytes" if is_binary(column.type) else "text"
        return data, ends[:-1].astype(np.int64), np.diff(ends), np.full(rows, name, object)
    if pa.types.is_boolean(column.type):
        numbers = np.arange(rows)
        bits = np.array([f"bit:{number}" for number in range(8)], object)
        return column.buffers()[1], numbers // 8, np.ones(rows, np.int64), bits[numbers % 8]
    bounds: np.ndarray = np.arange(rows + 1)
    axes, reasons = list[np.ndarray](), np.full(rows, "", object)
    while is_list(values.type):
        is_fixed = pa.types.is_fixed_size_list(values.type)
        length = values.type.list_size if is_fixed else 0
        ends = np.arange(len(values) + 1) * length
        if not is_fixed and len(values):
            ends = numbers_of(values.offsets).astype(np.int64)
        axis = np.full(rows, -1)
        if axes:  # that of all items of a row has to be one
            lengths, first, last = np.diff(ends), bounds[:-1], bounds[1:] - 1
            changes = np.append(0, np.cumsum(lengths[1:] != lengths[:-1]))
            some = np.flatnonzero(first <= last)
            axis[:] = length
            axis[some] = lengths[first[some]]
            reasons[some[changes[first[some]] != changes[last[some]]]] = IRREGULAR
        axes.append(axis)
        bounds, values = ends[bounds], values.values
        nulls = np.append(0, np.cumsum(~numbers_of(values.is_valid())))
        reasons[np.diff(nulls[bounds]) > 0] = NO_NUMBER
    dtype = np.dtype(values.type.to_pandas_dtype())
    kinds = np.full(rows, f"{dtype.str}:{'-1' * bool(axes)}", object)
    if len(axes) > 1:
        shapes, numbers = np.unique(np.array(axes), axis=1, return_inverse=True)
        texts = [f"{dtype.str}:{','.join(map(str, shape))}" for shape in shapes.T.tolist()]
        kinds = np.array([*texts, None], object)[numbers.reshape(-1)]
    wrong = reasons != ""
    sizes = np.where(wrong, -1, np.diff(bounds) * dtype.itemsize)
    return values.buffers()[1], bounds[:-1] * dtype.itemsize, sizes, np.where(wrong, reasons, kinds)


def _validate(batch: Any, key: str | None) -> None:
    """Raise `ArrowInvalid` for a malformed batch; keys need not be UTF-8."""
    kind = str(batch.schema.field(key).type) if key in batch.schema.names else ""
    if kind in BYTES_OF:
        place, column = batch.schema.get_field_index(key), batch.column(key)
        batch = batch.set_column(place, key, column.view(BYTES_OF[kind]))
    batch.validate(full=True)
