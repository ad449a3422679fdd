"""Chunks of rows <-> bytes: `raw`, `zstd` and `image`, and the codecs other Zarr software uses.

Encoders make the bytes of one chunk; a `Decoder` is read from an array's metadata and decodes into
the caller's buffer. The image filter is undone apart, over many rows at once, which is several
times cheaper than row by row.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc, zstd

from precache.errors import DamageError, PipelineError, StoreError, UsageError
from precache.pipeline import ImageCodec, RawCodec, ZstdCodec

IMAGE_FILTER = "precache.image"
IMAGE_FILTER_VERSION = 1

ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
"""Python's own zstd or its backport, with parameters that numcodecs has not; for who builds."""

LITERAL_COMPRESSION_MODE, MAX_BLOCK_SIZE = 1002, 1015
"""``ZSTD_c_literalCompressionMode``, ``ZSTD_c_maxBlockSize`` (zstd.h 1.5.7): unnamed in Python."""

_LEAST_BLOCK, _MOST_BLOCK = 20 << 10, 64 << 10
"""The smallest channel that is worth blocks of its own, and the largest block; bytes."""

_WIDE = 300
"""Lines of so many bytes are added up one by one, shorter ones in runs of four."""

_WIDE_ROWS = 64
"""Rows of wide lines whose filter is undone at once: enough to spread the calls."""

_NARROW_ROWS, _NARROW_BYTES = 128, 4800 << 10
"""Other rows, at most so many and of so many bytes together, which the caches hold."""

_scratch = threading.local()

Encode = Callable[[np.ndarray], bytes]


# --- the image filter ---------------------------------------------------------------------------


def filter_image(
    rows: np.ndarray, plain: np.ndarray | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """The `image` codec's filter, version 1.

    Parameters
    ----------
    rows
        (..., C, H, W) uint8; stays as it is.
    plain, out
        (..., H, W) scratch, and the result, of the shape of `rows`, to reuse, since fresh memory
        costs more than the work.

    Returns
    -------
    np.ndarray
        Same shape and dtype, modulo 256: where C = 3, (R - G, G, B - G); then each line of pixels
        less the line above it.
    """
    plain = np.empty(rows[..., 0, :, :].shape, np.uint8) if plain is None else plain
    out = np.empty(rows.shape, np.uint8) if out is None else out
    # Channel by channel: what the caches hold is dear.
    for channel in range(rows.shape[-3]):
        lines, residue = rows[..., channel, :, :], out[..., channel, :, :]
        if rows.shape[-3] == 3 and channel != 1:
            lines = np.subtract(lines, rows[..., 1, :, :], out=plain)
        residue[..., 0, :] = lines[..., 0, :]
        np.subtract(lines[..., 1:, :], lines[..., :-1, :], out=residue[..., 1:, :])
    return out


def undone_together(row_shape: tuple[int, ...]) -> int:
    """How many (C, H, W) rows `undo_image` takes at once; it costs least right after decoding."""
    fitting = max(1, _NARROW_BYTES // max(1, math.prod(row_shape)))
    return min(_NARROW_ROWS, fitting) if row_shape[-1] < _WIDE else _WIDE_ROWS


def undo_image(rows: np.ndarray) -> None:
    """Undo `filter_image` in place on contiguous (..., C, H, W) uint8; many rows cost less each."""
    if not rows.flags.c_contiguous:  # `reshape` would copy
        raise ValueError("rows that are not contiguous cannot be undone in place")
    if not rows.size:
        return
    channels, height, width = rows.shape[-3:]
    images = rows.reshape(-1, channels, height, width)
    together = undone_together(images.shape[1:])
    add_up = _add_up_fours if width < _WIDE else _add_up
    for start in range(0, len(images), together):
        part = images[start : start + together]
        add_up(part.reshape(-1, height, width))
        if channels == 3:
            part[:, 0] += part[:, 1]
            part[:, 2] += part[:, 1]


def _add_up(planes: np.ndarray) -> None:
    """Prefix sums along H of (M, H, W), in place."""
    lines = planes.swapaxes(0, 1)
    # Apart from the planes, whose lines share few sets of a cache where W is a power of two.
    above, below = lines[0].copy(), np.empty_like(lines[0])
    for line in lines[1:]:
        np.add(above, line, out=below)
        line[...] = below
        above, below = below, above


def _add_up_fours(planes: np.ndarray) -> None:
    """Prefix sums along H of (M, H, W), in place, four lines at a time.

    Each line becomes the sum of itself and the three above, in two additions of whole planes; of
    these, each run of four lines, one piece of memory, needs what the run above it has come to.
    """
    if not hasattr(_scratch, "sums") or _scratch.sums.size < planes.size:
        _scratch.sums = np.empty(planes.size, np.uint8)
    twos = _scratch.sums[: planes.size].reshape(planes.shape)
    for step, lines, sums in ((1, planes, twos), (2, twos, planes)):
        np.add(lines[:, step:], lines[:, :-step], out=sums[:, step:])
        sums[:, :step] = lines[:, :step]
    count, height, width = planes.shape
    whole = height // 4 * 4
    if whole:
        _add_up(planes[:, :whole].reshape(count, -1, 4 * width))
        planes[:, whole:] += planes[:, whole - 4 : height - 4]


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


def load_zstd() -> ModuleType:
    """`ZSTD_MODULE`, which a training node need not have.

    Raises
    ------
    UsageError
        It is not installed, or Python was built without it.
    """
    try:
        return importlib.import_module(ZSTD_MODULE)
    except ImportError:
        ours = ZSTD_MODULE.startswith("backports")
        way_out = "pip install 'precache[workers]'" if ours else "use a Python built with libzstd"
        raise UsageError(f"building needs {ZSTD_MODULE}: {way_out}") from None


def _block_size(channel: int) -> int:
    """Bytes of a zstd block for filtered channels of so many bytes; 0 leaves it to zstd.

    Blocks that end about where channels do have literals of one distribution each: smaller, and
    decoded faster. Of small channels, the tables of so many blocks would cost more than that.
    """
    if channel < _LEAST_BLOCK:
        return 0
    return -(-channel // -(-channel // _MOST_BLOCK))


def image_parameters(channel: int) -> dict[int, int]:
    """What zstd compresses filtered channels of so many bytes with: its parameters by number."""
    named = load_zstd().CompressionParameter
    parameters = {
        named.compression_level: 1,
        named.checksum_flag: 1,
        # The residue hardly repeats. What there is to find, borders and flat areas, is long: zstd
        # steps over 64 bytes at a time, and matches reach back over what it stepped over.
        named.min_match: 7,
        named.hash_log: 6,
        named.target_length: 64,
        LITERAL_COMPRESSION_MODE: 1,  # which with a target length would be off
    }
    block = _block_size(channel)
    return parameters | ({MAX_BLOCK_SIZE: block} if block else {})


class _ImageEncoder:
    """The filter and then zstd; scratch and compressor are those of the last chunk's shape."""

    def __init__(self) -> None:
        self._plain = self._out = np.empty(0, np.uint8)
        self._compressor: Any = None

    def _prepare(self, shape: tuple[int, ...]) -> None:
        parameters = image_parameters(shape[-2] * shape[-1])
        self._compressor = load_zstd().ZstdCompressor(options=parameters)
        self._plain = np.empty((*shape[:-3], *shape[-2:]), np.uint8)
        self._out = np.empty(shape, np.uint8)

    def __call__(self, chunk: np.ndarray) -> bytes:
        if chunk.shape != self._out.shape:
            self._prepare(chunk.shape)
        filtered = filter_image(chunk, self._plain, self._out)
        frame: bytes = self._compressor.compress(filtered.data, self._compressor.FLUSH_FRAME)
        return frame


def _encode_raw(chunk: np.ndarray) -> bytes:
    return _with_crc32c(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)


def _with_crc32c(data: bytes | memoryview) -> bytes:
    checksum = int(google_crc32c.value(np.frombuffer(data, np.uint8)))
    return b"".join((data, checksum.to_bytes(4, "little")))


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
                raise PipelineError(f"codec 'image' stores uint8, not {dtype}; use zstd or raw")
            return _ImageEncoder()


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
        try:
            for name in reversed(self.codecs[1:]):
                source = _expand(name, source, verify)
            first = self.codecs[0] if self.codecs else None
            _decode_into(first, source, out.reshape(-1).view(np.uint8), verify)
        except (RuntimeError, ValueError, zlib.error) as error:
            raise DamageError(f"a chunk does not decode: {error}") from None
        if self.swap:
            out.byteswap(inplace=True)


def _expand(name: str, source: Any, verify: bool) -> Any:
    """Undo a bytes -> bytes codec whose result is not the chunk yet."""
    if name == "crc32c":
        return _strip_crc32c(source, verify)
    if name == "zstd":
        return memoryview(zstd.decompress(source))
    if name == "blosc":
        _require(_blosc_sizes(source)[1] == len(source), "its buffer is another size")
        return memoryview(blosc.decompress(source))
    return memoryview(zlib.decompress(source, wbits=31))


def _decode_into(name: str | None, source: Any, out: np.ndarray, verify: bool) -> None:
    if name == "zstd":
        if verify:
            _require(_zstd_content_size(source) in (None, out.nbytes), "its frame is another size")
        zstd.decompress(source, out)
    elif name == "blosc":
        _require(_blosc_sizes(source) == (out.nbytes, len(source)), "its buffer is another size")
        blosc.decompress(source, out)
    else:
        plain = source if name is None else _expand(name, source, verify)
        _require(len(plain) == out.nbytes, f"{len(plain)} bytes where {out.nbytes} belong")
        out[:] = np.frombuffer(plain, np.uint8)


def crc32c_holds(chunk: memoryview) -> bool:
    """Whether a chunk that ends in its CRC32C matches it."""
    stored = int.from_bytes(chunk[-4:], "little")
    return len(chunk) >= 4 and google_crc32c.value(np.frombuffer(chunk[:-4], np.uint8)) == stored


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


def _zstd_content_size(frame: memoryview) -> int | None:
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
