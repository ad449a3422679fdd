"""`VersionFollower`: the current version of a store, from one epoch to the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch.distributed

from precache.errors import PrecacheError, StoreError, UsageError
from precache.messages import shown
from precache.storage.open import StorageOptions, open_folder
from precache.store.commit_log import ROOT, read_log, short
from precache.store.open import split_uri
from precache.store.version import Version

log = logging.getLogger(__name__)

T = TypeVar("T")


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

    def newer(self, own: Version, opened: Callable[[str], T], world_size: int) -> T | None:
        """Return the version that the epoch reads, as `opened`; None to stay with `own`.

        Where `torch.distributed` is initialised, rank 0 decides for all of its processes, which
        must call this together. A version that it cannot open is skipped, and logged.

        Parameters
        ----------
        opened
            Opens the version at a URI.
        world_size
            Ranks that must agree.
        """
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if alone and world_size > 1:
            raise UsageError(
                f"refresh='epoch' with {world_size} ranks needs torch.distributed, by which they "
                "agree on a version; initialise it before the first epoch"
            )
        newer, decision = None, [own.id]
        if alone or torch.distributed.get_rank() == 0:
            try:
                entry = read_log(self._folder, newest=True).current
                if entry is None:
                    raise StoreError(f"{shown(self._store)} has no commits, or is gone")
                if entry.version != own.id:
                    newer, decision = opened(self.uri_of(entry.version)), [entry.version]
                    log.info("version %s follows %s", short(decision[0], 12), short(own.id, 12))
            except PrecacheError as error:
                log.error("the next epoch reads version %s again: %s", short(own.id, 12), error)
        if not alone:  # a rank may have opened another version than rank 0
            torch.distributed.broadcast_object_list(decision, src=0)
        if newer is None and decision[0] != own.id:
            newer = opened(self.uri_of(decision[0]))
        return newer
