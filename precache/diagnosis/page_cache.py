"""Drop the files that a loader reads from the page cache, to measure reading from the disk."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset

from precache.loading.dataset import CachedDataset, dataset_of
from precache.loading.loader import Loader
from precache.loading.mixing import Mixture
from precache.runtime.operating_system import drop_cached
from precache.store.version import Version

PATH_ATTRIBUTES = ("samples", "imgs", "files", "paths", "filenames", "image_paths", "images")
"""Attributes in which datasets keep paths, or tuples that start with a path."""

StrPath = str | os.PathLike[str]

SAMPLED_FILES = 1000
"""Approximate number of files whose sizes are read; each is then one of many."""

READ_BYTES = 4 << 20
SEQUENTIAL_BYTES = 64 << 20


@dataclass(frozen=True)
class Files:
    """Number and sizes of the files that a loader reads.

    Attributes
    ----------
    count, nbytes
        Number and total size, estimated from a sample if there are many files.
    median_nbytes
        Median size of a file.
    """

    count: int
    nbytes: int
    median_nbytes: int

    @classmethod
    def of(cls, paths: Sequence[StrPath]) -> Files | None:
        """Read the sizes of files; None if no file is accessible."""
        sampled = _sample(paths)
        sizes = [size for size in map(_size, sampled) if size is not None]
        if not sizes:
            return None
        scale = len(paths) / len(sampled)
        nbytes, median = round(sum(sizes) * scale), round(statistics.median(sizes))
        return cls(round(len(sizes) * scale), nbytes, median)


def loaders_of(loader: Any) -> tuple[Loader, ...]:
    """Return the `Loader` itself or the sources of a mixture; empty for other loaders."""
    if isinstance(loader, Mixture):
        return loader.loaders
    return (loader,) if isinstance(loader, Loader) else ()


def versions_of(loader: Any) -> list[Version]:
    """Return the versions of stores that a loader reads; empty for other loaders."""
    if loaders := loaders_of(loader):
        return [source.version for source in loaders]
    dataset = dataset_of(loader)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return [dataset.version] if isinstance(dataset, CachedDataset) else []


def files_of(loader: Any) -> list[StrPath]:
    """Return the local files that a loader reads, each once; empty if unknown. Some may be missing.

    Of a `Subset`, those of its indices, if the dataset keeps one path per sample.
    """
    paths: list[StrPath] = []
    for version in versions_of(loader):
        root = version.folder.local("")
        paths += [] if root is None else [root / name for name in version.folder.sizes()]
    if isinstance(loader, DataLoader) and not paths:
        paths = _paths(loader.dataset)
    return list(dict.fromkeys(paths))


def _paths(dataset: Any) -> list[StrPath]:
    if isinstance(dataset, ConcatDataset):
        return [path for part in dataset.datasets for path in _paths(part)]
    if isinstance(dataset, Subset):
        whole: Any = dataset.dataset
        paths = _paths(whole)
        with contextlib.suppress(Exception):  # a length, which may raise anything
            if len(paths) == len(whole):
                return [paths[index] for index in dataset.indices]
        return paths
    for name in PATH_ATTRIBUTES:
        items = None
        with contextlib.suppress(Exception):  # a property, which may raise anything
            items = getattr(dataset, name)
        if isinstance(items, list | tuple):
            paths = [path for path in map(_path, items) if path is not None]
            if any(_size(path) is not None for path in _sample(paths)):
                return paths
    return []


def _path(item: Any) -> StrPath | None:
    first = item[0] if isinstance(item, tuple) and item else item
    return first if isinstance(first, str | os.PathLike) else None


def _sample(paths: Sequence[StrPath]) -> Sequence[StrPath]:
    """Choose a path at random from each of some `SAMPLED_FILES` equal runs of paths.

    Not every nth: names often alternate, as those of images and of their labels.
    """
    step, chance = max(1, len(paths) // SAMPLED_FILES), random.Random(0)
    starts = range(0, len(paths), step)
    return [paths[start + chance.randrange(min(step, len(paths) - start))] for start in starts]


def evict(paths: Sequence[StrPath], seconds: float) -> str:
    """Ask the kernel to drop files from the page cache; return why it cannot, or an empty string.

    Files that a process has mapped and files of an in-memory file system (tmpfs) stay cached.
    """
    until = time.perf_counter() + seconds
    for path in paths:
        if time.perf_counter() > until:
            return f"{len(paths):,} files are too many to drop from memory in time"
        if _size(path) is None:
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            with contextlib.suppress(OSError):
                os.fsync(descriptor)  # dirty pages are not dropped
            if not drop_cached(descriptor):
                return "this system cannot drop files from memory"
        finally:
            os.close(descriptor)
    return ""


def sequential_rate(paths: Sequence[StrPath], seconds: float = 0.5) -> float | None:
    """Return the bytes/s of reading a large file from the disk; None if there is none."""
    path = max(_sample(paths), key=lambda path: _size(path) or 0, default="")
    if (_size(path) or 0) < READ_BYTES or evict([path], seconds):
        return None
    buffer, done, started = bytearray(READ_BYTES), 0, time.perf_counter()
    with Path(path).open("rb", buffering=0) as file:
        while done < SEQUENTIAL_BYTES and time.perf_counter() < started + seconds:
            count = file.readinto(buffer)
            if not count:
                break
            done += count
    return done / (time.perf_counter() - started)


def _size(path: StrPath) -> int | None:
    """Return the size of a file; None for all else: text that is no path, folders, pipes."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
