"""A build in a process of its own, which goes on when the one that wanted it ends."""

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
from precache.runtime.terminal import guard_output, say_error
from precache.storage.open import open_folder
from precache.store.lease import Lease
from precache_workers.planning.listing import ListedSource
from precache_workers.planning.request import Request

log = logging.getLogger(__name__)


@dataclass
class Background:
    """A build in the background, begun by this process; its lines go into a log file.

    Attributes
    ----------
    ended
        Whether it had ended well when it was looked at before.
    """

    process: subprocess.Popen[bytes]
    log: Path
    ended: bool = False

    def check(self) -> str | None:
        """None; the store tells what it made.

        Raises
        ------
        UsageError, BuildError
            It has failed, with its last line; or it had ended before the store was last looked at.
        """
        status = self.process.poll()
        if self.ended:
            raise BuildError(
                "the build in the background made another version, for the source changed "
                f"meanwhile: ask again (its log: {self.log})"
            )
        self.ended = status == 0
        if not status:
            return None
        lines = self.log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        why = last.removeprefix("precache: ") or f"it ended with status {status}"
        kind = UsageError if status == UsageError.exit_status else BuildError
        raise kind(f"the build in the background failed: {why} (its log: {self.log})")


class _Apart(subprocess.Popen[bytes]):
    """A process that is meant to outlive this one."""

    def __del__(self) -> None:
        """Nothing: `Popen` would warn that it still runs."""


def new_log(store: str) -> Path:
    """An empty file for the lines of a build."""
    name = shown(store).rstrip("/").rpartition("/")[2]
    descriptor, path = tempfile.mkstemp(prefix=f"precache-{name}-", suffix=".log")
    os.close(descriptor)
    return Path(path)


def begin_build(
    request: Request, listed: ListedSource | None, claim: Lease, lines: Path
) -> Background:
    """Have another process build under a claim that this one took and did not enter.

    It gets what it is to do by a pipe, for storage options may hold credentials.

    Parameters
    ----------
    listed
        The source, where it was listed a moment ago.
    lines
        Its log.
    """
    # Whatever this process can import, the other can, too.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(request.import_path)}
    with lines.open("ab") as log_file:
        process = _Apart(
            [sys.executable, "-P", "-m", "precache_workers.ensure.background"],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            env=environment,
            start_new_session=True,
        )
    claim.hand_over_to(process_of(process.pid), str(lines))
    assert process.stdin is not None  # it is a pipe
    # One that has ended already takes nothing; `Background.check` tells why.
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pickle.dump((request, listed, claim.name, str(lines)), pipe)
    return Background(process, lines)


def main(job: Any) -> int:
    """Build; the exit status."""
    from precache_workers.driver.build import run_build

    guard_output()
    request, listed, name, lines = job
    store = open_folder(request.store, request.storage_options)
    try:
        with Lease(store, name, lines):
            run_build(request, True, listed)
    except PrecacheError as error:
        say_error(error)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(pickle.load(sys.stdin.buffer)))
