"""A build that holds its samples until it may go on, and the processes that ask for its version."""

import json
import sys
from pathlib import Path
from typing import Any

import precache
from precache.storage.open import open_folder
from precache.store.lease import remove_ended_leases
from tests.support.building import environment, poll, running, write_jpegs


class Held:
    """A source, a store, and processes whose builds hold.

    Each process writes its answer, as JSON, into a file of its name, and what it says beside it.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.source = write_jpegs(folder / "in", count)
        self.store = folder / "store"
        for name in ("held", "tmp"):
            (folder / name).mkdir()

    def recipe_of(self, after: int = 0) -> precache.Recipe:
        """One whose builds hold from sample number `after` on."""
        params = {"folder": str(self.folder / "held"), "store": str(self.store), "after": after}
        hold = {"op": "function", "function": "tests.support.building:hold", "params": params}
        resize = {"op": "resize", "size": [150, 150], "interpolation": "nearest"}
        ops = [{"op": "decode"}, resize, hold]
        return precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})

    def process(self, name: str, code: str, *arguments: object) -> Any:
        """A process that runs `code`, told where to answer behind `arguments`; a context."""
        line = [sys.executable, "-c", code, *map(str, arguments), str(self.folder / name)]
        # What it says goes into a file: nobody reads a pipe meanwhile.
        shell = ["sh", "-c", f'exec "$@" 2> "{self.said(name)}"', "sh"]
        return running([*shell, *line], environment(HOLD="1", TMPDIR=str(self.folder / "tmp")))

    def said(self, name: str) -> Path:
        return self.folder / f"{name}.said"

    def answer(self, name: str) -> Any:
        path, said = self.folder / name, self.said(name)

        def read() -> str:
            assert not said.exists() or "Traceback" not in said.read_text(), said.read_text()
            return path.read_text() if path.exists() else ""

        return json.loads(poll(read, f"{name} answers"))

    def builders(self) -> list[int]:
        """Processes that build and hold a sample, or did."""
        return [int(path.name) for path in (self.folder / "held").iterdir() if path.name != "go"]

    def go(self) -> None:
        (self.folder / "held" / "go").touch()

    def leases(self) -> list[Path]:
        return leases_of(self.store)

    def await_builds(self) -> None:
        """Wait until no process builds; what a killed one left is removed, as `gc` does it."""
        store = open_folder(str(self.store))

        def ended() -> bool:
            remove_ended_leases(store)
            return not self.leases()

        poll(ended, "its builds end")


def leases_of(store: Path) -> list[Path]:
    """Return the files of the leases of a store."""
    try:
        return list(store.glob("_claims/*"))
    except FileNotFoundError:  # the folder was removed meanwhile
        return []
