"""Where peers are installed: one virtual environment each, with pinned versions."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.harness import log

ROOT = Path(__file__).resolve().parents[3]

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """What a peer needs, and why that and no other."""

    requirements: tuple[str, ...]
    reason: str


ENVIRONMENTS = {
    "ffcv": Environment(
        (TORCH, "ffcv==1.0.2", "pillow==13.0.0"),
        "the last release; built from source, so Debian's g++, pkg-config, libopencv-dev and "
        "libturbojpeg0-dev must be there; it imports Pillow without requiring it",
    ),
    "mosaic": Environment(
        (TORCH, "torchvision==0.28.0", "mosaicml-streaming==0.13.0"),
        "the last release; the torchvision that belongs to this torch",
    ),
    "litdata": Environment((TORCH, "litdata==0.2.76"), "the last release"),
    "webdataset": Environment((TORCH, "webdataset==1.0.2"), "the last release"),
    "grain": Environment(
        (TORCH, "grain==0.2.18", "array-record==0.8.6"),
        "the last releases; torch only because the others hold it in memory, too",
    ),
}
"""By name. Peers that are not here run in this environment, with what precache's tests install."""

TOOLS = {
    "raydata": Environment(
        (TORCH, "ray[data]==2.60.0", "pillow==13.0.0", "simplejpeg==1.9.0"),
        "the Ray of precache's tests, and the decoders that precache uses",
    ),
    "img2dataset": Environment(("img2dataset==1.47.0",), "the last release"),
}
"""The same of tools that build."""


class NotInstalledError(Exception):
    """A peer's environment is not there; the message says why, in one line."""


def python_of(
    name: str | None, folder: Path, known: Mapping[str, Environment], *, install: bool
) -> Path:
    """The interpreter of an environment in `folder`, or this one where `name` is None.

    Raises
    ------
    NotInstalledError
        It is not there, or cannot be installed: with the last error that pip gave.
    """
    if name is None:
        return Path(sys.executable)
    home = folder / name
    if install:
        _install(home, known[name])
    if not _is_done(home, known[name]):
        raise NotInstalledError("not installed; run with --install")
    return home / "bin/python"


def _install(home: Path, environment: Environment) -> None:
    if _is_done(home, environment):
        return
    log.print(f"{home.name}: installing {', '.join(environment.requirements)}", markup=False)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run((sys.executable, "-m", "venv", home), check=True)
    pip = (str(home / "bin/python"), "-m", "pip", "install", "--quiet")
    done = subprocess.run(
        (*pip, *environment.requirements), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotInstalledError(_reason(done.stderr))
    _stamp(home).write_text("\n".join(environment.requirements), "utf-8")


def _stamp(home: Path) -> Path:
    return home / "requirements.txt"


def _is_done(home: Path, environment: Environment) -> bool:
    """Whether it was installed to the end, with the requirements of today."""
    stamp = _stamp(home)
    return stamp.is_file() and stamp.read_text("utf-8").split() == list(environment.requirements)


def _reason(output: str) -> str:
    """The last exception in what pip wrote, or its last word."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\w*(Error|ERROR): ", line)]
    return (errors or lines or ["pip failed without a word"])[-1]
