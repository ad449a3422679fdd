"""Exchange figures between ranks without collectives, through the job's key-value store."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from precache.loading.job_store import key_prefix
from precache.metering.report import RankStalls

GATHER_SECONDS = 1.0
"""Time that rank 0 waits for the figures of other ranks."""


class RankKeyValue:
    """The last figures of each rank, one key per rank, in the store at ``MASTER_ADDR``.

    It is the store of the job's rendezvous (torchrun's, or that of rank 0). A separate connection
    keeps our requests from delaying others.
    """

    def __init__(self, store: Any, name: str, rank: int, world_size: int) -> None:
        self._keys = [f"{key_prefix(name)}/{number}" for number in range(world_size)]
        self._store = store
        self._rank = rank
        self._reporting: set[int] = set()
        self._silent: set[int] = set()

    def put(self, stalls: RankStalls) -> None:
        """Publish the figures of this rank."""
        self._store.set(self._keys[self._rank], json.dumps(dataclasses.asdict(stalls)))

    def gather(self, window: int, is_last: Callable[[], bool]) -> list[RankStalls]:
        """Return the last figures of every rank that has published any, in order of ranks.

        It waits up to `GATHER_SECONDS` for figures of `window`, but not for ranks that have never
        published any by the end of an earlier call.

        Parameters
        ----------
        is_last
            Returns False if a later window is due, so that there is no time for this one.
        """
        until, seconds = time.monotonic() + GATHER_SECONDS, 0.01
        ranks = set(range(len(self._keys)))
        while True:
            figures = self._read()
            awaited = ranks - self._silent - {s.rank for s in figures if s.window >= window}
            if not awaited or time.monotonic() > until or not is_last():
                self._silent = ranks - {stalls.rank for stalls in figures}
                return figures
            time.sleep(seconds)
            seconds *= 2

    def _read(self) -> list[RankStalls]:
        new = [rank for rank in range(len(self._keys)) if rank not in self._reporting]
        if not new or not self._store.check([self._keys[rank] for rank in new]):
            new = [rank for rank in new if self._store.check([self._keys[rank]])]
        self._reporting.update(new)
        ranks = sorted(self._reporting)
        values = self._store.multi_get([self._keys[rank] for rank in ranks])
        return [RankStalls(**json.loads(value)) for value in values]
