"""Arrow files with images in a column, as Hugging Face's `datasets` saves them to disk.

Both formats of Arrow IPC are supported, streams and files (``ARROW1``). Of a local file, neither a
listing nor a read touches other values than it returns. Of a remote file, and where batches are
compressed, a batch is read at once. Columns are chosen, and rows named, as in Parquet files.

A row has no time: its identity is that of its file.

Format: https://arrow.apache.org/docs/format/Columnar.html
"""

from __future__ import annotations

import itertools
import json
import mmap
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from precache.errors import SourceError
from precache.storage.base import FileInfo, Folder, is_name
from precache.store.locations import Container
from precache_workers.sources.columns import (
    ChosenColumns,
    choose_images,
    leaf,
    row_labels,
    texts_of,
)
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Rows,
    container_etag,
    rows_of,
    structs,
)
from precache_workers.sources.file_ranges import open_file
from precache_workers.sources.labels import BYTES_OF
from precache_workers.sources.listings import Members
from precache_workers.sources.parquet_tables import TableFormat, Value, damaged
from precache_workers.sources.sample_parts import cell_of

MAGIC = b"ARROW1"
_WAY_OUT = "save it with save_to_disk of `datasets`, or as Parquet"


@dataclass(frozen=True)
class ArrowFormat(TableFormat):
    """Arrow files with images; see the module. A group is the offset of a record batch."""

    suffixes: tuple[str, ...] = (".arrow",)

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows]:
        import pyarrow as pa

        where, split = folder.path(file.name), file.name.rpartition("/")[0]
        with _opened(folder, file, where) as source:
            schema = pa.ipc.read_schema(source)
            chosen = choose_images(schema, self.columns, where)
            chosen.describe(members)
            start = source.tell()
            for number, message in enumerate(pa.ipc.MessageReader.open_stream(source)):
                batch = _batch(message, schema, chosen, where)
                count, rows = len(batch), np.arange(len(batch))
                nbytes = message.body.size // max(1, count)
                units: np.ndarray | int = (start + rows * nbytes) // UNIT_BYTES
                if folder.local("") is None or _is_decompressed(batch, message):
                    units, members.forward = number, True
                if split:
                    line = f"samples in {split}/; to take them alone, name it as the source"
                    members.notes[f"{{count}} {line}"] += count
                yield rows_of(
                    texts_of(leaf(batch, chosen.name), chosen.name) if chosen.name else (),
                    structs(self.places(), (np.full(count, start), rows)),
                    units=units,
                    nbytes=max(1, nbytes),
                    etags=container_etag(file),
                    labels=row_labels(batch, chosen, members),
                )
                start = source.tell()
            if source.tell() == start:
                raise SourceError(f"{where} is cut off: it has no end mark")

    def values(
        self, folder: Folder, container: Container, rows: Mapping[int, Collection[int]]
    ) -> Iterator[Value]:
        import pyarrow as pa

        file, where = FileInfo(container.name, container.size, -1), folder.path(container.name)
        with _opened(folder, file, where) as source:

            def read_schema() -> tuple[Any, ...]:
                schema = pa.ipc.read_schema(source)
                return schema, choose_images(schema, self.columns, where)

            schema, chosen = self.head_of(folder, container, read_schema)
            for start, some in rows.items():
                source.seek(start)
                batch = _batch(pa.ipc.read_message(source), schema, chosen, where)
                for row, (name, column) in itertools.product(some, chosen.inputs.items()):
                    if len(one := batch.slice(row, 1)):
                        is_null = one.column(_outer(schema, column)).null_count
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
def _opened(folder: Folder, file: FileInfo, where: str) -> Iterator[Any]:
    """Open a file, and yield it at its schema.

    Of a local file only the pages that are used are read.

    Raises
    ------
    SourceError
        The file is damaged.
    """
    import pyarrow as pa

    if not file.size:
        raise SourceError(f"{where} is cut off: it is empty")
    with damaged(where), open_file(folder, file) as stream:
        source = pa.PythonFile(stream, "r")
        if folder.local("") is not None:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            source = pa.BufferReader(pa.py_buffer(mapped))
        source.seek(8 if source.read(len(MAGIC)) == MAGIC else 0)
        yield source


def _batch(message: Any, schema: Any, chosen: ChosenColumns, where: str) -> Any:
    """Return the chosen columns of a record batch, validated; keys need not be UTF-8."""
    import pyarrow as pa

    if message.type != "record batch":
        raise SourceError(f"{where} has dictionaries; {_WAY_OUT}")
    names = (*chosen.inputs.values(), *chosen.listed, chosen.name)
    outer = {_outer(schema, name) for name in names if name}
    batch = pa.ipc.read_record_batch(message, schema)
    batch = plain = batch.select([name for name in schema.names if name in outer])
    key = chosen.name
    if key in batch.schema.names and (kind := str(batch.schema.field(key).type)) in BYTES_OF:
        place, column = batch.schema.get_field_index(key), batch.column(key)
        plain = batch.set_column(place, key, column.view(BYTES_OF[kind]))
    plain.validate(full=True)
    return batch


def _outer(schema: Any, name: str) -> str:
    """Return the column of a leaf."""
    return name if name in schema.names else name.partition(".")[0]


def _is_decompressed(batch: Any, message: Any) -> bool:
    """Return True if the values of a batch are no part of its message."""
    start, end = message.body.address, message.body.address + message.body.size
    buffers = (buffer for column in batch.columns for buffer in column.buffers())
    return not all(start <= buffer.address <= end for buffer in buffers if buffer and buffer.size)
