"""Hostile arrays of other software: whatever they promise or hold ends in a `StoreError` or a
`DamageError`, in little memory, however their chunks are read."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc, zstd
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

import precache
from precache.codecs.chunk import bounds, decoder
from precache.codecs.zarr_plugin import ImageFilter
from precache.errors import DamageError, PrecacheError, StoreError, UsageError
from precache.runtime.usage import available_bytes
from precache.store.layout import encode_index
from tests.store.test_forged import HOSTILE
from tests.support.mutations import places

SHAPE = (6, 3, 8, 8)
ROW = 192

KINDS: dict[str, dict[str, Any]] = {
    "raw": {"chunks": (2, 3, 8, 8), "compressors": None},
    "crc32c": {"chunks": (1, 3, 8, 8), "shards": (3, 3, 8, 8), "compressors": Crc32cCodec()},
    "zstd": {"chunks": (1, 3, 8, 8), "compressors": ZstdCodec(checksum=True)},
    "zstd in shards": {"chunks": (1, 3, 8, 8), "shards": (3, 3, 8, 8), "compressors": ZstdCodec()},
    "gzip": {"chunks": (2, 3, 8, 8), "compressors": GzipCodec()},
    "blosc": {"chunks": (3, 3, 8, 8), "compressors": BloscCodec(cname="lz4")},
    "zstd in gzip in zstd": {
        "chunks": (2, 3, 8, 8), "compressors": [ZstdCodec(), GzipCodec(), ZstdCodec()],
    },
    "blosc in crc32c in blosc": {
        "chunks": (2, 3, 8, 8), "compressors": [BloscCodec(), Crc32cCodec(), BloscCodec()],
    },
    "image": {"chunks": (2, 3, 4, 8), "compressors": ZstdCodec(), "filters": [ImageFilter()]},
}  # fmt: skip


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A group with an array of each kind."""
    root = tmp_path_factory.mktemp("arrays")
    values = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)
    for number, how in enumerate(KINDS.values()):
        zarr.create_array(root, name=str(number), shape=SHAPE, dtype="uint8", **how)[:] = values
    return root


@pytest.fixture
def own(arrays: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A group with a copy of the array of a kind, called x."""

    def copied(kind: str) -> Path:
        number = list(KINDS).index(kind)
        shutil.copytree(arrays / str(number), tmp_path / "group/x")
        return tmp_path / "group"

    return copied


def by_loader(group: Path, **how: Any) -> None:
    with precache.Loader(group, 2, fields={"x": "x"}, device="cpu", num_threads=2, **how) as loader:
        for _, _ in zip(range(4), loader, strict=False):
            pass


def by_ranges(group: Path) -> None:
    by_loader(group, access="pread")


def by_dataset(group: Path) -> None:
    dataset = precache.CachedDataset(group, fields={"x": "x"})
    for row in range(min(6, len(dataset))):
        dataset[row]


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """What would take more than a few hundred megabytes, maps of files left out, has none."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most = pages * resource.getpagesize() + (512 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


USES: list[Callable[[Path], None]] = [by_loader, by_ranges, by_dataset]
ANY_USE = pytest.mark.parametrize("use", USES)


# --- what a chunk holds -------------------------------------------------------------------------

ZEROS = 2 << 30


def gzipped_zeros(count: int) -> bytes:
    """The same megabyte over and over; what ends the stream is not there to be reached."""
    packer = zlib.compressobj(9, wbits=-15)
    once = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08" + bytes(7) + once * (count >> 20)


def claiming(count: int) -> bytes:
    """A zstd frame that says it holds so many bytes."""
    return b"\x28\xb5\x2f\xfd\xe0" + count.to_bytes(8, "little") + bytes(40)


def repeated(count: int) -> bytes:
    """A zstd frame of so many zeros, which does not say how many they are."""
    blocks = [(128 << 10 << 3 | 2).to_bytes(3, "little") + b"\0"] * (count >> 17)
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks) + b"\x01\x00\x00"


def blosc_claiming(count: int) -> bytes:
    data = bytearray(blosc.compress(bytes(1000), b"lz4", 5, blosc.SHUFFLE))
    data[4:8] = count.to_bytes(4, "little")
    return bytes(data)


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "gzip": ("gzip", lambda: gzipped_zeros(ZEROS)),
    "gzip, cut short": ("gzip", lambda: gzip.compress(bytes(2 * ROW))[:-9]),
    "zstd that says so": ("zstd", lambda: claiming(10**12)),
    "zstd that does not": ("zstd", lambda: repeated(ZEROS)),
    "zstd twice": ("zstd", lambda: bytes(zstd.compress(bytes(ROW), 1)) + claiming(10**12)),
    "blosc": ("blosc", lambda: blosc_claiming(2**31 - 1)),
    "zstd around": ("zstd in gzip in zstd", lambda: claiming(10**12)),
    "zstd around, of no size": ("zstd in gzip in zstd", lambda: repeated(ZEROS)),
    "zstd around, twice": (
        "zstd in gzip in zstd",
        lambda: bytes(zstd.compress(bytes(ROW), 1)) + claiming(10**12),
    ),
    "gzip within": (
        "zstd in gzip in zstd", lambda: bytes(zstd.compress(gzipped_zeros(512 << 20)[:1200], 1)),
    ),
    "zstd within": (
        "zstd in gzip in zstd", lambda: bytes(zstd.compress(gzip.compress(claiming(10**12)), 1)),
    ),
    "blosc around": ("blosc in crc32c in blosc", lambda: blosc_claiming(2**31 - 1)),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
@ANY_USE
def test_a_chunk_that_expands_to_more_than_was_promised(
    bomb: str, use: Callable[[Path], None], own: Callable[[str], Path]
) -> None:
    kind, data = BOMBS[bomb]
    group = own(kind)
    (group / "x/c/0/0/0/0").write_bytes(data())
    with little_memory(), pytest.raises(DamageError, match=r"x/c/0/0/0/0 is damaged at row \d"):
        use(group)


def test_a_gzip_bomb_of_a_plausible_size_ends_when_the_chunk_is_full() -> None:
    """What is stored is not longer than what belongs there."""
    bomb = gzipped_zeros(ZEROS)
    out = np.empty(len(bomb), np.uint8)
    decode = decoder([{"name": "bytes"}, {"name": "gzip"}], 1, "x").decode
    with little_memory(), pytest.raises(DamageError, match=f"more than {len(bomb)} bytes"):
        decode(memoryview(bomb), out)


@pytest.mark.parametrize("size", [1, 100, 10_000, 1 << 20])
def test_what_does_not_compress_stays_within_its_bounds(size: int) -> None:
    noise = np.random.default_rng(0).bytes(size)
    for name, data in (
        ("gzip", gzip.compress(noise, 0)),
        ("gzip", gzip.compress(noise)),
        ("zstd", zstd.compress(noise, 1, True)),
        ("zstd", zstd.compress(noise, 19, True)),
        ("blosc", blosc.compress(noise, b"lz4", 9, blosc.BITSHUFFLE, 0, 8)),
        ("blosc", blosc.compress(noise, b"blosclz", 1, blosc.SHUFFLE, 256, 8)),
    ):
        assert len(data) <= bounds((name,), size)[1]


# --- what the metadata promise ------------------------------------------------------------------


def document(shape: list[int], chunks: list[int], shards: list[int] | None = None) -> Any:
    codecs: list[Any] = [{"name": "bytes"}, {"name": "zstd"}]
    if shards is not None:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        inside = {"chunk_shape": chunks, "codecs": codecs, "index_codecs": index}
        codecs = [{"name": "sharding_indexed", "configuration": inside}]
    return {
        "zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shards or chunks}},
        "chunk_key_encoding": {"name": "default"}, "fill_value": 0, "codecs": codecs,
    }  # fmt: skip


PROMISES: dict[str, tuple[Any, ...]] = {
    "rows of ten billion chunks": ([6, 10**5, 10**5], [1, 1, 1]),
    "rows of ten billion chunks in shards": ([6, 10**5, 10**5], [1, 1, 1], [1, 10**5, 10**5]),
    "rows of none of very many chunks": ([6, 0, 2**40], [1, 1, 8]),
    "rows of ten terabytes": ([6, 10**13], [1, 10**13]),
    "rows of ten terabytes in a few chunks": ([6, 10**13], [1, 10**10]),
    "chunks of ten terabytes": ([6, 10], [10**12, 10]),
    "chunks wider than rows by far": ([6, 10], [1, 10**13]),
    "more bytes than numbers count": ([2**62, 2**62], [1, 2**62]),
    "chunks of more bytes than numbers count": ([6, 10], [2**62, 2**62]),
    "a trillion objects": ([10**12, 100], [1, 100]),
    "a trillion labels": ([10**12], [10**6]),
    "a hundred thousand labels, an object each": ([100_000], [1]),
    "millions of labels in shards of chunks": ([1 << 24, 2], [2, 2], [1 << 24, 2]),
    "a trillion chunks in a shard": ([10**12, 100], [1, 100], [10**12, 100]),
    "many shards of many chunks": ([10**15, 2], [1, 2], [1 << 26, 2]),
    "forty axes": ([1] * 40, [1] * 40),
    "a thousand axes": ([1] * 1000, [1] * 1000),
}


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("codecs", [["zstd"], ["gzip", "gzip"], ["crc32c"], []])
@ANY_USE
def test_metadata_that_promise_what_no_memory_holds(
    promise: str, codecs: list[str], use: Callable[[Path], None], tmp_path: Path
) -> None:
    promised = document(*PROMISES[promise])
    inside = promised["codecs"]
    if inside[0]["name"] == "sharding_indexed":
        inside = inside[0]["configuration"]["codecs"]
    inside[1:] = [{"name": name} for name in codecs]
    (tmp_path / "x").mkdir()
    (tmp_path / "x/zarr.json").write_text(json.dumps(promised))
    with little_memory(), pytest.raises(StoreError, match=rf"{tmp_path}/x"):
        use(tmp_path)


@ANY_USE
def test_a_chunk_that_memory_would_hold_were_it_not_limited(
    use: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/zarr.json").write_text(json.dumps(document([6, 300], [2 << 20, 300])))
    with little_memory(), pytest.raises(StoreError, match=rf"no memory for {tmp_path}/x: its 6 r"):
        use(tmp_path)


def test_a_batch_that_no_memory_holds(tmp_path: Path) -> None:
    rows = available_bytes() // (1 << 30) + 1
    array = {"shape": (rows, 1 << 30), "chunks": (1, 1 << 30), "dtype": "uint8"}
    zarr.create_array(tmp_path, name="x", **array)
    with pytest.raises(UsageError, match=rf"a batch of {rows} rows takes \d+ bytes, and \d+ are"):
        precache.Loader(tmp_path, rows, fields={"x": "x"}, device="cpu")


# --- what a shard's index says ------------------------------------------------------------------

EXTENTS = [
    (0, 2**63), (2**63, 1), (2**64 - 2, 2), (1, 2**64 - 1), (2**64 - 1, 1), (0, 0),
    (0, 100 << 30), (100 << 30, 100), (50 << 30, 2**63 - (50 << 30)),
]  # fmt: skip


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("kind", ["crc32c", "zstd in shards"])
@ANY_USE
def test_an_index_that_points_anywhere(
    extent: tuple[int, int], kind: str, use: Callable[[Path], None], own: Callable[[str], Path]
) -> None:
    """In a file that is as long as it says, and takes no disk."""
    group = own(kind)
    path = group / "x/c/0/0/0/0"
    entries = np.array([extent] * 3, np.uint64)
    with path.open("r+b") as file:
        file.truncate(200 << 30)
        file.seek(0, 2)
        file.write(encode_index(entries[:, 0], entries[:, 1]))
    with little_memory(), pytest.raises(DamageError, match=r"x/c/0/0/0/0 is damaged at row [012]"):
        use(group)


@pytest.mark.parametrize("kind", ["raw", "gzip", "zstd", "blosc"])
@ANY_USE
def test_an_object_that_is_longer_than_any_chunk(
    kind: str, use: Callable[[Path], None], own: Callable[[str], Path]
) -> None:
    group = own(kind)
    with (group / "x/c/0/0/0/0").open("r+b") as file:
        file.truncate(200 << 30)
    with little_memory(), pytest.raises(DamageError, match=r"x/c/0/0/0/0 is damaged at row \d"):
        use(group)


# --- any of them --------------------------------------------------------------------------------

NUMBERS = [0, 1, 2, 3, 7, 2**16, 2**31, 2**32 + 1, 10**10, 2**53, 2**63 - 1]


def forge_document(data: st.DataObject, path: Path) -> None:
    forged = json.loads(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        numbers = [(c, k) for c, k in places(forged) if isinstance(c, list) and type(c[k]) is int]
        found = numbers if data.draw(st.booleans()) else list(places(forged))
        if not found:
            return
        container, key = data.draw(st.sampled_from(found))
        forgery = data.draw(st.sampled_from(NUMBERS if found is numbers else HOSTILE))
        container[key] = copy.deepcopy(forgery)  # which may be changed in turn
    path.write_text(json.dumps(forged))


def forge_chunk(data: st.DataObject, path: Path) -> None:
    stored = bytearray(path.read_bytes())
    index = 16 * 3 + 4
    if data.draw(st.booleans()) and len(stored) > index:
        numbers = st.sampled_from([*NUMBERS, len(stored), 2**64 - 1])
        pairs = np.array(data.draw(st.lists(numbers, min_size=6, max_size=6)), np.uint64)
        stored[-index:] = encode_index(pairs[::2], pairs[1::2])
    for _ in range(data.draw(st.integers(0, 4))):
        if not stored:
            break
        at = data.draw(st.integers(0, len(stored) - 1) | st.integers(0, min(20, len(stored) - 1)))
        match data.draw(st.sampled_from(["change", "insert", "delete", "cut"])):
            case "change":
                stored[at] = data.draw(st.integers(0, 255))
            case "insert":
                stored[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            case "delete":
                del stored[at : at + data.draw(st.integers(1, 9))]
            case "cut":
                del stored[at:]
    if data.draw(st.booleans()):  # else a CRC32C would hide what is behind it
        body = bytes(stored[:-4])
        stored[-4:] = int(google_crc32c.value(body)).to_bytes(4, "little")
    path.write_bytes(stored)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("victim") / "group"


@given(data=st.data())
def test_whatever_is_forged_ends_in_words(data: st.DataObject, arrays: Path, victim: Path) -> None:
    shutil.rmtree(victim, ignore_errors=True)
    shutil.copytree(arrays / str(data.draw(st.integers(0, len(KINDS) - 1))), victim / "x")
    if data.draw(st.booleans()):
        forge_document(data, victim / "x/zarr.json")
    if data.draw(st.booleans()):
        forge_chunk(data, data.draw(st.sampled_from(sorted(victim.glob("x/c/*/0/0/0")))))
    with little_memory(), contextlib.suppress(PrecacheError):
        data.draw(st.sampled_from(USES))(victim)
