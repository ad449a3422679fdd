"""Share rank 0's listing of a source with the other ranks of a job."""

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
from precache.recipe.recipe import Recipe
from precache_workers.planning.options import RunOptions, SourceOptions
from precache_workers.planning.request import Request

log = logging.getLogger(__name__)

BEGIN_TIMEOUT = timedelta(seconds=30)
"""Longest wait for rank 0's request; after it, the other ranks list the source themselves."""

LISTING_TIMEOUT = timedelta(minutes=10)
"""Longest wait for rank 0's listing."""

_UNDECIDING = (
    RunOptions.model_fields.keys() - SourceOptions.model_fields.keys() - {"follow_links"}
) | {"import_path", "accept_unmatched", "recompute", "retry_failed"}
"""Options that say how a version is built, not which; ranks may differ in them."""

_requests: Counter[str] = Counter()
"""Digest -> number of such requests by this process; the nth ones of all ranks belong together."""


class Rank0Channel:
    """Messages of rank 0 about one request, through the key-value store of its job, if it has one.

    Rank 0 waits for no other rank. The others wait for limited times only.
    """

    def __init__(self, store: Any = None, name: str = "", *, is_rank0: bool = True) -> None:
        self._sends = store is not None and is_rank0
        self._receives = store is not None and not is_rank0
        self._store = store
        self._begun, self._listing, self._failed = (
            f"{name}/{n}" for n in ("0", "listing", "failed")
        )

    def begin(self) -> None:
        """Announce that rank 0 lists the source, so that the others wait for its listing."""
        self._set(self._begun, {})

    def send(self, listing: Mapping[str, Any]) -> None:
        """Send the result of the listing, which must be serialisable as JSON."""
        self._set(self._listing, listing)

    def fail(self, error: Exception) -> None:
        """Send an error of rank 0, which the others then raise, too."""
        text = str(error) if isinstance(error, PrecacheError) else repr(error)
        self._set(self._failed, {"kind": type(error).__name__, "text": text})
        self.send({})

    def receive(self) -> dict[str, Any] | None:
        """Wait for the result of rank 0; returns None on rank 0, and if it does not come in time.

        Raises
        ------
        PrecacheError
            The error of rank 0.
        """
        if not self._receives:
            return None
        try:
            self._store.wait([self._begun], BEGIN_TIMEOUT)
            self._store.wait([self._listing], LISTING_TIMEOUT)
            listing: dict[str, Any] = json.loads(self._store.get(self._listing))
        except RuntimeError as error:
            log.info("this rank lists the source itself, as rank 0 sent nothing: %s", error)
            return None
        self.raise_failure()
        return listing

    def raise_failure(self) -> None:
        """Raise the error of rank 0, if it failed, on other ranks."""
        try:
            if not self._receives or not self._store.check([self._failed]):
                return
            failed = json.loads(self._store.get(self._failed))
        except RuntimeError:  # the key-value store has ended
            return
        raise getattr(errors, failed["kind"], BuildError)(f"rank 0: {failed['text']}")

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        try:
            if self._sends:
                self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            log.info("other ranks list the source themselves: %s", error)


def rank0_channel(request: Request) -> Rank0Channel:
    """Open the channel for a request; it reaches no others outside a `torch.distributed` job."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return Rank0Channel()
    from precache.loading.job_store import job_store, key_prefix
    from precache.loading.ranks import find_rank

    rank, world_size = find_rank()
    store = job_store(world_size)
    digest = _digest(request)
    _requests[digest] += 1
    return Rank0Channel(store, f"{key_prefix(digest)}/{_requests[digest]}", is_rank0=rank == 0)


def _digest(request: Request) -> str:
    """Return a digest of everything that decides which version is requested."""
    named = [getattr(request, name) for name in sorted(Request.model_fields.keys() - _UNDECIDING)]
    parts = [part.to_dict() if isinstance(part, Recipe) else part for part in named]
    return hashlib.sha256(canonical_json(parts)).hexdigest()[:32]
