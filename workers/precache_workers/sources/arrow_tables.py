"""Arrow files with images in a column, as Hugging Face's `datasets` saves them to disk.

Both formats of Arrow IPC are supported, streams and files (``ARROW1``), if their batches are not
compressed. A listing finds the labels, the names and the offsets of the images in each record
batch, so that each image is a byte range of the file; of a remote file it reads all. Columns are
chosen, and rows named, as in Parquet files.

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

from precache.errors import SampleError, SourceError
from precache.storage.base import FileInfo, Folder, is_name
from precache.store.locations import Container
from precache_workers.sources.base import NO_COLUMNS, Columns, Fetched, Sample
from precache_workers.sources.columns import (
    ChosenColumns,
    choose_images,
    leaf,
    row_labels,
    texts_of,
)
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Read,
    Rows,
    Wanted,
    container_etag,
    read_places,
    rows_of,
    structs,
)
from precache_workers.sources.file_ranges import open_file
from precache_workers.sources.labels import BYTES_OF
from precache_workers.sources.listings import Members
from precache_workers.sources.parquet_tables import damaged

MAGIC = b"ARROW1"
_WAY_OUT = "save it with save_to_disk of `datasets`, or as Parquet"


@dataclass(frozen=True)
class ArrowFormat:
    """Arrow files with images; see the module."""

    columns: Columns = NO_COLUMNS
    suffixes: tuple[str, ...] = (".arrow",)
    checks_members: bool = False

    def places(self) -> Any:
        """Return the type of the places of images, which have no size where a row has none."""
        import pyarrow as pa

        return pa.struct({"start": pa.int64(), "size": pa.int64()})

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
                    batch, starts, sizes = _located(message, end, schema, chosen)
                    names = texts_of(leaf(batch, chosen.name), chosen.name) if chosen.name else ""
                    if split:
                        line = f"samples in {split}/; to take them alone, name it as the source"
                        members.notes[f"{{count}} {line}"] += len(batch)
                    yield rows_of(
                        names,
                        structs(self.places(), (starts, sizes)),
                        units=np.maximum(starts, 0) // UNIT_BYTES,
                        sizes=sizes,
                        etags=container_etag(file),
                        labels=row_labels(batch, chosen, members),
                    )
                else:
                    raise SourceError(
                        f"{where} has dictionaries, or batches without a schema; {_WAY_OUT}"
                    )

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        places = [(place["start"], place["size"]) for place in wanted.places.to_pylist()]

        def sample(number: int, data: bytes) -> Fetched | None:
            start, size = places[number]
            if start < 0:
                return SampleError("its row has no image")
            return Sample.of(data) if len(data) == size else None

        ranges = [(max(0, start), max(0, size)) for start, size in places]
        return read_places(folder, container, ranges, sample)


def _require_plain(schema: Any, chosen: ChosenColumns, where: str) -> None:
    import pyarrow as pa

    kind = schema.field(chosen.image).type
    kind = kind.field("bytes").type if chosen.struct else kind
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise SourceError(f"{where}: its column {chosen.image!r} is of type {kind}; {_WAY_OUT}")


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


def _located(
    message: Any, end: int, schema: Any, chosen: ChosenColumns
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the columns of a batch that a listing reads; starts and sizes of its images, or -1.

    Parameters
    ----------
    end
        Offset in the file behind the batch.
    """
    import pyarrow as pa

    key = (chosen.name or "").partition(".")[0] if chosen.name not in schema.names else chosen.name
    taken = [n for n in schema.names if n in (chosen.image, *chosen.listed, key)]
    batch = pa.ipc.read_record_batch(message, schema).select(taken)
    _validate(batch, chosen.name)
    image = batch.column(chosen.image)
    column = image.field("bytes") if chosen.struct else image
    present = np.asarray(image.is_valid()) & np.asarray(column.is_valid())
    _, places, pixels = column.buffers()
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    offsets = np.frombuffer(places, width)[: len(column) + 1] if len(column) else np.zeros(1, width)
    within = pixels.address - message.body.address if pixels else 0
    if not 0 <= within <= message.body.size:  # the buffer is a copy
        raise ValueError(f"its batches are compressed, or of another byte order; {_WAY_OUT}")
    start = end - message.body.size + within
    starts = np.where(present, start + offsets[:-1], -1)
    return batch, starts, np.where(present, np.diff(offsets), -1)


def _validate(batch: Any, key: str | None) -> None:
    """Raise `ArrowInvalid` for a malformed batch; keys need not be UTF-8."""
    kind = str(batch.schema.field(key).type) if key in batch.schema.names else ""
    if kind in BYTES_OF:
        place, column = batch.schema.get_field_index(key), batch.column(key)
        batch = batch.set_column(place, key, column.view(BYTES_OF[kind]))
    batch.validate(full=True)
