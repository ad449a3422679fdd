"""Small generated photos and the stores built from them, shared by all tests.

Images are PNG and stored without a resize, so that their pixels are known without the ops' help.
Stores of a session are shared: a test that writes into one asks `copy_store` for its own.
"""

import functools
import gc
import itertools
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from PIL import Image

import precache
import tests.support.unsynced  # noqa: F401  # for what it does
from precache.storage import retries
from precache.storage.local import LocalFolder
from tests.support.browser import CHROMIUM, Tab, chromium
from tests.support.command_line import Run, run_here
from tests.support.gcs_server import GCSServer
from tests.support.layouts import Builds
from tests.support.servers import Azurite, FaultProxy, S3Server

hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("quick")

# A shell has what it starts in the background ignore it, and all that this starts in turn.
signal.signal(signal.SIGINT, signal.default_int_handler)

CODECS = ("raw", "zstd", "image")
SIDE = 112
"""A row of 112 x 112 x 3 bytes is a chunk of its own."""

TILE = 32
"""Sixteen rows of 32 x 32 x 3 bytes share a chunk."""


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def many_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of another time are left to the build, as where there are many."""
    monkeypatch.setattr("precache_workers.planning.source_record.MOST_TOUCHED", 0)


@pytest.fixture
def builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Builds:
    """Builds by the command, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return Builds(tmp_path, capsys)


LONG = (
    "user_code/test_identity", "storage/test_faults", "storage/test_whole_road",
    "runtime/test_time_limit", "viewer/test_view",
)  # fmt: skip
"""Files of a third of a minute that would come last, when other processes have nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("heavy") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    items.sort(key=lambda item: not item.nodeid.startswith(tuple(f"tests/{n}.py" for n in LONG)))


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave all that was collected out of garbage collections, which take a second else."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
    gc.enable()


@dataclass(frozen=True)
class BuiltStore:
    """A store, the folder it was built from, and what the build returned."""

    path: Path
    source: Path
    recipe: precache.Recipe
    result: Any

    @property
    def version_folder(self) -> Path:
        return Path(self.result.path)

    def open(self) -> precache.Version:
        return precache.open(self.path)

    def pixels(self, key: str) -> np.ndarray:
        """(C, H, W) uint8 that the row of `key` must hold."""
        path = self.source / key
        return _decoded(path, path.stat().st_mtime_ns).copy()

    def rows(self) -> np.ndarray:
        """(rows, C, H, W) uint8 that the store must hold; zeros where a row is a hole."""
        version = self.open()
        shape = version.fields["image"].shape
        return np.stack(
            [
                self.pixels(key) if valid else np.zeros(shape, np.uint8)
                for key, valid in zip(version.keys, version.valid, strict=True)
            ]
        )

    def shard_path(self, number: int, field: str = "image") -> Path:
        return self.version_folder / field / "c" / str(number) / "0" / "0" / "0"


@functools.cache
def _decoded(path: Path, modified: int) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def photo(number: int, height: int, width: int) -> np.ndarray:
    """(H, W, 3) uint8: slopes and a little noise, another for each number."""
    random = np.random.default_rng(number)
    y, x = np.mgrid[0:height, 0:width]
    slopes = random.uniform(-2, 2, (3, 2))
    planes = [slopes[c, 0] * y + slopes[c, 1] * x + 40 * c + number for c in range(3)]
    noise = random.integers(-3, 4, (height, width, 3))
    return (np.stack(planes, axis=2) + noise + 60).clip(0, 255).astype(np.uint8)


def write_photos(
    root: Path,
    count: int,
    size: tuple[int, int] = (SIDE, SIDE),
    *,
    classes: Sequence[str] = ("cat", "dog", "eel"),
    broken: int = 0,
    black: int = 0,
    suffix: str = ".png",
) -> Path:
    """Write `count` images below `root`, one folder a class, the first ones black or broken.

    Parameters
    ----------
    broken
        How many files are no images, whatever their name; they come on top of `count`.
    black
        How many of the images are all zeros.
    """
    for number in range(count + broken):
        folder = root / classes[number % len(classes)] if classes else root
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number:04d}{suffix}"
        if number >= count:
            path.write_bytes(b"no image at all")
        else:
            pixels = photo(number, *size) * np.uint8(number >= black)
            Image.fromarray(pixels).save(path)
    return root


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A factory of folders of images; takes what `write_photos` takes behind the root."""

    def make(count: int, *args: Any, **kwargs: Any) -> Path:
        return write_photos(tmp_path_factory.mktemp("photos"), count, *args, **kwargs)

    return make


@pytest.fixture(scope="session")
def make_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BuiltStore]:
    """A factory of stores built in this process; takes what `precache.build` takes."""

    def make(source: Path, recipe: precache.Recipe | None = None, **kwargs: Any) -> BuiltStore:
        path = tmp_path_factory.mktemp("built") / "store"
        recipe = recipe or precache.Recipe.image()
        result = precache.build(source, path, recipe, **{"address": "serial", **kwargs})
        return BuiltStore(path, source, recipe, result)

    return make


@pytest.fixture(scope="session")
def photos(image_folder: Callable[..., Path]) -> Path:
    """21 images, one of them black, and two files that are none."""
    return image_folder(21, broken=2, black=1)


@pytest.fixture(scope="session")
def stores(photos: Path, make_store: Callable[..., BuiltStore]) -> dict[str, BuiltStore]:
    """Codec -> store of `photos`: 23 rows, two of them holes, in shards of 8, a chunk a row."""
    return {
        codec: make_store(photos, precache.Recipe.image(codec=codec), shard_samples=8)
        for codec in CODECS
    }


@pytest.fixture(scope="session", params=CODECS)
def store(request: pytest.FixtureRequest, stores: dict[str, BuiltStore]) -> BuiltStore:
    """The store of `photos`, once for each codec."""
    return stores[request.param]


@pytest.fixture(scope="session")
def image_store(stores: dict[str, BuiltStore]) -> BuiltStore:
    """The store of `photos` with filtered rows, where the codec makes no difference."""
    return stores["image"]


@pytest.fixture(scope="session")
def tiles(image_folder: Callable[..., Path]) -> Path:
    """73 images of 32 x 32, one of them black, and two files that are none."""
    return image_folder(73, (TILE, TILE), broken=2, black=1)


@pytest.fixture(scope="session")
def tile_stores(tiles: Path, make_store: Callable[..., BuiltStore]) -> dict[str, BuiltStore]:
    """Codec -> store of `tiles`: 75 rows, two holes, shards of 32 rows in two chunks of 16."""
    return {
        codec: make_store(tiles, precache.Recipe.image(codec=codec), shard_samples=32)
        for codec in CODECS
    }


@pytest.fixture(scope="session")
def image_tiles(tile_stores: dict[str, BuiltStore]) -> BuiltStore:
    """The store of `tiles` with filtered rows, where the codec makes no difference."""
    return tile_stores["image"]


@pytest.fixture
def copy_store(tmp_path: Path) -> Callable[[BuiltStore], BuiltStore]:
    """A factory of private copies of a store, to be damaged."""

    def copy(store: BuiltStore) -> BuiltStore:
        path = tmp_path / "copy" / store.path.name
        shutil.copytree(store.path, path)
        result = type(store.result)(
            **{**vars(store.result), "path": str(path / store.result.version)}
        )
        return BuiltStore(path, store.source, store.recipe, result)

    return copy


@pytest.fixture
def own(image_store: BuiltStore, copy_store: Callable[[BuiltStore], BuiltStore]) -> BuiltStore:
    """A private copy of the store of `photos` with filtered rows."""
    return copy_store(image_store)


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """The emulator of Azure, with a container named ``bucket``."""
    pytest.importorskip("obstore", reason="az:// needs obstore")
    pytest.importorskip("azure.storage.blob", reason="what makes the container")
    program = Azurite.find()
    if program is None:
        pytest.skip("no Azurite: npm install --no-save azurite, or name it in AZURITE")
    server = Azurite(program, tmp_path_factory.mktemp("azurite"))
    with server.container("bucket") as bucket:
        bucket.create_container()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter, arguments in `sys.argv`; its end must be a good one."""

    def run(code: str, *arguments: object, check: bool = True) -> Any:
        command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert not check or done.returncode == 0, f"exit {done.returncode}:\n{done.stderr}"
        return done

    return run


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A writer of importable modules, of a new name each time, which it returns."""
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(code: str) -> str:
        name = f"user_code_{next(_modules)}"
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
        return name

    return write


_modules = itertools.count()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process."""
    monkeypatch.setattr("sys.path", list(sys.path))
    return functools.partial(run_here, capfd)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A page of a browser."""
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium")
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture(scope="module")
def gcs() -> Iterator[GCSServer]:
    """A server of Google's, with an empty bucket named ``bucket``."""
    pytest.importorskip("gcsfs", reason="gs:// needs gcsfs")
    server = GCSServer()
    server.make_bucket("bucket")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server with an empty bucket named ``bucket``."""
    pytest.importorskip("obstore", reason="s3:// needs obstore")
    server = S3Server()
    server.make_bucket("bucket")
    yield server
    server.stop()


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """In front of the S3 server, with pauses too short to wait for."""
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    proxy = FaultProxy(s3.port)
    yield proxy
    proxy.stop()


@pytest.fixture
def empty(tmp_path: Path) -> LocalFolder:
    """A folder in which a store may be begun."""
    return LocalFolder(tmp_path / "store")


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is let go of is let go of at once."""
    gc.disable()
    yield
    gc.enable()
