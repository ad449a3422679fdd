"""The identity of code: what counts for it, and what does not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precache
from precache.errors import RecipeError
from precache_workers.driver import commit
from precache_workers.ops import identity
from precache_workers.ops.identity import libraries_of, named_ops, plain_version, with_code
from precache_workers.planning import listing as listed
from precache_workers.sources import code_digest as digests
from precache_workers.sources.code_digest import code_digest, code_of
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.user_code import load_object, tree_hash
from tests.support.building import build_here, pixels, write_jpegs

Write = Callable[[Mapping[str, str]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes files of the user's own below a folder from which they can be imported."""
    root = tmp_path / "code"
    root.mkdir()
    monkeypatch.syspath_prepend(root)

    def put(files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.stat().st_mtime_ns if path.exists() else 0
            path.write_text(textwrap.dedent(text))
            if before:  # whatever a file system's clock can tell apart
                os.utime(path, ns=(before + 10**9, before + 10**9))

    yield put
    tops = {path.name.removesuffix(".py") for path in root.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]


# --- what counts --------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, str], str, tuple[str, str, str]]] = {
    "its body": ({"own.py": "def f(x): return x"}, "own:f", ("own.py", "x\n", "x + 1\n")),
    "a helper two modules away": (
        {
            "own.py": "from near import g\ndef f(x): return g(x)",
            "near.py": "import far\ndef g(x): return far.h(x)",
            "far.py": "def h(x): return x",
        },
        "own:f",
        ("far.py", "x\n", "x + 1\n"),
    ),
    "a re-export": (
        {"own/__init__.py": "from own.impl import f", "own/impl.py": "def f(x): return x"},
        "own:f",
        ("own/impl.py", "x\n", "x + 1\n"),
    ),
    "a re-export of a star import": (
        {"own/__init__.py": "from .impl import *", "own/impl.py": "def f(x): return x"},
        "own:f",
        ("own/impl.py", "x\n", "x + 1\n"),
    ),
    "which of two is imported": (
        {
            "own.py": "from far import g as a, h as b\ndef f(x): return a(x) - b(x)",
            "far.py": "def g(x): return x\ndef h(x): return 2",
        },
        "own:f",
        ("own.py", "g as a, h as b", "h as a, g as b"),
    ),
    "a relative import": (
        {
            "own/__init__.py": "",
            "own/ops/__init__.py": "",
            "own/ops/f.py": "from ..base import K\ndef f(x): return K",
            "own/base.py": "K = 1",
        },
        "own.ops.f:f",
        ("own/base.py", "1", "2"),
    ),
    "a submodule by its dotted name": (
        {
            "own.py": "import lib.sub\ndef f(x): return lib.sub.K",
            "lib/__init__.py": "",
            "lib/sub.py": "K = 1",
        },
        "own:f",
        ("lib/sub.py", "1", "2"),
    ),
    "a module given away": (
        {"own.py": "import lib\ndef f(x): return getattr(lib, x)", "lib.py": "K = 1"},
        "own:f",
        ("lib.py", "1", "2"),
    ),
    "an import in the function": (
        {"own.py": "def f(x):\n    from lib import g\n    return g(x)", "lib.py": "g = abs"},
        "own:f",
        ("lib.py", "abs", "len"),
    ),
    "an import by a constant name": (
        {
            "own.py": "from importlib import import_module\n"
            "def f(x): return import_module('lib').K",
            "lib.py": "K = 1",
        },
        "own:f",
        ("lib.py", "1", "2"),
    ),
    "an import that may fail": (
        {
            "own.py": "try:\n    from lib import g\nexcept ImportError:\n    g = None\n"
            "def f(x): return g(x)",
            "lib.py": "def g(x): return x",
        },
        "own:f",
        ("lib.py", "x\n", "x + 1\n"),
    ),
    "a constant": ({"own.py": "K = 1\ndef f(x): return K"}, "own:f", ("own.py", "1", "2")),
    "a constant that a branch sets": (
        {"own.py": "import os\nif os.name:\n    K = 1\ndef f(x): return K"},
        "own:f",
        ("own.py", "1", "2"),
    ),
    "a default argument": (
        {"own.py": "from lib import K\ndef f(x, k=K): return k", "lib.py": "K = 1"},
        "own:f",
        ("lib.py", "1", "2"),
    ),
    "a class attribute": (
        {"own.py": "class A:\n    K = 1\ndef f(x): return A().K"},
        "own:f",
        ("own.py", "1", "2"),
    ),
    "a class attribute set afterwards": (
        {"own.py": "class A: pass\nA.K = 1\ndef f(x): return A().K"},
        "own:f",
        ("own.py", "1", "2"),
    ),
    "a name that a class takes over": (
        {"own.py": "K = 1\nclass A:\n    K = K\ndef f(x): return A.K"},
        "own:f",
        ("own.py", "1", "2"),
    ),
    "a base class in another module": (
        {
            "own.py": "import lib\nclass A(lib.Base): pass\ndef f(x): return A().g(x)",
            "lib.py": "class Base:\n    def g(self, x): return x",
        },
        "own:f",
        ("lib.py", "x\n", "x + 1\n"),
    ),
    "a decorator": (
        {
            "own.py": "from lib import twice\n@twice\ndef f(x): return x",
            "lib.py": "def twice(f): return lambda x: f(f(x))",
        },
        "own:f",
        ("lib.py", "f(f(x))", "f(f(f(x)))"),
    ),
    "a factory of closures": (
        {"own.py": "def make(k):\n    def inner(x): return x * k\n    return inner\nf = make(3)"},
        "own:f",
        ("own.py", "x * k", "x + k"),
    ),
    "the state of a closure": (
        {"own.py": "def make(k):\n    return lambda x: x * k\nf = make(3)"},
        "own:f",
        ("own.py", "make(3)", "make(4)"),
    ),
    "a partial": (
        {"own.py": "import functools\ndef g(k, x): return x\nf = functools.partial(g, 3)"},
        "own:f",
        ("own.py", "return x", "return k"),
    ),
    "an object with state": (
        {
            "own.py": "class Gain:\n    def __init__(self, k): self.k = k\n"
            "    def __call__(self, x): return x\nf = Gain(3)"
        },
        "own:f",
        ("own.py", "return x", "return x * self.k"),
    ),
    "a table that is assigned to": (
        {"own.py": "T = {}\nT['a'] = 1\ndef f(x): return T['a']"},
        "own:f",
        ("own.py", "= 1", "= 2"),
    ),
    "a table that is updated": (
        {"own.py": "T = {}\nT.update(a=1)\ndef f(x): return T['a']"},
        "own:f",
        ("own.py", "a=1", "a=2"),
    ),
    "a table that grows": (
        {"own.py": "T = [1]\nT += [2]\ndef f(x): return T"},
        "own:f",
        ("own.py", "[2]", "[3]"),
    ),
    "a table that a loop fills": (
        {"own.py": "T = {}\nfor k in range(3):\n    T[k] = k\ndef f(x): return T"},
        "own:f",
        ("own.py", "= k", "= k + 1"),
    ),
    "a table that a call fills": (
        {"own.py": "T = {}\ndef fill(): T['a'] = 1\nfill()\ndef f(x): return T"},
        "own:f",
        ("own.py", "= 1", "= 2"),
    ),
    "a table that a decorator fills": (
        {
            "own.py": "T = {}\ndef add(g):\n    T['g'] = g\n    return g\n"
            "@add\ndef g(x): return 1\ndef f(x): return T['g'](x)"
        },
        "own:f",
        ("own.py", "return 1", "return 2"),
    ),
    "a variable that a function sets": (
        {"own.py": "K = 0\ndef set():\n    global K\n    K = 1\nset()\ndef f(x): return K"},
        "own:f",
        ("own.py", "= 1", "= 2"),
    ),
    "a module's __getattr__": (
        {"own.py": "import lib\ndef f(x): return lib.K", "lib.py": "def __getattr__(n): return 1"},
        "own:f",
        ("lib.py", "1", "2"),
    ),
    "a submodule that its package imports": (
        {"own/__init__.py": "from . import sub\ndef f(x): return sub.K", "own/sub.py": "K = 1"},
        "own:f",
        ("own/sub.py", "1", "2"),
    ),
    "a folder without __init__.py in a package": (
        {"own/__init__.py": "", "own/sub/a.py": "def f(x): return 1"},
        "own.sub.a:f",
        ("own/sub/a.py", "1", "2"),
    ),
    "the last of two star imports": (
        {
            "own.py": "from a import *\nfrom b import *\ndef f(x): return g(x)",
            "a.py": "def g(x): return x",
            "b.py": "def g(x): return x",
        },
        "own:f",
        ("b.py", "x\n", "x + 1\n"),
    ),
    "what a star import leaves out": (
        {
            "own.py": "from a import *\nfrom b import *\ndef f(x): return g(x)",
            "a.py": "def g(x): return x",
            "b.py": "__all__ = ['h']\ndef g(x): return 1\ndef h(x): return x",
        },
        "own:f",
        ("b.py", "'h'", "'h', 'g'"),
    ),
    "the order of imports": (
        {
            "own.py": "from a import g\nfrom b import g\ndef f(x): return g(x)",
            "a.py": "def g(x): return x",
            "b.py": "def g(x): return 1",
        },
        "own:f",
        ("own.py", "from a import g\nfrom b import g", "from b import g\nfrom a import g"),
    ),
    "an import in a class": (
        {"own.py": "class A:\n    from lib import K\ndef f(x): return A.K", "lib.py": "K = 1"},
        "own:f",
        ("lib.py", "1", "2"),
    ),
    "a global variable that is imported": (
        {
            "own.py": "def load():\n    global lib\n    import lib\nload()\ndef f(x): return lib.K",
            "lib.py": "K = 1",
        },
        "own:f",
        ("lib.py", "1", "2"),
    ),
    "a global variable that only a function binds": (
        {"own.py": "def set():\n    global K\n    K = 1\nset()\ndef f(x): return K"},
        "own:f",
        ("own.py", "= 1", "= 2"),
    ),
    "an assignment within an expression": (
        {"own.py": "def g(x=[K := i for i in range(3)]): pass\ndef f(x): return K"},
        "own:f",
        ("own.py", "3", "4"),
    ),
    "a table that an assignment changes": (
        {"own.py": "T = [1, 2]\nlast = T.pop()\ndef f(x): return T"},
        "own:f",
        ("own.py", "pop()", "pop(0)"),
    ),
    "a table that a default argument changes": (
        {"own.py": "T = []\ndef g(x=T.append(1)): pass\ndef f(x): return T"},
        "own:f",
        ("own.py", "1", "2"),
    ),
    "a table that a class body changes": (
        {"own.py": "T = {}\nclass A:\n    T['a'] = 1\ndef f(x): return T"},
        "own:f",
        ("own.py", "= 1", "= 2"),
    ),
    "a table under another name": (
        {"own.py": "T = {}\nU = [T]\nU[0]['a'] = 1\ndef f(x): return T"},
        "own:f",
        ("own.py", "= 1", "= 2"),
    ),
    "attributes of classes in a loop": (
        {"own.py": "class A: pass\nfor c in (A,):\n    c.K = 1\ndef f(x): return A.K"},
        "own:f",
        ("own.py", "= 1", "= 2"),
    ),
    "attributes of an object's class": (
        {"own.py": "class A: pass\na = A()\ntype(a).K = 1\ndef f(x): return A.K"},
        "own:f",
        ("own.py", "= 1", "= 2"),
    ),
    "a module that a function imports for its effect": (
        {
            "own.py": "from lib import T\ndef f(x):\n    import ops\n    return T['g'](x)",
            "ops.py": "from lib import T\nT['g'] = lambda x: 1",
            "lib.py": "T = {}",
        },
        "own:f",
        ("ops.py", "1", "2"),
    ),
    "a module of which all is imported, given away": (
        {
            "own.py": "import lib\ndef f(x): return getattr(lib, x)",
            "lib.py": "from low import *",
            "low.py": "K = 1",
        },
        "own:f",
        ("low.py", "1", "2"),
    ),
    "a table of another module": (
        {
            "own.py": "from lib import T, g\nT['a'] = 1\ndef f(x): return g()",
            "lib.py": "T = {}\ndef g(): return T",
        },
        "own:f",
        ("own.py", "= 1", "= 2"),
    ),
    "a decorator that fills a table of another module": (
        {
            "own.py": "import ops\nfrom lib import T\ndef f(x): return T['g'](x)",
            "ops.py": "from lib import add\n@add\ndef g(x): return 1",
            "lib.py": "T = {}\ndef add(g):\n    T['g'] = g\n    return g",
        },
        "own:f",
        ("ops.py", "return 1", "return 2"),
    ),
    "a method that fills a table of another module": (
        {
            "own.py": "from lib import R\n@R.add\ndef g(x): return 1\ndef f(x): return R.d[0](x)",
            "lib.py": "class Table:\n    d = []\n"
            "    def add(self, g): self.d.append(g)\nR = Table()",
        },
        "own:f",
        ("own.py", "return 1", "return 2"),
    ),
    "a table of subclasses": (
        {
            "own.py": "from lib import Base\nclass A(Base): K = 1\n"
            "def f(x): return Base.known[0].K",
            "lib.py": "class Base:\n    known = []\n"
            "    def __init_subclass__(cls): Base.known.append(cls)",
        },
        "own:f",
        ("own.py", "1", "2"),
    ),
    "a type that a function is registered for": (
        {
            "own.py": "import functools\n@functools.singledispatch\ndef g(x): return 0\n"
            "@g.register\ndef _(x: int): return 1\ndef f(x): return g(x)"
        },
        "own:f",
        ("own.py", "x: int", "x: str"),
    ),
    "a module that a third one changes": (
        {
            "own/__init__.py": "from . import patches",
            "own/ops.py": "def f(x): return g(x)\ndef g(x): return x",
            "own/patches.py": "from . import ops\nops.g = lambda x: 1",
        },
        "own.ops:f",
        ("own/patches.py", "1", "2"),
    ),
    "the state of a package": (
        {
            "own.py": "import lib\nimport decimal\ndef f(x): return decimal.Decimal(1) / 3",
            "lib.py": "import decimal\ndecimal.getcontext().prec = 5",
        },
        "own:f",
        ("lib.py", "5", "6"),
    ),
    "names that a module makes": (
        {"own.py": "for n in 'gh':\n    globals()[n] = lambda x: 1\ndef f(x): return g(x)"},
        "own:f",
        ("own.py", "1", "2"),
    ),
    "a module's dictionary": (
        {"own.py": "import lib\ndef f(x): return lib.__dict__[x]", "lib.py": "K = 1"},
        "own:f",
        ("lib.py", "1", "2"),
    ),
}

SAME: dict[str, tuple[str, str]] = {
    "annotations of parameters": ("x: int) -> int", "x: 'float')"),
    "annotations of variables": ("y: int = 1", "y = 1"),
    "annotations of constants": ("K = 2", "K: int = 2"),
    "no statement": ("    y: int", "    pass\n    ...\n    y: int"),
    "line endings": ("\n", "\r\n"),
    "the order of definitions": ("K = 2\ndef g(): return K\n", "def g(): return K\nK = 2\n"),
    "what is printed of a constant": ("def g", "print(K, end='')\ndef g"),
    "a class that uses a constant": ("def g", "@dataclasses.dataclass\nclass A: k: int = K\ndef g"),
    "a helper that is called at import, and logs": ("log.info('a')", "log.info('b')"),
    "a constant computed of another": ("def g", "L = max(K, 3)\ndef g"),
    "what another function is given": ("def g", "def h(k=K): return k\nh(4)\ndef g"),
}


def edited(files: Mapping[str, str], edit: tuple[str, str, str]) -> dict[str, str]:
    name, old, new = edit
    text = f"{files[name]}\n"
    assert old in text
    return {name: text.replace(old, new)}


@pytest.mark.parametrize("what", CASES)
def test_an_edit_of_what_a_function_reaches_is_noticed(write: Write, what: str) -> None:
    files, name, edit = CASES[what]
    write(files)
    before = code_digest(name)
    assert code_digest(name) == before
    write(edited(files, edit))
    after = code_digest(name)
    assert after != before
    write({edit[0]: files[edit[0]]})
    assert code_digest(name) == before


@pytest.mark.parametrize("what", CASES)
def test_comments_docstrings_and_strangers_do_not_count(write: Write, what: str) -> None:
    files, name, _ = CASES[what]
    write(files)
    before = code_digest(name)
    stranger = '# why\n{}\n\ndef stranger(x):\n    """Does nothing."""\n    return 17\nOTHER = 4\n'
    names = ("given away", "by a constant name", "a module's dictionary")
    whole = ("lib.py", "low.py") if what.endswith(names) else ()
    write({each: stranger.format(text) for each, text in files.items() if each not in whole})
    assert code_digest(name) == before


@pytest.mark.parametrize("what", SAME)
def test_an_edit_that_changes_nothing_does_not_count(write: Write, what: str) -> None:
    text = "import dataclasses, logging\nK = 2\ndef g(): return K\n"
    text += "log = logging.getLogger()\ndef h(): log.info('a')\nL = h()\n"
    text += "def f(x: int) -> int:\n    y: int = 1\n    log.debug(y)\n    return g() + y\n"
    write({"own.py": text})
    before = code_digest("own:f")
    assert SAME[what][0] in text
    write({"own.py": text.replace(*SAME[what])})
    assert code_digest("own:f") == before


def test_code_is_not_run(write: Write) -> None:
    write({"own/__init__.py": "raise SystemExit", "own/a.py": "1 / 0\ndef f(x): return x"})
    code_digest("own.a:f")
    assert not [name for name in sys.modules if name.partition(".")[0] == "own"]


def test_import_cycles_end(write: Write) -> None:
    write(
        {
            "a.py": "import b\ndef f(x): return b.g(x)\nfrom b import lost",
            "b.py": "import a\ndef g(x): return a.f(x) + K\nfrom a import lost\nK = 1",
        }
    )
    before = code_digest("a:f")
    code_digest("a:lost")
    write({"b.py": "import a\ndef g(x): return a.f(x) + K\nfrom a import lost\nK = 2"})
    assert code_digest("a:f") != before


def test_an_installed_package_counts_by_its_version(write: Write, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    sys.path.insert(0, str(site))

    def digest(version: str) -> str:
        (site / "shifty.py").write_text(f"def g(x): return '{version}'")
        info = site / "shifty-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shifty\nVersion: {version}\n")
        digests._distributions.cache_clear()
        digests._known.clear()
        return code_digest("own:f")

    write({"own.py": "from shifty import g\ndef f(x): return g(x)"})
    try:
        assert digest("1.0") == digest("1.0+cpu") != digest("1.1")
    finally:
        sys.path.remove(str(site))


def test_the_users_compiled_modules_count_by_their_bytes(write: Write) -> None:
    suffix = EXTENSION_SUFFIXES[0]
    write({"own.py": "import fast\ndef f(x): return fast.g(x)", f"fast{suffix}": "one"})
    before = code_digest("own:f")
    write({f"fast{suffix}": "two"})
    assert code_digest("own:f") != before


def test_what_cannot_be_followed_is_said(write: Write) -> None:
    write(
        {
            "own.py": "import importlib\ndef f(x):\n    m = importlib.import_module(x)\n"
            "    return eval('g(x)') + globals()[x]"
        }
    )
    code = code_of("own:f")
    assert code is not None
    assert [text.partition("(")[0] for text in code.unfollowed] == [
        "eval",
        "globals",
        "importlib.import_module",
    ]


UNFOLLOWED = {
    "import_module under another name": "from importlib import import_module as im\n"
    "def f(x): return im(x)",
    "built-in functions": "import builtins\ndef f(x): return builtins.exec(x)",
    "modules by name": "import sys\ndef f(x): return sys.modules[x]",
    "other ways to import": "import runpy\ndef f(x): return runpy.run_path(x)",
    "docstrings": "def f(x): return f.__doc__",
    "annotations": "def g(x: 1): pass\ndef f(x): return g.__annotations__",
    "subclasses": "class A: pass\ndef f(x): return A.__subclasses__()",
    "files read at import": "from pathlib import Path\nT = Path('t').read_text()\n"
    "def f(x): return T",
    "a module that is not found": "import nowhere_at_all\ndef f(x): return nowhere_at_all.g(x)",
    "a module that does not parse": "import lib\ndef f(x): return lib.g(x)",
}


@pytest.mark.parametrize("what", UNFOLLOWED)
def test_code_that_reaches_what_cannot_be_known_is_listed(write: Write, what: str) -> None:
    write({"own.py": UNFOLLOWED[what], "lib.py": "def g(:"})
    code = code_of("own:f")
    assert code is not None
    assert len(code.unfollowed) == 1


HARD = {
    "long expressions": f"K = {'+'.join(['1'] * 900)}",
    "long chains of branches": "K = 0\nif K == 0: pass\n"
    + "".join(f"elif K == {i}: pass\n" for i in range(900)),
    "large numbers": f"K = 0x{'f' * 6000}",
    "strings that are not Unicode": "K = '\\ud800'",
    "other encodings": "# coding: latin-1\nK = 'a'",
}


@pytest.mark.parametrize("what", HARD)
def test_code_that_runs_is_followed(write: Write, what: str) -> None:
    write({"own.py": f"{HARD[what]}\ndef f(x): return K\n"})
    assert load_object("own:f", code_digest("own:f"))


def test_what_thousands_of_statements_change_is_found(write: Write) -> None:
    """Each by a call of its own, of which the effect depends on all before."""
    lines = [f"K{i} = h(K{i - 1})" for i in range(1, 3000)]
    text = "\n".join(["def h(x): return [x]", "K0 = [1]", *lines, "def f(x): return K2999"])
    write({"own.py": text})
    before = code_digest("own:f")
    write({"own.py": text.replace("K7 = h(K6)", "K7 = h(K5)")})
    assert code_digest("own:f") != before


NAMES = ["f0", "f1", "f2", "f3", "f4"]


@settings(max_examples=30)
@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=5, max_size=5), st.integers(0, 4))
def test_an_edit_counts_for_all_that_reach_it_and_for_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, uses: list[set[str]], edited: int
) -> None:
    root = tmp_path_factory.mktemp("code")
    module = f"chain_{hashlib.md5(str(root).encode()).hexdigest()}"
    reach = {name: {name} for name in NAMES}
    for _ in NAMES:
        for name, used in zip(NAMES, uses, strict=True):
            reach[name] |= {far for near in used for far in reach[near]}

    def found(constant: int) -> list[str]:
        bodies = [" + ".join([*(f"{u}()" for u in sorted(used)), "0"]) for used in uses]
        bodies[edited] += f" + {constant}"
        lines = [f"def {n}(): return {b}" for n, b in zip(NAMES, bodies, strict=True)]
        (root / f"{module}.py").write_text("\n".join(lines))
        digests._known.clear()
        return [code_digest(f"{module}:{name}") for name in NAMES]

    sys.path.insert(0, str(root))
    try:
        changed = [a != b for a, b in zip(found(1), found(22), strict=True)]
    finally:
        sys.path.remove(str(root))
    assert changed == [NAMES[edited] in reach[name] for name in NAMES]


PRINTS = (
    "import sys\nsys.path.insert(0, {root!r})\n"
    "from precache_workers.sources.code_digest import code_digest\n"
)


def test_the_digest_is_the_same_in_every_process(
    write: Write, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    files, name, _ = CASES["a table that a decorator fills"]
    write(files)
    code = PRINTS.format(root=str(tmp_path / "code")) + f"print(code_digest({name!r}))"
    assert run_python(code).stdout.strip() == code_digest(name)


SYNTAX = """
import typing as t
from dataclasses import dataclass, field
K: int = 3
@dataclass
class A(t.Generic[t.TypeVar("T")]):
    x: int = K
    y: list = field(default_factory=list)
    def m(self, q: "B" = None) -> "A":
        def inner():
            nonlocal q
            return [i + K for i in range(3) if (z := i)], f"{self.x!r:>{K}} {q}", lambda *b, c=K: b
        try:
            pass
        except* ValueError:
            raise
        match q:
            case A(x=1) | [1, *_]:
                return 1
def f(x: A) -> t.Optional[A]:
    global K
    return A(x)
"""


def test_the_digest_is_the_same_over_releases_of_python(write: Write) -> None:
    write({"own.py": SYNTAX})
    assert code_digest("own:f") == "86f43ddccfa3750e0a3761a7e8299d4e"


# --- long-lived processes -----------------------------------------------------------------------

LONG_LIVED = """
import sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path.insert(0, str(root))
from precache_workers.sources.user_code import load_object

def write(**files):
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)

write(
    own="from near import g\\ndef f(x): return g(x)",
    near="from far import h\\ndef g(x): return h(x)",
    far="def h(x): return x",
    apart="calls = []\\n",
)
assert load_object("own:f")(1) == 1
import apart
write(far="def h(x): return x + 10", apart="1 / 0")
assert load_object("own:f")(1) == 11
before = load_object("own:f")
write(far="def h(x): return x + 10  # the same")
assert load_object("own:f") is before
"""


def test_a_process_takes_up_an_edited_helper(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run_python(LONG_LIVED, tmp_path)


COPIED = """
import os, sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path.insert(0, str(root))
(root / "own.py").write_text("def f(x): return 1")
import own
from precache_workers.sources.code_digest import code_digest
from precache_workers.sources.user_code import load_object

before = code_digest("own:f")
(root / "own.py").write_text("def f(x): return 2")
os.utime(root / "own.py", (10**9, 10**9))  # as copies of files keep their times
after = code_digest("own:f")
assert after != before
assert load_object("own:f", after)(0) == 2
(root / "own.py").write_text("def f(x): return 3")
os.utime(root / "own.py", (10**9, 10**9))
assert code_digest("own:f") != after
assert load_object("own:f")(0) == 3
"""


def test_a_process_takes_up_a_file_of_an_earlier_time(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run_python(COPIED, tmp_path)


IMPORTED_FROM = """
import os, sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path.insert(0, str(root))
(root / "near.py").write_text("def g(x): return 1")
(root / "own.py").write_text("from near import g\\ndef f(x): return g(x)")
import near
from precache_workers.sources.user_code import load_object
(root / "near.py").write_text("def g(x): return 2")
assert load_object("own:f")(0) == 2
"""

ANNOTATED = """
import sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path.insert(0, str(root))
from precache_workers.sources.user_code import load_object
text = "class A: x: int\\ndef f(x): return A.__annotations__['x'](x)"
(root / "own.py").write_text(text)
assert load_object("own:f")("3") == 3
(root / "own.py").write_text(text + " + 1")
assert load_object("own:f")("3") == 4
"""

CACHED = """
import sys
sys.path.insert(0, sys.argv[1])
from precache_workers.sources.user_code import load_object
print(load_object("own:f")(0))
"""


@pytest.mark.parametrize("code", [IMPORTED_FROM, ANNOTATED])
def test_modules_run_again_as_they_are_imported(
    code: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run_python(code, tmp_path)


@pytest.mark.parametrize("first", ["", "import own\n"])
def test_code_that_python_cached_of_an_earlier_edit_is_not_run(
    first: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    code = CACHED.replace("from workers", first + "from workers")
    path = tmp_path / "own.py"
    path.write_text("def f(x): return 1")
    assert run_python(code, tmp_path).stdout == "1\n"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text("def f(x): return 2")
    os.utime(path, ns=times)  # as of an edit within a second
    assert run_python(code, tmp_path).stdout == "2\n"


def test_code_that_changed_since_a_build_began_makes_no_row(write: Write) -> None:
    write({"own.py": "from near import g\ndef f(x): return g(x)", "near.py": "def g(x): return x"})
    before = code_digest("own:f")
    load_object("own:f", before)
    write({"near.py": "def g(x): return x + 1"})
    with pytest.raises(RecipeError, match="not what it was when the build began"):
        load_object("own:f", before)


# --- builds -------------------------------------------------------------------------------------

GAIN = {
    "own/__init__.py": "from own.ops import shift",
    "own/ops.py": "from own.amounts import amount\ndef shift(x): return x + amount()",
    "own/amounts.py": "def amount(): return 1",
}
MORE = {"own/amounts.py": "def amount(): return 2"}
STRANGER = {"own/ops.py": GAIN["own/ops.py"] + "\ndef other(): return 3\n"}
OPS = [
    {"op": "decode"},
    {"op": "resize", "size": [8, 8]},
    {"op": "function", "function": "own:shift"},
]
RECIPE = precache.Recipe.from_dict({"fields": {"image": {"ops": OPS, "codec": "raw"}}})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "in", 6)


def values(store: Path) -> np.ndarray:
    return np.stack([row for _, row in sorted(pixels(store).items())]).astype(np.int64)


def test_an_edit_two_modules_away_makes_a_version_with_new_pixels(
    write: Write, photos: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    write(GAIN)
    first = build_here(photos, store, RECIPE)
    before = values(store)
    write({"own/amounts.py": "# why\n" + GAIN["own/amounts.py"], **STRANGER})
    assert precache.plan(photos, store, RECIPE).state == "nothing"
    assert build_here(photos, store, RECIPE).version == first.version
    write(MORE)
    planned = precache.plan(photos, store, RECIPE, timing=False, address="serial")
    assert planned.differences is not None
    assert planned.differences.functions == ("own:shift",)
    second = build_here(photos, store, RECIPE)
    assert (second.version != first.version, second.rows_reused) == (True, 0)
    assert (values(store) == (before + 1) % 256).all()
    write(GAIN)
    assert build_here(photos, store, RECIPE).version == first.version


FACTORIES = """
    import numpy as np
    def data(value):
        return [(np.full((8, 8, 3), value, np.uint8), 0) for _ in range(6)]
    def train(): return data(1)
    def val(): return data(2)
"""
IMAGES = precache.Recipe.image()


def test_two_factories_of_a_module_are_two_versions(write: Write, tmp_path: Path) -> None:
    write({"two.py": FACTORIES})
    train = build_here("python:two:train", tmp_path / "store", IMAGES)
    val = build_here("python:two:val", tmp_path / "store", IMAGES)
    assert val.version != train.version
    assert (values(tmp_path / "store") == 2).all()
    assert build_here("python:two:train", tmp_path / "store", IMAGES).version == train.version


# --- stores of older releases -------------------------------------------------------------------


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Callable[..., precache.BuildResult]:
    """Builds as releases did that identified code by its module, and kept no log of it."""

    def build(source: Path | str, store: Path, recipe: precache.Recipe) -> precache.BuildResult:
        with monkeypatch.context() as patched:
            patched.setattr(
                listed, "with_recorded_code", lambda _, each: (with_code(each, codes), {})
            )
            for name in ("decides", "behaviours"):
                patched.setattr(commit, name, lambda _: {})
            patched.setattr(listed, "with_recorded_factory", lambda *these: (these[2], {}))
            patched.setattr(
                DatasetSource, "etag", property(lambda it: tree_hash(it.factory.partition(":")[0]))
            )
            codes = {
                name: tree_hash("own")
                if step is None
                else json.dumps({each: plain_version(each) for each in libraries_of(op)})
                for name, op, step in named_ops(recipe)
            }
            result: precache.BuildResult = build_here(source, store, recipe)
            return result

    return build


def test_a_version_of_an_older_release_is_adopted(
    write: Write, photos: Path, tmp_path: Path, as_before: Callable[..., precache.BuildResult]
) -> None:
    store = tmp_path / "store"
    write(GAIN)
    old = as_before(photos, store, RECIPE)
    assert precache.plan(photos, store, RECIPE).state == "nothing"
    adopted = build_here(photos, store, RECIPE)
    assert (adopted.version, adopted.cpu_seconds) == (old.version, 0)
    write({"own/__init__.py": GAIN["own/__init__.py"] + "\nother = 3\n"})
    assert build_here(photos, store, RECIPE).version == old.version
    write_jpegs(photos, 8)
    grown = build_here(photos, store, RECIPE)
    assert grown.rows_reused == 6
    write(MORE)  # which is noticed, though the older release's hash of the module is what it was
    assert build_here(photos, store, RECIPE).rows_reused == 0
    write(GAIN)
    assert build_here(photos, store, RECIPE).version == grown.version


PLAIN = precache.Recipe.image(resize=40, crop=32)


def test_libraries_that_made_a_version_of_an_older_release_stand_for_their_pixels(
    photos: Path,
    tmp_path: Path,
    as_before: Callable[..., precache.BuildResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "store"
    old = as_before(photos, store, PLAIN)
    adopted = build_here(photos, store, PLAIN)
    assert (adopted.version, adopted.cpu_seconds) == (old.version, 0)
    monkeypatch.setattr(identity, "installed_version", lambda name: "99.9")  # of the same pixels
    assert build_here(photos, store, PLAIN).version == old.version
    write_jpegs(photos, 8)
    grown = build_here(photos, store, PLAIN)
    assert (grown.rows_reused, grown.samples) == (6, 8)
    found = precache.verify(store)
    assert found.ok
    assert not [each for each in found.unchecked if "recipe" in each]
    wider = build_here(photos, store, precache.Recipe.image(resize=40))
    assert build_here(photos, store, PLAIN).version == grown.version
    assert wider.rows_reused == 0  # resized alone, nothing was stored


def test_other_libraries_do_not_adopt_a_version_of_an_older_release(
    photos: Path,
    tmp_path: Path,
    as_before: Callable[..., precache.BuildResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing tells what those made that it was made by."""
    old = as_before(photos, tmp_path / "store", PLAIN)
    monkeypatch.setattr(identity, "installed_version", lambda name: "99.9")
    found = build_here(photos, tmp_path / "store", PLAIN)
    assert (found.version != old.version, found.rows_reused) == (True, 0)


def test_a_crop_that_became_narrower_goes_on_from_rows_of_an_older_release(
    photos: Path, tmp_path: Path, as_before: Callable[..., precache.BuildResult]
) -> None:
    as_before(photos, tmp_path / "store", precache.Recipe.image(resize=40))
    cropped = build_here(photos, tmp_path / "store", PLAIN)
    assert cropped.rows_reused == 6


def test_ensure_adopts_a_version_of_an_older_release_once(
    write: Write, photos: Path, tmp_path: Path, as_before: Callable[..., precache.BuildResult]
) -> None:
    store = tmp_path / "store"
    write(GAIN)
    old = as_before(photos, store, RECIPE)
    assert precache.ensure(photos, store, RECIPE, address="serial").id == old.version
    write(MORE)
    assert precache.ensure(photos, store, RECIPE, address="serial").id != old.version


def test_what_cannot_be_followed_is_said_by_plan_and_build(
    write: Write, photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write({"own/__init__.py": "def shift(x): return x + eval('1')"})
    precache.plan(photos, tmp_path / "store", RECIPE, progress=True)
    build_here(photos, tmp_path / "store", RECIPE, {"progress": True})
    shown = capfd.readouterr().err
    assert shown.count("own:shift: edits of what these reach are not noticed: eval('1')") == 2


def test_a_version_of_other_code_is_not_adopted(
    write: Write, photos: Path, tmp_path: Path, as_before: Callable[..., precache.BuildResult]
) -> None:
    write({"own/__init__.py": "def shift(x): return x"})
    old = as_before(photos, tmp_path / "store", RECIPE)
    write({"own/__init__.py": "def shift(x): return x + 1"})
    made = build_here(photos, tmp_path / "store", RECIPE)
    assert (made.version != old.version, made.rows_reused) == (True, 0)


def test_a_factorys_version_of_an_older_release_is_adopted(
    write: Write, tmp_path: Path, as_before: Callable[..., precache.BuildResult]
) -> None:
    store = tmp_path / "store"
    write({"two.py": FACTORIES})
    old = as_before("python:two:train", store, IMAGES)
    adopted = build_here("python:two:train", store, IMAGES)
    assert (adopted.version, adopted.cpu_seconds) == (old.version, 0)
    val = build_here("python:two:val", store, IMAGES)
    assert val.version != old.version
    assert (values(store) == 2).all()
    assert build_here("python:two:train", store, IMAGES).version == old.version
    write({"two.py": FACTORIES.replace("data(1)", "data(3)")})
    assert build_here("python:two:train", store, IMAGES).version != old.version
    assert (values(store) == 3).all()
