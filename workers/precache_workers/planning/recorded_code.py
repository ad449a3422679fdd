"""Identify ops and code as the store records them: by digests, or as older releases did.

Older releases identified ops by the versions of libraries, and code by a hash of its module. The
first build with an op, function or factory that the store's log does not name looks for a version
that was built by these libraries and this code. If there is one, the old identity is recorded in
the log in place of the digest: versions keep their ids, and their rows are reused, even when the
libraries later have other versions with the same digests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from precache.errors import DamageError, RecipeError, StorageError, StoreError
from precache.recipe.recipe import Recipe
from precache.storage.base import Folder
from precache.store.commit_log import ROOT, CodeDigests, append_entry, read_commits
from precache.store.json_documents import Attributes
from precache.store.open import open_own_unchecked
from precache.store.row_table import RowTable
from precache.store.version import ROW_TABLE
from precache_workers.ops.behaviour import RANDOM
from precache_workers.ops.identity import (
    NOTHING,
    by_libraries,
    digests,
    function_digests,
    libraries_in,
    libraries_of,
    named_ops,
    ops_digest,
    plain_version,
    with_code,
)
from precache_workers.planning.stored_versions import committed_versions
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.user_code import tree_hash


def with_recorded_code(store: Folder, recipe: Recipe) -> tuple[Recipe, dict[str, tuple[str, str]]]:
    """Give the ops and functions of a recipe their recorded identity; also as for `CommitEntry`.

    Functions that declare a version are left as they are.
    """
    current, recorded = digests(recipe), _recorded(store)
    old = _old_codes(store, recipe, current.keys() - {name for name, _ in recorded})
    code = {
        name: (digest, old.get(name) or recorded.get((name, digest), digest))
        for name, digest in current.items()
    }
    if _disagree(identity for _, identity in code.values()):
        code = {
            name: (digest, digest if libraries_in(identity) else identity)
            for name, (digest, identity) in code.items()
        }
    return with_code(recipe, {name: identity for name, (_, identity) in code.items()}), code


def _disagree(codes: Iterable[str]) -> bool:
    """Return whether ops are identified by different versions of one library."""
    versions = {item for code in codes for item in libraries_in(code).items()}
    return len(versions) > len(dict(versions))


def with_recorded_factory(
    store: Folder, source: DatasetSource, table: RowTable
) -> tuple[RowTable, CodeDigests]:
    """Give a factory's listing the recorded identity of its code; also as for `CommitEntry`.

    Samples that have fingerprints of their own are left as they are.
    """
    own = source.etag
    if not table.etags[0].startswith(own):
        return table, {}
    name = f"python:{source.factory}"
    recorded = _recorded(store)
    identity = recorded.get((name, own), own)
    old = tree_hash(source.factory)
    if name not in {named for named, _ in recorded} and _has_rows_of(store, name, old):
        identity = old
    if identity != own:
        table = replace(table, etags=[identity + etag[len(own) :] for etag in table.etags])
    return table, {name: (own, identity)}


def note_code(store: Folder, version: str, code: CodeDigests) -> None:
    """Record in the log the identity of the code that built a version, if it is current."""
    newest = read_commits(store, newest=True) if code else []
    if newest and newest[-1].version == version:
        append_entry(store, version, None, code, since=newest[-1].number)


def _recorded(store: Folder) -> dict[tuple[str, str], str]:
    """Read the log: (name, digest) -> identity.

    The first entry counts, so that versions keep their ids where two builds began at once and
    recorded different identities.
    """
    return {
        (name, digest): identity
        for entry in reversed(read_commits(store))
        for name, (digest, identity) in entry.code.items()
    }


def _old_codes(store: Folder, recipe: Recipe, names: AbstractSet[str]) -> dict[str, str]:
    """Find the identities of ops and functions, by name, in versions of older releases."""
    hashes = {name: tree_hash(name) for name in names & function_digests(recipe).keys()}
    old: dict[str, str] = {}
    for _, attributes in committed_versions(store) if names else ():
        if old.keys() == names:
            break
        if not attributes.decides:
            codes = _codes_of(attributes, hashes)
            old |= {name: code for name, code in codes.items() if name in names}
    return old


def _codes_of(attributes: Attributes, hashes: Mapping[str, str]) -> dict[str, str]:
    """Find the identities of ops and functions that built a version of an older release.

    Only those count that are current: the hashes of modules as they are now, and the versions of
    the installed libraries.
    """
    try:
        before = with_code(Recipe.from_dict(attributes.pipeline).by_array(), hashes)
    except RecipeError:  # of another release
        return {}
    codes: dict[str, str] = {}
    for name, field in before.fields.items():
        part = before.model_copy(update={"fields": {name: field}})
        functions = {op.function for op in part.functions if not op.version}
        stored = attributes.fields.get(name)
        if not functions <= hashes.keys() or stored is None:
            continue
        rule = by_libraries(attributes.libraries)
        if ops_digest(part, name, len(field.ops), rule) != stored.recipe:
            continue
        codes |= {function: hashes[function] for function in functions}
        for op_name, op, step in named_ops(part):
            versions = {library: plain_version(library) for library in libraries_of(op)}
            recorded = {n: plain_version(n, attributes.libraries) for n in versions}
            if step is not None and versions == recorded:
                codes[op_name] = json.dumps(versions, sort_keys=True)
        if any(op.random for op in part.functions):
            codes[RANDOM] = NOTHING
    return codes


def _has_rows_of(store: Folder, name: str, etag: str) -> bool:
    """Return whether the newest version of a source, and of it alone, has this etag."""
    log = read_commits(store)
    for version in dict.fromkeys(entry.version for entry in reversed(log)):
        sources = {entry.source for entry in log if entry.version == version}
        if sources - {None} != {name}:
            continue
        folder = store.folder(version)
        try:
            if not folder.exists(ROOT):
                continue
            data = open_own_unchecked(folder).read_checked(ROW_TABLE)
            rows = RowTable.from_parquet(data, folder.path(ROW_TABLE))
        except (DamageError, StorageError, StoreError):
            continue
        return bool(etag) and etag in rows.etags
    return False
