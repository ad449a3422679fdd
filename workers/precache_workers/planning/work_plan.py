"""Find the work of a build before it does any of it: for the build, and for the plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from precache.recipe.ops import Function
from precache.recipe.recipe import Recipe
from precache.recipe.variants import field_of
from precache.storage.base import Folder
from precache.store.build_status import DESCRIPTION
from precache.store.layout import RowShape, rows_per_shard
from precache.store.receipts import Receipt
from precache_workers.planning.catalogue import Catalogue, StoredRows
from precache_workers.planning.listing import ListedSource
from precache_workers.planning.request import Request
from precache_workers.planning.target_version import (
    StoredObjects,
    TargetVersion,
    VersionSpec,
    is_committed,
    new_target,
    read_receipts,
)
from precache_workers.sources.dataset_items import Starts

log = logging.getLogger(__name__)

LARGEST_SHARD_BYTES = 512 << 20
"""Most raw bytes of a shard of one field; above, rows are laid into shards anew."""

CHANNEL_COUNTS = (1, 3, 4)
"""Numbers of channels of an image: grey, RGB, RGBA."""
OUTGROWN = 4
"""Shards are laid out anew if there are this many times more than needed, and this many times more
rows than other versions have: these rows are copied, not linked."""

Shapes = Mapping[str, RowShape]


@dataclass(frozen=True)
class MeasuredRows:
    """Row shapes by field, and mean stored bytes of a row of those that were measured.

    Attributes
    ----------
    notes
        Lines for the user about the parts of samples.
    pixels
        Lines on defaults of the recipe that decided pixels.
    starts
        Of a dataset's samples.
    """

    shapes: Mapping[str, RowShape]
    stored: Mapping[str, float]
    notes: tuple[str, ...] = ()
    pixels: tuple[str, ...] = ()
    starts: Starts | None = None


class Probe(Protocol):
    """Tries a few samples before a build."""

    def measure(self, spec: VersionSpec) -> MeasuredRows:
        """Measure rows by samples from all over the table, and read their pixels, too."""

    def read_pixels(self, spec: VersionSpec, rows: list[int], twice: bool) -> None:
        """Read the pixels of samples of some rows.

        Raises
        ------
        RecipeError
            They suggest another reading of pixels than one that the recipe leaves open, or, if they
            are to be read twice, two reads of one differ.
        """


@dataclass(frozen=True)
class Work:
    """The work that completes a version.

    Attributes
    ----------
    found
        Where the rows are stored, lost objects apart: nowhere, if a committed version lacks none.
    retried
        Rows whose samples failed in another version, and are tried again by request.
    receipts
        Receipts of finished shards of an uncommitted version; none before `remaining`.
    todo
        Shards to build; of an uncommitted version, none before `remaining`.
    lost
        (field, shard) -> size and XXH3-64 of objects to restore; None for an uncommitted version.
    needed
        Bytes to be stored, by estimate; None where the build was begun before.
    failed
        Version of the same recipe and rows whose holes are tried again: if none of them is mended,
        it stays.
    """

    target: TargetVersion
    found: StoredRows
    retried: frozenset[int] = frozenset()
    receipts: Mapping[int, Receipt] = field(default_factory=dict)
    todo: Sequence[int] = ()
    lost: StoredObjects | None = None
    needed: int | None = None
    failed: TargetVersion | None = None


def find_work(
    request: Request,
    store: Folder,
    listed: ListedSource,
    target: TargetVersion | None,
    probe: Probe,
    damaged: StoredObjects = MappingProxyType({}),
) -> Work:
    """Find what the store lacks of a version, and which of its rows other versions have.

    Parameters
    ----------
    target
        The version, where the store has it, committed or begun.
    probe
        Measures row shapes where no earlier version has them. Pixels are read of the samples that
        this build decodes, unless it resumes one that was begun, refreshes a version, or the recipe
        leaves nothing open and code of the user makes no rows.
    damaged
        Objects of a committed version whose bytes are not what they were.

    Raises
    ------
    RecipeError
        Pixels have two readings, and the recipe does not state which; or two reads of a sample
        differ.
    """
    failed = lost = None
    if target is not None and is_committed(target):
        lost = {**target.committed().lost_objects(), **damaged}  # mended before all else
        if not lost and is_tried_again(request, target):
            failed, target = target, new_target(store, target)
        elif not lost:
            return Work(target, StoredRows.empty(target.shapes, len(target.table)), lost=lost)
    spec, measured, is_new = listed.spec, None, target is None
    catalogue = Catalogue.empty(spec)  # to compute all rows again
    if not request.recompute:
        catalogue = Catalogue.read(
            store,
            spec,
            retries=request.retry_failed,
            pinned=target.version if target is not None and lost else listed.refreshes,
            labels_with_samples=listed.fetches_labels,
            made=None if target is None or lost else target.version,
        )
    if target is not None and lost:
        gone = [((target.version, name), shard) for name, shard in lost]
        found = replace(catalogue, lost=gone).find(target.rows_per_shard, target.shapes)
        holes = {row: hole for row, (_, hole) in target.committed().holes.items()}
        found.known[list(holes)] = True  # as holes, whatever their samples are now
        found = replace(found, holes=holes)
        return Work(target, found, todo=sorted({shard for _, shard in lost}), lost=lost)
    if target is None:
        found = catalogue.find()
        shapes = found.shapes
        if shapes and bool((spec.table.sizes < 0).all()) and not catalogue.listed.known.any():
            # All samples may have other shapes, as of a dataset whose code changed.
            measured = probe.measure(spec)
            if shapes.items() - measured.shapes.items():
                catalogue = Catalogue.empty(spec)
                found, shapes = catalogue.find(), {}
        if shapes.keys() != spec.recipe.fields.keys():
            measured = measured or probe.measure(spec)
            shapes = {**measured.shapes, **shapes}
        _warn_of_transposed(spec.declared, shapes)
        target = TargetVersion.of(store, spec, _per_shard(request, listed, found, shapes), shapes)
        target = new_target(store, target, recompute=request.recompute)
    found = catalogue.find(target.rows_per_shard, target.shapes)
    draws = may_draw(request, spec.recipe) and not request.retry_failed  # one may end its process
    asks = (spec.recipe.leaves_pixels_open or draws) and listed.refreshes is None
    if asks and target.folder.size(DESCRIPTION) is None:
        for rows in _decoded_rows(found):
            if rows and (measured is None or len(rows) < target.table.samples):
                probe.read_pixels(spec, rows, draws)
    needed = _needed(target, catalogue, found, measured) if is_new else None
    retried = frozenset[int]()
    if catalogue.retries:
        retried = catalogue.failed if failed is None else frozenset(failed.committed().failures)
    return Work(target, found, retried, needed=needed, failed=failed)


def may_draw(request: Request, recipe: Recipe) -> bool:
    """Return whether code of the user may draw random numbers that the recipe does not state."""
    by_user = request.source.startswith("python:") or recipe.functions
    return bool(by_user) and not all(field.states_one_draw for field in recipe.fields.values())


def _decoded_rows(found: StoredRows) -> tuple[list[int], list[int]]:
    """List the rows of which no field is reused without its sample: those of which a content is
    guessed, and others.

    Of the former many may turn out to be the same, as where a container was written anew.
    """
    decoded = ~(found.has_rows & found.known)
    decoded[list(found.holes)] = False
    guessed = found.content.any(1)
    before, others = np.flatnonzero(decoded & guessed), np.flatnonzero(decoded & ~guessed)
    return before.tolist(), others.tolist()


def is_tried_again(request: Request, target: TargetVersion) -> bool:
    """Return whether a committed version has failed samples that the request tries again."""
    return request.retry_failed and bool(target.committed().failures)


def remaining(work: Work) -> Work:
    """Return the work without the shards of an uncommitted version that are finished."""
    if work.lost is not None:
        return work
    target, receipts = work.target, read_receipts(work.target)
    todo = target.shards_to_do(receipts)
    finished = {shard: receipts[shard] for shard in receipts.keys() - set(todo)}
    return replace(work, receipts=finished, todo=todo)


def _needed(
    target: TargetVersion, catalogue: Catalogue, found: StoredRows, measured: MeasuredRows | None
) -> int:
    """Estimate the bytes of the objects that are no links."""
    needed = 0.0
    raw = {name: row.nbytes for name, row in target.shapes.items()}
    for name, held in found.fields.items():
        part = slice(None, None, target.rows_per_shard)
        shards = np.arange(len(held)) // target.rows_per_shard
        taken = (held[:, 0] >= 0) & (found.known | (held[:, 2] == 1))
        whole = np.logical_and.reduceat(taken, np.arange(len(held))[part])
        encoded = any(array.encoded for _, array in catalogue.arrays[name])
        rows = int((~whole[shards] | (not encoded)).sum())
        nbytes = catalogue.stored_nbytes(name)
        if nbytes is None and measured is not None:
            nbytes = measured.stored.get(name)
        is_raw = target.spec.recipe.fields[name].stored_as.name == "raw"
        is_raw &= not target.shapes[name].ragged  # those have a usual length
        needed += rows * (raw[name] if is_raw or nbytes is None else nbytes)
    return int(needed)


def _warn_of_transposed(recipe: Recipe, shapes: Shapes) -> None:
    """Log a warning for each field whose function seems to return (C, H, W) in place of (H, W, C).

    Its first axis has the length of channels, its last one has not, and the last two are longer
    than channels.
    """
    for name, declared in recipe.fields.items():
        row = next(row for array, row in shapes.items() if field_of(array) == name)
        has_function = any(isinstance(op, Function) for op in declared.ops)
        if not (declared.decodes and has_function and len(row.shape) == 3):
            continue
        last, first, middle = row.shape  # as stored: the last axis comes first
        if first in CHANNEL_COUNTS and min(middle, last) > max(CHANNEL_COUNTS):
            log.warning(
                "%s: the ops return an array of %s, which looks like (C, H, W); they see and "
                "return (H, W, C), so its rows are stored as %s. Let the function return "
                "array.transpose(1, 2, 0)",
                name,
                (first, middle, last),
                tuple(row.shape),
            )


def _per_shard(request: Request, listed: ListedSource, found: StoredRows, shapes: Shapes) -> int:
    """Choose the rows of a shard: those of an earlier version, unless they no longer fit."""
    nbytes, rows = [row.nbytes for row in shapes.values()], len(listed.spec.table)
    fresh = rows_per_shard(rows, nbytes, request.shard_samples)
    kept = listed.placed.rows_per_shard
    if kept is None:
        return fresh
    if found.used and request.shard_samples is None:
        kept = found.used[0].rows_per_shard
    # A version that is only computed again keeps its shards.
    reused = rows if request.recompute else int(found.has_rows.sum())
    shards, needed = (-(-rows // count) for count in (kept, fresh))
    outgrown = shards >= OUTGROWN * needed and rows >= OUTGROWN * reused
    too_large = kept * max(nbytes) > LARGEST_SHARD_BYTES
    return fresh if not reused or outgrown or too_large else kept


def compact_shards(request: Request, listed: ListedSource, target: TargetVersion) -> int | None:
    """Return the shards that `--compact` would give; None where it would not give far fewer."""
    nbytes, rows = [row.nbytes for row in target.shapes.values()], target.table.samples
    shards = -(-rows // rows_per_shard(rows, nbytes, request.shard_samples))
    helps = listed.placed.compactable and OUTGROWN * shards <= target.shards
    return shards if helps else None
