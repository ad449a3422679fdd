"""Model of a measured loop: the recurrence of `precache.simulation` with measured times; pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from precache.diagnosis.measurements import Measurements
from precache.simulation.model import Setting, Simulation, Times

BATCHES = 1000
"""Batches of a prediction: the measured ones in their order, repeated."""
MANY = 3000
"""Batches of an epoch from which its start is negligible."""
CONTENTION = 1.25
"""Slowdown of a worker beside the others from which they are in each other's way."""


@dataclass(frozen=True)
class LoopModel:
    """Predictions for a measured loop; times in seconds."""

    measured: Measurements

    @property
    def setting(self) -> Setting:
        """Setting of the loop as it is; other loaders load ahead if they overlap with the step."""
        setup, copies = self.measured.setup, self.measured.copies
        workers = setup.workers
        if workers is None:
            workers = int(self.overlap >= 0.5)
        return Setting(
            workers=workers,
            prefetch=setup.prefetch,
            in_order=setup.in_order,
            startup=(1e3 * self.startup,),
            copy=1e3 * (copies.exposed if copies else 0.0),
        )

    @property
    def epoch(self) -> int | None:
        """Batches of an epoch at whose start workers begin to load; None if that is negligible."""
        setup = self.measured.setup
        return setup.epoch if setup.workers and (setup.epoch or MANY) < MANY else None

    @property
    def startup(self) -> float:
        """Time in which the workers of each epoch start, without the load of its first batch."""
        again = self.epoch and not self.measured.setup.persistent
        return max(0.0, self.measured.start - float(self.work.mean())) if again else 0.0

    @cached_property
    def overlap(self) -> float:
        """Share of the shorter of loading and step that runs during the other."""
        load, step = self.measured.loader.mean, self.step
        hidden = load + step - self.measured.together.mean
        return min(1.0, max(0.0, hidden / min(load, step)))

    @cached_property
    def steps(self) -> Times:
        """Times of the steps beside the loader: of the loop without its waits, or on CUDA alone."""
        together = self.measured.together
        if self.measured.setup.cuda or self.crowded:
            return np.full(len(together.seconds), self.measured.step.mean)
        return np.maximum(np.subtract(together.seconds, together.waits), 1e-9)

    @property
    def step(self) -> float:
        """Mean time of a step that never waits for data."""
        return float(self.steps.mean())

    @cached_property
    def crowded(self) -> bool:
        """Loading takes the step's cores, and slows it down."""
        together, step, setup = self.measured.together, self.measured.step, self.measured.setup
        demand = together.share(together.usage.cpu) + together.share(together.usage.delay)
        slowed = together.mean * (1 - together.stall) > CONTENTION * step.mean
        return slowed and setup.workers != 0 and step.computing > 0.5 and demand > 0.8 * setup.cores

    @cached_property
    def work(self) -> Times:
        """Times of one worker for a batch."""
        measured = self.measured
        own = measured.setup.workers == 0
        times = np.array(measured.together.waits) if own else measured.by_worker.times
        return np.maximum(times, 1e-9)

    @property
    def computing(self) -> float:
        """Share of a worker's time in which it computes or waits for a core; 0 if unknown."""
        return self.measured.by_worker.computing

    @cached_property
    def contention(self) -> float:
        """Slowdown of the loader alone over what its workers would deliver as fast as one alone."""
        worker, workers = self.measured.single_worker, self.measured.setup.workers
        if not worker or not workers:
            return 1.0
        load = 1e3 * np.resize(worker.times, BATCHES)
        setting = dataclasses.replace(self.setting, copy=0.0)
        alone = Simulation(load, np.zeros(BATCHES), setting)
        free = (alone.end - alone.startup) / 1e3 / (BATCHES - 1)
        return max(1.0, self.measured.loader.mean / free)

    def load(self, workers: int) -> Times:
        """Times of one of several workers for a batch: one cap for all of them.

        They share the cores with the step and with other processes, whose number follows from the
        time that one worker waited for a core; if they were in each other's way, they deliver no
        more than they did.
        """
        run, step, cores = self.measured.by_worker, self.measured.step, self.measured.setup.cores
        mean, busy = float(self.work.mean()), run.share(run.usage.cpu)
        waiting = run.share(run.usage.delay)
        others = cores * (1 + waiting / busy) - 1 if busy > 0.1 and waiting > 0.1 * busy else 0.0
        demand = workers * min(1.0, busy + waiting) + step.share(step.usage.cpu) + others
        wait = mean * max(0.0, 1 - busy - waiting)
        time = wait + min(1.0, busy) * mean * max(1.0, demand / cores) if workers else mean
        if self.contention > CONTENTION:
            time = max(time, mean * self.contention * workers / (self.measured.setup.workers or 1))
        return self.work * (max(time, mean) / mean)

    def run(self, load: Times | None = None, **changes: Any) -> Simulation:
        """Run the loop with other load times, workers or settings; an epoch, or a long run."""
        setting = dataclasses.replace(self.setting, **changes)
        if setting.workers:
            setting = dataclasses.replace(setting, copy=setting.copy + 1e3 * self.measured.take)
        load = self.load(setting.workers) if load is None else load
        count = self.epoch or BATCHES
        return Simulation(1e3 * np.resize(load, count), 1e3 * np.resize(self.steps, count), setting)

    def rate(self, load: Times | None = None, **changes: Any) -> float:
        """Predict batches/s, the start of each epoch included."""
        return self.run(load, **changes).rate

    @cached_property
    def now(self) -> float:
        """Measured batches/s of the loop, with the start of each epoch."""
        first = (self.startup + float(self.work.mean())) / self.epoch if self.epoch else 0.0
        return 1 / (self.measured.together.mean + first)

    @cached_property
    def fit(self) -> float:
        """Measured over predicted batches/s of the loop as it is."""
        return self.now / self.rate()
