"""The disk cache is its user's alone, and what is planted in it leads nowhere."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.errors import PrecacheError, StorageError, UsageError
from precache.reading.disk_cache import ENTRIES, DiskCache
from precache.storage.private_folder import OwnFolder
from tests.reading.test_disk_cache import SIZE, Reader, contents, limit_for, writer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run as another user")
OTHER = 65534
"""A user who is not this one."""

LIMIT = limit_for(4)
FOLDERS, FILES = ENTRIES[:2], ENTRIES[2:]


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
    files = ("lock", "uses", "objects/a-1")
    assert {mode_of(cache / name) for name in files} == {0o600}


def test_a_cache_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    one = join(tmp_path)
    one.obtain("a-1", writer("a-1"))
    one.uses.close()
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert not join(tmp_path).obtain("a-1", writer("a-1"))
    for path in (tmp_path, *(tmp_path / name for name in FOLDERS)):
        assert mode_of(path) == 0o700


@pytest.mark.parametrize("mode", [0o775, 0o2770, 0o1777, 0o702])
@pytest.mark.parametrize("name", ["", *FOLDERS])
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


# --- what is planted in it ----------------------------------------------------------------------


@dataclass
class Outside:
    """Files beside a cache, that nothing in it must lead to."""

    folder: Path
    files: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        for number, size in enumerate((SIZE, 900_000, 0)):
            self.files.append(self.folder / str(number))
            self.files[-1].write_bytes(b"k" * size)
            os.utime(self.files[-1], (1e9, 1e9))
        self._before = self._seen()

    def _seen(self) -> list[tuple[str, int, int, bytes]]:
        paths = sorted(self.folder.iterdir())
        stats = [path.lstat() for path in paths]
        return [
            (path.name, mode_of(path), s.st_mtime_ns, path.read_bytes())
            for path, s in zip(paths, stats, strict=True)
        ]

    def assert_untouched(self) -> None:
        assert self._seen() == self._before


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path / "outside")


def plant(path: Path, kind: str, outside: Outside) -> None:
    """Put something in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "garbage":
        path.write_bytes(b"\xff" * SIZE)
    elif kind == "theirs":
        path.write_bytes(contents(path.name))
        os.chown(path, OTHER, OTHER)
    elif kind == "nowhere":
        path.symlink_to(outside.folder / "nowhere")
    elif kind == "folder":
        path.symlink_to(outside.folder)
    elif kind.startswith("link"):
        path.symlink_to(outside.files[int(kind[-1])])
    else:
        os.link(outside.files[int(kind[-1])], path)


PLANTS = ["fifo", "garbage", "nowhere", "folder", "link 0", "link 1", "hard 0", "hard 1", "hard 2"]
THEIRS = pytest.param("theirs", marks=needs_root)
"""A file of another user, put there while the folder was open to others."""


@pytest.mark.parametrize("kind", [*PLANTS, THEIRS])
def test_what_is_planted_in_the_place_of_an_object_or_part_is_replaced(
    kind: str, tmp_path: Path, outside: Outside
) -> None:
    cache = tmp_path / "cache"
    one = join(cache)
    for folder in ("objects", "parts"):
        plant(cache / folder / "a-1", kind, outside)
    calls: list[str] = []
    sound = _sound_as("a-1")
    assert one.obtain("a-1", writer("a-1", calls), is_sound=sound)
    assert not one.obtain("a-1", writer("a-1", calls), is_sound=sound)
    assert calls == ["a-1"]
    assert (cache / "objects" / "a-1").read_bytes() == contents("a-1")
    outside.assert_untouched()


def _sound_as(name: str) -> Callable[[int], bool]:
    return lambda descriptor: os.pread(descriptor, SIZE, 0) == contents(name)


@pytest.mark.parametrize("place", ["objects/a-1", "parts/a-1"])
def test_a_folder_in_the_place_of_a_file_is_named(place: str, tmp_path: Path) -> None:
    one = join(tmp_path)
    (tmp_path / place).mkdir()
    with pytest.raises(StorageError, match=rf"{place} is a folder, which precache did not make"):
        one.obtain("a-1", writer("a-1"))


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/../../b", "/etc/passwd", "a\0b", "a\n"])
def test_names_that_could_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    one = join(tmp_path)
    with pytest.raises(StorageError, match="no object in a cache can be called"):
        one.obtain(name, writer("a"))


def test_an_object_that_is_not_sound_is_fetched_again_once(tmp_path: Path) -> None:
    one, calls = join(tmp_path), list[str]()
    one.obtain("a-1", writer("a-1"))
    path = tmp_path / "objects" / "a-1"
    path.write_bytes(b"x" * SIZE)
    before = path.open("rb")
    for _ in range(2):
        other = join(tmp_path)
        other.obtain("a-1", writer("a-1", calls), is_sound=_sound_as("a-1"))
    assert calls == ["a-1"]
    assert path.read_bytes() == contents("a-1")
    with before:
        assert before.read() == b"x" * SIZE  # who has it open keeps it


# --- whatever comes -----------------------------------------------------------------------------

names = st.sampled_from(["a-1", "a-2", "b-1"])
places = st.one_of(st.just("lock"), st.builds("/".join, st.tuples(st.sampled_from(FOLDERS), names)))
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["join", "close"])),
        st.tuples(st.sampled_from(["obtain", "give back", "kill"]), names),
        st.tuples(st.just("plant"), places, st.sampled_from(PLANTS)),
        st.tuples(st.just("replace"), st.sampled_from(FOLDERS)),
    ),
    max_size=25,
)


class Neighbours:
    """Loaders that share a cache, and someone who plants things in it."""

    def __init__(self, folder: Path) -> None:
        self.outside = Outside(folder / "outside")
        self.cache = folder / "cache"
        self.readers: list[Reader] = []

    def step(self, what: str, *arguments: str) -> None:
        steps: dict[str, Callable[..., None]] = {
            "join": self._join,
            "close": self._close,
            "obtain": self._obtain,
            "give back": self._give_back,
            "kill": self._kill,
            "plant": self._plant,
            "replace": self._replace,
        }
        steps[what](*arguments)

    def _join(self) -> None:
        with contextlib.suppress(PrecacheError):
            self.readers.append(join(self.cache))

    def _close(self) -> None:
        if self.readers:
            self.readers.pop().uses.close()

    def _obtain(self, name: str) -> None:
        if self.readers:
            with contextlib.suppress(PrecacheError):
                one = self.readers[-1]
                one.obtain(name, is_sound=_sound_as(name))
                with one.cache.objects.file(name) as file:
                    assert file.read() == contents(name)

    def _give_back(self, name: str) -> None:
        if self.readers:
            self.readers[-1].uses.end(name)

    def _kill(self, name: str) -> None:
        def die(descriptor: int) -> None:
            os.pwrite(descriptor, b"some", 0)
            os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                join(self.cache).obtain(name, die)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)

    def _plant(self, place: str, kind: str) -> None:
        path = self.cache / place
        if path.parent.is_dir() and not path.parent.is_symlink():
            plant(path, kind, self.outside)
        self._obtain(place.rpartition("/")[2])

    def _replace(self, name: str) -> None:
        folder = self.cache / name
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir():
            shutil.rmtree(folder)
            folder.symlink_to(self.outside.folder)


@settings(max_examples=40)
@given(steps)
def test_nothing_outside_of_a_cache_is_touched_whatever_is_planted(
    steps: list[tuple[str, ...]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        neighbours = Neighbours(Path(folder))
        for step in [("join",), *steps]:
            neighbours.step(*step)
            neighbours.outside.assert_untouched()
        neighbours.outside.assert_untouched()


def test_a_folder_is_listed_by_several_at_a_time(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / str(number)).touch()
    folder = OwnFolder(tmp_path)
    pairs = list(zip(folder.files(), folder.files(), strict=True))
    assert sorted(name for (name, _), _ in pairs) == list("01234")
