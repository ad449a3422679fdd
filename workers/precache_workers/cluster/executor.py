"""Executors: run the tasks of a build in this process, or on Ray."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from precache.errors import PrecacheError
from precache_workers.cluster.dispatch import Item, Outcome, Patience, dispatch
from precache_workers.cluster.placement import Placement
from precache_workers.cluster.ray_engine import RayEngine
from precache_workers.cluster.ray_session import joined_ray, own_ray
from precache_workers.runtime.time_limit import lookout_kept

logger = logging.getLogger(__name__)

Run = Callable[..., Iterator[Outcome]]
"""Function with the parameters of `run_serial` that yields (item, outcome) as tasks end."""

OWN_MACHINE = Placement(memory=0, nice=0)
"""Tasks on a Ray of our own, whose memory monitor ends those that take too much memory."""


def run_serial(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    patience: Patience | None = None,
    count: int = 0,
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
) -> Iterator[Run]:
    """Provide what runs tasks; a Ray that was started for it is stopped at the end.

    Parameters
    ----------
    address
        ``serial`` (this process), ``local`` (a Ray of our own), ``auto`` or ``ray://…`` (a running
        cluster, which goes on).
    cpus
        CPUs of a Ray of our own; by default all that this process may use.
    placement
        Of tasks on a running cluster; on a Ray of our own a task takes one CPU.
    notice
        Called with a message when tasks wait for nodes.
    """
    if address == "serial":
        with lookout_kept():
            yield run_serial
        return
    local = address == "local"
    placement = OWN_MACHINE if local else placement or Placement()
    excluded_nodes: dict[str, str] = {}

    def run_on_ray(
        function: Callable[[Any], Any],
        items: Iterable[Item],
        patience: Patience | None = None,
        count: int = 0,
    ) -> Iterator[Outcome]:
        engine = RayEngine(placement, notice, excluded_nodes)
        return dispatch(engine, function, items, patience, count)

    with own_ray(cpus) if local else joined_ray(address):
        yield run_on_ray


def is_joined(address: str) -> bool:
    """Return True for the address of a running cluster."""
    return address == "auto" or address.startswith("ray://")
