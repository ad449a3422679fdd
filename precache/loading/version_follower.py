"""`VersionFollower`: the current version of a store, from one epoch to the next."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed

from precache.errors import PrecacheError, StoreError, UsageError
from precache.messages import shown
from precache.storage.open import StorageOptions, open_folder
from precache.store.commit_log import ROOT, read_log, short
from precache.store.open import split_uri
from precache.store.version import Version

log = logging.getLogger(__name__)


class VersionFollower:
    """Follows the commits of a store.

    Raises
    ------
    UsageError
        The URI names one version, or no store.
    """

    def __init__(self, uri: str, options: StorageOptions) -> None:
        self._store = uri
        self._folder = open_folder(uri, options)
        if split_uri(uri, options)[1] is not None or self._folder.exists(ROOT):
            raise UsageError(
                f"{shown(uri)} is one version, or no store of precache; refresh='epoch' follows a "
                "store"
            )

    def uri_of(self, version: str) -> str:
        """Return the URI of one version of the store."""
        return f"{self._store}@{version}"

    def newer(self, own: Version, open_uri: Callable[[str], None], world_size: int) -> str | None:
        """Return the URI of the version that the epoch reads; None to stay with `own`.

        Where `torch.distributed` is initialised, rank 0 decides for all of its processes, which
        must call this together. A version that `open_uri` cannot open is skipped, and logged.

        Parameters
        ----------
        open_uri
            Opens a version; called in the process that decides.
        world_size
            Ranks that must agree.
        """
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if alone and world_size > 1:
            raise UsageError(
                f"refresh='epoch' with {world_size} ranks needs torch.distributed, by which they "
                "agree on a version; initialise it before the first epoch"
            )
        decides = alone or torch.distributed.get_rank() == 0
        decision = [self._decide(own, open_uri) if decides else ""]
        if not alone:  # a rank may have opened another version than rank 0
            torch.distributed.broadcast_object_list(decision, src=0)
        return None if decision[0] == own.id else self.uri_of(decision[0])

    def _decide(self, own: Version, open_uri: Callable[[str], None]) -> str:
        """Return the id of the version that the epoch reads."""
        try:
            entry = read_log(self._folder, newest=True).current
            if entry is None:
                raise StoreError(f"{shown(self._store)} has no commits, or is gone")
            current = entry.version
            if current != own.id:
                open_uri(self.uri_of(current))
                log.info("version %s follows %s", short(current, 12), short(own.id, 12))
            return current
        except PrecacheError as error:
            log.error("the next epoch reads version %s again: %s", short(own.id, 12), error)
            return own.id
