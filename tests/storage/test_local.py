"""Bytes are put whole or not at all, created once, and errors say what to do."""

import collections
import contextlib
import errno
import itertools
import os
import shutil
import socket
import stat
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precache.errors import StorageError
from precache.runtime import operating_system
from precache.storage.base import LINK_TWICE, required
from precache.storage.local import ANYWHERE, LocalFolder
from precache.storage.open import open_folder
from tests.storage.conftest import actions
from tests.support.building import with_equal_ctimes

_LIMIT = Path("/proc/sys/vm/max_map_count")
MAP_LIMIT = int(_LIMIT.read_text()) if _LIMIT.exists() else 0


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path / "root")


def _files(folder: LocalFolder) -> set[str]:
    return {str(p.relative_to(folder.root)) for p in folder.root.rglob("*") if p.is_file()}


def test_paths_and_file_uris_are_the_same_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for uri in ("/data/x", "file:///data/x", "local:///data/x", Path("/data/x")):
        assert open_folder(uri) == LocalFolder(Path("/data/x"))
    assert open_folder("data/a b@c") == LocalFolder(Path("data/a b@c").absolute())
    assert open_folder("~/x") == LocalFolder(tmp_path / "x")
    assert open_folder("~nobody-of-here/x") == LocalFolder(Path("~nobody-of-here/x").absolute())


def test_a_path_too_long_is_not_there_and_is_refused_in_words(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / ("x" * 5000))
    assert not folder.exists()
    assert not folder.is_link("a")
    assert folder.free_bytes() > 0
    for action in lambda: folder.put("a", [b"x"]), lambda: list(folder.walk()):
        with pytest.raises(StorageError, match="File name too long"):
            action()


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


@pytest.mark.parametrize("scratch", [None, "_build/tmp"])
def test_a_write_that_fails_leaves_the_old_object_and_no_temporary(
    folder: LocalFolder, scratch: str | None
) -> None:
    def parts_that_fail() -> Iterator[bytes]:
        yield b"half of "
        raise ZeroDivisionError

    folder.put("a", [b"old"])
    with pytest.raises(ZeroDivisionError):
        folder.put("a", parts_that_fail(), scratch=scratch)
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
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))
    for write in (lambda: folder.put("a", [b"x"]), lambda: folder.create("a", [b"x"])):
        with pytest.raises(StorageError, match=r"cannot write .*root/a: ") as caught:
            write()
        assert hint in str(caught.value)
    assert _files(folder) == set()


MAPS = """
import contextlib, mmap, pathlib, sys
from precache.storage.local import LocalFolder
from precache.storage.local_files import map_file
descriptor, maps = LocalFolder(pathlib.Path(sys.argv[1])).open("a"), []
with contextlib.suppress(OSError):
    while True:  # by turns, as neighbours that are alike count as one
        maps.append(mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE * (len(maps) % 2)))
try:
    maps += [map_file(descriptor) for _ in range(9)]
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(
    not 0 < MAP_LIMIT <= 1 << 17, reason="needs Linux, and a limit that a process can reach"
)
def test_the_limit_of_maps_is_named_where_a_map_fails_for_it(
    folder: LocalFolder, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    folder.put("a", [b"1"])
    said = run_python(MAPS, folder.root).stdout
    assert f"vm.max_map_count allows {MAP_LIMIT:,}; raise it: sudo sysctl -w" in said


@pytest.mark.parametrize("links", [True, False])
def test_an_object_is_created_once_on_whatever_disk(
    links: bool, folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        refuse = Mock(side_effect=OSError(errno.EPERM, os.strerror(errno.EPERM)))
        monkeypatch.setattr(os, "link", refuse)
    parts = [b"whole", memoryview(b" and"), bytearray(b" complete")]
    assert folder.create("a/b", parts, scratch="_build/tmp")
    assert not folder.create("a/b", [b"x"], scratch="_build/tmp")
    assert folder.copy("a/c", folder, "a/b", create=True)
    if links:
        assert folder.local("a/c").samefile(folder.local("a/b")), "the cheapest copy"
    assert not folder.copy("a/c", folder, "a/b", create=True)
    folder.put("a/b", [b"replaced"])
    assert folder.read("a/c") == b"whole and complete"
    assert _files(folder) == {"a/b", "a/c"}


def test_folders_that_are_made_are_synced_into_their_parents(
    folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def noted(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            synced.append(path.relative_to(folder.root.parent).as_posix())

    monkeypatch.setattr(os, "fsync", noted)
    folder.put("a/b/c", [b""])
    assert synced == [".", "root", "root/a", "root/a/b"]
    synced.clear()
    folder.put("a/b/d", [b""])
    assert synced == ["root/a/b"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_that_does_not_sync_folders_will_do(
    folder: LocalFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    folder.put("a/b", [b"1"])
    assert folder.create("a/c", [b"2"])
    assert _files(folder) == {"a/b", "a/c"}


@pytest.fixture
def outside(folder: LocalFolder) -> LocalFolder:
    """A folder beside another, to which that has links: to itself, a file, a folder, a new name."""
    outside = LocalFolder(folder.root.parent / "outside")
    outside.put("file", [b"secret"])
    outside.put("deep/file", [b"secret"])
    folder.put("own", [b"own"])
    links = {"dir": "", "deep": "deep", "file": "file", "new": "new", "loop": "../root/loop"}
    for name, target in links.items():
        folder.local(name).symlink_to(outside.root / target)
    folder.local("fifo").parent.mkdir(exist_ok=True)
    os.mkfifo(folder.local("fifo"))
    return outside


def _actions(folder: LocalFolder, name: str) -> list[Callable[[], object]]:
    return [
        *actions(folder, name),
        lambda: os.close(folder.open(name)),
        lambda: list(folder.folder(name).walk()),
        lambda: folder.folder(name).kind(),
        lambda: folder.put("own", [b"own"], scratch=name),
        lambda: folder.create("once", [b"new"], scratch=name),
        lambda: folder.folder(name).put("x", [b"new"]),
        lambda: folder.folder(name).remove("file"),
    ]


PARTS = st.sampled_from(
    ["", ".", "..", "own", "dir", "deep", "file", "new", "loop", "fifo", "root", "outside", "/",
     "~", "\0", "\n", "x" * 300, "é", "…", "*", "-", "%2e%2e", "..."]
)  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=st.lists(PARTS, min_size=1, max_size=4), number=st.integers(0, 23))
@pytest.mark.usefixtures("outside")
def test_nothing_outside_of_a_folder_is_read_or_changed_through_any_name(
    parts: list[str], number: int, folder: LocalFolder, outside: LocalFolder
) -> None:
    name = "/".join(parts)
    with contextlib.suppress(StorageError):
        found = _actions(folder, name)[number]()
        assert "secret" not in repr(found)
    assert {path.name for path in folder.root.parent.iterdir()} == {"outside", "root"}
    there = {str(p.relative_to(outside.root)): p for p in outside.root.rglob("*")}
    assert set(there) == {"file", "deep", "deep/file"}
    assert there["file"].read_bytes() == there["deep/file"].read_bytes() == b"secret"
    assert all(there[n].stat().st_nlink == 1 for n in ("file", "deep/file"))


def test_a_link_out_is_named_and_no_object_and_is_replaced_or_removed_alone(
    folder: LocalFolder, outside: LocalFolder
) -> None:
    reads = (folder.read, folder.get, folder.open, lambda n: folder.copy("x", folder, n))
    for name, act in itertools.product(("file", "dir/file", "deep/file"), reads):
        with pytest.raises(StorageError, match=rf"cannot read .*root/{name}: it leads out of .*ro"):
            act(name)
        assert not folder.exists(name)
        assert folder.size(name) is None
    assert folder.names("dir") == folder.folder("dir").names() == []
    assert folder.sizes() == {"own": 3}
    with pytest.raises(StorageError, match="it leads out of"):
        folder.put("dir/x", [b"1"])
    folder.put("file", [b"mine"])
    folder.remove("dir")
    folder.remove("new")
    folder.remove("loop")
    assert not folder.create("deep", [b"mine"])
    assert folder.read("file") == b"mine"
    assert outside.sizes() == {"file": 6, "deep/file": 6}
    assert folder.names() == ["deep", "fifo", "file", "own"]


def test_links_within_a_folder_are_read_and_not_written_through(folder: LocalFolder) -> None:
    folder.put("a/1", [b"one"])
    folder.local("b").symlink_to("a")
    folder.local("c").symlink_to(folder.local("a/1"))
    folder.folder("a").local("up").symlink_to("..")
    assert folder.read("b/1") == folder.read("c") == folder.folder("b").read("up/c") == b"one"
    assert folder.folder("b").names() == ["1", "up"]
    for change in (
        lambda: folder.put("b/2", [b"two"]),
        lambda: folder.create("b/2", [b"two"]),
        lambda: folder.folder("b").remove("1"),
        lambda: folder.copy("b/2", folder, "a/1"),
    ):
        with pytest.raises(StorageError, match="by way of a link it is"):
            change()
    assert folder.names("a") == ["1", "up"]
    folder.remove("b")
    assert folder.names("a") == ["1", "up"]


def test_a_folder_that_is_a_link_is_the_one_that_it_leads_to(folder: LocalFolder) -> None:
    folder.put("a/1", [b"one"])
    link = folder.root.parent / "link"
    link.symlink_to(folder.root)
    linked = LocalFolder(link)
    assert linked.kind() == "folder"
    assert linked.folder("a").read("1") == b"one"
    linked.put("b", [b"two"])
    assert linked.sizes() == folder.sizes() == {"a/1": 3, "b": 3}
    other = LocalFolder(folder.root.parent / "other")
    other.put("a/1", [b"other"])
    link.unlink()
    link.symlink_to(other.root)
    assert linked.read("a/1") == b"other"


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):
        bound.bind(path.name)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": _bind,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_regular_file_is_said_at_once(folder: LocalFolder, kind: str) -> None:
    folder.put("own", [b"own"])
    NO_FILES[kind](folder.local("x"))
    for read in (folder.read, folder.get, lambda n: required(*folder.read_ranges([(n, 0, 1)]))):
        with pytest.raises(StorageError, match=r"cannot read .*root/x: "):
            read("x")
    assert folder.size("x") is None
    assert folder.exists("x") == (kind == "folder")
    assert folder.sizes() == {"own": 3}


@pytest.mark.parametrize("lasting", [True, False])
def test_the_state_of_a_file_has_its_inode_number_only_where_that_lasts(
    lasting: bool, folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lasting:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        kinds = frozenset(line.rpartition(" - ")[2].split()[0] for line in mounts)
        monkeypatch.setattr(operating_system, "FAT", kinds)
    operating_system.has_lasting_inodes.cache_clear()
    paths = [folder.local(name) for name in ("a", "b")]
    for path in paths:
        folder.put(path.name, [b""])
    with_equal_ctimes(paths)
    one, other = (found.file_state for found in folder.walk())
    assert (one != other) is lasting
    until = paths[0].stat().st_ctime_ns
    while paths[0].stat().st_ctime_ns == until:
        paths[0].touch()
    states = {found.name: found.file_state for found in folder.walk()}
    assert states["a"] not in (one, other)
    operating_system.has_lasting_inodes.cache_clear()


def test_walking_follows_links_and_ends_where_they_lead_in_a_circle(folder: LocalFolder) -> None:
    folder.put("cat/a.png", [b"123"])
    elsewhere = LocalFolder(folder.root.parent / "elsewhere")
    elsewhere.put("b.png", [b"12345"])
    folder.local("dog").symlink_to(elsewhere.root)
    folder.local("cat/self").symlink_to(folder.local("cat"))
    folder.local("again").symlink_to(folder.root)
    folder.local("link.png").symlink_to(elsewhere.local("b.png"))
    folder.local("lost.png").symlink_to("nowhere")
    os.utime(folder.local("cat/a.png"), ns=(5, 1_000_000_007))
    found = sorted(LocalFolder(folder.root, ANYWHERE).walk())
    names = ["cat/a.png", "dog/b.png", "link.png", "lost.png"]
    assert [file.name for file in found] == names
    assert [file.size for file in found] == [3, 5, 5, -1]
    assert found[0].mtime_ns == 1_000_000_007


def test_folders_that_link_to_one_another_are_listed_once_by_each_link(folder: LocalFolder) -> None:
    for one in range(12):
        folder.put(f"{one:02d}/x", [b"1"])
        for other in range(12):
            (folder.root / f"{one:02d}" / f"to-{other:02d}").symlink_to(f"../{other:02d}")
    left = collections.Counter[str]()
    names = [info.name for info in folder.walk(lambda name, why: left.update([why]))]
    assert len(names) == len(set(names)) <= 12 * 12 + 12
    assert left[LINK_TWICE] > 100
    assert sorted(names) == sorted(info.name for info in folder.walk())


@pytest.mark.usefixtures("no_collection")
def test_an_error_keeps_nothing_of_its_callers_alive(folder: LocalFolder) -> None:
    def look() -> weakref.ref[set[int]]:
        held = set[int]()
        assert folder.get("missing") is None
        return weakref.ref(held)

    assert look()() is None


def test_a_range_is_read_whole_however_much_a_call_reads(
    folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, start: pread(file, min(size, 3), start))
    folder.put("a", [b"0123456789"])
    assert folder.read_first("a", 1 << 62) == b"0123456789"
    assert folder.read_ranges([("a", 2, 7), ("a", 8, 7), ("a", 11, 7)]) == [b"2345678", b"89", b""]


def test_walking_leaves_out_what_is_removed_meanwhile(
    folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b/c", "d"):
        folder.put(name, [b"1"])
    scandir = os.scandir

    def removing(path: Path) -> contextlib.AbstractContextManager[list[os.DirEntry[str]]]:
        monkeypatch.setattr(os, "scandir", scandir)
        entries = contextlib.nullcontext([*scandir(path)])
        folder.remove("d")
        folder.remove("b")
        return entries

    monkeypatch.setattr(os, "scandir", removing)
    assert [info.name for info in folder.walk()] == ["a"]


def test_what_is_not_there_is_not_made_and_has_the_space_of_the_nearest_folder(
    folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match=r"cannot list .*root"):
        list(folder.walk())
    disk_usage = Mock(return_value=SimpleNamespace(free=7))
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert LocalFolder(folder.root / "not" / "yet").free_bytes() == 7
    disk_usage.assert_called_once_with(folder.root.parent)
    assert not folder.root.exists()
