"""`ensure`: open the version that a training script needs; build it once if it is missing."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Real
from typing import Any

from precache.building.api import check_call, new_request, submit
from precache.errors import UsageError, needs
from precache.recipe.recipe import Recipe
from precache.storage.open import StorageOptions
from precache.store.version import Version


@needs("building")
def ensure(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    address: str = "local",
    wait: bool | float = True,
    follow: bool = False,
    progress: bool = True,
    code: Sequence[str | os.PathLike[str]] = (),
    storage_options: StorageOptions = None,
    **options: Any,
) -> Version | None:
    """Open the version of a source and a recipe; build it first if it does not exist.

    Every rank of a training, on every node, may call this: one builds, and the others wait and
    open the same version, as long as the source does not change. If the process that builds is
    killed, another one resumes its build. If the version exists, nothing is written to the store
    except a missing entry of its log; and neither Ray nor a decoder is loaded, unless libraries
    have changed since the last call.

    Every call lists the source. Once `torch.distributed` is initialised with ``MASTER_ADDR`` and
    ``MASTER_PORT``, rank 0 lists it for all ranks, and an error of rank 0 is raised on all of them;
    otherwise each process lists it.

    Parameters
    ----------
    source, store, recipe, storage_options
        As in `build`.
    address
        As in `build`; or the address of a cluster's job server, ``http://head:8265``, to which the
        build is submitted.
    wait
        ``True`` waits until the version is complete, a number waits at most that many seconds, and
        ``False`` does not wait: it returns None if the version is not complete yet. Unless `wait`
        is ``True``, the build runs in its own process or on the cluster, and continues after this
        process ends.
    follow
        Return as soon as the first shards can be read, so that a `Loader` can begin with them; the
        build continues in its own process or on the cluster. The first epoch takes the shards in
        their order, shuffled within each, and waits for those that are not finished. This order
        depends on the seed alone, also if the version is complete by then, so that ranks and
        resumed trainings that start later read the same. Each row comes once, and all ranks have
        the same number of batches, which follows from the number of samples. Rows from the
        beginning of the epoch are repeated in place of holes; the log and `Loader.stats` count
        them. Later epochs wait for the commit and are fully shuffled. With `rows`, `resident`,
        `refresh`, or ``shuffle=`` False, `Buckets` or `Weighted`, a `Loader` needs a complete
        version, on which `follow` then has no effect.
    progress
        Show the progress of the build, or the reason for waiting, on standard error.
    code
        As in `submit`; only with the address of a job server.
    options
        The other options of `build`, except `recompute`. They determine how a missing version is
        built. A complete version is opened as it is, even with `retry_failed` or `verify`.

    Returns
    -------
    Version
        As from `open`; a `Loader` accepts it in place of a URI. With `follow` it may not be
        committed yet; then only a `Loader` can read it.

    Raises
    ------
    UsageError
        An option's value is not allowed, or the request cannot be met.
    BuildError
        The build failed or timed out; the same call continues it, or continues to wait.

    Examples
    --------
    >>> recipe = Recipe.image(resize=256, crop=224)
    >>> version = ensure("photos/", "photos.store", recipe)  # doctest: +SKIP
    >>> loader = Loader(version)  # doctest: +SKIP
    >>> loader = Loader(ensure("photos/", "photos.store", recipe, follow=True))  # doctest: +SKIP
    """
    check_call("ensure", options)
    seconds = _seconds(wait)
    if follow and wait is not True:
        raise UsageError(f"follow returns at the first shard, and wait is {wait}; leave out one")
    cluster = address.startswith(("http://", "https://"))
    if code and not cluster:
        raise UsageError(f"code is sent to a cluster's job server, and address is {address!r}")
    if options.get("recompute"):
        raise UsageError(
            "recompute makes a new version each time, and ensure opens an existing one; build "
            "once with recompute, and leave it out here"
        )
    options = {**options, "storage_options": storage_options, "progress": progress}
    where = "auto" if cluster else address
    request = new_request(source, store, recipe, **options, address=where)
    from precache_workers.ensure import ensure as ensuring

    wanted = ensuring.WantedVersion(request, progress)
    with wanted.failing_for_all():
        begin: ensuring.Begin = (
            ensuring.build_here if wait is True and not follow else ensuring.build_apart
        )
        if cluster:

            def begin(wanted: ensuring.WantedVersion) -> ensuring.Pending:
                job = submit(source, store, request.recipe, address=address, code=code, **options)
                return ensuring.follow_job(wanted, job)

        return ensuring.ensure_version(wanted, begin, seconds, follow=follow)


def _seconds(wait: Any) -> float:
    if isinstance(wait, bool):
        return math.inf if wait else 0.0
    if not isinstance(wait, Real) or not float(wait) >= 0:
        raise UsageError(f"wait is {wait!r}; give True, False, or seconds from 0 up")
    return float(wait)
