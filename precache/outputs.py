"""Where a stall meter's reports go; each of these makes a callable that takes a report.

Any callable that takes a `StallReport` is an output: these are for what is in common use. They are
called on the meter's own thread, on every rank; all but `prometheus` pass over reports that are
`quiet`.
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

Output = Callable[[StallReport], None]


def _unless_quiet(output: Output) -> Output:
    @functools.wraps(output)
    def write(report: StallReport) -> None:
        if not report.quiet:
            output(report)

    return write


def log(logger: logging.Logger | None = None, level: int = logging.INFO) -> Output:
    """One line a report; by default to the logger ``precache.meter``."""
    chosen = logger or logging.getLogger("precache.meter")
    return _unless_quiet(lambda report: chosen.log(level, "%s", report))


def jsonl(path: str | os.PathLike[str]) -> Output:
    """One JSON object a line, appended; ranks of a node may share a file.

    Raises
    ------
    UsageError
        Its folder does not exist.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise UsageError(f"{file.parent} is no folder; make it before {file.name} is written there")

    def write(report: StallReport) -> None:
        with file.open("ab", buffering=0) as opened:  # a line is one write, and so stays whole
            opened.write(json.dumps(report.as_dict()).encode() + b"\n")

    return _unless_quiet(write)


def tensorboard(writer: Any) -> Output:
    """Scalars ``NAME/stall_ratio`` and so on, by step, to a `SummaryWriter`.

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
    """``NAME/stall_ratio`` and so on to a Weights & Biases run, as `wandb.init` returns it.

    They go with the next ``run.log`` of your own, or with the run's end: a step of theirs would
    make W&B refuse yours. ``NAME/step`` says which step they are of.
    """

    def write(report: StallReport) -> None:
        figures = {**report.figures(), "step": report.step}
        run.log({f"{report.name}/{name}": value for name, value in figures.items()}, commit=False)

    return _unless_quiet(write)


def prometheus(registry: Any = None) -> Output:
    """Gauges ``precache_stall_ratio`` and so on, labelled by meter and rank.

    Serve them yourself, as with ``prometheus_client.start_http_server(9100)``.

    Parameters
    ----------
    registry
        By default prometheus_client's own.

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
    """A registry refuses a second gauge of the same name."""
    from prometheus_client import Gauge

    what = f"Stall meter: {name.replace('_', ' ')}"
    return Gauge(f"precache_{name}", what, ["meter", "rank"], registry=registry)
