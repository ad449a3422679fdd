"""Identity of code: a digest of a function or class and of what it reaches, without running any.

A name of a module stands for the top-level statements that bind it or may change what it holds. The
names that these use are followed through imports, into all modules of the user's own. Of an
installed package the version counts; of Python's library and of precache itself, the name alone.
Comments, layout and docstrings do not count. Files that code reads are not followed.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import symtable
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import xxhash

from precache.errors import PipelineError

Chain = tuple[str, ...]
"""A dotted name, such as ``("np", "random", "choice")``."""
Target = tuple[str, Chain]
"""A module, and a dotted name in it; without one, all of the module."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_IMPORT_CALL = "import_module"
_DYNAMIC = {"exec", "eval", "globals", "__import__", _IMPORT_CALL}
_OWN_PACKAGES = Path(__file__).parents[1]


@dataclass(frozen=True)
class Code:
    """The identity of a function or class.

    Attributes
    ----------
    modules
        The user's own modules that it reaches, by name, with those that each uses. A module comes
        after those that it uses, import cycles apart.
    unfollowed
        Expressions that reach code which cannot be known without running it.
    """

    digest: str
    modules: Mapping[str, frozenset[str]]
    unfollowed: tuple[str, ...]


_Stats = dict[Path, tuple[int, int] | None]
_known: dict[str, tuple[list[str], _Stats, Code]] = {}
"""Name -> search path, state of the files and folders that were read, and what was found."""


def code_of(name: str) -> Code | None:
    """The identity of ``package.module:attribute``; None if its module has no file."""
    found = _known.get(name)
    if found is not None:
        path, stats, code = found
        if path == sys.path and all(_stat(each) == stat for each, stat in stats.items()):
            return code
    module, _, attribute = name.partition(":")
    place = find_module(module)
    if place is None or not place.has_location:
        return None
    tracer = _Tracer()
    code = tracer.trace(module, attribute)
    _known[name] = list(sys.path), tracer.stats, code
    return code


def code_digest(name: str) -> str:
    """Digest (32 hex digits) of the code of ``package.module:attribute``.

    Raises
    ------
    PipelineError
        The module has no file, or does not parse.
    """
    code = code_of(name)
    if code is None:
        raise PipelineError(
            f"cannot find the source of {name!r}, which is hashed to notice when it changes; "
            "make its module importable, or declare a version"
        )
    return code.digest


def find_module(name: str) -> ModuleSpec | None:
    """Where a module is, found without importing the packages that it is in."""
    root, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec


def canonical(node: Any, docstrings: bool = False) -> str:
    """A dump without what releases of Python add or leave out: positions, empty fields."""
    if isinstance(node, ast.AST):
        fields = dict(ast.iter_fields(node))
        if not docstrings and isinstance(node, _DEFINITIONS):
            fields["body"] = fields["body"][ast.get_docstring(node) is not None :]
        if not docstrings and isinstance(node, ast.JoinedStr):  # some releases add empty parts
            fields["values"] = [each for each in node.values if getattr(each, "value", None) != ""]
        parts = [
            f"{name}={canonical(value, docstrings)}"
            for name, value in fields.items()
            if value is not None and value != [] and name not in ("ctx", "type_comment", "kind")
        ]
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        return f"[{','.join(canonical(each, docstrings) for each in node)}]"
    return repr(node)


def _stat(path: Path) -> tuple[int, int] | None:
    """Modification time and size of a file or folder."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class _Statement:
    """A top-level statement of a module.

    Attributes
    ----------
    bound
        Names that it binds.
    imports
        Of these, the ones that are imported, with where from.
    touched
        Names whose values it may change otherwise.
    """

    def __init__(self, node: ast.stmt, package: str) -> None:
        self.node = node
        self.is_import = isinstance(node, _IMPORTS)
        self._package = package
        self.imports: dict[str, set[Target]] = {}
        self.touched: set[str] = set()
        for each in _outside_functions(node):
            if isinstance(each, _IMPORTS):
                for alias, target in _targets(each, package):
                    self.imports.setdefault(alias, set()).add(target)
        if isinstance(node, _DEFINITIONS):
            self.bound = {node.name}
            decorators = [_names(each) for each in node.decorator_list]
            self.touched = {name for names in decorators for name in names}
        elif self.is_import:
            self.bound = set(self.imports)
        else:
            top = _tables(node)[0].get_symbols()
            self.bound = {each.get_name() for each in top if each.is_assigned()}
            self.bound |= self.imports.keys()
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.touched = {name for each in targets for name in _names(each)}
            else:
                self.touched = {each.get_name() for each in top if each.is_referenced()}

    @functools.cached_property
    def text(self) -> str:
        return canonical(self.node)

    @functools.cached_property
    def uses(self) -> set[Chain]:
        """Names of the module that it uses, in functions and classes too."""
        used = set()
        for number, table in enumerate(_tables(self.node)):
            for symbol in table.get_symbols():
                outer = number == 0 or table.get_type() == "class"
                if symbol.is_global() or (outer and symbol.is_referenced()):
                    used.add(symbol.get_name())
        chains = {chain for chain in _chains(self.node) if chain[0] in used}
        return chains | {(name,) for name in used - {chain[0] for chain in chains}}

    @functools.cached_property
    def inner_targets(self) -> dict[Chain, Target]:
        """What its functions import themselves, as they use it."""
        outer = {id(each) for each in _outside_functions(self.node)}
        found: dict[str, set[Target]] = {}
        for each in ast.walk(self.node):
            if isinstance(each, _IMPORTS) and id(each) not in outer:
                for alias, target in _targets(each, self._package):
                    found.setdefault(alias, set()).add(target)
        targets = {}
        for chain in _chains(self.node):
            for number, (module, inside) in enumerate(sorted(found.get(chain[0], ()))):
                targets[(str(number), *chain)] = module, (*inside, *chain[1:])
        for number, each in enumerate(self._dynamic_calls):
            if (name := _constant(each)) is not None:
                targets[("import", str(number))] = name, ()
        return targets

    @functools.cached_property
    def unfollowed(self) -> list[str]:
        return [ast.unparse(each)[:60] for each in self._dynamic_calls if _constant(each) is None]

    @functools.cached_property
    def _dynamic_calls(self) -> list[ast.Call]:
        return list(_dynamic_calls(self.node))


class _Module:
    """The top-level statements of a module of the user's own, by the names that they concern."""

    def __init__(self, name: str, path: Path, is_package: bool) -> None:
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            raise PipelineError(f"{path} does not parse: {error}") from None
        self.package = name if is_package else name.rpartition(".")[0]
        body = tree.body[ast.get_docstring(tree) is not None :]
        body = [node for node in body if not _is_main_guard(node)]
        self.statements = [_Statement(node, self.package) for node in body]
        self.stars = [
            _from(node, self.package)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        ]
        self.bound: dict[str, list[_Statement]] = {}
        for each in self.statements:
            for bound in each.bound:
                self.bound.setdefault(bound, []).append(each)

    @functools.cached_property
    def touched(self) -> dict[str, list[_Statement]]:
        """Names of variables and classes, with the statements that may change their values.

        A call may change the variables that the module's functions use.
        """
        variables = {
            name
            for name, bound in self.bound.items()
            if any(not isinstance(each.node, (*_DEFINITIONS, *_IMPORTS)) for each in bound)
        }
        found: dict[str, list[_Statement]] = {}
        for each in self.statements:
            names, left = set[str](), set(each.touched)
            while left:
                name = left.pop()
                names.add(name)
                for definition in self.bound.get(name, ()):
                    if isinstance(definition.node, _DEFINITIONS):
                        left |= {chain[0] for chain in definition.uses} - names
            direct = set[str]() if isinstance(each.node, _DEFINITIONS) else each.touched
            for name in (direct | names & variables) - each.bound:
                found.setdefault(name, []).append(each)
        return found

    def about(self, name: str | None) -> list[_Statement]:
        """Statements that decide a name's value, in order; all where no name is given."""
        if name is None:
            return self.statements
        chosen = {id(each) for each in self.bound.get(name, [])}
        chosen |= {id(each) for each in self.touched.get(name, [])}
        return [each for each in self.statements if id(each) in chosen]


@functools.lru_cache(maxsize=1024)
def _parsed(name: str, path: Path, is_package: bool, stat: tuple[int, int] | None) -> _Module:
    return _Module(name, path, is_package)


class _Tracer:
    """Follows names from one definition to the next."""

    def __init__(self) -> None:
        self.stats: _Stats = {}
        self._entries: dict[str, str] = {}
        self._uses: dict[str, set[str]] = {}
        self._left: list[tuple[str, str | None]] = []
        self._places: dict[str, ModuleSpec | None] = {}
        self._packages: dict[str, str | None] = {}
        self._modules: dict[str, _Module] = {}
        self._unfollowed: set[str] = set()

    def trace(self, module: str, attribute: str) -> Code:
        """The identity of a module's attribute, or of the whole module where it has none such."""
        roots = self._resolve("", module, (attribute,), set())
        if not roots:
            self._unfollowed.add(f"{module}:{attribute}, which no statement of its module names")
            roots = self._resolve("", module, (), set())
        self._entries[""] = str(sorted(roots))
        while self._left:
            self._enter(*self._left.pop())
        digest = xxhash.xxh3_128_hexdigest(str(sorted(self._entries.items())).encode())
        modules = {name: frozenset(self._uses[name]) for name in self._in_order()}
        return Code(digest, modules, tuple(sorted(self._unfollowed)))

    def _enter(self, module: str, name: str | None) -> None:
        label = _label(module, name)
        if label in self._entries:
            return
        self._entries[label] = ""
        parts = []
        for each in self._module(module).about(name):
            parts.append("" if each.is_import else each.text)
            chains = each.uses if not each.is_import else {(bound,) for bound in each.bound}
            targets = {chain: (module, chain) for chain in chains} | each.inner_targets
            for chain, target in sorted(targets.items()):
                found = self._resolve(module, *target, set())
                if found:
                    parts.append(f"{'.'.join(chain)}={sorted(found)}")
            self._unfollowed |= {f"{text} in {module}" for text in each.unfollowed}
        if name is None:
            stars = self._module(module).stars
            parts += [str(sorted(self._resolve(module, star, (), set()))) for star in stars]
        self._entries[label] = "\n".join(parts)

    def _resolve(self, user: str, module: str, chain: Chain, seen: set[Target]) -> set[str]:
        """Labels of what a dotted name of a module stands for; that is noted to be followed."""
        if (module, chain) in seen:
            return set()
        seen.add((module, chain))
        place = self._place(module)
        if place is None:
            return {f"{module}:{'.'.join(chain)}?"}
        packages = self._packages[module]
        if packages is not None:
            self._entries[f"{module.partition('.')[0]}=="] = packages
            return {f"{module}:{'.'.join(chain)}"}
        if place.origin is not None and place.origin.endswith(tuple(EXTENSION_SUFFIXES)):
            self._entries[module] = xxhash.xxh3_128_hexdigest(self._path(place).read_bytes())
            return {f"{module}:{'.'.join(chain)}"}
        code = None
        if place.origin is not None:
            try:
                code = self._module(module)
            except PipelineError:
                if not user:
                    raise
                self._unfollowed.add(f"{module}, which does not parse")
                self._entries[module] = xxhash.xxh3_128_hexdigest(self._path(place).read_bytes())
                return {module}
        if not chain:
            self._reach(user, module)
            if code is not None:
                self._left.append((module, None))
            return {_label(module, None)}
        name, rest = chain[0], chain[1:]
        if code is not None and name in code.bound:
            self._reach(user, module)
            found: set[str] = set()
            for each in code.bound[name]:
                for target, inside in sorted(each.imports.get(name, ())):
                    found |= self._resolve(module, target, (*inside, *rest), seen)
            if not all(each.is_import for each in code.about(name)):
                self._left.append((module, name))
                found.add(_label(module, name))
            return found
        inner = f"{module}.{name}"
        if place.submodule_search_locations is not None and self._place(inner) is not None:
            return self._resolve(user, inner, rest, seen)
        if code is None:
            return set()
        if code.stars or "__getattr__" in code.bound:
            self._reach(user, module)
        for star in code.stars:
            found = self._resolve(module, star, chain, seen)
            if found:
                return found
        if "__getattr__" in code.bound and user != module:
            return self._resolve(module, module, ("__getattr__",), seen)
        return set()

    def _place(self, module: str) -> ModuleSpec | None:
        if module not in self._places:
            self._places[module] = place = find_module(module)
            self._packages[module] = None if place is None else _installed(place)
        return self._places[module]

    def _path(self, place: ModuleSpec) -> Path:
        path = Path(str(place.origin))
        for each in (path, path.parent):
            self.stats.setdefault(each, _stat(each))
        return path

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            place = self._place(name)
            assert place is not None  # it was found before it was noted
            path, is_package = self._path(place), place.submodule_search_locations is not None
            self._modules[name] = _parsed(name, path, is_package, self.stats[path])
        return self._modules[name]

    def _reach(self, user: str, module: str) -> None:
        self._uses.setdefault(module, set())
        if user not in ("", module):
            self._uses[user].add(module)

    def _in_order(self) -> Iterator[str]:
        """The modules, each after those that it uses."""
        seen: set[str] = set()
        left = [(name, False) for name in sorted(self._uses, reverse=True)]
        while left:
            name, entered = left.pop()
            if entered:
                yield name
            elif name not in seen:
                seen.add(name)
                left.append((name, True))
                left += [(each, False) for each in sorted(self._uses[name], reverse=True)]


def _label(module: str, name: str | None) -> str:
    return module if name is None else f"{module}:{name}"


def _installed(place: ModuleSpec) -> str | None:
    """Versions of the installed packages that a module may be of, empty for Python's library.

    None for a module of the user's own.
    """
    origin = place.origin or next(iter(place.submodule_search_locations or ()), "")
    path = Path(origin)
    if not path.is_absolute():  # built in, or frozen
        return ""
    root = place.name.partition(".")[0]
    if {"site-packages", "dist-packages"} & set(path.parts):
        return _distributions(root)
    own = root in ("precache", "workers") and path.is_relative_to(_OWN_PACKAGES / root)
    return "" if own or path.is_relative_to(sysconfig.get_path("stdlib")) else None


@functools.cache
def _distributions(root: str) -> str | None:
    version = importlib.metadata.version
    try:
        return f"{root}=={version(root).split('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        names = set(importlib.metadata.packages_distributions().get(root, ()))
        return ",".join(f"{n}=={version(n).split('+')[0]}" for n in sorted(names)) or None


def _tables(node: ast.stmt) -> list[symtable.SymbolTable]:
    """The scopes of a statement, that of the module first."""
    source = ast.unparse(ast.Module([node], []))
    tables = [symtable.symtable(source, "<statement>", "exec")]
    for table in tables:
        tables += table.get_children()
    return tables


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and what of it runs in the module's scope."""
    yield node
    if not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
        for each in ast.iter_child_nodes(node):
            yield from _outside_functions(each)


def _chains(node: ast.AST) -> Iterator[Chain]:
    """Dotted names, as long as they are."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        yield (node.id, *reversed(names))
    for each in ast.iter_child_nodes(node):
        yield from _chains(each)


def _names(node: ast.AST) -> set[str]:
    return {chain[0] for chain in _chains(node)}


def _targets(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, Target]]:
    """The names that an import binds, and where each is from."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            if alias.name != "*":
                yield alias.asname or alias.name, (_from(node, package), (alias.name,))
        elif alias.asname:
            yield alias.asname, (alias.name, ())
        else:
            root = alias.name.partition(".")[0]
            yield root, (root, ())


def _from(node: ast.ImportFrom, package: str) -> str:
    """The module that names are imported from."""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def _dynamic_calls(node: ast.AST) -> Iterator[ast.Call]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            plain = isinstance(each.func, ast.Name) and each.func.id in _DYNAMIC
            if plain or (isinstance(each.func, ast.Attribute) and each.func.attr == _IMPORT_CALL):
                yield each


def _constant(call: ast.Call) -> str | None:
    """The module that a call imports by a constant name."""
    name = call.args[0] if len(call.args) == 1 and not call.keywords else None
    text = name.value if isinstance(name, ast.Constant) else None
    called = call.func.id if isinstance(call.func, ast.Name) else _IMPORT_CALL
    imports = called in (_IMPORT_CALL, "__import__")
    return text if imports and isinstance(text, str) and not text.startswith(".") else None


def _is_main_guard(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and not node.orelse
        and isinstance(node.test, ast.Compare)
        and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")
    )
