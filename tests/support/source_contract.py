"""The contract of a source."""

import pickle
from collections.abc import Sequence

import numpy as np

from precache.errors import FetchError
from precache.store.labels import are_classes
from precache.store.row_table import RowTable
from precache_workers.sources.base import Fetched, Listing, Sample, Source

FOREIGN_KEYS = ("", "..", "../other.jpg", "/etc/passwd", "no such sample", "a\0b")
"""Keys that a store may contain, but no source has."""


def check_source(source: Source) -> Listing:
    """Check that a source lists and fetches as a build requires; returns its listing.

    All samples are fetched, and all of them must be readable.

    Raises
    ------
    AssertionError
        The source breaks the contract; the message states the rule.
    """
    counts: list[int] = []
    listing = source.list(counts.append)
    table = listing.table
    _require(len(table) > 0, "list() returns no sample")
    _require(counts[-1:] == [len(table)], "list() calls tick() last with the number of samples")
    _require(counts == sorted(counts), "the numbers that tick() is called with never fall")
    _check_table(table)
    file_states = listing.file_states
    known = file_states is None or (
        file_states.shape == (len(table),) and file_states.dtype == np.int64
    )
    _require(known, "file_states are int64, one for each sample, or None")
    _require(listing.complete, "a listing without a time limit is complete")
    again = pickle.loads(pickle.dumps(source))
    _require(_same(again.list(lambda count: None).table, table), "a pickled source lists the same")
    _check_index(source, listing)
    _check_fetching(again, table)
    return listing


def _check_table(table: RowTable) -> None:
    count = len(table)
    _require(len(set(table.keys)) == count, "keys are unique")
    _require(all(table.keys), "no key is empty")
    numbers = ("sizes", "mtimes", *(["labels"] if are_classes(table.labels) else []))
    for name in numbers:
        column = getattr(table, name)
        _require(column.shape == (count,) and column.dtype == np.int64, f"{name} are int64")
        _require(bool((column >= -1).all()), f"{name} are -1 where unknown, and never below")
    _require(len(table.etags) == count, "each sample has an etag, which may be empty")
    located = table.locations is None or len(table.locations) == count
    _require(located, "all samples have a location, or none has")
    _check_labels(table.labels, len(table), len(table.classes))


def _check_labels(labels: np.ndarray, count: int, classes: int) -> None:
    kinds = (
        "class numbers are (rows,) int64, numbers (rows,) float32, multi-hot (rows, classes) uint8"
    )
    if labels.ndim == 2:
        right = len(labels) == count and labels.dtype == np.uint8 and bool((labels <= 1).all())
        _require(right and classes in (0, labels.shape[1]), kinds)
    elif are_classes(labels):
        known = not classes or labels.max() < classes
        _require(bool(known), "each label has a class, if classes have names")
    else:
        right = labels.shape == (count,) and labels.dtype == np.float32
        _require(right and not np.isinf(labels).any(), kinds)


def _check_index(source: Source, listing: Listing) -> None:
    indexed = bool(source.index_name)
    located = listing.table.locations is not None
    _require(indexed == located, "a source with locations names its index")
    if listing.index is not None:
        again = source.list(lambda count: None, index=listing.index)
        _require(_same(again.table, listing.table), "a listing by its index is the same")
        _require(again.index is None, "an up-to-date index is not written again")
    damaged = source.list(lambda count: None, index=b"PAR1 and no more")
    _require(_same(damaged.table, listing.table), "a damaged index is ignored")


def _check_fetching(source: Source, table: RowTable) -> None:
    keys, sizes = list(table.keys), table.sizes.tolist()
    whole = _samples(source.fetch(keys, sizes, table.locations), keys)
    behind = table.locations_of(np.arange(len(table))[::-1])
    backwards = source.fetch(keys[::-1], sizes[::-1], behind)
    _require(
        _contents(_samples(backwards, keys[::-1])[::-1]) == _contents(whole),
        "fetch() returns samples in the order of its keys",
    )
    for number in {0, len(keys) // 2, len(keys) - 1}:
        [alone] = _samples(source.fetch([keys[number]], [-1]), [keys[number]])
        _require(
            _contents([alone]) == _contents([whole[number]]),
            "a sample that is fetched by its key alone is the same",
        )
    foreign = source.fetch(FOREIGN_KEYS, [-1] * len(FOREIGN_KEYS))
    _require(
        all(isinstance(error, FetchError) for error in foreign),
        "an unknown key gives a FetchError",
    )
    for sample, size in zip(whole, sizes, strict=True):
        if all(isinstance(part, bytes) for part in sample.inputs.values()):
            _require(size in (-1, sample.nbytes), "a sample of bytes has its listed size")


def _samples(fetched: Sequence[Fetched], keys: Sequence[str]) -> list[Sample]:
    _require(len(fetched) == len(keys), "fetch() returns as many samples as it gets keys")
    for key, sample in zip(keys, fetched, strict=True):
        _require(isinstance(sample, Sample), f"fetching {key!r} gives {sample!r}")
        _require(bool(isinstance(sample, Sample) and sample.inputs), f"{key!r} has no input")
    return [sample for sample in fetched if isinstance(sample, Sample)]


def _contents(samples: Sequence[Sample]) -> list[tuple[str, int | None]]:
    return [(sample.content, sample.label) for sample in samples]


def _same(one: RowTable, other: RowTable) -> bool:
    return one.digest == other.digest and same_locations(one, other)


def same_locations(one: RowTable, other: RowTable) -> bool:
    """Whether the samples of two tables lie in the same places."""
    here, there = one.locations, other.locations
    if here is None or there is None:
        return here is there
    return bool(
        here.containers == there.containers
        and np.array_equal(here.files, there.files)
        and np.array_equal(here.units, there.units)
        and here.places.equals(there.places)
    )


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise AssertionError(rule)
