"""One contract that every codec passes, on every dtype and kind of buffer; and bytes that stay."""

import itertools
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr.registry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numcodecs import zstd

from precache.codecs import kernels
from precache.codecs.chunk import Decoder, codec_metadata, decoder, encoder, most_stored
from precache.codecs.image import IMAGE_FILTER, filter_image, undo_image
from precache.errors import DamageError, PrecacheError
from precache.loading.slots import undo_image_tensor
from precache.recipe.ops import DTYPES
from precache.recipe.recipe import ImageCodec, RawCodec, ZstdCodec
from tests.codecs.test_kernels import WAYS
from tests.conftest import photo

GOLDEN = Path(__file__).parents[1] / "golden"

Codec = RawCodec | ZstdCodec | ImageCodec
COMBINATIONS: list[tuple[Codec, str]] = [
    *((RawCodec(), dtype) for dtype in DTYPES),
    *((ZstdCodec(), dtype) for dtype in DTYPES),
    (ZstdCodec(level=-5), "uint8"),
    (ZstdCodec(level=22), "float32"),
    (ImageCodec(), "uint8"),
]
every_codec = pytest.mark.parametrize(
    ("codec", "dtype"), COMBINATIONS, ids=lambda value: getattr(value, "name", value)
)


def _chunk(dtype: str, shape: tuple[int, ...] = (2, 3, 8, 6)) -> np.ndarray:
    pixels = np.stack([photo(i, *shape[2:])[..., : shape[1]] for i in range(shape[0])])
    chunk = pixels.transpose(0, 3, 1, 2)
    if dtype == "bool":
        return chunk > 100
    values = chunk // 2 if dtype.startswith("u") else chunk / 7 - 9
    return np.ascontiguousarray(values).astype(dtype)


def _decode(reader: Decoder, data: Any, like: np.ndarray) -> np.ndarray:
    out = np.full(like.shape, 1, like.dtype)
    reader.decode(data, out)
    if reader.filtered:
        undo_image(out)
    return out


# --- the contract -------------------------------------------------------------------------------


@every_codec
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_any_values_and_shapes_come_back(codec: Codec, dtype: str, data: st.DataObject) -> None:
    shapes = st.tuples(*[st.integers(1, n) for n in (3, 4, 5, 5)])
    chunk = data.draw(hnp.arrays(dtype, shapes))
    stored = encoder(codec, dtype)(chunk)
    decoded = _decode(decoder(codec, dtype), memoryview(stored), chunk)
    assert decoded.tobytes() == chunk.tobytes()  # bytes, for NaN with whatever payload


def _blocks(frame: bytes) -> int:
    """How many blocks a zstd frame has (RFC 8878, section 3.1.1)."""
    descriptor = frame[4]
    single = descriptor >> 5 & 1
    place = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[descriptor >> 6]
    count, last = 0, False
    while not last:
        header = int.from_bytes(frame[place : place + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        place += 3 + (1 if kind == 1 else size)
        count += 1
    assert place + 4 == len(frame), "the content checksum ends the frame"
    return count


def test_frames_of_images_have_blocks_of_one_channel_and_compressed_literals() -> None:
    for shape, blocks in (
        ((3, 224, 224), 3), ((3, 145, 150), 3), ((3, 257, 256), 6), ((1, 400, 400), 3),
        ((3, 32, 32), 1),
    ):  # fmt: skip
        noise = np.random.default_rng(0).integers(0, 4, (1, *shape), np.uint8)
        frame = encoder(ImageCodec(), "uint8")(noise)
        assert _blocks(frame) == blocks
        assert len(frame) < 0.6 * noise.nbytes  # nothing repeats: only entropy coding gets there


INPUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda chunk: chunk,
    "strided": lambda chunk: chunk.repeat(2, axis=-1)[..., ::2],
    "channels last": lambda c: np.ascontiguousarray(c.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
    "Fortran order": np.asfortranarray,
    "negative strides": lambda chunk: np.ascontiguousarray(chunk[:, :, ::-1])[:, :, ::-1],
    "read-only": lambda chunk: np.frombuffer(chunk.tobytes(), chunk.dtype).reshape(chunk.shape),
    "subclass": lambda chunk: chunk.copy().view(np.memmap),
}


def _mapped(data: bytes) -> memoryview:
    mapped = mmap.mmap(-1, len(data))
    mapped[:] = data
    return memoryview(mapped)


BUFFERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "writable memoryview": lambda data: memoryview(bytearray(data)),
    "slice": lambda data: memoryview(b"\1" + data + b"\1")[1:-1],
    "array": lambda data: memoryview(np.frombuffer(data, np.uint8)),
    "memory map": _mapped,
}


@every_codec
def test_chunks_come_back_whatever_arrays_and_buffers_hold_them(codec: Codec, dtype: str) -> None:
    """Written into the caller's buffer and nothing beside it, by codecs that zarr knows."""
    chunk, encode, reader = _chunk(dtype), encoder(codec, dtype), decoder(codec, dtype)
    stored = encode(chunk)
    encode(np.zeros_like(chunk))
    assert isinstance(stored, bytes)
    for of_kind in INPUTS.values():
        given_array = of_kind(chunk)
        assert encode(given_array) == encoder(codec, dtype)(given_array) == stored
        np.testing.assert_array_equal(given_array, _chunk(dtype))
    for of_kind in BUFFERS.values():
        room = np.zeros((4, *chunk.shape[1:]), dtype)
        reader.decode(of_kind(stored), room[1:3])
        if reader.filtered:
            undo_image(room[1:3])
        np.testing.assert_array_equal(room[1:3], chunk)
        assert not room[[0, 3]].any()
    for each in codec_metadata(codec, dtype):
        assert zarr.registry.get_codec_class(each["name"]).from_dict(each) is not None


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [pair for pair in COMBINATIONS[:-3] if pair[1] in ("uint8", "float32")] + COMBINATIONS[-1:],
)
def test_no_damage_reaches_a_pixel(codec: Codec, dtype: str) -> None:
    """A changed byte, another length, or a whole chunk of another size."""
    chunk = _chunk(dtype, (1, 3, 8, 6))
    stored, reader = encoder(codec, dtype)(chunk), decoder(codec, dtype)
    for flip in (0x01, 0x20, 0x80, 0xFF):
        unnoticed = 0
        for position in range(len(stored)):
            data = bytearray(stored)
            data[position] ^= flip
            try:
                decoded = _decode(reader, memoryview(data), chunk)
            except DamageError:
                continue
            np.testing.assert_array_equal(decoded, chunk)
            unnoticed += 1
        # Some bits of a zstd frame say how to decode it and not what: these may change unnoticed.
        assert unnoticed <= 2 * reader.codecs.count("zstd")
    others = [encoder(codec, dtype)(_chunk(dtype, (rows, 3, 8, 6))) for rows in (2, 3)]
    longer = [stored + b"\0", stored + stored]
    for data in [*(stored[:n] for n in range(len(stored))), *longer, *others]:
        with pytest.raises(DamageError, match="a chunk does not decode"):
            _decode(reader, memoryview(data), chunk)
    with pytest.raises(DamageError, match="a chunk does not decode"):
        _decode(reader, memoryview(stored), _chunk(dtype))


def test_without_verifying_only_a_crc32c_is_left_out() -> None:
    chunk = _chunk("uint8")
    stored = bytearray(encoder(RawCodec(), "uint8")(chunk))
    stored[5] ^= 1
    out = np.empty_like(chunk)
    decoder(RawCodec(), "uint8").decode(memoryview(stored), out, verify=False)
    assert (out != chunk).sum() == 1
    framed = bytearray(encoder(ImageCodec(), "uint8")(chunk))
    framed[-1] ^= 1
    with pytest.raises(DamageError):
        decoder(ImageCodec(), "uint8").decode(memoryview(framed), out, verify=False)


@given(st.binary(max_size=64), st.sampled_from(["zstd", "blosc", "crc32c"]))
def test_bytes_of_nothing_end_in_a_damage_error(data: bytes, name: str) -> None:
    with pytest.raises(DamageError):
        Decoder((name,)).decode(memoryview(data), np.empty(1000, np.uint8))


def test_what_the_image_codec_would_spoil_is_refused() -> None:
    with pytest.raises(PrecacheError):
        encoder(ImageCodec(), "float32")(_chunk("float32"))
    with pytest.raises(ValueError, match="not contiguous"):
        undo_image(np.zeros((2, 3, 8, 16), np.uint8)[..., ::2])


def test_what_does_not_compress_takes_no_more_than_may_be_stored() -> None:
    for size, (codec, dtype) in itertools.product([1, 100, 10_000, 1 << 20], COMBINATIONS):
        if dtype in ("uint8", "float32"):
            noise = np.frombuffer(np.random.default_rng(0).bytes(4 * size), dtype)
            chunk = noise[:size].reshape(1, 1, 1, -1)
            assert len(encoder(codec, dtype)(chunk)) <= most_stored(chunk.nbytes)


# --- the image filter ---------------------------------------------------------------------------


def _filtered(rows: np.ndarray) -> np.ndarray:
    """The filter in words: colours less green, then each line less the line above, modulo 256."""
    plain = rows.astype(np.int64)
    if rows.shape[-3] == 3:
        plain[..., [0, 2], :, :] -= plain[..., 1:2, :, :]
    lines: np.ndarray = np.diff(plain, axis=-2, prepend=0) % 256
    return lines.astype(np.uint8)


MANY = (300, 1, 7, 8), (2, 150, 3, 5, 4), (3, 3, 13, 299), (66, 3, 13, 300), (70, 1, 300, 299)
SHAPES = st.tuples(*[st.integers(*ends) for ends in ((0, 3), (1, 4), (1, 40), (1, 330))])


@given(st.sampled_from(MANY) | SHAPES | SHAPES.map(lambda shape: shape[1:]), st.integers(0, 99))
def test_the_filter_is_the_one_in_words_and_undone_in_every_way(
    shape: tuple[int, ...], seed: int
) -> None:
    """On a device, too, by tensors."""
    rows = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    filtered = filter_image(rows)
    np.testing.assert_array_equal(filtered, _filtered(rows))
    for way in WAYS.values():
        undone = filtered.copy()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "compiled", lambda way=way: way)
            undo_image(undone)
        np.testing.assert_array_equal(undone, rows)
    if rows.ndim > 3:
        tensor = undo_image_tensor(torch.from_numpy(filtered))
        np.testing.assert_array_equal(tensor.numpy(), rows)


def test_the_filter_is_registered_with_zarr() -> None:
    codec = zarr.registry.get_codec_class(IMAGE_FILTER)
    made = codec.from_dict({"name": IMAGE_FILTER, "configuration": {"version": 1}})
    assert made.to_dict() == {"name": IMAGE_FILTER, "configuration": {"version": 1}}
    with pytest.raises(ValueError, match="version 9"):
        codec.from_dict({"name": IMAGE_FILTER, "configuration": {"version": 9}})


# --- stored data stays readable -----------------------------------------------------------------

STORED: dict[str, tuple[Codec, str, tuple[int, ...]]] = {
    "image_rgb": (ImageCodec(), "uint8", (1, 3, 20, 14)),
    "image_grey": (ImageCodec(), "uint8", (2, 1, 9, 7)),
    "raw": (RawCodec(), "uint8", (1, 3, 4, 5)),
    "zstd": (ZstdCodec(), "uint8", (4, 3, 6, 5)),
    "zstd_float32": (ZstdCodec(), "float32", (4, 3, 6, 5)),
}


def write_golden() -> None:
    """Make the files anew; only ever for a codec that is new."""
    GOLDEN.mkdir(exist_ok=True)
    for name, (codec, dtype, shape) in STORED.items():
        chunk = _chunk(dtype, shape)
        (GOLDEN / f"{name}.stored.bin").write_bytes(encoder(codec, dtype)(chunk))
        (GOLDEN / f"{name}.pixels.bin").write_bytes(chunk.tobytes())


@pytest.mark.parametrize("name", STORED)
def test_what_earlier_releases_stored_is_read(name: str) -> None:
    codec, dtype, shape = STORED[name]
    pixels = np.frombuffer((GOLDEN / f"{name}.pixels.bin").read_bytes(), dtype)
    assert pixels.size == math.prod(shape)
    stored = (GOLDEN / f"{name}.stored.bin").read_bytes()
    decoded = _decode(decoder(codec, dtype), memoryview(stored), pixels.reshape(shape))
    np.testing.assert_array_equal(decoded, pixels.reshape(shape))
    if isinstance(codec, ImageCodec):  # a frame is the filter and plain zstd
        residue = np.frombuffer(zstd.decompress(stored), np.uint8).reshape(shape)
        np.testing.assert_array_equal(residue, _filtered(decoded))
