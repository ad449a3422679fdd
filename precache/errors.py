"""The errors that precache raises.

::

    PrecacheError
    ├── UsageError              an invalid request: exit status 2
    │   ├── RecipeError         an invalid recipe
    │   ├── SourceError         a source that is missing, empty or unusable
    │   │   └── ChoiceError         labels or samples that can be read in two ways
    │   └── StoreError          no such store or version, or one that cannot be read
    │       ├── FormatError         a version of another store format
    │       └── GoneError           a version that was removed
    ├── BuildError              a build that failed or ended incomplete: exit status 1
    │   ├── CrashError          a task whose worker process died on each attempt
    │   ├── MismatchError       a worker that computes other pixels than the planning process
    │   └── HangError           a sample that exceeds the time limit
    ├── StorageError            reading or writing bytes failed (disk full, permission, …)
    │   └── FetchError          one raw sample could not be fetched
    ├── SampleError             one sample cannot be turned into a row; it becomes a hole
    └── DamageError             stored bytes are damaged or missing

Every message names the offending value and the way out. It has no control characters and no
secrets of URLs, wherever its parts come from.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from precache.messages import printable, without_secrets

HoleKind = Literal[
    "failed", "not fetched", "timed out", "fetch timed out", "killed its worker",
    "fetch killed its worker", "removed",
]  # fmt: skip

_PACKAGES = {"cv2": "opencv-python-headless", "PIL": "pillow"}
"""Names of packages that are not called as their modules. The cv2 of opencv-python, without
headless, needs libraries of a desktop."""

MAX_MESSAGE = 10_000
"""Longest message in characters: parts of it may come from a foreign document."""


def _shortened(text: str) -> str:
    half = MAX_MESSAGE // 2
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]} … {text[-half:]}"


def _readable(text: str) -> str:
    """Return text in one line; only a traceback that torch brings from a worker keeps its lines."""
    brought = text.startswith("Caught ") and "\nOriginal Traceback" in text
    return "\n".join(map(printable, text.split("\n"))) if brought else printable(text)


class PrecacheError(Exception):
    """Base of all errors of precache; the command line exits with `exit_status`."""

    exit_status = 1

    def __init__(self, *parts: object) -> None:
        super().__init__(*(_shortened(_readable(without_secrets(str(part)))) for part in parts))


class UsageError(PrecacheError):
    """A request that is invalid or cannot be met.

    Attributes
    ----------
    ways
        Arguments of the command line by which it is met; the first may be another source.
    """

    exit_status = 2

    def __init__(self, *parts: object, ways: Iterable[Sequence[str]] = ()) -> None:
        super().__init__(*parts)
        self.ways = tuple(map(tuple, ways))


class RecipeError(UsageError):
    """A recipe with an unknown op, an invalid parameter, or ops that do not fit together."""


class SourceError(UsageError):
    """A source that is missing, empty or unusable."""


class ChoiceError(SourceError):
    """Labels or samples of a source that can be read in two ways, of which the user chooses one.

    Attributes
    ----------
    doubts
        Each `Doubt` of the source that the error names.
    """

    def __init__(
        self,
        *parts: object,
        ways: Iterable[Sequence[str]] = (),
        doubts: Iterable[Any] = (),
    ) -> None:
        super().__init__(*parts, ways=ways)
        self.doubts = tuple(doubts)


class StoreError(UsageError):
    """A store or version that does not exist or that this release cannot read."""


class FormatError(StoreError):
    """A version of another store format."""


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


class Hole(NamedTuple):
    """Why a row has no sample: a failure that is data, and no error of the build."""

    kind: HoleKind
    reason: str

    def __str__(self) -> str:
        return self.reason

    @property
    def ended_worker(self) -> bool:
        """True if its sample took too long, or killed its workers."""
        return self.in_fetch or self.kind in ("timed out", "killed its worker")

    @property
    def in_fetch(self) -> bool:
        """True if that was while it was fetched: then it is not fetched again."""
        return self.kind in ("fetch timed out", "fetch killed its worker")


class HangError(BuildError):
    """A sample exceeds the time limit; its process cannot process any more samples.

    Attributes
    ----------
    late
        Key -> hole. Of several samples, one hangs, and the others may only wait for it.
    """

    def __init__(self, *parts: object, late: Mapping[str, Hole] | None = None) -> None:
        super().__init__(*parts)
        self.late = dict(late or {})


class StorageError(PrecacheError):
    """Reading or writing bytes failed."""


class FetchError(StorageError):
    """One raw sample could not be fetched; its shard stays undone and is tried again."""


class SampleError(PrecacheError):
    """One sample cannot be turned into a row, on any attempt: it becomes a hole."""


class DamageError(PrecacheError):
    """Stored bytes fail their checksum, are cut short or missing; names shard and key."""


def missing_library(what: str, name: str | None, extra: str = "workers") -> UsageError:
    """Return the error of an optional library that is missing.

    Parameters
    ----------
    what
        Subject of the sentence: what needs it.
    name
        Name of the missing module, if it is known.
    extra
        Extra of this package that installs it.
    """
    library = name or "a library that is not installed"
    return UsageError(f"{what} needs {library}: pip install 'precache[{extra}]'")


@contextlib.contextmanager
def needs(what: str, extra: str = "workers") -> Iterator[None]:
    """Raise `missing_library` for an import of what is not installed, and name a failed one.

    Also a decorator of a function that imports what it needs when it is called.
    """
    try:
        yield
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError):
            raise missing_library(what, name, extra) from None
        name = _failing_library(error) or name
        raise UsageError(
            f"{what} needs {name}, whose import fails ({error}): pip install --force-reinstall "
            f"{_PACKAGES.get(name, name)}"
        ) from error


def _failing_library(error: ImportError) -> str:
    """Return the innermost library whose code imported what failed; empty if it was none's."""
    import traceback  # as few programs need it

    frames = traceback.walk_tb(error.__traceback__)
    names = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in frames]
    ours = {"precache", "precache_workers", *sys.stdlib_module_names}
    return next((name for name in reversed(names) if name not in ours), "")
