"""``precache gc``."""

from __future__ import annotations

import argparse
import dataclasses

from precache.cli.arguments import add_common
from precache.cli.output import show
from precache.maintenance.gc import GcResult, gc
from precache.runtime.terminal import say
from precache.units import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")
    parser.add_argument(
        "--keep",
        type=int,
        default=2,
        metavar="N",
        help="number of newest versions to keep, including the current one; default 2",
    )
    parser.add_argument(
        "--older-than",
        default="7d",
        metavar="AGE",
        help="time since another version replaced them, such as 12h or 4w; default 7d",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print what would be removed, by this machine's clock",
    )
    add_common(parser)


def run(options: argparse.Namespace) -> None:
    """Remove versions that are not current, not among the newest, and were replaced longer ago than
    --older-than; and unfinished builds and copies that have not changed for as long. Ages are
    measured with the store's own times, and only folders that identify themselves as versions are
    removed. gc does not see readers: let --older-than be longer than a training takes.

    example:
      precache gc photos.store --keep 2 --older-than 7d --dry-run
    """
    done = gc(
        options.store,
        options.keep,
        options.older_than,
        options.dry_run,
        dict(options.storage_options),
    )
    data = {**dataclasses.asdict(done), "freed_nbytes": done.freed_nbytes}
    show(options.json, data, lambda: _print(done))


def _print(done: GcResult) -> None:
    removed, kept, freed = "removed", "kept", "freed"
    if done.dry_run:
        removed, kept, freed = "would remove", "would keep", "would free"
    for removal in done.removed:
        nbytes = size(removal.nbytes)
        if removal.freed_nbytes != removal.nbytes:
            nbytes += f", of which {size(removal.nbytes - removal.freed_nbytes)} stay in use"
        say(f"{removed} {removal.version[:12]}: {removal.why}; {nbytes}")
    for version in done.kept:
        say(f"{kept} {version.version[:12]}: {version.why}")
    for swept in done.swept:
        say(f"{removed} temporary files of {swept[:12]}")
    say(f"{freed} {size(done.freed_nbytes)}" if done.removed else "nothing to remove")
