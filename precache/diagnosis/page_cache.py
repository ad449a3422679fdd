"""Drop the files that a loader reads from the page cache, to measure reading from the disk."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset

from precache.loading.dataset import CachedDataset
from precache.loading.loader import Loader
from precache.runtime.operating_system import drop_cached
from precache.store.version import Version

PATH_ATTRIBUTES = ("samples", "imgs", "files", "paths", "filenames", "image_paths", "images")
"""Attributes in which datasets keep paths, or tuples that start with a path."""

MOST_FILES = 200_000
SAMPLED_FILES = 1000
"""Approximate number of files whose sizes are read to estimate the total."""

READ_BYTES = 4 << 20
SEQUENTIAL_BYTES = 64 << 20


@dataclass(frozen=True)
class Files:
    """Number and sizes of the files that a loader reads.

    Attributes
    ----------
    nbytes
        Total size, estimated from a sample if there are many files.
    median_nbytes
        Median size of a file.
    """

    count: int
    nbytes: int
    median_nbytes: int

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Files | None:
        """Read the sizes of files; None if no file is accessible."""
        sampled = paths[:: max(1, len(paths) // SAMPLED_FILES)]
        sizes = [size for size in map(_size, sampled) if size is not None]
        if not sizes:
            return None
        mean = statistics.fmean(sizes)
        return cls(len(paths), round(mean * len(paths)), round(statistics.median(sizes)))


def loader_version(loader: Any) -> Version | None:
    """Return the version of a store that a loader reads; None for other loaders."""
    if isinstance(loader, Loader):
        return loader.version
    dataset = getattr(loader, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset.version if isinstance(dataset, CachedDataset) else None


def files_of(loader: Any) -> list[Path]:
    """Return the local files that a loader reads; empty if unknown."""
    version = loader_version(loader)
    if version is not None:
        root = version.folder.local("")
        return [] if root is None else [root / name for name in version.folder.sizes()]
    if not isinstance(loader, DataLoader):
        return []
    return list(itertools.islice(_paths(loader.dataset), MOST_FILES))


def _paths(dataset: Any) -> Iterator[Path]:
    if isinstance(dataset, Subset):
        yield from _paths(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _paths(part)
    else:
        for name in PATH_ATTRIBUTES:
            items = getattr(dataset, name, None)
            if isinstance(items, list | tuple) and items and _path(items[0]) is not None:
                yield from (path for path in map(_path, items) if path is not None)
                return


def _path(item: Any) -> Path | None:
    first = item[0] if isinstance(item, tuple) and item else item
    if not isinstance(first, str | os.PathLike):
        return None
    path = Path(first)
    return path if path.is_file() else None


def evict(paths: Sequence[Path], seconds: float) -> str:
    """Ask the kernel to drop files from the page cache; return why it cannot, or an empty string.

    Files that a process has mapped and files of an in-memory file system (tmpfs) stay cached.
    """
    until = time.perf_counter() + seconds
    for path in paths:
        if time.perf_counter() > until:
            return f"{len(paths):,} files are too many to drop from memory in time"
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fsync(descriptor)  # dirty pages are not dropped
            if not drop_cached(descriptor):
                return "this system cannot drop files from memory"
        finally:
            os.close(descriptor)
    return ""


def sequential_rate(path: Path, seconds: float = 0.5) -> float | None:
    """Return the bytes/s of reading a file from the disk; None if they cannot be measured."""
    size = _size(path)
    if size is None or size < READ_BYTES or evict([path], seconds):
        return None
    buffer, done, started = bytearray(READ_BYTES), 0, time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while done < SEQUENTIAL_BYTES and time.perf_counter() < started + seconds:
            count = file.readinto(buffer)
            if not count:
                break
            done += count
    return done / (time.perf_counter() - started)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
