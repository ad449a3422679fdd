"""Whether a process is known to have ended."""

from __future__ import annotations

import os
import subprocess
import sys

from precache.runtime.process_id import has_ended, process_of
from tests.support.building import poll


def test_a_process_ends_and_a_number_is_not_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = process_of(child.pid)
        assert not has_ended(process)
        assert str(child.pid) in str(process)
        child.kill()
        poll(lambda: has_ended(process), "a zombie has ended")
    assert has_ended(process)
    here = process_of(os.getpid())
    assert not has_ended(here)
    assert has_ended(here.model_copy(update={"started": here.started - 1}))
    elsewhere = here.model_copy(update={"node": "another boot", "started": 0})
    assert not has_ended(elsewhere), "nothing is known of it"
