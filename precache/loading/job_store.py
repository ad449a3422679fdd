"""The key-value store of a job: by it, ranks exchange facts without collectives."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from precache.errors import StoreError

log = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=5)
"""Time limit of a request to the store."""

_unreachable: set[tuple[str, str]] = set()
"""Addresses and ports at which there was no store: each costs a wait once."""

_compared: Counter[str] = Counter()
"""Store -> loaders whose version was compared; the nth ones of all ranks belong together."""


def job_store(world_size: int) -> Any | None:
    """Connect to the key-value store of a job with several ranks; None if there is none."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    if not address or not port.isdecimal():
        return None
    if (address, port) in _unreachable:
        return None
    try:
        # torch exports it only in builds with distributed training.
        connect = dist.TCPStore  # type: ignore[attr-defined]  # c10d's
        return connect(address, int(port), timeout=TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        _unreachable.add((address, port))
        log.warning("ranks exchange nothing: the store of their job is unreachable: %s", error)
        return None


def key_prefix(name: str) -> str:
    """Return the prefix of shared keys; it changes when torchrun restarts the job in one store."""
    return f"precache/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def require_same_version(path: str, version: str, world_size: int) -> None:
    """Raise `StoreError` if the first rank that came here opened another version of a store.

    No rank waits for another. Without a key-value store of the job, nothing is compared.

    Parameters
    ----------
    path
        Of the version, in the store.
    """
    store = path.removesuffix(version).rstrip("/")
    shared = job_store(world_size)
    if shared is None:
        return
    number = _compared[store] + 1
    digest = hashlib.sha256(store.encode()).hexdigest()[:32]
    try:
        first = shared.compare_set(f"{key_prefix(digest)}/{number}", "", version).decode()
    except RuntimeError as error:  # the job's store has ended
        log.info("ranks do not compare their versions of %s: %s", store, error)
        return
    if first != version:
        raise StoreError(
            f"this rank opened version {version} of {store}, and another rank {first}: a build "
            f"committed in between, or they use their loaders of this store in different orders; "
            f"open '{store}@{first[:12]}' on all ranks, or start them again"
        )
    _compared[store] = number
