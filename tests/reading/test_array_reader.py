"""Shards are plain Zarr: other software reads them, and damage has a name."""

import errno
import mmap
import os
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
import xxhash
import zarr
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.codecs import kernels
from precache.codecs.chunk import encoder
from precache.errors import DamageError, StorageError
from precache.reading.array_reader import ArrayReader
from precache.reading.shard_files import shard_files
from precache.recipe.recipe import RawCodec
from precache.storage import local_files
from precache.storage.local_files import map_file
from precache.store.layout import decode_index
from precache.store.shard_writer import ShardWriter
from tests.conftest import BuiltStore
from tests.support.building import flip
from tests.support.stored import checks_of

CopyStore = Callable[[BuiltStore], BuiltStore]


def _reader(store: BuiltStore) -> ArrayReader:
    return ArrayReader(store.open(), "image")


def read_rows(reader: ArrayReader, rows: Any) -> np.ndarray:
    numbers = np.asarray(rows, np.int64)
    out = np.full((len(numbers), *reader.array.row_shape), 77, reader.array.dtype)
    reader.read(numbers, out)
    return out


# --- other software reads ours ------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "zstd", "image"])
@pytest.mark.parametrize("kind", ["stores", "tile_stores"])
def test_other_software_reads_the_pixels_and_all_else(
    kind: str, codec: str, request: pytest.FixtureRequest
) -> None:
    """And lists the group without a warning, which is an error here."""
    store: BuiltStore = request.getfixturevalue(kind)[codec]
    folder, expected, version = store.version_folder, store.rows(), store.open()
    array = zarr.open_array(folder / "image", mode="r")
    np.testing.assert_array_equal(array[:], expected)
    assert array.metadata.dimension_names == ("row", "channel", "height", "width")
    if codec != "image":
        np.testing.assert_array_equal(_tensorstore(folder / "image").read().result(), expected)
    group = zarr.open_group(folder, mode="r")
    assert set(dict(group.members())) >= {"image", "label", "valid", "key", "shards"}
    for name, values in (("label", version.labels), ("valid", version.valid)):
        np.testing.assert_array_equal(group[name][:], values)
        np.testing.assert_array_equal(_tensorstore(folder / name).read().result(), values)
    leaves = version.shard_leaves("image")
    stored = [[leaf.size, leaf.xxh3 >> 64, leaf.xxh3 & 2**64 - 1] for leaf in leaves]
    assert group["shards/image"][:].tolist() == stored
    checks = np.stack([version.checks("image", number) for number in range(len(leaves))])
    np.testing.assert_array_equal(group["_checks/image"][:], checks)
    assert group["key"][:].tolist() == list(version.keys)


def _tensorstore(path: Path, **spec: Any) -> Any:
    kvstore = {"driver": "file", "path": str(path)}
    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore, **spec}).result()


def test_the_stores_have_what_makes_them_hard(
    stores: dict[str, BuiltStore], tile_stores: dict[str, BuiltStore]
) -> None:
    for store, shard, chunk in ((stores["raw"], 8, 1), (tile_stores["raw"], 32, 16)):
        version = store.open()
        array = _reader(store).array
        assert (array.object_rows, array.chunk_rows) == (shard, chunk)
        assert version.rows % shard
        assert len(version.holes) == 2
        black = version.keys.index("cat/0000.png")
        assert version.valid[black]
        assert not store.rows()[black].any()


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


@pytest.mark.parametrize("name", ["image", "half", "single", "wide", "narrow"])
def test_fields_of_every_dtype_are_the_same_to_every_reader(
    name: str, many_fields: BuiltStore
) -> None:
    pixels, dtype = many_fields.rows(), many_fields.open().fields[name].dtype
    expected = (pixels / 255 if dtype.startswith("float") else pixels).astype(dtype)
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
    written, rest = np.split(index, [-(-rows // per_chunk)])
    ends = np.cumsum(written[:, 1])
    assert written[:, 0].tolist() == [0, *ends[:-1].tolist()], "one behind another"
    assert int(ends[-1]) + 16 * chunks + 4 == made.size
    assert (rest == 2**64 - 1).all()
    values = [np.frombuffer(stored[o : o + n - 4], "<i2") for o, n in written.tolist()]
    padded = np.zeros((len(written) * per_chunk, 3), int)
    padded[:rows] = np.arange(rows)[:, None]
    np.testing.assert_array_equal(np.concatenate(values).reshape(-1, 3), padded)
    assert made.raw_nbytes == padded.size * 2
    np.testing.assert_array_equal(made.ends, checks_of(stored, chunks))


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("codec", ["raw", "zstd", "image"])
def test_rows_come_in_the_order_asked_for_and_as_often(
    codec: str,
    mapped: bool,
    stores: dict[str, BuiltStore],
    tile_stores: dict[str, BuiltStore],
) -> None:
    """To several threads, too; filtered ones as they are where that is asked for."""
    for store in (stores[codec], tile_stores[codec]):
        version, expected = store.open(), store.rows()
        reader = ArrayReader(version, "image", shard_files(version, "image", mapped=mapped))
        random = np.random.default_rng(0)
        orders = [random.integers(0, len(expected), count) for count in (1, 2, 3, 70, 150)]
        with ThreadPoolExecutor(3) as pool:
            for rows, pixels in zip(
                orders, pool.map(partial(read_rows, reader), orders), strict=True
            ):
                np.testing.assert_array_equal(pixels, expected[rows])
        assert read_rows(reader, []).shape == (0, *expected.shape[1:])
        out = np.empty_like(expected[:5])
        reader.read(np.arange(5), out, undo=False)
        assert reader.filtered == (codec == "image") == (out != expected[:5]).any()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_shard_that_another_iterator_lets_go_of_is_opened_again(
    stores: dict[str, BuiltStore], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "compiled", kernels.Compiled)
    reader, expected = _reader(stores["raw"]), stores["raw"].rows()
    unchecked = reader._objects.checks

    def let_go(*where: np.ndarray) -> np.ndarray:
        reader._objects.forget(0)
        return unchecked(*where)

    monkeypatch.setattr(reader._objects, "checks", let_go)
    for _ in range(3):
        np.testing.assert_array_equal(read_rows(reader, [0, 9, 1]), expected[[0, 9, 1]])
    monkeypatch.undo()
    np.testing.assert_array_equal(read_rows(reader, [2, 1, 9]), expected[[2, 1, 9]])


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a path cannot list what vanishes


def test_a_mapped_file_holds_no_descriptor_and_may_lie_on_a_disk_that_shares_no_maps(
    image_store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_memory, before = local_files.map_memory, _descriptors()

    def unshared(nbytes: int, flags: int, descriptor: int) -> int:
        if flags & mmap.MAP_SHARED:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return map_memory(nbytes, flags, descriptor)

    maps = dict[Path, np.ndarray]()
    for number in range(3):
        if number == 2:
            monkeypatch.setattr(local_files, "map_memory", unshared)
        with (path := image_store.shard_path(number)).open("rb") as file:
            maps[path] = map_file(file.fileno())
    assert _descriptors() <= before  # fewer, where a server of other tests closes connections
    assert all(mapped.tobytes() == path.read_bytes() for path, mapped in maps.items())


LIMITED = """
import resource, sys
from pathlib import Path
from precache.storage.local_files import map_file

[line] = [l for l in Path("/proc/self/status").read_text().splitlines() if "VmData" in l]
resource.setrlimit(resource.RLIMIT_DATA, ((int(line.split()[1]) << 10) + (1 << 30), -1))
with open(sys.argv[1], "rb") as file:
    mapped = map_file(file.fileno())
maps = Path("/proc/self/maps").read_text().splitlines()
[access] = [l.split()[1] for l in maps if sys.argv[1] in l]
print(access, mapped[0], len(mapped) >> 30)
"""


def test_a_file_longer_than_the_data_limit_is_read(tmp_path: Path) -> None:
    """As under `ulimit -d` or strict overcommit."""
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.write(b"\7")
        file.truncate(8 << 30)
    script = [sys.executable, "-c", LIMITED, str(path)]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("r--s 7 8\n", 0), done.stderr


# --- damage -------------------------------------------------------------------------------------


@pytest.fixture
def own(copy_store: CopyStore, store: BuiltStore) -> BuiltStore:
    """A store that may be damaged, once for each codec."""
    return copy_store(store)


@pytest.mark.skipif(not kernels.compiled().has_zstd, reason="numcodecs checks every frame")
def test_what_was_read_is_not_checked_again_by_its_reader(own: BuiltStore) -> None:
    """Neither the checksum of a frame, nor that of raw rows; by others it is."""
    path, expected = own.shard_path(0), own.rows()
    raw = own.open().fields["image"].codec == "raw"
    reader, index = _reader(own), np.frombuffer(path.read_bytes()[-132:-4], "<u8")
    np.testing.assert_array_equal(read_rows(reader, [0, 3]), expected[[0, 3]])
    # In place, where it is mapped: a byte of a raw row, or of a frame's checksum.
    flip(path, 5 if raw else int(index[:2].sum()) - 1, 0x55)
    assert (read_rows(reader, [3, 0]) != expected[[3, 0]]).sum() == raw
    [damage] = precache.verify(own.path).damage
    assert damage.keys == (own.open().keys[0],)
    with pytest.raises(DamageError):
        read_rows(_reader(own), [0])


def test_bytes_that_are_read_anew_are_checked_anew(own: BuiltStore) -> None:
    dataset = precache.CachedDataset(own.path, access="pread")
    for path in map(own.shard_path, range(3)):
        assert len(list(dataset)) == len(dataset)  # type: ignore[call-overload]
        flip(path, 20, 0x55)
        with pytest.raises(DamageError, match="is damaged at row"):
            list(dataset)  # type: ignore[call-overload]
        flip(path, 20, 0x55)


def test_a_shard_that_is_a_folder_or_unreadable_is_an_error_of_ours(own: BuiltStore) -> None:
    path = own.shard_path(0)
    path.unlink()
    path.mkdir()
    with pytest.raises((StorageError, DamageError), match=str(path)):
        read_rows(_reader(own), [0])


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_one_reader_checked_no_other_one_of_the_process_checks_again(
    stores: dict[str, BuiltStore], copy_store: CopyStore, codec: str
) -> None:
    store = copy_store(stores[codec])
    path = store.shard_path(0)

    def checked(*rows: int) -> list[int]:
        """The chunks of the first shard that are checked once a new reader has read rows."""
        reader = _reader(store)
        read_rows(reader, rows)
        return np.flatnonzero(reader._objects.checked[0]).tolist()

    assert checked(0, 1, 5) == [0, 1, 5]
    assert checked(7) == checked(7) == [0, 1, 5, 7]
    path.write_bytes(path.read_bytes())  # as it was, and yet another file
    assert checked(7) == [7]


def test_a_forged_index_leads_nowhere(own: BuiltStore) -> None:
    path, expected = own.shard_path(0), own.rows()
    whole = path.read_bytes()
    for offset, length in (
        (2**63, 5), (0, 2**62), (2**64 - 2, 10), (2**64 - 1, 2**64 - 1), (0, 0), (5, 3), (10**6, 9),
    ):  # fmt: skip
        index = np.frombuffer(whole[-132:-4], "<u8").reshape(8, 2).copy()
        index[3] = offset, length
        body = index.tobytes()
        path.write_bytes(whole[:-132] + body + google_crc32c.value(body).to_bytes(4, "little"))
        with pytest.raises(DamageError, match="image/c/0/0/0/0"):
            read_rows(_reader(own), [3])
        with (
            precache.Loader(own.path, batch_size=8, shuffle=False) as loader,
            pytest.raises(DamageError, match="image/c/0/0/0/0"),
        ):
            list(loader)
        for row in (0, 2, 4, 7):
            np.testing.assert_array_equal(read_rows(_reader(own), [row])[0], expected[row])
