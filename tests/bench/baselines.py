"""Baselines for feeding a CUDA device: its least work, by hand, and what it replaces."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numcodecs import zstd
from torch.utils.data import DataLoader, Dataset

import precache
from precache.reading.array_reader import ArrayReader
from precache.runtime.usage import cores
from tests.bench.common import CROP, chunk_extents, finish, mapped
from tests.demo.training import JpegDataset

Epoch = Callable[[], int]
"""Goes through all rows, and returns how many there were."""

JPEGS = 4_096
"""Photographs that a `DataLoader` decodes in an epoch, which takes it seconds."""


@contextlib.contextmanager
def copy_rows(store: Path, device: torch.device, batch: int) -> Iterator[Epoch]:
    """Rows of a `raw` store, each copied from the memory map into page-locked memory by NumPy, and
    a batch from there to the device."""
    reader = ArrayReader(precache.open(store), "image")
    array, pinned = reader.array, device.type == "cuda"
    rows: list[np.ndarray] = []
    for path, _, begin in reader.plain_objects():
        data = mapped(path)
        for row in range(min(array.object_shape[0], array.shape[0] - len(rows))):
            chunk, within = divmod(row, array.chunk_shape[0])
            start = begin + chunk * array.pitch + within * array.row_nbytes
            rows.append(data[start : start + array.row_nbytes])
    slots = [
        torch.empty((batch, array.row_nbytes), dtype=torch.uint8, pin_memory=pinned)
        for _ in range(3)
    ]
    copied: list[torch.cuda.Event] = []
    if pinned:
        copied = [torch.cuda.Event(blocking=True) for _ in slots]  # type: ignore[no-untyped-call]

    def epoch() -> int:
        order = np.random.default_rng().permutation(len(rows)).tolist()
        for number, start in enumerate(range(0, len(rows), batch)):
            place = number % len(slots)
            slot = slots[place]
            for event in copied[place : place + 1]:
                event.synchronize()  # its last copy
            out = slot.numpy()
            some = order[start : start + batch]
            for number_in_batch, row in enumerate(some):
                out[number_in_batch] = rows[row]
            slot[: len(some)].to(device, non_blocking=True)
            for event in copied[place : place + 1]:
                event.record()
        for event in copied:
            event.synchronize()
        return len(rows)

    yield epoch


@contextlib.contextmanager
def decompress_frames(store: Path) -> Iterator[Epoch]:
    """The zstd frames of a store, each decompressed into the same memory."""
    files: dict[Path, np.ndarray] = {}
    frames = [
        files.setdefault(path, mapped(path))[start : start + length]
        for path, start, length in chunk_extents(store)
    ]
    out = np.empty(3 * CROP * CROP, np.uint8)

    def epoch() -> int:
        for number in np.random.default_rng().permutation(len(frames)).tolist():
            zstd.decompress(frames[number], out)
        return len(frames)

    yield epoch


def decode_jpegs(
    source: Path, device: torch.device, batch: int
) -> contextlib.AbstractContextManager[Epoch]:
    """Photographs that the workers of a `DataLoader`, one for each core, decode, resize and crop,
    and that it copies into page-locked memory."""
    keys = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*.*"))][:JPEGS]
    classes = {(source / key).parent.name for key in keys}
    return _loaded(JpegDataset(source, keys, sorted(classes)), device, batch, cores())


def read_rows(
    store: Path, device: torch.device, batch: int
) -> contextlib.AbstractContextManager[Epoch]:
    """Rows that two workers of a `DataLoader` read from a store, and that it copies into
    page-locked memory."""
    dataset = precache.CachedDataset(store)
    return _loaded(dataset, device, batch, 2, collate_fn=dataset.collate)


@contextlib.contextmanager
def _loaded(
    dataset: Dataset[Any], device: torch.device, batch: int, workers: int, **options: Any
) -> Iterator[Epoch]:
    loader = DataLoader(
        dataset,
        batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
        multiprocessing_context="forkserver",
        **options,
    )

    def epoch() -> int:
        rows = 0
        for made in loader:
            image = made["image"] if isinstance(made, Mapping) else made[0]
            image.to(device, non_blocking=True)
            rows += len(image)
        finish(device)
        return rows

    yield epoch
