"""What a page needs to play loaders, queue and training loop."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from markupsafe import Markup

from precache.simulation.model import NEVER, Simulation, Times
from precache.simulation.text import number

PLAYED = 20_000
"""Batches that a page plays, about a megabyte of it."""


def played(found: Simulation) -> dict[str, Any]:
    """Values of the template ``player.html``."""
    end = played_until(found)
    depth, waits = found.queue_depth[1], found.stalls_ms[1:]
    data = json.dumps(_data(found, end), separators=(",", ":"))
    cut = f"Played and drawn up to {end / 1e9:.3g} s of {found.setting.seconds:g} s."
    return {
        # JSON is safe inside a script element but for what could end it.
        "data": Markup(data.replace("<", "\\u003c")),
        "cut": cut if end < found.end else "",
        "lanes_alt": (
            f"A lane for each loader and one for the training loop. Loaders are blocked "
            f"{found.blocked_share:.1%} of their time; the training loop waits "
            f"{found.stall_share:.1%} of its time after start-up."
        ),
        "queue_alt": (
            f"Batches in the queue over time: {found.queue_mean:.1f} on average, "
            f"{depth.max()} at most, of {found.setting.room}."
        )
        if found.setting.room
        else "",
        "waits_alt": (
            f"Wait before each of {len(waits):,} batches: {np.count_nonzero(waits):,} of them "
            f"waited for, {number(float(waits.max(initial=0)))} ms at most."
        ),
    }


def played_until(found: Simulation) -> int:
    """Nanoseconds that a page plays: all, or as long as there are not too many batches."""
    return int(found.begun[PLAYED]) if len(found.begun) > PLAYED else found.end


def _data(found: Simulation, end: int) -> dict[str, Any]:
    setting = found.setting
    times, depth = found.queue_depth
    kept = found.begun <= end
    moments = ("begun", "ready", "queued", "taken", "done")
    return {
        "end": end / 1e6,
        "loaders": setting.loaders,
        "room": setting.room,
        "load": setting.load.mean_ms,
        "step": setting.step.mean_ms,
        "batches": {
            "loader": found.loader[kept].tolist(),
            **{moment: _milliseconds(getattr(found, moment)[kept]) for moment in moments},
        },
        "queue": {
            "from": _milliseconds(times[times <= end]),
            "batches": depth[times <= end].tolist(),
        },
        "waits": [round(wait, 3) for wait in found.stalls_ms[:PLAYED].tolist()],
    }


def _milliseconds(times: Times) -> list[float | None]:
    return [round(time / 1e6, 3) if time < NEVER else None for time in times.tolist()]
