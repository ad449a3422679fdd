"""Placement of tasks on the nodes of a joined cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Placement:
    """Resources that each task takes on a joined cluster, and the nodes it may run on.

    Attributes
    ----------
    cpus, memory
        Of each task; memory in bytes, None for what its shard may need.
    resources
        Custom resources that each task takes, by name.
    labels
        Labels that a node must have.
    nice
        Least niceness of the workers, so that other work on their nodes comes first.
    """

    cpus: float = 1
    memory: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    nice: int = 10

    def slots(self, nodes: Iterable[Mapping[str, Any]], memory: int) -> int:
        """Return how many tasks fit at a time on the live nodes that may run them.

        Parameters
        ----------
        nodes
            As Ray describes them.
        memory
            Of each task, in bytes.
        """
        needs = {"CPU": self.cpus, "memory": memory, **self.resources}
        needs = {name: amount for name, amount in needs.items() if amount}
        return sum(
            min(int(node["Resources"].get(name, 0) // amount) for name, amount in needs.items())
            for node in nodes
            if node["Alive"] and self.labels.items() <= node["Labels"].items()
        )

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU", *(f"{name} {a:g}" for name, a in self.resources.items())]
        return ", ".join(parts + [f"label {name}={value}" for name, value in self.labels.items()])
