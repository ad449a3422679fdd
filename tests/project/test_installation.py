"""Installations: the environment that `make venv` makes, and packages outside the source tree."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import write_photos

ROOT = Path(__file__).parents[2]
SITE_PACKAGES = sysconfig.get_path("purelib")


def run(*arguments: str | Path, folder: Path, path: str | Path = os.environ["PATH"]) -> str:
    """Run a command as outside the source tree; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        arguments,
        cwd=folder,
        env=environment | {"PATH": str(path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_package_is_found_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    """As from the parent folder of a clone, where Python sees a namespace package."""
    if not Path(SITE_PACKAGES, "precache_clone.pth").exists():
        pytest.skip("this environment was not made by make venv")
    (tmp_path / "precache").mkdir()
    code = "import precache, precache_workers; print(precache.open.__name__)"
    assert run(sys.executable, "-c", code, folder=tmp_path) == "open\n"


QUICK_START = """
import precache
from precache import Loader
from precache.codecs import kernels

with Loader("photos.store", batch_size=4, seed=0, output="tuple") as loader:
    print(sum(len(labels) for images, labels in loader), precache.__file__)
print("NumPy" if kernels.compiled().functions is None else "compiled")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("code_path", ["compiled", "NumPy"])
def test_the_quick_start_runs_from_an_installed_wheel(code_path: str, tmp_path: Path) -> None:
    """An environment of its own, without the source tree and without a compiler.

    Its dependencies are those of this environment, so that no network is needed. With "NumPy", no
    compiler is there when the wheel is built, either.
    """
    if code_path == "compiled" and not shutil.which("cc"):
        pytest.skip("no C compiler is installed")
    for name in ("pip", "setuptools"):
        if not any(importlib.metadata.distributions(name=name)):
            pytest.skip(f"{name} is not installed")
    source = tmp_path / "source"
    for name in ("precache", "workers"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip")
    run(
        *(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source),
        folder=tmp_path,
        path=os.environ["PATH"] if code_path == "compiled" else "",
    )
    shutil.rmtree(source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in folders if not name.endswith(".dist-info")} == {
        "precache",
        "precache_workers",
    }

    venv.create(tmp_path / "env", with_pip=False)
    programs = tmp_path / "env" / "bin"
    python = programs / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    packages = Path(run(python, "-c", purelib, folder=tmp_path))
    (packages / "dependencies.pth").write_text(f"{SITE_PACKAGES}\n")

    write_photos(tmp_path / "photos", 12, (260, 258), classes=("cat", "dog"), suffix=".jpg")
    precache = programs / "precache"
    options = ("--resize", "256", "--crop", "224", "--address", "serial")
    run(precache, "build", "photos/", "photos.store", *options, folder=tmp_path, path=programs)
    assert "12" in run(precache, "info", "photos.store", folder=tmp_path, path=programs)
    printed = run(python, "-c", QUICK_START, folder=tmp_path, path=programs)
    assert printed == f"12 {packages / 'precache' / '__init__.py'}\n{code_path}\n"
