"""What stands for ops and code in a store: their digests, or what older releases had.

Older releases identified ops by the versions of libraries, and code by a hash of its module. The
first build of a store by an op, function or factory that its log does not name looks for a version
that was made so by the libraries and the code as they are now. Where there is one, those stand for
the digest from then on, as the log says: the versions keep their ids, and their rows are taken
over, also once the libraries have other versions and the same digests.
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
from precache.store.documents import Attributes
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
from precache_workers.planning.reuse import committed
from precache_workers.sources.base import DatasetSource
from precache_workers.sources.user_code import tree_hash


def identified(store: Folder, recipe: Recipe) -> tuple[Recipe, dict[str, tuple[str, str]]]:
    """A recipe with what stands for its ops and functions, and that as `CommitEntry` has it.

    Functions that declare a version are left as they are.
    """
    found, named = digests(recipe), _named(store)
    old = _old_codes(store, recipe, found.keys() - {name for name, _ in named})
    code = {
        name: (digest, old.get(name) or named.get((name, digest), digest))
        for name, digest in found.items()
    }
    if _disagree(known for _, known in code.values()):
        code = {
            name: (digest, digest if libraries_in(known) else known)
            for name, (digest, known) in code.items()
        }
    return with_code(recipe, {name: known for name, (_, known) in code.items()}), code


def _disagree(codes: Iterable[str]) -> bool:
    """Whether different versions of one library stand for ops."""
    versions = {item for code in codes for item in libraries_in(code).items()}
    return len(versions) > len(dict(versions))


def identified_rows(
    store: Folder, source: DatasetSource, table: RowTable
) -> tuple[RowTable, CodeDigests]:
    """A factory's listing with what stands for its code, and that as `CommitEntry` has it.

    Samples that have fingerprints of their own are left as they are.
    """
    if source.etag not in table.etags:
        return table, {}
    name = f"python:{source.factory}"
    named = _named(store)
    known = named.get((name, source.etag), source.etag)
    old = _module_hash(source.factory)
    if name not in {each for each, _ in named} and _has_rows_of(store, name, old):
        known = old
    return replace(table, etags=[known] * len(table)), {name: (source.etag, known)}


def note_code(store: Folder, version: str, code: CodeDigests) -> None:
    """Say in the log what stands for the code that made a version, where that is current."""
    newest = read_commits(store, newest=True) if code else []
    if newest and newest[-1].version == version:
        append_entry(store, version, None, code)


def _named(store: Folder) -> dict[tuple[str, str], str]:
    """(name, digest) -> what stands for it: what the log named first, for versions keep their ids
    though two builds that began at once each found something else."""
    return {
        (name, digest): known
        for entry in reversed(read_commits(store))
        for name, (digest, known) in entry.code.items()
    }


def _module_hash(name: str) -> str:
    """What stood for a function or factory in older releases; empty where nothing did."""
    return tree_hash(name.partition(":")[0])


def _old_codes(store: Folder, recipe: Recipe, wanted: AbstractSet[str]) -> dict[str, str]:
    """What stood for ops and functions in versions that older releases made of them, by name."""
    hashes = {name: _module_hash(name) for name in wanted & function_digests(recipe).keys()}
    found: dict[str, str] = {}
    for _, attributes in committed(store) if wanted else ():
        if found.keys() == wanted:
            break
        if not attributes.decides:
            made = _made_by(attributes, hashes)
            found |= {name: code for name, code in made.items() if name in wanted}
    return found


def _made_by(attributes: Attributes, hashes: Mapping[str, str]) -> dict[str, str]:
    """What stood for ops and functions that made a version: modules' hashes as they are now, and
    versions of libraries if these are those installed."""
    try:
        before = with_code(Recipe.from_dict(attributes.pipeline).by_array(), hashes)
    except RecipeError:  # of another release
        return {}
    found: dict[str, str] = {}
    for name, field in before.fields.items():
        part = before.model_copy(update={"fields": {name: field}})
        functions = {op.function for op in part.functions if not op.version}
        stored = attributes.fields.get(name)
        if not functions <= hashes.keys() or stored is None:
            continue
        rule = by_libraries(attributes.libraries)
        if ops_digest(part, name, len(field.ops), rule) != stored.recipe:
            continue
        found |= {each: hashes[each] for each in functions}
        for each, op, step in named_ops(part):
            versions = {library: plain_version(library) for library in libraries_of(op)}
            recorded = {n: plain_version(n, attributes.libraries) for n in versions}
            if step is not None and versions == recorded:
                found[each] = json.dumps(versions, sort_keys=True)
        if any(op.random for op in part.functions):
            found[RANDOM] = NOTHING
    return found


def _has_rows_of(store: Folder, name: str, etag: str) -> bool:
    """Whether the newest version that was made from a source, and from it alone, has this etag."""
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
