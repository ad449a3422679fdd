"""Measure peers: have each write the rows, then run epochs, in turns.

The rows are made first: each another crop of a photograph, as training draws them.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
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


@dataclass
class Measurement:
    """Bytes of a peer's store, and costs of epochs, of which the first opens it."""

    stored_bytes: int
    costs: list[Cost] = field(default_factory=list)

    def each(self, figure: str) -> list[float]:
        """Of the epochs after the first."""
        return [getattr(cost, figure) for cost in self.costs[1:]]

    def ratio(self, other: "Measurement") -> float:
        """Median of the ratios of CPU time to another peer's, of neighbours in time."""
        return median_ratio(self.each("cpu_ms_per_1000"), other.each("cpu_ms_per_1000"))


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
    """

    folder: Path
    rows: Path
    epochs: int
    install: bool

    def in_turns(self, peers: Sequence[Peer]) -> dict[str, Measurement | str]:
        """What each peer costs, whose epochs take turns; or in a line why that is not known."""
        measured: dict[str, Measurement | str] = {}
        children: dict[str, Child] = {}
        with contextlib.ExitStack() as ends:
            for peer in peers:
                store = self.folder / "stores" / peer.name
                store.parent.mkdir(exist_ok=True)
                _remove(store)
                ends.callback(_remove, store)
                try:
                    with self._start(peer, store) as child:
                        child.ask("write")
                    evict(files_of(store))  # what is measured finds it on the disk
                    children[peer.name] = ends.enter_context(self._start(peer, store))
                    nbytes = sum(path.stat().st_size for path in files_of(store))
                    measured[peer.name] = Measurement(nbytes)
                except (NotInstalledError, ChildError) as error:
                    measured[peer.name] = str(error)
            for request in (*["epoch"] * (1 + self.epochs), "check"):
                for name, child in list(children.items()):
                    try:
                        self._ask(request, child, measured[name], self.folder / "stores" / name)
                    except ChildError as error:
                        measured[name] = str(error)
                        del children[name]
        return measured

    def _ask(self, request: str, child: Child, found: Any, store: Path) -> None:
        if request == "check":
            child.ask(request)
            return
        touch(files_of(store))
        found.costs.append(Cost(**child.ask(request)))

    @contextlib.contextmanager
    def _start(self, peer: Peer, store: Path) -> Iterator[Child]:
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


def _remove(store: Path) -> None:
    if store.is_dir():
        shutil.rmtree(store)
    else:
        store.unlink(missing_ok=True)
