"""One shard, made whole: what it puts, what it leaves out, and that it can be made again."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import zstd
from PIL import Image

import precache
from precache.errors import CrashError, FetchError, SampleError, StorageError
from precache.storage.open import open_folder
from precache.store.layout import RowShape, decode_index
from precache.store.receipts import Receipt, receipt_name
from precache.store.shard_writer import ShardWriter
from precache_workers.planning import source_record
from precache_workers.profiling.row_probe import ProbeTask, run_probe
from precache_workers.shards import shard_objects
from precache_workers.shards.field_writer import FieldWriter
from precache_workers.shards.samples import Job
from precache_workers.shards.shard_task import ShardTask, _build, run_shard
from precache_workers.shards.stored_rows import StoredObject
from precache_workers.sources.base import Sample
from precache_workers.sources.fetching import MAX_HELD_NBYTES, _runs_of_units
from precache_workers.sources.kinds import open_source
from tests.support.building import (
    ask,
    assert_same,
    build_here,
    build_until,
    contents,
    cut,
    encoded,
    end,
    pixels,
    poll,
    remains,
    start,
    write,
    write_jpegs,
)
from tests.support.containers import located
from tests.support.counting import CALLS, build, recipe_of
from tests.support.servers import S3Server
from tests.support.stored import checks_of

RAW = precache.Recipe.image(codec="raw")
WIDTH, HEIGHT = 160, 144
ROW_NBYTES = 3 * HEIGHT * WIDTH
SHAPES = {"image": RowShape((3, HEIGHT, WIDTH), "uint8")}
"""A row is a chunk of its own."""


def photos(folder: Path, count: int) -> list[str]:
    for number in range(count):
        write(folder / f"{number}.png", encoded(cut(number, (WIDTH, HEIGHT)), "PNG"))
    return [f"{number}.png" for number in range(count)]


def task_of(
    tmp_path: Path,
    keys: Sequence[str],
    recipe: precache.Recipe = RAW,
    *,
    shard: int = 0,
    rows_per_shard: int = 8,
    accept_missing: bool = False,
    shapes: dict[str, RowShape] | None = None,
) -> ShardTask:
    source = open_source(str(tmp_path / "in"))
    folder = open_folder(tmp_path / "version")
    shapes = shapes or SHAPES
    sizes = [path.stat().st_size if path.exists() else -1
             for path in (tmp_path / "in" / key for key in keys)]  # fmt: skip
    return ShardTask(
        Job(source, recipe), list(keys), sizes, folder=folder, shapes=shapes,
        rows_per_shard=rows_per_shard, shard=shard, accept_missing=accept_missing,
    )  # fmt: skip


def stored(task: ShardTask) -> bytes:
    return (task.folder.root / task.objects["image"]).read_bytes()


def raw_rows(data: bytes, rows: int, row_nbytes: int = ROW_NBYTES) -> list[bytes]:
    """The rows of a raw shard with a chunk a row and room for `rows`."""
    index = decode_index(memoryview(data)[-(rows * 16 + 4) :], rows)
    places = [(int(offset), int(length)) for offset, length in index if offset != 2**64 - 1]
    assert all(length == row_nbytes + 4 for _, length in places)
    return [data[offset : offset + length - 4] for offset, length in places]


def reading(key: str, tmp_path: Path) -> bytes:
    with Image.open(io.BytesIO((tmp_path / "in" / key).read_bytes())) as image:
        return np.asarray(image).transpose(2, 0, 1).tobytes()


# --- what is put --------------------------------------------------------------------------------


def test_rows_come_in_the_order_of_the_keys(tmp_path: Path) -> None:
    """The last shard is padded in its index alone."""
    keys = photos(tmp_path / "in", 3)[::-1]
    task = task_of(tmp_path, keys, shard=5)
    run_shard(task)
    assert raw_rows(stored(task), 8) == [reading(key, tmp_path) for key in keys]
    assert (tmp_path / "version/image/c/5/0/0/0").exists()


@pytest.mark.parametrize("codec", ["raw", "zstd", "image"])
def test_the_same_task_puts_the_same_bytes(tmp_path: Path, codec: str) -> None:
    """In another process, too."""
    keys = photos(tmp_path / "in", 4)
    write(tmp_path / "in/broken.png", b"none")
    task = task_of(tmp_path, [*keys, "broken.png"], precache.Recipe.image(codec=codec))
    first = run_shard(task)
    timed = {"seconds": {}, "cpu_seconds": 0.0, "began": 0.0}
    before = contents(tmp_path / "version") | {receipt_name(0): b""}
    for second in (run_shard(task), ask(run_shard, task)):
        assert contents(tmp_path / "version") | {receipt_name(0): b""} == before
        assert dataclasses.replace(first, **timed) == dataclasses.replace(second, **timed)


def test_small_rows_share_a_chunk_that_is_padded(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"in/{number}.png", encoded(cut(number, (8, 8)), "PNG"))
    shape = RowShape((3, 8, 8), "uint8")
    per_chunk = shape.rows_per_chunk
    assert per_chunk > 3
    task = task_of(
        tmp_path, ["0.png", "1.png", "2.png"], rows_per_shard=2 * per_chunk, shapes={"image": shape}
    )
    receipt = run_shard(task)
    [chunk] = raw_rows(stored(task), 2, per_chunk * shape.nbytes)
    assert chunk[: 3 * shape.nbytes] == b"".join(
        reading(f"{number}.png", tmp_path) for number in range(3)
    )
    assert not any(chunk[3 * shape.nbytes :])
    assert receipt.objects["image"].raw_nbytes == per_chunk * shape.nbytes


# --- receipts -----------------------------------------------------------------------------------


def test_the_receipt_says_what_was_put(tmp_path: Path) -> None:
    keys = photos(tmp_path / "in", 4)
    task = task_of(tmp_path, keys, shard=3)
    before = time.time()
    receipt = run_shard(task)
    data = stored(task)
    made = receipt.objects["image"]
    assert receipt.shard == 3
    assert made.size == len(data)
    assert made.xxh3 == xxhash.xxh3_128_intdigest(data)
    assert made.ends.tolist() == checks_of(data, len(made.ends)).tolist()
    assert np.count_nonzero(made.ends) == 4
    assert made.raw_nbytes == 4 * ROW_NBYTES
    assert receipt.content == [
        xxhash.xxh3_128_hexdigest((tmp_path / "in" / key).read_bytes()) for key in keys
    ]
    assert set(receipt.seconds) == {"fetch", "ops", "encode", "put"}
    assert min(receipt.seconds.values()) >= 0
    assert receipt.cpu_seconds > 0
    assert receipt.host == socket.gethostname()
    assert before <= receipt.began <= time.time()
    assert receipt.labels is None
    assert Receipt.from_json(task.folder.read(receipt_name(3))) == receipt


def test_all_rows_may_be_holes(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"in/{number}.png", b"none")
    task = task_of(tmp_path, [f"{number}.png" for number in range(3)])
    receipt = run_shard(task)
    assert sorted(receipt.holes) == [0, 1, 2]
    assert raw_rows(stored(task), 8) == [bytes(ROW_NBYTES)] * 3
    assert receipt.sums["image"].count == 0


# --- holes --------------------------------------------------------------------------------------


def test_holes_have_reasons_and_shift_nothing(tmp_path: Path) -> None:
    keys = photos(tmp_path / "in", 4)
    whole = (tmp_path / "in/0.png").read_bytes()
    write(tmp_path / "in/text.png", b"<html>")
    write(tmp_path / "in/short.png", whole[: len(whole) // 2])
    write(tmp_path / "in/large.png", encoded(cut(1, (WIDTH + 1, HEIGHT)), "PNG"))
    write(tmp_path / "in/empty.png", b"")
    order = [keys[0], "text.png", keys[1], "short.png", "large.png", keys[2], "empty.png", keys[3]]
    task = task_of(tmp_path, order, shard=2)
    receipt = run_shard(task)
    assert sorted(receipt.holes) == [17, 19, 20, 22]
    reasons = {row: hole.reason for row, hole in receipt.holes.items()}
    assert {hole.kind for hole in receipt.holes.values()} == {"failed"}
    assert "not an image" in reasons[17]
    assert "truncated" in reasons[19]
    assert f"(3, {HEIGHT}, {WIDTH + 1})" in reasons[20]
    assert f"(3, {HEIGHT}, {WIDTH})" in reasons[20]
    assert reasons[22]
    rows = raw_rows(stored(task), 8)
    expected = [reading(key, tmp_path) if key in keys else bytes(ROW_NBYTES) for key in order]
    assert rows == expected
    valid = np.stack([np.frombuffer(reading(key, tmp_path), np.uint8) for key in keys])
    channels = valid.reshape(4, 3, -1).astype(np.float64)
    assert receipt.sums["image"].count == 4 * HEIGHT * WIDTH
    assert receipt.sums["image"].total == pytest.approx(channels.sum((0, 2)))
    assert receipt.sums["image"].squares == pytest.approx((channels**2).sum((0, 2)))


def test_a_hole_in_one_field_is_a_hole_in_all(tmp_path: Path) -> None:
    keys = photos(tmp_path / "in", 2)
    write(tmp_path / "in/large.png", encoded(cut(1, (WIDTH + 9, HEIGHT)), "PNG"))
    fields = {
        "image": {"ops": [{"op": "decode"}], "codec": "raw"},
        "small": {"ops": [{"op": "decode"}, {"op": "resize", "size": [160, 160]}], "codec": "raw"},
    }
    shapes = {"image": SHAPES["image"], "small": RowShape((3, 160, 160), "uint8")}
    for recipe_fields in (fields, dict(reversed(fields.items()))):
        recipe = precache.Recipe.from_dict({"fields": recipe_fields})
        task = task_of(
            tmp_path, [keys[0], "large.png", keys[1]], recipe,
            shapes={name: shapes[name] for name in recipe_fields},
        )  # fmt: skip
        receipt = run_shard(task)
        assert list(receipt.holes) == [1]
        small = (tmp_path / "version/small/c/0/0/0/0").read_bytes()
        rows = raw_rows(small, 8, 3 * 160 * 160)
        assert any(rows[0])
        assert not any(rows[1])
        assert any(rows[2])
        assert receipt.sums["small"].count == 2 * 160 * 160


# --- fetches that fail --------------------------------------------------------------------------


def test_a_fetch_that_fails_leaves_the_shard_undone(tmp_path: Path) -> None:
    keys = photos(tmp_path / "in", 8)
    task = task_of(tmp_path, keys)
    (tmp_path / "in/1.png").unlink()
    (tmp_path / "in/3.png").write_bytes(b"another size")
    with pytest.raises(
        FetchError, match=r"shard 0: 2 samples could not be fetched: .*1\.png.*3\.png"
    ):
        run_shard(task)
    assert contents(tmp_path / "version") == {}
    shutil.rmtree(tmp_path / "in")
    with pytest.raises(FetchError, match=r"8 samples could not be fetched: .*; and 3 more"):
        run_shard(task)


def test_missing_samples_are_holes_where_accepted(tmp_path: Path) -> None:
    keys = photos(tmp_path / "in", 4)
    task = task_of(tmp_path, keys, accept_missing=True)
    (tmp_path / "in/1.png").unlink()
    receipt = run_shard(task)
    assert list(receipt.holes) == [1]
    kind, reason = receipt.holes[1]
    assert kind == "not fetched"
    assert reason.startswith("could not be fetched: ")
    assert "1.png" in reason
    assert receipt.content[1] == ""
    assert raw_rows(stored(task), 8)[1:3] == [bytes(ROW_NBYTES), reading("2.png", tmp_path)]


def test_of_copies_with_other_rows_the_first_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cannot fetch a sample; its object counts if it has a receipt."""
    monkeypatch.setattr(shard_objects, "RECEIPT_SECONDS", 0.1)
    keys = photos(tmp_path / "in", 4)
    task = task_of(tmp_path, keys, accept_missing=True)
    receipt = _build(dataclasses.replace(task, keys=[*keys[:2], "gone.png", keys[3]]))
    before = stored(task)
    assert _build(task).objects == receipt.objects
    task.folder.remove(receipt_name(0))
    with pytest.raises(CrashError, match="by another copy of its task"):
        _build(task)
    assert stored(task) == before
    assert not task.folder.exists(receipt_name(0))


def of_another_release(data: bytes, order: Sequence[int]) -> bytes:
    """A shard of zstd with room for 8 chunks, encoded anew at another level, in an order."""
    index = decode_index(memoryview(data)[-(8 * 16 + 4) :], 8).tolist()
    chunks = [zstd.decompress(data[at : at + size]) for at, size in index if at != 2**64 - 1]
    writer = ShardWriter((1,), "uint8", 8, lambda chunk: b"")
    for number in order:
        encoded_anew = bytes(zstd.compress(chunks[number], 19, True))
        writer.put_chunks(encoded_anew, [len(encoded_anew)])
    return b"".join(writer.finish()[0])


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("codec", ["zstd", "image"])
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_an_object_of_another_release_of_a_codec_is_kept_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: S3Server, place: str, codec: Any,
    ragged: bool,
) -> None:  # fmt: skip
    keys, shapes = (
        photos(tmp_path / "in", 4),
        {"image": RowShape((3, HEIGHT, WIDTH), "uint8", ragged)},
    )
    task = task_of(tmp_path, keys, precache.Recipe.image(codec=codec), shapes=shapes)
    if place == "bucket":
        uri = f"s3://bucket/{codec}{ragged}"
        task = dataclasses.replace(task, folder=open_folder(uri, s3.options()))
    name, first = task.objects["image"], _build(task)
    data = bytes(task.folder.read(name))
    other, swapped = (of_another_release(data, rows) for rows in ([0, 1, 2, 3], [1, 0, 2, 3]))
    assert other != data
    monkeypatch.setattr(shard_objects, "RECEIPT_SECONDS", 0.1)
    for there, expected in ((other, other), (swapped, None), (other[:-1], None), (b"", None)):
        task.folder.remove(receipt_name(0))
        task.folder.put(name, [there])
        if expected is None:
            with pytest.raises(CrashError, match="by another copy of its task"):
                _build(task)
            task.folder.put(receipt_name(0), [b"of a copy that is not read"])
            continue
        receipt = _build(task)
        assert task.folder.read(name) == expected
        assert not receipt.objects["image"].leaf(name).fault(expected)
        np.testing.assert_array_equal(receipt.objects["image"].ends, checks_of(expected, 8))
        for same in ("content", "shapes", "sums", "holes"):
            assert getattr(receipt, same) == getattr(first, same)
        assert receipt.objects["image"].raw_nbytes == first.objects["image"].raw_nbytes
        assert Receipt.from_json(task.folder.read(receipt_name(0))).objects == receipt.objects


def test_an_object_that_cannot_be_put_leaves_no_receipt(tmp_path: Path) -> None:
    task = task_of(tmp_path, photos(tmp_path / "in", 2))
    write(tmp_path / "version/image", b"a file where a folder must be")
    with pytest.raises(StorageError, match=r"cannot write .*version/image/c/0/0/0/0"):
        run_shard(task)
    assert not (tmp_path / "version" / receipt_name(0)).exists()
    assert not [name for name in remains(tmp_path / "version") if name.endswith(".tmp")]


def test_threads_end_with_the_task_and_torch_gets_its_own_back(tmp_path: Path) -> None:
    keys = photos(tmp_path / "in", 4)
    before = threading.active_count(), torch.get_num_threads()
    run_shard(task_of(tmp_path, keys))
    task = task_of(tmp_path, keys)
    (tmp_path / "in/1.png").unlink()
    with pytest.raises(FetchError):
        run_shard(task)
    assert threading.active_count() <= before[0]
    assert torch.get_num_threads() == before[1]


# --- fetching ahead -----------------------------------------------------------------------------

FETCHED: list[str] = []


class Slides:
    """A source that notes what was fetched."""

    labels_with_samples = False
    fetch_threads = 1

    def list(self, tick: object) -> None:
        raise NotImplementedError

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Sequence[str]
    ) -> list[Sample | FetchError]:
        FETCHED.extend(keys)
        return [Sample({"x": np.zeros(16, np.uint8)}) for _ in keys]


def wait_for_the_next(array: np.ndarray) -> np.ndarray:
    """Rows of the first samples wait until later ones were fetched, which they must not hinder."""
    poll(lambda: len(FETCHED) > 20, "samples were fetched while others were worked on")
    assert len(FETCHED) < 100, "not all at once"
    return array


def test_the_next_samples_are_fetched_during_work_but_not_all(tmp_path: Path) -> None:
    FETCHED.clear()
    op = {"op": "function", "function": f"{__name__}:wait_for_the_next", "version": "1"}
    recipe = precache.Recipe.from_dict({"fields": {"x": {"ops": [op], "codec": "raw"}}})
    keys = [str(number) for number in range(20)]
    task = ShardTask(
        Job(Slides(), recipe), [*keys, *(str(n) for n in range(20, 300))], [-1] * 300,
        folder=open_folder(tmp_path), shapes={"x": RowShape((16,), "uint8")},
        rows_per_shard=4096, shard=0,
    )  # fmt: skip
    receipt = run_shard(task)
    late = [row for row in receipt.holes if row < 20]
    assert late == []
    assert [str(number) for number in range(300)] == FETCHED


@given(st.lists(st.integers(0, 5), max_size=60), st.data())
def test_samples_of_a_unit_come_together_and_in_order(
    units: list[int], data: st.DataObject
) -> None:
    """Each unit is read once, unless more than may be held lies in between."""
    size = data.draw(st.sampled_from([-1, 1, MAX_HELD_NBYTES // 10]))
    locations = located([("a", False)] * len(units), units)
    runs = list(_runs_of_units([size] * len(units), locations))
    assert sorted(place for run in runs for place in run) == list(range(len(units)))
    assert all(len({units[place] for place in run}) == 1 for run in runs)
    if size < 1000:
        assert len(runs) == len(set(units))
    held, yielded = set[int](), 0
    for run in runs:
        held.update(run)
        while yielded in held:
            held.remove(yielded)
            yielded += 1
        assert size < 1000 or len(held) <= 10


# --- the probe ----------------------------------------------------------------------------------


def probe_of(tmp_path: Path, keys: Sequence[str], recipe: precache.Recipe = RAW) -> ProbeTask:
    return ProbeTask(Job(open_source(str(tmp_path / "in")), recipe), keys, [-1] * len(keys))


def test_the_probe_learns_the_shape_of_rows_or_that_they_differ(tmp_path: Path) -> None:
    """It passes over what does not decode, and says why nothing does."""
    for number, width in enumerate((30, 30, 40)):
        write(tmp_path / f"in/{number}.png", encoded(cut(0, (width, 20)), "PNG"))
    write(tmp_path / "in/none.png", b"none")
    keys = ["none.png", "gone.png", "0.png", "1.png"]
    alike = run_probe(probe_of(tmp_path, keys)).shapes
    assert alike == {"image": RowShape((3, 20, 30), "uint8")}
    assert run_probe(probe_of(tmp_path, ["1.png", "2.png"])).shapes["image"].ragged
    with pytest.raises(SampleError, match=r"none of the 2 samples tried has a row: none\.png: not"):
        run_probe(probe_of(tmp_path, keys[:2]))


@pytest.mark.parametrize(
    ("codec", "size"),
    [("raw", (200, 160)), ("zstd", (20, 16)), ("image", (200, 160)), ("image", (20, 16))],
)
def test_the_estimate_of_bytes_is_near_what_is_stored(
    tmp_path: Path, codec: str, size: tuple[int, int]
) -> None:
    keys = []
    for number in range(64):
        write(tmp_path / f"in/{number}.png", encoded(cut(number, size), "PNG"))
        keys.append(f"{number}.png")
    recipe = precache.Recipe.image(codec=codec)
    probe = run_probe(probe_of(tmp_path, keys[::4], recipe))
    assert 64 % probe.shapes["image"].rows_per_chunk == 0
    task = task_of(tmp_path, keys, recipe, rows_per_shard=64, shapes=dict(probe.shapes))
    found = run_shard(task).objects["image"].size
    assert 0.8 < probe.stored["image"] * 64 / found < 2


def shards_in_memory() -> list[object]:
    return [x for x in gc.get_objects() if issubclass(type(x), FieldWriter | StoredObject)]


@pytest.mark.usefixtures("no_collection")
def test_a_shard_leaves_memory_as_soon_as_its_task_ends(tmp_path: Path) -> None:
    """Whatever its rows were made by: a shard may be large, and the collector late."""
    source, store = write_jpegs(tmp_path / "in", 12), tmp_path / "store"
    gc.collect()
    ops = [{"op": "decode"}, {"op": "resize", "size": 32}, {"op": "center_crop", "size": 28}]
    half = {"op": "to_dtype", "dtype": "float16"}
    for codec, more in (
        ("raw", []),
        ("zstd", []),  # encoded anew
        ("raw", [{"op": "center_crop", "size": 24}]),  # cropped
        ("raw", [half]),  # resumed
    ):
        recipe = {"fields": {"image": {"ops": [*ops, *more], "codec": codec}}}
        build_here(source, store, precache.Recipe.from_dict(recipe))
        assert not shards_in_memory()
    write(source / "dog/new.jpg", encoded(cut(99)))
    assert build_here(source, store, precache.Recipe.from_dict(recipe)).rows_reused == 12  # copied
    assert not shards_in_memory()
    with contextlib.suppress(FetchError):
        run_shard(task_of(tmp_path, ["missing.png"]))
    assert not shards_in_memory()


# --- rows of other versions -----------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "source", 40, classes=("cat", "dog"))


def test_recompute_takes_over_no_shard_of_a_build_that_was_killed(
    source: Path, tmp_path: Path
) -> None:
    """What that build took over from an earlier version is not what was asked for."""
    store = tmp_path / "store"
    build(source, store, recipe_of(codec="raw"))
    write(source / "cat/new.jpg", encoded(cut(99)))
    killed = start(build_until, 60, source, store, recipe_of(codec="raw"), {"shard_samples": 8})
    assert end(killed) < 0
    assert list(store.glob("*/_build/receipts/*.json"))
    second = build(source, store, recipe_of(codec="raw"), recompute=True)
    assert (second.shards_skipped, second.rows_reused, len(CALLS)) == (0, 0, 41)


@pytest.mark.parametrize("codec", ["image", "zstd"])
def test_of_several_rows_a_chunk_only_chunks_with_a_change_are_encoded(
    codec: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(80, codec)
    build(source, tmp_path / "store", recipe, shard_samples=16)
    assert precache.open(tmp_path / "store").arrays["image"].chunk_rows == 2
    write(source / "cat/0004.jpg", encoded(cut(70)))
    write(source / "cat/new.jpg", encoded(cut(71)))
    (source / "dog/0007.jpg").unlink()
    encoded_chunks = []
    flush = ShardWriter._flush

    def flush_counted(self: ShardWriter) -> None:
        encoded_chunks.append(1)
        flush(self)

    monkeypatch.setattr(ShardWriter, "_flush", flush_counted)
    second = build(source, tmp_path / "store", recipe, shard_samples=16)
    assert len(encoded_chunks) == 3
    assert second.rows_reused == 38
    again = build(source, tmp_path / "store", recipe, shard_samples=16, recompute=True)
    assert again.rows_reused == 0
    versions = [contents(Path(each.path)) for each in (second, again)]
    for name in ("zarr.json", "_spare/c/0"):
        assert all(version.pop(name) for version in versions)
    assert versions[0] == versions[1]


def test_a_version_in_a_bucket_whose_small_arrays_are_damaged_is_mended(
    s3: S3Server, source: Path
) -> None:
    """Its shards are its own: a service refuses to copy an object onto itself."""
    options = {"storage_options": s3.options()}
    store = "s3://bucket/mended"
    first = build(source, store, recipe_of(codec="raw"), **options)
    folder = open_folder(first.path, s3.options())
    for name in ("label/c/0", "valid/c/0"):
        data = folder.read(name)
        folder.put(name, [data[:-1]])
        assert build(source, store, recipe_of(codec="raw"), **options).version == first.version
        assert folder.read(name) == data
    assert precache.verify(store, storage_options=s3.options()).ok


def test_what_is_linked_needs_no_room_and_another_codec_needs_it_for_all_rows(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(source, tmp_path / "store", recipe_of(codec="zstd"))
    free = first.stored_bytes // 4
    monkeypatch.setattr("precache.storage.local.LocalFolder.free_bytes", lambda self: free)
    write(source / "cat/new.jpg", encoded(cut(99)))
    assert build(source, tmp_path / "store", recipe_of(codec="zstd")).shards_reused == 5
    free = first.stored_bytes
    with pytest.raises(precache.StorageError, match="and its disk has"):
        build(source, tmp_path / "store", recipe_of(codec="raw"))


def test_a_field_that_names_its_input_is_another(source: Path, tmp_path: Path) -> None:
    """Files have bytes alone: a field that starts from anything else has no rows."""
    build(source, tmp_path / "store", recipe_of(codec="raw"))
    field = recipe_of(codec="raw").to_dict()["fields"]["image"]
    recipe = precache.Recipe.from_dict({"fields": {"image": {**field, "input": "image"}}})
    with pytest.raises(precache.PrecacheError, match="fields start from 'image'"):
        build(source, tmp_path / "store", recipe)


def lose_on_link(source: Path, store: Path, recipe: precache.Recipe, version: Path) -> Any:
    """Build, while an earlier version is removed right before its first link."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.link" and os.fspath(arguments[0]).startswith(f"{version}/"):
            shutil.rmtree(version, ignore_errors=True)

    sys.addaudithook(hook)
    source_record.MOST_TOUCHED = 0
    return build_here(source, store, recipe, {"shard_samples": 8})


@pytest.mark.parametrize("change", ["added", "etags alone"])
def test_a_version_that_is_removed_while_it_is_linked_from_does_not_stop_a_build(
    change: str, source: Path, tmp_path: Path
) -> None:
    first = build(source, tmp_path / "store", recipe_of(codec="raw"))
    if change == "added":
        write(source / "cat/new.jpg", encoded(cut(99)))
    else:
        for path in source.rglob("*.jpg"):
            os.utime(path)
    second = ask(lose_on_link, source, tmp_path / "store", recipe_of(codec="raw"), Path(first.path))
    assert not Path(first.path).exists()
    other = build(source, tmp_path / "anew", recipe_of(codec="raw"))
    assert_same(pixels(tmp_path / "store"), pixels(tmp_path / "anew"))
    assert (second.mean, second.std) == (other.mean, other.std)
