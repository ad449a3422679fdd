"""Render a simulation as an HTML page that replays it, and the data of its player."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from markupsafe import Markup

from precache.html.pages import render
from precache.simulation.model import Simulation

MAX_BATCHES = 20_000
"""Maximum number of batches that a page replays, about a megabyte of data."""


def render_simulation(simulation: Simulation) -> str:
    """Render a self-contained HTML page that replays a simulation, for light and dark mode."""
    return render(
        "simulation.html",
        title=simulation.title(),
        tiles=list(simulation.figures()),
        replay_note="",
        **player_values(simulation),
    )


def player_values(simulation: Simulation) -> dict[str, Any]:
    """Return the values of the template ``player.html``, its style sheet and its script."""
    batches = simulation.batches
    end = min([simulation.end, *batches.begun[MAX_BATCHES : MAX_BATCHES + 1].tolist()])
    played = ("worker", "begun", "ready", "taken", "done")
    shown = {name: np.round(getattr(batches, name)[:MAX_BATCHES], 3) for name in played}
    data = {
        "end": end,
        "workers": simulation.setting.lanes,
        "capacity": simulation.setting.window,
        "load": float(simulation.load.mean()),
        "step": float(simulation.step.mean()),
        "batches": {name: times.tolist() for name, times in shown.items()},
    }
    # Only "<" could end the script element that holds the JSON.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    cut = f"Shown up to {end / 1e3:.3g} s of {simulation.end / 1e3:g} s."
    values = {"data": Markup(text), "cut": cut if end < simulation.end else ""}
    return {"styles": "player.css", "script": "player.js", **values}
