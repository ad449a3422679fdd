"""Render a diagnosis as an HTML page."""

from __future__ import annotations

from precache.diagnosis.diagnose import CONFIDENCE_TEXT, Diagnosis, waiting_notes
from precache.html.charts import Bars, Dots, Panel
from precache.html.pages import render
from precache.simulation.page import player_values
from precache.units import number


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """Render a self-contained HTML page, for light and dark mode."""
    played, stall = diagnosis.simulation.stall_share, diagnosis.measurements.together.stall
    names, shares, rates = zip(*loops(diagnosis), strict=True)
    free = diagnosis.without_waiting, "without waiting"
    panels = [
        Panel("lost to data", shares, [f"{share:.0%}" for share in shares], top=1),
        Panel("batches/s", rates, [*map(number, rates)], free),
    ]
    colours = ["blue"] + ["green"] * (len(names) - 1)
    note = "Predictions, in green, are of the loop with a remedy."
    times = {name: 1e3 * run.times for name, run in diagnosis.measurements.runs.items()}
    return render(
        "diagnosis.html",
        title=f"{diagnosis.verdict}: {diagnosis.reason}",
        tiles=[
            ("batches/s", number(diagnosis.batches_per_s)),
            ("without waiting", number(diagnosis.without_waiting)),
            ("lost to data", f"{diagnosis.lost_share:.0%}"),
            *(("best remedy", f"{best.gain:.2f} x") for best in diagnosis.helpful[:1]),
        ],
        charts=[
            Bars("Before and after", names, panels, colours, note),
            Dots("Time per batch", times, "Each dot is a batch."),
        ],
        remedies=[
            (f"{r.gain:.2f} x: {r.what}", f"{r.why} ({CONFIDENCE_TEXT[r.confidence]})")
            for r in diagnosis.remedies
        ],
        flags=[*waiting_notes(diagnosis), *diagnosis.flags],
        replay_note=(
            f"The loop as the model has it, from the measured load and step times: it waits "
            f"{played:.0%} of the time; the measured loop waited {stall:.0%}."
        ),
        **player_values(diagnosis.simulation),
    )


def loops(diagnosis: Diagnosis) -> list[tuple[str, float, float]]:
    """List the loop as it is, and with each helpful remedy: name, share lost to data, batches/s."""
    result = [("now, measured", diagnosis.lost_share, diagnosis.batches_per_s)]
    for remedy in diagnosis.helpful:
        lost = max(0.0, 1 - remedy.batches_per_s / diagnosis.without_waiting)
        result.append((f"{remedy.name}, predicted", lost, remedy.batches_per_s))
    return result
