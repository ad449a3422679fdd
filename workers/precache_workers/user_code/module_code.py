"""Top-level statements of a Python module, with the names that each binds, uses and may change.

The code is parsed and compiled, not run: the compiler tells global names from local ones. Comments,
layout, docstrings, annotations that are never evaluated and the main guard are left out.
"""

from __future__ import annotations

import ast
import dis
import inspect
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import xxhash

Import = tuple[str, str, str]
"""The name that an import binds (``*`` for all), its module, and the name in it or an empty one."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LITERALS = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.Load)
_FIXED = {"Path", "compile", "frozenset", "getLogger"}
"""Calls whose results cannot change, or do not affect what is computed."""
_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "vars"}
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"}


class Module:
    """The top-level statements of a module; none if it is no Python source, or does not parse.

    Attributes
    ----------
    error
        Why it cannot be read or parsed; empty if it can.
    imports
        Imports anywhere in it.
    binders
        Name -> the statements that bind it.
    codes
        The `plain_code` of its functions and classes.
    """

    def __init__(self, name: str, path: Path | None, is_package: bool) -> None:
        self.error, self._data = "", b""
        self._code, self._tree = compile("", "", "exec"), ast.Module([], [])
        try:
            self._data = path.read_bytes() if path is not None else b""
            if path is not None and path.suffix == ".py":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._code = compile(self._data, str(path), "exec", dont_inherit=True)
                    self._tree, self._data = ast.parse(self._data), b""
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.error = f"{path} does not parse: {error}"
        self._tree.body = [node for node in self._tree.body if not _is_main_guard(node)]
        _tidy(self._tree)
        package = name if is_package else name.rpartition(".")[0]
        self.statements = [Statement(node, package) for node in self._tree.body]
        self.imports = [found for statement in self.statements for found in statement.imports]

    @cached_property
    def text(self) -> str:
        """Text of all that counts of the module."""
        return _canonical(self._tree) + xxhash.xxh3_128_hexdigest(self._data)

    @cached_property
    def binders(self) -> dict[str, list[Statement]]:
        binders: dict[str, list[Statement]] = {}
        for statement in self.statements:
            for bound in statement.bound:
                binders.setdefault(bound, []).append(statement)
        return binders

    @cached_property
    def codes(self) -> set[CodeType]:
        codes = [plain_code(self._code)]
        for code in codes:
            codes += (part for part in code.co_consts if isinstance(part, CodeType))
        return set(codes)

    def using(self, names: set[str]) -> set[str]:
        """Return names, and those whose statements mention any, directly or through others."""
        using, size = set(names), -1
        while size != len(using):
            size = len(using)
            for name, binders in self.binders.items():
                if not all(s.is_fixed or s.mentions.isdisjoint(using) for s in binders):
                    using.add(name)
        return using


class Statement:
    """A top-level statement of a module.

    Attributes
    ----------
    imports
        Imports anywhere in it, also those by calls with a constant name.
    run_imports
        Those that run when its module is imported.
    acts
        True if it may change more at import than the names that it binds.
    """

    def __init__(self, node: ast.stmt, package: str) -> None:
        self.node = node
        self.nodes = list(ast.walk(node))
        self.imports = [found for part in self.nodes for found in _imported(part, package)]
        self.is_import = isinstance(node, ast.Import | ast.ImportFrom)
        self.definition = node if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) else None
        run: list[ast.AST] = [node]
        for part in run:
            if isinstance(part, _FUNCTIONS):
                run += [part.args, *part.decorator_list]
            else:
                run += [part.args] if isinstance(part, ast.Lambda) else ast.iter_child_nodes(part)
        self.run_imports = [found for part in run for found in _imported(part, package)]
        self.acts = any(
            _is_part_store(part)
            or isinstance(part, ast.Call | ast.AugAssign | ast.Expr)
            or getattr(part, "decorator_list", None)
            or getattr(part, "bases", None)
            or getattr(part, "keywords", None)
            for part in run
        )

    @cached_property
    def text(self) -> str:
        return _canonical(self.node)

    @property
    def bound(self) -> set[str]:
        """Names of the module that it binds, by ``global`` too."""
        return self._names[0]

    @property
    def mentions(self) -> set[str]:
        """Global names that it uses."""
        return self._names[1]

    @property
    def mentions_run(self) -> set[str]:
        """Global names that it uses when its module is imported."""
        return self._names[2]

    @cached_property
    def _names(self) -> tuple[set[str], set[str], set[str]]:
        bound, mentions, run = set[str](), set[str](), set[str]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = compile(ast.Module([self.node], []), "", "exec", dont_inherit=True)
        left = [(whole, True)]
        for code, runs in left:
            for step in dis.get_instructions(code):
                verb, _, place = step.opname.partition("_")
                if verb == "LOAD" and place.endswith(("NAME", "GLOBAL", "GLOBALS")):
                    mentions.add(step.argval)
                    run |= {step.argval} if runs else set()
                elif place == "GLOBAL" or (place == "NAME" and verb != "IMPORT" and code is whole):
                    bound.add(step.argval)
            for inner in code.co_consts:
                if isinstance(inner, CodeType):
                    later = inner.co_flags & inspect.CO_OPTIMIZED
                    left.append((inner, runs and (inner.co_name in _COMPREHENSIONS or not later)))
        return bound, mentions, run

    @property
    def value(self) -> ast.expr | None:
        """The value of an assignment to names; None for all else."""
        node = self.node
        if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
            return node.value
        return None

    @cached_property
    def is_fixed(self) -> bool:
        """True if it binds names to values that count as immutable."""
        called = spine(self.value)[-1:] if isinstance(self.value, ast.Call) else ()
        return bool(_FIXED.intersection(called)) or (
            self.value is not None and _is_literal(self.value)
        )

    @property
    def is_tuple(self) -> bool:
        """True if each of the names that it binds has a value of its own."""
        return isinstance(getattr(self.node, "value", None), ast.Tuple)

    @cached_property
    def is_mutable(self) -> bool:
        """True if calls may change what it binds, or bind it again."""
        values: list[ast.expr | None]
        match self.node:
            case ast.ClassDef(body=body):
                values = [p.value for p in body if isinstance(p, ast.Assign | ast.AnnAssign)]
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args) as function:
                values = [*function.decorator_list, *args.defaults, *args.kw_defaults]
            case _:
                return not (self.is_import or self.is_fixed)
        others = len(self.bound) > 1  # by ``global``
        return others or not all(value is None or _is_literal(value) for value in values)

    @cached_property
    def known(self) -> dict[str, tuple[Any, ...]]:
        """Names that it binds to a constant -> that alone; to a function or class -> empty.

        An empty list or dict is left out: it is there to be filled.
        """
        if self.definition:
            return {} if self.definition.decorator_list else {self.definition.name: ()}
        try:
            value = ast.literal_eval(self.value or "")
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return {}
        return {} if value in ([], {}) else dict.fromkeys(self.bound, (value,))

    @cached_property
    def stores(self) -> set[str]:
        """Names, also of attributes, on the way to what it sets: ``a`` and ``b`` for ``a.b = 1``.

        An empty one stands for other expressions. A class may set attributes of its instances.
        """
        targets = [node for node in self.nodes if _is_part_store(node)]
        for call in self._calls:
            targets += call.args[:1] if _SETTERS.intersection(spine(call.func)) else ()
        ways = [spine(target) or [""] for target in targets]
        own = isinstance(self.node, ast.ClassDef)
        return {name for way in ways if not (own and way[:-1] == ["self"]) for name in way}

    @cached_property
    def calls(self) -> set[str]:
        """Names that it calls, or methods of which it calls, and leaves the result."""
        calls = (node.value for node in self.nodes if isinstance(node, ast.Expr))
        return {name for call in calls for name in spine(call)[:1]}

    @cached_property
    def methods(self) -> set[str]:
        """Names, also of attributes, of which it calls a method."""
        return {name for call in self._calls for name in spine(call.func)[-2:-1]}

    @property
    def _calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]


def plain_code(code: CodeType) -> CodeType:
    """Return compiled code without its positions in a file."""
    parts = (plain_code(part) if isinstance(part, CodeType) else part for part in code.co_consts)
    return code.replace(co_filename="", co_firstlineno=1, co_linetable=b"", co_consts=(*parts,))


def spine(node: ast.AST | None) -> list[str]:
    """Return the names that an expression begins with: ``a``, ``b`` and ``c`` for ``a.b[0].c()``.

    The list is empty if it begins with anything else.
    """
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        names += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.func if isinstance(node, ast.Call) else node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def import_called(node: ast.AST) -> str:
    """Return the module that a call imports; empty unless its name is a constant."""
    if not isinstance(node, ast.Call) or len(node.args) != 1:
        return ""
    name = getattr(node.args[0], "value", None)
    known = {*spine(node.func)[-1:]} & {"import_module", "__import__"} and isinstance(name, str)
    return str(name) if known and not str(name).startswith(".") else ""


def _imported(node: ast.AST, package: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            root = alias.name.partition(".")[0]
            yield (alias.asname, alias.name, "") if alias.asname else (root, root, "")
            yield "", alias.name, ""
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = parts[: len(parts) - node.level + 1] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        for alias in node.names:
            yield alias.asname or alias.name, module, alias.name.strip("*")
    elif name := import_called(node):
        yield "", name, ""


def _is_part_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)


def _is_literal(node: ast.AST) -> bool:
    return all(isinstance(part, _LITERALS) for part in ast.walk(node))


def _is_main_guard(node: ast.stmt) -> bool:
    guards = ("__name__ == '__main__'", "'__main__' == __name__")
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) in guards


def _tidy(tree: ast.AST) -> None:
    """Remove docstrings, ``pass`` statements, and annotations that are never evaluated."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and not node.decorator_list:
            node.returns = None
            for part in ast.walk(node.args):
                if isinstance(part, ast.arg):
                    part.annotation = None
        elif isinstance(node, ast.JoinedStr):  # only some releases of Python add empty parts
            node.values = [part for part in node.values if getattr(part, "value", None) != ""]
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                kept = [part for part in body if not _is_idle(part)]
                if not isinstance(node, ast.ClassDef):
                    kept = [part for whole in kept for part in _without_annotation(whole)]
                setattr(node, name, kept or [ast.copy_location(ast.Pass(), p) for p in body[:1]])


def _is_idle(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass)


def _without_annotation(node: ast.stmt) -> list[ast.stmt]:
    if not isinstance(node, ast.AnnAssign):
        return [node]
    assigned = [] if node.value is None else [ast.Assign([node.target], node.value)]
    return [ast.copy_location(new, node) for new in assigned]


def _canonical(tree: ast.AST) -> str:
    """Write a tree without positions and empty fields, alike in all releases of Python."""
    words: list[str] = []
    left: list[Any] = [tree]
    while left:
        part = left.pop()
        if isinstance(part, list):
            words.append(str(len(part)))
            left += reversed(part)
        elif isinstance(part, ast.AST):
            fields = [
                (name, value)
                for name, value in ast.iter_fields(part)
                if value not in (None, []) and name not in ("ctx", "type_comment", "kind")
            ]
            words.append(f"{type(part).__name__}({' '.join(name for name, _ in fields)})")
            left += [value for _, value in reversed(fields)]
        else:
            words.append(f"{part:#x}" if type(part) is int else repr(part))
    return " ".join(words)
