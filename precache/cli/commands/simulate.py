"""``precache simulate``."""

from __future__ import annotations

import argparse

from precache.cli.arguments import add_json, take_defaults
from precache.cli.output import show
from precache.runtime.terminal import say
from precache.simulation import text as simulation_text
from precache.simulation.distributions import ORDERS, SPREADS, read_times
from precache.simulation.model import Simulation, simulate

_EPILOG = """\
examples:
  precache simulate --load-ms 2000 --loaders 7 --step-ms 100
  precache simulate --load-ms 2000 --loaders 7 --step-ms 100 --load-cv 0.3
  precache simulate --trace load_times.txt --loaders 8 --step-ms 100 --html loading.html

Batches done by 7 loaders with a step of 100 ms in 30 s, mean of 100 seeds:

  load time                              2,000 ms   700 ms   350 ms
  steady                                       98      293      296 batches
  --load-cv 0.1 --resolution-ms 100            99      275      296

At 700 ms, loading and the step are balanced, 7 / 700 ms = 1 / 100 ms. Neither side has slack, so
any delay costs batches. Rounding up to 100 ms adds 50 ms on average, and 7 / 750 ms is 9.3/s.
Without rounding, the queue evens out most of the variance: it costs almost nothing at --load-cv 0.1
and 4 batches at 0.5, but 22 at 0.1 with --queue 0. At 350 ms the loaders have slack, and none of
these costs a batch.

A DataLoader returns batches in the order in which they were requested, while this model takes the
first one that is ready. So with much variance a DataLoader may wait longer than predicted here.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument(
        "--load-ms", type=float, metavar="MS", help="time of one loader for one batch"
    )
    load.add_argument(
        "--trace", metavar="FILE", help="file of measured load times in ms, one per line"
    )
    parser.add_argument(
        "--step-ms", type=float, required=True, metavar="MS", help="time of one step"
    )
    parser.add_argument("--loaders", type=int, required=True, metavar="N", help="number of loaders")
    parser.add_argument(
        "--queue",
        type=int,
        metavar="N",
        help="finished batches that the queue holds, besides one per loader; default as many as "
        "loaders, which matches a DataLoader's prefetch_factor=2",
    )
    for name in ("load", "step"):
        parser.add_argument(
            f"--{name}-cv",
            type=float,
            metavar="C",
            help="standard deviation over mean; default 0",
        )
    parser.add_argument(
        "--load-dist",
        choices=(*SPREADS, *ORDERS),
        help="default gamma with a --load-cv; with a --trace: cycle (the times in their order, "
        "repeated; default) or resample (draw them at random)",
    )
    parser.add_argument("--step-dist", choices=SPREADS, help="the same for the step")
    parser.add_argument(
        "--resolution-ms",
        type=float,
        metavar="R",
        help="round load times up to a multiple of R; default %(default)g, no rounding",
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="simulated time; default %(default)g"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="default %(default)s")
    parser.add_argument("--html", metavar="FILE", help="write a page that replays the simulation")
    add_json(parser, "one JSON object on stdout, with all series")
    take_defaults(parser, simulate, "resolution_ms", "seconds", "seed")


def run(options: argparse.Namespace) -> None:
    """Simulate loaders that feed a training loop: how long it waits, and what would help.

    N loader processes start together, and each makes one batch at a time. A finished batch goes
    into a queue; while the queue is full, its loader is blocked. The training loop takes batches
    and spends a step on each; a batch is done when its step has ended. In the long run, the rate
    is at most the lower of loaders / load time and 1 / step time.

      stall            share of the time that the training loop waits for data
      wait before ...  one bar per batch. Loaders that start together deliver together, so the loop
                       waits at every N-th batch. With variance (--load-cv) they drift apart: the
                       spikes disappear, but the stall stays.
    """
    result = simulate(
        options.load_ms if options.trace is None else read_times(options.trace),
        options.step_ms,
        options.loaders,
        queue=options.queue,
        load_cv=options.load_cv,
        step_cv=options.step_cv,
        load_dist=options.load_dist,
        step_dist=options.step_dist,
        resolution_ms=options.resolution_ms,
        seconds=options.seconds,
        seed=options.seed,
    )
    if options.html is not None:
        result.html(options.html)
    if options.json:
        show(options.json, result.to_dict(), result)
    else:
        _print(result)


def _print(result: Simulation) -> None:
    say(simulation_text.scenario_title(result), style="bold")
    rows = simulation_text.figures(result)
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        say(f"{name.ljust(width)}{value}")
    for name, value in simulation_text.wait_pattern(result):
        for line in ("", name, f"  {value}"):
            say(line)
    say("")
    say(simulation_text.verdict(result))
