"""The order of a `Loader`'s rows, as its options and the version decide."""

from __future__ import annotations

import threading

import numpy as np

from precache.errors import UsageError
from precache.loading.arrival_order import ArrivalOrder
from precache.loading.options import require_choice
from precache.loading.selection import Selection
from precache.reading.version_reader import VersionReader
from precache.sampling.order import Order, Shuffle
from precache.store.live_version import LiveVersion
from precache.store.version import Version


def shuffle_of(
    shuffle: bool | str, columns: VersionReader, window: int, nodes: int
) -> Shuffle | None:
    """How rows are shuffled; None where they are not.

    Parameters
    ----------
    window
        Shards that a block shuffle mixes.
    nodes
        That a block shuffle deals them out to.
    """
    shuffle = require_choice("shuffle", shuffle, (True, False, "full", "block"))
    blocks = shuffle == "block" or (shuffle is True and columns.cached is not None)
    if nodes > 1 and not blocks:
        raise UsageError(f"num_canonical_nodes is {nodes}; give shuffle='block' with it")
    if blocks:
        rows = [reader.array.object_shape[0] for reader in columns.readers.values()]
        return Shuffle("block", max(rows, default=1), window, nodes)
    return Shuffle() if shuffle else None


def order_of(
    version: Version,
    selection: Selection,
    batch_size: int,
    shuffle: Shuffle | None,
    seed: int,
    drop_last: bool,
    order: str,
    ranks: tuple[int, int],
    stopped: threading.Event,
) -> Order | ArrivalOrder:
    """The rows of each epoch's batches.

    Parameters
    ----------
    order
        ``row`` or ``key``: what decides where nothing is shuffled.
    ranks
        Rank and number of ranks.
    stopped
        Whoever waits for the rows of a version that grows gives up once this is set.

    Raises
    ------
    UsageError
        There is no such order of these rows.
    """
    if shuffle is not None and batch_size * ranks[1] % shuffle.nodes:
        raise UsageError(
            f"num_canonical_nodes is {shuffle.nodes}, and {ranks[1]} ranks read {batch_size} "
            "rows each a step; choose a batch_size that deals out evenly"
        )
    if isinstance(version, LiveVersion):
        return ArrivalOrder(version, batch_size, seed, drop_last, *ranks, stopped)
    valid, weights = selection.valid, selection.weights
    if batch_size * ranks[1] > len(valid):
        shared = f" for {ranks[1]} ranks" if ranks[1] > 1 else ""
        raise UsageError(
            f"batch_size is {batch_size}, and {version.path} has {len(valid)} valid rows"
            f"{shared}; give at most {len(valid) // ranks[1]}"
        )
    if weights is not None and shuffle is None:
        raise UsageError("weights draw rows at random; leave out shuffle=False with them")
    if order == "key" and shuffle is not None:
        raise UsageError("order='key' reads in a fixed order; give shuffle=False with it")
    sequence = None
    if order == "key":
        rows = valid(np.arange(len(valid)))
        keys = list(version.keys)
        sequence = np.array(sorted(rows.tolist(), key=lambda row: keys[row]), np.int64)
    return Order(valid, batch_size, shuffle, seed, drop_last, sequence, weights, *ranks)
