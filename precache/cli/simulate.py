"""The command ``precache simulate``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from precache.runtime.terminal import say
from precache.simulation import text as simulation_text
from precache.simulation.distributions import ORDERS, SPREADS, read_times
from precache.simulation.model import Simulation, simulate

_DESCRIPTION = """\
Simulate loaders that feed a training loop: how long it waits, and what would help.

N loader processes load one batch at a time each and start together. A loaded batch goes into a
queue; while the queue is full, its loader is blocked. One consumer takes batches and runs a step on
each; a batch is done when its step has ended. The rate is at most the lower of loaders / load time
and 1 / step time.

  stall            share of the consumer's time spent waiting: from the first batch's arrival on,
                   and with the start-up before it
  wait before ...  one bar per batch. Loaders that start together deliver together, so that the
                   consumer waits at every N-th batch. With variance (--load-cv) they drift apart
                   and the spikes vanish; the share of time spent waiting stays.
"""

_EPILOG = """\
examples:
  precache simulate --load-ms 2000 --loaders 7 --step-ms 100
  precache simulate --load-ms 2000 --loaders 7 --step-ms 100 --load-cv 0.3
  precache simulate --trace load_times.txt --loaders 8 --step-ms 100 --html loading.html

7 loaders and a step of 100 ms deliver, in 30 s (mean of 100 seeds):

  load time                              2,000 ms   700 ms   350 ms
  steady                                       98      293      296 batches
  --load-cv 0.1 --resolution-ms 100            98      275      296

The middle one differs because it is the balance point, 7 / 700 ms = 1 / 100 ms: neither side has
slack, so that any delay costs batches. Rounding up to a grid adds half of its step on average,
750 ms instead of 700, and 7 / 750 ms is 9.3/s. At 350 ms the loaders have slack, and variance costs
only what the queue cannot even out: nearly nothing at --load-cv 0.1, 4 batches at 0.5, but 22 at
0.1 with --queue 0.

A DataLoader delivers batches in the order of its requests, while this model takes the first that is
ready: with much variance a DataLoader may wait longer than this model.
"""


def add_simulate(commands: Any) -> None:
    """Add the command to the subparsers of ``precache``."""
    command = commands.add_parser(
        "simulate",
        help="model how long a training loop waits for its loaders",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_simulate)
    load = command.add_mutually_exclusive_group(required=True)
    load.add_argument(
        "--load-ms", type=float, metavar="MS", help="time of one loader for one batch"
    )
    load.add_argument("--trace", metavar="FILE", help="measured load times in ms, one per line")
    command.add_argument(
        "--step-ms", type=float, required=True, metavar="MS", help="time of one step"
    )
    command.add_argument("--loaders", type=int, required=True, metavar="N", help="processes")
    command.add_argument(
        "--queue",
        type=int,
        metavar="N",
        help="batches that the queue holds, besides one in each loader; default the number of "
        "loaders, which is a DataLoader's prefetch_factor=2",
    )
    for name in ("load", "step"):
        command.add_argument(
            f"--{name}-cv",
            type=float,
            metavar="C",
            help="standard deviation over mean; default 0: constant",
        )
    command.add_argument(
        "--load-dist",
        choices=(*SPREADS, *ORDERS),
        help="distribution with --load-cv, default gamma; with --trace: cycle (in order, repeated; "
        "default) or resample (at random)",
    )
    command.add_argument("--step-dist", choices=SPREADS, help="distribution of the step time")
    command.add_argument(
        "--resolution-ms",
        type=float,
        default=0.0,
        metavar="R",
        help="round load times up to a multiple; default 0: continuous",
    )
    command.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="simulated time; default 30"
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of random times; default 0"
    )
    command.add_argument("--html", metavar="FILE", help="write a page with an animation")
    command.add_argument(
        "--png", metavar="FILE", help='write a picture; needs pip install "precache[report]"'
    )
    command.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, with all series"
    )


def _simulate(options: argparse.Namespace) -> int:
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
    if options.png is not None:
        result.png(options.png)
    if options.json:
        sys.stdout.write(json.dumps(result.to_dict()) + "\n")
    else:
        _print(result)
    return 0


def _print(result: Simulation) -> None:
    say(simulation_text.title(result), style="bold")
    rows = simulation_text.summary(result)
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        say(f"{name.ljust(width)}{value}")
    for name, value in simulation_text.pattern(result):
        for line in ("", name, f"  {value}"):
            say(line)
    say("")
    say(simulation_text.verdict(result))
