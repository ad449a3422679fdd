"""`refresh`: compute new variants of a store's samples, here or on a cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from precache.building.api import check_call, new_request
from precache.errors import PrecacheError, needs
from precache.store.open import open_version
from precache_workers.planning.options import RunOptions, read_options

if TYPE_CHECKING:
    from precache_workers.driver.build_result import BuildResult
    from precache_workers.jobs.submission import ClusterJob


@needs("building")
def refresh(
    store: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    **options: Any,
) -> BuildResult:
    """Compute fresh variants of a store's samples, as a child version that becomes current.

    In each field with variants, a fresh variant replaces the oldest one; everything else is linked.
    The rows are those of the current version. A `Loader` with ``refresh="epoch"`` reads the current
    version; replaced versions stay until `gc` removes them.

    Parameters
    ----------
    store
        As in `build`.
    source
        Source of the samples; by default that of the current version, as recorded in the commit
        log.
    options
        Options of `build` for where and how it runs. ``run_functions=True`` permits running the
        functions in the store's recipe, and a ``python:`` source in its log; set it only for a
        store that you trust.

    Raises
    ------
    StoreError
        There is no store, or its current version has no variants.
    UsageError
        The source is not known, the store names code and ``run_functions`` is false, or an
        option's value is not allowed.
    BuildError
        The child version is incomplete (the same call continues it), or a sample has changed; or
        another build made its version current meanwhile, of which the same call builds a child.
    """
    check_call("refresh", options, RunOptions)
    request = new_request(source or "", store, None, **options)
    from precache_workers.driver.refresh import refresh_once

    return refresh_once(request, request.progress)


def submit_refresh(
    store: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    address: str | None = None,
    code: Sequence[str | os.PathLike[str]] = (),
    **options: Any,
) -> ClusterJob:
    """Submit a `refresh` to a cluster and return at once; the job continues without this process.

    If the same refresh is under way, its job is returned; it does not run twice.

    Parameters
    ----------
    store, source
        As in `refresh`; paths are those of the cluster's nodes.
    address, code
        As in `submit`.
    options
        The other options of `refresh`, with storage options as in `submit`; `progress` is on by
        default.

    Returns
    -------
    ClusterJob
        As from `submit`.

    Raises
    ------
    UsageError
        The request cannot be met, the store names code and ``run_functions`` is false, or another
        job works on the store; nothing was sent.
    BuildError
        The cluster cannot be reached.
    """
    check_call("submit_refresh", options, RunOptions)
    checked = read_options(RunOptions, {"progress": True, **options, "address": "auto"})
    from precache_workers.jobs.job_package import pack_refresh
    from precache_workers.jobs.submission import submit_package
    from precache_workers.user_code.loading import require_permission

    recipe = None
    with contextlib.suppress(PrecacheError):  # the cluster's nodes may be able to open it
        recipe = open_version(store, checked.storage_options).recipe
    if recipe is not None:
        require_permission(recipe, checked.run_functions)
    place = None if source is None else os.fspath(source)
    package = pack_refresh(place, os.fspath(store), recipe, checked, code)
    return submit_package(package, address)
