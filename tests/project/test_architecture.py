"""Who may import whom, and what an import costs."""

import ast
import importlib
import itertools
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import precache
from tests.support.building import environment

ROOT = Path(precache.__file__).parents[1]


def _modules() -> dict[str, Path]:
    """Name -> file of every module of both packages."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path
        for folder in (ROOT / "precache", ROOT / "workers/precache_workers")
        for path in folder.rglob("*.py")
        if path.stem != "__init__"
    }


MODULES = _modules()


def _top_level(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (n for part in node.orelse for n in _top_level(ast.Module([part], [])))
        else:
            yield from _top_level(node)


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.module is not None
    for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        yield inner if inner in MODULES else node.module


def _imported(module: str) -> set[str]:
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    return {name for node in _top_level(tree) for name in _names(node)}


def _everywhere(path: Path) -> set[str]:
    """Packages that a file imports anywhere, functions included."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    found = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    return {name.partition(".")[0] for node in found for name in _names(node)}


def test_packages_import_none_of_their_modules() -> None:
    for folder in (ROOT / "precache", ROOT / "workers/precache_workers"):
        for path in folder.rglob("__init__.py"):
            tree = ast.parse(path.read_text("utf-8"))
            names = {name for node in _top_level(tree) for name in _names(node)}
            assert not any(name.startswith("precache") for name in names), path
            assert ast.get_docstring(tree), path


def test_the_map_names_all_packages_and_only_what_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert text.count("\n") <= 120
    names = set(re.findall(r"`([\w./-]+)`", text))
    for name in names:
        if name.startswith(("precache.", "precache_workers.")):
            pkgutil.resolve_name(name)
        elif "/" in name:
            assert (ROOT / name).exists(), name
    packages = {name.rpartition(".")[0] for name in MODULES} - {"precache", "precache_workers"}
    top = {".".join(package.split(".")[:2]) for package in packages}
    assert top - names <= {"precache_workers.runtime"}, "packages that the map lacks"


def test_only_the_cluster_and_the_job_server_import_ray() -> None:
    """Tasks and jobs are two subjects."""
    found = {name for name, path in MODULES.items() if "ray" in _everywhere(path)}
    workers = "precache_workers"
    in_cluster = {f"{workers}.cluster.{name}" for name in ("nodes", "ray_engine", "ray_session")}
    assert found == {*in_cluster, f"{workers}.jobs.job_server"}


def _required(group: str | None) -> set[str]:
    """Modules of the packages that an installation with an extra, or without one, brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = project["dependencies"] if group is None else project["optional-dependencies"][group]
    names = {re.split(r"[<>=~ \[;]", requirement)[0] for requirement in listed}
    return {{"pillow": "PIL"}.get(name, name.replace("-", "_")) for name in names}


def test_a_training_node_needs_no_library_of_the_workers_at_import() -> None:
    extras = _required("workers") - _required(None)
    assert {"ray", "PIL", "simplejpeg", "pyarrow"} <= extras
    for module in MODULES:
        if module.startswith("precache."):
            tops = {name.split(".")[0] for name in _imported(module)}
            assert not tops & extras, module


Python = Callable[..., subprocess.CompletedProcess[str]]

PLANNING = ", ".join(
    f"precache_workers.{name}"
    for name in ("driver.build", "driver.build_plan", "planning.target_version", "sources.base")
)
LOADING = "precache.loading.loader, precache.loading.dataset, precache.store.open"
ABSENT: Sequence[Sequence[tuple[str, set[str]]]] = [
    [
        ("precache", {"torch", "ray", "zarr", "PIL", "simplejpeg", "numpy", "pyarrow"}),
        (PLANNING, {"torch", "ray", "zarr", "PIL", "simplejpeg"}),
        ("precache_workers.shards.shard_task", {"torch"}),
    ],
    [
        (LOADING, {"ray", "zarr", "PIL", "simplejpeg", "pyarrow"}),
        ("precache.building, precache.storage.remote, precache.reading.disk_cache", set()),
        ("precache.loading.mixing, precache.metering.meter, precache.transforms", set()),
    ],
]
"""What a process imports, one after another, and what it has not loaded then."""

NOTING = """
import atexit, gc, os, sys
made = []
def noting(register):
    def note(*functions, **more):
        if sys._getframe(1).f_globals["__name__"].startswith("precache"):
            made.append((functions, more))
        return register(*functions, **more)
    return note
atexit.register, os.register_at_fork = noting(atexit.register), noting(os.register_at_fork)
"""
REGISTERED = """
print(made, [c for c in gc.callbacks if "precache" in str(getattr(c, "__module__", c))])
"""


@pytest.mark.parametrize("steps", ABSENT, ids=["building", "loading"])
def test_an_import_loads_no_library_that_it_does_not_need_and_registers_nothing(
    run_python: Python, steps: Sequence[tuple[str, set[str]]]
) -> None:
    code = "".join(f"import {modules}\nprint(*sys.modules)\n" for modules, _ in steps)
    *loaded, registered = run_python(NOTING + code + REGISTERED).stdout.splitlines()
    for line, (modules, absent) in zip(loaded, steps, strict=True):
        assert not {*line.split()} & absent, modules
    assert registered == "[] []"


def test_the_docs_name_parts_and_options_that_benchmarks_have() -> None:
    from tests.bench.harness import parse

    guide = (ROOT / "tests/bench/README.md").read_text("utf-8")
    texts = [guide, *(path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md"))]
    lines = set(re.findall(r"tests\.bench\.([a-z]+[^`\n]*)", "\n".join(texts)))
    listed = re.findall(r"^\| (?:`(\w+)`)? ?\| `(\w+)` \|", guide, re.MULTILINE)
    modules = list(itertools.accumulate((name for name, _ in listed), lambda one, two: two or one))
    for name in set(modules):
        module = f"tests.bench.{name}" + ".__main__" * (name == "peers")
        parts = importlib.import_module(module).PARTS
        assert [part.name for part in parts] == [
            part for own, (_, part) in zip(modules, listed, strict=True) if own == name
        ]
        for line in (line for line in lines if line.split()[0] == name):
            parse(name, parts, shlex.split(line, comments=True)[1:])
    assert {line.split()[0] for line in lines} <= set(modules)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "line",
    ["reading --rows 512 --rounds 1", "reading small --rounds 1", "building --rows 60 --rounds 1"],
)
def test_a_benchmark_measures(line: str) -> None:
    name, *options = line.split()
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.{name}", *options, "--json"],
        check=False, cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["machine"]


def test_commands_import_only_what_they_need(run_python: Python) -> None:
    """None, those that are wrong, and those that only read a store, one after another."""
    code = (
        "import sys, precache.cli.main as m\nfor line in sys.argv[1:]:\n"
        "    try: m.main(line.split())\n    except SystemExit: pass\n"
        "    print(chr(10) + chr(31), *sys.modules)"
    )
    none = "", "--version", "--help", "biuld"
    reading = [f"{name} /nowhere" for name in ("info", "ls", "gc", "use", "verify")]
    printed = run_python(code, *none, *reading).stdout.splitlines()
    loaded = [{*line.split()} for line in printed if line.startswith("\x1f")]
    assert len(loaded) == len(none) + len(reading)
    without, last = loaded[len(none) - 1], loaded[-1]
    assert not without & {"numpy", "pydantic", "rich", "fsspec"}
    if sys.version_info < (3, 14):  # from there on, argparse imports these two
        assert not without & {"dataclasses", "inspect"}
    assert not last & {"precache_workers", "rich.progress", "torch", "fsspec", "asyncio"}


def test_type_checkers_see_the_names_that_are_exported_where_they_live_and_no_others() -> None:
    tree = ast.parse(Path(precache.__file__).with_suffix(".pyi").read_text("utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = [(alias.name, alias.asname, node.module) for node in imports for alias in node.names]
    assert [name for name, _, _ in seen] == precache.__all__
    assert dir(precache) == sorted({*precache.__all__})
    for name, shown, home in seen:
        assert shown == name, "else it is private"
        value = getattr(precache, name)
        assert (value.__name__, value.__module__) == (name, home)
    with pytest.raises(AttributeError, match="no attribute 'Caches'"):
        _ = precache.Caches  # type: ignore[attr-defined]  # it does not exist
