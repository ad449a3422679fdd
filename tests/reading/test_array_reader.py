"""Shards are plain Zarr: other software reads ours, we read theirs, and damage has a name."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorstore
import torch
import xxhash
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec

import precache
from precache.codecs import kernels
from precache.codecs.chunk import encoder
from precache.errors import DamageError, PrecacheError, StorageError, StoreError
from precache.reading.array_reader import ArrayReader
from precache.reading.shard_files import shard_files
from precache.recipe.recipe import RawCodec
from precache.storage import local_files
from precache.storage.local_files import map_file
from precache.store.layout import checks_of, decode_index
from precache.store.shard_writer import ShardWriter
from tests.conftest import BuiltStore
from tests.support.building import flip

CopyStore = Callable[[BuiltStore], BuiltStore]


def _reader(version: precache.Version, name: str = "image", verify: bool = True) -> ArrayReader:
    return ArrayReader(version, name, verify)


def read_rows(reader: ArrayReader, rows: Any) -> np.ndarray:
    numbers = np.asarray(rows, np.int64)
    out = np.full((len(numbers), *reader.array.row_shape), 77, reader.array.dtype)
    reader.read(numbers, out)
    return out


def _loaded(store: BuiltStore) -> dict[int, np.ndarray]:
    with precache.Loader(store.path, batch_size=5, shuffle=False) as loader:
        batches = [(batch["row"].tolist(), batch["image"].numpy().copy()) for batch in loader]
    return {
        row: pixels for rows, images in batches for row, pixels in zip(rows, images, strict=True)
    }


# --- other software reads ours ------------------------------------------------------------------

ANY_STORE = pytest.mark.parametrize("kind", ["stores", "tile_stores"])
ANY_CODEC = pytest.mark.parametrize("codec", ["raw", "zstd", "image"])


@ANY_STORE
@ANY_CODEC
def test_zarr_python_reads_the_pixels_that_the_loader_yields(
    kind: str, codec: str, request: pytest.FixtureRequest
) -> None:
    store: BuiltStore = request.getfixturevalue(kind)[codec]
    array = zarr.open_array(store.version_folder / "image", mode="r")
    pixels = array[:]
    np.testing.assert_array_equal(pixels, store.rows())
    for row, image in _loaded(store).items():
        np.testing.assert_array_equal(image, pixels[row])
    assert array.metadata.dimension_names == ("row", "channel", "height", "width")


@ANY_STORE
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_tensorstore_reads_the_pixels_that_the_loader_yields(
    kind: str, codec: str, request: pytest.FixtureRequest
) -> None:
    store: BuiltStore = request.getfixturevalue(kind)[codec]
    pixels = _tensorstore(store.version_folder / "image").read().result()
    np.testing.assert_array_equal(pixels, store.rows())
    for row, image in _loaded(store).items():
        np.testing.assert_array_equal(image, pixels[row])


def _tensorstore(path: Path, **spec: Any) -> Any:
    kvstore = {"driver": "file", "path": str(path)}
    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore, **spec}).result()


def test_the_stores_have_what_makes_them_hard(
    stores: dict[str, BuiltStore], tile_stores: dict[str, BuiltStore]
) -> None:
    for store, shard, chunk in ((stores["raw"], 8, 1), (tile_stores["raw"], 32, 16)):
        version = store.open()
        array = _reader(version).array
        assert (array.object_shape[0], array.chunk_shape[0]) == (shard, chunk)
        assert version.rows % shard
        assert len(version.holes) == 2
        black = version.keys.index("cat/0000.png")
        assert version.valid[black]
        assert not store.rows()[black].any()


def test_zarr_python_lists_the_group_without_a_warning(store: BuiltStore) -> None:
    """Warnings are errors here."""
    group = zarr.open_group(store.version_folder, mode="r")
    version = store.open()
    assert set(dict(group.members())) >= {"image", "label", "valid", "key", "shards"}
    np.testing.assert_array_equal(group["label"][:], version.labels)
    np.testing.assert_array_equal(group["valid"][:], version.valid)
    leaves = version.shard_leaves("image")
    stored = [[leaf.size, leaf.xxh3 >> 64, leaf.xxh3 & 2**64 - 1] for leaf in leaves]
    assert group["shards/image"][:].tolist() == stored
    checks = np.stack([version.checks("image", number) for number in range(len(leaves))])
    np.testing.assert_array_equal(group["_checks/image"][:], checks)
    assert group["key"][:].tolist() == list(version.keys)


def test_the_small_arrays_are_plain_to_tensorstore(store: BuiltStore) -> None:
    version = store.open()
    for name, values in (("label", version.labels), ("valid", version.valid)):
        read = _tensorstore(store.version_folder / name).read().result()
        np.testing.assert_array_equal(read, values)


@pytest.fixture(scope="module")
def many_fields(tiles: Path, make_store: Callable[..., BuiltStore]) -> BuiltStore:
    """Fields of several dtypes, whose rows share chunks in different numbers."""

    def field(dtype: str, codec: str, **how: Any) -> precache.Field:
        ops = (precache.Decode(), precache.ToDType(dtype=dtype, **how))
        return precache.Field(ops=ops, codec=codec)

    fields = {
        "image": precache.Field(ops=(precache.Decode(),)),
        "half": field("float16", "zstd", scale=True),
        "single": field("float32", "raw", scale=True),
        "wide": field("int32", "zstd"),
        "narrow": field("uint16", "raw"),
        "grey": precache.Field(ops=(precache.Decode(mode="L"),), codec="zstd"),
    }
    return make_store(tiles, precache.Recipe(fields=fields), shard_samples=20)


def _expected(store: BuiltStore, name: str) -> np.ndarray:
    pixels = store.rows()
    dtype = store.open().fields[name].dtype
    return (pixels / 255).astype(dtype) if dtype.startswith("float") else pixels.astype(dtype)


@pytest.mark.parametrize("name", ["image", "half", "single", "wide", "narrow"])
def test_fields_of_every_dtype_are_the_same_to_every_reader(
    name: str, many_fields: BuiltStore
) -> None:
    expected = _expected(many_fields, name)
    path = many_fields.version_folder / name
    array = zarr.open_array(path, mode="r")
    assert array.shards[0] == 20
    assert array.chunks[0] == 4  # what divides the rows of a shard
    np.testing.assert_array_equal(array[:], expected)
    if name != "image":
        np.testing.assert_array_equal(_tensorstore(path).read().result(), expected)
    with precache.Loader(many_fields.path, 9, fields=[name]) as loader:
        for batch in loader:
            assert batch[name].numpy().dtype == expected.dtype
            np.testing.assert_array_equal(batch[name].numpy(), expected[batch["row"].numpy()])


# --- a shard is what the specification says -----------------------------------------------------


def test_every_shard_is_as_large_and_sums_up_as_the_table_says(store: BuiltStore) -> None:
    version = store.open()
    for number, leaf in enumerate(version.shard_leaves("image")):
        data = store.shard_path(number).read_bytes()
        assert (leaf.size, leaf.xxh3) == (len(data), xxhash.xxh3_128_intdigest(data))
        np.testing.assert_array_equal(version.checks("image", number), checks_of(data, 8))


def test_every_index_has_all_its_entries_and_chunks_lie_end_to_end(store: BuiltStore) -> None:
    for number, rows in enumerate((8, 8, 7)):
        data = store.shard_path(number).read_bytes()
        index = decode_index(data[-(16 * 8 + 4) :], 8).tolist()
        ends = [0, *(offset + length for offset, length in index[:rows])]
        assert [offset for offset, _ in index[:rows]] == ends[:-1]
        assert ends[-1] == len(data) - (16 * 8 + 4)
        assert all(entry == [2**64 - 1] * 2 for entry in index[rows:])


@given(st.integers(1, 20), st.integers(1, 5), st.data())
def test_what_a_writer_is_given_is_in_the_object(
    rows: int, per_chunk: int, data: st.DataObject
) -> None:
    chunks = -(-rows // per_chunk) + data.draw(st.integers(0, 2))
    writer = ShardWriter((per_chunk, 3), "int16", chunks, encoder(RawCodec(), "int16"))
    for row in range(rows):
        writer.row[...] = row
        writer.advance()
    parts, made = writer.finish()
    stored = b"".join(map(bytes, parts))
    assert (made.size, made.xxh3) == (len(stored), xxhash.xxh3_128_intdigest(stored))
    index = decode_index(stored[-(16 * chunks + 4) :], chunks)
    written = index[: -(-rows // per_chunk)]
    values = [np.frombuffer(stored[o : o + n - 4], "<i2") for o, n in written.tolist()]
    padded = np.zeros((len(written) * per_chunk, 3), int)
    padded[:rows] = np.arange(rows)[:, None]
    np.testing.assert_array_equal(np.concatenate(values).reshape(-1, 3), padded)
    assert made.raw_nbytes == padded.size * 2
    np.testing.assert_array_equal(made.ends, checks_of(stored, chunks))


# --- reading ------------------------------------------------------------------------------------


@ANY_STORE
@ANY_CODEC
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_rows_come_in_the_order_asked_for_and_as_often(
    kind: str, codec: str, verify: bool, mapped: bool, request: pytest.FixtureRequest
) -> None:
    store: BuiltStore = request.getfixturevalue(kind)[codec]
    version, expected = store.open(), store.rows()
    reader = ArrayReader(version, "image", verify, shard_files(version, "image", mapped=mapped))
    random = np.random.default_rng(0)
    for count in (1, 2, 3, 70, 150):
        rows = random.integers(0, len(expected), count)
        np.testing.assert_array_equal(read_rows(reader, rows), expected[rows])
    assert read_rows(reader, []).shape == (0, *expected.shape[1:])


def test_filtered_rows_can_be_had_as_they_are(tile_stores: dict[str, BuiltStore]) -> None:
    reader = _reader(tile_stores["image"].open())
    rows = np.arange(5)
    out = np.empty((5, 3, 32, 32), np.uint8)
    reader.read(rows, out, undo=False)
    assert reader.filtered
    assert (out != tile_stores["image"].rows()[rows]).any()


def test_several_threads_may_share_a_reader(store: BuiltStore) -> None:
    expected = store.rows()
    for verify in (True, False):
        reader = _reader(store.open(), verify=verify)
        orders = [np.random.default_rng(n).permutation(23) for n in range(12)]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(partial(read_rows, reader), orders))
        for rows, pixels in zip(orders, results, strict=True):
            np.testing.assert_array_equal(pixels, expected[rows])


@pytest.mark.parametrize("compiled", [True, False])
def test_a_shard_that_another_iterator_lets_go_of_is_opened_again(
    stores: dict[str, BuiltStore], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "compiled", kernels.Compiled)
    store = stores["raw"]
    reader = _reader(store.open())
    unchecked = reader._checks

    def let_go(*where: np.ndarray) -> np.ndarray:
        reader._objects.forget(0)
        return unchecked(*where)

    monkeypatch.setattr(reader, "_checks", let_go)
    for _ in range(3):
        np.testing.assert_array_equal(read_rows(reader, [0, 9, 1]), store.rows()[[0, 9, 1]])
    monkeypatch.undo()
    np.testing.assert_array_equal(read_rows(reader, [2, 1, 9]), store.rows()[[2, 1, 9]])


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a path cannot list what vanishes


def _mapped(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        return map_file(file.fileno())


def test_a_mapped_file_holds_no_descriptor(store: BuiltStore) -> None:
    before = _descriptors()
    maps = [_mapped(store.shard_path(number)) for number in range(3)]
    assert _descriptors() <= before  # fewer, where a server of other tests closes connections
    for number, mapped in enumerate(maps):
        assert mapped.tobytes() == store.shard_path(number).read_bytes()


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
import precache

def data() -> int:
    [line] = [l for l in Path("/proc/self/status").read_text().splitlines() if "VmData" in l]
    return int(line.split()[1]) << 10

precache.Loader  # with all that it imports
resource.setrlimit(resource.RLIMIT_DATA, (data() + (1 << 30), -1))
with precache.Loader(sys.argv[1], 2, fields={"x": "x"}, shuffle=False, device="cpu") as loader:
    batches = iter(loader)
    assert (next(batches)["x"].numpy() == 7).all()
    maps = Path("/proc/self/maps").read_text().splitlines()
    [access] = {l.split()[1] for l in maps if sys.argv[1] in l}
    print(access)
    batches.close()
"""


@pytest.mark.heavy
def test_a_file_longer_than_the_data_limit_is_read(tmp_path: Path) -> None:
    """As under `ulimit -d` or strict overcommit."""
    array = zarr.create_array(
        tmp_path, name="x", shape=(1 << 20, 1 << 13), chunks=(1 << 20, 1 << 13), dtype="uint8",
        compressors=None,
    )  # fmt: skip
    assert array.nbytes == 8 << 30
    chunk = tmp_path / "x/c/0/0"
    chunk.parent.mkdir(parents=True)
    with chunk.open("wb") as file:
        file.write(b"\7" * (8 << 13))
        file.truncate(array.nbytes)
    script = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("r--s\n", 0), done.stderr


def test_a_disk_that_shares_no_maps_is_mapped_all_the_same(
    store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_memory = local_files.map_memory

    def unshared(nbytes: int, flags: int, descriptor: int) -> int:
        if flags & mmap.MAP_SHARED:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return map_memory(nbytes, flags, descriptor)

    monkeypatch.setattr(local_files, "map_memory", unshared)
    assert _mapped(store.shard_path(0)).tobytes() == store.shard_path(0).read_bytes()


# --- damage -------------------------------------------------------------------------------------


@pytest.fixture
def own(copy_store: CopyStore, store: BuiltStore) -> BuiltStore:
    """A store that may be damaged, once for each codec."""
    return copy_store(store)


def _assert_damaged(store: BuiltStore, shard: int, reason: str = "") -> None:
    """Rows of `shard` fail by its name and a key of it; all others are read."""
    version, expected = store.open(), store.rows()
    reader = _reader(version)
    inside = range(8 * shard, min(8 * shard + 8, 23))
    failed = []
    for row in inside:
        try:
            np.testing.assert_array_equal(read_rows(reader, [row])[0], expected[row])
        except DamageError as error:
            failed.append((row, str(error)))
    assert failed
    for row, text in failed:
        assert str(store.shard_path(shard)) in text
        assert f"row {row}" in text
        assert repr(version.keys[row]) in text
        assert reason in text
    others = [row for row in range(23) if row not in inside]
    np.testing.assert_array_equal(read_rows(reader, others), expected[others])


@pytest.mark.skipif(not kernels.compiled().has_zstd, reason="numcodecs checks every frame")
@pytest.mark.parametrize("codec", ["zstd", "image"])
@pytest.mark.parametrize("verify", [True, False])
def test_the_checksum_of_a_frame_is_checked_once_if_that_is_asked_for(
    stores: dict[str, BuiltStore], copy_store: CopyStore, codec: str, verify: bool
) -> None:
    own = copy_store(stores[codec])
    reader, expected = _reader(own.open(), verify=verify), own.rows()
    frame = int(own.shard_path(0).stat().st_size) - 132
    end = int(np.frombuffer(own.shard_path(0).read_bytes()[frame:-4], "<u8")[:2].sum())
    np.testing.assert_array_equal(read_rows(reader, [0, 3]), expected[[0, 3]])
    flip(own.shard_path(0), end - 1, 0x55)
    if verify:
        np.testing.assert_array_equal(read_rows(reader, [3, 0]), expected[[3, 0]])
    else:
        with pytest.raises(DamageError, match="row 0"):
            read_rows(reader, [3, 0])


def test_bytes_that_are_read_anew_are_checked_anew(own: BuiltStore) -> None:
    dataset = precache.CachedDataset(own.path, access="pread")
    for path in map(own.shard_path, range(3)):
        assert len(list(dataset)) == len(dataset)  # type: ignore[call-overload]
        flip(path, 20, 0x55)
        with pytest.raises(DamageError, match="is damaged at row"):
            list(dataset)  # type: ignore[call-overload]
        flip(path, 20, 0x55)


SIZE = "bytes where {size} were written"
DAMAGED: dict[str, tuple[Callable[[Path, int], object], str]] = {
    **{
        # The middle of a chunk, since some bits of a zstd header say nothing about pixels.
        f"a byte at {where}": (
            partial(lambda at, p, n: flip(p, int((n - 132) * at) + 20, 0x55), where),
            "",
        )
        for where in (0.0, 0.3, 0.9)
    },
    **{
        f"a byte of the index at {place}": (
            partial(lambda at, p, n: flip(p, at, 0x55), place),
            "index fails its CRC32C",
        )
        for place in (-1, -4, -5, -132)
    },
    **{
        f"cut to {left}": (partial(lambda m, p, n: os.truncate(p, m), left), SIZE)
        for left in (0, 131)
    },
    "cut to half": (lambda path, size: os.truncate(path, size // 2), SIZE),
    "a byte less": (lambda path, size: os.truncate(path, size - 1), SIZE),
    "longer by an index": (lambda path, size: os.truncate(path, size + 132), SIZE),
    "missing": (
        lambda path, size: path.unlink(),
        "it is missing; run the same precache build command again with",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_shard_is_named_with_row_and_key(damage: str, own: BuiltStore) -> None:
    spoil, reason = DAMAGED[damage]
    size = own.shard_path(1).stat().st_size
    spoil(own.shard_path(1), size)
    _assert_damaged(own, 1, reason.format(size=size))


def test_a_shard_that_is_a_folder_or_unreadable_is_an_error_of_ours(own: BuiltStore) -> None:
    path = own.shard_path(0)
    path.unlink()
    path.mkdir()
    with pytest.raises((StorageError, DamageError), match=str(path)):
        read_rows(_reader(own.open()), [0])


def test_raw_rows_are_checked_as_verify_says(
    stores: dict[str, BuiltStore], copy_store: CopyStore
) -> None:
    store = copy_store(stores["raw"])
    path, expected = store.shard_path(0), store.rows()
    reader = _reader(store.open())
    np.testing.assert_array_equal(read_rows(reader, [0]), expected[:1])
    flip(path, 5, 0xFF)  # in place, where it is mapped
    assert (read_rows(reader, [0])[0] != expected[0]).sum() == 1
    [damage] = precache.verify(store.path).damage
    assert damage.keys == (store.open().keys[0],)
    assert (read_rows(_reader(store.open(), verify=False), [0])[0] != expected[0]).sum() == 1
    with pytest.raises(DamageError):
        read_rows(_reader(store.open()), [0])


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_one_reader_checked_no_other_one_of_the_process_checks_again(
    stores: dict[str, BuiltStore], copy_store: CopyStore, codec: str
) -> None:
    store = copy_store(stores[codec])
    path = store.shard_path(0)
    first = _reader(store.open())
    read_rows(first, [0, 1, 5])
    del first
    second = _reader(store.open())
    read_rows(second, [7])
    assert np.flatnonzero(second._objects.checked[0]).tolist() == [0, 1, 5, 7]
    off = _reader(store.open(), verify=False)
    read_rows(off, [2, 3])
    third = _reader(store.open())
    read_rows(third, [7])
    assert np.flatnonzero(third._objects.checked[0]).tolist() == [0, 1, 5, 7]
    path.write_bytes(path.read_bytes())  # as it was, and yet another file
    fourth = _reader(store.open())
    read_rows(fourth, [7])
    assert np.flatnonzero(fourth._objects.checked[0]).tolist() == [7]


def test_a_version_that_is_removed_while_it_is_read_says_so(own: BuiltStore) -> None:
    reader = _reader(own.open())
    expected = own.rows()
    read_rows(reader, [0])
    shutil.rmtree(own.path)
    np.testing.assert_array_equal(read_rows(reader, [0, 3]), expected[[0, 3]])
    with pytest.raises(StoreError, match=r"was removed; open the store's"):
        read_rows(reader, [8])


def _forge_index(path: Path, entry: int, offset: int, length: int) -> None:
    data = bytearray(path.read_bytes())
    index = np.frombuffer(data[-132:-4], "<u8").reshape(8, 2).copy()
    index[entry] = offset, length
    body = index.tobytes()
    data[-132:] = body + google_crc32c.value(body).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(2**63, 5), (0, 2**62), (2**64 - 2, 10), (2**64 - 1, 2**64 - 1), (0, 0), (5, 3), (10**6, 9)],
)
def test_a_forged_index_leads_nowhere(own: BuiltStore, offset: int, length: int) -> None:
    path = own.shard_path(0)
    _forge_index(path, 3, offset, length)
    with pytest.raises(DamageError, match="image/c/0/0/0/0"):
        read_rows(_reader(own.open()), [3])
    with (
        precache.Loader(own.path, batch_size=8, shuffle=False) as loader,
        pytest.raises(DamageError, match="image/c/0/0/0/0"),
    ):
        list(loader)
    for row in (0, 2, 4, 7):
        np.testing.assert_array_equal(read_rows(_reader(own.open()), [row])[0], own.rows()[row])


# --- we read what other software wrote ----------------------------------------------------------

SHAPE = (13, 3, 8, 8)
GRIDS: dict[str, dict[str, Any]] = {
    "a row a chunk": {"chunks": (1, 3, 8, 8)},
    "rows share a chunk": {"chunks": (4, 3, 8, 8)},
    "one chunk": {"chunks": SHAPE},
    "sharded, a row a chunk": {"chunks": (1, 3, 8, 8), "shards": (5, 3, 8, 8)},
    "sharded, rows share a chunk": {"chunks": (2, 3, 8, 8), "shards": (6, 3, 8, 8)},
    "chunked along other axes": {"chunks": (2, 2, 8, 5)},
    "sharded, chunked along other axes": {"chunks": (2, 1, 4, 8), "shards": (4, 3, 8, 8)},
    "sharded along other axes": {"chunks": (1, 3, 2, 8), "shards": (4, 3, 4, 8)},
    "shards wider than rows, a row a chunk": {"chunks": (1, 3, 8, 8), "shards": (5, 3, 16, 24)},
    "shards wider than rows": {"chunks": (2, 3, 8, 8), "shards": (6, 6, 8, 16)},
    "chunks wider than rows": {"chunks": (1, 3, 10, 9)},
    "chunks wider than rows, rows share a chunk": {"chunks": (2, 4, 8, 8)},
    "sharded, chunks wider than rows": {"chunks": (1, 3, 16, 9), "shards": (4, 3, 32, 9)},
    "index at the start": {
        "chunks": (2, 3, 8, 8),
        "shards": {"shape": (6, 3, 8, 8), "index_location": "start"},
    },
}
COMPRESSORS: dict[str, Any] = {
    "raw": None,
    "crc32c": Crc32cCodec(),
    "zstd": ZstdCodec(),
    "zstd and crc32c": [ZstdCodec(checksum=True), Crc32cCodec()],
    "blosc": BloscCodec(cname="lz4", shuffle="bitshuffle"),
    "gzip": GzipCodec(),
}


def _values(dtype: str) -> np.ndarray:
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    return numbers % 3 == 0 if dtype == "bool" else (numbers % 251).astype(dtype)


def _write(folder: Path, values: np.ndarray, name: str = "train/pixels", **how: Any) -> zarr.Array:
    zarr.open_group(folder, mode="a")
    how = {"dtype": values.dtype, "fill_value": 0, **how}
    array = zarr.create_array(folder, name=name, shape=values.shape, **how)
    array[:] = values
    return array


def _assert_reads(folder: Path, values: np.ndarray, name: str = "train/pixels") -> None:
    fields = {"image": name}
    with precache.Loader(folder, batch_size=5, shuffle=False, fields=fields) as loader:
        images = np.concatenate([batch["image"].numpy() for batch in loader])
    assert images.dtype == values.dtype.newbyteorder("=")
    np.testing.assert_array_equal(images, values)
    reader = _reader(precache.store.open.open_version(folder, fields))
    rows = np.array([7, 0, 12, 7, 3])
    np.testing.assert_array_equal(read_rows(reader, rows), values[rows])


@pytest.mark.parametrize(
    ("grid", "compressor"),
    [
        *itertools.product(GRIDS, ("raw", "zstd and crc32c")),
        *itertools.product(("rows share a chunk", "sharded, a row a chunk"), COMPRESSORS),
    ],
)
def test_arrays_of_zarr_python_are_read(grid: str, compressor: str, tmp_path: Path) -> None:
    values = _values("uint8")
    _write(tmp_path, values, **GRIDS[grid], compressors=COMPRESSORS[compressor])
    _assert_reads(tmp_path, values)


@pytest.mark.parametrize("grid", ["rows share a chunk", "sharded, a row a chunk"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "float32", "uint16", "int64"])
def test_arrays_of_every_kind_of_number_are_read(dtype: str, grid: str, tmp_path: Path) -> None:
    values = _values(dtype)
    _write(tmp_path, values, **GRIDS[grid])
    _assert_reads(tmp_path, values)


@pytest.mark.parametrize("grid", ["a row a chunk", "sharded, rows share a chunk"])
@pytest.mark.parametrize("compressor", ["raw", "crc32c", "zstd"])
def test_big_endian_arrays_are_read(grid: str, compressor: str, tmp_path: Path) -> None:
    values = _values("int32") * 1000 - 7
    codecs = COMPRESSORS[compressor]
    how = {**GRIDS[grid], "compressors": codecs, "serializer": BytesCodec(endian="big")}
    _write(tmp_path, values, **how)
    _assert_reads(tmp_path, values)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("compressor", ["raw", "crc32c", "zstd"])
def test_missing_chunks_are_fill_values(grid: str, compressor: str, tmp_path: Path) -> None:
    values = np.full(SHAPE, 9, np.uint8)
    how = {**GRIDS[grid], "compressors": COMPRESSORS[compressor], "fill_value": 9}
    array = _write(tmp_path, values, **how)
    if compressor == "raw":  # before there is any object
        _assert_reads(tmp_path, values)
    array[6:] = values[6:] = _values("uint8")[6:]
    _assert_reads(tmp_path, values)


@pytest.mark.parametrize("rows", [slice(2, 3), slice(6, 13), slice(0, 4)])
def test_missing_large_rows_are_fill_values(rows: slice, tmp_path: Path) -> None:
    """Rows so large that plain ones are copied one by one."""
    values = np.full((13, 3, 80, 80), 9, np.uint8)
    how = {"chunks": (1, 3, 80, 80), "shards": (5, 3, 80, 80), "compressors": None}
    array = _write(tmp_path, values, **how, fill_value=9)
    array[rows] = values[rows] = 5
    _assert_reads(tmp_path, values)


TENSORSTORE_CODECS: dict[str, list[dict[str, Any]]] = {
    "raw": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "big-endian": [{"name": "bytes", "configuration": {"endian": "big"}}],
    "zstd": [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "zstd", "configuration": {"level": 3}},
    ],
    "gzip": [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "gzip", "configuration": {"level": 5}},
    ],
    "blosc": [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {
            "name": "blosc",
            "configuration": {
                "cname": "zlib", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 0,
            },
        },
    ],
    "crc32c": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
}  # fmt: skip


@pytest.mark.parametrize("codec", ["raw", "big-endian", "zstd", "gzip", "crc32c"])
@pytest.mark.parametrize("chunks", [[4, 3, 8, 8], [1, 3, 8, 8], [2, 2, 8, 8]])
@pytest.mark.parametrize("fill_value", [1.5, "NaN", "0x3fc0"])
def test_bfloat16_is_read(codec: str, chunks: list[int], fill_value: Any, tmp_path: Path) -> None:
    metadata = {
        "shape": list(SHAPE),
        "data_type": "bfloat16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "codecs": TENSORSTORE_CODECS[codec],
        "fill_value": fill_value,
    }
    array = _tensorstore(tmp_path / "x", metadata=metadata, create=True)
    array[:7].write(np.random.default_rng(0).normal(size=SHAPE).astype("bfloat16")[:7]).result()
    values = array.read().result()
    how: Any = {"fields": {"x": "x"}}
    with precache.Loader(tmp_path, 13, shuffle=False, device="cpu", **how) as loader:
        [batch] = list(loader)
    dataset = precache.CachedDataset(tmp_path, **how)
    for tensor in (batch["x"], dataset.collate(dataset.__getitems__(range(13)))["x"]):
        assert tensor.dtype == torch.bfloat16
        np.testing.assert_array_equal(tensor.float().numpy(), values.astype(np.float32))


def test_bfloat16_without_ml_dtypes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tensorstore(tmp_path / "x", metadata={"shape": [3], "data_type": "bfloat16"}, create=True)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(StoreError, match=r"'bfloat16', for which ml_dtypes is needed: pip install"):
        precache.store.open.open_version(tmp_path, {"x": "x"})


@pytest.mark.parametrize("name", ["default", "v2"])
@pytest.mark.parametrize("separator", ["/", "."])
def test_both_ways_to_name_chunks_are_read(name: str, separator: str, tmp_path: Path) -> None:
    values = _values("uint8")
    encoding = {"name": name, "separator": separator}
    _write(tmp_path, values, chunks=(2, 3, 4, 8), chunk_key_encoding=encoding)
    _assert_reads(tmp_path, values)


@pytest.mark.parametrize("codec", TENSORSTORE_CODECS)
@pytest.mark.parametrize("location", [None, "start", "end"])
@pytest.mark.parametrize("row", [(3, 8, 8), (2, 8, 5)])
def test_arrays_of_tensorstore_are_read(
    codec: str, location: str | None, row: tuple[int, ...], tmp_path: Path
) -> None:
    values = _values("int32") - 100
    codecs = TENSORSTORE_CODECS[codec]
    grid = [4, *row]
    if location is not None:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        configuration = {
            "chunk_shape": [2, *row],
            "codecs": codecs,
            "index_codecs": index,
            "index_location": location,
        }
        codecs = [{"name": "sharding_indexed", "configuration": configuration}]
    metadata = {
        "shape": list(SHAPE),
        "data_type": "int32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid}},
        "codecs": codecs,
    }
    array = _tensorstore(tmp_path / "train" / "pixels", metadata=metadata, create=True)
    array[:9].write(values[:9]).result()
    values[9:] = 0
    _assert_reads(tmp_path, values)


def test_chunks_beyond_the_edge_are_not_taken_for_rows(tmp_path: Path) -> None:
    """An array that was cut in two keeps them, one between each row and the next."""
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    plain = TENSORSTORE_CODECS["raw"]
    configuration = {"chunk_shape": [1, 5], "codecs": plain, "index_codecs": index}
    metadata = {
        "shape": [6, 10],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 10]}},
        "codecs": [{"name": "sharding_indexed", "configuration": configuration}],
    }
    array = _tensorstore(tmp_path / "train" / "pixels", metadata=metadata, create=True)
    values = np.arange(60, dtype=np.uint8).reshape(6, 10)
    array.write(values).result()
    array.resize(exclusive_max=[6, 5]).result()
    reader = _reader(precache.store.open.open_version(tmp_path, {"image": "train/pixels"}))
    for rows in ([0, 1, 2, 3, 4, 5], [1, 2], [5, 4]):
        np.testing.assert_array_equal(read_rows(reader, rows), values[rows, :5])


def test_arrays_of_a_group_are_read_together_and_by_their_names(tmp_path: Path) -> None:
    values, labels = _values("uint8"), np.arange(13, dtype=np.int32) - 1
    _write(tmp_path, values, "data/pixels", chunks=(4, 3, 8, 8))
    _write(tmp_path, labels, "data/labels", chunks=(4,))
    fields = {"image": "data/pixels", "label": "data/labels"}
    with precache.Loader(tmp_path, 4, output="tuple", fields=fields, shuffle=False) as loader:
        batches = list(loader)
    np.testing.assert_array_equal(np.concatenate([image for image, _ in batches]), values)
    np.testing.assert_array_equal(np.concatenate([label for _, label in batches]), labels)
    dataset = precache.CachedDataset(tmp_path, fields=fields)
    np.testing.assert_array_equal(dataset[-1]["image"], values[-1])


@pytest.mark.parametrize("shape", [(13,), (13, 10)])
def test_labels_that_are_no_integers_stay_what_they_are(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    labels = np.linspace(0, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    _write(tmp_path, labels, "label", chunks=shape)
    with precache.Loader(tmp_path, 13, fields={"label": "label"}, shuffle=False) as loader:
        [batch] = list(loader)
    np.testing.assert_array_equal(batch["label"].numpy(), labels)


def test_what_foreign_arrays_lack_is_said(tmp_path: Path) -> None:
    _write(tmp_path, _values("uint8"), chunks=(4, 3, 8, 8))
    version = precache.store.open.open_version(tmp_path, {"image": "train/pixels"})
    assert version.foreign
    assert version.fields["image"].shape == (3, 8, 8)
    assert version.holes == {}
    for ask in (lambda: version.keys[0], lambda: version.labels, lambda: version.recipe):
        with pytest.raises(StoreError, match="was written by other software"):
            ask()


FOREIGN_REFUSALS: dict[str, tuple[dict[str, str], str]] = {
    "no array": ({}, "name at least one array"),
    "missing": ({"image": "train/nothing"}, "there is no Zarr v3 array at .*train/nothing"),
    "a group": ({"image": "train"}, "no Zarr v3 array"),
    "other lengths": ({"image": "train/pixels", "label": "short"}, "differ in rows: image: 13"),
    "complex": ({"image": "complex"}, "complex64"),
    "transposed": ({"image": "turned"}, "transpose"),
    "a name of ours": ({"row": "train/pixels"}, "row"),
}


@pytest.mark.parametrize("case", FOREIGN_REFUSALS)
def test_foreign_arrays_that_cannot_be_read_are_refused(case: str, tmp_path: Path) -> None:
    group = tmp_path / "group"
    _write(group, _values("uint8"), chunks=(4, 3, 8, 8))
    _write(group, np.arange(5), "short", chunks=(5,))
    _write(group, np.ones((13, 40), np.complex64), "complex", chunks=(5, 40))
    transpose = zarr.codecs.TransposeCodec(order=(1, 0))
    _write(group, np.ones((13, 400)), "turned", chunks=(5, 400), filters=[transpose])
    fields, words = FOREIGN_REFUSALS[case]
    with pytest.raises(PrecacheError, match=words):
        precache.Loader(group, 4, fields=fields)


def test_damage_of_foreign_chunks_is_named_too(tmp_path: Path) -> None:
    values = _values("uint8")
    _write(tmp_path, values, chunks=(4, 3, 8, 8), compressors=ZstdCodec(checksum=True))
    path = tmp_path / "train" / "pixels" / "c" / "1" / "0" / "0" / "0"
    flip(path, 0.5, 0x55)
    reader = _reader(precache.store.open.open_version(tmp_path, {"image": "train/pixels"}))
    np.testing.assert_array_equal(read_rows(reader, [0, 12]), values[[0, 12]])
    with pytest.raises(
        DamageError, match=r"c/1/0/0/0 is damaged at row 5.*: restore the file from"
    ):
        read_rows(reader, [5])


def test_a_foreign_chunk_that_is_cut_is_damaged(tmp_path: Path) -> None:
    for number, compressor in enumerate(COMPRESSORS.values()):
        name = f"a{number}"
        _write(tmp_path, _values("uint8"), name, chunks=(1, 3, 8, 8), compressors=compressor)
        path = tmp_path / name / "c" / "2" / "0" / "0" / "0"
        data = path.read_bytes()
        for cut in (0, 1, 3, 5, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:cut])
            reader = _reader(precache.store.open.open_version(tmp_path, {"image": name}))
            with pytest.raises(DamageError):
                read_rows(reader, [2])


@pytest.mark.parametrize("rows", [2**40, 2**60])
def test_a_huge_foreign_array_opens_or_is_refused(rows: int, tmp_path: Path) -> None:
    """Its metadata promise more than any memory holds."""
    zarr.create_array(tmp_path, name="x", shape=(rows, 100), chunks=(1, 100), dtype="uint8")
    with (
        contextlib.suppress(PrecacheError),
        precache.Loader(tmp_path, 2, fields={"x": "x"}, shuffle=False) as loader,
    ):
        assert next(iter(loader))["row"].tolist() == [0, 1]
