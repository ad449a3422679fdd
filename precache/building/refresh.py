"""`refresh`: fresh variants of a store's samples, here or on a cluster."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from precache.building.api import build, request_of, require_known
from precache.errors import PrecacheError
from precache.maintenance.gc import parse_age
from precache.runtime.integers import whole
from precache.storage.open import StorageOptions
from precache.store.open import open_version

if TYPE_CHECKING:
    from precache_workers.jobs.submission import ClusterJob
    from precache_workers.planning.request import BuildResult

_OF_ROWS = ("labels", "classes", "accept_unmatched", "keep_order", "shard_samples", "compact")
_OF_THE_VERSION = ("recipe", *_OF_ROWS, "recompute", "retry_failed")
"""Options of a build that a refresh does not take: they are what the version has."""


def refresh(
    store: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    times: int = 1,
    every: float | str | None = None,
    **options: Any,
) -> list[BuildResult]:
    """Make fresh variants of a store's samples: child versions, each current when it is made.

    Of every field with variants the oldest is dropped and a fresh one computed; all others are
    linked. The rows are those of the current version. A `Loader` with ``refresh="epoch"`` reads
    what is current; versions that were replaced stay until `gc` removes them.

    Parameters
    ----------
    source
        Where the samples are; by default what the current version was built from, as the store's
        log of commits tells.
    times
        Child versions, one after another.
    every
        Seconds between the beginnings of two, or a time such as ``"30m"``.
    options
        Of `build`, as far as they tell where and how it runs. ``run_functions=True`` lets functions
        that the store's recipe names run, and a ``python:`` source that its log names: for a store
        that you trust.

    Raises
    ------
    StoreError
        There is no store, or its current version has no variants.
    UsageError
        The source is not known, the store names code and ``run_functions`` is false, or an option
        makes no sense.
    BuildError
        It is incomplete, and the same call continues it; or a sample is not what it was.
    """
    return list(refreshes(store, source, times=times, every=every, **options))


def refreshes(
    store: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    times: int | None = None,
    every: float | str | None = None,
    **options: Any,
) -> Iterator[BuildResult]:
    """As `refresh`, each result as it comes; by default one, with `every` without end."""
    defaults = _defaults("refresh", options)
    seconds = _seconds(times, every) or 0.0
    given = {**defaults, "source": source or "", "store": store, "recipe": None, **options}
    request = request_of(**given)
    from precache_workers.driver.refresh import refresh_once

    for number in itertools.count(1):
        began = time.monotonic()
        yield refresh_once(request, given["progress"])
        if number == (times or (1 if every is None else None)):
            return
        time.sleep(max(0.0, began + seconds - time.monotonic()))  # this long was asked for


def submit_refresh(
    store: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    times: int | None = None,
    every: float | str | None = None,
    address: str | None = None,
    code: Sequence[str | os.PathLike[str]] = (),
    storage_options: StorageOptions = None,
    **options: Any,
) -> ClusterJob:
    """Have a cluster `refresh`, and return at once: the job goes on without this process.

    The same refresh submitted while it is under way is joined, not run twice.

    Parameters
    ----------
    store, source, times, every
        As `refresh` takes them, but that with `every` and without `times` there is no end; paths
        are those of the cluster's nodes.
    address, code, storage_options
        As `submit` takes them.
    options
        The others of `refresh`; `progress` is on unless it is false.

    Returns
    -------
    ClusterJob
        As `submit` gives it.

    Raises
    ------
    UsageError
        The request cannot be met, the store names code and ``run_functions`` is false, or another
        job works on the store; nothing was sent.
    BuildError
        The cluster cannot be reached.
    """
    defaults = {**_defaults("submit_refresh", options), "progress": True}
    seconds = _seconds(times, every)
    from precache_workers.jobs.job_package import pack_refresh
    from precache_workers.jobs.submission import submit_parcel
    from precache_workers.sources.user_code import require_permission

    given = {name: value for name, value in options.items() if value != defaults[name]}
    given |= {"times": times, "every": None if seconds is None else f"{seconds:f}s"}
    recipe = None
    with contextlib.suppress(PrecacheError):  # the cluster may see what is not to be had here
        recipe = open_version(store, None, storage_options).recipe
    if recipe is not None:
        require_permission(recipe, options.get("run_functions", False))
    place = None if source is None else os.fspath(source)
    parcel = pack_refresh(place, os.fspath(store), recipe, given, code)
    return submit_parcel(parcel, address, storage_options or {})


def _defaults(function: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options of a build; raises `TypeError` for those that a refresh does not take."""
    known = inspect.signature(build).parameters
    taken = {name: each for name, each in known.items() if name not in _OF_THE_VERSION}
    require_known(function, options, taken)
    return {name: each.default for name, each in known.items()}


def _seconds(times: int | None, every: float | str | None) -> float | None:
    """Between the beginnings of two child versions."""
    if times is not None:
        whole("times", times, 1)
    return None if every is None else parse_age(every)
