"""What the tests of building share: photographs, processes that may die, stores compared."""

import contextlib
import ctypes
import functools
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

import precache
from precache.storage.base import Folder
from precache.storage.open import open_folder
from precache.store.commit_log import append, commit_entry
from precache.store.json_documents import LogEntry

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "workers")))
"""By which this repository is importable."""
LONG_AGO = 1_700_000_000
DEADLINE = 150.0
"""Seconds after which a condition that a test waits for counts as never met."""


# --- photographs --------------------------------------------------------------------------------


@functools.cache
def photograph(name: str = "chelsea.png") -> Image.Image:
    """A photograph that scikit-image carries, in RGB."""
    data = resources.files("skimage.data").joinpath(name).read_bytes()
    return Image.open(io.BytesIO(data)).convert("RGB")


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_equal_ctimes(paths: Sequence[Path]) -> None:
    """Touch files until all their times agree.

    Twice at a time: a kernel gives times of its clock's last tick, but not of one that was read.
    """
    while len({path.stat().st_ctime_ns for path in paths}) > 1:
        for path in (*paths, *paths):
            os.utime(path, (LONG_AGO, LONG_AGO))


def write(path: Path, data: bytes) -> Path:
    """Write a file, its folders where they are missing, dated long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def rewrite(path: Path, data: bytes) -> None:
    """Write a file in place, zeros behind the data, so that its size and mtime stay."""
    before = path.stat()
    path.write_bytes(data.ljust(before.st_size, b"\0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def cut(number: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A piece of a photograph, (width, height) large, another for each number."""
    image = photograph()
    random = np.random.default_rng(number)
    left = int(random.integers(0, image.width - size[0] + 1))
    top = int(random.integers(0, image.height - size[1] + 1))
    return image.crop((left, top, left + size[0], top + size[1]))


def write_jpegs(
    root: Path,
    count: int,
    size: tuple[int, int] = (64, 48),
    classes: Sequence[str] = ("cat", "dog", "eel"),
) -> Path:
    """`count` JPEGs below `root`, named as their numbers, one folder a class."""
    for number in range(count):
        folder = root / classes[number % len(classes)] if classes else root
        write(folder / f"{number:04d}.jpg", _jpeg(number, size))
    return root


@functools.cache
def _jpeg(number: int, size: tuple[int, int]) -> bytes:
    return encoded(cut(number, size), quality=90)


def put_photos(folder: Folder, count: int = 12) -> None:
    """Photographs in two classes, a broken one in `dog`, and a file that is none."""
    for number in range(count):
        image = photograph().crop((number, 0, number + 120, 90))
        folder.put(f"{'cat' if number % 2 else 'dog'}/{number:02d}.jpg", [encoded(image)])
    folder.put("dog/broken.jpg", [b"no photo"])
    folder.put("notes.txt", [b"x"])


# --- stores -------------------------------------------------------------------------------------


def contents(store: Path) -> dict[str, bytes]:
    """Name -> bytes of every file of a store; of the log without times, sources and nonces."""
    files = sorted(path for path in store.rglob("*") if path.is_file())
    return {path.relative_to(store).as_posix(): _timeless(path) for path in files}


def _timeless(path: Path) -> bytes:
    data = path.read_bytes()
    if path.parent.name != "commits":
        return data
    document = json.loads(data)
    for name in ("time", "source", "nonce"):
        document.pop(name, None)
    return json.dumps(document).encode()


def version_name(*digits: str) -> str:
    """The name of a version whose id begins with these digits."""
    return "".join(digits).ljust(32, "0") + ".1"


def append_commit(store: Folder, version: str, **given: Any) -> LogEntry:
    """Append the entry that makes a version current, without a look at the version."""
    current = append(store, functools.partial(commit_entry, version=version, **given)).current
    assert current is not None
    return current


def remains(store: Path) -> list[str]:
    """What a build may keep only while it runs."""
    names = [path.relative_to(store).as_posix() for path in store.rglob("*")]
    return sorted(name for name in names if "_build" in name or name.endswith(".tmp"))


def shard_files(store: Path, field: str = "image") -> dict[str, Path]:
    """Name below the version -> path of each shard object of a field."""
    [version] = [path for path in store.iterdir() if "." in path.name]
    found = sorted(path for path in (version / field / "c").rglob("*") if path.is_file())
    return {path.relative_to(version).as_posix(): path for path in found}


def flip(path: Path, at: float, mask: int = 1) -> None:
    """Change bits of one byte of a file, in place; a float is the byte's place as a share."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        place = int(at * (size - 1)) if isinstance(at, float) else at % size
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ mask]))


def age(folder: Path, seconds: float) -> None:
    """As if all below had been written so long ago."""
    then = time.time() - seconds
    for path in folder.rglob("*"):
        os.utime(path, (then, then), follow_symlinks=False)


def identities(paths: dict[str, Path]) -> dict[str, tuple[int, int]]:
    """What changes when a file is written anew: inode and time of modification."""
    return {name: (p.stat().st_ino, p.stat().st_mtime_ns) for name, p in paths.items()}


def pixels(store: Path | str, field: str = "image", **options: Any) -> dict[str, np.ndarray]:
    """Key -> stored row, for every row that is no hole; a key that comes twice is an error."""
    rows: dict[str, np.ndarray] = {}
    with precache.Loader(
        store, batch_size=32, shuffle=False, device="cpu", fields=[field], **options
    ) as loader:
        for batch in loader:
            for key, row in zip(loader.keys(batch["row"]), batch[field], strict=True):
                assert key not in rows
                rows[key] = row.numpy().copy()
    return rows


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """The same keys, and the same rows of them."""
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[key], other[key]) for key in one)


def labels(store: Path) -> dict[str, int]:
    """Key -> label, for every row that is no hole."""
    version = precache.open(store)
    rows = zip(version.keys, version.labels.tolist(), version.valid, strict=True)
    return {key: label for key, label, valid in rows if valid}


def assert_whole_road(
    photos: str, store: str, options: dict[str, Any], folder: Path, address: str = "serial"
) -> None:
    """Build from what `put_photos` put, build again, verify, pull, train in both ways; and build
    from a copy of the source."""
    recipe = precache.Recipe.image(resize=64, crop=56)
    build: dict[str, Any] = {"address": address, "shard_samples": 4, "storage_options": options}
    result = precache.build(photos, store, recipe, **build)
    assert (result.samples, result.failed, result.ignored) == (13, 1, {".txt": 1})
    assert result.path == f"{store}/{result.version}"
    again = precache.build(photos, store, recipe, **build)
    assert again.shards_skipped == again.shards == 4
    assert again.version == result.version
    assert precache.verify(store, storage_options=options).ok
    version = precache.open(store, options)
    assert version.classes == ("cat", "dog")
    assert [key for key, _ in version.holes.values()] == ["dog/broken.jpg"]

    done = precache.pull(store, folder / "here", storage_options=options)
    assert done.version == result.version
    right = pixels(folder / "here")
    assert len(right) == 12
    with precache.Loader(
        store, 5, device="cpu", cache=folder / "cache", storage_options=options
    ) as loader:
        batches = [(loader.keys(b["row"]), b["image"].numpy().copy()) for b in loader]
        assert loader.stats().fetched.objects == 4
    assert sorted(key for keys, _ in batches for key in keys) == sorted(right)
    for keys, images in batches:
        assert np.array_equal(images, np.stack([right[key] for key in keys]))
    by_range = pixels(store, storage_options=options)
    assert by_range.keys() == right.keys()
    assert all(np.array_equal(by_range[key], right[key]) for key in right)

    origin, copied = open_folder(photos, options), open_folder(f"{photos}-copied", options)
    for info in list(origin.walk()):
        copied.copy(info.name, origin, info.name)
    for info in list(origin.walk()):
        write(folder / "photos" / info.name, origin.read(info.name))
    local = precache.build(
        folder / "photos", folder / "local", recipe, shard_samples=4, address="serial"
    )
    shards = [shard_files(folder / name).values() for name in ("here", "local")]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]
    assert local.version != result.version
    moved = precache.build(f"{photos}-copied", store, recipe, **{**build, "address": "serial"})
    assert moved.version != result.version
    assert moved.shards_reused == moved.shards == 4
    assert precache.verify(store, storage_options=options).ok
    there = pixels(store, storage_options=options)
    assert there.keys() == right.keys()
    assert all(np.array_equal(there[key], right[key]) for key in right)


def assert_as_serial(
    store: Path, source: Path, recipe: precache.Recipe, shard_samples: int
) -> None:
    """A store is, to the last byte, what a build in one process makes, and has no remains."""
    build_here(source, store.with_name("serial"), recipe, {"shard_samples": shard_samples})
    assert contents(store) == contents(store.with_name("serial"))
    assert remains(store) == []


# --- the command line ---------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    """The command line as another process runs it."""
    return [sys.executable, "-m", "precache", *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with this repository importable."""
    return {**os.environ, "PYTHONPATH": PYTHONPATH, **changes}


def cli(
    *arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        command(*arguments),
        check=False,
        cwd=cwd,
        env=env or environment(),
        capture_output=True,
        text=True,
    )


def own_threads() -> list[threading.Thread]:
    """The threads of precache that run, but for that of meters, which stays."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("precache") and thread.name != "precache-meter"
    ]


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [bound.getsockname()[1] for bound in sockets]


def poll(condition: Callable[[], Any], what: str) -> Any:
    """Wait until `condition` gives something true, and return that."""
    limit, pause = time.monotonic() + DEADLINE, 0.01
    while not (value := condition()):
        assert time.monotonic() < limit, f"never happened: {what}"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.1)
    return value


@contextlib.contextmanager
def running(
    line: Sequence[str], env: dict[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that is over when the block is, and all that it has started with it."""
    with subprocess.Popen(
        line, env=env or environment(), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        family: list[psutil.Process] = []
        try:
            yield process
        finally:
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
                process.kill()
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended, a zombie that nobody waits for included."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# --- functions for recipes --------------------------------------------------------------------


HELD = """
    [[fields.image.ops]]
    op = "decode"

    [[fields.image.ops]]
    op = "resize"
    size = [150, 150]
    interpolation = "nearest"

    [[fields.image.ops]]
    op = "function"
    function = "tests.support.building:hold"
    version = "1"
    params = {{ folder = "{folder}", store = "{store}" }}
"""
"""Of a recipe; images wait for `folder`/go."""


def hold(array: np.ndarray, folder: str = "", store: str = "", after: int = 0) -> np.ndarray:
    """The array as it is, once ``folder/go`` exists; ``folder/<pid>`` tells that it waits.

    Only processes with HOLD in their environment wait, not before a version of `store` was begun,
    and then from their call number `after` on.
    """
    begun = not store or any(Path(store).glob("*/_build/build.json"))
    if "HOLD" in os.environ and begun and next(_calls) >= after:
        Path(folder, str(os.getpid())).touch()
        poll(Path(folder, "go").exists, "the test's leave to go on")
    return array


MARKED = ("cat/0000.jpg", "eel/0023.jpg")
"""Keys of `marked_photos`: one among those that are measured first, one that is not."""


def marked_photos(folder: Path) -> Path:
    """40 photos, of which two make the functions of `marked_recipe` go wrong."""
    write_jpegs(folder, 40)
    for name in MARKED:
        write(folder / name, encoded(cut(1, (33, 33)), quality=90))
    return folder


def marked_recipe(function: str, **params: Any) -> str:
    """A recipe, in TOML, with a function of this module that goes wrong at marked photos."""
    given = ", ".join(f"{name} = {json.dumps(value)}" for name, value in params.items())
    return f"""
        [[fields.image.ops]]
        op = "decode"

        [[fields.image.ops]]
        op = "function"
        function = "tests.support.building:{function}"
        version = "1"
        params = {{ {given} }}

        [[fields.image.ops]]
        op = "resize"
        size = [48, 48]
        interpolation = "nearest"
    """


def build_marked(
    photos: Path, recipe: str, *options: object, prefix: Sequence[str] = (), **variables: str
) -> Any:
    """Result of ``precache build`` on a local Ray, by a recipe in TOML."""
    (photos.parent / "recipe.toml").write_text(recipe)
    line = command(
        *("build", photos, photos.with_name("store"), "--recipe", photos.parent / "recipe.toml"),
        *("--cpus", "1", "--shard-samples", "20", "--json", *options),
    )
    ran = subprocess.run(
        [*prefix, *line], env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    return json.loads(ran.stdout)


def assert_all_but_the_marked(photos: Path, store: Path, toml: str) -> None:
    """Rows as they are where the function does not go wrong, but for the two holes."""
    harmless, recipe = (
        store.with_name("harmless"),
        precache.Recipe.from_dict(tomllib.loads(toml)),
    )
    ask(build_here, photos, harmless, recipe, {"shard_samples": 20}, {"HARMLESS": "1"})
    assert sorted(key for key, _ in precache.open(store).holes.values()) == sorted(MARKED)
    assert precache.verify(store).ok
    assert remains(store) == []
    found, expected = pixels(store), pixels(harmless)
    assert found.keys() == expected.keys() - set(MARKED)
    for key, row in found.items():
        np.testing.assert_array_equal(row, expected[key])


def _goes_wrong(array: np.ndarray) -> bool:
    return array.shape[:2] == (33, 33) and "HARMLESS" not in os.environ


def hoard(array: np.ndarray, nbytes: int = 0) -> np.ndarray:
    """The array as it is; over a marked one takes so much memory, or by default all there is."""
    kept = []
    while _goes_wrong(array):
        kept.append(np.ones(nbytes or 64 << 20, np.uint8))
    return array


def die(array: np.ndarray) -> np.ndarray:
    """The array as it is; over a marked one the process dies."""
    if _goes_wrong(array):
        ctypes.string_at(0)
    return array


def hang(array: np.ndarray) -> np.ndarray:
    """The array as it is; over a marked one it never ends."""
    while _goes_wrong(array):
        time.sleep(0.01)
    return array


def hold_the_lock(array: np.ndarray) -> np.ndarray:
    """The array as it is; over a marked one it keeps the interpreter's lock, and never ends."""
    if _goes_wrong(array):
        block()
    return array


def block() -> None:
    """Keep the interpreter's lock for ever: the expression is matched in exponential time."""
    re.match("(a+)+$", "a" * 64 + "b")


def linger(array: np.ndarray, seconds: float = 0.0) -> np.ndarray:
    """The array as it is; where LINGER is set, after so long that there is time to kill it."""
    if "LINGER" in os.environ:
        time.sleep(seconds)
    return array


_calls: Iterator[int] = iter(range(sys.maxsize))


# --- processes ----------------------------------------------------------------------------------

# Forked from a server that has loaded what a build loads, and runs nothing else: cheap, and safe
# to fork.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "tests.support.building",
        "tests.support.unsynced",
        "torch",
        "pandas",  # which pyarrow imports if it is there
        "pyarrow.compute",
        "precache_workers.driver.build",
        "precache_workers.profiling.row_probe",
        "precache_workers.shards.shard_task",
    ]
)


def start(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run a module's function in a process of its own."""
    process = _forks.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def end(process: BaseProcess) -> int:
    """Wait for a process, and return its exit status, negative for a signal."""
    process.join(DEADLINE)
    assert process.exitcode is not None, f"process {process.pid} hangs"
    return process.exitcode


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a module's function returns, or the precache error it raises, in another process."""
    receiver, sender = _forks.Pipe(duplex=False)
    process = start(_answer, sender, function, arguments)
    sender.close()
    with receiver:
        answer = receiver.recv()
    assert end(process) == 0
    if isinstance(answer, Exception) and not isinstance(answer, precache.PrecacheError):
        raise answer
    return answer


def _answer(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send(function(*arguments))
    except Exception as error:
        sender.send(error)


def build(source: Any, store: Any, recipe: Any, **options: Any) -> precache.BuildResult:
    """A serial build; files bind their recipe and options by `functools.partial`."""
    return precache.build(source, store, recipe, **{"address": "serial"} | options)


def build_here(
    source: Path,
    store: Path,
    recipe: precache.Recipe,
    options: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
) -> Any:
    """A serial build, for processes that are told all by arguments."""
    os.environ.update(variables or {})
    return precache.build(source, store, recipe, **{"address": "serial", **(options or {})})


def changes(source: Path, store: Path, recipe: precache.Recipe, options: dict[str, Any]) -> int:
    """How often a build changes what lies below `store`."""
    return _counted(store, build_here, source, store, recipe, options)


def refresh_changes(store: Path) -> int:
    """How often a refresh changes what lies below `store`."""
    return _counted(store, lambda: precache.refresh(store, address="serial"))


def _counted(below: Path, act: Callable[..., object], *arguments: Any) -> int:
    made: list[None] = []
    _on_change(below, lambda: made.append(None))
    act(*arguments)
    return len(made)


def build_until(
    change: int, source: Path, store: Path, recipe: precache.Recipe, options: dict[str, Any]
) -> None:
    """Build, and be killed right before change number `change` of what lies below `store`."""
    _kill_at(change, store)
    build_here(source, store, recipe, options)


def collect_until(change: int, store: Path) -> None:
    """Remove all but the current version, and be killed right before change number `change`."""
    _kill_at(change, store)
    precache.gc(store, keep=1, older_than=0)


def refresh_until(change: int, store: Path) -> None:
    """Make a fresh variant, and be killed right before change number `change`."""
    _kill_at(change, store)
    precache.refresh(store, address="serial")


def _kill_at(change: int, store: Path) -> None:
    left = iter(range(change))
    _on_change(store, lambda: next(left, None) is None and os.kill(os.getpid(), signal.SIGKILL))


def _on_change(store: Path, act: Callable[[], object]) -> None:
    """Call `act` before each change of a file or folder; audit hooks live as long as a process."""
    below = os.fspath(store)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and "x" in (arguments[1] or "")
        if writes or event in ("os.rename", "os.link", "os.mkdir", "os.rmdir", "os.remove"):
            name = os.fspath(arguments[0])
            if name.startswith(below) or not name.startswith("/"):  # relative to a descriptor
                act()

    sys.addaudithook(hook)


def peak_memory(source: Path, store: Path, recipe: precache.Recipe, options: dict[str, Any]) -> int:
    """Bytes of memory that this process had at most when it had built."""
    build_here(source, store, recipe, options)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth(act: Callable[..., object], *arguments: Any) -> int:
    """Bytes by which the peak of this process grows, though the act may fail."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(precache.PrecacheError):
        act(*arguments)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def build_as_anyone(
    source: Path, store: Path, recipe: precache.Recipe, options: dict[str, Any]
) -> Any:
    """A build for which modes of files count, though root runs it."""
    drop_privileges()
    return build_here(source, store, recipe, options)


def drop_privileges() -> None:
    """Give up the capabilities by which root overrides the modes of files (capset(2))."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    version_3, kinds, words = 0x20080522, 3, 2
    header = ctypes.create_string_buffer(struct.pack("<Ii", version_3, 0))
    sets = ctypes.create_string_buffer(4 * kinds * words)
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    values = list(struct.unpack("<6I", sets.raw[:24]))
    override = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    values[:kinds] = [value & ~override for value in values[:kinds]]
    changed = ctypes.create_string_buffer(struct.pack("<6I", *values))
    assert libc.capset(header, changed) == 0, os.strerror(ctypes.get_errno())
