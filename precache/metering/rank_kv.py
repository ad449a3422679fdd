"""How ranks tell each other figures without a collective: by the key-value store of their job."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from precache.metering.report import RankStalls

log = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=5)
"""For one request to the store, which no step waits for."""

PATIENCE = 1.0
"""Seconds that rank 0 waits for others' figures of the window that it reports."""


def job_store(world_size: int) -> Any | None:
    """A connection to the key-value store of a job with several ranks; None where it has none."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    if not address or not port.isdecimal():
        return None
    try:
        # torch exports it where it has distributed training.
        make = dist.TCPStore  # type: ignore[attr-defined]  # c10d's
        return make(address, int(port), timeout=TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        log.info("ranks go on one by one, for they have no store to share: %s", error)
        return None


def own_prefix(name: str) -> str:
    """Of keys that ranks share: a job that torchrun restarts keeps its store."""
    return f"precache/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class RankStore:
    """The last figures of each rank, under a key of its own, in the store at ``MASTER_ADDR``.

    That is the store by which the processes of a job have found each other (torchrun's, or that of
    rank 0), reached by a connection of our own, so that nobody else's requests wait for ours.
    """

    def __init__(self, store: Any, name: str, rank: int, world_size: int) -> None:
        self._keys = [f"{own_prefix(name)}/{each}" for each in range(world_size)]
        self._store = store
        self._rank = rank
        self._known: set[int] = set()
        self._absent: set[int] = set()

    @classmethod
    def connect(cls, name: str, rank: int, world_size: int) -> RankStore | None:
        """A connection, or None where there is nobody to talk to, or no store to do it over."""
        store = job_store(world_size)
        return None if store is None else cls(store, name, rank, world_size)

    def put(self, stalls: RankStalls) -> None:
        """Tell the others."""
        self._store.set(self._keys[self._rank], json.dumps(dataclasses.asdict(stalls)))

    def gather(self, window: int, hurry: threading.Event) -> list[RankStalls]:
        """The last figures of every rank that has told any, by rank.

        Waits up to `PATIENCE` for figures of `window`, unless there is a `hurry`, and does not
        wait a second time for a rank that was never heard.
        """
        until, pause = time.monotonic() + PATIENCE, 0.01
        while True:
            found = self._read()
            heard = {each.rank for each in found if each.window >= window}
            awaited = set(range(len(self._keys))) - heard - self._absent
            if not awaited or time.monotonic() > until or hurry.wait(pause):
                self._absent = set(range(len(self._keys))) - {each.rank for each in found}
                return found
            pause *= 2

    def _read(self) -> list[RankStalls]:
        unknown = [rank for rank in range(len(self._keys)) if rank not in self._known]
        if unknown and self._store.check([self._keys[rank] for rank in unknown]):
            self._known.update(unknown)
        else:
            self._known.update(rank for rank in unknown if self._store.check([self._keys[rank]]))
        ranks = sorted(self._known)
        if not ranks:
            return []
        values = self._store.multi_get([self._keys[rank] for rank in ranks])
        return [RankStalls(**json.loads(value)) for value in values]
