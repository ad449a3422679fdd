"""The command line in this process, and on a terminal."""

import contextlib
import json
import os
import pty
import re
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from precache.cli import main as command_line
from tests.support.building import command, environment


class Ran(NamedTuple):
    """What one run came to."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout, with nothing else there."""
        assert self.out.count("\n") == 1, self.out
        assert self.out.endswith("\n")
        return json.loads(self.out)


Run = Callable[..., Ran]


def run_here(capfd: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    """Run a command, its output caught at the descriptors."""
    capfd.readouterr()
    try:
        status = command_line.main([str(argument) for argument in arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    return Ran(status, *capfd.readouterr())


def on_a_terminal(
    *arguments: object, at: str = "", act: Callable[[], object] | None = None, **variables: str
) -> str:
    """What a terminal gets of a command; as it has what `at` matches, `act` is called."""
    leader, follower = pty.openpty()
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    environ, found = environment(TERM="xterm", **variables), bytearray()
    with subprocess.Popen(command(*arguments), env=environ, **ends) as process:
        os.close(follower)
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while chunk := os.read(leader, 1 << 16):
                found += chunk
                if act is not None and re.search(at.encode(), found):
                    act()
        assert process.wait() == 0
    os.close(leader)
    return found.decode()
