"""Replay the batches of a diagnosis, as recorded or as simulated; pure.

If the loop itself loads, all its times are recorded. Times of workers are not recorded, so workers
are simulated with the times measured for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from precache.diagnosis.measurements import Measurements
from precache.diagnosis.remedies import LoopTimes
from precache.simulation.distributions import Durations
from precache.simulation.model import Scenario, Simulation, simulate_scenario


def recorded(measured: Measurements) -> bool:
    """Return whether the loop itself loads, so that all its times are recorded."""
    workers = measured.setup.workers
    return workers == 0 or (workers is None and LoopTimes.of(measured).overlap < 0.5)


def replay(measured: Measurements) -> Simulation:
    """Return loaders, queue and training loop during the run of loader and step together.

    The load times of simulated workers are those of one worker in turn, multiplied by the measured
    slowdown from contention. Steps take the recorded times.
    """
    together = measured.together
    ends = list(accumulate(together.seconds))
    steps = [total - wait for total, wait in zip(together.seconds, together.waits, strict=True)]
    if recorded(measured):
        scenario = Scenario(1, _times(together.waits), _times(steps), 0, ends[-1])
        return _recorded_simulation(scenario, together.waits, ends)
    workers, work = max(1, measured.setup.workers or 1), measured.by_worker
    slowdown = (
        max(1.0, measured.loader.mean * workers / work.mean) if measured.single_worker else 1.0
    )
    load = [slowdown * seconds for seconds in work.seconds]
    queue = workers * max(0, measured.setup.prefetch - 1)
    return simulate_scenario(Scenario(workers, _times(load), _times(steps), queue, ends[-1]))


def _recorded_simulation(
    scenario: Scenario, waits: Sequence[float], ends: Sequence[float]
) -> Simulation:
    begun = [0.0, *ends[:-1]]
    taken = [start + wait for start, wait in zip(begun, waits, strict=True)]
    starts, ready, done = (
        np.rint(np.array(times) * 1e9).astype(np.int64) for times in (begun, taken, ends)
    )
    loader = np.zeros(len(starts), np.int64)
    return Simulation(scenario, loader, starts, ready, ready, ready, done)


def _times(seconds: Sequence[float]) -> Durations:
    """Return measured times in their order; zeros become a microsecond."""
    ms = tuple(1e3 * max(time, 1e-6) for time in seconds)
    mean = sum(ms) / len(ms)
    return Durations(mean, float(np.std(ms)) / mean, "cycle", ms)
