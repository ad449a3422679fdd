"""The key-value store of a job: by it, ranks exchange facts without collectives."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

log = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=5)
"""Time limit of a request to the store."""

_unreachable: set[tuple[str, str]] = set()
"""Addresses and ports at which there was no store: each costs a wait once."""


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
