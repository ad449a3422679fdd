"""A build in a background process, which outlives the process that started it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precache.errors import BuildError, PrecacheError, UsageError
from precache.messages import shown
from precache.runtime.process_id import process_of
from precache.runtime.terminal import guard_output, note
from precache.storage.open import open_folder
from precache.store.lease import Lease
from precache_workers.planning.listing import ListedSource
from precache_workers.planning.request import Request

log = logging.getLogger(__name__)


@dataclass
class Background:
    """A build in the background, started by this process; its output goes to a log file.

    Attributes
    ----------
    ended
        True if the process had succeeded at the previous check.
    """

    process: subprocess.Popen[bytes]
    log: Path
    ended: bool = False

    def check(self) -> str | None:
        """Raise an error if the build failed; returns None, since the version is in the store.

        Raises
        ------
        UsageError, BuildError
            The build failed; the text is the last line of its log. Or the previous check already
            saw its success, and the store still has no requested version.
        """
        status = self.process.poll()
        if self.ended:
            raise BuildError(
                "the build in the background made another version, since the source changed "
                "meanwhile: call ensure again"
            )
        self.ended = status == 0
        if not status:
            return None
        lines = self.log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        why = last.removeprefix("precache: ") or f"it ended with status {status}"
        kind = UsageError if status == UsageError.exit_status else BuildError
        raise kind(f"the build in the background failed: {why} (its log: {self.log})")


class _Detached(subprocess.Popen[bytes]):
    """A process that may outlive this one."""

    def __del__(self) -> None:
        """Do nothing: `Popen` would warn that the process still runs."""


def begin_build(request: Request, listed: ListedSource | None, lease: Lease) -> Background:
    """Start a process that builds under a lease that this process acquired but did not enter.

    The request travels through a pipe, since storage options may contain credentials.

    Parameters
    ----------
    listed
        The listing of the source, if this process has it.
    """
    name = shown(request.store).rstrip("/").rpartition("/")[2]
    descriptor, log_path = tempfile.mkstemp(prefix=f"precache-{name}-", suffix=".log")
    # The process can import the same modules as this one.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(request.import_path)}
    with os.fdopen(descriptor, "ab") as log_file:
        process = _Detached(
            [sys.executable, "-P", "-m", "precache_workers.ensure.background"],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            env=environment,
            start_new_session=True,
        )
    lease.hand_over_to(process_of(process.pid), log_path)
    assert process.stdin is not None  # it is a pipe
    # A process that has ended reads nothing; `Background.check` raises its error.
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pickle.dump((request, listed, lease.name, lease.nonce, log_path), pipe)
    return Background(process, Path(log_path))


def main(job: Any) -> int:
    """Build a version and remove the log on success; returns the exit status."""
    from precache_workers.driver.build import run_build

    guard_output()
    request, listed, name, nonce, log_path = job
    store = open_folder(request.store, request.storage_options)
    try:
        with Lease(store, name, log_path, nonce):
            run_build(request, True, listed)
    except PrecacheError as error:
        note(error)
        return error.exit_status
    Path(log_path).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(pickle.load(sys.stdin.buffer)))
