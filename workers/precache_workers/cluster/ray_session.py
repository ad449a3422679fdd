"""Start a Ray of our own, or join one that runs."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from precache.errors import BuildError
from precache.runtime.process_id import Process, has_ended, process_of
from precache.runtime.usage import cores

FOLDER, OWNER = "precache-ray-", "owner.json"
"""Prefix of the temporary folder of a Ray of our own; the file in it that names its process."""

LONGEST_FOLDER = 38
"""Bytes of a folder's path: a socket's path has at most 107, of which Ray appends 69."""

QUIET = {
    # Ray prints the end of a worker on standard output, also where it is not to print logs.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|killed due to memory pressure",
}

OWN = {
    **QUIET,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",  # for a dashboard, which a Ray of our own lacks
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Workers that are just starting when a build is killed try five times: half a minute.
    "RAY_gcs_rpc_server_connect_timeout_s": "1",
    # glibc gives freed image buffers back to the kernel, only to fault them in again.
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
"""Environment of a Ray of our own, its workers included."""

JOINED = {
    **QUIET,
    # Without these, tasks on a node whose link was cut stay pending though Ray declared it dead.
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "3000",
}
"""Environment of a driver that joins a cluster."""


@contextlib.contextmanager
def own_ray(cpus: int | None) -> Iterator[None]:
    """Start a Ray on this machine, with a token of its own; stop it at the end."""
    with own_folder() as folder:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(_token())
        settings = dict(OWN)
        if _token_is_ours():
            settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        if len(os.fsencode(folder)) <= LONGEST_FOLDER:
            settings["RAY_TMPDIR"] = str(folder)  # Ray lets everyone write into its own folders
        with (
            _environment(settings),
            _connected(
                "local",
                num_cpus=cpus or cores(),
                include_dashboard=False,
                job_config=_without_current_folder(),
            ),
        ):
            yield


@contextlib.contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Connect to a running cluster at ``auto`` or ``ray://…``."""
    with _environment(JOINED):
        _require_listening(address)
        options = {"job_config": _without_current_folder()} if address == "auto" else {}
        with _connected(address, **options):
            yield


def _without_current_folder() -> Any:
    """Return a Ray configuration that keeps the current folder off the workers' import path.

    Ray would put it first, and it may be a store or a folder of samples, with files that are named
    like modules. What workers may import is in `Job.import_path`.
    """
    from ray.job_config import JobConfig

    return JobConfig.from_json({"client_job": True})


@functools.cache
def _token() -> str:
    """Return the process's token: Ray keeps the first that it reads."""
    return os.urandom(32).hex()


@functools.cache
def _token_is_ours() -> bool:
    """Return True before Ray is imported, which settles how the process authenticates."""
    return "ray" not in sys.modules


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Provide a private folder for a Ray of our own; remove those that killed builds left."""
    temporary, user = Path(tempfile.gettempdir()), os.getuid()
    for folder in temporary.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError, ValueError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != user:
                continue
            if has_ended(Process.model_validate_json((folder / OWNER).read_bytes())):
                shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True) as name:
        (Path(name) / OWNER).write_text(process_of(os.getpid()).model_dump_json())
        yield Path(name)


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while, except those that the user has set."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _connected(address: str, **options: Any) -> Iterator[None]:
    """Connect this process to Ray, unless it is connected already, and disconnect it at the end."""
    import ray

    already = ray.is_initialized()
    try:
        if not already:
            _init(address=address, logging_level="ERROR", log_to_driver=False, **options)
    except (ConnectionError, TimeoutError) as error:
        raise BuildError(
            f"cannot reach the Ray cluster at {address}: {error}; start one with `ray start "
            "--head`, or use --address local; one with tokens needs RAY_AUTH_MODE=token here, and "
            "its token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from None
    try:
        yield
    except ConnectionError as error:
        if type(error) is not ConnectionError:  # of another connection than Ray's
            raise
        raise BuildError(
            f"lost the connection to {address}: {error}; once the cluster answers again, run the "
            "same command again: it continues"
        ) from None
    finally:
        if not already:
            ray.shutdown()


def _init(**options: Any) -> None:
    """Start or join a Ray; try again where the head's server for a client dies as it is forked."""
    import ray

    for retries in (2, 1, 0):
        try:
            ray.init(**options)
            return
        except ConnectionAbortedError as error:
            if "Starting Ray client server failed" not in str(error) or not retries:
                raise


def _require_listening(address: str) -> None:
    """Raise `BuildError` where nothing answers: Ray would end the process, or try for long."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = named.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise BuildError(
            f"cannot reach the Ray cluster at {address}: {named} does not answer ({error}); start "
            "one with `ray start --head`, or use --address local"
        ) from None
