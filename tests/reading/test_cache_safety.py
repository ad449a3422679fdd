"""The disk cache is its user's alone, and no link in it is followed."""

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


def modes(cache: Path) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in (cache, *(cache / n for n in FOLDERS))}


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
    before = os.umask(mask)
    try:
        one = join(tmp_path / "cache")
        one.obtain("a-1")
    finally:
        os.umask(before)
    assert modes(tmp_path / "cache") == {0o700}


def test_a_cache_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    one = join(tmp_path)
    one.obtain("a-1")
    one.end()
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert not join(tmp_path).obtain("a-1")
    assert modes(tmp_path) == {0o700}


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
    assert stat.S_IMODE(folder.lstat().st_mode) == mode
    [command] = re.findall(r"run (chmod 700 .*), or choose", str(refused.value))
    subprocess.run(shlex.split(command), check=True)
    assert join(tmp_path / "my cache").obtain("a-1")


def test_a_folder_with_other_files_is_no_cache(tmp_path: Path) -> None:
    """Neither are its own files evicted, such as .git/objects, nor is it closed to others."""
    tmp_path.chmod(0o755)
    (tmp_path / "objects").mkdir()
    (tmp_path / "HEAD").touch()
    with pytest.raises(UsageError, match=r"has other files in it \('HEAD'\), and a cache needs a"):
        DiskCache(tmp_path, LIMIT)
    assert stat.S_IMODE(tmp_path.lstat().st_mode) == 0o755
    assert sorted(path.name for path in tmp_path.iterdir()) == ["HEAD", "objects"]


@needs_root
def test_a_cache_or_a_folder_in_it_of_another_user_is_refused(common: Path, tmp_path: Path) -> None:
    words = rf"theirs belongs to .*{OTHER}.*, and this process runs as .*uid 0.*choose a folder "
    as_another_user(lambda: join(common / "theirs"))
    with pytest.raises(UsageError, match=words + "of your own"):
        join(common / "theirs")
    join(common / "mine")

    def refused() -> None:
        with pytest.raises(UsageError, match="mine belongs to"):
            join(common / "mine")

    as_another_user(refused)
    for name in FOLDERS:
        join(tmp_path / name)
        os.chown(tmp_path / name / name, OTHER, OTHER)
        with pytest.raises(UsageError, match=rf"{tmp_path / name / name} belongs to .*{OTHER}"):
            join(tmp_path / name)


# --- what lies in it ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FOLDERS, *FILES, "objects/a-1", "parts/a-1", "versions/a"])
def test_a_link_is_refused_and_not_followed(name: str, tmp_path: Path) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    join(cache).end()
    place = cache / name
    if name in FOLDERS:
        outside.mkdir(mode=0o755)
        shutil.rmtree(place)
        place.symlink_to(outside)
        with pytest.raises(UsageError, match=rf"{place} is a link or a file, where a folder"):
            join(cache)
        assert stat.S_IMODE(outside.lstat().st_mode) == 0o755
    else:
        outside.write_bytes(b"k" * SIZE)
        place.unlink(missing_ok=True)
        place.symlink_to(outside)
        with pytest.raises(StorageError, match=rf"the cache {cache}: .*symbolic links"):
            join(cache).obtain("a-1")
        assert outside.read_bytes() == b"k" * SIZE


def test_names_that_could_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    one = join(tmp_path)
    for name in ("", ".", "..", "../a", "a/../../b", "/etc/passwd", "a\0b", "a\n"):
        with pytest.raises(StorageError, match="no object in a cache can be called"):
            one.obtain(name, writer("a"))


def test_an_object_that_is_not_sound_is_fetched_again_once(tmp_path: Path) -> None:
    one, calls = join(tmp_path), list[str]()
    one.obtain("a-1")
    path = tmp_path / "objects" / "a-1"
    path.write_bytes(b"x" * SIZE)
    with path.open("rb") as before:
        for _ in range(2):
            join(tmp_path).obtain(
                "a-1",
                writer("a-1", calls),
                use=lambda descriptor: os.pread(descriptor, SIZE, 0) == contents("a-1"),
            )
        assert calls == ["a-1"]
        assert path.read_bytes() == contents("a-1")
        assert before.read() == b"x" * SIZE  # who has it open keeps it
