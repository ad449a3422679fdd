"""What a doctor's examination came to, as a page and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from precache.html import pages
from precache.html.charts import Chart, Panel, bars, distributions, draw_png, need_matplotlib
from precache.simulation.model import MOST_LOADERS, Simulation, simulate
from precache.simulation.pictures import time_line
from precache.simulation.player import played
from precache.units import size
from precache_workers.doctor import text

if TYPE_CHECKING:
    from precache_workers.doctor.report import CodecFigures, DoctorReport

BATCH = 64
"""Samples of a batch of the loops that are modelled."""
BATCHES = 100
SLOWEST_MS = 1e8
"""Of a step, a day or so: any loader keeps up with such a device."""
TEXT_COLUMNS = ("key", "stored after")


def page(found: DoctorReport) -> str:
    """A page of HTML: one file, no network, light and dark."""
    tables = {
        heading: (
            [str(column.header).replace("\n", " ") for column in table.columns],
            list(zip(*(map(str, column.cells) for column in table.columns), strict=True)),
        )
        for heading, table in text.tables(found, notable=0)
    }
    before, after = without_cache(found), with_cache(found)
    return pages.render(
        "doctor.html",
        styles="player.css",
        script="player.js",
        title=text.title(found),
        answers=list(text.answers(found)),
        charts=[*charts(found), *_line_after(after)],
        tables=tables,
        text=TEXT_COLUMNS,
        listing=text.number(1e3 * found.listing_seconds / found.samples),
        remarks=list(text.remarks(found)),
        how=_how(found, before, after),
        **played(before),
    )


def write_page(found: DoctorReport, path: str | Path) -> None:
    """Write the page that `page` makes.

    Raises
    ------
    UsageError
        If matplotlib is not installed.
    StorageError
        If the file cannot be written.
    """
    need_matplotlib(path)
    pages.save(page(found), path)


def write_png(found: DoctorReport, path: str | Path) -> None:
    """Draw all charts into a PNG, 1,600 pixels wide; raises the same."""
    before = time_line(without_cache(found), "Time line without a cache, modelled")
    drawn = [*charts(found), before, *_line_after(with_cache(found))]
    draw_png(text.title(found), drawn, path)


# --- charts -------------------------------------------------------------------------------------


def charts(found: DoctorReport) -> list[Chart]:
    """What was measured and what follows, the answer first."""
    return [_feeding(found), _stages(found), _cuts(found), _codecs(found), *_storage(found)]


def _line_after(after: Simulation | None) -> list[Chart]:
    return [time_line(after, "Time line with a cache, modelled")] if after else []


def without_cache(found: DoctorReport) -> Simulation:
    """A process on each core that fetches and decodes batches of the samples that were timed."""
    each = np.sum([stage.each_ms for stage in found.stages[:-1]], axis=0)
    drawn = np.random.default_rng(0).choice(each, (BATCHES, BATCH)).sum(axis=1)
    return _fed(found, drawn)


def with_cache(found: DoctorReport) -> Simulation | None:
    """The same on what is stored after the cut, where there is one."""
    cut = next(each for each in found.cuts if each.after == found.cut)
    return None if cut.after == "fetch" else _fed(found, np.full(1, BATCH * cut.online_cpu_ms))


def _fed(found: DoctorReport, load_ms: npt.NDArray[np.float64]) -> Simulation:
    loaders, step_ms = min(found.cores, MOST_LOADERS), min(1e3 * BATCH / found.rate, SLOWEST_MS)
    pace = max(step_ms, float(load_ms.mean()) / loaders)
    seconds = (load_ms.max() + BATCHES * pace) / 1e3
    return simulate(np.maximum(load_ms, 1e-3), step_ms, loaders, seconds=seconds)


def _how(found: DoctorReport, before: Simulation, after: Simulation | None) -> str:
    told = (
        f"A model: {text.cores(found.cores)} load batches of {BATCH} without a cache, a process on "
        "each, from the times of the samples measured, waiting for fetches included. The device "
        f"waits {before.stall_share:.0%} of its time"
    )
    return f"{told}; with a cache, {after.stall_share:.0%}." if after else f"{told}."


def stall(found: DoctorReport, samples_per_s: float) -> float:
    """Share of its time that the device waits, at the rate asked for: 1 - given / asked."""
    return max(0.0, 1 - samples_per_s / found.rate)


def by_cpu_time(codec: CodecFigures, cores: int) -> float:
    """Samples a second that cores read from a store, by the CPU time of its reading."""
    return 1e6 * cores / max(codec.cpu_ms_per_1000, 1e-9)


def _feeding(found: DoctorReport) -> Chart:
    given = [found.cuts[0].samples_per_s]
    given += [by_cpu_time(each, found.cores) for each in found.codecs]
    needed = [found.cores_without_cache, *(each.cores_at_rate for each in found.codecs)]
    foretold = [stall(found, each) for each in given]
    measured = [math.nan, *(stall(found, each.samples_per_s) for each in found.codecs)]
    panels = [
        Panel("stall, predicted", foretold, list(map(_share, foretold)), top=1),
        Panel("stall, at measured speed", measured, list(map(_share, measured)), top=1),
        Panel(
            "cores needed",
            needed,
            [f"{each:.2g}" for each in needed],
            (found.cores, f"the {found.cores} there"),
        ),
    ]
    return bars(
        "feeding",
        f"Feeding a device of {found.rate:,.0f} samples/s, before and after",
        ["without a cache", *(f"cached, {each.codec}" for each in found.codecs)],
        panels,
        ["orange"] + ["green"] * len(found.codecs),
        f"Stall is the device's share of waiting, 1 - samples/s / {found.rate:,.0f}. Predicted: by "
        f"the CPU time that {text.cores(found.cores)} have. Measured: a Loader's speed from a "
        f"small store, on {text.cores(found.host.cores)} here.",
    )


def _share(value: float) -> str:
    return "not tried" if math.isnan(value) else f"{value:.0%}"


def _stages(found: DoctorReport) -> Chart:
    rows = {each.name: np.array(each.each_ms) for each in found.stages}
    return distributions(
        "stages",
        "Time of each stage, ms a sample",
        rows,
        "CPU time; of fetch the time waited. Each dot is a sample.",
    )


def _cuts(found: DoctorReport) -> Chart:
    cuts = found.cuts
    once, each_epoch = [cut.offline_cpu_ms for cut in cuts], [cut.online_cpu_ms for cut in cuts]
    speeds = [cut.samples_per_s for cut in cuts]
    panels = [
        Panel("storage", [cut.bytes_total for cut in cuts], [size(c.bytes_total) for c in cuts]),
        Panel("CPU-ms once", once, list(map(text.number, once))),
        Panel("CPU-ms each epoch", each_epoch, list(map(text.number, each_epoch))),
        Panel("samples/s", speeds, _whole(speeds), (found.rate, "device")),
    ]
    rows = [text.cut_name(cut) for cut in cuts]
    colours = ["green" if cut.after == found.cut else "blue" for cut in cuts]
    note = "Work up to the cut is done once, the rest in every epoch; the cut to take is green."
    return bars("cuts", "Where to cut", rows, panels, colours, note)


def _codecs(found: DoctorReport) -> Chart:
    cores = found.host.cores
    foretold = [by_cpu_time(each, cores) for each in found.codecs]
    measured = [each.samples_per_s for each in found.codecs]
    panels = [
        Panel(
            "storage",
            [each.bytes_total for each in found.codecs],
            [size(each.bytes_total) for each in found.codecs],
        ),
        Panel("samples/s, predicted", foretold, _whole(foretold), top=max(measured)),
        Panel("samples/s, measured", measured, _whole(measured), top=max(foretold)),
    ]
    note = (
        f"Predicted: by CPU time, on {text.cores(cores)}, as the device's stall is. Measured: by "
        "a Loader here, from memory, on the machine as busy as it was."
    )
    rows = [each.codec for each in found.codecs]
    return bars("codecs", "Each codec", rows, panels, ["blue"] * len(rows), note)


def _whole(values: Sequence[float]) -> list[str]:
    return [f"{each:,.0f}" for each in values]


def _storage(found: DoctorReport) -> Iterator[Chart]:
    if not found.storage:
        return
    read = found.storage
    speeds, waits = [each.bytes_per_s / 1e6 for each in read], [each.median_ms for each in read]
    requests = [each.requests_per_s for each in read]
    panels = [
        Panel("MB/s", speeds, list(map(text.number, speeds))),
        Panel("requests/s", requests, _whole(requests)),
        Panel("ms a request, median", waits, list(map(text.number, waits))),
    ]
    rows = [f"{each.pattern}, {each.depth} at a time" for each in read]
    yield bars("storage", "Reading the source", rows, panels, ["blue"] * len(rows))
