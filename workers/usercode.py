"""Code of the user's own: loaded by name, and brought up to date when it changes.

What comes out of a store is data. Functions and factories that a store names are neither looked
for nor loaded unless the user allows it, for to look for ``package.module`` imports ``package``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import xxhash

from precache.errors import PipelineError, PrecacheError, UsageError
from precache.liveness import process_of
from precache.pipeline import Pipeline
from workers.code_digest import Code, State, code_of, file_state, find_module
from workers.code_names import canonical

_loaded: dict[str, str] = {}
"""Module -> `_tree_hash` of the code that this process runs."""


def require_permission(pipeline: Pipeline, allowed: bool) -> None:
    """Raise `UsageError` where a recipe came out of a store and names functions.

    Parameters
    ----------
    allowed
        Whether the user lets them run.
    """
    stored = [op for op in pipeline.functions if op.store]
    if stored and not allowed:
        refuse_stored_code([op.function for op in stored], stored[0].store)


def refuse_stored_code(names: Sequence[str], store: str) -> NoReturn:
    """Raise `UsageError` for functions and factories that a store names."""
    shown = ", ".join(repr(name) for name in dict.fromkeys(names))
    raise UsageError(
        f"{store} names code to be run: {shown}. A store is data, and may be a stranger's: look at "
        "this code, and if you trust it, give --run-functions (in Python run_functions=True)"
    )


def load_object(name: str, code: str = "") -> Any:
    """The object that ``package.module:attribute`` names, by the code that its files hold.

    Modules that it reaches are executed again where their files, or modules that they use, changed.

    Parameters
    ----------
    code
        What `code_digest` must be, where given.

    Raises
    ------
    PipelineError
        It cannot be loaded, or its code is another.
    """
    module, _, attribute = name.partition(":")
    try:
        found = code_of(name)
        with _lock:
            present = set(sys.modules)
            loaded = importlib.import_module(module)
            if found is not None:
                _bring_up_to_date(found, present)
        attained = getattr(loaded, attribute)
    except PrecacheError:
        raise
    except Exception as error:  # whatever the user's module raises when it is imported
        raise PipelineError(
            f"cannot load {name!r}: {error}; give package.module:name, importable from "
            f"{sys.path[0] or 'the current folder'}"
        ) from None
    if found is not None and code not in ("", found.digest):
        raise PipelineError(
            f"the code of {name!r}, or a package that it uses, is not what it was when the build "
            "began; run the same command again, with the same packages on all nodes"
        )
    return attained


_lock = threading.RLock()


def _bring_up_to_date(code: Code, present: Collection[str]) -> None:
    """Execute modules again that changed since this process imported them, or that use such.

    Parameters
    ----------
    present
        Modules that had been imported before.
    """
    hashes = {name: tree_hash(name) for name in code.modules if name in sys.modules}
    changed = {
        name
        for name, found in hashes.items()
        if (found != _loaded[name] if name in _loaded else name in present and _is_newer(name))
    }
    while more := {n for n in hashes if code.modules[n] & changed} - changed:
        changed |= more
    for name in code.modules:
        if name in changed and name in present and _source_of(name) is not None:
            _run_again(sys.modules[name])
    _loaded.update(hashes)


def _is_newer(module: str) -> bool:
    """Whether a module's file changed after this process began, and so perhaps after its import.

    Its modification time may be older: copies of files keep it.
    """
    path = _source_of(module)
    return path is not None and path.stat().st_ctime > _began()


@functools.cache
def _began() -> float:
    """Unix time of this process's start, a clock tick late at most.

    Of what it runs, nothing is imported within a tick. The time of boot, which psutil adds to the
    ticks since, is told to whole seconds only.
    """
    ticks = process_of(os.getpid()).started + 1
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _run_again(module: ModuleType) -> None:
    """Bring a module up to its file; `importlib.reload` may take an outdated cached one for it."""
    path = Path(str(module.__file__))
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)


def tree_hash(module: str) -> str:
    """XXH3-128 (hex) of a module's syntax tree; empty for a module without Python source."""
    path = _source_of(module)
    if path is None:
        return ""
    return _hash_of(path, file_state(path))


def _source_of(module: str) -> Path | None:
    place = find_module(module)
    found = place is not None and place.origin is not None and place.origin.endswith(".py")
    return Path(str(place.origin)) if place is not None and found else None


@functools.lru_cache(maxsize=256)
def _hash_of(path: Path, state: State) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        raise PipelineError(f"{path} does not parse: {error}") from None
    return xxhash.xxh3_128_hexdigest(canonical(tree).encode())
