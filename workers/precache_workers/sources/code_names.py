"""Names that each top-level statement of a Python module binds, uses and may change.

The code is parsed, not run. Docstrings, and annotations that are never evaluated, are left out.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from precache.errors import RecipeError

Chain = tuple[str, ...]
"""A dotted name, such as ``("np", "random", "choice")``."""
Target = tuple[str, Chain]
"""A module, and a dotted name in it; an empty name stands for the whole module."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_IMPORTS = (ast.Import, ast.ImportFrom)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CAPTURES = (ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping)
_BLOCKS = (ast.stmt, ast.match_case)
_WITHOUT_NAMES = {"ctx", "op", "ops", "id", "attr", "arg", "kind", "type_comment", "level"}
_IMPORT_CALLS = {"import_module", "__import__"}
_NAMESPACES = {"exec", "eval", "globals", "locals", "vars"}
"""Built-in functions that may bind any name of a module when it is imported."""
_INTROSPECTION = {"__annotations__", "__doc__", "__globals__", "__subclasses__"}
_READERS = {"fromfile", "load", "loadtxt", "open", "read_bytes", "read_text"}
_FIXED = {"Path", "compile", "frozenset", "getLogger"}
"""Calls whose results cannot change, or do not affect what is computed."""
_LITERALS = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.Load)

LATER, NOW, EFFECT = range(3)
"""Time of evaluation: in a call; at import; at import, with the value unused."""


def canonical(tree: ast.AST) -> str:
    """Dump a tree without positions and empty fields, alike in all releases of Python."""
    text: list[str] = []
    left: list[Any] = [tree]
    while left:
        node = left.pop()
        kind = type(node)
        if kind is str:  # a finished part; the tree holds its own strings in `Constant` nodes
            text.append(node)
        elif kind is ast.Name:
            text.append(f"Name(id={node.id!r})")
        elif kind is ast.Constant:
            text.append("Constant()" if node.value is None else f"Constant(value={_shown(node)})")
        elif kind is list:
            parts: list[Any] = ["["]
            for item in node:
                parts += (item if isinstance(item, ast.AST) else repr(item), ",")
            parts[-1:] = ["]"] if node else ["[", "]"]
            left += reversed(parts)
        else:
            parts = [f"{kind.__name__}("]
            for name in kind._fields:
                value = getattr(node, name, None)
                if value is None or value == [] or name in ("ctx", "type_comment", "kind"):
                    continue
                held = isinstance(value, ast.AST | list)
                parts += (f"{name}=", value if held else repr(value), ",")
            parts[-1:] = [")"] if len(parts) > 1 else [parts[0], ")"]
            left += reversed(parts)
    return "".join(text)


def _shown(constant: ast.Constant) -> str:
    try:
        return repr(constant.value)
    except ValueError:  # the integer has too many digits
        return hex(constant.value)  # type: ignore[arg-type]


class Module:
    """The top-level statements of a module.

    Attributes
    ----------
    binders
        Name -> the statements that bind it.
    stars
        Star imports: the number of the statement, and the module.
    imported
        Pairs of an imported module and a name in it that may be a submodule, empty for none.

    Raises
    ------
    RecipeError
        The file cannot be read or parsed.
    """

    def __init__(self, name: str, path: Path, is_package: bool) -> None:
        try:
            source = path.read_bytes()
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RecipeError(f"{path} does not parse: {error}") from None
        package = name if is_package else name.rpartition(".")[0]
        tree.body = [node for node in tree.body if not _is_main_guard(node)]
        _tidy(tree, False)
        has_globals = re.search(rb"^\s+global\s", source, re.MULTILINE) is not None
        self.statements = [
            Statement(node, name, package, number, has_globals)
            for number, node in enumerate(tree.body)
        ]
        self.binders: dict[str, list[Statement]] = {}
        self.stars: list[tuple[int, str]] = []
        self.imported: set[tuple[str, str]] = set()
        for statement in self.statements:
            for bound in statement.bound:
                self.binders.setdefault(bound, []).append(statement)
            for node in _run_at_import(statement.node):
                if isinstance(node, _IMPORTS):
                    self.imported |= _imported(node, package)
                if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                    self.stars.append((statement.number, _from(node, package)))

    def providers(self, name: str) -> list[Statement | str]:
        """Return statements that bind a name, and modules of star imports that may, in order."""
        providers: list[tuple[int, Statement | str]] = [*self.stars]
        providers += [(statement.number, statement) for statement in self.binders.get(name, ())]
        return [provider for _, provider in sorted(providers, key=lambda pair: pair[0])]

    @functools.cached_property
    def exports(self) -> frozenset[str] | None:
        """Names in ``__all__``; None if it is missing or not one literal."""
        statements = self.binders.get("__all__", [])
        node = statements[0].node if len(statements) == 1 else None
        value = node.value if isinstance(node, ast.Assign) else None
        items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        names = [item.value for item in items if isinstance(item, ast.Constant)]
        return frozenset(map(str, names)) if len(names) == len(items) else None


class Statement:
    """A top-level statement of a module."""

    def __init__(
        self, node: ast.stmt, module: str, package: str, number: int, has_globals: bool
    ) -> None:
        self.node = node
        self.module = module
        self.number = number
        self._package = package
        self._has_globals = has_globals
        self.is_import = isinstance(node, _IMPORTS)

    @functools.cached_property
    def bound(self) -> dict[str, list[Target]]:
        """Names that it binds, ``global`` ones included, with the targets of imported names."""
        if self._has_globals:
            return self.names.bound
        if isinstance(self.node, _DEFINITIONS) and not self.may_have_effects:
            return {self.node.name: []}
        return self.names_at_import.bound

    @property
    def may_have_effects(self) -> bool:
        """True if it may change more at import than the names that it binds."""
        node = self.node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            outside = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
            return not all(value is None or isinstance(value, ast.Constant) for value in outside)
        return not self.is_import and not self.is_fixed

    @functools.cached_property
    def is_fixed(self) -> bool:
        """True if it binds names to values that count as immutable."""
        node = self.node
        if not isinstance(node, ast.Assign):
            return False
        called = _chain(node.value.func) if isinstance(node.value, ast.Call) else None
        return all(isinstance(target, ast.Name) for target in node.targets) and (
            (called is not None and called[-1] in _FIXED)
            or all(isinstance(part, _LITERALS) for part in ast.walk(node.value))
        )

    def defines(self, name: str) -> bool:
        return isinstance(self.node, _DEFINITIONS) and self.node.name == name

    @functools.cached_property
    def digest(self) -> str:
        """XXH3-128 (hex) of its code; empty for an import, whose names are resolved instead."""
        text = "" if self.is_import else canonical(self.names.node)
        return text and xxhash.xxh3_128_hexdigest(text.encode())

    @functools.cached_property
    def names(self) -> Names:
        return Names(self.node, self.module, self._package)

    @functools.cached_property
    def names_at_import(self) -> Names:
        """Names that are used at import, without those in bodies of functions."""
        if not isinstance(self.node, _DEFINITIONS):
            return self.names
        return Names(self.node, self.module, self._package, bodies=False)


class _Scope:
    def __init__(self, outer: _Scope | None, is_class: bool = False) -> None:
        self.outer = outer
        self.is_class = is_class
        self.is_comprehension = False
        self.names: dict[str, list[Target]] = {}


class Names:
    """Names in a statement, grouped by their use; local names are left out.

    Attributes
    ----------
    bound
        Names of the module that it binds, with the targets of imported names.
    uses
        All names as written, with their targets.
    changed
        Names in expressions whose value is unused at import: the expression may change them.
    assigned, stored
        Names whose attributes or items are assigned: at import; in functions.
    called
        Functions called at import, with their arguments.
    methods
        Functions and methods called in functions.
    bases
        Base classes.
    imported
        Pairs of an imported module and a name in it that may be a submodule, empty for none.
    has_hooks
        True if it defines a class that runs code when another class inherits from it.
    runs_code
        True if it may bind any name of its module at import.
    unfollowed
        Expressions that are not followed, whatever their names resolve to.
    shown
        Name -> a call of it, for messages.
    """

    def __init__(self, node: ast.stmt, module: str, package: str, *, bodies: bool = True) -> None:
        self.node = node
        self._bodies = bodies
        self.uses: dict[Chain, list[Target]] = {}
        self.changed: list[Target] = []
        self.assigned: list[Target] = []
        self.stored: list[Target] = []
        self.called: list[tuple[list[Target], list[Target]]] = []
        self.methods: list[Target] = []
        self.bases: list[Target] = []
        self.imported: set[tuple[str, str]] = set()
        self.has_hooks = False
        self.runs_code = False
        self.unfollowed: set[str] = set()
        self.shown: dict[Chain, ast.Call] = {}
        self._module = module
        self._package = package
        outermost = _Scope(None)
        self.bound = outermost.names
        self._classes: list[tuple[str, _Scope]] = []
        self._occurrences: list[tuple[list[Target], Chain, _Scope]] = []
        self._left: list[tuple[ast.AST, _Scope, int]] = [(node, outermost, NOW)]
        while self._left:
            self._look_at(*self._left.pop())
        for name, scope in self._classes:  # names imported in its body are attributes
            for alias, targets in scope.names.items():
                self.uses.setdefault((name, alias), []).extend(targets)
        for targets, chain, scope in self._occurrences:  # now all local names are known
            targets += [target for target in self._targets(chain, scope) if target not in targets]

    def _look_at(self, node: ast.AST, scope: _Scope, when: int) -> None:
        look = _LOOKS.get(type(node))
        if look is not None:
            look(self, node, scope, when)
            return
        if isinstance(node, ast.Expr) and when == NOW:
            when = EFFECT
        if isinstance(node, _BLOCKS):
            _tidy(node, scope.is_class)
        self._push(_children(node), scope, when)

    def _push(self, nodes: list[ast.AST], scope: _Scope, when: int) -> None:
        self._left += [(node, scope, when) for node in reversed(nodes)]

    def _look_at_name(self, node: Any, scope: _Scope, when: int) -> None:
        if isinstance(node, ast.Attribute):
            if node.attr in _INTROSPECTION:
                self.unfollowed.add(ast.unparse(node)[:60])
            self._note_part(node, scope, when)
        elif not isinstance(node.ctx, ast.Load):
            scope.names.setdefault(node.id, [])
        elif node.id == "__doc__":
            self.unfollowed.add("__doc__")
        chain = _chain(node)
        if chain is None:
            while isinstance(node, ast.Attribute):
                node = node.value
            self._left.append((node, scope, when))
            return
        self._occurrences.append((self.uses.setdefault(chain, []), chain, scope))
        if when == EFFECT:
            self._occurrences.append((self.changed, chain, scope))

    def _look_at_subscript(self, node: Any, scope: _Scope, when: int) -> None:
        self._note_part(node, scope, when)
        self._push([node.value, node.slice], scope, when)

    def _look_at_call(self, node: Any, scope: _Scope, when: int) -> None:
        module = _imported_by(node)
        if module is not None:
            self.uses["import", module] = [(module, ())]
            return
        self._push(_children(node), scope, when)
        chain = _chain(node.func)
        if chain is not None:
            self.shown[chain] = node
        if when == LATER:
            self._note_root(self.methods, node.func, scope)
            if chain == ("setattr",) and node.args:
                self._note_root(self.stored, node.args[0], scope)
            return
        arguments: list[Target] = []
        names = [dotted for part in (*node.args, *node.keywords) for dotted in _chains(part)]
        self._occurrences += [(arguments, dotted, scope) for dotted in names]
        self._note_called(node.func, arguments, scope)
        name = chain[-1] if chain else getattr(node.func, "attr", "")
        self.runs_code |= chain is not None and name in _NAMESPACES
        if name in _READERS or (chain in (("locals",), ("vars",)) and not node.args):
            self.unfollowed.add(ast.unparse(node)[:60])

    def _look_at_comprehension(self, node: Any, scope: _Scope, when: int) -> None:
        first = node.generators[0].iter
        self._left.append((first, scope, when))
        scope = _Scope(scope)
        scope.is_comprehension = True
        parts = [part for child in _children(node) for part in _parts_of_comprehension(child)]
        self._push([part for part in parts if part is not first], scope, when)

    def _look_at_walrus(self, node: Any, scope: _Scope, when: int) -> None:
        self._left.append((node.value, scope, when))
        while scope.is_comprehension and scope.outer is not None:
            scope = scope.outer
        self._left.append((node.target, scope, when))

    def _look_at_import(self, node: Any, scope: _Scope, when: int) -> None:
        self.imported |= _imported(node, self._package)
        for alias, target in _imports(node, self._package):
            targets = scope.names.setdefault(alias, [])
            if targets == [(self._module, (alias,))]:  # a global variable
                targets = self.bound[alias]
            targets.append(target)

    def _look_at_global(self, node: Any, scope: _Scope, when: int) -> None:
        for name in node.names:
            self.bound.setdefault(name, [])
            if scope.outer is not None:
                scope.names[name] = [(self._module, (name,))]

    def _look_at_capture(self, node: Any, scope: _Scope, when: int) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name:
            scope.names.setdefault(name, [])
        _tidy(node, scope.is_class)
        self._push(_children(node), scope, when)

    def _look_at_format(self, node: Any, scope: _Scope, when: int) -> None:
        """Visit an f-string without its empty parts, which only some releases of Python add."""
        node.values = [part for part in node.values if getattr(part, "value", None) != ""]
        self._push(node.values, scope, when)

    def _look_at_function(self, node: Any, scope: _Scope, when: int) -> None:
        inner = _Scope(scope)
        outside = _children(node.args)
        body = [node.body]
        if not isinstance(node, ast.Lambda):
            _tidy(node, False)
            body = node.body
            outside += [*node.decorator_list, *([node.returns] if node.returns else [])]
            scope.names.setdefault(node.name, [])
            self._note_decorators(node, scope, when)
        inner.names |= {argument.arg: [] for argument in _arguments(node)}
        self._enter(node, inner, body, outside, LATER, when)

    def _look_at_class(self, node: Any, scope: _Scope, when: int) -> None:
        _tidy(node, True)
        inner = _Scope(scope, is_class=True)
        scope.names.setdefault(node.name, [])
        outside = [*node.decorator_list, *node.bases, *node.keywords]
        self._enter(node, inner, node.body, outside, when, when)
        self._classes.append((node.name, inner))
        if when == LATER:
            return
        self._note_decorators(node, scope, when)
        for keyword in node.keywords:
            self._note_called(keyword.value, [], scope)
        for base in node.bases:
            self._note_root(self.bases, base, scope)
        hooks = [getattr(statement, "name", "") == "__init_subclass__" for statement in node.body]
        self.has_hooks |= any(hooks) or any(keyword.arg == "metaclass" for keyword in node.keywords)

    def _enter(
        self,
        node: Any,
        inner: _Scope,
        body: list[ast.AST],
        outside: list[ast.AST],
        when_inside: int,
        when: int,
    ) -> None:
        """Queue a definition: its body in the inner scope, all else in the outer scope."""
        inner.names |= {parameter.name: [] for parameter in getattr(node, "type_params", ())}
        if self._bodies or inner.is_class:
            self._push(body, inner, when_inside)
        scope = inner.outer
        assert scope is not None
        self._push(outside, scope, when)

    def _note_decorators(self, node: Any, scope: _Scope, when: int) -> None:
        if when != LATER:
            for decorator in node.decorator_list:
                self._note_called(decorator, [], scope)

    def _note_called(self, node: ast.AST, arguments: list[Target], scope: _Scope) -> None:
        functions: list[Target] = []
        self._note_root(functions, node, scope)
        self.called.append((functions, arguments))

    def _note_part(self, node: Any, scope: _Scope, when: int) -> None:
        if not isinstance(node.ctx, ast.Load):
            targets = self.stored if when == LATER else self.assigned
            self._note_root(targets, node, scope)
            calls = [call for call in ast.walk(node.value) if isinstance(call, ast.Call)]
            names = [dotted for call in calls for part in call.args for dotted in _chains(part)]
            self._occurrences += [(targets, dotted, scope) for dotted in names]

    def _note_root(self, targets: list[Target], node: ast.AST, scope: _Scope) -> None:
        """Note the dotted name that an expression begins with: ``a.b`` for ``a.b[0].c()``."""
        chain = _chain(node)
        while chain is None and isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            node = node.func if isinstance(node, ast.Call) else node.value
            chain = _chain(node)
        if chain is not None:
            self._occurrences.append((targets, chain, scope))

    def _targets(self, chain: Chain, scope: _Scope | None) -> list[Target]:
        """Return the targets of a dotted name; none if it begins with a local variable."""
        innermost = True
        while scope is not None and scope.outer is not None:
            targets = scope.names.get(chain[0]) if innermost or not scope.is_class else None
            if targets or (targets is not None and not scope.is_class):
                return [(module, (*inside, *chain[1:])) for module, inside in targets]
            scope, innermost = scope.outer, False
        return [(self._module, chain)]


_LOOKS: dict[type[ast.AST], Callable[[Names, Any, _Scope, int], None]] = {
    ast.Name: Names._look_at_name,
    ast.Attribute: Names._look_at_name,
    ast.Subscript: Names._look_at_subscript,
    ast.Call: Names._look_at_call,
    ast.NamedExpr: Names._look_at_walrus,
    ast.JoinedStr: Names._look_at_format,
    ast.Global: Names._look_at_global,
    ast.ClassDef: Names._look_at_class,
    **dict.fromkeys(_FUNCTIONS, Names._look_at_function),
    **dict.fromkeys(_COMPREHENSIONS, Names._look_at_comprehension),
    **dict.fromkeys(_IMPORTS, Names._look_at_import),
    **dict.fromkeys(_CAPTURES, Names._look_at_capture),
}


def _tidy(node: Any, in_class: bool) -> None:
    """Remove docstrings, ``pass`` statements, and annotations that are never evaluated."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        node.returns = None
        for argument in _arguments(node):
            argument.annotation = None
    for name in ("body", "orelse", "finalbody"):
        if body := getattr(node, name, None):
            statements = body if in_class else map(_without_annotation, body)
            kept = [statement for statement in statements if statement and not _is_idle(statement)]
            setattr(node, name, kept)


def _arguments(node: Any) -> list[ast.arg]:
    args = node.args
    variadic = [argument for argument in (args.vararg, args.kwarg) if argument is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *variadic]


def _without_annotation(node: ast.stmt) -> ast.stmt | None:
    if not isinstance(node, ast.AnnAssign):
        return node
    return ast.Assign([node.target], node.value) if node.value else None


def _is_idle(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass)


def _children(node: ast.AST) -> list[Any]:
    """Return the child nodes that may contain names."""
    children = []
    for name in node._fields:
        if name not in _WITHOUT_NAMES:
            value = getattr(node, name, None)
            if type(value) is list:
                children += [child for child in value if type(child) is not ast.Constant]
            elif isinstance(value, ast.AST) and type(value) is not ast.Constant:
                children.append(value)
    return [child for child in children if isinstance(child, ast.AST)]


def _parts_of_comprehension(node: ast.AST) -> list[Any]:
    return _children(node) if isinstance(node, ast.comprehension) else [node]


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement and the nested statements that run when its module is imported."""
    left = [node]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, _FUNCTIONS):
            for name in ("body", "handlers", "cases", "orelse", "finalbody"):
                left += getattr(node, name, ())


def _chain(node: ast.AST) -> Chain | None:
    """Return an expression as a dotted name; None if it is anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else None


def _chains(node: ast.AST) -> Iterator[Chain]:
    """Yield the dotted names in an expression."""
    left = [node]
    while left:
        node = left.pop()
        chain = _chain(node)
        if chain is None:
            left += _children(node)
        else:
            yield chain


def _imports(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, Target]]:
    """Yield each name that an import binds, and its target."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            if alias.name != "*":
                yield alias.asname or alias.name, (_from(node, package), (alias.name,))
        elif alias.asname:
            yield alias.asname, (alias.name, ())
        else:
            root = alias.name.partition(".")[0]
            yield root, (root, ())


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> set[tuple[str, str]]:
    """Return the modules that it imports, each with a name that may be a submodule."""
    if isinstance(node, ast.Import):
        return {(alias.name, "") for alias in node.names}
    return {(_from(node, package), alias.name) for alias in node.names}


def _from(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that names are imported from."""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def _imported_by(call: ast.Call) -> str | None:
    """Return the module that a call imports; None unless its name is a constant."""
    called = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    if called not in _IMPORT_CALLS or len(call.args) != 1 or call.keywords:
        return None
    name = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
    return name if isinstance(name, str) and not name.startswith(".") else None


def _is_main_guard(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and not node.orelse
        and isinstance(node.test, ast.Compare)
        and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")
    )
