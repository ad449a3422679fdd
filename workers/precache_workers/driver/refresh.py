"""Refresh: child versions with a fresh variant each; the oldest is dropped, others are linked.

The recipe is the store's, and so is the source unless the user names one. A folder or URL that the
commit log names is read; functions, and a ``python:`` source, run only if the user allows it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from precache.errors import Hole, RecipeError, StoreError, UsageError
from precache.messages import shown
from precache.storage.open import open_folder
from precache.store.build_status import read_description
from precache.store.commit_log import read_log, recordable_source, short
from precache.store.lease import is_built
from precache.store.open import open_version
from precache.store.version import Version
from precache.units import ago
from precache_workers.cluster.executor import is_joined
from precache_workers.driver.build import run_build
from precache_workers.driver.build_result import BuildResult
from precache_workers.ops.identity import function_digests
from precache_workers.planning.listing import ListedSource, with_locations
from precache_workers.planning.request import Request, check_request, source_of
from precache_workers.planning.row_placement import Placed
from precache_workers.planning.rows import default_max_failures
from precache_workers.planning.target_version import VersionSpec
from precache_workers.sources.folder import FolderSource
from precache_workers.user_code.loading import refuse_stored_code


def refresh_once(request: Request, shown: bool) -> BuildResult:
    """Build the next child of the current version, or finish a killed one, and make it current.

    Parameters
    ----------
    request
        Of a build; its recipe is ignored, and an empty source means that of the current version.
    shown
        Show progress on standard error.

    Raises
    ------
    StoreError
        There is no store, or its version has no variants.
    UsageError
        The source is unknown, or the store names code that the user did not allow to run.
    ReplacedError
        Another build made its version current meanwhile.
    BuildError
        It is incomplete, or a sample is not what it was.
    """
    version = open_version(request.store, request.storage_options)
    stored = version.recipe
    request = request.model_copy(update={"recipe": stored})
    check_request(request)
    try:
        fresh = stored.with_fresh_variants()
    except RecipeError as error:
        raise StoreError(f"{version.path}: {error}") from None
    cut_off = _was_cut_off(version)
    recipe = stored if cut_off else fresh
    source = request.source or _source(version, request)
    request = request.model_copy(update={"recipe": recipe, "source": source})
    failed = dict(version.failures.values())
    if request.max_failures is None:  # what failed before may fail again
        most = max(default_max_failures(version.rows), len(failed))
        request = request.model_copy(update={"max_failures": most})
    listed = rows_of(version, request, failed)
    current = read_log(open_folder(request.store, request.storage_options), newest=True).current
    assert current is not None  # it was opened
    age = ago(time.time() - current.time)
    line = f"Fresh variants of the samples of version {short(version.id)}, made current {age}"
    if cut_off:
        line = f"Version {short(version.id)} is of a refresh that was cut off after its commit"
    listed = replace(listed, placed=replace(listed.placed, changed=line))
    return run_build(request, shown, listed)


def _was_cut_off(version: Version) -> bool:
    """Return True if the version is of a refresh that was cut off after its commit."""
    begun = None if is_built(version.folder) else read_description(version.folder)
    return begun is not None and begun.refreshes is not None


def _source(version: Version, request: Request) -> str:
    store = open_folder(request.store, request.storage_options)
    uri = read_log(store).source_of(version.id)
    if uri is None:
        raise UsageError(
            f"{store} does not record the source of version {short(version.id)}; give --source "
            "SOURCE"
        )
    if uri.startswith("python:"):
        if not request.run_functions:
            refuse_stored_code([uri], str(store))
    elif uri != recordable_source(uri):  # such as one relative to wherever this runs
        raise UsageError(
            f"{store} names {shown(uri)!r} as its source, in a form that no build writes; give "
            "--source SOURCE"
        )
    source = source_of(request.model_copy(update={"source": uri}))
    seen_here = not is_joined(request.address)
    if seen_here and isinstance(source, FolderSource) and source.folder.kind() is None:
        raise UsageError(
            f"{store} was built from {uri}, which is not there any more; give --source SOURCE"
        )
    return uri


def rows_of(version: Version, request: Request, failed: Mapping[str, Hole]) -> ListedSource:
    """Return the rows of a version as the listing of a build by the request's recipe.

    Parameters
    ----------
    failed
        Key -> hole, of the version: samples that killed a worker, or took too long, are
        not tried again.
    """
    folder, attributes = version.folder, version.attributes
    table = version.row_table()
    store = open_folder(request.store, request.storage_options)
    source = source_of(request)
    table = with_locations(request, store, source, table)
    located = table.locations
    if located is not None and located.places.null_count == len(located):
        raise UsageError(
            f"{shown(request.source)} has none of the samples of version {short(version.id)}; if "
            "it was built with --source-kind, --image-column, --label-column, --key-column or "
            "--sample-name, give them again"
        )
    return ListedSource(
        VersionSpec.of(request.recipe, table),
        Placed(table, attributes.rows_per_shard),
        ignored={},
        code=function_digests(request.recipe),
        seconds=0.0,
        barred={key: hole for key, hole in failed.items() if hole.ended_worker},
        refreshes=folder.name,
        labels=version.labels,
    )
