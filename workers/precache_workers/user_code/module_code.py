"""Top-level statements of a Python module, with the names that each binds, uses and may change.

The code is parsed and compiled, not run: the compiler tells global names from local ones. Comments,
layout, docstrings, annotations of functions and the main guard are left out.
"""

from __future__ import annotations

import ast
import copy
import dis
import inspect
import re
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
_FIXED = {"pathlib.Path", "re.compile", "frozenset", "logging.getLogger"}
"""Calls whose results cannot change, or do not affect what is computed."""
_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
_SETTING = re.compile(r"set|\w*seed")
"""Beginnings of names of functions that set a state, as ``np.seterr`` and ``torch.manual_seed``."""
_HOOKS = {"__init_subclass__", "metaclass"}
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"}


class Module:
    """The top-level statements of a module; none if it is no Python source, or does not parse.

    Attributes
    ----------
    error
        Why it cannot be read or parsed; empty if it can.
    statements
        Its statements; an import of several names is one for each.
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
        nodes = (part for node in self._tree.body for part in _apart(node))
        self._tree.body = [node for node in nodes if not _is_main_guard(node)]
        _tidy(self._tree)
        package = name if is_package else name.rpartition(".")[0]
        self.statements = [Statement(node, package) for node in self._tree.body]
        self.imports = [found for statement in self.statements for found in statement.imports]
        self.binders: dict[str, list[Statement]] = {}
        for statement in self.statements:
            for bound in statement.bound:
                self.binders.setdefault(bound, []).append(statement)

    @cached_property
    def text(self) -> str:
        """Text of all that counts of the module."""
        return _canonical(self._tree) + xxhash.xxh3_128_hexdigest(self._data)

    @cached_property
    def _imported(self) -> dict[str, tuple[str, str]]:
        return {bound: (module, name) for bound, module, name in self.imports if bound}

    def resolve(self, node: ast.AST | None) -> list[str]:
        """Return the `spine` of an expression, in which what was imported has its own name."""
        root, *rest = spine(node) or [""]
        return [*filter(None, self._imported.get(root, (root,))), *rest]

    def is_fixed(self, statement: Statement) -> bool:
        """Return True for a statement that binds names to values that count as immutable."""
        value = getattr(statement.node, "value", None)
        return statement.constant is not None or ".".join(self.resolve(value)) in _FIXED

    def is_variable(self, name: str) -> bool:
        """Return True for a name to which only assignments bind values."""
        binders = self.binders.get(name, [])
        return bool(binders) and all(hasattr(s.node, "value") for s in binders)

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
                if not all(self.is_fixed(s) or s.mentions.isdisjoint(using) for s in binders):
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
    is_hook
        True if it may define a class that acts when another one inherits from it.
    bound
        Names of the module that it binds, by ``global`` too.
    mentions
        Global names that it uses.
    mentions_run
        Global names that it uses when its module is imported.
    """

    def __init__(self, node: ast.stmt, package: str) -> None:
        self.node = node
        self.nodes = list(ast.walk(node))
        self.imports = [found for part in self.nodes for found in _imported(part, package)]
        self.is_definition = isinstance(node, (*_FUNCTIONS, ast.ClassDef))
        self.is_hook = any(
            {getattr(part, "name", ""), getattr(part, "arg", "")} & _HOOKS for part in self.nodes
        )
        run: list[ast.AST] = [node]
        for part in run:
            if isinstance(part, _FUNCTIONS):
                run += [part.args, *part.decorator_list]
            else:
                run += [part.args] if isinstance(part, ast.Lambda) else ast.iter_child_nodes(part)
        self.run_imports = [found for part in run for found in _imported(part, package)]
        self.acts = any(
            isinstance(part, ast.Call | ast.AugAssign | ast.Expr | ast.For | ast.With)
            or is_part_store(part)
            or any(getattr(part, name, None) for name in ("decorator_list", "keywords"))
            for part in run
        )
        self.bound, self.mentions, self.mentions_run = _names(node)

    @cached_property
    def text(self) -> str:
        return _canonical(self.node)

    @cached_property
    def constant(self) -> ast.expr | None:
        """The expression of a value that cannot change, if it binds names to one."""
        node, value = self.node, getattr(self.node, "value", None)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        named = all(isinstance(target, ast.Name) for target in targets)
        if not (named and value and isinstance(node, ast.Assign | ast.AnnAssign)):
            return None
        return value if all(isinstance(part, _LITERALS) for part in ast.walk(value)) else None

    @cached_property
    def stores(self) -> set[str]:
        """Names of which it sets or deletes attributes or items."""
        targets = [node for node in self.nodes if is_part_store(node)]
        for node in self.nodes:
            if isinstance(node, ast.Call) and _SETTERS.intersection(spine(node.func)):
                targets += node.args[:1]
        return {name for target in targets for name in spine(target)[:1]}

    @cached_property
    def calls(self) -> set[str]:
        """Names that it calls, or methods of which it calls, and leaves the result."""
        calls = (node.value for node in self.nodes if isinstance(node, ast.Expr))
        return {name for call in calls for name in spine(call)[:1]} | self.sets

    @cached_property
    def sets(self) -> set[str]:
        """Names of which it calls methods that set a state."""
        calls = (spine(node.func) for node in self.nodes if isinstance(node, ast.Call))
        return {names[0] for names in calls if names and _SETTING.match(names[-1])}


def _names(node: ast.stmt) -> tuple[set[str], set[str], set[str]]:
    """Return the global names that a statement binds, uses, and uses at import."""
    bound, mentions, run = set[str](), set[str](), set[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = compile(ast.Module([node], []), "", "exec", dont_inherit=True)
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


def is_part_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)


def _apart(node: ast.stmt) -> list[ast.stmt]:
    """Return a statement; for an import of several names, one for each."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return [node]
    parts = [copy.copy(node) for _ in node.names]
    for part, name in zip(parts, node.names, strict=True):
        part.names = [name]
    return [*parts]


def _is_main_guard(node: ast.stmt) -> bool:
    guards = ("__name__ == '__main__'", "'__main__' == __name__")
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) in guards


def _tidy(tree: ast.AST) -> None:
    """Remove docstrings, and annotations of functions."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and not node.decorator_list:
            node.returns = None
            for part in ast.walk(node.args):
                if isinstance(part, ast.arg):
                    part.annotation = None
        elif isinstance(node, ast.JoinedStr):  # only some releases of Python add empty parts
            node.values = [part for part in node.values if getattr(part, "value", None) != ""]
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [part for part in body if not _is_docstring(part)]
            body[:] = kept or [ast.copy_location(ast.Pass(), part) for part in body[:1]]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


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
