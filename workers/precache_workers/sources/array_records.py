"""ArrayRecord files, whose records are examples with an image, or images, as in TFRecord files.

A record has no time, and its reader exposes no checksum: its identity is that of its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from precache.errors import SampleError, SourceError, needs
from precache.messages import printable
from precache.storage.base import FileInfo, Folder
from precache.store.locations import Container
from precache_workers.sources.base import NO_COLUMNS, Columns
from precache_workers.sources.containers import (
    AT_ONCE,
    Members,
    Read,
    Rows,
    Wanted,
    container_etag,
    in_batches,
)
from precache_workers.sources.tf_examples import sample_of, samples_of

UNIT_RECORDS = 32
"""Number of records that are read at once to fetch samples."""

FORMAT_NOUN = "an ArrayRecord file"
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


@dataclass(frozen=True)
class ArrayRecordFormat:
    """ArrayRecord files on a local disk; see the module."""

    columns: Columns = NO_COLUMNS
    suffixes: tuple[str, ...] = (".array_record", ".arrayrecord")
    checks_members: bool = False

    def places(self) -> Any:
        """Return the type of the numbers of records."""
        import pyarrow as pa

        return pa.int64()

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows]:
        where, etag = folder.path(file.name), container_etag(file)
        with _opened(folder, file) as reader:
            count = reader.num_records()
            records = (
                (record, {"place": number, "unit": number // UNIT_RECORDS, "etag": etag})
                for start in range(0, count, AT_ONCE)
                for number, record in enumerate(
                    _records(reader, range(start, min(start + AT_ONCE, count))), start
                )
            )
            samples = samples_of(records, self.columns, file, where, members)
            yield from in_batches(samples, self.places())

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        with _opened(folder, FileInfo(container.name, container.size, -1)) as reader:
            records = _records(reader, wanted.places.to_pylist())
        return [
            record if isinstance(record, SampleError) else sample_of(record, self.columns)
            for record in records
        ]


def _records(reader: Any, numbers: Sequence[int]) -> list[bytes | SampleError]:
    """Read records, one by one if any of them is damaged."""
    try:
        return list(reader.read(list(numbers)))
    except RuntimeError as error:
        if len(numbers) == 1:
            return [SampleError(f"its record is damaged: {printable(str(error))}")]
        return [record for number in numbers for record in _records(reader, [number])]


@contextmanager
def _opened(folder: Folder, file: FileInfo) -> Iterator[Any]:
    """Open a file and yield its reader.

    Raises
    ------
    SourceError
        The file is not on a local disk, or is damaged.
    UsageError
        `array_record` is not installed.
    """
    with needs("an ArrayRecord file", "arrayrecord"):
        from array_record.python.array_record_module import ArrayRecordReader
    path, where = folder.local(file.name), folder.path(file.name)
    if path is None:
        raise SourceError(f"{where} is {FORMAT_NOUN}, which is read from a disk; copy it there")
    reader = ArrayRecordReader(str(path), _OPTIONS)
    if not reader.ok():
        try:
            reader.close()
        except RuntimeError as error:
            reason = printable(str(error)) or f"it is cut off, or not {FORMAT_NOUN}"
            raise SourceError(f"{where} cannot be read: {reason}") from None
    try:
        yield reader
    finally:
        with suppress(RuntimeError):  # the read of a damaged record has raised its error already
            reader.close()
