"""Storage options of a job: Ray shows its command line, so no secret is sent."""

from __future__ import annotations

from collections.abc import Mapping
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


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options that are sent as they are, and the names of variables for the others.

    Raises
    ------
    UsageError
        The value of an option may be a secret.
    """
    plain, variables = {}, {}
    for key, value in options.items():
        if isinstance(value, FromEnvironment):
            variables[key] = value.variable
        elif is_plain(key, value):
            plain[key] = value
        else:
            raise UsageError(
                f"the storage option {key!r} may hold a secret, and Ray shows what a job is given; "
                "give the cluster's nodes an identity of their own, or name a variable of their "
                f"environment: --storage-options-env {key}=VARIABLE"
            )
    return plain, variables


def is_plain(key: str, value: Any) -> bool:
    """Return whether the value of an option is no secret."""
    if key == "token":
        return isinstance(value, str) and value in PLAIN_TOKENS
    if key not in PLAIN:
        return False
    if isinstance(value, Mapping):
        return all(is_plain(inner, value[inner]) for inner in value)
    if isinstance(value, str):
        # Text without a scheme is not read as a URL: what may hold a secret in it is refused.
        return shown(value) == value and ("://" in value or not set("@?;&") & set(value))
    return value is None or isinstance(value, bool | int | float)
