"""Removal of metadata that decoding does not use, before a library parses it.

Pillow takes microseconds for each segment, chunk or tag, and longer for those that belong together;
a file may have millions of them. So Pillow receives only the pixels and at most a mebibyte of EXIF
and XMP, and files with too many parts are refused.

Sources: ITU-T T.81, annex B (JPEG); W3C PNG, 5; GIF89a; TIFF 6.0, section 2; RFC 9649 (WebP).
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterable, Iterator

from precache.errors import SampleError

MOST_PARTS = 100_000
"""Most segments, chunks or blocks of a file."""

MOST_SCANS = 100
"""Most scans of a JPEG, each of which visits all pixels. Ten are usual; libtiff's limit is 100."""

MOST_TAGS, MOST_STRIPS = 4096, 1 << 18
"""Most tags in a TIFF's first directory (libtiff's limit), and most strips or tiles."""

MOST_METADATA = 1 << 20
"""Most bytes of EXIF and XMP that are read, and of a JPEG's tables."""

_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/"
_SOS, _EOI, _APP1, _APP2, _COMMENT = 0xDA, 0xD9, 0xE1, 0xE2, 0xFE
_SEQUENTIAL = frozenset((0xC0, 0xC1))
"""Markers of a frame that is not progressive."""
_APPS = frozenset(range(0xE0, 0xF0))
_COLOUR_APPS = frozenset((0xE0, 0xEE))
"""JFIF and Adobe, which define the meaning of the components."""
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
"""Markers without a length."""
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_PIXELS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_PNG_TEXTS = frozenset((b"tEXt", b"zTXt", b"iTXt"))
_PNG_KEYWORDS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")

_STRIP_OFFSETS, _TILE_OFFSETS = 273, 324


def cut(data: bytes, *, profile: bool = False) -> bytes:
    """Remove everything from an image file that decides neither its pixels nor its orientation.

    An ICC profile is kept if `profile` is true.

    Raises
    ------
    SampleError
        The file has too many parts, or tables that are too large.
    """
    if data.startswith(b"\xff\xd8"):
        return _cut_jpeg(data, profile)
    if data.startswith(_PNG):
        return _cut_png(data, profile)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _cut_gif(data)
    if data.startswith((b"II", b"MM")):
        _check_tiff(data)
    return data


def _parts(what: str) -> Iterator[None]:
    """Yield one None for each part that a file may have; then raise."""
    yield from itertools.repeat(None, MOST_PARTS)
    raise SampleError(f"has more than {MOST_PARTS:,} {what}; save it anew with an image editor")


# --- JPEG ---------------------------------------------------------------------------------------


Segment = tuple[int, int, int]
"""Marker, start, end."""


def _segments(data: bytes, at: int = 2) -> Iterator[Segment]:
    """Yield each segment up to the first scan's header."""
    for _ in _parts("segments before its picture"):
        at = data.find(b"\xff", at)
        if not 0 <= at < len(data) - 4:
            return
        marker = data[at + 1]
        if marker == 0xFF or marker == 0 or marker in _ALONE:
            at += 1 if marker == 0xFF else 2
            continue
        end = at + 2 + max(2, data[at + 2] << 8 | data[at + 3])
        yield marker, at, end
        if marker in (_SOS, _EOI):
            return
        at = end


def jpeg_tags(data: bytes) -> list[bytes]:
    """Return the contents of a JPEG's EXIF and XMP segments, which may hold an orientation.

    Raises
    ------
    SampleError
        The file has so many segments or scans that decoding would take too long.
    """
    return [data[start + 4 : end] for start, end in _checked(data)]


def _checked(data: bytes) -> list[tuple[int, int]]:
    """Return (start, end) of the EXIF and XMP segments; raises if a JPEG has too many scans."""
    tagged, nbytes, segments = [], 0, [*_segments(data)]
    for marker, start, end in segments:
        if marker == _APP1 and data.startswith((_EXIF, _XMP), start + 4):
            nbytes += end - start
            if nbytes <= MOST_METADATA:
                tagged.append((start, end))
    if not has_one_scan(data, segments):
        _check_scans(data)
    return tagged


def has_one_scan(data: bytes, segments: Iterable[Segment] | None = None) -> bool:
    """Return True if a JPEG's first scan is its only one: of all components, not progressive."""
    components = 0
    for marker, start, _ in _segments(data) if segments is None else segments:
        if marker in _SEQUENTIAL:
            components = int.from_bytes(data[start + 9 : start + 10])
        elif marker == _SOS:
            return data[start + 4] == components
    return False


def is_exif(tag: bytes) -> bool:
    """Return True if one of `jpeg_tags` is EXIF, not XMP."""
    return tag.startswith(_EXIF)


def _cut_jpeg(data: bytes, profile: bool) -> bytes:
    apps = _COLOUR_APPS | {_APP2} if profile else _COLOUR_APPS
    tagged = set(_checked(data))
    kept, nbytes, rest = [b"\xff\xd8"], 0, len(data)
    for marker, start, end in _segments(data):
        if marker in (_SOS, _EOI):
            rest = start
            break
        if (start, end) in tagged:
            kept.append(data[start:end])
        elif marker in apps or (marker not in _APPS and marker != _COMMENT):
            kept.append(data[start:end])
            nbytes += end - start
    if nbytes > MOST_METADATA:
        raise SampleError(f"has {nbytes:,} bytes of tables; save it anew with an image editor")
    return b"".join((*kept, data[rest:]))


def _check_scans(data: bytes) -> None:
    """Raise `SampleError` if a JPEG has too many scans.

    The marker of a scan's header never occurs inside a scan, so counting it is enough for nearly
    all files. If the count is high, some of them may be in segments or after the picture.
    """
    if data.count(b"\xff\xda") <= MOST_SCANS:
        return
    scans, at = 0, 2
    while segment := next((part for part in _segments(data, at) if part[0] in (_SOS, _EOI)), None):
        marker, _, end = segment
        if marker == _EOI:
            return
        scans += 1
        if scans > MOST_SCANS:
            raise SampleError(
                f"has more than {MOST_SCANS} scans, each of which takes as long as a picture; "
                "save it anew with an image editor"
            )
        following = _MARKER_IN_SCAN.search(data, end)
        if following is None:
            return
        at = following.start()


# --- other formats ------------------------------------------------------------------------------


def _cut_png(data: bytes, profile: bool) -> bytes:
    view = memoryview(data)
    kept, at, metadata = [view[:8]], 8, 0
    for _ in _parts("chunks"):
        if at + 8 > len(data):
            break
        name, end = data[at + 4 : at + 8], at + 12 + int.from_bytes(data[at : at + 4])
        if name in _PNG_PIXELS or (profile and name == b"iCCP"):
            kept.append(view[at:end])
        elif name == b"eXIf" or (name in _PNG_TEXTS and data.startswith(_PNG_KEYWORDS, at + 8)):
            metadata += end - at
            if metadata <= MOST_METADATA:
                kept.append(view[at:end])
        at = end
    return b"".join(kept)


def _cut_gif(data: bytes) -> bytes:
    """Remove all extensions before the first frame, except graphic control extensions."""
    coloured = len(data) > 10 and data[10] & 0x80
    at = 13 + (3 << (data[10] & 7) + 1 if coloured else 0)
    kept = [data[:at]]
    blocks = _parts("blocks before its picture")
    while at < len(data) - 2:
        next(blocks)
        if data[at] == ord(","):
            kept.append(data[at:])
            break
        if data[at] != ord("!"):
            block = re.compile(rb"[!,;]").search(data, at)
            if block is None or block.group() == b";":
                break
            at = block.start()
            continue
        start, at = at, at + 2
        while at < len(data) and data[at]:
            next(blocks)
            at += 1 + data[at]
        at += 1
        if data[start + 1] == 0xF9:
            kept.append(data[start:at])
    return b"".join(kept)


def is_lossy_webp(data: bytes) -> bool:
    """Return True if the first frame of a WebP image is of VP8, and not lossless."""
    at = 12
    for _ in _parts("chunks"):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name in (b"VP8 ", b"VP8L", b""):
            return name == b"VP8 "
        at += 8 + (16 if name == b"ANMF" else size + size % 2)  # a frame has chunks of its own
    return False


def _check_tiff(data: bytes) -> None:
    """Raise `SampleError` if the first directory has too many tags, strips or tiles.

    Pillow creates an object for each of them.
    """
    order = "<" if data.startswith(b"II") else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    first, count, entry = ("Q", "Q", "HHQ8x") if big else ("L", "H", "HHL4x")
    try:
        (at,) = struct.unpack_from(order + first, data, 8 if big else 4)
        (tags,) = struct.unpack_from(order + count, data, at)
        if tags > MOST_TAGS:
            raise SampleError(f"has {tags:,} tags; save it anew with an image editor")
        at += struct.calcsize(order + count)
        size = struct.calcsize(order + entry)
        for number in range(tags):
            tag, _, parts = struct.unpack_from(order + entry, data, at + number * size)
            if tag in (_STRIP_OFFSETS, _TILE_OFFSETS) and parts > MOST_STRIPS:
                raise SampleError(
                    f"has {parts:,} strips or tiles; save it anew with an image editor"
                )
    except struct.error:  # the file is cut off; the decoder reports it
        return
