"""LMDB databases of encoded images by key.

A value is a sample if its key has the suffix of an image, or if the value starts as an image. The
label of ``image-N`` is the value of ``label-N``, as in data sets for text recognition. The label of
any other key is the value of the same key with the suffix ``.cls``. Labels may be of any kind that
`labels.decide` knows. In a database without labels they are folders of the keys.

A value has neither a time nor a checksum: its identity is that of its file. After a change of the
file, all its values are compared by content. LMDB maps its file and does not validate it: only a
file that is shorter than its header claims is detected.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from precache.errors import SourceError, needs
from precache.messages import printable
from precache.storage.base import NO_NAME, FileInfo, Folder, is_name
from precache.store.locations import Container
from precache_workers.sources.base import (
    Fetched,
    Sample,
    hidden_as,
    is_image,
    starts_as_image,
    too_large_error,
)
from precache_workers.sources.containers import (
    Place,
    Read,
    Rows,
    Wanted,
    in_batches,
    with_column,
)
from precache_workers.sources.labels import MOST_TEXT
from precache_workers.sources.listings import Members

UNIT_SAMPLES = 64
"""Number of samples, consecutive by key, that are read at once."""

_NUMBERED = re.compile(rb"image(-\d+)")
_LABEL = re.compile(rb"label-\d+|.*\.cls", re.DOTALL)
_lock = threading.Lock()
"""A process must not open a database twice."""


@dataclass(frozen=True)
class LMDBFormat:
    """Databases on a local disk; see the module."""

    suffixes: tuple[str, ...] = ("data.mdb", ".lmdb")
    columns: None = None
    checks_members: bool = False

    def places(self) -> Any:
        """Return the type of the keys of values."""
        return pa.large_binary()

    def scan(self, folder: Folder, file: FileInfo, members: Members) -> Iterator[Rows | None]:
        labels, parts = dict[bytes, str](), list[Rows]()
        samples = _samples(folder, file, members, labels)
        for rows in in_batches(samples, self.places(), folder.path(file.name)):
            parts.append(rows)
            yield None
        for rows in parts:
            texts = [_label_of(key, labels) for key in rows["place"].to_pylist() if labels]
            yield with_column(rows, "label", pa.array(texts, pa.large_string())) if texts else rows

    def read(self, folder: Folder, container: Container, wanted: Wanted, most_bytes: int) -> Read:
        file = FileInfo(container.name, container.size, -1)
        fetched: list[Fetched | None] = []
        with _opened(folder, file) as transaction:
            for _, key in wanted:
                value = transaction.get(key)
                if value is None:
                    fetched.append(None)
                elif len(value) > most_bytes:
                    fetched.append(too_large_error(len(value), most_bytes))
                else:
                    fetched.append(Sample.of(bytes(value)))
        return fetched


def _samples(
    folder: Folder, file: FileInfo, members: Members, labels: dict[bytes, str]
) -> Iterator[Place]:
    """Yield the samples of a database, without their labels.

    Parameters
    ----------
    labels
        Output: key of a label -> its text.
    """
    where, count = folder.path(file.name), 0
    with _opened(folder, file) as transaction:
        for key, value in transaction.cursor():
            text = bytes(key).decode("utf-8", "surrogateescape").removeprefix("./")
            if _LABEL.fullmatch(key):
                labels[bytes(key)] = _label(value, f"{where}: {printable(text)}")
            elif not (is_image(text) or starts_as_image(value)):
                members.ignore(text, file.name)
            elif not all(map(is_name, (text, f"{file.name}/{text}"))):
                members.left_out[NO_NAME] += 1
            elif reason := hidden_as(text):
                members.leave_out(reason, f"{file.name}/{text}")
            else:
                unit = count // UNIT_SAMPLES
                count += 1
                yield Place(text, bytes(key), size=len(value), unit=unit)


@contextmanager
def _opened(folder: Folder, file: FileInfo) -> Iterator[Any]:
    """Open a database and yield a read transaction, which returns values as views.

    Raises
    ------
    SourceError
        The file is not on a local disk, is damaged, or is cut off.
    UsageError
        `lmdb` is not installed.
    """
    with needs("an LMDB database", "lmdb"):
        import lmdb
    path, where = folder.local(file.name), folder.path(file.name)
    if path is None:
        raise SourceError(f"{where} is an LMDB database, which is read from a disk; copy it there")
    with _lock:
        try:
            # No lock is taken, since the disk may be read-only: no process may write meanwhile.
            with lmdb.open(
                str(path), subdir=False, readonly=True, lock=False, readahead=False
            ) as database:
                pages = database.info()["last_pgno"] + 1
                if pages * database.stat()["psize"] > file.size:
                    raise SourceError(
                        f"{where} is cut off: it should have {pages:,} pages, but has "
                        f"{file.size:,} bytes; if it is complete, copy it with mdb_copy -c"
                    )
                with database.begin(buffers=True) as transaction:
                    yield transaction
        except lmdb.Error as error:
            raise SourceError(f"{where} cannot be read: {printable(str(error))}") from None


def _label(value: Any, what: str) -> str:
    if len(value) > MOST_TEXT:
        raise SourceError(f"{what} has {len(value):,} bytes; a label is a class number or name")
    try:
        return bytes(value).decode().strip()
    except UnicodeDecodeError:
        raise SourceError(f"{what} is not UTF-8, and a label is; save it as UTF-8") from None


def _label_of(key: bytes, labels: dict[bytes, str]) -> str | None:
    """Return the label of an image among those of its database; None if it has none."""
    numbered = _NUMBERED.fullmatch(key)
    stem = key.rpartition(b".")[0] or key
    return labels.get(b"label" + numbered[1] if numbered else stem + b".cls") or None
