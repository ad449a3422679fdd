"""The text of a build's plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from precache.messages import aligned, as_text, row_types_text
from precache.recipe.variants import variants_of
from precache.storage.base import left_out_text
from precache.store.commit_log import short
from precache.units import counted, duration, plain, size
from precache_workers.sources.base import ignored_text

if TYPE_CHECKING:
    from precache.maintenance.diff import KeyChange
    from precache_workers.driver.build_plan import BuildPlan
    from precache_workers.planning.assembly import FieldRows
    from precache_workers.planning.diff import BuildDifferences
    from precache_workers.profiling.estimate import Estimate

_NAME_WIDTH = 12
"""Width of the column of names."""


def plan_text(plan: BuildPlan) -> str:
    """Return what ``precache plan`` prints."""
    return as_text([_headline(plan), *aligned(_lines(plan), _NAME_WIDTH)])


def _headline(plan: BuildPlan) -> str:
    version = f"version {short(plan.version)}"
    if plan.estimate is not None and plan.fails:
        measured, failed = plan.estimate.samples, len(plan.estimate.failed)
        count = f"all {measured}" if failed == measured else f"{failed} of {measured}"
        return f"{version} cannot be built: {count} samples measured fail (--max-failures)"
    match plan.state:
        case "nothing" if plan.version == plan.current:
            return f"Nothing to do: {version} is complete by its sizes (build --verify reads it)"
        case "nothing":
            return f"Nothing to compute: {version} is complete, and would be made current again"
        case "repair":
            return f"Objects of {version} are lost, and would be rebuilt"
        case "continue":
            return f"A build of {version} began, and would be continued"
        case "build":
            return f"A new {version} would be built"


def _lines(plan: BuildPlan) -> Iterator[tuple[str, str]]:
    """Yield names and values; a value without a name belongs to the name before it."""
    yield "version", plan.version
    yield "current", plan.current or "none yet"
    if plan.differences is not None:
        yield from _differences(plan.differences, plan.keeps_rows, plan.compares)
    removed = f"; {plan.removed:,} removed, whose rows stay as holes" if plan.removed else ""
    left_out = left_out_text(plan.left_out, plan.examples)
    yield "samples", f"{plan.samples:,}{removed}{left_out}"
    if plan.ignored:
        unused = ignored_text(plan.ignored)
        yield "not used", f"as they are no images and no field names them: {unused}"
    yield "row", row_types_text(plan.row_types)
    yield from _under("pixels", list(plan.pixels))
    if plan.rows_failed:
        yield "holes", f"{plan.rows_failed:,} failed before, and stay; --retry-failed tries again"
    if plan.shards_compact is not None:
        yield (
            "compact",
            f"{counted(plan.shards, 'shard')}; --compact would give {plan.shards_compact:,}",
        )
    if plan.shards == plan.shards_skipped:
        return
    base = "nothing" if plan.base is None else f"version {short(plan.base)}"
    yield "reused", f"{base}: {plan.base_reason}"
    for name, rows in _by_rows(plan.fields):
        yield "", f"{name}: {_field_rows(rows)}"
    counts = plan.shards_to_make, plan.shards_reused, plan.shards_skipped
    parts = "{:,} to write, {:,} reused, {:,} already there".format(*counts)
    yield "shards", f"{plan.shards:,}: {parts}"
    fetched = f"{counted(plan.rows_computed, 'sample')} to fetch"
    if plan.rows_compared:
        known = "reused as far as their content is what it was"
        fetched += f" ({plan.rows_compared:,} of them {known})"
    yield "rows", f"{fetched}, {plan.rows_reused:,} reused"
    if plan.rows_retried:
        yield "tried again", f"{counted(plan.rows_retried, 'sample')} that failed before"
    yield "bytes", ", ".join(_bytes(plan))
    if plan.estimate is not None:
        yield from _estimate(plan.estimate)


def _differences(
    differences: BuildDifferences, keeps_rows: bool, compares: bool
) -> Iterator[tuple[str, str]]:
    lines = list(map(str, differences.recipe))
    lines += [f"the code of {function} was edited" for function in differences.functions]
    lines += map(str, differences.ops)
    if not lines:
        lines = ["the same"]
    yield from _under("recipe", lines)
    way_out = "samples not compared: give the dataset fingerprint(i), or --compare"
    yield from _under("source", [*_source(differences), *([] if compares else [way_out])])
    if not keeps_rows:
        yield "rows", "placed anew, not at their positions"
    yield from _under(
        "libraries",
        [
            f"{library.name} {library.before} → {library.after}: "
            + (
                "the same pixels, so that nothing is computed again"
                if not library.decides
                else "other pixels, so that they are computed again"
            )
            for library in differences.libraries
        ],
    )


def _under(name: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines):
        yield ("" if number else name), line


def _source(differences: BuildDifferences) -> Iterator[str]:
    source = differences.source
    if source is None or not source.any:
        yield "the same"
        return
    if source.other_source:
        yield "another source: what has the same name may be another sample"
    else:
        yield f"{source.same:,} the same"
    words = {"changed": "of the same names"} if source.other_source else {}
    for name in ("added", "changed", "removed", "relabelled"):
        change: KeyChange = getattr(source, name)
        if change.count:
            yield change.text(words.get(name, name))
    if source.labels is not None:
        yield str(source.labels)
    if source.classes_changed:
        yield "names or numbers of classes changed"


def _by_rows(fields: Mapping[str, FieldRows]) -> Iterator[tuple[str, FieldRows]]:
    """Yield fields, with variants grouped whose rows are computed alike."""
    for name, arrays in variants_of(fields).items():
        for rows, alike in itertools.groupby(arrays, fields.__getitem__):
            numbers = [array.removeprefix(f"{name}.") for array in alike]
            several = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else numbers[0]
            yield name if arrays == [name] else f"{name}, variants {several}", rows


def _field_rows(rows: FieldRows) -> str:
    words = {
        "linked": "in whole shards",
        "copied": "copied as they are stored",
        "resumed": "resumed from its rows",
        "computed": "computed from samples",
    }
    parts = [f"{getattr(rows, n):,} {word}" for n, word in words.items() if getattr(rows, n)]
    return ", ".join(parts) or "no row"


def _bytes(plan: BuildPlan) -> Iterator[str]:
    kinds = {
        "fetched": plan.bytes_fetched,
        "read of earlier shards": plan.bytes_read,
        "linked" if plan.hard_links else "copied by the service": plan.bytes_linked,
        "written": plan.bytes_written,
    }
    for name, nbytes in kinds.items():
        if nbytes is None:
            yield f"{name}: unknown without timing"
        elif nbytes or name in ("fetched", "written"):
            yield f"{size(nbytes)} {name}"


def _estimate(estimate: Estimate) -> Iterator[tuple[str, str]]:
    cores = f"{estimate.cpus} core{'s' * (estimate.cpus > 1)}"
    cpu, hours = f"{estimate.cpu_seconds:.2g} CPU-s", estimate.cpu_seconds / 3600
    cpu = cpu if hours < 0.01 else f"{plain(hours, 2)} CPU-hours"
    time = f"about {duration(estimate.seconds)} on {cores}, {cpu}"
    basis = f"{estimate.samples} samples" if estimate.samples else "existing rows"
    yield "time", f"{time}; measured on {basis}"
    yield from _under("would fail", [f"{key}: {reason}" for key, reason in estimate.failed])
