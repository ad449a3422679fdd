"""Chunks of rows <-> bytes: `raw`, `zstd` and `image`, and the codecs other Zarr software uses.

Encoders make the bytes of one chunk; a `Decoder` is read from an array's metadata and decodes into
the caller's buffer, and leaves the filter of `image` to be undone (`imagecodec.undo_image`).

No stage of decoding takes more memory than the chunk's size in the metadata allows (`bounds`),
whatever the stored bytes claim.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numcodecs import blosc, zstd

from precache.codecs import kernels
from precache.codecs.image import IMAGE_FILTER, IMAGE_FILTER_VERSION, ImageEncoder
from precache.errors import DamageError, RecipeError, StoreError
from precache.recipe.recipe import ImageCodec, RawCodec, ZstdCodec

Encode = Callable[[np.ndarray], bytes]


# --- metadata -----------------------------------------------------------------------------------


def index_codecs() -> list[dict[str, Any]]:
    """The Zarr v3 `index_codecs` of a shard."""
    return [_bytes(), _crc32c()]


def _bytes() -> dict[str, Any]:
    return {"name": "bytes", "configuration": {"endian": "little"}}


def _crc32c() -> dict[str, Any]:
    return {"name": "crc32c"}


def _zstd(level: int) -> dict[str, Any]:
    return {"name": "zstd", "configuration": {"level": level, "checksum": True}}


def codec_metadata(codec: RawCodec | ZstdCodec | ImageCodec, dtype: str) -> list[dict[str, Any]]:
    """The Zarr v3 `codecs` of one chunk."""
    size = np.dtype(dtype).itemsize
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


def _clevel(codec: ZstdCodec) -> int:
    return min(9, max(1, codec.level))


# --- encoding -----------------------------------------------------------------------------------


def _encode_raw(chunk: np.ndarray) -> bytes:
    return _with_crc32c(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)


def _with_crc32c(data: bytes | memoryview) -> bytes:
    return b"".join((data, kernels.crc32c(data).to_bytes(4, "little")))


def encoder(codec: RawCodec | ZstdCodec | ImageCodec, dtype: str) -> Encode:
    """A function from one (rows, ...) little-endian chunk to its stored bytes; not thread-safe."""
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


# --- decoding -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """Decodes one chunk of an array into the caller's buffer.

    Attributes
    ----------
    codecs
        Names of the bytes -> bytes codecs, in the order they were applied when writing.
    swap
        Whether the stored byte order is not this machine's.
    filtered
        Whether `undo_image` is still to be applied to what `decode` gives.
    """

    codecs: tuple[str, ...]
    swap: bool = False
    filtered: bool = False

    @property
    def plain(self) -> bool:
        """Whether a chunk's bytes are the rows themselves, with at most a CRC32C behind them."""
        return not (self.swap or self.filtered) and self.codecs in ((), ("crc32c",))

    @property
    def framed(self) -> bool:
        """Whether a chunk is a zstd frame, and nothing is left to do but to undo a filter."""
        return self.codecs == ("zstd",) and not self.swap

    def decode(self, data: memoryview, out: np.ndarray, *, verify: bool = True) -> None:
        """Decode one chunk.

        Parameters
        ----------
        data
            Stored bytes.
        out
            C-contiguous array of the chunk's shape and dtype.
        verify
            Whether a CRC32C is checked. zstd's own content checksum always is.

        Raises
        ------
        DamageError
            The bytes are not what was written.
        """
        source: Any = data
        most = bounds(self.codecs, out.nbytes)
        try:
            for number in range(len(self.codecs) - 1, 0, -1):
                source = _expand(self.codecs[number], source, most[number], verify)
            first = self.codecs[0] if self.codecs else None
            _decode_into(first, source, out.reshape(-1).view(np.uint8), verify)
        except (RuntimeError, ValueError, zlib.error) as error:
            raise DamageError(f"a chunk does not decode: {error}") from None
        if self.swap:
            out.view(f"u{out.itemsize}").byteswap(inplace=True)  # bfloat16 knows no byte order


@functools.lru_cache
def bounds(codecs: tuple[str, ...], nbytes: int) -> tuple[int, ...]:
    """Bytes that a chunk of `nbytes` has at most before the first codec, before the second, and so
    on, and stored.

    A CRC32C adds 4 bytes. No compressor adds as much as an eighth and a kilobyte: what does not
    compress is stored in blocks with a few bytes each.
    """

    def encoded(nbytes: int, codec: str) -> int:
        return nbytes + (4 if codec == "crc32c" else (nbytes >> 3) + 1024)

    return tuple(itertools.accumulate(codecs, encoded, initial=nbytes))


def _expand(name: str, source: Any, most: int, verify: bool) -> Any:
    """Undo a bytes -> bytes codec, to at most so many bytes, where the size is not known."""
    if name == "crc32c":
        return _strip_crc32c(source, verify)
    if name == "gzip":
        return _expand_gzip(source, most)
    size = zstd_content_size(source) if name == "zstd" else _blosc_sizes(source)[0]
    if size is None:
        raise DamageError("a chunk does not decode: its frame within another codec has no size")
    _require(size <= most, f"{size} bytes where at most {most} belong")
    plain = np.empty(size, np.uint8)
    _decode_into(name, source, plain, verify)
    return plain.data


def _expand_gzip(source: Any, most: int) -> memoryview:
    stream = zlib.decompressobj(wbits=31)
    plain = stream.decompress(source, most + 1)
    _require(len(plain) <= most, f"more than {most} bytes, which is all that belongs there")
    _require(stream.eof, "its gzip stream is cut short")
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
    """Whether a chunk that ends in its CRC32C matches it."""
    stored = int.from_bytes(chunk[-4:], "little")
    return len(chunk) >= 4 and kernels.crc32c(chunk[:-4]) == stored


def _strip_crc32c(source: memoryview, verify: bool) -> memoryview:
    _require(not verify or crc32c_holds(source), "its CRC32C does not hold")
    return source[:-4]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise DamageError(f"a chunk does not decode: {what}")


def _blosc_sizes(buffer: memoryview) -> tuple[int, int]:
    """Decoded and encoded bytes of a Blosc buffer, from its header; the library trusts both."""
    _require(len(buffer) >= 16, "too short for a Blosc buffer")
    return int.from_bytes(buffer[4:8], "little"), int.from_bytes(buffer[12:16], "little")


def zstd_content_size(frame: memoryview) -> int | None:
    """Frame_Content_Size of a zstd frame (RFC 8878, section 3.1.1.1), or None where not stated."""
    if len(frame) < 6 or bytes(frame[:4]) != b"\x28\xb5\x2f\xfd":
        raise DamageError("a chunk does not decode: it is no zstd frame")
    descriptor = frame[4]
    single = descriptor >> 5 & 1
    size = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    if not size:
        return None
    return int.from_bytes(frame[start : start + size], "little") + (256 if size == 2 else 0)


MOST_EXPANDED, MOST_RATIO = 64 << 20, 1000
"""Bytes that any small object may decode into, and bytes for each stored one above that."""


def require_plausible(stored: int, decoded: int) -> None:
    """Raise `DamageError` where so few bytes say that they decode into so many."""
    if decoded > max(MOST_EXPANDED, MOST_RATIO * stored):
        raise DamageError(f"{stored} bytes cannot be {decoded} bytes compressed")


_SUPPORTED = ("zstd", "blosc", "gzip", "crc32c")


def decoder(codecs: Sequence[Mapping[str, Any]], itemsize: int, where: str) -> Decoder:
    """Read a chunk's codecs from Zarr v3 metadata.

    Raises
    ------
    StoreError
        A codec that precache does not read, by name.
    """
    names = [codec["name"] for codec in codecs]
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
