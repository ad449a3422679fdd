"""What rank 0 of a job found in a source, told to its other ranks, so that one of them lists it."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from precache import errors
from precache.errors import BuildError, PrecacheError
from precache.recipe.base import canonical_json
from precache_workers.planning.request import Request

log = logging.getLogger(__name__)

COMES_WITHIN = timedelta(seconds=30)
"""For rank 0 to ask for the same; after it the others look for themselves."""

KNOWS_WITHIN = timedelta(minutes=10)
"""For rank 0 to list the source."""

_asked: Counter[str] = Counter()
"""How often this process asked for what: what ranks ask for the nth time belongs together."""


class Rank0Channel:
    """What rank 0 says of one request, by the key-value store of its job.

    It waits for nobody, and nobody for a rank that never asks: ranks may ask or not, as they like.
    """

    def __init__(self, store: Any, name: str, leads: bool) -> None:
        self.leads = leads
        self._store = store
        self._begun, self._found, self._failed = (f"{name}/{n}" for n in ("0", "found", "failed"))

    def begin(self) -> None:
        """Rank 0 asks: the others wait for what it finds."""
        self._set(self._begun, {})

    def tell(self, found: Mapping[str, Any]) -> None:
        """What it found, as JSON can hold it."""
        self._set(self._found, found)

    def fail(self, error: Exception) -> None:
        """It has none of it, for all alike."""
        text = str(error) if isinstance(error, PrecacheError) else repr(error)
        self._set(self._failed, {"kind": type(error).__name__, "text": text})
        self.tell({})

    def hear(self) -> dict[str, Any] | None:
        """What rank 0 found; None where it cannot be had.

        Raises
        ------
        PrecacheError
            Its failure.
        """
        try:
            self._store.wait([self._begun], COMES_WITHIN)
            self._store.wait([self._found], KNOWS_WITHIN)
            found: dict[str, Any] = json.loads(self._store.get(self._found))
        except RuntimeError as error:
            log.info("this rank lists the source itself, for rank 0 says nothing: %s", error)
            return None
        self.heed()
        return found

    def heed(self) -> None:
        """Raise what rank 0 failed with, if it has."""
        try:
            if not self._store.check([self._failed]):
                return
            failed = json.loads(self._store.get(self._failed))
        except RuntimeError:  # it has ended
            return
        raise getattr(errors, failed["kind"], BuildError)(f"rank 0: {failed['text']}")

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            log.info("other ranks list the source themselves: %s", error)


def told_by_rank_0(request: Request) -> Rank0Channel | None:
    """The words on a request; None where `torch.distributed` joins this process to no others."""
    if "torch.distributed" not in sys.modules:
        return None
    from precache.loading.ranks import find_rank
    from precache.metering.rank_kv import job_store, key_prefix

    rank, world_size = find_rank()
    store = job_store(world_size)
    if store is None:
        return None
    what = _what(request)
    _asked[what] += 1
    return Rank0Channel(store, f"{key_prefix(what)}/{_asked[what]}", rank == 0)


def _what(request: Request) -> str:
    """Digest of all that decides which version is asked for."""
    parts = [
        request.source,
        request.store,
        request.recipe.to_dict(),
        request.labels,
        request.classes,
        request.follow_links,
        request.keep_order,
        request.shard_samples,
        request.compact,
    ]
    return hashlib.sha256(canonical_json(parts)).hexdigest()[:32]
