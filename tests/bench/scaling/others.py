"""The same photos through others' tools, each whole: every process from start to end counts."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import precache
from tests.bench.common import CROP, log
from tests.bench.peers.environments import TORCH, Environment, NotInstalledError, install, python_of
from tests.bench.peers.measure import ROOT
from tests.bench.scaling.builds import RESIZE
from tests.bench.scaling.watch import counted

CPUS = 2
PER_FILE = 500
ENVIRONMENTS = {
    "raydata": Environment(
        (TORCH, "ray[data]==2.60.0", "pillow==13.0.0", "simplejpeg==1.9.0"),
        "the Ray of precache's tests, and the decoders that precache uses",
    ),
    "img2dataset": Environment(("img2dataset==1.47.0",), "the last release"),
}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "WANDB_MODE": "disabled",
}


@dataclass(frozen=True)
class Run:
    """What one tool took, all its processes together, and the bytes of its files."""

    samples: int
    cpu_seconds: float
    seconds: float
    nbytes: int

    @property
    def per_cpu_second(self) -> float:
        return self.samples / self.cpu_seconds


@dataclass(frozen=True)
class Tool:
    """A tool: its command for (python, source, target), and how many images a target holds."""

    title: str
    environment: str | None
    command: Callable[[Path, Path, Path], Sequence[str | Path]]
    count: Callable[[Path], int]


def _precache(codec: str) -> Tool:
    size = ("--resize", str(RESIZE), "--crop", str(CROP), "--codec", codec, "--cpus", str(CPUS))
    return Tool(
        f"precache, {codec}",
        None,
        lambda python, source, target: (python, "-m", "precache", "build", source, target, *size),
        lambda target: int(precache.open(target).valid.sum()),
    )


def _ray_data(kind: str, title: str) -> Tool:
    script = Path(__file__).with_name("ray_data.py")
    return Tool(
        title,
        "raydata",
        lambda python, source, target: (python, script, kind, source, target, str(CPUS)),
        lambda target: sum(len(np.load(path, mmap_mode="r")) for path in target.glob("*.npy")),
    )


def _img2dataset(python: Path, source: Path, target: Path) -> Sequence[str | Path]:
    """It has no crop after a larger resize: the shorter side becomes what is cropped to."""
    urls = target.with_suffix(".txt")
    files = sorted(path for path in source.rglob("*") if path.is_file())
    urls.write_text("".join(f"{path.resolve().as_uri()}\n" for path in files), "utf-8")
    options = {
        "url_list": urls,
        "output_folder": target,
        "image_size": CROP,
        "resize_mode": "center_crop",
        "processes_count": CPUS,
        "thread_count": 2,
        "number_sample_per_shard": PER_FILE,
        "output_format": "webdataset",
    }
    flags = (f"--{name}={value}" for name, value in options.items())
    return (python.with_name("img2dataset"), *flags)


def _count_tars(target: Path) -> int:
    names = (subprocess.check_output(("tar", "-tf", path), text=True) for path in _tars(target))
    return sum(name.endswith(".jpg") for each in names for name in each.splitlines())


def _tars(target: Path) -> list[Path]:
    return sorted(target.glob("*.tar"))


TOOLS = (
    _precache("image"),
    _precache("raw"),
    _ray_data("images", "Ray Data, read_images"),
    _ray_data("bytes", "Ray Data, precache's decoders"),
    Tool("img2dataset, to JPEG", "img2dataset", _img2dataset, _count_tars),
)


def run(tool: Tool, source: Path, folder: Path, installing: bool) -> Run | str:
    """Its cost, or in a line why there is none."""
    target = folder / "target"
    homes = folder / "environments"
    try:
        if tool.environment is not None and installing:
            install(tool.environment, homes, ENVIRONMENTS)
        python = python_of(tool.environment, homes, ENVIRONMENTS)
        command = tool.command(python, source, target)
        with counted() as (prefix, count):
            began = time.perf_counter()
            done = subprocess.run(
                [*prefix, *(str(part) for part in command)],
                env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.perf_counter() - began
            burnt = count()
        if done.returncode:
            return (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        files = (path.stat() for path in target.rglob("*") if path.is_file())
        return Run(tool.count(target), burnt, seconds, sum(each.st_size for each in files))
    except NotInstalledError as error:
        return str(error)
    finally:
        shutil.rmtree(target, ignore_errors=True)
        target.with_suffix(".txt").unlink(missing_ok=True)


def in_turns(
    source: Path, folder: Path, rounds: int, installing: bool
) -> dict[str, list[Run | str]]:
    """Runs of every tool, by title, one of each in every round; each round begins with another."""
    found: dict[str, list[Run | str]] = {tool.title: [] for tool in TOOLS}
    for number in range(rounds):
        first = number % len(TOOLS)
        for tool in (*TOOLS[first:], *TOOLS[:first]):
            log.print(f"round {number + 1} of {rounds}: {tool.title}")
            found[tool.title].append(run(tool, source, folder, installing))
    return found
