"""The head of a Ray cluster with a job server, as ``ray start --head`` runs it."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.support.building import DEADLINE, environment, free_ports, gone, poll
from tests.support.raycluster import HEAD

PATIENCE = {
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{DEADLINE:.0f}",
    "RAY_gcs_server_request_timeout_seconds": f"{DEADLINE:.0f}",
    "RAY_gcs_rpc_server_reconnect_timeout_s": f"{DEADLINE:.0f}",
    "RAY_agent_register_timeout_ms": f"{1000 * DEADLINE:.0f}",
    "RAY_worker_register_timeout_seconds": f"{DEADLINE:.0f}",
    "RAY_health_check_timeout_ms": f"{1000 * DEADLINE:.0f}",
    "RAY_health_check_period_ms": "10000",
}
"""Times after which Ray's processes give each other up, on a machine that is busy."""


STARTS = 4
"""Attempts: Ray gives up a node that takes half a minute, while its job server answers already."""


class JobHead:
    """A head with one CPU and its files in its own folder; `env` is the environment of its clients.

    Parameters
    ----------
    token
        That clients must have; by default they need none.
    variables
        Environment variables of the cluster's node, and not of its clients.
    """

    def __init__(self, token: str = "", **variables: str) -> None:
        if importlib.util.find_spec("aiohttp_cors") is None:
            pytest.skip("no job server: pip install '.[cluster]'")
        self._folder = tempfile.TemporaryDirectory(prefix="head-")  # sockets need a short path
        self.folder = Path(self._folder.name)
        self.token = token
        self.address = f"http://127.0.0.1:{free_ports(1)[0]}"
        auth = {"RAY_AUTH_MODE": "disabled"}
        if token:
            auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env = {
            **plain,
            "PYTHONPATH": environment()["PYTHONPATH"],
            "RAY_API_SERVER_ADDRESS": self.address,
            "HOME": str(self.folder),
            **auth,
        }
        for _ in range(STARTS):
            self._process = self._start(auth, {**plain, **variables})
            poll(lambda: self._has_ended() or self._is_up(), "the cluster is up")
            if not self._has_ended():
                break
        assert not self._has_ended(), self._log()

    def _start(self, auth: dict[str, str], plain: dict[str, str]) -> psutil.Popen:
        line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        line += ["--port=0", "--min-worker-port=0", "--max-worker-port=0"]
        line += [f"--node-ip-address={HEAD}", f"--temp-dir={self.folder}/ray", "--num-cpus=1"]
        line += ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
        line += [f"--dashboard-port={self.address.rpartition(':')[2]}"]
        line += ["--dashboard-agent-listen-port=0", f"--object-store-memory={80 << 20}"]
        env = {
            **plain,
            "PYTHONPATH": environment()["PYTHONPATH"],
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            **PATIENCE,
            **auth,
        }
        with (self.folder / "log").open("wb") as log:
            return psutil.Popen(line, env=env, stdout=log, stderr=subprocess.STDOUT)

    def _log(self) -> str:
        return (self.folder / "log").read_text()

    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    def _is_up(self) -> bool:
        """Return True if the job server answers, and all else of the head has been started."""
        if "will now block" not in self._log():
            return False
        with contextlib.suppress(OSError):
            return self.get("/api/version") is not None
        return False

    def get(self, path: str, method: str = "GET") -> bytes | None:
        """Return the job server's answer, None for 404."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        answer = requests.request(method, self.address + path, headers=headers, timeout=DEADLINE)
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        return answer.content

    def job(self, job: str) -> dict[str, Any]:
        """Return a job as Ray lists it."""
        return json.loads(self.get(f"/api/jobs/{job}") or b"null")

    def delete(self, job: str) -> None:
        """Do as ``ray job delete``."""
        answer = json.loads(self.get(f"/api/jobs/{job}", "DELETE") or b"null")
        assert answer == {"deleted": True}

    def files_with(self, text: str) -> list[str]:
        """Return the cluster's files that contain a text: logs, packages, unpacked files."""
        return [
            str(path)
            for path in self.folder.rglob("*")
            if path.is_file() and text.encode() in path.read_bytes()
        ]

    def close(self) -> None:
        family = [self._process, *self._process.children(recursive=True)]
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(DEADLINE)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in family:
            poll(lambda process=process: gone(process), f"{process} has ended")
        self._folder.cleanup()
