"""Parquet files with images in a column: bytes, or Hugging Face's struct of bytes and path.

Class names come from the metadata of the schema (Hugging Face's ``ClassLabel``). A sample's key is
the value of the column of keys, if the user names one. Otherwise it is the name of the file with
the path in the row's struct, if the paths of the file are all different, or else with the row
number.

A row has neither a size nor a time: its identity is that of its file. After a change of the file,
its rows are compared by content. A row group is read at once, up to the last row that is needed;
small row groups are read together.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from precache.errors import SampleError, SourceError, StorageError
from precache.messages import printable
from precache.storage.base import FileInfo, Folder
from precache.store.locations import Container
from precache_workers.runtime.time_limit import samples_at_work
from precache_workers.sources.base import IMAGE, NO_COLUMNS, Columns, nbytes_of, too_large_error
from precache_workers.sources.columns import (
    ChosenColumns,
    choose_images,
    keys_of,
    leaf,
    row_labels,
    stored_as,
)
from precache_workers.sources.containers import (
    Read,
    Rows,
    Wanted,
    rows_of,
    structs,
    units_of,
)
from precache_workers.sources.dataset_items import Part
from precache_workers.sources.file_ranges import GAP_BYTES, open_file
from precache_workers.sources.labels import kind_of
from precache_workers.sources.listings import Members
from precache_workers.sources.sample_parts import cell_of, joined

LISTED_ROWS, LISTED_LISTS = 8192, 128
"""Rows whose labels and names are decoded at a time; fewer if labels are lists, since one long list
may stand for all rows of a page."""

NO_IMAGE = (
    "its row has no image, or only a path of one; write the file with all images embedded, or, to "
    "read the files there, give --source-kind manifest"
)

Value = tuple[int, int, Part, Any]
"""Group, row, and name of an input; and its value, None, or an error."""

FOOTER_BYTES = 16 << 20
"""Most bytes of footers that a process keeps."""
HEAD_BYTES = 1 << 14
"""Bytes of a schema, or of what stands before arrays, in memory."""


@dataclass(frozen=True)
class TableFormat:
    """Tables whose rows are samples: places are a group of rows, and the number of a row in it."""

    columns: Columns = NO_COLUMNS
    suffixes: tuple[str, ...] = ()
    checks_members: bool = False

    def places(self) -> Any:
        """Return the type of the places of rows."""
        return pa.struct({"group": pa.int64(), "row": pa.int32()})

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        numbers = [(place["group"], place["row"]) for _, place in wanted]
        rows: dict[int, set[int]] = defaultdict(set)
        for group, row in numbers:
            rows[group].add(row)
        parts: dict[tuple[int, int], dict[Part, Any]] = defaultdict(dict)
        where, inputs = folder.path(container.name), self.columns.inputs
        file = FileInfo(container.name, container.size, -1)
        stamp = where, container.etag, container.file_state, self.columns
        missing = SampleError(f"{where} has no such row: its footer claims more than there are")
        try:
            if (head := _heads.get(stamp)) is None:
                head = self.head(folder, file)
                with _lock:
                    firsts = (first for first, *_ in _heads.values())
                    sizes = (getattr(first, "serialized_size", HEAD_BYTES) for first in firsts)
                    if sum(sizes) > FOOTER_BYTES:
                        _heads.clear()
                    if container.etag:
                        _heads[stamp] = head
            for group, row, name, value in self.values(folder, file, head, rows):
                nbytes = nbytes_of(value)
                too_large = too_large_error(nbytes, most_bytes) if nbytes > most_bytes else None
                parts[group, row][name] = too_large or value
        except SourceError as error:
            missing = SampleError(str(error))
        count = len(inputs.names) + inputs.image
        whole = {number: joined(part) for number, part in parts.items() if len(part) == count}
        return [whole.get(number, missing) for number in numbers]

    def head(self, folder: Folder, file: FileInfo) -> tuple[Any, ...]:
        """Read what is at the beginning or end of a file, to be kept for its next reads.

        Raises
        ------
        SourceError
            The file is damaged.
        """
        raise NotImplementedError

    def values(
        self, folder: Folder, file: FileInfo, head: Any, rows: Mapping[int, Collection[int]]
    ) -> Iterator[Value]:
        """Yield the values of the inputs of some rows, by group; raises as `head`."""
        raise NotImplementedError


_heads: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""Path, identity, ctime and chosen columns of the files read last -> what was found in them."""
_lock = threading.Lock()


@dataclass(frozen=True)
class ParquetFormat(TableFormat):
    """Parquet files with images; see the module."""

    suffixes: tuple[str, ...] = (".parquet",)

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows]:
        where = folder.path(file.name)
        with open_file(folder, file, GAP_BYTES) as stream, damaged(where):
            table = open_table(stream)
            count = table.metadata.num_rows
            if count > file.size:
                raise SourceError(f"{where} claims {count:,} rows and has {file.size:,} bytes")
            schema = table.schema_arrow
            chosen = choose_images(schema, self.columns, where)
            chosen.describe(members)
            members.forward = True
            one = chosen.labels[0] if len(chosen.labels) == 1 else None
            kind = pa.null() if one is None else schema.field(one).type
            several = "several" in str(kind_of(kind))
            at_once = LISTED_LISTS if several else LISTED_ROWS
            # Asked for as a dictionary, one would lose the order of its categories.
            coded = several or pa.types.is_dictionary(kind)
            texts = [name for name in (chosen.name, None if coded else one) if name]
            listed = [name for name in (chosen.name, *chosen.listed) if name is not None]
            units = _units(table, chosen)
            table = open_table(stream, table.metadata, texts)
            for group, (unit, nbytes) in enumerate(units):
                count = table.metadata.row_group(group).num_rows
                place = 0
                for batch in table.iter_batches(at_once, [group], listed, use_threads=False):
                    numbers = np.arange(place, place + len(batch), dtype=np.int32)
                    yield rows_of(
                        keys_of(batch, chosen),
                        structs(self.places(), (np.full(len(batch), group), numbers)),
                        labels=row_labels(batch, chosen, members),
                        units=unit,
                        nbytes=nbytes,
                    )
                    place += len(batch)
                if place != count:
                    raise SourceError(
                        f"{where}: row group {group} has {place:,} rows, and its footer claims "
                        f"{count:,}"
                    )

    def head(self, folder: Folder, file: FileInfo) -> tuple[Any, ...]:
        where = folder.path(file.name)
        with damaged(where), open_file(folder, file) as stream:
            footer = open_table(stream).metadata
            schema = footer.schema.to_arrow_schema()
            return footer, schema, choose_images(schema, self.columns, where)

    def values(
        self, folder: Folder, file: FileInfo, head: Any, rows: Mapping[int, Collection[int]]
    ) -> Iterator[Value]:
        (footer, schema, chosen), last = head, max(rows)
        with damaged(folder.path(file.name)):
            for name, column in chosen.inputs.items():
                end = _end(footer, stored_as(schema, column), last, max(rows[last]))
                with open_file(folder, file, end=end) as stream:
                    table = open_table(stream, footer)
                    for group, some in sorted(rows.items()):
                        for row, value in _values(table, group, column, some):
                            none = SampleError(NO_IMAGE) if name == IMAGE else None
                            yield group, row, name, none if value is None else value


def _end(footer: Any, column: str, group: int, row: int) -> int:
    """Estimate the offset in the file at which the value of a row in a column ends."""
    described = footer.row_group(group)
    chunk, *_ = _chunks(described, [column])
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    return int(start + chunk.total_compressed_size * (row + 1) // max(1, described.num_rows))


@contextmanager
def damaged(where: str) -> Iterator[None]:
    """Translate the errors that pyarrow raises for a damaged file.

    Raises
    ------
    SourceError
        The file is damaged.
    StorageError
        The operating system cannot read the file.
    """
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Arrow's own errors have none
            raise StorageError(f"cannot read {where}: {error.strerror}") from None
        raise SourceError(f"{where} cannot be read: {printable(str(error))}") from None


def open_table(stream: BinaryIO, metadata: Any = None, repeated: Sequence[str] = ()) -> Any:
    """Open a Parquet file and read its pages only when needed, since row groups may be large.

    Parameters
    ----------
    metadata
        Footer of the same file, if it was read before.
    repeated
        Columns of text that are read as dictionaries: equal values are held once.
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(
        stream,
        metadata=metadata,
        read_dictionary=list(repeated),
        buffer_size=1 << 20,
        pre_buffer=False,
        page_checksum_verification=True,
    )


def _units(table: Any, chosen: ChosenColumns) -> list[tuple[int, int]]:
    """Return the unit of each row group, and the mean bytes of a sample in the unit.

    Small neighbours share a unit.
    """
    read = {stored_as(table.schema_arrow, column) for column in chosen.inputs.values()}
    groups = [*map(table.metadata.row_group, range(table.num_row_groups))]
    held = np.array([group.total_byte_size for group in groups], np.int64)
    units = units_of(np.cumsum(held) - held, held)
    nbytes, rows = np.zeros((2, len(groups)), np.int64)
    for unit, group in zip(units.tolist(), groups, strict=True):
        nbytes[unit] += sum(chunk.total_uncompressed_size for chunk in _chunks(group, read))
        rows[unit] += group.num_rows
    means = np.maximum(1, nbytes // np.maximum(1, rows))
    return [(unit, int(means[unit])) for unit in units.tolist()]


def _chunks(described: Any, columns: Collection[str]) -> list[Any]:
    """Return the footer's descriptions of columns in a row group; lists lie below their name."""
    chunks = map(described.column, range(described.num_columns))
    starts = tuple(f"{column}." for column in columns)
    return [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(starts)]


def _values(
    table: Any, group: int, column: str, rows: Collection[int]
) -> Iterator[tuple[int, Any]]:
    """Yield (row, value) of the wanted rows of a row group.

    Rows are decoded one by one, and equal bytes are held once, since one large image may stand
    for thousands of rows of a page.
    """
    last, known = max(rows), dict[bytes, bytes]()
    stored = stored_as(table.schema_arrow, column)
    for row, batch in enumerate(table.iter_batches(1, [group], [stored], use_threads=False)):
        samples_at_work().advance()  # row groups may be large, and networks slow
        if row in rows:
            value = cell_of(leaf(batch, column), 0)
            yield row, known.setdefault(value, value) if isinstance(value, bytes) else value
        if row == last:
            return
