"""What is asked for again, by the errors that the libraries raise."""

from __future__ import annotations

import pytest

from precache.storage import retries


class ServerError(Exception):
    """Has the status of an answer, as those of the libraries have."""

    def __init__(self, status: int) -> None:
        super().__init__("no such luck")
        self.status = status


@pytest.mark.parametrize(
    ("error", "transient", "forbidden"),
    [
        (ServerError(503), True, False),
        (ServerError(200), True, False),
        (ServerError(409), True, False),
        (ServerError(412), False, False),
        (ServerError(403), False, True),
        (PermissionError(), False, True),
        (ConnectionError(), True, False),
        (TimeoutError(), True, False),
        (ValueError(), False, False),
    ],
)
def test_what_other_credentials_would_help_is_not_asked_for_again(
    error: Exception, transient: bool, forbidden: bool
) -> None:
    assert retries.is_transient(error) == transient
    assert retries.is_forbidden(error) == forbidden


def test_a_server_that_is_busy_has_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries.random, "uniform", lambda low, high: 1.0)
    pauses = [retries.pause(number, None) for number in range(retries.BUSY_ATTEMPTS - 1)]
    assert sum(pauses) >= retries.RETRY_SECONDS
