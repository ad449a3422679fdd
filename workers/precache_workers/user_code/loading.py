"""The user's own code: loaded by name, and refused if it was edited after its import.

A store is data. Functions and factories named by a store are neither searched for nor loaded
unless the user allows it: even the search for ``package.module`` imports ``package``.
"""

from __future__ import annotations

import ast
import gc
import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from precache.errors import PrecacheError, RecipeError, UsageError
from precache.messages import did_you_mean
from precache.recipe.recipe import Recipe
from precache_workers.user_code.identity import Code, code_of, missing_module
from precache_workers.user_code.module_code import Statement, is_part_store, plain_code

_loaded: dict[tuple[str, str], tuple[ModuleSpec, str]] = {}
"""Name and module -> the module's spec, which a reload replaces, and what counted of it."""
_lock = threading.RLock()


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
    """Load the callable ``package.module:attribute``.

    Parameters
    ----------
    code
        Expected `code_digest`; empty for any.

    Raises
    ------
    RecipeError
        The object cannot be loaded or called, its code has another digest, or this process runs an
        older state of a module that it reaches.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise RecipeError(f"cannot load {name!r}: give package.module:name, such as data:Photos")
    try:
        identity = code_of(name)
        with _lock:
            loaded = importlib.import_module(module)
            if identity is not None:
                if code not in ("", identity.digest):
                    raise RecipeError(
                        f"the code of {name!r}, or a package that it uses, is not what it was when "
                        "the build began; run the same command again, with the same packages on "
                        "all nodes"
                    )
                _compare(name, identity)
        try:
            attained = getattr(loaded, attribute)
        except AttributeError as error:
            parsed = identity and identity.modules.get(module)
            spec = getattr(loaded, "__spec__", None)
            if parsed and spec and attribute in parsed.binders:
                raise _edited(name, spec) from None
            members = getattr(loaded, "__dict__", {})
            known = [other for other, member in members.items() if callable(member)]
            why = f"there is none in {members.get('__file__') or module} ({_short(str(error))})"
            hint = did_you_mean(attribute, known)
            raise RecipeError(f"cannot load {name!r}: {why}{hint}") from None
    except PrecacheError:
        raise
    except Exception as error:  # whatever the user's module raises when it is imported
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise missing_module(name) from None
        raise RecipeError(f"cannot load {name!r}: {error!r} as {module} was imported") from error
    if not callable(attained):
        kind = type(attained).__name__
        raise RecipeError(f"cannot load {name!r}: it is of type {kind}, which cannot be called")
    return attained


def require_unchanged(name: str) -> None:
    """Raise `RecipeError` if this process runs other code than the files of a name have.

    Workers import the code from its files, and its identity is that of the files. Compared are what
    was loaded before, and the functions and constants of what was imported otherwise.

    Parameters
    ----------
    name
        ``package.module:attribute``. Modules that are not imported yet are as their files.
    """
    identity = code_of(name)
    if identity is not None:
        with _lock:
            _compare(name, identity)


def _compare(name: str, code: Code) -> None:
    """Raise `RecipeError` if this process runs other code than the files of a name have."""
    stores = [n for m in code.modules.values() for s in m.statements for n in s.nodes]
    stored = {n.attr for n in stores if isinstance(n, ast.Attribute) and is_part_store(n)}
    functions: list[FunctionType] = []
    for module, text in code.texts.items():
        loaded, parsed = sys.modules.get(module), code.modules[module]
        spec: ModuleSpec | None = getattr(loaded, "__spec__", None)
        if loaded is None or spec is None:
            continue
        for bound, binders in parsed.binders.items():
            if len(binders) == 1 and binders[0] in code.counted and bound not in stored:
                _require_constant(name, loaded, spec, bound, binders[0])
        before, seen = _loaded.get((name, module), (None, ""))
        edited = seen != text
        if before is not spec:
            functions = functions or [f for f in gc.get_objects() if type(f) is FunctionType]
            own = [f.__code__ for f in functions if f.__globals__ is vars(loaded)]
            names = {c.co_qualname for c in parsed.codes}  # others were made of them
            own = [c for c in own if c.co_filename == spec.origin and c.co_qualname in names]
            # Other loaders may change the code, as that of pytest does.
            is_plain = type(spec.loader) is SourceFileLoader
            edited = is_plain and not parsed.codes.issuperset(map(plain_code, own))
        if edited:
            raise _edited(name, spec)
        _loaded[name, module] = spec, text


def _require_constant(
    name: str, loaded: ModuleType, spec: ModuleSpec, bound: str, statement: Statement
) -> None:
    """Raise `RecipeError` if a module has another value than a constant that its file binds."""
    if statement.constant is None:
        return
    value = eval(compile(ast.Expression(statement.constant), "", "eval"))
    found = vars(loaded).get(bound)
    if (type(found), repr(found)) != (type(value), repr(value)):
        raise RecipeError(
            f"cannot use {name!r}: {loaded.__name__}.{bound} is {_short(repr(found))} in this "
            f"process, but {_short(repr(value))} by {loaded.__file__}, which workers run: "
            "restart the process if the file was edited (if that does not help, remove "
            f"{spec.cached}); a value that was set, pass as a parameter of the function "
            "(params={...}), or write it in the file"
        )


def _edited(name: str, spec: ModuleSpec) -> RecipeError:
    return RecipeError(
        f"cannot use {name!r}: {spec.origin} was edited since its import; restart the process (if "
        f"that does not help, remove {spec.cached})"
    )


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:99]}…"
