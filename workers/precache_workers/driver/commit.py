"""The commit: receipts -> small arrays and metadata, by which a version is whole."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from precache.errors import BuildError, FormatError, Hole, StorageError, StoreError
from precache.runtime.threads import prefetch
from precache.storage.base import Folder
from precache.store.arrays import (
    CHECKS,
    SHARDS,
    SUMS,
    as_json,
    checks_per_object,
    field_document,
    group_document,
    shapes_name,
)
from precache.store.build_status import remove_abandoned_scratch
from precache.store.commit_log import ROOT, read_log
from precache.store.json_documents import FORMAT
from precache.store.labels import are_classes, narrow
from precache.store.lease import Lease
from precache.store.open import open_own
from precache.store.receipts import Receipt
from precache.store.row_table import (
    LISTED_LABEL,
    ROWS,
    contents_of,
    label_attributes,
    label_objects,
    table_objects,
)
from precache.store.small_arrays import file_array, small_array
from precache.store.tree import Leaf, sealed_root, spare_objects
from precache.store.version import mean_and_std
from precache_workers.driver import totals
from precache_workers.ops.identity import behaviours, installed_versions
from precache_workers.planning.target_version import SCRATCH, TargetVersion

PUTS = 8
"""Objects in flight to a service at a time: it answers late."""


def commit(
    target: TargetVersion,
    receipts: Mapping[int, Receipt],
    labels: np.ndarray | None = None,
    lease: Lease | None = None,
) -> None:
    """Write the small arrays and the metadata, the group's last.

    Nothing is written if another build has taken over and committed the version.

    Parameters
    ----------
    receipts
        Of every shard of the version, by number.
    labels
        Labels by row; by default those of the receipts, else of the row table.
    lease
        The lease of the build, which another build may have taken over.

    Raises
    ------
    BuildError
        Objects or the version were removed meanwhile, or another build took over.
    """
    if was_committed(target):
        return
    if lease is not None:
        lease.require()
    ordered = [receipts[shard] for shard in range(target.shards)]
    if labels is None:
        labels = target.table.labels
        if are_classes(labels) and any(receipt.labels for receipt in ordered):
            fetched = np.concatenate([np.array(r.labels or [-1] * len(r.content)) for r in ordered])
            labels = np.where(fetched < 0, labels, fetched)
    labels, of_rows = narrow(labels), totals.holes(ordered)
    sums = {  # of images
        name: np.array([receipt.sums[name].flat() for receipt in ordered], np.float64)
        for name in target.shapes
        if all(name in receipt.sums for receipt in ordered)
    }
    objects = small_objects(target, ordered, labels, of_rows, sums)
    leaves = {name: [len(data), Leaf.of(name, data).hex] for name, data in objects.items()}
    own = _attributes(target, ordered, labels, len(of_rows), sums)
    root = sealed_root({**own, "objects": leaves})
    objects |= spare_objects(root, objects.values())

    def create(item: tuple[str, bytes]) -> None:
        name, data = item
        if target.folder.create(name, [data], scratch=SCRATCH) or target.folder.get(name) == data:
            return
        if lease is not None:
            lease.require()
        target.folder.put(name, [data], scratch=SCRATCH)  # of a commit that was cut off

    items = objects.items()
    deque(map(create, items) if target.folder.local("") else prefetch(create, items, PUTS, PUTS), 0)
    if lease is not None:
        lease.require()
    created = target.folder.create(ROOT, [root], scratch=SCRATCH)
    if created and (lost := target.shards_to_do(receipts)):
        target.folder.remove(ROOT)
        raise BuildError(
            f"{len(lost)} of {target.shards} shards of {target.folder} were removed while the "
            "others were made; run the same command again to make them"
        )


def was_committed(target: TargetVersion) -> bool:
    """Return whether a version was committed; removes a document that was cut off.

    Callers hold the lease of the version.
    """
    document = target.folder.get(ROOT)
    if document is None:
        return False
    try:
        open_own(target.folder, document)
    except FormatError:
        raise
    except StoreError:
        target.folder.remove(ROOT)
        return False
    return True


def tidy_current(store: Folder) -> None:
    """Remove scratch files of a build that was cut off after its commit of the current version."""
    if current := read_log(store, newest=True, appends=True).current:
        folder = store.folder(current.version)
        with contextlib.suppress(StorageError):  # of another user: gc reports it
            if folder.size(ROOT) is not None:
                remove_abandoned_scratch(folder)


def small_objects(
    target: TargetVersion,
    receipts: Sequence[Receipt],
    labels: np.ndarray,
    holes: Mapping[int, Hole],
    sums: Mapping[str, np.ndarray],
) -> dict[str, bytes]:
    """Return name -> bytes of all objects of a version but its shards and its own document.

    Parameters
    ----------
    receipts
        Of all shards, in order.
    labels, holes, sums
        By row; every hole by its row; field of images -> (shards, 1 + 2 C) float64.
    """
    table, fields = target.table, target.spec.recipe.fields
    valid = np.ones(len(table), np.bool_)
    valid[list(holes)] = False
    group = as_json(group_document({}))
    objects = {f"{folder}/{ROOT}": group for folder in (SHARDS, CHECKS, SUMS)}

    def add(folder: str, files: Mapping[str, bytes]) -> None:
        objects.update({f"{folder}/{name}": data for name, data in files.items()})

    for name, row in target.shapes.items():
        document = field_document(fields[name], row, len(table), target.rows_per_shard)
        objects[f"{name}/{ROOT}"] = as_json(document)
        stored = [receipt.objects[name] for receipt in receipts]
        shards = [(made.size, made.xxh3 >> 64, made.xxh3 & 2**64 - 1) for made in stored]
        ends = np.stack([made.ends for made in stored])
        per_object = checks_per_object(ends.shape[1])
        sizes = small_array(np.array(shards, np.uint64), ["shard", "size_xxh3"])
        add(f"{SHARDS}/{name}", sizes)
        add(f"{CHECKS}/{name}", small_array(ends, ["shard", "chunk"], per_chunk=per_object))
        if row.ragged:
            shapes = [shape for receipt in receipts for shape in receipt.shapes[name]]
            add(shapes_name(name), small_array(np.array(shapes, np.int32), ["row", "axis"]))
        if name in sums:
            add(f"{SUMS}/{name}", small_array(sums[name], ["shard", "count_total_squares"]))
    objects |= {**label_objects(labels), **table_objects(table)}
    if not np.array_equal(labels, table.labels, equal_nan=labels.dtype.kind == "f"):
        add(LISTED_LABEL, small_array(table.labels, ["row"], -1))
    add("valid", small_array(valid, ["row"], fill_value=False))
    named = {row: [table.keys[row], hole] for row, hole in holes.items()}
    add("holes", file_array(as_json(named)))
    texts = [text for receipt in receipts for text in receipt.content]
    of_parts = [t for receipt in receipts for t in receipt.parts or [""] * len(receipt.content)]
    contents, parts = contents_of(texts, of_parts)
    for name, halves in {
        "content": contents,
        **{f"part.{n}": p for n, p in enumerate(parts)},
    }.items():
        add(f"{ROWS}/{name}", small_array(halves, ["row", "xxh3"]))
    return objects


def _attributes(
    target: TargetVersion,
    receipts: Sequence[Receipt],
    labels: np.ndarray,
    hole_count: int,
    sums: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    means = {name: mean_and_std(of_shards) for name, of_shards in sums.items()}
    recorded: dict[str, set[str]] = {}  # of the nodes that built the shards, several of one joined
    for name, version in (item for receipt in receipts for item in receipt.libraries.items()):
        recorded.setdefault(name, set()).add(version)
    joined = {name: ", ".join(sorted(versions)) for name, versions in recorded.items()}
    own, total = target.describe(), totals.Totals.of(receipts)
    for name, described in own["fields"].items():
        described["raw"] = total.raw_of[name]
        described["stored"] = total.stored_of[name]
    return {
        "format": FORMAT,
        **own,
        "holes": hole_count,
        "classes": list(target.table.classes),
        "label": label_attributes(target.table, labels),
        "mean": {name: mean for name, (mean, _) in means.items() if mean is not None},
        "std": {name: std for name, (_, std) in means.items() if std is not None},
        "libraries": {**installed_versions(), **joined},
        "decides": dict(target.spec.decides),
        "behaviours": behaviours(target.spec.declared),
    }
