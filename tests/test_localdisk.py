"""Bytes are put whole or not at all, created once, and errors say what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precache import localdisk
from precache.errors import PrecacheError, StorageError
from precache.folder import FileInfo
from precache.localdisk import LocalFolder
from precache.storage import open_folder


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path / "root")


def _files(folder: LocalFolder) -> set[str]:
    return {str(p.relative_to(folder.root)) for p in folder.root.rglob("*") if p.is_file()}


# --- names and URIs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/data/x", "/data/x"),
        ("file:///data/x", "/data/x"),
        ("local:///data/x", "/data/x"),
        ("data/a b@c", "data/a b@c"),
        (Path("/data/x"), "/data/x"),
    ],
)
def test_paths_and_file_uris_are_the_same_folder(uri: str | Path, path: str) -> None:
    assert open_folder(uri) == LocalFolder(Path(path).absolute())


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_folder("~/x") == LocalFolder(tmp_path / "x")


def test_a_name_that_no_disk_can_hold_is_an_error_of_ours(folder: LocalFolder) -> None:
    folder.put("a", [b""])
    for ask in (folder.exists, folder.size, folder.read, folder.names):
        with contextlib.suppress(PrecacheError):
            assert not ask("x" * 300)


# --- reading ------------------------------------------------------------------------------------


def test_what_is_not_there(folder: LocalFolder) -> None:
    assert not folder.exists()
    assert not folder.exists("a/b")
    assert folder.size("a") is None
    assert folder.names() == folder.names("a") == []
    with pytest.raises(StorageError, match=r"cannot read .*root/a: No such file"):
        folder.read("a")
    folder.remove("a")


def test_a_file_is_no_folder(folder: LocalFolder) -> None:
    folder.put("a", [b"x"])
    assert folder.names("a") == []
    assert folder.size("a/b") is None
    with pytest.raises(StorageError, match="cannot read"):
        folder.read("a/b")
    with pytest.raises(StorageError, match="cannot write"):
        folder.put("a/b", [b"x"])


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs Linux")
def test_a_file_with_more_in_it_than_its_size_says_is_read_whole() -> None:
    found = LocalFolder(Path("/proc")).read("version")
    assert Path("/proc/version").stat().st_size < len(found)
    assert found == Path("/proc/version").read_bytes()


def test_names_are_sorted_and_of_one_level(folder: LocalFolder) -> None:
    for name in ("b", "a", "c/d"):
        folder.put(name, [b""])
    assert folder.names() == ["a", "b", "c"]


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scratch", [None, "_build/tmp"])
def test_an_object_is_its_parts_one_after_another(folder: LocalFolder, scratch: str | None) -> None:
    parts = [b"one ", bytearray(b"two "), memoryview(b"three"), b""]
    folder.put("deep/down/object", parts, scratch=scratch)
    assert folder.read("deep/down/object") == b"one two three"
    assert folder.size("deep/down/object") == 13
    assert _files(folder) == {"deep/down/object"}


def test_putting_replaces_the_whole_object(folder: LocalFolder) -> None:
    folder.put("a", [b"long content"])
    folder.put("a", [b"short"])
    assert folder.read("a") == b"short"


class _Broken(Exception):
    pass


def _parts_that_fail() -> Iterator[bytes]:
    yield b"half of "
    raise _Broken


@pytest.mark.parametrize("scratch", [None, "_build/tmp"])
def test_a_write_that_fails_leaves_the_old_object_and_no_temporary(
    folder: LocalFolder, scratch: str | None
) -> None:
    folder.put("a", [b"old"])
    with pytest.raises(_Broken):
        folder.put("a", _parts_that_fail(), scratch=scratch)
    assert folder.read("a") == b"old"
    assert _files(folder) == {"a"}


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "No space left on device; free some space and run the same command again"),
        (errno.EDQUOT, "the quota is used up"),
        (errno.EACCES, "check its owner and mode"),
        (errno.EROFS, "choose a folder that can be written"),
        (errno.EMFILE, "raise `ulimit -n`"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_the_system_refuses_is_said_with_the_way_out(
    folder: LocalFolder, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    for write in (lambda: folder.put("a", [b"x"]), lambda: folder.create("a", [b"x"])):
        with pytest.raises(StorageError, match=r"cannot write .*root/a: ") as caught:
            write()
        assert hint in str(caught.value)
    assert _files(folder) == set()


FULL = """
import pathlib, sys
from precache.errors import StorageError
from precache.localdisk import LocalFolder
folder = LocalFolder(pathlib.Path(sys.argv[1]))
try:
    folder.put("a", [bytes(1 << 20)])
except StorageError as error:
    print("free some space" in str(error), folder.names())
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root to mount")
def test_a_disk_that_is_full_in_earnest(tmp_path: Path) -> None:
    """A file system of 64 KiB, mounted for one process alone."""
    mount = f"mount -t tmpfs -o size=64k tmpfs {tmp_path} || exit 77"
    script = f'{mount}; exec {sys.executable} -c "$0" {tmp_path}'
    command = ["unshare", "--mount", "sh", "-c", script, FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip("mounting is not allowed here")
    assert done.stdout == "True []\n", done.stderr


# --- create only --------------------------------------------------------------------------------


def test_an_object_is_created_once(folder: LocalFolder) -> None:
    assert folder.create("commits/1", [b"first"])
    assert not folder.create("commits/1", [b"second"])
    assert folder.read("commits/1") == b"first"
    assert _files(folder) == {"commits/1"}


def test_of_many_threads_one_creates(folder: LocalFolder) -> None:
    start = threading.Barrier(8)
    won: list[int] = []

    def create(number: int) -> None:
        start.wait(30)
        if folder.create("x", [b"%d" % number]):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert folder.read("x") == b"%d" % won[0]
    assert _files(folder) == {"x"}


RACER = """
import sys, pathlib
from precache.localdisk import LocalFolder
folder = LocalFolder(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(50):
    if folder.create(f"c/{number}", [sys.argv[2].encode()]):
        print(number)
"""


def test_of_two_processes_one_creates_each_object(folder: LocalFolder) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(folder.root), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [set(racer.communicate(timeout=60)[0].split()) for racer in racers]
    assert not won[0] & won[1]
    assert won[0] | won[1] == set(map(str, range(50)))
    for name, numbers in zip(("one", "two"), won, strict=True):
        assert all(folder.read(f"c/{number}") == name.encode() for number in numbers)


WAYS = [(), ("link",), ("link", "renameat2")]
"""To create only once, those that a disk does not know."""


@pytest.fixture(params=WAYS, ids=lambda ways: "-".join(["without", *ways]))
def poorer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not know some ways to create an object."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if "link" in request.param:
        monkeypatch.setattr(os, "link", refuse)
    if "renameat2" in request.param:
        monkeypatch.setattr(localdisk, "_rename_new", refuse)


@pytest.mark.usefixtures("poorer")
def test_an_object_is_created_once_on_whatever_disk(folder: LocalFolder) -> None:
    parts = [b"whole", memoryview(b" and"), bytearray(b" complete")]
    assert folder.create("a/b", parts, scratch="_build/tmp")
    assert not folder.create("a/b", [b"x"], scratch="_build/tmp")
    assert folder.copy("a/c", folder, "a/b", create=True)
    assert not folder.copy("a/c", folder, "a/b", create=True)
    folder.put("a/b", [b"replaced"])
    assert folder.read("a/c") == b"whole and complete"
    assert _files(folder) == {"a/b", "a/c"}


@pytest.mark.usefixtures("poorer")
def test_of_many_threads_one_creates_on_whatever_disk(folder: LocalFolder) -> None:
    test_of_many_threads_one_creates(folder)


def test_a_link_is_the_cheapest_copy_and_creates_only(folder: LocalFolder) -> None:
    folder.put("a", [b"1"])
    assert folder.copy("b", folder, "a", create=True)
    assert folder.local("a").samefile(folder.local("b"))
    folder.put("c", [b"2"])
    assert not folder.copy("c", folder, "a", create=True)
    assert folder.read("c") == b"2"


# --- removing, listing, space -------------------------------------------------------------------


def test_removing_takes_a_file_or_a_whole_folder(folder: LocalFolder) -> None:
    folder.put("a", [b""])
    folder.put("b/c/d", [b""])
    folder.remove("a")
    folder.remove("b")
    folder.remove("b")
    assert folder.names() == []


def _listed(folder: LocalFolder) -> dict[str, FileInfo]:
    found = list(folder.walk())
    assert len({file.name for file in found}) == len(found)
    return {file.name: file for file in found}


def test_walking_finds_every_file_with_size_and_time(folder: LocalFolder) -> None:
    folder.put("a.png", [b"123"])
    folder.put("cat/b c.png", [b""])
    os.utime(folder.local("a.png"), ns=(5, 1_000_000_007))
    found = _listed(folder)
    assert set(found) == {"a.png", "cat/b c.png"}
    assert found["a.png"] == FileInfo("a.png", 3, 1_000_000_007)


def test_walking_follows_links_and_ends_where_they_lead_in_a_circle(folder: LocalFolder) -> None:
    folder.put("cat/a.png", [b"123"])
    elsewhere = LocalFolder(folder.root.parent / "elsewhere")
    elsewhere.put("b.png", [b"12345"])
    folder.local("dog").symlink_to(elsewhere.root)
    folder.local("cat/self").symlink_to(folder.local("cat"))
    folder.local("link.png").symlink_to(elsewhere.local("b.png"))
    folder.local("lost.png").symlink_to("nowhere")
    found = _listed(folder)
    assert set(found) == {"cat/a.png", "dog/b.png", "link.png", "lost.png"}
    assert found["link.png"].size == 5
    assert found["lost.png"].size == -1


def test_a_link_to_the_root_lists_nothing_twice(folder: LocalFolder) -> None:
    folder.put("a.png", [b"123"])
    folder.local("again").symlink_to(folder.root)
    assert set(_listed(folder)) == {"a.png"}


def test_walking_what_is_not_there_is_an_error(folder: LocalFolder) -> None:
    with pytest.raises(StorageError, match=r"cannot list .*root"):
        list(folder.walk())


def test_free_space_is_that_of_the_nearest_folder(
    folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def disk_usage(path: Path) -> object:
        asked.append(path)
        return type("Usage", (), {"free": 7})()

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert LocalFolder(folder.root / "not" / "yet").free_bytes() == 7
    assert asked == [folder.root.parent]


@pytest.mark.parametrize("ask", [LocalFolder.exists, LocalFolder.free_bytes])
def test_asking_makes_no_folder(folder: LocalFolder, ask: Callable[[LocalFolder], object]) -> None:
    ask(folder)
    assert not folder.root.exists()
