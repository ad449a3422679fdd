"""Placement of tasks on the nodes of a joined cluster."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, field_validator


def _plain_int(value: Any) -> Any:
    """Convert integers of NumPy and torch; leave other values to the check that follows."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _plain_dict(value: Any) -> Any:
    """Convert any mapping, or (name, value) pairs as the command line reads them."""
    try:
        return dict(value or ())
    except (TypeError, ValueError):
        raise ValueError("give values by name") from None


PLAIN_INT = BeforeValidator(_plain_int)
PLAIN_DICT = BeforeValidator(_plain_dict)
PositiveBytes = Annotated[ByteSize, Field(ge=1)]


class Placement(BaseModel):
    """Options of a build: resources that each task takes of a joined cluster, and the nodes for it.

    Attributes
    ----------
    memory_per_task
        Bytes; None for what its shard may need.
    nice
        Least niceness of the workers, so that other work on their nodes comes first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cpus_per_task: float = Field(default=1, gt=0)
    memory_per_task: PositiveBytes | None = None
    node_resources: Annotated[dict[str, Annotated[float, Field(gt=0)]], PLAIN_DICT] = {}
    node_labels: Annotated[dict[str, str], PLAIN_DICT] = {}
    nice: Annotated[int, Field(strict=True, ge=0, le=19), PLAIN_INT] = 10

    @field_validator("node_labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            if not key or not value or set(value) & set("!(),"):
                raise ValueError(f"label {key}={value} is not KEY=VALUE, such as tier=spot")
        return labels

    def slots(self, nodes: Iterable[Mapping[str, Any]], memory: int) -> int:
        """Return how many tasks fit at a time on the live nodes that may run them.

        Parameters
        ----------
        nodes
            As Ray describes them.
        memory
            Of each task, in bytes.
        """
        needs = {"CPU": self.cpus_per_task, "memory": memory, **self.node_resources}
        needs = {name: amount for name, amount in needs.items() if amount}
        return sum(
            min(int(node["Resources"].get(name, 0) // amount) for name, amount in needs.items())
            for node in nodes
            if node["Alive"] and self.node_labels.items() <= node["Labels"].items()
        )

    @property
    def needs_in_words(self) -> str:
        """The CPUs, resources and labels that a task needs of a node, as text for people."""
        parts = [f"{self.cpus_per_task:g} CPU"]
        parts += [f"{name} {amount:g}" for name, amount in self.node_resources.items()]
        return ", ".join(parts + [f"label {name}={v}" for name, v in self.node_labels.items()])
