"""Where peers are installed: one virtual environment each, with pinned versions."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.bench.harness import log

ROOT = Path(__file__).resolve().parents[3]

TORCH = "torch==2.13.0"


Requirements = tuple[str, ...]

ENVIRONMENTS: dict[str, Requirements] = {
    # Built from source, so Debian's g++, pkg-config, libopencv-dev and libturbojpeg0-dev must be
    # there; it imports Pillow without requiring it.
    "ffcv": (TORCH, "ffcv==1.0.2", "pillow==13.0.0"),
    # The torchvision that belongs to this torch.
    "mosaic": (TORCH, "torchvision==0.28.0", "mosaicml-streaming==0.13.0"),
    "litdata": (TORCH, "litdata==0.2.76"),
    "lancedb": (TORCH, "lancedb==0.40.0"),
    "webdataset": (TORCH, "webdataset==1.0.2"),
    # torch only because the others hold it in memory, too.
    "grain": (TORCH, "grain==0.2.18", "array-record==0.8.6"),
}
"""Name of a peer -> the last releases of what it needs. Peers that are not here run in this
environment, with what precache's tests install."""

TOOLS: dict[str, Requirements] = {
    # The Ray of precache's tests, and the decoders that precache uses.
    "raydata": (TORCH, "ray[data]==2.60.0", "pillow==13.0.0", "simplejpeg==1.9.0"),
    "img2dataset": ("img2dataset==1.47.0",),
}
"""The same of tools that build."""


class NotInstalledError(Exception):
    """A peer's environment is not there; the message says why, in one line."""


def python_of(
    name: str | None, folder: Path, known: Mapping[str, Requirements], *, install: bool
) -> Path:
    """The interpreter of an environment in `folder`, or this one where `name` is None.

    Raises
    ------
    NotInstalledError
        It is not there, or cannot be installed: with the last line that pip wrote.
    """
    if name is None:
        return Path(sys.executable)
    home, stamp = folder / name, folder / name / "requirements.txt"
    wanted = "\n".join(known[name])
    # The stamp comes last, so that an install that was cut short is made again.
    if not stamp.is_file() or stamp.read_text("utf-8") != wanted:
        if not install:
            raise NotInstalledError("not installed; run with --install")
        log.print(f"{name}: installing {', '.join(known[name])}", markup=False)
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run((sys.executable, "-m", "venv", home), check=True)
        pip = (str(home / "bin/python"), "-m", "pip", "install", "--quiet", *known[name])
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise NotInstalledError("".join(last) or "pip failed without a word")
        stamp.write_text(wanted, "utf-8")
    return home / "bin/python"
