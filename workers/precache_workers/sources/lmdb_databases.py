"""LMDB databases of encoded images by key.

A value is a sample if its key has the suffix of an image, or if the value starts as an image. The
label of ``image-N`` is the value of ``label-N``, as in data sets for text recognition. The label of
any other key is the value of the same key with the suffix ``.cls``. Labels may be of any kind that
`infer_kind` knows. In a database without labels, the first folder of the key is the label.

A value has neither a time nor a checksum: its identity is that of its file. After a change of the
file, all its values are compared by content. LMDB maps its file and does not validate it: only a
file that is shorter than its header claims is detected.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from precache.errors import SampleError, SourceError, UsageError
from precache.messages import printable
from precache.storage.base import NO_NAME, SERVICE_FOLDER, FileInfo, Folder
from precache_workers.sources.base import (
    FILES_PER_TICK,
    Fetched,
    Sample,
    count_ignored,
    first_folder,
    in_service_folder,
    is_image,
    starts_as_image,
)
from precache_workers.sources.containers import (
    Members,
    RequestedSample,
    TimeUpError,
    changed,
    container_etag,
    member_key,
    too_large_error,
)
from precache_workers.sources.labels import MOST_TEXT, infer_kind

UNIT_SAMPLES = 64
"""Number of samples, consecutive by key, that are read at once."""

_NUMBERED = re.compile(r"image(-\d+)")
_lock = threading.Lock()
"""A process must not open a database twice."""


@dataclass(frozen=True)
class LMDBFormat:
    """Databases on a local disk; see the module."""

    noun: str = "an LMDB database"
    suffixes: tuple[str, ...] = ("data.mdb", ".lmdb")
    typed: bool = False

    def scan(self, folder: Folder, file: FileInfo, until: float) -> Members:
        members, labels, where = Members(), dict[str, str](), folder.path(file.name)
        etag = container_etag(file)
        with _opened(folder, file) as transaction:
            for number, (name, value) in enumerate(transaction.cursor()):
                if number % FILES_PER_TICK == 0 and time.monotonic() > until:
                    raise TimeUpError
                text = bytes(name).decode("utf-8", "surrogateescape")
                key = member_key(file.name, text)
                if text.startswith("label-") or text.lower().endswith(".cls"):
                    labels[text] = _label(value, f"{where}: {printable(text)}")
                elif not (is_image(text) or starts_as_image(value)):
                    count_ignored(members.ignored, text)
                elif key is None:
                    members.left_out[NO_NAME] += 1
                elif in_service_folder(text):
                    members.leave_out(SERVICE_FOLDER, key)
                else:
                    unit, place = len(members.keys) // UNIT_SAMPLES, f"{etag}:{bytes(name).hex()}"
                    location = f"{file.name}#{unit}\t{place}"
                    members.add(key, location, size=len(value), mtime=-1, etag=etag, label="")
        for row, key in enumerate(members.keys):
            members.labels[row] = _label_of(key[len(file.name) + 1 :], labels)
        if labels:
            members.kind = infer_kind(members.labels, members.keys, where)
            members.label_rule = "beside"
        elif any(members.labels):
            members.kind, members.label_rule = "names", "folder"
        return members

    def read(
        self,
        folder: Folder,
        name: str,
        unit: str,
        wanted: Sequence[RequestedSample],
        most_bytes: int,
    ) -> Sequence[Fetched]:
        file = folder.info(name)
        places = [sample.place.partition(":") for sample in wanted]
        if file is None or any(etag != container_etag(file) for etag, _, _ in places):
            return [changed(folder, name, sample.key) for sample in wanted]
        fetched: list[Fetched] = []
        try:
            with _opened(folder, file) as transaction:
                for sample, (_, _, key) in zip(wanted, places, strict=True):
                    value = transaction.get(bytes.fromhex(key))
                    if value is None:
                        fetched.append(changed(folder, name, sample.key))
                    elif len(value) > most_bytes:
                        fetched.append(too_large_error(len(value), most_bytes))
                    else:
                        fetched.append(Sample.of(bytes(value)))
        except SourceError as error:
            return [SampleError(str(error)) for _ in wanted]
        return fetched


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
    try:
        import lmdb
    except ImportError:
        raise UsageError(
            "LMDB databases need a library that is not installed: pip install 'precache[lmdb]'"
        ) from None
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
        raise SourceError(f"{what} is not UTF-8, and a label is") from None


def _label_of(name: str, labels: dict[str, str]) -> str:
    """Return the label of an image: from the labels of its database, or else its first folder."""
    if not labels:
        return first_folder(name)
    numbered = _NUMBERED.fullmatch(name)
    stem = name.rpartition(".")[0] or name
    return labels.get(f"label{numbered[1]}" if numbered else f"{stem}.cls", "")
