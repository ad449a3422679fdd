"""Compare the samples of a Python dataset with those of its latest version, by reading them.

The identity of a sample that differs has a ``+`` and a digest after that of the listing. Later
builds that do not compare keep it, so that they do not go back to what was stored before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from precache.errors import DamageError, SourceError, StorageError, StoreError
from precache.storage.base import Folder
from precache.store.columns import Texts
from precache.store.consistency import has_labels_with_samples
from precache.store.open import open_own_unchecked
from precache.store.row_table import RowTable, read_contents, read_etags
from precache.store.version import ROW_TABLE, Version
from precache_workers.planning.stored_versions import committed_versions, latest_of
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.sources.base import Fetched, Sample, Tick
from precache_workers.sources.dataset import DatasetSource

READ_TWICE = 64
"""Samples that are read twice; a task reads those that changed again, too."""

READ_AT_ONCE = 16


@dataclass(frozen=True)
class _Stored:
    """A stored sample: its identity, content, and the label that came with it, None for others."""

    etag: str
    content: str
    label: int | None


def keep_compared(store: Folder, table: RowTable) -> RowTable:
    """Give samples of a listing the identity by which an earlier build compared them."""
    latest = latest_of(store, table.source)
    if latest is None:
        return table
    try:
        data = open_own_unchecked(latest[0]).read_checked(ROW_TABLE)
        if not any("+" in etag for etag in read_etags(data, ROW_TABLE)):
            return table
        before = RowTable.from_parquet(data, ROW_TABLE)
    except (DamageError, StorageError, StoreError):
        return table
    etags = dict(zip(before.keys, before.etags, strict=True))
    compared = [
        stored if (stored := etags.get(key, "")).partition("+")[0] == etag else etag
        for key, etag in zip(table.keys, table.etags, strict=True)
    ]
    return replace(table, etags=Texts(compared))


def note_of_held_data(store: Folder, source: DatasetSource, table: RowTable) -> tuple[str, ...]:
    """Return a line if what a dataset holds changed since the latest version, so that all samples
    are read."""
    latest = latest_of(store, table.source)
    if latest is None or not table.etags[0].startswith(source.etag):
        return ()
    try:
        stored = read_etags(open_own_unchecked(latest[0]).read_checked(ROW_TABLE), ROW_TABLE)
    except (DamageError, StorageError, StoreError):
        return ()
    before, now = ({etag.partition("+")[0] for etag in etags} for etags in (stored, table.etags))
    if now <= before or not any(etag.startswith(source.etag) for etag in before):
        return ()
    line = (
        f"{source.factory}: what its attributes hold, or a file that they name, changed since "
        f"version {latest[1].version[:8]}: all {len(table):,} samples are read and compared by "
        "content, and those that are the same are not decoded again. A method fingerprint(i) of "
        "the dataset spares reading them"
    )
    return (line,)


def compare_samples(
    store: Folder,
    source: DatasetSource,
    table: RowTable,
    seconds: float,
    tick: Tick,
    rows: Sequence[int] | None = None,
) -> tuple[RowTable, Mapping[str, str]]:
    """Read samples, and give those that are stored as they are the identity that they have.

    Parameters
    ----------
    seconds
        Time limit of a sample.
    rows
        Those that are read; by default all, and some of them twice.

    Returns
    -------
    tuple
        The listing, and the content of each sample that was read, by key.

    Raises
    ------
    SourceError
        Two reads of a sample differ.
    HangError
        A sample takes too long.
    """
    brings = source.labels_with_samples and not source.labels_given
    stored = _stored_samples(store, table.source, brings)
    again = set(np.linspace(0, len(table) - 1, min(READ_TWICE, len(table))).astype(int).tolist())
    etags, contents = list(table.etags), {}
    wanted = range(len(table)) if rows is None else rows
    for start in range(0, len(wanted), READ_AT_ONCE):
        some = wanted[start : start + READ_AT_ONCE]
        samples = _read(source, table, some, seconds)
        if rows is None:
            _require_same(source, table, some, samples, again, seconds)
        for row, sample in zip(some, samples, strict=True):
            key = table.keys[row]
            own = sample if isinstance(sample, Sample) else Sample({})
            contents[key] = own.content
            if key in stored:
                etags[row] = _identity(stored[key], own, etags[row], brings)
        tick(start + len(some))
    return replace(table, etags=Texts(etags)), contents


def _identity(stored: _Stored, sample: Sample, etag: str, brings: bool) -> str:
    """Return the identity of a sample: the stored one, unless its content or label differ.

    Parameters
    ----------
    brings
        Whether labels come with samples.
    """
    label = -1 if sample.label is None else sample.label
    if sample.content == stored.content and (not brings or stored.label == label):
        return stored.etag
    return f"{etag}+{xxhash.xxh3_64_hexdigest(f'{sample.content} {label}'.encode())}"


def _read(
    source: DatasetSource, table: RowTable, rows: Sequence[int], seconds: float
) -> Sequence[Fetched]:
    keys = [table.keys[row] for row in rows]
    return run_in_time(functools.partial(source.fetch, keys, [-1] * len(keys)), seconds)


def _require_same(
    source: DatasetSource,
    table: RowTable,
    rows: Sequence[int],
    samples: Sequence[Fetched],
    again: set[int],
    seconds: float,
) -> None:
    read = zip(rows, samples, strict=True)
    first = {row: sample for row, sample in read if row in again and isinstance(sample, Sample)}
    second = _read(source, table, list(first), seconds) if first else ()
    for (row, before), sample in zip(first.items(), second, strict=True):
        if isinstance(sample, Sample) and _facts(before) != _facts(sample):
            raise differs(table.keys[row])


def _facts(sample: Sample) -> tuple[str, int | None]:
    return sample.content, sample.label


def differs(key: str) -> SourceError:
    """Return the error for a sample of which two reads differ."""
    return SourceError(
        f"two reads of sample {key} gave different items, so that samples cannot be "
        "compared. Take what is random out of the dataset: random ops belong into the recipe, or "
        "behind the loader (precache.transforms); else leave out --compare, and keep one draw of "
        "each by --variants 1 (variants = 1 in each field)"
    )


def _opened(version_folder: Folder) -> tuple[Version, RowTable, bytes]:
    """Open a version, and return it with its row table, parsed and as it is stored."""
    version = open_own_unchecked(version_folder)
    data = version.read_checked(ROW_TABLE)
    return version, RowTable.from_parquet(data, ROW_TABLE), data


def _stored_samples(store: Folder, source: str, brings: bool) -> dict[str, _Stored]:
    """Read the samples of a source's latest version, by key; none if it is damaged.

    Parameters
    ----------
    brings
        Whether labels come with samples; then that version comes first whose labels did so.
    """
    versions = [folder for folder, of in committed_versions(store) if of.source == source]
    if not versions:
        return {}
    try:
        opened = map(_opened, versions)
        latest = next(opened)
        candidates = itertools.chain([latest], opened if brings else ())
        version, table, data = next(
            (some for some in candidates if has_labels_with_samples(some[1])), latest
        )
        contents = read_contents(data, ROW_TABLE)
        brought = has_labels_with_samples(table)
        labels: list[int | None] = version.labels.tolist() if brought else [None] * len(table)
    except (DamageError, StorageError, StoreError):
        return {}
    rows = zip(table.keys, table.etags, contents, labels, strict=True)
    return {
        key: _Stored(etag, content, label)
        for row, (key, etag, content, label) in enumerate(rows)
        if row not in table.removed
    }
