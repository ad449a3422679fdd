"""The first step of a build: what the source holds, in rows, and what is to be made of it."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from precache.errors import HangError, RecipeError, SourceError
from precache.messages import shown
from precache.recipe.recipe import Recipe
from precache.storage.base import Folder
from precache.store.commit_log import CodeDigests
from precache.store.layout import RowShape, rows_per_shard
from precache.store.row_table import RowTable
from precache_workers.ops.identity import decides
from precache_workers.planning.adoption import identified, identified_rows
from precache_workers.planning.labels import freeze_classes, override_labels, read_classes
from precache_workers.planning.request import Request
from precache_workers.planning.reuse import Placed, committed, place_rows
from precache_workers.planning.target_version import VersionSpec
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.sources import base as sources
from precache_workers.sources.code_digest import code_of

FETCH_SAMPLES = 64
"""That are held in memory at a time."""


@dataclass(frozen=True)
class ListedSource:
    """A source, listed.

    Attributes
    ----------
    ignored, left_out
        Files that are not images by suffix; what else is no sample, counted by reason.
    code
        Of custom functions that declare no version, and of a factory, as `CommitEntry` explains.
    fetches_labels
        Whether labels are known only once samples are fetched.
    seconds
        It took.
    pinned
        Whether these are the rows of a version, and the source was not looked at: then samples must
        be what they were.
    barred
        Key -> why, of samples that must not be decoded.
    refreshes
        Id of the version of which a refresh is made.
    """

    spec: VersionSpec
    placed: Placed
    ignored: int
    code: CodeDigests
    fetches_labels: bool
    seconds: float
    pinned: bool = False
    barred: Mapping[str, str] = field(default_factory=dict)
    refreshes: str | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def digests(self) -> dict[str, str]:
        """Digests that the code of functions must have, by function."""
        return {name: digest for name, (digest, _) in self.code.items()}

    def unfollowed(self) -> list[str]:
        """By function or factory, a line about code of which edits are not noticed."""
        named = [name for name in self.code if ":" in name]  # others are ops
        codes = {name: code_of(name.removeprefix("python:")) for name in named}
        return [
            f"{name}: edits of what these reach are not noticed: {'; '.join(code.unfollowed)}"
            for name, code in codes.items()
            if code is not None and code.unfollowed
        ]


def list_rows(
    request: Request, store: Folder, source: sources.Source, tick: sources.Tick
) -> ListedSource:
    """List the source, and give its samples the rows that they have in the current version.

    Raises
    ------
    SourceError
        The source cannot be listed, or has not what the request says of it.
    """
    began = time.perf_counter()
    listing = source.list(tick)
    recipe, code = identified(store, _numbered_on(request.recipe, store))
    table = listing.table
    if isinstance(source, sources.DatasetSource):
        table, made_by = identified_rows(store, source, table)
        code |= made_by
    table = _labelled(request, source, table)
    may_have = functools.partial(_may_have, request.shard_samples)
    contents = None
    if source.content_decides:
        contents = functools.partial(_contents, source, request.sample_timeout)
    placed = place_rows(store, table, request.keep_order, request.compact, may_have, contents)
    fingerprint = recipe.fingerprint(decides(recipe))
    spec = VersionSpec(recipe, fingerprint, placed.table, placed.table.digest)
    relabelled = request.labels is not None or request.classes is not None
    fetches_labels = source.labels_with_samples and not relabelled
    seconds = time.perf_counter() - began
    return ListedSource(
        spec,
        placed,
        listing.ignored,
        code,
        fetches_labels,
        seconds,
        left_out=listing.left_out,
    )


def _contents(
    source: sources.Source, seconds: float, keys: Sequence[str], sizes: Sequence[int]
) -> list[str]:
    """Of samples; empty for all where one hangs, which is for the build to find out."""
    try:
        return run_in_time(lambda: _read(source, keys, sizes), seconds)
    except HangError:
        return [""] * len(keys)


def _read(source: sources.Source, keys: Sequence[str], sizes: Sequence[int]) -> list[str]:
    found = []
    for start in range(0, len(keys), FETCH_SAMPLES):
        run = slice(start, start + FETCH_SAMPLES)
        fetched = source.fetch(keys[run], sizes[run])
        found += [each.content if isinstance(each, sources.Sample) else "" for each in fetched]
    return found


def _numbered_on(recipe: Recipe, store: Folder) -> Recipe:
    """The recipe with the variants that the current version has, where it does not say which.

    Else the same build would bring back those that were refreshed away.
    """
    open_ones = {n for n, each in recipe.fields.items() if each.leaves_variants_open}
    current = next(committed(store), None) if open_ones else None
    if current is None:
        return recipe
    try:
        before = Recipe.from_dict(current[1].pipeline).fields
    except RecipeError:  # of another release
        return recipe
    numbers = {n: before[n].first_variant for n in open_ones & before.keys()}
    fields = {
        name: each.model_copy(update={"first_variant": numbers[name]}) if name in numbers else each
        for name, each in recipe.fields.items()
    }
    return recipe.model_copy(update={"fields": fields})


def _labelled(request: Request, source: sources.Source, table: RowTable) -> RowTable:
    """The listing with the labels and classes that the request gives it."""
    frozen = None
    if request.classes is not None:
        frozen = read_classes(request.classes, request.storage_options)
    if request.labels is not None:
        table = override_labels(
            table, request.labels, frozen or (), accept_unmatched=request.accept_unmatched
        )
    if request.classes is None or frozen is None:
        return table
    if source.labels_with_samples and (table.labels < 0).all():
        raise SourceError(
            f"--classes {shown(request.classes)} numbers labels before samples are fetched, and "
            f"{shown(request.source)} has no targets; give it targets, or --labels"
        )
    return freeze_classes(table, frozen, shown(request.classes))


def _may_have(wanted: int | None, per_shard: int, shapes: Mapping[str, RowShape]) -> bool:
    """Whether shards of an earlier version hold as many rows as are asked for."""
    nbytes = [row.nbytes for row in shapes.values()]
    return wanted is None or wanted <= per_shard <= rows_per_shard(0, nbytes, wanted)
