"""Results as text, for people."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from precache.codecs.kernels import MISSING
from precache.messages import printable
from precache.recipe.recipe import op_texts
from precache.recipe.variants import variants_text
from precache.runtime.terminal import Rows, Terminal, say, say_rows
from precache.store.commit_log import ROOT
from precache.store.version import FieldInfo, Version
from precache.units import size

if TYPE_CHECKING:
    from precache.diagnosis.bench import BenchResult, ReadCost
    from precache.maintenance.transfer import Transferred
    from precache.maintenance.verify import Verified
    from precache.store.build_status import StoreStatus
    from precache_workers.jobs.submission import JobStatus
    from precache_workers.planning.request import BuildResult

SHOWN = 10
"""Holes, keys and classes listed before the rest is only counted."""


def _shortened(items: Sequence[str], separator: str = ", ") -> str:
    rest = f" … and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + rest


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def show(as_json: bool, data: Mapping[str, Any], print_text: Callable[[], None]) -> None:
    """A result as one line of JSON where that was asked for, else as text."""
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
    else:
        print_text()


def build_json(result: BuildResult) -> dict[str, Any]:
    """What ``precache build --json`` prints."""
    fields = dataclasses.asdict(result)
    return {**fields, "ratio": result.ratio}


def print_build(result: BuildResult) -> None:
    """The summary at the end of a build."""
    made = result.shards - result.shards_skipped - result.shards_reused
    mended = f", {result.mended} mended" if result.mended else ""
    reused = f"{result.shards_reused} reused, " if result.shards_reused else ""
    bytes_ = f"{size(result.raw_bytes)} raw, {size(result.stored_bytes)} stored"
    stages = ", ".join(f"{name} {value:.2f}" for name, value in result.timings.items())
    rows = [
        ("version", result.version),
        ("path", result.path),
        ("samples", f"{result.samples:,}, {result.failed} failed{mended}"),
        ("shards", f"{result.shards}: {made} made, {reused}{result.shards_skipped} there before"),
        ("size", f"{bytes_}: ratio {result.ratio:.2f}"),
        ("time", f"{result.seconds:.1f} s, {result.cpu_seconds:.1f} CPU-s in tasks"),
        ("by stage, s", stages),
        *_statistics(result.mean, result.std),
    ]
    say_rows(rows)
    for key, reason in result.holes[:SHOWN]:
        say(f"hole: {key}: {reason}")
    if len(result.holes) > SHOWN:
        say(f"… and {len(result.holes) - SHOWN} more holes")
    if result.holes:
        say("what failed is tried again with --retry-failed, as after a limit was raised")


def print_job(found: JobStatus) -> None:
    """What a cluster says of a build, and what to do next."""
    ended = found.ended or time.time()
    rows = [("job", found.job), ("store", found.store), ("state", found.state.lower())]
    if found.started is not None:
        rows.append(("since", _time(found.started)))
        rows.append(("took" if found.ended else "for", _duration(ended - found.started)))
    if found.state in ("PENDING", "RUNNING"):
        rows.append(("last said", found.progress))
    if found.state == "FAILED":
        rows.append(("why", found.reason))
    if found.state in ("FAILED", "STOPPED"):
        rows.append(("next", "what is done is kept; submit the same build again to continue it"))
    say_rows(rows)


def print_store_status(found: StoreStatus) -> None:
    """The current version of a store, and the builds that have begun."""
    current = "none yet"
    if found.version is not None and found.committed is not None:
        current = f"{found.version}, committed {_time(found.committed)}"
    rows = [("store", found.store), ("current version", current)]
    for each in found.building:
        shards = "?" if each.shards is None else f"{each.shards:,}"
        of_rows = "" if each.rows is None else f", {each.rows:,} rows in all"
        idle = "" if each.idle_seconds is None else f"; idle for {_duration(each.idle_seconds)}"
        rows.append(
            (f"building {each.version[:8]}", f"{each.done:,} of {shards} shards{of_rows}{idle}")
        )
    say_rows(rows)


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _statistics(mean: Mapping[str, list[float]], std: Mapping[str, list[float]]) -> Rows:
    return [(f"{n} mean, std", f"{_numbers(mean[n])}, {_numbers(std[n])}") for n in mean]


def print_refreshed(result: BuildResult, fields: Mapping[str, FieldInfo]) -> None:
    """A child version, and the variants of its fields that have some."""
    for name, field in fields.items():
        new = field.first_variant + field.variants - 1
        say(f"variant {new} of {name} is new; there are variants {variants_text(field)}")
    print_build(result)


def print_info(version: Version, info: Mapping[str, Any]) -> None:
    """What a store holds."""
    rows = [
        ("version", version.id),
        ("path", version.path),
        ("created", info["created"]),
        ("rows", f"{version.rows:,}, {info['holes']} of them holes"),
        *((name, _field(field)) for name, field in version.fields.items()),
        *_statistics(version.mean, version.std),
    ]
    if version.classes:
        rows.append((f"{len(version.classes)} classes", _shortened(version.classes)))
    for name, recipe in version.recipe.fields.items():
        rows.append((f"{name} recipe", " → ".join(op_texts(recipe))))
    say_rows(rows)
    for key, reason in list(version.holes.values())[:SHOWN]:
        say(f"hole: {key}: {reason}")


def _field(field: FieldInfo) -> str:
    ratio = field.raw_nbytes / max(1, field.stored_nbytes)
    several = f"variants {variants_text(field)} of " if field.variants > 1 else ""
    return (
        f"{several}{field.dtype} {field.shape}, codec {field.codec}, {size(field.raw_nbytes)} raw, "
        f"{size(field.stored_nbytes)} stored: ratio {ratio:.2f}"
    )


@contextlib.contextmanager
def byte_progress(doing: str, version: Version, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of a version's bytes on standard error, advanced by what is yielded."""
    columns = TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    total = sum(field.stored_nbytes for field in version.fields.values())
    console = Terminal(stderr=True)
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextlib.contextmanager
def bench_progress(shown: bool) -> Iterator[Callable[[str], None]]:
    """Show on standard error what is being measured."""
    with Terminal(stderr=True, quiet=not shown).status("Measuring") as status:
        yield lambda what: status.update(Text(printable(f"Measuring: {what}")))


def print_verified(found: Verified) -> None:
    """Print damage by object and key, or that there is none."""
    for damage in found.damage:
        keys = f"; keys {_shortened(damage.keys)}" if damage.keys else ""
        say(f"damaged: {damage.shard}: {damage.reason}{keys}")
    for reason in found.unchecked:
        say(f"not checked: {reason}")
    checked = f"{found.objects} shards, {found.rows:,} rows, {size(found.nbytes)} read"
    if found.ok:
        say(f"version {found.version[:8]} is not damaged: {checked}")
        return
    say(f"version {found.version[:8]} has {len(found.damage)} damaged objects ({checked})")
    say("to repair it, delete the damaged files and run the same precache build command again")
    if any(damage.shard == ROOT for damage in found.damage):
        say(f"without its {ROOT} the whole version is built again")


def print_transferred(done: Transferred) -> None:
    """Print what was copied."""
    there = f"; {done.skipped} existed already" if done.skipped else ""
    say(
        f"version {done.version[:8]} is at {done.path}: {done.objects} objects, "
        f"{size(done.nbytes)} copied{there}"
    )


def print_bench(result: BenchResult) -> None:
    """Print the cost of reading beside the copy limit."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header, justify in (("", "left"), ("samples/s", "right"), ("CPU-ms per 1,000", "right")):
        table.add_column(header, justify=justify)  # type: ignore[arg-type]  # a literal's type
    rows: dict[str, ReadCost] = {
        "first epoch": result.first_epoch,
        "warm epochs": result.warm,
        "copy limit": result.copy_limit,
    }
    for name, cost in rows.items():
        table.add_row(name, f"{cost.samples_per_s:,.0f}", f"{cost.cpu_ms_per_1000:.1f}")
    say(
        f"{result.samples:,} samples of {size(result.row_nbytes)} decoded, codec {result.codec}, "
        f"batches of {result.batch_size}"
    )
    Terminal().print(table, soft_wrap=True)
    ratio = f"{result.cpu_ratio:.2f}"
    say(f"a warm epoch takes {ratio} times the CPU time of copying as many plain bytes")
    if not result.compiled:
        say(MISSING)
