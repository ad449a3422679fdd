"""Files that a torch `Dataset` holds, found by paths in its attributes; their sizes and times.

Code outside precache opens them, so what they hold is not known here; a change of a file that is
named by no attribute is not seen.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

MOST_DEPTH = 4
"""Datasets within a dataset, such as of a `Subset`, that are searched."""

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class HeldFiles:
    """Files of a dataset.

    Attributes
    ----------
    count
        Number of files.
    of_samples
        Name, size and time of the file of each sample; None if files are not one a sample.
    others
        Digest of the names, sizes and times of all other files; empty if there are none.
    """

    count: int
    of_samples: Sequence[str] | None
    others: str


def held_files(dataset: Any) -> HeldFiles:
    """Find the files that a dataset holds, and read their sizes and times."""
    own: Sequence[str] | None = None
    with contextlib.suppress(Exception):  # attributes of the user's class, which may raise anything
        own = _paths_of_samples(dataset)
    found = dict.fromkeys(_paths_of(dataset, ("",), MOST_DEPTH))
    states = {path: _state(path) for path in dict.fromkeys((*(own or ()), *found))}
    of_samples = None if own is None else [f"{path} {states[path]}" for path in own]
    others = {path: state for path, state in states.items() if state}
    for path in own or ():
        others.pop(path, None)
    digest = xxhash.xxh3_64_hexdigest(repr(list(others.items())).encode()) if others else ""
    return HeldFiles(sum(map(bool, states.values())), of_samples, digest)


def _paths_of_samples(dataset: Any) -> list[str] | None:
    """Return the path of each sample, of a dataset like torchvision's `ImageFolder`."""
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # a `Subset`
        whole = _paths_of_samples(dataset.dataset)
        return None if whole is None else [whole[number] for number in dataset.indices]
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or len(samples) != len(dataset):
        return None
    if not all(isinstance(sample, tuple) and _is_path(sample[0]) for sample in samples):
        return None
    return [os.fspath(sample[0]) for sample in samples]


def _paths_of(dataset: Any, roots: tuple[str, ...], depth: int) -> Iterator[str]:
    """Yield paths of files in the attributes of a dataset, and of those within it.

    Parameters
    ----------
    roots
        Folders that paths may be relative to.
    """
    attributes: dict[str, Any] = {}
    for part in (*reversed(type(dataset).__mro__[:-1]), dataset):
        with contextlib.suppress(TypeError):  # it has slots alone
            attributes |= vars(part)
    folders = [value for value in attributes.values() if _is_path(value) and os.path.isdir(value)]  # noqa: PTH112 - no error
    roots = (*roots, *dict.fromkeys(map(os.fspath, folders)))
    for value in attributes.values():
        with contextlib.suppress(Exception):  # of the user's class
            yield from _paths_in(value, roots, depth)


def _paths_in(value: Any, roots: tuple[str, ...], depth: int) -> Iterator[str]:
    filename = value if _is_path(value) else getattr(value, "filename", None)  # of a memory map
    if filename is not None and _is_path(filename):
        yield os.fspath(filename)
        return
    if depth and _is_dataset(value):
        yield from _paths_of(value, roots, depth - 1)
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.dtype.kind in "OU" and value.ndim == 1 else ()
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple) or not value:
        return
    if depth and _is_dataset(value[0]):
        for part in value:
            yield from _paths_of(part, roots, depth - 1)
    first = _items(value[0]).items()
    places = [(name, root) for name, path in first for root in roots if _state(_joined(root, path))]
    for entry in value if places else ():
        items = _items(entry)
        yield from (_joined(root, items[name]) for name, root in places if name in items)


def _joined(root: str, path: str) -> str:
    return path if not root or path.startswith("/") else f"{root}/{path}"


def _is_dataset(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("__getitem__", "__len__", "__dict__"))


def _items(entry: Any) -> dict[Any, str]:
    """Return the paths in an entry of a list: a path, or a tuple or dict with paths."""
    if _is_path(entry):
        return {0: os.fspath(entry)}
    if isinstance(entry, list | tuple):
        entry = dict(enumerate(entry))
    if not isinstance(entry, Mapping):
        return {}
    return {name: os.fspath(part) for name, part in entry.items() if _is_path(part)}


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))


def _state(path: str) -> str:
    """Return size and time of a file; empty for all else: text that is no path, folders, pipes."""
    try:
        status = os.stat(path)  # noqa: PTH116 - of a million files
    except (OSError, ValueError):
        return ""
    return f"{status.st_size} {status.st_mtime_ns}" if stat.S_ISREG(status.st_mode) else ""
