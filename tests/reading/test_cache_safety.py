"""The disk cache is its user's alone, and no link in it is followed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precache.errors import StorageError, UsageError
from precache.reading.disk_cache import ENTRIES, DiskCache
from tests.reading.test_disk_cache import SIZE, Reader, contents, limit_for, writer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run as another user")
OTHER = 65534
"""A user who is not this one."""

LIMIT = limit_for(4)
FOLDERS, FILES = ENTRIES[:-1], ENTRIES[-1:]


def join(folder: Path) -> Reader:
    return Reader(folder, LIMIT)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder in which everybody may make files, as /tmp is one."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_another_user(work: Callable[[], object]) -> None:
    """Do it in a process of another user; raises where it does."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert ended == 0


# --- whose it is --------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o077, 0o777])
def test_a_cache_is_its_users_alone_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with umask(mask):
        one = join(cache)
        one.obtain("a-1", writer("a-1"))
    assert {mode_of(path) for path in (cache, *(cache / name for name in FOLDERS))} == {0o700}


def test_a_cache_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    one = join(tmp_path)
    one.obtain("a-1", writer("a-1"))
    one.end()
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert not join(tmp_path).obtain("a-1", writer("a-1"))
    for path in (tmp_path, *(tmp_path / name for name in FOLDERS)):
        assert mode_of(path) == 0o700


@pytest.mark.parametrize(
    ("name", "mode"), [*zip(["", *FOLDERS], [0o775, 0o2770, 0o1777, 0o702], strict=True)]
)
def test_a_cache_that_others_can_write_is_refused_until_it_is_closed_to_them(
    name: str, mode: int, tmp_path: Path
) -> None:
    folder = tmp_path / "my cache" / name
    join(tmp_path / "my cache")
    folder.chmod(mode)
    with pytest.raises(UsageError, match=f"has mode {mode:04o}, so that others can") as refused:
        join(tmp_path / "my cache")
    assert mode_of(folder) == mode
    [command] = re.findall(r"run (chmod 700 .*), or choose", str(refused.value))
    subprocess.run(shlex.split(command), check=True)
    assert join(tmp_path / "my cache").obtain("a-1", writer("a-1"))


def test_a_folder_with_other_files_is_no_cache(tmp_path: Path) -> None:
    """Neither are its own files evicted, such as .git/objects, nor is it closed to others."""
    tmp_path.chmod(0o755)
    (tmp_path / "objects").mkdir()
    (tmp_path / "HEAD").touch()
    with pytest.raises(UsageError, match=r"has other files in it \('HEAD'\), and a cache needs a"):
        DiskCache(tmp_path, LIMIT)
    assert mode_of(tmp_path) == 0o755
    assert sorted(path.name for path in tmp_path.iterdir()) == ["HEAD", "objects"]


@needs_root
def test_a_cache_of_another_user_is_refused(common: Path) -> None:
    words = rf"theirs belongs to .*{OTHER}.*, and this process runs as .*uid 0.*choose a folder "
    as_another_user(lambda: join(common / "theirs"))
    with pytest.raises(UsageError, match=words + "of your own"):
        join(common / "theirs")
    join(common / "mine")

    def refused() -> None:
        with pytest.raises(UsageError, match="mine belongs to"):
            join(common / "mine")

    as_another_user(refused)


@needs_root
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_users_within_a_cache_is_refused(name: str, tmp_path: Path) -> None:
    join(tmp_path)
    os.chown(tmp_path / name, OTHER, OTHER)
    with pytest.raises(UsageError, match=rf"{tmp_path / name} belongs to .*{OTHER}"):
        join(tmp_path)


# --- what lies in it ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_in_the_place_of_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    DiskCache(cache, LIMIT)
    outside.mkdir(mode=0o755)
    (cache / name).rmdir()
    (cache / name).symlink_to(outside)
    with pytest.raises(UsageError, match=rf"{cache / name} is a link or a file, where a folder"):
        join(cache)
    assert mode_of(outside) == 0o755


@pytest.mark.parametrize("name", [*FILES, "objects/a-1", "parts/a-1", "versions/a"])
def test_a_link_in_the_place_of_a_file_is_not_followed(name: str, tmp_path: Path) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    join(cache)
    outside.write_bytes(b"k" * SIZE)
    (cache / name).unlink(missing_ok=True)
    (cache / name).symlink_to(outside)
    with pytest.raises(StorageError, match=rf"the cache {cache}: .*symbolic links"):
        join(cache).obtain("a-1", writer("a-1"))
    assert outside.read_bytes() == b"k" * SIZE


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/../../b", "/etc/passwd", "a\0b", "a\n"])
def test_names_that_could_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    one = join(tmp_path)
    with pytest.raises(StorageError, match="no object in a cache can be called"):
        one.obtain(name, writer("a"))


def _sound_as(name: str) -> Callable[[int], bool]:
    return lambda descriptor: os.pread(descriptor, SIZE, 0) == contents(name)


def test_an_object_that_is_not_sound_is_fetched_again_once(tmp_path: Path) -> None:
    one, calls = join(tmp_path), list[str]()
    one.obtain("a-1", writer("a-1"))
    path = tmp_path / "objects" / "a-1"
    path.write_bytes(b"x" * SIZE)
    before = path.open("rb")
    for _ in range(2):
        other = join(tmp_path)
        other.obtain("a-1", writer("a-1", calls), use=_sound_as("a-1"))
    assert calls == ["a-1"]
    assert path.read_bytes() == contents("a-1")
    with before:
        assert before.read() == b"x" * SIZE  # who has it open keeps it
