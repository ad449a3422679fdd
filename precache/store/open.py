"""Opening a store: which of its versions is meant, and whether its documents hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from precache.errors import GoneError, StorageError, StoreError
from precache.messages import shown
from precache.recipe.variants import number_of, variants_of
from precache.storage.base import Folder, is_missing
from precache.storage.batch_get import Ahead, Readable
from precache.storage.open import StorageOptions, open_folder
from precache.store import zarr_metadata
from precache.store.array_metadata import LABEL_DTYPES, difference, field_layout
from precache.store.attributes import Attributes
from precache.store.commit_log import BUILD, ROOT, Commit, read_commits
from precache.store.small_arrays import ROWS_PER_CHUNK, small_layout
from precache.store.version import (
    MENDS,
    Version,
    gone,
    read_array_documents,
    read_attributes,
    stamp_of,
)
from precache.store.zarr_metadata import Array

TRIES = 5
"""Times that the version to be opened may be removed meanwhile, and another be current."""


def split_uri(
    uri: str | os.PathLike[str], storage_options: StorageOptions = None
) -> tuple[str, str | None]:
    """``STORE@3f2a`` -> (``STORE``, ``3f2a``); a path that exists as it stands has no version."""
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
        Of a remote file system, as its fsspec class takes them.

    Raises
    ------
    StoreError
        No store there, no such version, or a format newer than this release.
    """
    base, prefix = split_uri(uri, storage_options)
    store = open_folder(base, storage_options)
    if fields is not None:
        return _open_foreign(store, fields)
    folder, document = _find(store, base, prefix)
    for _ in range(TRIES):
        try:
            return open_own(folder, document)
        except GoneError:
            if prefix is not None or folder is store:
                raise
            folder, document = _find(store, base, prefix)
    return open_own(folder, document)


def open_unchecked(uri: str | os.PathLike[str], storage_options: StorageOptions = None) -> Version:
    """As `open_version`, but only the version's own document is read: for who checks the others."""
    base, prefix = split_uri(uri, storage_options)
    folder, document = _find(open_folder(base, storage_options), base, prefix)
    return unchecked(folder, document)


def unchecked(folder: Folder, document: bytes | None = None) -> Version:
    """As `open_own`, but only the version's own document is read."""
    stamp = stamp_of(folder)
    attributes = read_attributes(document or _read_root(folder, folder), f"{folder}/{ROOT}")
    version = Version(folder, attributes.version, attributes, {}, attributes.rows, stamp=stamp)
    with version.unless_gone():
        layouts = _layouts(folder, attributes)
    version.arrays = {name: (name, layout) for name, layout in layouts.items()}
    return version


def _find(store: Folder, base: str, prefix: str | None) -> tuple[Folder, bytes | None]:
    """The folder of a version, and its document where that was read on the way.

    Parameters
    ----------
    store
        Or one of its versions' folders.
    """
    newest = prefix is None
    with ThreadPoolExecutor(1, "precache-open") as pool:  # far away the two are asked at once
        asked = pool.submit(read_commits, store, newest=newest) if _is_far(store) else None
        document = store.get(ROOT)
    if document is not None:  # on a disk it is read again, once its time is known
        return store, document if _is_far(store) else None
    log = asked.result() if asked else read_commits(store, newest=newest)
    return store.folder(_pick(log, store, base, prefix)), None


def _is_far(folder: Folder) -> bool:
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
    found = [v for v in known if prefix and v.startswith(prefix)]
    if len(found) != 1:  # some may have been removed
        there = set(store.names())
        known = [v for v in known if v in there]
        found = [v for v in known if prefix and v.startswith(prefix)]
    if len(found) != 1:
        what = "fits more than one version" if found else "fits no version"
        raise StoreError(f"'{prefix}' {what} of {base}; it has " + ", ".join(v[:12] for v in known))
    return found[0]


def _hint(store: Folder, base: str) -> str:
    if any(store.exists(f"{name}/{BUILD}") for name in store.names()):
        return "a build was started here: run the same precache build command to finish it"
    return "give the folder that precache build wrote"


_OF_EVERY = ("label/zarr.json", "label/c/0", "valid/c/0")
_OF_A_FIELD = ("{}/zarr.json", "shards/{}/c/0/0")
"""What a loader reads of a version, and of a field; of more than a million rows or shards, more."""


def open_own(folder: Folder, document: bytes | None = None) -> Version:
    """Open a version's folder; `document` is its `zarr.json`, where that was read already.

    Raises
    ------
    GoneError
        It is not there any more.
    StoreError
        Its documents do not hold, or those of its arrays are not what its own says.
    """
    ahead, stamp = Ahead(folder), stamp_of(folder)
    if _is_far(folder):
        ahead.bring(_OF_EVERY if document else [ROOT, *_OF_EVERY])
    attributes = read_attributes(document or _read_root(folder, ahead), f"{folder}/{ROOT}")
    if _is_far(folder):
        ahead.bring(part.format(name) for name in attributes.fields for part in _OF_A_FIELD)
    version = Version(folder, attributes.version, attributes, {}, attributes.rows, ahead, stamp)
    with version.unless_gone():
        documents = _checked_documents(folder, ahead, attributes)
    version.arrays = {name: (name, array) for name, array in documents.items()}
    return version


def _checked_documents(
    folder: Folder, ahead: Readable, attributes: Attributes
) -> dict[str, zarr_metadata.Array]:
    """The layouts of a version's arrays, by their documents; they must be what its own asks for."""
    expected = _layouts(folder, attributes)
    try:
        documents = read_array_documents(ahead, [*expected, "label"])
    except StoreError as error:
        raise StoreError(f"{error}; {MENDS}") from None
    expected["label"] = _label_layout(attributes, documents["label"])
    for name, layout in documents.items():
        wrong = difference(layout, expected[name])
        if wrong:
            raise StoreError(f"{folder.path(name)}/{ROOT} is damaged or forged: {wrong}; {MENDS}")
    return documents


def _read_root(folder: Folder, ahead: Readable) -> bytes:
    [found] = ahead.read_many([ROOT], [-1])
    if isinstance(found, StorageError):
        raise gone(str(folder)) if is_missing(found) else found
    return found


def _layouts(folder: Folder, attributes: Attributes) -> dict[str, Array]:
    """How the array of each field is laid out, as the version's own document tells.

    Raises
    ------
    StoreError
        There can be no such version, or there is too little for as many rows and shards.
    """
    _require_alike(folder, attributes)
    _require_there(folder, attributes)
    where = folder.path(ROOT)
    return {name: field_layout(attributes, name, where) for name in attributes.fields}


def _label_layout(attributes: Attributes, found: Array) -> Array:
    """Of the labels, whose dtype their document alone tells."""
    dtype = found.dtype if found.dtype in LABEL_DTYPES else LABEL_DTYPES[0]
    return small_layout((attributes.rows,), dtype, -1)


def _require_there(folder: Folder, attributes: Attributes) -> None:
    """Refuse a version that says it has more rows or shards than it has objects for.

    Whatever goes by their number may take memory for each. One object of a small array is for a
    million; there is nothing to count below that.
    """
    shards = -(-attributes.rows // attributes.rows_per_shard)
    for name, count in (
        ("label", attributes.rows),
        (f"shards/{next(iter(attributes.fields))}", shards),
    ):
        needed = -(-count // ROWS_PER_CHUNK)
        if needed > 1 and needed > len(folder.names(f"{name}/c")):
            raise StoreError(
                f"{folder}/{ROOT} is damaged or forged: it tells of {count} entries of {name}, for "
                f"which {needed} objects are needed, and there are fewer"
            )


def _require_alike(folder: Folder, attributes: Attributes) -> None:
    """Refuse variants that differ in shape or dtype, or whose numbers do not follow."""
    for name, arrays in variants_of(attributes.fields).items():
        numbers = range(number_of(arrays[0]), number_of(arrays[0]) + len(arrays))
        rows = {(f.shape, f.dtype, f.codec) for f in map(attributes.fields.__getitem__, arrays)}
        one = arrays == [name]
        if not one and (arrays != [f"{name}.{number}" for number in numbers] or len(rows) > 1):
            raise StoreError(
                f"{folder}/{ROOT} is damaged or forged: {', '.join(arrays)} are no variants of one "
                "field"
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
    return Version(folder, digest[:32], None, arrays, rows.pop())
