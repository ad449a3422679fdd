"""Outputs of a stall meter: each function here returns a callable that takes a report.

Any callable that takes a `StallReport` is an output; these serve common tools. They are called on
the meter's own thread, on every rank. Lines, of `terminal` and `log`, are written by each rank that
stalls. `jsonl`, `tensorboard` and `wandb` take all reports of rank 0, and of others if they stall.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from precache.errors import UsageError
from precache.metering.report import StallReport
from precache.runtime.terminal import say

Output = Callable[[StallReport], None]


def _unless_quiet(output: Output) -> Output:
    return lambda report: None if report.quiet else output(report)


def _if_it_stalls(output: Output) -> Output:
    return lambda report: output(report) if report.stalls else None


def terminal() -> Output:
    """Print a line on standard error for each report of a stall, the default of a meter."""
    return _if_it_stalls(lambda report: say(str(report), stderr=True))


def log(logger: logging.Logger | None = None, level: int = logging.INFO) -> Output:
    """Log a line for each report of a stall; by default to the logger ``precache.meter``."""
    chosen = logger or logging.getLogger("precache.meter")
    return _if_it_stalls(lambda report: chosen.log(level, "%s", report))


def jsonl(path: str | os.PathLike[str]) -> Output:
    """Append each report to a file as one line of JSON; ranks of a node may share the file.

    Raises
    ------
    UsageError
        The folder of the file does not exist.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise UsageError(
            f"the folder {file.parent} does not exist; create it, or give another path"
        )

    def write(report: StallReport) -> None:
        with file.open("ab", buffering=0) as opened:  # one write per line keeps lines intact
            opened.write(json.dumps(report.as_dict()).encode() + b"\n")

    return _unless_quiet(write)


def tensorboard(writer: Any) -> Output:
    """Write scalars ``NAME/stall_ratio`` and so on, by step, to a `SummaryWriter`.

    Examples
    --------
    >>> writer = torch.utils.tensorboard.SummaryWriter("runs")  # doctest: +SKIP
    >>> meter(loader, to=[tensorboard(writer)])  # doctest: +SKIP
    """

    def write(report: StallReport) -> None:
        for name, value in report.figures().items():
            writer.add_scalar(f"{report.name}/{name}", value, report.step)

    return _unless_quiet(write)


def wandb(run: Any) -> Output:
    """Log ``NAME/stall_ratio`` and so on to a Weights & Biases run, as `wandb.init` returns it.

    They are committed with your next ``run.log``, or at the end of the run, since W&B would refuse
    your steps if a report advanced its own. ``NAME/step`` is the step of the report.
    """

    def write(report: StallReport) -> None:
        figures = {**report.figures(), "step": report.step}
        run.log({f"{report.name}/{name}": value for name, value in figures.items()}, commit=False)

    return _unless_quiet(write)


def prometheus(registry: Any = None) -> Output:
    """Set gauges ``precache_stall_ratio`` and so on, labelled by meter and rank.

    Serve them yourself, for example with ``prometheus_client.start_http_server(9100)``.

    Parameters
    ----------
    registry
        Registry of the gauges; by default that of prometheus_client.

    Raises
    ------
    UsageError
        prometheus_client is not installed.
    """
    try:
        import prometheus_client
    except ImportError:
        raise UsageError("prometheus_client is missing; pip install prometheus_client") from None
    chosen = registry or prometheus_client.REGISTRY

    def write(report: StallReport) -> None:
        for name, value in report.figures().items():
            _gauge(chosen, name).labels(report.name, str(report.rank)).set(value)

    return write


@functools.cache
def _gauge(registry: Any, name: str) -> Any:
    """Return the only gauge of a name, since a registry refuses a second one."""
    from prometheus_client import Gauge

    description = f"Stall meter: {name.replace('_', ' ')}"
    return Gauge(f"precache_{name}", description, ["meter", "rank"], registry=registry)
