"""Ray's job server: reached, its errors translated; storage options brought past its listings."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from precache.errors import BuildError, UsageError

FIRST_ANSWER, ANSWER = 10.0, 60.0
"""Seconds that the job server may take to say its release, and for any other answer."""

CONNECTING = 5.0
"""Seconds for a connection."""

_SEAL = b"storage options of a precache build\n"
"""Before the options in the cluster's memory: the first bytes, which Ray quotes where it fails."""


def connect(address: str | None) -> tuple[Any, str]:
    """A client of the job server, and its address."""
    found = address or os.environ.get("RAY_API_SERVER_ADDRESS")
    named = found or os.environ.get("RAY_ADDRESS") or "auto"
    web = named.startswith(("http://", "https://"))
    if named.startswith("ray://") or (found and not web and named != "auto"):
        raise UsageError(
            f"the address {named} is none of a job server; give the one of the cluster's "
            "dashboard, such as http://head:8265"
        )
    make = _patient_client()
    with translated(named), _only_this(named if web else None):
        if not web and named != "auto":  # Ray would try for most of a minute
            host, _, port = named.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECTING).close()
        try:
            client = make(named, verify=os.environ.get("SSL_CERT_FILE") or True)
        except RuntimeError as error:
            raise ConnectionError(error) from None
    client.seconds = ANSWER
    return client, client.get_address()


def _patient_client() -> Any:
    try:
        import aiohttp  # noqa: F401 - Ray's client only says that it wants much more
        from ray.job_submission import JobSubmissionClient
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise UsageError(f"submitting needs {missing}: pip install 'precache[workers]'") from None
    for chatty in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
        logging.getLogger(chatty).setLevel(logging.WARNING)

    class PatientClient(JobSubmissionClient):
        """Ray's, which would wait for an answer for ever."""

        seconds = FIRST_ANSWER

        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, timeout=(CONNECTING, self.seconds), **options)

    return PatientClient


@contextlib.contextmanager
def _only_this(address: str | None) -> Iterator[None]:
    """Ray's client prefers what the environment names to the address that it is given."""
    before = os.environ.get("RAY_API_SERVER_ADDRESS")
    if address is not None:
        os.environ["RAY_API_SERVER_ADDRESS"] = address
    try:
        yield
    finally:
        if address is not None:
            del os.environ["RAY_API_SERVER_ADDRESS"]
        if before is not None:
            os.environ["RAY_API_SERVER_ADDRESS"] = before


@contextlib.contextmanager
def translated(address: str) -> Iterator[None]:
    """What Ray's client raises, with the address and the way out."""
    from ray import exceptions

    try:
        yield
    except getattr(exceptions, "AuthenticationError", ()) as error:  # older releases have none
        why = _first_line(error).partition(". ")[0]
        raise BuildError(
            f"the Ray cluster at {address} does not let us in: {why}; set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
        ) from None
    except (OSError, ValueError, exceptions.RayError) as error:  # those of requests among them
        raise BuildError(
            f"no Ray job server answers at {address}: {_first_line(error)}; give "
            "--address http://HEAD:8265 of a head that was started with its dashboard, which "
            "takes pip install 'precache[cluster]'"
        ) from None
    except RuntimeError as error:
        raise BuildError(f"the Ray job server at {address} refused: {error}") from None


def _first_line(error: BaseException) -> str:
    """What is the matter, without the layers around it."""
    inner = error.__context__ if type(error) is ConnectionError else None
    inner = inner or error
    reason = getattr(inner.args[0], "reason", inner) if inner.args else inner
    line = (str(reason).strip() or type(reason).__name__).splitlines()[0].rstrip(".")
    return line.partition("): ")[2] or line


# --- storage options ----------------------------------------------------------------------------


def send_storage_options(client: Any, storage_options: Mapping[str, Any]) -> str:
    """Put storage options into the cluster's memory; the name under which they are there."""
    try:
        data = _SEAL + json.dumps(dict(storage_options)).encode()
    except (TypeError, ValueError):
        raise UsageError("storage options must be what JSON can hold to be sent") from None
    name = f"_precache_{secrets.token_hex(16)}.zip"
    place = f"/api/packages/gcs/{name}"
    client._do_request("GET", place)  # so that Ray deletes it after ten minutes
    answer = client._do_request("PUT", place, data=data)
    if answer.status_code != 200:
        raise BuildError(f"the cluster did not take the storage options: {answer.status_code}")
    return name


def receive_storage_options(name: str) -> dict[str, Any]:
    """What `send_storage_options` put there, which is deleted with this; for the job itself.

    Raises
    ------
    BuildError
        It is not there any more.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

    cluster: Any = GcsClient(address=os.environ.get("RAY_ADDRESS", ""))
    key = f"gcs://{name}".encode()
    data = cluster.internal_kv_get(key, None)
    if data is None or not data.startswith(_SEAL):
        raise BuildError(
            "the storage options that were sent with the job are gone; submit the build again"
        )
    cluster.internal_kv_del(key, False, None)
    options: dict[str, Any] = json.loads(data.removeprefix(_SEAL))
    return options
