"""Storage options of a job: what may hold a secret is refused."""

from __future__ import annotations

from typing import Any

import pytest

from precache.errors import UsageError
from precache_workers.jobs.storage_options import split_options


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("endpoint_url", "someone:PASSWORD@host:9000"),
        ("account_host", "account.blob.core.windows.net?sig=PASSWORD"),
        ("account_name", "AccountName=a;AccountKey=PASSWORD"),
        ("client_kwargs", {"endpoint_url": "http://someone:PASSWORD@host:9000"}),
    ],
)
def test_a_plain_option_with_what_may_be_a_secret_in_it_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{key}' may hold a secret") as caught:
        split_options({key: value})
    assert "PASSWORD" not in str(caught.value)


def test_options_without_secrets_are_sent() -> None:
    options = {"endpoint_url": "http://host:9000", "account_name": "photos", "anon": True}
    assert split_options(options) == (options, {})
