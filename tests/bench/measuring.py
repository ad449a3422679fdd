"""Benchmarks of what precache measures and predicts."""

import itertools
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import precache
from precache.diagnosis.judgement import Remedy
from precache.runtime.machine import MachineReader
from precache.simulation.model import Setting, Simulation
from tests.bench.harness import (
    BATCH,
    CROP,
    RESIZE,
    Rounds,
    Rows,
    Table,
    Work,
    in_clean_process,
    log,
    main,
    part,
    rotated,
)
from tests.support import loops
from tests.support.building import free_ports

EVERY = 100
BARE = "bare loop"
Spent = dict[str, list[tuple[float, float]]]


@part("meter")
def meter(work: Work, rounds: Rounds = 7, steps: Annotated[int, "of a loop"] = 20_000) -> Table:
    """The stall meter, by what it adds to a step.

    A bare loop, one that is metered, and one that is metered with many reports take turns in one
    process. Their steps do nothing: what is left is the meter.
    """
    if steps < EVERY:
        raise SystemExit(f"--steps {steps}: give at least {EVERY}")
    spent, reading = in_clean_process(_metered, steps, rounds)
    table = Table(
        f"{steps:,} steps that do nothing, batches with {BATCH} rows",
        ("a loop", "µs a step|.1f", "CPU-µs a step|.1f", "at most|d"),
        "Above a bare loop, on the loop's own thread\n"
        f"and on all threads: medians of {rounds} rounds.",
        remarks=[f"reading the machine: {reading:.1f} ms, once a report"],
        measured=spent,
    )
    for name in list(spent)[1:]:
        pairs = list(zip(spent[name], spent[BARE], strict=True))
        beyond = ([own[i] - bare[i] for own, bare in pairs] for i in (0, 1))
        table.add(name, *(statistics.median(each) * 1e6 / steps for each in beyond), 20)
    return table


def _metered(steps: int, rounds: int) -> tuple[Spent, float]:
    """Seconds of each loop in turns, after one of each: wall until its last step, CPU of all
    threads until the end; and milliseconds to read the machine once."""

    def bare() -> Iterable[dict[str, Any]]:
        return itertools.repeat({"row": torch.arange(BATCH)}, steps)

    def metered(every: int, device: str) -> Callable[[], Iterable[Any]]:
        return lambda: precache.meter(bare(), every, to=[lambda report: None], device=device)

    loops = {
        BARE: bare,
        "metered, no report": metered(10 * steps, "cpu"),
        f"metered, a report every {EVERY} steps": metered(EVERY, "cpu"),
    }
    if torch.cuda.is_available():
        loops["metered by CUDA events, no report"] = metered(10 * steps, "cuda")
    spent: Spent = {name: [] for name in loops}
    for _, (name, loop) in itertools.product(range(rounds + 1), loops.items()):
        spent[name].append(_loop(loop()))
    reader, times = MachineReader(), []
    for _ in range(10 * rounds):
        started = time.perf_counter()
        reader.read()
        times.append(time.perf_counter() - started)
    return {name: each[1:] for name, each in spent.items()}, statistics.median(times) * 1e3


def _loop(loader: Iterable[Any]) -> tuple[float, float]:
    last, cpu = time.perf_counter(), time.process_time()
    wall = last
    for _ in loader:
        last = time.perf_counter()
    return last - wall, time.process_time() - cpu


METERED = ("on no rank", "on each rank", "on rank 0 alone")
SPUN_SECONDS = 1e-4
"""Time that the end of a bare loop is made to take, as long as that of a metered one: so long
may the machine interrupt it."""


class Ended(NamedTuple):
    """The end of an epoch: seconds, and how often its thread was taken off its core meanwhile."""

    seconds: float
    lost: int


@part("ends")
def ends(
    work: Work,
    epochs: Annotated[int, "of each loop"] = 100,
    steps: Annotated[int, "of an epoch"] = 20,
    ranks: Annotated[int, "processes"] = 2,
) -> Table:
    """The stall meter at the end of an epoch, of ranks that meet in each step (gloo).

    Each epoch has a meter of its own. Epochs with and without one take turns, with steps of 2 ms.
    What is measured is the time from the end of the last step to the end of the loop. Without a
    meter, it is made as long as with one: its longest are those of the machine.
    """
    context, [port] = multiprocessing.get_context("spawn"), free_ports(1)
    with ProcessPoolExecutor(ranks, context) as pool:
        begun = [pool.submit(_ends, n, ranks, port, epochs, steps) for n in range(ranks)]
        spent = [rank.result() for rank in begun]
    metered = {METERED[1]: spent, METERED[2]: spent[:1]}
    most = max(max(rank[name]).seconds for name, those in metered.items() for rank in those)
    table = Table(
        f"The end of an epoch takes {1e3 * most:.2f} ms at most, of {epochs} on {ranks} gloo ranks",
        ("a meter", "rank|d", "median µs|.0f", "longest ms|.2f", "at most|d", "preempted|d"),
        "Those preempted were taken off their core, for another thread.",
        measured=spent,
    )
    for name, (number, rank) in itertools.product(METERED, enumerate(spent)):
        seconds, lost = zip(*rank[name], strict=True)
        times = 1e6 * statistics.median(seconds), 1e3 * max(seconds)
        table.add(name, number, *times, 1, sum(map(bool, lost)))
    return table


def _ends(rank: int, ranks: int, port: int, epochs: int, steps: int) -> dict[str, list[Ended]]:
    """The end of each epoch, on one rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    spent: dict[str, list[Ended]] = {name: [] for name in METERED}
    for _, name in itertools.product(range(epochs), METERED):
        loader: Iterable[int] = range(steps)
        if name == METERED[1] or (name == METERED[2] and rank == 0):
            loader = precache.meter(loader, to=[], name=name)
        last, lost = 0.0, 0
        for _ in loader:
            time.sleep(0.002)
            dist.all_reduce(torch.ones(1))
            lost = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
            last = time.perf_counter()
        while loader == range(steps) and time.perf_counter() < last + SPUN_SECONDS:
            pass
        seconds = time.perf_counter() - last
        spent[name].append(
            Ended(seconds, resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - lost)
        )
    dist.barrier()
    dist.destroy_process_group()
    return spent


# --- the model of a loop -----------------------------------------------------------------------

SETTINGS = (
    # workers, cv, in order, start-up of workers in s
    (1, 0.0, True, 0.0), (1, 1.0, True, 1.0), (2, 0.5, True, 0.0), (2, 1.5, False, 0.0),
    (2, 1.0, True, 0.5), (4, 0.0, False, 1.0), (4, 0.5, True, 0.0), (4, 1.0, True, 0.0),
    (4, 1.5, True, 1.0), (4, 1.5, False, 0.0), (8, 0.5, False, 0.5), (8, 1.0, True, 0.0),
)  # fmt: skip


@part("simulation")
def simulation(
    work: Work,
    rounds: Rounds = 3,
    steps: Annotated[int, "of each loop"] = 100,
    seed: Annotated[int, "of the load times"] = 0,
) -> Table:
    """The recurrence of precache.simulate beside a DataLoader whose workers and steps sleep.

    The loops take turns. Load times are drawn, 0.7 to 1.3 times what the workers can deliver in a
    step of 50 ms. The simulation is given the times of loads and steps as they were, the first
    moment of a worker, and the median time to hand a batch over.
    """
    chance, step = np.random.default_rng(seed), 0.05
    loads = {}
    for setting in SETTINGS:
        workers, cv = setting[:2]
        mean = step * workers * chance.uniform(0.7, 1.3)
        loads[setting] = chance.gamma(cv**-2, mean * cv**2, steps) if cv else np.full(steps, mean)
    found: dict[Any, list[tuple[float, ...]]] = {setting: [] for setting in SETTINGS}
    for setting in rotated(SETTINGS, rounds):
        found[setting].append(_beside_a_loader(loads[setting], step, *setting))
    table = Table(
        f"Loops of {steps} steps of {1e3 * step:.0f} ms",
        ("workers", "cv", "order", "start-up", "batches/s|.2f", "simulated|.2f", "over|+.1%",
         "stall|.1%", "simulated|.1%", "points|+.1f"),
        f"Beside a real DataLoader: medians of {rounds} rounds.",
        measured={str(setting): each for setting, each in found.items()},
    )  # fmt: skip
    for (workers, cv, in_order, startup), each in found.items():
        real, model, stall, simulated = zip(*each, strict=True)
        over = statistics.median(m / r - 1 for m, r in zip(model, real, strict=True))
        points = statistics.median(m - r for m, r in zip(simulated, stall, strict=True))
        names = (str(workers), f"{cv:g}", "in order" if in_order else "any", f"{startup:g} s")
        shares = map(statistics.median, (stall, simulated))
        table.add(
            *names, statistics.median(real), statistics.median(model), over, *shares, 100 * points
        )
    beyond = [max(abs(row[column]) for row in table.rows) for column in (6, 9)]
    table.title += (
        f": {beyond[0]:.1%} of throughput and {beyond[1]:.1f} points of stall off at most"
    )
    return table


class Sleeps(torch.utils.data.Dataset[tuple[int, float, float]]):
    """Samples that take their time; each is its index, and when it was begun and ready."""

    def __init__(self, seconds: np.ndarray) -> None:
        self.seconds = seconds.tolist()

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        begun = time.monotonic()
        time.sleep(self.seconds[index])
        return index, begun, time.monotonic()


def _beside_a_loader(
    load: np.ndarray, step: float, workers: int, cv: float, in_order: bool, startup: float
) -> tuple[float, float, float, float]:
    """Batches/s of a loop and of its simulation, and the stall of each after the first batch."""
    loader = torch.utils.data.DataLoader(
        Sleeps(load),
        batch_size=None,
        num_workers=workers,
        in_order=in_order,
        multiprocessing_context="fork",
        worker_init_fn=lambda _: time.sleep(startup),
    )
    batches = iter(loader)
    began = time.monotonic()
    spans, taken, done = [], [], []
    for index, begun, ready in batches:
        taken.append(time.monotonic() - began)
        spans.append((index, begun - began, ready - began))
        time.sleep(step)
        done.append(time.monotonic() - began)
    _, begun, ready = map(np.array, zip(*sorted(spans), strict=True))
    steps = np.subtract(done, taken)
    _, _, arrived = map(np.array, zip(*spans, strict=True))
    waited = arrived > [0, *done[:-1]]
    found = Simulation(
        ready - begun,
        steps,
        Setting(
            workers=workers,
            in_order=in_order,
            startup=begun[:workers].tolist(),
            handover=float(np.median((np.array(taken) - arrived)[waited])),
        ),
    )
    stall = 1 - steps.sum() / (done[-1] - taken[0])
    return len(load) / done[-1], len(load) / found.end, stall, found.stall_share


@part("verdicts")
def verdicts(
    work: Work,
    draws: Annotated[int, "loops of each kind"] = 8,
    seconds: Annotated[float, "of each run of a diagnosis"] = 2.5,
    seed: Annotated[int, "of the parameters; -1 draws one"] = -1,
) -> Table:
    """Verdicts of precache.diagnose on loops whose bottleneck is known by construction."""
    seed = int(np.random.default_rng().integers(1 << 31)) if seed < 0 else seed
    chance = np.random.default_rng(seed)
    given: dict[str, list[tuple[str, str]]] = {kind: [] for kind in loops.KINDS}
    for _, kind in itertools.product(range(draws), loops.KINDS):
        loop = loops.draw_loop(kind, chance)
        with loop.resources:
            found = precache.diagnose(loop.loader(), loop.step, seconds=seconds)
        given[kind].append((loop.verdict, found.verdict))
        log.print(f"{kind} {loop.options}: {found.verdict}, expected {loop.verdict}")
        if found.verdict != loop.verdict:
            log.print(str(found))
    right = {kind: sum(own == given for own, given in each) for kind, each in given.items()}
    table = Table(
        f"{sum(right.values())} of {draws * len(right)} verdicts are right, seed {seed}",
        ("kind", "right|d", "of|d", "wrong"),
        measured=given,
    )
    for kind, each in given.items():
        wrong = ", ".join(found for own, found in each if own != found)
        table.add(kind, right[kind], draws, wrong)
    return table


@part("gains")
def gains(
    work: Work,
    draws: Annotated[int, "loops of each kind"] = 2,
    seconds: Annotated[float, "of each run"] = 3.0,
    others: Annotated[int, "processes at work beside them"] = 0,
    seed: Annotated[int, "of the parameters; -1 draws one"] = -1,
) -> Table:
    """Gains that precache.diagnose predicts, beside those of the remedies in place.

    Loops with and without a remedy take turns, three each: others may use the machine.
    """
    seed = int(np.random.default_rng().integers(1 << 31)) if seed < 0 else seed
    chance = np.random.default_rng(seed)
    table = Table(
        f"Predicted and measured gains, {others} processes beside them, seed {seed}",
        ("kind", "remedy", "before/s|.2f", "after/s|.2f", "gain|.2f", "predicted|.2f", "over|+.0%"),
    )
    with loops.busy(others):
        for kind, _ in itertools.product(loops.REMEDIES, range(draws)):
            loop = loops.draw_loop(kind, chance)
            with loop.resources:
                found = precache.diagnose(loop.loader(), loop.step, seconds=seconds)
                best = loops.best_remedy(loop, found.remedies)
                before, after = (
                    statistics.median(rates)
                    for rates in zip(*(_rates(loop, best, seconds) for _ in range(3)), strict=True)
                )
            gain = after / before
            log.print(kind, loop.options, best.what, gain, best.gain)
            table.add(kind, best.what, before, after, gain, best.gain, best.gain / gain - 1)
    off = [abs(row[-1]) for row in table.rows]
    within = sum(error <= 0.25 for error in off)
    table.title += f": {within} of {len(off)} within 25%, {max(off):.0%} off at most"
    return table


def _rates(loop: loops.DrawnLoop, remedy: Remedy, seconds: float) -> tuple[float, float]:
    """Batches/s without and with a remedy, one right after the other."""
    before = loops.rate(loop, loop.loader(), seconds)
    return before, loops.rate(loop, loops.remedied(loop, remedy), seconds)


FIGURES = ("CPU time of the build", "stored bytes", "CPU time of reading", "samples/s")


@part("doctor", needs=["simplejpeg"])
def doctor(
    work: Work,
    rows: Rows = 400,
    rounds: Rounds = 5,
    seconds: Annotated[float, "that a prediction may take"] = 15.0,
) -> Table:
    """Predictions of precache doctor, over what is measured then.

    Each turn predicts, builds and reads a store of one codec, one right after the other, so that
    all three have the same neighbours on the machine. Turns of the codecs alternate, and the first
    of each is not counted.
    """
    source, ratios = work.photos(rows), {}
    for number, codec in enumerate(rotated(("image", "raw", "zstd"), rounds + 1)):
        log.print(codec)
        store = work.folder / f"{codec}-{os.getpid()}-{number}.store"
        ratios.setdefault(codec, []).append(_predicted(source, store, codec, seconds))
    table = Table(
        f"Predicted over measured, {rounds} turns",
        ("codec", "figure", "median|.2f", "least|.2f", "most|.2f"),
        measured=ratios,
    )
    for codec, turns in ratios.items():
        for name, column in zip(FIGURES, zip(*turns[1:], strict=True), strict=True):
            table.add(codec, name, statistics.median(column), min(column), max(column))
    return table


def _predicted(source: Path, store: Path, codec: str, seconds: float) -> tuple[float, ...]:
    """Predicted over measured figures."""
    from precache_workers.doctor.trials import read_cost

    recipe = precache.Recipe.image(resize=RESIZE, crop=CROP, codec=codec)
    predicted = precache.doctor(source, recipe, seconds=seconds)
    built = precache.build(source, store, recipe, address="serial")
    own, (samples_per_s, cpu_ms_per_1000) = predicted.codecs[0], read_cost(store)
    return (
        predicted.build.cpu_seconds / built.cpu_seconds,
        own.stored * predicted.samples / built.stored_bytes,
        own.cpu_ms_per_1000 / cpu_ms_per_1000,
        own.samples_per_s / samples_per_s,
    )


PARTS = (meter, ends, simulation, verdicts, gains, doctor)

if __name__ == "__main__":
    main("measuring", PARTS)
