"""Data that a torch `Dataset` holds: values in its attributes, and files that these name.

Code outside precache opens the files, and any sample may come from any of them: a change of one
has all samples read and compared. A change of a file that no attribute names is not seen.

Each process makes the dataset anew: what it holds is compared between them, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import json
import os
import re
import stat
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from precache.storage.local_files import state_of

MOST_DEPTH = 4
"""Datasets within a dataset, such as of a `Subset`, that are searched."""

MOST_WITHIN = 1000
"""Datasets in a list, such as of a `ConcatDataset`, that are searched."""

LONGEST_PATH = 4096
"""Bytes of a path at most; longer ones are data."""

MOST_COMPARED = 10_000
"""Values of a list, table or map that are compared between processes; of more, each n-th."""


@dataclass(frozen=True)
class HeldData:
    """Values and files of a dataset.

    Attributes
    ----------
    files
        Number of files.
    digest
        Of the values, and of the names, sizes and times of the files; empty if there are none.
    file_states
        Digest of the states of the files: int63.
    unread
        Attributes that could not be searched, with the reason.
    """

    files: int
    digest: str
    file_states: int
    unread: Mapping[str, str]


def held_data(dataset: Any, but: Collection[str] = ()) -> HeldData:
    """Search a dataset, and read the sizes and times of its files.

    A text may be the path of a file below each folder that is an attribute.

    Parameters
    ----------
    but
        Attributes that are left out.
    """
    values, unread = list[str](), dict[str, str]()
    held: dict[str, os.stat_result] = {}
    for found in _search(dataset, "dataset", ("",), MOST_DEPTH, {}):
        if found.where in {f"dataset.{name}" for name in but}:
            continue
        try:
            facts = _facts(_as_builtin(found.value))
            if isinstance(facts, list):
                values.append(xxhash.xxh3_64_hexdigest(json.dumps(facts).encode()))
            for text, root in itertools.product(dict.fromkeys(_texts(facts)), found.roots):
                path = text if not root or text.startswith("/") else f"{root}/{text}"
                if path not in held and (status := _status(path)):
                    held[path] = status
        except Exception as error:  # of the user's class
            unread[found.where.rpartition(".")[2]] = repr(error)
    states = [f"{path} {status.st_size} {status.st_mtime_ns}" for path, status in held.items()]
    file_states = np.array([state_of(status) for status in held.values()], np.int64)
    whole = xxhash.xxh3_64_hexdigest(os.fsencode(json.dumps([values, states])))
    return HeldData(
        len(held),
        whole if values or states else "",
        xxhash.xxh3_64_intdigest(file_states.tobytes()) >> 1,
        unread,
    )


def held_values(dataset: Any, module: str) -> dict[str, str]:
    """Digest the lists, arrays and maps of a dataset, in their order, and its length.

    They are to be the same in all processes that make the dataset. Objects that are no text, number
    or array do not count, nor do the folder that paths share, and fractions in maps, which may be
    times. Of what classes hold, and modules, lists of names count, and maps of names to numbers.

    Parameters
    ----------
    module
        Name of the module of its factory, which is searched as that of its class is.

    Returns
    -------
    dict
        Where a value is held -> its digest.
    """
    length = len(dataset) if hasattr(dataset, "__len__") else -1
    digests = {"len(dataset)": str(length)}
    seen: dict[int, Any] = {id(value): value for value in (sys.argv, sys.path)}
    held = [_Held("dataset", dataset, ()), *_search(dataset, "dataset", (), MOST_DEPTH, {})]
    for name in dict.fromkeys((module, type(dataset).__module__)):
        variables = list(getattr(sys.modules.get(name), "__dict__", {}).items())
        held += [_Held(f"{name}.{n}", v, (), True) for n, v in variables if not n.startswith("_")]
    for found in held:
        if id(found.value) in seen or (found.is_shared and not _are_names(found.value)):
            continue
        seen[id(found.value)] = found.value
        with contextlib.suppress(Exception):  # of the user's class
            facts = _facts(_as_builtin(found.value), length)
            if isinstance(facts, list):
                digests[found.where] = _digest(facts)
    return digests


@dataclass(frozen=True)
class _Held:
    """A value, where it is held, and the folders that paths in it may be relative to.

    Attributes
    ----------
    is_shared
        True for a value of a class or module, which may be a cache.
    """

    where: str
    value: Any
    roots: tuple[str, ...]
    is_shared: bool = False


def _search(
    dataset: Any, where: str, roots: tuple[str, ...], depth: int, seen: dict[Any, Any]
) -> Iterator[_Held]:
    """Yield the attributes of a dataset, and of `depth` levels of datasets within it."""
    attributes = _attributes(dataset)
    paths = [os.fsdecode(value) for value in attributes.values() if _is_path(value)]
    folders = filter(os.path.isdir, dict.fromkeys(paths))  # no error, whatever the text is
    roots = tuple(dict.fromkeys((*roots, *folders)))
    kind = type(dataset)
    for name, value in [*attributes.items(), *_around(dataset)]:
        if (id(value), roots) in seen:
            continue
        seen[id(value), roots] = value  # kept, as ids are used again
        of_class = value is inspect.getattr_static(kind, name, None) or name.startswith("globals ")
        yield _Held(f"{where}.{name}", value, roots, of_class)
        within = {f"{where}.{name}": value}
        with contextlib.suppress(Exception):  # of the user's class
            parts = list(value.values()) if isinstance(value, Mapping) else value
            if isinstance(parts, list | tuple):
                inner = enumerate(parts[:MOST_WITHIN])
                within |= {f"{where}.{name}[{n}]": part for n, part in inner}
        for place, part in within.items():
            if depth and _is_dataset(part):
                yield from _search(part, place, roots, depth - 1, seen)


def _attributes(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a dataset, and those of its classes."""
    attributes: dict[str, Any] = {}
    for part in reversed(type(dataset).__mro__[:-1]):
        attributes |= vars(part)
    attributes |= _own(dataset)
    return {name: value for name, value in attributes.items() if not name.startswith("__")}


def _around(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield what methods of a dataset read from the functions around them, and from their module.

    So do functions of that module that they call. Names of the latter begin with ``globals``.
    """
    classes = [part for part in type(dataset).__mro__ if not part.__module__.startswith("torch")]
    found = [value for part in classes[:-1] for value in vars(part).values()]
    found += [value for value in getattr(dataset, "__dict__", {}).values() if callable(value)]
    seen = set[Any]()
    while found:
        function = found.pop()
        if isinstance(function, functools.partial):
            yield function.func.__name__, [function.args, function.keywords]
            function = function.func
        function = getattr(function, "fget", None) or function
        function = inspect.unwrap(getattr(function, "__func__", function))
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            continue
        codes, names = [function.__code__], set[str]()
        seen.add(function.__code__)
        while codes:
            code = codes.pop()
            names |= {*code.co_names}
            codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            with contextlib.suppress(ValueError):  # it is not set yet
                found.append(cell.cell_contents)
                yield f"{function.__name__}.{name}", cell.cell_contents
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if getattr(value, "__module__", "") == function.__module__:
                found.append(value)
            elif not (isinstance(value, types.ModuleType) or callable(value)):
                yield f"globals {name}", value


def _as_builtin(value: Any) -> Any:
    """Return a column of pandas, polars or Arrow as a list, and a table as a list of them.

    The index of pandas is a column. Of Arrow's columns only text and numbers are copied: others may
    hold images.
    """
    if isinstance(value, np.ndarray | type):
        return value
    if hasattr(value, "to_pylist") and hasattr(value, "type"):  # Arrow
        simple = re.search("string|^u?int|^float|^double|^halffloat|^bool", str(value.type))
        return value.to_pylist() if simple else ()
    if hasattr(value, "iloc"):  # pandas, where several columns may have one name
        columns = [column for _, column in value.items()] if hasattr(value, "columns") else [value]
        return [values.to_list() for values in (value.index, *columns)]
    if hasattr(value, "to_list"):
        return value.to_list()
    if not hasattr(value, "columns"):
        return value
    if hasattr(value, "iter_columns"):  # polars
        return list(map(_as_builtin, value.iter_columns()))
    if hasattr(value, "itercolumns"):  # Arrow
        return list(map(_as_builtin, value.flatten().itercolumns()))
    if hasattr(value, "__getitem__") and not _is_dataset(value):  # a lazy table of polars
        raise TypeError(f"{type(value).__name__} is a table whose columns cannot be listed")
    return value


def _facts(value: Any, length: int | None = None, most: int = MOST_COMPARED) -> Any:
    """Return a value as JSON has it: texts, numbers, hashes of arrays, and types of all else.

    Parameters
    ----------
    length
        Number of samples, if the value is compared between processes; -1 within a list that has one
        value for each. What may differ by chance is left out then: fractions in maps, and arrays of
        fractions or three dimensions, which may be buffers, unless they have a value for each.
    most
        Values that are compared between processes.
    """
    if type(value) in (str, int, float):  # most are
        return value
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = tuple(_own(value).values())
    elif length is None and _is_record(value):
        value = tuple(
            p for p in _own(value).values() if not (hasattr(p, "__dict__") or _is_record(p))
        )
    is_array = isinstance(value, np.ndarray) and not isinstance(value, np.memmap)
    if is_array and value.dtype.kind in "OSU":
        value = value.tolist()
    elif is_array:
        whole = 0 < value.ndim < 3 and value.dtype.kind in "iub"
        if length is not None and not whole and length not in (-1, *value.shape[:1]):
            return "array"
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return [str(value.dtype), *value.shape, xxhash.xxh3_64_hexdigest(data.data)]
    if isinstance(value, list | tuple | Mapping):
        parts = value.items() if isinstance(value, Mapping) else value
        some = list(parts) if length is None else _some(parts, most)
        each = max(1, most // max(1, len(some)))
        within = -1 if length == len(value) else length
        facts = [_facts(part, within, each) for part in some]
        if isinstance(value, Mapping) and length is not None:
            facts = [pair for pair in facts if not isinstance(pair[-1], float)]
        return [len(value), *facts]
    if isinstance(value, AbstractSet):
        return [len(value), *sorted((_facts(part, length) for part in value), key=json.dumps)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes | bytearray):
        if len(value) <= LONGEST_PATH and 0 not in value:
            return os.fsdecode(bytes(value))
        return xxhash.xxh3_64_hexdigest(value)
    name = "name" if isinstance(value, io.IOBase) else "filename"  # of an open file
    path = value if _is_path(value) else getattr(value, name, None)
    if path is not None and _is_path(path):
        return os.fsdecode(path)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value) if hasattr(value, "isoformat") else type(value).__qualname__


def _is_record(value: Any) -> bool:
    """Return True for an object of a user's class that is told by its attributes."""
    kinds = (str, bytes, int, float, list, tuple, Mapping, AbstractSet, np.ndarray, os.PathLike)
    return not isinstance(value, kinds) and _is_of_user(type(value).__module__)


def _own(value: Any) -> dict[str, Any]:
    """Return an object's attributes and slots."""
    slots = _slots(type(value))  # type: ignore[arg-type]  # a type is hashable
    return getattr(value, "__dict__", {}) | {name: getattr(value, name, None) for name in slots}


@functools.lru_cache(maxsize=4096)
def _slots(kind: type[object]) -> list[str]:
    members = [item for part in kind.__mro__ for item in vars(part).items()]
    return [name for name, value in members if isinstance(value, types.MemberDescriptorType)]


@functools.lru_cache(maxsize=4096)
def _is_of_user(module: str) -> bool:
    """Return True for a module that is neither Python's nor of an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    installed = re.search("/(site|dist)-packages/", file)
    return bool(file) and not (installed or file.startswith(sysconfig.get_path("stdlib")))


def _some(parts: Collection[Any], most: int) -> list[Any]:
    """Return the first of many values, and each n-th of the others: a set may come repeatedly."""
    first = len(parts) if len(parts) <= most else most // 2
    step = max(1, -(-2 * len(parts) // most))
    return [*itertools.islice(parts, first), *itertools.islice(parts, first, None, step)]


def _digest(facts: Any) -> str:
    """Digest facts without the folder that all paths in them share, which may be a node's own."""
    paths = [text for text in _texts(facts) if text.startswith("/")]
    folder = os.path.commonpath(map(os.path.dirname, paths)) if paths else ""
    text = json.dumps(facts, ensure_ascii=False)
    if len(folder) > 1:
        text = text.replace(json.dumps(folder, ensure_ascii=False)[1:-1], "")
    return xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))


def _texts(facts: Any) -> Iterator[str]:
    if isinstance(facts, str):
        yield facts
    elif isinstance(facts, list):
        for part in facts:
            yield from _texts(part)


def _are_names(value: Any) -> bool:
    """Return True for a list of texts, and for a map of texts to numbers or back."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(part, str) for part in value)
    if not isinstance(value, dict) or not value:
        return False
    return all({type(key), type(part)} == {str, int} for key, part in value.items())


def _is_dataset(value: Any) -> bool:
    parts = ("__getitem__", "__len__", "__dict__")
    return not hasattr(value, "dtype") and all(hasattr(value, name) for name in parts)


def _is_path(value: Any) -> bool:
    return bool(value) if isinstance(value, str) else hasattr(type(value), "__fspath__")


def _status(path: str) -> os.stat_result | None:
    """Return the status of a file; None for all else: text that is no path, folders, pipes."""
    try:
        status = os.stat(path)  # noqa: PTH116 - of a million files
    except (OSError, ValueError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None
