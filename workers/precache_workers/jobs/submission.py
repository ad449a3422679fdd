"""Builds as jobs of a Ray cluster: submit one, and follow it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from precache.errors import BuildError, UsageError
from precache.messages import shown
from precache_workers.driver.build_result import BuildResult
from precache_workers.jobs.job_package import JobPackage
from precache_workers.jobs.job_server import connect, translate_errors

POLL_EVERY = 1.0
"""Seconds between two requests for a job's state."""

UNREACHABLE_SECONDS = 60.0
"""Seconds for which the cluster may be out of reach while a job is followed."""

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class ClusterJob:
    """A build on a cluster; it goes on without this object.

    Attributes
    ----------
    id, address
        The job, and the address of its job server.
    attached
        The job was already under way when it was submitted.
    """

    def __init__(self, client: Any, address: str, job: str, attached: bool = False) -> None:
        self._client = client
        self.id = job
        self.address = shown(address)
        self.attached = attached
        self._reached = time.monotonic()

    def command(self, name: str) -> str:
        """Return a command of Ray for the job: ``status``, ``logs`` or ``stop``."""
        return ray_command(name, self.id, self.address)

    def wait(self, write: Callable[[str], object] = lambda line: None) -> BuildResult:
        """Pass on the lines of the job's log until it has ended, and return its result.

        Raises
        ------
        UsageError, BuildError
            The job failed or was stopped; submitting it again continues it. Or it succeeded, and
            the cluster has lost its log. Or the cluster was out of reach for over a minute; the
            job may go on.
        """
        details = self._follow(write)
        with translate_errors(self.address):
            lines = _own_lines(self._client.get_job_logs(self.id))
        state = details.status.value
        if state == "SUCCEEDED":
            for line in reversed(lines):
                if (result := _result(line)) is not None:
                    return result
            raise BuildError(
                f"job {self.id} succeeded, and the cluster has lost its log with the result; the "
                f"store has the version: precache info {details.metadata['precache_store']}"
            )
        kind = UsageError if details.driver_exit_code == UsageError.exit_status else BuildError
        why = _reason(lines, details.message or "") if state == "FAILED" else ""
        why = why or "submit the build again to continue it"
        raise kind(f"job {self.id} {state.lower()}: {why}")

    def _follow(self, write: Callable[[str], object]) -> Any:
        """Pass on the lines of the log; returns what the cluster knows of the job that ended.

        The job needs no answers of its server: one that is missed is asked for at the next poll.
        """
        passed, self._reached = 0, time.monotonic()
        while True:
            try:
                with translate_errors(self.address):
                    for number, line in enumerate(self._lines()):
                        self._reached = time.monotonic()
                        if number >= passed:
                            passed = number + 1
                            if line.strip() and _result(line) is None:
                                write(line)
                    details = self._details()
                    if details.status.value in ENDED:
                        return details
            except BuildError as error:
                if time.monotonic() - self._reached > UNREACHABLE_SECONDS:
                    where = self.command("status")
                    raise BuildError(f"{error}; the job may go on: {where}") from None
            time.sleep(POLL_EVERY)  # a job server sends no notice

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the log from its beginning, as they are written."""
        self._details()  # a job that is unknown has no log to follow
        rest = ""
        for chunk in self._client.tail_job_logs(self.id):
            if not chunk:
                self._details()  # raises if the server is gone
            *lines, rest = (rest + chunk).split("\n")
            yield from _own_lines("\n".join([*lines, ""]))
        yield from _own_lines(rest)

    def _details(self) -> Any:
        try:
            details = self._client.get_job_info(self.id)
        except RuntimeError as error:
            if "status code 404" not in str(error):
                raise
            raise UsageError(
                f"the cluster at {self.address} knows no job {self.id}; if the cluster was "
                "restarted since, submit the build again to continue it"
            ) from None
        self._reached = time.monotonic()
        return details


def ray_command(name: str, job: str, address: str) -> str:
    """Return a command of Ray for a job of a job server."""
    return f"ray job {name} {job} --address {address}"


def _own_lines(log: str) -> list[str]:
    """Return the lines of a job's log without the one in which Ray quotes the command.

    Ray and others put tabs into their lines, which a terminal would show escaped.
    """
    lines = log.expandtabs().removesuffix("\n").split("\n") if log else []
    return [line for line in lines if not line.startswith("Running entrypoint for job")]


def _reason(lines: list[str], message: str) -> str:
    errors = [line.removeprefix("precache: ") for line in lines if line.startswith("precache: ")]
    last = [line for line in lines if line.strip()][-1:]
    reason = (errors or last or message.splitlines()[:1] or [""])[-1].strip()
    if reason.endswith("No module named precache"):  # as that interpreter says with its own path
        return (
            f"{reason}, and here it is {sys.executable}: start Ray on the cluster's nodes by the "
            "Python that has precache, or install it there: pip install 'precache[cluster]'"
        )
    return reason


def _result(line: str) -> BuildResult | None:
    """Parse the line that `precache build --json` prints at its end; None for any other."""
    if not line.startswith('{"version"'):
        return None
    names = {field.name for field in dataclasses.fields(BuildResult)}
    try:
        data = {name: value for name, value in json.loads(line).items() if name in names}
        result = BuildResult(**data)
    except (ValueError, TypeError):  # of another release, or printed by something else
        return None
    holes = [(key, why) for key, why in result.holes]
    return dataclasses.replace(result, holes=holes, classes=tuple(result.classes))


def submit_package(package: JobPackage, address: str | None) -> ClusterJob:
    """Run a build on a cluster, or attach to it if the same one is under way.

    Raises
    ------
    UsageError
        Another build into the same store is under way, or the address is none of a job server.
    BuildError
        The cluster cannot be reached, or refuses access.
    """
    client, address = connect(address)
    digest = package.digest()
    with tempfile.TemporaryDirectory(prefix="precache-submit-") as folder:
        package.unpack(Path(folder))
        with translate_errors(address):
            jobs = [job for job in client.list_jobs() if job.metadata]
            running = _under_way(jobs, package.store, digest, address)
            if running is not None:
                return ClusterJob(client, address, running, attached=True)
            same = [job for job in jobs if job.metadata.get("precache_build") == digest]
            numbers = [int(job.submission_id.rpartition("-")[2]) for job in same]
            job_id = f"precache-{digest}-{max(numbers, default=0) + 1}"
            attached = not _submit(
                client,
                entrypoint=shlex.join(["python", "-m", "precache", "job", package.document]),
                submission_id=job_id,
                runtime_env={"working_dir": folder} if package.files else {},
                metadata={"precache_store": package.store, "precache_build": digest},
            )
    return ClusterJob(client, address, job_id, attached)


def _under_way(jobs: Sequence[Any], store: str, digest: str, address: str) -> str | None:
    """Return the id of the same build if it has not ended; raise for another into the store."""
    for job in jobs:
        if job.metadata.get("precache_store") != store or job.status.value in ENDED:
            continue
        job_id: str = job.submission_id
        if job.metadata.get("precache_build") == digest:
            return job_id
        raise UsageError(
            f"job {job_id} builds into {store} with other options or code; wait for it, or stop "
            f"it: {ray_command('stop', job_id, address)}"
        )
    return None


def _submit(client: Any, **job: Any) -> bool:
    """Submit a job; False if another process submitted it a moment ago, as Ray takes an id once."""
    try:
        client.submit_job(**job)
    except RuntimeError as error:
        if "already exists" not in str(error):
            raise
        return False
    return True
