"""The files that a loader reads, out of the page cache, so that a first epoch can be measured."""

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
from precache.store.version import Version

LISTS = ("samples", "imgs", "files", "paths", "filenames", "image_paths", "images")
"""Attributes in which datasets keep paths, or tuples that begin with one."""

MOST_FILES = 200_000
SAMPLED = 1000
"""Files whose sizes stand for those of all."""

BLOCK = 4 << 20
SEQUENTIAL_BYTES = 64 << 20


@dataclass(frozen=True)
class Files:
    """Files that a loader reads.

    Attributes
    ----------
    count, nbytes
        Of all; bytes are estimated from a sample where they are many.
    median_nbytes
        Of one.
    """

    count: int
    nbytes: int
    median_nbytes: int

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Files | None:
        """None where none of them can be looked at."""
        sampled = paths[:: max(1, len(paths) // SAMPLED)]
        sizes = [size for size in map(_size, sampled) if size is not None]
        if not sizes:
            return None
        mean = statistics.fmean(sizes)
        return cls(len(paths), round(mean * len(paths)), round(statistics.median(sizes)))


def version_of(loader: Any) -> Version | None:
    """The version of a store that a loader reads, if it reads one."""
    if isinstance(loader, Loader):
        return loader.version
    dataset = getattr(loader, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset.version if isinstance(dataset, CachedDataset) else None


def files_of(loader: Any) -> list[Path]:
    """Files on a local disk that a loader is known to read; none where that cannot be told."""
    version = version_of(loader)
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
        for name in LISTS:
            listed = getattr(dataset, name, None)
            if isinstance(listed, list | tuple) and listed and _path(listed[0]) is not None:
                yield from (path for path in map(_path, listed) if path is not None)
                return


def _path(item: Any) -> Path | None:
    first = item[0] if isinstance(item, tuple) and item else item
    if not isinstance(first, str | os.PathLike):
        return None
    path = Path(first)
    return path if path.is_file() else None


def evict(paths: Sequence[Path], seconds: float) -> bool:
    """Have the kernel drop files from the page cache; whether there was time for all of them.

    What a process has mapped, or what lies in memory anyway, such as a tmpfs, stays.
    """
    until = time.perf_counter() + seconds
    for path in paths:
        if time.perf_counter() > until:
            return False
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fdatasync(descriptor)  # what is not written yet is not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def sequential_rate(path: Path, seconds: float = 0.5) -> float | None:
    """Bytes/s of reading a file from its beginning, after dropping it; None for a small one."""
    size = _size(path)
    if size is None or size < BLOCK or not evict([path], seconds):
        return None
    buffer, done, started = bytearray(BLOCK), 0, time.perf_counter()
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
