"""Opening a store: which of its versions is meant, and whether its documents hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from precache import metadata
from precache.ahead import Ahead
from precache.attributes import FORMAT, Attributes
from precache.commits import BUILD, ROOT, Commit, read_commits
from precache.errors import NewerFormatError, StorageError, StoreError
from precache.folder import Folder, is_missing
from precache.messages import shown
from precache.storage import StorageOptions, open_folder
from precache.variants import number_of, variants_of
from precache.version import Version, read_array_documents


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
    folder = open_folder(base, storage_options)
    if fields is not None:
        return _open_foreign(folder, fields)
    newest = prefix is None
    with ThreadPoolExecutor(1, "precache-open") as pool:  # far away the two are asked at once
        asked = pool.submit(read_commits, folder, newest=newest) if _is_far(folder) else None
        document = folder.get(ROOT)
    if document is None:
        log = asked.result() if asked else read_commits(folder, newest=newest)
        folder = folder.folder(_pick(log, folder, base, prefix))
    return open_own(folder, document)


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


_OF_EVERY = ("label/zarr.json", "label/c/0", "valid/zarr.json", "valid/c/0")
_OF_A_FIELD = ("{}/zarr.json", "shards/{}/zarr.json", "shards/{}/c/0/0")
"""What a loader reads of a version, and of a field; of more than a million rows or shards, more."""


def open_own(folder: Folder, document: bytes | None = None) -> Version:
    """Open a version's folder; `document` is its `zarr.json`, where that was read already."""
    ahead = Ahead(folder)
    if _is_far(folder):
        ahead.bring(_OF_EVERY if document else [ROOT, *_OF_EVERY])
    if document is None:
        [found] = ahead.read_many([ROOT], [-1])
        if isinstance(found, StorageError):
            if not is_missing(found):
                raise found
            raise StoreError(f"the version at {folder} is gone; open the store's current version")
        document = found
    attributes = read_attributes(document, f"{folder}/{ROOT}")
    if _is_far(folder):
        ahead.bring(part.format(name) for name in attributes.fields for part in _OF_A_FIELD)
    documents = read_array_documents(ahead, [*attributes.fields, "label"])
    arrays = {name: (name, array) for name, array in documents.items()}
    for name, field in attributes.fields.items():
        array = arrays[name][1]
        if (array.shape, array.dtype) != ((attributes.rows, *field.shape), field.dtype):
            raise StoreError(
                f"{folder.path(name)} is {array.dtype} {array.shape}, and its version has "
                f"{attributes.rows} rows of {field.dtype} {field.shape}"
            )
    _require_alike(folder, attributes)
    return Version(folder, attributes.version, attributes, arrays, attributes.rows, ahead)


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


def read_attributes(data: bytes, where: str) -> Attributes:
    """`attributes.precache` of a version's `zarr.json`.

    Raises
    ------
    StoreError
        The group is not of this software, is of a newer format, or is damaged.
    """
    attributes = metadata.parse_json(data, where).get("attributes")
    own = attributes.get("precache") if isinstance(attributes, dict) else None
    if not isinstance(own, dict):
        raise StoreError(
            f"{where} is of a Zarr group that precache did not write; "
            "name its arrays, for example fields={'image': 'path/in/group'}"
        )
    if own.get("format") not in range(1, FORMAT + 1):
        raise NewerFormatError(
            f"{where} has store format {own.get('format')}, and this release of precache reads "
            f"formats up to {FORMAT}; update precache"
        )
    return Attributes.read(json.dumps(own).encode(), where)


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
