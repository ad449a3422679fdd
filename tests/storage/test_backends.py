"""What is said of an error of a file system, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from precache.storage.backends import reason_of

KEY = "a-secret=that/nobody+may=see=="


@pytest.mark.parametrize(
    "options",
    [
        {"key": KEY},
        {"client_kwargs": {"password": KEY}},
        {"connection_string": f"AccountName=someone;AccountKey={KEY};BlobEndpoint=http://host/x"},
        {"connection_string": f"SharedAccessSignature=sv=2024-11-04&sig={KEY}&sp=rl;X=y"},
        {"sas_token": f"?sv=2024-11-04&sig={KEY}"},
    ],
)
def test_a_reason_holds_nothing_secret_of_the_options(options: dict[str, Any]) -> None:
    error = ValueError(f"http://host/x refuses '{KEY}'")
    assert reason_of(error, options) == "http://host/x refuses '…'"
