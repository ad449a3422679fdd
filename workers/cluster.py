"""Ray: the only file that imports it. Bounded submission of tasks, results as they come."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from precache.errors import BuildError, PrecacheError, UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")
Outcome = tuple[Item, Result | PrecacheError]
Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[tuple[Any, Any]]]

SUBMITTED_PER_CPU = 2
"""Tasks under way for each CPU of the cluster: one running, one whose arguments are on the way."""

MAX_RETRIES = 3
"""Of a task whose worker or node died."""


def run_serial(
    function: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Outcome[Item, Result]]:
    """The same tasks, one after another in this process: what a cluster's results must equal."""
    for item in items:
        try:
            yield item, function(item)
        except PrecacheError as error:
            yield item, error


@contextlib.contextmanager
def executor(address: str, cpus: int | None = None) -> Iterator[Run]:
    """Where tasks run: ``serial``, ``local`` (a Ray of our own), ``auto`` or ``ray://…``.

    What was started here is stopped at the end; a cluster that was joined goes on.
    """
    check_address(address)
    if address == "serial":
        yield run_serial
    elif address == "local":
        with _quiet_environment(), _connected(None, cpus):
            yield _run_on_ray
    else:
        with _connected(address, None):
            yield _run_on_ray


def check_address(address: str) -> None:
    """Raise `UsageError` for an address that names no kind of executor."""
    if address not in ("serial", "local", "auto") and not address.startswith("ray://"):
        raise UsageError(f"address is {address!r}; choose local, serial, auto, or ray://host:10001")


@functools.cache
def _token() -> str:
    """One for the process: Ray's client keeps the first that it reads."""
    return os.urandom(32).hex()


@contextlib.contextmanager
def _quiet_environment() -> Iterator[None]:
    """Settings of a Ray of our own, unless the user chose: no reports, a token of its own."""
    with tempfile.TemporaryDirectory(prefix="precache-ray-") as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(_token())
        settings = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # glibc gives freed image buffers back to the kernel, only to fault them in again.
            "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        }
        added = {name: value for name, value in settings.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)


@contextlib.contextmanager
def _connected(address: str | None, cpus: int | None) -> Iterator[None]:
    import ray

    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        quiet |= {"include_dashboard": False, "num_cpus": cpus, "address": "local"}
    else:
        quiet |= {"address": address}
    if address is not None:
        _require_listening(address)
    already = ray.is_initialized()
    try:
        if not already:
            ray.init(**quiet)
    except (ConnectionError, TimeoutError) as error:
        raise BuildError(
            f"cannot reach the Ray cluster at {address}: {error}; start one with `ray start "
            "--head`, or use --address local"
        ) from None
    # Ray prints that a worker died on standard output, whatever its own settings say.
    printing = ray._private.worker
    speaks, printing._worker_logs_enabled = getattr(printing, "_worker_logs_enabled", True), False
    try:
        yield
    finally:
        printing._worker_logs_enabled = speaks
        if not already:
            ray.shutdown()


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


def _run_on_ray(
    function: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Outcome[Item, Result]]:
    """Results in the order they come; tasks under way are bounded and cancelled when closed."""
    import ray

    remote: Any = ray.remote(_returning_errors).options(
        num_cpus=1, max_retries=MAX_RETRIES, name=getattr(function, "__name__", "task")
    )
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    bound = max(2, int(resources.get("CPU", 1)) * SUBMITTED_PER_CPU)
    remaining = iter(items)
    under_way: dict[Any, Item] = {}
    try:
        while True:
            while len(under_way) < bound and (item := next(remaining, None)) is not None:
                under_way[remote.remote(function, item)] = item
            if not under_way:
                return
            ready, _ = ray.wait(list(under_way), num_returns=1)
            item = under_way.pop(ready[0])
            try:
                outcome = ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                outcome = BuildError(f"a task failed: {error.cause!r}")
            except ray.exceptions.RayError as error:
                outcome = BuildError(f"a worker died {MAX_RETRIES + 1} times: {error}")
            yield item, outcome
    finally:
        for reference in under_way:
            ray.cancel(reference, force=True)


def _returning_errors(function: Callable[[Item], Result], item: Item) -> Result | PrecacheError:
    """Errors of ours come back as values, so that only a lost worker counts as lost."""
    try:
        return function(item)
    except PrecacheError as error:
        return error
