"""Code of the user's own: loaded by name, and hashed to notice when it changes.

What comes out of a store is data. Functions and factories that a store names are neither looked
for nor loaded unless the user allows it, for to look for ``package.module`` imports ``package``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import xxhash

from precache.errors import PipelineError, PrecacheError, UsageError
from precache.liveness import process_of
from precache.pipeline import Pipeline

_loaded: dict[str, str] = {}
"""Module -> hash of the code that this process runs."""


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
    """The object that ``package.module:attribute`` names, by the code that its file holds.

    Parameters
    ----------
    code
        What `module_hash` must be, where given.

    Raises
    ------
    PipelineError
        It cannot be loaded, or its module is not that code any more.
    """
    module, _, attribute = name.partition(":")
    try:
        present = module in sys.modules
        loaded = importlib.import_module(module)
        found = code_of(name)
        known = _loaded.get(module)
        if known not in (None, found) or (known is None and present and _is_newer(module)):
            _run_again(loaded)
        _loaded[module] = found
        attained = getattr(loaded, attribute)
    except PrecacheError:
        raise
    except Exception as error:  # whatever the user's module raises when it is imported
        raise PipelineError(
            f"cannot load {name!r}: {error}; give package.module:name, importable from "
            f"{sys.path[0] or 'the current folder'}"
        ) from None
    if code not in ("", found):
        raise PipelineError(
            f"the module of {name!r} changed while the build ran; run the same command again"
        )
    return attained


def _is_newer(module: str) -> bool:
    """Whether a module's file changed after this process began, and so perhaps after its import."""
    path = _source_of(module)
    return path is not None and path.stat().st_mtime > _began()


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


def module_hash(name: str) -> str:
    """XXH3-128 (hex) of the syntax tree of the module of ``package.module:attribute``.

    Comments and layout do not count; the same over the supported releases of Python.

    Raises
    ------
    PipelineError
        The module has no Python source, or one that does not parse.
    """
    found = code_of(name)
    if not found:
        raise PipelineError(
            f"cannot find the source of {name!r}, which is hashed to notice when it changes; "
            "make its module importable, or declare a version"
        )
    return found


def code_of(name: str) -> str:
    """`module_hash`, empty for a module without Python source."""
    path = _source_of(name.partition(":")[0])
    if path is None:
        return ""
    status = path.stat()
    return _hash_of(path, status.st_mtime_ns, status.st_size)


def _source_of(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    found = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return Path(str(spec.origin)) if spec is not None and found else None


@functools.lru_cache(maxsize=256)
def _hash_of(path: Path, mtime_ns: int, size: int) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise PipelineError(f"{path} does not parse: {error}") from None
    return xxhash.xxh3_128_hexdigest(_canonical(tree).encode())


def _canonical(node: Any) -> str:
    """A dump without what releases of Python add or leave out: positions, empty fields."""
    if isinstance(node, ast.AST):
        parts = [
            f"{name}={_canonical(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != [] and name not in ("ctx", "type_comment", "kind")
        ]
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    return repr(node)
