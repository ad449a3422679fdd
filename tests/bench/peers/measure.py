"""Measure a peer: have it write the rows, then run epochs, in turns with the floor."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.bench.common import Cost, median_ratio, touch
from tests.bench.peers.environments import NotInstalledError, install, python_of
from tests.bench.peers.registry import Peer
from tests.bench.peers.rows import Rows

ROOT = Path(__file__).resolve().parents[3]
LIMIT_SECONDS = 900
"""For one request: a peer that hangs fails, and does not end the run."""
FAREWELL_SECONDS = 10
LEAST_SECONDS = 3
MOST_EPOCHS = 50
"""Epochs that are over sooner are run more often, but not without end."""


class ChildError(Exception):
    """A peer's process failed; the message is the last line it wrote."""


@dataclass(frozen=True)
class Memory:
    """At the peak, in bytes: all that is resident, and what no file backs."""

    resident_bytes: int
    anonymous_bytes: int


@dataclass(frozen=True)
class Measurement:
    """What one peer costs.

    Attributes
    ----------
    written
        Cost of writing the rows.
    first, later
        Epochs: the first opens the store.
    ratio
        CPU time of `later` over that of the floor in between; None where that did not run.
    """

    written: Cost
    stored_bytes: int
    first: Cost
    later: tuple[Cost, ...]
    ratio: float | None
    memory: Memory

    @property
    def cpu_ms_per_1000(self) -> float:
        return statistics.median(cost.cpu_ms_per_1000 for cost in self.later)

    @property
    def samples_per_s(self) -> float:
        return statistics.median(cost.samples_per_s for cost in self.later)

    @property
    def others(self) -> float:
        """Cores that other processes kept busy in an epoch after the first."""
        return statistics.median(cost.others_seconds / cost.wall_seconds for cost in self.later)

    @property
    def disk_bytes(self) -> float:
        """Read from the disk in an epoch after the first."""
        return statistics.median(cost.disk_bytes for cost in self.later)


class Child:
    """A peer in a process of its own; leaving the context ends it."""

    def __init__(self, python: Path, peer: Peer, store: Path, rows: Rows, log: Path) -> None:
        self._log = log
        module = (python, "-m", "tests.bench.peers.child")
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                (*module, peer.target, store, rows.folder),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def ask(self, request: str) -> dict[str, Any]:
        """Have a method of `child.Child` called, and return its answer.

        Raises
        ------
        ChildError
            It failed, or took too long.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(LIMIT_SECONDS, self._kill)
        timer.start()
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise ChildError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        if self._process.wait() == -signal.SIGKILL:
            return f"killed, after {LIMIT_SECONDS} s or for memory"
        lines = [line.strip() for line in self._log.read_text("utf-8", "replace").splitlines()]
        return next(filter(None, reversed(lines)), "ended without a word")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(FAREWELL_SECONDS)
        self._kill()  # what it left behind, too
        self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class Bench:
    """Where and how peers are measured.

    Attributes
    ----------
    epochs
        After the first, at least.
    cold
        Evict the store before every epoch.
    """

    folder: Path
    rows: Rows
    epochs: int
    cold: bool
    install: bool

    @contextlib.contextmanager
    def start(self, peer: Peer, store: Path) -> Iterator[Child]:
        """A process for `peer`.

        Raises
        ------
        NotInstalledError
            Its environment is not there.
        """
        environments = self.folder / "envs"
        if self.install and peer.environment is not None:
            environments.mkdir(exist_ok=True)
            install(peer.environment, environments)
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        python = python_of(peer.environment, environments)
        with Child(python, peer, store, self.rows, logs / f"{peer.name}.log") as child:
            yield child

    def measure(self, peer: Peer, floor: Child | None) -> Measurement | str:
        """Figures, or in a line why there are none."""
        store = self.folder / "stores" / peer.name
        store.parent.mkdir(exist_ok=True)
        _remove(store)
        try:
            with self.start(peer, store) as child:
                written = Cost(**child.ask("write"))
            for path in _files(store):
                _write_back(path)
            with self.start(peer, store) as child:
                return self._read(child, store, floor, written)
        except (NotInstalledError, ChildError) as error:
            return str(error)
        finally:
            _remove(store)

    def _read(self, child: Child, store: Path, floor: Child | None, written: Cost) -> Measurement:
        files = _files(store)
        costs: list[Cost] = []
        floors: list[float] = []
        while len(costs) <= self.epochs or _want_more(costs):
            if self.cold:
                child.ask("evict")
                _evict(files)
            else:
                touch(files)
            if floor is not None:
                floors.append(Cost(**floor.ask("epoch")).cpu_ms_per_1000)
            costs.append(Cost(**child.ask("epoch")))
        first, *later = costs
        burnt = [cost.cpu_ms_per_1000 for cost in later]
        ratio = None if floor is None else median_ratio(burnt, floors[1:])
        stored = sum(path.stat().st_size for path in files)
        memory = Memory(**child.ask("check"))
        return Measurement(written, stored, first, tuple(later), ratio, memory)


def as_json(found: Measurement | str) -> dict[str, Any]:
    """Plain data: medians and every epoch's cost, or the error."""
    if isinstance(found, str):
        return {"error": found}
    names = ("cpu_ms_per_1000", "samples_per_s", "others", "disk_bytes")
    return {**{name: getattr(found, name) for name in names}, **dataclasses.asdict(found)}


def _want_more(costs: list[Cost]) -> bool:
    seconds = sum(cost.wall_seconds for cost in costs[1:])
    return seconds < LEAST_SECONDS and len(costs) <= MOST_EPOCHS


def _files(store: Path) -> list[Path]:
    return [store] if store.is_file() else [path for path in store.rglob("*") if path.is_file()]


def _remove(store: Path) -> None:
    if store.is_dir():
        shutil.rmtree(store)
    else:
        store.unlink(missing_ok=True)


def _write_back(path: Path) -> None:
    """Have a file on the disk before anything is measured; only clean pages can be evicted."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _evict(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
