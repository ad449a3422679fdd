"""What is asked for again, by the errors that the libraries raise."""

from __future__ import annotations

import pytest

from precache.storage import retries


class HttpResponseError(Exception):
    """As azure-core's: the status is None where no answer came."""

    __module__ = "azure.core.exceptions"

    def __init__(self, status: int | None) -> None:
        super().__init__("no such luck")
        self.status_code = status


class ClientAuthenticationError(HttpResponseError):
    __module__ = "azure.core.exceptions"


class CredentialUnavailableError(ClientAuthenticationError):
    __module__ = "azure.identity"


@pytest.mark.parametrize(
    ("error", "transient", "forbidden"),
    [
        (HttpResponseError(None), True, False),
        (HttpResponseError(503), True, False),
        (HttpResponseError(200), True, False),
        (HttpResponseError(409), True, False),
        (HttpResponseError(412), False, False),
        (HttpResponseError(403), False, True),
        (ClientAuthenticationError(403), False, True),
        (ClientAuthenticationError(None), False, True),
        (CredentialUnavailableError(None), False, True),
        (ClientAuthenticationError(503), True, False),
    ],
)
def test_what_other_credentials_would_help_is_not_asked_for_again(
    error: HttpResponseError, transient: bool, forbidden: bool
) -> None:
    assert retries.is_transient(error) == transient
    assert retries.is_forbidden(error) == forbidden
