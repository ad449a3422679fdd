"""The command line in this process."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from precache.cli import main as command_line


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
