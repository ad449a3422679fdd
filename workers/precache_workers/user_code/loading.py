"""The user's own code: loaded by name, and refused if it was edited after its import.

A store is data. Functions and factories named by a store are neither searched for nor loaded
unless the user allows it: even the search for ``package.module`` imports ``package``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from precache.errors import PrecacheError, RecipeError, UsageError
from precache.messages import did_you_mean
from precache.recipe.recipe import Recipe
from precache_workers.user_code.identity import Code, Label, code_of, missing_module
from precache_workers.user_code.module_code import Module, plain_code

_loaded: dict[tuple[str, str], tuple[ModuleSpec | None, str]] = {}
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
    return attained


def require_unchanged(name: str) -> None:
    """Raise `RecipeError` if this process runs other code than the files of a name have.

    Workers import the code from its files, and its identity is that of the files. Compared are what
    was loaded before, and the constants, functions and classes that a file binds once.

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
    for module, text in code.texts.items():
        spec = _spec(module)
        before, loaded = _loaded.get((name, module), (None, text))
        if spec is not None and before is spec and loaded != text:
            raise RecipeError(
                f"cannot use {name!r}: {spec.origin} was edited since its import; "
                "restart the process"
            )
        _loaded[name, module] = spec, text
    for (module, bound), (origin, defined, value) in _certain(code).items():
        members, spec = getattr(sys.modules.get(module), "__dict__", {}), _spec(origin)
        found = members.get(bound)
        if (
            not members
            or spec is None
            or _agrees(found, defined, value, code.modules[origin], spec)
        ):
            continue
        there = f"not what {spec.origin} defines as {defined}"
        there = f"but {_short(repr(value[0]))} by {spec.origin}" if value else there
        raise RecipeError(
            f"cannot use {name!r}: {module}.{bound} is {_short(repr(found))} in this process, "
            f"{there}: the file is what workers run. If the file was edited since its "
            f"import, restart the process (if that does not help, remove {spec.cached}). If the "
            "value was set, pass it as a parameter of the function (params={...}), or write it in "
            "the file and restart the process"
        )


def _certain(code: Code) -> dict[Label, tuple[str, str, tuple[Any, ...]]]:
    """Find names whose value is known without running the code, as nothing is seen to change them.

    Returns
    -------
    dict
        Module and name -> the module and name where it is defined, and the value as in `known`.
    """
    statements = [s for module in code.modules.values() for s in module.statements]
    stored = {name for statement in statements for name in statement.stores}
    called = {name for statement in statements for name in statement.methods}
    certain: dict[Label, tuple[str, str, tuple[Any, ...]]] = {}
    imported: dict[Label, Label] = {}
    for module, parsed in code.modules.items():
        for name, binders in parsed.binders.items():
            value = binders[0].known.get(name)
            if len(binders) > 1 or name in stored or (value and name in called):
                continue
            if value is not None and binders[0] in code.counted:
                certain[module, name] = module, name, value
            for bound, source, inner in binders[0].imports:
                imported |= {(module, name): (source, inner)} if bound == name else {}
    return certain | {label: certain[of] for label, of in imported.items() if of in certain}


def _spec(module: str) -> ModuleSpec | None:
    return getattr(sys.modules.get(module), "__spec__", None)


def _agrees(
    found: Any, name: str, value: tuple[Any, ...], module: Module, spec: ModuleSpec
) -> bool:
    """Return False if a value of this process is certainly not what a file binds to a name."""
    if value:
        return _same(found, value[0])
    with contextlib.suppress(ValueError):  # wrappers in a circle
        found = inspect.unwrap(found)
    if type(spec.loader) is not SourceFileLoader:  # others may change the code, as pytest does
        return getattr(found, "__qualname__", "") == name
    parts = vars(found).values() if isinstance(found, type) else [found]
    functions = [getattr(part, "__func__", getattr(part, "fget", part)) for part in parts]
    codes = [plain_code(f.__code__) for f in functions if isinstance(f, FunctionType)]
    names = {code.co_qualname for code in module.codes}  # classes have generated methods, too
    return getattr(found, "__qualname__", "") == name and all(
        code in module.codes for code in codes if code.co_qualname in names
    )


def _same(found: Any, value: Any) -> bool:
    """Compare a value with a constant of a file by types and `repr`, sets in any order."""
    if type(found) is not type(value):
        return False
    if isinstance(value, set):
        return sorted(map(repr, found)) == sorted(map(repr, value))
    if isinstance(value, dict):
        found, value = list(found.items()), list(value.items())
    if isinstance(value, list | tuple):
        return len(found) == len(value) and all(map(_same, found, value))
    return repr(found) == repr(value)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:59]}…"


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
