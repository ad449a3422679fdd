"""Join a running Ray cluster."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from precache.errors import BuildError, PrecacheError

JOINED = {
    # Ray prints deaths of workers on standard output even without log_to_driver.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|killed due to memory pressure",
    # Without these, tasks on a node whose link was cut stay pending though Ray declared it dead.
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "3000",
}
"""Environment of a driver that joins a cluster."""


@contextlib.contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Connect to a running cluster, and disconnect at the end.

    A process that is connected already stays so.
    """
    with environment({name: os.environ.get(name, value) for name, value in JOINED.items()}):
        import ray  # reads some of them at import

        _require_listening(address)
        already = ray.is_initialized()
        try:
            if not already:
                client = address.startswith("ray://")
                options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
                if not client:
                    options["job_config"] = _without_current_folder()
                ray.init(address, **options)
        except (ConnectionError, TimeoutError) as error:
            raise BuildError(
                f"cannot reach the Ray cluster at {address}: {error}; start one with `ray start "
                "--head`, or use --address local; one with tokens needs RAY_AUTH_MODE=token here, "
                "and its token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            ) from None
        except Exception as error:
            if not (isinstance(error, AssertionError) or _is_of_grpc(error)):
                raise
            raise _lost(address, error) from None  # while it was joined
        try:
            yield
        except Exception as error:
            # A call without a connection has Ray join or start another cluster, and fail at that.
            is_cut_off = address.startswith("ray://") and not _is_connected()
            if isinstance(error, PrecacheError) or not (
                is_cut_off or type(error) is ConnectionError or _is_of_grpc(error)
            ):
                raise
            raise _lost(address, error) from None
        finally:
            if not already:
                ray.shutdown()


def _is_connected() -> bool:
    """Return whether this process is the client of a cluster."""
    from ray.util.client import ray

    return bool(ray.is_connected())  # type: ignore[no-untyped-call]


def _is_of_grpc(error: Exception) -> bool:
    """Return whether an error is that of a call which gRPC could not make."""
    return "closed channel" in str(error) or type(error).__module__.startswith("grpc")


def _lost(address: str, error: Exception) -> BuildError:
    """Make the error for a cluster that ended while it was used."""
    return BuildError(
        f"lost the connection to {address}: {str(error) or 'it ended'}; once the cluster answers "
        "again, run the same command again: it continues"
    )


def _without_current_folder() -> Any:
    """Return a Ray configuration that keeps the current folder off the workers' import path.

    Ray would put it first, and it may be a store or a folder of samples, with files that are named
    like modules. What workers may import is in `Job.import_path`.
    """
    from ray.job_config import JobConfig

    return JobConfig.from_json({"client_job": True})


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ[name] for name in settings.keys() & os.environ.keys()}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update(before)


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
