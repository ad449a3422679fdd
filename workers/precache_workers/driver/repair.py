"""Repair of a committed version: small objects from what is whole, shards from other versions.

Every small object follows from others: metadata documents from the version's own; keys, labels and
holes from the row table, which the listed source has again; what lists the shards, and their sums,
from the shards; the hashes in the row table from the samples. An object is put only if what it is
made of agrees with all that the version's own document tells of it. So that document is not mended:
without it the version is made again. It changes in one case: where a lost shard is made again by
another release of its encoder, its rows are the same and its bytes are not.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from precache.errors import DamageError, PrecacheError, StorageError, StoreError
from precache.storage.base import Folder
from precache.store.array_metadata import SUMS, is_summed
from precache.store.commit_log import BUILD, ROOT
from precache.store.consistency import Flaw, has_labels_with_samples
from precache.store.lease import deciding
from precache.store.open import open_own, unchecked
from precache.store.receipts import Receipt
from precache.store.row_table import kept_contents, kept_reasons
from precache.store.version import HOLES, ROW_TABLE, Version, sums_differ
from precache_workers.cluster.executor import Run
from precache_workers.driver.commit import Facts, as_json, shard_table_objects, small_objects
from precache_workers.ops.identity import installed_versions
from precache_workers.planning.reuse import committed
from precache_workers.planning.target_version import SCRATCH, TargetVersion

if TYPE_CHECKING:  # loads torch and the decoders
    from precache_workers.shards.shard_objects import Recorded
    from precache_workers.shards.shard_task import Job
    from precache_workers.shards.survey import SampleFacts, Surveyed

Lost = Mapping[tuple[str, int], tuple[int, int]]
"""(field, shard) -> size and XXH3-64."""


# --- small objects ------------------------------------------------------------------------------


def mend_small(
    store: Folder, goal: TargetVersion, flaws: Sequence[Flaw], job: Job, run: Run
) -> None:
    """Put the small objects of a committed version that are flawed.

    Sums of a field some of whose shards are lost are left for when these are there again.

    Parameters
    ----------
    flaws
        As `standing.flaws_of` finds them.
    job
        By which samples are fetched, where their hashes or labels are lost.
    run
        Runs tasks, where shards or samples have to be read.

    Raises
    ------
    StoreError
        Something cannot be mended.
    """
    reasons = {flaw.name: flaw.reason for flaw in flaws}
    if ROOT in reasons:
        raise _hopeless(goal, ROOT, reasons[ROOT], ROOT)
    version = unchecked(goal.folder)
    names = set(reasons)
    for field, _ in _known_losses(version, names):
        names = {name for name in names if not name.startswith(f"{SUMS}/{field}/")}
    for name in sorted(names & {ROW_TABLE, HOLES}):
        data = _of_twin(store, version, name)
        if data is not None:
            goal.folder.put(name, [data], scratch=SCRATCH)
            names.remove(name)
    if not names:
        return
    made = small_objects(goal, _Facts(goal, version, names, job, run).facts())
    if any(name.startswith("label/") for name in names):  # its document goes with its dtype
        names |= {name for name in made if name.startswith("label/")}
    for name in names & {ROW_TABLE, HOLES}:
        try:
            version.checked(name, made[name])
        except DamageError:
            why = "what is made of its source today is not what it was"
            raise _hopeless(goal, name, why) from None
    for name in sorted(names):
        goal.folder.put(name, [made[name]], scratch=SCRATCH)


def _known_losses(version: Version, flawed: Collection[str]) -> Iterable[tuple[str, int]]:
    """Shards that are lost, as far as their tables tell."""
    if any(name.startswith("shards/") and "/c/" in name for name in flawed):
        return []
    return version.lost_objects()


def _hopeless(goal: TargetVersion, name: str, why: str, remove: str = "") -> StoreError:
    """The error that says so of an object, and what is left to do."""
    place = goal.folder.path(remove) if remove else str(goal.folder)
    return StoreError(
        f"{goal.folder.path(name)} is damaged and cannot be mended: {why}; remove {place} and run "
        "the same command again, which makes all of the version again"
    )


def _of_twin(store: Folder, version: Version, name: str) -> bytes | None:
    """The same row table or list of holes from another version, by its checksum."""
    for folder, _ in committed(store):
        data = folder.get(name) if folder.name != version.id else None
        with contextlib.suppress(DamageError):
            if data is not None:
                return version.checked(name, data)
    return None


class _Facts:
    """What the small objects of a version tell: from those that are not flawed, and from what has
    to be read again for the others."""

    def __init__(
        self, goal: TargetVersion, version: Version, flawed: Collection[str], job: Job, run: Run
    ) -> None:
        self.goal, self.version, self.job, self.run = goal, version, job, run
        self.flawed = flawed
        self.fields = goal.spec.recipe.fields

    def _is_flawed(self, array: str) -> bool:
        return any(name.startswith(f"{array}/c/") for name in self.flawed)

    def facts(self) -> Facts:
        holes = self._holes()
        valid = np.ones(self.version.rows, np.bool_)
        valid[list(holes)] = False
        self.version.valid = valid
        contents, labels = self._contents(holes), self._labels()
        shards, sums = {}, {}
        for name, row in self.goal.shapes.items():
            summed = is_summed(self.fields[name], row)
            lost = self._is_flawed(f"shards/{name}")
            if lost or (summed and self._is_flawed(f"{SUMS}/{name}")):
                found = self._survey(name, summed)
                shards[name] = self._judged(name, found) if lost else self._table(name)
                if summed:
                    sums[name] = self._judged_sums(name, found)
            else:
                shards[name] = self._table(name)
                if summed:
                    sums[name] = self.version.stored_sums(name)
        return Facts(holes, contents, labels, shards, sums)

    # --- rows -----------------------------------------------------------------------------------

    def _holes(self) -> dict[int, str]:
        if ROW_TABLE not in self.flawed:
            reasons = kept_reasons(self.version.read_checked(ROW_TABLE), ROW_TABLE)
            return {row: why for row, why in enumerate(reasons) if why}
        if HOLES not in self.flawed:
            return {row: why for row, (_, why) in sorted(self.version.holes.items())}
        raise _hopeless(self.goal, HOLES, f"{ROW_TABLE} is damaged, too")

    def _contents(self, holes: Mapping[int, str]) -> list[str]:
        if ROW_TABLE not in self.flawed:
            return kept_contents(self.version.read_checked(ROW_TABLE), ROW_TABLE)
        from precache_workers.shards.shard_task import UNFETCHED

        absent = {row for row, why in holes.items() if why.startswith(UNFETCHED)}
        rows = range(self.version.rows)
        return ["" if row in absent else self._fetched(row).content for row in rows]

    def _fetched(self, row: int) -> SampleFacts:
        found = self._samples[row]
        if found.error is not None:
            raise found.error
        return found

    def _labels(self) -> np.ndarray:
        if not has_labels_with_samples(self.goal.table):
            return self.goal.table.labels
        if not self._is_flawed("label"):
            return self.version.labels
        rows = np.flatnonzero(self.version.valid).tolist()
        fetched = np.full(self.version.rows, -1, np.int64)
        fetched[rows] = [self._fetched(row).label for row in rows]
        return np.where(fetched < 0, self.goal.table.labels, fetched)

    @functools.cached_property
    def _samples(self) -> list[SampleFacts]:
        """What is known of each row's sample once it is fetched again."""
        from precache_workers.shards.survey import FetchTask, SampleFacts, fetch_samples

        goal, table = self.goal, self.goal.table
        found: dict[int, list[SampleFacts]] = {}
        tasks = []
        for shard in range(goal.shards):
            rows = [row for row in goal.rows_of(shard) if row not in table.removed]
            keys, sizes = [table.keys[row] for row in rows], [int(table.sizes[row]) for row in rows]
            tasks.append(FetchTask(self.job, shard, keys, sizes))
        for task, outcome in self.run(fetch_samples, tasks, None, len(tasks)):
            if isinstance(outcome, PrecacheError):
                raise outcome
            found[task.shard] = outcome
        samples = (each for shard in sorted(found) for each in found[shard])
        nothing = SampleFacts("", -1)
        return [nothing if row in table.removed else next(samples) for row in range(len(table))]

    # --- shards ---------------------------------------------------------------------------------

    def _table(self, name: str) -> np.ndarray:
        table = self.version.shard_table(name)
        assert table is not None  # a version of ours
        return table

    def _survey(self, name: str, summed: bool) -> list[Surveyed]:
        """All shards of a field, read again."""
        from precache_workers.shards.survey import SurveyTask, survey_shard

        goal, layout = self.goal, self.version.arrays[name][1]
        tasks = [
            SurveyTask(
                layout,
                goal.folder,
                goal.object_name(name, shard),
                shard,
                self.version.valid[goal.rows_of(shard)],
                summed,
            )
            for shard in range(goal.shards)
        ]
        found: dict[int, Surveyed] = {}
        for task, outcome in self.run(survey_shard, tasks, None, len(tasks)):
            if isinstance(outcome, PrecacheError):
                raise _hopeless(goal, f"shards/{name}", f"{task.name} is damaged, too: {outcome}")
            found[task.shard] = outcome
        return [found[shard] for shard in range(goal.shards)]

    def _judged(self, name: str, found: Sequence[Surveyed]) -> np.ndarray:
        """Sizes and checksums of shards that must be those that were written."""
        assert self.version.attributes is not None
        stored, nbytes = self.version.attributes.fields[name].stored, sum(f.size for f in found)
        if nbytes != stored:
            why = f"its shards have {nbytes} bytes, and {stored} were written"
            raise _hopeless(self.goal, f"shards/{name}", why)
        return np.array([(each.size, each.xxh3) for each in found], np.uint64)

    def _judged_sums(self, name: str, found: Sequence[Surveyed]) -> np.ndarray:
        """Sums of shards, which must give the mean that the version has."""
        sums = np.array([each.sums for each in found], np.float64)
        if why := sums_differ(self.version, name, sums):
            why = f"those of the rows of {name} are others: {why}"
            raise _hopeless(self.goal, ROOT, why, ROOT)
        known = None if self._is_flawed(f"{SUMS}/{name}") else self.version.stored_sums(name)
        if known is not None and not np.allclose(known, sums, rtol=1e-9, equal_nan=True):
            why = "its shards are not those that the sums by channel tell of"
            raise _hopeless(self.goal, f"shards/{name}", why)
        return sums


# --- shards -------------------------------------------------------------------------------------


_ENCODERS = {"image": "zstd", "zstd": "numcodecs"}
"""Codec -> the library whose release decides the bytes it makes of a chunk."""


def recorded_of(goal: TargetVersion, lost: Lost) -> dict[int, Recorded]:
    """Shard -> what a committed version records of it, of those of which objects are lost."""
    from precache_workers.shards.shard_objects import Recorded

    if not lost:
        return {}
    version = unchecked(goal.folder)
    assert version.attributes is not None
    content = kept_contents(version.read_checked(ROW_TABLE), ROW_TABLE)
    encoded: dict[str, np.ndarray | None] = {}
    for name in {name for name, _ in lost}:
        field = goal.spec.recipe.fields[name]
        if field.stored_as.name in _ENCODERS:
            with contextlib.suppress(DamageError, StorageError):  # else the bytes must be the same
                summed = is_summed(field, goal.shapes[name])
                encoded[name] = version.stored_sums(name) if summed else None
    found = {}
    for shard in sorted({shard for _, shard in lost}):
        rows = goal.rows_of(shard)
        found[shard] = Recorded(
            {name: made for (name, number), made in lost.items() if number == shard},
            content[rows.start : rows.stop],
            frozenset(row for row in version.holes if row in rows),
            {n: None if sums is None else sums[shard].tolist() for n, sums in encoded.items()},
        )
    return found


def is_other_encoder(goal: TargetVersion, field: str) -> bool:
    """Whether another release than the one here encoded shards of a field of a version."""
    attributes = unchecked(goal.folder).attributes
    assert attributes is not None
    library = _ENCODERS.get(goal.spec.recipe.fields[field].stored_as.name)
    return (
        library is not None and attributes.libraries.get(library) != installed_versions()[library]
    )


def objects_of(receipts: Iterable[Receipt]) -> dict[tuple[str, int], tuple[int, int]]:
    """(field, shard) -> size and XXH3-64 of the objects that were made."""
    return {
        (name, receipt.shard): (made.size, made.xxh3)
        for receipt in receipts
        for name, made in receipt.objects.items()
    }


def restate(store: Folder, folder: Folder, lost: Lost, remade: Lost) -> None:
    """Record the objects of a version that took the place of lost ones, where they differ.

    Its own document goes first: where this is cut off between the two, the table is the one that
    does not fit, and it is made again from the shards.
    """
    changed = {each: remade[each] for each in lost.keys() & remade if remade[each] != lost[each]}
    if changed:
        with deciding(store, folder.name):
            _restate(folder, changed)


def _restate(folder: Folder, changed: Lost) -> None:
    version = unchecked(folder)
    document = json.loads(folder.read(ROOT))
    own = document["attributes"]["precache"]
    objects: dict[str, bytes] = {}
    for name in {name for name, _ in changed}:
        table = version.shard_table(name)
        assert table is not None  # a version of ours
        table = table.copy()
        layout = version.arrays[name][1]
        for shard in (shard for field, shard in changed if field == name):
            path = f"{name}/{layout.object_name(shard)}"
            if _is_whole(folder, path, changed[name, shard]):  # else another repair put its own
                table[shard] = changed[name, shard]
        objects |= shard_table_objects(name, table)
        described = own["fields"][name]
        described["stored"] = sum(table[:, 0].tolist())
        library = _ENCODERS[described["codec"]]
        known = own["libraries"].get(library)
        releases = {installed_versions()[library], *(known.split(", ") if known else ())}
        own["libraries"][library] = ", ".join(sorted(releases))
    for name, data in {ROOT: as_json(document), **objects}.items():
        folder.put(name, [data], scratch=SCRATCH)


def copy_from_twins(store: Folder, goal: TargetVersion, lost: Lost) -> list[tuple[str, int]]:
    """Put lost objects of a version that another has whole; returns which."""
    found = []
    for (field, shard), made in lost.items():
        name = goal.object_name(field, shard)
        for twin in _twins(store, goal, field, shard, made):
            if _is_whole(twin, name, made):
                goal.folder.copy(name, twin, name, scratch=SCRATCH)
                found.append((field, shard))
                break
    return found


def copy_to_twins(store: Folder, goal: TargetVersion, lost: Lost, remade: Lost) -> list[str]:
    """Put objects that were made again where other versions have the same ones damaged.

    Returns the ids of these versions. They are found by what the goal recorded of the lost objects,
    so that the goal is restated last.
    """
    found = set()
    for field, shard in lost.keys() & remade:
        made, name = lost[field, shard], goal.object_name(field, shard)
        for twin in _twins(store, goal, field, shard, made):
            if not _is_one_file(twin, goal.folder, name) and not _is_whole(twin, name, made):
                twin.copy(name, goal.folder, name, scratch=SCRATCH)
                restate(store, twin, {(field, shard): made}, remade)
                twin.remove(SCRATCH)
                if not twin.names(BUILD):
                    twin.remove(BUILD)
                found.add(twin.name)
    return sorted(found)


def _twins(
    store: Folder, goal: TargetVersion, field: str, shard: int, made: tuple[int, int]
) -> Iterator[Folder]:
    """Other versions whose records name the same object."""
    for folder, attributes in committed(store):
        if folder.name == goal.version or field not in attributes.fields:
            continue
        try:
            table = open_own(folder).shard_table(field)
        except (DamageError, StorageError, StoreError):
            continue  # `verify` says why
        if table is not None and shard < len(table) and tuple(table[shard].tolist()) == made:
            yield folder


def _is_one_file(one: Folder, other: Folder, name: str) -> bool:
    here, there = one.local(name), other.local(name)
    return bool(here and there and here.exists() and here.samefile(there))


def _is_whole(folder: Folder, name: str, made: tuple[int, int]) -> bool:
    if folder.size(name) != made[0]:
        return False
    try:
        return xxhash.xxh3_64_intdigest(folder.read(name)) == made[1]
    except StorageError:
        return False
