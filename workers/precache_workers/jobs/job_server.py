"""The job server of a Ray cluster: how it is reached, and its errors as ours."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from precache.errors import BuildError, UsageError, needs
from precache_workers.cluster.ray_session import environment

FIRST_ANSWER, ANSWER, SUBMISSION = 10.0, 60.0, 600.0
"""Limits in seconds for the job server's release, for other answers, and for a job's upload."""

SILENT = 5.0
"""Seconds without a line of a job's log, after which the server is asked for the job's state."""

CONNECTING = 5.0
"""Limit in seconds for a connection."""


def connect(address: str | None) -> tuple[Any, str]:
    """Return a client of the job server, and the server's address."""
    chosen = address or os.environ.get("RAY_API_SERVER_ADDRESS")
    named = chosen or os.environ.get("RAY_ADDRESS") or "auto"
    web = named.startswith(("http://", "https://"))
    if named.startswith("ray://") or (chosen and not web and named != "auto"):
        raise UsageError(
            f"the address {named} is none of a job server; give the one of the cluster's "
            "dashboard, such as http://head:8265"
        )
    client_class = _client_class()
    preferred = {"RAY_API_SERVER_ADDRESS": named} if web else {}  # by Ray, to its argument
    with translate_errors(named), environment(preferred):
        if not web and named != "auto":  # Ray would try for most of a minute
            host, _, port = named.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECTING).close()
        verify = os.environ.get("SSL_CERT_FILE") or True
        try:
            client = _within(FIRST_ANSWER, client_class, named, verify=verify)
        except RuntimeError as error:
            raise ConnectionError(error) from None
    return TimedClient(client), client.get_address()


class TimedClient:
    """Ray's client of a job server with a time limit for each call, as its own calls have none.

    `tail_job_logs` is a plain iterator, see `tail`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "tail_job_logs":
            return functools.partial(tail, self._client)
        limit = SUBMISSION if name == "submit_job" else ANSWER
        return functools.partial(_within, limit, getattr(self._client, name))


def _within(seconds: float, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a call returns; raise TimeoutError if it takes longer."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call(*arguments, **options))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="precache-job-server", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # the call's own error
            raise
        raise TimeoutError(f"no answer within {seconds:g} seconds") from None


def tail(client: Any, job: str) -> Iterator[str]:
    """Yield chunks of a job's log until it has ended, and an empty one where none comes for long.

    Ray's client follows a log in an event loop, which has a thread of its own here: the caller may
    be in another.
    """
    chunks: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()

    async def pass_on() -> None:
        try:
            async for chunk in client.tail_job_logs(job):
                chunks.put(chunk)
            chunks.put(None)
        except Exception as error:
            chunks.put(error)

    threading.Thread(
        target=lambda: asyncio.run(pass_on()), name="precache-job-log", daemon=True
    ).start()
    while True:
        try:
            chunk = chunks.get(timeout=SILENT)
        except queue.Empty:
            chunk = ""
        if isinstance(chunk, Exception):
            raise chunk
        if chunk is None:
            return
        yield chunk


def _client_class() -> Any:
    with needs("submitting"):
        import aiohttp  # noqa: F401 - Ray's client would only say that it needs ray[default]
        from ray.job_submission import JobSubmissionClient
    for name in ("ray", "ray.dashboard.modules.dashboard_sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return JobSubmissionClient


@contextlib.contextmanager
def translate_errors(address: str) -> Iterator[None]:
    """Raise errors of Ray's client as `BuildError` with the address and the way out."""
    from ray import exceptions

    try:
        yield
    except getattr(exceptions, "AuthenticationError", ()) as error:  # older releases have none
        why = _first_line(error).partition(". ")[0]
        raise BuildError(
            f"the Ray cluster at {address} refused access: {why}; set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
        ) from None
    except (OSError, ValueError, exceptions.RayError) as error:  # OSError includes requests' errors
        raise BuildError(
            f"no Ray job server answers at {address}: {_first_line(error)}; give "
            "--address http://HEAD:8265 of a head that was started with its dashboard, which "
            "takes pip install 'precache[cluster]'"
        ) from None
    except RuntimeError as error:
        raise BuildError(f"the Ray job server at {address} refused: {error}") from None


def _first_line(error: BaseException) -> str:
    """Return the reason of an error without the errors that wrap it."""
    cause = error.__context__ if type(error) is ConnectionError else None
    cause = cause or error
    reason = getattr(cause.args[0], "reason", cause) if cause.args else cause
    line = (str(reason).strip() or type(reason).__name__).splitlines()[0].rstrip(".")
    return line.partition("): ")[2] or line
