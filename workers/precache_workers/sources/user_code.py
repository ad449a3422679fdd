"""The user's own code: loaded by name, and reloaded when it changes.

A store is data. Functions and factories named by a store are neither searched for nor loaded
unless the user allows it: even the search for ``package.module`` imports ``package``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import marshal
import os
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

import xxhash

from precache.errors import PrecacheError, RecipeError, UsageError
from precache.messages import did_you_mean
from precache.recipe.recipe import Recipe
from precache.runtime.process_id import process_of
from precache.runtime.usage import CLOCK_TICKS
from precache_workers.sources.code_digest import (
    Code,
    FileState,
    code_digest,
    code_of,
    file_state,
    find_module,
    missing_module,
)
from precache_workers.sources.code_names import canonical

_loaded: dict[str, tuple[FileState, bytes]] = {}
"""Module -> state and source of its file, as this process runs it."""


def require_permission(recipe: Recipe, allowed: bool) -> None:
    """Raise `UsageError` if a recipe from a store names functions and the user did not allow them.

    Parameters
    ----------
    allowed
        True if the user allows functions of stores to run.
    """
    stored = [op for op in recipe.functions if op.store]
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
    """Load the callable ``package.module:attribute`` from the current code of its files.

    A module that it reaches is executed again if its file changed, or that of a module it uses.

    Parameters
    ----------
    code
        Expected `code_digest`; empty for any.

    Raises
    ------
    RecipeError
        The object cannot be loaded or called, or its code has another digest.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise RecipeError(f"cannot load {name!r}: give package.module:name, such as data:Photos")
    try:
        identity = code_of(name)
        with _lock:
            present = set(sys.modules)
            loaded = importlib.import_module(module)
            if identity is not None:
                _bring_up_to_date(identity, present)
        try:
            attained = getattr(loaded, attribute)
        except AttributeError as error:
            why = _why_missing(loaded, module, attribute, str(error))
            raise RecipeError(f"cannot load {name!r}: {why}") from None
    except PrecacheError:
        raise
    except Exception as error:  # whatever the user's module raises when it is imported
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise missing_module(name) from None
        raise RecipeError(f"cannot load {name!r}: {error!r} as {module} was imported") from error
    if not callable(attained):
        kind = type(attained).__name__
        raise RecipeError(f"cannot load {name!r}: it is of type {kind}, which cannot be called")
    if identity is not None and code not in ("", code_digest(name)):  # it may have changed since
        raise RecipeError(
            f"the code of {name!r}, or a package that it uses, is not what it was when the build "
            "began; run the same command again, with the same packages on all nodes"
        )
    return attained


def _why_missing(loaded: Any, module: str, attribute: str, words: str) -> str:
    """Return why a module lacks a name: in its own words, if they say more than the name."""
    members: dict[str, Any] = getattr(loaded, "__dict__", {})
    own = "__getattr__" in members or type(loaded) is not ModuleType
    words = " ".join(words.split())
    words = words if len(words) <= 300 else f"{words[:299]}…"
    if not own or words.strip("'\"") in ("", attribute):
        words = f"there is none in {members.get('__file__') or module}"
    known = [other for other, member in list(members.items()) if callable(member)]
    return words + did_you_mean(attribute, known)


_lock = threading.RLock()


def _bring_up_to_date(code: Code, present: Collection[str]) -> None:
    """Reload modules that may run an older state of their files, and those that import them.

    Parameters
    ----------
    present
        Modules that were already imported before this call.
    """
    paths = {name: path for name in code.modules if (path := _path_of(name)) is not None}
    outdated = {name for name, path in paths.items() if _is_outdated(name, path, name in present)}
    while more := {n for n in paths if code.modules[n] & outdated} - outdated:
        outdated |= more
    for name, path in paths.items():
        state = file_state(path)
        if name in outdated or name not in _loaded or _loaded[name][0] != state:
            source = path.read_bytes()
            if name in outdated:
                exec(_compiled(source, path), sys.modules[name].__dict__)
            _loaded[name] = state, source


def _compiled(source: bytes, path: Path) -> CodeType:
    return compile(source, str(path), "exec", dont_inherit=True)


def _path_of(module: str) -> Path | None:
    """Return the file of an imported module with Python source."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return Path(file) if file.endswith(".py") else None


def _is_outdated(module: str, path: Path, present: bool) -> bool:
    """Return True if a module may run an older state of its file; comments and layout are ignored.

    Modification times are not reliable: copied files keep theirs, and after two edits within one
    second, Python uses the bytecode that it cached from the first.
    """
    state = file_state(path)
    if module in _loaded:
        known, loaded = _loaded[module]
        source = loaded if state == known else path.read_bytes()
        return source != loaded and canonical(ast.parse(source)) != canonical(ast.parse(loaded))
    changed = path.stat().st_ctime_ns
    if present and changed > _began() * 1e9:
        return True
    cached = Path(getattr(sys.modules[module].__spec__, "cached", None) or "")
    if not cached.is_file() or cached.stat().st_ctime_ns > changed:
        return False
    return bool(marshal.loads(cached.read_bytes()[16:]) != _compiled(path.read_bytes(), path))


@functools.cache
def _began() -> float:
    """Return the Unix time of this process's start, at most one clock tick late.

    No module is imported within the first tick. psutil is not used, since its boot time is rounded
    to whole seconds.
    """
    ticks = process_of(os.getpid()).started + 1
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / CLOCK_TICKS
    return time.time() - age


def tree_hash(name: str) -> str:
    """Return XXH3-128 (hex) of the syntax tree of the module in ``module:attribute``.

    Older releases used it as the identity of code. It is empty if the module has no Python source.
    """
    place = find_module(name.partition(":")[0])
    path = Path(place.origin or "") if place is not None else Path()
    return _hash_of(path, file_state(path)) if path.suffix == ".py" else ""


@functools.lru_cache(maxsize=256)
def _hash_of(path: Path, state: FileState) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} does not parse: {error}") from None
    return xxhash.xxh3_128_hexdigest(canonical(tree).encode())
