"""Indexes of listings come out of a store: damaged or forged, they are made anew or harmless."""

import io
import json
import os
import pickle
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from precache.errors import FetchError
from precache_workers.sources.base import Listing
from precache_workers.sources.kinds import open_source
from tests.support.building import cut, encoded
from tests.support.containers import add
from tests.support.source_contract import same_locations

PHOTO = encoded(cut(0))
SAMPLES = 6


@pytest.fixture
def archive(tmp_path: Path) -> str:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(SAMPLES):
            add(tar, f"{number}.jpg", PHOTO, mtime=1000 + number)
            add(tar, f"{number}.cls", str(number).encode())
    return str(tmp_path / "a.tar")


def listed(source: str, index: bytes | None = None) -> Listing:
    return open_source(source).list(lambda count: None, index=index)


def forged(
    index: bytes, change: Callable[[list[Any]], Any] = lambda container: None, **columns: Any
) -> bytes:
    """An index with a valid digest whose first container, or some columns of it, are others."""
    table = pq.read_table(io.BytesIO(index[16:]))
    containers = json.loads(table.schema.metadata[b"containers"])
    change(containers[0])
    for name, value in columns.items():
        place, kind = table.schema.get_field_index(name), table.schema.field(name).type
        values = pa.array([value] * len(table)).cast(kind)
        table = table.set_column(place, name, values)
    return sealed(
        table.replace_schema_metadata(
            {**table.schema.metadata, b"containers": json.dumps(containers)}
        )
    )


def sealed(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return xxhash.xxh3_128_digest(sink.getvalue()) + sink.getvalue()


def test_a_damaged_or_foreign_index_is_ignored(archive: str) -> None:
    listing = listed(archive)
    assert listing.index is not None
    table, code = pq.read_table(io.BytesIO(listing.index[16:])), pickle.dumps(os.getcwd)
    metadata = table.schema.metadata
    deep = {**metadata, b"containers": "[" * 100_000}
    number, count = table.schema.get_field_index("place"), len(table)
    places: list[Any] = [["a"] * count, [[1]] * count, [1] * count]
    others = (table.set_column(number, "place", [pa.array(of)]) for of in places)
    indexes = [
        b"", code, xxhash.xxh3_128_digest(code) + code, sealed(table.replace_schema_metadata(deep)),
        *(sealed(other.replace_schema_metadata(metadata)) for other in others),
    ]  # fmt: skip
    for place in range(0, len(listing.index), 97):
        damaged = bytearray(listing.index)
        damaged[place] ^= 1
        indexes.append(bytes(damaged))
    for index in indexes:
        again = listed(archive, index)
        assert again.table.digest == listing.table.digest
        assert same_locations(again.table, listing.table)
        assert again.index == listing.index


def test_an_index_that_leads_to_other_files_is_ignored(archive: str, tmp_path: Path) -> None:
    listing = listed(archive)
    assert listing.index is not None
    assert listed(archive, listing.index).index is None
    other = tmp_path / "b.tar"
    other.write_bytes(Path(archive).read_bytes())
    os.utime(other, ns=(0, Path(archive).stat().st_mtime_ns))
    index = forged(listing.index, lambda container: container[0].__setitem__(0, "b.tar"))
    keys = listed(str(other), index).table.keys
    assert [key.partition("/")[0] for key in keys] == ["b.tar"] * SAMPLES


@pytest.mark.parametrize("offset", [-(1 << 63), -5, 0, 511, 1 << 62])
def test_a_forged_place_of_a_sample_is_no_hole(archive: str, offset: int) -> None:
    source = open_source(archive)
    listing = source.list(lambda count: None)
    assert listing.index is not None
    place = [{"offset": offset, "size": 10, "digest": 1, "suffix": "jpg"}]
    table = listed(archive, forged(listing.index, place=place)).table
    assert table.locations is not None
    assert table.locations.places.to_pylist() == [place] * SAMPLES
    for error in source.fetch(table.keys, table.sizes.tolist(), table.locations):
        assert isinstance(error, FetchError)


def test_no_thread_of_arrow_reads_an_index(archive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lets go of Python's bytes while the process ends would abort it."""
    index, threads = listed(archive).index, set[int]()

    class Noted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            threads.add(threading.get_ident())
            return super().read(size)

    monkeypatch.setattr(io, "BytesIO", Noted)
    assert listed(archive, index).index is None
    assert threads == {threading.get_ident()}
