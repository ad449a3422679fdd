"""The tree of digests: which bytes are those of a version.

An entry of the log names the digest of a version's root, `zarr.json`. The root is sealed: it has
its own digest. It names size and digest of every other object but the shards, and tables among
these objects do so for the shards. A spare copy of all but the shards mends what is damaged.
"""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from precache.errors import DamageError, StorageError
from precache.storage.base import MOST_DOCUMENT, Buffer, Folder, is_missing, required
from precache.store.arrays import as_json, group_document
from precache.store.small_arrays import file_array, file_array_document

PIECE_BYTES = 8 << 20
"""Bytes of an object that are read at a time."""

CHECKSUM = "its checksum does not hold"
MISSING = "it is missing"
FAILING = "its disk fails to read it"

SPARE = "_spare"
"""Folder of a version with the copy of its small objects."""

SPARE_COPY = f"{SPARE}/c/0"
_SPARE_DOCUMENT = f"{SPARE}/zarr.json"

_LENGTH = 8
"""Bytes at the end of the copy that state the length of the root before them."""

_DIGEST = re.compile(rb'"digest": "([0-9a-f]{32})"')
_UNSEALED = b"0" * 32


@dataclass(frozen=True, slots=True)
class Leaf:
    """Name of an object below its version's folder, its size in bytes and its XXH3-128."""

    name: str
    size: int
    xxh3: int

    @classmethod
    def of(cls, name: str, data: Buffer) -> Leaf:
        """Describe an object with these bytes."""
        return cls(name, len(data), xxhash.xxh3_128_intdigest(data))

    @property
    def hex(self) -> str:
        """The digest as documents have it."""
        return f"{self.xxh3:032x}"

    def fault(self, data: Buffer) -> str:
        """Describe how bytes differ from the object's; empty if they are the same."""
        if fault := self.fault_of_size(len(data)):
            return fault
        return "" if xxhash.xxh3_128_intdigest(data) == self.xxh3 else CHECKSUM

    def fault_of_size(self, size: int | None) -> str:
        """Describe how a size, None for no object, differs from the object's; empty if the same."""
        if size is None:
            return MISSING
        return "" if size == self.size else f"it has {size} bytes where {self.size} were written"

    def fault_in(self, folder: Folder, tick: Callable[[int], None] = lambda nbytes: None) -> str:
        """Describe how a folder's object differs from this one; empty if it is the same.

        It is read in pieces, and not mapped: a file that is cut short meanwhile would kill the
        process.

        Parameters
        ----------
        tick
            Called with the number of bytes of each piece.

        Raises
        ------
        StorageError
            It cannot be read for another reason than a failing disk.
        """
        try:
            fault = self._fault_by_pieces(folder, tick)
        except StorageError as error:
            if fault := fault_by(error):
                return fault
            if folder.size(self.name) == self.size:
                raise
            fault = CHECKSUM
        return fault and (self.fault_of_size(folder.size(self.name)) or fault)

    def is_in(self, folder: Folder) -> bool:
        """Return True if a folder has the object, and it can be read."""
        try:
            return not self.fault_in(folder)
        except StorageError:
            return False

    def _fault_by_pieces(self, folder: Folder, tick: Callable[[int], None]) -> str:
        digest, whole = xxhash.xxh3_128(), self.size <= PIECE_BYTES
        for start in range(0, max(1, self.size), PIECE_BYTES):
            length = min(PIECE_BYTES, self.size - start)
            # Of the last piece a byte more, which tells what has grown.
            part = self.name, start, start + length + (start + length == self.size)
            data = required(*folder.read_parts([part], [-1 if whole else length], whole=whole))
            tick(min(len(data), length))
            if len(data) != length:  # it ends here, however long a forged size says that it is
                return CHECKSUM
            digest.update(data)
        return "" if digest.intdigest() == self.xxh3 else CHECKSUM

    def read(self, folder: Folder, hint: str) -> bytes:
        """Read the object; raise `DamageError` with a hint if it comes with other bytes twice."""
        for _ in range(2):  # a transfer can corrupt bytes
            try:
                data = folder.read_first(self.name, self.size + 1)
            except StorageError as error:
                if not (fault := fault_by(error)):
                    raise
                break
            if not (fault := self.fault(data)):
                return data
            if len(data) > self.size:
                fault = self.fault_of_size(folder.size(self.name)) or fault
        raise damage_error(folder.path(self.name), "", fault, hint)


def fault_by(error: StorageError) -> str:
    """Describe the fault of an object by the error of reading it; empty if it may be none."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno == errno.EIO:
        return FAILING
    return MISSING if is_missing(error) else ""


def damage_error(where: str, place: str, fault: str, hint: str) -> DamageError:
    """Make the error for an object that is not the one that was written.

    A missing one may be the first of a version that is being removed by other software than `gc`,
    which removes the root first.

    Parameters
    ----------
    place
        A part of the object, such as " at row 5"; may be empty.
    hint
        Advice on damage.
    """
    if fault != MISSING:
        return DamageError(f"{where} is damaged{place}: {fault}; {hint}")
    return DamageError(
        f"{where} is missing{place}: its version has lost it, or is being removed; open the "
        f"store's current version, or, if this is the one, {hint}"
    )


def fault_of(leaf: Leaf, data: bytes | StorageError) -> str:
    """Describe how what was read differs from an object; raises other errors of the storage."""
    if isinstance(data, StorageError):
        return fault_by(data) or leaf.fault(required(data))
    return leaf.fault(data)


# --- the root -----------------------------------------------------------------------------------


def sealed_root(attributes: Mapping[str, Any]) -> bytes:
    """Serialize a version's root: the document of a group with these attributes, and its digest.

    The digest is that of the document with zeros in its place.
    """
    own = {"digest": _UNSEALED.decode(), **attributes}
    document = as_json(group_document({"precache": own}))
    return document.replace(_UNSEALED, xxhash.xxh3_128_hexdigest(document).encode(), 1)


def seal_of(root: bytes) -> str | None:
    """Return the digest of a root; None if it is not intact."""
    found = _DIGEST.search(root)
    if found is None:
        return None
    digest = xxhash.xxh3_128(root[: found.start(1)])
    digest.update(_UNSEALED)
    digest.update(root[found.end(1) :])
    return digest.hexdigest() if digest.hexdigest() == found[1].decode() else None


# --- the spare copy -----------------------------------------------------------------------------


def spare_objects(root: bytes, objects: Iterable[bytes]) -> dict[str, bytes]:
    """Make the spare copy: name -> bytes.

    Parameters
    ----------
    objects
        All objects that the root names, in its order.
    """
    data = b"".join([*objects, root, len(root).to_bytes(_LENGTH, "little")])
    return {f"{SPARE}/{name}": part for name, part in file_array(data).items()}


def spare_root(folder: Folder) -> bytes | None:
    """Return a version's root from its spare copy; None if it is not intact there."""
    try:
        end = (folder.size(SPARE_COPY) or 0) - _LENGTH
        if end < 0:
            return None
        tail = required(*folder.read_ranges([(SPARE_COPY, end, _LENGTH)]))
        length = int.from_bytes(tail, "little")
        if length > min(end, MOST_DOCUMENT):
            return None
        root = required(*folder.read_ranges([(SPARE_COPY, end - length, length)]))
    except StorageError:
        return None
    return root if seal_of(root) else None


def spare_of(folder: Folder, leaves: Iterable[Leaf], wanted: Leaf) -> bytes | None:
    """Return an object from the spare copy; None if it is not intact there.

    Parameters
    ----------
    leaves
        All objects that the root names, in its order.
    """
    before = itertools.takewhile(lambda leaf: leaf.name != wanted.name, leaves)
    start = sum(leaf.size for leaf in before)
    try:
        data = required(*folder.read_ranges([(SPARE_COPY, start, wanted.size)]))
    except StorageError:
        return None
    return None if wanted.fault(data) else data


def spare_flaws(folder: Folder, root: bytes, leaves: Iterable[Leaf]) -> Iterator[tuple[str, str]]:
    """Compare the spare copy with what it is a copy of: yields names and what is wrong there.

    Parameters
    ----------
    leaves
        All objects that the root names, in its order.
    """
    parts = [*leaves, Leaf.of("", root + len(root).to_bytes(_LENGTH, "little"))]
    copy, start = Leaf(SPARE_COPY, sum(leaf.size for leaf in parts), 0), 0
    if folder.get(_SPARE_DOCUMENT) != file_array_document(copy.size):
        yield _SPARE_DOCUMENT, "it is not that of the spare copy"
    if fault := copy.fault_of_size(folder.size(SPARE_COPY)):
        yield SPARE_COPY, fault
        return
    for leaf in parts:
        [data] = folder.read_ranges([(SPARE_COPY, start, leaf.size)])
        if fault := fault_of(leaf, data):
            yield SPARE_COPY, fault
            return
        start += leaf.size
