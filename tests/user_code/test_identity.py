"""The identity of code: what counts for it, and what does not."""

import contextlib
import hashlib
import io
import os
import random
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precache
from precache.errors import RecipeError
from precache_workers.ops.identity import function_digests
from precache_workers.user_code import identity as digests
from precache_workers.user_code.identity import code_digest, code_of, unfollowed
from precache_workers.user_code.loading import load_object
from tests.support.building import build_here, pixels, write_jpegs

Write = Callable[[Mapping[str, str]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes files of the user's own, to be imported as by a process that starts afterwards."""
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
        forget()

    def forget() -> None:
        tops = {path.name.removesuffix(".py") for path in root.iterdir()}
        for name in [name for name in list(sys.modules) if name.partition(".")[0] in tops]:
            del sys.modules[name]

    yield put
    forget()


# --- what counts --------------------------------------------------------------------------------

CASES = r"""
= a setting of a library, in a module that the function does not name | own.py | True | False
own.py: from PIL import Image, ImageFile as F\nF.LOAD_TRUNCATED_IMAGES = True\ndef f(): return Image
= a global set on one line with others | own.py | C = 1 | C = 2
own.py: def s(): n = 0; global C; C = 1\ns()\ndef f(x): return C
= its body | own.py | x\n | x + 1\n
own.py: def f(x): return x
= a helper two modules away | far.py | x\n | x + 1\n
own.py: from near import g\ndef f(x): return g(x)
near.py: import far\ndef g(x): return far.h(x)
far.py: def h(x): return x
= a re-export | own/impl.py | x\n | x + 1\n
own/__init__.py: from own.impl import f
own/impl.py: def f(x): return x
= a re-export of a star import | own/impl.py | x\n | x + 1\n
own/__init__.py: from .impl import *
own/impl.py: def f(x): return x
= which of two is imported | own.py | g as a, h as b | h as a, g as b
own.py: from far import g as a, h as b\ndef f(x): return a(x) - b(x)
far.py: def g(x): return x\ndef h(x): return 2
= a relative import | own/base.py | 1 | 2 | own.ops.f:f
own/__init__.py:
own/ops/__init__.py:
own/ops/f.py: from ..base import K\ndef f(x): return K
own/base.py: K = 1
= a submodule by its dotted name | lib/sub.py | 1 | 2
own.py: import lib.sub\ndef f(x): return lib.sub.K
lib/__init__.py:
lib/sub.py: K = 1
= a module given away | lib.py | 1 | 2
own.py: import lib\ndef f(x): return getattr(lib, x)
lib.py: K = 1
= an import in the function | lib.py | abs | len
own.py: def f(x):\n    from lib import g\n    return g(x)
lib.py: g = abs
= an import by a constant name | lib.py | 1 | 2
own.py: from importlib import import_module\ndef f(x): return import_module('lib').K
lib.py: K = 1
= an import that may fail | lib.py | x\n | x + 1\n
own.py: try:\n    from lib import g\nexcept ImportError:\n    g = None\ndef f(x): return g(x)
lib.py: def g(x): return x
= a default argument | lib.py | 1 | 2
own.py: from lib import K\ndef f(x, k=K): return k
lib.py: K = 1
= a name that a class takes over | own.py | 1 | 2
own.py: K = 1\nclass A:\n    K = K\ndef f(x): return A.K
= a base class in another module | lib.py | x\n | x + 1\n
own.py: import lib\nclass A(lib.Base): pass\ndef f(x): return A().g(x)
lib.py: class Base:\n    def g(self, x): return x
= a decorator | lib.py | f(f(x)) | f(f(f(x)))
own.py: from lib import twice\n@twice\ndef f(x): return x
lib.py: def twice(f): return lambda x: f(f(x))
= a factory of closures | own.py | x * k | x + k
own.py: def make(k):\n    def inner(x): return x * k\n    return inner\nf = make(3)
= a partial | own.py | return x | return k
own.py: import functools\ndef g(k, x): return x\nf = functools.partial(g, 3)
= an object with state | own.py | return x | return x * self.k
own.py: class Gain:\n    def __init__(self, k): self.k = k
|     def __call__(self, x): return x\nf = Gain(3)
= a call that may fail | own.py | s(2)\n | s(3)\n
own.py: C = 1\ndef s(k):\n    global C\n    C = k\ntry: s(2)\nexcept ValueError: pass
| def f(x): return C
= a call by another function | own.py | [2] | [3]
own.py: C = 1\ndef s(k):\n    global C\n    C = k\nlist(map(s, [2]))\ndef f(x): return C
= a call of a partial | own.py | s, 2 | s, 3
own.py: from functools import partial\nC = 1\ndef s(k):\n    global C\n    C = k\npartial(s, 2)()
| def f(x): return C
= a call that binds names by text | own.py | = 2 | = 3
own.py: C = 1\ndef s(): globals()['C'] = 2\ns()\ndef f(x): return C
= a class method that sets an attribute | own.py | s(2)\n | s(3)\n
own.py: class A:\n    k = 1\n    @classmethod\n    def s(cls, k): cls.k = k\nA.s(2)
| def f(x): return A.k
= a function that is given a class | own.py | A, 2 | A, 3
own.py: class A: k = 1\ndef s(a, k): a.k = k\ns(A, 2)\ndef f(x): return A.k
= an attribute of a function | own.py | f, 'k', 2 | f, 'k', 3
own.py: def f(x): return f.k\nsetattr(f, 'k', 2)
= attributes by name in a loop | own.py | 'k': 2 | 'k': 3
own.py: class A: k = 1\nfor n, k in {'k': 2}.items(): setattr(A, n, k)\ndef f(x): return A.k
= an attribute that the type of a class sets | own.py | 'k', 2 | 'k', 3
own.py: class A: k = 1\ntype.__setattr__(A, 'k', 2)\ndef f(x): return A.k
= a class that its subclass changes | own.py | k = 2 | k = 3
own.py: class A:\n    k = 1\n    def __init_subclass__(cls): A.last = cls.k
| class B(A): k = 2\ndef f(x): return A.last
= a class that a metaclass changes | own.py | k = 2 | k = 3
own.py: class M(type):\n    last = None\n    def __init__(cls, *a): M.last = cls
| class A(metaclass=M): k = 2\ndef f(x): return M.last.k
= a closure that shares a variable | own.py | s(2)\n | s(3)\n
own.py: def make():\n    k = [1]\n    return (lambda x: k[0]), lambda v: k.insert(0, v)
| g, s = make()\ns(2)\ndef f(x): return g(x)
= a default argument that a call fills | own.py | g(2) | g(3)
own.py: def g(x, kept={}): return kept.setdefault('k', x)\ng(2)\ndef f(x): return g(x)
= an operator that sets a variable | own.py | + 2 | + 3
own.py: C = 1\nclass A:\n    def __add__(self, k):\n        global C\n        C = k\na = A()\na + 2
| def f(x): return C
= a module's __getattr__ | lib.py | 1 | 2
own.py: import lib\ndef f(x): return lib.K
lib.py: def __getattr__(n): return 1
= a submodule that its package imports | own/sub.py | 1 | 2
own/__init__.py: from . import sub\ndef f(x): return sub.K
own/sub.py: K = 1
= a folder without __init__.py in a package | own/sub/a.py | 1 | 2 | own.sub.a:f
own/__init__.py:
own/sub/a.py: def f(x): return 1
= the last of two star imports | b.py | x\n | x + 1\n
own.py: from a import *\nfrom b import *\ndef f(x): return g(x)
a.py: def g(x): return x
b.py: def g(x): return x
= what a star import leaves out | b.py | 'h' | 'h', 'g'
own.py: from a import *\nfrom b import *\ndef f(x): return g(x)
a.py: def g(x): return x
b.py: __all__ = ['h']\ndef g(x): return 1\ndef h(x): return x
= the order of imports | own.py | a import g\nfrom b | b import g\nfrom a
own.py: from a import g\nfrom b import g\ndef f(x): return g(x)
a.py: def g(x): return x
b.py: def g(x): return 1
= a constant that a function imports from its own module | own.py | 1 | 2
own.py: K = 1\ndef f(x):\n    import own\n    return own.K
= a constant of a submodule by its package | own/ops.py | 1 | 2 | own.ops:f
own/__init__.py:
own/ops.py: from . import ops\nK = 1\ndef f(x): return ops.K
= an import in a class | lib.py | 1 | 2
own.py: class A:\n    from lib import K\ndef f(x): return A.K
lib.py: K = 1
= a global variable that is imported | lib.py | 1 | 2
own.py: def load():\n    global lib\n    import lib\nload()\ndef f(x): return lib.K
lib.py: K = 1
= an assignment within an expression | own.py | 3 | 4
own.py: def g(x=[K := i for i in range(3)]): pass\ndef f(x): return K
= a table under another name | own.py | = 1 | = 2
own.py: T = {}\nU = [T]\nU[0]['a'] = 1\ndef f(x): return T
= a module that a function imports for its effect | ops.py | 1 | 2
own.py: from lib import T\ndef f(x):\n    import ops\n    return T['g'](x)
ops.py: from lib import T\nT['g'] = lambda x: 1
lib.py: T = {}
= a module of which all is imported, given away | low.py | 1 | 2
own.py: import lib\ndef f(x): return getattr(lib, x)
lib.py: from low import *
low.py: K = 1
= a table of another module | own.py | = 1 | = 2
own.py: from lib import T, g\nT['a'] = 1\ndef f(x): return g()
lib.py: T = {}\ndef g(): return T
= a decorator that fills a table of another module | ops.py | return 1 | return 2
own.py: import ops\nfrom lib import T\ndef f(x): return T['g'](x)
ops.py: from lib import add\n@add\ndef g(x): return 1
lib.py: T = {}\ndef add(g):\n    T['g'] = g\n    return g
= a method that fills a table of another module | own.py | return 1 | return 2
own.py: from lib import R\n@R.add\ndef g(x): return 1\ndef f(x): return R.d[0](x)
lib.py: class Table:\n    d = []\n    def add(self, g): self.d.append(g)\nR = Table()
= a table of subclasses | own.py | 1 | 2
own.py: from lib import Base\nclass A(Base): K = 1\ndef f(x): return Base.known[0].K
lib.py: class Base:\n    known = []\n    def __init_subclass__(cls): Base.known.append(cls)
= a type that a function is registered for | own.py | x: int | x: str
own.py: import functools\n@functools.singledispatch\ndef g(x): return 0\n@g.register
| def _(x: int): return 1\ndef f(x): return g(x)
= a module that a third one changes | own/patches.py | 1 | 2 | own.ops:f
own/__init__.py: from . import patches
own/ops.py: def f(x): return g(x)\ndef g(x): return x
own/patches.py: from . import ops\nops.g = lambda x: 1
= the state of a package | lib.py | 5 | 6
own.py: import lib\nimport decimal\ndef f(x): return decimal.Decimal(1) / 3
lib.py: import decimal\ndecimal.getcontext().prec = 5
= names that a module makes | own.py | 1 | 2
own.py: for n in 'gh':\n    globals()[n] = lambda x: 1\ndef f(x): return g(x)
= a module's dictionary | lib.py | 1 | 2
own.py: import lib\ndef f(x): return lib.__dict__[x]
lib.py: K = 1
= an import cycle | b.py | = 1 | = 2
own.py: import b\ndef f(x): return b.g(x)\nfrom b import lost
b.py: import own\ndef g(x): return own.f(x) + K\nfrom own import lost\nK = 1
= a compiled module | fast.abi3.so | one | two
own.py: import fast\ndef f(x): return fast.g(x)
fast.abi3.so: one
= the type of a constant | own.py | gain=2 | gain=2.0
own.py: def f(x, gain=2): return x * gain
= another function of a module | lib.py | return 1 | return 2
own.py: from lib import g\ndef f(x): return g(x)
lib.py: def g(x): return x\ndef apart(x): return 1
= a value taken between two imports | own.py | b = a\nfrom far import a | from far import a\nb = a
own.py: from lib import a\nb = a\nfrom far import a\ndef f(x): return b
lib.py: a = 1
far.py: a = 2
= the order of modules that change a third | own.py | import a\nimport b | import b\nimport a
own.py: import a\nimport b\nfrom lib import T\ndef f(x): return T
a.py: from lib import T\nT['k'] = 1
b.py: from lib import T\nT['k'] = 2
lib.py: T = {}
= a seed that another module draws by | own.py | seed(1) | seed(2)
own.py: import random\nrandom.seed(1)\nimport lib\ndef f(x): return lib.K
lib.py: import random\nK = random.random()
= a seed by another name of the package | own.py | seed(1) | seed(2)
own.py: import random\nfrom random import choice\nrandom.seed(1)
| K = choice('ab')\ndef f(x): return K
= a seed by a function that imports the package | own.py | seed(1) | seed(2)
own.py: def s():\n    import random\n    random.seed(1)\ns()\nimport lib\ndef f(x): return lib.K
lib.py: import random\nK = random.random()
= a state whose last value is kept | own.py | 'warn' | 'raise'
own.py: import numpy as np\nold = np.seterr(divide='warn')\ndef f(x): return np.geterr()
= a module that a function imports and changes | own.py | = 1 | = 2
own.py: def s():\n    import low\n    low.K = 1\ns()\nimport lib\ndef f(x): return lib.low.K
lib.py: import low
low.py: K = 0
= a module that a function imports and calls | own.py | put(1) | put(2)
own.py: def s():\n    import low\n    low.put(1)\ns()\nimport lib\ndef f(x): return lib.low.T
lib.py: import low
low.py: T = []\ndef put(x): T.append(x)
= an object by a method called compile | own.py | k = 1 | k = 2
own.py: class A:\n    def compile(self): return self\na = A().compile()
| a.k = 1\ndef f(x): return a.k
= an object of a class called Path | own.py | k = 1 | k = 2
own.py: class Path: pass\na = Path()\na.k = 1\ndef f(x): return a.k
= an iterator that a loop advances | own.py | == 3 | == 4
own.py: n = iter(range(9))\nfor i in n:\n    if i == 3: break\nK = next(n)\ndef f(x): return K
= a block that changes what it enters | own.py | with a: pass | pass
own.py: class A:\n    k = 0\n    def __enter__(self): self.k += 1\n    def __exit__(self, *x): pass
| a = A()\nwith a: pass\ndef f(x): return a.k
= what an imported module imports | low.py | 1 | 2
own.py: import lib\ndef f(x): return x
lib.py: def g():\n    import low
low.py: K = 1
"""
"""``= what | edited file | old | new | function``, and then the files."""


def parsed(table: str) -> Iterator[tuple[str, dict[str, str], tuple[str, str, str], str]]:
    for case in table.split("\n= ")[1:]:
        first, *lines = case.strip().replace("\n| ", "\\n").splitlines()
        what, *edit = first.split(" | ")
        texts = (line.partition(":") for line in lines)
        files = {name: text.strip().replace("\\n", "\n") for name, _, text in texts}
        name, before, after = (part.replace("\\n", "\n") for part in edit[:3])
        assert before in files[name] + "\n"
        yield what, files, (name, before, after), [*edit, "own:f"][3]


STRANGER = """# why
{}

def stranger(x=LR if (LR := 0.1) else 0):
    \"\"\"Does nothing.\"\"\"
    return 17 + LR
class Trainer: rate = LR
trainer = Trainer(); trainer.rate = LR * 2
if __name__ == "__main__":
    print(f(LR))
"""


@pytest.mark.parametrize(
    ("files", "edit", "name"), [pytest.param(*case, id=what) for what, *case in parsed(CASES)]
)
def test_what_an_edit_must_change_and_what_not(
    write: Write, files: dict[str, str], edit: tuple[str, str, str], name: str
) -> None:
    write(files)
    before = code_digest(name)
    own = next(
        file for file, text in files.items() if re.search(r"^(def f\(|f = )", text, re.MULTILINE)
    )
    write({file: f"# why\n{text}\n" for file, text in files.items() if file.endswith(".py")})
    write({own: STRANGER.format(files[own])})
    assert code_digest(name) == before
    edited, old, new = edit
    write({edited: f"{files[edited]}\n".replace(old, new)})
    assert code_digest(name) != before
    write(files)
    assert code_digest(name) == before


@pytest.mark.parametrize("use", ["getattr(own, x.upper())", "vars(own)[x.upper()]"])
def test_an_import_of_the_functions_module_may_use_any_name(write: Write, use: str) -> None:
    own = "K = 1\nfrom lib import g\ndef f(x): return g('k')"
    write({"own.py": own, "lib.py": f"import own\ndef g(x): return {use}"})
    before = code_digest("own:f")
    write({"own.py": own.replace("1", "2")})
    assert code_digest("own:f") != before


SAME: dict[str, tuple[str, str]] = {
    "annotations of parameters": ("x: int) -> int", "x: 'float')"),
    "line endings": ("\n", "\r\n"),
    "the order of definitions": ("K = 2\ndef g(): return K\n", "def g(): return K\nK = 2\n"),
    "what is printed of a constant": ("def g", "print(K, end='')\ndef g"),
    "a class that uses a constant": ("def g", "@dataclasses.dataclass\nclass A: k: int = K\ndef g"),
    "a helper that is called at import, and logs": ("log.info('a')", "log.info('b')"),
    "a constant computed of another": ("def g", "L = max(K, 3)\ndef g"),
    "an unrelated constant": ("K = 2", "LR = 0.1\nK = 2"),
    "the state of an unrelated object": ("def g", "class A: pass\nA.k = logging.INFO\ndef g"),
    "what another function is given": ("def g", "def h(k=K): return k\nh(4)\ndef g"),
}


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


SCRIPT = """
import argparse, logging
import random
import click, numpy as np, torch
from torch.utils.data import Dataset, DataLoader
from lib import build_model
SIZE = 224
LR = 0.1
MEAN = np.array([0.5])
CONFIG = {"lr": 0.1}
log = logging.getLogger(__name__)
app = click.Group()
DEVICE = torch.device("cpu")
torch.backends.cudnn.benchmark = True
random.seed(88)
class Base(Dataset):
    def __init__(self, root): self.root = root
    def __len__(self): return 3
class Train(Base):
    def __getitem__(self, n): return blur(np.zeros(SIZE)), n
class Val(Base):
    def __getitem__(self, n): return n + 11
def blur(x): return x * 2
def f(x): return blur(x) - MEAN.mean()
def train(model, lr=LR):
    for batch in DataLoader(Train(''), batch_size=32): model(f(batch))
@app.command()
@click.option("--lr", default=0.3)
def main(lr):
    log.info("start 77")
    train(build_model(55), lr)
parser = argparse.ArgumentParser()
parser.add_argument("--wd", default=0.01)
model = build_model(width=64)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
if __name__ == "__main__":
    loader = DataLoader(Train("here"), num_workers=5)
"""
"""A training script with an op and datasets; a global setting of torch counts for all of them."""


@pytest.mark.parametrize(
    ("old", "new", "noticed"),
    [
        *((old, new, "") for old, new in [
            ('"lr": 0.1', '"lr": 0.2'), ("batch_size=32", "batch_size=64"), ("0.3", "0.4"),
            ("num_workers=5", "num_workers=6"),
            ("start 77", "start 78"), ("(55)", "(56)"), ("0.01", "0.02"), ("=64", "=65"),
            ("(88)", "(89)"),
            ('"cpu"', '"cuda"'), ("import argparse, logging", "import logging\nimport argparse"),
        ]),
        ("x * 2", "x * 3", "f Train"), ("n + 11", "n + 12", "Val"), ("return 3", "4", "Train Val"),
        ("benchmark = True", "benchmark = False", "f Train Val"),
    ],
)  # fmt: skip
def test_an_edit_in_a_training_script_counts_for_what_reaches_it(
    write: Write, old: str, new: str, noticed: str
) -> None:
    write({"own.py": SCRIPT, "lib.py": "def build_model(width): return width"})
    before = {name: code_digest(f"own:{name}") for name in ("f", "Train", "Val")}
    assert old in SCRIPT
    write({"own.py": SCRIPT.replace(old, new)})
    assert [
        name for name in before if code_digest(f"own:{name}") != before[name]
    ] == noticed.split()


def test_code_is_not_run(write: Write) -> None:
    write({"own/__init__.py": "raise SystemExit", "own/a.py": "1 / 0\ndef f(x): return x"})
    code_digest("own.a:f")
    assert not [name for name in list(sys.modules) if name.partition(".")[0] == "own"]


def test_an_installed_package_counts_by_its_version(write: Write, tmp_path: Path) -> None:
    """Its distribution has another name than its module, as of ``cv2``."""
    site = tmp_path / "site-packages"
    info = site / "shifty_headless-1.dist-info"
    info.mkdir(parents=True)
    sys.path.insert(0, str(site))

    def digest(version: str, code: str = "a", installer: str = "pip", url: str = "") -> str:
        (site / "shifty.py").write_text(f"def g(x): return '{version}'")
        (info / "METADATA").write_text(f"Name: shifty-headless\nVersion: {version}\n")
        (info / "RECORD").write_text(f"shifty.py,sha256={code},9\nINSTALLER,sha256={installer},9\n")
        (info / "direct_url.json").unlink(missing_ok=True)
        if url:
            (info / "direct_url.json").write_text(url)
        digests._distributions.cache_clear()
        return code_digest("own:f")

    write({"own.py": "from shifty import g\nimport hypothesis\ndef f(x): return g(x)"})
    try:
        assert digest("1.0") == digest("1.0+cpu") != digest("1.1")
        assert digest("1.0", "a", "pip") == digest("1.0", "b", "uv")
        assert digest("1.0", "a", "pip", "{}") == digest("1.0", "a", "uv", "{ }")
        assert digest("1.0", "a", "pip", "{}") != digest("1.0", "b", "pip", "{}")
    finally:
        sys.path.remove(str(site))


@pytest.mark.parametrize(
    ("module", "name"),
    [("PIL", "pillow"), ("cv2", "opencv-python-headless"), ("math", "numpy")],
)
def test_a_package_is_found_by_the_name_of_its_module(
    write: Write, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy always counts, as functions get its arrays and random numbers."""
    write({"own.py": f"import {module}\ndef f(x): return {module}.open(x)"})
    before, version = code_digest("own:f"), digests.importlib.metadata.Distribution.version.fget
    digests._distributions.cache_clear()
    distribution = digests.importlib.metadata.Distribution
    newer = property(lambda d: version(d) + ".9" * (d.metadata["Name"].lower() == name))
    monkeypatch.setattr(distribution, "version", newer)
    assert code_digest("own:f") != before
    digests._distributions.cache_clear()


UNFOLLOWED = {
    "import_module under another name": "from importlib import import_module as im\n"
    "def f(x): return im(x)",
    "a module by a name that is computed": "import importlib\n"
    "def f(x): return importlib.import_module(x)",
    "code as text": "def f(x): return eval('g(x)')",
    "the names of a module": "def f(x): return globals()[x]",
    "variables of the environment": "import os\ndef f(x): return os.environ['A']",
    "arguments of the command": "import sys\ndef f(x): return sys.argv[1]",
    "built-in functions": "import builtins\ndef f(x): return builtins.exec(x)",
    "modules by name": "import sys\ndef f(x): return sys.modules[x]",
    "other ways to import": "import runpy\ndef f(x): return runpy.run_path(x)",
    "docstrings": "def f(x): return f.__doc__",
    "annotations": "def g(x: 1): pass\ndef f(x): return g.__annotations__",
    "help": "import inspect\ndef f(x): return inspect.getdoc(f)",
    "subclasses": "class A: pass\ndef f(x): return A.__subclasses__()",
}


@pytest.mark.parametrize("what", UNFOLLOWED)
def test_code_that_reaches_what_cannot_be_known_is_listed(write: Write, what: str) -> None:
    write({"own.py": UNFOLLOWED[what]})
    code = code_of("own:f")
    assert code is not None
    assert [reads for _, reads in unfollowed(code)] == [False]


READS = [
    *("open(x)", "np.load(x)", "net(weights=x)", "x.read_bytes()", "(x / 'a').read_text()"),
    *("io.read_image(x)", "io.loadmat(x)", "cdll.LoadLibrary(x)", "self.path.read_text()"),
    *("safe_open(x)", "PATH.read_bytes()", "h5py.File(x)", "ffi.dlopen(x)", "parser.parse_args(x)"),
    *("xarray.open_dataset(x)", "cv2.dnn.readNetFromONNX(x)", "tifffile.TiffFile(x)"),
    *("cv2.FileStorage(x)", "configparser.ConfigParser(x)", "linecache.getline(x, 1)"),
    *("glob.glob(x)", "os.listdir(x)", "x.rglob('*')", "sqlite3.connect(x)", "etree.parse(x)"),
]


@pytest.mark.parametrize("read", READS)
def test_files_that_are_read_are_listed_apart(write: Write, read: str) -> None:
    """Also of other modules, which count as a whole; a function of the user is followed instead."""
    lib = f"from paths import PATH\nclass Net:\n    def load(self): return {read}.a\n"
    lib += "    def read_all(self): return self.load(), json.loads(x)\ndef load(x): return x"
    own = f"from lib import load\ndef g(): {read}\ndef f(x): load(x)"
    write({"paths.py": "PATH = 1", "lib.py": lib, "own.py": own})
    code = code_of("own:f")
    assert code is not None
    assert unfollowed(code) == [(f"{read} in lib", True)]
    write({"own.py": f"from paths import PATH\nT = {read}\ndef f(x): return T"})
    code = code_of("own:f")
    assert code is not None
    assert unfollowed(code) == [(f"{read} in own", True)]


@pytest.mark.parametrize("given", ["map(np.load, x)", "partial(np.load, x)", "[np.load]"])
def test_a_function_that_reads_files_is_listed_where_others_call_it(
    write: Write, given: str
) -> None:
    write({"own.py": f"import numpy as np\ndef f(x): return isinstance(x, np.memmap), {given}"})
    code = code_of("own:f")
    assert code is not None
    assert unfollowed(code) == [("np.load in own", True)]


HARD = {
    "long expressions": f"K = {'+'.join(['1'] * 900)}",
    "long chains of branches": "K = 0\nif K == 0: pass\n"
    + "".join(f"elif K == {i}: pass\n" for i in range(900)),
    "strings that are not Unicode": "K = '\\ud800'",
    "other encodings": "# coding: latin-1\nK = 'a'",
}


@pytest.mark.parametrize("what", HARD)
def test_code_that_runs_is_followed(write: Write, what: str) -> None:
    write({"own.py": f"{HARD[what]}\ndef f(x): return K\n"})
    assert load_object("own:f", code_digest("own:f"))


def test_what_thousands_of_statements_change_is_found(write: Write) -> None:
    """Each by a call of its own, of which the effect depends on all before."""
    lines = [f"K{i} = h(K{i - 1})" for i in range(1, 1500)]
    text = "\n".join(["def h(x): return [x]", "K0 = [1]", *lines, "def f(x): return K1499"])
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
        return [code_digest(f"{module}:{name}") for name in NAMES]

    sys.path.insert(0, str(root))
    try:
        changed = [a != b for a, b in zip(found(1), found(22), strict=True)]
    finally:
        sys.path.remove(str(root))
    assert changed == [NAMES[edited] in reach[name] for name in NAMES]


VALUES = ["1", "{n}", "[{n}]", "{{'k': 1}}", "{n}(1)", "lib.h({n})", "max({n}, 1)"]
STATEMENTS = [
    *("{n} = {v}", "{n} = {{}}", "{n} += {v}", "{n}['k'] = {v}", "{n}.k = 1", "{n}.append({v})"),
    *("{n}({v})", "if {v}:\n    {n} = {v}", "for i in range(1):\n    {n}[i] = 1", "print({v})"),
    *("def {n}(x, y={v}): return {v}", "def {n}(x):\n    {m}['k'] = 1\n    return x"),
    *("def {n}(x):\n    global {m}\n    {m} = 1", "@{n}\ndef {m}(x): return 1"),
    *("class {n}({m}):\n    k = 1", "class {n}:\n    k = {v}\n    def g(self): return {v}"),
    *("from lib import h as {n}", "import lib as {n}", "import json as {n}"),
]
LIB = "T = {}\ndef h(x):\n    T['a'] = x\n    return x"


def random_module(draw: random.Random) -> tuple[list[str], str]:
    """Return statements that run, and a function after them."""

    def filled(text: str) -> str:
        n, m = draw.choices("abcdef", k=2)
        return text.format(n=n, m=m, v=draw.choice(VALUES).format(n=draw.choice("abcdef")))

    starts = ["{n} = [1]", "{n} = {{}}", "{n} = 1", "{n} = dict(k=1)", "def {n}(x): return x"]
    lines = ["import lib", *(draw.choice(starts).format(n=n) for n in "abcdef")]
    for text in draw.choices(STATEMENTS, k=12):
        line = filled(text)
        lines += [line] if run([*lines, line, "def f(x): pass"]) else []
    more = draw.choice(["", ", dict(lib.T)"])
    return lines, f"def f(x): return {filled('{v}')}, {filled('{v}')}{more}"


def run(lines: Sequence[str]) -> str:
    """Return what the function of a module returns, without addresses; empty if it fails."""
    sys.modules.pop("lib", None)
    names: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec("\n".join(lines), names)
            return re.sub("<[^>]*>", "", repr(names["f"](1)))
    except Exception:
        return ""


def edits_of(lines: list[str], draw: random.Random) -> Iterator[list[str]]:
    """Yield the lines with another number in one of them, without one, and in another order."""
    for at, line in enumerate(lines):
        if "1" in line:
            yield [*lines[:at], line.replace("1", "2", 1), *lines[at + 1 :]]
    for at in draw.sample(range(1, len(lines) - 1), 2):
        yield [*lines[:at], *lines[at + 1 :]]
        yield [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]


def test_an_edit_that_changes_what_a_function_returns_is_noticed(write: Write) -> None:
    """Of random modules, by running them; most edits of other statements are not."""
    draw, noticed, spared = random.Random(0), 0, 0
    write({"lib.py": LIB})
    for number in range(60):
        lines, function = random_module(draw)
        module, result = f"own{number}", run([*lines, function])
        write({f"{module}.py": "\n".join([*lines, function])})
        before = code_digest(f"{module}:f")
        for edited in edits_of(lines, draw) if result else ():
            write({f"{module}.py": "\n".join([*edited, function])})
            same = code_digest(f"{module}:f") == before
            other = run([*edited, function])
            assert not (same and other and other != result), (lines, edited, function)
            noticed, spared = noticed + (not same), spared + same
    assert min(noticed, spared) > 100


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
    code = code_of("own:f")
    assert code is not None
    text = code.texts["own"]
    assert hashlib.md5(text.encode()).hexdigest() == "e3b6fb3dee43fcf4c9383e25cbb5f8f1"


HASHED = """
import math, functools, lib
from lib import g as h
ALLOWED = {*"ant bee cat cow dog eel fox hen owl pig rat yak".split()}
T, U, V, W = {}, [1], {*"abcdefgh"}, frozenset("xyz")
def fill(x): T[x] = eval("1")
fill(1)
@functools.singledispatch
def pick(x): return open(x)
@pick.register
def _(x: int): return lib.K
for name in ALLOWED:
    T[name] = len(name)
def f(x): return h(x), T, U, V, W, pick(x), math.pi, ALLOWED
class Data:
    def __init__(self):
        self.names, self.groups = set(ALLOWED), {"a": set(ALLOWED), "b": (1, frozenset(ALLOWED))}
        self.keep = lambda name, kept=set(ALLOWED): name in kept
    def __len__(self): return 4
    def __getitem__(self, n): return {"image": b"", "tags": set(ALLOWED), "label": n}
"""
IDS = """
import sys
sys.path.insert(0, sys.argv[1])
from precache_workers.sources.kinds import open_source
from precache_workers.user_code.identity import code_of, unfollowed
code, source = code_of("own:f"), open_source("python:own:Data")
print(code.digest, unfollowed(code), source.list(lambda count: None).table.digest)
print(source.fetch(["0"], [-1])[0].content)
"""


def test_ids_are_the_same_whatever_the_order_of_sets(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Any
) -> None:
    write({"own.py": HASHED, "lib.py": "K = 1\ndef g(x): return {K, x}"})
    ids = set()
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        ids.add(run_python(IDS, tmp_path / "code").stdout)
    assert len(ids) == 1


# --- long-lived processes -----------------------------------------------------------------------

START = """
import importlib, os, re, sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path.insert(0, str(root))
from precache.errors import RecipeError
from precache_workers.user_code.loading import load_object

def write(**files):
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)
"""
SAID = """
def refused():
    try:
        return f"no: {load_object('own:f')(0)}"
    except RecipeError as error:
        return str(error)

def edited(file):
    said = refused()
    assert re.search(rf"/{file} was edited since its import; restart the process", said), said

OWN, NEAR = "from near import g\\ndef f(x): return g(x)", "def g(x): return x + 1"
"""
EDITS = """
# a helper
write(own=OWN, near=NEAR, apart="calls = []")
load = load_object("own:f")
import apart
write(near=NEAR + "  # the same", apart="1 / 0")
assert load_object("own:f") is load
write(near="def g(x): return 22")
edited("near.py")
edited("near.py")

# a new function
write(own="def g(x): return x")
load_object("own:g")
write(own="def f(x): return 22")
edited("own.py")

# a constant of a module that was imported before
write(own="K = 1\\ndef f(x): return K")
import own
write(own="K = 22\\ndef f(x): return K")
assert re.search(r"own.K is 1 in this process, but 22 by .*own.py.*: restart", refused())

# times are kept
write(own="def f(x): return 1")
import own
write(own="def f(x): return 2222 % 100")
os.utime(root / "own.py", (10**9, 10**9))
edited("own.py")
write(own="def f(x): return 22")

# a helper that was imported before
write(own=OWN, near=NEAR)
import near
write(near="def g(x): return 22")
edited("near.py")

# annotations
write(own="class A: x: int\\ndef f(x): return A.__annotations__['x'](x)")
load_object("own:f")
write(own="class A: x: int\\ndef f(x): return A.__annotations__['x'](x) + 22")
edited("own.py")

# the user reloads it
write(own="def f(x): return 1")
assert load_object("own:f")(0) == 1
write(own="def f(x): return 20 + 2")
import own
importlib.reload(own)
assert refused() == "no: 22"

# a function that was imported before, without bytecode that would show the edit
write(own="def f(x): return 1")
sys.dont_write_bytecode = True
import own
sys.dont_write_bytecode = False
assert load_object("own:f") is own.f
write(own="def f(x): return 22")
edited("own.py")
""".strip().split("\n\n")


def of_modules(number: object, code: str) -> str:
    """The code with modules of its own."""
    return re.sub(r"\b(own|near|apart)\b", rf"\g<1>{number}", code)


def test_a_process_that_imported_an_older_state_is_to_be_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., Any]
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    edits = [of_modules(number, f"{SAID}{edit}\n") for number, edit in enumerate(EDITS)]
    run_python("".join([START, *edits]), tmp_path)
    again = [f"assert load_object('own{n}:f')(0) == 22\n" for n in range(len(EDITS))]
    run_python("".join([START, *again]), tmp_path)


def test_bytecode_that_python_cached_of_an_earlier_edit_is_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., Any]
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    paths = [tmp_path / "own0.py", tmp_path / "own1.py"]
    for path in paths:
        path.write_text("def f(x): return 11")
    run_python(START + "load_object('own0:f')\nload_object('own1:f')", tmp_path)
    for path in paths:
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        path.write_text("def f(x): return 22")
        os.utime(path, ns=times)  # as of an edit within a second
    loads = [SAID + "print(refused())\n", SAID + "import own\nprint(refused())\n"]
    said = run_python(START + "".join(map(of_modules, range(2), loads)), tmp_path).stdout
    advice = re.findall(r"restart the process \(if that does not help, remove (\S+)\)", said)
    assert len(advice) == 2, said
    for path in advice:
        Path(path).unlink()
    again = "assert load_object('own0:f')(0) == load_object('own1:f')(0) == 22"
    run_python(START + again, tmp_path)


def test_code_that_changed_since_a_build_began_makes_no_row(write: Write) -> None:
    write({"own.py": "from near import g\ndef f(x): return g(x)", "near.py": "def g(x): return x"})
    before = code_digest("own:f")
    load_object("own:f", before)
    write({"near.py": "def g(x): return x + 1"})
    with pytest.raises(RecipeError, match="not what it was when the build began"):
        load_object("own:f", before)


FUNCTION = {"op": "function", "function": "own:f"}
CONSTANTS = """
import os
import near as n
K = 3
N: float = -1.5
T = (1, (2.5, None))
GIVEN = os.environ.get("FIX", "a")
COUNT = 0
TWICE = 1
TWICE = 3
STATE = {"n": 0}
USED = [1]
n.PUT = 5
def count():
    global COUNT
    COUNT += 1
def f(x):
    STATE["n"] += 1
    USED.append(x)
    n.CALLS += 1
    return K + N + len(T) + TWICE + COUNT + len(GIVEN) + n.M + n.PUT
"""
NEAR = "M = 3\nCALLS = 0\nPUT = 1"


@pytest.mark.parametrize(
    ("module", "name", "value", "said"),
    [
        ("own", "K", 7, r"own\.K is 7 in this process, but 3 by .*own\.py"),
        ("own", "K", np.int64(3), r"own\.K is np\.int64\(3\) in this process, but 3"),
        ("own", "N", None, r"own\.N is None in this process, but -1\.5 by"),
        ("own", "T", (1, (2.5, 0)), r"own\.T is \(1, \(2\.5, 0\)\) in this process"),
        ("near", "M", 7, r"near\.M is 7 in this process, but 3 by"),
    ],
)
def test_a_constant_set_at_run_time_is_refused(
    write: Write, module: str, name: str, value: object, said: str
) -> None:
    write({"near.py": NEAR, "own.py": CONSTANTS})
    before = load_object("own:f")
    kept = getattr(sys.modules[module], name)
    setattr(sys.modules[module], name, value)
    with pytest.raises(
        RecipeError, match=rf"{said}.*restart the process.*, remove \S+\.pyc\).*params=\{{\.\.\.\}}"
    ):
        load_object("own:f")
    with pytest.raises(RecipeError, match=said):
        function_digests(precache.Recipe.from_dict({"fields": {"image": {"ops": [FUNCTION]}}}))
    setattr(sys.modules[module], name, kept)
    assert load_object("own:f") is before


def test_values_that_code_changes_itself_are_not_refused(write: Write) -> None:
    write({"near.py": NEAR, "own.py": CONSTANTS})
    function = load_object("own:f")
    own: Any = sys.modules["own"]
    for _ in range(2):
        function(1)
        own.count()
    own.GIVEN = "abc"
    assert load_object("own:f") is function
    assert len(function.__globals__["USED"]) == 3


# --- builds -------------------------------------------------------------------------------------

GAIN = {
    "own/__init__.py": "from own.ops import shift",
    "own/ops.py": "from own.amounts import amount\ndef shift(x): return x + amount()",
    "own/amounts.py": "def amount(): return 1",
}
MORE = {"own/amounts.py": "def amount(): return 2"}
BESIDE = {"own/ops.py": GAIN["own/ops.py"] + "\ndef other(): return 3\n"}
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
    write({"own/amounts.py": "# why\n" + GAIN["own/amounts.py"], **BESIDE})
    assert precache.plan(photos, store, RECIPE, address="serial").state == "nothing"
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


TRAIN = """
import torch
LR = 0.1
GAIN = 1
def shift(x): return x + GAIN
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
"""


def test_ensure_names_the_edit_and_the_rows_and_an_edit_beside_it_builds_nothing(
    write: Write, photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def ensured(train: str) -> str:
        write({"own/__init__.py": train})
        precache.ensure(photos, tmp_path / "store", RECIPE, address="serial", progress=True)
        return " ".join(capfd.readouterr().err.split())

    ensured(TRAIN)
    assert ensured(TRAIN.replace("LR = 0.1", "LR = 0.2")) == ""
    said = ensured(TRAIN.replace("GAIN = 1", "GAIN = 2"))
    assert re.search(r"The code of own:shift was edited since version \w+: 6 rows", said), said


@pytest.mark.parametrize("use", ["import far\ndef shift(x):", "def shift(x):\n    import far"])
def test_a_module_in_a_folder_that_the_users_code_adds_to_the_path_is_followed(
    write: Write, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    def built() -> precache.BuildResult:
        monkeypatch.setattr(sys, "path", path.copy())
        monkeypatch.delitem(sys.modules, "far", raising=False)
        return build_here(photos, tmp_path / "store", RECIPE)

    path, more = sys.path.copy(), tmp_path / "more"
    more.mkdir()
    (more / "far.py").write_text("K = 1")
    own = {"own.py": f"import sys\nsys.path.append('{more}')\n{use}\n    return x + far.K"}
    write(own)
    first, before = built(), values(tmp_path / "store")
    write(own)
    (more / "far.py").write_text("K = 2  # more")
    assert built().version != first.version
    assert (values(tmp_path / "store") == (before + 1) % 256).all()


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


def test_what_cannot_be_followed_is_said_by_plan_and_build(
    write: Write, photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write({"own/__init__.py": "def shift(x): return x + eval('1')"})
    quick: dict[str, Any] = {"timing": False, "address": "serial", "progress": True}
    precache.plan(photos, tmp_path / "store", RECIPE, **quick)
    build_here(photos, tmp_path / "store", RECIPE, {"progress": True})
    shown = capfd.readouterr().err
    line = (
        "own:shift: edits of what these reach are not noticed: eval('1') in own; give the function"
    )
    assert " ".join(shown.split()).count(line) == 2
    recipe = RECIPE.to_dict()
    recipe["fields"]["image"]["ops"][-1]["version"] = "2"
    precache.plan(photos, tmp_path / "store", precache.Recipe.from_dict(recipe), **quick)
    assert "not noticed" not in capfd.readouterr().err
