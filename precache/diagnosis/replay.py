"""The batches of a diagnosis, one by one: as they were recorded, or by the model of loading; pure.

Where the loop itself loads, what was recorded is all there is to see. What workers did at any time
was not recorded: loaders that take the times measured of one stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from precache.diagnosis.measurements import Measurements
from precache.diagnosis.remedies import Rates
from precache.simulation.distributions import Durations
from precache.simulation.model import Setting, Simulation, run


def recorded(measured: Measurements) -> bool:
    """Whether the loop itself loads, so that each moment of both is known."""
    workers = measured.setup.workers
    return workers == 0 or (workers is None and Rates.of(measured).overlap < 0.5)


def replay(measured: Measurements) -> Simulation:
    """Loaders, queue and training loop over the time in which both were measured together.

    With workers that is a model of their loading, `precache.simulate`: one worker's times in
    turn, so much longer as several get into each other's way; and steps as long as recorded.
    """
    together = measured.together
    ends = list(accumulate(together.seconds))
    steps = [each - wait for each, wait in zip(together.seconds, together.waits, strict=True)]
    if recorded(measured):
        setting = Setting(1, _times(together.waits), _times(steps), 0, ends[-1])
        return _recorded(setting, together.waits, ends)
    workers, work = max(1, measured.setup.workers or 1), measured.by_worker
    slower = max(1.0, measured.loader.mean * workers / work.mean) if measured.lane else 1.0
    load = [slower * each for each in work.seconds]
    queue = workers * max(0, measured.setup.prefetch - 1)
    return run(Setting(workers, _times(load), _times(steps), queue, ends[-1]))


def _recorded(setting: Setting, waits: Sequence[float], ends: Sequence[float]) -> Simulation:
    begun = [0.0, *ends[:-1]]
    taken = [at + wait for at, wait in zip(begun, waits, strict=True)]
    starts, ready, done = (
        np.rint(np.array(each) * 1e9).astype(np.int64) for each in (begun, taken, ends)
    )
    alone = np.zeros(len(starts), np.int64)
    return Simulation(setting, alone, starts, ready, ready, ready, done)


def _times(seconds: Sequence[float]) -> Durations:
    """Measured times, as they came; none is quite zero."""
    ms = tuple(1e3 * max(each, 1e-6) for each in seconds)
    mean = sum(ms) / len(ms)
    return Durations(mean, float(np.std(ms)) / mean, "cycle", ms)
