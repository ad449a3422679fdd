"""Stores that somebody tampered with, and machines that are wrong: nothing committed is harmed."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import PrecacheError
from precache.storage import local_files
from precache.store.commit_log import BUILD, ROOT
from tests.support.building import (
    age,
    build_here,
    contents,
    cut,
    encoded,
    environment,
    write_jpegs,
)
from tests.support.servers import Handler, answering

OTHER = precache.Recipe.image(resize=16, crop=16)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, and a store of two versions of it, the second of which is current."""
    root = tmp_path_factory.mktemp("attacked")
    source = write_jpegs(root / "in", 6)
    build_here(source, root / "store", precache.Recipe.image(resize=24, crop=24))
    build_here(source, root / "store", OTHER)
    return root


@pytest.fixture
def source(built: Path) -> Path:
    return built / "in"


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built / "store", tmp_path / "store"))


def versions(store: Path) -> tuple[Path, Path]:
    current = Path(precache.open(store).path)
    others = ("commits", "_listings", current.name)
    [first] = [path for path in store.iterdir() if path.name not in others]
    return first, current


# --- links within a store -----------------------------------------------------------------------


def act(call: Any) -> None:
    """What comes of it does not matter, as long as it ends in words."""
    with contextlib.suppress(PrecacheError):
        call()


@pytest.mark.parametrize("place", [f"{{first}}/{BUILD}", "_claims", "{first}/image", "{first}"])
@pytest.mark.parametrize("to", ["commits", "{current}", "{current}/image", "."])
def test_nothing_is_written_or_removed_through_links_within_a_store(
    place: str, to: str, source: Path, store: Path
) -> None:
    first, current = versions(store)

    def kept() -> dict[str, bytes]:
        log = {f"commits/{path.name}": path.read_bytes() for path in (store / "commits").iterdir()}
        return {**contents(current), **log}

    before = kept()
    link = store / place.format(first=first.name)
    target = store / to.format(current=current.name)
    if link.exists():
        link.rename(store.parent / "aside")
    link.symlink_to(os.path.relpath(target, link.parent))
    age(store, 1e8)
    act(lambda: precache.gc(store, keep=2, older_than=0))
    act(lambda: build_here(source, store, precache.Recipe.image(resize=24, crop=24)))
    act(lambda: precache.use(f"{store}@{first.name}"))
    act(lambda: precache.gc(store, keep=2, older_than=0))
    assert kept().items() >= before.items()


# --- wrong clocks, failing reads ----------------------------------------------------------------


@pytest.mark.parametrize("working", range(1, 8))
def test_a_document_that_cannot_be_read_is_not_taken_for_missing(
    working: int, source: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = Path(precache.open(store).path)
    before = contents(current)
    reads, opened = 0, local_files.open_regular

    def failing(path: Path) -> tuple[int, int]:
        nonlocal reads
        if Path(path) == current / ROOT:
            reads += 1
            if reads > working:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path)

    monkeypatch.setattr(local_files, "open_regular", failing)
    act(lambda: build_here(source, store, OTHER))
    monkeypatch.undo()
    assert contents(current) == before


# --- what else lies in a store ------------------------------------------------------------------


def test_what_others_put_into_a_store_stops_no_build(source: Path, store: Path) -> None:
    (store / "mine").mkdir()
    os.mkfifo(store / "mine" / ROOT)
    (store / "latest").symlink_to("/etc")
    (store / ("0" * 32 + ".1")).symlink_to("/etc")
    (store / "folder" / ROOT).mkdir(parents=True)
    (store / "new").mkdir()
    (store / "new" / ROOT).write_text('{"attributes": {"precache": {"format": 99}}}')
    assert build_here(source, store, OTHER).failed == 0
    build_here(source, store, precache.Recipe.image(resize=20, crop=20))


def test_a_group_of_others_with_a_folder_called_like_ours_stays(store: Path) -> None:
    other = store / ("6" * 32 + ".1")
    for name in (f"{BUILD}/x", "data/c/0/0"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text("mine")
    (other / ROOT).write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    (other / "data" / ROOT).write_text("{}")
    age(store, 1e8)
    precache.gc(store, keep=2, older_than=0)
    assert (other / "data/c/0/0").read_text() == "mine"


# --- samples ------------------------------------------------------------------------------------


@pytest.fixture
def endless() -> Iterator[str]:
    """A page of six photos, of which the last has no length and does not end."""

    class Endless(Handler):
        protocol_version = "HTTP/1.0"  # the end of a connection is that of its answer

        def do_GET(self) -> None:
            number = self.path.rpartition("/")[2].removesuffix(".jpg")
            page = "".join(f'<a href="{n}.jpg">{n}.jpg</a>' for n in range(6)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "image/jpeg" if number.isdigit() else "text/html")
            self.end_headers()
            self.wfile.write(encoded(cut(int(number))) if number.isdigit() else page)
            while number == "5":
                self.wfile.write(bytes(65536))

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

    with answering(Endless) as url:
        yield f"{url}/p/"


def test_a_file_without_an_end_is_a_hole(endless: str, tmp_path: Path) -> None:
    result = build_here(endless, tmp_path / "store", OTHER, {"max_sample_bytes": "1MB"})
    [(key, why)] = result.holes
    assert (key, "over the limit of" in why) == ("5.jpg", True)


SLEEPY = """
import sys, time
import numpy as np
import precache

class Sleepy:
    def __len__(self):
        return 8
    def __getitem__(self, number):
        if number == 5:
            time.sleep(1000)
        return np.zeros((3, 8, 8), np.uint8), 0

def make():
    return Sleepy()

if __name__ == "__main__":
    recipe = precache.Recipe.from_dict({"fields": {"image": {"codec": "zstd"}}})
    precache.build("python:sleepy:make", sys.argv[1], recipe, address="serial", sample_timeout=1)
"""


def test_a_process_ends_though_a_fetch_hangs(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    line = [sys.executable, str(tmp_path / "sleepy.py"), str(tmp_path / "store")]
    ran = subprocess.run(
        line, check=False, capture_output=True, text=True, timeout=60, env=environment()
    )
    assert ran.returncode == 1
    assert "HangError: 5: fetching it took longer than 1 s (--sample-timeout)" in ran.stderr
