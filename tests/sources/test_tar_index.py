"""Indexes beside remote tar archives: fewer bytes to list, and never another listing."""

import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.errors import PrecacheError
from precache.storage.open import open_folder
from precache_workers.sources.base import Listing
from precache_workers.sources.kinds import open_source
from precache_workers.sources.tar_archives import LARGE_BYTES
from tests.support.containers import add, tar_index
from tests.support.servers import FaultProxy, web_server
from tests.support.source_contract import same_locations

SAMPLES, LARGE = 30, LARGE_BYTES + 12_345


@dataclass
class Server:
    """A web server of a folder, and what it was asked for."""

    folder: Path
    port: int
    answers: list[tuple[str, int]] = field(default_factory=list)

    def list(self, archive: str = "train-0.tar") -> Listing:
        self.answers.clear()
        return open_source(f"http://127.0.0.1:{self.port}/{archive}").list(lambda count: None)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.answers)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shards")
    with web_server(folder) as url:
        proxy = FaultProxy(int(url.rpartition(":")[2]))
        served = Server(folder, proxy.port)

        def answered(method: str, path: str) -> Any:
            def count(handler: Any, status: int, data: bytes) -> bool:
                with proxy.lock:
                    served.answers.append((path, len(data)))
                return False

            return count

        proxy.choose = answered
        try:
            yield served
        finally:
            proxy.stop()


@pytest.fixture
def archive(server: Server) -> Path:
    """An archive of large photos, with labels, and one long name that has headers of its own."""
    path, generator = server.folder / "train-0.tar", np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(SAMPLES):
            stem = f"{number:04d}" if number != 15 else "long" * 60
            add(tar, f"{stem}.jpg", generator.bytes(LARGE + number), mtime=number)
            add(tar, f"{stem}.cls", str(number % 7).encode(), mtime=number)
    path.with_suffix(".idx").unlink(missing_ok=True)
    return path


def assert_same(one: Listing, other: Listing) -> None:
    assert one.table.keys == other.table.keys
    assert same_locations(one.table, other.table)
    assert one.table.etags == other.table.etags
    for name in ("sizes", "mtimes", "labels"):
        assert getattr(one.table, name).tolist() == getattr(other.table, name).tolist()
    assert (one.ignored, one.left_out, one.notes) == (other.ignored, other.left_out, other.notes)


def write_index(archive: Path) -> str:
    with archive.open("rb") as file:
        text = tar_index(file)
    archive.with_suffix(".idx").write_text(text)
    return text


def test_listing_reads_little_more_than_headers(server: Server, archive: Path) -> None:
    without = server.list()
    assert server.nbytes > 0.9 * archive.stat().st_size
    index = write_index(archive)
    without_names = re.sub(r"(\w+ \d+ \d+) \S+", r"\1", index).replace("v1.2", "v1.1")
    for text in (index, without_names):
        archive.with_suffix(".idx").write_text(text)
        assert_same(server.list(), without)
        assert server.nbytes < 0.1 * archive.stat().st_size
    assert without.table.labels.tolist() == [number % 7 for number in range(SAMPLES)]


def test_a_damaged_archive_is_refused_in_spite_of_its_index(server: Server, archive: Path) -> None:
    write_index(archive)
    data = bytearray(archive.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 2 * LARGE] = bytes([255]) * 2 * LARGE
    archive.write_bytes(data)
    with pytest.raises(PrecacheError, match="is damaged"):
        server.list()


@pytest.mark.parametrize("size", ["4096", "999999999"])
def test_an_index_is_asked_for_where_it_may_spare_requests(server: Server, size: str) -> None:
    index = f"v1.2 1\njpg 512 {size} a.jpg\n"
    for name, kind in (("small.tar", "w"), ("packed.tar.gz", "w:gz")):
        with tarfile.open(server.folder / name, kind) as tar:
            add(tar, "a.jpg", b"image")
        (server.folder / f"{name.partition('.')[0]}.idx").write_text(index)
        assert len(server.list(name).table) == 1
        assert not [path for path, _ in server.answers if path.endswith(".idx")]


@pytest.fixture(scope="module")
def plain(server: Server) -> Listing:
    """The listing of an archive of 20 large members that no test changes."""
    with tarfile.open(server.folder / "plain.tar", "w") as tar:
        for number in range(20):
            add(tar, f"{number:04d}.jpg", bytes([number]) * (LARGE + number), mtime=number)
    (server.folder / "plain.idx").unlink(missing_ok=True)
    return server.list("plain.tar")


numbers = st.integers(0, 21 * LARGE) | st.integers(0, 10**18)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=200), st.booleans())
def test_no_index_changes_a_listing(
    server: Server, plain: Listing, places: list[tuple[int, int]], true: bool
) -> None:
    if true:  # between true ones
        index = tar_index(io.BytesIO((server.folder / "plain.tar").read_bytes())).splitlines()
    else:
        index = ["v1.2 3"]
    index += [f"jpg {offset} {size} {size}.jpg" for offset, size in places]
    (server.folder / "plain.idx").write_text("\n".join(index))
    assert_same(server.list("plain.tar"), plain)


def test_an_index_may_be_any_bytes(server: Server, plain: Listing) -> None:
    generator = np.random.default_rng(1)
    for data in (b"", b"\0" * 99, b" 1 2" * 1_000_000, generator.bytes(1 << 16)):
        (server.folder / "plain.idx").write_bytes(data)
        assert_same(server.list("plain.tar"), plain)
    folder = open_folder(f"http://127.0.0.1:{server.port}/")
    assert folder.read_first("plain.idx", 5) == data[:5]
