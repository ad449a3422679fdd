"""Storage options whose values are environment variables, read where the storage is opened."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precache.errors import UsageError


@dataclass(frozen=True)
class FromEnvironment:
    """A value that stays in the environment: what is sent, pickled or shown is the variable's name.

    Attributes
    ----------
    variable
        Of each process that opens the storage.

    Raises
    ------
    UsageError
        It is no name of a variable, and not shown, as it may be a secret.
    """

    variable: str

    def __post_init__(self) -> None:
        if not self.variable.isidentifier():
            raise UsageError(
                "a storage option that is read from the environment names a variable, such as "
                "PHOTOS_SECRET; another text was given, which is not shown, as it may be a secret"
            )


def with_environment(
    storage_options: Mapping[str, Any] | None, storage_options_env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return storage options together with those that variables of the environment hold.

    Parameters
    ----------
    storage_options_env
        Storage options whose values are environment variables, such as
        ``{"secret": "PHOTOS_SECRET"}``.
    """
    variables = (storage_options_env or {}).items()
    by_name = {key: FromEnvironment(variable) for key, variable in variables}
    return {**(storage_options or {}), **by_name}


def read_environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options with the values of the variables that they name.

    Raises
    ------
    UsageError
        A variable is not set, or empty.
    """
    values = dict(options)
    for key, value in options.items():
        if isinstance(value, FromEnvironment):
            values[key] = os.environ.get(value.variable)
            if not values[key]:
                raise UsageError(
                    f"the environment variable {value.variable} of the storage option {key} is not "
                    f"set on {platform.node()}; set it on every node that opens the storage"
                )
    return values
