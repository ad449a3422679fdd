"""What a user asks of a build, and what a build answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from precache.errors import UsageError
from precache.messages import shown
from precache.recipe.recipe import Recipe
from precache.storage.open import StorageOptions, open_folder
from precache.storage.retries import RETRY_SECONDS, SILENT_SECONDS
from precache.store.commit_log import ROOT
from precache.store.open import split_uri
from precache_workers.cluster.executor import check_address, is_joined
from precache_workers.cluster.placement import Placement
from precache_workers.runtime.time_limit import SAMPLE_SECONDS
from precache_workers.sources.base import MOST_SAMPLE_BYTES
from precache_workers.sources.user_code import require_permission

MOST_SHARD_SAMPLES = 1 << 24


@dataclass(frozen=True)
class Request:
    """What the user asked for; `precache.build` explains each."""

    source: str = field(repr=False)
    store: str = field(repr=False)
    recipe: Recipe
    address: str = "local"
    labels: str | None = None
    classes: str | None = None
    accept_unmatched: bool = False
    follow_links: bool = False
    keep_order: bool = False
    shard_samples: int | None = None
    on_error: str = "skip"
    max_failures: int | None = None
    accept_missing: bool = False
    check_space: bool = True
    cpus: int | None = None
    compact: bool = False
    recompute: bool = False
    retry_failed: bool = False
    run_functions: bool = False
    import_path: tuple[str, ...] = ()
    placement: Placement = field(default_factory=Placement)
    storage_options: StorageOptions = field(default=None, repr=False)
    reports: tuple[str, ...] = ()
    max_sample_bytes: int = MOST_SAMPLE_BYTES
    sample_timeout: float = SAMPLE_SECONDS


@dataclass(frozen=True)
class BuildResult:
    """What a build made.

    Attributes
    ----------
    version, path
        The version's id and folder.
    samples, failed, ignored
        Of the source; holes among them; files of the source that are not images by suffix.
    left_out
        What else lies in the source and is no sample, counted by reason: ``link_out``, links that
        lead out of it; ``no_file``, FIFOs, sockets and devices; ``no_name``, objects with an empty
        part, ``.`` or ``..`` in their names.
    mended
        Samples that had failed before, and were tried again with success.
    removed
        Rows, holes too, whose samples the source has no more.
    rows_reused
        Rows taken over from an earlier version, in whole shards or one by one.
    holes
        (key, why) of every hole.
    shards, shards_skipped, shards_reused
        Shards of the version; those that were there before; those taken over from an earlier
        version of the same samples.
    raw_bytes, stored_bytes
        Of all large fields, before and after compression.
    seconds, cpu_seconds
        Wall time of all; CPU time that the tasks burnt on what was made in this run.
    timings
        Seconds by stage: ``list`` and ``start`` (of the executor, once) as wall time; ``fetch``,
        ``ops``, ``encode``, ``put`` as wall time summed over tasks; ``imports`` as CPU time of the
        workers before their first task.
    classes, mean, std
        Class names; by image field, statistics of each channel in stored units.
    """

    version: str
    path: str
    samples: int
    failed: int
    shards: int
    shards_skipped: int
    raw_bytes: int
    stored_bytes: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    holes: Sequence[tuple[str, str]] = ()
    ignored: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    shards_reused: int = 0
    rows_reused: int = 0
    removed: int = 0
    mended: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    mean: Mapping[str, list[float]] = field(default_factory=dict)
    std: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return self.raw_bytes / max(1, self.stored_bytes)


def check_request(request: Request) -> None:
    """Raise `UsageError` for what can be told to be wrong before the source is listed."""
    require_permission(request.recipe, request.run_functions)
    check_address(request.address)
    request.placement.check()
    if not is_joined(request.address) and request.placement != Placement():
        raise UsageError(
            f"address is {request.address!r}: CPUs and memory per task, resources, labels and "
            "niceness are for a cluster that is joined by --address auto or ray://host:10001"
        )
    if request.on_error not in ("skip", "raise"):
        raise UsageError(f"on_error is {request.on_error!r}; choose skip or raise")
    if request.retry_failed and request.recompute:
        raise UsageError(
            "retry_failed takes over all but what failed, recompute takes over nothing; drop one"
        )
    if request.max_sample_bytes < 1:
        raise UsageError(
            f"max_sample_bytes is {request.max_sample_bytes}; give a whole number from 1 up"
        )
    if (request.shard_samples or 0) > MOST_SHARD_SAMPLES:
        raise UsageError(
            f"shard_samples is {request.shard_samples}; the most is {MOST_SHARD_SAMPLES}"
        )
    least = RETRY_SECONDS + SILENT_SECONDS if "://" in request.source else 0
    if not least < request.sample_timeout < math.inf:
        why = ", for which requests to a service may be made again" if least else ""
        raise UsageError(
            f"sample_timeout is {request.sample_timeout:g}; give more than {least:g} seconds{why}"
        )
    named = shown(request.store)
    if split_uri(request.store, request.storage_options)[1] is not None:
        raise UsageError(f"{named} names a version; build into the store itself")
    store = open_folder(request.store, request.storage_options)
    if store.get(ROOT) is not None:
        raise UsageError(f"{named} is a Zarr group, not a store; choose another folder")
    if store.kind() == "file":
        raise UsageError(f"{named} is a file; choose a folder for the store")
