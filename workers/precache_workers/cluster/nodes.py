"""The nodes of the cluster that this process has joined."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from precache.errors import BuildError, PrecacheError
from precache.storage.base import Folder
from precache_workers.cluster.placement import Placement
from precache_workers.runtime.node import NODE

LAST_CALL_SECONDS = 5.0
"""Limit for an actor's last call: the actor may have only just been started."""

NODES_SECONDS = 60.0
"""Limit for the answers of all nodes."""


def is_connected() -> bool:
    """Return True if this process has joined a Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


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


def node_cpus() -> dict[str, int]:
    """Return the CPUs of each live node of the joined cluster, by address; {} without a cluster."""
    if not is_connected():
        return {}
    cpus: Counter[str] = Counter()
    for node in nodes():
        if node["Alive"]:
            cpus[node["NodeManagerAddress"]] += int(node["Resources"].get("CPU", 0))
    return dict(cpus)


def set_niceness(nice: int) -> None:
    """Raise the niceness of this process to `nice`; one that is nicer already stays as it is.

    Only root may lower it.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) < nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def call_in_worker(function: Callable[[Any], Any], item: Any, nice: int) -> Any:
    """Call a function in a worker; return its `PrecacheError`, so that only lost tasks raise."""
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    os.environ.setdefault(NODE, address)
    set_niceness(nice)
    try:
        return function(item)
    except PrecacheError as error:
        return error


def on_every_node(
    placement: Placement, function: Callable[[Any], Any], item: Any
) -> dict[str, Any]:
    """Call a function on each node that tasks may run on; return the results by node.

    A result may be a `PrecacheError`. Nodes that are lost meanwhile are left out.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(call_in_worker)
    names = {}
    for node in nodes():
        if not placement.slots([node], 0):
            continue
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        name = f"{node['NodeManagerHostname']} at {node['NodeManagerAddress']}"
        names[task.remote(function, item, placement.nice)] = name
    if not names:
        return {}
    results = {}
    ready, late = ray.wait(list(names), num_returns=len(names), timeout=NODES_SECONDS)
    for reference in ready:
        with contextlib.suppress(ray.exceptions.RayError):
            results[names[reference]] = ray.get(reference)
    for reference in late:
        ray.cancel(reference, force=True)
    return results


def require_shared(placement: Placement, folder: Folder, name: str) -> None:
    """Raise `BuildError` if some nodes do not see an object of a local folder."""
    if folder.local(name) is None:  # a URL, which all nodes see
        return
    results = on_every_node(placement, _sees, (folder, name))
    blind = [node for node, seen in results.items() if seen is not True]
    if blind:
        raise BuildError(
            f"{folder} is not shared: {len(blind)} of {len(results)} nodes do not see "
            f"{folder.path(name)} ({', '.join(blind[:3])}); use a URL, or a disk that all nodes "
            "mount at the same path, or choose nodes that do by --resource or --label"
        )


def _sees(folder_and_name: tuple[Folder, str]) -> bool:
    folder, name = folder_and_name
    return folder.size(name) is not None


def actor_on_head(kind: type, *arguments: Any) -> Any:
    """Start an actor on the head, where it takes no CPU and is not lost with a spare node.

    It ends with this process's connection. Calls that it gets afterwards are lost without an error.
    """
    import ray

    remote: Any = ray.remote(kind)
    head = {"node:__internal_head__": 0.001}
    return remote.options(num_cpus=0, resources=head).remote(*arguments)


def wait_for(call: Any) -> None:
    """Wait until an actor has executed a call, for a few seconds at most."""
    import ray

    ray.wait([call], timeout=LAST_CALL_SECONDS)
