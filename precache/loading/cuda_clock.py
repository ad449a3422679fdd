"""The stall clock of a device: the host's own, or events on a CUDA stream.

A CUDA step returns as soon as it is queued, so the host cannot measure it, and a wait for data
during which the device runs queued steps costs nothing. So on CUDA one event is recorded when the
caller requests a batch and another when it receives one, both on the caller's current stream. The
device passes the first when it has done all earlier work. It passes the second immediately if the
host has recorded it by then, else when the host does. The time between the two is how long the
device was idle for lack of the batch, plus copies and transforms that fetching queued on that
stream. Nothing here waits for the device: an event that is not passed is checked a step later.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from precache.runtime.step_clock import StallClock


def stall_clock(device: torch.device) -> StallClock[Any]:
    """Make a clock that measures by events on CUDA, else by the host's clock."""
    if device.type == "cuda":
        return StallClock(lambda: _record_event(device), _seconds_between)
    return StallClock(time.perf_counter, lambda start, end: end - start)


def _record_event(device: torch.device) -> torch.cuda.Event:
    """Record a timed event on the caller's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
    """Return the device's seconds between two events; None before it has passed both."""
    # Both, since they may be on different streams. torch's own method has no types.
    if not (start.query() and end.query()):  # type: ignore[no-untyped-call]
        return None
    return float(start.elapsed_time(end)) / 1e3
