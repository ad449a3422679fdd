"""Every source keeps one contract, and gives the same rows of the same photographs."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import precache
from precache.storage.open import open_folder
from precache_workers.sources.base import Fetched
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.kinds import open_source
from tests.support.building import build_here, labels, pixels, write_jpegs
from tests.support.containers import KEY_COLUMNS, ON_DISK, WRITERS
from tests.support.servers import S3Server
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


@pytest.mark.parametrize("kind", WRITERS)
def test_containers_keep_the_contract(kind: str, photos: Path, tmp_path: Path) -> None:
    source = WRITERS[kind](photos, tmp_path)
    assert len(check_source(open_source(source)).table) == 30


@pytest.mark.parametrize("kind", sorted(WRITERS.keys() - ON_DISK))
def test_containers_in_a_bucket_keep_the_contract(
    kind: str, photos: Path, tmp_path: Path, s3: S3Server
) -> None:
    source = Path(WRITERS[kind](photos, tmp_path))
    folder = open_folder("s3://bucket/data", s3.options())
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file():
            folder.put(path.relative_to(tmp_path).as_posix(), [path.read_bytes()])
    uri = f"s3://bucket/data/{source.relative_to(tmp_path).as_posix()}"
    said = "arrow" if kind == "datasets" else None  # a folder is looked into on a disk only
    listing = check_source(open_source(uri, s3.options(), kind=said))
    local = open_source(str(source)).list(lambda count: None)
    assert list(listing.table.keys) == list(local.table.keys)
    np.testing.assert_array_equal(listing.table.labels, local.table.labels)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_same_photographs_give_the_same_rows(kind: str, photos: Path, tmp_path: Path) -> None:
    build_here(photos, tmp_path / "folder.store", RECIPE)
    options = {"key_column": KEY_COLUMNS.get(kind)}
    build_here(WRITERS[kind](photos, tmp_path), tmp_path / "own.store", RECIPE, options)
    wanted, rows = pixels(tmp_path / "folder.store"), pixels(tmp_path / "own.store")
    expected = {plain_name(key): row for key, row in wanted.items()}
    assert {plain_name(key) for key in rows} == expected.keys()
    for key, row in rows.items():
        np.testing.assert_array_equal(row, expected[plain_name(key)])
    classes = {plain_name(key): n for key, n in labels(tmp_path / "folder.store").items()}
    assert {plain_name(key): n for key, n in labels(tmp_path / "own.store").items()} == classes


PLUG_IN = """
    import numpy as np
    from precache.errors import FetchError
    from precache.store.row_table import RowTable
    from precache_workers.sources.base import Listing, Sample
    from precache_workers.sources.kinds import SourceKind

    class Counted:
        labels_with_samples, fetch_threads, index_name = False, 1, ""

        def __init__(self, count):
            self.count = count

        def list(self, tick, seconds=0.0, index=None):
            tick(self.count)
            keys = [str(n) for n in range(self.count)]
            return Listing(RowTable.of_keys(keys, etags=["1"] * self.count))

        def fetch(self, keys, sizes, locations=()):
            known = {str(n) for n in range(self.count)}
            return [
                Sample({"x": np.full(4, int(key))}, content=key) if key in known
                else FetchError(f"no sample {key!r}")
                for key in keys
            ]

        def file_of(self, key):
            return None

    def counted(spec):
        return Counted(int(spec.uri))

    KIND = SourceKind(counted)
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with a source of its own."""
    (tmp_path / "counted.py").write_text(textwrap.dedent(PLUG_IN), "utf-8")
    info = tmp_path / "counted-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counted\nVersion: 1\n", "utf-8")
    (info / "entry_points.txt").write_text("[precache.sources]\ncount = counted:KIND\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("counted", None)


def test_a_plug_in_is_found_by_its_name(plug_in: None, tmp_path: Path) -> None:
    assert len(check_source(open_source("8", kind="count")).table) == 8
    with pytest.raises(precache.UsageError, match=r"no source kind 'counts'; choose .*count"):
        open_source("8", kind="counts")


def test_a_plug_in_that_is_none_is_named(plug_in: None, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("KIND = 1", "utf-8")
    with pytest.raises(precache.SourceError, match="the source plug-in count is a int"):
        open_source("7.count", kind="count")


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
