"""Samples are the same by source, size, time and content: files rewritten unseen, equal names."""

import csv
import functools
import io
import os
import random
import re
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import precache
from precache.cli.main import main
from precache.errors import BuildError
from precache.storage.open import open_folder
from precache.store.row_table import RowTable
from precache_workers.planning.content_reader import ContentReader
from precache_workers.runtime.time_limit import FETCHING, samples_at_work
from precache_workers.sources.base import Fetched
from precache_workers.sources.containers import ContainerSource
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.kinds import open_source
from precache_workers.sources.manifests import ManifestSource
from tests.support.building import (
    LONG_AGO,
    assert_same,
    cut,
    encoded,
    pixels,
    rewrite,
    with_equal_ctimes,
    write,
)

RECIPE = precache.Recipe.image(resize=40, crop=32)
NBYTES = 4000
"""Size of each photo, padded: bytes behind the end of a JPEG do not count."""

Photos = dict[str, bytes]
FORMS = ("folder", "tar", "times.tar", "zip", "parquet", "csv", "keys.csv")
fetched: list[str] = []


def photos_from(first: int, count: int = 12) -> Photos:
    """Photos of the same names and sizes, other ones for each `first`."""
    classes = ("cat", "dog", "eel")
    return {f"{classes[n % 3]}/{n:02d}.jpg": padded_photo(first + n) for n in range(count)}


@functools.cache
def padded_photo(number: int) -> bytes:
    return encoded(cut(number), quality=60).ljust(NBYTES, b"\0")


def packed(form: str, photos: Photos) -> bytes:
    """The container of photos; its size depends on their names and sizes alone."""
    sink = io.BytesIO()
    if form.endswith("tar"):
        with tarfile.open(fileobj=sink, mode="w") as tar:
            for number, (key, data) in enumerate(photos.items()):
                info = tarfile.TarInfo(key)
                info.size, info.mtime = len(data), LONG_AGO + number * (form == "times.tar")
                tar.addfile(info, io.BytesIO(data))
    elif form == "zip":
        with zipfile.ZipFile(sink, "w") as archive:
            for key, data in photos.items():
                archive.writestr(zipfile.ZipInfo(key), data)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {
            "image": list(photos.values()),
            "label": [key.partition("/")[0] for key in photos],
        }
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue()


def files_of(form: str, root: Path, photos: Photos) -> dict[Path, bytes]:
    """The files that make a source, besides a table of their names."""
    if form in ("folder", "csv", "keys.csv"):
        return {root / key: data for key, data in photos.items()}
    return {root / f"photos.{form}": packed(form, photos)}


def write_source(form: str, root: Path, photos: Photos) -> str:
    """Write a source, all files dated long ago, and return its name."""
    for path, data in files_of(form, root, photos).items():
        write(path, data)
    if not form.endswith("csv"):
        return str(root if form == "folder" else root / f"photos.{form}")
    sink = io.StringIO()
    keys = [["key"], *([f"k{number}"] for number in range(len(photos)))]
    rows = [["path", "label"], *([key, key[:3]] for key in photos)]
    with_keys = [own + row for own, row in zip(keys, rows, strict=True)]
    csv.writer(sink).writerows(rows if form == "csv" else with_keys)
    write(root / f"list.{form}", sink.getvalue().encode())
    return str(root / f"list.{form}")


def by_rename(path: Path, data: bytes) -> None:
    write(path.with_name("new"), data).replace(path)


Rewrite = Callable[[Path, bytes], None]


def change(path: Path, data: bytes, how: Rewrite = rewrite) -> None:
    """Give a file other bytes, of the same size and time, if it has not these already."""
    before = path.stat()
    if path.read_bytes() != data:
        how(path, data)
    after = path.stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def options_of(form: str) -> dict[str, Any]:
    return {"shard_samples": 4} | ({"key_column": "key"} if form == "keys.csv" else {})


def build(form: str, source: str, store: Path | str, **options: Any) -> Any:
    fetched.clear()
    options = {"address": "serial"} | options_of(form) | options
    return precache.build(source, store, RECIPE, **options)


ROWS: dict[bytes, np.ndarray] = {}
"""Photo -> its row in a new store."""


def rows_of(form: str, photos: Photos) -> dict[str, np.ndarray]:
    """Key -> row, of a build of the photos into a new store."""
    unknown = {f"{n}.jpg": data for n, data in enumerate({*photos.values()} - ROWS.keys())}
    if unknown:
        with tempfile.TemporaryDirectory() as folder:
            source = write_source("folder", Path(folder) / "photos", unknown)
            precache.build(source, f"{folder}/store", RECIPE, address="serial")
            ROWS.update({unknown[key]: row for key, row in pixels(f"{folder}/store").items()})
    keys = {"folder": "{key}", "csv": "{key}", "keys.csv": "k{n}", "parquet": "photos.parquet/{n}"}
    name = keys.get(form, f"photos.{form}/{{key}}")
    return {name.format(n=n, key=key): ROWS[photos[key]] for n, key in enumerate(photos)}


def assert_rows(store: Path, form: str, photos: Photos) -> None:
    """The store has the rows that photos have in a new one."""
    assert_same(pixels(store), rows_of(form, photos))


def record_files(store: Path) -> list[Path]:
    return sorted((store / "_listings").glob("*-samples.parquet"))


@pytest.fixture(autouse=True)
def count_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (FolderSource, ContainerSource, ManifestSource):
        own = kind.fetch

        def fetch(self: Any, keys: Any, *rest: Any, own: Any = own, **named: Any) -> Any:
            if not getattr(self, "sample_keys", None):  # of a table's files, by their keys
                fetched.extend(keys)
            return own(self, keys, *rest, **named)

        monkeypatch.setattr(kind, "fetch", fetch)


def exchange(one: Path, other: Path) -> None:
    one.rename(one.with_name("meanwhile"))
    other.rename(one)
    one.with_name("meanwhile").rename(other)


def exchange_links(one: Path, other: Path) -> None:
    """Let two links lead to each other's folders."""
    leads_to = one.readlink(), other.readlink()
    for link, folder in zip((other, one), leads_to, strict=True):
        link.unlink()
        link.symlink_to(folder)


def write_alike(form: str, one: Path, other: Path) -> str:
    """Write two sources whose names, sizes, mtimes and ctimes are equal; return the name of one."""
    source = write_source(form, one, photos_from(0))
    write_source(form, other, photos_from(500))
    for path in one.rglob("*.*"):
        with_equal_ctimes([path, other / path.relative_to(one)])
    return source


@pytest.mark.parametrize("form", FORMS)
def test_a_source_that_takes_the_place_of_another_is_read_and_one_that_moved_is_compared(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Names, sizes and all times of both are equal."""
    one, other, store = (tmp_path / name for name in ("one", "other", "store"))
    source = write_alike(form, one, other)
    there = str(other / Path(source).relative_to(one))
    options: dict[str, Any] = {"address": "serial", **options_of(form)}
    first = build(form, source, store)
    plan = precache.plan(there, store, RECIPE, ignore_ctime=True, timing=False, **options)
    assert "another source" in str(plan)
    assert plan.rows_computed == 12
    exchange(one, other)
    plan = precache.plan(source, store, RECIPE, timing=False, **options)
    assert (plan.state, plan.rows_computed) == ("build", 12)
    second = build(form, source, store)
    assert second.version != first.version
    assert_rows(store, form, photos_from(500))
    one.rename(tmp_path / "moved")
    moved = str(tmp_path / "moved" / Path(source).relative_to(one))
    third = build(form, moved, store, progress=True)
    said = capfd.readouterr().err
    assert "another source" in said
    assert f"is complete. It is current, in place of version {second.version[:8]}" in said
    assert third.version not in (first.version, second.version)
    assert (third.shards_reused, third.rows_reused) == (third.shards, 12)
    assert sorted(set(fetched)) == sorted(precache.open(store).keys)
    difference = precache.diff(f"{store}@{second.version}", f"{store}@{third.version}")
    assert (difference.samples.changed.count, difference.samples.touched.count) == (0, 12)
    last = build(form, there, store).version
    for name, version in ((moved, third.version), (there, last)):
        assert build(form, name, store).version == version
        assert not fetched
        assert precache.open(store).id == version
    more = photos_from(0) | {"cat/new.jpg": photos_from(90)["cat/00.jpg"]}
    write_source(form, other, more)
    assert build(form, there, store).rows_reused == 12
    assert_rows(store, form, more)


@pytest.mark.parametrize("act", [exchange, exchange_links])
def test_folders_of_one_source_that_are_exchanged_are_read(
    act: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    source, true, store = (tmp_path / name for name in ("photos", "true", "store"))
    write_alike("folder", true / "one", true / "other")
    source.mkdir()
    for name in ("one", "other"):
        if act is exchange:
            (true / name).rename(source / name)
        else:
            (source / name).symlink_to(true / name)
    options: dict[str, Any] = {"label_level": 0, "follow_links": True}
    first = build("folder", str(source), store, **options)
    act(source / "one", source / "other")
    second = build("folder", str(source), store, **options)
    assert second.version != first.version
    build("folder", str(source), tmp_path / "anew", **options)
    assert_same(pixels(store), pixels(tmp_path / "anew"))


EDITS = (
    "rewrite", "rename", "touch", "chmod", "link", "grow", "remove", "return", "lose record",
)  # fmt: skip


@pytest.mark.parametrize(
    ("form", "many"),
    [
        ("folder", False),
        ("folder", True),
        ("times.tar", False),
        ("zip", False),
        ("keys.csv", False),
        *(pytest.param(f, False, marks=pytest.mark.heavy) for f in ("tar", "parquet", "csv")),
    ],
)
def test_rows_follow_contents_through_any_edits(
    form: str, many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and times return, as those of archives that are unpacked with fixed times; what leaves
    contents as they are makes no other version, and is read once. A plan says so, and writes
    nothing."""
    if many:
        monkeypatch.setattr("precache_workers.planning.source_record.MOST_TOUCHED", 0)
    draw, photos, store = random.Random(f"{form} {many}"), photos_from(0), tmp_path / "store"
    root, gone, options = tmp_path / "photos", Photos(), {"address": "serial", **options_of(form)}
    source = write_source(form, root, photos)
    last = build(form, source, store).version
    for number, edit in enumerate((*draw.sample(EDITS, len(EDITS)), "damage table"), 500):
        key, before = draw.choice(list(photos)), dict(photos)
        path = draw.choice([*files_of(form, root, photos)])
        if edit == "damage table":
            table = draw.choice(sorted(store.glob("*/rows/size/c/0")))
            os.truncate(table, table.stat().st_size - 9)
        if edit in ("rewrite", "rename", "damage table"):
            photos[key] = padded_photo(number).ljust(len(photos[key]), b"\0")
            for each, data in files_of(form, root, photos).items():
                change(each, data, rewrite if edit == "rewrite" else by_rename)
        elif edit == "touch":
            moment = LONG_AGO + draw.choice([0, 9])
            os.utime(path, (moment, moment))
        elif edit == "chmod":
            path.chmod(draw.choice([0o600, 0o644]))
        elif edit == "link":
            path.with_name("link").hardlink_to(path)
            path.with_name("link").unlink()
        elif edit == "lose record":
            for record in record_files(store):
                record.unlink() if draw.random() < 0.5 else os.truncate(record, 99)
        else:
            if edit == "grow":
                photos[key] += b"+"
            elif edit == "remove":
                gone = {key: photos.pop(key)}
                (root / key).unlink(missing_ok=True)
            else:
                photos |= gone
            write_source(form, root, photos)
        there = sorted(store.rglob("*"))
        options["timing"] = form == "folder" and edit == "rewrite"
        plan = precache.plan(source, store, RECIPE, **options)
        if edit in ("rewrite", "rename"):
            assert (plan.state, plan.rows_computed) == ("build", 1)
            if form != "zip":  # which has checksums
                ignored = precache.plan(source, store, RECIPE, ignore_ctime=True, **options)
                assert ignored.version == last
        assert sorted(store.rglob("*")) == there
        built = build(form, source, store)
        read = len(fetched)
        assert_rows(store, form, photos)
        assert edit not in ("rewrite", "rename") or built.rows_reused == len(photos) - 1
        assert many or (built.version == last) == (photos == before), edit
        if not many and edit in ("touch", "chmod", "link"):
            each = 1 if path.suffix == ".jpg" else len(photos)
            assert (edit, read) == (edit, 0 if form == "zip" else each)
        last = build(form, source, store).version
        assert (last, fetched) == (built.version, []), edit
    del options["timing"]
    version = precache.ensure(source, store, RECIPE, **options)
    assert version is not None
    assert version.id == last


def test_one_folder_has_several_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, photos = tmp_path / "store", photos_from(0)
    source = Path(write_source("folder", tmp_path / "photos", photos))
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    first = build("folder", str(source), store).version
    fetched.clear()
    names = ["photos", "./photos/", "link", f"{tmp_path}/link/", f"file://{source}"]
    names.append(f"../{tmp_path.name}/photos")
    for name in names:
        assert build("folder", name, store).version == first
        assert not fetched
    key = list(photos)[3]
    change(source / key, photos_from(500)[key])
    second = build("folder", "link", store).version
    assert second != first
    fetched.clear()
    for name in names:
        assert precache.ensure(name, store, RECIPE, address="serial", shard_samples=4).id == second
    assert not fetched


def test_archives_that_are_appended_are_one_source(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(tmp_path / "a.tar", packed("tar", photos_from(0)))
    build("tar", str(tmp_path / "a.tar"), store)
    write(tmp_path / "b.tar", packed("tar", photos_from(300)))
    both = str(tmp_path / "{a,b}.tar")
    assert build("tar", both, store).rows_reused == 12
    assert len(set(fetched)) == 12
    build("tar", both, tmp_path / "anew")
    assert_same(pixels(store), pixels(tmp_path / "anew"))


def test_a_key_of_a_table_that_names_another_file_is_another_sample(tmp_path: Path) -> None:
    store, photos = tmp_path / "store", photos_from(0)
    source = write_source("keys.csv", tmp_path / "photos", photos)
    first = build("keys.csv", source, store)
    table = Path(source)
    text = table.read_text().replace("cat/00.jpg", "-").replace("cat/03.jpg", "cat/00.jpg")
    write(table, text.replace("-", "cat/03.jpg").encode())
    second = build("keys.csv", source, store)
    assert second.version != first.version
    photos["cat/00.jpg"], photos["cat/03.jpg"] = photos["cat/03.jpg"], photos["cat/00.jpg"]
    assert_rows(store, "keys.csv", photos)


def test_many_files_of_another_ctime_are_announced_with_the_flag_that_ignores_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store, photos = tmp_path / "store", photos_from(0)
    source = write_source("folder", tmp_path / "photos", photos)
    command = ["build", source, str(store), "--resize", "40", "--crop", "32", "--address", "serial"]
    assert main(command) == 0
    for count, flags in ((12, ["--ignore-ctime"]), (12, []), (0, []), (1, ["--no-progress"])):
        for key in list(photos)[: count if "--ignore-ctime" not in flags else 12]:
            (tmp_path / "photos" / key).chmod(0o600)
        capfd.readouterr()
        fetched.clear()
        assert main([*command, *flags]) == 0
        assert len(fetched) == (0 if "--ignore-ctime" in flags else count)
        said = re.search(
            r"12 of 12 samples .* ctime.* \(48 KB\).*--ignore-ctime", capfd.readouterr().err
        )
        assert bool(said) == (count == 12 and not flags)


def forged(**columns: Any) -> bytes:
    """A record with a right digest, and other columns, or none at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = {name: [1] for name in ("size", "mtime_ns", "file_state", "known_mtime_ns")}
    texts = {name: ["a"] for name in ("key", "etag", "content", "known_etag")}
    sink = io.BytesIO()
    pq.write_table(pa.table({**numbers, **texts, **columns}), sink)
    return xxhash.xxh3_128_digest(sink.getvalue()) + sink.getvalue()


def not_utf8() -> Any:
    import pyarrow as pa

    return pa.array([b"\xff\xfe"]).view(pa.string())


def test_a_damaged_record_costs_time_alone(tmp_path: Path) -> None:
    store, photos = tmp_path / "store", photos_from(0)
    source = write_source("folder", tmp_path / "photos", photos)
    first = build("folder", source, store).version
    wrong = forged(size=["a"]), forged(etag=[None]), forged(key=not_utf8())
    for damage in (b"", b"no record", b"\0" * 4096, None, *wrong):
        [record] = record_files(store)
        record.write_bytes(record.read_bytes()[:-9] if damage is None else damage)
        assert build("folder", source, store).version == first
        assert sorted(fetched) == sorted(photos)  # but not again
        assert build("folder", source, store).version == first
        assert not fetched
    key = list(photos)[3]
    photos[key] = photos_from(500)[key]
    change(tmp_path / "photos" / key, photos[key])
    assert build("folder", source, store).version != first
    assert_rows(store, "folder", photos)


@pytest.mark.parametrize("brings_labels", [False, True])
def test_a_photo_rewritten_between_two_attempts_is_built_as_it_is_now(
    brings_labels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has no version yet, but shards that are done."""
    store, photos = tmp_path / "store", photos_from(0, 24)
    root = tmp_path / "photos"
    source = write_source("folder", root, photos)
    if brings_labels:
        code = f"""
from pathlib import Path
class Data:
    paths = sorted(Path({str(root)!r}).rglob("*.jpg"))
    def __len__(self): return len(self.paths)
    def __getitem__(self, n): return self.paths[n].read_bytes(), n % 5
    def key(self, n): return f"{{self.paths[n].parent.name}}/{{self.paths[n].name}}"
"""
        write(tmp_path / "code/rewritten_photos.py", code.encode())
        monkeypatch.syspath_prepend(tmp_path / "code")
        source = "python:rewritten_photos:Data"
    for key in sorted(photos)[-2:]:
        write(root / key, b"no photo".ljust(NBYTES))
    with pytest.raises(BuildError):
        build("folder", source, store, on_error="raise", max_failures=None, keep_order=True)
    assert list(store.glob("*/image/c/*"))
    for key, data in photos_from(500, 24).items():
        change(root / key, data)
    build("folder", source, store, keep_order=True)
    assert_rows(store, "folder", photos_from(500, 24))


def test_gc_keeps_the_records_of_sources_that_stay(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name in ("one", "other"):
        source = write_source("folder", tmp_path / name, photos_from(0))
        build("folder", source, store)
    assert len(record_files(store)) == 2
    precache.gc(store, keep=2, older_than=0)
    assert len(record_files(store)) == 2
    removed = precache.gc(store, keep=1, older_than=0)
    assert len(removed.listings) == 1
    [record] = record_files(store)
    fetched.clear()
    build("folder", source, store)
    assert not fetched
    assert record.exists()


def test_a_photo_rewritten_while_it_is_built_is_seen_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, photos = tmp_path / "store", photos_from(0)
    root = tmp_path / "photos"
    source, key = write_source("folder", root, photos), "cat/03.jpg"
    own = FolderSource.fetch

    def fetch(self: Any, keys: Any, *rest: Any) -> Any:
        samples = own(self, keys, *rest)
        if fetched.count(key) == 2 and key in keys:  # after the probe of shapes
            change(root / key, photos_from(500)[key])
        return samples

    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "fetch", fetch)
        first = build("folder", source, store).version
    assert fetched.count(key) == 2
    second = build("folder", source, store)
    assert (second.version != first, second.rows_reused) == (True, 11)
    assert_rows(store, "folder", photos | {key: photos_from(500)[key]})


def test_an_object_that_is_put_again_is_read_once() -> None:
    root, store = open_folder("memory://identity/photos"), "memory://identity/store"
    photos = photos_from(0)
    for key, data in photos.items():
        root.put(key, [data])
    first = build("folder", str(root), store).version
    assert not open_folder(store).names("_listings")  # of a bucket, the listing says all
    root.put("cat/03.jpg", [photos["cat/03.jpg"]])
    assert root.info("cat/03.jpg") is not None
    assert build("folder", f"{root}/", store).version == first
    assert fetched == ["cat/03.jpg"]
    assert build("folder", str(root), store).version == first
    assert not fetched
    root.put("cat/03.jpg", [photos_from(500)["cat/03.jpg"]])
    assert build("folder", str(root), store).version != first


def test_a_touched_photo_that_hangs_is_left_to_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang(source: FolderSource, keys: Sequence[str], *others: object) -> list[Fetched]:
        samples_at_work().begin(FETCHING, *keys, foreign=False)
        released.wait()
        return []

    monkeypatch.setattr(FolderSource, "fetch", hang)
    read = ContentReader(
        open_source(write_source("folder", tmp_path / "photos", photos_from(0))), 0.5, print
    )
    assert read(RowTable.of_keys(["a", "b"]), [0, 1]) == ["", ""]
    released.set()
