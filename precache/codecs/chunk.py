"""Chunks of rows <-> bytes: the codecs of recipes.

Encoders make the bytes of one chunk. A `Decoder` decodes into the caller's buffer; the filter of
`image` is left for `image.undo_image`.

Decoding takes no more memory than the chunk's size allows, even if the stored bytes claim more.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numcodecs import blosc, zstd

from precache.codecs import kernels
from precache.codecs.image import (
    IMAGE_FILTER,
    IMAGE_FILTER_VERSION,
    ImageEncoder,
    undo_image,
)
from precache.codecs.jpeg import decode_jpeg
from precache.codecs.raw420 import planes_nbytes, rgb_of
from precache.errors import DamageError, RecipeError
from precache.recipe.recipe import (
    AnyCodec,
    ImageCodec,
    JpegCodec,
    LossyCodec,
    Raw420Codec,
    RawCodec,
    ZstdCodec,
)

Encode = Callable[[np.ndarray], bytes]

RAGGED = "vlen-bytes"
"""Zarr's codec of chunks of byte strings: their number, then length and bytes of each."""

RAGGED_HEAD_NBYTES = 8
"""Bytes before the row in a ragged row's chunk: the number of rows, 1, and the row's length."""

MOST_RAGGED_NBYTES = 2**32 - 1
"""Most bytes of a ragged row, whose length is stored as 32 bits."""


# --- metadata -----------------------------------------------------------------------------------


def index_codecs() -> list[dict[str, Any]]:
    """Return the Zarr v3 `index_codecs` of a shard."""
    return [_bytes(), _crc32c()]


def _bytes() -> dict[str, Any]:
    return {"name": "bytes", "configuration": {"endian": "little"}}


def _crc32c() -> dict[str, Any]:
    return {"name": "crc32c"}


def _zstd(level: int) -> dict[str, Any]:
    return {"name": "zstd", "configuration": {"level": level, "checksum": True}}


def codec_metadata(codec: AnyCodec, dtype: str, *, ragged: bool = False) -> list[dict[str, Any]]:
    """Return the Zarr v3 `codecs` of one chunk; those of ragged rows know no dtype or filter."""
    size = np.dtype(dtype).itemsize
    if ragged:
        level = codec.level if isinstance(codec, ZstdCodec) else 1
        last = _crc32c() if isinstance(codec, RawCodec | LossyCodec) else _zstd(level)
        return [{"name": RAGGED, "configuration": {}}, last]
    match codec:
        case RawCodec():
            return [_bytes(), _crc32c()]
        case ZstdCodec() if size == 1:
            return [_bytes(), _zstd(codec.level)]
        case ZstdCodec():
            configuration = {
                "cname": "zstd",
                "clevel": _clevel(codec),
                "shuffle": "shuffle",
                "typesize": size,
                "blocksize": 0,
            }
            return [_bytes(), {"name": "blosc", "configuration": configuration}, _crc32c()]
        case ImageCodec():
            image = {"name": IMAGE_FILTER, "configuration": {"version": IMAGE_FILTER_VERSION}}
            return [image, _bytes(), _zstd(1)]
        case JpegCodec() | Raw420Codec():
            raise _only_ragged(codec)


def _only_ragged(codec: LossyCodec) -> RecipeError:
    return RecipeError(f"codec '{codec.name}' stores ragged rows, and no chunks of several")


def _clevel(codec: ZstdCodec) -> int:
    return min(9, max(1, codec.level))


# --- encoding -----------------------------------------------------------------------------------


def _encode_raw(chunk: np.ndarray) -> bytes:
    return _with_crc32c(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)


def _with_crc32c(data: bytes | memoryview) -> bytes:
    return b"".join((data, kernels.crc32c(data).to_bytes(4, "little")))


def encoder(codec: AnyCodec, dtype: str) -> Encode:
    """Return the function that encodes a (rows, ...) little-endian chunk; not thread-safe."""
    size = np.dtype(dtype).itemsize
    match codec:
        case RawCodec():
            return _encode_raw
        case ZstdCodec() if size == 1:
            return lambda chunk: bytes(
                zstd.compress(np.ascontiguousarray(chunk), codec.level, True)
            )
        case ZstdCodec():
            compress = partial(
                blosc.compress, cname=b"zstd", clevel=_clevel(codec), shuffle=blosc.SHUFFLE,
                typesize=size,
            )  # fmt: skip
            return lambda chunk: _with_crc32c(bytes(compress(np.ascontiguousarray(chunk))))
        case ImageCodec():
            if dtype != "uint8":
                raise RecipeError(f"codec 'image' stores uint8, not {dtype}; use zstd or raw")
            return ImageEncoder()
        case JpegCodec() | Raw420Codec():
            raise _only_ragged(codec)


def ragged_encoder(codec: AnyCodec) -> Encode:
    """Return the function that encodes one ragged row, C-contiguous, as a chunk; not thread-safe.

    `image` stores rows that are (C, H, W) uint8. `jpeg` and `raw420` are given the bytes that they
    store: (n,) uint8.
    """
    encode_image = ImageEncoder()

    def encode(row: np.ndarray) -> bytes:
        head = _ragged_head(row.nbytes)
        if isinstance(codec, ImageCodec) and row.size:
            return encode_image(row, head)
        payload = b"".join((head, row.reshape(-1).view(np.uint8).data))
        if isinstance(codec, RawCodec | LossyCodec):
            return _with_crc32c(payload)
        level = codec.level if isinstance(codec, ZstdCodec) else 1
        return bytes(zstd.compress(payload, level, True))

    return encode


def _ragged_head(nbytes: int) -> bytes:
    return struct.pack("<II", 1, nbytes)


# --- decoding -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """Decodes one chunk of an array into the caller's buffer.

    Attributes
    ----------
    codecs
        Names of the bytes -> bytes codecs, in the order they were applied when writing: a
        compressor, a CRC32C, or both.
    filtered
        `undo_image` is still to be applied to the output of `decode`.
    ragged
        A chunk is one row of any shape: `decode_ragged` decodes it, and undoes the filter.
    jpeg
        A ragged row is a JPEG file.
    halves
        A ragged row is stored as `raw420.planes_of` returns it.
    """

    codecs: tuple[str, ...]
    filtered: bool = False
    ragged: bool = False
    jpeg: bool = False
    halves: bool = False

    @functools.cached_property
    def plain(self) -> bool:
        """True if a chunk's bytes are the rows themselves, with a CRC32C behind them."""
        return self.codecs == ("crc32c",) and not self.ragged

    @property
    def framed(self) -> bool:
        """True if a chunk is a zstd frame of the rows, apart from the image filter."""
        return self.codecs == ("zstd",) and not self.ragged

    def decode(self, data: memoryview, out: np.ndarray, *, verify: bool = True) -> None:
        """Decode one chunk.

        Parameters
        ----------
        data
            Stored bytes.
        out
            C-contiguous array of the chunk's shape and dtype.
        verify
            Check CRC32C checksums. zstd's content checksum is always checked.

        Raises
        ------
        DamageError
            The bytes are not what was written.
        """
        plain = out.reshape(-1).view(np.uint8)
        try:
            if "crc32c" in self.codecs:
                data = _strip_crc32c(data, verify)
            if "zstd" in self.codecs:
                same = zstd_content_size(data) in (None, plain.nbytes)
                _require(same, "its frame is another size")
                zstd.decompress(data, plain)
            elif "blosc" in self.codecs:
                same = _blosc_sizes(data) == (plain.nbytes, len(data))
                _require(same, "its buffer is another size")
                blosc.decompress(data, plain)
            else:
                _require(
                    len(data) == plain.nbytes, f"{len(data)} bytes where {plain.nbytes} belong"
                )
                plain[:] = np.frombuffer(data, np.uint8)
        except (RuntimeError, ValueError) as error:
            raise DamageError(f"a chunk does not decode: {error}") from None

    def decode_ragged(
        self,
        data: memoryview,
        shape: tuple[int, ...],
        dtype: str,
        *,
        verify: bool = True,
        room: np.ndarray | None = None,
        box: np.ndarray | None = None,
    ) -> np.ndarray:
        """Decode the chunk of one ragged row; a plain one is not copied, and read-only.

        Pixels of a JPEG file are (C, H, W), as `decode_jpeg` returns them.

        Parameters
        ----------
        shape
            Shape of the row: no more memory is taken, whatever the chunk claims.
        verify
            Check a CRC32C. zstd's content checksum is always checked.
        room, box
            As of `decode_jpeg`.

        Raises
        ------
        DamageError
            The bytes are not a row of this shape.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self.jpeg and nbytes:
            file = self._payload(data, verify=verify)
            require_plausible(len(file), nbytes)
            return decode_jpeg(file, shape, room, box)
        if self.halves and nbytes:
            _require(shape[0] == 3, f"rows of raw420 are no {tuple(shape)}")
            stored = int(planes_nbytes(np.array(shape)))
            return rgb_of(self._payload(data, stored, verify=verify), shape)
        row = self._payload(data, nbytes, verify=verify).view(dtype).reshape(shape)
        if self.filtered and row.size:
            undo_image(row[np.newaxis])
        return row

    def _payload(
        self, data: memoryview, nbytes: int | None = None, *, verify: bool = True
    ) -> np.ndarray:
        """Return the bytes of a ragged row as they are stored: `nbytes`, if these are known."""
        framed = "zstd" in self.codecs
        whole = (zstd_content_size(data) or 0) if framed else len(data) - 4
        wanted = whole - RAGGED_HEAD_NBYTES if nbytes is None else nbytes
        if framed:
            require_plausible(len(data), wanted)
        wrong = f"it is no single row of {max(0, wanted)} bytes"
        _require(whole == wanted + RAGGED_HEAD_NBYTES >= RAGGED_HEAD_NBYTES, wrong)
        if framed:
            source = np.empty(whole, np.uint8)
            self.decode(data, source)
        else:
            source = np.frombuffer(_strip_crc32c(data, verify), np.uint8)
        _require(source[:RAGGED_HEAD_NBYTES].tobytes() == _ragged_head(wanted), wrong)
        return source[RAGGED_HEAD_NBYTES:]


def decoder(codec: AnyCodec, dtype: str, *, ragged: bool = False) -> Decoder:
    """Return the decoder of chunks of a codec."""
    names = (stage["name"] for stage in codec_metadata(codec, dtype, ragged=ragged))
    return Decoder(
        tuple(name for name in names if name in ("zstd", "blosc", "crc32c")),
        filtered=isinstance(codec, ImageCodec),
        ragged=ragged,
        jpeg=isinstance(codec, JpegCodec),
        halves=isinstance(codec, Raw420Codec),
    )


def most_stored(nbytes: int) -> int:
    """Return the most bytes that a chunk of `nbytes` is stored in.

    No compressor adds as much as an eighth and a kilobyte: incompressible data is stored in blocks
    with a few bytes of overhead each. Nor does a CRC32C.
    """
    return nbytes + (nbytes >> 3) + 1024


def crc32c_holds(chunk: memoryview) -> bool:
    """Return whether a chunk matches the CRC32C that it ends in."""
    stored = int.from_bytes(chunk[-4:], "little")
    return len(chunk) >= 4 and kernels.crc32c(chunk[:-4]) == stored


def _strip_crc32c(source: memoryview, verify: bool) -> memoryview:
    _require(not verify or crc32c_holds(source), "its CRC32C does not hold")
    return source[:-4]


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise DamageError(f"a chunk does not decode: {reason}")


def _blosc_sizes(buffer: memoryview) -> tuple[int, int]:
    """Decoded and encoded size of a Blosc buffer, from its header; the library trusts both."""
    _require(len(buffer) >= 16, "too short for a Blosc buffer")
    return int.from_bytes(buffer[4:8], "little"), int.from_bytes(buffer[12:16], "little")


def zstd_content_size(frame: memoryview) -> int | None:
    """Frame_Content_Size of a zstd frame (RFC 8878, section 3.1.1.1); None if not stated."""
    if len(frame) < 6 or bytes(frame[:4]) != b"\x28\xb5\x2f\xfd":
        raise DamageError("a chunk does not decode: it is no zstd frame")
    descriptor = frame[4]
    single = descriptor >> 5 & 1
    size = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    if not size:
        return None
    return int.from_bytes(frame[start : start + size], "little") + (256 if size == 2 else 0)


MAX_EXPANDED, MAX_RATIO = 64 << 20, 1000
"""Bytes that any small object may decode to, and the largest compression ratio above that."""


def require_plausible(stored: int, decoded: int) -> None:
    """Raise `DamageError` if `stored` bytes claim to decode to implausibly many."""
    if decoded > max(MAX_EXPANDED, MAX_RATIO * stored):
        raise DamageError(f"{stored} bytes cannot be {decoded} bytes compressed")
