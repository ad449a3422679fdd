"""The nodes of the cluster that this process has joined."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from typing import Any

from precache.errors import BuildError, PrecacheError
from precache.runtime.process_id import NODE
from precache.storage.base import Folder
from precache_workers.cluster.placement import Placement

NODES_SECONDS = 60.0
"""Limit for the answers of all nodes."""


def nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster, as Ray describes them."""
    import ray

    descriptions: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return descriptions


def node_id() -> str:
    """Return Ray's id of the node that this task runs on."""
    import ray

    identity: str = ray.get_runtime_context().get_node_id()
    return identity


def cluster_cpus() -> int:
    """Return the CPUs of all live nodes."""
    return sum(int(node["Resources"].get("CPU", 0)) for node in nodes() if node["Alive"])


def set_niceness(nice: int) -> None:
    """Raise the niceness of this process to `nice`; one that is nicer already stays as it is.

    Only root may lower it.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) < nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def prepare_worker(nice: int) -> None:
    """Name the node of this worker, and set its niceness."""
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    os.environ.setdefault(NODE, address)
    set_niceness(nice)


def _call(function: Callable[[Any], Any], item: Any, nice: int) -> Any:
    """Call a function in a worker; return its `PrecacheError`, so that only lost tasks raise."""
    prepare_worker(nice)
    try:
        return function(item)
    except PrecacheError as error:
        return error


def on_every_node(
    placement: Placement, function: Callable[[Any], Any], item: Any
) -> Generator[tuple[str, Any], None, None]:
    """Call a function on each node that tasks may run on; yield (node, result) as they come.

    A result may be a `PrecacheError`. Nodes that are lost meanwhile, or do not answer in time, are
    left out. Closing the iterator cancels the calls.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(_call)
    names = {}
    for node in nodes():
        if not placement.slots([node], 0):
            continue
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        name = f"{node['NodeManagerHostname']} at {node['NodeManagerAddress']}"
        names[task.remote(function, item, placement.nice)] = name
    until = time.monotonic() + NODES_SECONDS
    try:
        while names:
            left = max(0.0, until - time.monotonic())
            ready, _ = ray.wait(list(names), num_returns=1, timeout=left)
            if not ready:
                return
            for reference in ready:
                name = names.pop(reference)
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayError:
                    continue
                yield name, result
    finally:
        for reference in names:
            ray.cancel(reference, force=True)


def require_shared(placement: Placement, folder: Folder, name: str) -> None:
    """Raise `BuildError` if some nodes do not see an object of a local folder."""
    if folder.local(name) is None:  # a URL, which all nodes see
        return
    results = list(on_every_node(placement, _sees, (folder, name)))
    blind = [node for node, seen in results if seen is not True]
    if blind:
        raise BuildError(
            f"{folder} is not shared: {len(blind)} of {len(results)} nodes do not see "
            f"{folder.path(name)} ({', '.join(blind[:3])}); use a URL, or a disk that all nodes "
            "mount at the same path, or choose nodes that do by --node-resources or --node-labels"
        )


def _sees(folder_and_name: tuple[Folder, str]) -> bool:
    folder, name = folder_and_name
    return folder.size(name) is not None
