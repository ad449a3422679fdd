"""Files that a loader reads, and dropping them from the page cache."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
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
            firsts = [item[0] if isinstance(item, tuple) and item else item for item in items]
            paths = [path for path in firsts if isinstance(path, str | os.PathLike)]
            if any(map(_is_file, paths[:1000])):
                return paths
    return []


def _is_file(path: StrPath) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # text that is no path
        return False


def evict(paths: Sequence[StrPath], seconds: float) -> tuple[int, str]:
    """Ask the kernel to drop files from the page cache.

    Files that a process has mapped and files of an in-memory file system (tmpfs) stay cached.

    Returns
    -------
    tuple
        Bytes of the files that were dropped, and why the others were not; empty if all were.
    """
    until, nbytes = time.perf_counter() + seconds, 0
    for number, path in enumerate(paths):
        if time.perf_counter() > until:
            return nbytes, (
                f"{len(paths):,} files are too many to drop from memory in time; "
                f"{number:,} were dropped, and the next reads of them come from the disk"
            )
        if not _is_file(path):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            with contextlib.suppress(OSError):
                os.fsync(descriptor)  # dirty pages are not dropped
            if not drop_cached(descriptor):
                return nbytes, "this system cannot drop files from memory"
            nbytes += os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return nbytes, ""
