"""Every way of reading yields what is stored, each row once."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import precache
from precache.codecs import kernels
from precache.loading import batch_source, stream
from precache.reading import array_reader
from precache.reading.array_reader import DecodedChunks
from precache.sampling import order
from tests.codecs.test_kernels import WAYS, needs_compiled
from tests.conftest import CODECS, BuiltStore
from tests.support.loaders import opened, rows_as_stored, valid_rows

READINGS = st.just(precache.Reading(resident="host")) | st.builds(
    precache.Reading,
    num_threads=st.integers(1, 3),
    prefetch_batches=st.none() | st.integers(1, 4),
    access=st.sampled_from(["map", "pread"]),
)
OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 80),
        "shuffle": st.sampled_from([True, False, "full", "block", precache.Block(1)]),
        "seed": st.integers(0, 3),
        "reading": READINGS,
    }
)
PLACES = st.sampled_from(["local", "memory", "cached"])


@pytest.fixture(scope="module")
def far() -> Callable[[BuiltStore], str]:
    """Put a store into a bucket, once."""

    @functools.cache
    def put(path: Path) -> str:
        uri = f"memory://ways-{path.parent.name}"
        precache.pull(path, uri)
        return uri

    return lambda store: put(store.path)


@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=needs_compiled) for way in [*WAYS][:2]), "numpy"]
)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["stores", "tile_stores"])
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=OPTIONS, place=PLACES, data=st.data())
def test_every_way_of_reading_yields_each_row_once_as_it_is_stored(
    kind: str,
    codec: str,
    way: str,
    request: pytest.FixtureRequest,
    far: Callable[[BuiltStore], str],
    tmp_path: Path,
    options: dict[str, Any],
    place: str,
    data: st.DataObject,
) -> None:
    """In several epochs: the first one checks checksums."""
    store = request.getfixturevalue(kind)[codec]
    uri = store.path if place == "local" else far(store)
    if place == "cached":
        options["cache"] = tmp_path / "cache"
    room = data.draw(st.sampled_from([1, 100_000, array_reader.DECODED_NBYTES]), "decoded bytes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compiled", lambda: WAYS[way])
        patch.setattr(kernels, "PAST_CACHES_NBYTES", data.draw(st.sampled_from([0, 1 << 40])))
        patch.setattr(stream, "PART_NBYTES", data.draw(st.sampled_from([1, stream.PART_NBYTES])))
        patch.setattr(array_reader, "DECODED_NBYTES", room)
        patch.setattr(DecodedChunks.__init__, "__defaults__", (room,))
        at_once = data.draw(st.sampled_from([6, order.POSITIONS_AT_ONCE]), "positions at once")
        for module in (order, batch_source):
            patch.setattr(module, "POSITIONS_AT_ONCE", at_once)
        with opened(uri, **options) as loader:
            count = -(-len(valid_rows(store)) // options["batch_size"])
            named = f"{count} batches of {options['batch_size']}, rank 0 of 1"
            assert repr(loader) == f"<precache loader, {named}: {loader.version!r}>"
            for _ in range(2):
                batches = list(loader)
                rows = rows_as_stored(batches, store)
                assert sorted(rows) == valid_rows(store)
                assert (rows == sorted(rows)) == (options["shuffle"] is False)
                labels = torch.cat([batch["label"] for batch in batches])
                np.testing.assert_array_equal(labels, loader.version.labels[rows])
                for batch in batches:
                    assert [(name, t.dtype, t.device.type) for name, t in batch.items()] == [
                        ("image", torch.uint8, "cpu"), ("label", torch.int64, "cpu"),
                        ("row", torch.int64, "cpu"),
                    ]  # fmt: skip
