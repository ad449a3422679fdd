"""Executors: run the tasks of a build in this process, in others of this machine, or on Ray."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from precache.errors import PrecacheError
from precache.runtime.usage import cores
from precache_workers.cluster.placement import Placement

logger = logging.getLogger(__name__)

Outcome = tuple[Any, Any]
"""An item, and the value that its task returned, which may be a `PrecacheError`."""

RunTasks = Callable[..., Iterator[Outcome]]
"""Function with the parameters of `run_serial` that yields (item, outcome) as tasks end."""


def run_serial(
    function: Callable[[Any], Any], items: Iterable[Any], count: int = 0
) -> Iterator[Outcome]:
    """Run tasks one after another in this process: the results that a cluster's must equal."""
    for item in items:
        try:
            yield item, function(item)
        except PrecacheError as error:
            yield item, error


@contextlib.contextmanager
def executor(
    address: str,
    cpus: int | None = None,
    placement: Placement | None = None,
    notice: Callable[[str], None] = logger.warning,
) -> Iterator[RunTasks]:
    """Provide what runs tasks; processes that were started for it end with it.

    Parameters
    ----------
    address
        ``serial`` (this process), ``local`` (worker processes on this machine), ``auto``,
        ``host:port`` or ``ray://…`` (a running Ray cluster, which goes on).
    cpus
        Worker processes on this machine; by default one for each core that this process may use.
    placement
        Of tasks on a running cluster.
    notice
        Called with a message when tasks wait for nodes.
    """
    if address == "serial":
        yield run_serial
        return
    from precache_workers.cluster.dispatch import dispatch

    if address == "local":
        from precache_workers.cluster.process_engine import ProcessEngine  # which needs psutil

        with contextlib.closing(ProcessEngine(cpus or cores())) as engine:
            yield functools.partial(dispatch, engine)
        return
    from precache_workers.cluster.ray_engine import RayEngine
    from precache_workers.cluster.ray_session import joined_ray

    excluded_nodes: dict[str, str] = {}

    def run_on_ray(*task: Any) -> Iterator[Outcome]:
        return dispatch(RayEngine(placement or Placement(), notice, excluded_nodes), *task)

    with joined_ray(address):
        yield run_on_ray


def is_joined(address: str) -> bool:
    """Return True for the address of a running cluster."""
    return bool(re.fullmatch(r"auto|ray://.*|[^/\s]+:\d+", address))
