"""What travels with a build to a cluster: its command line, the user's code, small files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from precache.errors import UsageError
from precache.messages import shown
from precache.recipe.recipe import Recipe
from precache.storage.environment import with_environment
from precache.units import size
from precache_workers.jobs.storage_options import split_options

SENT = "precache_sent"
"""Folder of the files that options name, in the job's working directory."""

FILE_OPTIONS = ("labels", "classes")
"""Options that name a file, which travels where this machine has it."""

MOST_COMMAND_NBYTES = 100_000
"""Of a command line: the job's shell takes it as one argument, of which Linux allows 131,072."""

MOST_NBYTES = 99 << 20
"""Of all files; Ray's job server takes requests of up to 100 MiB, and does not compress."""

_JUNK = re.compile(r"\..*|__pycache__|node_modules|.*\.py[co]|.*\.egg-info")


@dataclass(frozen=True)
class JobPackage:
    """A build ready to be sent.

    Attributes
    ----------
    store
        As the cluster sees it.
    arguments
        Of `precache` there.
    files
        Path below the job's working directory -> file here.
    """

    store: str
    arguments: tuple[str, ...]
    files: Mapping[str, Path]

    def digest(self) -> str:
        """12 hex digits that are the same for the same build of the same code."""
        found = hashlib.sha256(json.dumps(self.arguments).encode())
        for name, path in sorted(self.files.items()):
            found.update(json.dumps(name).encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()[:12]

    def unpack(self, folder: Path) -> None:
        """Lay the files down as the job will see them."""
        for name, path in self.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def pack(
    source: str,
    store: str,
    recipe: Recipe,
    options: Mapping[str, Any],
    code: Sequence[str | os.PathLike[str]] = (),
) -> JobPackage:
    """All that a build on a cluster takes from this machine.

    Parameters
    ----------
    options
        Keyword arguments of `precache.build` that differ from its defaults.
    code
        Modules and packages, or folders of them, that the job can import.

    Raises
    ------
    UsageError
        Something cannot be sent, or would stand in the way of what the cluster has.
    """
    # In its own order, which is that of a batch's fields.
    data = recipe.to_dict()
    for name, each in recipe.fields.items():
        if "first_variant" in each.model_fields_set:  # written, it counts, though it be the default
            data["fields"][name]["first_variant"] = each.first_variant
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    line = ["build", _as_there(source), there := _as_there(store), f"--recipe={text}"]
    parcel = _pack(there, line, _imports(source, recipe), options, code)
    if len(os.fsencode(" ".join(parcel.arguments))) > MOST_COMMAND_NBYTES:
        raise UsageError(
            f"the recipe takes {size(len(text))} as text, too much for a command line; put what "
            "is large into a file that the cluster can read, and name it in the params"
        )
    return parcel


def pack_refresh(
    source: str | None,
    store: str,
    recipe: Recipe | None,
    options: Mapping[str, Any],
    code: Sequence[str | os.PathLike[str]] = (),
) -> JobPackage:
    """The same for a refresh.

    Parameters
    ----------
    recipe
        The store's; None where the store cannot be opened here.
    options
        Keyword arguments of `precache.refresh` that differ from its defaults.
    """
    line = ["refresh", there := _as_there(store)]
    line += [f"--source={_as_there(source)}"] if source else []
    return _pack(there, line, _imports(source or "", recipe), options, code)


def _pack(
    store: str,
    line: Sequence[str],
    imports: Sequence[str],
    options: Mapping[str, Any],
    code: Sequence[str | os.PathLike[str]],
) -> JobPackage:
    """A command with its options and what travels along.

    Parameters
    ----------
    imports
        What the job imports by name, as ``package.module:name``.
    """
    files = _code_files(code)
    _check_names(files)
    _check_imports(imports, files)
    given = dict(options)
    plain, variables = split_options(
        with_environment(given.pop("storage_options", None), given.pop("storage_options_env", None))
    )
    given["storage_option"] = [f"{key}={json.dumps(value)}" for key, value in plain.items()]
    given["storage_option_env"] = [f"{key}={variable}" for key, variable in variables.items()]
    for name in FILE_OPTIONS:
        if given.get(name) is not None:
            path = Path(given[name])
            sent = f"{SENT}/{name}/{path.name}"
            if path.is_file():
                files[sent] = path
            given[name] = sent if path.is_file() else _as_there(os.fspath(given[name]))
    reports = given.get("report") or ()
    listed = [reports] if isinstance(reports, str | os.PathLike) else reports
    given["report"] = [_as_there(os.fspath(path)) for path in listed]
    _check_size(files)
    return JobPackage(store, (*line, "--address=auto", "--json", *_flags(given)), files)


def _as_there(name: str) -> str:
    """A path of this machine made absolute; the cluster sees it at the same place, or not at all.

    Raises
    ------
    UsageError
        For a URL with credentials, which Ray would list.
    """
    if "://" not in name:
        return name if name.startswith("python:") else str(Path(name).expanduser().absolute())
    if shown(name) != name:
        raise UsageError(
            f"{shown(name)} carries credentials, or what may be some, and Ray would list them with "
            "the job; name a variable that the nodes have: --storage-option-env"
        )
    return name


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Keyword arguments of `precache.build` as `precache build` takes them."""
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                yield flag
            case False:
                yield _OFF[name]
            case Mapping():
                one = "--" + name.removeprefix("node_").removesuffix("s").replace("_", "-")
                yield from (f"{one}={key}={each}" for key, each in value.items())
            case list() | tuple():
                yield from (f"{flag}={each}" for each in value)
            case _:
                yield f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}"


_OFF = {"check_space": "--no-space-check", "progress": "--quiet"}
"""Flags that turn off what is on by default."""


# --- code ---------------------------------------------------------------------------------------


def _code_files(code: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """Path in the working directory -> file; a package comes whole, of a plain folder its contents.

    Left out are hidden files, caches, virtual environments and stores.
    """
    files: dict[str, Path] = {}
    for each in code:
        path = Path(each).absolute()
        if path.is_dir():
            root = path.parent if (path / "__init__.py").is_file() else path
            found = {file.relative_to(root).as_posix(): file for file in _walk(path)}
        elif path.is_file() and inspect.getmodulename(path.name):
            found = {path.name: path}
        else:
            raise UsageError(f"--code {each} is no Python module, package or folder of them")
        for name in found.keys() & files.keys():
            if found[name] != files[name]:
                raise UsageError(f"--code gives {name} twice: {files[name]} and {found[name]}")
        files |= found
    return files


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if _JUNK.fullmatch(path.name):
            continue
        if not path.is_dir():
            yield from [path] if path.is_file() else []
        elif not path.is_symlink() and not _is_data(path):
            yield from _walk(path)


def _is_data(folder: Path) -> bool:
    """Whether a folder is a virtual environment, a store, or a Zarr group or array."""
    return any((folder / name).exists() for name in ("pyvenv.cfg", "commits", "zarr.json"))


def _top_modules(files: Iterable[str]) -> dict[str, str]:
    """Name -> what is imported by it; folders without `__init__.py` stand in nobody's way."""
    found = {}
    for name in files:
        first, *rest = PurePosixPath(name).parts
        module = inspect.getmodulename(first) if not rest else first
        if module and (not rest or rest == ["__init__.py"]):
            found[module] = name
    return found


def _check_names(files: Mapping[str, Path]) -> None:
    """Raise where a module would be imported in place of one that the build needs."""
    taken = _needed_modules()
    for module, name in _top_modules(files).items():
        if module in taken or module in sys.stdlib_module_names:
            raise UsageError(
                f"{files[name]} would be imported in place of the module {module!r} that precache "
                "needs; rename it, or give --code a narrower path"
            )


def _needed_modules() -> set[str]:
    """Modules of precache and of what it is declared to require."""
    try:
        declared = importlib.metadata.requires("precache") or []
    except importlib.metadata.PackageNotFoundError:  # run from its source
        declared = []
    names = (each for each in declared if "extra == 'test'" not in each.replace('"', "'"))
    required = {re.split(r"[\s<>=~!;\[]", name)[0].lower() for name in names}
    modules = importlib.metadata.packages_distributions().items()
    found = {name for name, homes in modules if required & {home.lower() for home in homes}}
    return {"precache", "precache_workers", *found}


def _imports(source: str, recipe: Recipe | None) -> list[str]:
    """What a job imports by name."""
    factories = [source.removeprefix("python:")] if source.startswith("python:") else []
    functions = [] if recipe is None else [op.function for op in recipe.functions]
    return [*functions, *factories]


def _check_imports(imports: Iterable[str], files: Mapping[str, Path]) -> None:
    """Raise where code in the current folder is named, and would be missing there."""
    tops = {name.split("/")[0].removesuffix(".py") for name in files}
    for name in imports:
        top = name.partition(":")[0].partition(".")[0]
        here = [path for path in (f"{top}.py", top) if Path(path).exists()]
        if here and top not in tops:
            raise UsageError(f"{name} is here and not on the cluster; send it: --code {here[0]}")


def _check_size(files: Mapping[str, Path]) -> None:
    """Raise where files take more than the cluster takes, naming the largest parts."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    if total <= MOST_NBYTES:
        return
    parts: dict[str, int] = {}
    for name, nbytes in sizes.items():
        top = "/".join(PurePosixPath(name).parts[:2])
        parts[top] = parts.get(top, 0) + nbytes
    largest = sorted(parts, key=lambda part: -parts[part])[:3]
    named = ", ".join(f"{part} with {size(parts[part])}" for part in largest)
    raise UsageError(
        f"the code to send takes {size(total)}, and Ray takes {size(MOST_NBYTES)}: {named}; give "
        "--code a narrower path, and large files where the cluster can read them"
    )
