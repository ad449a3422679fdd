"""The errors that precache raises.

::

    PrecacheError
    ├── UsageError              an invalid request: exit status 2
    │   ├── RecipeError         an invalid recipe
    │   ├── SourceError         a source that is missing, empty or unusable
    │   │   └── ChoiceError         labels or samples that can be read in two ways
    │   └── StoreError          no such store or version, or one that cannot be read
    │       ├── NewerFormatError    a store that a newer release wrote
    │       └── GoneError           a version that was removed
    ├── BuildError              a build that failed or ended incomplete: exit status 1
    │   ├── CrashError          a task whose worker process died on each attempt
    │   ├── MismatchError       a worker that computes other pixels than the planning process
    │   └── HangError           a sample that exceeds the time limit
    ├── StorageError            reading or writing bytes failed (disk full, permission, …)
    │   └── FetchError          one raw sample could not be fetched
    ├── SampleError             one sample cannot be turned into a row; it becomes a hole
    └── DamageError             stored bytes are damaged

Every message names the offending value and the way out. It has no control characters and no
secrets of URLs, wherever its parts come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from precache.messages import printable, without_secrets

MAX_MESSAGE = 10_000
"""Longest message in characters: parts of it may come from a foreign document."""


def _shortened(text: str) -> str:
    half = MAX_MESSAGE // 2
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]} … {text[-half:]}"


class PrecacheError(Exception):
    """Base of all errors of precache; the command line exits with `exit_status`."""

    exit_status = 1

    def __init__(self, *parts: object) -> None:
        super().__init__(*(_shortened(printable(without_secrets(str(part)))) for part in parts))


class UsageError(PrecacheError):
    """A request that is invalid or cannot be met."""

    exit_status = 2


class RecipeError(UsageError):
    """A recipe with an unknown op, an invalid parameter, or ops that do not fit together."""


PipelineError = RecipeError
"""An older name of `RecipeError`."""


class SourceError(UsageError):
    """A source that is missing, empty or unusable."""


class ChoiceError(SourceError):
    """Labels or samples of a source that can be read in two ways, of which the user chooses one.

    Attributes
    ----------
    ways
        Arguments of the command line by which it builds. The first may be another source.
    """

    def __init__(self, *parts: object, ways: Iterable[Sequence[str]] = ()) -> None:
        super().__init__(*parts)
        self.ways = tuple(map(tuple, ways))


class StoreError(UsageError):
    """A store or version that does not exist or that this release cannot read."""


class NewerFormatError(StoreError):
    """A store that a newer release wrote."""


class GoneError(StoreError):
    """A version that was removed while it was opened or read."""


class BuildError(PrecacheError):
    """A build that failed or ended incomplete; running it again resumes it."""


class CrashError(BuildError):
    """A task whose worker process died on each attempt."""


class MismatchError(BuildError):
    """A worker computes other pixels than the process that planned the build.

    Attributes
    ----------
    node
        Ray's id of the worker's node; empty without a cluster.
    """

    node = ""


class HangError(BuildError):
    """A sample exceeds the time limit; its process cannot process any more samples.

    Attributes
    ----------
    late
        Key -> reason. Of several samples, one hangs, and the others may only wait for it.
    """

    def __init__(self, *parts: object, late: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(*parts)
        self.late = dict(late)


class StorageError(PrecacheError):
    """Reading or writing bytes failed."""


class FetchError(StorageError):
    """One raw sample could not be fetched; its shard stays undone and is tried again."""


class SampleError(PrecacheError):
    """One sample cannot be turned into a row, on any attempt: it becomes a hole."""


class DamageError(PrecacheError):
    """Stored bytes fail their checksum or are cut short; names shard and key."""
