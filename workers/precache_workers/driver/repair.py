"""Repair of a committed version: small objects from intact ones, shards from other versions.

Every small object follows from others: metadata documents from the version's own document; keys,
labels and holes from the row table, which the listed source has again; the tables of shards, and
their sums, from the shards; the hashes in the row table from the samples. An object is put only if
its inputs agree with the version's own document. So that document cannot be repaired: without it
the version is built again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from precache.errors import (
    BuildError,
    DamageError,
    FetchError,
    PrecacheError,
    SampleError,
    StorageError,
    StoreError,
)
from precache.storage.base import Folder
from precache.storage.stored_digest import has_bytes
from precache.store.array_metadata import SUMS, is_summed
from precache.store.commit_log import BUILD, ROOT
from precache.store.consistency import Flaw
from precache.store.lease import BuildLease, decision_lease
from precache.store.open import open_own, open_own_unchecked
from precache.store.receipts import Receipt
from precache.store.row_table import read_contents, read_reasons
from precache.store.small_arrays import file_array
from precache.store.version import HOLES, ROW_TABLE, Version, sums_mismatch
from precache_workers.cluster.executor import RunTasks
from precache_workers.driver.commit import Facts, shard_table_objects, small_objects
from precache_workers.planning.stored_versions import StoredObjects, committed_versions
from precache_workers.planning.target_version import SCRATCH, TargetVersion
from precache_workers.runtime.time_limit import FETCHING

if TYPE_CHECKING:  # loads torch and the decoders
    from precache_workers.shards.samples import Job
    from precache_workers.shards.shard_objects import Recorded
    from precache_workers.shards.survey import SampleFacts, Surveyed


# --- small objects ------------------------------------------------------------------------------


def mend_small(
    store: Folder, target: TargetVersion, flaws: Sequence[Flaw], job: Job, run: RunTasks
) -> None:
    """Put the flawed small objects of a committed version again.

    Sums of a field with lost shards are left until these are built again.

    Parameters
    ----------
    flaws
        As `stored_versions.flaws_of` returns them.
    job
        Fetches samples whose hashes or labels are lost.
    run
        Runs tasks that read shards or samples.

    Raises
    ------
    StoreError, BuildError
        An object cannot be repaired, or another process changed the version meanwhile.
    """
    reasons = {flaw.name: flaw.reason for flaw in flaws}
    if ROOT in reasons:
        raise _repair_error(target, ROOT, reasons[ROOT], ROOT)
    root = target.folder.read(ROOT)
    version = open_own_unchecked(target.folder)

    def put(objects: Mapping[str, bytes]) -> None:
        with decision_lease(store, target.version) as decision:
            if target.folder.get(ROOT) != root:
                raise StoreError(
                    f"{target.folder} was changed by another process; run the same command again"
                )
            for name, data in sorted(objects.items()):
                decision.require()
                target.folder.put(name, [data], scratch=SCRATCH)

    names = set(reasons)
    for field, _ in _known_losses(version, names):
        names = {name for name in names if not name.startswith(f"{SUMS}/{field}/")}
    for name in sorted(names & {ROW_TABLE, HOLES}):
        data = _from_other_version(store, version, name)
        if data is not None:
            array = {f"{_folder_of(name)}/{file}": d for file, d in file_array(data).items()}
            put(array)
            names -= array.keys()
    if not names:
        return
    objects = small_objects(target, _FactReader(target, version, names, job, run).facts())
    # Their documents have dtypes and sizes that nothing else has.
    folders = {_folder_of(name) for name in names} & {"label", *map(_folder_of, (ROW_TABLE, HOLES))}
    names |= {name for name in objects if _folder_of(name) in folders}
    for name in names & {ROW_TABLE, HOLES}:
        try:
            version.verify(name, objects[name])
        except DamageError:
            why = "what is made of its source today is not what it was"
            raise _repair_error(target, name, why) from None
    put({name: objects[name] for name in names})


def _folder_of(name: str) -> str:
    """Return the folder of a small array, of the name of one of its objects."""
    return name.partition("/")[0]


def _known_losses(version: Version, flawed: Collection[str]) -> Iterable[tuple[str, int]]:
    """Return lost shards, as far as the tables of shards are intact."""
    if any(name.startswith("shards/") and "/c/" in name for name in flawed):
        return []
    return version.lost_objects()


def _repair_error(target: TargetVersion, name: str, why: str, remove: str = "") -> StoreError:
    """Return the error for an object that cannot be repaired, with the way out."""
    way = "give --recompute, which makes a new version of the source and trusts nothing of this one"
    if remove:
        way = (
            f"remove {target.folder.path(remove)} and run the same command again, which makes all "
            "of the version again"
        )
    return StoreError(f"{target.folder.path(name)} is damaged and cannot be mended: {why}; {way}")


def _from_other_version(store: Folder, version: Version, name: str) -> bytes | None:
    """Return the same row table or list of holes of another version, by its checksum."""
    for folder, _ in committed_versions(store):
        data = folder.get(name) if folder.name != version.id else None
        with contextlib.suppress(DamageError):
            if data is not None:
                return version.verify(name, data)
    return None


def _unfetched(holes: Mapping[int, str]) -> set[int]:
    """Rows whose samples could not be fetched, or not in time."""
    from precache_workers.shards.shard_task import UNFETCHED

    return {row for row, why in holes.items() if why.startswith((UNFETCHED, FETCHING))}


class _FactReader:
    """Reads the facts of a version from its intact small objects, and from shards and samples."""

    def __init__(
        self,
        target: TargetVersion,
        version: Version,
        flawed: Collection[str],
        job: Job,
        run: RunTasks,
    ) -> None:
        self.target, self.version, self.job, self.run = target, version, job, run
        self.flawed = flawed
        self.fields = target.spec.recipe.fields

    def _is_flawed(self, array: str) -> bool:
        return any(name.startswith(f"{array}/c/") for name in self.flawed)

    def facts(self) -> Facts:
        """Collect all facts."""
        holes = self._holes()
        valid = np.ones(self.version.rows, np.bool_)
        valid[list(holes)] = False
        self.version.valid = valid
        contents, labels = self._contents_and_labels(holes)
        shards, sums = {}, {}
        for name, row in self.target.shapes.items():
            summed = is_summed(self.fields[name], row)
            lost = self._is_flawed(f"shards/{name}")
            if lost or (summed and self._is_flawed(f"{SUMS}/{name}")):
                surveyed = self._survey(name, summed)
                shards[name] = self._checked(name, surveyed) if lost else self._table(name)
                if summed:
                    sums[name] = self._checked_sums(name, surveyed)
            else:
                shards[name] = self._table(name)
                if summed:
                    sums[name] = self.version.stored_sums(name)
        return Facts(holes, contents, labels, shards, sums)

    # --- rows -----------------------------------------------------------------------------------

    def _holes(self) -> dict[int, str]:
        if ROW_TABLE not in self.flawed:
            reasons = read_reasons(self.version.read_checked(ROW_TABLE), ROW_TABLE)
            return {row: why for row, why in enumerate(reasons) if why}
        if HOLES not in self.flawed:
            return {row: why for row, (_, why) in sorted(self.version.holes.items())}
        raise _repair_error(self.target, HOLES, f"{ROW_TABLE} is damaged, too")

    def _contents_and_labels(self, holes: Mapping[int, str]) -> tuple[list[str], np.ndarray]:
        """Return hashes and labels by row; samples of which they are lost are fetched again."""
        table, lost = self.target.table, ROW_TABLE in self.flawed
        labels = table.labels if self._is_flawed("label") else self.version.labels
        fetches_labels = self._is_flawed("label") and self.job.fetch_labels
        if lost:
            contents, absent = [""] * len(table), _unfetched(holes) | table.removed
            rows = [row for row in range(len(table)) if row not in absent]
        else:
            contents = read_contents(self.version.read_checked(ROW_TABLE), ROW_TABLE)
            rows = [row for row, content in enumerate(contents) if content and fetches_labels]
        fetched = np.full(len(table), -1, np.int64)
        for row, sample in zip(rows, self._fetch(rows), strict=True):
            # A sample without a hash may have been what failed.
            may_fail = row in holes and not contents[row]
            if isinstance(sample.error, FetchError) or (sample.error and not may_fail):
                raise self._fetch_error(sample.error)
            contents[row], fetched[row] = contents[row] or sample.content, sample.label
        return contents, np.where(fetched < 0, labels, fetched) if fetches_labels else labels

    def _fetch(self, rows: Sequence[int]) -> Iterator[SampleFacts]:
        """Fetch the samples of some rows, in order; a task has those of a shard."""
        from precache_workers.shards.survey import FetchTask, fetch_samples

        target = self.target
        by_shard = itertools.groupby(rows, lambda row: row // target.rows_per_shard)
        tasks = [FetchTask.of(self.job, target.table, some, shard=n) for n, some in by_shard]
        found: dict[int, list[SampleFacts]] = {}
        for task, outcome in self.run(fetch_samples, tasks, None, len(tasks)) if tasks else ():
            if isinstance(outcome, PrecacheError):
                raise outcome
            found[task.shard] = outcome
        for task in tasks:
            yield from found[task.shard]

    def _fetch_error(self, error: FetchError | SampleError) -> FetchError:
        folder = self.target.folder
        lost = min(n for n in self.flawed if n == ROW_TABLE or n.startswith("label/c/"))
        return FetchError(
            f"{folder.path(lost)} is damaged, and mended from samples: {error}; run the same "
            "command again when they can be fetched, or with --recompute, which makes a new version"
        )

    # --- shards ---------------------------------------------------------------------------------

    def _table(self, name: str) -> np.ndarray:
        table = self.version.shard_table(name)
        assert table is not None  # a version of ours
        return table

    def _survey(self, name: str, summed: bool) -> list[Surveyed]:
        """Read all shards of a field again."""
        from precache_workers.shards.survey import SurveyTask, survey_shard

        target, layout = self.target, self.version.arrays[name][1]
        tasks = [
            SurveyTask(
                layout,
                target.folder,
                target.object_name(name, shard),
                shard,
                self.version.valid[target.rows_of(shard)],
                summed,
            )
            for shard in range(target.shards)
        ]
        surveyed: dict[int, Surveyed] = {}
        for task, outcome in self.run(survey_shard, tasks, None, len(tasks)):
            if isinstance(outcome, PrecacheError):
                if self._is_flawed(f"shards/{name}"):
                    why = f"{task.name} is damaged, too: {outcome}"
                    raise _repair_error(target, f"shards/{name}", why)
                raise StoreError(
                    f"{target.folder.path(task.name)} is damaged, and so is {SUMS}/{name}, which "
                    f"is made of it: {outcome}; remove {target.folder.path(task.name)} and run the "
                    "same command again, which makes both again, that shard of its samples"
                )
            surveyed[task.shard] = outcome
        return [surveyed[shard] for shard in range(target.shards)]

    def _checked(self, name: str, surveyed: Sequence[Surveyed]) -> np.ndarray:
        """Return sizes and checksums of shards, which must be those that were written."""
        assert self.version.attributes is not None
        stored = self.version.attributes.fields[name].stored
        nbytes = sum(shard.size for shard in surveyed)
        if nbytes != stored:
            why = f"its shards have {nbytes} bytes, and {stored} were written"
            raise _repair_error(self.target, f"shards/{name}", why)
        return np.array([(shard.size, shard.xxh3) for shard in surveyed], np.uint64)

    def _checked_sums(self, name: str, surveyed: Sequence[Surveyed]) -> np.ndarray:
        """Return sums of shards, which must give the mean that the version has."""
        sums = np.array([shard.sums for shard in surveyed], np.float64)
        if why := sums_mismatch(self.version, name, sums):
            why = f"those of the rows of {name} are others: {why}"
            raise _repair_error(self.target, ROOT, why, ROOT)
        known = None if self._is_flawed(f"{SUMS}/{name}") else self.version.stored_sums(name)
        if known is not None and not np.allclose(known, sums, rtol=1e-9, equal_nan=True):
            why = "its shards are not those that the sums by channel tell of"
            raise _repair_error(self.target, f"shards/{name}", why)
        return sums


# --- shards -------------------------------------------------------------------------------------


def recorded_of(target: TargetVersion, lost: StoredObjects) -> dict[int, Recorded]:
    """Return shard -> its record in a committed version, of all shards with lost objects."""
    from precache_workers.shards.shard_objects import Recorded

    if not lost:
        return {}
    version = open_own_unchecked(target.folder)
    content = read_contents(version.read_checked(ROW_TABLE), ROW_TABLE)
    recorded = {}
    for shard in sorted({shard for _, shard in lost}):
        rows = target.rows_of(shard)
        recorded[shard] = Recorded(
            {name: stored for (name, number), stored in lost.items() if number == shard},
            content[rows.start : rows.stop],
            frozenset(row for row in version.holes if row in rows),
        )
    return recorded


def objects_of(receipts: Iterable[Receipt]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return (field, shard) -> size and XXH3-64 of the objects of receipts."""
    return {
        (name, receipt.shard): (stored.size, stored.xxh3)
        for receipt in receipts
        for name, stored in receipt.objects.items()
    }


def mend_checksums(store: Folder, target: TargetVersion, rebuilt: StoredObjects) -> list[str]:
    """Correct the records of objects that were built again as they lie there; returns the fields.

    The table of a field is put if the bytes of all its shards are then as many as were written.
    """
    version, mended = open_own_unchecked(target.folder), []
    assert version.attributes is not None
    with decision_lease(store, target.version) as decision:
        for field in sorted({field for field, _ in rebuilt}):
            recorded = version.shard_table(field)
            assert recorded is not None  # a version of ours
            table = recorded.copy()
            for shard in (shard for name, shard in rebuilt if name == field):
                table[shard] = rebuilt[field, shard]
            nbytes = version.attributes.fields[field].stored
            if sum(table[:, 0].tolist()) == nbytes:
                for name, data in shard_table_objects(field, table).items():
                    decision.require()
                    target.folder.put(name, [data], scratch=SCRATCH)
                mended.append(field)
    return mended


def require_recorded(target: TargetVersion, lost: StoredObjects) -> None:
    """Raise `BuildError` if the version records other objects now, as one that replaced it may."""
    version = open_own_unchecked(target.folder)
    tables = {field: version.shard_table(field) for field in {field for field, _ in lost}}
    if any(_entry(tables[field], shard) != stored for (field, shard), stored in lost.items()):
        raise BuildError(
            f"another process changed {target.folder} meanwhile; run the same command again"
        )


def copy_from_other_versions(
    store: Folder, target: TargetVersion, lost: StoredObjects, lease: BuildLease
) -> list[tuple[str, int]]:
    """Copy lost objects from other versions that have them whole; returns which."""
    copied = []
    for (field, shard), stored in lost.items():
        name = target.object_name(field, shard)
        for other in _versions_with(store, target, field, shard, stored):
            if _is_whole(other, name, stored):
                lease.require()
                target.folder.copy(name, other, name, scratch=SCRATCH)
                copied.append((field, shard))
                break
    return copied


def copy_to_other_versions(
    store: Folder, target: TargetVersion, rebuilt: StoredObjects
) -> list[str]:
    """Copy objects that were built again to other versions in which the same ones are damaged.

    Returns the ids of these versions.
    """
    mended = set()
    for (field, shard), stored in rebuilt.items():
        name = target.object_name(field, shard)
        for other in _versions_with(store, target, field, shard, stored):
            if _is_one_file(other, target.folder, name) or _is_whole(other, name, stored):
                continue
            if not _is_whole(target.folder, name, stored):
                continue  # it was replaced meanwhile
            with decision_lease(store, other.name) as decision:
                if _recorded(other, field, shard) != stored:
                    continue  # it was replaced meanwhile
                decision.require()
                other.copy(name, target.folder, name, scratch=SCRATCH)
            other.remove(SCRATCH)
            if not other.names(BUILD):
                other.remove(BUILD)
            mended.add(other.name)
    return sorted(mended)


def _versions_with(
    store: Folder, target: TargetVersion, field: str, shard: int, stored: tuple[int, int]
) -> Iterator[Folder]:
    """Yield other versions whose records name the same object."""
    for folder, attributes in committed_versions(store):
        is_other = folder.name != target.version and field in attributes.fields
        if is_other and _recorded(folder, field, shard) == stored:
            yield folder


def _recorded(folder: Folder, field: str, shard: int) -> tuple[int, int] | None:
    """Return size and XXH3-64 that a version records of an object; None if it is damaged."""
    try:
        return _entry(open_own(folder).shard_table(field), shard)
    except (DamageError, StorageError, StoreError):
        return None  # `verify` reports it


def _entry(table: np.ndarray | None, shard: int) -> tuple[int, int] | None:
    if table is None or shard >= len(table):
        return None
    size, xxh3 = table[shard].tolist()
    return size, xxh3


def _is_one_file(one: Folder, other: Folder, name: str) -> bool:
    path, other_path = one.local(name), other.local(name)
    return bool(path and other_path and path.exists() and path.samefile(other_path))


def _is_whole(folder: Folder, name: str, stored: tuple[int, int]) -> bool:
    try:
        return has_bytes(folder, name, *stored)
    except StorageError:
        return False
