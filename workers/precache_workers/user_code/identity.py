"""Identity of code: a digest of a function or class and of the code of the user that it needs.

- Of the module that defines it, the top-level statements count that its names reach, and those that
  may change the value of such a name while the module is imported.
- Other modules of the user that these statements or the module itself import count as a whole, with
  all that they import.
- An installed package, and always NumPy, counts by its distribution and version; one that was
  installed from a folder or repository also by its files. The standard library and precache count
  by name only.
- The order of statements counts, but for that of functions, constants and imports of packages whose
  names are bound once.
- Comments, layout, docstrings and annotations of functions do not count.
- Expressions that use code, files or variables which are known only at run time are listed.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import xxhash

from precache.errors import RecipeError
from precache_workers.user_code.module_code import (
    Import,
    Module,
    Statement,
    import_called,
    spine,
)

_DYNAMIC = re.compile(
    r"(exec|eval|compile|globals|__import__|builtins|importlib|pkgutil|runpy|subprocess|os\.environb?"
    r"|os\.getenv|sys\.argv|sys\.modules|ctypes\.CDLL|inspect\.(get\w+|signature)"
    r"|typing\.get_type_hints)\b"
)
_INTROSPECTION = {"__annotations__", "__doc__", "__globals__", "__subclasses__"}
_READER = re.compile(
    r"from_?file|from_pretrained|genfromtxt|getline|imread|load(_\w+|mat|txt)?|LoadLibrary|memmap"
    r"|read_\w+|readNet\w*|\w*open(_\w+)?|\w*File(IO|Storage)?|CascadeClassifier"
    r"|(Raw)?ConfigParser|getOpenProfile|InferenceSession|truetype"
    r"|parse(_known)?_args"
    r"|connect|i?glob|iterdir|listdir|parse|rglob|scandir|walk"
)
_WEIGHTS = {"pretrained", "weights"}
_NAMESPACES = {"exec", "eval", "globals", "locals", "vars"}
"""Built-in functions that may bind any name of a module when it is imported."""
_BY_NAME = {"getattr", "globals", "vars", "__dict__"}
"""Words of code that may use any name of a module that it imports."""

_OWN_PACKAGES = {"precache", "precache_workers"}
_STDLIB = sysconfig.get_path("stdlib")

Label = tuple[str, str]
"""A module and a name in it; an empty name stands for the module."""


@dataclass(frozen=True)
class Code:
    """The identity of a function or class.

    Attributes
    ----------
    digest
        XXH3-128, in hex.
    texts
        Module of the user -> what counts of it.
    modules
        Module of the user -> its statements.
    counted
        The statements that count.
    """

    digest: str
    texts: Mapping[str, str]
    modules: Mapping[str, Module]
    counted: Set[Statement]


def code_of(name: str) -> Code | None:
    """Return the identity of ``package.module:attribute``; None if its module has no file.

    A module is imported only if it imports what is not found, as it may change ``sys.path``.

    Raises
    ------
    RecipeError
        The module does not parse.
    """
    module, _, attribute = name.partition(":")
    place = find_module(module)
    if place is None or not place.has_location:
        return None
    tracer = _Tracer((module, attribute))
    code = tracer.trace()
    if tracer.lacks and module not in sys.modules:
        with contextlib.suppress(Exception, SystemExit):  # which loading it tells
            importlib.import_module(module)
        code = _Tracer((module, attribute)).trace()
    return code


def code_digest(name: str) -> str:
    """Return the digest (32 hex digits) of the code of ``package.module:attribute``.

    Raises
    ------
    RecipeError
        The module has no file, or does not parse.
    """
    code = code_of(name)
    if code is not None:
        return code.digest
    module = name.partition(":")[0]
    if module == "__main__" or (module not in sys.modules and find_module(module) is None):
        raise missing_module(name)
    raise RecipeError(
        f"the module of {name!r} has no source here, which is hashed to notice when it "
        "changes; if it was moved or renamed, name its new place, else declare a version"
    )


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


@functools.lru_cache(maxsize=4096)
def _parsed(name: str, path: Path | None, is_package: bool, *state: int) -> Module:
    return Module(name, path, is_package)


class _Tracer:
    """Follows names from statement to statement of one module, and imports to other modules."""

    def __init__(self, label: Label) -> None:
        self._module = functools.cache(self._find)
        self._texts: dict[str, str] = {}
        self._packages: dict[str, str] = {}
        self.lacks = False
        """True if something that is imported is not found."""
        self._left: list[str] = []
        self._reached: set[str] = set()
        self._counted: set[Statement] = set()
        self._follow(label[0])
        self._label = self._origin(label)
        self._follow(self._label[0])
        self._own = self._module(self._label[0]) or Module("", None, is_package=False)
        for module in (self._module(label[0]), self._own):
            if module is not None and module.error:
                raise RecipeError(f"{module.error}; correct it, or declare a version")
        self._uses_itself = self._uses_own(self._own)

    def trace(self) -> Code:
        """Return the identity of a name, or of the whole module if no statement binds it."""
        (module, name), own = self._label, self._own
        self._follow("numpy")  # of which all functions get arrays, and some random numbers
        for statement in own.statements:
            self._follow_imports(statement.run_imports)
        self._reach({name} if name in own.binders else {name, *own.binders})
        self._reach(self._count(s for s in own.statements if self._brings(s)))
        while self._left or self._count_effects():
            while self._left:
                self._take(self._left.pop())
        if module in self._texts:
            self._texts[module] = self._text() if own.statements else own.text
        facts = module, name, sorted(self._texts.items()), sorted(self._packages.items())
        modules = {m: found for m in self._texts if (found := self._module(m))}
        for other in modules.values():
            self._counted.update(() if other is own else other.statements)
        digest = xxhash.xxh3_128_hexdigest(repr(facts).encode())
        return Code(digest, self._texts, modules, self._counted)

    def _text(self) -> str:
        """Return what counts of the function's module: in order, where that may matter."""
        loose, ordered = list[str](), list[str]()
        for s in (s for s in self._own.statements if s in self._counted):
            again = any(len(self._own.binders[name]) > 1 for name in s.bound)
            fixed = not (s.acts or s.mentions_run or again or self._brings(s))
            (loose if fixed else ordered).append(s.text)
        return str((sorted(loose), ordered))

    def _brings(self, statement: Statement) -> bool:
        """Return True if a statement imports a module of the user, or all names of a package."""
        return any(bound == "*" or self._module(m) for bound, m, _ in statement.run_imports)

    # What counts

    def _follow(self, module: str) -> None:
        """Count a package, or a module of the user with those that contain it."""
        parts = module.split(".")
        if self._module(parts[0]) is None:
            place = find_module(parts[0])
            self._packages[parts[0]] = "missing" if place is None else _version_of(place) or ""
            self.lacks |= place is None
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in self._texts and self._module(name) is not None:
                self._texts[name] = ""
                self._left.append(name)

    def _follow_imports(self, imports: Iterable[Import]) -> None:
        for _, module, name in imports:
            self._follow(f"{module}.{name}" if name else module)

    def _take(self, name: str) -> None:
        """Count a module and all that it imports, and what it names of the function's module."""
        module = self._module(name)
        if module is not None and module is not self._own:
            self._texts[name] = module.text
            self._follow_imports(module.imports)
            if self._uses_own(module):
                self._reach(self._named(module.text))

    def _uses_own(self, module: Module) -> bool:
        """Return True if a module imports the function's, or a name in it."""
        own = self._label[0]
        joined = ((m, f"{m}.{inner}" if inner else m) for _, m, inner in module.imports)
        return any(own == other or (own == m and not self._module(other)) for m, other in joined)

    def _named(self, text: str) -> set[str]:
        """Return names of the function's module that a text may use by attribute."""
        words, names = set(re.findall(r"\w+", text)), self._own.binders.keys()
        return {*names} if words & _BY_NAME else names & words

    def _reach(self, names: Set[str]) -> None:
        """Count the statements that bind names, and those that bind what they use."""
        while new := names - self._reached:
            self._reached |= new
            names = self._count(s for name in new for s in self._own.binders.get(name, ()))

    def _count(self, statements: Iterable[Statement]) -> set[str]:
        """Count statements of the function's module, and return the names that they use."""
        new = {*statements} - self._counted
        self._counted |= new
        self._follow_imports(found for statement in new for found in statement.imports)
        names = {name for statement in new for name in statement.mentions}
        if self._uses_itself:
            names = names.union(*(self._named(statement.text) for statement in new))
        return names

    def _count_effects(self) -> bool:
        """Count own statements that may change, at import, what counts; True if there are more."""
        own, reached = self._own, self._reached
        names = own.binders.keys() | {name for s in own.statements for name in s.mentions}
        imported = {n: found for n in names if (found := self._sources((self._label[0], n)))}
        users = {n for n, found in imported.items() if any(self._module(m) for m, _ in found)}
        binders = [s for name in reached - imported.keys() for s in own.binders.get(name, ())]
        shared = {name for s in binders if not own.is_fixed(s) for name in s.bound}
        shared |= users if users & reached else set()
        called = users | imported.keys() & reached
        others = (m for m in map(self._module, self._texts) if m is not None and m is not own)
        used = {_root(source) for module in others for _, source, _ in module.imports}
        used |= {_root(source) for n in imported.keys() & reached for source, _ in imported[n]}
        shown = {n for n, found in imported.items() if any(_root(m) in used for m, _ in found)}
        setters = {  # such as ``ImageFile.LOAD_TRUNCATED_IMAGES = True``, or ``np.seterr(...)``
            s
            for s in own.statements
            if s.stores & imported.keys()
            or s.calls & called
            or s.sets & shown
            or s.mentions & _NAMESPACES
            or any(
                bound in s.stores
                or (bound in s.calls and self._module(m))
                or (bound in s.sets and _root(m) in used)
                for bound, m, _ in s.imports
            )
        }
        shared |= {name for s in setters if s.is_definition for name in s.bound}
        using = own.using(shared) | _NAMESPACES
        hooks = own.binders.keys() if any(s.is_hook for s in own.statements) else own.using(users)
        effects = [
            s
            for s in own.statements
            if s not in self._counted
            if (s.mentions_run & using and (s.acts or (s.is_definition and s.mentions_run & hooks)))
            or (s in setters and not s.is_definition)
        ]
        self._reach(self._count(effects))
        return bool(effects)

    # What names resolve to

    def _sources(self, label: Label) -> list[Label]:
        """Return the modules, and names in them, that the imports of a name may bring."""
        module = self._module(label[0])
        if module is None:
            return []
        binders = module.binders.get(label[1], [])
        if binders or hasattr(builtins, label[1]):
            imports = (found for binder in binders for found in binder.imports)
            return [(source, name) for bound, source, name in imports if bound == label[1]]
        return [(star, label[1]) for bound, star, _ in module.imports if bound == "*"]

    def _origin(self, label: Label) -> Label:
        """Return where a name is defined that modules of the user import from one another."""
        seen = set[Label]()
        while label not in seen:
            seen.add(label)
            for module, name in self._sources(label):
                if name and self._module(module) and not self._module(f"{module}.{name}"):
                    label = module, name
        return label

    def _find(self, name: str) -> Module | None:
        """Return the statements of a module; None if it is not found, or not the user's."""
        root, inner, _ = name.partition(".")
        place = find_module(name) if name and not (inner and self._module(root) is None) else None
        if place is None or not (inner or _version_of(place) is None):
            return None
        path = Path(place.origin) if place.origin else None
        status = path.stat() if path and path.exists() else None
        # The ctime reveals a change even if the mtime was reset.
        state = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino) if status else ()
        return _parsed(name, path, place.submodule_search_locations is not None, *state)


def unfollowed(code: Code) -> list[tuple[str, bool]]:
    """Return the expressions that are not followed, sorted, with True if they read files."""
    unknown = set[tuple[str, bool]]()
    for name, module in code.modules.items():
        followed = {"self", *(n for s in module.statements if s.is_definition for n in s.bound)}
        followed |= {
            bound
            for bound, source, inner in module.imports
            if source in code.modules and not code.modules[source].is_variable(inner)
        }
        given = {bound for bound, source, _ in module.imports if source not in code.modules}
        given.add("open")  # which others may call, as in ``map(np.load, paths)``
        left: list[ast.AST] = [s.node for s in module.statements if s in code.counted]
        while left:
            node = left.pop()
            call = node if isinstance(node, ast.Call) else None
            root, *rest = spine(call.func if call else node) or [""]
            full = module.resolve(call.func if call else node) or [""]
            last = getattr(call.func, "attr", full[-1]) if call else full[-1]
            of_user = root in followed and not (root == "self" and len(rest) > 1)
            dynamic = not of_user and _DYNAMIC.match(".".join(full))
            words = {word.arg for word in call.keywords} if call else set()
            can_read = (call or root in given) and _READER.fullmatch(last)
            reads = not of_user and (can_read or words & _WEIGHTS)
            if import_called(node) or full == ["isinstance"]:
                continue
            if dynamic or reads or full[-1] in _INTROSPECTION:
                text = f"{ast.unparse(node)[:60]} in {name}"
                unknown.add((text, bool(reads and not dynamic)))
                left += [*call.args, *call.keywords] if call else []
            else:
                left += ast.iter_child_nodes(node)
    return sorted(unknown)


def _root(module: str) -> str:
    return module.partition(".")[0]


def _version_of(place: ModuleSpec) -> str | None:
    """Return the versions of the packages that may contain a top-level module.

    The text is empty for the standard library and precache; None for a module of the user.
    """
    path = Path(place.origin or next(iter(place.submodule_search_locations or ()), ""))
    if not path.is_absolute() or place.name in _OWN_PACKAGES:  # built in, frozen
        return ""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return _distributions(place.name)
    return "" if path.is_relative_to(_STDLIB) else None


@functools.cache
def _distributions(root: str) -> str | None:
    """Return the versions of the packages that install a top-level module; None if none does."""
    try:
        names = [importlib.metadata.distribution(root).name]
    except importlib.metadata.PackageNotFoundError:  # as of cv2; slower
        names = importlib.metadata.packages_distributions().get(root, [])
    return ",".join(sorted({_version(importlib.metadata.distribution(n)) for n in names})) or None


def _version(distribution: importlib.metadata.Distribution) -> str:
    """Return name and version, and a digest of the code of what has no release.

    The file list itself differs between two environments with the same package.
    """
    version = f"{distribution.name}=={distribution.version.split('+')[0]}"
    if distribution.read_text("direct_url.json") is None:
        return version
    lines = (distribution.read_text("RECORD") or "").splitlines()
    code = sorted(line for line in lines if re.search(r"\.(py|so|pyd),", line))
    return f"{version} {xxhash.xxh3_128_hexdigest(str(code).encode())}"
