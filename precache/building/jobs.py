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
        Address of the job server, as in `submit`; not allowed with a store.
    storage_options
        Storage options of a store, as in `build`.

    Returns
    -------
    JobStatus or StoreStatus
        A job's state, last line of progress and reason for a failure; or a store's current version
        and its unfinished builds.

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

    Complete shards are kept; to resume, submit the same build again.

    Parameters
    ----------
    job
        Id of the job.
    address
        Address of the job server, as in `submit`.

    Raises
    ------
    UsageError
        There is no such job.
    BuildError
        The cluster cannot be reached, or the job does not end.
    """
    from precache_workers.jobs.submission import open_job

    return open_job(job, address).cancel()
