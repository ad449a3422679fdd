"""Comparison of a loader with those of the other ranks, by the key-value store of their job."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import get_worker_info

from precache.errors import StoreError, UsageError
from precache.loading.job_store import job_store, key_prefix
from precache.store.commit_log import short

log = logging.getLogger(__name__)

BLOCK = "shard size of fields"
"""Name of the rows of a block of a shuffle: those of the largest shard of the fields read."""

ALONE = "a loader that only this rank uses takes rank=0, world_size=1, and reads all rows"

OF_VERSION = {"version", "rows", "weights", BLOCK}
"""Settings that may differ because versions do."""

_made: Counter[str] = Counter()
"""Place -> loaders made there; the nth ones of all ranks belong together."""


class _Job(NamedTuple):
    """The store of a job, the prefix of keys in it, and the rank of this process in the job."""

    store: Any
    prefix: str
    rank: int


_jobs: dict[tuple[int, str, str], _Job] = {}
"""Process, address and port -> the connection that all loaders share."""

_joining = threading.Lock()


def _join_job(world_size: int) -> _Job | None:
    """Connect to the job whose ranks are those of a loader; None if there is no such job."""
    # Workers of a DataLoader share their process's rank, and come and go.
    if get_worker_info() is not None:
        return None
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != world_size:
        return None
    at = os.getpid(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    with _joining:
        if at not in _jobs:
            store = job_store(world_size)
            if store is None:
                return None
            rank, prefix = dist.get_rank(), key_prefix(f"loaders/{world_size}")
            # A store may outlive processes: those that replace them share no keys with them.
            start = store.add(f"{prefix}/starts/{rank}", 1)
            _jobs[at] = _Job(store, f"{prefix}/{start}", rank)
        return _jobs[at]


class RankCheck:
    """Compares one loader with the loaders that the other ranks made at the same place.

    No rank waits for another: the first that comes registers, and later ones compare. The place is
    the chain of lines that led to the loader; the nth loaders made at a place belong together.
    """

    def __init__(self, rank: int, world_size: int, what: str, unit: str) -> None:
        self.rank, self.world_size = rank, world_size
        self._unit = unit
        chain, line = _place(sys._getframe(1))
        self._what = f"the {what} made at {line}"
        _made[chain] += 1
        name = f"{chain}\n{_made[chain]}"
        self._name = hashlib.sha256(name.encode()).hexdigest()[:32]
        self._registered = self._ended = False
        self._job: _Job | None = None
        self._compared = 1
        # Passes that got further than their first batch; others may be one rank's look at a batch.
        self._chosen_passes = self._other_passes = 0
        self._begun: tuple[int, int] | None = None
        self._is_chosen = False
        self._epochs = set[int]()
        self._alone = 0

    @contextlib.contextmanager
    def passing(
        self, epoch: int, place: int, chosen: bool, settings: Callable[[], Mapping[str, Any]]
    ) -> Iterator[None]:
        """Compare a loader, and where a pass of it begins, with its first batch; record its end.

        By the end of a pass, the other ranks have begun theirs.

        Parameters
        ----------
        chosen
            By the user, and not by the passes before it.
        settings
            Returns option -> value, of JSON. The store may differ where the version does not.

        Raises
        ------
        UsageError
            Another rank has other settings, by name, or the same rank, or chose another position.
        StoreError
            Another rank opened another version of the same store.
        """
        self._register(settings)
        self._begun, self._is_chosen = (epoch, place), chosen
        if epoch not in self._epochs:
            self._epochs.add(epoch)
            self._add(f"epoch/{epoch}", 1)
        if chosen:
            self._compare(f"pass/{self._chosen_passes + 1}/0", epoch, place)
        try:
            yield
        finally:
            self._ended = True

    def _register(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        """Compare what decides the rows of a loader."""
        if self._registered:
            return
        try:
            self._job = _join_job(self.world_size)
            if self._job is None:
                self._warn_of_worker()
                return  # perhaps not yet
            process = self._job.rank
            own = {"rank": self.rank, "settings": settings()}
            first = self._set_first("settings", own)
            claimed = self._set_first(f"rank/{self.rank}", process)
            self._require_equal(json.loads(json.dumps(own)), first)
            if claimed != process:
                raise UsageError(
                    f"ranks would read the same rows: {self._what} is for rank {self.rank} of "
                    f"{self.world_size} on ranks {claimed} and {process} of the job; leave out "
                    f"rank and world_size, or give each process its own; {ALONE}"
                )
            self._compared = self._add("compared", 1) or self._compared
        except RuntimeError as error:
            self._give_up(error)
        self._registered = True

    def _warn_of_worker(self) -> None:
        """Log, on rank 0 alone, that a loader in a worker of a `DataLoader` is not compared."""
        if self.rank == 0 and get_worker_info() is not None:
            self._registered = True
            log.warning(
                "%s is in a worker of a DataLoader, and no rank compares it with another's: ranks "
                "whose seed, shuffle, batch size, rows or store differ would read overlapping "
                "rows. A Loader reads ahead by itself: iterate over it in place of the DataLoader, "
                "or give num_workers=0",
                self._what,
            )

    def advance(self) -> None:
        """Compare where a pass began, once it gets further than its first batch.

        Raises
        ------
        UsageError
            Another rank began at another position.
        """
        if self._begun is None:
            return
        position, self._begun = self._begun, None
        if not (self._chosen_passes or self._other_passes):
            self._compare("first", *position)
        if self._is_chosen:
            self._chosen_passes, self._other_passes = self._chosen_passes + 1, 0
            self._add(f"chosen/{self._chosen_passes}", 1)
        else:
            self._other_passes += 1
            self._compare(f"pass/{self._chosen_passes}/{self._other_passes}", *position)

    def finish(self, epoch: int) -> None:
        """Log, with the last batch of a pass, if this rank reads epochs that others have not begun.

        Ranks that train together cannot be an epoch apart; others may be, so that one epoch counts
        for nothing, unless a rank is within one that it chose, and waits for none.
        """
        if self._begun is not None:  # in the only batch, others may be late
            return
        known, begun = self.count() or 0, self._add(f"epoch/{epoch}", 0)
        if not 0 < begun < known:
            self._alone = 0
            return
        chosen = self._alone == 0 and self._add(f"chosen/{self._chosen_passes + 1}", 0)
        self._alone += 2 if chosen else 1
        if self._alone == 2:
            log.warning(
                "rank %d reads epoch %d of %s to its end, which %d of %d ranks have begun, and "
                "%s: ranks that train together at different epochs read overlapping rows; iterate "
                "equally often, or set_epoch(epoch), on all; %s",
                self.rank, epoch, self._what, begun, known,
                "another rank chose its epoch" if chosen else "read the one before it alone, too",
                ALONE,
            )  # fmt: skip

    def count(self) -> int | None:
        """Count the ranks that were compared, this one included; None before a pass has ended."""
        if not self._ended:
            return None
        if self._compared < self.world_size:
            self._compared = self._add("compared", 0) or self._compared
        return self._compared

    def _add(self, name: str, more: int) -> int:
        """Add to a number that the ranks share, and return it; 0 without a store."""
        try:
            return int(self._job.store.add(self._key(name), more)) if self._job else 0
        except RuntimeError as error:
            self._give_up(error)
            return 0

    def _key(self, name: str) -> str:
        return f"{self._job.prefix if self._job else ''}/{self._name}/{name}"

    def _set_first(self, name: str, value: Any) -> Any:
        """Return the value of the rank that came first, which may be this one."""
        if self._job is None:
            return value
        return json.loads(self._job.store.compare_set(self._key(name), "", json.dumps(value)))

    def _give_up(self, error: RuntimeError) -> None:
        """Compare nothing from here on: the store of the job has ended, or is unreachable."""
        log.info("ranks do not compare %s: %s", self._what, error)
        for at, job in list(_jobs.items()):
            if job is self._job:
                _jobs.pop(at, None)  # another thread may give up, too
        self._job = None

    def _compare(self, name: str, epoch: int, place: int) -> None:
        """Compare a position; raise `UsageError` if the first rank had another."""
        own = [self.rank, epoch, place]
        try:
            first = self._set_first(name, own)
        except RuntimeError as error:
            self._give_up(error)
            return
        if first[1:] != own[1:]:
            raise UsageError(
                f"ranks would read overlapping rows: {self._what} begins at epoch {epoch}, "
                f"{self._unit} {place} on rank {self.rank}, and at epoch {first[1]}, {self._unit} "
                f"{first[2]} on rank {first[0]}; load the same state on all ranks, and call "
                f"set_epoch(epoch) on all before each epoch; {ALONE}"
            )

    def _require_equal(self, own: Mapping[str, Any], first: Mapping[str, Any]) -> None:
        mine, theirs = own["settings"], first["settings"]
        names = {name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]}
        # Ranks may read copies.
        stores = {name for name in names if name.startswith("store")}
        names -= {name for name in stores if name.replace("store", "version", 1) not in names}
        if not names:
            return
        here, there = f"on rank {own['rank']}", f"on rank {first['rank']}"
        if "version" in names and names <= OF_VERSION and not mine["refresh"]:
            opened, version, store = mine["version"], theirs["version"], mine["store"]
            raise StoreError(
                f"{self._what} opened version {opened} of {store} {here}, and {version} {there}: a "
                "build committed in between, or each rank names its own; open "
                f"'{store}@{short(version, 12)}' on all ranks, or start them again"
            )
        values = [f"{n} ({v} {here}, {theirs[n]} {there})" for n, v in mine.items() if n in names]
        raise UsageError(
            f"ranks would read overlapping rows: {self._what} differs in {', '.join(values)}; make "
            f"it alike, and equally often, on all ranks; {ALONE}"
        )


def _place(frame: FrameType | None) -> tuple[str, str]:
    """Return the chain of lines outside of precache that led to a frame, and the last of them."""
    lines = []
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package != "precache":
            # Folders may differ between nodes.
            lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return "\n".join(lines), lines[0] if lines else "an unknown place"
