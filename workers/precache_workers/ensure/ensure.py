"""The version that a training asks for: there, or made once, however many ask."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from precache.errors import BuildError
from precache.recipe.recipe import Recipe
from precache.runtime.terminal import say
from precache.storage.open import open_folder
from precache.store.array_metadata import field_layout
from precache.store.attributes import FORMAT, Attributes
from precache.store.build_status import DESCRIPTION, is_alive, read_build
from precache.store.commit_log import ROOT
from precache.store.lease import POLL_LOCAL, POLL_REMOTE, Claim, Claims
from precache.store.live_version import LiveVersion
from precache.store.open import open_own
from precache.store.row_table import RowTable
from precache.store.shard_log import FATE, follow_log, kept_name
from precache.store.small_arrays import small_layout
from precache.store.version import Version
from precache_workers.driver.build import run_build
from precache_workers.ensure.background import Background, begin_build, new_log
from precache_workers.ensure.rank0_listing import told_by_rank_0
from precache_workers.planning.adoption import note_code
from precache_workers.planning.committed import is_whole
from precache_workers.planning.listing import ListedSource, list_rows
from precache_workers.planning.request import Request, check_request
from precache_workers.planning.target_version import TargetVersion, VersionSpec, find_goal
from precache_workers.sources import base as sources

if TYPE_CHECKING:
    from precache_workers.jobs.submission import ClusterJob

LIFE_SECONDS = 5.0
"""Between two looks for signs of life of a build, which lists its receipts."""

ASK_EVERY = 5.0
"""Seconds between two questions to a cluster about a job, each of which fetches its log."""

GRACE = 10.0
"""Seconds after which a rank other than 0 makes what nobody is at work on."""

LINE_EVERY = 30.0
"""Seconds between two lines that say what is awaited."""


def _unread(rows: int) -> RowTable:
    """A row table of which only the length is known; the version's own has the rest."""
    unknown = np.full(rows, -1, np.int64)
    return RowTable([""] * rows, unknown, unknown, [""] * rows, unknown, ())


class WantedVersion:
    """A version that is wanted, and whoever makes it.

    Attributes
    ----------
    listed
        The source, where this process listed it: other ranks of a job have it from rank 0.

    Parameters
    ----------
    shown
        Whether progress, and what is awaited, goes to standard error.

    Raises
    ------
    UsageError
        The request cannot be met, found before anything is written.
    """

    def __init__(self, request: Request, shown: bool) -> None:
        check_request(request)
        self.request = request
        self.shown = shown
        self.store = open_folder(request.store, request.storage_options)
        self.told = told_by_rank_0(request)
        self.listed: ListedSource | None = None
        self.spec = self._find_out()
        self.poll = POLL_REMOTE if self.store.local("") is None else POLL_LOCAL
        self.claims = Claims(self.store, self._digest())
        self._idle_since = time.monotonic()
        self._goal: TargetVersion | None = None
        self._looked, self._lives = -math.inf, False
        self.said = -math.inf

    def _find_out(self) -> VersionSpec:
        """What the version is made of: rank 0 of a job lists the source, for all."""
        told = self.told
        if told is not None and not told.leads:
            found = told.hear()
            if found is not None:
                recipe = Recipe.from_dict(found["pipeline"])
                table = _unread(found["rows"])
                return VersionSpec(recipe, found["fingerprint"], table, found["rows_digest"])
        if told is not None and told.leads:
            told.begin()
        with self.failing_for_all():
            request = self.request
            source = sources.open_source(
                request.source, request.storage_options, follow_links=request.follow_links
            )
            self.listed = list_rows(request, self.store, source, lambda found: None)
        spec = self.listed.spec
        if told is not None and told.leads:
            told.tell(
                {
                    "pipeline": spec.declared.to_dict(),
                    "rows": len(spec.table),
                    "fingerprint": spec.fingerprint,
                    "rows_digest": spec.rows_digest,
                }
            )
        return spec

    @contextlib.contextmanager
    def failing_for_all(self) -> Iterator[None]:
        """What rank 0 raises here, the others raise as well."""
        try:
            yield
        except Exception as error:
            if self.told is not None and self.told.leads:
                self.told.fail(error)
            raise

    def _digest(self) -> str:
        """Of what makes a build the same, before its row shapes are known."""
        spec = self.spec
        parts = [spec.fingerprint, spec.rows_digest, self.request.shard_samples]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def goal(self) -> TargetVersion | None:
        """The version, where somebody began it."""
        if self._goal is None:
            self._goal = find_goal(self.store, self.spec, self.request.shard_samples)
        return self._goal

    def version(self) -> Version | None:
        """The version, where it is there whole."""
        goal = self.goal()
        # What describes a build goes last: until then its commit may have been cut off.
        if goal is None or goal.folder.size(DESCRIPTION) is not None:
            return None
        if goal.folder.size(ROOT) is None or not is_whole(goal, self.listed is not None):
            return None
        if self.listed is not None:
            note_code(self.store, goal.version, self.listed.code)
        return open_own(goal.folder)

    def is_made(self) -> bool:
        """Whether a build of it goes on that holds no claim."""
        goal, now = self.goal(), time.monotonic()
        if goal is not None and now - self._looked >= LIFE_SECONDS:
            self._looked, self._lives = now, is_alive(goal.folder)
        return self._lives

    def is_at_work(self) -> bool:
        """Whether anybody is making it."""
        return self.claims.holder() is not None or self.is_made()

    def claim(self) -> Claim | None:
        """A claim to make it, to be entered; None where somebody else is at it.

        A rank that has the source's listing from rank 0 leaves the build to that, unless nobody is
        at it for a while.
        """
        now = time.monotonic()
        if self.listed is None and self.is_at_work():
            self._idle_since = now
        if self.listed is None and now - self._idle_since < GRACE:
            return None
        return None if self.is_made() else self.claims.take()

    def how_far(self) -> str:
        """What is known of its build, for people."""
        goal = self.goal()
        build = read_build(goal.folder) if goal is not None else None
        if goal is None or build is None:
            return "none of its shards is done"
        return f"{build.done} of {goal.shards} shards are done"

    def say(self, text: str) -> None:
        """A line on standard error."""
        if self.shown:
            say(f"precache: {text}", stderr=True)

    def say_waiting(self) -> None:
        """What is awaited, now and then; raises what rank 0 has failed with."""
        if self.told is not None and not self.told.leads:
            self.told.heed()
        if time.monotonic() - self.said >= LINE_EVERY:
            self.said = time.monotonic()
            holder = self.claims.holder()
            who = str(holder.holder) if holder else "another process"
            log = f" (its log: {holder.note})" if holder and holder.note else ""
            self.say(f"waiting for {self.store}, which {who} builds{log}: {self.how_far()}")


def ensure_here(wanted: WantedVersion) -> Version:
    """The version: there already, or made by this process, or by another that is awaited.

    Whoever waits takes over where the other ends without having made it.
    """
    while True:
        version = wanted.version()
        if version is not None:
            return version
        claim = wanted.claim()
        if claim is None:
            wanted.say_waiting()
            time.sleep(wanted.poll)  # a store tells nobody
            continue
        with claim:
            version = wanted.version()  # who held one before may just have ended
            if version is None:
                made = run_build(wanted.request, wanted.shown, wanted.listed)
                return open_own(wanted.store.folder(made.version))
            return version


def growing(goal: TargetVersion, wanted: WantedVersion) -> LiveVersion:
    """A version that was begun, to be read while it is made, or in the order in which it was."""
    if wanted.listed is None:
        frozen = goal.frozen_rows()
        goal = replace(goal, spec=replace(goal.spec, table=frozen))
    own, table = goal.describe(), goal.table
    for name, described in own["fields"].items():
        codec = goal.spec.recipe.fields[name].stored_as.name
        described.update(codec=codec, raw=0, stored=0)
    more = {"rows": len(table), "holes": 0, "classes": list(table.classes)}
    told = {"format": FORMAT, **own, **more, "pipeline": goal.spec.declared.to_dict()}
    attributes = Attributes.read(json.dumps(told).encode(), str(goal.folder))
    layouts = {name: field_layout(attributes, name, str(goal.folder)) for name in goal.shapes}
    layouts["label"] = small_layout((len(table),), "int64", -1)
    arrays = {name: (name, layout) for name, layout in layouts.items()}
    columns = table.keys, table.labels, table.removed
    return LiveVersion(wanted.store, attributes, arrays, *columns, wanted.claims)


class PendingBuild(Protocol):
    """A build that goes on elsewhere, begun by this process."""

    def check(self) -> str | None:
        """The version that it made, where that is known; raises where it failed."""


class PendingJob:
    """A build that a job of a cluster makes."""

    def __init__(self, job: ClusterJob) -> None:
        self.job = job
        self._asked = self._heard = time.monotonic()

    def check(self) -> str | None:
        """Poll the cluster now and then; it is no error at first that it does not answer."""
        from precache_workers.jobs.submission import ENDED, PATIENCE

        now = time.monotonic()
        if now - self._asked < ASK_EVERY:
            return None
        self._asked = now
        try:
            ended = self.job.status().state in ENDED
        except BuildError:
            if now - self._heard > PATIENCE:
                raise
            return None
        self._heard = now
        return self.job.wait().version if ended else None


def follow(wanted: WantedVersion, begin: Callable[[], PendingBuild | None]) -> Version:
    """The version, as soon as its shards can be followed; or whole, where nobody followed it.

    All who ask get the same: who comes after the commit follows as well if others do, by the log
    that was kept for them.

    Parameters
    ----------
    begin
        Has it made elsewhere; None where somebody is at it.
    """
    begun = None
    while True:
        version, goal = wanted.version(), wanted.goal()
        if version is not None:
            kept = wanted.store.exists(kept_name(version.id))
            return growing(goal, wanted) if kept and goal is not None else version
        begun = begun or begin()
        if begun is not None:
            made = begun.check()
            if made is not None and wanted.version() is None:
                return open_own(wanted.store.folder(made))
        if goal is not None and goal.folder.exists(DESCRIPTION) and wanted.is_at_work():
            follows = follow_log(goal.folder)
            if goal.folder.size(ROOT) is not None:
                goal.folder.remove(FATE)  # it came too late
            elif follows:
                return growing(goal, wanted)
        wanted.say_waiting()
        time.sleep(wanted.poll)  # a store tells nobody


def begin_apart(wanted: WantedVersion) -> Background | None:
    """Have a process of its own make the version; None where somebody else is at it."""
    claim = wanted.claim()
    if claim is None:
        return None
    lines = new_log(wanted.request.store)
    begun = begin_build(wanted.request, wanted.listed, claim, lines)
    wanted.say(f"building {wanted.store} in the background; its log: {lines}")
    wanted.said = time.monotonic()
    return begun


def ensure_apart(wanted: WantedVersion, seconds: float) -> Version | None:
    """The version, made meanwhile by a process of its own.

    Parameters
    ----------
    seconds
        To wait for it at most; with 0 None is returned where it is not there.

    Raises
    ------
    BuildError
        It is not there in time, or its build failed.
    """
    until, begun = time.monotonic() + seconds, None
    while (version := wanted.version()) is None:
        if begun is not None:
            begun.check()
        else:
            begun = begin_apart(wanted)
        if not seconds:
            return None
        if begun is None:
            wanted.say_waiting()
        if time.monotonic() > until:
            holder = wanted.claims.holder()
            where = f" ({holder.note})" if holder and holder.note else ""
            raise BuildError(
                f"{wanted.store} is not built after {seconds:g} seconds: {wanted.how_far()}; the "
                f"build goes on{where}: ask again, or wait longer"
            )
        # A store tells nobody.
        time.sleep(min(wanted.poll, max(0.0, until - time.monotonic())))
    return version


def ensure_by_job(
    wanted: WantedVersion, submit: Callable[[], ClusterJob], seconds: float
) -> Version | None:
    """The version, made meanwhile by a job of a cluster.

    Parameters
    ----------
    submit
        Has the cluster build, or joins the job that does.
    seconds
        As `ensure_apart` takes them.

    Raises
    ------
    UsageError, BuildError
        It is not there in time, or the job failed.
    """
    from precache_workers.jobs.submission import ENDED

    version = wanted.version()
    if version is not None:
        return version
    job = submit()
    wanted.say(f"job {job.id} builds {wanted.store}: {job.status_command()}")
    if not seconds:
        return None
    until = time.monotonic() + seconds
    while seconds < math.inf and (status := job.status()).state not in ENDED:
        if time.monotonic() > until:
            raise BuildError(
                f"{wanted.store} is not built after {seconds:g} seconds: "
                f"{status.progress or wanted.how_far()}; job {job.id} goes on: ask again, or wait "
                "longer"
            )
        # Nor does a cluster.
        time.sleep(min(ASK_EVERY, max(wanted.poll, until - time.monotonic())))
    made = job.wait(lambda line: None if job.attached else wanted.say(line))
    # Not always the one that was wanted here: libraries of the cluster decide, too.
    return open_own(wanted.store.folder(made.version))
