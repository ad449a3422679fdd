"""Which version the next epoch reads: a loader that follows its store's commits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch.distributed

from precache.errors import PrecacheError, StoreError, UsageError
from precache.messages import shown
from precache.storage.open import StorageOptions, open_folder
from precache.store.commit_log import ROOT, read_commits
from precache.store.open import split_uri
from precache.store.version import Version

log = logging.getLogger(__name__)


class VersionFollower:
    """Follows the current version of a store, from one epoch to the next.

    Raises
    ------
    UsageError
        It is not a store that is named, but one of its versions or something else.
    """

    def __init__(self, uri: str | os.PathLike[str], options: StorageOptions = None) -> None:
        self._store = os.fspath(uri)
        self._folder = open_folder(uri, options)
        if split_uri(uri, options)[1] is not None or self._folder.exists(ROOT):
            raise UsageError(
                f"{shown(uri)} is one version, or no store of precache; refresh='epoch' follows a "
                "store"
            )

    def uri_of(self, version: str) -> str:
        """Of one version of the store."""
        return f"{self._store}@{version}"

    def newer(self, own: Version, take: Callable[[str], None], world_size: int) -> str | None:
        """The URI of the version that the epoch reads; None where it is the loader's own still.

        Where `torch.distributed` is initialised, rank 0 decides for all of its processes, which
        must call this together. The version is refused, and the log says so, where `take` raises.

        Parameters
        ----------
        take
            Opens a version, where this process decides.
        world_size
            Ranks that must agree.
        """
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if alone and world_size > 1:
            raise UsageError(
                f"refresh='epoch' with {world_size} ranks needs torch.distributed, by which they "
                "agree on a version; initialise it before the first epoch"
            )
        if alone:
            return self._decide(own, take)
        told = [self._decide(own, take) if torch.distributed.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(told, src=0)
        return told[0]

    def _decide(self, own: Version, take: Callable[[str], None]) -> str | None:
        try:
            log_entries = read_commits(self._folder)
            if not log_entries:
                raise StoreError(f"{shown(self._store)} has no commits, or is away")
            current = log_entries[-1].version
            if current == own.id:
                return None
            take(self.uri_of(current))
        except PrecacheError as error:
            log.error("version %s is read on: %s", own.id[:12], error)
            return None
        log.info("version %s follows %s", current[:12], own.id[:12])
        return self.uri_of(current)
