"""A training script may have a module or a package of its own that is called `workers`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.building import environment, write, write_jpegs

SCRIPT = """
import precache
import workers

if __name__ == "__main__":
    recipe = precache.Recipe.image(resize=40, crop=32)
    for address in ("serial", "local"):
        made = precache.build("photos", f"{address}.store", recipe, address=address, cpus=1)
        version = precache.ensure("photos", f"{address}.store", recipe, address=address)
        assert made.version == version.id
    print(workers.MINE)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["workers.py", "workers/__init__.py"])
def test_builds_here_and_on_ray_beside_workers_of_the_users_own(tmp_path: Path, name: str) -> None:
    write_jpegs(tmp_path / "photos", 4)
    write(tmp_path / name, b"MINE = 'mine'\n")
    write(tmp_path / "train.py", SCRIPT.encode())
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment(), timeout=110, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-1] == "mine"
