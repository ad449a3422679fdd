"""Open the version that a training script needs, or build it once for all that need it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from precache.errors import BuildError
from precache.recipe.recipe import Recipe
from precache.runtime.terminal import say
from precache.storage.open import open_folder
from precache.store.build_status import DESCRIPTION, read_build
from precache.store.commit_log import ROOT
from precache.store.lease import POLL_LOCAL, POLL_REMOTE, Lease, Leases
from precache.store.live_version import open_begun
from precache.store.open import open_own
from precache.store.row_table import RowTable
from precache.store.version import Version
from precache_workers.driver.build import run_build
from precache_workers.driver.build_result import BuildResult
from precache_workers.ensure.background import begin_build
from precache_workers.ensure.rank0_listing import rank0_channel
from precache_workers.planning.listing import ListedSource, list_rows
from precache_workers.planning.request import Request, check_request, source_of
from precache_workers.planning.target_version import (
    TargetVersion,
    VersionSpec,
    find_target,
    is_whole,
)

if TYPE_CHECKING:
    from precache_workers.jobs.submission import ClusterJob

LEASE_EVERY = 5.0
"""Seconds between two reads of the leases of a version's builds."""

RANK0_SECONDS = 10.0
"""Seconds without any build after which a rank other than 0 builds the version itself."""

WAIT_LINE_EVERY = 30.0
"""Seconds between two lines that report a wait for a build."""


class WantedVersion:
    """A requested version, and the state of its build.

    Attributes
    ----------
    listed
        The listing of the source, if this process listed it; None if its result came from rank 0.

    Parameters
    ----------
    shown
        True to show progress and waits on standard error.

    Raises
    ------
    UsageError
        The request cannot be met; nothing was written.
    """

    def __init__(self, request: Request, shown: bool) -> None:
        check_request(request)
        self.request = request
        self.shown = shown
        self.store = open_folder(request.store, request.storage_options)
        self._rank0 = rank0_channel(request)
        self.listed: ListedSource | None = None
        self.spec = self._find_spec()
        self.poll = POLL_REMOTE if self.store.local("") is None else POLL_LOCAL
        self.leases = Leases.named(self.store, self._digest())
        self._idle_since = time.monotonic()
        self._target: TargetVersion | None = None
        self._builds: Leases | None = None
        self._looked, self._is_alive = -math.inf, False
        self._line_shown = -math.inf

    def _find_spec(self) -> VersionSpec:
        """List the source, or receive the result of rank 0, which lists it for all ranks."""
        listing = self._rank0.receive()
        if listing is not None:
            declared = Recipe.from_dict(listing["recipe"])
            table = RowTable.of_keys([""] * listing["rows"])  # the version has the real ones
            return VersionSpec(declared, listing["fingerprint"], table, listing["rows_digest"])
        self._rank0.begin()
        with self.failing_for_all():
            source = source_of(self.request)
            self.listed = list_rows(self.request, self.store, source, lambda count: None, self.say)
        spec = self.listed.spec
        digests = {"fingerprint": spec.fingerprint, "rows_digest": spec.rows_digest}
        recipe = spec.declared.to_dict()
        self._rank0.send({"recipe": recipe, "rows": len(spec.table), **digests})
        return spec

    @contextlib.contextmanager
    def failing_for_all(self) -> Iterator[None]:
        """Send errors that rank 0 raises in the block to the other ranks."""
        try:
            yield
        except Exception as error:
            self._rank0.fail(error)
            raise

    def _digest(self) -> str:
        """Return a digest that identifies the build before its row shapes are known."""
        spec = self.spec
        parts = [spec.fingerprint, spec.rows_digest, self.request.shard_samples]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def target(self) -> TargetVersion | None:
        """Return the version if a build of it has begun."""
        if self._target is None:
            self._target = find_target(self.store, self.spec, self.request.shard_samples)
        return self._target

    def version(self) -> Version | None:
        """Open the version if it is complete."""
        target = self.target()
        # A commit removes the description last: if it exists, the commit may be incomplete.
        if target is None or target.folder.size(DESCRIPTION) is not None:
            return None
        if target.folder.size(ROOT) is None or not is_whole(target):
            return None
        version = open_own(target.folder)
        if self.listed is not None:
            self.listed.keep(self.store)
        return version

    def _is_building(self) -> bool:
        """Return True if a lease shows a live build, whoever started it.

        It is read at most once in `LEASE_EVERY` seconds.
        """
        target, now = self.target(), time.monotonic()
        if target is not None and now - self._looked >= LEASE_EVERY:
            self._builds = self._builds or Leases(target.folder)
            self._looked, self._is_alive = now, self._builds.holder() is not None
        return self._is_alive

    def is_in_progress(self) -> bool:
        """Return True if any process builds the version."""
        return self.leases.holder() is not None or self._is_building()

    def try_lease(self) -> Lease | None:
        """Acquire the lease for a build, not yet entered; returns None if another process builds.

        A rank that received its listing leaves the build to rank 0, unless no process builds the
        version for `RANK0_SECONDS`.
        """
        now = time.monotonic()
        if self.listed is None and self.is_in_progress():
            self._idle_since = now
        if self.listed is None and now - self._idle_since < RANK0_SECONDS:
            return None
        return None if self._is_building() else self.leases.take()

    def progress(self) -> str:
        """Describe the progress of the build."""
        target = self.target()
        build = read_build(target.folder) if target is not None else None
        if target is None or build is None:
            return "none of its shards is done"
        return f"{build.done} of {target.shards} shards are done"

    def say(self, text: str) -> None:
        """Show a line on standard error."""
        if self.shown:
            say(f"precache: {text}", stderr=True)

    def say_uncompared(self) -> None:
        """Print the lines of a listing that does not tell whether data of samples changed."""
        if self.listed is not None and not self.listed.compares:
            for line in self.listed.notes:
                self.say(line)

    def check_waiting(self) -> None:
        """Raise the error of rank 0, if it failed; prints a line about the wait now and then."""
        self._rank0.raise_failure()
        if time.monotonic() - self._line_shown >= WAIT_LINE_EVERY:
            self._line_shown = time.monotonic()
            holder = self.leases.holder()
            who = str(holder.holder) if holder else "another process"
            log = f" (its log: {holder.note})" if holder and holder.note else ""
            self.say(f"waiting for {self.store}, which {who} builds{log}: {self.progress()}")

    def say_begun(self, text: str) -> None:
        """Print that a build began; delays the next line about the wait."""
        self.say(text)
        self._line_shown = time.monotonic()


class Pending(NamedTuple):
    """A build that this process started.

    Attributes
    ----------
    name
        The build that goes on if this process does not wait for it.
    check
        Returns the version that the build produced, None if not known; raises if it failed.
    """

    name: str
    check: Callable[[], str | None]


Begin = Callable[[WantedVersion], Pending | None]
"""Starts a build of a version; returns None if another process builds it."""


def build_here(wanted: WantedVersion) -> Pending | None:
    """Build the version in this process."""
    lease = wanted.try_lease()
    if lease is None:
        return None
    with lease:
        # The previous holder may just have finished it.
        if (version := wanted.version()) is not None:
            return Pending("the build", lambda: version.id)
        built = run_build(wanted.request, wanted.shown, wanted.listed)
    return Pending("the build", lambda: built.version)


def build_apart(wanted: WantedVersion) -> Pending | None:
    """Start a background process that builds the version."""
    lease = wanted.try_lease()
    if lease is None:
        return None
    background = begin_build(wanted.request, wanted.listed, lease)
    log = f"its log, removed if it succeeds: {background.log}"
    wanted.say_begun(f"building {wanted.store} in the background; {log}")
    return Pending("the build", background.check)


def follow_job(wanted: WantedVersion, job: ClusterJob) -> Pending:
    """Follow a job of a cluster on a thread, from the first check on."""
    lines, built = SimpleQueue[str](), Future[BuildResult]()
    name = f"job {job.id}"
    wanted.say_begun(f"{name} builds {wanted.store}: {job.command('status')}")

    def follow() -> None:
        try:
            built.set_result(job.wait((lambda line: None) if job.attached else lines.put))
        except BaseException as error:
            built.set_exception(error)

    thread = threading.Thread(target=follow, name="precache-job", daemon=True)

    def check() -> str | None:
        if thread.ident is None:
            thread.start()
        ended = built.done()  # before its last lines are passed on
        while not lines.empty():
            wanted.say(lines.get())
        return built.result().version if ended else None

    return Pending(name, check)


def ensure_version(
    wanted: WantedVersion, begin: Begin, seconds: float, *, follow: bool
) -> Version | None:
    """Open the version, which is built if needed.

    If another process that builds it ends without a complete version, one of the waiting processes
    builds it.

    Parameters
    ----------
    seconds
        Longest wait for the version. If it is 0 and the version is not complete, the function
        starts the build and returns None.
    follow
        Open it as soon as its build has begun, for a `Loader` that follows it.

    Raises
    ------
    UsageError, BuildError
        The version is not complete in time, or its build failed.
    """
    until, begun = time.monotonic() + seconds, None
    while True:
        version, target = wanted.version(), wanted.target()
        if version is None:
            begun = begun or begin(wanted)
            built = begun.check() if begun is not None and seconds else None
            if built is not None:  # on a cluster other libraries may have decided
                version = wanted.version() or open_own(wanted.store.folder(built))
        if version is not None:
            if begun is None:
                wanted.say_uncompared()
            version.followed = follow
            return version
        if not seconds:
            return None
        begins = target is not None and target.folder.exists(DESCRIPTION)
        if follow and target is not None and begins and wanted.is_in_progress():
            live = open_begun(target.folder, wanted.leases)
            if live is not None:
                return live
        if time.monotonic() > until:
            holder = wanted.leases.holder()
            where = f" ({holder.note})" if holder and holder.note else ""
            raise BuildError(
                f"{wanted.store} is not built after {seconds:g} seconds: {wanted.progress()}; "
                f"{begun.name if begun else 'the build'} goes on{where}: call ensure again, or "
                "wait longer"
            )
        wanted.check_waiting()
        # A store has no notifications.
        time.sleep(min(wanted.poll, max(0.0, until - time.monotonic())))
