"""Makes the probes by which `precache_workers.ops.behaviour` tells decoders apart.

They were made once. Made again, by other libraries, they may have other bytes, and then every
version has another id: `python -m tests.support.make_probes FOLDER` is for files that are added.
"""

from __future__ import annotations

import io
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import Image, ImageCms

from precache_workers.ops.behaviour import pattern

ORIENTATION = 0x0112


def _image(mode: str = "RGB", width: int = 67, height: int = 45) -> Image.Image:
    bands = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    array = pattern(height, width, bands)
    return Image.fromarray(array[..., 0] if bands == 1 else array, mode)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _jpeg(mode: str = "RGB", size: tuple[int, int] = (67, 45), **options: Any) -> bytes:
    return _saved(_image(mode, *size), "JPEG", **{"quality": 88, **options})


def _oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return _jpeg(size=(23, 14), exif=exif)


def _with_segments(*segments: bytes) -> bytes:
    data = _jpeg(size=(23, 14))
    parts = [b"\xff\xe1" + struct.pack(">H", len(each) + 2) + each for each in segments]
    return data[:2] + b"".join(parts) + data[2:]


def _exif(orientation: int | None) -> bytes:
    exif = Image.Exif()
    if orientation is None:
        exif[0x010E] = "nothing"
    else:
        exif[ORIENTATION] = orientation
    found: bytes = exif.tobytes()
    return found if found.startswith(b"Exif\0\0") else b"Exif\0\0" + found


def _xmp(orientation: int) -> bytes:
    text = (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF '
        'xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description '
        f'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{orientation}"/>'
        "</rdf:RDF></x:xmpmeta>"
    )
    return b"http://ns.adobe.com/xap/1.0/\0" + text.encode()


def _ycck() -> bytes:
    data = bytearray(_jpeg("CMYK"))
    data[data.index(b"Adobe") + len(b"Adobe") + 6] = 2
    return bytes(data)


def _fill_bytes() -> bytes:
    """With bytes that mean nothing, and a marker without a length, before its segments."""
    data = _jpeg(size=(23, 14))
    return data[:2] + b"\xff\x01\xff\xff" + data[2:]


def _many_markers() -> bytes:
    """Of a few scans, and a comment with the marker of a scan's header again and again."""
    data = _jpeg(size=(23, 14), progressive=True) + b"trailer"
    comment = b"\xff\xda" * 120
    return data[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + data[2:]


def _in_first_scan(behind: bytes) -> bytes:
    """The same up to its first scan."""
    data = _many_markers()
    scan = data.index(b"\xff\xda", data.index(b"\xff\xc2"))
    return data[: scan + 20] + behind


def _scans() -> bytes:
    """More scans than are decoded."""
    data = _jpeg(size=(16, 16), progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 120 + b"\xff\xd9"


def _png(width: int, height: int, kind: int, bits: int, rows: bytes, *chunks: bytes) -> bytes:
    """A PNG of raw rows, each behind its filter's byte."""
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    parts = [_chunk(b"IHDR", header), *chunks, _chunk(b"IDAT", zlib.compress(rows, 9))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png_wide(channels: int) -> bytes:
    values = pattern(15, 24, channels).astype(np.uint16) * 257 + 13
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return _png(24, 15, 2 if channels == 3 else 0, 16, rows)


def _png_bits() -> bytes:
    """Of one bit each, and so many that it is converted in strips."""
    rows = b"".join(b"\0" + bytes([(y * 37 + x) & 255 for x in range(130)]) for y in range(1040))
    return _png(1040, 1040, 0, 1, rows)


def _png_key() -> bytes:
    values = pattern(15, 24, 3)
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    key = struct.pack(">HHH", *values[3, 4].tolist())
    return _png(24, 15, 2, 8, rows, _chunk(b"gAMA", struct.pack(">I", 45455)), _chunk(b"tRNS", key))


def _png_few_bits(channels: int) -> bytes:
    """Of 12 bits in 16."""
    values = pattern(15, 24, channels).astype(np.uint16) * 16 + 15
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return _png(24, 15, {1: 0, 3: 2, 4: 6}[channels], 16, rows)


def _png_wide_alpha() -> bytes:
    values = pattern(15, 24, 2).astype(np.uint16) * 257
    return _png(24, 15, 4, 16, b"".join(b"\0" + row.astype(">u2").tobytes() for row in values))


def _profile() -> bytes:
    """sRGB with red and green exchanged."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = profile.replace(b"rXYZ", b"?XYZ", 1).replace(b"gXYZ", b"rXYZ", 1)
    return swapped.replace(b"?XYZ", b"gXYZ", 1)


def _tiff_pages(*sizes: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for height, width in sizes:
            page = pattern(height, width, 1)[..., 0]
            writer.write(page, metadata=None, software="", contiguous=False)
    return file.getvalue()


def _png_huge() -> bytes:
    return _png(60_000, 60_000, 2, 8, b"\0")


def _palette(transparent: bool = False) -> Image.Image:
    image = _image().quantize(32)
    if transparent:
        image.info["transparency"] = bytes(range(0, 256, 8))
    return image


def _tiff(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, metadata=None, software="", **options)
    return file.getvalue()


def _tiff_overlapping() -> bytes:
    """Its strips are two, named again and again."""
    data = bytearray(_tiff(pattern(64, 16, 1)[..., 0], rowsperstrip=1))
    with tifffile.TiffFile(io.BytesIO(bytes(data))) as file:
        tags = file.pages[0].tags
        rows = tags["RowsPerStrip"]
    struct.pack_into("<H" if rows.dtype == 3 else "<I", data, rows.valueoffset, 32)
    return bytes(data)


def _tiff_photometric(data: bytes, value: int) -> bytes:
    changed = bytearray(data)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        tag = file.pages[0].tags["PhotometricInterpretation"]
    struct.pack_into("<H", changed, tag.valueoffset, value)
    return bytes(changed)


def _tiff_directory(count: int, *entry: int) -> bytes:
    """Nothing but the beginning of a directory."""
    first = struct.pack("<HHLL", *entry) if entry else b""
    return b"II*\0" + struct.pack("<LH", 8, count) + first


def _gif_with(between: bytes) -> bytes:
    """With something between its palette and its picture."""
    data = _saved(_palette(), "GIF")
    at = 13 + (3 << (data[10] & 7) + 1)
    return data[:at] + between + data[at:]


def _bmp_runs(width: int, height: int) -> bytes:
    """Of run lengths; of a height that is not there, it has the end of the picture alone."""
    runs = b"" if height > 1000 else b"".join(bytes([width, y]) + b"\0\0" for y in range(height))
    palette = bytes(value for n in range(256) for value in (n, 255 - n, n * 3 & 255, 0))
    body, offset = runs + b"\0\1", 54 + len(palette)
    header = struct.pack(
        "<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body), 2835, 2835, 256, 256
    )
    file = struct.pack("<2sIHHI", b"BM", offset + len(body), 0, 0, offset)
    return file + header + palette + body


def _lab() -> bytes:
    return _tiff_photometric(_tiff(pattern(15, 24, 3), photometric="rgb"), 8)


def _animated(kind: str, **options: Any) -> bytes:
    frames = [_image(), _image().rotate(90)]
    return _saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def _tiff_tiles_huge() -> bytes:
    """Its tile is said to be larger than any picture that is decoded."""
    data = bytearray(_tiff(pattern(16, 16, 3), tile=(16, 16), photometric="rgb"))
    with tifffile.TiffFile(io.BytesIO(bytes(data))) as file:
        tags = [file.pages[0].tags[name] for name in ("TileWidth", "TileLength")]
    for tag in tags:
        struct.pack_into("<H" if tag.dtype == 3 else "<I", data, tag.valueoffset, 65_520)
    return bytes(data)


FILES: dict[str, Callable[[], bytes]] = {
    "jpeg-444.jpg": lambda: _jpeg(subsampling=0),
    "jpeg-422.jpg": lambda: _jpeg(subsampling=1),
    "jpeg-420.jpg": lambda: _jpeg(subsampling=2),
    "jpeg-420-odd.jpg": lambda: _jpeg(size=(35, 27), subsampling=2, quality=60),
    "jpeg-420-large.jpg": lambda: _jpeg(size=(323, 209), subsampling=2, quality=40),
    "jpeg-one-pixel.jpg": lambda: _jpeg(size=(1, 1)),
    "jpeg-quality-100.jpg": lambda: _jpeg(quality=100, subsampling=0),
    "jpeg-quality-5.jpg": lambda: _jpeg(quality=5),
    "jpeg-progressive.jpg": lambda: _jpeg(progressive=True),
    "jpeg-progressive-444.jpg": lambda: _jpeg(progressive=True, subsampling=0, quality=95),
    "jpeg-restart.jpg": lambda: _jpeg(restart_marker_rows=1),
    "jpeg-grey.jpg": lambda: _jpeg("L"),
    "jpeg-grey-progressive.jpg": lambda: _jpeg("L", progressive=True),
    "jpeg-cmyk.jpg": lambda: _jpeg("CMYK"),
    "jpeg-ycck.jpg": _ycck,
    "jpeg-rgb.jpg": lambda: _jpeg(keep_rgb=True),
    **{f"jpeg-turned-{n}.jpg": lambda n=n: _oriented(n) for n in range(2, 10)},
    "jpeg-exif-broken.jpg": lambda: _with_segments(b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "jpeg-exif-garbage.jpg": lambda: _with_segments(b"Exif\0\0garbage!"),
    "jpeg-exif-silent.jpg": lambda: _with_segments(_exif(None)),
    "jpeg-exif-twice.jpg": lambda: _with_segments(_exif(6), _exif(8)),
    "jpeg-exif-and-xmp.jpg": lambda: _with_segments(_exif(6), _xmp(3)),
    "jpeg-xmp.jpg": lambda: _with_segments(_xmp(3)),
    "jpeg-xmp-and-silent-exif.jpg": lambda: _with_segments(_exif(None), _xmp(8)),
    "jpeg-no-end.jpg": lambda: _jpeg()[:-2],
    "jpeg-cmyk-no-end.jpg": lambda: _jpeg("CMYK")[:-2],
    "jpeg-profile.jpg": lambda: _jpeg(icc_profile=_profile()),
    "jpeg-cut-off.jpg": lambda: _jpeg()[:-300],
    "jpeg-scans.jpg": _scans,
    "jpeg-many-markers.jpg": _many_markers,
    "jpeg-many-markers-cut-off.jpg": lambda: _in_first_scan(b""),
    "jpeg-many-markers-no-end.jpg": lambda: _in_first_scan(b"\xff\xfe\0\x06gone"),
    "jpeg-fill-bytes.jpg": _fill_bytes,
    "jpeg-no-picture.jpg": lambda: _jpeg()[:200],
    "jpeg-cmyk-profile.jpg": lambda: _jpeg("CMYK", comment=b"a comment", icc_profile=bytes(99)),
    "png-rgb.png": lambda: _saved(_image(), "PNG"),
    "png-grey.png": lambda: _saved(_image("L"), "PNG"),
    "png-rgba.png": lambda: _saved(_image("RGBA"), "PNG"),
    "png-grey-alpha.png": lambda: _saved(_image("RGBA").convert("LA"), "PNG"),
    "png-palette.png": lambda: _saved(_palette(), "PNG"),
    "png-palette-alpha.png": lambda: _saved(_palette(transparent=True), "PNG"),
    "png-bits-in-strips.png": _png_bits,
    "png-16.png": lambda: _png_wide(1),
    "png-16-rgb.png": lambda: _png_wide(3),
    "png-12.png": lambda: _png_few_bits(1),
    "png-12-rgb.png": lambda: _png_few_bits(3),
    "png-12-rgba.png": lambda: _png_few_bits(4),
    "png-16-grey-alpha.png": _png_wide_alpha,
    "png-grey-of-2-bits.png": lambda: _png(8, 1, 0, 2, b"\0\x1b\x1b"),
    "png-profile.png": lambda: _saved(_image("RGBA"), "PNG", icc_profile=_profile()),
    "png-profile-grey.png": lambda: _saved(_image("L"), "PNG", icc_profile=_profile()),
    "png-colour-key.png": _png_key,
    "png-turned.png": lambda: _saved(_image(), "PNG", exif=_exif(6)),
    "png-cut-off.png": lambda: _saved(_image(), "PNG")[:-200],
    "png-huge.png": _png_huge,
    "webp-lossy.webp": lambda: _saved(_image(), "WEBP", quality=70),
    "webp-lossless.webp": lambda: _saved(_image("RGBA"), "WEBP", lossless=True, exact=True),
    "webp-alpha.webp": lambda: _saved(_image("RGBA"), "WEBP", quality=60),
    "webp-animated.webp": lambda: _animated("WEBP", quality=60),
    "gif.gif": lambda: _saved(_palette(), "GIF"),
    "gif-transparent.gif": lambda: _saved(_palette(), "GIF", transparency=3),
    "gif-animated.gif": lambda: _animated("GIF"),
    "gif-comment.gif": lambda: _saved(_palette(), "GIF", comment=b"a comment"),
    "gif-garbage.gif": lambda: _gif_with(b"\0\0"),
    "gif-no-picture.gif": lambda: _gif_with(b"")[:109],
    "gif-no-blocks.gif": lambda: _gif_with(b"")[:109] + bytes(4),
    "gif-ended.gif": lambda: _gif_with(b"; garbage"),
    "bmp-24.bmp": lambda: _saved(_image(), "BMP"),
    "bmp-32.bmp": lambda: _saved(_image("RGBA"), "BMP"),
    "bmp-runs.bmp": lambda: _bmp_runs(24, 15),
    "bmp-runs-huge.bmp": lambda: _bmp_runs(20_000, 5_000),
    "tiff-rgb.tif": lambda: _saved(_image(), "TIFF"),
    "tiff-lzw.tif": lambda: _saved(_image(), "TIFF", compression="tiff_lzw"),
    "tiff-deflate.tif": lambda: _saved(_image(), "TIFF", compression="tiff_adobe_deflate"),
    "tiff-jpeg.tif": lambda: _saved(_image(), "TIFF", compression="jpeg", quality=85),
    "tiff-bits.tif": lambda: _saved(_image().convert("1"), "TIFF", compression="group4"),
    "tiff-cmyk.tif": lambda: _saved(_image("CMYK"), "TIFF"),
    "tiff-tiles.tif": lambda: _tiff(pattern(45, 67, 3), tile=(16, 32), photometric="rgb"),
    "tiff-planes.tif": lambda: _tiff(
        np.moveaxis(pattern(15, 24, 3), 2, 0), planarconfig="separate", photometric="rgb"
    ),
    "tiff-premultiplied.tif": lambda: _tiff(
        pattern(15, 24, 4), photometric="rgb", extrasamples=["assocalpha"]
    ),
    "tiff-inverted.tif": lambda: _tiff(pattern(15, 24, 1)[..., 0], photometric="miniswhite"),
    "tiff-16.tif": lambda: _tiff(pattern(15, 24, 1)[..., 0].astype("<u2") * 257 + 100),
    "tiff-16-inverted.tif": lambda: _tiff(
        pattern(15, 24, 1)[..., 0].astype("<u2") * 257 + 100, photometric="miniswhite"
    ),
    "tiff-32.tif": lambda: _tiff(pattern(15, 24, 1)[..., 0].astype("<i4") * 1000),
    "tiff-float.tif": lambda: _tiff(pattern(15, 24, 1)[..., 0].astype("<f4") / 255),
    "tiff-signed.tif": lambda: _tiff(pattern(15, 24, 1)[..., 0].astype(np.int8)),
    "tiff-lab.tif": _lab,
    "tiff-overlapping.tif": _tiff_overlapping,
    "tiff-big-endian.tif": lambda: _tiff(pattern(15, 24, 3), byteorder=">", photometric="rgb"),
    "tiff-pages.tif": lambda: _tiff_pages((15, 24), (15, 24)),
    "tiff-overviews.tif": lambda: _tiff_pages((15, 24), (7, 12), (3, 6)),
    "tiff-bands.tif": lambda: _tiff(
        pattern(15, 24, 4), photometric="rgb", extrasamples=["unspecified"]
    ),
    "tiff-64.tif": lambda: _tiff(pattern(15, 24, 3), bigtiff=True, photometric="rgb"),
    "tiff-cut-off.tif": lambda: _tiff_directory(8),
    "tiff-many-tags.tif": lambda: _tiff_directory(5000),
    "tiff-many-strips.tif": lambda: _tiff_directory(1, 273, 4, 1 << 19, 8),
    "tiff-tiles-huge.tif": _tiff_tiles_huge,
    "text.txt": lambda: b"This is no picture.",
}


def main(folder: Path) -> None:
    """Write those files that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in FILES.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(make())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
