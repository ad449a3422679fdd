"""Pull and push: what is copied, what is refused, and that nothing is lost when they are killed."""

import dataclasses
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import DamageError, GoneError, StorageError, StoreError
from precache.maintenance import transfer
from precache.maintenance import versions as inventory
from precache.maintenance.verify import require_whole
from precache.storage.base import Folder
from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.storage.remote import RemoteFolder
from precache.store.build_status import COPY, DESCRIPTION
from precache.store.commit_log import BUILD, ROOT, read_log
from precache.store.lease import Leases
from tests.conftest import BuiltStore
from tests.support.building import append_commit, contents, identities, write
from tests.support.forging import edit_root
from tests.support.mutations import object_names

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"

_numbers = iter(range(10**6))


@pytest.fixture
def built(image_store: BuiltStore) -> BuiltStore:
    """23 rows in three shards; not to be changed."""
    return image_store


@pytest.fixture
def bucket() -> str:
    return f"memory://transfer/{next(_numbers)}"


def names_of(store: BuiltStore) -> list[str]:
    """Names that the version promises, below its folder."""
    return [name for name in object_names(store.version_folder) if name != ROOT]


def put_secret(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/id_rsa").write_bytes(SECRET)
    return tmp_path / "home"


def test_what_no_version_has_is_not_copied(own: BuiltStore, bucket: str, tmp_path: Path) -> None:
    home = put_secret(tmp_path)
    (own.version_folder / "extra").symlink_to(home)
    (own.version_folder / "image/c/9").symlink_to(home)
    (own.version_folder / "notes.txt").write_bytes(SECRET)
    precache.pull(own.path, bucket)
    there = open_folder(bucket).folder(own.result.version).sizes()
    added = {"extra", "notes.txt", "image/c/9"}
    names = {name for name in names_of(own) if not name.startswith(tuple(added))}
    assert there.keys() == {ROOT, *names}


@pytest.mark.parametrize("change", ["flip", "cut", "link"])
def test_damage_is_not_spread(change: str, own: BuiltStore, tmp_path: Path) -> None:
    """Of a link in place of an object, nothing of what it leads to is put."""
    secret = put_secret(tmp_path) / "id_rsa"
    for name in (ROOT, *names_of(own)) if change == "link" else names_of(own):
        path, bucket = own.version_folder / name, f"memory://transfer/{next(_numbers)}"
        right = path.read_bytes()
        middle = len(right) // 2
        path.unlink()
        if change == "link":
            path.symlink_to(secret)
        else:
            rest = bytes([right[middle] ^ 0xFF]) + right[middle + 1 :] if change == "flip" else b""
            path.write_bytes(right[:middle] + rest)
        folder = open_folder(bucket)
        if name.startswith("_spare/"):  # it is made anew
            precache.pull(own.path, bucket)
        else:
            with pytest.raises((DamageError, StorageError, StoreError)) as caught:
                precache.pull(own.path, bucket)
            said = str(caught.value)
            assert name.partition("/")[0] in said, name
            assert not any(text in said for text in ("memory:", "precache-pull", SECRET.decode()))
            assert not read_log(folder).commits
        assert not any(SECRET in folder.read(each) for each in folder.sizes())
        path.unlink()
        path.write_bytes(right)


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    return identities({name: root / name for name in object_names(root)})


def test_a_version_of_the_same_rows_with_another_root_is_another_generation(
    built: BuiltStore, own: BuiltStore, bucket: str
) -> None:
    """Shards of the same bytes are not copied again, and nothing of the other changes."""
    edit_root(own.version_folder, lambda root: root.update(libraries={"made": "with others"}))
    for to in (bucket, str(own.path)):
        if to == bucket:
            precache.pull(own.path, bucket)
        one = precache.open(to)
        before = {name: one.folder.read(name) for name in one.folder.sizes()}
        done = precache.pull(built.path, to)
        assert done.version == f"{one.id[:32]}.2"
        assert done.skipped == built.result.shards
        assert precache.open(to).digest == precache.open(built.path).digest != one.digest
        assert precache.verify(to).ok
        assert {name: one.folder.read(name) for name in one.folder.sizes()} == before
        assert f"it is current there in place of {one.id[:8]}" in str(done)
        again = dataclasses.replace(done, objects=0, nbytes=0, replaced=None)
        assert precache.pull(built.path, to) == again


def damage(version: Path) -> None:
    """In a shard, a small object, and by an object that is missing."""
    shard = version / "image/c/1/0/0/0"
    shard.write_bytes(bytes(shard.stat().st_size))
    (version / "label/c/0").write_bytes(b"none")
    (version / "key/zarr.json").unlink()


def test_one_that_is_damaged_is_mended_once_the_right_one_is_there(
    built: BuiltStore, own: BuiltStore, tmp_path: Path
) -> None:
    """As is said where the damage is found: the command that built it may have built elsewhere."""
    damage(own.version_folder)
    before = stamps(own.version_folder)
    with pytest.raises(DamageError) as error:
        _ = precache.open(own.path).labels
    for said in (str(precache.verify(own.path)), str(error.value)):
        assert "or the pull or push that copied it here" in said

    source = shutil.copytree(built.path, tmp_path / "source")
    (source / own.result.version / "image/c/1/0/0/0").write_bytes(b"none")
    with pytest.raises(DamageError, match=r"image/c/1/0/0/0 is damaged"):
        precache.pull(source, own.path)
    after = stamps(own.version_folder)
    assert {name: after[name] for name in after if not name.startswith(BUILD)} == before

    kept = own.shard_path(0).stat().st_ino
    assert precache.pull(built.path, own.path).skipped == built.result.shards - 1
    assert own.shard_path(0).stat().st_ino == kept
    assert contents(own.version_folder) == contents(built.version_folder)
    names = {built.result.version, "commits", "_listings"}
    assert {p.name for p in own.path.iterdir()} == names

    append_commit(open_folder(own.path), "0" * 32 + ".1")
    before = stamps(own.version_folder)
    done = precache.pull(built.path, own.path)
    assert (done.objects, done.nbytes, done.skipped) == (0, 0, built.result.shards)
    assert stamps(own.version_folder) == before
    assert precache.open(own.path).id == done.version == built.result.version


def test_several_at_once_agree(built: BuiltStore, own: BuiltStore, tmp_path: Path) -> None:
    damage(own.version_folder)
    for to in (own.path, tmp_path / "new"):
        with ThreadPoolExecutor(3) as pool:
            done = list(pool.map(lambda _, to=to: precache.pull(built.path, to), range(3)))
        [version] = {each.version for each in done}
        assert version == built.result.version
        assert contents(to / version) == contents(built.version_folder)
        assert {p.name for p in to.iterdir()} - {"_listings"} == {version, "commits"}
        assert precache.gc(to).removed == ()


OTHERS: dict[str, Callable[[Path], object]] = {
    "a link": lambda place: place.symlink_to(place.parent),
    "a file": lambda place: place.write_bytes(b"mine"),
    "files of others": lambda place: write(place / "photo.jpg", b"mine"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_others_have_in_its_place_stays(kind: str, built: BuiltStore, tmp_path: Path) -> None:
    place = tmp_path / "to" / built.result.version
    precache.pull(built.path, tmp_path / "to")
    shutil.rmtree(place)
    OTHERS[kind](place)
    before = contents(tmp_path)
    done = precache.pull(built.path, tmp_path / "to")
    assert done.version == f"{built.result.version[:32]}.2"
    assert precache.verify(tmp_path / "to").ok
    assert contents(tmp_path).items() >= before.items()


@pytest.mark.parametrize("to", ["disk", "bucket"])
def test_a_build_under_way_is_left_alone(
    to: str, built: BuiltStore, bucket: str, tmp_path: Path
) -> None:
    url = str(tmp_path / "to") if to == "disk" else bucket
    folder = open_folder(url).folder(built.result.version)
    with Leases(folder).wait(print):
        folder.put(DESCRIPTION, [b"{}"])
        before = folder.sizes()
        assert precache.pull(built.path, url).version == f"{built.result.version[:32]}.2"
        assert folder.sizes() == before
    assert precache.verify(url).ok


def flip(folder: Folder, name: str, at: int = -1) -> None:
    data = bytearray(folder.read(name))
    data[at] ^= 0xFF
    folder.put(name, [data])


@pytest.mark.parametrize("is_there", [False, True])
def test_a_copy_holds_the_lease_of_its_version_whose_root_comes_last(
    is_there: bool, built: BuiltStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of the version waits, and gc leaves it."""
    folder, version, shard = open_folder(bucket), built.result.version, "image/c/0/0/0/0"
    if is_there:  # then it is mended
        precache.pull(built.path, bucket)
        flip(folder.folder(version), shard)
    read, held = LocalFolder.read_first, []

    def read_and_look(source: LocalFolder, name: str, most: int) -> bytes:
        if name == shard:
            there = folder.folder(version)
            held.append(
                (Leases(there).holder() is not None, there.exists(ROOT), there.exists(COPY))
            )
        return read(source, name, most)

    put, done = RemoteFolder.put, list[str]()

    def put_and_note(target: RemoteFolder, name: str, *given: Any, **options: Any) -> None:
        put(target, name, *given, **options)
        done.append(name)

    monkeypatch.setattr(LocalFolder, "read_first", read_and_look)
    monkeypatch.setattr(RemoteFolder, "put", put_and_note)
    precache.pull(built.path, bucket)
    assert held == [(True, is_there, not is_there)]
    objects = [name for name in done if not name.startswith(BUILD)]
    if is_there:
        assert objects == [shard]
    else:
        assert sorted(objects) == object_names(built.version_folder)
        assert objects[-1] == ROOT
    assert precache.verify(bucket).ok


def test_a_committed_version_in_a_bucket_is_mended(built: BuiltStore, bucket: str) -> None:
    precache.pull(built.path, bucket)
    folder = open_folder(bucket).folder(built.result.version)
    for name in object_names(built.version_folder):
        flip(folder, name)
        precache.pull(built.path, bucket)
        assert folder.read(name) == (built.version_folder / name).read_bytes(), name
    flip(folder, ROOT)
    flip(folder, "_spare/c/0", -20)  # its copy of the root
    precache.pull(built.path, bucket)
    assert precache.verify(bucket).ok
    assert open_folder(bucket).names() == sorted([built.result.version, "commits"])


@pytest.mark.parametrize("named", [True, False])
def test_a_version_that_is_removed_on_its_way_is_gone_or_the_next_one_comes(
    named: bool, own: BuiltStore, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = own.result.version
    read = transfer._read

    def receive(version: precache.Version) -> Any:
        if version.id == first:
            second = precache.build(
                photos, own.path, precache.Recipe.image(codec="raw"), address="serial"
            )
            precache.gc(own.path, keep=0, older_than=0)
            assert second.version != first
        return read(version)

    monkeypatch.setattr(transfer, "_read", receive)
    if named:
        with pytest.raises(StoreError, match="is gone"):
            precache.pull(f"{own.path}@{first}", tmp_path / "to")
    else:
        done = precache.pull(own.path, tmp_path / "to")
        assert done.version == precache.open(own.path).id != first
        assert precache.verify(tmp_path / "to").ok


def test_a_version_that_is_removed_while_it_is_used_is_gone(
    own: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(version: precache.Version, advice: str) -> Any:
        shutil.rmtree(version.path)
        return require_whole(version, advice)

    monkeypatch.setattr(inventory, "require_whole", remove)
    with pytest.raises(GoneError, match=f"version at .*{own.result.version} is gone"):
        precache.use(f"{own.path}@{own.result.version}")
