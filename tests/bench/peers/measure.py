"""Measure a peer: have it write the rows, then run epochs, in turns with the floor.

The rows are made first: each another crop of a photograph, as training draws them.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from tests.bench.costs import Cost, evict, files_of, touch
from tests.bench.harness import Work, log, median_ratio
from tests.bench.peers.child import LONGEST, ROW_SHAPE, draw_crop
from tests.bench.peers.environments import ENVIRONMENTS, ROOT, NotInstalledError, python_of

PART = 250
QUALITY = 90
LIMIT_SECONDS = 900
"""For one request: a peer that hangs fails, and does not end the run."""
FAREWELL_SECONDS = 10
LEAST_SECONDS = 3
MOST_EPOCHS = 50
"""Epochs that are over sooner are run more often, but not without end."""


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Attributes
    ----------
    name
        For ``--only``.
    target
        ``module:attribute`` of its `child.Peer`.
    environment
        Of `ENVIRONMENTS`; None for this one.
    """

    name: str
    title: str
    target: str
    environment: str | None = None


def make_rows(work: Work, count: int) -> Path:
    """A folder with ``rows.npy`` (count, H, W, C), and in ``photos/`` the photograph of each row,
    made unless there is one from an earlier run.

    Each row has a photograph of its own on the disk, a copy where there are too few, so that
    reading them cold is what it would be with as many photographs.
    """
    done = work.folder / f"rows-{count}"
    if done.exists():
        return done
    _, files = work.files()
    log.print(f"Cutting {count:,} rows from {len(files)} photos")
    making = done.with_suffix(".making")
    shutil.rmtree(making, ignore_errors=True)
    (making / "photos").mkdir(parents=True)
    for number, path in zip(range(count), itertools.cycle(files), strict=False):
        shutil.copyfile(path, making / f"photos/{number:06d}.jpg")
    shape = (count, *ROW_SHAPE)
    out = np.lib.format.open_memmap(making / "rows.npy", "w+", np.uint8, shape)
    parts = [range(count)[start : start + PART] for start in range(0, count, PART)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for some, crops in zip(parts, pool.map(partial(_cut, making), parts), strict=True):
            out[some.start : some.stop] = crops
    out.flush()
    making.rename(done)
    return done


def make_photos(work: Work, count: int) -> Path:
    """A folder with `count` photographs in ``photos/``, encoded at `QUALITY` and of at most
    `LONGEST` pixels; each is a file of its own."""
    folder = work.folder / f"photos-{LONGEST}-{count}"
    _, files = work.files()
    for number, path in enumerate(itertools.islice(itertools.cycle(files), count)):
        target = folder / f"photos/{number:06d}.jpg"
        if number >= len(files):
            shutil.copyfile(folder / f"photos/{number % len(files):06d}.jpg", target)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        image = Image.open(path).convert("RGB")
        image.thumbnail((LONGEST, LONGEST))
        image.save(target, "JPEG", quality=QUALITY)
    return folder


def _cut(rows: Path, some: range) -> np.ndarray:
    return np.stack([draw_crop(rows / f"photos/{number:06d}.jpg", number) for number in some])


class ChildError(Exception):
    """A peer's process failed; the message is the last line it wrote."""


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
    resident_bytes, anonymous_bytes
        At the peak: all memory that is resident, and what no file backs.
    """

    written: Cost
    stored_bytes: int
    first: Cost
    later: tuple[Cost, ...]
    ratio: float | None
    resident_bytes: int
    anonymous_bytes: int

    @property
    def costs(self) -> list[Cost]:
        return [self.first, *self.later]

    def figures(self) -> Iterator[float | None]:
        """In the order of the table's columns."""
        yield statistics.median(cost.cpu_ms_per_1000 for cost in self.later)
        yield self.ratio
        yield statistics.median(cost.samples_per_s for cost in self.later)
        yield statistics.median(cost.others_seconds / cost.wall_seconds for cost in self.later)
        yield self.first.cpu_ms_per_1000
        for nbytes in (self.resident_bytes, self.anonymous_bytes, self.stored_bytes):
            yield nbytes / 1e6
        yield statistics.median(cost.disk_bytes for cost in self.later) / 1e6


class Child:
    """A peer in a process of its own; leaving the context ends it."""

    def __init__(self, python: Path, peer: Peer, store: Path, rows: Path, log: Path) -> None:
        self._log = log
        module = (python, "-m", "tests.bench.peers.child")
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                (*module, peer.target, store, rows),
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
    rows: Path
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
        environments, logs = self.folder / "envs", self.folder / "logs"
        for folder in (environments, logs):
            folder.mkdir(exist_ok=True)
        python = python_of(peer.environment, environments, ENVIRONMENTS, install=self.install)
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
            evict(files_of(store))  # what is measured finds it on the disk
            with self.start(peer, store) as child:
                return self._read(child, store, floor, written)
        except (NotInstalledError, ChildError) as error:
            return str(error)
        finally:
            _remove(store)

    def in_turns(self, peers: Sequence[Peer]) -> dict[str, tuple[list[Cost], float] | str]:
        """Costs of each peer's epochs, all of which take turns, and bytes stored of a row; or in a
        line why there are none."""
        measured: dict[str, Any] = {}
        with contextlib.ExitStack() as ends:
            children = {}
            for peer in peers:
                store = self.folder / "stores" / peer.name
                store.parent.mkdir(exist_ok=True)
                _remove(store)
                ends.callback(_remove, store)
                try:
                    with self.start(peer, store) as child:
                        count = Cost(**child.ask("write")).samples
                    nbytes = sum(path.stat().st_size for path in files_of(store))
                    children[peer.name] = ends.enter_context(self.start(peer, store))
                    measured[peer.name] = ([], nbytes / count)
                except (NotInstalledError, ChildError) as error:
                    measured[peer.name] = str(error)
            for request in (*["epoch"] * (1 + self.epochs), "check"):
                for name, child in list(children.items()):
                    try:
                        answer = child.ask(request)
                    except ChildError as error:
                        measured[name] = str(error)
                        del children[name]
                        continue
                    if request == "epoch":
                        measured[name][0].append(Cost(**answer))
        return measured

    def _read(self, child: Child, store: Path, floor: Child | None, written: Cost) -> Measurement:
        files = files_of(store)
        costs: list[Cost] = []
        floors: list[float] = []
        while len(costs) <= self.epochs or _want_more(costs):
            if self.cold:
                child.ask("evict")
                evict(files)
            else:
                touch(files)
            if floor is not None:
                floors.append(Cost(**floor.ask("epoch")).cpu_ms_per_1000)
            costs.append(Cost(**child.ask("epoch")))
        first, *later = costs
        own = [cost.cpu_ms_per_1000 for cost in later]
        ratio = None if floor is None else median_ratio(own, floors[1:])
        stored = sum(path.stat().st_size for path in files)
        return Measurement(written, stored, first, tuple(later), ratio, **child.ask("check"))


def _want_more(costs: list[Cost]) -> bool:
    seconds = sum(cost.wall_seconds for cost in costs[1:])
    return seconds < LEAST_SECONDS and len(costs) <= MOST_EPOCHS


def _remove(store: Path) -> None:
    if store.is_dir():
        shutil.rmtree(store)
    else:
        store.unlink(missing_ok=True)
