"""Where the tasks of a joined cluster may run, and what each of them takes there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Placement:
    """Where the tasks of a joined cluster may run, and what each takes.

    Attributes
    ----------
    cpus, memory
        Of each task; memory in bytes, by default what its shard may need.
    resources
        Custom resources that each task takes, by name.
    labels
        Labels that a node must have.
    nice
        What is added to a worker's niceness, so that other work on its node comes first.
    """

    cpus: float = 1
    memory: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    nice: int = 10

    def slots(self, nodes: Iterable[Mapping[str, Any]], memory: int) -> int:
        """Tasks that fit at a time on those of Ray's nodes that live and may take them."""
        needs = {"CPU": self.cpus, "memory": memory, **self.resources}
        needs = {name: amount for name, amount in needs.items() if amount}
        return sum(
            min((int(node["Resources"].get(n, 0) // amount) for n, amount in needs.items()))
            for node in nodes
            if node["Alive"] and self.labels.items() <= node["Labels"].items()
        )

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU", *(f"{n} {a:g}" for n, a in self.resources.items())]
        return ", ".join(parts + [f"label {name}={value}" for name, value in self.labels.items()])
