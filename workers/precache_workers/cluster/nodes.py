"""Whether the nodes of a cluster see the local folders that a build reads and writes."""

from __future__ import annotations

from precache.errors import BuildError
from precache.storage.base import Folder
from precache_workers.cluster.executor import on_every_node
from precache_workers.cluster.placement import Placement


def require_shared(placement: Placement, folder: Folder, name: str) -> None:
    """Ask every node that tasks may run on for an object of a local folder; a URL needs no asking.

    Raises
    ------
    BuildError
        Nodes that do not see it.
    """
    if folder.local(name) is None:
        return
    answers = on_every_node(placement, _sees, (folder, name))
    blind = [node for node, seen in answers.items() if seen is not True]
    if blind:
        raise BuildError(
            f"{folder} is not shared: {len(blind)} of {len(answers)} nodes do not see "
            f"{folder.path(name)} ({', '.join(blind[:3])}); use a URL, or a disk that all nodes "
            "mount at the same path, or choose nodes that do by --resource or --label"
        )


def _sees(where: tuple[Folder, str]) -> bool:
    folder, name = where
    return folder.size(name) is not None
