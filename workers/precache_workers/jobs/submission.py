"""Builds as jobs of a cluster, by Ray's job server: sent, followed, stopped."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precache.errors import BuildError, UsageError
from precache.messages import shown
from precache_workers.jobs.job_package import JobPackage
from precache_workers.jobs.job_server import connect, send_storage_options, translated
from precache_workers.planning.request import BuildResult

POLL_EVERY = 1.0
"""Seconds between two looks at a job that is followed."""

PATIENCE = 60.0
"""Seconds for which a job that is followed may be out of reach."""

STOPS_WITHIN = 30.0
"""Seconds that a cancelled job may take to end; Ray kills it after 3."""

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")

JOB_ID = re.compile(r"precache-[0-9a-f]{12}-[0-9]+")

_PROGRESS = re.compile(r"[\d,]+ of [\d,]+ images.*")


@dataclass(frozen=True)
class JobStatus:
    """What the cluster says of a job.

    Attributes
    ----------
    state
        ``PENDING``, ``RUNNING``, ``SUCCEEDED``, ``FAILED`` or ``STOPPED``.
    started, ended
        Seconds since 1970; None where unknown.
    progress
        The last line that tells how far it is, else the last line at all.
    reason
        Why it ended, where it failed.
    exit_status
        Of the build, where it ended by itself.
    """

    job: str
    address: str
    store: str
    state: str
    started: float | None
    ended: float | None
    progress: str
    reason: str
    exit_status: int | None


class ClusterJob:
    """A build on a cluster; it goes on whatever becomes of this object.

    Attributes
    ----------
    id, address
        The job, and the job server that knows it.
    attached
        Whether the job was under way already when it was submitted.
    """

    def __init__(self, client: Any, address: str, job: str, attached: bool = False) -> None:
        self._client = client
        self.id = job
        self.address = shown(address)
        self.attached = attached

    def status(self) -> JobStatus:
        """Ask the cluster.

        Raises
        ------
        UsageError
            It does not know the job.
        BuildError
            It cannot be reached.
        """
        with translated(self.address):
            return self._status(self._details(), self._client.get_job_logs(self.id))

    def _details(self) -> Any:
        try:
            found = self._client.get_job_info(self.id)
        except RuntimeError as error:
            if "status code 404" not in str(error):
                raise
            raise UsageError(
                f"the cluster at {self.address} knows no job {self.id}; if it was started anew "
                "since, submit the build again: it goes on where it was"
            ) from None
        if "precache_store" not in (found.metadata or {}):
            raise UsageError(f"{self.id} is no job of precache submit; see `ray job status`")
        return found

    def _status(self, details: Any, log: str) -> JobStatus:
        lines = _own_lines(log)
        state = details.status.value
        exit_status = details.driver_exit_code
        return JobStatus(
            self.id,
            self.address,
            details.metadata["precache_store"],
            state,
            details.start_time and details.start_time / 1000,
            details.end_time and details.end_time / 1000,
            _progress(lines),
            _reason(lines, details.message or "") if state == "FAILED" else "",
            exit_status,
        )

    def follow(
        self,
        write: Callable[[str], object],
        made: Callable[[BuildResult], object] = lambda result: None,
    ) -> JobStatus:
        """Pass on the lines of the job's log until it has ended, those that it has first.

        Parameters
        ----------
        made
            Told what came of each version: a refresh makes one after another.

        Raises
        ------
        BuildError
            The cluster is out of reach for a minute; the job may go on.
        """
        passed, reached = 0, time.monotonic()
        while True:
            try:
                with translated(self.address):
                    details = self._details()  # before the log, which is whole if it has ended
                    log = self._client.get_job_logs(self.id)
            except BuildError as error:
                if time.monotonic() - reached > PATIENCE:
                    raise BuildError(f"{error}; the job may go on: {self.how_to_go_on()}") from None
            else:
                reached = time.monotonic()
                ended = details.status.value in ENDED
                lines = _own_lines(log if ended else log[: log.rfind("\n") + 1])
                for line in lines[passed:]:
                    if (result := _result(line)) is not None:
                        made(result)
                    elif line.strip():
                        write(line)
                passed = len(lines)
                if ended:
                    return self._status(details, log)
            time.sleep(POLL_EVERY)  # a job server tells nobody

    def how_to_go_on(self) -> str:
        """The command that asks for the job."""
        return f"precache status {self.id} --address {self.address}"

    def wait(
        self,
        write: Callable[[str], object] = lambda line: None,
        made: Callable[[BuildResult], object] = lambda result: None,
    ) -> BuildResult:
        """What the build came to, or the last of a refresh, once the job has ended.

        Raises
        ------
        UsageError, BuildError
            It failed or was stopped; submitting it again continues it.
        """
        status = self.follow(write, made)
        if status.state == "SUCCEEDED":
            with translated(self.address):
                lines = _own_lines(self._client.get_job_logs(self.id))
            for line in reversed(lines):
                if (result := _result(line)) is not None:
                    return result
        kind = UsageError if status.exit_status == UsageError.exit_status else BuildError
        why = status.reason or "submit the build again to continue it"
        raise kind(f"job {self.id} {status.state.lower()}: {why}")

    def cancel(self) -> JobStatus:
        """Stop the job; every shard that is done is kept.

        Raises
        ------
        UsageError
            The cluster does not know the job.
        BuildError
            It cannot be reached, or the job did not end within half a minute.
        """
        limit = time.monotonic() + STOPS_WITHIN
        with translated(self.address):
            self._details()
            self._client.stop_job(self.id)
        while (status := self.status()).state not in ENDED:
            if time.monotonic() > limit:
                raise BuildError(f"job {self.id} does not stop; {self.how_to_go_on()}")
            time.sleep(POLL_EVERY / 5)  # a job server tells nobody
        return status


def _own_lines(log: str) -> list[str]:
    """Lines of a job's log without the one in which Ray quotes the command."""
    lines = log.removesuffix("\n").split("\n") if log else []
    return [line for line in lines if not line.startswith("Running entrypoint for job")]


def _progress(lines: list[str]) -> str:
    told = [line for line in lines if line and _result(line) is None]
    counted = [found.group() for line in told if (found := _PROGRESS.search(line))]
    return (counted or told or [""])[-1].strip()


def _reason(lines: list[str], message: str) -> str:
    ours = [line.removeprefix("precache: ") for line in lines if line.startswith("precache: ")]
    told = [line for line in lines if line.strip()]
    return (ours or told[-1:] or message.splitlines()[:1] or [""])[-1].strip()


def _result(line: str) -> BuildResult | None:
    """What `precache build --json` prints at its end."""
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


def submit_parcel(
    parcel: JobPackage, address: str | None, storage_options: Mapping[str, Any]
) -> ClusterJob:
    """Run a build or a refresh on a cluster, or join it if the same is under way there.

    Storage options are in nothing that Ray lists: not in the command, the runtime environment,
    the metadata or the log. They go into the cluster's key-value memory under a random name, which
    stands in the command; the job reads and deletes them there when it begins, and what no job
    reads is deleted after ten minutes.

    Raises
    ------
    UsageError
        Another build into the same store is under way, or the address is none of a job server.
    BuildError
        The cluster cannot be reached, or does not let us in.
    """
    client, address = connect(address)
    digest = parcel.digest()
    with tempfile.TemporaryDirectory(prefix="precache-submit-") as folder:
        parcel.unpack(Path(folder))
        with translated(address):
            jobs = [each for each in client.list_jobs() if each.metadata]
            there = _under_way(jobs, parcel.store, digest, address)
            if there is not None:
                return ClusterJob(client, address, there, attached=True)
            before = sum(each.metadata.get("precache_build") == digest for each in jobs)
            job = f"precache-{digest}-{before + 1}"
            arguments = ["job", parcel.document]
            if storage_options:
                name = send_storage_options(client, storage_options)
                arguments.append(f"--storage-options-at={name}")
            attached = not _submit(
                client,
                entrypoint=shlex.join(["python", "-m", "precache", *arguments]),
                submission_id=job,
                runtime_env={"working_dir": folder} if parcel.files else {},
                metadata={"precache_store": parcel.store, "precache_build": digest},
            )
    return ClusterJob(client, address, job, attached)


def _under_way(jobs: Sequence[Any], store: str, digest: str, address: str) -> str | None:
    """The same build, where it has not ended; raises for another into the same store."""
    for each in jobs:
        if each.metadata.get("precache_store") != store or each.status.value in ENDED:
            continue
        job: str = each.submission_id
        if each.metadata.get("precache_build") == digest:
            return job
        raise UsageError(
            f"job {job} builds into {store} with other options or code; wait for it, or stop it: "
            f"precache cancel {job} --address {address}"
        )
    return None


def _submit(client: Any, **job: Any) -> bool:
    """False where somebody else submitted it a moment ago: Ray takes an id once."""
    try:
        client.submit_job(**job)
    except RuntimeError as error:
        if "already exists" not in str(error):
            raise
        return False
    return True


def open_job(job: str, address: str | None) -> ClusterJob:
    """A job that was submitted before, from here or elsewhere."""
    return ClusterJob(*connect(address), job)
