"""Data of a simulation for the player of a page."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from markupsafe import Markup

from precache.simulation.model import NEVER, Nanoseconds, Simulation
from precache.simulation.text import milliseconds

MAX_BATCHES = 20_000
"""Maximum number of batches that a page replays, about a megabyte of data."""


def player_values(simulation: Simulation) -> dict[str, Any]:
    """Return the values of the template ``player.html``."""
    end = _replay_end(simulation)
    depth, waits = simulation.queue_depth[1], simulation.stalls_ms[1:]
    data = json.dumps(_data(simulation, end), separators=(",", ":"))
    cut = f"Shown up to {end / 1e9:.3g} s of {simulation.scenario.seconds:g} s."
    return {
        # Only "<" could end the script element that holds the JSON.
        "data": Markup(data.replace("<", "\\u003c")),
        "cut": cut if end < simulation.end else "",
        "lanes_alt": (
            f"One lane per loader and one for the training loop. Loaders are blocked "
            f"{simulation.blocked_share:.1%} of their time; the training loop waits "
            f"{simulation.stall_share:.1%} of its time after start-up."
        ),
        "queue_alt": (
            f"Batches in the queue over time: {simulation.queue_mean:.1f} on average, "
            f"{depth.max()} at most; it holds {simulation.scenario.capacity}."
        )
        if simulation.scenario.capacity
        else "",
        "waits_alt": (
            f"Wait before each of {len(waits):,} batches: the loop waits for "
            f"{np.count_nonzero(waits):,}, {milliseconds(float(waits.max(initial=0)))} ms at most."
        ),
    }


def _replay_end(simulation: Simulation) -> int:
    """Return the end of the replay in nanoseconds: the simulation's, or the limit of batches."""
    return (
        int(simulation.begun[MAX_BATCHES])
        if len(simulation.begun) > MAX_BATCHES
        else simulation.end
    )


def _data(simulation: Simulation, end: int) -> dict[str, Any]:
    scenario = simulation.scenario
    times, depth = simulation.queue_depth
    kept = simulation.begun <= end
    moments = ("begun", "ready", "queued", "taken", "done")
    return {
        "end": end / 1e6,
        "loaders": scenario.loaders,
        "capacity": scenario.capacity,
        "load": scenario.load.mean_ms,
        "step": scenario.step.mean_ms,
        "batches": {
            "loader": simulation.loader[kept].tolist(),
            **{moment: _milliseconds(getattr(simulation, moment)[kept]) for moment in moments},
        },
        "queue": {
            "from": _milliseconds(times[times <= end]),
            "batches": depth[times <= end].tolist(),
        },
        "waits": [round(wait, 3) for wait in simulation.stalls_ms[:MAX_BATCHES].tolist()],
    }


def _milliseconds(times: Nanoseconds) -> list[float | None]:
    return [round(time / 1e6, 3) if time < NEVER else None for time in times.tolist()]
