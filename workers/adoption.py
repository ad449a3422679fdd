"""What stands for code in the versions of a store: its digest, or what an older release had.

Older releases identified code by a hash of its module. The first build of a store by a function or
factory that its log does not name looks for a version that was made so by the code as it is now.
Where there is one, that hash stands for the digest from then on, as the log says: the versions keep
their ids, and their rows are taken over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from precache.attributes import Attributes
from precache.commits import ROOT, Code, append_entry, read_commits
from precache.errors import DamageError, PipelineError, StorageError, StoreError
from precache.folder import Folder
from precache.pipeline import Pipeline
from precache.rowtable import RowTable
from precache.store import unchecked
from precache.version import ROW_TABLE
from workers.plan import function_digests, ops_digest
from workers.reuse import committed
from workers.sources import DatasetSource
from workers.usercode import tree_hash


def identified(store: Folder, pipeline: Pipeline) -> tuple[Pipeline, dict[str, tuple[str, str]]]:
    """A pipeline with what stands for the code of its functions, and that as `CommitEntry` has it.

    Functions that declare a version are left as they are.
    """
    digests = function_digests(pipeline)
    if not digests:
        return pipeline, {}
    named = _named(store)
    unnamed = digests.keys() - {name for name, _ in named}
    old = _old_hashes(store, {name: _module_hash(name) for name in unnamed}) if unnamed else {}
    code = {
        name: (digest, old.get(name) or named.get((name, digest), digest))
        for name, digest in digests.items()
    }
    return pipeline.with_code({name: known for name, (_, known) in code.items()}), code


def identified_rows(store: Folder, source: DatasetSource, table: RowTable) -> tuple[RowTable, Code]:
    """A factory's listing with what stands for its code, and that as `CommitEntry` has it."""
    name = f"python:{source.factory}"
    named = _named(store)
    known = named.get((name, source.etag), source.etag)
    old = _module_hash(source.factory)
    if name not in {each for each, _ in named} and _has_rows_of(store, name, old):
        known = old
    return replace(table, etags=[known] * len(table)), {name: (source.etag, known)}


def note_code(store: Folder, version: str, code: Code) -> None:
    """Say in the log what stands for the code that made a version, where that is current."""
    newest = read_commits(store, newest=True) if code else []
    if newest and newest[-1].version == version:
        append_entry(store, version, None, code)


def _named(store: Folder) -> dict[tuple[str, str], str]:
    """(name, digest) -> what stands for it."""
    return {
        (name, digest): known
        for entry in read_commits(store)
        for name, (digest, known) in entry.code.items()
    }


def _module_hash(name: str) -> str:
    """What stood for a function or factory in older releases; empty where nothing did."""
    return tree_hash(name.partition(":")[0])


def _old_hashes(store: Folder, hashes: Mapping[str, str]) -> dict[str, str]:
    """Those of the hashes by which some version of the store was made, by function."""
    found: dict[str, str] = {}
    for _, attributes in committed(store):
        if found.keys() == hashes.keys():
            break
        found |= {name: hashes[name] for name in _made_by(attributes, hashes)}
    return found


def _made_by(attributes: Attributes, hashes: Mapping[str, str]) -> set[str]:
    """Functions by which a version was made, as their modules' hashes say."""
    try:
        before = Pipeline.from_dict(attributes.pipeline).by_array().with_code(hashes)
    except PipelineError:  # of another release
        return set()
    found: set[str] = set()
    for name, field in before.fields.items():
        part = before.model_copy(update={"fields": {name: field}})
        functions = {op.function for op in part.functions if not op.version}
        stored = attributes.fields.get(name)
        if functions and functions <= hashes.keys() and stored is not None:
            digest = ops_digest(part, name, len(field.ops), attributes.libraries)
            found |= functions if digest == stored.recipe else set()
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
            data = unchecked(folder).read_checked(ROW_TABLE)
            rows = RowTable.from_parquet(data, folder.path(ROW_TABLE))
        except (DamageError, StorageError, StoreError):
            continue
        return bool(etag) and etag in rows.etags
    return False
