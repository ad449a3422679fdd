"""The errors that precache raises on purpose.

::

    PrecacheError
    ├── UsageError              what was asked for cannot be: exit status 2
    │   ├── RecipeError       a recipe that does not hold together
    │   ├── SourceError         a source that is missing, empty or unusable
    │   └── StoreError          no such store or version, or one that cannot be read
    │       ├── NewerFormatError    one that a newer release wrote
    │       └── GoneError           a version that was removed meanwhile
    ├── BuildError              a job that failed or ended incomplete: exit status 1
    │   ├── CrashError          a task whose worker process died each time
    │   ├── MismatchError       a process that makes other pixels than the one that planned
    │   └── HangError           a sample that takes longer than it may
    ├── StorageError            reading or writing bytes failed (disk full, permission, …)
    │   └── FetchError          one raw sample could not be fetched
    ├── SampleError             one sample cannot be turned into a row; it becomes a hole
    └── DamageError             stored bytes are not what was written

Every message names the offending value and what to do about it. It holds no control characters
and nothing secret of a URL, wherever its parts come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from precache.messages import printable, without_secrets

LONGEST = 10_000
"""Characters of a message: some of it may come out of a stranger's document."""


def _shortened(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} … {text[-half:]}"


class PrecacheError(Exception):
    """Base of every error raised on purpose; `exit_status` is what the command line returns."""

    exit_status = 1

    def __init__(self, *parts: object) -> None:
        super().__init__(*(_shortened(printable(without_secrets(str(part)))) for part in parts))


class UsageError(PrecacheError):
    """What was asked for cannot be done as asked."""

    exit_status = 2


class RecipeError(UsageError):
    """A recipe with an unknown op, a wrong parameter, or ops that do not fit together."""


class SourceError(UsageError):
    """A source that is missing, empty or unusable."""


class StoreError(UsageError):
    """A store or version that does not exist or that this release cannot read."""


class NewerFormatError(StoreError):
    """A store that a newer release wrote."""


class GoneError(StoreError):
    """A version that was removed while it was opened or read."""


class BuildError(PrecacheError):
    """A build that failed or ended incomplete; running it again continues."""


class CrashError(BuildError):
    """A task whose worker process died each time it was tried."""


class MismatchError(BuildError):
    """A process makes other pixels than the one that planned the build.

    Attributes
    ----------
    node
        Ray's id of its node; empty without a cluster.
    """

    node = ""


class HangError(BuildError):
    """A sample takes longer than it may; its process can do nothing more with samples.

    Attributes
    ----------
    late
        Key -> why; of several, one hangs, and the others may only wait for it.
    """

    def __init__(self, *parts: object, late: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(*parts)
        self.late = dict(late)


class StorageError(PrecacheError):
    """Reading or writing bytes failed."""


class FetchError(StorageError):
    """One raw sample could not be fetched; the shard stays undone and is tried again."""


class SampleError(PrecacheError):
    """One sample cannot be turned into a row, whatever is tried: it becomes a hole."""


class DamageError(PrecacheError):
    """Stored bytes fail their checksum or are cut short; shard and key are named."""
