"""Storage options of a job: Ray lists its command line, so no secret is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from precache.errors import UsageError
from precache.messages import shown
from precache.storage.environment import FromEnvironment

PLAIN = frozenset(
    ("account_host", "account_name", "anon", "client_kwargs", "config_kwargs", "default_location",
     "endpoint", "endpoint_url", "profile", "project", "region", "region_name", "requester_pays",
     "requests_timeout", "s3", "signature_version", "addressing_style", "timeout", "use_ssl",
     "verify")
)  # fmt: skip
"""Options, and keys of nested ones, whose values are no secrets."""

PLAIN_TOKENS = frozenset(("anon", "cloud", "google_default"))
"""Values of gcsfs' ``token`` that name a method."""


def storage_option_flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield storage options as the job's command line takes them.

    Raises
    ------
    UsageError
        The value of an option may be a secret.
    """
    for key, value in options.items():
        if isinstance(value, FromEnvironment):
            yield f"--storage-option-env={key}={value.variable}"
        elif _is_plain(key, value):
            yield f"--storage-option={key}={json.dumps(value)}"
        else:
            raise UsageError(
                f"the storage option {key!r} may hold a secret, and Ray shows what a job is given; "
                "give the cluster's nodes an identity of their own, or name a variable of their "
                f"environment: --storage-option-env {key}=VARIABLE"
            )


def _is_plain(key: str, value: Any) -> bool:
    if key == "token":
        return isinstance(value, str) and value in PLAIN_TOKENS
    if key not in PLAIN:
        return False
    if isinstance(value, Mapping):
        return all(_is_plain(inner, value[inner]) for inner in value)
    if isinstance(value, str):
        return shown(value) == value
    return value is None or isinstance(value, bool | int | float)
