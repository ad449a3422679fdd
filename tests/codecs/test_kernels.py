"""Rows and the messages about damage are the same, compiled or not, with libzstd or without."""

import contextlib
import dataclasses
import functools
import itertools
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from numcodecs import zstd

import precache
from precache.codecs import kernels
from precache.codecs.chunk import Decoder
from precache.codecs.image import filter_image
from precache.codecs.kernels import OWN, UNCHECKED
from precache.errors import DamageError
from precache.runtime.operating_system import library_places
from tests.conftest import BuiltStore
from tests.support.building import flip

ROOT = Path(precache.__file__).parents[1]

needs_compiled = pytest.mark.skipif(
    not kernels.compiled().has_zstd,
    reason="_rows.c is not compiled, or libzstd is missing",
)


WAYS = {
    "compiled": kernels.compiled(),
    "no libzstd": dataclasses.replace(kernels.compiled(), has_zstd=False),
    "numpy": kernels.Compiled(),
}
"""As it was compiled; where there is no libzstd; and where nothing is compiled."""


@pytest.fixture(params=[*(pytest.param(way, marks=needs_compiled) for way in [*WAYS][:2]), "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiled", lambda: WAYS[request.param])


@pytest.fixture(params=[0, 1 << 40], ids=["past caches", "through caches"])
def past(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of every size past the caches, and none."""
    monkeypatch.setattr(kernels, "PAST_CACHES_NBYTES", request.param)


# --- copying ------------------------------------------------------------------------------------


def _gathered(
    sources: list[bytes], pieces: list[tuple[int, int, int]], shift: int = 0
) -> np.ndarray:
    columns = np.array(pieces, np.int64).reshape(-1, 3).T
    numbers, starts, lengths = map(np.ascontiguousarray, columns)
    total = int(lengths.sum())
    room = np.full(total + shift + 64, 0xAA, np.uint8)
    out = room[shift : shift + total]
    kernels.copy_pieces(list(map(memoryview, sources)), numbers, starts, lengths, out, total)
    assert (room[:shift] == 0xAA).all(), "written before its room"
    assert (room[shift + total :] == 0xAA).all(), "written behind its room"
    return out


@pytest.mark.usefixtures("way", "past")
@pytest.mark.parametrize("shift", [0, 1, 16, 63])
def test_pieces_are_copied_one_after_another(shift: int) -> None:
    for length in (0, 1, 63, 64, 255, 256, 319, 320, 4099, 150_528):
        random = np.random.default_rng(length)
        sources = [random.bytes(length + 300), random.bytes(2 * length + 7)]
        pieces = [(1, 7, length), (0, 299, length), (1, length, length), (0, 1, length)]
        pieces += [(0, 0, 3), *pieces, (1, 3, length)]
        expected = b"".join(sources[n][start : start + size] for n, start, size in pieces)
        assert _gathered(sources, pieces, shift).tobytes() == expected
    for nothing in ([b"abc"], []):
        assert not len(_gathered(nothing, []))


OUTSIDE, OTHER_SIZE = "do not lie in their sources", "another size than the room"


@needs_compiled
def test_pieces_that_lie_outside_or_do_not_fit_are_refused() -> None:
    """Number, start and length of pieces of one source, and the room for them."""
    outside = [
        (0, 0, 11), (0, 11, 0), (0, 4, 7), (0, -1, 4), (0, 0, -1), (1, 0, 1), (-1, 0, 1),
        (0, 2**62, 2**62), (0, 1, 2**63 - 1),
    ]  # fmt: skip
    for pieces, room, said in [
        *(([piece], 11, OUTSIDE) for piece in outside),
        *(([(0, 0, 3), (0, 3, 3)], room, OTHER_SIZE) for room in (0, 5, 7)),
    ]:
        columns, out = map(np.array, zip(*pieces, strict=True)), np.empty(room, np.uint8)
        with pytest.raises(ValueError, match=said):
            kernels.copy_pieces([memoryview(b"0123456789")], *columns, out, room)


@pytest.mark.usefixtures("way", "past")
def test_rows_are_taken_as_numpy_takes_them() -> None:
    random = np.random.default_rng(0)
    for dtype in ("uint8", "float32", "int64"):
        values = random.integers(0, 100, (30, 3, 17, 5)).astype(dtype)
        rows, out = random.integers(0, 30, 12), np.empty((12, 3, 17, 5), dtype)
        kernels.take(values, rows, out)
        np.testing.assert_array_equal(out, values[rows])


# --- CRC32C -------------------------------------------------------------------------------------

SIZES = [0, 1, 7, 63, 64, 255, 256, 257, 319, 320, 4099, 150_528]


@pytest.mark.usefixtures("way")
def test_checksums_are_those_of_google_crc32c() -> None:
    for start, size in itertools.product([0, 1, 15, 64], SIZES):
        data = np.random.default_rng(size).bytes(start + size)[start:]
        wanted = google_crc32c.value(data)
        assert kernels.crc32c(data) == kernels.crc32c(memoryview(data)) == wanted


@needs_compiled
@pytest.mark.usefixtures("past")
@pytest.mark.parametrize("shift", [0, 1, 16, 63])
@pytest.mark.parametrize("size", SIZES)
def test_pieces_are_copied_up_to_the_first_that_is_damaged(size: int, shift: int) -> None:
    random = np.random.default_rng(size)
    rows = [random.bytes(size) for _ in range(6)]
    stored = [row + google_crc32c.value(row).to_bytes(4, "little") for row in rows]
    source, pitch = bytearray(b"".join(stored)), size + 4
    columns = np.zeros(6, np.int64), np.arange(6) * pitch, np.full(6, size, np.int64)
    room = np.full(6 * size + shift + 64, 0xAA, np.uint8)
    out = room[shift : shift + 6 * size]

    def copied(checked: list[int], check: np.ndarray | int = OWN) -> int:
        checks = np.where(np.isin(np.arange(6), checked), check, UNCHECKED)
        out[:] = 0xAA
        return kernels.copy_pieces([memoryview(source)], *columns, out, out.nbytes, checks)

    assert copied([0, 1, 2, 3, 4, 5]) == copied([1, 4]) == copied([]) == 6
    assert out.tobytes() == b"".join(rows)
    known = np.array([google_crc32c.value(row) for row in rows])
    assert copied([0, 1, 2, 3, 4, 5], known) == 6
    if size:
        assert copied([1, 4], known[::-1]) == 1
    for place in {0, size // 2, size - 1, size, size + 3} - {-1}:
        source[3 * pitch + place] ^= 4
        assert copied([0, 1, 2, 3, 4, 5]) == copied([3]) == 3
        assert out[: 3 * size].tobytes() == b"".join(rows[:3])
        assert copied([0, 1, 2, 4, 5]) == 6
        source[3 * pitch + place] ^= 4
    assert (room[:shift] == 0xAA).all(), "written before its room"
    assert (room[shift + len(out) :] == 0xAA).all(), "written behind its room"


@needs_compiled
@pytest.mark.parametrize("behind", [0, 3])
def test_a_checksum_that_lies_outside_is_refused(behind: int) -> None:
    data, out = memoryview(bytes(100 + behind)), np.empty(100, np.uint8)
    columns = [np.array([value]) for value in (0, 0, 100)]
    assert kernels.copy_pieces([data], *columns, out, 100) == 1
    for checks in ([OWN], [UNCHECKED, OWN]):
        with pytest.raises(ValueError, match=OUTSIDE):
            kernels.copy_pieces([data], *columns, out, 100, np.array(checks))


@pytest.fixture
def patient_threads() -> Iterator[None]:
    """No thread takes the interpreter lock from one that does not let go of it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


@needs_compiled
@pytest.mark.usefixtures("patient_threads")
def test_other_threads_go_on_while_a_checksum_is_computed() -> None:
    data, went_on = memoryview(bytes(64 << 20)), False
    for _ in range(100):  # a machine that is busy elsewhere may be late
        with ThreadPoolExecutor(1) as pool:
            started = threading.Event()
            done = pool.submit(lambda started=started: (started.set(), kernels.crc32c(data)))
            started.wait()
            went_on = went_on or not done.done()
        if went_on:
            return
    raise AssertionError("the lock was held all the time")


# --- the filter ---------------------------------------------------------------------------------


@needs_compiled
def test_rows_of_another_shape_are_refused() -> None:
    functions, frame = kernels.compiled().functions, [memoryview(zstd.compress(bytes(48)))]
    assert functions is not None
    for shape in ((0, 4, 4), (3, 0, 4), (3, 4, -4), (3, 5, 4), (2**40, 2**40, 2**40)):
        with pytest.raises(ValueError, match="another shape"):
            functions.undo_image(np.zeros(48, np.uint8), *shape)
        with pytest.raises(ValueError, match="another shape"):
            functions.decode(frame, None, np.zeros(48, np.uint8), True, *shape, False)


# --- zstd ---------------------------------------------------------------------------------------


def _decoded(
    frames: Sequence[bytes | bytearray],
    out: np.ndarray,
    checks: list[int] | None = None,
    filtered: bool = False,
) -> int:
    numbers = None if checks is None else np.array(checks)
    how: dict[str, Any] = {"filtered": filtered, "batch_nbytes": out.nbytes, "checks": numbers}
    return kernels.decode_frames(list(map(memoryview, frames)), out, **how)


@needs_compiled
@pytest.mark.usefixtures("past")
@pytest.mark.parametrize("filtered", [False, True])
def test_frames_are_decoded_up_to_the_first_that_is_not_whole(filtered: bool) -> None:
    rows = np.random.default_rng(0).integers(0, 9, (6, 3, 20, 31), np.uint8)
    stored = filter_image(rows) if filtered else rows
    frames = [bytes(zstd.compress(row, 1, True)) for row in stored]
    frames[3] = frames[3][:40] + bytes([frames[3][40] ^ 1]) + frames[3][41:]
    frames[4] = frames[4][:-1]
    frames[5] = bytes(zstd.compress(stored[5, :2], 1, True))
    for first, whole in ((0, 3), (3, 0), (4, 0), (5, 0), (6, 0)):
        out = np.zeros_like(rows[first:])
        assert _decoded(frames[first:], out, filtered=filtered) == whole
        np.testing.assert_array_equal(out[:whole], rows[first : first + whole])


@needs_compiled
@pytest.mark.usefixtures("past")
def test_a_content_checksum_is_checked_where_that_is_asked_for() -> None:
    rows = np.random.default_rng(0).integers(0, 9, (4, 3, 20, 31), np.uint8)
    frames, out = [bytearray(zstd.compress(row, 1, True)) for row in rows], np.empty_like(rows)
    frames[2][-1] ^= 1  # of the checksum
    whole = functools.partial(_decoded, frames, out)
    assert whole([OWN, OWN, UNCHECKED, OWN]) == whole([UNCHECKED] * 4) == 4
    np.testing.assert_array_equal(out, rows)
    assert whole() == whole([OWN] * 4) == whole([UNCHECKED, UNCHECKED, OWN, OWN]) == 2
    first, second, *_ = (int.from_bytes(frame[-4:], "little") for frame in frames)
    assert whole([first, second, UNCHECKED, UNCHECKED]) == 4
    assert whole([first, first, UNCHECKED, UNCHECKED]) == 1
    with pytest.raises(ValueError, match="another shape"):
        whole([OWN, OWN, UNCHECKED])


EMPTY, SKIPPABLE = bytes(zstd.compress(b"", 1, True)), b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
OTHER_FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "two frames": lambda frame: bytes(zstd.compress(bytes(600))) + bytes(zstd.compress(bytes(600))),
    "an empty frame before it": lambda frame: EMPTY + frame,
    "an empty frame behind it": lambda frame: frame + EMPTY,
    "a skippable frame before it": lambda frame: SKIPPABLE + frame,
    "a skippable frame behind it": lambda frame: frame + SKIPPABLE,
    "a shorter row": lambda frame: bytes(zstd.compress(bytes(1199), 1, True)),
    "a longer row": lambda frame: bytes(zstd.compress(bytes(1201), 1, True)),
    "nothing": lambda frame: b"",
}


@needs_compiled
@pytest.mark.parametrize("case", OTHER_FRAMES)
def test_what_is_not_one_frame_of_a_row_is_left_to_python(case: str) -> None:
    """Which takes frames without content behind it, and refuses all else."""
    frame = OTHER_FRAMES[case](bytes(zstd.compress(bytes(1200), 1, True)))
    out, harmless = np.empty((1, 1200), np.uint8), case.endswith("behind it")
    assert _decoded([frame], out) == 0
    for verify in (True, False):
        raises = pytest.raises(DamageError, match="does not decode")
        with contextlib.nullcontext() if harmless else raises:
            Decoder(("zstd",)).decode(memoryview(frame), out, verify=verify)


@needs_compiled
def test_damage_is_said_in_the_same_words(
    store: BuiltStore,
    copy_store: Callable[[BuiltStore], BuiltStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, said = copy_store(store), set[str]()
    flip(own.shard_path(1), 0.5, 0x55)
    for compiled in WAYS.values():
        monkeypatch.setattr(kernels, "compiled", lambda compiled=compiled: compiled)
        with pytest.raises(DamageError) as caught, precache.Loader(own.path, 4, seed=0) as loader:
            list(loader)
        said.add(str(caught.value))
    assert len(said) == 1


# --- installation -------------------------------------------------------------------------------


@pytest.mark.heavy
def test_without_a_compiler_the_installation_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    copy, target = tmp_path / "clone", tmp_path / "site"
    for name in ("precache", "workers"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", target, copy],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "CC": "/nonexistent/cc"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list((target / "precache/codecs").glob("*.so"))
    # An editable installation beside it would be asked for what is missing here.
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
        "from precache.codecs import kernels; print(kernels.compiled().functions, kernels.__file__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(target)}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.split() == ["None", str(target / "precache/codecs/kernels.py")]


def test_a_loader_warns_once_of_what_is_missing(
    image_store: BuiltStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for compiled, expected in (
        (kernels.Compiled(), [kernels.NO_COMPILED_CODE]),
        (kernels.Compiled(kernels), [kernels.NO_LIBZSTD]),
        (kernels.Compiled(kernels, has_zstd=True), []),
    ):
        monkeypatch.setattr(kernels, "compiled", lambda compiled=compiled: compiled)
        kernels.warn_if_slow.cache_clear()
        caplog.clear()
        for _ in range(2):
            precache.Loader(image_store.path, 4).close()
        own = [record for record in caplog.records if record.name == "precache.codecs.kernels"]
        assert [record.message for record in own] == expected


@needs_compiled
def test_only_a_library_with_zstd_is_loaded(tmp_path: Path) -> None:
    functions = kernels.compiled().functions
    assert functions is not None
    for path in (tmp_path / "none.so", tmp_path / "bad \udcff.so", functions.__file__):
        assert not functions.load_zstd(str(path))
    assert functions.load_zstd(library_places("zstd", 1)[1])


def _zstd_libraries(prefix: Path) -> tuple[list[str], list[str]]:
    """Files called libzstd that a process has mapped after the import, and after the first use."""
    code = (
        f"import json, pathlib, sys; sys.prefix = {str(prefix)!r}\n"
        "from precache.codecs import kernels\n"
        "def mapped():\n"
        "    lines = pathlib.Path('/proc/self/maps').read_text().splitlines()\n"
        "    return sorted({line.split()[-1] for line in lines if 'libzstd' in line})\n"
        "imported = mapped()\n"
        "assert kernels.compiled().has_zstd\n"
        "print(json.dumps([imported, mapped()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported, used = json.loads(done.stdout)
    return imported, used


@needs_compiled
def test_zstd_is_loaded_on_first_use_of_the_system_or_first_of_the_environment(
    tmp_path: Path,
) -> None:
    """conda installs it there, where the dynamic linker does not look."""
    imported, [system] = _zstd_libraries(tmp_path)
    assert imported == []
    assert Path(system).name.partition(".")[0] == "libzstd"
    own = tmp_path / "lib" / library_places("zstd", 1)[1]
    own.parent.mkdir()
    shutil.copy(system, own)
    assert _zstd_libraries(tmp_path) == ([], [str(own)])
