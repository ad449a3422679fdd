"""Chunks of rows <-> bytes: the codecs of recipes, and those other Zarr software uses.

Encoders make the bytes of one chunk. A `Decoder` is made from an array's metadata and decodes into
the caller's buffer; the filter of `image` is left for `image.undo_image`.

No stage of decoding takes more memory than the chunk's size in the metadata allows (`bounds`),
even if the stored bytes claim more.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from precache.errors import DamageError, RecipeError, StoreError
from precache.recipe.recipe import AnyCodec, ImageCodec, JpegCodec, RawCodec, ZstdCodec

Encode = Callable[[np.ndarray], bytes]

RAGGED = "vlen-bytes"
"""Zarr's codec of chunks of byte strings: their number, then length and bytes of each."""

RAGGED_HEAD_NBYTES = 8
"""Bytes before the row in a ragged row's chunk: the number of rows, 1, and the row's length."""

MOST_RAGGED_NBYTES = 2**32 - 1
"""Most bytes of a ragged row, whose length is stored as 32 bits."""

GZIP_PIECE = 64 << 10
"""Bytes of gzip that are decompressed at a time."""


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
        last = _crc32c() if isinstance(codec, RawCodec | JpegCodec) else _zstd(level)
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
        case JpegCodec():
            raise _only_ragged()


def _only_ragged() -> RecipeError:
    return RecipeError("codec 'jpeg' stores a file a row, and no chunks of rows of one shape")


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
        case JpegCodec():
            raise _only_ragged()


def ragged_encoder(codec: AnyCodec) -> Encode:
    """Return the function that encodes one ragged row, C-contiguous, as a chunk; not thread-safe.

    `image` stores rows that are (C, H, W) uint8. `jpeg` is given files: (n,) uint8.
    """
    encode_image = ImageEncoder()

    def encode(row: np.ndarray) -> bytes:
        head = _ragged_head(row.nbytes)
        if isinstance(codec, ImageCodec) and row.size:
            return encode_image(row, head)
        payload = b"".join((head, row.reshape(-1).view(np.uint8).data))
        if isinstance(codec, RawCodec | JpegCodec):
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
        Names of the bytes -> bytes codecs, in the order they were applied when writing.
    swap
        The stored byte order is not this machine's.
    filtered
        `undo_image` is still to be applied to the output of `decode`.
    ragged
        A chunk is one row of any shape: `decode_ragged` decodes it, and undoes the filter.
    jpeg
        A ragged row is a JPEG file.
    """

    codecs: tuple[str, ...]
    swap: bool = False
    filtered: bool = False
    ragged: bool = False
    jpeg: bool = False

    @functools.cached_property
    def plain(self) -> bool:
        """True if a chunk's bytes are the rows themselves, with at most a CRC32C behind them."""
        return not (self.swap or self.filtered or self.ragged) and self.codecs in ((), ("crc32c",))

    @property
    def framed(self) -> bool:
        """True if a chunk is a zstd frame of the rows, apart from the image filter."""
        return self.codecs == ("zstd",) and not (self.swap or self.ragged)

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
        source: Any = data
        limits = bounds(self.codecs, out.nbytes)
        try:
            for number in range(len(self.codecs) - 1, 0, -1):
                source = _expand(self.codecs[number], source, limits[number], verify)
            first = self.codecs[0] if self.codecs else None
            _decode_into(first, source, out.reshape(-1).view(np.uint8), verify)
        except (RuntimeError, ValueError, zlib.error) as error:
            raise DamageError(f"a chunk does not decode: {error}") from None
        if self.swap:
            # As integers, since NumPy's bfloat16 has no byte order.
            out.view(f"u{out.itemsize}").byteswap(inplace=True)

    def decode_ragged(
        self,
        data: memoryview,
        shape: tuple[int, ...],
        dtype: str,
        *,
        verify: bool = True,
        room: np.ndarray | None = None,
    ) -> np.ndarray:
        """Decode the chunk of one ragged row; a plain one is not copied, and read-only.

        Pixels of a JPEG file are (C, H, W), as `decode_jpeg` returns them.

        Parameters
        ----------
        shape
            Shape of the row: no more memory is taken, whatever the chunk claims.
        verify
            Check a CRC32C. zstd's content checksum is always checked.
        room
            As of `decode_jpeg`.

        Raises
        ------
        DamageError
            The bytes are not a row of this shape.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self.jpeg and nbytes:
            file = self._stored_values(data, verify)
            require_plausible(len(file), nbytes)
            return decode_jpeg(file, shape, room)
        if "zstd" in self.codecs:
            require_plausible(len(data), nbytes)
        source: Any = data
        limits = bounds(self.codecs, nbytes + RAGGED_HEAD_NBYTES)
        try:
            for number in range(len(self.codecs) - 1, -1, -1):
                source = _expand(self.codecs[number], source, limits[number], verify)
            _require(len(source) == limits[0], f"{len(source)} bytes where {limits[0]} belong")
        except (RuntimeError, ValueError, zlib.error) as error:
            raise DamageError(f"a chunk does not decode: {error}") from None
        head = bytes(source[:RAGGED_HEAD_NBYTES])
        _require(head == _ragged_head(nbytes), f"it is no single row of {nbytes} bytes")
        row = np.frombuffer(source, dtype, offset=RAGGED_HEAD_NBYTES).reshape(shape)
        if self.filtered and row.size:
            undo_image(row[np.newaxis])
        return row

    def ragged_values(self, data: memoryview) -> bytes:
        """Return the values of a ragged row as they are stored, filtered ones too; or its file.

        Raises
        ------
        DamageError
            The bytes are not what was written.
        """
        return self._stored_values(data).tobytes()

    @functools.cached_property
    def _unfiltered(self) -> Decoder:
        return replace(self, filtered=False, jpeg=False)

    def _stored_values(self, data: memoryview, verify: bool = True) -> np.ndarray:
        size = zstd_content_size(data) if "zstd" in self.codecs else len(data) - 4
        nbytes = (size or 0) - RAGGED_HEAD_NBYTES
        _require(nbytes >= 0, "it is no single row")
        return self._unfiltered.decode_ragged(data, (nbytes,), "uint8", verify=verify)


@functools.lru_cache
def bounds(codecs: tuple[str, ...], nbytes: int) -> tuple[int, ...]:
    """Upper bounds of a chunk's bytes: before the first codec (`nbytes`), after it, and so on.

    A CRC32C adds 4 bytes. No compressor adds as much as an eighth and a kilobyte: incompressible
    data is stored in blocks with a few bytes of overhead each.
    """

    def encoded(nbytes: int, codec: str) -> int:
        return nbytes + (4 if codec == "crc32c" else (nbytes >> 3) + 1024)

    return tuple(itertools.accumulate(codecs, encoded, initial=nbytes))


def _expand(name: str, source: Any, limit: int, verify: bool) -> Any:
    """Undo a bytes -> bytes codec whose output size is not known, to at most `limit` bytes."""
    if name == "crc32c":
        return _strip_crc32c(source, verify)
    if name == "gzip":
        return _expand_gzip(source, limit)
    size = zstd_content_size(source) if name == "zstd" else _blosc_sizes(source)[0]
    if size is None:
        raise DamageError("a chunk does not decode: its frame within another codec has no size")
    _require(size <= limit, f"{size} bytes where at most {limit} belong")
    plain = np.empty(size, np.uint8)
    _decode_into(name, source, plain, verify)
    return plain.data


def _expand_gzip(source: Any, limit: int) -> memoryview:
    """Decompress gzip of one or more members (RFC 1952), which zeros may follow.

    The input is fed in pieces because `zlib` copies what follows a member: fed whole, many small
    members would take quadratic time.
    """
    plain = bytearray()
    stream: Any = zlib.decompressobj(wbits=31)
    for start in range(0, len(source), GZIP_PIECE):
        piece = bytes(source[start : start + GZIP_PIECE])
        while piece := piece if stream else piece.lstrip(b"\0"):
            stream = stream or zlib.decompressobj(wbits=31)
            plain += stream.decompress(piece, limit + 1 - len(plain))
            _require(len(plain) <= limit, f"more than {limit} bytes, all that belongs there")
            piece, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    _require(stream is None, "its gzip stream is cut short")
    return memoryview(plain)


def _decode_into(name: str | None, source: Any, out: np.ndarray, verify: bool) -> None:
    if name == "zstd":
        _require(zstd_content_size(source) in (None, out.nbytes), "its frame is another size")
        zstd.decompress(source, out)
    elif name == "blosc":
        _require(_blosc_sizes(source) == (out.nbytes, len(source)), "its buffer is another size")
        blosc.decompress(source, out)
    else:
        plain = source if name is None else _expand(name, source, out.nbytes, verify)
        _require(len(plain) == out.nbytes, f"{len(plain)} bytes where {out.nbytes} belong")
        out[:] = np.frombuffer(plain, np.uint8)


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


_SUPPORTED = ("zstd", "blosc", "gzip", "crc32c")


def decoder(codecs: Sequence[Mapping[str, Any]], itemsize: int, where: str) -> Decoder:
    """Make a `Decoder` from a chunk's Zarr v3 codec metadata.

    Raises
    ------
    StoreError
        precache does not read one of the codecs; names it.
    """
    names = [codec["name"] for codec in codecs]
    if names[:1] == [RAGGED] and set(names[1:]) <= {"crc32c", "zstd"}:
        return Decoder(tuple(names[1:]), ragged=True)
    filtered = bool(names) and names[0] == IMAGE_FILTER
    if filtered:
        version = codecs[0].get("configuration", {}).get("version")
        if version != IMAGE_FILTER_VERSION:
            raise StoreError(f"{where} has image filter version {version}; update precache")
        names, codecs = names[1:], codecs[1:]
    if not names or names[0] != "bytes" or any(n not in _SUPPORTED for n in names[1:]):
        unknown = [n for n in names if n not in (*_SUPPORTED, "bytes")] or names
        raise StoreError(
            f"{where} uses the codecs {', '.join(unknown)}; "
            f"precache reads bytes with {', '.join(_SUPPORTED)}: rewrite the array with these"
        )
    endian = codecs[0].get("configuration", {}).get("endian", "little")
    if endian not in ("little", "big"):
        raise StoreError(f"{where} has byte order {endian!r}; it is little or big")
    return Decoder(tuple(names[1:]), swap=endian == "big" and itemsize > 1, filtered=filtered)
