"""The stall clock of a device: the host's own, or events on a CUDA stream.

A CUDA step returns as soon as it is queued, so the host cannot tell how long it takes, and a wait
for data that the device spends on queued steps costs nothing. So on CUDA an event is recorded where
the caller asks for a batch and another where it has one, both on the caller's current stream. The
device passes the first when it has done all that was queued before, and the second at once if it is
still behind the host by then, else when the host gets there. What lies between the two is how long
the device had nothing to do because the batch was not there, together with copies and transforms
that fetching put on that stream. Nothing here waits for the device: an event it has not passed is
looked at again a step later.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from precache.runtime.step_clock import StallClock


def stall_clock(device: torch.device) -> StallClock[Any]:
    """By events on CUDA, else by the host's clock."""
    if device.type == "cuda":
        return StallClock(lambda: _record_event(device), _seconds_between)
    return StallClock(time.perf_counter, lambda start, end: end - start)


def _record_event(device: torch.device) -> torch.cuda.Event:
    """A timed event at this point of the caller's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
    """What the device spent from one event to another; None before it has passed both."""
    # Of both: they may be on different streams. torch's own method has no types.
    if not (start.query() and end.query()):  # type: ignore[no-untyped-call]
        return None
    return float(start.elapsed_time(end)) / 1e3
