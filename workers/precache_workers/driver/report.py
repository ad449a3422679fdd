"""The report at the end of a build: figures as JSON, or a page of HTML made of these."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from precache.errors import StorageError, UsageError
from precache.messages import printable, shown, without_secrets
from precache.store.receipts import Receipt
from precache_workers.driver.commit import holes
from precache_workers.driver.run_monitor import RunMonitor
from precache_workers.driver.tally import by_number
from precache_workers.planning.request import BuildResult
from precache_workers.shards.timing import STAGES

BINS = 120
"""Points of a curve over time."""
SLOWEST = 20
"""Samples named as the slowest of all."""
_LIBRARIES = ("matplotlib", "jinja2")


def check_reports(paths: Sequence[str]) -> None:
    """Raise `UsageError` for a report that could not be written at the end of the build."""
    for path in map(Path, paths):
        if path.suffix not in (".html", ".json"):
            raise UsageError(f"report is {str(path)!r}; give a name that ends in .html or .json")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"report is {str(path)!r}, and there is no folder to write it to")
        if path.suffix == ".html":
            for name in _LIBRARIES:
                if importlib.util.find_spec(name) is None:
                    raise UsageError(
                        f"a report as a page needs {name}: pip install 'precache[report]', or ask "
                        "for one that ends in .json"
                    )


def write_reports(
    account: RunMonitor, result: BuildResult | None = None, error: BaseException | None = None
) -> None:
    """Write all that were asked for; `result` of a build that ended well, else its `error`.

    Raises
    ------
    StorageError
        One could not be written.
    """
    if not account.request.report:
        return
    figures = summary(account, result, error)
    for path in map(Path, account.request.report):
        if path.suffix == ".html":
            from precache_workers.driver.report_page import page

            text = page(figures)
        else:
            text = json.dumps(figures)
        try:
            path.write_text(text, "utf-8", errors="backslashreplace")
        except OSError as failed:
            raise StorageError(f"cannot write the report {path}: {failed.strerror}") from None


def report_failure(account: RunMonitor, error: BaseException, say: Callable[[str], None]) -> None:
    """Write the reports of a build that did not end well."""
    account.fail(error)
    try:
        write_reports(account, error=error)
    except Exception as failed:  # the build's own error is the one to be raised
        say(f"The report is not written: {failed}")


def summary(
    account: RunMonitor, result: BuildResult | None = None, error: BaseException | None = None
) -> dict[str, Any]:
    """All that a report tells, as JSON has it: sums over the shards that this run made.

    Times are seconds since the first of these began, by their nodes' own clocks. ``failures`` are
    those of the whole version, earlier runs included.
    """
    request, goal, made = account.request, account.goal, account.made
    objects = [each for receipt in made for each in receipt.objects.values()]
    raw, stored = (sum(getattr(o, name) for o in objects) for name in ("raw_nbytes", "size"))
    cpu_seconds = sum(receipt.cpu_seconds for receipt in made)
    images = sum(len(receipt.content) for receipt in made)
    began = min((receipt.began for receipt in made), default=account.began)
    return {
        "state": "complete" if result is not None else "incomplete",
        "error": None if error is None else _reason(account, error),
        "version": goal.version if goal is not None else result.version if result else None,
        "source": shown(request.source),
        "store": shown(request.store),
        "address": shown(request.address),
        "began": account.began,
        "seconds": time.time() - account.began,
        "rows": len(goal.table) if goal is not None else result.samples if result else 0,
        "shards": {
            "of_version": goal.shards if goal is not None else result.shards if result else 0,
            "to_make": account.shards,
            "made": len(made),
            "reused": sum(receipt.reused for receipt in made),
        },
        "images": images,
        "images_failed": sum(len(receipt.holes) for receipt in made),
        "cpu_seconds": cpu_seconds,
        "images_per_cpu_second": images / cpu_seconds if cpu_seconds else 0.0,
        "bytes": {"fetched": sum(r.fetched for r in made), "raw": raw, "stored": stored},
        "ratio": raw / max(1, stored),
        "stages": {name: sum(r.seconds.get(name, 0.0) for r in made) for name in STAGES},
        "nodes": _nodes(made, began),
        "throughput": _throughput(made, began),
        "timeline": [_line(receipt, began) for receipt in sorted(made, key=lambda r: r.began)],
        "slowest": _slowest(account),
        "failures": _failures(account, result),
    }


def _reason(account: RunMonitor, error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to continue"
    return printable(without_secrets(str(error) or repr(error)))


def _line(receipt: Receipt, began: float) -> dict[str, Any]:
    return {
        "shard": receipt.shard,
        "node": receipt.host,
        "began": round(receipt.began - began, 6),
        "seconds": {name: round(value, 6) for name, value in receipt.seconds.items()},
        "cpu_seconds": round(receipt.cpu_seconds, 6),
        "images": len(receipt.content),
        "failed": len(receipt.holes),
        "fetched": receipt.fetched,
        "stored": receipt.stored,
        "reused": receipt.reused,
    }


def _nodes(made: Sequence[Receipt], began: float) -> list[dict[str, Any]]:
    by_node: dict[str, list[Receipt]] = {}
    for receipt in made:
        by_node.setdefault(receipt.host, []).append(receipt)
    return [
        {
            "node": node,
            "shards": len(receipts),
            "images": sum(len(r.content) for r in receipts),
            "failed": sum(len(r.holes) for r in receipts),
            "fetched": sum(r.fetched for r in receipts),
            "stored": sum(r.stored for r in receipts),
            "cpu_seconds": sum(r.cpu_seconds for r in receipts),
            "wall_seconds": sum(r.wall_seconds for r in receipts),
            "began": min(r.began for r in receipts) - began,
            "ended": max(r.began + r.wall_seconds for r in receipts) - began,
        }
        for node, receipts in ((name, by_node[name]) for name in sorted(by_node, key=by_number))
    ]


def _throughput(made: Sequence[Receipt], began: float) -> dict[str, list[float]]:
    """Means over equal spans of time, a shard's images spread evenly over its own."""
    starts = np.array([r.began - began for r in made])
    walls = np.array([r.wall_seconds for r in made])
    weights = np.array([[len(r.content), r.fetched, r.stored] for r in made]).reshape(-1, 3)
    edges = span_edges(starts, walls)
    rates = done_until(edges, starts, walls, weights)
    middles = (edges[1:] + edges[:-1]) / 2
    names = ("images_per_second", "fetched_per_second", "stored_per_second")
    columns = zip(names, rates.T.tolist(), strict=True)
    return {"seconds": middles.round(6).tolist(), **dict(columns)}


def span_edges(starts: np.ndarray, walls: np.ndarray) -> np.ndarray:
    """Edges (BINS + 1,) of equal spans from 0 to the end of the last shard."""
    end = float((starts + walls).max(initial=0.0))
    return np.linspace(0.0, max(end, 1e-3), BINS + 1)


def done_until(
    edges: np.ndarray, starts: np.ndarray, walls: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """How much a second was done in each span: (spans, kinds) of weights (shards, kinds)."""
    done = np.zeros((len(edges), weights.shape[1]))
    for start, wall, weight in zip(starts, np.maximum(walls, 1e-6), weights, strict=True):
        done += np.clip((edges - start) / wall, 0.0, 1.0)[:, None] * weight
    rates: np.ndarray = np.diff(done, axis=0) / np.diff(edges)[:, None]
    return rates


def _slowest(account: RunMonitor) -> list[dict[str, Any]]:
    found = [(slow, receipt) for receipt in account.made for slow in receipt.slowest]
    found.sort(key=lambda pair: pair[0].seconds, reverse=True)
    keys = account.goal.table.keys if account.goal is not None else []
    return [
        {
            "key": keys[slow.row],
            "seconds": slow.seconds,
            "bytes": slow.nbytes,
            "shard": receipt.shard,
            "node": receipt.host,
        }
        for slow, receipt in found[:SLOWEST]
    ]


def _failures(account: RunMonitor, result: BuildResult | None) -> list[dict[str, str]]:
    if result is not None:
        pairs = list(result.holes)
    elif account.goal is not None:
        keys = account.goal.table.keys
        found = holes(list(account.receipts.values()))
        pairs = [(keys[row], why) for row, why in found.items()]
    else:
        pairs = []
    return [{"key": key, "reason": why} for key, why in pairs]
