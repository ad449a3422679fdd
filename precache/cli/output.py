"""Results of commands, printed as text or as JSON."""

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

from precache.codecs.kernels import NO_COMPILED_CODE
from precache.messages import printable
from precache.recipe.recipe import op_texts
from precache.recipe.variants import variants_text
from precache.runtime.terminal import Rows, Terminal, say, say_rows
from precache.store.build_status import StoreStatus
from precache.store.commit_log import ROOT
from precache.store.version import FieldInfo, Version
from precache.units import size

if TYPE_CHECKING:
    from precache.diagnosis.bench import BenchResult, ReadCost
    from precache.maintenance.info import VersionInfo
    from precache.maintenance.transfer import Transferred
    from precache.maintenance.verify import Verified
    from precache_workers.jobs.submission import JobStatus
    from precache_workers.planning.request import BuildResult

SHOWN = 10
"""Number of holes, keys and classes that are listed; the rest is only counted."""


def _shortened(items: Sequence[str], separator: str = ", ") -> str:
    rest = f" … and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + rest


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def show(as_json: bool, data: Mapping[str, Any], print_text: Callable[[], None]) -> None:
    """Print a result as one line of JSON or as text."""
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
    else:
        print_text()


def build_json(result: BuildResult) -> dict[str, Any]:
    """Return the object that ``precache build --json`` prints."""
    return {**dataclasses.asdict(result), "ratio": result.ratio}


def print_build(result: BuildResult) -> None:
    """Print the summary of a build."""
    skipped = result.shards_skipped
    computed = result.shards - skipped - result.shards_reused
    mended = f", {result.mended} mended" if result.mended else ""
    reused = f"{result.shards_reused} reused, " if result.shards_reused else ""
    bytes_ = f"{size(result.raw_bytes)} raw, {size(result.stored_bytes)} stored"
    stages = ", ".join(f"{name} {value:.2f}" for name, value in result.timings.items())
    rows = [
        ("version", result.version),
        ("path", result.path),
        ("samples", f"{result.samples:,}, {result.failed} failed{mended}"),
        (
            "shards",
            f"{result.shards}: {computed} made, {reused}{skipped} there before",
        ),
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
        say("to try failed samples again, as after a limit was raised, give --retry-failed")


def print_status(status: JobStatus | StoreStatus) -> None:
    """Print how far a job of a cluster is, or the builds of a store."""
    if isinstance(status, StoreStatus):
        _print_store(status)
    else:
        _print_job(status)


def _print_job(status: JobStatus) -> None:
    ended = status.ended or time.time()
    rows = [("job", status.job), ("store", status.store), ("state", status.state.lower())]
    if status.started is not None:
        rows.append(("since", _time(status.started)))
        rows.append(("took" if status.ended else "for", _duration(ended - status.started)))
    if status.state in ("PENDING", "RUNNING"):
        rows.append(("progress", status.progress))
    if status.state == "FAILED":
        rows.append(("reason", status.reason))
    if status.state in ("FAILED", "STOPPED"):
        rows.append(("next", "what is done is kept; submit the same build again to continue it"))
    say_rows(rows)


def _print_store(status: StoreStatus) -> None:
    current = "none yet"
    if status.version is not None and status.committed is not None:
        current = f"{status.version}, committed {_time(status.committed)}"
    rows = [("store", status.store), ("current version", current)]
    for build in status.building:
        shards = "?" if build.shards is None else f"{build.shards:,}"
        of_rows = "" if build.rows is None else f", {build.rows:,} rows in all"
        idle = "" if build.idle_seconds is None else f"; idle for {_duration(build.idle_seconds)}"
        rows.append(
            (f"building {build.version[:8]}", f"{build.done:,} of {shards} shards{of_rows}{idle}")
        )
    say_rows(rows)


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _statistics(mean: Mapping[str, list[float]], std: Mapping[str, list[float]]) -> Rows:
    return [(f"{n} mean, std", f"{_numbers(mean[n])}, {_numbers(std[n])}") for n in mean]


def print_refreshed(result: BuildResult, fields: Mapping[str, FieldInfo]) -> None:
    """Print a child version, and the variants of its fields that have several."""
    for name, field in fields.items():
        new, dropped = field.first_variant + field.variants - 1, field.first_variant - 1
        say(
            f"variant {new} of {name} is new; there are variants {variants_text(field)}: "
            f"{field.variants - 1} as they were, and variant {dropped} is dropped"
        )
    print_build(result)


def info_json(info: VersionInfo) -> dict[str, Any]:
    """Return the object that ``precache info --json`` prints."""
    data = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    fields = {name: dataclasses.asdict(field) for name, field in info.fields.items()}
    recipe = data.pop("recipe").to_dict()
    return {**data, "holes": len(info.holes), "fields": fields, "pipeline": recipe}


def print_info(info: VersionInfo) -> None:
    """Print the summary of a version."""
    rows = [
        ("version", info.version),
        ("path", info.path),
        ("created", info.created),
        ("rows", f"{info.rows:,}, {len(info.holes)} of them holes"),
        *((name, _field(field)) for name, field in info.fields.items()),
        *_statistics(info.mean, info.std),
    ]
    if info.classes:
        rows.append((f"{len(info.classes)} classes", _shortened(info.classes)))
    for name, recipe in info.recipe.fields.items():
        rows.append((f"{name} recipe", " → ".join(op_texts(recipe))))
    say_rows(rows)
    for key, reason in info.holes[:SHOWN]:
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
    """Show a bar of a version's bytes on standard error; the yielded function advances it."""
    columns = TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    total = sum(field.stored_nbytes for field in version.fields.values())
    console = Terminal(stderr=True)
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextlib.contextmanager
def bench_progress(shown: bool) -> Iterator[Callable[[str], None]]:
    """Show on standard error what is measured; the yielded function sets it."""
    with Terminal(stderr=True, quiet=not shown).status("Measuring") as status:
        yield lambda name: status.update(Text(printable(f"Measuring: {name}")))


def print_verified(result: Verified) -> None:
    """Print the damage by shard and key."""
    for damage in result.damage:
        keys = f"; keys {_shortened(damage.keys)}" if damage.keys else ""
        say(f"damaged: {damage.shard}: {damage.reason}{keys}")
    for part in result.unchecked:
        say(f"not checked: {part}")
    checked = f"{result.objects} shards, {result.rows:,} rows, {size(result.nbytes)} read"
    if result.ok:
        say(f"version {result.version[:8]} is whole: {checked}")
        return
    say(f"version {result.version[:8]} is damaged in {len(result.damage)} objects ({checked})")
    say("delete the damaged files and run the same precache build command again to rebuild them")
    if any(damage.shard == ROOT for damage in result.damage):
        say(f"without its {ROOT} the whole version is built again")


def print_transferred(result: Transferred) -> None:
    """Print where a version was copied to, and how much of it."""
    skipped = f"; {result.skipped} existed" if result.skipped else ""
    say(
        f"version {result.version[:8]} is at {result.path}: {result.objects} objects, "
        f"{size(result.nbytes)} copied{skipped}"
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
        say(NO_COMPILED_CODE)
