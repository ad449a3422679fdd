"""Identity of code: a digest of a function or class and of the code that it uses, not run.

- A name stands for the top-level statements that bind it, and for statements that may change its
  value while its module or another module of the user, imported with it, is imported.
- The names that these statements use are followed through imports into all modules of the user.
- An installed package counts by its version; the standard library and precache by name only.
- Comments, layout, docstrings, and annotations that are never evaluated do not count.
- Expressions that use code or files which are known only at run time are listed as unfollowed.
  Files that code reads when it is called are not followed.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import xxhash

import precache
import precache_workers
from precache.errors import RecipeError
from precache_workers.sources.code_names import Chain, Module, Statement, Target

_DYNAMIC_CALLS = {"exec", "eval", "compile", "globals", "__import__"}
_DYNAMIC_MODULES = {"importlib", "pkgutil", "runpy", "subprocess"}
_DYNAMIC_NAMES = {
    "ctypes:CDLL",
    "inspect:getsource",
    "inspect:signature",
    "sys:modules",
    "typing:get_type_hints",
}
_OWN_PACKAGES = tuple(
    Path(package.__file__ or "").parent for package in (precache, precache_workers)
)


@dataclass(frozen=True)
class Code:
    """The identity of a function or class.

    Attributes
    ----------
    modules
        The user's modules that the code reaches: name -> the reached modules that it imports. A
        module comes after its imports, except in an import cycle.
    unfollowed
        Expressions that use code or files which are known only at run time.
    """

    digest: str
    modules: Mapping[str, frozenset[str]]
    unfollowed: tuple[str, ...]


FileState = tuple[int, ...] | None
_Stats = dict[Path, FileState]
_known: dict[str, tuple[list[str], _Stats, Code]] = {}
"""Cache: name -> search path, states of the files and folders that were read, and the identity."""


def code_of(name: str) -> Code | None:
    """Return the identity of ``package.module:attribute``; None if its module has no file."""
    known = _known.get(name)
    if known is not None:
        path, stats, code = known
        if path == sys.path and all(file_state(file) == state for file, state in stats.items()):
            return code
    module, _, attribute = name.partition(":")
    place = find_module(module)
    if place is None or not place.has_location:
        return None
    tracer = _Tracer()
    try:
        with _uncollected():
            code = tracer.trace(module, attribute)
    except RecursionError:
        raise RecipeError(
            f"the code of {name!r} is nested too deeply to be followed; declare a version"
        ) from None
    _known[name] = list(sys.path), tracer.stats, code
    return code


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection, which would traverse all syntax trees on each pass."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def code_digest(name: str) -> str:
    """Return the digest (32 hex digits) of the code of ``package.module:attribute``.

    Raises
    ------
    RecipeError
        The module has no file, or does not parse.
    """
    code = code_of(name)
    if code is None:
        module = name.partition(":")[0]
        if module == "__main__" or (module not in sys.modules and find_module(module) is None):
            raise missing_module(name)
        raise RecipeError(
            f"the module of {name!r} has no source here, which is hashed to notice when it "
            "changes; if it was moved or renamed, name its new place, else declare a version"
        )
    return code.digest


def missing_module(name: str) -> RecipeError:
    """Return the error for ``package.module:attribute`` whose module is not found."""
    module = name.partition(":")[0]
    if module == "__main__":
        return RecipeError(
            f"cannot load {name!r}: workers run another script; put it into a module of its own"
        )
    return RecipeError(
        f"cannot load {name!r}: there is no module {module!r} here; run this in its folder, or "
        "name that folder in PYTHONPATH"
    )


def find_module(name: str) -> ModuleSpec | None:
    """Locate a module without importing the packages that contain it."""
    root, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name, locations = f"{spec.name}.{part}", list(spec.submodule_search_locations)
        try:
            spec = PathFinder.find_spec(name, locations)
        except KeyError:  # a folder without ``__init__.py``, in a package that is not imported yet
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [f"{location}/{part}" for location in locations]
    return spec


def file_state(path: Path) -> FileState:
    """Return times, size and inode of a file or folder; None if it cannot be read.

    The ctime reveals a change even if the mtime was reset.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


@functools.lru_cache(maxsize=4096)
def _parsed(name: str, path: Path, is_package: bool, state: FileState) -> Module:
    return Module(name, path, is_package)


_Fact = str | tuple[str, str] | Statement
"""A label: it is reached. ("in", module): a label of the module is reached. ("may change", label):
a call of the label may change a reached label. A statement: it may change a reached label."""


class _Tracer:
    """Follows names from statement to statement.

    A name resolves to labels: ``module:name`` for the statements that bind the name, ``module`` for
    all statements of a module, ``package==`` for an installed package.
    """

    def __init__(self) -> None:
        self.stats: _Stats = {}
        self._places: dict[str, ModuleSpec | None] = {}
        self._packages: dict[str, str | None] = {}
        self._versions: dict[str, str] = {}
        self._modules: dict[str, Module | None] = {}
        self._hashes: dict[str, str] = {}
        self._broken: dict[str, RecipeError] = {}
        self._resolved: dict[Target, tuple[list[str], set[str]]] = {}
        self._used: dict[Statement, dict[Chain, list[str]]] = {}
        self._unexamined: list[Module] = []
        self._explored: set[str] = set()
        self._then: dict[_Fact, list[_Fact]] = {}
        self._facts: set[_Fact] = set()
        self._left: list[_Fact] = []
        self._entered: set[Statement] = set()
        self._visited: set[str] = set()
        self._unfollowed: set[str] = set()

    def trace(self, module: str, attribute: str) -> Code:
        """Return the identity of an attribute, or of the whole module if no statement binds it."""
        self._import({(module, "")})
        roots = self._follow((module, (attribute,)))
        if module in self._broken:
            raise self._broken[module]
        if roots == [f"{module}:{attribute}"] and self._is_own(module) and not self._bound(*roots):
            self._unfollowed.add(f"{module}:{attribute}, which no statement of its module names")
            roots = self._follow((module, ()))
        while self._left or self._unexamined:
            if self._left:
                self._conclude(self._left.pop())
            else:
                self._examine(self._unexamined.pop())
        labels = sorted(label for label in self._facts if isinstance(label, str))
        entries = [entry for label in labels if (entry := self._entry(label))]
        changes = [statement for statement in self._facts if isinstance(statement, Statement)]
        changes = [statement for statement in changes if not self._is_reached(statement)]
        changes.sort(key=lambda statement: (statement.module, statement.number))
        text = str((roots, entries, [self._text(statement) for statement in changes]))
        modules = {name: frozenset(self._imports(name)) for name in self._in_order()}
        unfollowed = tuple(sorted(self._unfollowed))
        return Code(xxhash.xxh3_128_hexdigest(text.encode()), modules, unfollowed)

    def _follow(self, target: Target) -> list[str]:
        labels, visited = self._resolution(target)
        self._visited |= visited
        self._reach(labels)
        return labels

    def _reach(self, labels: Iterable[str]) -> None:
        for label in labels:
            module = label.partition(":")[0]
            if module in self._broken:
                self._unfollowed.add(f"{module}, which does not parse")
            self._hold(self._group(label))

    def _hold(self, fact: _Fact) -> None:
        if fact not in self._facts:
            self._facts.add(fact)
            self._left.append(fact)

    def _imply(self, cause: _Fact, effect: _Fact) -> None:
        self._then.setdefault(cause, []).append(effect)
        if cause in self._facts:
            self._hold(effect)

    def _conclude(self, fact: _Fact) -> None:
        """Reach the statements of a fact, and add the facts that follow from it."""
        if isinstance(fact, Statement):
            self._enter(fact)
        elif isinstance(fact, str):
            for statement in self._bound(fact):
                self._enter(statement)
            for part in self._parts(fact):
                self._follow(part)
            self._hold(("in", fact.partition(":")[0]))
        for effect in self._then.get(fact, ()):
            self._hold(effect)

    def _enter(self, statement: Statement) -> None:
        """Reach every label that a statement uses."""
        if statement in self._entered:
            return
        self._entered.add(statement)
        self._visited.add(statement.module)
        self._unfollowed |= {f"{text} in {statement.module}" for text in statement.names.unfollowed}
        self._import(statement.names.imported)
        for targets in statement.names.uses.values():
            for target in targets:
                self._visited |= self._resolution(target)[1]
        for chain, labels in self._uses(statement).items():
            self._reach(labels)
            if any(self._is_dynamic(label) for label in labels):
                shown = ast.unparse(statement.names.shown.get(chain) or ast.Name(".".join(chain)))
                self._unfollowed.add(f"{shown[:60]} in {statement.module}")
            elif labels[-1:] and labels[-1].endswith("?") and self._is_imported(statement, chain):
                self._unfollowed.add(f"{labels[-1][:-1]}, which is not found")

    def _is_dynamic(self, label: str) -> bool:
        """Return True if a label is of a function or module whose effects are not followed."""
        module, _, name = label.partition(":")
        root = module.partition(".")[0]
        if root == "builtins" or self._is_own(label):
            return name in _DYNAMIC_CALLS and not self._bound(label)
        return root in _DYNAMIC_MODULES or label in _DYNAMIC_NAMES

    def _is_imported(self, statement: Statement, chain: Chain) -> bool:
        """Return True if only plain imports bind a name; in a function, none in a ``try``."""
        code = self._modules[statement.module]
        binders = code.binders.get(chain[0]) if code is not None else None
        if binders is None:  # bound in a function
            return not any(isinstance(node, ast.Try) for node in ast.walk(statement.node))
        return all(binder.is_import for binder in binders)

    def _entry(self, label: str) -> str:
        """Return the text that identifies a label; empty if nothing is known of it."""
        known = self._versions.get(label) or self._hashes.get(label, "")
        names = [(part, self._labels([part])) for part in self._parts(label)]
        texts = [self._text(statement) for statement in self._bound(label)]
        return str((label, known, names, texts)) if known or names or texts else ""

    def _text(self, statement: Statement) -> str:
        return f"{statement.digest} {sorted(self._uses(statement).items())}"

    def _is_reached(self, statement: Statement) -> bool:
        labels = {statement.module, *(f"{statement.module}:{name}" for name in statement.bound)}
        return not labels.isdisjoint(self._facts)

    # Resolution of names

    def _uses(self, statement: Statement) -> dict[Chain, list[str]]:
        """Return the names that a statement uses, with their labels."""
        uses = self._used.get(statement)
        if uses is None:
            names = statement.names.uses.items()
            uses = {chain: self._labels(targets) for chain, targets in names}
            self._used[statement] = uses
        return uses

    def _labels(self, targets: Iterable[Target]) -> list[str]:
        """Return the distinct labels of names, in order."""
        labels = [label for target in targets for label in self._resolution(target)[0]]
        return list(dict.fromkeys(labels))

    def _resolution(self, target: Target) -> tuple[list[str], set[str]]:
        """Return the labels of a name, and the user's modules that its resolution visited."""
        if target not in self._resolved:
            visited: set[str] = set()
            self._resolved[target] = self._resolve(*target, set(), visited), visited
        return self._resolved[target]

    def _resolve(
        self, module: str, chain: Chain, seen: set[Target], visited: set[str]
    ) -> list[str]:
        if (module, chain) in seen:
            return []
        seen.add((module, chain))
        place = self._place(module)
        full = f"{module}:{'.'.join(chain)}"
        if place is None:
            return [f"{full}?"]
        if self._packages[module] is not None:
            return [full]
        code = self._module(module)
        if module in self._hashes:
            return [full]
        visited.add(module)
        if not chain:
            return [module]
        name, rest = chain[0], chain[1:]
        labels: dict[str, None] = {}
        for binder in code.providers(name) if code is not None else ():
            if isinstance(binder, str):
                if not self._provides(binder, name, set()):
                    continue
                targets: list[Target] = [(binder, (name,))]
                star = self._modules.get(binder)
                if star is not None and star.exports is None and "__all__" in star.binders:
                    targets.append((binder, ("__all__",)))
            else:
                targets = binder.bound[name]
                if not binder.is_import:
                    labels[f"{module}:{name}"] = None
            for target, inside in targets:
                resolved = self._resolve(target, (*inside, *rest), seen, visited)
                labels |= dict.fromkeys(resolved)
        if labels:
            return list(labels)
        inner = f"{module}.{name}"
        if place.submodule_search_locations is not None and self._place(inner) is not None:
            return self._resolve(inner, rest, seen, visited)
        if name == "__dict__":
            return [module]
        if code is not None and "__getattr__" in code.binders and not name.startswith("__"):
            return [f"{module}:__getattr__", f"{module}:{name}"]
        return [f"{module}:{name}"]

    def _provides(self, module: str, name: str, seen: set[str]) -> bool:
        """Return True if a star import of a module binds a name."""
        if module in seen or self._place(module) is None:
            return False
        seen.add(module)
        if self._packages[module] is not None:
            return not hasattr(builtins, name)
        code = self._module(module)
        if code is None:
            return module in self._hashes
        if code.exports is not None:
            return name in code.exports
        if name.startswith("_") and "__all__" not in code.binders:
            return False
        return name in code.binders or any(self._provides(s, name, seen) for _, s in code.stars)

    def _group(self, label: str) -> str:
        """Return the package or module that a label counts as, or the label itself."""
        module = label.partition(":")[0]
        if self._packages.get(module) is not None:
            return f"{module.partition('.')[0]}=="
        return module if module in self._hashes else label

    def _is_own(self, label: str) -> bool:
        """Return True if a label belongs to a module of the user with Python source."""
        return self._modules.get(label.partition(":")[0]) is not None

    # Statements of a label

    def _parts(self, label: str) -> list[Target]:
        """Return all names that a module binds, if the label stands for a whole module."""
        code = self._modules.get(label)
        if code is None:
            return []
        return [
            *((label, (name,)) for name in sorted(code.binders)),
            *((s, ()) for _, s in code.stars),
        ]

    def _bound(self, label: str) -> list[Statement]:
        """Return the statements that bind a name, without imports; for a module, all statements."""
        module, _, name = label.partition(":")
        code = self._modules.get(module)
        if code is None:
            return []
        if not name:
            return code.statements
        return [statement for statement in code.binders.get(name, ()) if not statement.is_import]

    # Effects of statements

    def _examine(self, code: Module) -> None:
        """Record the effects of a module's statements, and parse the modules that it imports."""
        self._import(code.imported)
        for statement in code.statements:
            if not statement.may_have_effects:
                continue
            changed, called = self._changes(statement)
            for label in changed:
                self._imply_change(label, statement)
            for label in called:
                self._explore(label)
                self._imply(("may change", label), statement)

    def _imply_change(self, label: str, effect: _Fact) -> None:
        """Record an effect that holds once the label, which it may change, is reached."""
        module, _, name = label.partition(":")
        self._imply(self._group(label), effect)
        if self._is_own(label):
            self._imply(module if name else ("in", module), effect)

    def _changes(self, statement: Statement) -> tuple[set[str], set[str]]:
        """Return the labels that a statement may change at import, and those that it may call."""
        names = statement.names_at_import
        assigned, used = self._labels(names.assigned), self._labels(names.changed)
        changed = {*assigned, *(label for label in used if not self._is_fixed(label))}
        for label in filter(self._is_variable, assigned):  # it may alias another name
            changed.update(*(used for s in self._bound(label) for used in self._uses(s).values()))
        called = {*assigned, *used}
        for functions, arguments in names.called:
            own = [label for label in self._labels(functions) if self._is_own(label)]
            if own:
                called.update(own)
                called.update(
                    label for label in self._labels(arguments) if self._is_variable(label)
                )
                for name in {chain[-1] for _, chain in functions if len(chain) > 1}:  # of methods
                    changed |= {label for label in own if not label.endswith(f":{name}")}
        called.update(label for label in self._labels(names.bases) if self._has_hooks(label, set()))
        if names.runs_code or "sys:modules" in changed:
            changed.add(statement.module)
        return changed, called

    def _explore(self, label: str) -> None:
        """Find the calls that may change a label: those of functions that reach it."""
        left = [label]
        while left:
            label = left.pop()
            if label in self._explored or not self._is_own(label) or ":" not in label:
                continue
            self._explored.add(label)
            calls = "may change", label
            if self._is_variable(label):
                self._imply_change(label, calls)
            for statement in self._bound(label):
                methods = self._labels(statement.names.methods)
                for changed in [
                    *filter(self._is_class, methods),
                    *self._labels(statement.names.stored),
                ]:
                    self._imply_change(changed, calls)
                for labels in self._uses(statement).values():
                    for used in labels:
                        self._imply(("may change", used), calls)
                    left += labels

    def _is_fixed(self, label: str) -> bool:
        """Return True if only an assignment to its name can change a label."""
        bound = self._bound(label)
        return ":" in label and bool(bound) and all(statement.is_fixed for statement in bound)

    def _is_variable(self, label: str) -> bool:
        """Return True if calls may change a label: it is neither fixed nor a definition."""
        name = label.partition(":")[2]
        return not self._is_fixed(label) and not all(
            statement.defines(name) for statement in self._bound(label) if ":" in label
        )

    def _is_class(self, label: str) -> bool:
        return ":" in label and any(isinstance(s.node, ast.ClassDef) for s in self._bound(label))

    def _has_hooks(self, label: str, seen: set[str]) -> bool:
        """Return True if code of the user runs when a class inherits from this label."""
        if label in seen or ":" not in label:
            return False
        seen.add(label)
        own = [statement.names for statement in self._bound(label)]
        bases = [base for names in own for base in self._labels(names.bases)]
        hooks = any(names.has_hooks for names in own)
        return hooks or any(self._has_hooks(base, seen) for base in bases)

    # Modules

    def _place(self, module: str) -> ModuleSpec | None:
        if module not in self._places:
            self._places[module] = place = find_module(module)
            self._packages[module] = package = None if place is None else _installed(place)
            if package is not None:
                self._versions[f"{module.partition('.')[0]}=="] = package
        return self._places[module]

    def _module(self, name: str) -> Module | None:
        """Return a module of the user; None if it has no readable Python source."""
        if name in self._modules:
            return self._modules[name]
        place = self._places[name]
        self._modules[name] = None
        if place is None or place.origin is None:
            return None
        path = Path(place.origin)
        for watched in (path, path.parent):
            self.stats.setdefault(watched, file_state(watched))
        try:
            if path.suffix == ".py":
                is_package = place.submodule_search_locations is not None
                code = _parsed(name, path, is_package, self.stats[path])
                self._modules[name] = code
                self._unexamined.append(code)
                return code
        except RecipeError as error:
            self._broken[name] = error
        try:
            self._hashes[name] = xxhash.xxh3_128_hexdigest(path.read_bytes())
        except OSError as error:
            self._broken[name] = RecipeError(f"{path} cannot be read: {error}; declare a version")
            self._hashes[name] = ""
        return None

    def _import(self, imported: set[tuple[str, str]]) -> None:
        """Parse those imported modules that belong to the user."""
        for module in sorted({module for pair in imported for module in _with_parents(*pair)}):
            if self._place(module) is not None and self._packages[module] is None:
                self._module(module)

    def _imports(self, name: str) -> set[str]:
        """Return the reached modules that a module imports."""
        code = self._modules.get(name)
        imported = code.imported if code is not None else ()
        modules = {module for pair in imported for module in _with_parents(*pair)}
        return modules & self._visited - {name}

    def _in_order(self) -> Iterator[str]:
        """Return the reached modules, each after those that it imports."""
        seen: set[str] = set()
        left = [(name, False) for name in sorted(self._visited, reverse=True)]
        while left:
            name, entered = left.pop()
            if entered:
                yield name
            elif name not in seen:
                seen.add(name)
                left.append((name, True))
                imported = sorted(self._imports(name), reverse=True)
                left += [(module, False) for module in imported]


def _with_parents(module: str, name: str) -> list[str]:
    """Return a module, its parents, and its submodule of that name, if a name is given."""
    parts = [*module.split("."), *([name] if name else [])]
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _installed(place: ModuleSpec) -> str | None:
    """Return the versions of the packages that may contain a module.

    The text is empty for the standard library and precache; None for a module of the user.
    """
    origin = place.origin or next(iter(place.submodule_search_locations or ()), "")
    path = Path(origin)
    if not path.is_absolute():  # built in, or frozen
        return ""
    root = place.name.partition(".")[0]
    if {"site-packages", "dist-packages"} & set(path.parts):
        return _distributions(root)
    own = any(path.is_relative_to(folder) for folder in _OWN_PACKAGES)
    return "" if own or path.is_relative_to(sysconfig.get_path("stdlib")) else None


@functools.cache
def _distributions(root: str) -> str | None:
    """Return the versions of the packages that install a top-level module; None if none does.

    Faster than `importlib.metadata.packages_distributions`, which parses all metadata.
    """
    try:
        return f"{root}=={importlib.metadata.version(root).split('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        pass
    of_root = re.compile(rf"^{re.escape(root)}([/.].*)?$", re.MULTILINE)
    versions = {
        f"{distribution.name}=={distribution.version.split('+')[0]}"
        for distribution in importlib.metadata.distributions()
        if of_root.search(
            distribution.read_text("top_level.txt") or distribution.read_text("RECORD") or ""
        )
    }
    return ",".join(sorted(versions)) or None
