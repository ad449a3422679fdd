"""`ensure`: the version that a training script asks for, built once where it is missing."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from numbers import Real
from typing import Any

from precache.building.api import new_request, require_known, submit, takes_recipe
from precache.errors import UsageError
from precache.recipe.recipe import Recipe
from precache.storage.open import StorageOptions
from precache.store.version import Version
from precache_workers.planning.options import BuildOptions


@takes_recipe
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
    """Open the version of a source and a recipe; build it first where it is not there.

    Every rank of a training, on every node, may call this: one builds, and the others wait and
    open the same version, as long as the source stands still. If the one that builds is killed,
    another one goes on where it was. Where the version is there, nothing is written to the store
    but an entry of its log where that lacks one, and Ray is not loaded, nor a decoder, unless
    libraries have changed since the last time; the source is listed each time. Once
    `torch.distributed` is initialised with ``MASTER_ADDR`` and ``MASTER_PORT``, rank 0 lists it for
    all, and what it fails
    with they all raise; else each process lists it.

    Parameters
    ----------
    source, store, recipe, storage_options
        As `build` takes them.
    address
        Where it is built: as `build` takes it, by the calling process; or a cluster's job server,
        ``http://head:8265``, which gets the build as `submit` does.
    wait
        ``True``: until the version is there. A number: so many seconds. ``False``: not at all;
        None is returned where the version is not there yet. Unless it is ``True``, the build goes
        on in a process of its own, or on the cluster, whatever becomes of this one.
    follow
        Return as soon as shards can be read, while the others are still made (elsewhere, as with
        ``wait=False``), and let a `Loader` begin with them: in the first epoch rows come in the
        order in which the shards are finished, mixed within each. All ranks draw from one log of
        these, so that step k has the same rows for all, each row comes once, and every rank has as
        many batches, told by the number of samples: rows from the epoch's beginning come again in
        place of bad ones, which the log and `Loader.stats` count. Later epochs wait for the commit
        and are fully shuffled. Where the version is there, it is as without; but if anybody
        followed its build, the order is kept in the store, for ranks and resumed trainings that
        come later.
    progress
        Show on standard error how far the build is, or what is awaited.
    code
        As `submit` takes it, with a job server.
    options
        The others of `build`, but for `recompute`.

    Returns
    -------
    Version
        As `open` gives it; a `Loader` takes it in place of a URI. With `follow` it may not be
        committed yet: then only a `Loader` can read it.

    Raises
    ------
    UsageError
        The request cannot be met.
    BuildError
        The build failed, or is not done in time; the same call continues it, or waits on.

    Examples
    --------
    >>> recipe = Recipe.image(resize=256, crop=224)
    >>> version = ensure("photos/", "photos.store", recipe)  # doctest: +SKIP
    >>> loader = Loader(version)  # doctest: +SKIP
    >>> loader = Loader(ensure("photos/", "photos.store", recipe, follow=True))  # doctest: +SKIP
    """
    if isinstance(source, Recipe) or source is None:
        raise UsageError("ensure takes source, store and recipe in this order, as build does")
    seconds = _seconds(wait)
    if follow and wait is not True:
        raise UsageError(f"follow begins with the first shard, and wait is {wait}; leave out one")
    cluster = address.startswith(("http://", "https://"))
    if code and not cluster:
        raise UsageError(f"code travels to a cluster's job server, and address is {address!r}")
    if options.get("recompute"):
        raise UsageError(
            "recompute makes a new version each time, and ensure opens the one that is there; "
            "build once with recompute, and leave it out here"
        )
    require_known("ensure", options, BuildOptions.model_fields)
    options = {**options, "storage_options": storage_options, "progress": progress}
    where = "auto" if cluster else address
    request = new_request(source, store, recipe, **options, address=where)
    from precache_workers.ensure import ensure as ensuring

    wanted = ensuring.WantedVersion(request, progress)
    with wanted.failing_for_all():
        if cluster:
            job = functools.partial(
                submit, source, store, request.recipe, address=address, code=code, **options
            )
            if follow:
                return ensuring.follow(wanted, lambda: ensuring.PendingJob(job()))
            return ensuring.ensure_by_job(wanted, job, seconds)
        if follow:
            return ensuring.follow(wanted, lambda: ensuring.begin_apart(wanted))
        if wait is True:
            return ensuring.ensure_here(wanted)
        return ensuring.ensure_apart(wanted, seconds)


def _seconds(wait: Any) -> float:
    if isinstance(wait, bool):
        return math.inf if wait else 0.0
    if not isinstance(wait, Real) or not float(wait) >= 0:
        raise UsageError(f"wait is {wait!r}; give True, False, or seconds from 0 up")
    return float(wait)
