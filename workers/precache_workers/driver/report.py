"""The report at the end of a build: figures as JSON, or as a page of HTML."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precache.errors import StorageError, UsageError
from precache.messages import printable, shown, without_secrets
from precache.store.receipts import Receipt
from precache.units import duration, size
from precache_workers.driver.build_result import BuildResult
from precache_workers.driver.totals import Totals, failed_samples
from precache_workers.shards.timing import STAGES
from precache_workers.sources.labels import by_number

if TYPE_CHECKING:
    from precache_workers.driver.build import Build

STAGE_COLOURS = {"fetch": "blue", "ops": "orange", "encode": "green", "put": "purple"}


def check_reports(paths: Sequence[str], store: str) -> None:
    """Raise `UsageError` for a report that could not be written at the end of the build.

    A folder with nothing but a report in it would not be taken for a store by the next build.
    """
    for path in map(Path, paths):
        if "://" not in store and path.resolve().is_relative_to(Path(store).resolve()):
            raise UsageError(
                f"report is {str(path)!r}, inside of the store {store}; give a place outside of it"
            )
        if path.suffix not in (".html", ".json"):
            raise UsageError(f"report is {str(path)!r}; give a name that ends in .html or .json")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"report is {str(path)!r}, and there is no folder to write it to")
        if path.suffix == ".html":
            import precache.html.pages  # noqa: F401  # which says what is missing


def write_reports(
    build: Build, result: BuildResult | None = None, error: BaseException | None = None
) -> None:
    """Write all reports that were requested, with the build's result or else its error.

    Raises
    ------
    StorageError
        One could not be written.
    """
    if not build.request.report:
        return
    figures = summary(build, result, error)
    for path in map(Path, build.request.report):
        text = page(figures) if path.suffix == ".html" else json.dumps(figures)
        try:
            path.write_text(text, "utf-8", errors="backslashreplace")
        except OSError as failed:
            raise StorageError(f"cannot write the report {path}: {failed.strerror}") from None


def report_failure(build: Build, error: BaseException, say: Callable[[str], None]) -> None:
    """Record that a build failed, so that no follower waits for it, and write its reports."""
    if build.target is not None:
        with contextlib.suppress(StorageError, ValueError):  # the build's own error is raised
            build.target.record_failure(str(error) or type(error).__name__)
    try:
        write_reports(build, error=error)
    except Exception as failed:  # the build's own error is the one to be raised
        say(f"The report is not written: {failed}")


def summary(
    build: Build, result: BuildResult | None = None, error: BaseException | None = None
) -> dict[str, Any]:
    """All figures of a report, as JSON has them: sums over the shards that this run made.

    Times are seconds since the first of these began, by their nodes' own clocks. ``failures`` are
    those of the whole version, earlier runs included.
    """
    request, target, receipts = build.request, build.target, build.new_receipts
    total = Totals.of(receipts)
    began = min((receipt.began for receipt in receipts), default=build.began)
    nodes = sorted({receipt.host for receipt in receipts}, key=by_number)
    return {
        "state": "complete" if result is not None else "incomplete",
        "error": None if error is None else _reason(error),
        "version": target.version if target is not None else None,
        "source": shown(request.source),
        "store": shown(request.store),
        "address": shown(request.address),
        "began": build.began,
        "seconds": time.time() - build.began,
        "rows": len(target.table) if target is not None else 0,
        "shards": {
            "of_version": target.shards if target is not None else 0,
            "to_make": build.planned,
            "made": total.shards,
            "reused": total.reused,
        },
        "images": total.images,
        "images_failed": total.failed,
        "cpu_seconds": total.cpu_seconds,
        "images_per_cpu_second": total.images / total.cpu_seconds if total.cpu_seconds else 0.0,
        "bytes": {"fetched": total.fetched, "raw": total.raw, "stored": total.stored},
        "ratio": total.raw / max(1, total.stored),
        "stages": {name: total.stages.get(name, 0.0) for name in STAGES},
        "nodes": [_node([r for r in receipts if r.host == name], began) for name in nodes],
        "timeline": [_line(receipt, began) for receipt in sorted(receipts, key=lambda r: r.began)],
        "failures": _failures(build, result),
    }


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to continue"
    return printable(without_secrets(str(error) or repr(error)))


def _line(receipt: Receipt, began: float) -> dict[str, Any]:
    return {
        "shard": receipt.shard,
        "began": round(receipt.began - began, 6),
        "seconds": {name: round(value, 6) for name, value in receipt.seconds.items()},
        "reused": receipt.reused,
        **_sums([receipt]),
    }


def _node(receipts: Sequence[Receipt], began: float) -> dict[str, Any]:
    return {
        "shards": len(receipts),
        "wall_seconds": sum(receipt.wall_seconds for receipt in receipts),
        "began": min(receipt.began for receipt in receipts) - began,
        "ended": max(receipt.began + receipt.wall_seconds for receipt in receipts) - began,
        **_sums(receipts),
    }


def _sums(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Return a node's name, and sums over some of its shards."""
    total = Totals.of(receipts)
    names = ("images", "failed", "fetched", "stored", "cpu_seconds")
    return {"node": receipts[0].host, **{name: getattr(total, name) for name in names}}


def _failures(build: Build, result: BuildResult | None) -> list[dict[str, str]]:
    if result is not None:
        pairs = list(result.holes)
    elif build.target is not None:
        pairs = failed_samples(build.target.table.keys, build.receipts.values())
    else:
        pairs = []
    return [{"key": key, "reason": why} for key, why in pairs]


def page(figures: Mapping[str, Any]) -> str:
    """Render the figures of `summary` as a page: no script, no network, light and dark."""
    from precache.html.pages import TABLE_ROWS, bar, render

    total = max(sum(figures["stages"].values()), 1e-9)
    rendered = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(figures["began"])),
        "stages": [
            (name, duration(s), f"{s / total:.0%}", bar(s / total, STAGE_COLOURS[name]))
            for name, s in figures["stages"].items()
        ],
        "nodes": [_cells(node) for node in figures["nodes"][:TABLE_ROWS]],
        "node_count": len(figures["nodes"]),
        "failures": [(one["key"], one["reason"]) for one in figures["failures"][:TABLE_ROWS]],
        "failure_count": len(figures["failures"]),
    }
    return render("build.html", **{**figures, **rendered})


def _cells(node: Mapping[str, Any]) -> Iterable[str]:
    """Return the cells of a node's line in the page's table."""
    span = max(node["ended"] - node["began"], 1e-9)
    return (
        node["node"] or "unknown",
        f"{node['shards']:,}",
        f"{node['images']:,}",
        f"{node['images'] / span:,.0f}",
        f"{node['failed']:,}",
        size(node["fetched"]),
        size(node["stored"]),
        duration(node["cpu_seconds"]),
        f"{node['wall_seconds'] / span:.1f}",
    )
