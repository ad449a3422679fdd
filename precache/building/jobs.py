"""`status` and `cancel`: jobs of a cluster, and the builds of a store."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from precache.errors import UsageError
from precache.storage.open import StorageOptions
from precache.store.build_status import StoreStatus, read_status

if TYPE_CHECKING:
    from precache_workers.jobs.submission import JobStatus


def status(
    job_or_store: str | os.PathLike[str],
    *,
    address: str | None = None,
    storage_options: StorageOptions = None,
) -> JobStatus | StoreStatus:
    """Return the state of a job that `submit` started, or of a store and its builds.

    Parameters
    ----------
    job_or_store
        A job's id, or a store as path or URL.
    address
        Of the job server, as `submit` takes it; no cluster is asked about a store.
    storage_options
        Of a store, as `build` takes them.

    Returns
    -------
    JobStatus or StoreStatus
        A job's state, last line of progress and reason of a failure; or a store's current version
        and the builds that have begun.

    Raises
    ------
    UsageError, StoreError
        There is no such job, or no such store.
    BuildError
        The cluster cannot be reached.
    """
    name = os.fspath(job_or_store)
    if re.fullmatch(r"precache-[0-9a-f]{12}-[0-9]+", name):
        from precache_workers.jobs.submission import open_job

        return open_job(name, address).status()
    if address is not None:
        raise UsageError(f"{name} is not the id of a job, such as precache-0123456789ab-1")
    return read_status(name, storage_options)


def cancel(job: str, *, address: str | None = None) -> JobStatus:
    """Stop a job that `submit` started, and return its state when it has ended.

    Shards that are complete are kept; the same build, submitted again, continues.

    Parameters
    ----------
    job
        Its id.
    address
        Of the job server, as `submit` takes it.

    Raises
    ------
    UsageError
        There is no such job.
    BuildError
        The cluster cannot be reached, or the job does not end.
    """
    from precache_workers.jobs.submission import open_job

    return open_job(job, address).cancel()
