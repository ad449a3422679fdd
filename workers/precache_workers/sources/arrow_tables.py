"""Arrow files with images in a column, as Hugging Face's `datasets` saves them to disk.

Both formats of Arrow IPC are supported, streams and files (``ARROW1``), if their batches are not
compressed. A listing reads the labels, the names and the offsets of the images in each record
batch, so that each image is a byte range of the file. Columns are chosen, and rows named, as in
Parquet files.

A row has no time: its identity is that of its file.

Format: https://arrow.apache.org/docs/format/Columnar.html, and Message.fbs beside it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.storage.base import FileInfo, Folder, is_name, required
from precache.store.locations import Container
from precache_workers.sources.base import NO_COLUMNS, Columns, Sample
from precache_workers.sources.columns import (
    ChosenColumns,
    choose_images,
    leaf,
    row_labels,
    texts_of,
)
from precache_workers.sources.containers import (
    UNIT_BYTES,
    Members,
    Read,
    Rows,
    Wanted,
    container_etag,
    rows_of,
    structs,
)
from precache_workers.sources.file_ranges import read_parts, require_size
from precache_workers.sources.labels import BYTES_OF
from precache_workers.sources.parquet_tables import damaged

MAGIC = b"ARROW1"
MOST_MESSAGE_METADATA = 16 << 20
"""Most bytes of the metadata of a message."""
HEAD_BYTES = 8 << 10
"""Bytes of a message that are read first; the metadata of most messages fit."""

_MARK = 0xFFFFFFFF
_SCHEMA, _BATCH = 1, 3
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
        where = folder.path(file.name)
        require_size(folder, file)
        schema, chosen, split = None, None, file.name.rpartition("/")[0]
        with damaged(where):
            for message in _messages(folder, file, where):
                if message.kind == _SCHEMA:
                    schema = message.schema()
                    chosen = choose_images(schema, self.columns, where)
                    _require_plain(schema, chosen, where)
                    chosen.describe(members)
                elif message.kind == _BATCH and chosen is not None:
                    batch, starts, sizes = _read_batch(folder, file.name, message, schema, chosen)
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
        ranges = [(container.name, max(0, start), max(0, size)) for start, size in places]
        return [
            SampleError("its row has no image") if start < 0
            else FetchError(str(data)) if isinstance(data, StorageError)
            else None if len(data) != size
            else Sample.of(data)
            for (start, size), data in zip(places, read_parts(folder, ranges), strict=True)
        ]  # fmt: skip


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


class _Message(NamedTuple):
    """A message of Arrow IPC: its metadata with their prefix, and offset and size of its body."""

    kind: int
    metadata: bytes
    body: int
    body_bytes: int

    def schema(self) -> Any:
        import pyarrow as pa

        return pa.ipc.read_schema(pa.py_buffer(self.metadata))


def _messages(folder: Folder, file: FileInfo, where: str) -> Iterator[_Message]:
    """Yield the messages of a file up to its end mark."""

    def read(start: int, length: int) -> bytes:
        part = (file.name, start, min(length, file.size - start))
        return required(*read_parts(folder, [part]))

    offset = 8 if file.size >= 8 and read(0, 8).startswith(MAGIC) else 0
    while True:
        head = read(offset, HEAD_BYTES) if offset < file.size else b""
        if len(head) < 8:
            raise SourceError(f"{where} is cut off: it has no end mark")
        mark, length = struct.unpack("<II", head[:8])
        if mark == _MARK and length == 0:
            return
        body = offset + 8 + length
        if mark != _MARK or length > MOST_MESSAGE_METADATA or body > file.size:
            raise SourceError(
                f"{where} is cut off at byte {offset:,}, or no Arrow file; {_WAY_OUT}"
            )
        if 8 + length > len(head):
            head = read(offset, 8 + length)
        data = head[8 : 8 + length]
        message = _followed(data, 0)
        kind_at, length_at = _slot(data, message, 1), _slot(data, message, 3)
        kind = _number(data, "<B", kind_at) if kind_at else 0
        body_bytes = _number(data, "<q", length_at) if length_at else 0
        if not 0 <= body_bytes <= file.size - body:
            raise SourceError(
                f"{where} is cut off: a batch at byte {body:,} should have {body_bytes:,} bytes"
            )
        if kind == _BATCH and _slot(data, _followed(data, _slot(data, message, 2)), 3):
            raise ValueError(f"its batches are compressed; {_WAY_OUT}")
        yield _Message(kind, head[: 8 + length], body, body_bytes)
        offset = body + body_bytes


def _number(data: bytes, form: str, offset: int) -> int:
    if not 0 <= offset <= len(data) - struct.calcsize(form):
        raise ValueError("its metadata are damaged")
    [number] = struct.unpack_from(form, data, offset)
    return int(number)


def _followed(data: bytes, offset: int) -> int:
    """Return the target of a FlatBuffers offset."""
    return offset + _number(data, "<I", offset)


def _slot(data: bytes, table: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table; 0 if it is absent."""
    fields = table - _number(data, "<i", table)
    at = 4 + 2 * number
    offset = _number(data, "<H", fields + at) if at < _number(data, "<H", fields) else 0
    return table + offset if offset else 0


# --- rows ---------------------------------------------------------------------------------------


def _read_batch(
    folder: Folder, name: str, message: _Message, schema: Any, chosen: ChosenColumns
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the columns of a batch that a listing reads; starts and sizes of its images, or -1.

    Only the buffers of names, labels and image offsets are read. The others stay zeros: pyarrow
    does not use their content.
    """
    import pyarrow as pa

    prefix = len(message.metadata)
    whole = np.zeros(
        prefix + message.body_bytes, np.uint8
    )  # pages that are not used take no memory
    whole[:prefix] = np.frombuffer(message.metadata, np.uint8)
    memory = pa.py_buffer(whole)
    key = (chosen.name or "").partition(".")[0] if chosen.name not in schema.names else chosen.name
    taken = [n for n in schema.names if n in (chosen.image, *chosen.listed, key)]
    batch = pa.ipc.read_record_batch(memory, schema).select(taken)
    image = batch.column(chosen.image)
    column = image.field("bytes") if chosen.struct else image
    # All zeros so far, but the addresses of the buffers give their positions in the body.
    held = [buffer for part in batch.columns for buffer in part.buffers() if buffer]
    spans = {(buffer.address - memory.address, buffer.size) for buffer in held}
    if any(not prefix <= start <= start + length <= len(whole) for start, length in spans):
        raise ValueError(f"its numbers are in another byte order than this machine's; {_WAY_OUT}")
    pixels = column.buffers()[2]
    images = pixels.address - memory.address - prefix if pixels else 0
    parts = sorted(span for span in spans if span[0] != images + prefix or not pixels)
    offset = message.body - prefix
    read = read_parts(folder, [(name, offset + start, length) for start, length in parts])
    for (start, length), data in zip(parts, map(required, read), strict=True):
        if len(data) != length:
            raise StorageError(f"{folder.path(name)} became shorter while it was read")
        whole[start : start + length] = np.frombuffer(data, np.uint8)
    _validate(batch, chosen.name)
    present = np.asarray(image.is_valid()) & np.asarray(column.is_valid())
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    offsets = np.zeros(1, width)
    if len(column):
        offsets = np.frombuffer(column.buffers()[1], width)[: len(column) + 1]
    starts = np.where(present, message.body + images + offsets[:-1], -1)
    return batch, starts, np.where(present, np.diff(offsets), -1)


def _validate(batch: Any, key: str | None) -> None:
    """Raise `ArrowInvalid` for a malformed batch; keys need not be UTF-8."""
    kind = str(batch.schema.field(key).type) if key in batch.schema.names else ""
    if kind in BYTES_OF:
        place, column = batch.schema.get_field_index(key), batch.column(key)
        batch = batch.set_column(place, key, column.view(BYTES_OF[kind]))
    batch.validate(full=True)
