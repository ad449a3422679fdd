"""Who may import whom, and what an import costs."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
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
    """Tasks and jobs are two subjects; the counters see nothing else of Ray."""
    found = {name for name, path in MODULES.items() if "ray" in _everywhere(path)}
    workers = "precache_workers"
    counters = f"{workers}.cluster.counters"
    in_cluster = {f"{workers}.cluster.{name}" for name in ("nodes", "ray_engine", "ray_session")}
    assert found == {*in_cluster, f"{workers}.jobs.job_server", counters}
    tree = ast.parse(MODULES[counters].read_text("utf-8"))
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {name for node in nodes for name in _names(node) if name.startswith("ray")}
    assert names == {"ray.util.metrics"}


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


LOADED = "import sys, {modules}\nprint(*sys.modules)"


def _loaded(run: Callable[..., subprocess.CompletedProcess[str]], modules: str) -> set[str]:
    return set(run(LOADED.format(modules=modules)).stdout.split())


def test_importing_precache_loads_no_heavy_library(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    loaded = _loaded(run_python, "precache")
    assert not loaded & {"torch", "ray", "zarr", "PIL", "simplejpeg", "numpy", "pyarrow"}


def test_planning_a_build_loads_neither_torch_nor_ray_nor_a_decoder(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    names = ("driver.build", "driver.build_plan", "planning.target_version", "sources.base")
    loaded = _loaded(run_python, ", ".join(f"precache_workers.{name}" for name in names))
    assert not loaded & {"torch", "ray", "zarr", "PIL", "simplejpeg"}


def test_what_a_driver_hands_out_needs_no_torch(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert "torch" not in _loaded(run_python, "precache_workers.shards.shard_task")


@pytest.mark.heavy
def test_every_benchmark_can_be_loaded(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    folder = ROOT / "tests/bench"
    modules = [f"tests.bench.{path.stem}" for path in folder.glob("[a-z]*.py")]
    modules += ["tests.bench.peers.__main__"]
    assert set(modules) <= _loaded(run_python, ", ".join(modules))


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


def test_an_import_registers_nothing_with_the_interpreter(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(
        """
import atexit, gc, os, sys
import torch, torch.utils.data, torch.distributed
before = list(gc.callbacks)
made = []
def note(*functions, **more):
    if sys._getframe(1).f_globals["__name__"].startswith("precache"):
        made.append((functions, more))
atexit.register = os.register_at_fork = note
import precache.building, precache.loading.mixing, precache.metering.meter
import precache.reading.disk_cache, precache.storage.remote, precache.transforms
print(made, gc.callbacks == before)
"""
    )
    assert done.stdout == "[] True\n"


def _loaded_by_commands(
    run: Callable[..., subprocess.CompletedProcess[str]], *lines: str
) -> set[str]:
    """Return the modules that are loaded after command lines, one after another."""
    code = (
        "import sys, precache.cli.main as m\nfor line in sys.argv[1:]:\n"
        "    try: m.main(line.split())\n    except SystemExit: pass"
    )
    return set(run(f"{code}\nprint(*sys.modules)", *lines).stdout.split())


def test_without_a_command_no_library_is_imported(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    loaded = _loaded_by_commands(run_python, "", "--version", "--help", "biuld")
    assert not loaded & {"numpy", "pydantic", "rich", "fsspec"}
    if sys.version_info < (3, 14):  # from there on, argparse imports these two
        assert not loaded & {"dataclasses", "inspect"}


def test_a_command_that_reads_imports_no_package_of_the_workers(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    commands = ("info", "ls", "gc", "use", "verify")
    loaded = _loaded_by_commands(run_python, *(f"{name} /nowhere" for name in commands))
    assert not loaded & {"precache_workers", "rich.progress", "torch", "fsspec", "asyncio"}


def test_opening_and_loading_need_no_zarr_python_and_no_decoder(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    loaded = _loaded(
        run_python, "precache.loading.loader, precache.loading.dataset, precache.store.open"
    )
    assert not loaded & {"ray", "zarr", "PIL", "simplejpeg", "pyarrow"}


def test_type_checkers_see_the_names_that_are_exported_where_they_live() -> None:
    tree = ast.parse(Path(precache.__file__).with_suffix(".pyi").read_text("utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = [(alias.name, alias.asname, node.module) for node in imports for alias in node.names]
    assert [name for name, _, _ in seen] == precache.__all__
    assert dir(precache) == sorted({*precache.__all__})
    for name, shown, home in seen:
        assert shown == name, "else it is private"
        value = getattr(precache, name)
        assert (value.__name__, value.__module__) == (name, home)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Caches'"):
        _ = precache.Caches  # type: ignore[attr-defined]  # it does not exist
