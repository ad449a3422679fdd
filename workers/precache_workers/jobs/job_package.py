"""Job packages: options of a build, the user's code and small files, to be sent to a cluster."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precache.errors import UsageError
from precache.messages import shown
from precache.recipe.recipe import Recipe
from precache.storage.local import local_path
from precache.units import size
from precache_workers.jobs.storage_options import split_options
from precache_workers.planning.options import BuildOptions

SENT = "precache_sent"
"""Folder of the files that options name, in the job's working directory."""

FILE_OPTIONS = ("labels", "classes")
"""Options that name a file, which is sent if it is on this machine."""

MOST_COMMAND_NBYTES = 100_000
"""Limit of a command line, which the job's shell takes as one argument; Linux allows 131,072."""

_JUNK = re.compile(r"\..*|__pycache__|node_modules|.*\.py[co]|.*\.egg-info")


@dataclass(frozen=True)
class JobPackage:
    """A build ready to be sent.

    Attributes
    ----------
    store
        As the cluster sees it.
    document
        JSON that ``precache job`` runs there: source, store, recipe and options.
    files
        Path below the job's working directory -> file here.
    """

    store: str
    document: str
    files: Mapping[str, Path]

    def digest(self) -> str:
        """12 hex digits that are the same for the same build of the same code."""
        digest = hashlib.sha256(self.document.encode())
        for name, path in sorted(self.files.items()):
            digest.update(json.dumps(name).encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:12]

    def unpack(self, folder: Path) -> None:
        """Write the files into a folder, as the job will find them."""
        for name, path in self.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def pack(
    source: str,
    store: str,
    recipe: Recipe,
    options: BuildOptions,
    code: Sequence[str | os.PathLike[str]] = (),
) -> JobPackage:
    """Collect all that a build on a cluster takes from this machine.

    Parameters
    ----------
    code
        Modules and packages, or folders of them, that the job can import.

    Raises
    ------
    UsageError
        Something cannot be sent.
    """
    files = _code_files(code)
    factories = [source.removeprefix("python:")] * source.startswith("python:")
    _check_imports([*(op.function for op in recipe.functions), *factories], files)
    # The recipe travels as the user's own, whose functions need no permission.
    updates: dict[str, Any] = {"report": tuple(map(_as_there, options.report))}
    updates["run_functions"] = False
    for name in FILE_OPTIONS:
        value = getattr(options, name)
        if value is not None:
            path = Path(value)
            updates[name] = f"{SENT}/{name}/{path.name}" if path.is_file() else _as_there(value)
            if path.is_file():
                files[updates[name]] = path
    updates["storage_options"], updates["storage_options_env"] = split_options(
        options.storage_options
    )
    changed = options.model_copy(update=updates).model_dump(mode="json", exclude_defaults=True)
    data, store = recipe.as_stated(), _as_there(store)
    content = {"store": store, "source": _as_there(source), "recipe": data, "options": changed}
    document = json.dumps(content, separators=(",", ":"))
    if len(shlex.quote(document)) > MOST_COMMAND_NBYTES:
        raise UsageError(
            f"the recipe takes {size(len(json.dumps(data)))} as text, too much for a command line; "
            "put what is large into a file that the cluster can read, and name it in the params"
        )
    return JobPackage(store, document, files)


def _as_there(name: str) -> str:
    """Return a URL, or a path as absolute, which the cluster may see at the same place.

    Raises
    ------
    UsageError
        The URL holds credentials, which Ray would list.
    """
    if "://" not in name:
        return name if name.startswith("python:") else str(local_path(name).absolute())
    if shown(name) != name:
        raise UsageError(
            f"{shown(name)} carries credentials, or what may be some, and Ray would list them with "
            "the job; name a variable that the nodes have: --storage-options-env"
        )
    return name


# --- code ---------------------------------------------------------------------------------------


def _code_files(code: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """Map paths in the job's working directory to files of packages and of folders' contents.

    Hidden files, caches, virtual environments and stores are left out.
    """
    files: dict[str, Path] = {}
    for entry in code:
        path = Path(entry).absolute()
        if path.is_dir():
            root = path.parent if (path / "__init__.py").is_file() else path
            inside = {file.relative_to(root).as_posix(): file for file in _walk(path)}
        elif path.is_file() and inspect.getmodulename(path.name):
            inside = {path.name: path}
        else:
            raise UsageError(f"--code {entry} is no Python module, package or folder of them")
        for name in inside.keys() & files.keys():
            if inside[name] != files[name]:
                raise UsageError(f"--code gives {name} twice: {files[name]} and {inside[name]}")
        files |= inside
    return files


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if _JUNK.fullmatch(path.name):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and not (path.is_symlink() or _is_data(path)):
            yield from _walk(path)


def _is_data(folder: Path) -> bool:
    """Return True for a virtual environment, a store, and a Zarr group or array."""
    return any((folder / name).exists() for name in ("pyvenv.cfg", "commits", "zarr.json"))


def _check_imports(imports: Iterable[str], files: Mapping[str, Path]) -> None:
    """Refuse functions and factories of the current folder that would not be sent."""
    tops = {name.split("/")[0].removesuffix(".py") for name in files}
    for name in imports:
        top = name.partition(":")[0].partition(".")[0]
        here = [path for path in (f"{top}.py", top) if Path(path).exists()]
        if here and top not in tops:
            raise UsageError(f"{name} is here and not on the cluster; send it: --code {here[0]}")
