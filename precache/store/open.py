"""Open a store: find the version that a URI names, and check its documents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from precache.errors import GoneError, StorageError, StoreError
from precache.messages import shown
from precache.recipe.variants import number_of, variants_of
from precache.storage.base import Folder, is_missing
from precache.storage.open import StorageOptions, open_folder
from precache.storage.prefetched_folder import PrefetchedFolder, Readable
from precache.store.array_metadata import field_layout, label_layouts, layout_difference
from precache.store.commit_log import BUILD, ROOT, VERSION, Commit, read_commits
from precache.store.json_documents import Attributes
from precache.store.small_arrays import ROWS_PER_CHUNK
from precache.store.version import (
    REPAIR_HINT,
    ROOT_HINT,
    Version,
    gone_error,
    read_array_documents,
    read_attributes,
    stamp_of,
)
from precache.store.zarr_metadata import Array

OPEN_TRIES = 5
"""Times that opening is tried if the current version is removed meanwhile."""

LOOKED_AT = 3
"""Folders that are looked at to see if they are versions: others may have such names, too."""


def split_uri(
    uri: str | os.PathLike[str], storage_options: StorageOptions = None
) -> tuple[str, str | None]:
    """Split ``STORE@3f2a`` into (``STORE``, ``3f2a``); an existing path is not split."""
    text = os.fspath(uri)
    base, at, prefix = text.rpartition("@")
    if not at or not base or "/" in prefix or open_folder(text, storage_options).exists():
        return text, None
    return base, prefix


def open_version(
    uri: str | os.PathLike[str],
    fields: Mapping[str, str] | None = None,
    storage_options: StorageOptions = None,
) -> Version:
    """Open the current version of a store, or the one that ``STORE@prefix`` names.

    Parameters
    ----------
    uri
        A store, one of its versions' folders, or any Zarr v3 group together with `fields`.
    fields
        Name -> path of an array in the group, for a group that other software wrote.
    storage_options
        Options of a remote file system, as its fsspec class takes them.

    Raises
    ------
    StoreError
        There is no store or no such version, or it has another format.
    """
    base, prefix = split_uri(uri, storage_options)
    store = open_folder(base, storage_options)
    if fields is not None:
        return _open_foreign(store, fields)
    folder, document = _find(store, base, prefix)
    for _ in range(OPEN_TRIES):
        try:
            return open_own(folder, document)
        except GoneError:
            if prefix is not None or folder is store:
                raise
            folder, document = _find(store, base, prefix)
    return open_own(folder, document)


def open_unchecked(uri: str | os.PathLike[str], storage_options: StorageOptions) -> Version:
    """Open a version like `open_version`, reading only its own document: to check the others."""
    base, prefix = split_uri(uri, storage_options)
    folder, document = _find(open_folder(base, storage_options), base, prefix)
    return open_own_unchecked(folder, document)


def open_own_unchecked(folder: Folder, document: bytes | None = None) -> Version:
    """Open a version's folder like `open_own`, reading only the version's own document."""
    return open_own(folder, document, checked=False)


def _find(store: Folder, base: str, prefix: str | None) -> tuple[Folder, bytes | None]:
    """Find the folder of a version; also return its document if that was read on the way.

    Parameters
    ----------
    store
        The store, or one of its versions' folders.
    """
    newest = prefix is None
    with ThreadPoolExecutor(1, "precache-open") as pool:  # remote requests run in parallel
        request = pool.submit(_log, store, newest) if _is_remote(store) else None
        document = store.get(ROOT)
    if document is not None and prefix is not None:
        raise StoreError(f"{shown(base)} is one version, and no store; leave out @{prefix}")
    if document is not None:  # on a disk it is read again, after its time
        return store, document if _is_remote(store) else None
    log = request.result() if request else _log(store, newest)
    if log is None:
        assert prefix is not None
        return store.folder(_pick_whole(store, base, prefix)), None
    return store.folder(_pick(log, store, base, prefix)), None


def _log(store: Folder, newest: bool) -> list[Commit] | None:
    """Read the log, or its newest entry; None for a damaged log that is not needed as a whole."""
    try:
        return read_commits(store, newest=newest)
    except StoreError:
        if newest:
            raise
        return None


def _pick_whole(store: Folder, base: str, prefix: str) -> str:
    """Return the one whole version whose name begins so, whatever the log says."""
    fitting = [v for v in possible_versions(store.names()) if prefix and v.startswith(prefix)]
    whole = [version for version in fitting if store.exists(f"{version}/{ROOT}")]
    if len(whole) != 1:
        what = "more than one version" if whole else "no version"
        raise StoreError(f"'{prefix}' fits {what} of {shown(base)}, whose log is damaged")
    return whole[0]


def _is_remote(folder: Folder) -> bool:
    return folder.local("") is None


def _pick(log: Sequence[Commit], store: Folder, base: str, prefix: str | None) -> str:
    base = shown(base)
    if not log:
        if not store.exists():
            raise StoreError(
                f"there is no store at {base}; build one: precache build SOURCE {base}"
            )
        raise StoreError(f"{base} is not a store: it has no commits; {_hint(store, base)}")
    known = list(dict.fromkeys(commit.version for commit in reversed(log)))
    if prefix is None:
        return known[0]
    matches = [v for v in known if prefix and v.startswith(prefix)]
    if len(matches) != 1:  # some may have been removed
        existing = set(store.names())
        known = [v for v in known if v in existing]
        matches = [v for v in known if prefix and v.startswith(prefix)]
    if len(matches) != 1:
        what = "fits more than one version" if matches else "fits no version"
        raise StoreError(f"'{prefix}' {what} of {base}; it has " + ", ".join(v[:12] for v in known))
    return matches[0]


def _hint(store: Folder, base: str) -> str:
    if any(store.exists(f"{name}/{BUILD}") for name in possible_versions(store.names(first=True))):
        return "a build was started here: run the same precache build command to finish it"
    return "give the folder that precache build wrote"


def possible_versions(names: Iterable[str]) -> list[str]:
    """Return the first names that are those of versions' folders, at most `LOOKED_AT`."""
    return list(islice(filter(VERSION.fullmatch, names), LOOKED_AT))


_SMALL_OBJECTS = ("label/zarr.json", "label/c/0", "valid/c/0")
_FIELD_OBJECTS = ("{}/zarr.json", "shards/{}/c/0/0")
"""Objects that a loader reads of a version, and of a field (up to a million rows or shards)."""


def open_own(folder: Folder, document: bytes | None = None, *, checked: bool = True) -> Version:
    """Open a version's folder; `document` is its `zarr.json`, if that was read already.

    Unless `checked`, the documents of its arrays are not read.

    Raises
    ------
    GoneError
        The version was removed.
    StoreError
        A document is invalid, or those of its arrays do not agree with the version's own.
    """
    ahead, stamp = PrefetchedFolder(folder), stamp_of(folder)
    ahead_of_need = checked and _is_remote(folder)
    if ahead_of_need:
        ahead.prefetch(_SMALL_OBJECTS if document else [ROOT, *_SMALL_OBJECTS])
    attributes = read_attributes(document or _read_root(folder, ahead), f"{folder}/{ROOT}")
    if ahead_of_need:
        ahead.prefetch(part.format(name) for name in attributes.fields for part in _FIELD_OBJECTS)
    version = Version(
        folder,
        version_id=attributes.version,
        attributes=attributes,
        arrays={},
        rows=attributes.rows,
        ahead=ahead,
        stamp=stamp,
    )
    with version.unless_gone():
        try:
            layouts = _layouts(folder, attributes)
        except StoreError as error:
            raise StoreError(f"{error}; {ROOT_HINT}") from None
        arrays = _checked_documents(folder, ahead, attributes, layouts) if checked else layouts
    version.arrays = {name: (name, array) for name, array in arrays.items()}
    return version


def _checked_documents(
    folder: Folder, ahead: Readable, attributes: Attributes, expected: dict[str, Array]
) -> dict[str, Array]:
    """Read the layouts of a version's arrays, and check them against the version's own document."""
    try:
        documents = read_array_documents(ahead, [*expected, "label"])
    except StoreError as error:
        raise StoreError(f"{error}; {REPAIR_HINT}") from None
    expected["label"] = _label_layout(attributes, documents["label"])
    for name, layout in documents.items():
        difference = layout_difference(layout, expected[name])
        if difference:
            raise StoreError(
                f"{folder.path(name)}/{ROOT} is damaged or forged: {difference}; {REPAIR_HINT}"
            )
    return documents


def _read_root(folder: Folder, ahead: Readable) -> bytes:
    [document] = ahead.read_many([ROOT], [-1])
    if isinstance(document, StorageError):
        raise gone_error(str(folder)) if is_missing(document) else document
    return document


def _layouts(folder: Folder, attributes: Attributes) -> dict[str, Array]:
    """Return the layout of each field's array, from the version's own document.

    Raises
    ------
    StoreError
        There can be no such version, or it has too few objects for its rows and shards.
    """
    _require_same_variants(folder, attributes)
    _require_small_objects(folder, attributes)
    where = folder.path(ROOT)
    return {name: field_layout(attributes, name, where) for name in attributes.fields}


def _label_layout(attributes: Attributes, stored: Array) -> Array:
    """Return the layout of the labels; the dtype of class numbers only their own document has."""
    layouts = label_layouts(attributes)
    return next((layout for layout in layouts if layout.dtype == stored.dtype), layouts[0])


def _require_small_objects(folder: Folder, attributes: Attributes) -> None:
    """Refuse a version that claims more rows or shards than its small arrays have objects for.

    Later code takes memory for each row and shard. One object of a small array holds a million;
    below that, nothing needs to be counted. It suffices that one of several arrays is whole, since
    a lost object of another can be repaired.
    """
    shards = -(-attributes.rows // attributes.rows_per_shard)
    for what, count, arrays in (
        ("rows", attributes.rows, ["label", "valid"]),
        ("shards", shards, [f"shards/{field}" for field in attributes.fields]),
    ):
        needed = -(-count // ROWS_PER_CHUNK)
        if needed > 1 and all(needed > len(folder.names(f"{array}/c")) for array in arrays):
            raise StoreError(
                f"{folder}/{ROOT} is damaged or forged: it claims {count} {what}, for which "
                f"{arrays[0]} takes {needed} objects, and has fewer"
            )


def _require_same_variants(folder: Folder, attributes: Attributes) -> None:
    """Refuse variants that differ in shape, dtype or codec, or are not numbered in a row."""
    for name, arrays in variants_of(attributes.fields).items():
        numbers = range(number_of(arrays[0]), number_of(arrays[0]) + len(arrays))
        rows = {(f.shape, f.dtype, f.codec) for f in map(attributes.fields.__getitem__, arrays)}
        one = arrays == [name]
        if not one and (arrays != [f"{name}.{number}" for number in numbers] or len(rows) > 1):
            raise StoreError(
                f"{folder}/{ROOT} is damaged or forged: {', '.join(arrays)} are not variants of "
                "one field"
            )


def _open_foreign(folder: Folder, fields: Mapping[str, str]) -> Version:
    if not fields or "row" in fields:
        raise StoreError(f"fields is {dict(fields)}; name at least one array, and none of them row")
    if not folder.exists():
        raise StoreError(f"there is no Zarr group at {folder}")
    documents = read_array_documents(folder, list(dict.fromkeys(fields.values())))
    arrays = {name: (path, documents[path]) for name, path in fields.items()}
    rows = {array.shape[0] for _, array in arrays.values()}
    if len(rows) > 1:
        lengths = ", ".join(f"{name}: {array.shape[0]}" for name, (_, array) in arrays.items())
        raise StoreError(f"the arrays of {folder} differ in rows: {lengths}")
    text = "\n".join(f"{name} {array}" for name, array in sorted(arrays.items()))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Version(folder, version_id=digest[:32], attributes=None, arrays=arrays, rows=rows.pop())
