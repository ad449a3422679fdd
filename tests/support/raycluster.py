"""A Ray cluster of real processes on this machine, with an address for each node."""

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from tests.support.building import environment, gone, poll, write

HEAD = "127.0.0.2"
"""Not 127.0.0.1, which Ray takes for this machine's own address on a network."""


TOKEN = os.urandom(32).hex()
"""Of all clusters: a process keeps the first that Ray reads in it."""

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "20000",
    "RAY_agent_register_timeout_ms": "150000",  # a raylet ends without its agent
    "RAY_worker_register_timeout_seconds": "150",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


class Cluster:
    """A head that runs no task, and nodes that can be added and killed.

    Attributes
    ----------
    env
        Variables with which ``--address auto`` finds it.

    Parameters
    ----------
    head
        More of Ray's arguments for the head.
    more
        Variables of its workers.
    """

    def __init__(self, folder: Path, head: Mapping[str, Any] | None = None, **more: str) -> None:
        token = write(folder / "token", TOKEN.encode())
        token.chmod(0o600)
        own = {"HOME": str(folder), "RAY_AUTH_TOKEN_PATH": str(token)}
        self.settings = {**SETTINGS, **own, **more}
        with mock.patch.dict(os.environ, self.settings):
            from ray.cluster_utils import Cluster as Processes

            self._processes = Processes(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0,
                    "include_dashboard": False,
                    "node_ip_address": HEAD,
                    "object_store_memory": 80 << 20,
                    **(head or {}),
                },
            )
        self.env = environment(**self.settings, RAY_ADDRESS=self._processes.address)
        self.nodes: list[Any] = []
        self._started = 2

    def add(self, cpus: int = 1, **how: Any) -> Any:
        """Add a node; return it, for `kill`."""
        self._started += 1
        with mock.patch.dict(os.environ, self.settings):
            node = self._processes.add_node(
                num_cpus=cpus,
                node_ip_address=f"127.0.0.{self._started}",
                object_store_memory=80 << 20,
                **how,
            )
        self.nodes.append(node)
        return node

    def kill(self, node: Any) -> None:
        """Kill a node's raylet, as when its machine is taken away; its workers end with it."""
        raylet = self.raylet(node)
        workers = raylet.children(recursive=True)
        for process in (raylet, *workers):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        poll(lambda: gone(raylet), "the raylet has ended")
        self.nodes.remove(node)
        self._processes.remove_node(node, allow_graceful=False)

    def raylet(self, node: Any) -> psutil.Process:
        return psutil.Process(node.all_processes["raylet"][0].process.pid)

    def workers(self, node: Any) -> list[psutil.Process]:
        """Return the processes of a node that are inside a task."""
        found = []
        for process in self.raylet(node).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                name = process.name()
                if name.startswith("ray::") and "IDLE" not in name and "Agent" not in name:
                    found.append(process)
        return found

    def close(self) -> None:
        family = psutil.Process().children(recursive=True)
        with mock.patch.dict(os.environ, self.settings):
            self._processes.shutdown()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "ray" in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGKILL)
