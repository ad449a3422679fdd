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

MOST_WITHIN = 1000
"""Datasets in a list, such as of a `ConcatDataset`, that are searched."""


@dataclass(frozen=True)
class HeldFiles:
    """Files of a dataset.

    Attributes
    ----------
    count
        Number of files.
    of_samples
        Names, sizes and times of the files of each sample; None if it is not known whose they are.
    others
        Digest of the names, sizes and times of all other files; empty if there are none.
    """

    count: int
    of_samples: Sequence[str] | None
    others: str


def held_files(dataset: Any) -> HeldFiles:
    """Find the files that a dataset holds, and read their sizes and times."""
    own: Sequence[Sequence[str]] | None = None
    seen: dict[int, Any] = {}  # lists by their ids; kept, so that no other object gets its id
    with contextlib.suppress(Exception):  # attributes of the user's class, which may raise anything
        own = _paths_of_samples(dataset, seen)
    if own is None:
        seen.clear()
    found = dict.fromkeys(_paths_of(dataset, ("",), MOST_DEPTH, seen))
    owned = dict.fromkeys(path for paths in own or () for path in paths)
    states = {path: _state(path) for path in (owned | found)}
    of_samples = None if own is None else [_identity(paths, states) for paths in own]
    others = {path: state for path, state in states.items() if state and path not in owned}
    digest = xxhash.xxh3_64_hexdigest(repr(list(others.items())).encode()) if others else ""
    return HeldFiles(sum(map(bool, states.values())), of_samples, digest)


def _identity(paths: Sequence[str], states: Mapping[str, str]) -> str:
    """Write names, sizes and times of a sample's files; text that names none is left out."""
    first, *others = paths
    files = (first, *(path for path in others if states[path]))
    return " ".join(f"{path} {states[path]}" for path in files)


def _paths_of_samples(dataset: Any, seen: dict[int, Any]) -> list[tuple[str, ...]] | None:
    """Return the paths of each sample, of a dataset like torchvision's `ImageFolder`.

    A sample is a tuple that begins with a path. Other parts of it may be paths, as of masks, or
    text.
    """
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # a `Subset`
        whole = _paths_of_samples(dataset.dataset, seen)
        return None if whole is None else [whole[number] for number in dataset.indices]
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or len(samples) != len(dataset):
        return None
    if not all(isinstance(sample, tuple) and _is_path(sample[0]) for sample in samples):
        return None
    seen[id(samples)] = samples
    return [tuple(os.fspath(part) for part in sample if _is_path(part)) for sample in samples]


def _paths_of(
    dataset: Any, roots: tuple[str, ...], depth: int, seen: dict[int, Any]
) -> Iterator[str]:
    """Yield paths of files in the attributes of a dataset, and of those within it.

    Parameters
    ----------
    roots
        Folders that paths may be relative to.
    seen
        Objects that were searched, by their ids.
    """
    attributes: dict[str, Any] = {}
    for part in (*reversed(type(dataset).__mro__[:-1]), dataset):
        with contextlib.suppress(TypeError):  # it has slots alone
            attributes |= {n: value for n, value in vars(part).items() if not n.startswith("__")}
    folders = [os.fspath(value) for value in attributes.values() if _is_path(value)]
    roots = (*roots, *filter(_is_folder, dict.fromkeys(folders)))
    for value in attributes.values():
        if id(value) not in seen:
            seen[id(value)] = value
            with contextlib.suppress(Exception):  # of the user's class
                yield from _paths_in(value, roots, depth, seen)


def _paths_in(
    value: Any, roots: tuple[str, ...], depth: int, seen: dict[int, Any]
) -> Iterator[str]:
    filename = value if _is_path(value) else getattr(value, "filename", None)  # of a memory map
    if filename is not None and _is_path(filename):
        yield os.fspath(filename)
        return
    if depth and _is_dataset(value):
        yield from _paths_of(value, roots, depth - 1, seen)
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.dtype.kind in "OU" and value.ndim == 1 else ()
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple) or not value:
        return
    if depth and _is_dataset(value[0]):
        for part in value[:MOST_WITHIN]:
            yield from _paths_of(part, roots, depth - 1, seen)
    for column in _columns(value):
        first = os.fspath(column[0])
        for root in roots:
            if _state(_joined(root, first)):
                yield from (_joined(root, os.fspath(path)) for path in column if _is_path(path))


def _columns(entries: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the lists that begin with a path, in a list of paths, or of tuples or dicts of them."""
    first = entries[0]
    if _is_path(first):
        yield list(entries)
    elif isinstance(first, list | tuple):
        for place in (place for place, part in enumerate(first) if _is_path(part)):
            yield [entry[place] for entry in entries if len(entry) > place]
    elif isinstance(first, Mapping):
        for name in (name for name, part in first.items() if _is_path(part)):
            yield [entry.get(name) for entry in entries]


def _joined(root: str, path: str) -> str:
    return path if not root or path.startswith("/") else f"{root}/{path}"


def _is_dataset(value: Any) -> bool:
    parts = ("__getitem__", "__len__", "__dict__")
    return not hasattr(value, "dtype") and all(hasattr(value, name) for name in parts)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - no error, whatever the text is


def _is_path(value: Any) -> bool:
    return bool(value) if isinstance(value, str) else hasattr(type(value), "__fspath__")


def _state(path: str) -> str:
    """Return size and time of a file; empty for all else: text that is no path, folders, pipes."""
    try:
        status = os.stat(path)  # noqa: PTH116 - of a million files
    except (OSError, ValueError):
        return ""
    return f"{status.st_size} {status.st_mtime_ns}" if stat.S_ISREG(status.st_mode) else ""
