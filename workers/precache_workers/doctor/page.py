"""The doctor's report as a page and as a PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from precache.html.charts import Chart, Panel, bars, distributions
from precache.html.pages import render
from precache.simulation.model import MOST_LOADERS, Simulation, simulate
from precache.simulation.page import timeline
from precache.simulation.player import player_values
from precache.units import number, plain, size
from precache_workers.doctor import text

if TYPE_CHECKING:
    from precache_workers.doctor.report import CodecFigures, DoctorReport

BATCH_SAMPLES = 64
"""Samples per batch of the simulated loops."""
BATCHES = 100
MAX_STEP_MS = 1e8
"""Longest simulated step, about a day."""
TEXT_COLUMNS = ("key", "stored after", "slowest stage")


def render_doctor_report(report: DoctorReport) -> str:
    """Render a page: one file, no network, light and dark."""
    tables = {
        heading: (
            [str(column.header).replace("\n", " ") for column in table.columns],
            list(zip(*(map(str, column.cells) for column in table.columns), strict=True)),
        )
        for heading, table in text.tables(report, slow_ratio=0)
    }
    before, after = simulate_without_cache(report), simulate_with_cache(report)
    return render(
        "doctor.html",
        styles="player.css",
        script="player.js",
        title=text.title(report),
        answers=list(text.answers(report)),
        charts=[*_charts(report), *_timeline_after(after)],
        tables=tables,
        text=TEXT_COLUMNS,
        listing=number(1e3 * report.listing_seconds / report.samples),
        remarks=list(text.remarks(report)),
        replay_note=_replay_note(report, before, after),
        **player_values(before),
    )


# --- charts -------------------------------------------------------------------------------------


def _charts(report: DoctorReport) -> list[Chart]:
    """List the charts, the answer first."""
    return [
        _feeding(report), _stages(report), _cuts(report), _codecs(report), *_storage(report)
    ]  # fmt: skip


def _timeline_after(after: Simulation | None) -> list[Chart]:
    return [timeline(after, "Timeline with a cache, simulated")] if after else []


def simulate_without_cache(report: DoctorReport) -> Simulation:
    """Simulate one process per core that fetches and decodes batches of the timed samples."""
    sample_ms = np.sum([stage.each_ms for stage in report.stages[:-1]], axis=0)
    shape = (BATCHES, BATCH_SAMPLES)
    return _simulate(report, np.random.default_rng(0).choice(sample_ms, shape).sum(axis=1))


def simulate_with_cache(report: DoctorReport) -> Simulation | None:
    """Simulate the same processes reading a store; None if caching is not recommended."""
    cut = next(cut for cut in report.cuts if cut.after == report.cut)
    if cut.after == "fetch":
        return None
    return _simulate(report, np.full(1, BATCH_SAMPLES * cut.online_cpu_ms))


def _simulate(report: DoctorReport, load_ms: npt.NDArray[np.float64]) -> Simulation:
    loaders = min(report.cores, MOST_LOADERS)
    step_ms = min(1e3 * BATCH_SAMPLES / report.rate, MAX_STEP_MS)
    pace = max(step_ms, float(load_ms.mean()) / loaders)
    seconds = (load_ms.max() + BATCHES * pace) / 1e3
    return simulate(np.maximum(load_ms, 1e-3), step_ms, loaders, seconds=seconds)


def _replay_note(report: DoctorReport, before: Simulation, after: Simulation | None) -> str:
    note = (
        f"A simulation without a cache: one process on each of {text.count_cores(report.cores)} "
        f"loads batches of {BATCH_SAMPLES}, with the times of the measured samples, fetches "
        f"included. The device waits {before.stall_share:.0%} of its time"
    )
    return f"{note}; with a cache, {after.stall_share:.0%}." if after else f"{note}."


def stall(report: DoctorReport, samples_per_s: float) -> float:
    """Return the share of its time that the device waits if it gets fewer samples than its rate."""
    return max(0.0, 1 - samples_per_s / report.rate)


def predict_speed(codec: CodecFigures, cores: int) -> float:
    """Predict the samples/s that cores read from a store, from the CPU time of reading."""
    return 1e6 * cores / max(codec.cpu_ms_per_1000, 1e-9)


def _feeding(report: DoctorReport) -> Chart:
    speeds = [report.cuts[0].samples_per_s]
    speeds += [predict_speed(codec, report.cores) for codec in report.codecs]
    needed = [report.cores_without_cache, *(codec.cores_at_rate for codec in report.codecs)]
    predicted = [stall(report, speed) for speed in speeds]
    measured = [math.nan, *(stall(report, codec.samples_per_s) for codec in report.codecs)]
    panels = [
        Panel("stall, predicted", predicted, list(map(_share, predicted)), top=1),
        Panel("stall, at measured speed", measured, list(map(_share, measured)), top=1),
        Panel(
            "cores needed",
            needed,
            [plain(cores, 2) for cores in needed],
            (report.cores, f"the {report.cores} available"),
        ),
    ]
    return bars(
        "feeding",
        f"Feeding a device of {report.rate:,.0f} samples/s, before and after",
        ["without a cache", *(f"cached, {codec.codec}" for codec in report.codecs)],
        panels,
        ["orange"] + ["green"] * len(report.codecs),
        f"Stall is the device's share of time waiting, 1 - samples/s / {report.rate:,.0f}. "
        f"Predicted: from CPU time, on {text.count_cores(report.cores)}. Measured: a Loader that "
        f"reads a small store, on {text.count_cores(report.host.cores)} here.",
    )


def _share(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.0%}"


def _stages(report: DoctorReport) -> Chart:
    rows = {stage.name: np.array(stage.each_ms) for stage in report.stages}
    return distributions(
        "stages",
        "Time of each stage, ms per sample",
        rows,
        "CPU time; for fetch the time spent waiting. Each dot is a sample.",
    )


def _cuts(report: DoctorReport) -> Chart:
    cuts = report.cuts
    once, online = [cut.offline_cpu_ms for cut in cuts], [cut.online_cpu_ms for cut in cuts]
    speeds = [cut.samples_per_s for cut in cuts]
    panels = [
        Panel(
            "storage", [cut.bytes_total for cut in cuts], [size(cut.bytes_total) for cut in cuts]
        ),
        Panel("CPU-ms once", once, list(map(number, once))),
        Panel("CPU-ms every epoch", online, list(map(number, online))),
        Panel("samples/s", speeds, _integers(speeds), (report.rate, "device")),
    ]
    rows = [text.cut_name(cut) for cut in cuts]
    colours = ["green" if cut.after == report.cut else "blue" for cut in cuts]
    note = (
        "Ops up to this result run once, the others in every epoch. The recommended one is green."
    )
    return bars("cuts", "Result to store", rows, panels, colours, note)


def _codecs(report: DoctorReport) -> Chart:
    cores = report.host.cores
    predicted = [predict_speed(codec, cores) for codec in report.codecs]
    measured = [codec.samples_per_s for codec in report.codecs]
    panels = [
        Panel(
            "storage",
            [codec.bytes_total for codec in report.codecs],
            [size(codec.bytes_total) for codec in report.codecs],
        ),
        Panel("samples/s, predicted", predicted, _integers(predicted), top=max(measured)),
        Panel("samples/s, measured", measured, _integers(measured), top=max(predicted)),
    ]
    note = (
        f"Predicted: from CPU time, on {text.count_cores(cores)}. Measured: a Loader that reads "
        "from memory here, beside whatever else ran on this machine."
    )
    rows = [codec.codec for codec in report.codecs]
    return bars("codecs", "Each codec", rows, panels, ["blue"] * len(rows), note)


def _integers(values: Sequence[float]) -> list[str]:
    return [f"{value:,.0f}" for value in values]


def _storage(report: DoctorReport) -> Iterator[Chart]:
    if not report.storage:
        return
    speeds = [trial.bytes_per_s / 1e6 for trial in report.storage]
    waits = [trial.median_ms for trial in report.storage]
    requests = [trial.requests_per_s for trial in report.storage]
    panels = [
        Panel("MB/s", speeds, list(map(number, speeds))),
        Panel("requests/s", requests, _integers(requests)),
        Panel("ms per request, median", waits, list(map(number, waits))),
    ]
    rows = [f"{trial.pattern}, {trial.depth} at a time" for trial in report.storage]
    yield bars("storage", "Reading the source", rows, panels, ["blue"] * len(rows))
