"""What a worker does to its process before it runs tasks."""

from __future__ import annotations

import subprocess
import sys

import pytest

NICENESS = """
import os
from precache_workers.cluster.nodes import set_niceness
os.nice(15 - os.nice(0))
if os.geteuid() == 0:
    os.setuid(65534)
set_niceness({nice})
print(os.nice(0))
"""


@pytest.mark.parametrize(("nice", "then"), [(10, 15), (18, 18)])
def test_a_worker_that_is_nicer_already_stays_so(nice: int, then: int) -> None:
    """Only root could lower its niceness; Ray and service managers start workers with some."""
    code = NICENESS.format(nice=nice)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == (f"{then}\n", "")
