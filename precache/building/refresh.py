"""`refresh`: compute new variants of a store's samples."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from precache.building.api import check_call, new_request
from precache.errors import needs
from precache_workers.planning.options import RunOptions

if TYPE_CHECKING:
    from precache_workers.driver.build_result import BuildResult


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
        Store whose current version has variants, as path or URL.
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
