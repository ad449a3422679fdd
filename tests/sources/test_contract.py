"""Every source keeps one contract, and gives the same rows of the same photographs."""

import gzip
import io
import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precache
from precache.errors import FetchError, PrecacheError, SampleError, SourceError
from precache.storage.open import open_folder
from precache_workers.shards import shard_task
from precache_workers.sources.base import Columns, Fetched, Sample
from precache_workers.sources.containers import ContainerSource
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.kinds import open_source
from tests.support.building import build_here, cut, encoded, labels, pixels, write_jpegs
from tests.support.containers import (
    KEY_COLUMNS,
    ON_DISK,
    SOURCES,
    WRITERS,
    Members,
    add,
    fetched,
    in_bucket,
    keys_of,
    listed,
)
from tests.support.servers import S3Server, web_server
from tests.support.source_contract import check_source

RECIPE = precache.Recipe.image(resize=40, crop=32)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_jpegs(folder, 30)
    return folder


def plain_name(key: str) -> str:
    """The name of a photograph in whatever container it lies."""
    return key.rpartition("/")[2].partition(".")[0]


def test_a_folder_keeps_the_contract(photos: Path) -> None:
    assert len(check_source(open_source(str(photos))).table) == 30


@pytest.fixture(scope="module")
def folder_store(photos: Path) -> Path:
    build_here(photos, photos.with_name("folder.store"), RECIPE)
    return photos.with_name("folder.store")


@pytest.mark.parametrize("kind", WRITERS)
def test_containers_keep_the_contract_and_give_the_same_rows(
    kind: str, photos: Path, folder_store: Path, tmp_path: Path
) -> None:
    source = WRITERS[kind](photos, tmp_path)
    assert len(check_source(open_source(source)).table) == 30
    build_here(source, tmp_path / "own.store", RECIPE, {"key_column": KEY_COLUMNS.get(kind)})
    wanted, rows = pixels(folder_store), pixels(tmp_path / "own.store")
    expected = {plain_name(key): row for key, row in wanted.items()}
    assert {plain_name(key) for key in rows} == expected.keys()
    for key, row in rows.items():
        np.testing.assert_array_equal(row, expected[plain_name(key)])
    classes, own = labels(folder_store), labels(tmp_path / "own.store")
    assert {plain_name(k): n for k, n in own.items()} == {
        plain_name(k): n for k, n in classes.items()
    }


@pytest.mark.parametrize("kind", sorted(WRITERS.keys() - ON_DISK))
def test_containers_in_a_bucket_keep_the_contract(
    kind: str, photos: Path, tmp_path: Path, s3: S3Server
) -> None:
    source = Path(WRITERS[kind](photos, tmp_path))
    bucket = in_bucket(tmp_path, "s3://bucket/data", s3.options())
    uri = f"{bucket}/{source.relative_to(tmp_path).as_posix()}"
    said = "arrow" if kind == "datasets" else None  # a folder is looked into on a disk only
    listing = check_source(open_source(uri, s3.options(), kind=said))
    local = open_source(str(source)).list(lambda count: None)
    assert list(listing.table.keys) == list(local.table.keys)
    np.testing.assert_array_equal(listing.table.labels, local.table.labels)


# --- containers that change, or are damaged -----------------------------------------------------

FORMATS = ("tar", "zip", "parquet", "arrow", "tfrecord", "lmdb")
MEMBERS = [(f"{'cat' if n % 2 else 'dog'}/{n:03d}.jpg", encoded(cut(n))) for n in range(12)]


def rewritten(kind: str, folder: Path, members: Members) -> str:
    """A container in place of the one that was there, with another time."""
    for path in folder.glob("a.*"):
        path.unlink()
    source = SOURCES[kind](folder, members)
    os.utime(source, (1, 1))
    return source


@pytest.mark.parametrize("kind", FORMATS)
def test_a_container_that_changed_after_listing_is_noticed(kind: str, tmp_path: Path) -> None:
    columns = Columns(key=keys_of(kind).get("key_column"))
    source = open_source(SOURCES[kind](tmp_path, MEMBERS[:4]), columns=columns)
    table = source.list(lambda count: None).table
    rewritten(kind, tmp_path, [("dog/new.jpg", encoded(cut(50))), *MEMBERS[:4]])
    for error in source.fetch(table.keys, table.sizes.tolist(), table.locations):
        assert isinstance(error, FetchError)
        assert "has changed since it was listed" in str(error)
    [again] = source.fetch([table.keys[1]], [-1])  # by keys alone it is listed anew
    assert isinstance(again, Sample)
    data = {name[-7:]: data for name, data in MEMBERS}
    assert data[table.keys[1][-7:]] in again.inputs.values()


def tar_of(first: int) -> bytes:
    """A tar of photographs from a number on, whose headers are those of each other one."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for number in range(40):
            data = encoded(cut(first + number)).ljust(4000, b"\0")
            add(tar, f"{number:02}.jpg", data, mtime=1000)
    return stream.getvalue()


@pytest.mark.parametrize("where", ["disk", "ignored", "touched", "s3", "https", "gzip"])
def test_an_archive_of_equal_headers_that_is_rewritten_during_a_build_is_noticed(
    where: str, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = gzip.compress if where == "gzip" else bytes
    folder, name = tmp_path / "in", "a.tar.gz" if where == "gzip" else "a.tar"
    source, options = str(folder / name), {"ignore_ctime": where == "ignored"}
    (folder / name).parent.mkdir()
    receipt = shard_task.create_receipt

    def put(first: int) -> None:
        (folder / name).write_bytes(packed(tar_of(first)))
        if where in ("disk", "ignored"):
            os.utime(folder / name, (9, 9))
        if where == "s3":
            open_folder("s3://bucket", s3.options()).put(name, [tar_of(first)])

    def rewriting(*arguments: Any, **more: Any) -> Any:
        made = receipt(*arguments, **more)
        put(50)
        return made

    with web_server(folder) as base:
        if where == "s3":
            source, options["storage_options"] = f"s3://bucket/{name}", s3.options()
        if where == "https":
            source = f"{base}/{name}"
        how: dict[str, Any] = {"address": "serial", "shard_samples": 16, **options}
        put(0)
        if where == "https":
            os.utime(folder / name, (9, 9))
        monkeypatch.setattr(shard_task, "create_receipt", rewriting)
        store = tmp_path / "store"
        if where == "ignored":
            assert precache.build(source, store, RECIPE, **how).samples == 40
            return
        with pytest.raises(PrecacheError, match="has changed since it was listed"):
            precache.build(source, store, RECIPE, **how)
        monkeypatch.setattr(shard_task, "create_receipt", receipt)
        assert precache.build(source, store, RECIPE, **how).samples == 40
        precache.build(source, tmp_path / "new", RECIPE, **how)
    wanted = pixels(tmp_path / "new")
    for key, row in pixels(store).items():
        np.testing.assert_array_equal(row, wanted[key])


def test_a_node_may_read_a_copy_of_an_archive_with_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(0))
    os.utime(path, (9, 9))
    source = open_source(str(path))
    locations = source.list(lambda count: None).table.locations
    assert locations is not None
    source.require_unchanged(locations)
    path.write_bytes(tar_of(0))
    os.utime(path, (9, 9))
    with pytest.raises(FetchError, match="has changed since it was listed"):
        source.require_unchanged(locations)
    monkeypatch.setattr("precache_workers.sources.containers.this_node", lambda: "another")
    source.require_unchanged(locations)
    os.utime(path, (8, 8))
    with pytest.raises(FetchError, match=r"has changed since it was listed.*rsync -t"):
        source.require_unchanged(locations)


def test_files_of_which_a_server_tells_nothing_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(0))
    text = "1 of 1 files have neither ETag nor Last-Modified, such as http.*not noticed"
    with web_server(tmp_path) as base:
        assert not [n for n in listed(f"{base}/a.tar").notes if re.search(text, n)]
    with web_server(tmp_path, silent=True) as base:
        source = open_source(f"{base}/a.tar")
        listing = source.list(lambda count: None)
        assert [n for n in listing.notes if re.search(text, n)]
        assert listing.table.locations is not None
        source.require_unchanged(listing.table.locations)
        (tmp_path / "a.tar").write_bytes(tar_of(0) + bytes(512))
        with pytest.raises(FetchError, match="has changed since it was listed"):
            source.require_unchanged(listing.table.locations)


@pytest.mark.parametrize("kind", FORMATS)
def test_of_a_changed_container_only_what_changed_is_computed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"address": "serial", "shard_samples": 100, **keys_of(kind)}
    precache.build(SOURCES[kind](tmp_path, MEMBERS), tmp_path / "store", RECIPE, **options)
    changed = [*MEMBERS[:4], (MEMBERS[4][0], encoded(cut(99))), *MEMBERS[5:]]
    source = rewritten(kind, tmp_path, changed)
    read, fetch = set[str](), ContainerSource.fetch

    def noted(self: ContainerSource, keys: Sequence[str], *rest: Any) -> Any:
        read.update(keys)
        return fetch(self, keys, *rest)

    monkeypatch.setattr(ContainerSource, "fetch", noted)
    assert precache.build(source, tmp_path / "store", RECIPE, **options).rows_reused == 11
    assert (len(read) == 1) is (kind == "zip"), "a checksum spares the reading of the others"
    precache.build(source, tmp_path / "fresh", RECIPE, **options)
    own = pixels(tmp_path / "store")
    for key, row in pixels(tmp_path / "fresh").items():
        np.testing.assert_array_equal(own[key], row)


REFUSED = {
    "tar": "is no tar archive",
    "zip": "no directory at its end",
    "parquet": "cannot be read",
    "arrow": "cannot be read|cut off",
    "tfrecord": "is no TFRecord file",
    "lmdb": "cannot be read",
    "jsonl": "is not JSON",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_cut_off_or_of_other_bytes_is_no_container(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    for data in (b"no container at all, but long enough to be one " * 400, b"\x9a\x07" * 9999):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=REFUSED[kind]):
            listed(path)
    if kind == "jsonl":
        return
    path.unlink()
    data = Path(SOURCES[kind](tmp_path, MEMBERS[:4])).read_bytes()
    most = len(data.rstrip(b"\0")) * 3 // 4
    for length in (0, 1, 8, 20, 40, 100, 400, 512, 700, 1527, 1536, 4096, most // 2, most):
        path.write_bytes(data[: min(length, most)])
        with pytest.raises(SourceError, match=r"cut off|cannot be read|no TFRecord file|is empty"):
            listed(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_sample_over_the_limit_is_a_hole(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path, [("cat/1.jpg", bytes(5000)), ("cat/2.jpg", bytes(100))])
    large, small = fetched(source, most_bytes=1000)
    assert isinstance(large, SampleError)
    assert "--max-sample-bytes" in str(large)
    assert isinstance(small, Sample)
    opened = open_source(source, most_bytes=1000)
    keys = opened.list(lambda count: None).table.keys
    large, small = opened.fetch(keys, [-1, -1])  # no size is known
    assert isinstance(large, SampleError) is (kind in ("parquet", "arrow", "lmdb"))
    assert isinstance(small, Sample)


places = st.floats(0, 1, exclude_max=True)
values = st.sampled_from(b"\0\1\4\x08\x7f\x80\xff")


@pytest.mark.parametrize("kind", ["tar", "zip", "arrow", "tfrecord"])
@settings(max_examples=60, deadline=None)
@given(damage=st.lists(st.tuples(places, values), min_size=1, max_size=4))
def test_damaged_bytes_are_refused_or_lead_into_the_container(
    tmp_path_factory: pytest.TempPathFactory, kind: str, damage: list[tuple[float, int]]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    image = b"\xff\xd8\xff"
    path = Path(SOURCES[kind](folder, [("a/1.jpg", image), ("b/2.jpg", image + b"\0")]))
    whole = bytearray(path.read_bytes())
    for part, value in damage:
        whole[int(part * len(whole))] = value
    path.write_bytes(whole)
    try:
        samples = fetched(path)
    except PrecacheError:
        return
    for one in samples:
        assert isinstance(one, SampleError | FetchError) or one.nbytes <= len(whole)


class Backwards(FolderSource):
    """A source that fetches in another order than it is asked to."""

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Sequence[str] = ()
    ) -> Sequence[Fetched]:
        return super().fetch(keys[::-1], sizes[::-1])


def test_a_source_that_breaks_the_contract_is_refused(photos: Path) -> None:
    source = open_source(str(photos))
    assert isinstance(source, FolderSource)
    with pytest.raises(AssertionError, match="by its key alone"):
        check_source(Backwards(source.folder))
