"""Builds from listing to commit, in this process or in one that is killed."""

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import precache
from precache.errors import (
    BuildError,
    Hole,
    RecipeError,
    SourceError,
    StorageError,
    StoreError,
    UsageError,
    needs,
)
from precache.storage.local import LocalFolder
from precache.store import lease
from precache.store.build_status import DESCRIPTION
from precache.store.json_documents import FORMAT
from precache.store.labels import narrow
from precache.store.lease import BUILD_LEASES, is_built, latest
from precache.store.receipts import Receipt
from precache.store.row_table import digests_of
from precache.store.tree import SPARE_COPY
from precache_workers.driver.progress import BuildProgress
from precache_workers.driver.totals import holes
from tests.support import building
from tests.support.building import (
    PYTHONPATH,
    REPOSITORY,
    ask,
    build_as_anyone,
    build_until,
    changes,
    cli,
    contents,
    cut,
    encoded,
    end,
    environment,
    identities,
    labels,
    peak_memory,
    pixels,
    poll,
    remains,
    shard_files,
    start,
    write,
    write_jpegs,
)

SMALL = precache.Recipe.image(resize=24, crop=20)
LARGE = precache.Recipe.image(resize=160, crop=150)
"""A row is a chunk of its own: as many rows a shard as are asked for."""


build = functools.partial(building.build, recipe=LARGE)


def fields(**given: dict[str, Any]) -> precache.Recipe:
    return precache.Recipe.from_dict({"fields": given})


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"op": "function", "function": name, "version": "1", **more}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twelve photographs."""
    return write_jpegs(tmp_path / "in", 12)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of this test's own, to be found by builds, and gives its name."""
    name = f"mine_{next(_numbers)}"
    monkeypatch.syspath_prepend(tmp_path / "code")
    (tmp_path / "code").mkdir()

    def make(code: str) -> str:
        path = tmp_path / f"code/{name}.py"
        path.write_text(textwrap.dedent(code))
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        return name

    return make


_numbers = itertools.count()


# --- what is built ------------------------------------------------------------------------------


def test_without_a_resize_a_shape_that_no_measured_sample_has_is_a_bad_sample(
    tmp_path: Path,
) -> None:
    source = write_jpegs(tmp_path / "in", 100)
    write(source / "cat/0003.jpg", encoded(cut(1, (48, 64))))
    result = build(source, tmp_path / "store", recipe=precache.Recipe.image())
    assert precache.open(tmp_path / "store").fields["image"].shape == (3, 48, 64)
    [(key, reason)] = result.holes
    assert key == "cat/0003.jpg"
    assert "its image is uint8 (3, 64, 48), and the rows of this store are uint8 (3, 48, 64)" in (
        reason
    )
    assert result.shards >= 16, "though the set is small"


def test_several_fields_of_several_dtypes(tmp_path: Path, source: Path) -> None:
    decode, small = {"op": "decode"}, {"op": "resize", "size": [16, 24]}
    recipe = fields(
        image={"ops": [decode, {"op": "resize", "size": [40, 50]}]},
        half={
            "ops": [decode, small, {"op": "to_dtype", "dtype": "float16", "scale": True}],
            "codec": "zstd",
        },
        single={"ops": [decode, {"op": "to_dtype", "dtype": "float32", "scale": True}]},
        raw={"ops": [decode, small, {"op": "to_dtype", "dtype": "float32"}], "codec": "raw"},
        double={"ops": [decode, {"op": "to_dtype", "dtype": "float64", "scale": True}]},
        long={"ops": [decode, {"op": "to_dtype", "dtype": "int64"}]},
        sums={"ops": [decode, function(f"{__name__}:channel_sums", dtype="int32", shape=[3])]},
        grey={"ops": [{"op": "decode", "mode": "L"}, small]},
        light={
            "ops": [decode, function(f"{__name__}:is_light", dtype="bool", shape=[1])],
            "codec": "raw",
        },
    )
    result = build(source, tmp_path / "store", recipe=recipe)
    assert result.failed == 0
    version = precache.open(tmp_path / "store")
    assert {name: (f.dtype, f.shape) for name, f in version.fields.items()} == {
        "image": ("uint8", (3, 40, 50)),
        "half": ("float16", (3, 16, 24)),
        "single": ("float32", (3, 48, 64)),
        "raw": ("float32", (3, 16, 24)),
        "double": ("float64", (3, 48, 64)),
        "long": ("int64", (3, 48, 64)),
        "sums": ("int32", (3,)),
        "grey": ("uint8", (1, 16, 24)),
        "light": ("bool", (1,)),
    }
    rows = {name: pixels(tmp_path / "store", name) for name in version.fields}
    for key in version.keys:
        with Image.open(source / key) as image:
            array = np.asarray(image)
        assert rows["sums"][key].tolist() == array.sum((0, 1)).tolist()
        assert rows["light"][key].tolist() == [bool(array.mean() > 128)]
        expected = (array / 255).astype(np.float32).transpose(2, 0, 1)
        assert np.array_equal(rows["single"][key], expected)
        assert np.allclose(rows["double"][key], array.transpose(2, 0, 1) / 255)
        assert np.array_equal(rows["long"][key], array.transpose(2, 0, 1))
        with Image.open(source / key) as image:
            shrunk = np.asarray(image.resize((24, 16), Image.Resampling.BILINEAR), np.float32)
        assert np.abs(rows["raw"][key] - shrunk.transpose(2, 0, 1)).max() <= 3
        assert np.abs(rows["half"][key] * 255 - rows["raw"][key]).max() < 0.2
    assert precache.verify(tmp_path / "store").ok


def channel_sums(array: np.ndarray) -> np.ndarray:
    return array.sum((0, 1), dtype=np.int32)


def is_light(array: np.ndarray) -> np.ndarray:
    return np.array([array.mean() > 128])


def as_float(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) / 3


def nothing(array: np.ndarray) -> None:
    return None


def as_complex(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex64)


def returned(array: np.ndarray, shape: list[int]) -> np.ndarray:
    """Zeros of a shape, whatever comes in."""
    return np.zeros(shape, np.uint8)


SHAPES: list[list[int]] = [
    [3, 64, 48],
    [1, 8, 8],
    # Of these, none looks transposed:
    [64, 48, 3],
    [64, 48, 1],
    [64, 48, 2],  # as optical flow
    [3, 64, 4],  # a strip of RGBA
    [1, 1, 512],  # an embedding
    [64, 48],
    [512],
]


def test_a_function_that_seems_to_return_channels_first_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jpegs(tmp_path / "in", 2)
    ops = [function(f"{__name__}:returned", params={"shape": shape}) for shape in SHAPES]
    recipe = fields(
        **{f"x{n}": {"ops": [{"op": "decode"}, op], "codec": "raw"} for n, op in enumerate(ops)}
    )
    plan = precache.plan(source, tmp_path / "store", recipe, timing=False, address="serial")
    result = build(source, tmp_path / "store", recipe=recipe)
    stored = [(*each[2:], *each[:2]) for each in SHAPES]
    types = {f"x{number}": f"uint8 {shape}" for number, shape in enumerate(stored)}
    assert plan.row_types == result.row_types == types
    warnings = [r.getMessage() for r in caplog.records if "looks like (C, H, W)" in r.getMessage()]
    assert len(warnings) == 2 * 2
    for shape, laid in zip(SHAPES[:2], stored[:2], strict=True):
        text = f"an array of {tuple(shape)}"
        assert sum(text in each and f"stored as {laid}" in each for each in warnings) == 2


def test_a_function_that_returns_what_cannot_be_stored(tmp_path: Path, source: Path) -> None:
    declared = {"dtype": "float16", "shape": [3, 48, 64]}
    for name, more, codec, text in (
        ("nothing", {}, "raw", "returned None"),
        ("as_complex", {}, "raw", "complex64"),
        ("as_float", declared, "raw", "float16.*float32|float32.*float16"),
        ("as_float", {}, "image", "float32"),
    ):
        op = function(f"{__name__}:{name}", **more)
        recipe = fields(x={"ops": [{"op": "decode"}, op], "codec": codec})
        with pytest.raises(UsageError, match=text):
            build(source, tmp_path / "store", recipe=recipe)
        assert not (tmp_path / "store/commits").exists()


# --- again, and after a change ------------------------------------------------------------------


def test_a_build_again_makes_what_is_missing_alone(tmp_path: Path, source: Path) -> None:
    store = tmp_path / "store"
    first = build(source, store, shard_samples=2)
    assert first.raw_bytes == 12 * 150 * 150 * 3
    assert first.ratio == first.raw_bytes / first.stored_bytes
    before, paths = contents(store), shard_files(store)
    written = identities(paths)
    again = build(source, f"file://{store}", shard_samples=2)  # type: ignore[arg-type]
    assert (again.version, again.shards_skipped) == (first.version, again.shards)
    assert again.cpu_seconds == 0
    for name in ("samples", "failed", "raw_bytes", "stored_bytes", "classes", "mean", "std"):
        assert getattr(again, name) == getattr(first, name), name
    assert (contents(store), identities(shard_files(store))) == (before, written)
    for path in [*paths.values()][2:4]:
        path.unlink()
    result = build(source, store, shard_samples=2)
    assert result.shards_skipped == result.shards - 2
    assert result.cpu_seconds > 0
    assert contents(store) == before
    after = identities(shard_files(store))
    assert [name for name in paths if after[name] != written[name]] == [*paths][2:4]
    assert remains(store) == []
    assert precache.verify(store).ok
    end(start(build_until, 25, source, store, LARGE, {"shard_samples": 6}))
    for path in [store, *store.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    read_only = ask(build_as_anyone, source, store, LARGE, {})
    assert getattr(read_only, "version", read_only) == first.version


def test_only_missing_shards_are_made(tmp_path: Path) -> None:
    """Of a build that was killed with some of its shards there, a receipt or object damaged since.

    A version half built is none yet.
    """
    source, half = write_jpegs(tmp_path / "in", 12), tmp_path / "half"
    options = {"shard_samples": 2}
    build(source, tmp_path / "undisturbed", **options)
    total = ask(changes, source, tmp_path / "counted", LARGE, options)
    end(start(build_until, total // 4, source, half, LARGE, options))
    with pytest.raises(StoreError, match="a build was started here: run the same precache build"):
        precache.open(half)
    for damaged in (False, True):
        store = Path(shutil.copytree(half, tmp_path / f"store{damaged}"))
        [receipt, *rest] = receipts = sorted(store.rglob("receipts/*.json"))
        if damaged:
            os.truncate(receipt, receipt.stat().st_size // 2)
        kept = [f"{int(path.stem)}" for path in (rest if damaged else receipts)]
        there = {name: p for name, p in shard_files(store).items() if name.split("/")[2] in kept}
        before = identities(there)
        result = build(source, store, **options)
        assert 0 < result.shards_skipped == len(kept) == len(there) < result.shards
        assert identities(there) == before
        assert contents(store) == contents(tmp_path / "undisturbed")
    path = next(iter(shard_files(half).values()))
    path.write_bytes(path.read_bytes()[:-1])
    build(source, half, **options)
    assert contents(half) == contents(tmp_path / "undisturbed")


# --- failures -----------------------------------------------------------------------------------


def test_more_failures_than_allowed_stop_the_build(tmp_path: Path, source: Path) -> None:
    for number in range(6):
        write(source / f"cat/x{number}.jpg", b"none")
    for _ in range(2):  # failures of earlier runs count
        with pytest.raises(BuildError, match=r"6 of 18 samples failed \(.*\.jpg: not an") as e:
            build(source, tmp_path / "store", shard_samples=1)
        assert "the limit is 5: mend them, or raise --max-failures" in str(e.value)
    with pytest.raises(StoreError):
        precache.open(tmp_path / "store")
    result = build(source, tmp_path / "store", max_failures=6)
    assert result.failed == 6
    assert result.shards_skipped > 0, "what was done is kept"
    (source / "cat/x5.jpg").unlink()
    assert build(source, tmp_path / "other").failed == 5


DATASET = """
    import numpy as np
    from pathlib import Path

    class Flaky:
        def __len__(self):
            return 12

        def __getitem__(self, i):
            if i in (3, 7) and Path({down!r}).exists():
                raise OSError("link is down")
            return np.full((160, 150, 3), i, np.uint8), i
"""


def test_what_cannot_be_fetched_leaves_its_shard_undone_unless_that_is_accepted(
    tmp_path: Path, module: Callable[[str], str]
) -> None:
    flaky = f"python:{module(DATASET.format(down=str(tmp_path / 'down')))}:Flaky"
    recipe, store = precache.Recipe.image(), tmp_path / "store"
    build(flaky, tmp_path / "undisturbed", recipe=recipe, shard_samples=2)
    (tmp_path / "down").touch()
    with pytest.raises(BuildError, match=r"of 6 shards are not done: .*link is down") as e:
        build(flaky, store, recipe=recipe, shard_samples=2)
    assert "run the same command again, or with --accept-missing" in str(e.value)
    with pytest.raises(StoreError, match="run the same precache build command"):
        precache.open(store)
    undone = 6 - len(list(store.rglob("receipts/*.json")))
    assert undone in (1, 2)
    with pytest.raises(BuildError, match="2 of 12 samples failed"):
        build(flaky, tmp_path / "accepted", recipe=recipe, accept_missing=True, max_failures=1)
    result = build(flaky, tmp_path / "accepted", recipe=recipe, accept_missing=True)
    assert {key for key, _ in result.holes} == {"3", "7"}
    assert all("could not be fetched: " in why and "link is down" in why for _, why in result.holes)
    assert labels(tmp_path / "accepted") == {str(i): i for i in range(12) if i not in (3, 7)}
    (tmp_path / "down").unlink()
    result = build(flaky, store, recipe=recipe, shard_samples=2)
    assert (result.failed, result.shards_skipped) == (0, 6 - undone)
    assert contents(store) == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("path", "mode", "kind", "done"),
    [
        ("in/cat/0003.jpg", 0, BuildError, True),
        ("in/dog", 0, StorageError, False),
        ("locked", 0o555, StorageError, False),
        ("locked", 0, StorageError, False),
    ],
)
def test_what_may_not_be_read_or_written_is_named_until_it_may(
    path: str, mode: int, kind: type[Exception], done: bool, tmp_path: Path, source: Path
) -> None:
    """Shards without the sample that cannot be read are done."""
    (tmp_path / "locked").mkdir()
    arguments = (build_as_anyone, source, tmp_path / "locked/store", LARGE, {})
    (tmp_path / path).chmod(mode)
    found = ask(*arguments)
    (tmp_path / path).chmod(0o755)
    assert isinstance(found, kind)
    assert Path(path).name in str(found)
    assert "Permission denied; check its owner and mode" in str(found)
    again = ask(*arguments)
    assert (again.failed, again.shards_skipped) == (0, (again.shards - 1) * done)


# --- bad requests -------------------------------------------------------------------------------


def test_bad_requests_are_refused_and_write_nothing(tmp_path: Path, source: Path) -> None:
    (tmp_path / "empty").mkdir()
    file = write(tmp_path / "file", b"x")
    write(tmp_path / "group/zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
    for number in range(4):
        write(tmp_path / f"broken/{number}.jpg", b"none")
    store = tmp_path / "store"
    version = Path(build(source, store).path)
    for number in (FORMAT - 1, FORMAT + 1):
        shutil.copytree(store, tmp_path / f"format{number}")
        path = tmp_path / f"format{number}" / version.name / "zarr.json"
        document = json.loads(path.read_text())
        document["attributes"]["precache"]["format"] = number
        path.write_text(json.dumps(document))
        (path.parent / SPARE_COPY).unlink()  # whose root would be of that format
    before = contents(tmp_path)
    for kind, text, of, into in (
        (SourceError, "nowhere does not exist", tmp_path / "nowhere", store),
        (SourceError, r"empty has no image \(other files: 0", tmp_path / "empty", store),
        (SourceError, "is not a folder", source / "cat/0000.jpg", store),
        (UsageError, "nowhere:// is not supported", "nowhere://x", store),
        (RecipeError, "cannot find|cannot load", "python:no_such_module:f", store),
        (SourceError, "it is a store, or a version", store, tmp_path / "other"),
        (SourceError, "it is a store, or a version", version, tmp_path / "other"),
        (
            SourceError, "none of the 4 samples tried has a row: .*not an image",
            tmp_path / "broken", tmp_path / "other",
        ),
        (UsageError, "file is a file; choose a folder", source, file),
        (StorageError, "file/store.*Not a directory", source, file / "store"),
        (UsageError, "is a Zarr group, not a store", source, tmp_path / "group"),
        (UsageError, "is a Zarr group, not a store", source, version),
        (UsageError, "names a version; give the store alone", source, tmp_path / "s@3f2a"),
        (UsageError, "nowhere:// is not supported", source, "nowhere://bucket/store"),
        *(
            (
                StoreError, rf"store format {number}, .* format {FORMAT} alone; read it with the r",
                of, tmp_path / f"format{number}",
            )
            for number in (FORMAT - 1, FORMAT + 1)
            for of in (source, source / "cat")
        ),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            build(of, into)  # type: ignore[arg-type]
    recipe = precache.Recipe(fields={"image": precache.Field(ops=[])})
    with pytest.raises(RecipeError, match="begin them with decode"):
        build(source, store, recipe=recipe)
    with pytest.raises(RecipeError, match=r"unknown op 'decoed' \(did you mean decode\?\); choose"):
        fields(image={"ops": [{"op": "decoed"}]})
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("rest", "entries"), [(7, 1), (20, 5)])
def test_a_damaged_log_is_mended_by_removing_the_entry_and_building_again(
    tmp_path: Path, source: Path, rest: int, entries: int
) -> None:
    store = tmp_path / "store"
    versions = [build(source, store, recipe=recipe).version for recipe in (LARGE, SMALL)[-entries:]]
    while len(versions) < entries:
        versions.append(build(source, store, recipe=SMALL, recompute=True).version)
    entry = store / f"commits/00000{entries}.json"
    os.truncate(entry, rest)
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    advice = rf"{re.escape(str(entry))} is damaged or forged: .*Remove that file, and before any gc"
    for use in (
        lambda: precache.open(store),
        lambda: precache.versions(store),
        lambda: precache.gc(store, keep=0),
        lambda: build(source, store, recipe=SMALL),
    ):
        with pytest.raises(StoreError, match=advice):
            use()
    assert before == {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    for version in versions:
        assert precache.open(store / version).id == version
    written = {path: path.stat().st_ino for path in before}
    entry.unlink()
    again = build(source, store, recipe=SMALL)
    assert again.version == versions[-1]
    assert precache.open(store).id == versions[-1]
    assert len(precache.versions(store).versions) == entries
    assert all(path.stat().st_ino == written[path] for path in before if path != entry)
    entry_of_build = entry.read_bytes()
    assert precache.verify(store).ok
    assert before | {entry: entry_of_build} == {
        path: path.read_bytes() for path in store.rglob("*") if path.is_file()
    }


# --- repair -------------------------------------------------------------------------------------


def test_a_repair_of_one_field_leaves_another_that_would_come_out_different(
    tmp_path: Path, source: Path, module: Callable[[str], str]
) -> None:
    """A function that changed under the version declared for it: its new rows must not mix."""
    same = "def f(array):\n    return array\n"
    name = module(same)
    resized = [{"op": "decode"}, {"op": "resize", "size": [150, 150]}]
    recipe = fields(
        image={"ops": resized, "codec": "raw"},
        other={"ops": [*resized, function(f"{name}:f")], "codec": "zstd"},
    )
    store = tmp_path / "store"
    build(source, store, recipe=recipe, shard_samples=4)
    before = contents(store)
    others = shard_files(store, "other").values()
    whole = {path: path.read_bytes() for path in others}
    next(iter(shard_files(store).values())).unlink()
    sys.modules.pop(module("def f(array):\n    return array ^ 1\n"))
    with contextlib.suppress(BuildError):
        build(source, store, recipe=recipe, shard_samples=4)
    assert {path: path.read_bytes() for path in others} == whole
    sys.modules.pop(module(same))
    build(source, store, recipe=recipe, shard_samples=4)
    assert contents(store) == before


# --- kills --------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("repairs", [False, True])
def test_a_build_or_repair_killed_before_each_of_its_changes_finishes(
    repairs: bool, tmp_path: Path, source: Path
) -> None:
    def begin(store: Path) -> Path:
        if repairs:
            shutil.copytree(tmp_path / "undisturbed", store)
            list(shard_files(store).values())[1].unlink()
        return store

    options = {"shard_samples": 4}
    build(source, tmp_path / "undisturbed", **options)
    expected = contents(tmp_path / "undisturbed")
    total = ask(changes, source, begin(tmp_path / "counted"), LARGE, options)
    for moment in range(total):
        store = begin(tmp_path / f"killed{moment}")
        assert end(start(build_until, moment, source, store, LARGE, options)) == -signal.SIGKILL
        build(source, store, **options)
        assert contents(store) == expected, f"killed before change {moment} of {total}"
        assert remains(store) == [], f"killed before change {moment} of {total}"
        shutil.rmtree(store)


# --- disks --------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a given size, or changes its size."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = False

    def mount(size: str) -> Path:
        nonlocal mounted
        options = f"remount,size={size}" if mounted else f"size={size}"
        line = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            subprocess.run(line, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs a file system of its own, and cannot mount one: {error}")
        mounted = True
        return path

    yield mount
    if mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_disk_too_small_is_refused_before_anything_is_written(
    source: Path, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("256k")
    with pytest.raises(StorageError, match=r"needs about .* and its disk has .* free; choose"):
        build(source, disk / "store", recipe=precache.Recipe.image(resize=160, codec="raw"))
    assert list(disk.iterdir()) == []


def test_a_store_on_a_read_only_disk_with_nothing_to_do(
    tmp_path: Path, source: Path, small_disk: Callable[[str], Path]
) -> None:
    """Where its source was moved, there is something to do: to compare what is there now."""
    moved = Path(shutil.copytree(source, tmp_path / "moved"))
    disk = small_disk("16m")
    recipe = precache.Recipe.image(resize=40, crop=32)
    built = build(source, disk / "store", recipe=recipe)
    small_disk("16m,ro")
    again = build(source, disk / "store", recipe=recipe)
    assert (again.version, again.shards_skipped) == (built.version, built.shards)
    with pytest.raises(StorageError, match="Read-only file system"):
        build(moved, disk / "store", recipe=recipe)


@pytest.mark.parametrize("size", ["64k", "420k"])
def test_a_full_disk_is_a_clear_error_and_the_build_goes_on_from_there(
    tmp_path: Path, source: Path, small_disk: Callable[[str], Path], size: str
) -> None:
    recipe = precache.Recipe.image(resize=160, crop=150, codec="raw")
    options: dict[str, Any] = {"shard_samples": 1, "check_space": False}
    disk = small_disk(size)
    with pytest.raises(StorageError, match=r"No space left on device; free some space and run"):
        build(source, disk / "store", recipe=recipe, **options)
    assert not list((disk / "store").glob("commits/*"))
    assert not [name for name in remains(disk / "store") if name.endswith(".tmp")]
    made = len(list(disk.rglob("receipts/*.json")))
    small_disk("16m")
    result = build(source, disk / "store", recipe=recipe, **options)
    assert result.shards_skipped == made
    build(source, tmp_path / "undisturbed", recipe=recipe, **options)
    assert contents(disk / "store") == contents(tmp_path / "undisturbed")
    assert remains(disk / "store") == []


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("codec", ["raw", "image"])
def test_memory_does_not_grow_with_the_source(tmp_path: Path, codec: str) -> None:
    """Four times the images: no more than a few shards' worth of memory."""
    data = encoded(cut(0, (448, 300)).resize((640, 512)), quality=90)
    raw_shard = 8 * 640 * 512 * 3
    peaks = {}
    for count in (32, 128):
        for number in range(count):
            write(tmp_path / f"in{count}/{number}.jpg", data)
        peaks[count] = ask(
            peak_memory,
            tmp_path / f"in{count}",
            tmp_path / f"store{count}",
            precache.Recipe.image(codec=codec),
            {"shard_samples": 8},
        )
    assert peaks[128] - peaks[32] < 2 * raw_shard, "and the source grew by 12 shards"


# --- real photos --------------------------------------------------------------------------------

PHOTOS = REPOSITORY.parent / "shared/photos"


@pytest.mark.skipif(not PHOTOS.is_dir(), reason=f"needs photographs in {PHOTOS}")
def test_real_photos_shrink_without_loss(tmp_path: Path) -> None:
    result = build(PHOTOS, tmp_path / "store", recipe=precache.Recipe.image(resize=256, crop=224))
    assert result.samples == 160
    assert result.failed == 0
    assert result.ratio >= 1.85
    assert precache.open(tmp_path / "store").fields["image"].codec == "image"


def test_a_library_that_is_missing_is_named_with_the_way_out(tmp_path: Path) -> None:
    library, remedy = "backports.zstd", "pip install 'precache[workers]'"
    if sys.version_info >= (3, 14):
        library, remedy = "compression.zstd", "use a Python built with libzstd"
    source = write_jpegs(tmp_path / "in", 2)
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from precache.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", code, "build", source, tmp_path / "out", "--address", "serial"]
    ran = subprocess.run(line, check=False, env=environment(), capture_output=True, text=True)
    assert f"building needs {library}: {remedy}" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 2


BROKEN = "raise ImportError('libGL.so.1: no such file')"
FAILS = "whose import fails (libGL.so.1: no such file): pip install --force-reinstall"


def test_a_library_whose_import_fails_is_named_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path / "path/PIL/__init__.py", BROKEN.encode())
    source = write_jpegs(tmp_path / "in", 2)
    path = os.pathsep.join((str(tmp_path / "path"), PYTHONPATH))
    environ = environment(PYTHONPATH=path)
    ran = cli("build", source, tmp_path / "out", "--address", "serial", env=environ)
    assert ran.stderr.endswith(f"building needs PIL, {FAILS} pillow\n")
    assert (ran.returncode, (tmp_path / "out").exists()) == (2, False)
    for library, package in (("cv2", "opencv-python-headless"), ("pyarrow", "pyarrow")):
        with pytest.raises(UsageError) as caught, needs("building"):
            exec(BROKEN, {"__name__": library})
        assert str(caught.value) == f"building needs {library}, {FAILS} {package}"


# --- the commit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "dtype"),
    [
        (-1, "int8"), (127, "int8"), (128, "int16"), (32767, "int16"), (32768, "int32"),
        (2**31 - 1, "int32"), (2**31, "int64"),
    ],
)  # fmt: skip
def test_labels_take_the_narrowest_type_with_room_for_none(top: int, dtype: str) -> None:
    found = narrow(np.array([-1, top], np.int64))
    assert found.dtype.name == dtype
    assert found.tolist() == [-1, top]


def test_holes_come_in_row_order() -> None:
    empty: Any = {"objects": {}, "content": [], "sums": {}, "seconds": {}, "cpu_seconds": 0.0}
    a, b, c = (Hole("failed", reason) for reason in "abc")
    later, first = {9: b, 5: a}, {3: c}
    found = holes([Receipt(shard=n, holes=own, **empty) for n, own in ((1, later), (0, first))])
    assert list(found.items()) == [(3, c), (5, a), (9, b)]


def test_a_version_says_what_it_has_and_what_made_it(tmp_path: Path) -> None:
    """It travels, and is the same wherever its samples lay; the log alone says where."""
    source = write_jpegs(tmp_path / "a-secret-place", 20)
    write(source / "cat/broken.jpg", b"none")
    result = build(source, tmp_path / "store", recipe=SMALL, shard_samples=8)
    rows = np.stack(list(pixels(tmp_path / "store").values())).astype(np.float64)
    version = precache.open(tmp_path / "store")
    for found in (result, version):  # of all rows that are no holes
        assert found.mean["image"] == pytest.approx(rows.mean((0, 2, 3)), rel=1e-6)
        assert found.std["image"] == pytest.approx(rows.std((0, 2, 3)), rel=1e-6)

    table = version.row_table()
    assert list(table.keys) == list(version.keys)
    assert table.classes == version.classes == ("cat", "dog", "eel")
    assert table.labels.tolist() == version.labels.tolist()
    for key, size in zip(table.keys, table.sizes.tolist(), strict=True):
        assert (source / key).stat().st_size == size
    assert len({*digests_of(version.contents())}) == 21

    attributes = json.loads((Path(result.path) / "zarr.json").read_text())["attributes"]["precache"]
    assert attributes["format"] == FORMAT
    assert f"{attributes['version']}.1" == result.version == Path(result.path).name
    assert (attributes["rows"], attributes["holes"]) == (21, 1)
    assert attributes["classes"] == ["cat", "dog", "eel"]
    assert precache.Recipe.from_dict(attributes["recipe"]) == SMALL
    assert {"precache", "torch", "pillow", "simplejpeg"} <= set(attributes["libraries"])
    assert attributes["fields"]["image"]["stored"] == result.stored_bytes
    assert remains(tmp_path / "store") == []
    for path in Path(result.path).rglob("*"):
        assert not path.is_file() or b"a-secret-place" not in path.read_bytes()


# --- the lease ----------------------------------------------------------------------------------


def beating() -> bool:
    return any(thread.name == "precache-lease" for thread in threading.enumerate())


def await_beats(array: np.ndarray, store: str) -> np.ndarray:
    """The array as it is, once the build, if it has begun, has shown that it lives."""
    if any(Path(store).glob(f"*/{DESCRIPTION}")):
        poll(lambda: any(Path(store).glob(f"*/{BUILD_LEASES}/*.json")), "a beat")
    return array


def test_a_build_has_a_lease_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that fails."""
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.001)
    source, store = write_jpegs(tmp_path / "in", 4), tmp_path / "store"
    write(source / "eel/broken.jpg", b"none")
    ops = [{"op": "decode"}, function(f"{__name__}:await_beats", params={"store": str(store)})]
    with pytest.raises(BuildError):
        build(source, store, recipe=fields(image={"ops": ops}), on_error="raise")
    assert not beating()
    [folder] = {path.parents[2] for path in store.glob(f"*/{BUILD_LEASES}/*.json")}
    last = latest(LocalFolder(folder))
    assert last is not None
    assert last.released
    assert not is_built(LocalFolder(folder))
    assert len(precache.versions(store).unfinished) == 1
    build(source, store, recipe=fields(image={"ops": ops}))
    assert remains(store) == []
    assert not beating()


def test_a_first_shard_without_samples_has_no_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its rows may be removed ones."""
    monkeypatch.setattr("precache_workers.driver.progress.LINE_EVERY", 0)
    with BuildProgress(True) as progress:
        progress.begin(0, 8)
        progress.advance(0, 0)
        progress.advance(8, 0)
    assert "0 of 8 samples\n8 of 8 samples, " in capsys.readouterr().err
