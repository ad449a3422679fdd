"""Files that would take a library long, by what they have besides pixels."""

import struct
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from precache.errors import SampleError
from precache.recipe.ops import Decode
from precache_workers.ops.decoding import decode
from precache_workers.ops.segments import MOST_METADATA, MOST_PARTS, MOST_SCANS, MOST_STRIPS, cut
from tests.support.building import encoded, photograph
from tests.support.pictures import by_pillow, oriented, png_chunk

SMALL = photograph().resize((64, 48))
PROGRESSIVE = encoded(SMALL, progressive=True)
GIF, PNG = (encoded(SMALL.quantize(16), kind) for kind in ("GIF", "PNG"))


def segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body


def jpeg_with(parts: bytes, data: bytes = PROGRESSIVE) -> bytes:
    """A JPEG with more behind its first marker."""
    return data[:2] + parts + data[2:]


def png_with(parts: bytes, before: bytes = b"IDAT", data: bytes = PNG) -> bytes:
    at = data.index(before) - 4
    return data[:at] + parts + data[at:]


def gif_with(parts: bytes) -> bytes:
    at = 13 + (3 << (GIF[10] & 7) + 1)
    return GIF[:at] + parts + GIF[at:]


def blocks(body: bytes, size: int = 255) -> bytes:
    parts = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(bytes((len(part),)) + part for part in parts) + b"\0"


def assert_same_pixels(data: bytes, plain: bytes) -> None:
    for mode in ("RGB", "RGBA"):  # of JPEGs, libjpeg-turbo and Pillow
        expected = by_pillow(plain, mode)
        np.testing.assert_array_equal(decode(data, Decode(mode=mode)), expected)


def scans(more: int, data: bytes = PROGRESSIVE) -> bytes:
    """A JPEG whose last scan comes so many times again."""
    start, end = data.rfind(b"\xff\xda"), data.rfind(b"\xff\xd9")
    return data[:end] + data[start:end] * more + data[end:]


# --- scans --------------------------------------------------------------------------------------


def hidden_scans() -> bytes:
    """Scans behind a false end, before the tables of the second one."""
    many = scans(MOST_SCANS)
    following = many.index(b"\xff\xc4", many.index(b"\xff\xda"))
    return many[:following] + segment(0xFE, b"\xff\xd9") + many[following:]


def scans_of_one_component() -> bytes:
    """A JPEG that is not progressive may have them, too."""
    sequential = encoded(SMALL.convert("L"))
    start, end = sequential.rfind(b"\xff\xda"), sequential.rfind(b"\xff\xd9")
    frame = sequential.index(b"\xff\xc0")
    two = bytearray(sequential[: frame + 9] + b"\2" + sequential[frame + 10 : start])
    two[frame + 2 : frame + 4] = struct.pack(">H", 14)
    two[frame + 13 : frame + 13] = b"\2\x11\0"
    return bytes(two) + sequential[start:end] * 2000 + sequential[end:]


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_jpeg_of_too_many_scans_is_refused(mode: str) -> None:
    usual = PROGRESSIVE.count(b"\xff\xda")
    most = scans(MOST_SCANS - usual)
    np.testing.assert_array_equal(decode(most, Decode(mode=mode)), by_pillow(most, mode))
    with pytest.raises(SampleError, match="has more than 100 scans"):
        decode(scans(MOST_SCANS - usual + 1), Decode(mode=mode))
    for many in (hidden_scans(), scans_of_one_component()):
        with pytest.raises(SampleError, match="has more than 100 scans"):
            decode(many, Decode(mode=mode))


@pytest.mark.parametrize("plain", [PROGRESSIVE, encoded(SMALL)])
@pytest.mark.parametrize("where", ["before", "behind"])
def test_what_looks_like_a_scan_and_is_not_one_does_not_count(where: str, plain: bytes) -> None:
    """A thumbnail in the metadata, a film behind the picture."""
    markers = b"\xff\xda" * 500
    data = plain + markers if where == "behind" else jpeg_with(segment(0xE3, markers), plain)
    assert_same_pixels(data, plain)


# --- metadata -----------------------------------------------------------------------------------

EXIF_6 = oriented(6).tobytes()
LARGE = bytes(65_000)

HEAVY: dict[str, Callable[[], bytes]] = {
    "EXIF in 900 segments": lambda: jpeg_with(
        segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0" + LARGE) * 900
    ),
    "profiles": lambda: jpeg_with(segment(0xE2, b"ICC_PROFILE\0\1\xff" + LARGE) * 100),
    "comments": lambda: jpeg_with(segment(0xFE, LARGE) * 100),
    "Photoshop": lambda: jpeg_with(
        segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 5000) * 100
    ),
    "bytes between segments": lambda: jpeg_with(b"\1" * 10_000_000),
    "chunks before": lambda: png_with(png_chunk(b"prVt", b"") * 90_000),
    "chunks behind": lambda: png_with(png_chunk(b"prVt", b"") * 90_000, b"IEND"),
    "profiles that swell": lambda: png_with(
        png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1_000_000))) * 10_000, b"PLTE"
    ),
    "texts": lambda: png_with(png_chunk(b"tEXt", b"Comment\0" + bytes(1_000_000)) * 70),
    "EXIF of a PNG": lambda: png_with(png_chunk(b"eXIf", b"II*\0\x08\0\0\0" + bytes(9_000_000))),
    "a comment": lambda: gif_with(b"!\xfe" + blocks(bytes(20_000_000))),
    "many comments": lambda: gif_with(b"!\xfe\1x\0" * 40_000),
    "bytes between blocks": lambda: gif_with(b"\1" * 10_000_000),
}


@pytest.mark.parametrize("name", HEAVY)
def test_pillow_is_not_given_what_it_would_parse_for_nothing(name: str) -> None:
    data = HEAVY[name]()
    assert len(cut(data)) < MOST_METADATA + 10_000
    plain = {b"\xff\xd8": PROGRESSIVE, b"GI": GIF}.get(data[:2], PNG)
    assert_same_pixels(data, plain)


@pytest.mark.parametrize("where", [b"IDAT", b"IEND"])
def test_an_orientation_among_the_chunks_of_a_png_holds(where: bytes) -> None:
    plain = encoded(SMALL, "PNG")
    for name, body in (
        (b"eXIf", EXIF_6[6:]),
        (b"tEXt", b"Raw profile type exif\0\nexif\n20\n" + EXIF_6.hex().encode()),
        (b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>'),
    ):
        data = png_with(png_chunk(name, body), where, plain)
        found = decode(data, Decode())
        np.testing.assert_array_equal(found, by_pillow(data), err_msg=str(name))
        assert name == b"iTXt" or found.shape == (64, 48, 3)


JPEG_MARKERS = [*range(0xE1, 0xEE), 0xEF, 0xFE]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(JPEG_MARKERS), st.binary(max_size=300)), max_size=20),
    st.lists(st.tuples(st.sampled_from([b"prVt", b"tEXt", b"tIME"]), st.binary(max_size=90))),
    st.lists(st.tuples(st.sampled_from(b"\xfe\xff\x01"), st.binary(max_size=600))),
)
def test_metadata_never_changes_a_pixel(
    segments: Sequence[tuple[int, bytes]],
    chunks: Sequence[tuple[bytes, bytes]],
    extensions: Sequence[tuple[int, bytes]],
) -> None:
    parts = b"".join(segment(*each) for each in segments)
    assert_same_pixels(jpeg_with(parts), PROGRESSIVE)
    assert_same_pixels(png_with(b"".join(png_chunk(*each) for each in chunks)), PNG)
    shown = b"".join(b"!" + bytes((label,)) + blocks(body) for label, body in extensions)
    assert_same_pixels(gif_with(shown), GIF)


# --- TIFF and BMP -------------------------------------------------------------------------------


def tiff(
    size: tuple[int, int], parts: int, rows: int, more: Sequence[tuple[int, int, int, int]] = ()
) -> bytes:
    """Uncompressed grey, whose strips are all the same bytes, behind the header."""
    entries = [(256, 4, 1, size[0]), (257, 4, 1, size[1]), (258, 3, 1, 8), (259, 3, 1, 1)]
    entries += [(262, 3, 1, 1), (277, 3, 1, 1), (278, 4, 1, rows)]
    at = 8 + 2 + 12 * (len(entries) + 2 + len(more)) + 4
    entries += [(273, 4, parts, at), (279, 4, parts, at), *more]
    packed = b"".join(struct.pack("<HHLL", *entry) for entry in sorted(entries))
    head = b"II*\0" + struct.pack("<LH", 8, len(entries)) + packed + bytes(4)
    return head + struct.pack("<L", at) * parts + bytes(size[0] * rows)


def large_bmp() -> bytes:
    """Of run lengths: 178 million pixels of 7 bytes took 26 seconds."""
    runs = b"\1\5\0\0\0\1"
    head = struct.pack("<IiiHHIIiiII", 40, 178_000_000, 1, 1, 8, 1, len(runs), 0, 0, 256, 0)
    data = b"BM" + struct.pack("<IHHI", 54 + 1024 + len(runs), 0, 0, 54 + 1024) + head
    return data + bytes(1024) + runs


def large_webp() -> bytes:
    """Of a small picture on a large canvas."""
    image = encoded(Image.new("RGB", (16, 16)), "WEBP", lossless=True)
    side = (60_000 - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + side + side + image[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


MANY, TABLES = "has more than 100,000 ", segment(0xDB, (b"\0" + bytes(range(1, 65))) * 1000)
TILE = [(322, 4, 1, 30_000), (323, 4, 1, 30_000), (324, 4, 1, 8), (325, 4, 1, 1000)]
"""A tile of 860 MB."""
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "segments": (lambda: jpeg_with(segment(0xE5, b"") * MOST_PARTS), MANY),
    "fill bytes": (lambda: jpeg_with(b"\xff" * (MOST_PARTS + 1)), MANY),
    "chunks": (lambda: png_with(png_chunk(b"prVt", b"") * MOST_PARTS), MANY),
    "blocks": (lambda: gif_with(b"!\xfe" + blocks(bytes(MOST_PARTS), 1)), MANY),
    "tables": (lambda: jpeg_with(TABLES * 20), "bytes of tables"),
    "a strip again and again": (lambda: tiff((1024, 1024), 5000, 512), "strips or tiles overlap"),
    "strips": (lambda: tiff((64, 64), MOST_STRIPS + 1, 32), "262,145 strips or tiles"),
    "tags": (
        lambda: tiff((64, 64), 2, 32, [(60000 + n, 4, 1, 0) for n in range(5000)]), "tags",
    ),
    "a large tile": (lambda: tiff((64, 64), 1, 64, TILE), "30000 x 30000 px is over the limit"),
    "run lengths": (large_bmp, "178000000 x 1 px is over the limit"),
    "a canvas": (large_webp, "over the limit of 178956970 px"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_take_long_or_much_memory_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(SampleError, match=words):
        decode(make(), Decode(mode="RGBA"))  # by Pillow


def test_strips_that_are_alike_are_decoded() -> None:
    assert decode(tiff((64, 64), 2, 32), Decode()).shape == (64, 64, 3)
