"""One peer in a process of its own, that does as it is told.

``python -m tests.bench.peers.child PEER STORE ROWS``, started by `measure` with the interpreter of
the peer's environment: nothing is imported but NumPy, torch and the peer. Each line on standard
input is a request, the name of one of `Child`'s methods; each is answered by a line of JSON.
"""

import importlib
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401 - training has it in memory, so no peer is charged with it

from tests.bench.costs import cost_of, cpu_seconds, disk_bytes

BATCH = 256
ROW_SHAPE = (224, 224, 3)
LONGEST = 500  # pixels of a photo's longer side, of which crops are taken
LOSSY_MEAN = 8.0  # levels that a lossy peer may be off on average

Batch = tuple[Any, Any]
"""Images, (n, H, W, C) or (n, C, H, W) uint8, and row numbers: anything that NumPy reads."""


class Peer:
    """The base of what a peer's module offers.

    Attributes
    ----------
    exact
        Whether pixels come back as they went in; None if rows are random crops of photos.
    """

    exact: bool | None = True

    def write(self, rows: Path, store: Path) -> None:
        """Write the rows of ``rows/rows.npy`` with their numbers; `store` does not exist yet."""
        store.hardlink_to(rows / "rows.npy")

    def loader(self, rows: Path, store: Path) -> Iterable[Batch]:
        """Open a store; each iteration is an epoch, in an order of its own."""
        raise NotImplementedError

    def epochs(self, rows: Path, store: Path) -> Iterator[Iterable[Batch]]:
        """Open a store when the first is asked for, and yield epoch after epoch."""
        yield from itertools.repeat(self.loader(rows, store))


def read_rows(rows: Path) -> np.memmap:
    """All rows, mapped: (count, H, W, C) uint8."""
    mapped: np.memmap = np.load(rows / "rows.npy", mmap_mode="r")
    return mapped


class RowDataset:
    """All rows, each with its number."""

    def __init__(self, rows: Path) -> None:
        self._rows = read_rows(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.asarray(self._rows[index]), index


def photos(rows: Path) -> list[Path]:
    """The photograph of each row, in their order."""
    return sorted((rows / "photos").iterdir())


class PhotoDataset:
    """All photographs, decoded, each with its number."""

    def __init__(self, rows: Path) -> None:
        self._photos = photos(rows)

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        from PIL import Image

        with Image.open(self._photos[index]) as file:
            return np.asarray(file.convert("RGB")), index


SHARES = (0.6, 1.0)  # of a photograph's width and of its height that a row shows


def draw_crop(path: Path, number: int) -> np.ndarray:
    """Decode a photograph, and resize the crop that `number` stands for: (H, W, C) uint8."""
    from PIL import Image

    draw = random.Random(number)
    with Image.open(path) as file:
        image = file.convert("RGB")
    width, height = (side * draw.uniform(*SHARES) for side in image.size)
    left, top = (image.width - width) * draw.random(), (image.height - height) * draw.random()
    box = (left, top, left + width, top + height)
    return np.asarray(image.resize(ROW_SHAPE[:2], Image.Resampling.BILINEAR, box=box))


# --- requests -----------------------------------------------------------------------------------


class Child:
    """Answers requests; CPU time and disk reads count from one answer to the next."""

    def __init__(self, peer: str, store: Path, rows: Path) -> None:
        module, _, name = peer.partition(":")
        self._peer: Peer = getattr(importlib.import_module(module), name)
        self._store = store
        self._rows = rows
        self._epochs = self._peer.epochs(rows, store)
        self._count = len(photos(rows))
        self._last_order = np.empty(0, np.int64)
        self._mark()

    def _mark(self) -> None:
        self._cpu, self._disk = cpu_seconds(), disk_bytes(children=True)

    def _cost_of(self, work: Callable[[], int]) -> dict[str, Any]:
        """The fields of a `Cost`."""
        cost = asdict(cost_of(work, children=True))
        cost["cpu_seconds"] = cpu_seconds() - self._cpu
        cost["disk_bytes"] = disk_bytes(children=True) - self._disk
        return cost

    def write(self) -> dict[str, Any]:
        """Have the store written."""

        def run() -> int:
            self._peer.write(self._rows, self._store)
            return self._count

        return self._cost_of(run)

    def epoch(self) -> dict[str, Any]:
        """Run an epoch."""
        seen: list[np.ndarray] = []

        def run() -> int:
            for batch in next(self._epochs):
                seen.append(np.array(batch[1], np.int64))
                del batch
            return self._count

        cost = self._cost_of(run)
        self._check_order(np.concatenate(seen))
        self._mark()
        return cost

    def check(self) -> dict[str, Any]:
        """Run an epoch, and compare pixels."""
        seen = []
        for images, numbers in next(self._epochs):
            seen.append(np.array(numbers, np.int64))
            for position in (0, len(numbers) // 2, len(numbers) - 1):
                self._check_pixels(np.asarray(images[position]), int(numbers[position]))
        self._check_order(np.concatenate(seen))
        return {}

    def _check_order(self, order: np.ndarray) -> None:
        if not np.array_equal(np.sort(order), np.arange(self._count)):
            raise ValueError(f"{len(order)} rows came, {len(np.unique(order))} of {self._count}")
        if np.array_equal(order, self._last_order):
            raise ValueError("two epochs had the same order")
        self._last_order = order

    def _check_pixels(self, image: np.ndarray, number: int) -> None:
        if self._peer.exact is None:
            shapes = ROW_SHAPE, (ROW_SHAPE[2], *ROW_SHAPE[:2])
            if image.shape not in shapes or image.std() == 0:
                raise ValueError(f"crops are {image.shape}, of deviation {image.std()}")
            return
        # Read, not mapped: pages mapped here would count as the peer's.
        expected = self._expected(number)
        if image.dtype != np.uint8:
            raise ValueError(f"images are {image.dtype}")
        if image.shape != expected.shape:
            image = image.transpose(1, 2, 0)
        error = np.abs(image.astype(int) - expected).mean()
        if error > (0 if self._peer.exact else LOSSY_MEAN):
            raise ValueError(f"row {number} is off by {error:.2f} levels on average")

    def _expected(self, number: int) -> np.ndarray:
        rows = read_rows(self._rows)
        with (self._rows / "rows.npy").open("rb") as file:
            file.seek(rows.offset + number * rows[0].nbytes)
            return np.fromfile(file, np.uint8, rows[0].size).reshape(rows.shape[1:])


def main() -> None:
    """Answer until standard input ends."""
    # Libraries print, too: answers go where standard output went, and prints to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer, store, rows = sys.argv[1:]
    child = Child(peer, Path(store), Path(rows))
    for request in sys.stdin:
        answer = getattr(child, request.strip())()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
