"""A version that is removed while it is opened or read: said so, or the new current one is read."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import BuildError, DamageError, GoneError, StorageError, StoreError
from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.store.open import open_version
from tests.support.building import build_here, write_jpegs
from tests.support.servers import S3Server

Store = tuple[Path, str, str]


def recipe_of(side: int) -> precache.Recipe:
    return precache.Recipe.image(resize=side)


def build_two(source: Path, store: Any, **options: Any) -> tuple[str, str]:
    """Ids of two versions; the second is current."""
    built = [build_here(source, store, recipe_of(side), options) for side in (20, 24)]
    return built[0].version, built[1].version


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("gone")
    source = write_jpegs(root / "in", 8, (32, 24))
    return root / "store", *build_two(source, root / "store", shard_samples=4)


@pytest.fixture
def store(built: Store, tmp_path: Path) -> Store:
    shutil.copytree(built[0], tmp_path / "store")
    return tmp_path / "store", *built[1:]


class Removal:
    """Something that happens right before read number `at` of any local folder, once; or, with
    `looks`, right before that look at one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], *, looks: bool = False
    ) -> None:
        self.at, self._act = -1, act
        self._reads = itertools.count()
        more = ("open", "names", "size", "sizes", "get") if looks else ()
        for name in ("read", "read_many", *more):
            monkeypatch.setattr(LocalFolder, name, self._counted(getattr(LocalFolder, name)))

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(folder: Any, *arguments: Any) -> Any:
            if next(self._reads) == self.at:
                self.at = -1
                self._act()
            return method(folder, *arguments)

        return read

    def arm(self, at: int) -> None:
        self._reads, self.at = itertools.count(), at

    def reads_of(self, action: Callable[[], object]) -> int:
        """How many reads an action makes when nothing is removed."""
        self.arm(1 << 40)
        action()
        return next(self._reads)


def test_opening_a_store_whose_current_version_goes_opens_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever moment: by then another version is current."""
    path, other, current = store
    kept = tmp_path / "kept"
    shutil.copytree(path, kept)

    def replace() -> None:
        precache.use(f"{path}@{other}")
        precache.gc(path, keep=1, older_than=0)

    removal = Removal(monkeypatch, replace)
    for at in range(removal.reads_of(lambda: open_version(path))):
        shutil.rmtree(path)
        shutil.copytree(kept, path)
        removal.arm(at)
        version = open_version(path)
        assert removal.at == -1
        assert version.id in (other, current)
        if version.id == current:  # the last of its documents had been read
            with pytest.raises(GoneError, match="was removed; open"):
                _ = version.labels
        else:
            assert len(version.labels) == 8


READS: dict[str, Callable[[Path, str], object]] = {
    "open": lambda path, version: precache.open(f"{path}@{version}").labels,
    "keys": lambda path, version: list(precache.open(f"{path}@{version}").keys),
    "holes": lambda path, version: precache.open(f"{path}@{version}").holes,
    "verify": lambda path, version: precache.verify(f"{path}@{version}"),
    "use": lambda path, version: precache.use(f"{path}@{version}"),
    "diff": lambda path, version: precache.diff(f"{path}@{version}", path),
    "dataset": lambda path, version: precache.CachedDataset(f"{path}@{version}")[0],
}


@pytest.mark.parametrize("by_hand", [False, True], ids=["gc", "by hand"])
@pytest.mark.parametrize("name", READS)
def test_a_version_that_goes_is_said_to_be_gone(
    name: str, by_hand: bool, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing while its version's root is still there may be lost, too."""
    path, other, _ = store
    kept = tmp_path / "kept"
    shutil.copytree(path, kept)

    def remove() -> None:
        if not by_hand:
            precache.gc(path, keep=1, older_than=0)
            return
        for objects in list((path / other).rglob("c")):
            shutil.rmtree(objects)

    removal = Removal(monkeypatch, remove, looks=by_hand)
    words = ["is gone", "was removed", "fits no version"]
    if by_hand:
        words = ["is being removed; open", *(["it is missing"] if name == "use" else [])]

    def action() -> None:
        READS[name](path, other)

    said = list[str]()
    for at in range(removal.reads_of(action)):
        shutil.rmtree(path)
        shutil.copytree(kept, path)
        removal.arm(at)
        try:
            action()
        except (BuildError, DamageError, StoreError, StorageError) as error:
            said.append(str(error))
    assert said or (name, by_hand) == ("verify", True)
    assert [text for text in said if not any(each in text for each in words)] == []


def test_in_a_bucket_a_version_that_goes_is_said_to_be_gone(s3: S3Server, tmp_path: Path) -> None:
    """There its objects go one by one, its document first."""
    url, options = "s3://bucket/gone.store", s3.options()
    source = write_jpegs(tmp_path / "in", 8, (32, 24))
    first, second = build_two(source, url, shard_samples=4, storage_options=options)
    version = precache.open(f"{url}@{first}", storage_options=options)
    dataset = precache.CachedDataset(f"{url}@{first}", storage_options=options)
    folder = open_folder(url, options)
    folder.remove(f"{first}/zarr.json")
    folder.remove(f"{first}/holes/c/0")
    for shard in range(2):
        folder.remove(f"{first}/image/c/{shard}/0/0/0")
    for read in (
        lambda: version.holes,
        lambda: dataset[0],
        lambda: precache.open(f"{url}@{first}", storage_options=options),
    ):
        with pytest.raises(GoneError, match=f"{first} is gone: it was removed"):
            read()
    assert precache.open(url, storage_options=options).id == second


def test_a_build_whose_version_goes_makes_it_again(
    store: Store, built: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, _ = store
    source = built[0].parent / "in"
    options = {"shard_samples": 4}
    removal = Removal(monkeypatch, lambda: shutil.rmtree(path / other))
    for at in (14, 16, 18):
        removal.arm(at)
        assert build_here(source, path, recipe_of(20), options).version == other
        assert precache.verify(path).ok
