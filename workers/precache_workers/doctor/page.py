"""The doctor's report as a page."""

from __future__ import annotations

import numpy as np

from precache.html.charts import Bars, Dots, Panel
from precache.html.pages import render
from precache.simulation.model import Simulation
from precache.simulation.page import player_values
from precache.units import number, plain
from precache_workers.doctor import text
from precache_workers.doctor.report import BATCH_SAMPLES, DoctorReport, feed


def render_doctor_report(report: DoctorReport) -> str:
    """Render a page: one file, no network, light and dark."""
    before = simulate_without_cache(report)
    times = {stage.name: np.array(stage.each_ms) for stage in report.stages}
    note = "CPU time; for fetch the time spent waiting. Each dot is a sample."
    return render(
        "doctor.html",
        title=text.title(report),
        answers=list(text.answers(report)),
        bars=_feeding(report, before),
        dots=Dots("Time of each stage, per sample", times, note),
        tables=list(text.tables(report, slow_ratio=0)),
        listing=number(1e3 * report.listing_seconds / report.samples),
        remarks=list(text.remarks(report)),
        replay_note=_replay_note(report, before),
        **player_values(before),
    )


def simulate_without_cache(report: DoctorReport) -> Simulation:
    """Simulate one process per core that fetches and decodes batches of the timed samples."""
    sample_ms = np.sum([stage.each_ms for stage in report.stages[:-1]], axis=0)
    if report.storage:  # however many processes read it
        sample_ms = np.maximum(sample_ms, 1e3 * report.cores / report.source_per_s)
    return feed(sample_ms, report.cores, report.rate)


def _replay_note(report: DoctorReport, before: Simulation) -> str:
    note = (
        f"A simulation without a cache: one process on each of {text.count_cores(report.cores)} "
        f"loads batches of {BATCH_SAMPLES}, with the times of the measured samples, fetches "
        f"included. The device waits {before.stall_share:.0%} of its time"
    )
    if report.worthwhile:
        note += f"; with a cache, {report.simulate_reading(report.codecs[0]).stall_share:.0%}"
    return f"{note}."


def _feeding(report: DoctorReport, before: Simulation) -> Bars:
    needed = [report.cores_without_cache, *map(report.cores_at_rate, report.codecs)]
    loops = before, *map(report.simulate_reading, report.codecs)
    stalls = [loop.stall_share for loop in loops]
    available = report.cores, f"the {report.cores} available"
    return Bars(
        f"Feeding a device of {report.rate:,.0f} samples/s, before and after",
        ["without a cache", *(f"cached, {codec.codec}" for codec in report.codecs)],
        [
            Panel("stall", stalls, [f"{stall:.0%}" for stall in stalls], top=1),
            Panel("cores needed", needed, [plain(cores, 2) for cores in needed], available),
        ],
        ["orange"] + ["green"] * len(report.codecs),
        "Stall is the share of its time in which the device waits, as simulated on "
        f"{text.count_cores(report.cores)}.",
    )
