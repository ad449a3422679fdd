"""The environment that `make venv` makes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def test_the_package_is_found_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    """As from the parent folder of a clone, where Python sees a namespace package."""
    if not (Path(sysconfig.get_path("purelib")) / "precache_clone.pth").exists():
        pytest.skip("this environment was not made by make venv")
    (tmp_path / "precache").mkdir()
    code = "import precache, precache_workers; print(precache.open.__name__)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "open_version\n"
